"""The passes of one worker: each tower's turn, under its own streams, from the shared buffers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from samestep.buffers.model_buffers import Buffers
from samestep.errors import UsageError
from samestep.streams import keep_globals, seed_globals, tower_seed
from samestep.summation.placement import Placement
from samestep.towers.batch import LocalBatch
from samestep.towers.tower import HandIn, Tower
from samestep.workers.job import Job

__all__ = ["Passes"]


class Passes:
    """Gives a worker's towers their turns, one after the other.

    Args:
        job: this worker's.
        placement: which rows its towers get.
        buffers: the model's.
        parameters: those that get gradients.
    """

    def __init__(
        self, job: Job, placement: Placement, buffers: Buffers, parameters: Sequence[Tensor]
    ) -> None:
        self._job = job
        self._placement = placement
        self._buffers = buffers
        self._parameters = parameters

    def turns(self, local: LocalBatch, seed: int, step: int, hand_in: HandIn) -> Iterator[Tower]:
        """Yield the towers that have rows, in order.

        Args:
            local: their rows.
            seed: of the run.
            step: whose random streams the passes draw from.
            hand_in: gets what each tower hands in.

        Raises:
            UsageError: a turn ended, and the tower had not handed in.
        """
        rows = self._placement.rows(self._job.rank, local.rows)
        with keep_globals(self._job.device):
            self._buffers.start_step()
            try:
                for index, batch in local.slices.items():
                    self._buffers.start_tower()
                    seed_globals(tower_seed(seed, step, index), self._job.device)
                    tower = Tower(index, batch, len(rows[index]), hand_in)
                    yield tower
                    tower.end_turn()
                    self._check_turn_used(tower)
            finally:
                self._buffers.end_passes()

    def check_no_gradients(self, tower: Tower) -> None:
        """Refuse a tower's loss where gradients are there that did not come through a tower.

        Raises:
            UsageError: some parameter has a gradient.
        """
        if self._has_gradients():
            raise UsageError(
                f"{tower!r}: parameters have gradients already; call tower.backward(loss) once instead of "
                "loss.backward(), which goes past the tower"
            )

    def _check_turn_used(self, tower: Tower) -> None:
        if not tower.is_done:
            called = (
                "loss.backward() was called past it"
                if self._has_gradients()
                else "its turn ended without a backward"
            )
            raise UsageError(f"{tower!r}: {called}; call tower.backward(loss) once for every tower")

    def _has_gradients(self) -> bool:
        return any(parameter.grad is not None for parameter in self._parameters)
