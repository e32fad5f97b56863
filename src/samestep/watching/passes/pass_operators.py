"""Finds passes that compute their losses in different ways, although nothing that they read differs.

A pass may choose its operators, and the numbers and seeds that they take, by what it reads in Python: values
of tensors, random numbers, the tower's index. If two passes over rows of the same shapes read the same
values, and none of the others, their losses are the same function of rows, weights and random numbers.
Otherwise, this function depends on what an earlier pass has left, such as a count of passes, or on the time,
and so on the number of workers.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch._ops import OpOverload

from samestep.batches.columns import version_of
from samestep.errors import warn
from samestep.watching.operators.operator_calls import Call, tensors_in
from samestep.watching.operators.origins import Kept, keep_address, storage_of
from samestep.watching.operators.values import checksum_of_value, is_readable
from samestep.watching.passes.reads import Reads
from samestep.watching.program.program_line import ProgramLine

__all__ = ["Outcomes", "PassOperators"]

_READING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_MASKS = {torch.bool, torch.uint8}
_UNTAGGED = {"_pack_padded_sequence", "_ctc_loss", "_cudnn_ctc_loss"}
_ALIKE = (
    "both have rows of the same shapes, and both passes had read the same values of tensors in Python, and "
    "neither tower.index nor random numbers of the tower's own seed"
)
_MOST_KINDS = 16  # of outcomes that are kept in a step
_PLAIN = (int, float, str, type(None), torch.dtype)


class _Operator(NamedTuple):
    """An operator of a pass."""

    inputs: Sequence[int]  # the numbers of the results that it takes
    text: str


class Outcome(NamedTuple):
    """A result of a pass, such as its loss: the result's number, and the pass's operators by results."""

    what: str  # "loss" or "outputs"; or, for all of a pass together, "gradients" or "buffers"
    tower: int
    number: int
    operators: Mapping[int, _Operator]  # in order

    @property
    def was(self) -> str:
        """Return the verb for it."""
        return "was" if self.what == "loss" else "were"

    @property
    def that(self) -> str:
        """Return the pronoun for another one."""
        return "that" if self.what == "loss" else "those"

    def first_unlike(self, other: Outcome) -> str:
        """Return the first operator that only one of the two depends on: this one, or the other."""
        own, others = self._texts_unlike(other), other._texts_unlike(self)
        # What follows an operator that only one of them has is different in both, with the same text.
        new = [text for text in own if text not in others] or [text for text in others if text not in own]
        return (new or own or others)[0]

    def _texts_unlike(self, other: Outcome) -> list[str]:
        new = self._needed() - other._needed()
        return [operator.text for number, operator in self.operators.items() if number in new]

    def _needed(self) -> set[int]:
        """Return the numbers of all results that this one depends on, and its own."""
        found, open_ = set[int](), [self.number]
        while open_:
            number = open_.pop()
            if number not in found:
                found.add(number)
                open_ += self.operators[number].inputs if number in self.operators else ()
        return found


Outcomes: TypeAlias = Mapping[tuple[Any, ...], Outcome]
"""A worker's outcomes by kind: the shapes and dtypes of a tower's rows, a hash of the values that the pass
has read, and the place among several losses, or "gradients" or "buffers"."""


class PassOperators:
    """The operators of a step's passes that compute from rows and random numbers.

    Each result has a number: a hash of the operator, of the numbers that it takes, and of its inputs. Other
    inputs count by their values, because a pass may use what an earlier one has computed, such as a mask.
    Once a pass has read what may differ, and what is not known, the rest of it is not followed.

    Attributes:
        outcomes: of the step's passes, the first of each kind.
        has_warned: whether there has been a warning.
        is_explained: whether another check has warned of what may be the cause of differences.
    """

    def __init__(self, reads: Reads) -> None:
        self._reads = reads
        self.has_warned = self.is_explained = self._is_followed = False
        self.start_step()

    def start_step(self) -> None:
        """Forget the step before."""
        self.outcomes: dict[tuple[Any, ...], Outcome] = {}
        self._pair: tuple[Outcome, Outcome] | None = None

    def start_pass(self, tower: int, rows: Sequence[Tensor], shared: Iterable[Tensor]) -> None:
        """Begin a tower's pass. `shared` are the model's parameters and buffers."""
        self._is_followed = not (self.has_warned or self._reads.found)
        # By storage, with what keeps its address from being reused.
        self._results: dict[int, tuple[int, Kept]] = {}
        self._values: dict[tuple[Any, ...], tuple[int, Kept]] = {}
        self._empty: dict[int, Kept] = {}  # those with arbitrary values
        self._operators: dict[int, _Operator] = {}
        if self._is_followed:
            self._tower, self._values_read = tower, 0
            self._newest, self._values_before = range(0), 0
            self._values_before_write = 0  # read before the last write to one of the model's tensors
            with self._reads.ignored():
                self._own_seed = torch.default_generator.initial_seed()
            self._kind = tuple((tensor.shape, tensor.dtype) for tensor in rows)
            each = enumerate(shared)
            self._shared = {storage_of(tensor): (number, keep_address(tensor)) for number, tensor in each}
            self._of_rows = set(map(storage_of, rows))  # what was computed from them, or from random numbers
            for number, tensor in enumerate(rows):
                self._results[storage_of(tensor)] = number, keep_address(tensor)

    def stop_pass(self) -> None:
        """Forget the pass, except its loss."""
        self._is_followed = False
        self._results, self._empty, self._values, self._operators = {}, {}, {}, {}

    def start(self, call: Call) -> None:
        """Note an operator before it runs, and perhaps writes to its arguments."""
        self._number: int | None = None
        if not self._is_followed:
            return
        self._reads.found |= _may_read_anything(call)
        if self._reads.found or not self._is_of_pass(call):
            return
        self._overwritten = set(map(storage_of, call.written)) if call.overwrites else set()
        # Rows that are looked up count as rows: their values are not compared.
        self._table = storage_of(call.given[0]) if call.kind.takes_parts else None
        described = tuple(map(self._described, call.values))
        self._seed = self._other_seed(call) if call.kind.is_random else None
        if not self._reads.found:
            # Autograd adds in place or not, depending on what else refers to a gradient.
            name = str(call.func).replace("_.", ".")
            self._number = zlib.crc32(repr((name, described, self._seed)).encode())

    def _is_of_pass(self, call: Call) -> bool:
        """Say whether an operator draws, takes what the pass has computed, or changes the model's buffers."""
        taken = () if call.kind.takes_shapes_only else map(storage_of, call.given)
        is_of_pass = call.kind.is_random or any(each in self._results for each in taken)
        return is_of_pass or any(storage_of(each) in self._shared for each in call.written)

    def finish(self, call: Call, result: Any) -> None:
        """Note what the operator has computed."""
        if not self._is_followed:
            return
        if not self._reads.found and _reads_values(call) and not all(map(self._is_of_model, call.given)):
            seen = [tuple(each.shape) for each in tensors_in((result,))] or result
            self._values_read = zlib.crc32(repr(seen).encode(), self._values_read)
        storages = set(map(storage_of, call.given))
        written = [*call.written, *_statistics_written(call)]
        made = [*written, *(each for each in tensors_in((result,)) if storage_of(each) not in storages)]
        for tensor in written:
            self._empty.pop(storage_of(tensor), None)
        if self._number is not None:
            self._note_results(call, self._number, storages, made)
        elif self._reads.found:
            for tensor in call.written:
                self._results.pop(storage_of(tensor), None)
        elif str(call.func).startswith(("aten.empty", "aten.new_empty")):
            self._empty.update((storage_of(each), keep_address(each)) for each in filter(storage_of, made))

    def _note_results(self, call: Call, number: int, given: set[int], made: Iterable[Tensor]) -> None:
        operator = self._operator(call)
        results = [(storage, each) for each in made if (storage := storage_of(each))]
        storages = {storage for storage, _ in results}
        if call.kind.is_random or not given.isdisjoint(self._of_rows):
            self._of_rows |= storages
        if not storages.isdisjoint(self._shared):
            self._values_before_write = self._values_read
        for index, (storage, tensor) in enumerate(results):
            self._operators[number + index] = operator
            self._results[storage] = number + index, keep_address(tensor)
        if _may_be_loss(call, [each for _, each in results]):
            self._newest = range(number, number + len(results))
            self._values_before = self._values_read

    def _is_of_model(self, tensor: Tensor) -> bool:
        """Say whether a tensor's values are the model's, or computed from these alone: no pass has others."""
        storage = storage_of(tensor)
        return storage not in self._of_rows and (storage in self._results or storage in self._shared)

    def _operator(self, call: Call) -> _Operator:
        numbers = [f"{each:.6g}" for each in call.values if type(each) in (int, float)]
        seed = "" if self._seed is None else f", seeded by {self._seed},"
        text = f"{call.func.overloadpacket}({', '.join(numbers)}){seed} in {ProgramLine.current()}"
        inputs = [self._results[each][0] for each in map(storage_of, call.given) if each in self._results]
        return _Operator(inputs, text)

    def _other_seed(self, call: Call) -> int | None:
        """Return the seed of an operator that draws; None if it is the tower's, or not known."""
        generator = call.kwargs.get("generator") or _global_generator(call)
        seed = None if generator is None else generator.initial_seed()
        return None if seed == self._own_seed else seed

    def _described(self, value: Any) -> Any:
        """Return a value that is the same for the same argument in another pass."""
        if isinstance(value, (list, tuple)):
            return tuple(map(self._described, value))
        if not isinstance(value, Tensor):
            return value if isinstance(value, _PLAIN) else ""
        if value.is_nested:  # it has no shape
            self._reads.found = True
            return ""
        storage, place = storage_of(value), (int(value.storage_offset()), tuple(value.shape))
        if storage in self._results:
            return self._results[storage][0], place
        if storage in self._shared:
            return "model", self._shared[storage][0], place
        if storage in self._overwritten or storage == self._table:
            return "", place[1]
        if storage in self._empty or not is_readable(value):  # it is not known what is there
            self._reads.found = True
            return ""
        key = (storage, place, value.stride(), version_of(value))
        if key not in self._values:
            self._values[key] = checksum_of_value(value), keep_address(value)
        return self._values[key][0], place[1]

    def note_losses(self, losses: Iterable[Any], what: str = "loss") -> None:
        """Note the losses of the pass, or its `"outputs"` for a loss of the whole batch."""
        if not (self._is_followed and self._reads.is_complete()):
            return
        for index, tensor in enumerate(each for each in losses if isinstance(each, Tensor)):
            if (storage := storage_of(tensor)) in self._results:
                own = Outcome(what, self._tower, self._results[storage][0], self._operators)
                # Values that were read after the newest loss, such as `loss.item()`, had no part in it.
                values = self._values_before if own.number in self._newest else self._values_read
                self._compare(own, (self._kind, values, index))

    def note_gradients(self, gradients: Iterable[Tensor]) -> None:
        """Note the gradients that the pass's backward has left."""
        if self._is_followed:
            self._note_together("gradients", gradients, self._values_read)

    def note_buffers(self, buffers: Iterable[Tensor]) -> None:
        """Note what the pass's forward has written to the model's buffers, which all workers share."""
        if self._is_followed:
            found = list(buffers)
            are_same = all(storage_of(each) in self._shared for each in found)
            # Another tensor in a buffer's place may have been chosen by what was read after it was computed.
            values = self._values_before_write if are_same else self._values_read
            self._note_together("buffers", found, values)

    def _note_together(self, what: str, tensors: Iterable[Tensor], values: int) -> None:
        if self._reads.found or not self._reads.is_complete():
            return
        found = [self._results[each][0] for each in map(storage_of, tensors) if each in self._results]
        number = zlib.crc32(repr(found).encode())
        self._operators[number] = _Operator(found, f"the {what}")
        self._compare(Outcome(what, self._tower, number, self._operators), (self._kind, values, what))

    def _compare(self, own: Outcome, kind: tuple[Any, ...]) -> None:
        """Compare the pass's outcome with the first one of its kind, or keep it if it is the first."""
        first = self.outcomes.get(kind, own)
        if first.number != own.number:
            self._pair = self._pair or (first, own)
        elif len(self.outcomes) < _MOST_KINDS:
            self.outcomes[kind] = first

    def check(self, who: str) -> None:
        """Warn, once, if the outcome of the pass differs from an earlier one's."""
        if self._pair is not None and not (self.has_warned or self.is_explained):
            first, own = self._pair
            self._warn(
                f"{who}: its {own.what} {own.was} computed in another way than {own.that} of tower "
                f"{first.tower}, from {own.first_unlike(first)} on, although {_ALIKE}: this depends on what "
                "another pass has left, such as a count of passes, or on the time, and so on the number of "
                "workers; compute it from towers.step, tower.index or the rows, or before the loop"
            )

    def check_workers(self, where: str, all_outcomes: Sequence[Outcomes]) -> None:
        """Warn, once, if workers have computed outcomes in different ways, given those of each worker."""
        found = None if self.has_warned or self.is_explained else _find_unlike(all_outcomes)
        if found is not None:
            (worker, own), (other, theirs) = found
            self._warn(
                f"{where}: worker {other} computed the {own.what} of tower {theirs.tower} in another way "
                f"than worker {worker} {own.that} of tower {own.tower}, from "
                f"{theirs.first_unlike(own)} on, although {_ALIKE}: it depends on the worker, as with its "
                "rank, a hook or a setting that only one worker has, or the order of a set"
            )

    def _warn(self, message: str) -> None:
        self.has_warned = True
        warn(message)

    def hash(self) -> int:
        """Return a 32-bit hash of how outcomes were computed; 0 if it is not known."""
        numbers = sorted((repr(kind), outcome.number) for kind, outcome in self.outcomes.items())
        return zlib.crc32(repr(numbers).encode()) if numbers else 0


