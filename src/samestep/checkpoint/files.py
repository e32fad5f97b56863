"""A checkpoint's files: all are written or none, and every byte is checked when they are read.

model.safetensors            weights and buffers, for any tool that reads safetensors
averaged_model.safetensors   the averaged model's weights and buffers by the same names, if there is one
training.json                all other state: towers, loader, optimizer; see `samestep.checkpoint.state_tree`
training.safetensors         the tensors of that state
manifest.json                step, fingerprint, digest; sizes and SHA-256 of the other files
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
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor
from torch.utils import _pytree as pytree

from samestep.checkpoint.durable import parse_json, read_file, storage
from samestep.checkpoint.folder import Folder
from samestep.checkpoint.manifest import MANIFEST, MAX_MANIFEST_BYTES, Manifest
from samestep.checkpoint.objects import AVERAGES, WEIGHTS
from samestep.checkpoint.replacement import replaced_name, replacing
from samestep.checkpoint.snapshot import STATE, Snapshot
from samestep.errors import ConfigError, DamagedError, DataError, MissingFileError, StorageError, one_line
from samestep.identity import digest

__all__ = ["Found", "read", "write"]

_OUTLINE = f"{STATE}.json"
_REQUIRED = {f"{WEIGHTS}.safetensors", f"{STATE}.safetensors", _OUTLINE}
_ALLOWED = _REQUIRED | {f"{AVERAGES}.safetensors"}
_MAX_OUTLINE_BYTES = 2**28

# Errors on opening a file that mean a damaged checkpoint; others are about this machine.
_DAMAGE = (errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO, errno.EIO)


def write(snapshot: Snapshot, path: Path, parent: Folder | None = None) -> Path:
    """Write a snapshot as a checkpoint; may run in any thread while training continues.

    Args:
        snapshot: what to write.
        path: the checkpoint's folder.
        parent: the open parent folder; by default the parent of `path`.

    Raises:
        ConfigError: `path` does not end with the name of a folder.
        StorageError: it cannot be written, or `path` holds something else; what was at `path` is unchanged.
    """
    with storage(path), ExitStack() as stack:
        name = path.name
        if name in ("", ".."):
            raise ConfigError(f"path = {str(path)!r}: expected the name of a folder, such as runs/a/last")
        above = parent or stack.enter_context(Folder.open(path.parent, make=True))
        with replacing(above, name, _ALLOWED | {MANIFEST}) as unfinished:
            _write_files(snapshot, unfinished)
    return path


def _write_files(snapshot: Snapshot, folder: Folder) -> None:
    outline = json.dumps(snapshot.outline, indent=1, allow_nan=False) + "\n"
    files = {_OUTLINE: _write_bytes(folder, _OUTLINE, outline.encode())}
    parts = {WEIGHTS: snapshot.weights, AVERAGES: snapshot.averages, STATE: snapshot.tensors}
    for part, tensors in parts.items():
        if tensors is not None:
            files[f"{part}.safetensors"] = _write_tensors(folder, f"{part}.safetensors", tensors)
    manifest = Manifest(snapshot.step, digest(snapshot.weights), files, snapshot.fingerprint)
    _write_bytes(folder, MANIFEST, manifest.to_text().encode())
    folder.flush()


def _write_bytes(folder: Folder, name: str, content: bytes) -> tuple[int, str]:
    """Write a file, and return its size and SHA-256."""
    with folder.create(name) as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    return len(content), hashlib.sha256(content).hexdigest()


def _write_tensors(folder: Folder, name: str, tensors: Mapping[str, Tensor]) -> tuple[int, str]:
    # safetensors needs row-major tensors that share no memory; a snapshot's copies share none.
    rows = {key: tensor.contiguous() for key, tensor in tensors.items()}
    path = folder.path_of(name)
    try:
        safetensors.torch.save_file(rows, path)
    except SafetensorError as error:  # raised for OS errors too, with the number in the text only
        number = re.search(r"os error (\d+)", str(error))
        code = int(number[1]) if number else errno.EIO
        why = os.strerror(code) if number else str(error)
        raise OSError(code, why, str(folder.path / name)) from error
    # safetensors creates files that only their owner can read.
    shutil.copymode(folder.path_of(_OUTLINE), path)
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
        return os.fstat(stream.fileno()).st_size, hashlib.file_digest(stream, "sha256").hexdigest()


@dataclass(frozen=True)
class Found:
    """A checkpoint, read and verified."""

    path: Path
    manifest: Manifest
    snapshot: Snapshot


pytree.register_dataclass(Found)  # so that workers can send each other its tensors


def read(path: Path) -> Found:
    """Read a checkpoint and verify every byte; files that its manifest does not list are ignored.

    Raises:
        MissingFileError: there is no such folder.
        DamagedError: the content is not what was written, or not all of it.
        DataError: its format is newer, or it is larger than this machine's memory.
        StorageError: it cannot be read.
    """
    with storage(path, "read"), _open(path) as folder:
        try:
            return _read(path, folder)
        except DamagedError:
            if folder.is_there():
                raise
    return read(path)  # replaced or deleted during the read


def _open(path: Path) -> Folder:
    """Open a checkpoint's folder, or the old one if a save was killed while it replaced the folder."""
    for place in (path, path.parent / replaced_name(path.name)):
        try:
            mode = os.lstat(place).st_mode
            if not stat.S_ISDIR(mode):
                kind = "link" if stat.S_ISLNK(mode) else "file"
                raise DamagedError(f"{path}: is a {kind}, expected a folder")
            return Folder.open(place)
        except (FileNotFoundError, NotADirectoryError):
            continue
    raise MissingFileError(f"{path}: does not exist; expected a checkpoint, as `samestep train` writes it")


