"""Finds writes to what a pass must not change: parameters, and buffers without a policy."""

from __future__ import annotations

import operator
import zlib
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from torch import Tensor, nn

from samestep.buffers.named_tensors import (
    NamedBuffer,
    NamedParameter,
    NamedTensor,
    find_named_parameters,
    reader,
)
from samestep.buffers.policies import Policy
from samestep.buffers.statistics import is_statistic
from samestep.errors import BufferPolicyError, Error, UsageError
from samestep.watching.model.weight_hash import Hashes, WeightHash

__all__ = ["WatchedTensors"]

_MOST_NAMES = 4
_TO_START = (
    "; if a layer sets its first values from the rows that it sees first, run the model once before making "
    "Towers"
)

_version = operator.attrgetter("_version")
_is_trained = operator.attrgetter("requires_grad")


class _Ended(NamedTuple):
    """The hashes of a step, from before its passes and after them."""

    step: int
    before: Hashes
    after: Hashes


class WatchedTensors:
    """Compares a model's tensors before and after passes: version counters, data pointers, and hashes.

    Version counters show ordinary writes, and data pointers new memory. Writes through `.data`, and those of
    batch norm's kernels, show in a hash of the bytes of a slice of the model.

    Attributes:
        pointers: addresses of parameters, and of buffers that no pass may change, when `note` was called.
        num_entries: how many parameters, buffers and modules there were then.
        late_hash: on a GPU, a 32-bit hash of the previous step's hashes. It is 0 if unknown: on a worker that
            has joined, or that has ended the step before and takes it again.
    """

    pointers: list[int]
    num_entries: int
    late_hash: int

    def __init__(self) -> None:
        self._step = 0
        self._before = Hashes()
        self._ended: _Ended | None = None  # on a GPU: the last step that has ended, to be compared later

    def look_at(self, model: nn.Module, fixed: Sequence[NamedBuffer], shared: Sequence[NamedBuffer]) -> None:
        """Compare the tensors that the model has now; see `Watch.look_at_model`."""
        parameters = find_named_parameters(model)
        self._places = [*parameters, *fixed]
        self._current = reader(self._places)
        self._registries = [r for m in model.modules() for r in (m._parameters, m._buffers, m._modules)]
        self._entries = list(map(set, self._registries))
        self._parts = [m._modules for m in model.modules() if m._modules]
        self._tensors: list[Tensor | None] = []
        self._all = [*parameters, *sorted((*fixed, *shared), key=lambda buffer: buffer.name)]
        self._hash = WeightHash(self._places, shared, fixed)
        self._before = Hashes()
        self.note()

    def start_step(self, step: int) -> None:
        """Hash this step's slice, after `note` and before the first pass."""
        self._step = step
        self._trained = list(map(_is_trained, self._present))
        self._layers = self._current_layers()
        self._before, self.late_hash = self._hash.of(step), 0
        if self._ended is not None and self._ended.step == step - 1:
            self.late_hash = zlib.crc32(repr(self._ended.before.by_name()).encode())

    def note(self, *, rehash: bool = False) -> None:
        """Note the current state: changes until now were the same on all workers."""
        if rehash:
            self._before = self._hash.of(self._step)
        now = self._current()
        if len(now) != len(self._tensors) or any(map(operator.is_not, now, self._tensors)):
            self._tensors = now
            self._present = [each for each in now if each is not None and not each.is_inference()]
        self._versions = list(map(_version, self._present))
        self.pointers = list(map(Tensor.data_ptr, self._present))
        self.num_entries = sum(map(len, self._registries))

    @property
    def hashes(self) -> Mapping[str, int]:
        """Hashes from before the passes, which must be the same on all workers; none yet on a GPU."""
        return self._before.by_name() if self._before.is_ready else {}

    def hashes_to_explain(self) -> Mapping[str, int]:
        """Return what shows which tensor differs; on a GPU, whole tensors, as the difference may be older."""
        if self._before.is_ready:
            return self._before.by_name()
        return {**self._before.by_name(), **self._hash.by_name(fixed_only=True)}

    def hashes_of_all(self) -> dict[str, int]:
        """Return a hash of the current value of each parameter and buffer, the same in any mode of layers."""
        return WeightHash(self._all, (), ()).by_name()

    def have_changed(self) -> bool:
        """Whether a watched tensor has changed since `note`, or this step's slice since it was hashed."""
        return bool(
            self._changes() or _differing_names(self._before, self._hash.of(self._step, fixed_only=True))
        )

    def check(self, who: str) -> None:
        """Raise if `who` wrote to a watched tensor or replaced it since `note`."""
        if has_changed := self._changes():
            self._fail(who, self._step, has_changed)

    def _changes(self) -> list[bool]:
        """Say for each place whether its tensor was written to or replaced since `note`; [] if none was."""
        now = self._current()
        written = self._differing(_version, self._versions) | self._differing(Tensor.data_ptr, self.pointers)
        if not written and not any(map(operator.is_not, now, self._tensors)):
            return []
        pairs = zip(now, self._tensors, strict=True)
        return [new is not old or id(old) in written for new, old in pairs]

    def _differing(self, read: Callable[[Tensor], int], before: list[int]) -> set[int]:
        now = list(map(read, self._present))
        if now == before:
            return set()
        return {id(t) for t, new, old in zip(self._present, now, before, strict=True) if new != old}

    def end_step(self, who: str) -> None:
        """After the last `check` of a step, check also entries, layers, what is trained, and hashes."""
        if sum(map(len, self._registries)) != self.num_entries:
            raise self._explain_entries(who)
        self._check_layers(who)
        self._check_trained(who)
        ended = _Ended(self._step, self._before, self._hash.of(self._step, fixed_only=True))
        if ended.after.is_ready:
            self._compare(ended)
        else:  # on a GPU, compare the last step that has ended, without waiting
            last, self._ended = self._ended, ended
            if last is not None:
                self._compare(last)

    def _check_layers(self, who: str) -> None:
        pairs = zip(self._layers, self._current_layers(), strict=True)
        if replaced := [type(old).__name__ for old, new in pairs if new is not old]:
            raise UsageError(
                f"{who} replaced layers of the model ({', '.join(replaced)}), so nobody would average the "
                "gradients of the new ones: replace layers after average()"
            )

    def _check_trained(self, who: str) -> None:
        ids = self._differing(_is_trained, self._trained)
        pairs = zip(self._places, self._tensors, strict=True) if ids else ()
        # Nobody trains a buffer.
        if changed := [place for place, t in pairs if id(t) in ids and isinstance(t, nn.Parameter)]:
            raise UsageError(
                f"{who} changed requires_grad of {_names(changed)}: all towers of a step must train the same "
                "parameters; freeze and unfreeze layers after average(), or put it back before the pass ends"
            )

    def _current_layers(self) -> list[nn.Module | None]:
        return list(chain.from_iterable(each.values() for each in self._parts))

    def _compare(self, ended: _Ended) -> None:
        changed = _differing_names(ended.before, ended.after)
        if changed:
            has_changed = [place.name in changed for place in self._places]
            self._fail(f"step {ended.step}: a pass", ended.step, has_changed)

    def _fail(self, who: str, step: int, has_changed: Sequence[bool]) -> None:
        triples = zip(self._places, self._tensors, has_changed, strict=True)
        changed = [(place, old) for place, old, has in triples if has]
        parameters = [place for place, _ in changed if isinstance(place, NamedParameter)]
        if parameters:
            raise UsageError(
                f"{who} wrote to {_names(parameters)}: all towers of a step must see the same parameters, "
                "and with another number of workers, different towers would see the change; write to "
                f"parameters after average(), as optimizer.step() does{'' if step else _TO_START}"
            )
        buffers = [(place, old) for place, old in changed if isinstance(place, NamedBuffer)]
        empty = [place for place, old in buffers if old is None]
        raise BufferPolicyError(f"{who} {_explain([place for place, _ in buffers], empty)}")

    def _explain_entries(self, who: str) -> Error:
        pairs = zip(self._registries, self._entries, strict=True)
        new = [name for registry, known in pairs for name in registry if name not in known]
        what = f"added {', '.join(new[:_MOST_NAMES])} to the model" if new else "removed parts of the model"
        return BufferPolicyError(
            f"{who} {what}: make all layers, parameters and buffers before Towers, in __init__"
        )


