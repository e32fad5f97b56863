"""The options that all recipes share, and the file settings.json in the run folder."""

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
"""Options that `Trainer` has under the same names."""


@dataclass(frozen=True)
class Settings(abc.ABC):
    """Base class of recipes: the options that all recipes share. A subclass adds its own options and `build`.

    A subclass is a frozen dataclass. Its docstring and the strings below its fields are the help of
    `samestep train`; a field's type defines the allowed values. All options are saved in the run folder. A
    run can only be resumed with the same options, except for those in `free`.

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
    """Processes to start here; auto is one per core or GPU, and at most one per tower."""
    nnodes: str | None = None
    """Number of hosts, or MIN:MAX; run this command on each of them; see docs/clusters.md."""
    rdzv_endpoint: str | None = None
    """HOST or HOST:PORT of the host at which all hosts meet; the job ends if it is lost."""
    rdzv_id: str = DEFAULT_ID
    """Name of a job of several hosts; jobs with the same --rdzv-endpoint need different names."""
    threads: Threads = 1
    """CPU threads of each worker; another number may change the last bits of the result."""
    placement: Literal["auto", "even"] = "auto"
    """Which workers run which towers: auto moves towers to faster workers, even never moves them."""
    batch_size: Annotated[int, Range(1, 2**31 - 1)] = 256
    """Rows of the global batch, of all towers together."""
    steps: Count = 1000
    """Steps to train for, including those of earlier runs in the same run folder."""
    seed: Annotated[int, Range(-(2**63), 2**63 - 1)] = 0
    """Seed of the weights, the order of the data, augmentation and dropout."""
    run_dir: Path = Path("runs/unnamed")
    """Folder for checkpoints, settings and summaries; an earlier run in this folder is continued."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on; auto is the GPU if there is one."""
    autocast: Literal["none", "bf16", "fp16"] = "none"
    """Dtype of mixed precision (torch.autocast)."""
    tf32: bool = False
    """Let GPUs round float32 factors to 11 significant bits (TF32): faster, with different results."""
    log_every: Count = 50
    """Steps between printed lines."""
    summary_every: Count = 100
    """Steps between summaries for TensorBoard, written to RUN_DIR/summaries."""
    evaluate_every: Annotated[int, Range(0, 10**12)] = 0
    """Steps between evaluations; 0 evaluates only at the end."""
    checkpoint_every: Count = 1000
    """Steps between checkpoints; one is always written at the end."""
    checkpoint_minutes: Annotated[float, Range(0, 10**6, is_open=True)] | None = None
    """Also write a checkpoint every so many minutes."""
    keep_checkpoints: Count = 3
    """Number of newest checkpoints to keep."""
    keep_every: Annotated[int, Range(0, 10**12)] = 0
    """Also keep the checkpoints of steps that are multiples of this; 0 keeps no others."""
    max_seconds: Annotated[float, Range(0, 10**9, is_open=True)] | None = None
    """Stop after this many seconds, between two steps, with a checkpoint."""
    timeout: Annotated[float, Range(0, 10**6, is_open=True)] = DEFAULT_TIMEOUT_S
    """Seconds to wait for another worker before it counts as lost; must exceed the time of a step."""
    fresh: bool = False
    """Start over: first delete the checkpoints and summaries in the run folder."""
    log_device_placement: bool = False
    """At the start, print which worker runs which towers on which device."""

    recipe: ClassVar[str]
    """The recipe's name; by default that of the file that defines the class."""
    free: ClassVar[frozenset[str]] = frozenset(
        (
            *("nnodes", "rdzv_endpoint", "rdzv_id"),
            *("workers", "threads", "placement", "run_dir", "device", "fresh", "max_seconds", "timeout"),
            *("log_every", "summary_every", "evaluate_every", "log_device_placement"),
            *("checkpoint_every", "checkpoint_minutes", "keep_checkpoints", "keep_every"),
        )
    )
    """Options that may change when a run is resumed: where and how it runs, not what is computed.

    An optional folder (`*_dir`) in this set may change, but neither be added nor left out."""
    per_worker: ClassVar[frozenset[str]] = frozenset(
        ("data_dir", "loader_processes", "workers", "rdzv_endpoint")
    )
    """Options that may differ between the workers of a job, because they depend on the machine."""

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
        """Build model, data and step, in the same way on every worker; return `self.trainer(...)`."""

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
            step: as for `Trainer`; so are the other arguments.
            loader: the loader of the step's batches.
            evaluate: the evaluation on the test examples.
            loggers: by default `TensorBoard`; without tensorboard, a line says that summaries are missing.
            callbacks: called on all workers.
            terms: the terms of the loss that depend only on the weights.
            panels: the pictures that the default `TensorBoard` shows.
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
        except ConfigError as error:  # tensorboard is not installed
            if job.is_first:
                print(f"samestep: no summaries are written: {error}", file=sys.stderr, flush=True)
            return []

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The dtype of `autocast`; None for "none"."""
        import torch

        return {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}[self.autocast]

    def write(self) -> None:
        """Write the settings to the run folder.

        Raises:
            StorageError: the file cannot be written.
        """
        values = {"recipe": self.recipe, **self.plain_values()}
        write_whole(self.run_dir / _FILE, json.dumps(values, indent=2) + "\n")

    def plain_values(self) -> dict[str, Any]:
        """Return the options by name, as settings.json has them."""
        return {name: _plain(value) for name, value in dataclasses.asdict(self).items()}

    def check_same_experiment(self) -> None:
        """Compare these settings with those in the run folder, if there are any.

        Raises:
            ConfigError: a setting that is not in `free` has changed.
        """
        try:
            earlier = read_values(self.run_dir)
        except MissingFileError:
            return
        self.check_same(earlier)

    def check_same(self, earlier: object) -> None:
        """Compare these settings with a dict of the run's earlier ones; ignore anything but a dict.

        Raises:
            ConfigError: a setting that is not in `free` has changed.
        """
        if not isinstance(earlier, dict):
            return
        current = {"recipe": self.recipe, **self.plain_values()}
        defaults = {field.name: _plain(field.default) for field in dataclasses.fields(self)}
        for name in current:  # the recipe first
            # An earlier version may not have had this option: then compare with its default.
            values = earlier.get(name, defaults.get(name)), current[name]
            is_free = name in self.free and not (name.endswith("_dir") and None in values)
            if not is_free and not (is_plain(values[0]) and values[0] == values[1]):
                before, now = map(_shown, values)
                raise ConfigError(
                    f"{self.run_dir} was trained with {name} = {before}, not {now}: use the same value, "
                    "choose another --run-dir, or start over with --fresh"
                )

    def must_match(self) -> dict[str, Any]:
        """Return the settings that `check_same` compares; of folders in `free`, whether they are given."""
        values = self.plain_values()
        fixed = {name: value for name, value in values.items() if name not in self.free}
        folders = {name for name in values if name in self.free and name.endswith("_dir")}
        given = {name: None if values[name] is None else "given" for name in folders}
        return {"recipe": self.recipe, **fixed, **given}


def trainer_of(settings: Settings, job: Job) -> Trainer:
    """Return the trainer that a recipe builds.

    Raises:
        ConfigError: `build` returned something else.
    """
    trainer = settings.build(job)
    if not hasattr(trainer, "step"):
        raise ConfigError(
            f"{settings.recipe}: build returned {shown(trainer)}: expected "
            "`return self.trainer(step, loader, ...)`"
        )
    return trainer


def _plain(value: Any) -> Any:
    """Return an option's value as settings.json has it, with a path as text."""
    return str(value) if isinstance(value, Path) else value


