"""What functions can reach: their variables, globals and closures, and what these contain."""

from __future__ import annotations

import inspect
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from types import CellType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

__all__ = [
    "Named",
    "cells_of",
    "contents_of",
    "functions_of",
    "in_reach",
    "is_of_watch",
    "is_proxy",
    "let_go_of_variables",
    "locals_of",
    "plain_name",
]

Named = tuple[str, Any]
"""An object's name, and the object."""

_FindParts = Callable[[str, Any], Iterator[Named]]

_MOST_FRAMES = 10
_MOST_VALUES = 200
_MOST_PARTS = 64
_MOST_STEPS = 3
_MANY = 8
_CONTAINERS = (list, tuple, deque, dict)
_LIBRARIES = {"samestep", "torch", "numpy", "builtins", "collections", "weakref", "threading"}
_EMPTY = CellType()
_WATCHING = ".".join(__name__.split(".")[:2])


def in_reach(is_wanted: Callable[[Any], bool], functions: Iterable[Named] = ()) -> list[Named]:
    """Return the wanted objects that `functions`, or the functions on this thread's stack, can reach.

    The search starts at what they refer to by name and takes up to three steps, each to an object's
    attributes, a container's values, or what a function refers to. It ends after 200 objects; classes and
    what may be an example of a dataset, nested or one of many, come last. It changes nothing, and skips
    whatever raises an error. A wanted object is returned once for each name.
    """
    values: deque[tuple[str, Any, int]] = deque()
    last: deque[tuple[str, Any, int]] = deque()

    def add(named: Iterable[Named], steps: int, holder: Any = None) -> None:
        of_data = type(holder) in _CONTAINERS
        is_one_of_many = of_data and len(holder) > _MANY
        for name, part in named:
            kind = type(part)
            is_data = is_one_of_many or (of_data and kind in _CONTAINERS)
            (last if is_data or issubclass(kind, type) else values).append((name, part, steps))

    add(functions, 0)
    add(_of_this_stack(), 0)
    found: list[Named] = []
    seen, wanted = set[int](), set[int]()
    finders = _PartFinders()
    while (values or last) and len(seen) < _MOST_VALUES:
        name, value, steps = (values or last).popleft()
        if id(value) in wanted:
            found.append((name, value))
        if id(value) in seen:
            continue
        try:
            if is_wanted(value):
                seen.add(id(value))
                wanted.add(id(value))
                found.append((name, value))
            elif steps < _MOST_STEPS and (find_parts := finders[type(value)]):
                seen.add(id(value))
                add(islice(find_parts(name, value), _MOST_PARTS), steps + 1, value)
        except Exception:  # a user's object may be anything
            continue
    return found


def _of_this_stack() -> list[Named]:
    """Return what the functions on this thread's stack refer to by name, except those of this package."""
    found: list[Named] = []
    frame: FrameType | None = sys._getframe(1)
    num_frames = 0
    while frame is not None and num_frames < _MOST_FRAMES:
        if not is_of_watch(frame):
            found += [*locals_of(frame), *_globals_of(frame.f_code, frame.f_globals)]
            num_frames += 1
        frame = frame.f_back
    del frame  # a frame in its own variables is a reference cycle
    return found


def is_of_watch(frame: FrameType) -> bool:
    """Say whether a frame runs code of this package."""
    return str(frame.f_globals.get("__name__")).startswith(_WATCHING)


def let_go_of_variables() -> None:
    """Empty the dicts of variables that a hook for profilers has left in this thread's frames."""
    frame = inspect.currentframe()
    while frame is not None:
        locals_of(frame)
        frame = frame.f_back


def cells_of(function: FunctionType) -> Mapping[str, CellType]:
    """Return the cells of the variables that a function shares with those around it, by name."""
    return dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))


def contents_of(cells: Mapping[str, CellType]) -> Mapping[str, Any]:
    """Return the values of variables in cells, without those that have none yet."""
    return {name: cell.cell_contents for name, cell in cells.items() if cell != _EMPTY}


def functions_of(kind: type) -> list[FunctionType]:
    """Return the functions of a class and its bases, which are the methods of its objects."""
    values = (value for each in kind.__mro__ for value in vars(each).values())
    return [value for value in values if isinstance(value, FunctionType)]


def plain_name(name: str) -> str:
    """Return the name of a variable or attribute, or that of the list or array in which an entry is.

    >>> [plain_name(each) for each in ("mean", "mean of self", "means[0] of self", "settings.mean")]
    ['mean', 'mean of self', 'means of self', 'mean of settings']
    """
    return re.sub(r"(\w+)\.(\w+)", r"\2 of \1", re.sub(r"\[[^\]]*\]", "", name))


