"""Recording a few steps, on a real worker, or in one process with a fresh model for each worker."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree as pytree

from samestep.checking.attributes import Held, Place, fingerprint, held_by, outside_tensors
from samestep.checking.operators import OperatorWatch, Phase, process_settings
from samestep.checking.recording import Event, Recording, Turn, When
from samestep.errors import BufferPolicyError, ConfigError
from samestep.identity import digest
from samestep.streams import GlobalStreams, seed_globals, stream_seed
from samestep.summation.placement import Placement
from samestep.towers.nest import tensors
from samestep.towers.report import Report
from samestep.towers.run import Tower
from samestep.towers.step import LossFunction, Step
from samestep.towers.towers import Towers
from samestep.workers.job import Job

__all__ = ["ChangedBufferError", "Subject", "Trial", "record"]

Subject = Callable[[Job], tuple[Step, Iterable[Any]]]
"""What is recorded: makes the step of one worker, and gives its batches, without end."""


_recorded: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class ChangedBufferError(Exception):
    """A tower changed a buffer that is not averaged: which one, and the message of the error."""

    def __init__(self, when: When, places: list[Place], message: str) -> None:
        super().__init__(when, places, message)
        self.when = when
        self.places = places
        self.message = message


@dataclass(frozen=True)
class Trial:
    """How to record.

    Attributes:
        number: of this recording; whatever is drawn outside the towers' turns depends on it.
        steps: how many to take.
        operators: whether to record every operator.
        stand_ins: fresh models that stand for as many workers in one process.
    """

    number: int
    steps: int
    operators: bool = False
    stand_ins: int = 1


@dataclass
class _Worker:
    """One worker's own model and loss function, and what the model held when it was built."""

    model: nn.Module
    loss_fn: LossFunction
    built: dict[Place, Held]

    def held(self) -> dict[Place, Held]:
        return held_by(self.model, self.loss_fn)


def record(subject: Subject, job: Job, trial: Trial) -> Recording:
    """Build what `subject` makes, take a few steps, and return what happened in them.

    Global generators are seeded alike before worker 0's build, whose weights all workers take over, and
    differently before the others' and outside the towers' turns, where training does not keep them alike.

    Raises:
        ChangedBufferError: a tower changed a buffer that is not averaged.
    """
    streams = GlobalStreams.capture(job.device)
    torch.set_num_threads(job.threads)
    try:
        workers, step, batches = _build(subject, job, trial)
        recorder = _Recorder(workers, step, trial)
        seed_globals(stream_seed(trial.number, "outside turns", job.world_size, job.rank), job.device)
        return recorder.run(batches)
    finally:
        streams.restore()


def _build(subject: Subject, job: Job, trial: Trial) -> tuple[list[_Worker], Step, Iterable[Any]]:
    made = []
    for rank in range(job.rank, job.rank + trial.stand_ins):
        seed_globals(stream_seed(0, "build", rank), job.device)
        made.append(subject(job))
        _check_new(made[-1][0].towers.model)
    steps = [step for step, _ in made]
    for step in steps[1:]:
        _share_weights(steps[0].towers.model, step.towers.model)
    workers = [_Worker(step.towers.model, step.loss_fn, {}) for step in steps]
    for worker in workers:
        worker.built = worker.held()
    return workers, *made[0]


def _check_new(model: nn.Module) -> None:
    if model in _recorded:
        raise ConfigError("build() returned the same model again: expected a new one from each call")
    _recorded.add(model)


def _share_weights(model: nn.Module, stand_in: nn.Module) -> None:
    """Make a stand-in compute with the model's own parameters, buffers and normalisation layers."""
    owned, theirs = (
        {**dict(each.named_parameters(remove_duplicate=False)), **dict(each.named_buffers())}
        for each in (model, stand_in)
    )
    if [(n, t.shape) for n, t in owned.items()] != [(n, t.shape) for n, t in theirs.items()]:
        raise ConfigError("build() makes a model with other parameters or buffers each time it is called")
    for path, module in model.named_modules(remove_duplicate=False):
        if path and isinstance(module, _NormBase):  # its statistics are collected from the layer itself
            stand_in.set_submodule(path, module)
            continue
        place = stand_in.get_submodule(path)
        for name, parameter in module._parameters.items():
            setattr(place, name, parameter)  # recurrent layers note their parameters a second time
        # The same dictionaries, because a forward may put another tensor in a buffer's place.
        place._parameters, place._buffers = module._parameters, module._buffers


