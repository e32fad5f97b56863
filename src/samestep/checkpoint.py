"""State on disk: whole or not there, checked when it is read, and free of placement.

A checkpoint is a folder:

    model.safetensors      weights and buffers, for any tool that reads safetensors
    average.safetensors    the moving averages of the weights, where they are kept
    training.pt            optimizer, scheduler and loop state, for torch.load(weights_only=True)
    manifest.json          format version, step, digest, and each file's size and SHA-256
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from samestep.digest import digest
from samestep.durable import flush
from samestep.errors import DataError, MissingFileError

__all__ = [
    "FORMAT",
    "Manifest",
    "all_checkpoints",
    "checkpoint_path",
    "keep_last",
    "load",
    "newest",
    "read_digest",
    "save",
]

FORMAT = 1

_MANIFEST = "manifest.json"
_STATE = "training.pt"
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says about itself.

    Attributes:
        step: steps taken when it was written.
        digest: `samestep.digest` of the model's weights.
        files: each file's size in bytes and SHA-256.
        state: after `load`, what was saved beside the weights, by name.
    """

    step: int
    digest: str
    files: Mapping[str, tuple[int, str]]
    state: Mapping[str, Any] = field(default_factory=dict)


def save(
    path: str | Path, *, step: int, model: nn.Module, average: nn.Module | None = None, **state: Any
) -> Path:
    """Write a checkpoint: under a temporary name, flushed to disk, then renamed.

    Call it on one worker; all have the same state.

    Args:
        path: the folder to write; one that is there already is replaced.
        step: steps taken.
        model: its `state_dict` is written as safetensors.
        average: a second module to write the same way, such as an `AveragedModel`'s `module`.
        state: optimizers, schedulers and anything else with a `state_dict`, or plain numbers, strings,
            tensors, and lists and dicts of them; None is left out.

    Returns:
        The folder.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    _write_weights(unfinished / "model.safetensors", model)
    if average is not None:
        _write_weights(unfinished / "average.safetensors", average)
    values = {n: v.state_dict() if hasattr(v, "state_dict") else v for n, v in state.items() if v is not None}
    torch.save(values, unfinished / _STATE)
    files = {file.name: (file.stat().st_size, _sha256(file)) for file in sorted(unfinished.iterdir())}
    manifest = {"format": FORMAT, "step": step, "digest": digest(model), "files": files}
    (unfinished / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    for file in (*unfinished.iterdir(), unfinished):
        flush(file)
    if path.exists():
        shutil.rmtree(path)
    unfinished.rename(path)
    flush(path.parent)
    return path


def load(path: str | Path, *, model: nn.Module, average: nn.Module | None = None, **state: Any) -> Manifest:
    """Read a checkpoint back into the objects it was written from, after checking every file.

    Args:
        path: the folder.
        model: gets the weights.
        average: gets the moving averages.
        state: the objects with a `load_state_dict` to fill, by the names they were saved under.

    Raises:
        MissingFileError: there is no checkpoint.
        DataError: it is damaged, or does not fit the objects.
    """
    path = Path(path)
    manifest = read_manifest(path)
    for name in manifest.files:
        _check(path / name, *manifest.files[name])
    _read_weights(path / "model.safetensors", model)
    if average is not None:
        _read_weights(path / "average.safetensors", average)
    values = torch.load(path / _STATE, map_location="cpu", weights_only=True)
    for name, target in state.items():
        if target is not None:
            if name not in values:
                raise DataError(f"{path / _STATE}: holds no {name}; expected one of {', '.join(values)}")
            target.load_state_dict(values[name])
    return replace(manifest, state=values)


def read_manifest(path: Path) -> Manifest:
    """Read what a checkpoint says about itself.

    Raises:
        MissingFileError: there is no manifest.
        DataError: it cannot be read, or is of a newer format.
    """
    file = path / _MANIFEST
    if not file.exists():
        raise MissingFileError(f"{file}: not there; expected a checkpoint, as `samestep train` writes it")
    try:
        values = json.loads(file.read_text())
        if values["format"] > FORMAT:
            raise DataError(f"{file}: format {values['format']} is newer than {FORMAT}: update samestep")
        files = {name: (int(size), str(sha256)) for name, (size, sha256) in values["files"].items()}
        return Manifest(int(values["step"]), str(values["digest"]), files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"{file}: is no manifest of a checkpoint ({error!r}); use another checkpoint"
        ) from error


def all_checkpoints(run_dir: Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first."""
    folder = run_dir / "checkpoints"
    found = [(int(match[1]), path) for path in folder.glob("step-*") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def newest(run_dir: Path) -> Path:
    """Return the newest checkpoint of a run, or `run_dir` itself if it is a checkpoint.

    Raises:
        MissingFileError: there is none.
    """
    if (run_dir / _MANIFEST).exists():
        return run_dir
    found = all_checkpoints(run_dir)
    if not found:
        raise MissingFileError(f"{run_dir}: no checkpoint there; train first, or name another run folder")
    return found[-1]


def keep_last(run_dir: Path, count: int) -> None:
    """Delete all but the newest `count` checkpoints of a run."""
    for path in all_checkpoints(run_dir)[:-count]:
        shutil.rmtree(path)


def checkpoint_path(run_dir: Path, step: int) -> Path:
    """Return where a run keeps the checkpoint of a step."""
    return run_dir / "checkpoints" / f"step-{step:08d}"


def read_digest(path: Path) -> str:
    """Return the digest of the weights in a checkpoint, or in the newest of a run, computed anew."""
    file = newest(path) / "model.safetensors"
    _check(file, *read_manifest(newest(path)).files[file.name])
    return digest(load_file(file))


def _write_weights(file: Path, model: nn.Module) -> None:
    # Copies, because safetensors refuses tensors that share memory, as tied weights do.
    tensors = {
        n: t.detach().cpu().clone(memory_format=torch.contiguous_format) for n, t in _tensors(model).items()
    }
    save_file(tensors, file)


def _read_weights(file: Path, model: nn.Module) -> None:
    try:
        model.load_state_dict(load_file(file))
    except RuntimeError as error:
        raise DataError(f"{file}: does not fit the model ({' '.join(str(error).split())})") from error


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}


def _check(file: Path, size: int, sha256: str) -> None:
    if not file.exists():
        raise MissingFileError(f"{file}: not there, although the manifest names it; use another checkpoint")
    if file.stat().st_size != size:
        raise DataError(f"{file}: has {file.stat().st_size} bytes, expected {size}; use another checkpoint")
    if _sha256(file) != sha256:
        raise DataError(f"{file}: its SHA-256 is not the manifest's; use another checkpoint")


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