def _find_unlike(all_outcomes: Sequence[Outcomes]) -> tuple[tuple[int, Outcome], tuple[int, Outcome]] | None:
    """Return two workers, and their outcomes of one kind that were computed in different ways."""
    for kind in dict.fromkeys(kind for outcomes in all_outcomes for kind in outcomes):
        first, *rest = ((worker, each[kind]) for worker, each in enumerate(all_outcomes) if kind in each)
        for other in rest:
            if other[1].number != first[1].number:
                return first, other
    return None


def _may_read_anything(call: Call) -> bool:
    """Say whether it is not known which values of tensors Python sees by an operator."""
    if not isinstance(call.func, OpOverload) or call.func.overloadpacket.__name__ in _UNTAGGED:
        return True
    return any(each.layout is not torch.strided for each in call.given)


def _statistics_written(call: Call) -> Iterator[Tensor]:
    """Yield the running statistics that batch norm writes to, which its operators' schemas do not say."""
    if call.name.endswith("batch_norm") and any(call.args[5:6]):  # in training
        yield from tensors_in(call.args[3:5])


def _may_be_loss(call: Call, results: Iterable[Tensor]) -> bool:
    """Say whether an operator has computed a number that has a gradient."""
    has_number = any(each.is_floating_point() and each.numel() == 1 for each in results)
    return has_number and torch.is_grad_enabled() and any(each.requires_grad for each in call.given)


def _reads_values(call: Call) -> bool:
    """Say whether an operator's result, or its size, tells Python values of tensors."""
    if call.func is torch.ops.aten.index.Tensor:
        return any(each.dtype in _MASKS for each in call.given[1:])
    # Other operators than torch's may not say whether sizes depend on values.
    return call.func.namespace != "aten" or not _READING.isdisjoint(call.func.tags)


def _global_generator(call: Call) -> torch.Generator | None:
    """Return the global generator of the device on which an operator runs; None if it is not known."""
    found = (each.device for each in call.given)
    device = next(found, None) or call.kwargs.get("device") or torch.device("cpu")
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        generator: torch.Generator = torch.cuda.default_generators[index]
        return generator
    return torch.default_generator if device.type == "cpu" else None
