"""What a recipe consists of: the settings that a user chooses, and the parts that they make."""

from __future__ import annotations

import abc
import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from samestep.checkpoint.durable import parse_json, write_whole
from samestep.data.loader import TowerLoader
from samestep.data.readers import BatchedDataset
from samestep.errors import ConfigError, DataError, MissingFileError
from samestep.towers.step import Step
from samestep.workers.job import DEFAULT_TIMEOUT_S, Job

__all__ = ["Experiment", "Settings", "read_settings"]

_FILE = "settings.json"


@dataclass(frozen=True)
class Experiment:
    """The parts of one training run.

    Attributes:
        step: takes one training step.
        loader: gives its batches.
        test: the examples to evaluate on.
        count: `count(model, batch)` -> int64 tensor of counts that add up over batches.
        figures: turns the summed counts into named figures, the main one first.
        terms: `terms(model)` -> those terms of the loss that depend on the weights alone, by name, for the
            summaries; worker 0 calls it before each step, without gradients.
        panels: `panels(model, batch)` -> uint8 [n, 3, height, width], what the summaries show of the rows of
            a tower instead of the input pictures; worker 0 calls it on the first rows of each of its
            towers, without gradients and with the model in evaluation mode.
        test_chunk_rows: test examples that are evaluated at once; 1 where their shapes differ.
    """

    step: Step
    loader: TowerLoader
    test: BatchedDataset
    count: Callable[[nn.Module, Any], Tensor]
    figures: Callable[[Tensor], Mapping[str, float]]
    terms: Callable[[nn.Module], Mapping[str, float | Tensor]] | None = None
    panels: Callable[[nn.Module, Any], Tensor] | None = None
    test_chunk_rows: int = 250

    @property
    def model(self) -> nn.Module:
        """The model in training."""
        return self.step.towers.model

    @property
    def evaluated(self) -> nn.Module:
        """The model to evaluate: with the moving averages of the weights, where they are kept."""
        return self.step.average.module if self.step.average is not None else self.model


