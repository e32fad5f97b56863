"""The trainer: a loop around a step, with progress, checkpoints, evaluation and final metrics."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any, Protocol

from torch import nn

from samestep.app.bounds import describe as describe_kind, fits, kinds_of
from samestep.app.callbacks import PERIOD, Callback, Logger
from samestep.app.display import print_placement
from samestep.app.evaluation import Evaluation, describe
from samestep.app.hooks import Hooks
from samestep.app.interruption import Interruption, StopFlags
from samestep.app.lock import RunLock
from samestep.app.loop import Loop
from samestep.app.output import lasting_output
from samestep.app.resume import check_fresh, open_run
from samestep.app.scalars import Terms
from samestep.app.settings import TRAINER_OPTIONS, Settings, is_plain
from samestep.app.writer import CheckpointWriter
from samestep.arguments import check_callable, check_kind, whole
from samestep.errors import ConfigError, shown
from samestep.identity import digest
from samestep.streams import GlobalStreams
from samestep.towers.step import Step
from samestep.workers.agreement import from_first_worker
from samestep.workers.job import Job

__all__ = ["Batches", "Trainer", "TrainingResult"]


class Batches(Protocol):
    """A loader like `TowerLoader`: iterating over it yields an epoch's batches, from its position on."""

    def __iter__(self) -> Iterator[Any]: ...
    def state_dict(self) -> dict[str, Any]: ...  # noqa: D102
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...  # noqa: D102


@dataclass(frozen=True)
class TrainingResult:
    """The result of `Trainer.run`.

    Attributes:
        step: number of steps taken.
        metrics: metrics of the final evaluation; empty if there was none, or `max_seconds` ended the run.
        digest: the SHA-256 of the weights, see `samestep.digest`.
        reason: "max_seconds" if that ended the run before its last step; otherwise None.
    """

    step: int
    metrics: Mapping[str, float]
    digest: str
    reason: str | None = None


