"""Finds what flows from one tower's pass into another's loss: a hidden state, a running mean, a memory."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from samestep.errors import UsageError

__all__ = ["FlowWatch", "not_followed"]

_DRAWING = "normal_ uniform_ random_ bernoulli_ exponential_ cauchy_ log_normal_ geometric_"
_OVERWRITING = {"copy_", "fill_", "zero_", "set_", "_foreach_copy_", "_foreach_zero_", *_DRAWING.split()}
_MOST_REGIONS = 64


_is_off = ContextVar("_is_off", default=False)


@contextmanager
def not_followed() -> Iterator[None]:
    """Follow no values in the passes of this thread, because somebody looks more closely."""
    token = _is_off.set(True)
    try:
        yield
    finally:
        _is_off.reset(token)


class _Kind(NamedTuple):
    """What an operator does with its arguments."""

    writes: tuple[tuple[int, str], ...]  # to which of them, by position and name
    overwrites: bool  # whether nothing stays of what was there
    is_random: bool
    takes_shapes_only: bool


class _Region(NamedTuple):
    """Bytes of a storage, and where their values come from."""

    start: int
    stop: int
    towers: int  # a bit for each whose rows or random numbers went in
    how: str  # what first brought two towers together, "" if nothing has


class FlowWatch(TorchDispatchMode):
    """Follows the values of towers' rows, and of random numbers, through the operators of their passes.

    A worker's towers share what a program keeps from one pass to the next, towers of other workers do not.
    What is kept and not used in a loss, such as a sum of losses to be printed, does no harm; nor does what
    depends on no rows, such as a mask made of a size.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._regions: dict[int, tuple[StorageWeakRef, list[_Region]]] = {}
        self._parameters: dict[int, StorageWeakRef] = {}  # those of parameters beside the model
        self._tower = -1
        self._follows = False  # whether this pass
        self._is_paused = True
        self._updated = ""
        self._shared: set[int] = set()

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Say that what is compiled stays compiled."""
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Say that nothing within what is compiled is looked at."""
        return True

    def start_step(self) -> None:
        """Forget the step before."""
        self.stop()
        self._regions.clear()
        self._updated = ""

    def start_pass(self, tower: int, rows: Iterable[Tensor], shared: Iterable[Tensor]) -> None:
        """Follow a tower's pass, until `stop`; not within another mode, which may not expect one.

        Args:
            tower: its index.
            rows: the tensors that hold its rows.
            shared: the model's own, which the watch compares, or samestep puts back.
        """
        self._tower = tower
        self._parameters.clear()
        self._shared = set(map(_storage, shared))
        for storage in self._shared:
            self._regions.pop(storage, None)
        for tensor in rows:
            self._write(tensor, 1 << tower, "", replaces=True)
        self._follows = _get_current_dispatch_mode() in (None, self) and not _is_off.get()
        self.resume()

    def pause(self) -> None:
        """Follow nothing, until `resume`."""
        self._is_paused = True
        if _get_current_dispatch_mode() is self:  # and not one that the pass has entered since
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def resume(self) -> None:
        """Go on after `pause`."""
        if self._follows:
            self._is_paused = False
            if _get_current_dispatch_mode() is None:
                self.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """End a pass."""
        self.pause()
        self._follows = False

    def check(self, who: str, loss: Tensor) -> None:
        """Raise if the pass that is followed now used what another tower's has left.

        Raises:
            UsageError: says which towers, and which tensor.
        """
        if not self._follows:
            return
        towers, how = self._read(loss)
        if others := _indices(towers & ~(1 << self._tower)):
            which = ", ".join(map(str, others))
            raise UsageError(
                f"{who}: its loss depends on the rows, or random numbers, of tower {which}, by {how}: a "
                "hidden state, a running mean, a memory of samples, a mask or the like, which on another "
                "number of workers would be of other towers; begin anew in each pass, update it after "
                "average(), or keep it in a buffer with a policy, Towers(..., buffers={pattern: policy})"
            )

    def end_step(self, who: str) -> None:
        """Raise if two passes of the step have updated the same weights beside the model.

        Raises:
            UsageError: gives its shape.
        """
        self.stop()
        if self._updated:
            raise UsageError(
                f"{who} updated {self._updated}, as a pass before it did, so that its value depends on how "
                "many towers share a worker: update averages of weights, and other nets, after average()"
            )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator, and note where what it made comes from."""
        result = func(*args, **(kwargs or {}))
        if not self._is_paused and isinstance(func, OpOverload):
            self._follow(func, args, kwargs or {}, result)
        return result

    def _follow(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        kind = _kind_of(func)
        values = [args[at] if at < len(args) else kwargs.get(name) for at, name in kind.writes]
        written = list(_tensors(values))
        given = list(_tensors((*args, *kwargs.values())))
        self._note_parameters(given)
        taken: list[Tensor] = [] if kind.takes_shapes_only else given
        if kind.overwrites:
            taken = [tensor for tensor in taken if not any(tensor is each for each in written)]
        towers, how = self._join(func, taken, (1 << self._tower) * kind.is_random)
        is_average = not kind.overwrites and any(_storage(tensor) in self._shared for tensor in taken)
        for tensor in written:
            if is_average or _storage(tensor) in self._parameters:
                self._note_update(tensor, towers)
                self._write(tensor, towers | 1 << self._tower, how, replaces=kind.overwrites)
            else:
                self._write(tensor, towers, how, replaces=kind.overwrites)
        before = set(map(_storage, given))
        for tensor in _tensors((result,)):
            if _storage(tensor) not in before:
                self._write(tensor, towers, how, replaces=True)

    def _join(self, func: OpOverload, taken: Iterable[Tensor], towers: int) -> tuple[int, str]:
        """Return whose values meet in an operator, and how they did first."""
        how = ""
        for tensor in taken:
            more, before = self._read(tensor)
            towers |= more
            if not how and more & ~(1 << self._tower):
                how = before or f"a tensor of shape {list(tensor.shape)} that {func.overloadpacket} took"
        return towers, how

    def _note_parameters(self, given: Iterable[Tensor]) -> None:
        for tensor in given:
            if isinstance(tensor, nn.Parameter):
                storage = _storage(tensor)
                if storage and storage not in self._shared:
                    self._parameters.setdefault(storage, StorageWeakRef(tensor.untyped_storage()))

    def _note_update(self, tensor: Tensor, towers: int) -> None:
        """Note that a pass has written weights beside the model, which go on from another pass's."""
        if towers & ~(1 << self._tower):
            self._updated = f"a tensor of shape {list(tensor.shape)} that is not the model's"

    def _read(self, tensor: Tensor) -> tuple[int, str]:
        _, regions = self._regions.get(_storage(tensor), (None, ()))
        if not regions:
            return 0, ""
        start, stop = _span(tensor)
        towers, how = 0, ""
        for region in regions:
            if region.start < stop and start < region.stop:
                towers |= region.towers
                how = how or region.how
        return towers, how

    def _write(self, tensor: Tensor, towers: int, how: str, *, replaces: bool) -> None:
        storage = _storage(tensor)
        if not storage or not (towers or storage in self._regions):
            return
        start, stop = _span(tensor)
        reference, regions = self._regions.get(storage) or (StorageWeakRef(tensor.untyped_storage()), [])
        if replaces and tensor.is_contiguous():
            pieces = [(r, r.start, min(r.stop, start)) for r in regions]
            pieces += [(r, max(r.start, stop), r.stop) for r in regions]
            regions = [r._replace(start=low, stop=high) for r, low, high in pieces if low < high]
        if len(regions) > _MOST_REGIONS:
            start, stop = min(start, *(r.start for r in regions)), max(stop, *(r.stop for r in regions))
            towers, how = functools.reduce(operator.or_, (r.towers for r in regions), towers), how
            regions = []
        # A weak reference keeps the address from being used again, and lets the memory go.
        self._regions[storage] = reference, [*regions, _Region(start, stop, towers, how)]


@functools.cache
def _kind_of(func: OpOverload) -> _Kind:
    arguments = enumerate(func._schema.arguments)
    writes = [
        (at, each) for at, each in arguments if each.alias_info is not None and each.alias_info.is_write
    ]
    name = func.overloadpacket.__name__
    return _Kind(
        tuple((at, each.name) for at, each in writes),
        name in _OVERWRITING or any(each.kwarg_only for _, each in writes),
        torch.Tag.nondeterministic_seeded in func.tags,
        name.endswith("_like") or name.startswith("new_"),
    )


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among an operator's arguments, or results."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _storage(tensor: Tensor) -> int:
    """Return the address of what holds a tensor's memory; 0 for one that has none of its own."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse tensors, some subclasses
        return 0


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the bytes of its storage that a tensor lies in."""
    if not tensor.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset()) * tensor.itemsize
    return start, start + (last + 1) * tensor.itemsize


def _indices(bits: int) -> list[int]:
    return [index for index in range(bits.bit_length()) if bits >> index & 1]
