"""Reads the program's source code in the first step."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from samestep.watching.decisions import check_decisions, check_outside_gradients
from samestep.watching.early_gradients import EarlyGradients
from samestep.watching.model.optimizer_steps import ids_of_outside_gradients
from samestep.watching.program.source_code import SourceCode

__all__ = ["FirstStep"]


class FirstStep:
    """What the source code shows of the step that begins now."""

    def __init__(self) -> None:
        self._source = SourceCode()
        self._named = check_decisions(self._source)
        self._early = EarlyGradients(self._source)

    def end(self, parameters: Iterable[Tensor]) -> None:
        """Check how the program uses gradients: of these before `average()`, of others after it."""
        self._early.check(parameters)
        if ids := ids_of_outside_gradients():
            check_outside_gradients(self._source, ids, but=self._named)
