"""Watches the passes of a step: calls each check when a step, a pass or a turn begins and ends."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from samestep.buffers.named_tensors import NamedBuffer
from samestep.identity import is_compiled
from samestep.watching.first_step import FirstStep
from samestep.watching.losses.loss_forms import LossForm
from samestep.watching.model.modes import Modes
from samestep.watching.model.optimizer_settings import OptimizerSettings, has_settings
from samestep.watching.model.outside_nets import OutsideNets
from samestep.watching.model.own_generators import OwnGenerators, is_generator
from samestep.watching.model.own_numbers import OwnNumbers
from samestep.watching.model.watched_tensors import WatchedTensors
from samestep.watching.operators.operator_calls import tensors_in
from samestep.watching.passes.flow import FlowWatch
from samestep.watching.program.code_flow import CodeFlow
from samestep.watching.program.reach import in_reach
from samestep.watching.program.source_code import SourceCode

__all__ = ["Watch"]

_LOOK_EVERY = 32
"""Every so many steps "look": they check passes more closely, such as which nets they run."""


class Watch:
    """Watches what passes do that they must not do.

    The model's tensors are compared after each tower in steps that look, otherwise after the last one.

    Attributes:
        tensors: the model's parameters and buffers.
        modes: the layers' modes, training or evaluation.
        follows: whether values are followed in this step.
        flow: the values that a pass leaves and another one uses, in some of the steps that look.
        settings: of torch's own layers, by layer, in every 32nd step.
        loss: of the whole batch, which all workers compute; None until it is known in this step.

    Args:
        model: whose tensors and layers are watched.
        reads_source: whether to read the program's source code in the first step. It is the same for all
            workers, so one of them is enough.
    """

    modes: Modes
    settings: Mapping[str, str]
    loss: float | None

    def __init__(self, model: nn.Module, *, reads_source: bool) -> None:
        self._model = model
        self._reads_source = reads_source
        self._modules: list[nn.Module] = []
        self._known: set[int | str] = set()  # trained parameters and shared buffers of the steps so far
        self._new: set[int | str] = set()  # those of the next step that are not known
        self._num_workers = 0
        self.tensors = WatchedTensors()
        self._optimizers = OptimizerSettings()
        self.flow = FlowWatch()
        self._first: FirstStep | None = None  # in the first step
        self._pass_function: Callable[[Any], Any] | None = None  # see `start_step`
        self.looks = self.follows = False

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
        self._fixed, self._shared = fixed, shared
        self.tensors.look_at(self._model, fixed, shared)
        trained = {id(parameter) for parameter in self._model.parameters() if parameter.requires_grad}
        self._new = (trained | {buffer.name for buffer in shared}) - self._known

    def start_step(
        self, step: int, num_workers: int, pass_function: Callable[[Any], Any] | None = None
    ) -> None:
        """Start to watch a step, after `note` and before its first pass.

        Args:
            step: its number.
            num_workers: those that take it.
            pass_function: what samestep calls for a pass, if the loop over towers is not the program's.
        """
        self.tensors.start_step(step)
        self.loss, self._pass_function = None, pass_function
        self._first = FirstStep() if self._reads_source and self._num_workers == 0 else None
        is_first = self._num_workers != num_workers or bool(self._new)
        self._num_workers = num_workers
        self._known |= self._new
        self._new = set()
        # By the step's number, the same on all workers: a newcomer has taken fewer steps itself. Step 1 is
        # the first that uses what the program has made of a step.
        do_all_look = step % _LOOK_EVERY == 0 or step == 1
        # Ever more rarely, because following operators makes them slower.
        do_all_follow = do_all_look and step & (step - 1) == 0
        compares = num_workers > 1 and do_all_follow
        self.looks = is_first or do_all_look
        self.follows = is_first or do_all_follow
        self.settings = self.numbers.settings() if do_all_look else {}
        self.modes.start_step(notes_autocast=do_all_follow)
        self.outside.start_step()
        if self.looks:
            found = in_reach(_is_looked_for, self._forwards) if self.follows else []
            self.numbers.start_step()
            self._generators.start_step(found)
            self._optimizers.start_step(found)
            self.outside.note_compiled(found)
        self.flow.beside.clear()
        self.flow.operators.start_step()
        if self.follows:
            self.flow.start_step()
        if compares:
            self.flow.beside.start_step(self._forwards)

    def note_loss(self, loss: Tensor) -> None:
        """Note the loss of the whole batch; not on a GPU, which would have to be synchronized."""
        if loss.device.type == "cpu":
            self.loss = float(loss)

    def start_loop(self, batch: Callable[[], Iterable[Tensor]]) -> None:
        """Begin the loop over the towers of a batch; `batch` returns the tensors that it is cut from."""
        self.flow.messages.start_step()
        if self.follows:
            self.flow.batch_reads.start_step(batch())

    def start_pass(self, tower: int, *, is_first_of_two: bool = False) -> None:
        """Begin a tower's pass, or the first of its two; in a step that looks, note what it might change."""
        if self.looks:
            self.modes.start_pass()
            self.outside.start_looking()
            self._generators.note()
            self.numbers.start_pass(tower)
        if not self.follows or is_first_of_two:
            self.flow.start_other_pass(is_followed_later=self.follows)

    def follow(self, tower: int, num_rows: int, rows: Iterable[Tensor], *, is_comparable: bool) -> None:
        """Follow the values of a tower's rows in a step that `follows`; see `FlowWatch.start_pass`."""
        # Buffers with the policy "ignore" are state like any other: what one pass leaves, another one finds.
        buffers = tensors_in(buffer.get() for buffer in (*self._fixed, *self._shared))
        shared = [*self._model.parameters(), *buffers]
        is_comparable = is_comparable and not self.outside.is_compiled
        self.flow.start_pass(tower, num_rows, rows, shared, self._forwards, is_comparable=is_comparable)

    def note_losses(self, losses: Iterable[Any], what: str = "loss") -> None:
        """Note a pass's losses or outputs, and its buffers, in a step whose values are followed."""
        if self.follows:
            self.flow.operators.note_losses(losses, what)
            self.flow.operators.note_buffers(tensors_in(buffer.get() for buffer in self._shared))

    def form_of(self, loss: Any, count: Any = None) -> LossForm | None:
        """Return what a loss, its sums by name, or a sum with a count are made of, if the step `follows`."""
        if not self.follows:
            return None
        self.note_losses(loss.values() if isinstance(loss, Mapping) else [loss])
        return self.flow.form_of(loss, count)

    def note_explained(self) -> None:
        """Note that a warning has named what may make losses differ from pass to pass."""
        self.flow.operators.is_explained = True

    def stop_looking(self) -> None:
        """Stop recording which modules run, once a tower has passed its loss or an error ends its pass."""
        if self.looks:
            self.outside.stop_looking()
        self.flow.pause()

    def go_on(self) -> None:
        """Follow a pass again after its backward: the program may still make values and keep them."""
        if self.follows:
            self.flow.resume()

    def end_pass(self) -> None:
        """End a tower's pass, if one has begun."""
        if self.looks:
            self.outside.stop_looking()
        if self.follows:
            self.flow.stop()
        else:
            self.flow.pause()

    def check_pass(self, who: str, loss: Tensor, *, is_outer: bool) -> None:
        """Check after a tower's forward.

        Modes are checked at the worker's first and last tower (`is_outer`) in every step, because a change of
        mode mostly persists, and at all towers in steps that look.
        """
        if is_outer or self.looks:
            self.modes.check(who)
        if self.looks:
            self.check(who)
            self._generators.compare()
        else:
            self.outside.check(who)
        if self.follows:
            self.flow.check(who, loss, has_warned=self.numbers.has_warned)

    def check_outputs(self, who: str, outputs: Sequence[Tensor]) -> None:
        """Check the outputs of a pass for a whole-batch loss, in a step whose values are followed."""
        self.note_losses(outputs, "outputs")
        for tensor in outputs if self.follows else ():
            self.flow.check(who, tensor)

    def check(self, who: str) -> None:
        """Raise if `who` wrote to a watched tensor or replaced it since `note`."""
        self.tensors.check(who)
        self.outside.check(who)

    def end_turn(self, who: str) -> None:
        """Check what a tower's whole turn in the loop has changed, in a step that looks."""
        if self.looks:
            self.numbers.check(self._pass_function)
            self._generators.check(code=self._code)
            self._optimizers.check(who)
        if self.follows:
            has_warned = self.numbers.has_warned or self._generators.has_warned
            self.flow.end_turn(who, self._pass_function, has_warned=has_warned)
        if self._first is not None and not self.flow.reads.index:  # which may keep something for each tower
            self._first.end_turn(self._pass_function)

    def end_step(self, who: str) -> None:
        """Check again after the last backward."""
        self.check(who)
        if self._first is not None:
            if not (self.numbers.has_warned or self.flow.has_warned):
                self._first.check_carried(who)
            self._first.end(self._model.parameters())
        if self.looks:
            self.numbers.check(self._pass_function)  # the loop may have ended with a `break`
            self._generators.check(code=self._code)
            self._optimizers.start_step(())  # or go on after average(), where settings may change
        if self.follows:
            self.flow.end_step(who)
        self.tensors.end_step(who)
        self._pass_function = None  # which may refer to a batch

    def _code(self) -> CodeFlow:
        return CodeFlow.of_running_loop(SourceCode(), self._pass_function)


def _is_looked_for(value: Any) -> bool:
    """Say whether this is a generator, compiled code, or has settings: the watch treats these specially."""
    return is_generator(value) or is_compiled(value) or has_settings(value)
