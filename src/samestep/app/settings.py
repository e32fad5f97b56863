"""The options that all recipes share, and the file in the run folder that keeps them."""

from __future__ import annotations

import abc
import dataclasses
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from samestep.app.bounds import (
    Count,
    NumWorkers,
    Range,
    Threads,
    describe,
    fits,
    from_json,
    kinds_of,
)
from samestep.app.launching.nodes import DEFAULT_ID, Nodes
from samestep.checkpoint.durable import parse_json, storage, write_whole
from samestep.errors import ConfigError, DataError, MissingFileError, one_line, shown
from samestep.workers.process import DEFAULT_TIMEOUT_S

if TYPE_CHECKING:
    import torch

    from samestep.app.callbacks import Callback, Logger
    from samestep.app.evaluation import Evaluation
    from samestep.app.loggers.tensorboard import Panels
    from samestep.app.scalars import Terms
    from samestep.app.trainer import Batches, Trainer
    from samestep.towers.step import Step
    from samestep.workers.job import Job

__all__ = ["TRAINER_OPTIONS", "Settings", "is_plain", "read_settings", "read_values", "trainer_of"]

_FILE = "settings.json"
_MAX_BYTES = 1 << 20
_REMEDY = "restore it or start over"
TRAINER_OPTIONS = (
    *("run_dir", "steps", "evaluate_every", "log_every", "max_seconds", "fresh"),
    *("checkpoint_every", "checkpoint_minutes", "keep_checkpoints", "keep_every"),
)
"""Those that a `Trainer` has by the same names."""


