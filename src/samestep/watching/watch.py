"""Finds what a pass changed that must not change: parameters, and buffers without a policy."""

from __future__ import annotations

import operator
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

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
from samestep.identity import is_compiled
from samestep.watching.flow import FlowWatch
from samestep.watching.modes import Modes
from samestep.watching.optimizer_settings import OptimizerSettings, has_settings
from samestep.watching.outside_nets import OutsideNets
from samestep.watching.own_generators import OwnGenerators, is_generator
from samestep.watching.own_numbers import OwnNumbers
from samestep.watching.reach import in_reach
from samestep.watching.weight_hash import Hashes, WeightHash

__all__ = ["Watch"]

_LOOK_EVERY = 32
"""Every so many steps "look": they check passes more closely, such as which nets they run."""

_MOST_NAMES = 4

_version = operator.attrgetter("_version")


class _Ended(NamedTuple):
    """The hashes of a step, from before its passes and after them."""

    step: int
    before: Hashes
    after: Hashes


class Watch:
    """Compares the model before and after passes: tensors, version counters, data pointers, and hashes.

    Version counters show ordinary writes, and data pointers new memory: after each tower in steps that look,
    otherwise after the last one. Writes through `.data`, and those of batch norm's kernels, show in a hash of
    the bytes of a slice of the model, after the passes.

    Attributes:
        pointers: addresses of parameters, and of buffers that no pass may change, when `note` was called.
        num_entries: how many parameters, buffers and modules there were then.
        settings: of torch's own layers, by layer, in every 32nd step.
        loss: of the whole batch, which all workers compute; None until it is known in this step.
        late_hash: on a GPU, a 32-bit hash of the previous step's hashes. It is 0 if unknown: on a worker that
            has joined, or that has ended the step before and takes it again.
    """

    pointers: list[int]
    num_entries: int
    settings: Mapping[str, str]
    loss: float | None
    late_hash: int

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules: list[nn.Module] = []
        self._known: set[int | str] = set()  # trained parameters and shared buffers of the steps so far
        self._new: set[int | str] = set()  # those of the next step that are not known
        self._num_workers = 0
        self._ended: _Ended | None = None  # on a GPU: the last step that has ended, to be compared later
        self._optimizers = OptimizerSettings()
        self.flow = FlowWatch()
        self.looks = self._follows = False

    def look_at_model(self, fixed: Sequence[NamedBuffer], shared: Sequence[NamedBuffer]) -> None:
        """Watch the model as it is from now on: when it is new, and after a change between two steps.

        Args:
            fixed: the buffers that no pass may change.
            shared: those that passes may change; all workers have the same values between steps.
        """
        modules = list(self._model.modules())
        if len(modules) != len(self._modules) or any(map(operator.is_not, modules, self._modules)):
            self._modules = modules
            self._known.clear()
            self._forwards = [(type(module).__name__, type(module).forward) for module in modules]
            self._generators = OwnGenerators(self._model)
            self.modes = Modes(self._model)
            self.numbers = OwnNumbers(self._model)
            self.outside = OutsideNets(self._model, self.modes, self.numbers)
        parameters = find_named_parameters(self._model)
        self._places = [*parameters, *fixed]
        self._current = reader(self._places)
        self._registries = [r for m in modules for r in (m._parameters, m._buffers, m._modules)]
        self._entries = list(map(set, self._registries))
        self._tensors: list[Tensor | None] = []
        self._all = [*parameters, *sorted((*fixed, *shared), key=lambda buffer: buffer.name)]
        self._hash = WeightHash(self._places, shared, fixed)
        self._before = Hashes()
        trained = {id(p) for each in parameters if (p := each.get()) is not None and p.requires_grad}
        self._new = (trained | {buffer.name for buffer in shared}) - self._known
        self.note()

    def start_step(self, step: int, num_workers: int) -> None:
        """Start to watch a step, after `note` and before its first pass."""
        self._step, self.loss = step, None
        self._before, self.late_hash = self._hash.of(step), 0
        if self._ended is not None and self._ended.step == step - 1:
            self.late_hash = zlib.crc32(repr(self._ended.before.by_name()).encode())
        is_first = self._num_workers != num_workers or bool(self._new)
        self._num_workers = num_workers
        self._known |= self._new
        self._new = set()
        # By the step's number, the same on all workers: a newcomer has taken fewer steps itself.
        do_all_look = step % _LOOK_EVERY == 0
        # Ever more rarely, because following operators makes them slower.
        do_all_follow = do_all_look and step & (step - 1) == 0
        # With several workers, step 1 as well: it uses what the program has made of step 0.
        compares = num_workers > 1 and (do_all_follow or step == 1)
        self.looks = is_first or do_all_look
        self._follows = is_first or do_all_follow or compares
        self.settings = self.numbers.settings() if do_all_look else {}
        self.modes.start_step(notes_autocast=do_all_follow)
        self.outside.start_step()
        if self.looks:
            found = in_reach(_is_looked_for, self._forwards) if self._follows else []
            self.numbers.start_step()
            self._generators.start_step(found)
            self._optimizers.start_step(found)
            self.outside.note_compiled(found)
        self.flow.beside.clear()
        if self._follows:
            self.flow.start_step()
        if compares:
            self.flow.beside.start_step(self._forwards)

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

    def note_loss(self, loss: Tensor) -> None:
        """Note the loss of the whole batch; not on a GPU, which would have to be synchronized."""
        if loss.device.type == "cpu":
            self.loss = float(loss)

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

    def start_pass(self, tower: int) -> None:
        """Note what a tower's pass might change, in a step that looks."""
        if self.looks:
            self.modes.start_pass()
            self.outside.start_looking()
            self._generators.note()
            self.numbers.start_pass(tower)

    def follow(self, tower: int, num_rows: int, rows: Iterable[Tensor]) -> None:
        """Follow the values of a tower's rows, in some of the steps that look."""
        if self._follows:
            shared = [*self._model.parameters(), *self._model.buffers()]
            self.flow.start_pass(tower, num_rows, rows, shared, self._forwards)

    def stop_looking(self) -> None:
        """Stop recording which modules run, once a tower has passed its loss or an error ends its pass."""
        if self.looks:
            self.outside.stop_looking()
        if self._follows:
            self.flow.pause()

    def go_on(self) -> None:
        """Follow a pass again after its backward: the program may still make values and keep them."""
        if self._follows:
            self.flow.resume()

    def end_pass(self) -> None:
        """End a tower's pass, if one has begun."""
        if self.looks:
            self.outside.stop_looking()
        if self._follows:
            self.flow.stop()

    def check_pass(self, who: str, loss: Tensor, *, is_outer: bool) -> None:
        """Check after a tower's forward.

        Modes are checked at the worker's first and last tower (`is_outer`) in every step, because a change of
        mode mostly persists, and at all towers in steps that look.
        """
        if is_outer or self.looks:
            self.modes.check(who)
        if self.looks:
            self.check(who)
            self._generators.check()
        else:
            self.outside.check(who)
        if self._follows:
            self.flow.check(who, loss, has_warned=self.numbers.has_warned)

    def check_outputs(self, who: str, outputs: Iterable[Tensor]) -> None:
        """Check the outputs of a pass for a whole-batch loss, in a step whose values are followed."""
        for tensor in outputs if self._follows else ():
            self.flow.check(who, tensor)

    def check(self, who: str) -> None:
        """Raise if `who` wrote to a watched tensor or replaced it since `note`."""
        now = self._current()
        written = self._differing(_version, self._versions) | self._differing(Tensor.data_ptr, self.pointers)
        if written or any(map(operator.is_not, now, self._tensors)):
            pairs = zip(now, self._tensors, strict=True)
            self._fail(who, [new is not old or id(old) in written for new, old in pairs])
        self.outside.check(who)

    def _differing(self, read: Callable[[Tensor], int], before: list[int]) -> set[int]:
        now = list(map(read, self._present))
        if now == before:
            return set()
        return {id(t) for t, new, old in zip(self._present, now, before, strict=True) if new != old}

    def end_turn(self, who: str) -> None:
        """Check what a tower's whole turn in the loop has changed, in a step that looks."""
        if self.looks:
            self.numbers.check()
            self._optimizers.check(who)

    def end_step(self, who: str) -> None:
        """Check again after the last backward, also the numbers of entries and the hashes."""
        self.check(who)
        if self.looks:
            self.numbers.check()  # the loop may have ended with a `break`
            self._optimizers.start_step(())  # or go on after average(), where settings may change
        if self._follows:
            self.flow.end_step(who)
        if sum(map(len, self._registries)) != self.num_entries:
            raise self._explain_entries(who)
        ended = _Ended(self._step, self._before, self._hash.of(self._step, fixed_only=True))
        if ended.after.is_ready:
            self._compare(ended)
        else:  # on a GPU, compare the last step that has ended, without waiting
            last, self._ended = self._ended, ended
            if last is not None:
                self._compare(last)

    def _compare(self, ended: _Ended) -> None:
        old = ended.before.by_name()
        changed = {name for name, value in ended.after.by_name().items() if old.get(name, value) != value}
        has_changed = [place.name in changed for place in self._places]
        if any(has_changed):
            self._fail(f"step {ended.step}: a pass", has_changed)

    def _fail(self, who: str, has_changed: Sequence[bool]) -> None:
        triples = zip(self._places, self._tensors, has_changed, strict=True)
        changed = [(place, old) for place, old, has in triples if has]
        parameters = [place for place, _ in changed if isinstance(place, NamedParameter)]
        if parameters:
            raise UsageError(
                f"{who} wrote to {_names(parameters)}: all towers of a step must see the same parameters, "
                "and with another number of workers, different towers would see the change; write to "
                "parameters after average(), as optimizer.step() does"
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


def _is_looked_for(value: Any) -> bool:
    """Say whether this is a generator, compiled code, or has settings: the watch treats these specially."""
    return is_generator(value) or is_compiled(value) or has_settings(value)


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
