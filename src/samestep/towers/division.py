"""Which averages each worker needs if each worker updates only a shard of the parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from samestep.summation.buckets import Owners
from samestep.summation.norms import NORM_BLOCK
from samestep.summation.plan import Plan

__all__ = ["Division", "UpdatesShards"]


@dataclass(frozen=True, eq=False)
class Division:
    """Which worker updates which elements: for each parameter's id, pairs of a worker and its elements."""

    of: Mapping[int, Sequence[tuple[int, range]]]

    def owners_in(self, plan: Plan, parameters: Sequence[Tensor]) -> Owners | None:
        """Return the elements whose averages each worker needs, or None if all workers get all averages.

        They get all if the buckets are so small that this saves a round of messages, if some parameter is
        complex or belongs to no shard, or if a shard starts inside a block of `norms.py`.
        """
        if plan.is_whole:
            return None
        found = {}
        for index, parameter in enumerate(parameters):
            owners = self.of.get(id(parameter), ())
            is_cut = any(elements.start % NORM_BLOCK for _, elements in owners)
            if not owners or parameter.is_complex() or is_cut:
                return None
            found[index] = owners
        return found


class UpdatesShards(ABC):
    """An optimizer that updates one shard per worker, and in a `Step` needs only that shard's averages."""

    @abstractmethod
    def _division_now(self) -> Division | None:
        """Return which averages each worker needs for `step`; None if all workers need all."""

    @abstractmethod
    def _take_averages(self) -> list[Tensor] | None:
        """Set the gradients of this worker's shards to their averages; return the shards that have one.

        Return None if all workers have all averages.
        """

    @abstractmethod
    def _let_go(self) -> None:
        """Drop all gradients."""