class _PartFinders(dict[type, _FindParts | None]):
    """The function that yields the parts of a type's objects, found once for each type in one search.

    None if they have no parts.
    """

    def __missing__(self, kind: type) -> _FindParts | None:
        has_attributes = kind.__dictoffset__ != 0 and not issubclass(kind, (ModuleType, Tensor))
        of_others = _parts_of_class if issubclass(kind, type) else _parts_of_object
        self[kind] = found = _PARTS.get(kind, of_others if has_attributes and not is_proxy(kind) else None)
        return found


def is_proxy(kind: type) -> bool:
    """Say whether objects may be proxies, where reading an attribute could load or call something."""
    if type(kind.__getattribute__) is FunctionType:
        return True
    return any("__class__" in vars(each) for each in kind.__mro__ if each is not object)


def _is_of_library(module: object) -> bool:
    """Say whether a module belongs to a library that holds no objects of the user."""
    return str(module).partition(".")[0] in _LIBRARIES


def locals_of(frame: FrameType) -> list[Named]:
    """Return a frame's variables.

    Before Python 3.13, a function's frame keeps the dict that `f_locals` returns, and with it what the
    variables refer to now, such as a pass's outputs, until they are read again: so the dict is emptied.
    """
    variables = frame.f_locals
    found = [*variables.items()]
    is_copy = sys.version_info < (3, 13) and bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED)
    if is_copy and sys.getrefcount(variables) == _REFERENCES:  # else the program has it, from `locals()`
        variables.clear()
    return found


_REFERENCES = 3  # of the frame, of a variable, and of an argument


def _globals_of(code: CodeType, namespace: Mapping[str, Any]) -> Iterator[Named]:
    """Yield the globals that a user's function names, and for modules the attributes that it names."""
    if _is_of_library(namespace.get("__name__")):
        return
    for name in code.co_names:
        value = namespace.get(name)
        if type(value) is ModuleType:
            inner = vars(value)
            yield from ((f"{name}.{each}", inner[each]) for each in code.co_names if each in inner)
        else:
            yield name, value


def _parts_of_function(name: str, value: FunctionType) -> Iterator[Named]:
    yield from contents_of(cells_of(value)).items()
    yield from ((name, each) for each in value.__defaults__ or ())
    yield from _globals_of(value.__code__, value.__globals__)


def _parts_of_partial(name: str, value: partial[Any]) -> Iterator[Named]:
    yield from ((name, each) for each in (value.func, *value.args))
    yield from value.keywords.items()


def _parts_of_dict(name: str, value: Mapping[Any, Any]) -> Iterator[Named]:
    for key, each in value.items():
        yield f"{key} of {name}" if type(key) is str else _indexed(name, key), each


def _parts_of_sequence(name: str, value: Sequence[Any]) -> Iterator[Named]:
    yield from ((_indexed(name, index), each) for index, each in enumerate(value))


def _indexed(name: str, key: object) -> str:
    """Return the name of an entry: "queue[0] of self" for the first one of "queue of self"."""
    first, of, rest = name.partition(" of ")
    return f"{first}[{key if type(key) is int else '...'}]{of}{rest}"


def _parts_of_object(name: str, value: Any) -> Iterator[Named]:
    """Yield what calling an object runs, and its attributes; of a library's object only the user's."""
    kind = type(value)
    yield name, kind.forward if issubclass(kind, nn.Module) else kind.__call__
    from_library = _is_of_library(kind.__module__)
    for attribute, each in vars(value).items():
        is_users = type(each) in _FUNCTIONS or issubclass(type(each), _USERS)
        if not from_library or is_users or not _is_of_library(type(each).__module__):
            yield f"{attribute} of {name}", each


def _parts_of_class(name: str, value: type) -> Iterator[Named]:
    """Yield the values that a user's class keeps, such as settings or state; not its methods."""
    if not _is_of_library(value.__module__):
        for attribute, each in vars(value).items():
            if not (attribute.startswith("__") or type(each) in _DESCRIPTORS):
                yield f"{attribute} of {name}", each


_FUNCTIONS = {FunctionType, MethodType}
_DESCRIPTORS = {FunctionType, classmethod, staticmethod, property}
_USERS = (Optimizer, LRScheduler)  # as a `Step` holds them
_PARTS: Mapping[type, _FindParts] = {
    FunctionType: _parts_of_function,
    MethodType: lambda name, value: iter([(name, value.__func__), (name, value.__self__)]),
    partial: _parts_of_partial,
    list: _parts_of_sequence,
    tuple: _parts_of_sequence,
    deque: _parts_of_sequence,
    dict: _parts_of_dict,
}
"""For each type that refers to other values: a function that yields them."""
