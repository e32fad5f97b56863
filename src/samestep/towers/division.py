"""Who needs which averages, where each worker updates a share of the parameters."""

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
        """Return of what each worker needs the averages, or None where all workers get all.

        So they do where all buckets are so small that this saves a round, where somebody else needs an
        average, too, and where a norm's block is cut.
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
    """An optimizer of which each worker updates a share, and needs the averages of no more in a `Step`."""

    @abstractmethod
    def _division_now(self) -> Division | None:
        """Return who needs the averages of what in `step`; None where all workers need all."""

    @abstractmethod
    def _take_averages(self) -> list[Tensor] | None:
        """Let this worker's shares have the averages that it got of them; return those that have one.

        None where all workers have all averages.
        """

    @abstractmethod
    def _let_go(self) -> None:
        """Let go of all gradients."""
