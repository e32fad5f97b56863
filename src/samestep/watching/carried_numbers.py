"""Finds numbers that a pass computes from what the pass before left, and takes: a mean, updated first.

Python does not say from what a number is computed. So this looks at the numbers that operators of a pass
take: at those that the program has when the pass ends, and at those of an expression that takes others than
in the pass before, or did not run in it. What they are computed from, the program's code shows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cached_property, partial
from types import CodeType, FunctionType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from samestep.errors import warn
from samestep.watching.beside import MOST_EXPRESSIONS, expression_bit
from samestep.watching.name_uses import carried_sources, plain_name
from samestep.watching.program_line import Expression, ProgramLine
from samestep.watching.reach import Named
from samestep.watching.source_code import SourceCode
from samestep.watching.values import checksum_of_value, is_readable

__all__ = ["CarriedNumbers", "rounded"]

_MOST_ELEMENTS = 8
"""Of larger tensors, a hash of the values is compared."""

_Kind: TypeAlias = tuple[torch.Size, torch.dtype] | None
"""The shape and dtype of a tensor; None for a number."""

_Values: TypeAlias = Mapping[_Kind, set[float]]


class CarriedNumbers:
    """The numbers that passes of a step take.

    Args:
        search: `in_reach`.
    """

    def __init__(self, search: Callable[..., list[Named]]) -> None:
        self._search = search
        self.start_step()

    def start_step(self) -> None:
        """Forget the step before."""
        self._bits: dict[Expression, int] = {}
        self._fresh: set[str | Expression] = set()  # what no pass computes from what it finds
        self._before: dict[Expression, dict[_Kind, set[float]]] = {}  # in earlier passes
        self._has_before = False  # whether there was one
        self._changed: set[str] = set()  # names of numbers that passes have changed
        self.start_pass()

    def start_pass(self) -> None:
        """Begin a pass, which has taken nothing."""
        self._taken: dict[Expression, dict[_Kind, set[float]]] = {}
        self._used: dict[str, int] = {}

    def take(self, numbers: Collection[float]) -> int:
        """Return a bit for the expression that runs an operator that takes numbers."""
        return self._take(None, {abs(each) for each in numbers}) if numbers else 0

    def take_values(self, tensor: Tensor) -> int:
        """Return a bit for the expression that reads a tensor that depends on no tower's rows."""
        if not (is_readable(tensor) and tensor.is_cpu) or tensor.is_complex():
            return 0
        is_small = tensor.numel() <= _MOST_ELEMENTS
        values = map(abs, tensor.flatten().tolist()) if is_small else [checksum_of_value(tensor)]
        return self._take((tensor.shape, tensor.dtype), set(values))

    def _take(self, kind: _Kind, values: set[float]) -> int:
        expression = Expression.current()
        if expression is None or (expression not in self._bits and len(self._bits) == MOST_EXPRESSIONS):
            return 0
        self._taken.setdefault(expression, {}).setdefault(kind, set()).update(values)
        return self._bits.setdefault(expression, expression_bit(len(self._bits)))

    def note_used(self, what: str, bits: int) -> None:
        """Note the bits of what a pass's loss or gradients depend on; `what` is like "its loss depends"."""
        self._used[what] = self._used.get(what, 0) | bits

    def check(
        self,
        known: Iterable[str],
        changed: Iterable[str],
        left: Iterable[tuple[str, float]],
        functions: Iterable[Named],
    ) -> bool:
        """Warn of numbers that the pass has used, and computed from what it has found and changed.

        Args:
            known: the names of all numbers.
            changed: the names of those that it has changed.
            left: those that it may leave for the next one, by name.
            functions: what it has run, beside the functions on this thread's stack.

        Returns:
            whether there was a warning.
        """
        self._changed.update(map(plain_name, changed))
        same = set(map(plain_name, known)) - self._changed
        numbers, code = list(left), _Code(partial(self._search, functions=functions), self._changed, same)
        found = ((what, self._find(numbers, bits, code)) for what, bits in self._used.items())
        what, names = next(((what, names) for what, names in found if names), ("", set[str]()))
        for expression, taken in self._taken.items():
            self._before.setdefault(expression, {}).update(taken)
        self._has_before = True
        if names:
            warn(
                f"{what} on {', '.join(sorted(names))}, which each pass computes from what the one before "
                "has left; with another number of workers it would be from a different tower: update it "
                "after average(), or compute it from towers.step or from this tower's rows alone"
            )
        return bool(names)

    def _find(self, left: Iterable[tuple[str, float]], bits: int, code: _Code) -> set[str]:
        """Return the names of what the expressions of some bits have taken, and that code carries on."""
        used = {each: values for each, values in self._taken.items() if bits & self._bits[each]}
        names = self._variables(left, used.values(), code)
        for expression in filter(self._differs, used.keys() - self._fresh):
            names |= (found := code.carried_in(expression))
            self._fresh |= set() if found else {expression}
        return names

    def _differs(self, expression: Expression) -> bool:
        """Whether an expression takes other numbers, or tensors of the same shape, than in earlier passes.

        Or whether it has not run in them.
        """
        if expression not in self._before:
            return self._has_before
        before = self._before[expression]
        return any(before.get(kind, values) != values for kind, values in self._taken[expression].items())

    def _variables(
        self, left: Iterable[tuple[str, float]], taken: Collection[_Values], code: _Code
    ) -> set[str]:
        """Return the names of numbers that operators have taken, and that code carries on."""
        used = {
            name: number
            for name, number in left
            if "[" not in name and any(_has(number, values) for values in taken)
        }
        self._fresh |= {name for name in used.keys() - self._fresh if not code.carries_on(name, used[name])}
        # Of equal numbers, the operator may have taken any.
        fresh = {abs(used[name]) for name in used.keys() & self._fresh}
        return {name for name, number in used.items() if abs(number) not in fresh}


