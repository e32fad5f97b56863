"""Reads the program's source code in the first step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from samestep.errors import warn
from samestep.watching.decisions import check_decisions, check_outside_gradients
from samestep.watching.early_gradients import EarlyGradients
from samestep.watching.model.optimizer_steps import ids_of_outside_gradients
from samestep.watching.program.carried_decisions import CarriedDecisions
from samestep.watching.program.program_line import ProgramLine
from samestep.watching.program.source_code import SourceCode

__all__ = ["FirstStep"]


class FirstStep:
    """What the source code shows of the step that begins now."""

    def __init__(self) -> None:
        self._source = SourceCode()
        self._named = check_decisions(self._source)
        self._early = EarlyGradients(self._source)
        self._carried: Mapping[ProgramLine, set[str]] | None = None  # after the first turn
        self._values: Mapping[str, object] = {}  # of this, after the first turn
        self._has_changed: bool | None = None  # these; None if there was one turn

    def end_turn(self, pass_function: Callable[[Any], Any] | None) -> None:
        """Note by what the first turn decides, and whether this changes in others.

        Code that is switched off changes nothing. `pass_function` is as for `Watch.start_step`.
        """
        if self._carried == {} or self._has_changed:
            return
        turn = CarriedDecisions.of_running_loop(self._source, pass_function)
        if self._carried is None:
            self._carried, self._values = turn.by_line(), turn.values()
        else:
            self._has_changed = turn.values() != self._values

    def check_carried(self, who: str) -> None:
        """Warn if a pass decides on its loss by what it carries on."""
        if self._carried and self._has_changed is not False:
            line, names = min(self._carried.items())
            warn(
                f"{who} decides on its loss by {', '.join(sorted(names))} ({line}), which each pass computes "
                "from what the one before has left; with another number of workers it would be from a "
                "different tower: decide by towers.step, or update it after average()"
            )

    def end(self, parameters: Iterable[Tensor]) -> None:
        """Check how the program uses gradients: of these before `average()`, of others after it."""
        self._early.check(parameters)
        if ids := ids_of_outside_gradients():
            check_outside_gradients(self._source, ids, but=self._named)