@dataclass(frozen=True)
class Settings(abc.ABC):
    """A recipe: the options that all share, and in a class derived from it those of its own.

    Such a class is a frozen dataclass. Its docstring and the strings below its fields are the help of
    `samestep train`; a field's type says what values it may have. All options are kept in the run's folder,
    and a run is continued only with the same, but for those in `free`.

    Raises:
        ConfigError: an option has a value that its type does not allow.

    Example:
        >>> @dataclass(frozen=True)
        ... class Mine(Settings):
        ...     width: int = 64
        ...     def build(self, job):
        ...         raise NotImplementedError  # see docs/trainer.md
        >>> Mine(width=8, steps=0)
        Traceback (most recent call last):
        samestep.errors.ConfigError: --steps 0: expected an integer from 1 to 1000000000000
    """

    towers: Annotated[int, Range(1, 65_536)] = 8
    """Slices of the global batch; part of the experiment, like the batch size."""
    workers: NumWorkers = "auto"
    """Processes to start here; auto is one for each core or GPU, and at most one for each tower."""
    nnodes: str | None = None
    """Hosts of the job, as a number or MIN:MAX, each with a command like this one; see docs/clusters.md."""
    rdzv_endpoint: str | None = None
    """HOST or HOST:PORT at which several hosts meet: that of one of them, which must not be lost."""
    rdzv_id: str = DEFAULT_ID
    """Name of a job of several hosts; jobs that meet at the same place need different names."""
    threads: Threads = 1
    """CPU threads of each worker; another number may change the last bits of the result."""
    placement: Literal["auto", "even"] = "auto"
    """Which workers run which towers: auto moves them to workers that run them faster, even never does."""
    batch_size: Annotated[int, Range(1, 2**31 - 1)] = 256
    """Rows of the global batch, of all towers together."""
    steps: Count = 1000
    """Steps to train for, including those of earlier runs in the same run folder."""
    seed: Annotated[int, Range(-(2**63), 2**63 - 1)] = 0
    """Seed of the weights, the order of the data, augmentation and dropout."""
    run_dir: Path = Path("runs/unnamed")
    """Folder for checkpoints, settings and summaries; a run that is already there is continued."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on; auto is the GPU where there is one."""
    autocast: Literal["none", "bf16", "fp16"] = "none"
    """Dtype of mixed precision (torch.autocast)."""
    tf32: bool = False
    """Let GPUs multiply float32 numbers rounded to 11 significant bits (TF32): faster; the result differs."""
    log_every: Count = 50
    """Steps between printed lines."""
    summary_every: Count = 100
    """Steps between summaries for TensorBoard, which are written to RUN_DIR/summaries."""
    evaluate_every: Annotated[int, Range(0, 10**12)] = 0
    """Steps between evaluations; there is always one at the end, and with 0 no others."""
    checkpoint_every: Count = 1000
    """Steps between checkpoints; one is always written at the end."""
    checkpoint_minutes: Annotated[float, Range(0, 10**6, is_open=True)] | None = None
    """Also write a checkpoint every so many minutes."""
    keep_checkpoints: Count = 3
    """Number of newest checkpoints to keep."""
    keep_every: Annotated[int, Range(0, 10**12)] = 0
    """Also keep the checkpoints of steps that are multiples of this; 0 keeps no others."""
    max_seconds: Annotated[float, Range(0, 10**9, is_open=True)] | None = None
    """Stop after so many seconds, between two steps and with a checkpoint."""
    timeout: Annotated[float, Range(0, 10**6, is_open=True)] = DEFAULT_TIMEOUT_S
    """Seconds to wait for another worker before it counts as lost; must exceed the time of a step."""
    fresh: bool = False
    """Start over: first delete the checkpoints and summaries in the run folder."""
    log_device_placement: bool = False
    """Print at the start which worker runs which towers, and on which device."""

    recipe: ClassVar[str]
    """Its name; by default that of the file that defines the class."""
    free: ClassVar[frozenset[str]] = frozenset(
        (
            *("nnodes", "rdzv_endpoint", "rdzv_id"),
            *("workers", "threads", "placement", "run_dir", "device", "fresh", "max_seconds", "timeout"),
            *("log_every", "summary_every", "evaluate_every", "log_device_placement"),
            *("checkpoint_every", "checkpoint_minutes", "keep_checkpoints", "keep_every"),
        )
    )
    """Settings that may change when a run is continued: where and how it runs, not what is computed.

    An optional folder has to stay given, or stay left out."""
    per_worker: ClassVar[frozenset[str]] = frozenset(
        ("data_dir", "loader_processes", "workers", "rdzv_endpoint")
    )
    """Settings that may differ between the workers of a job: what a machine has, and how it gets at data."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "recipe" not in vars(cls):
            cls.recipe = f"{cls.__module__.rpartition('.')[2]}.py"

    def __post_init__(self) -> None:
        for name, kind in kinds_of(type(self)).items():
            value = getattr(self, name)
            if not fits(kind, value):
                raise ConfigError(f"--{name.replace('_', '-')} {_shown(value)}: expected {describe(kind)}")
        Nodes.of(self.nnodes, self.rdzv_endpoint, self.rdzv_id)

    @abc.abstractmethod
    def build(self, job: Job) -> Trainer:
        """Make model, data, step and the rest, alike on every worker; return `self.trainer(...)`."""

    def trainer(  # noqa: PLR0913 - what a `Trainer` takes
        self,
        step: Step,
        loader: Batches,
        *,
        evaluate: Evaluation | None = None,
        loggers: Sequence[Logger] | None = None,
        callbacks: Sequence[Callback] = (),
        terms: Terms | None = None,
        panels: Panels | None = None,
    ) -> Trainer:
        """Return a `Trainer` with these options.

        Args:
            step: see `Trainer`, as for the others.
            loader: of its batches.
            evaluate: what to measure on the test examples.
            loggers: by default `TensorBoard`; where that is not installed, a line says so.
            callbacks: to call on all workers.
            terms: of the loss.
            panels: what `TensorBoard` shows, where `loggers` is left out.
        """
        from samestep.app.trainer import Trainer

        if loggers is None:
            loggers = self._summaries(panels, step.towers.job)
        options: dict[str, Any] = {name: getattr(self, name) for name in TRAINER_OPTIONS}
        return Trainer(
            step,
            loader,
            **options,
            evaluate=evaluate,
            loggers=loggers,
            callbacks=callbacks,
            terms=terms,
            name=self.recipe,
            log_placement=self.log_device_placement,
            settings=self,
        )

    def _summaries(self, panels: Panels | None, job: Job) -> list[Logger]:
        from samestep.app.loggers.tensorboard import TensorBoard

        try:
            return [TensorBoard(self.summary_every, panels=panels)]
        except ConfigError as error:  # it is not installed
            if job.is_first:
                print(f"samestep: no summaries are written: {error}", file=sys.stderr, flush=True)
            return []

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The dtype that `autocast` names."""
        import torch

        return {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}[self.autocast]

    def write(self) -> None:
        """Write the settings to the run folder.

        Raises:
            StorageError: the disk does not take it.
        """
        values = {name: str(v) if isinstance(v, Path) else v for name, v in dataclasses.asdict(self).items()}
        write_whole(self.run_dir / _FILE, json.dumps({"recipe": self.recipe, **values}, indent=2) + "\n")

    def check_same_experiment(self) -> None:
        """Compare with the settings in the run folder, if there are any.

        Raises:
            ConfigError: a setting that the result depends on has changed.
        """
        try:
            earlier = read_values(self.run_dir)
        except MissingFileError:
            return
        self.check_same(earlier)

    def check_same(self, earlier: object) -> None:
        """Compare with earlier settings of the run, as a dict; anything else says nothing.

        Raises:
            ConfigError: a setting that the result depends on has changed.
        """
        if not isinstance(earlier, dict):
            return
        current = {"recipe": self.recipe, **dataclasses.asdict(self)}
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for name in sorted(current):
            # What is left out had the default, in a version that had no such option.
            values = earlier.get(name, defaults.get(name)), current[name]
            is_free = name in self.free and not (name.endswith("_dir") and None in values)
            if not is_free and not (is_plain(values[0]) and values[0] == values[1]):
                before, now = map(_shown, values)
                raise ConfigError(
                    f"{self.run_dir} was trained with {name} = {before}, not {now}: use the same value, "
                    "choose another --run-dir, or start over with --fresh"
                )

    def must_match(self) -> dict[str, Any]:
        """Return what `check_same` compares: the same for every place and placement of the run."""
        values = dataclasses.asdict(self)
        folders = {n: None if v is None else "given" for n, v in values.items() if n.endswith("_dir")}
        return {"recipe": self.recipe, **{n: v for n, v in values.items() if n not in self.free}, **folders}


