"""The generators from which passes draw through torch's operators, and whether one goes on after another."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from samestep.errors import warn
from samestep.watching.operators.origins import NOWHERE, Origin
from samestep.watching.program.reach import in_reach

__all__ = ["GENERATOR", "INSTEAD_OF_DRAWN", "Draws"]

GENERATOR = "a torch.Generator"
INSTEAD_OF_DRAWN = (
    "seed it in each pass from the step and tower.index, or draw from the global generators, which are "
    "seeded for each tower"
)


class _Drawn(NamedTuple):
    """The use, in this step, of a generator that was passed to operators."""

    generator: torch.Generator  # kept alive, so that no other generator gets its id
    state: Tensor  # after the last draw
    towers: int  # a bit for each tower that has drawn from it since it was seeded


class Draws:
    """The draws of a step's passes from generators of the program.

    Attributes:
        has_warned: whether there has been a warning.
    """

    def __init__(self) -> None:
        self.has_warned = False
        self._drawn: dict[int, _Drawn] = {}  # by the generators' ids
        self._continued: torch.Generator | None = None  # that this pass drew from after another tower

    def clear(self) -> None:
        """Forget all."""
        self._drawn.clear()
        self._continued = None

    def start_pass(self) -> None:
        """Begin a pass, which has drawn from no generator yet."""
        self._continued = None

    def check(self, who: str) -> None:
        """Warn, once, if this pass has drawn after another tower, perhaps for `.item()`."""
        if self._continued is not None and not self.has_warned:
            self.has_warned = True
            warn(
                f"{who} drew from {self.name()} that continues from another tower's draws, so its numbers "
                f"depend on the number of workers: {INSTEAD_OF_DRAWN}"
            )

    def start(self, generator: object, own: int) -> Origin:
        """Return this tower, and those whose draws a generator continues because it was not reseeded.

        Args:
            generator: what an operator draws from; anything else than a generator draws nothing.
            own: the bit of this pass's tower.
        """
        if not isinstance(generator, torch.Generator):
            return NOWHERE
        last = self._drawn.get(id(generator))
        if last is None or not last.towers & ~own or not torch.equal(generator.get_state(), last.state):
            return Origin(own, "")
        self._continued = generator
        return Origin(last.towers | own, GENERATOR)

    def finish(self, generator: object, drawn: Origin) -> None:
        """Note the generator's state after the operator; `drawn` is what `start` returned."""
        if isinstance(generator, torch.Generator):
            self._drawn[id(generator)] = _Drawn(generator, generator.get_state(), drawn.towers)

    def name(self) -> str:
        """Return `GENERATOR`, with the program's name for the continued one in brackets."""
        if self._continued is None:
            return GENERATOR
        state = self._continued.get_state()
        # By state, because operators receive a different object than the program's.
        found = in_reach(lambda each: type(each) is torch.Generator and torch.equal(each.get_state(), state))
        return f"{GENERATOR} ({found[0][0]})" if found else GENERATOR
