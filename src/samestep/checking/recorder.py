"""Records a few steps of one worker, real or a stand-in."""

from __future__ import annotations

import contextlib
import random
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

from samestep.batches.nest import tensors
from samestep.buffers.named_tensors import find_named_buffers
from samestep.buffers.policies import assign_policies
from samestep.checking.attributes import fingerprint, held_by
from samestep.checking.operators import OperatorWatch, Phase, num_compiled, process_settings
from samestep.checking.recording import Event, Recording, Turn, When
from samestep.checking.surroundings import Surroundings
from samestep.errors import ConfigError, Error
from samestep.identity import digest, plain_names
from samestep.streams import GlobalStreams, seed_globals, stream_seed
from samestep.towers.losses import LossSum
from samestep.towers.report import Report
from samestep.towers.step import Step
from samestep.towers.tower import Tower
from samestep.towers.towers import Towers
from samestep.watching.passes.pass_mode import not_followed
from samestep.workers.job import Job

__all__ = ["Subject", "Trial", "record"]

Subject = Callable[[Job], tuple[Step, Iterable[Any]]]
"""What is recorded: a function that makes one worker's step and an endless iterable of batches."""

_recorded: weakref.WeakSet[nn.Module] = weakref.WeakSet()


@dataclass(frozen=True)
class Trial:
    """How to record."""

    number: int  # of this recording; random numbers outside the towers' turns depend on it
    steps: int  # how many to take
    operators: bool = False  # whether to record every operator
    shown: frozenset[tuple[str, str]] = frozenset()  # warnings that have been shown


def record(subject: Subject, job: Job, trial: Trial) -> Recording:
    """Build what `subject` makes, take a few steps as one worker, and return what happened in them.

    Global generators are seeded alike in all trials before worker 0's build, because all workers take its
    weights. They are seeded differently on other workers, and outside the towers' turns, where training does
    not keep them alike. An error of samestep in a step ends the recording, and is part of it.

    Raises:
        ConfigError: `subject` returned a model that was recorded before, or one that cannot be trained.
    """
    streams = GlobalStreams.capture(job.device)
    torch.set_num_threads(job.threads)
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # like a new process, which has compiled nothing
    try:
        seed_globals(stream_seed(0, "build", job.rank), job.device)
        step, batches = subject(job)
        _check_new(step.towers.model)
        recorder = _Recorder(step, trial)
        seed_globals(stream_seed(trial.number, "outside turns", job.world_size, job.rank), job.device)
        return recorder.run(batches)
    finally:
        streams.restore()


def _check_new(model: nn.Module) -> None:
    if model in _recorded:
        raise ConfigError("build() returned the same model again: expected a new one from each call")
    _recorded.add(model)


