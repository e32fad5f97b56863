"""The batches of a run, one epoch after the other."""

from __future__ import annotations

from collections.abc import Iterator

from samestep.batches.batch import LocalBatch
from samestep.data.loader import TowerLoader

__all__ = ["Batches"]


class Batches:
    """Yields a loader's batches without end, from the loader's position when the first one is requested."""

    def __init__(self, loader: TowerLoader) -> None:
        self._loader = loader
        self._batches = self._without_end()

    def __iter__(self) -> Iterator[LocalBatch]:
        return self

    def __next__(self) -> LocalBatch:
        return next(self._batches)

    def leave_epoch(self) -> None:
        """Continue with the next epoch, because a callback has stopped this one."""
        if self._loader.position % len(self._loader):
            self._loader.position = (self._loader.epoch + 1) * len(self._loader)
            self._batches = self._without_end()

    def _without_end(self) -> Iterator[LocalBatch]:
        while True:
            yield from self._loader
