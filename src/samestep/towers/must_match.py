"""What all workers must have alike in a step beside plan and batch: settings and weights."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from samestep.buffers.watch import Watch

__all__ = ["MustMatch"]

_DRAWN = "torch's global generator differs, too: one worker alone drew from it, as in an evaluation"


@dataclass(frozen=True)
class MustMatch:
    """Settings by name, and the weights: their hash travels with a step's first message."""

    settings: Mapping[str, Any]
    watch: Watch

    def hash(self) -> int:
        """Return a 32-bit number that tells apart what workers have."""
        return zlib.crc32(repr([*self.settings.items(), self.watch.hashes]).encode())

    def in_words(self) -> dict[str, object]:
        """Return it by name, with a hint where batches differ."""
        generator = zlib.crc32(bytes(torch.get_rng_state().tolist()))
        return {
            **{name: repr(value) for name, value in self.settings.items()},
            **{f"hash of the weights in {name}": value for name, value in self.watch.hashes.items()},
            f"?batch fingerprint: {_DRAWN}": generator,
        }