class _Recorder:
    """Writes down the turns of one process while a `Step` runs as it always does."""

    def __init__(self, workers: list[_Worker], step: Step, trial: Trial) -> None:
        self._workers = workers
        self._step = step
        self._num_steps = trial.steps
        self._towers = step.towers
        self._model = step.towers.model
        self._worker = workers[0]
        self._recording = Recording(process_settings())
        self._turn: Turn | None = None
        self._owner = Placement.even(self._towers.placement.num_towers, trial.stand_ins).owner
        self._watch = OperatorWatch(self._towers.job.device, self._write) if trial.operators else None
        step.loss_fn = self._loss
        step.towers = cast(Towers, _Turns(step.towers, self))

    def run(self, batches: Iterable[Any]) -> Recording:
        """Take the steps."""
        hooks = [
            parameter.register_hook(partial(self._write_tensor, "gradient", name))
            for name, parameter in self._model.named_parameters()
            if parameter.requires_grad
        ]
        self._open(When(0, "build"))
        self._close_with_weights()
        if self._watch is not None:
            for worker in self._workers:
                self._watch.follow(worker.model)
        with contextlib.nullcontext() if self._watch is None else self._watch:
            for batch in islice(batches, self._num_steps):
                self._take_step(batch)
        for hook in hooks:
            hook.remove()
        self._recording.digest = digest(self._model)
        return self._recording

    def _take_step(self, batch: Any) -> None:
        number = self._towers.step
        try:
            self._step(batch)
        except BufferPolicyError as error:
            raise self._changed_buffers(error) from error
        if self._turn is None:  # a step that averages by other means than `Towers.average`
            self._open(When(number, "update"))
        self._close_with_weights()

    def open_tower(self, step: int, tower: Tower) -> None:
        """Start a tower's turn, on the worker that runs it."""
        self._worker = self._workers[self._owner(tower.index)]
        self._open(When(step, f"tower {tower.index}"), tower.batch)
        for name, rows in _named_rows(tower.batch):
            self._write_tensor("rows", name, rows)

    def open_update(self, step: int) -> None:
        """Start what comes after the average."""
        self._worker = self._workers[0]
        self._open(When(step, "update"))
        for name, parameter in self._model.named_parameters():
            if parameter.grad is not None:
                self._write_tensor("average", name, parameter.grad)
                if self._watch is not None:
                    self._watch.note(parameter.grad)
        if self._watch is not None:
            self._watch.phase = "update"

    def close(self) -> None:
        """End the turn."""
        assert self._turn is not None
        self._turn.settings = process_settings()
        self._turn = None

    def _changed_buffers(self, error: BufferPolicyError) -> ChangedBufferError:
        """Say what the last tower has changed that it must not."""
        when, turn = next(reversed(self._recording.turns.items()))
        now, before = self._worker.held(), turn.held
        places = [p for p, held in now.items() if held.kind == "buffer" and before.get(p) != held]
        return ChangedBufferError(when, places, str(error))

    def _open(self, when: When, batch: Any = None) -> None:
        with self._during("paused"):
            held = self._worker.held()
            built = self._worker.built
            changed = {place: value for place, value in held.items() if built.get(place) != value}
            self._turn = self._recording.turns[when] = Turn(built, changed)
            if self._watch is not None:
                outside = outside_tensors(self._worker.model, self._worker.loss_fn)
                self._watch.start_turn([*outside, *_named_rows(batch)])

    def _close_with_weights(self) -> None:
        if self._watch is not None:
            self._watch.phase = "none"
        for name, value in self._model.state_dict().items():
            if isinstance(value, Tensor):
                self._write_tensor("weight", name, value)
        self.close()

    def _loss(self, model: nn.Module, *batch: Any) -> Any:
        """Stand in for the step's loss function: call that of the worker on turn."""
        with self._during("forward"):
            result = self._worker.loss_fn(self._worker.model, *batch)
        for leaf in pytree.tree_leaves(result):  # the loss, or losses by name, and what it counts
            if isinstance(leaf, Tensor):
                self._write_tensor("loss", "loss", leaf)
            else:
                self._write(Event("loss", "count", repr(leaf)))
        return result

    def _write_tensor(self, kind: Any, name: str, tensor: Tensor) -> None:
        with self._during("paused"):
            self._write(Event(kind, name, fingerprint(tensor)))

    def _write(self, event: Event) -> None:
        if self._turn is not None:
            self._turn.events.append(event)

    def _during(self, phase: Phase) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._watch is None else self._watch.during(phase)


class _Turns:
    """A `Towers` that reports each tower's turn to a recorder."""

    def __init__(self, towers: Towers, recorder: _Recorder) -> None:
        self._towers = towers
        self._recorder = recorder

    def __call__(self, batch: Any, **options: Any) -> Iterator[Tower]:
        for tower in self._towers(batch, **options):
            self._recorder.open_tower(self._towers.step, tower)
            yield tower
            self._recorder.close()

    def average(self) -> Report:
        report = self._towers.average()
        self._recorder.open_update(report.step)
        return report

    def __getattr__(self, name: str) -> Any:
        return getattr(self._towers, name)


def _named_rows(batch: Any) -> Iterator[tuple[str, Tensor]]:
    for number, leaf in enumerate(tensors(batch)):
        if isinstance(leaf, Tensor):
            yield f"tensor {number} of the batch", leaf