def trainer_of(settings: Settings, job: Job) -> Trainer:
    """Return the trainer that a recipe builds.

    Raises:
        ConfigError: it builds something else.
    """
    trainer = settings.build(job)
    if not hasattr(trainer, "step"):
        raise ConfigError(
            f"{settings.recipe}: build returned {shown(trainer)}: expected "
            "`return self.trainer(step, loader, ...)`"
        )
    return trainer


def is_plain(value: object) -> bool:
    """Say whether a value can be compared with one of a checkpoint: in a forged one there may be anything."""
    return isinstance(value, int | float | str | None)


def read_settings(run_dir: Path, recipes: Mapping[str, type[Settings]]) -> Settings:
    """Return the settings of the run in a folder.

    Raises:
        ConfigError: it is a run of another recipe, in a file.
        MissingFileError: there is no run.
        DataError: its settings cannot be read.
    """
    path = run_dir / _FILE
    values = read_values(run_dir)
    recipe = values.get("recipe")
    kind = recipes.get(recipe) if isinstance(recipe, str) else None
    if kind is None and isinstance(recipe, str) and recipe.endswith(".py"):
        raise ConfigError(f"{path}: recipe = {shown(recipe)} is a file: give its path with --recipe")
    if kind is None:
        raise DataError(f"{path}: recipe = {shown(recipe)}, expected one of {', '.join(recipes)}; {_REMEDY}")
    known = {name: _parse(path, name, of_kind, values) for name, of_kind in kinds_of(kind).items()}
    try:
        return kind(**{name: value for name, value in known.items() if name in values} | {"run_dir": run_dir})
    except ConfigError as error:  # settings that do not go together
        raise DataError(f"{path}: {error}; {_REMEDY}") from error


def _parse(path: Path, name: str, kind: Any, values: Mapping[str, Any]) -> Any:
    """Return one of the values as its field has it; None where it is not there."""
    if name not in values:
        return None
    try:
        return from_json(kind, values[name])
    except ValueError as error:
        raise DataError(f"{path}: {name} = {shown(values[name])}, {error}; {_REMEDY}") from None


def read_values(run_dir: Path) -> dict[str, Any]:
    """Return what settings.json in a run folder holds, whether these are settings or not.

    Raises:
        MissingFileError: there is none.
        DataError: it is no JSON object.
    """
    path = run_dir / _FILE
    with storage(path, "read"):
        if not os.path.lexists(path):
            raise MissingFileError(f"{path}: not found; expected a run folder, as `samestep train` writes it")
        if not path.is_file():
            raise DataError(f"{path}: not a file, expected JSON with the run's settings; {_REMEDY}")
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise DataError(f"{path}: expected at most {_MAX_BYTES} bytes; {_REMEDY}")
    try:
        values = parse_json(content)
    except ValueError as error:
        raise DataError(f"{path}: cannot be read as JSON ({error}); {_REMEDY}") from error
    if not isinstance(values, dict):
        raise DataError(f"{path}: expected a JSON object with the run's settings; {_REMEDY}")
    return values


def _shown(value: object) -> str:
    """Return a value for a message, text without quotes."""
    return one_line(str(value), 80) if isinstance(value, str | Path) else shown(value)
