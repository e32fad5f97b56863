"""Operators as a dispatch mode receives them: what they do with their arguments."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

aten = torch.ops.aten

__all__ = [
    "MEAN",
    "OF_LABELS",
    "SUM",
    "Call",
    "Kind",
    "argument",
    "is_arithmetic",
    "number_of",
    "reduction_of",
    "square_of",
    "tensors_in",
]

MEAN, SUM = 1, 2
"""Torch's numbers for reduction="mean" and "sum"."""

OF_LABELS = {aten.nll_loss_forward.default, aten.nll_loss2d_forward.default}
"""Losses with a term for each label, which is their second argument."""

_DRAWING = "normal_ uniform_ random_ bernoulli_ exponential_ cauchy_ log_normal_ geometric_"
_OVERWRITING = {"copy_", "fill_", "zero_", "set_", "_foreach_copy_", "_foreach_zero_", *_DRAWING.split()}

_ARITHMETIC = {"mul", "div", "add", "sub", "rsub", "pow", "mul_", "div_", "add_", "sub_", "pow_"}

_LOOKUPS = {"index", "index_select", "gather", "take", "embedding"}

_INDEXED: Mapping[str, Callable[[Sequence[Any], Tensor, int], object]] = {
    "index_put_": lambda args, part, number: aten.index_put_(part, args[1], part.new_tensor(number)),
    "index_copy_": lambda args, part, number: part.index_fill_(args[1], args[2], number),
    "index_fill_": lambda args, part, number: part.index_fill_(args[1], args[2], number),
    "scatter_": lambda args, part, number: part.scatter_(args[1], args[2], number),
    "masked_fill_": lambda args, part, number: part.masked_fill_(args[1], number),
    "masked_scatter_": lambda args, part, number: part.masked_fill_(args[1], number),
}
"""For operators that write to some elements: writes a number to the same elements, given their arguments."""


class Kind(NamedTuple):
    """What an operator does with its arguments."""

    name: str  # without that of its overload; "" for operators of higher order
    writes: tuple[tuple[int, str], ...]  # the arguments that it writes to, by position and name
    overwrites: bool  # whether their old values are lost
    is_random: bool
    takes_shapes_only: bool
    takes_parts: bool  # looks up rows, or gives a view of its arguments
    write: Callable[[Sequence[Any], Tensor, int], object] | None  # see `_INDEXED`


_HIGHER_ORDER = Kind(
    "", (), overwrites=False, is_random=False, takes_shapes_only=False, takes_parts=False, write=None
)
"""Of higher-order operators: what happens inside the functions that they call is not followed."""


class Call(NamedTuple):
    """An operator and its arguments."""

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    kind: Kind
    values: tuple[Any, ...]  # of all arguments
    given: Sequence[Tensor]  # the tensors among them
    written: Sequence[Tensor]  # those that it writes to
    overwrites: bool  # whether their old values are lost

    @classmethod
    def of(cls, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """Return the call of any operator."""
        kind = _kind_of(func) if isinstance(func, OpOverload) else _HIGHER_ORDER
        values = (*args, *kwargs.values())
        written = [args[at] if at < len(args) else kwargs.get(name) for at, name in kind.writes]
        adds = kind.overwrites and any(each is True for each in (*args[3:4], kwargs.get("accumulate")))
        tensors = list(tensors_in(values)), list(tensors_in(written))
        return cls(func, args, kwargs, kind, values, *tensors, kind.overwrites and not adds)

    @property
    def name(self) -> str:
        """The operator's name, without that of its overload; "" for those of higher order."""
        return self.kind.name

    def run(self) -> Any:
        """Run the operator."""
        return self.func(*self.args, **self.kwargs)


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among an operator's arguments or results."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def reduction_of(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the reduction of torch's loss functions, as its number; None for other operators."""
    return argument(func, "reduction", args, kwargs)


def square_of(call: Call) -> Tensor | None:
    """Return the tensor whose square an operator computes; None if it does something else."""
    of, other = (*call.args, None, None)[:2]
    is_power = call.name == "pow" and isinstance(other, (int, float)) and other == 2
    is_square = is_power or (call.name == "mul" and other is of)
    return of if isinstance(of, Tensor) and is_square else None


def argument(func: OpOverload, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return an argument by its name, or its default; None if the operator has none of this name."""
    at, default = _positions(func).get(name, (None, None))
    return None if at is None else args[at] if at < len(args) else kwargs.get(name, default)


@functools.cache
def is_arithmetic(func: Any) -> bool:
    """Say whether whole numbers among an operator's arguments are values, and no sizes or dimensions."""
    return getattr(getattr(func, "overloadpacket", None), "__name__", "") in _ARITHMETIC


@functools.cache
def _positions(func: OpOverload) -> Mapping[str, tuple[int, Any]]:
    """Return the position and default of each argument, by its name."""
    return {each.name: (at, each.default_value) for at, each in enumerate(func._schema.arguments)}


def number_of(value: object) -> float | None:
    """Return a positive number, of Python or in a tensor without a gradient; None for anything else."""
    if isinstance(value, Tensor):
        is_number = value.numel() == 1 and not (value.requires_grad or value.is_complex())
        value = value.item() if is_number else None
    return float(value) if isinstance(value, (int, float)) and 0 < value < math.inf else None


@functools.cache
def _kind_of(func: OpOverload) -> Kind:
    arguments = enumerate(func._schema.arguments)
    writes = [
        (at, each) for at, each in arguments if each.alias_info is not None and each.alias_info.is_write
    ]
    name = func.overloadpacket.__name__
    indexed = None if "reduce" in func._overloadname else _INDEXED.get(name)
    return Kind(
        name,
        tuple((at, each.name) for at, each in writes),
        name in _OVERWRITING or indexed is not None or any(each.kwarg_only for _, each in writes),
        torch.Tag.nondeterministic_seeded in func.tags,
        name.endswith("_like") or name.startswith("new_"),
        name in _LOOKUPS or bool(func.is_view),
        indexed,
    )
