"""Finds numbers that a pass computes from what the pass before left, and takes: a mean, updated first.

Python does not say from what a number is computed. So this looks at the numbers that operators of a pass
take: at those that the program has when the pass ends, and at those of an expression that takes others than
in the pass before, or did not run in it. What they are computed from, the program's code shows. Of values
that Python reads from another pass's tensors, it also shows whether the loss is computed from them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache, cached_property, partial
from types import CodeType, FunctionType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from samestep.errors import warn
from samestep.watching.operators.values import checksum_of_value, is_readable
from samestep.watching.passes.beside import MOST_EXPRESSIONS, expression_bit
from samestep.watching.program.code_flow import CodeFlow
from samestep.watching.program.code_values import Value
from samestep.watching.program.program_line import Expression, code_that_we_call
from samestep.watching.program.reach import Named, functions_of, plain_name
from samestep.watching.program.source_code import Computed, SourceCode

__all__ = ["CarriedNumbers", "rounded"]

_MOST_ELEMENTS = 8
"""Of larger tensors, a hash of the values is compared."""

_Kind: TypeAlias = tuple[torch.Size, torch.dtype] | None
"""The shape and dtype of a tensor; None for a number."""

_Values: TypeAlias = Mapping[_Kind, set[float]]


class CarriedNumbers:
    """The numbers that passes take.

    Args:
        search: `in_reach`.
    """

    def __init__(self, search: Callable[..., list[Named]]) -> None:
        self._search = search
        self._before: dict[Expression, dict[_Kind, set[float]]] = {}  # in earlier passes
        self._has_before = False  # whether there was one
        self._harmless: set[Expression] = set()  # those that read nothing that passes carry into the loss
        self.start_step()

    def start_step(self) -> None:
        """Forget what passes have changed in the step before."""
        self._bits: dict[Expression, int] = {}
        self._called: dict[Expression, CodeType | None] = {}  # the functions that run expressions
        self._changed: set[str] = set()  # names of numbers that passes have changed
        self._values: dict[Expression, str] = {}  # that expressions have read first
        self.start_pass()

    def start_pass(self) -> None:
        """Begin a pass, which has taken nothing."""
        self._taken: dict[Expression, dict[_Kind, set[float]]] = {}
        self._computed: dict[Expression, dict[_Kind, set[float]]] = {}
        self._used: dict[str, int] = {}
        self._read: dict[Expression, CodeType | None] = {}  # and the functions that run them

    def note_read(self, value: Any, *, is_left: bool) -> None:
        """Note that an expression reads, in Python, the value of a tensor that is not of this tower's rows.

        It counts if another pass has left it (`is_left`), or it is another value than before in this step.
        """
        expression = Expression.current()
        if expression is None or expression in self._harmless or len(self._values) == MOST_EXPRESSIONS:
            return
        # Not the value itself: whether the program still has this object is what `HeldNumber` asks.
        text = repr(value)
        is_other = self._values.setdefault(expression, text) != text
        if (is_left or is_other) and expression not in self._read:
            self._read[expression] = code_that_we_call()

    def take(self, numbers: Collection[float]) -> int:
        """Return a bit for the expression that runs an operator that takes numbers."""
        return self._take(None, {abs(each) for each in numbers}) if numbers else 0

    def take_values(self, tensor: Tensor) -> int:
        """Return a bit for the expression that reads a tensor that depends on no tower's rows."""
        return self._take((tensor.shape, tensor.dtype), values) if (values := _values_of(tensor)) else 0

    def note_values(self, tensor: Tensor) -> None:
        """Note a tensor that the step has computed of numbers; a later step may find it, as in a cache."""
        if (values := _values_of(tensor)) and (expression := Expression.current()) is not None:
            kinds = self._computed.setdefault(expression, {})
            kinds.setdefault((tensor.shape, tensor.dtype), set()).update(values)

    def _take(self, kind: _Kind, values: set[float]) -> int:
        expression = Expression.current()
        if expression is None or (expression not in self._bits and len(self._bits) == MOST_EXPRESSIONS):
            return 0
        if expression not in self._bits:
            self._called[expression] = code_that_we_call()
        self._taken.setdefault(expression, {}).setdefault(kind, set()).update(values)
        return self._bits.setdefault(expression, expression_bit(len(self._bits)))

    def note_used(self, what: str, bits: int) -> None:
        """Note the bits of what a pass's loss or gradients depend on; `what` is like "its loss depends"."""
        self._used[what] = self._used.get(what, 0) | bits

    def check(
        self,
        known: Iterable[str],
        changed: Iterable[str],
        left: Iterable[float],
        functions: Iterable[Named],
        pass_function: Callable[[Any], Any] | None,
    ) -> bool:
        """Warn of numbers that the pass has used, and computed from what it has found and changed.

        Args:
            known: the names of all numbers.
            changed: the names of those that it has changed.
            left: those that it may leave for the next one.
            functions: what it has run, beside the functions on this thread's stack.
            pass_function: as for `Watch.start_step`.

        Returns:
            whether there was a warning.
        """
        self._changed.update(map(plain_name, changed))
        same = set(map(plain_name, known)) - self._changed
        code = _Code(partial(self._search, functions=functions), pass_function, self._changed, same)
        # Whole numbers are often equal.
        numbers = [number for number in left if not number.is_integer()]
        found = ((what, self._find(numbers, bits, code)) for what, bits in self._used.items())
        what, names = next(((what, names) for what, names in found if names), ("", set[str]()))
        if not names and self._used:
            what = next(iter(self._used))  # the loss; the gradients follow it
            names = set[str]().union(*(code.carried_into_loss(*each) for each in self._read.items()))
            self._harmless.update(self._read)
        for expression, taken in (*self._computed.items(), *self._taken.items()):
            self._before.setdefault(expression, {}).update(taken)
        self._has_before = True
        if names:
            warn(
                f"{what} on {', '.join(sorted(names))}, which each pass computes from what the one before "
                "has left; with another number of workers it would be from a different tower: update it "
                "after average(), or compute it from towers.step or from this tower's rows alone; take what "
                "an iterator gives once a step, as a part of the batch"
            )
        return bool(names)

    def _find(self, left: Collection[float], bits: int, code: _Code) -> set[str]:
        """Return the names of what the expressions of some bits have taken, and that code carries on."""
        used = (each for each in self._taken if bits & self._bits[each])
        found = (each for each in used if self._differs(each) or _has_one_of(left, self._taken[each]))
        return set[str]().union(*(code.carried_in(each, self._called[each]) for each in found))

    def _differs(self, expression: Expression) -> bool:
        """Whether an expression takes other numbers, or tensors of the same shape, than in earlier passes.

        Or whether it has not run in them.
        """
        if expression not in self._before:
            return self._has_before
        before = self._before[expression]
        return any(before.get(kind, values) != values for kind, values in self._taken[expression].items())