class _Recorder:
    """Records the turns of one worker while its `Step` runs as usual."""

    def __init__(self, step: Step, trial: Trial) -> None:
        self._step = step
        self._loss_fn = step.loss_fn
        self._num_steps = trial.steps
        self._towers = step.towers
        self._model = step.towers.model
        self._built = held_by(self._surroundings(), self._model)
        self._recording = Recording(process_settings())
        self._turn: Turn | None = None
        self._last: Turn | None = None
        self._generators: dict[str, object] = {}  # states before the turn
        self._seed = 0  # of torch's global generator, before the turn
        self._watch = OperatorWatch(self._towers.job.device, self._write) if trial.operators else None
        policies = assign_policies(find_named_buffers(self._model), self._towers._settings.buffers)
        self._ignored = {name for name, policy in policies.items() if policy == "ignore"}
        step.loss_fn = self._loss
        step.towers = cast(Towers, _Turns(step.towers, self))

    def _surroundings(self) -> Surroundings:
        return Surroundings(self._model, self._loss_fn, self._step.optimizer)

    def run(self, batches: Iterable[Any]) -> Recording:
        """Take the steps, up to the first that fails."""
        # On autograd nodes, because samestep warns about hooks on parameters. `nodes` keeps them alive.
        trained = {name: p for name, p in self._parameters().items() if p.requires_grad}
        nodes = {name: get_gradient_edge(parameter).node for name, parameter in trained.items()}
        hooks = [node.register_prehook(partial(self._write_gradient, name)) for name, node in nodes.items()]
        self._open(When(0, "build"))
        self._close_with_weights()
        if self._watch is not None:
            self._watch.follow(self._surroundings().modules)
        with not_followed(), contextlib.nullcontext() if self._watch is None else self._watch:
            for batch in islice(batches, self._num_steps):
                if not self._take_step(batch):
                    break
        for hook in hooks:
            hook.remove()
        self._recording.digest = digest(self._model)
        return self._recording

    def _take_step(self, batch: Any) -> bool:
        """Take a step; return False if samestep raised an error."""
        number = self._towers.step
        try:
            self._step(batch)
        except Error as error:
            self._recording.error = error
            self._open(When(number, "error"))  # notes what the last pass has changed
            self._turn = None
            self._recording.unaveraged = self._unaveraged()
            return False
        if self._turn is None:  # the step did not average by `Towers.average`
            self._open(When(number, "update"))
        self._close_with_weights()
        return True

    def open_tower(self, step: int, tower: Tower) -> None:
        """Start a tower's turn."""
        self._open(When(step, f"tower {tower._index}"), tower.batch)
        for name, rows in _named_rows(tower.batch):
            self._write_tensor("rows", name, rows)

    def open_update(self, step: int) -> None:
        """Start the turn after the average."""
        self._open(When(step, "update"))
        self._recording.unaveraged = self._unaveraged()
        for name, parameter in self._parameters().items():
            if parameter.grad is not None:
                self._write_tensor("average", name, parameter.grad)
                if self._watch is not None:
                    self._watch.note(parameter.grad)
        if self._watch is not None:
            self._watch.phase = "update"

    def close(self) -> None:
        """End the turn."""
        assert self._turn is not None
        after = _other_generators()
        self._turn.drew = tuple(name for name in after if after[name] != self._generators[name])
        self._turn.is_reseeded = torch.default_generator.initial_seed() != self._seed
        self._turn.settings = process_settings()
        self._turn.num_compiled = num_compiled() - self._turn.num_compiled
        self._turn = None

    def _unaveraged(self) -> tuple[str, ...]:
        """Name the parameters that the optimizer updates by gradients of this worker alone."""
        own = set(map(id, self._towers._replica.model.parameters()))  # `also` included
        names = {id(parameter): name for name, parameter in self._surroundings().parameters()}
        listed = [parameter for group in self._step.optimizer.param_groups for parameter in group["params"]]
        return tuple(
            names.get(id(parameter), f"a parameter of shape {tuple(parameter.shape)}")
            for parameter in listed
            if id(parameter) not in own and parameter.requires_grad
            if parameter.grad is not None or self._recording.error is not None
        )

    def _open(self, when: When, batch: Any = None) -> None:
        with self._during("paused"):
            surroundings = self._surroundings()
            held, weights = held_by(surroundings, self._model), self._weights()
            self._note_written(weights)
            changed = {place: value for place, value in held.items() if self._built.get(place) != value}
            self._turn = self._last = Turn(when, self._built, changed, weights, num_compiled=num_compiled())
            self._recording.turns[when] = self._turn
            if self._watch is not None:
                self._watch.start_turn([*surroundings.tensors(), *_named_rows(batch)])
        self._generators, self._seed = _other_generators(), torch.default_generator.initial_seed()

    def _parameters(self) -> dict[str, nn.Parameter]:
        return plain_names(dict(self._model.named_parameters()))

    def _weights(self) -> dict[str, str]:
        return {name: fingerprint(parameter) for name, parameter in self._parameters().items()}

    def _note_written(self, weights: dict[str, str]) -> None:
        """Note which parameters of the model the last pass has written to, and their modules."""
        if self._last is not None and self._last.when.is_tower:
            before = self._last.weights
            changed = [name for name in {**before, **weights} if before.get(name) != weights.get(name)]
            if changed:
                self._last.written = self._surroundings().owners(changed)

    def _close_with_weights(self) -> None:
        if self._watch is not None:
            self._watch.phase = "none"
        kept = {name: v for name, v in self._model.state_dict().items() if name not in self._ignored}
        names = plain_names(dict(self._model.named_buffers()))
        buffers = self._surroundings().owners(names)
        for name, value in plain_names(kept).items():
            if isinstance(value, Tensor):
                self._write_tensor("weight", name, value, buffers.get(name, ""))
        self.close()

    def _loss(self, model: nn.Module, *batch: Any) -> Any:
        """Call the step's loss function, and record its result."""
        with self._during("forward"):
            result = self._loss_fn(model, *batch)
        losses = [result.total, result.count] if isinstance(result, LossSum) else result
        for leaf in pytree.tree_leaves(losses):
            if isinstance(leaf, Tensor):
                self._write_tensor("loss", "loss", leaf)
            else:
                self._write(Event("loss", "count", repr(leaf)))
        return result

    def _write_gradient(self, name: str, gradients: tuple[Tensor, ...]) -> None:
        self._write_tensor("gradient", name, gradients[0])

    def _write_tensor(self, kind: Any, name: str, tensor: Tensor, module: str = "") -> None:
        with self._during("paused"):
            self._write(Event(kind, name, fingerprint(tensor), module))

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
        return self._recorded(self._towers(batch, **options))

    def _loop(self, *options: Any) -> Iterator[Tower]:
        return self._recorded(self._towers._loop(*options))

    def _recorded(self, turns: Iterator[Tower]) -> Iterator[Tower]:
        for tower in turns:
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


def _other_generators() -> dict[str, object]:
    """Return the states of the global generators besides torch's."""
    numpy: Any = np.random.get_state()
    return {"random": random.getstate(), "np.random": (numpy[1].tobytes(), *numpy[2:])}