@dataclass(eq=False, repr=False)
class Trainer:
    """Trains up to a given step, with checkpoints, evaluation and logging; construct it on all workers.

    A run has its own folder. The trainer writes checkpoints there in the background, and `run` resumes from
    the newest whole one, on any number of workers, with the same bits as an uninterrupted run. It shows
    progress on the terminal, appends scalars to `metrics.jsonl`, and evaluates during training and at the
    end. SIGTERM, SIGINT or SIGHUP to any worker stops all workers after the same step, with a checkpoint, by
    `SystemExit`. In a job of `samestep.launch` or `samestep train`, a killed worker is replaced while the
    others continue, with the same bits; see docs/reliability.md.

    Args:
        step: the training step.
        loader: a `TowerLoader`, or another loader with `__iter__`, `state_dict` and `load_state_dict`.
        run_dir: folder for checkpoints and metrics; an earlier run in this folder is continued. Worker
            0's folder is used on all workers, so its name may include the time.
        steps: steps to train for, including those of earlier runs in the same folder.
        evaluate: the evaluation on the test examples.
        evaluate_every: steps between evaluations; 0 evaluates only at the end.
        loggers: called on worker 0; see `Logger`.
        callbacks: called on all workers; see `Callback`.
        terms: `terms(model)` -> {name: value} of the loss terms that depend only on the weights, for the
            loggers; called before each step, without gradients, on worker 0 and on workers that may replace
            it.
        checkpoint_every: steps between checkpoints; one is always written at the end.
        checkpoint_minutes: also write a checkpoint every so many minutes.
        keep_checkpoints: number of newest checkpoints to keep.
        keep_every: also keep the checkpoints of steps that are multiples of this; 0 keeps no others.
        max_seconds: stop after this many seconds, between two steps, with a checkpoint.
        log_every: steps between printed lines.
        fresh: start over: first delete the run's checkpoints and metrics.
        must_match: numbers or texts by name that must be the same when the run is resumed. The optimizer's
            defaults, batch size, seeds and number of towers are always compared.
        log_placement: print which worker runs which towers on which device.
        name: the name of the run on the terminal.
        settings: the settings of a recipe, to be written to `settings.json`.

    Attributes:
        ending: why the run ended, for `on_end`: "done", "--max-seconds", a signal's name, or the error in one
            line; None until then.
        is_stopping: whether `stop` was called.

    Raises:
        ConfigError: on construction, an option is out of range; in `run`, the folder holds another run.

    Example:
        >>> import tempfile, torch
        >>> from samestep import TowerLoader, Towers
        >>> model = nn.Linear(1, 1)
        >>> towers = Towers(model, 4)
        >>> step = Step(towers, lambda model, x: model(x).square().mean(),
        ...             torch.optim.SGD(model.parameters(), lr=0.1))
        >>> loader = TowerLoader(torch.arange(20.0)[:, None] / 20, 10, towers)
        >>> with tempfile.TemporaryDirectory() as run_dir:
        ...     result = Trainer(step, loader, run_dir=run_dir, steps=5, log_every=5).run()
        training: 4 towers on 1 worker (cpu), batches of 10 rows
        ...: step 5, loss = ... (... rows/sec; ... sec/batch; ... GiB)
        weights sha256 ...
        >>> result.step
        5
    """

    step: Step
    loader: Batches
    _: KW_ONLY
    run_dir: str | Path
    steps: int
    evaluate: Evaluation | None = None
    evaluate_every: int = 0
    loggers: Sequence[Logger] = ()
    callbacks: Sequence[Callback] = ()
    terms: Terms | None = None
    checkpoint_every: int = 1000
    checkpoint_minutes: float | None = None
    keep_checkpoints: int = 3
    keep_every: int = 0
    max_seconds: float | None = None
    log_every: int = 50
    fresh: bool = False
    must_match: Mapping[str, Any] = field(default_factory=dict)
    log_placement: bool = False
    name: str = "training"
    settings: Settings | None = None
    ending: str | None = field(default=None, init=False)
    is_stopping: bool = field(default=False, init=False)
    # The global generators when the run began; None once a checkpoint's have been loaded.
    _from_generators: GlobalStreams | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.run_dir = Path(self.run_dir)
        for name in TRAINER_OPTIONS:
            kind, value = kinds_of(Settings)[name], getattr(self, name)
            if not fits(kind, value):
                raise ConfigError(f"{name} = {value!r}: expected {describe_kind(kind)}")
        self._check_parts()
        for name, value in self.must_match.items():
            if not is_plain(value):
                raise ConfigError(f"must_match: {name} = {shown(value)}: expected a number, text or None")
        if not hasattr(self.loader, "state_dict"):
            raise ConfigError(
                f"loader is a {type(self.loader).__name__}: expected a TowerLoader, or another loader with "
                "state_dict and load_state_dict, so that the run can be continued"
            )

    def _check_parts(self) -> None:
        check_kind("step", self.step, Step, "a samestep.Step")
        check_kind("evaluate", self.evaluate, (Evaluation, NoneType), "a samestep.Evaluation, or None")
        check_kind("must_match", self.must_match, Mapping, "a mapping from names to plain values")
        if self.terms is not None:
            check_callable("terms", self.terms, "a function of the model")
        for name, kind in (("callbacks", Callback), ("loggers", Logger)):
            check_kind(
                name, getattr(self, name), (list, tuple), f"a list of samestep.{kind.__name__} objects"
            )
            for each in getattr(self, name):
                check_kind(f"one of {name}", each, kind, f"a samestep.{kind.__name__}")
        for logger in self.loggers:
            if logger.every is not None:
                whole(f"{type(logger).__name__}.every", logger.every, 1, PERIOD)

    @property
    def job(self) -> Job:
        """This process's view of the job."""
        return self.step.towers.job

    @property
    def model(self) -> nn.Module:
        """The model in training."""
        return self.step.towers.model

    @property
    def evaluated(self) -> nn.Module:
        """The model to evaluate: with the moving averages of the weights, if the step keeps them."""
        return self.step.averaged_model.module if self.step.averaged_model is not None else self.model

    def run(self) -> TrainingResult:
        """Train from the newest checkpoint, if there is one, to the last step.

        Prints the metrics of the final evaluation and, on the last line, `weights sha256 <hex>`.

        Raises:
            ConfigError: the run folder holds another experiment, or `fresh` would delete at every restart.
            DisagreementError: workers have different options, or different weights.
            DataError: the run folder has checkpoints, but none is whole; its checkpoints are gone; or the
                loader has no batches.
            LockedError: another process trains in the run folder.
            LostWorkerError: another worker is gone or silent, and the job cannot continue without it.
            StorageError: a checkpoint cannot be written.
            SystemExit: signal n stopped the run, after a checkpoint; the exit status is 128 + n.
        """
        check_fresh(self)
        self._from_generators = GlobalStreams.capture(self.job.device)
        interruption = Interruption(
            self.job, max_seconds=self.max_seconds, checkpoint_minutes=self.checkpoint_minutes
        )
        if not self.job.is_newcomer:  # a newcomer gets it when it joins
            self.run_dir = from_first_worker(self.job, lambda: self.run_dir)
        with lasting_output(), RunLock(Path(self.run_dir), self.job) as lock:
            if not self.job.is_newcomer:  # a newcomer gets its state from another worker
                open_run(self, lock)
                if self.log_placement:
                    print_placement(self.step.towers)
            return self._train(interruption, lock)

    def stop(self) -> None:
        """End the run after the next step, on all workers, as if that step were the last; for callbacks."""
        self.is_stopping = True

    def measure(self) -> dict[str, float]:
        """Evaluate the model, and return the metrics, on every worker; all workers must call this."""
        return {} if self.evaluate is None else self.evaluate(self.evaluated, self.job)

    def _train(self, interruption: Interruption, lock: RunLock) -> TrainingResult:
        """Take steps up to the last one, or until any worker has to stop."""
        self.ending, self.is_stopping = None, False
        hooks = Hooks(self, lock)
        writer = CheckpointWriter(lock, keep_last=self.keep_checkpoints, keep_every=self.keep_every)
        with interruption, writer:
            loop = Loop(self, lock, interruption, writer, hooks)
            loop.join()
            with hooks:
                loop.run()
                self.ending = loop.flags.reason or "done"
        return self._done(loop.metrics or {}) if loop.flags.reason is None else self._stopped(loop.flags)

    def _stopped(self, flags: StopFlags) -> TrainingResult:
        step = self.step.towers.step
        if self.job.is_first:
            sys.stdout.flush()
            sys.stderr.write(_goodbye(step, flags))
        if flags.exit_status:
            raise SystemExit(flags.exit_status)
        return TrainingResult(step, {}, digest(self.model), "max_seconds")

    def _done(self, metrics: Mapping[str, float]) -> TrainingResult:
        result = TrainingResult(self.step.towers.step, metrics, digest(self.model))
        if metrics:
            self.print_on_first(describe(metrics))
        self.print_on_first(f"weights sha256 {result.digest}")
        return result

    def print_on_first(self, line: str) -> None:
        """Print a line, on worker 0."""
        if self.job.is_first:
            print(line, flush=True)


def _goodbye(step: int, flags: StopFlags) -> str:
    return (
        f"samestep: stopped after step {step} by {flags.reason}; checkpoint written; run the same command "
        "to continue\n"
    )