def _read(path: Path, folder: Folder) -> Found:
    manifest = Manifest.parse(_content(path / MANIFEST, folder, MAX_MANIFEST_BYTES), path / MANIFEST)
    if not _REQUIRED <= manifest.files.keys() <= _ALLOWED:
        listed = one_line(", ".join(manifest.files)) or "none"
        raise DamagedError(
            f"{path / MANIFEST}: lists the files {listed}, expected {', '.join(sorted(_REQUIRED))}"
        )
    _check_memory(path, sum(size for size, _ in manifest.files.values()))
    contents = {
        name: _verified(path / name, folder, *manifest.files[name]) for name in sorted(manifest.files)
    }
    return Found(path, manifest, _snapshot(path, manifest, contents))


def _check_memory(path: Path, num_bytes: int) -> None:
    there_is = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if num_bytes > there_is:
        raise DataError(
            f"{path}: needs {num_bytes} bytes by its manifest, but this machine has {there_is} bytes of "
            "memory"
        )


def _snapshot(path: Path, manifest: Manifest, contents: dict[str, bytes]) -> Snapshot:
    """Build a snapshot from the files' contents, and free the contents one by one to save memory."""
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
    # Clone to get torch's alignment: kernels may choose by it, and safetensors' memory may have another.
    return {name: found.pop(name).clone() for name in list(found)}


def _verified(file: Path, folder: Folder, size: int, sha256: str) -> bytes:
    content = _content(file, folder, _MAX_OUTLINE_BYTES if file.suffix == ".json" else size)
    if len(content) != size:
        raise DamagedError(f"{file}: has {len(content)} bytes, expected {size}")
    if hashlib.sha256(content).hexdigest() != sha256:
        raise DamagedError(f"{file}: its SHA-256 is not the manifest's")
    return content


def _content(file: Path, folder: Folder, max_bytes: int) -> bytes:
    try:
        return read_file(file, max_bytes, inside=folder)
    except DataError as error:
        raise DamagedError(str(error)) from error
    except StorageError:
        raise
    except OSError as error:
        if error.errno not in _DAMAGE:
            error.filename = str(file)
            raise
        what = {errno.ENOENT: "is not there", errno.ELOOP: "is a link, expected a file"}
        raise DamagedError(f"{file}: {what.get(error.errno, error.strerror)}") from error
