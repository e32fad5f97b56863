"""Which worker needs which averages, when each worker updates a share of the parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from samestep.summation.buckets import Shares
from samestep.summation.norms import NORM_BLOCK
from samestep.summation.plan import Plan

__all__ = ["Division", "UpdatesShares"]


@dataclass(frozen=True, eq=False)
class Division:
    """Who updates which elements: the workers of each parameter and the elements of each, by its id."""

    of: Mapping[int, Sequence[tuple[int, range]]]

    def shares_in(self, plan: Plan, parameters: Sequence[Tensor]) -> Shares | None:
        """Return the elements whose averages each worker needs, or None if all workers get all.

        They get all if the buckets are so small that this saves a round, if some parameter has no share, and
        if a share cuts a block of a norm.
        """
        if plan.is_whole:
            return None
        found = {}
        for index, parameter in enumerate(parameters):
            shares = self.of.get(id(parameter), ())
            is_cut = any(elements.start % NORM_BLOCK for _, elements in shares)
            if not shares or parameter.is_complex() or is_cut:
                return None
            found[index] = shares
        return found


class UpdatesShares(ABC):
    """An optimizer that updates a share on each worker, and in a `Step` needs only that share's averages."""

    @abstractmethod
    def _division_now(self) -> Division | None:
        """Return which averages each worker needs in `step`; None if all workers need all."""

    @abstractmethod
    def _take_averages(self) -> list[Tensor] | None:
        """Give this worker's shares their averages as gradients; return the shares that have one.

        None if all workers have all averages.
        """

    @abstractmethod
    def _let_go(self) -> None:
        """Let go of all gradients."""
