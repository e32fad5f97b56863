"""Finds losses that a program scales by the number of workers or towers, as other training loops need it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.autograd.graph import Node

from samestep.errors import warn
from samestep.summation.placement import Placement
from samestep.watching.program.program_line import ProgramLine

__all__ = ["ScaledLosses", "Scaling"]


class Scaling(NamedTuple):
    """A mean loss that was divided or multiplied by a whole number."""

    how: str  # "divided" or "multiplied"
    number: int
    line: str  # where

    @classmethod
    def of(cls, how: str, mean: Tensor, number: int) -> Scaling | None:
        """Return the operator that is running, given the mean, or what was computed from means.

        None if the number is written in that line, as in `loss / 2`; if the source is not known; or if it
        makes another mean: of a sum, or of as many terms.
        """
        node = mean.grad_fn
        if number < 2 or node is None or node.name().startswith("SumBackward") or _adds(number, node):
            return None
        line = ProgramLine.current()
        written = line.numbers()
        return None if written is None or number in written else cls(how, number, str(line))


def _adds(number: int, node: Node) -> bool:
    """Say whether a node adds so many terms, one after the other."""
    terms, nodes = 0, [node]
    while nodes and terms <= number:  # a sum may be long, and may add a sum to itself
        node = nodes.pop()
        if node.name().startswith("AddBackward"):
            nodes += [each for each, _ in node.next_functions if each is not None]
        else:
            terms += 1
    return terms == number


class ScaledLosses:
    """Warns, once, if all passes of a step scale their losses by the number of workers or towers.

    Attributes:
        has_warned: whether it has.
    """

    def __init__(self) -> None:
        self.has_warned = False
        self.start_step()

    def start_step(self) -> None:
        """Forget the passes of another step."""
        self._found = set[Scaling | None]()

    def note(self, scaling: Scaling | None) -> None:
        """Note how a pass scaled its loss."""
        self._found.add(scaling)

    def check(self, who: str, placement: Placement) -> None:
        """Warn if all passes up to this one have scaled their losses by the number of workers or towers."""
        scaling = next(iter(self._found)) if len(self._found) == 1 else None
        if scaling is None or self.has_warned:
            return
        counts = {placement.num_towers: "towers", placement.num_workers: "workers"}
        if scaling.number in counts:
            self.has_warned = True
            warn(
                f"{who}: its loss was {scaling.how} by {scaling.number}, in {scaling.line}, and this is "
                f"the number of {counts[scaling.number]}: tower.backward takes the mean over the tower's "
                "rows, and samestep averages over towers, so no such factor is needed; pass the mean itself"
            )
