"""Finds what a pass computes by comparing values of its rows: the hardest rows, a threshold among them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from samestep.watching.losses.rows import Rows, dimensions_of, is_over_all
from samestep.watching.operators.operator_calls import Call, tensors_in
from samestep.watching.operators.origins import storage_of
from samestep.watching.program.program_line import ProgramLine

__all__ = ["Combination", "RowComparisons"]

_SORTING = {"topk", "sort", "kthvalue", "median"}
_ALONG = {"_softmax", "_log_softmax", "logcumsumexp", "cummax", "cummin", "cumprod", "cumsum", *_SORTING}
"""Operators that compare what is along a dimension; the last one, if none is given."""

_EXTREMES = {"amax", "amin", "argmax", "argmin", "max", "median", "min"}
_FUNCTIONS = {"logsumexp", "prod", "std", "var", "var_mean"}
"""Operators on one number for each row: their largest or smallest, and functions of all."""

_READING = "_local_scalar_dense"
_DECIMALS = 3  # numbers of more are known again, as a program does not write them
_MOST_ELEMENTS = 2**16  # of tensors that are kept until the pass ends


class Combination(NamedTuple):
    """What a loss is made of that was computed from several rows.

    Attributes:
        made: what it is and in which line it was made, in words.
        how: by pairs or along their dimension; one after the other, as time steps are; or by a function
            of sums or means over them.
    """

    made: str
    how: Literal["pairs", "time", "function"]


class RowComparisons:
    """The tensors and numbers of a pass that it computes by comparing its rows, with gradients or without.

    What is compared was computed from parameters: an order or a maximum of the rows themselves, such as
    their lengths, decides nothing for a loss.
    """

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self.clear()

    def clear(self) -> None:
        """Forget the pass."""
        self._of_model = set[int]()  # by storage, of tensors that have rows; `Rows` keeps their addresses
        self._made: dict[int, tuple[Combination, Tensor]] = {}  # by ids of tensors, which are kept alive
        self._numbers: dict[float, Combination] = {}  # that the pass has read

    def find(self, call: Call, result: Any) -> Combination | None:
        """Note an operator that has run; return by what comparison its result was computed, if by any."""
        given = call.given
        results = list(tensors_in((result,)))
        if any(self.is_of_model(each) for each in given):
            self._of_model.update(storage_of(each) for each in results if self._has_rows(each))
        found = self._made_by(call) or next(self._taken_by(call), None)
        if found is None:
            return None
        self.follow(result, found)
        if call.name == _READING and isinstance(result, float) and result != round(result, _DECIMALS):
            self._numbers[result] = found
        has_gradient = torch.is_grad_enabled() and any(each.requires_grad for each in given)
        return found if has_gradient else None

    def follow(self, result: Any, found: Combination) -> None:
        """Follow what is computed from tensors that compare rows, also by their indices and values."""
        made = [each for each in tensors_in((result,)) if each.numel() <= _MOST_ELEMENTS]
        self._made.update((id(each), (found, each)) for each in made)

    def is_of_model(self, tensor: Tensor) -> bool:
        """Say whether a tensor was computed from parameters, with a gradient or without."""
        return tensor.requires_grad or storage_of(tensor) in self._of_model

    def _has_rows(self, tensor: Tensor) -> bool:
        return self._rows.dimension_of(tensor) is not None

    def _made_by(self, call: Call) -> Combination | None:
        """Return the comparison that an operator is, if it compares rows."""
        name, tensor = call.name, next(iter(call.args), None)
        if name not in _ALONG | _EXTREMES | _FUNCTIONS or not isinstance(tensor, Tensor):
            return None
        is_function = name in _FUNCTIONS
        if not (tensor.requires_grad if is_function else self.is_of_model(tensor)):
            return None
        if name == "sort" and not tensor.is_floating_point():
            return None  # rows by groups, such as tokens by their experts
        if not (self._is_along_rows(call, tensor) if name in _ALONG else self._is_over_rows(call, tensor)):
            return None
        made = f"{name.strip('_')} over rows in {ProgramLine.current()}"
        return Combination(made, "function" if is_function else "pairs")

    def _is_along_rows(self, call: Call, tensor: Tensor) -> bool:
        along = dimensions_of(call)
        return self._rows.dimension_of(tensor) in along if along else self._is_over_rows(call, tensor)

    def _is_over_rows(self, call: Call, tensor: Tensor) -> bool:
        """Say whether an operator works on one number for each row."""
        is_each = tensor.numel() == self._rows.num_rows and self._has_rows(tensor)
        return is_each and (is_over_all(call) or tensor.dim() == 1)

    def _taken_by(self, call: Call) -> Iterator[Combination]:
        """Yield the comparisons of what an operator takes."""
        if call.kind.takes_shapes_only:
            return
        for each in call.given:
            if id(each) in self._made:
                yield self._made[id(each)][0]
        for number in call.values if self._numbers else ():
            if isinstance(number, float) and number in self._numbers:
                yield self._numbers[number]
