"""Watches every operator of a pass: in which module it runs, its inputs and its results."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from samestep.checking.attributes import fingerprint
from samestep.checking.recording import Event
from samestep.checking.surroundings import LOSS_FUNCTION, OPTIMIZER
from samestep.identity import digest, precisions
from samestep.streams import GlobalStreams

__all__ = ["OperatorWatch", "Phase", "num_compiled", "process_settings"]

Phase = Literal["none", "forward", "update", "paused"]

_UNDEFINED = ("empty", "new_empty", "resize_")  # these return uninitialized memory


def _float32_precision() -> str:
    return precisions(torch.backends.mkldnn, torch.backends.cuda, torch.backends.cudnn)


def process_settings() -> dict[str, str]:
    """Return this process's settings that the bits depend on."""
    settings = {
        "threads": torch.get_num_threads(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "cudnn.benchmark": torch.backends.cudnn.benchmark,
        "float32 precision": _float32_precision(),
        "default dtype": torch.get_default_dtype(),
    }
    return {name: str(value) for name, value in settings.items()}


def num_compiled() -> int:
    """Return how many graphs torch.compile has made in this process."""
    if "torch._dynamo.utils" not in sys.modules:
        return 0
    return int(sys.modules["torch._dynamo.utils"].counters["stats"]["unique_graphs"])


class OperatorWatch(TorchDispatchMode):
    """Turns operators into events; `phase` says which part of a step runs.

    Operators that accumulate gradients on parameters are left out: what they do depends on the placement. The
    module of a backward operator is the one that made its autograd node in forward.

    Args:
        device: the states of its generator and the CPU's are recorded.
        write: is called with each event.

    Attributes:
        phase: which part of the step runs; "none" watches only backward, "paused" nothing.
    """

    def __init__(self, device: torch.device, write: Callable[[Event], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._write = write
        self.phase: Phase = "none"
        self._modules: list[str] = []
        self._settings = process_settings()
        self._made_in: dict[int, str] = {}
        self._last_node = -1
        self._names: dict[int, str] = {}
        self._known: dict[int, StorageWeakRef] = {}

    def follow(self, modules: Mapping[nn.Module, str]) -> None:
        """Note from now on, by name, which of these modules runs."""
        for module, name in modules.items():
            module.register_forward_pre_hook(lambda *_, name=name: self._enter_module(name))
            module.register_forward_hook(lambda *_: self._leave_module(), always_call=True)

    def _enter_module(self, name: str) -> None:
        self._notice_settings()
        self._modules.append(name)

    def _leave_module(self) -> None:
        self._notice_settings()
        self._modules.pop()

    def _notice_settings(self) -> None:
        """Write an event if the current module has changed a setting."""
        settings = process_settings()
        if settings != self._settings:
            self._settings = settings
            self._write(Event("setting", "", str(settings), self._module()))

    def start_turn(self, outside: Iterable[tuple[str, Tensor]]) -> None:
        """Forget the last turn; `outside` has the tensors that exist before this turn, with their names."""
        self._modules.clear()
        self._settings = process_settings()
        self._made_in.clear()
        self._last_node = torch._C._autograd._get_sequence_nr() - 1
        self._known.clear()
        self._names = {_storage(tensor): name for name, tensor in outside if _has_storage(tensor)}

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Set the phase for a while."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def _where(self) -> tuple[str, str] | None:
        """Return the current phase and module; None if this is not to be watched."""
        node = torch._C._current_autograd_node()
        if self.phase == "paused":
            return None
        if node is not None and node.name() != "torch::autograd::AccumulateGrad":
            return "backward", self._made_in.get(node._sequence_nr(), LOSS_FUNCTION)
        if node is not None or self.phase == "none":
            return None
        return self.phase, self._module() if self.phase == "forward" else OPTIMIZER

    def _module(self) -> str:
        return self._modules[-1] if self._modules else LOSS_FUNCTION

    def _claim_nodes(self, module: str) -> None:
        """Note that the autograd nodes made since the last operator belong to a module."""
        newest = torch._C._autograd._get_sequence_nr() - 1
        for number in range(self._last_node + 1, newest + 1):
            self._made_in[number] = module
        self._last_node = newest

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator, and write an event for it."""
        kwargs = kwargs or {}
        where = self._where()
        if where is None or not isinstance(func, OpOverload) or func.namespace == "profiler":
            return func(*args, **kwargs)
        written = _written(func, args, kwargs)
        leaves = pytree.tree_leaves((args, kwargs))
        outside = self._outside(leaves, written)
        stream = self._stream(func, kwargs)
        result = func(*args, **kwargs)
        self._claim_nodes(where[1])
        made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        for tensor in made:
            self.note(tensor)
        self._write(
            Event(
                "operator",
                str(func),
                _values(func, result, written),
                where[1],
                where[0],
                ", ".join(_text(leaf) for leaf in leaves if not isinstance(leaf, Tensor)),
                outside,
                stream,
                tuple(self._name(t) for t in written if _storage(t) in self._names),
            )
        )
        return result

    def _outside(self, leaves: list[Any], written: list[Tensor]) -> tuple[tuple[str, str], ...]:
        """Return name and digest of the inputs that no operator of this turn has made or seen."""
        found = []
        for leaf in leaves:
            if not isinstance(leaf, Tensor) or not _has_storage(leaf) or _storage(leaf) in self._known:
                continue
            self.note(leaf)
            if not any(leaf is tensor for tensor in written):  # its old values may be garbage
                found.append((self._name(leaf), fingerprint(leaf)))
        return tuple(found)

    def note(self, tensor: Tensor) -> None:
        """Count a tensor, and all that share its memory, as made or seen in this turn."""
        # Lets the memory be freed, but keeps its `StorageImpl`, so that the address is not reused.
        if _has_storage(tensor):
            self._known.setdefault(_storage(tensor), StorageWeakRef(tensor.untyped_storage()))

    def _name(self, tensor: Tensor) -> str:
        return self._names.get(_storage(tensor), "")

    def _stream(self, func: OpOverload, kwargs: dict[str, Any]) -> str:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return ""
        if kwargs.get("generator") is not None:
            return "own"
        state = GlobalStreams.capture(self._device)
        on_device = {} if state.torch_device is None else {"device": state.torch_device}
        return digest({"cpu": state.torch_cpu, **on_device})[:16]


def _values(func: OpOverload, result: Any, written: list[Tensor]) -> str:
    """Return a digest of what an operator returns and writes, except views and uninitialized memory."""
    if func.is_view or func.overloadpacket.__name__.startswith(_UNDEFINED):
        return ""
    leaves = [*pytree.tree_leaves(result), *written]
    unique = {id(leaf): leaf for leaf in leaves}.values()
    return " ".join(_digest(leaf) if isinstance(leaf, Tensor) else _text(leaf) for leaf in unique)


def _digest(tensor: Tensor) -> str:
    # Recurrent and normalisation layers save workspaces for backward as bytes, with uninitialized gaps.
    return "bytes" if tensor.dtype is torch.uint8 else fingerprint(tensor)


def _written(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that an operator writes to, by its schema."""
    written = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            written += [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    return written


def _has_storage(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if _has_storage(tensor) else 0


def _text(leaf: Any) -> str:
    is_plain = isinstance(leaf, (bool, int, float, complex, str, torch.dtype)) or leaf is None
    return repr(leaf) if is_plain else type(leaf).__name__
