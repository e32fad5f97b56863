"""Finds terms of losses that do not grow with the number of rows: means, statistics, penalties of weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from samestep.watching.losses.rows import is_over_all, is_over_rows
from samestep.watching.operators.operator_calls import MEAN, Call, number_of, reduction_of, tensors_in
from samestep.watching.operators.tensor_set import TensorSet
from samestep.watching.program.program_line import ProgramLine
from samestep.watching.program.running_factors import LEAST_COUNT, multiplies_by_count

__all__ = ["LightTerms"]

_AVERAGING = {"mean", "var", "var_mean", "std", "std_mean"}


class LightTerms:
    """The terms of a pass that do not grow with its rows.

    Args:
        depends_on_rows: says whether a tensor was computed from the tower's rows or random numbers.
    """

    def __init__(self, depends_on_rows: Callable[[Tensor], bool]) -> None:
        self._depends_on_rows = depends_on_rows
        self.clear()

    def clear(self) -> None:
        """Forget the pass."""
        self._averages = TensorSet()  # over rows, and what is computed from them
        self._counted = TensorSet()  # numbers that were multiplied as by a count

    def note(self, call: Call, result: Any, *, takes_rows: bool) -> None:
        """Note an operator that has run; `takes_rows` says whether it took tensors with rows in front."""
        given = call.given
        if _is_counting(call) or any(each in self._counted for each in given):
            self._counted.add([each for each in tensors_in((result,)) if each.numel() == 1])
        if takes_rows:
            averages = call.name in _AVERAGING and (is_over_all(call) or is_over_rows(call))
            averages |= reduction_of(call.func, call.args, call.kwargs) == MEAN
        else:
            averages = any(each in self._averages for each in given)
        if averages:
            self._averages.add(result)

    def has(self, tensor: Tensor) -> bool:
        """Say whether a tensor of one element is such a term, and was not multiplied by a count."""
        if tensor.numel() != 1 or not tensor.requires_grad or tensor in self._counted:
            return False
        return tensor in self._averages or not self._depends_on_rows(tensor)


def _is_counting(call: Call) -> bool:
    """Say whether a number of one element is multiplied by what may be a count, or a number times a count.

    Or by zero, as is done for parameters that a loss does not use.
    """
    if call.name not in ("mul", "mul_") or any(each.numel() != 1 for each in call.given):
        return False
    if any(isinstance(each, int | float) and each == 0 for each in call.args[:2]):
        return True
    numbers = [number for number in map(number_of, call.args[:2]) if number is not None]
    if not numbers:
        return False
    written = ProgramLine.current().numbers() or []
    is_large = any(number >= LEAST_COUNT and number not in written for number in numbers)
    return is_large or multiplies_by_count()
