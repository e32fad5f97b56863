"""A step between its batch and its average: what this worker's towers hand in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from samestep.buffers.model_buffers import Buffers
from samestep.errors import UsageError
from samestep.summation.gradient_sum import Contributions, TowerFigures
from samestep.towers.batch import LocalBatch
from samestep.towers.counts import LossSum, NamedWeights, is_known_to_count, weigh
from samestep.towers.passes import Passes
from samestep.towers.tower import HandIn, Loss, Tower

__all__ = ["LossScale", "OpenStep"]


class LossScale(Protocol):
    """What is needed of a gradient scaler."""

    def scale(self, outputs: Tensor) -> Tensor:
        """Return the loss times the scale."""

    def get_scale(self) -> float:
        """Return the scale."""


class OpenStep:
    """Takes in what this worker's towers hand in, and passes it on.

    Args:
        local: this worker's rows.
        named: what the sums of the loss count; None where the loss is one sum.
        contributions: where gradients and figures go.
        passes: gives the towers their turns.
        buffers: the model's.
        scaler: scales each loss before backward, if there is one.
        is_whole: whether the loss is one of the whole batch, which counts once.

    Attributes:
        is_known_to_count: whether some tower's weight is above 0, as far as is known without waiting.
        contributions: see above.
        is_whole: see above.
        local: see above.
        named: see above.
    """

    def __init__(  # noqa: PLR0913 - all that a step consists of
        self,
        local: LocalBatch,
        named: NamedWeights | None,
        contributions: Contributions,
        passes: Passes,
        buffers: Buffers,
        scaler: LossScale | None,
        *,
        is_whole: bool = False,
    ) -> None:
        self.local = local
        self.named = named
        self.contributions = contributions
        self.is_whole = is_whole
        self.is_known_to_count = False
        self._passes = passes
        self._buffers = buffers
        self._scaler = scaler
        self._done: set[int] = set()

    @property
    def unit(self) -> int:
        """The largest power of two that is at most the batch's rows: the unit of sums and weights.

        Scaling by it is exact. It keeps sums of gradients at the size of means, which float16 needs, and
        makes the division at the root one by 1 where the batch is a power of two. A loss of the whole batch
        is no sum over rows; its unit is 1.
        """
        return 1 if self.is_whole else 1 << (self.local.rows.bit_length() - 1)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the sums that the loss consists of; none where it is one sum."""
        return () if self.named is None else self.named.names

    def turns(self, seed: int, step: int) -> Iterator[Tower]:
        """Give the towers their turns, and take in what they hand in."""
        return self._passes.turns(self.local, seed, step, self._take_in)

    def replay(self, seed: int, step: int, hand_in: HandIn) -> Iterator[Tower]:
        """Give the towers their turns again, and have `hand_in` look at what they hand in."""
        return self._passes.turns(self.local, seed, step, hand_in)

    def weigh(self, tower: Tower, loss: Loss, weight: float | Tensor | None) -> LossSum:
        """Return what a tower's loss adds up to, in units.

        Raises:
            UsageError: it is not what `Tower.backward` expects.
        """
        if self.named is None:
            return weigh(tower, loss, weight, self.unit)
        return self.named.weigh(tower, loss, weight, self.unit)

    def _take_in(self, tower: Tower, loss: Loss, weight: float | Tensor | None) -> None:
        self._passes.check_no_gradients(tower)
        loss_sum = self.weigh(tower, loss, weight)
        total = loss_sum.total
        scaled = total if self._scaler is None else self._scaler.scale(total)
        self.add(tower, loss_sum, scaled.backward if total.requires_grad else None)

    def add(self, tower: Tower, loss_sum: LossSum, backward: Callable[[], None] | None) -> None:
        """Note a tower's figures, then run its backward and take the gradients.

        Args:
            tower: whose turn it is.
            loss_sum: what it adds to the loss.
            backward: leaves its gradients on the parameters; None where there are none.
        """
        self.is_known_to_count |= is_known_to_count(loss_sum.weight)
        figures = TowerFigures(loss_sum.weight, loss_sum.sums, self._buffers.counters())
        self.contributions.add_figures(tower.index, figures, self._buffers.moments(tower.index, tower.rows))
        is_last = tower.index == max(self.local.slices)
        if is_last:
            self._send_figures()
        self.contributions.before_backward(tower.index, is_last=is_last)
        if backward is not None:
            backward()
        self.contributions.after_backward(is_last=is_last)
        self._done.add(tower.index)

    def finish(self, step: int) -> None:
        """Send what has not been sent, once all towers have run.

        Raises:
            UsageError: some have not.
        """
        missing = [tower for tower in self.local.slices if tower not in self._done]
        if missing:
            which = f"tower{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
            verb = "has" if len(missing) == 1 else "have"
            raise UsageError(f"average() at step {step}: {which} {verb} not run; every tower must run once")
        if not self.local.slices:
            self._buffers.start_step()  # nobody need have looped over no towers
            self._buffers.end_passes()
            self._send_figures()
        self.contributions.send_rest()

    def _send_figures(self) -> None:
        """Send the figures of all this worker's towers; those without rows come last, and hand in zeros."""
        counters = self._buffers.counters()
        zeros = torch.zeros(self._buffers.num_moments, dtype=torch.float64, device=self.contributions.device)
        nothing = TowerFigures(0.0, zeros.new_zeros(max(1, len(self.names))), torch.zeros_like(counters))
        for tower in self.contributions.towers:
            if tower not in self.local.slices:
                self.contributions.add_figures(tower, nothing, zeros.clone())
        self.contributions.send_figures()
