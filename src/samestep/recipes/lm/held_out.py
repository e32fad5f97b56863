"""How well a model predicts held-out tokens, compared with a compressor."""

from __future__ import annotations

import lzma
import math
from collections.abc import Mapping
from functools import cached_property

from torch import Tensor

from samestep.recipes.lm.data import Windows

__all__ = ["HeldOut"]

_XZ_MAX_BYTES = 32 << 20


class HeldOut:
    """Metrics on the held-out tokens: bits per byte of the model, and of `xz -9` on the same bytes.

    Args:
        windows: the held-out tokens.
        is_of_bytes: whether tokens are bytes; if not, the only metric is bits per token.
    """

    def __init__(self, windows: Windows, is_of_bytes: bool) -> None:
        self._windows = windows
        self._is_of_bytes = is_of_bytes

    def __call__(self, totals: Mapping[str, tuple[Tensor, Tensor]]) -> Mapping[str, float]:
        """Return the metrics from the totals of `nats_of`."""
        nats, count = totals["nats"]
        bits = float(nats) / math.log(2) / int(count)
        if not self._is_of_bytes:
            return {"bits per token": bits}
        is_small = self._windows.num_targets <= _XZ_MAX_BYTES
        return {"bits per byte": bits, **({"bits per byte of xz -9": self._xz} if is_small else {})}

    @cached_property
    def _xz(self) -> float:
        """Bits per byte of `xz -9` on all bytes except the first, which is not a target."""
        return (
            8 * len(lzma.compress(self._windows.stream[1:].tobytes(), preset=9)) / self._windows.num_targets
        )
