"""What must be the same on all workers in a step, besides the plan and the batch: settings and weights."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from samestep.watching.watch import Watch

__all__ = ["FIRST_EXAMPLE", "MustMatch", "of_weights"]

FIRST_EXAMPLE = "checksum of the batch's first example"

_BATCH = (
    "expected the whole global batch on all workers, not a part for each, in the same order: seed shuffles"
)
_WEIGHTS_NAME = "hash of the weights in"
_WEIGHTS = "expected the same optimizer steps, learning rates, edits and loaded checkpoints on all workers"
_DRAWN = (
    "torch's global generator also differs: it was seeded differently, or only one worker drew from it, as "
    "in an evaluation"
)
_DATA = (
    "expected the same data in the same order on all workers: sort directory listings, seed shuffles and "
    "splits, give every worker the whole dataset, and keep nothing of earlier rows in it or in collate_fn"
)
_LOSS = (
    "all workers compute it from the same outputs: expected it to use no state or generator that differs "
    "between workers, and no rank"
)
_MODES = "call train(), or eval(), on all workers, also after an evaluation on only one of them"


def of_weights(hashes: Mapping[str, int]) -> dict[str, object]:
    """Return hashes of weights by tensor, and the hint for an error, as `agree` takes them."""
    return {_WEIGHTS_NAME: hashes, f"?{_WEIGHTS_NAME}: {_WEIGHTS}": hashes}


@dataclass(frozen=True)
class MustMatch:
    """Settings by name, and the weights. Their hash travels with a step's first message."""

    settings: Mapping[str, Any]
    watch: Watch
    first_example: int = 0
    rows: int = 0
    batch: int = 0  # its fingerprint

    def hash(self) -> int:
        """Return a 32-bit hash of settings and weights."""
        values = [*self.settings.items(), self.watch.tensors.hashes, self.watch.settings]
        return zlib.crc32(repr(values).encode())

    def hash_of_passes(self) -> int:
        """Return a 32-bit hash of the layers' modes in the passes so far, and of a whole-batch loss."""
        modes, loss = self.watch.modes.hash(), self.watch.loss
        # 0 means "do not compare": a worker without rows has run no layers.
        return modes if loss is None or modes == 0 else zlib.crc32(f"{modes} {loss}".encode())

    def hash_beside(self) -> int:
        """Return a 32-bit number of what losses depend on beside the model, and how; 0 for nothing."""
        hashes = self.watch.flow.beside.hash(), self.watch.flow.operators.hash()
        return zlib.crc32(repr(hashes).encode()) if any(hashes) else 0

    def late_hash(self) -> int:
        """Return a 32-bit hash of the weights in the previous step, on a GPU; 0 if unknown."""
        return self.watch.tensors.late_hash

    def in_words(self) -> dict[str, object]:
        """Return all of this by name, and after a "?" the hints that an error adds if they differ."""
        modes = self.watch.modes.in_words()
        generator = zlib.crc32(bytes(torch.get_rng_state().tolist()))
        return {
            **{name: repr(value) for name, value in self.settings.items()},
            **of_weights(self.watch.tensors.hashes_to_explain()),
            "the layer": self.watch.settings,
            f"?{FIRST_EXAMPLE}: {_DATA}": self.first_example,
            "modes": modes,
            f"?modes: {_MODES}": modes,
            f"?rows: {_BATCH}": self.rows,
            f"?batch fingerprint: {_BATCH}": self.batch,
            f"?batch fingerprint: {_DRAWN}": generator,
            "loss of the whole batch": self.watch.loss,
            f"?loss of the whole batch: {_LOSS}": self.watch.loss,
            "autocast in the passes": ", ".join(self.watch.modes.autocast),  # "" on a worker without rows
        }
