"""What is known of the values of a program's code: what they are computed from, and the objects they are."""

from __future__ import annotations

import inspect
from collections import ChainMap, deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import BuiltinFunctionType, FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn
from torch.utils.data import DataLoader

from samestep.watching.program.reach import cells_of, contents_of, is_proxy, locals_of
from samestep.watching.program.source_code import Function

__all__ = [
    "MISSING",
    "PLAIN",
    "UNKNOWN",
    "LocalFunction",
    "Method",
    "MethodCall",
    "NewObject",
    "Parent",
    "Place",
    "Scope",
    "Value",
    "attribute_of",
    "is_buffer",
    "is_loader",
    "is_method_of",
    "is_object_of",
    "is_of_samestep",
    "is_registry",
    "join",
    "kind_of",
]

UNKNOWN = object()
"""The object of a value of which it is not known."""

MISSING = object()
"""The attribute of an object that has none of this name."""

PLAIN = (int, float, complex, str, bytes, np.generic, Tensor, type(None))
"""Values that hold no others that code could set by name."""

_CODE = (type, ModuleType, BuiltinFunctionType)

_MODULE_PARTS = ("_modules", "_parameters", "_buffers")


class Place(NamedTuple):
    """A variable, an attribute, or an entry of a container."""

    holder: Hashable
    name: str

    @property
    def is_new(self) -> bool:
        """Whether the turn makes what has it: an object, or the variables of a function that it calls."""
        return isinstance(self.holder, NewObject) or (isinstance(self.holder, Scope) and self.holder.is_new)


@dataclass(frozen=True, eq=False)
class NewObject:
    """An object that the code makes, of a class if that is known; `parts` are those of a list."""

    kind: type | None = None
    parts: Sequence[Value] = ()


_CONTAINERS = (list, tuple, dict, set, deque, np.ndarray, NewObject)


class Value(NamedTuple):
    """A value.

    Attributes:
        sources: the places whose values before the turn it is computed from.
        object: what it is, if known.
        key: identifies it as the holder of places; None if it was computed in a way that is not known.
        name: as errors mention it: "mean of self".
    """

    sources: frozenset[Place] = frozenset()
    object: Any = UNKNOWN
    key: Hashable = None
    name: str = ""

    @classmethod
    def before(cls, place: Place, name: str, found: Any = UNKNOWN) -> Value:
        """Return the value that a place has before the turn."""
        found = UNKNOWN if is_proxy(type(found)) else found
        key = place if found is UNKNOWN or isinstance(found, PLAIN) else id(found)
        return cls(frozenset({place}), found, key, name)

    @classmethod
    def of(cls, found: Any, name: str = "") -> Value:
        """Return that of an object, such as a function."""
        return cls(frozenset(), UNKNOWN if is_proxy(type(found)) else found, id(found), name)

    @property
    def is_known(self) -> bool:
        """Whether it is known what object it is."""
        return self.object is not UNKNOWN

    @property
    def is_container(self) -> bool:
        """Whether its data are its entries, as far as is known."""
        return self.key is not None and (not self.is_known or isinstance(self.object, _CONTAINERS))

    @property
    def is_dict(self) -> bool:
        """Whether it is a dict, or may be one that the code makes."""
        if isinstance(self.object, NewObject):
            return self.object.kind in (None, dict)
        return type(self.object) is dict

    @property
    def text(self) -> str:
        """The string that it is, which may name something; "" if it is none that is known."""
        return self.object if isinstance(self.object, str) else ""

    def computed_from(self, *others: frozenset[Place]) -> Value:
        """Return it with other sources as well."""
        sources = self.sources.union(*others)
        return self if sources == self.sources else Value(sources, self.object, self.key, self.name)


def _methods_of(found: object) -> Iterable[object]:
    """Return what a class has by itself; nothing of other objects."""
    return vars(found).values() if isinstance(found, type) else ()


def is_registry(found: object) -> bool:
    """Say whether it is a dict of what has no data, such as functions, by name or class."""
    if type(found) is not dict or not found:
        return False
    return all(isinstance(key, (str, type)) and not _has_data(value) for key, value in found.items())


def _has_data(found: object) -> bool:
    """Say whether something may hold numbers: not code, nor an object that refers to nothing else."""
    if isinstance(found, FunctionType):
        return found.__closure__ is not None
    if isinstance(found, _CODE):
        return False
    is_plain = type(found).__new__ is object.__new__ and hasattr(found, "__dict__")
    return not (is_plain and all(isinstance(each, _CODE) for each in vars(found).values()))


def is_of_samestep(found: type | FunctionType) -> bool:
    """Say whether a class or a function is defined in this package."""
    return str(found.__module__).partition(".")[0] == "samestep"


def join(values: Iterable[Value]) -> Value:
    """Return the value that is one of several."""
    first, *others = found = list(values)
    sources = frozenset[Place]().union(*(each.sources for each in found))
    if all(each.key == first.key and each.object is first.object for each in others):
        return first._replace(sources=sources)
    return Value(sources)