def _differing_names(before: Hashes, after: Hashes) -> set[str]:
    old = before.by_name()
    return {name for name, value in after.by_name().items() if old.get(name, value) != value}


def _explain(changed: Sequence[NamedBuffer], empty: Sequence[NamedBuffer] = ()) -> str:
    frozen = [buffer for buffer in changed if is_statistic(buffer)]
    if frozen:
        return f"changed {_names(frozen)}, of layers in eval mode: switch modes between steps, not within one"
    if empty:
        return (
            f"set {_names(empty)}, which was None before: run the model once before making Towers or, if it "
            f"does not affect the weights, use Towers(..., buffers={_argument(empty, 'ignore')})"
        )
    return (
        f"changed {_names(changed)}, which has no policy: choose one, such as Towers(..., "
        f"buffers={_argument(changed, 'first')}); 'first' keeps tower 0's value, 'mean' averages over rows, "
        "'ignore' is for buffers that do not affect the weights"
    )


def _names(places: Sequence[NamedTensor]) -> str:
    return ", ".join(place.name for place in places)


def _argument(buffers: Sequence[NamedBuffer], policy: Policy) -> dict[str, Policy]:
    """Return the argument that gives the buffers this policy: by name or, if there are many, by attribute."""
    if len(buffers) <= _MOST_NAMES:
        return {buffer.name: policy for buffer in buffers}
    return {f"*{buffer.attribute}": policy for buffer in buffers}
