"""Finds nets beside the model that passes run, and checks that these do not change their buffers."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_pre_hooks

from samestep.errors import BufferPolicyError
from samestep.identity import checksum_of, is_compiled
from samestep.watching.model.modes import Modes
from samestep.watching.model.own_numbers import OwnNumbers
from samestep.watching.program.reach import Named

__all__ = ["OutsideNets"]

_keys = itertools.count(-1, -1)  # torch's own keys are not negative
_SMALL_BYTES = 2**16
_MOST_NAMES = 4


class _Seen(NamedTuple):
    name: str
    tensor: Tensor
    version: int
    crc: int


class OutsideNets:
    """Finds nets outside the model that passes run, and checks that their buffers do not change.

    A global forward hook finds the nets, in some steps; from then on every step checks them.

    Args:
        model: its modules are not outside.
        modes: is notified of the model's layers that run.
        numbers: is notified of other modules that run.

    Attributes:
        is_compiled: whether anything is that passes can reach.
    """

    def __init__(self, model: nn.Module, modes: Modes, numbers: OwnNumbers) -> None:
        self._modes, self._numbers = modes, numbers
        modules = list(model.modules())
        self._inside = weakref.WeakSet(modules)
        # A compiled module runs no hooks of its submodules, warns about this one, and would be compiled
        # again for the steps that have it.
        self.is_compiled = any(map(is_compiled, modules))
        self._seen: weakref.WeakKeyDictionary[nn.Module, list[_Seen]] = weakref.WeakKeyDictionary()
        self._num_passes = 0
        # Nets that have run in a single pass so far, in this step.
        self._new: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        # Always the same key: torch.compile compiles again for each new one, and from a limit on runs
        # different code.
        self._key = next(_keys)

    def start_step(self) -> None:
        """Note the buffers of all known nets."""
        if self._seen:
            for module in list(self._seen):
                self._seen[module] = _buffers_of(module)
            self._new.clear()

    def note_compiled(self, in_reach: Iterable[Named]) -> None:
        """Install no hook from now on if anything that passes can reach is compiled."""
        self.is_compiled = self.is_compiled or any(is_compiled(value) for _, value in in_reach)

    def start_looking(self) -> None:
        """Note every module that runs, until `stop_looking`."""
        self._num_passes += 1
        if not self.is_compiled:
            _global_forward_pre_hooks[self._key] = self._note

    def stop_looking(self) -> None:
        """Remove the hook."""
        _global_forward_pre_hooks.pop(self._key, None)

    def _note(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():  # must not be traced into the graph
            return
        if module in self._inside:
            self._modes.note(module)
            return
        self._numbers.note(module)
        if module._buffers and module not in self._seen:
            self._seen[module] = _buffers_of(module)
            self._new[module] = self._num_passes
        elif self._new.get(module, self._num_passes) != self._num_passes:
            del self._new[module]

    def check(self, who: str) -> None:
        """Raise if `who` changed a buffer of a net outside the model.

        A net that has run in only one pass is exempt: the pass may have made it, such as a copy of the model
        for an inner loop. A net that persists is reported in the pass, or the step, that runs it again.

        Raises:
            BufferPolicyError: names the buffers and their module.
        """
        for module, before in self._seen.items() if self._seen else ():
            if module in self._new:
                continue
            changed = [
                seen.name
                for seen in before
                if (now := module._buffers.get(seen.name)) is not seen.tensor
                or _version(now) != seen.version
                or _crc(now) != seen.crc
            ]
            if changed:
                raise BufferPolicyError(
                    f"{who} changed {', '.join(changed[:_MOST_NAMES])} of a {type(module).__name__} that is "
                    "not part of the model, so workers would end with different values: call eval() on that "
                    "net for the pass, update it after average(), or pass it as Towers(model, ..., "
                    "also=net), which shares its buffers"
                )


def _buffers_of(module: nn.Module) -> list[_Seen]:
    return [
        _Seen(name, tensor, _version(tensor), _crc(tensor))
        for name, tensor in module._buffers.items()
        if tensor is not None
    ]


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _crc(tensor: Tensor) -> int:
    """Hash a small tensor in host memory, because batch norm's kernels write without a new version."""
    is_in_memory = tensor.device.type == "cpu" and tensor.layout == torch.strided
    small = is_in_memory and tensor.nbytes <= _SMALL_BYTES
    return checksum_of(tensor.detach().contiguous()) if small else 0