def is_plain(value: object) -> bool:
    """Return whether a value is a number, text or None; a forged checkpoint may hold any other type."""
    return isinstance(value, int | float | str | None)


def read_settings(
    run_dir: Path, recipes: Mapping[str, type[Settings]], *, own: type[Settings] | None = None
) -> Settings:
    """Return the settings of the run in a folder.

    Args:
        run_dir: the run folder.
        recipes: the installed recipes by name.
        own: the recipe in the file that the user has passed, which must be that of the run.

    Raises:
        ConfigError: the run has another recipe than `own`, or its recipe is in a file that was not passed.
        MissingFileError: there is no settings.json.
        DataError: settings.json cannot be read, or has a wrong value.
    """
    path = run_dir / _FILE
    values = read_values(run_dir)
    kind = _kind_of(path, values.get("recipe"), recipes, own)
    known = {name: _parse(path, name, of_kind, values) for name, of_kind in kinds_of(kind).items()}
    try:
        return kind(**{name: value for name, value in known.items() if name in values} | {"run_dir": run_dir})
    except ConfigError as error:  # settings that are not allowed together
        raise DataError(f"{path}: {error}; {_REMEDY}") from error


def _kind_of(
    path: Path, recipe: object, recipes: Mapping[str, type[Settings]], own: type[Settings] | None
) -> type[Settings]:
    """Return the class of the recipe that settings.json names."""
    kind = recipes.get(recipe) if isinstance(recipe, str) else None
    is_file = kind is None and isinstance(recipe, str) and recipe.endswith(".py")
    if own is not None and own.recipe == recipe:
        return own
    if own is not None and (kind is not None or is_file):
        remedy = "give the path of that file with --recipe" if is_file else "leave out --recipe"
        raise ConfigError(f"{path}: recipe = {shown(recipe)}, not {shown(own.recipe)}: {remedy}")
    if is_file:
        raise ConfigError(f"{path}: recipe = {shown(recipe)} is a file: give its path with --recipe")
    if kind is None:
        raise DataError(f"{path}: recipe = {shown(recipe)}, expected one of {', '.join(recipes)}; {_REMEDY}")
    return kind


def _parse(path: Path, name: str, kind: Any, values: Mapping[str, Any]) -> Any:
    """Convert the value `name` to the type of its field; return None if it is missing."""
    if name not in values:
        return None
    try:
        return from_json(kind, values[name])
    except ValueError as error:
        raise DataError(f"{path}: {name} = {shown(values[name])}, {error}; {_REMEDY}") from None


def read_values(run_dir: Path) -> dict[str, Any]:
    """Return the contents of settings.json in a run folder, without checking the values.

    Raises:
        MissingFileError: there is no such file.
        DataError: the file is not a JSON object.
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
    """Format a value for a message, with text unquoted."""
    return one_line(str(value), 80) if isinstance(value, str | Path) else shown(value)
