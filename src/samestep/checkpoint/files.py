"""A checkpoint's files: written all or not at all, and every byte checked when they are read.

model.safetensors            weights and buffers, for any tool that reads safetensors
averaged_model.safetensors   their moving averages, where they are kept, by the same names
training.json                all other state: towers, loader, optimizer; see `samestep.checkpoint.state_tree`
training.safetensors         its tensors
manifest.json                step, fingerprint, digest; sizes and SHA-256 of the rest
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor
from torch.utils import _pytree as pytree

from samestep.checkpoint.durable import flush, make_folder, parse_json, remove, storage
from samestep.checkpoint.manifest import MANIFEST, MAX_MANIFEST_BYTES, Manifest
from samestep.checkpoint.objects import AVERAGES, WEIGHTS
from samestep.checkpoint.snapshot import STATE, Snapshot
from samestep.errors import DamagedError, MissingFileError, one_line
from samestep.identity import digest

__all__ = ["Found", "read", "write"]

_OUTLINE = f"{STATE}.json"
_REQUIRED = {f"{WEIGHTS}.safetensors", f"{STATE}.safetensors", _OUTLINE}
_ALLOWED = _REQUIRED | {f"{AVERAGES}.safetensors"}
_MAX_OUTLINE_BYTES = 2**28

# The errors of opening a file that mean damage; others are about this machine.
_DAMAGE = (errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO, errno.EIO)


def write(snapshot: Snapshot, path: Path) -> Path:
    """Write a snapshot as a checkpoint; any thread may do it, while training continues.

    Raises:
        StorageError: it cannot be written; what was at `path` before is still there.
    """
    unfinished = path.with_name(f".{path.name}.unfinished")
    with storage(path):
        try:
            make_folder(path.parent)
            remove(unfinished)
            unfinished.mkdir()
            _write_files(snapshot, unfinished)
            _rename(unfinished, path)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)  # it would keep a full disk full
            raise
    return path


def _write_files(snapshot: Snapshot, folder: Path) -> None:
    outline = folder / _OUTLINE
    outline.write_text(json.dumps(snapshot.outline, indent=1, allow_nan=False) + "\n")
    files = {WEIGHTS: snapshot.weights, AVERAGES: snapshot.averages, STATE: snapshot.tensors}
    for name, tensors in files.items():
        if tensors is not None:
            _write_tensors(folder / f"{name}.safetensors", tensors)
            # safetensors makes files that only their owner may read.
            shutil.copymode(outline, folder / f"{name}.safetensors")
    manifest = Manifest(
        snapshot.step,
        digest(snapshot.weights),
        {file.name: (file.stat().st_size, _sha256_of(file)) for file in folder.iterdir()},
        snapshot.fingerprint,
    )
    (folder / MANIFEST).write_text(manifest.to_text())
    for file in (*folder.iterdir(), folder):
        flush(file)


def _write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    # safetensors wants row-major tensors that share no memory, as a snapshot's copies are.
    rows = {name: tensor.contiguous() for name, tensor in tensors.items()}
    try:
        safetensors.torch.save_file(rows, file)
    except SafetensorError as error:  # has the system's error, too, as text only
        number = re.search(r"os error (\d+)", str(error))
        code = int(number[1]) if number else errno.EIO
        raise OSError(code, os.strerror(code) if number else str(error), str(file)) from error


def _rename(unfinished: Path, path: Path) -> None:
    replaced = path.with_name(f".{path.name}.replaced")
    remove(replaced)
    with suppress(FileNotFoundError):
        path.rename(replaced)
    try:
        unfinished.rename(path)
    except OSError:
        with suppress(FileNotFoundError):
            replaced.rename(path)
        raise
    flush(path.parent)
    remove(replaced)


@dataclass(frozen=True)
class Found:
    """A checkpoint that was read whole."""

    path: Path
    manifest: Manifest
    snapshot: Snapshot


pytree.register_dataclass(Found)  # so that workers can send each other its tensors


def read(path: Path) -> Found:
    """Read a checkpoint and check every byte of it.

    Raises:
        MissingFileError: there is no such folder.
        DamagedError: it is not what was written, or more or less than that.
        DataError: it is of a newer format.
        StorageError: it cannot be read.
    """
    with storage(path, "read"):
        if not os.path.lexists(path):
            raise MissingFileError(
                f"{path}: does not exist; expected a checkpoint, as `samestep train` writes it"
            )
        if path.is_symlink() or not path.is_dir():
            raise DamagedError(f"{path}: is a {'link' if path.is_symlink() else 'file'}, expected a folder")
        names = set(os.listdir(path))
    manifest = Manifest.parse(_content(path / MANIFEST, MAX_MANIFEST_BYTES), path / MANIFEST)
    if not _REQUIRED <= manifest.files.keys() <= _ALLOWED:
        listed = one_line(", ".join(manifest.files)) or "none"
        raise DamagedError(
            f"{path / MANIFEST}: lists the files {listed}, expected {', '.join(sorted(_REQUIRED))}"
        )
    for name in sorted(names - manifest.files.keys() - {MANIFEST}):
        raise DamagedError(f"{path / one_line(name)}: is not in the manifest")
    contents = {name: _verified(path / name, *manifest.files[name]) for name in sorted(manifest.files)}
    return Found(path, manifest, _snapshot(path, manifest, contents))


def _snapshot(path: Path, manifest: Manifest, contents: dict[str, bytes]) -> Snapshot:
    """Make a snapshot of the files' contents, and free them one by one."""
    tensors = {
        name: _parse_tensors(path / f"{name}.safetensors", contents.pop(f"{name}.safetensors"))
        for name in (WEIGHTS, AVERAGES, STATE)
        if f"{name}.safetensors" in contents
    }
    if digest(tensors[WEIGHTS]) != manifest.digest:
        raise DamagedError(f"{path / WEIGHTS}.safetensors: its weights do not have the manifest's digest")
    try:
        snapshot = Snapshot(
            manifest.step,
            manifest.fingerprint,
            tensors[WEIGHTS],
            tensors.get(AVERAGES),
            parse_json(contents[_OUTLINE]),
            tensors[STATE],
        )
        snapshot.sections()
    except ValueError as error:
        raise DamagedError(f"{path / _OUTLINE}: {error}") from error
    return snapshot


