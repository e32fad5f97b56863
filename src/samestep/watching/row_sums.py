"""Finds losses that are sums over a tower's rows."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef

from samestep.watching.operator_calls import SUM, Call, argument, number_of, reduction_of, tensors_in
from samestep.watching.origins import is_plain, storage_of
from samestep.watching.program_line import ProgramLine

__all__ = ["RowSums"]

_FIRST = {"mm": 0, "mv": 0, "bmm": 0, "addmm": 1, "addmv": 1, "baddbmm": 1}
"""Matrix products, and which of their arguments has the rows of the result."""

_KEEPING = {"add", "sub", "rsub", "neg", "add_", "sub_", "neg_", "sum", "stack", "view", "_to_copy", "clone"}
"""Operators whose result is still a sum over rows."""

_SCALING = {"mul": 1, "mul_": 1, "div": -1, "div_": -1}
"""Products and quotients: the power of their second argument."""

_ROUNDING = 1e-3
_MOST_ELEMENTS = 4096  # of weights whose sum is taken


class _Sum(NamedTuple):
    """A tensor that was computed from sums over rows, by sums and products."""

    tensor: Tensor  # kept alive, so that no other one gets its id
    line: str  # where the rows were summed
    factor: float  # by which a sum was multiplied


class RowSums:
    """The sums over rows that a pass has computed.

    A tensor "has rows" if its first dimension is that of the tower's rows, or is divided into as many equal
    parts, one for each row, such as the tokens of a sentence.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget the pass."""
        self._num_rows = 0
        # The elements from one row to the next, by storage; references keep its address from being reused.
        self._strides: dict[int, tuple[int, StorageWeakRef]] = {}
        self._factors: dict[int, float] = {}  # by which terms were multiplied, by storage
        self._sums: dict[int, _Sum] = {}

    def start_pass(self, num_rows: int, rows: Iterable[Tensor]) -> None:
        """Note the sums of a pass over these rows; with one row, a sum is a mean."""
        self.clear()
        if num_rows > 1:
            self._num_rows = num_rows
            for tensor in rows:
                self._note_rows(tensor)

    def note(self, call: Call, result: Any) -> None:
        """Note an operator that has run."""
        if not self._strides or not isinstance(call.func, OpOverload):
            return
        name = call.func.overloadpacket.__name__
        sums = [self._sums[id(each)] for each in tensors_in(call.args) if id(each) in self._sums]
        if sums:
            self._note_sum(name, call, sums, result)
            return
        taken = call.args[_FIRST[name] : _FIRST[name] + 1] if name in _FIRST else call.args
        if any(map(self._has_rows, tensors_in(taken))):
            self._note_terms(name, call, result)

    def line_of(self, loss: Any) -> str | None:
        """Return where a loss was summed over the rows, and forget the pass; None if it was not.

        It is a mean if it was divided by the number of rows or more.
        """
        found, num_rows = self._sums.get(id(loss)), self._num_rows
        self.clear()
        return found.line if found is not None and found.factor * num_rows > 1 + _ROUNDING else None

    def _note_sum(self, name: str, call: Call, sums: list[_Sum], result: Any) -> None:
        if not isinstance(result, Tensor) or result.numel() > len(sums):
            return
        largest = max(sums, key=lambda each: each.factor)
        if name in _SCALING:
            self._sums[id(result)] = largest._replace(
                tensor=result, factor=largest.factor * _factor_in(name, call)
            )
        elif name in _KEEPING:
            self._sums[id(result)] = largest._replace(tensor=result)

    def _note_terms(self, name: str, call: Call, result: Any) -> None:
        if not _is_over_rows(call):
            for tensor in tensors_in((result,)):
                self._note_rows(tensor)
                if name in _SCALING:
                    before = math.prod(self._factors.get(storage_of(each), 1) for each in call.given)
                    self._factors[storage_of(tensor)] = before * _factor_in(name, call)
        terms = call.args[0]
        if name == "sum" or reduction_of(call.func, call.args, call.kwargs) == SUM:
            total = result if isinstance(result, Tensor) else result[0]
            if total.numel() == 1 and terms.requires_grad and self._has_rows(terms):
                factor = self._factors.get(storage_of(terms), 1)
                self._sums[id(total)] = _Sum(total, str(ProgramLine.current()), factor)

    def _note_rows(self, tensor: Tensor) -> None:
        storage = storage_of(tensor)
        if storage and storage not in self._strides and self._is_divided(tensor):
            stride = tensor.stride(0) * (len(tensor) // self._num_rows)
            self._strides[storage] = stride, StorageWeakRef(tensor.untyped_storage())

    def _has_rows(self, tensor: Tensor) -> bool:
        held = self._strides.get(storage_of(tensor))
        if held is None or not self._is_divided(tensor):
            return False
        return held[0] == tensor.stride(0) * (len(tensor) // self._num_rows)

    def _is_divided(self, tensor: Tensor) -> bool:
        if not _is_dense(tensor) or tensor.dim() == 0:
            return False
        return len(tensor) > 0 and len(tensor) % self._num_rows == 0


def _is_over_rows(call: Call) -> bool:
    """Say whether an operator combines rows: it works along the first dimension."""
    dims = argument(call.func, "dim", call.args, call.kwargs, 0)
    num_dims = next(tensors_in(call.args)).dim()
    return any(each in (0, -num_dims) for each in (dims if isinstance(dims, (list, tuple)) else [dims]))


def _factor_in(name: str, call: Call) -> float:
    """Return the number by which a product multiplies; 0 if by weights that add up to one, as in a mean."""
    factor = 1.0
    for value, power in zip(call.args[:2], (1, _SCALING[name]), strict=True):
        number = number_of(value)
        if number is not None:
            factor *= number**power
        elif isinstance(value, Tensor) and _is_small(value):
            total = float((value.detach().double() ** power).sum())
            factor *= not math.isclose(abs(total), 1, rel_tol=_ROUNDING)
    return factor


def _is_small(tensor: Tensor) -> bool:
    return _is_dense(tensor) and not tensor.is_complex() and 1 < tensor.numel() <= _MOST_ELEMENTS


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and is_plain(tensor) and not tensor.is_nested