@dataclass(frozen=True)
class Settings(abc.ABC):
    """The options that all recipes share."""

    towers: int = 8
    """Logical slices of the global batch; part of the experiment, like the batch size."""
    workers: int | Literal["auto"] = "auto"
    """Processes to start here; auto is one for each core or GPU, at most one a tower."""
    threads: int = 1
    """CPU threads of each worker; the bits depend on it."""
    batch_size: int = 256
    """The global batch, in rows."""
    steps: int = 1000
    """Steps to take in all, those of earlier runs in the same folder included."""
    seed: int = 0
    """Of the weights, the order of the data, augmentation and dropout."""
    run_dir: Path = Path("runs/unnamed")
    """Where checkpoints and settings are kept; training goes on from what is there."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What to compute on; auto is the GPU where there is one."""
    autocast: Literal["none", "bf16", "fp16"] = "none"
    """Mixed precision."""
    log_every: int = 50
    """Steps between printed lines."""
    summary_every: int = 100
    """Steps between summaries for TensorBoard, in the folder summaries of the run's."""
    checkpoint_every: int = 1000
    """Steps between checkpoints; there is always one at the end."""
    checkpoint_minutes: float | None = None
    """Write a checkpoint whenever so many minutes have passed, too."""
    keep_checkpoints: int = 3
    """How many of the newest checkpoints to keep."""
    keep_every: int = 0
    """Keep the checkpoints of steps that are multiples of this as well; 0 is none."""
    max_seconds: float | None = None
    """Stop after the step in which so many seconds since the start are over, with a checkpoint."""
    timeout: float = DEFAULT_TIMEOUT_S
    """Seconds until a worker that does not answer counts as lost; more than the slowest step takes."""
    fresh: bool = False
    """Start over: delete the checkpoints and summaries in the run folder first."""
    log_device_placement: bool = False
    """Print at the start which worker runs which towers, and on what."""

    recipe: ClassVar[str]
    free: ClassVar[frozenset[str]] = frozenset(
        (
            *("workers", "threads", "run_dir", "device", "fresh", "max_seconds", "timeout"),
            *("log_every", "summary_every", "log_device_placement"),
            *("checkpoint_every", "checkpoint_minutes", "keep_checkpoints", "keep_every"),
        )
    )
    """Settings that may change when a run goes on: where and how it runs, not what is computed.

    A folder that may be left out has to stay left out, or stay given."""

    def __post_init__(self) -> None:
        counts = (
            "towers",
            "threads",
            "batch_size",
            "steps",
            "log_every",
            "summary_every",
            "checkpoint_every",
            "keep_checkpoints",
        )
        for name in counts:
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} {getattr(self, name)}: expected at least 1")
        if self.keep_every < 0:
            raise ConfigError(f"--keep-every {self.keep_every}: expected a number of steps, or 0 for none")
        for name in ("checkpoint_minutes", "max_seconds", "timeout"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"--{name.replace('_', '-')} {value:g}: expected more than 0")

    @abc.abstractmethod
    def build(self, job: Job) -> Experiment:
        """Make the parts: data, model, optimizer, step. The same on every worker."""

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The dtype that `autocast` names."""
        return {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}[self.autocast]

    def write(self) -> None:
        """Note the settings in the run folder.

        Raises:
            StorageError: the disk does not take it.
        """
        values = {name: str(v) if isinstance(v, Path) else v for name, v in dataclasses.asdict(self).items()}
        write_whole(self.run_dir / _FILE, json.dumps({"recipe": self.recipe, **values}, indent=2) + "\n")

    def check_same_experiment(self) -> None:
        """Compare with the settings noted in the run folder, if any.

        Raises:
            ConfigError: a setting that the result depends on is another one.
        """
        path = self.run_dir / _FILE
        if not path.exists():
            return
        noted = _read(path)
        current = {"recipe": self.recipe, **dataclasses.asdict(self)}
        for name in sorted(current.keys() & noted.keys()):
            values = noted[name], current[name]
            is_free = name in self.free and not (name.endswith("_dir") and None in values)
            if not is_free and values[0] != values[1]:
                raise ConfigError(
                    f"{self.run_dir} was trained with {name} = {noted[name]}, not {current[name]}: go on "
                    "with the same, choose another --run-dir, or start over with --fresh"
                )


def read_settings(run_dir: Path, recipes: Mapping[str, type[Settings]]) -> Settings:
    """Return the settings of the run in a folder.

    Raises:
        MissingFileError: there is no run.
        DataError: its settings cannot be read.
    """
    values = _read(run_dir / _FILE)
    kind = recipes.get(values.pop("recipe", ""))
    if kind is None:
        raise DataError(f"{run_dir / _FILE}: its recipe is unknown, expected one of {', '.join(recipes)}")
    known = {field.name: field.default for field in dataclasses.fields(kind)}
    for name in values.keys() & known.keys():
        if not _is_like(name, values[name], known[name]):
            raise DataError(
                f"{run_dir / _FILE}: {name} = {values[name]!r}, expected a value like {str(known[name])!r}; "
                "restore it or start over"
            )
    paths = {
        name: Path(values[name]) for name in values if name.endswith("_dir") and values[name] is not None
    }
    return kind(**{**{n: v for n, v in values.items() if n in known}, **paths, "run_dir": run_dir})


def _is_like(name: str, value: object, default: object) -> bool:
    """Say whether a value from JSON can stand where the default does."""
    if default is None:  # a folder or a number that may be left out
        return value is None or type(value) in ((str,) if name.endswith("_dir") else (int, float))
    if isinstance(default, str):
        return isinstance(value, (str, int))  # the number of workers is a number or "auto"
    if isinstance(default, Path):
        return isinstance(value, str)
    if isinstance(default, float):
        return type(value) in (int, float)
    return type(value) is type(default)


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise MissingFileError(
            f"{path}: not there; expected the folder of a run, as `samestep train` writes it"
        )
    if not path.is_file():
        raise DataError(
            f"{path}: is no file, expected JSON with the run's settings; restore it or start over"
        )
    try:
        values = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as JSON ({error}); restore it or start over") from error
    if not isinstance(values, dict):
        raise DataError(f"{path}: expected a JSON object with the run's settings")
    return values