def _parse_tensors(file: Path, content: bytes) -> dict[str, Tensor]:
    try:
        found = safetensors.torch.load(content)
    except Exception as error:  # the parser raises many types of errors for damaged files
        why = one_line(f"{type(error).__name__}: {error}")
        raise DamagedError(f"{file}: is not a safetensors file ({why})") from error
    # In memory that torch has allocated and aligned, as it was before.
    return {name: found.pop(name).clone() for name in list(found)}


def _verified(file: Path, size: int, sha256: str) -> bytes:
    content = _content(file, _MAX_OUTLINE_BYTES if file.suffix == ".json" else None, size)
    if hashlib.sha256(content).hexdigest() != sha256:
        raise DamagedError(f"{file}: its SHA-256 is not the manifest's")
    return content


def _content(file: Path, max_bytes: int | None, size: int | None = None) -> bytes:
    """Read a regular file: not a link, pipe or device, which may never end."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as stream:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise DamagedError(f"{file}: is not a regular file")
            if size is not None and found.st_size != size:
                raise DamagedError(f"{file}: has {found.st_size} bytes, expected {size}")
            if max_bytes is not None and found.st_size > max_bytes:
                raise DamagedError(f"{file}: has {found.st_size} bytes, expected at most {max_bytes}")
            return stream.read()
    except OSError as error:
        if error.errno in _DAMAGE:
            what = {errno.ENOENT: "is not there", errno.ELOOP: "is a link, expected a file"}
            raise DamagedError(f"{file}: {what.get(error.errno, error.strerror)}") from error
        with storage(file, "read"):
            raise


def _sha256_of(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
