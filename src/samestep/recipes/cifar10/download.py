"""Archives from the web: fetched once, checked, and unpacked so that nothing half-written is ever used."""

from __future__ import annotations

import fcntl
import gzip
import os
import shutil
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import pooch
import requests
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from samestep.checkpoint.durable import flush
from samestep.errors import DataError, MissingFileError

__all__ = ["Archive", "fetch"]

_CHUNK_BYTES = 1 << 16
_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Archive:
    """A gzipped tar file on the web with all its files in one folder.

    Attributes:
        url: http or https; its last part is the name of the file.
        md5: its checksum, in hexadecimal digits.
        folder: the folder that it unpacks to.
    """

    url: str
    md5: str
    folder: str

    @property
    def file(self) -> str:
        """The name of the file."""
        return self.url.rpartition("/")[2]


def fetch(archive: Archive, data_dir: Path) -> Path:
    """Return the archive's folder under `data_dir`; fetch and unpack it where it is not there.

    Any number of processes may call it at once: one does the work, the others wait for it. An archive of the
    right checksum that lies in `data_dir` already is unpacked, not fetched again. The folder appears under
    its name only when all of it is on the disk.

    Args:
        archive: what to fetch.
        data_dir: where it is kept; made where it is not there.

    Raises:
        MissingFileError: the archive cannot be fetched, or nothing can be written to `data_dir`.
        DataError: what was fetched has another checksum, or cannot be unpacked safely.
    """
    folder = data_dir / archive.folder
    remedy = f"download {archive.url} yourself and unpack it into {data_dir}"
    try:
        with _alone(data_dir / f".{archive.file}.lock"):
            # Another process may have been at it while this one waited.
            if not folder.exists():
                _unpack(_download(archive, data_dir, remedy), folder, remedy)
    except OSError as error:
        if isinstance(error, MissingFileError):
            raise
        reason = error.strerror or error
        raise MissingFileError(
            f"{error.filename or data_dir}: cannot be written ({reason}), expected space for {archive.file} "
            f"and its contents; choose another data folder than {data_dir}, or free space there"
        ) from error
    return folder


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Hold a lock file, which the system releases when the process ends, however it ends."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download(archive: Archive, data_dir: Path, remedy: str) -> Path:
    """Download the file under a temporary name, check and rename it; or find it there."""
    columns = TextColumn(archive.file), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    console = Console(stderr=True)
    try:
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            downloader = pooch.HTTPDownloader(_Bar(progress), chunk_size=_CHUNK_BYTES, timeout=_TIMEOUT_S)
            return Path(
                pooch.retrieve(archive.url, f"md5:{archive.md5}", archive.file, data_dir, None, downloader)
            )
    except requests.RequestException as error:
        raise MissingFileError(
            f"{archive.url}: cannot be fetched ({_reason(error)}), expected {archive.file}; check the "
            f"connection and run again, or {remedy}"
        ) from error
    except ValueError as error:  # Pooch's, for a wrong checksum; it has deleted the file
        raise DataError(
            f"{archive.url}: what was fetched does not have the MD5 checksum {archive.md5}; run again, or "
            f"{remedy}"
        ) from error


def _reason(error: requests.RequestException) -> str:
    """Say in a few words why: the status, or the innermost cause, without the layers around it."""
    if error.response is not None:
        error.response.close()  # Pooch leaves the connection open
        return f"HTTP status {error.response.status_code}"
    cause: BaseException = error
    while (inner := cause.__cause__ or cause.__context__) is not None:
        cause = inner
    return getattr(cause, "strerror", None) or str(cause)


class _Bar:
    """What Pooch expects of a progress bar, shown by Rich."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=None)

    @property
    def total(self) -> float | None:
        """Bytes in all."""
        return self._progress.tasks[0].total

    @total.setter
    def total(self, total: int) -> None:
        self._progress.update(self._task, total=total)

    def update(self, num_bytes: int) -> None:
        """Go on by some bytes."""
        self._progress.advance(self._task, num_bytes)

    def reset(self) -> None:
        """Go back to the start."""
        self._progress.reset(self._task)

    def close(self) -> None:
        """Do nothing: Rich's own context ends the display."""


def _unpack(file: Path, folder: Path, remedy: str) -> None:
    """Unpack into a folder beside the final one, flush all to the disk, and rename it."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        _extract(file, partial)
        if not (partial / folder.name).is_dir():
            raise DataError(f"{file}: holds no folder {folder.name}, expected one; delete it, then {remedy}")
        flush(partial / folder.name)
        os.rename(partial / folder.name, folder)
        flush(folder.parent)
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{file}: cannot be unpacked ({error}); delete it, then {remedy}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _extract(file: Path, into: Path) -> None:
    into.mkdir()
    with tarfile.open(file, "r:gz") as tar:
        for member in tar:
            _check_member(file, member)
            tar.extract(member, into, filter="data")
            flush(into / member.name)


def _check_member(file: Path, member: tarfile.TarInfo) -> None:
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts or not (member.isreg() or member.isdir()):
        raise DataError(
            f"{file}: holds {member.name!r}, expected only files and folders inside its own folder and no "
            "links; delete it, and do not trust where it came from"
        )
