"""Finds state that flows from one tower's pass into another's loss or gradients, such as a running mean."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from samestep.errors import UsageError
from samestep.watching.losses.loss_forms import LossForm
from samestep.watching.losses.loss_operators import LossOperators
from samestep.watching.operators.operator_calls import Call, tensors_in
from samestep.watching.operators.origins import Kept, Origin, Origins, keep_address, storage_of
from samestep.watching.passes.batch_reads import BatchReads
from samestep.watching.passes.beside import COUNTED_NUMBER, LEFT_NUMBER, Beside
from samestep.watching.passes.draws import GENERATOR, INSTEAD_OF_DRAWN, Draws
from samestep.watching.passes.kept_numbers import KeptNumbers
from samestep.watching.passes.messages import Messages
from samestep.watching.passes.other_formulas import OtherFormulas
from samestep.watching.passes.own_code import OwnCode
from samestep.watching.passes.pass_counts import PassCounts
from samestep.watching.passes.pass_mode import PassMode
from samestep.watching.passes.pass_operators import PassOperators
from samestep.watching.passes.reads import Reads
from samestep.watching.passes.weight_updates import WeightUpdates
from samestep.watching.program.reach import Named

aten = torch.ops.aten

__all__ = ["FlowWatch"]

_INSTEAD_OF_KEPT = (
    "a hidden state, a running mean, a memory of samples, a mask or the like, which with another number of "
    "workers would come from other towers; reset it in each pass, update it after average() from the whole "
    "batch, or keep it in a buffer with the policy 'mean' or 'first', Towers(..., buffers={pattern: policy})"
)


class FlowWatch(PassMode):
    """Follows the towers' rows and random numbers through the operators of their passes.

    What a program keeps from one pass to the next reaches only the towers of the same worker. That is
    harmless if no loss uses it, such as a sum of losses to be printed, or if it depends on no rows, such as a
    mask made from a size.

    Attributes:
        beside: what passes read beside the model.
        reads: what this pass reads that may differ between towers.
        operators: how passes compute their losses.
        messages: which ones the loop over towers sends.
        batch_reads: what passes read of the batch of all towers.
        own_code: whether code of the program runs in backward.
        formulas: whether derivatives have other bits if they are followed.
    """

    def __init__(self) -> None:
        super().__init__()
        self._origins = Origins()
        self._tower = -1
        self._is_backward = False
        self._updates = WeightUpdates()
        self._shared: dict[int, Kept] = {}  # those of the model's tensors before the pass
        self._draws = Draws()
        self._kept_numbers = KeptNumbers()
        self._counts = PassCounts()
        self.beside = Beside()
        self._of_loss = LossOperators(self._depends_on_rows)
        self.batch_reads = BatchReads()
        self.reads = Reads()
        self.operators = PassOperators(self.reads)
        self.messages = Messages()
        self.own_code = OwnCode()
        self.formulas = OtherFormulas()

    def start_step(self) -> None:
        """Forget the step before."""
        self.stop()
        self._origins.clear()
        self._draws.clear()
        self._kept_numbers.start_step()
        self._counts.start_step()
        self._updates.start_step()

    def start_pass(
        self,
        tower: int,
        num_rows: int,
        rows: Iterable[Tensor],
        shared: Sequence[Tensor],
        functions: Iterable[Named] = (),
        *,
        is_comparable: bool = False,
    ) -> None:
        """Follow a tower's pass until `stop`; not under another dispatch mode, which may not expect this one.

        Args:
            tower: its index.
            num_rows: how many rows it has.
            rows: the tensors that hold them.
            shared: the model's parameters and buffers: `Watch` compares them, or samestep restores them.
            functions: what the pass runs, beside the functions on this thread's stack.
            is_comparable: whether other passes over rows of the same shapes may be expected to be alike.
        """
        held = list(rows)
        self._tower = tower
        self._draws.start_pass()
        self.formulas.start_pass()
        self._kept_numbers.start_pass(functions)
        self._of_loss.start_pass(num_rows, held)
        self.batch_reads.start_pass(held, is_known=is_comparable)
        self._shared = {storage_of(tensor): keep_address(tensor) for tensor in shared}
        self._updates.start_pass(tower, self._shared)
        for storage in self._shared:
            self._origins.forget(storage)
        self._counts.start_pass(held)
        self.note_own(held)
        self.beside.start_pass(num_rows, held)
        self.begin()
        self.reads.start(is_known=is_comparable and self.follows)
        self.operators.start_pass(tower, held, shared)

    def note_own(self, tensors: Iterable[Tensor]) -> None:
        """Count the values of these tensors as this tower's, like its rows."""
        for tensor in tensors:
            self._origins.note(tensor, Origin(1 << self._tower, ""))

    def pause(self) -> None:
        """Follow nothing, until `resume`."""
        self.reads.stop()
        super().pause()

    def start_other_pass(self, *, is_followed_later: bool = False) -> None:
        """Begin a pass that is not followed now, under this mode where that changes its bits."""
        if self.formulas.in_forwards or is_followed_later:
            self.begin(follows=False)

    def run_backward(
        self, backward: Callable[[], None], parameters: Sequence[Tensor], *, is_comparable: bool
    ) -> list[Tensor]:
        """Run a pass's backward, and follow it if code of the program may run in it.

        Otherwise, the gradients depend on what the loss depends on, and on nothing else.

        Args:
            backward: runs it.
            parameters: those whose gradients it makes; if it is followed, none may have one yet.
            is_comparable: whether it begins alike in passes over rows of the same shapes.

        Returns:
            the gradients, if it was followed; see `check_gradients`.
        """
        is_in_this_thread = all(each.is_cpu for each in parameters)  # what others call and read is not seen
        self.own_code.is_found |= not is_in_this_thread
        is_followed = self.own_code.is_expected and not self.formulas.in_backward
        if not (is_followed and self.is_in_its_thread):
            with self.own_code.looked_for():
                backward()
            return []
        self.reads.found |= not (is_comparable and is_in_this_thread)
        self._is_backward = True
        self.resume()
        self.reads.resume()
        try:
            backward()
            gradients = [each.grad for each in parameters if each.grad is not None]
            self.operators.note_gradients(gradients)
        finally:
            self.pause()
            self._is_backward = False
        return gradients

    def stop(self) -> None:
        """End a pass."""
        self.pause()
        self.follows = False
        self._of_loss.clear()
        self.operators.stop_pass()

    def check(self, who: str, loss: Tensor, *, has_warned: bool = False) -> None:
        """Raise if this pass's loss depends on state from another tower's pass.

        If a counter has been named (`has_warned`), there is no second warning of what is computed from it.

        Raises:
            UsageError: names the towers and the tensor.
        """
        if not self.follows:
            return
        self.batch_reads.check(who)
        origin = self._origins.of(loss)
        self.beside.note_used(self._tower, origin.beside)
        self._check_origin(f"{who}: its loss depends", origin)
        has_warned |= self._kept_numbers.has_warned or self.operators.has_warned
        if origin.beside & COUNTED_NUMBER and not has_warned:
            self._counts.check(who)
        self._draws.check(who)

    def check_gradients(self, who: str, gradients: Iterable[Tensor]) -> None:
        """Raise if the gradients from this pass's backward depend on state from another tower's pass.

        Raises:
            UsageError: names the towers and the tensor.
        """
        for gradient in gradients if self.follows else ():
            self._check_origin(f"{who}: its gradients depend", self._origins.of(gradient))
        self._draws.check(who)

    def _check_origin(self, what: str, origin: Origin) -> None:
        if others := _indices(origin.towers & ~(1 << self._tower)):
            which = ", ".join(map(str, others))
            depends = f"{what} on rows or random numbers of tower {which}, through"
            if origin.how != GENERATOR:
                raise UsageError(f"{depends} {origin.how}: {_INSTEAD_OF_KEPT}")
            raise UsageError(
                f"{depends} {self._draws.name()} that continues from that tower's draws; {INSTEAD_OF_DRAWN}"
            )
        self._kept_numbers.carried.note_used(what, origin.beside)
        if origin.beside & LEFT_NUMBER:
            self._kept_numbers.check(what)

    @property
    def has_warned(self) -> bool:
        """Whether there was a warning of what passes leave for others."""
        return any(
            each.has_warned for each in (self._kept_numbers, self._counts, self._draws, self.operators)
        )

    def form_of(self, loss: Any, count: Any = None) -> LossForm:
        """Return what this pass's loss, or its sums by name, are made of, and forget it."""
        is_of_rows = count is None or (isinstance(count, Tensor) and self._depends_on_rows(count))
        return self._of_loss.form_of(loss, has_own_count=is_of_rows or self.reads.found)

    def end_turn(
        self, who: str, pass_function: Callable[[Any], Any] | None = None, *, has_warned: bool
    ) -> None:
        """Warn if this pass has computed its loss in a different way, unless there was another warning.

        `pass_function` is as for `Watch.start_step`.
        """
        self.messages.check(who, counts=False)
        has_warned |= self._draws.has_warned
        is_explained = has_warned or self.reads.index or self.operators.is_explained
        self._kept_numbers.end_turn(pass_function, is_explained=is_explained)
        has_warned |= self._kept_numbers.has_warned or self._counts.has_warned
        self.operators.is_explained |= has_warned
        self.operators.check(who)

    def end_step(self, who: str) -> None:
        """Raise if two passes of the step have updated the same weights outside the model.

        Raises:
            UsageError: gives their shape.
        """
        self.stop()
        self.own_code.end_step()
        self._origins.clear()
        self._draws.clear()
        if self._updates.found:
            raise UsageError(
                f"{who} updated {self._updates.found}, which an earlier pass of the step also updated, so "
                "its value depends on how many towers share a worker: update averages of weights, and other "
                "nets, after average()"
            )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator, and note the origin of its results."""
        kwargs = kwargs or {}
        if self.is_paused:
            return func(*args, **kwargs)
        with self.reads.ignored():
            if self._is_backward:
                self.own_code.look_at_stack(FlowWatch.run_backward.__code__)
            return self._run(Call.of(func, args, kwargs))

    def _run(self, call: Call) -> Any:
        if not self._is_backward:
            self.messages.note(call.func)
            self.formulas.note(call.func)
        self.operators.start(call)
        generator = call.kwargs.get("generator")
        drawn = self._draws.start(generator, 1 << self._tower)
        result = call.run()
        self._draws.finish(generator, drawn)
        self.operators.finish(call, result)
        self._follow(call, result, drawn)
        return result

    def _follow(self, call: Call, result: Any, drawn: Origin) -> None:
        func, kind, given, written = call.func, call.kind, call.given, call.written
        own = 1 << self._tower
        self._updates.note_parameters(given)
        taken: Sequence[Tensor] = [] if kind.takes_shapes_only else given
        if call.overwrites:
            taken = [tensor for tensor in taken if not any(tensor is each for each in written)]
        beside = self._kept_numbers.take(func, call.values)
        if not self._is_backward:
            self._of_loss.note(call, result)
            self.batch_reads.note(given)
            beside |= self._take_numbers(call, taken)
        towers = drawn.towers | own * kind.is_random
        origin = self._join(func, taken, drawn._replace(towers=towers, beside=beside))
        if func is aten._local_scalar_dense.default and storage_of(given[0]) not in self._shared:
            self._kept_numbers.note_read(result, origin.towers, own)
        is_average = not call.overwrites and any(storage_of(tensor) in self._shared for tensor in taken)
        for tensor in written:
            of_this = origin
            if is_average or self._updates.is_outside(tensor):
                self._updates.note_in_place(tensor, origin.towers)
                of_this = origin._replace(towers=origin.towers | own)
            self._origins.note(tensor, of_this, kind.write and partial(kind.write, call.args))
        # `torch.tensor` hands its result to an operator that returns it.
        before = set() if func is aten.lift_fresh.default else set(map(storage_of, given))
        made = [tensor for tensor in tensors_in((result,)) if storage_of(tensor) not in before]
        for tensor in made:
            self._origins.note(tensor, origin)
        if not origin.towers:
            self._updates.note_made(taken, made)

    def _depends_on_rows(self, tensor: Tensor) -> bool:
        return bool(self._origins.of(tensor).towers & 1 << self._tower)

    def _take_numbers(self, call: Call, taken: Iterable[Tensor]) -> int:
        """Return the bits of numbers that count passes, and of what is held beside the model."""
        bits = 0
        if not self.reads.index:
            bits |= COUNTED_NUMBER * self._counts.take(call.func, call.values)
        if self.beside.holds_any:
            for tensor in call.written:
                self.beside.forget(storage_of(tensor))
            bits |= self._read_beside(call.func, [] if call.kind.takes_parts else taken, call.values)
        return bits

    def _read_beside(self, func: Any, read: Iterable[Tensor], given: Iterable[Any]) -> int:
        """Return the bits of the tensors, arrays and numbers that are held beside the model."""
        bits = 0
        if func is aten.lift_fresh.default:  # `torch.tensor`
            bits |= sum(self.beside.read_copy(each) for each in given)
        for value in given:
            bits |= self.beside.read_number(value)
        for tensor in read:
            if storage_of(tensor) not in self._shared:
                bits |= self.beside.read(tensor)
        return bits

    def _join(self, func: Any, taken: Iterable[Tensor], drawn: Origin) -> Origin:
        """Return the towers whose values or draws an operator combines, and how they first came together."""
        towers, how, beside = drawn
        for tensor in taken:
            more, before, more_beside = self._origins.of(tensor)
            if not more and more_beside:
                self._kept_numbers.note_values(tensor)
            elif not (more or storage_of(tensor) in self._shared):
                more_beside = self._kept_numbers.take_values(tensor)
            towers |= more
            beside |= more_beside
            if not how and more & ~(1 << self._tower):
                name = getattr(func, "overloadpacket", func)
                how = before or f"a tensor of shape {list(tensor.shape)} that {name} read"
        return Origin(towers, how, beside)


def _indices(bits: int) -> list[int]:
    return [index for index in range(bits.bit_length()) if bits >> index & 1]