class _Code:
    """The code that runs in a pass.

    Args:
        search: `in_reach`, for what it may run.
        pass_function: the pass, if the loop over towers is not the program's.
        changed: the names of numbers that passes have changed.
        same: those of others.
    """

    def __init__(
        self,
        search: Callable[[Callable[[Any], bool]], list[Named]],
        pass_function: Callable[[Any], Any] | None,
        changed: Iterable[str],
        same: set[str],
    ) -> None:
        self._search, self._pass_function = search, pass_function
        self._same = same | ({_first(name) for name in same} - {_first(name) for name in changed})
        self._source = SourceCode()
        self._run: set[CodeType] = set()

    @cached_property
    def _turn(self) -> CodeFlow:
        return CodeFlow.of_running_loop(self._source, self._pass_function)

    def carried_in(self, expression: Expression, called: CodeType | None) -> set[str]:
        """Return the names of what an expression is computed from, and the turn has found and changed.

        Args:
            expression: the expression.
            called: the code of the function that runs it, if the loop is not the program's.
        """
        names = self._names(self._turn.carried_in, expression, called)
        return {name for name in names if name not in self._same and _first(name) not in self._same}

    def carried_into_loss(self, expression: Expression, called: CodeType | None) -> set[str]:
        """Return those of these names, of numbers or not, from which the loss is computed, too."""
        return self._names(self._turn.carried_into_loss, expression, called)

    def _names(
        self,
        names_in: Callable[[list[Computed]], set[str] | None],
        expression: Expression,
        called: CodeType | None,
    ) -> set[str]:
        nodes = self._source.all_at(expression)
        # A library may have called the function, such as a hook.
        others = [code for code in (called, expression.code) if code is not None and code not in self._run]
        while (names := names_in(nodes)) is None and others:
            self._visit(others.pop(0))
        return names or set()

    def _visit(self, code: CodeType) -> None:
        """Visit a function, after the loop; if it is a method, that of the first object that is found."""
        self._run.add(code)
        method_of: Callable[[type], FunctionType | None] = cache(partial(_method_of, code))
        found = [value for _, value in self._search(partial(_runs, code, method_of))]
        methods = ((method_of(type(value)), value) for value in found)
        method, of = next((each for each in methods if each[0] is not None), (None, None))
        if method is not None:
            self._turn.run_function(method, [Value.of(of, "self")])
        elif found:
            self._turn.run_function(found[0], [])


def _first(name: str) -> str:
    """Return the name of an attribute, or a variable, without that of the object."""
    return name.partition(" of ")[0]


def _values_of(tensor: Tensor) -> set[float]:
    """Return the values of a small tensor, a hash of those of another one, and nothing if it is not read."""
    if not (is_readable(tensor) and tensor.is_cpu) or tensor.is_complex():
        return set()
    is_small = tensor.numel() <= _MOST_ELEMENTS
    return set(map(abs, tensor.flatten().tolist()) if is_small else [checksum_of_value(tensor)])


def _has_one_of(numbers: Iterable[float], values: _Values) -> bool:
    return any(_has(number, values) for number in numbers)


def _has(number: float, values: _Values) -> bool:
    kinds = (kind for kind in values if kind is not None and kind[1].is_floating_point)
    copies = (rounded(abs(number), dtype) in values[shape, dtype] for shape, dtype in kinds)
    return abs(number) in values.get(None, ()) or any(copies)


def rounded(number: float, dtype: torch.dtype) -> float:
    """Return a number as a tensor of this dtype holds it."""
    return torch.tensor(number, dtype=dtype).item()


def _runs(code: CodeType, method_of: Callable[[type], FunctionType | None], value: Any) -> bool:
    """Say whether code is that of a function, or of a method of an object."""
    if type(value) is FunctionType:
        return value.__code__ is code
    return method_of(type(value)) is not None


def _method_of(code: CodeType, kind: type) -> FunctionType | None:
    return next((each for each in functions_of(kind) if each.__code__ is code), None)