class _Code:
    """The code that runs in a pass.

    Args:
        search: `in_reach`, for what it may run.
        changed: the names of numbers that passes have changed.
        same: those of others.
    """

    def __init__(
        self,
        search: Callable[[Callable[[Any], bool]], list[Named]],
        changed: Iterable[str],
        same: set[str],
    ) -> None:
        self._search = search
        self._changed = {part for name in changed for part in name.split(" of ")} - {"self"}
        self._same = same

    @cached_property
    def _source(self) -> SourceCode:
        return SourceCode(list(ProgramLine.all_running()))

    def carries_on(self, name: str, number: float) -> bool:
        """Say whether it computes a number from one that it has found and changed."""
        name = plain_name(name)
        sources = self._sources_of({name})
        if " of " in name:
            sources |= self._sources_of({f"{name.partition(' of ')[0]} of self"}, partial(_holds, number))
        return any(map(self._has_changed, sources))

    def carried_in(self, expression: Expression) -> set[str]:
        """Return what an expression reads, or what that is computed from and has changed, if carried on."""
        read = self._source.names_in(expression) - {"self"}
        sources = self._sources_of(read, partial(_has_method, expression.code), expression.code) - {"self"}
        return {each for each in sources - self._same if each in read or self._has_changed(each)}

    def _sources_of(
        self, names: Collection[str], is_own: Callable[[Any], bool] | None = None, *functions: CodeType
    ) -> set[str]:
        """Return what is carried on of `names` and their sources, also by `functions` and what `is_own`."""
        variables = {name.rpartition(" of ")[2] for name in names}
        sharing = [found.__code__ for _, found in self._search(partial(_shares, variables))]
        own = [] if is_own is None else self._search(is_own)
        methods = [method for kind in {type(each) for _, each in own} for method in _methods_of(kind)]
        return carried_sources(names, self._source.of_passes([*sharing, *methods, *functions]))

    def _has_changed(self, name: str) -> bool:
        return name.partition(" of ")[0] in self._changed


def _has(number: float, values: _Values) -> bool:
    """Say whether values include a number; whole ones, which are often equal, do not count."""
    if number.is_integer():
        return False
    kinds = (kind for kind in values if kind is not None and kind[1].is_floating_point)
    copies = (rounded(abs(number), dtype) in values[shape, dtype] for shape, dtype in kinds)
    return abs(number) in values.get(None, ()) or any(copies)


def rounded(number: float, dtype: torch.dtype) -> float:
    """Return a number as a tensor of this dtype holds it."""
    return torch.tensor(number, dtype=dtype).item()


def _shares(variables: Collection[str], value: Any) -> bool:
    """Say whether this is a function that uses variables of another one, or globals."""
    if type(value) is not FunctionType:
        return False
    return not {*value.__code__.co_freevars, *value.__code__.co_names}.isdisjoint(variables)


def _holds(number: float, value: Any) -> bool:
    """Say whether a number is an attribute of an object, unless reading that could load or call something."""
    is_usual: bool = type(value).__getattribute__ is vars(object)["__getattribute__"]
    return is_usual and any(each is number for each in vars(value).values())


def _has_method(code: CodeType, value: Any) -> bool:
    """Say whether code is that of a method of an object."""
    return any(method is code for method in _methods_of(type(value)))


def _methods_of(kind: type) -> list[CodeType]:
    methods = {name: each for base in reversed(kind.__mro__) for name, each in vars(base).items()}
    return [each.__code__ for each in methods.values() if isinstance(each, FunctionType)]
