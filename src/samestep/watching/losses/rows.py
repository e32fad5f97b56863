"""Follows the rows of a tower: which dimension of a tensor they are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch._ops import OpOverload

from samestep.watching.operators.operator_calls import Call, argument, tensors_in
from samestep.watching.operators.origins import Kept, is_dense, keep_address, storage_of

__all__ = [
    "BATCHED",
    "BY_ELEMENT",
    "COUNTING",
    "Rows",
    "dimensions_of",
    "is_over_all",
    "is_over_rows",
    "norm_order",
]

BATCHED = {"bmm", "baddbmm"}
"""Products of several pairs of matrices, as in attention over several heads, and in `einsum`."""

BY_ELEMENT = {"add", "sub", "mul", "div"}

_NORM = "linalg_vector_norm"
_COPYING = {"clone", "_to_copy"}

COUNTING = {"bincount", "histc"}
"""Operators that count what is chosen for each row, such as an expert."""

_FIRST = {"mm": 0, "mv": 0, "bmm": 0, "addmm": 1, "addmv": 1, "baddbmm": 1}
"""Matrix products, and which of their arguments has the rows of the result."""


class Rows:
    """The tensors of a pass that have its rows.

    A tensor "has rows" in a dimension that is the tower's rows, or that is divided into as many equal parts,
    one for each row, such as the tokens of a sentence. Results of operators are followed if this is their
    first dimension; views of these may have it in any, and so may their copies, what is computed from them by
    element, and their products with other matrices.

    Attributes:
        num_rows: of the tower; 0 if none are followed.
        most_elements: of a tensor that holds them.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget the pass."""
        self.num_rows = self.most_elements = 0
        # The bytes from one row to the next, by storage; references keep its address from being reused.
        self._strides: dict[int, tuple[int, Kept]] = {}

    def start_pass(self, num_rows: int, rows: Iterable[Tensor]) -> None:
        """Follow these rows; a single one can't be told from other dimensions of size one."""
        self.clear()
        if num_rows > 1:
            self.num_rows = num_rows
            for tensor in rows:
                self.most_elements = max(self.most_elements, tensor.numel())
                self._note(tensor, 0)

    def note(self, call: Call, result: Any) -> bool:
        """Note an operator that has run; return whether it took any tensor that has rows in front."""
        if not self._strides or not isinstance(call.func, OpOverload):
            return False
        name = call.name
        taken = call.args[_FIRST[name] : _FIRST[name] + 1] if name in _FIRST else call.args
        found = {self.dimension_of(each): each.dim() for each in tensors_in(taken)}
        has_rows = 0 in found or (name in BATCHED and self.dimension_of(call.args[-1]) == 0)
        joins = name == "cat" and list(found) == [0]  # two views of each row, say, one after the other
        if has_rows and (joins or not (is_over_rows(call) or name in COUNTING)):
            for tensor in tensors_in((result,)):
                self._note(tensor, 0)
        elif name in _FIRST:
            self._note_product(taken[0], result)
        elif name in BY_ELEMENT or name in _COPYING:
            dims = [at for at, num_dims in found.items() if at is not None and num_dims == result.dim()]
            if len(dims) == 1:
                self._note(result, dims[0])
        return has_rows

    def dimension_of(self, tensor: Tensor) -> int | None:
        """Return the dimension that is the rows; None if there is none, or it is not known."""
        held = self._strides.get(storage_of(tensor))
        if held is None or not is_dense(tensor):
            return None
        for dimension, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            num_bytes = tensor.itemsize * stride * (size // self.num_rows)
            if size and size % self.num_rows == 0 and num_bytes == held[0]:
                return dimension
        return None

    def _note_product(self, matrix: Tensor, result: Tensor) -> None:
        """Note the product of a matrix, or of several, that has rows elsewhere than in front."""
        held = self._strides.get(storage_of(matrix))
        if held is None or not (is_dense(matrix) and is_dense(result)):
            return
        if matrix.dim() == 3 and self.dimension_of(matrix) == 1:
            self._note(result, 1)
            return
        # All rows of one time, then those of the next: attention layers flatten them so.
        is_by_time = matrix.itemsize * matrix.stride(0) == held[0] and len(matrix) % self.num_rows == 0
        if is_by_time and result.dim() == 2:
            self._keep(result, result.itemsize * result.stride(0))

    def _note(self, tensor: Tensor, dimension: int) -> None:
        if not is_dense(tensor) or tensor.dim() <= dimension:
            return
        if (size := tensor.shape[dimension]) and size % self.num_rows == 0:
            self._keep(tensor, tensor.itemsize * tensor.stride(dimension) * (size // self.num_rows))

    def _keep(self, tensor: Tensor, num_bytes: int) -> None:
        """Keep how many bytes there are from one row of a new tensor to the next."""
        storage = storage_of(tensor)
        if storage and storage not in self._strides:
            self._strides[storage] = num_bytes, keep_address(tensor)


def is_over_all(call: Call) -> bool:
    """Say whether an operator works along no dimension of those that it could."""
    return argument(call.func, "dim", call.args, call.kwargs) in (None, [])


def norm_order(call: Call) -> float | None:
    """Return the order of a norm over all elements; None for other operators."""
    if call.name != _NORM or not is_over_all(call):
        return None
    return float(argument(call.func, "ord", call.args, call.kwargs))


def is_over_rows(call: Call) -> bool:
    """Say whether an operator combines rows: it works along the first dimension."""
    return 0 in dimensions_of(call)


def dimensions_of(call: Call) -> set[int]:
    """Return the dimensions of its first tensor along which an operator works; none if along all."""
    dims = argument(call.func, "dim", call.args, call.kwargs)
    num_dims = next(tensors_in(call.args)).dim()
    named = dims if isinstance(dims, (list, tuple)) else [] if dims is None else [dims]
    return {each + num_dims if each < 0 else each for each in named}
