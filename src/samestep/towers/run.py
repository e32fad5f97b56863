"""One step on one worker: its towers take turns, and what they hand in is added up and sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from samestep.buffers.model_buffers import ModelBuffers
from samestep.errors import UsageError
from samestep.streams import GlobalStreams, seed_globals, tower_seed
from samestep.summation.exchange import Exchange
from samestep.summation.gradient_sum import GradientSum
from samestep.summation.scalars import TowerScalars
from samestep.towers.batch import LocalBatch
from samestep.towers.counts import LossSum, NamedCounts, is_known_to_count, loss_sum, mean_loss
from samestep.workers.job import Job

__all__ = ["LossScale", "StepInputs", "StepRun", "Tower"]


class LossScale(Protocol):
    """What is needed of a gradient scaler, such as `torch.amp.GradScaler`."""

    def scale(self, outputs: Tensor) -> Tensor:
        """Return the loss times the scale."""

    def get_scale(self) -> float:
        """Return the scale."""


class Tower:
    """One logical slice of the batch: what the loop over `towers(batch)` yields.

    Attributes:
        index: 0 <= index < T.
        batch: the tower's own rows of the batch, nested as the batch is.
        rows: how many, at least 1.

    Example:
        >>> from samestep import Towers
        >>> model = torch.nn.Linear(2, 1)
        >>> towers = Towers(model, 2)
        >>> for tower in towers(torch.randn(5, 2)):
        ...     print(tower, tuple(tower.batch.shape))
        ...     tower.backward(model(tower.batch).square().mean())
        Tower(index=0, rows=3) (3, 2)
        Tower(index=1, rows=2) (2, 2)
    """

    def __init__(self, index: int, batch: Any, rows: int, run: StepRun) -> None:
        self.index = index
        self.batch = batch
        self.rows = rows
        self._run = run

    def backward(self, loss: Tensor | Mapping[str, Tensor]) -> None:
        """Hand in the tower's loss: compute its gradient and keep it for `Towers.average`.

        Args:
            loss: the mean over the tower's rows, a scalar that requires grad. Where the step began with
                `counts`, a mapping that has a sum for each of their names.

        Raises:
            UsageError: the tower has handed in already, its turn is over, `loss` is not what the step
                expects, or gradients came from `loss.backward()`.
            DisagreementError: workers turn out to have different batches.
        """
        self._run.take_mean(self, loss)

    def backward_sum(self, total: Tensor, count: float | Tensor) -> None:
        """Hand in a loss that is a sum over something other than rows, such as valid tokens or pixels.

        The step's loss is the sum of all towers' totals, divided once by the sum of all their counts.

        Args:
            total: the sum, a scalar that requires grad; where the count is 0 it need not require grad.
            count: how many things it is a sum over, at least 0: a number or 0-dim tensor.

        Raises:
            UsageError: as for `backward`, or `count` is not one number.
            DisagreementError: workers turn out to have different batches.

        Example:
            >>> from samestep import Towers
            >>> model, words = torch.nn.Embedding(9, 1), torch.tensor([[3, 1, 0], [4, 0, 0]])  # 0 is padding
            >>> towers = Towers(model, 2)
            >>> for tower in towers(words):
            ...     valid = tower.batch > 0
            ...     tower.backward_sum(model(tower.batch).squeeze(-1)[valid].square().sum(), valid.sum())
            >>> towers.average().count
            3.0
        """
        self._run.take_sum(self, total, count)

    def __repr__(self) -> str:
        return f"Tower(index={self.index}, rows={self.rows})"


@dataclass(frozen=True)
class StepInputs:
    """What a step begins with.

    Attributes:
        step: its number.
        seed: of all random streams.
        local: this worker's rows.
        rows: how many rows each of this worker's towers has; those without any are left out.
        counts: what the sums of the loss count; None where the loss is one sum.
        scaler: scales each loss before backward, if there is one.
        is_whole_batch: whether the loss is one of the whole batch, which counts once.
    """

    step: int
    seed: int
    local: LocalBatch
    rows: Mapping[int, int]
    counts: NamedCounts | None = None
    scaler: LossScale | None = None
    is_whole_batch: bool = False

    @property
    def unit(self) -> int:
        """The largest power of two that is at most the batch's rows: the unit of sums and counts.

        Scaling by it is exact. It keeps sums of gradients at the size of means, which float16 needs, and
        makes the division at the root one by 1 where the batch is a power of two. A loss of the whole batch
        is no sum over rows; its unit is 1.
        """
        return 1 if self.is_whole_batch else 1 << (self.local.rows.bit_length() - 1)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the sums that the loss consists of; none where it is one sum."""
        return () if self.counts is None else self.counts.names