@dataclass(frozen=True, eq=False)
class Scope:
    """The variables that a function's code can name.

    Attributes:
        own: the names of its own variables.
        cells: those that functions share, with the ids of their cells.
        objects: what variables are before the turn: the globals, and those around.
        module: the id of the globals.
        path: the file of the code.
        around: the scope of the function in which it was defined, if the turn defines it.
        is_new: whether the turn makes its own variables, as it calls the function.
    """

    own: frozenset[str] = frozenset()
    cells: Mapping[str, int] = field(default_factory=dict)
    objects: Mapping[str, Any] = field(default_factory=dict)
    module: int = 0
    path: str = ""
    around: Scope | None = None
    is_new: bool = True

    @classmethod
    def of_frame(cls, frame: FrameType) -> Scope:
        """Return the scope of a function, or a module, that is running."""
        code, variables = frame.f_code, dict(locals_of(frame))
        # It is not known which cells are its own, except from functions and classes that share them.
        held = [part for each in variables.values() for part in (each, *_methods_of(each))]
        functions = [each for each in held if isinstance(each, FunctionType)]
        cells = {name: cell for each in functions for name, cell in cells_of(each).items()}
        shared = {
            name: id(cell) for name, cell in cells.items() if name in code.co_cellvars + code.co_freevars
        }
        own = frozenset(code.co_varnames + code.co_cellvars + code.co_freevars)
        is_function = bool(code.co_flags & inspect.CO_OPTIMIZED)
        objects = ChainMap(variables, frame.f_globals)
        module = id(frame.f_globals)
        own = own if is_function else frozenset()
        return cls(own, shared, objects, module, code.co_filename, is_new=False)

    @classmethod
    def of_function(cls, function: FunctionType) -> Scope:
        """Return the scope of a function that is called."""
        code, cells = function.__code__, cells_of(function)
        objects = ChainMap({**contents_of(cells)}, function.__globals__)
        shared = {name: id(cell) for name, cell in cells.items()}
        own, module = frozenset(code.co_varnames + code.co_cellvars), id(function.__globals__)
        return cls(own, shared, objects, module, code.co_filename)

    def place_of(self, name: str) -> Place:
        """Return the place of a variable."""
        if name in self.cells:
            return Place(("cell", self.cells[name]), name)
        if name in self.own:
            return Place(self, name)
        return Place(self.module, name) if self.around is None else self.around.place_of(name)

    def value_before(self, name: str) -> Value:
        """Return the value of a variable before the turn."""
        if self.around is not None and name not in self.own:
            return self.around.value_before(name)
        found = self.objects.get(name, self._builtins.get(name, UNKNOWN))
        value = Value.before(place := self.place_of(name), name, found)
        return value._replace(sources=frozenset()) if place.is_new else value

    @cached_property
    def _builtins(self) -> Mapping[str, Any]:
        found = self.objects.get("__builtins__", {})
        return vars(found) if isinstance(found, ModuleType) else found


@dataclass(frozen=True, eq=False)
class Method:
    """A function of the program, and the object that it is called on."""

    function: FunctionType
    of: Value


class MethodCall(NamedTuple):
    """A call of a method of a container, or of a library's object.

    Attributes:
        holder: the object.
        method: the name of the method.
        arguments: what it gets, by position.
        named: what it gets by name; "" for others.
        sources: what these and the method are computed from.
    """

    holder: Value
    method: str
    arguments: Sequence[Value]
    named: Mapping[str, Value]
    sources: frozenset[Place]

    @property
    def given(self) -> tuple[Value, ...]:
        """All that it gets."""
        return (*self.arguments, *self.named.values())


@dataclass(frozen=True, eq=False)
class Parent:
    """What `super()` returns: an object as one of the classes that follow `kind`."""

    kind: type
    of: Value

    def function(self, name: str) -> Any:
        """Return a function of these classes."""
        kind = self.of.object.kind if isinstance(self.of.object, NewObject) else type(self.of.object)
        classes = () if kind is None else kind.__mro__
        after = classes[classes.index(self.kind) + 1 :] if self.kind in classes else ()
        return next((vars(each)[name] for each in after if name in vars(each)), UNKNOWN)


@dataclass(frozen=True, eq=False)
class LocalFunction:
    """A function that the turn defines."""

    node: Function
    scope: Scope


def kind_of(value: Value) -> type:
    """Return the class that a value is, or of which it is; that of a method's object."""
    match value.object:
        case Method(of=holder):
            return kind_of(holder)
        case NewObject(kind=kind):
            return kind or object
        case LocalFunction():
            return FunctionType
        case type() as kind:
            return kind
    return type(value.object)


def is_object_of(name: str, value: Value) -> bool:
    """Say whether a value is an object of samestep's class of this name."""
    kind, is_object = kind_of(value), not isinstance(value.object, (type, Method))
    return is_object and kind.__name__ == name and is_of_samestep(kind)


def is_loader(value: Value) -> bool:
    """Say whether a value is a loader of torch or of samestep."""
    return kind_of(value) is DataLoader or any(
        is_object_of(name, value) for name in ("TowerLoader", "StreamLoader")
    )


def is_method_of(name: str, of: str, value: Value) -> bool:
    """Say whether a value is this method of an object of samestep's class `of`."""
    found = value.object
    return isinstance(found, Method) and found.function.__name__ == name and is_object_of(of, found.of)


def is_buffer(found: object, name: str) -> bool:
    """Say whether an attribute of an object is a module's buffer."""
    return isinstance(found, nn.Module) and name in found._buffers


def attribute_of(found: Any, name: str) -> Any:
    """Return an attribute of an object, or MISSING; a property as such, because it is code of the program."""
    if isinstance(found, nn.Module):
        parts = [vars(found).get(each, {}) for each in _MODULE_PARTS]
        held = next((each[name] for each in parts if name in each), UNKNOWN)
        if held is not UNKNOWN:
            return held
    kind = found.kind if isinstance(found, NewObject) else found
    if isinstance(found, ModuleType) and found.__name__ == "samestep":
        return getattr(found, name, MISSING)  # its names are imported when they are read
    value = UNKNOWN if kind is None else inspect.getattr_static(kind, name, MISSING)
    is_descriptor = inspect.isdatadescriptor(value) or inspect.ismethoddescriptor(value)
    return UNKNOWN if is_descriptor and not isinstance(value, _DESCRIPTORS) else value


_DESCRIPTORS = (property, staticmethod, classmethod)
