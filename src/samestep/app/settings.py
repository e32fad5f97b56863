"""The options that all recipes share, and the file in the run folder that keeps them."""

from __future__ import annotations

import abc
import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from samestep.app.experiment import Experiment
from samestep.checkpoint.durable import parse_json, write_whole
from samestep.errors import ConfigError, DataError, MissingFileError
from samestep.workers.job import DEFAULT_TIMEOUT_S, Job

__all__ = ["Settings", "read_settings"]

_FILE = "settings.json"


@dataclass(frozen=True)
class Settings(abc.ABC):
    """The options that all recipes share."""

    towers: int = 8
    """Slices of the global batch; part of the experiment, like the batch size."""
    workers: int | Literal["auto"] = "auto"
    """Processes to start here; auto is one for each core or GPU, and at most one for each tower."""
    threads: int = 1
    """CPU threads of each worker; another number may change the last bits of the result."""
    batch_size: int = 256
    """Rows of the global batch, of all towers together."""
    steps: int = 1000
    """Steps to train for, including those of earlier runs in the same run folder."""
    seed: int = 0
    """Seed of the weights, the order of the data, augmentation and dropout."""
    run_dir: Path = Path("runs/unnamed")
    """Folder for checkpoints, settings and summaries; a run that is already there is continued."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on; auto is the GPU where there is one."""
    autocast: Literal["none", "bf16", "fp16"] = "none"
    """Dtype of mixed precision (torch.autocast)."""
    tf32: bool = False
    """Let GPUs multiply float32 numbers rounded to 11 significant bits (TF32): faster, and another result."""
    log_every: int = 50
    """Steps between printed lines."""
    summary_every: int = 100
    """Steps between summaries for TensorBoard, which are written to RUN_DIR/summaries."""
    checkpoint_every: int = 1000
    """Steps between checkpoints; one is always written at the end."""
    checkpoint_minutes: float | None = None
    """Also write a checkpoint every so many minutes."""
    keep_checkpoints: int = 3
    """Number of newest checkpoints to keep."""
    keep_every: int = 0
    """Also keep the checkpoints of steps that are multiples of this; 0 keeps no others."""
    max_seconds: float | None = None
    """Stop after so many seconds, between two steps and with a checkpoint."""
    timeout: float = DEFAULT_TIMEOUT_S
    """Seconds to wait for another worker before it counts as lost; must exceed the time of a step."""
    fresh: bool = False
    """Start over: first delete the checkpoints and summaries in the run folder."""
    log_device_placement: bool = False
    """Print at the start which worker runs which towers, and on which device."""

    recipe: ClassVar[str]
    free: ClassVar[frozenset[str]] = frozenset(
        (
            *("workers", "threads", "run_dir", "device", "fresh", "max_seconds", "timeout"),
            *("log_every", "summary_every", "log_device_placement"),
            *("checkpoint_every", "checkpoint_minutes", "keep_checkpoints", "keep_every"),
        )
    )
    """Settings that may change when a run is continued: where and how it runs, not what is computed.

    An optional folder has to stay given, or stay left out."""
    per_worker: ClassVar[frozenset[str]] = frozenset(("data_dir", "loader_processes"))
    """Settings that may differ between the workers of a job: how a machine gets at the data."""

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
        path = self.run_dir / _FILE
        if not path.exists():
            return
        earlier = _read(path)
        current = {"recipe": self.recipe, **dataclasses.asdict(self)}
        for name in sorted(current.keys() & earlier.keys()):
            values = earlier[name], current[name]
            is_free = name in self.free and not (name.endswith("_dir") and None in values)
            if not is_free and values[0] != values[1]:
                raise ConfigError(
                    f"{self.run_dir} was trained with {name} = {earlier[name]}, not {current[name]}: use "
                    "the same value, choose another --run-dir, or start over with --fresh"
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
    if default is None:  # an optional folder or number
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
        raise MissingFileError(f"{path}: not found; expected a run folder, as `samestep train` writes it")
    if not path.is_file():
        raise DataError(
            f"{path}: not a file, expected JSON with the run's settings; restore it or start over"
        )
    try:
        values = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as JSON ({error}); restore it or start over") from error
    if not isinstance(values, dict):
        raise DataError(f"{path}: expected a JSON object with the run's settings")
    return values