class StepRun:
    """A step of this worker between its batch and its average.

    Args:
        inputs: what the step begins with.
        job: of this worker.
        buffers: the model's.
        parameters: those that get gradients.
        gradients: adds them up; None, as `exchange`, where the towers of a step run once more, for a closer
            look: then they stay on the parameters.
        exchange: what the sums are sent through.
    """

    def __init__(
        self,
        inputs: StepInputs,
        job: Job,
        buffers: ModelBuffers,
        parameters: Sequence[Tensor],
        gradients: GradientSum | None,
        exchange: Exchange | None,
    ) -> None:
        self.inputs = inputs
        self.has_count = False
        self._job = job
        self._buffers = buffers
        self._parameters = parameters
        self._gradients = gradients
        self._exchange = exchange
        self._scalars: dict[int, TowerScalars] = {}
        self._done: set[int] = set()
        self._turn: Tower | None = None
        self._outside: GlobalStreams | None = None
        self._has_begun = False

    def turns(self) -> Iterator[Tower]:
        """Yield the towers that have rows, in order, each under its own streams, from the shared buffers.

        Raises:
            UsageError: a turn ended, and the tower had not handed in.
        """
        inputs = self.inputs
        self._outside = GlobalStreams.capture(self._job.device)
        try:
            self._begin_passes()
            for index in inputs.local.slices:
                tower = Tower(index, inputs.local.slices[index], inputs.rows[index], self)
                self._buffers.start_tower()
                seed_globals(tower_seed(inputs.seed, inputs.step, index), self._job.device)
                self._turn = tower
                yield tower
                self._turn = None
                self._check_done(tower)
                del tower  # its rows, before those of the next one are read
        finally:
            self._end_passes()

    def _begin_passes(self) -> None:
        self._buffers.start_step()
        self._has_begun = True

    def _end_passes(self) -> None:
        """Put the streams back, unless that is done: who calls `next` on turns may hold on to them."""
        outside, self._outside = self._outside, None
        if outside is not None:
            outside.restore()
            if self._has_begun:
                self._buffers.end_passes()

    def put_back(self) -> None:
        """Leave the streams and the model's buffers as they were before the step."""
        self._end_passes()
        if self._has_begun:
            self._buffers.put_back()

    def _check_done(self, tower: Tower) -> None:
        if tower.index not in self._done:
            called = "the loop went on before backward was called"
            if self._has_gradients():
                called = "loss.backward() was called instead of tower.backward(loss)"
            raise UsageError(f"{tower!r}: {called}; call tower.backward(loss) once for every tower")

    def _has_gradients(self) -> bool:
        return any(parameter.grad is not None for parameter in self._parameters)

    def take_mean(self, tower: Tower, loss: Tensor | Mapping[str, Tensor]) -> None:
        """Take a tower's mean loss, or its sums by name; see `Tower.backward`."""
        self._check_turn(tower)
        inputs, who = self.inputs, repr(tower)
        if inputs.counts is not None:
            named = inputs.counts.loss_sum(who, loss, tower.index, tower.rows, inputs.unit)  # type: ignore[arg-type]
            self._take(tower, named)
        elif isinstance(loss, Mapping):
            raise UsageError(
                f"{who}: loss is a mapping, but the step was started without counts: start it with "
                "towers(batch, counts={name: count, ...}), or Step(..., counts=...)"
            )
        else:
            self._take(tower, mean_loss(who, loss, tower.rows, inputs.unit))

    def take_sum(self, tower: Tower, total: Tensor, count: float | Tensor) -> None:
        """Take a tower's sum and its count; see `Tower.backward_sum`."""
        self._check_turn(tower)
        if self.inputs.counts is not None:
            raise UsageError(
                f"{tower!r}: backward_sum cannot be used in a step that was started with counts; call "
                "tower.backward({name: sum})"
            )
        self._take(tower, loss_sum(repr(tower), total, count, self.inputs.unit))

    def _check_turn(self, tower: Tower) -> None:
        if tower.index in self._done or tower is not self._turn:
            why = "has run backward already" if tower.index in self._done else "is not the current tower"
            raise UsageError(
                f"{tower!r} {why}: call backward once for each tower, inside the loop over towers(batch)"
            )
        if self._has_gradients():
            raise UsageError(
                f"{tower!r}: parameters have gradients already; call tower.backward(loss) instead of "
                "loss.backward(), whose gradients are not averaged"
            )

    def _take(self, tower: Tower, loss: LossSum) -> None:
        scaler, total = self.inputs.scaler, loss.total
        scaled = total if scaler is None else scaler.scale(total)
        self.add(tower, loss, scaled.backward if total.requires_grad else None)

    def add(self, tower: Tower, loss: LossSum, backward: Callable[[], None] | None) -> None:
        """Note a tower's scalars, then run its backward and take the gradients.

        Args:
            tower: the current one.
            loss: what it adds to the loss.
            backward: leaves its gradients on the parameters; None where there are none.
        """
        self._done.add(tower.index)
        if self._gradients is None:
            if backward is not None:
                backward()
            return
        self.has_count |= is_known_to_count(loss.count)
        counters, moments = self._buffers.counters(), self._buffers.moments(tower.index, tower.rows)
        self._scalars[tower.index] = TowerScalars(loss.count, loss.sums, counters, moments)
        is_last = tower.index == max(self.inputs.local.slices)
        if is_last:
            self._start_exchange()
        self._gradients.backward(tower.index, backward, is_last=is_last)

    @property
    def exchange(self) -> Exchange:
        """Where the sums of this step go."""
        assert self._exchange is not None
        return self._exchange

    def check_complete(self) -> None:
        """Check that all of this worker's towers have handed in.

        Raises:
            UsageError: some have not.
        """
        missing = [tower for tower in self.inputs.local.slices if tower not in self._done]
        if missing:
            which = f"tower{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
            verb = "has" if len(missing) == 1 else "have"
            raise UsageError(
                f"average() at step {self.inputs.step}: {which} {verb} not run; every tower must run once"
            )

    def finish(self) -> list[tuple[int, Tensor | None]]:
        """Return (parameter index, averaged gradient) for each parameter."""
        assert self._gradients is not None
        self._end_passes()
        if not self.inputs.local.slices:
            self._begin_passes()  # without towers there may have been no loop
            self._buffers.end_passes()
            self._start_exchange()
        return self._gradients.finish()

    def squares(self) -> Tensor | None:
        """Return the squared norms of this worker's towers; see `GradientSum.squares`."""
        return None if self._gradients is None else self._gradients.squares()

    def _start_exchange(self) -> None:
        """Give the scalars of all this worker's towers to the exchange; those without rows count 0."""
        plan, like = self.exchange.plan, torch.zeros(0, dtype=torch.float64, device=self._job.device)
        for tower in plan.placement.towers(self._job.rank):
            if tower not in self._scalars:
                moments = like.new_zeros(plan.buffers.num_moments)
                counters = like.new_zeros(plan.buffers.num_counters)
                zeros = TowerScalars(0.0, like.new_zeros(plan.num_sums), counters, moments)
                self._scalars[tower] = zeros
        self.exchange.start([self._scalars[t] for t in plan.placement.towers(self._job.rank)])
