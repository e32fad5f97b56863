"""Notes whether a pass has read, in Python, something that may differ between towers."""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import FrameType, MethodDescriptorType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from samestep.watching.model.own_generators import state_of
from samestep.watching.program.reach import let_go_of_variables

__all__ = ["Reads"]

_VALUES = {"numpy", "tolist", "data_ptr", "_to_dlpack"}  # reads of tensors that no operator shows
_SEED = "initial_seed"  # of torch's generators, which are seeded for each tower
_SETS = {"seed", "setstate"}  # of Python's generator: what follows depends on what the pass knows
_KNOWN = {"torch", "numpy", *sys.stdlib_module_names}
_MOST_METHODS = 4096  # whose kind is cached
_COMPILED = "_empty_strided"  # begins the names of functions that allocate in compiled code
_IMPORTING = "<frozen importlib._bootstrap>"  # the file of functions that import a module
_methods: tuple[Any, ...] = (random.random, np.random.rand)
_PYTHON, _NUMPY = (method.__self__ for method in _methods)


class Reads:
    """Whether this pass has read values of tensors, random numbers, or the tower's index.

    Operators show most reads of tensors. Others, such as `Tensor.tolist`, are seen as calls of C functions,
    by Python's hook for profilers. Functions of other extensions, and compiled code, may read anything,
    except in modules that are imported during the pass, as parts of torch are when they are first used. Once
    the pass has seeded Python's generator, its random numbers are no longer the tower's.

    Attributes:
        found: whether the pass has read any of these, or may have, as far as is known.
        index: whether it has read the tower's index.
    """

    def __init__(self) -> None:
        self.found = self.index = False
        self._has_hooked = False  # in this pass
        self._has_seeded = False  # Python's generator, in this pass
        self._hook = self._note  # the same object each time
        self._numpy: object = None

    def start(self, *, is_known: bool) -> None:
        """Begin a pass, after the global generators were seeded for its tower.

        Nothing is known of what it reads, unless `is_known`, or if a profiler is running.
        """
        self.index = self._has_seeded = False
        self.found = not is_known or sys.getprofile() is not None
        self._has_hooked = not self.found
        if self._has_hooked:
            self._numpy = state_of(_NUMPY)
            self._num_imports = _num_imports(inspect.currentframe())
        self.resume()

    def resume(self) -> None:
        """Note calls again after `stop`, unless the pass has read such a thing already."""
        if self._has_hooked and not self.found and sys.getprofile() is None:
            sys.setprofile(self._hook)

    def stop(self) -> None:
        """Ignore calls from now on."""
        if sys.getprofile() is self._hook:
            sys.setprofile(None)
        if self._has_hooked:
            let_go_of_variables()

    @contextmanager
    def ignored(self) -> Iterator[None]:
        """Ignore the calls in this block, which are not the program's."""
        is_hooked = sys.getprofile() is self._hook
        if is_hooked:
            sys.setprofile(None)
        try:
            yield
        finally:
            if is_hooked:
                sys.setprofile(self._hook)

    def note_index(self) -> None:
        """Note that the program has read the tower's index."""
        self.found = self.index = True

    def is_complete(self) -> bool:
        """Say whether no call was missed, nor a draw from NumPy's global generator, which no call shows."""
        if sys.getprofile() is not self._hook:
            return False
        with self.ignored():
            return state_of(_NUMPY) == self._numpy

    def _note(self, frame: FrameType, event: str, function: Any) -> None:
        if event != "c_call" or self.found:
            return
        if getattr(function, "__self__", None) is _PYTHON:  # after another seed, it draws no tower's numbers
            self._has_seeded |= function.__name__ in _SETS
            self.found = not self._has_seeded
        else:
            self.found = _reads(function) and _num_imports(frame) == self._num_imports


def _num_imports(frame: FrameType | None) -> int:
    """Count the functions of imports on the stack from this frame on."""
    found = 0
    while frame is not None:
        found += frame.f_code.co_filename == _IMPORTING
        frame = frame.f_back
    return found


def _reads(function: Any) -> bool:
    kind: Any = type(getattr(function, "__self__", None))
    return _method_reads(kind, getattr(function, "__name__", ""), getattr(function, "__module__", None))


@lru_cache(_MOST_METHODS)
def _method_reads(kind: type, name: str, module: Any) -> bool:
    if issubclass(kind, torch.Generator) and name == _SEED:
        return True
    if issubclass(kind, Tensor) or name in _VALUES:
        return name in _VALUES
    package = str(module or _origin(kind, name)).partition(".")[0]
    return package not in _KNOWN or name.startswith(_COMPILED)


def _origin(kind: type, method: str) -> str:
    """Return the module of the C class that a method comes from, such as `dict` for that of a subclass."""
    found = (each for each in kind.__mro__ if isinstance(vars(each).get(method), MethodDescriptorType))
    return next(found, kind).__module__
