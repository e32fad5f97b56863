"""What must be the same on all workers in a step beside plan and batch: settings and weights."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from samestep.watching.watch import Watch

__all__ = ["FIRST_EXAMPLE", "MustMatch"]

FIRST_EXAMPLE = "checksum of the batch's first example"

_DRAWN = "torch's global generator also differs: only one worker drew from it, as in an evaluation"
_DATA = (
    "expected the same data in the same order on all workers: sort directory listings, seed shuffles and "
    "splits, and give every worker the whole dataset"
)
_LOSS = (
    "all workers compute it from the same outputs: expected it to use no state or generator that differs "
    "between workers, and no rank"
)
_MODES = "call train(), or eval(), on all workers, also after an evaluation on only one of them"


@dataclass(frozen=True)
class MustMatch:
    """Settings by name, and the weights: their hash travels with a step's first message."""

    settings: Mapping[str, Any]
    watch: Watch
    first_example: int = 0

    def hash(self) -> int:
        """Return a 32-bit number that tells apart what workers have."""
        return zlib.crc32(repr([*self.settings.items(), self.watch.hashes, self.watch.settings]).encode())

    def hash_of_passes(self) -> int:
        """Return a 32-bit number of what the passes so far have seen: the layers' modes, a common loss."""
        modes, loss = self.watch.modes.hash(), self.watch.loss
        # A worker whose towers have no rows has seen no modes, and is not compared.
        return modes if loss is None or modes == 0 else zlib.crc32(f"{modes} {loss}".encode())

    def hash_beside(self) -> int:
        """Return a 32-bit number of what the losses so far depend on beside the model, 0 for nothing."""
        return self.watch.flow.beside.hash()

    def in_words(self) -> dict[str, object]:
        """Return it by name, with a hint where batches or modes differ."""
        modes = self.watch.modes.in_words()
        generator = zlib.crc32(bytes(torch.get_rng_state().tolist()))
        return {
            **{name: repr(value) for name, value in self.settings.items()},
            "hash of the weights in": self.watch.hashes,
            "the layer": self.watch.settings,
            f"?{FIRST_EXAMPLE}: {_DATA}": self.first_example,
            "modes": modes,
            f"?modes: {_MODES}": modes,
            f"?batch fingerprint: {_DRAWN}": generator,
            "loss of the whole batch": self.watch.loss,
            f"?loss of the whole batch: {_LOSS}": self.watch.loss,
            "autocast in the passes": ", ".join(self.watch.modes.autocast),  # none on a worker without rows
        }
