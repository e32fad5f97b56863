"""Archives from the web: downloaded once, verified, and unpacked so that no partial file is ever used."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

from samestep.app.extras import extra
from samestep.checkpoint.durable import open_regular
from samestep.checkpoint.file_lock import FileLock
from samestep.checkpoint.folder import Folder
from samestep.errors import ConfigError, DataError, MissingFileError, StorageError, one_line
from samestep.recipes.cifar10.unpacking import unpack

__all__ = ["Archive", "fetch"]

_CHUNK_BYTES = 1 << 16
_POLL_S = 0.1
_TIMEOUT_S = 30.0
"""How long a server may be silent, and how long after the start the minimum speed does not apply."""
_BYTES_PER_S = 10_000
"""The minimum average speed."""


@dataclass(frozen=True)
class Archive:
    """A gzipped tar file on the web with all its files in one folder.

    Attributes:
        url: http or https; its last part is the file's name.
        md5: the checksum, in hexadecimal digits.
        folder: the name of the folder in the archive, without subfolders.
        max_bytes: the largest size to accept, packed or unpacked.
    """

    url: str
    md5: str
    folder: str
    max_bytes: int = 2**28

    @property
    def file(self) -> str:
        """The file's name."""
        return self.url.rpartition("/")[2]


def fetch(archive: Archive, data_dir: Path) -> Path:
    """Return the archive's folder under `data_dir`; if it is missing, download and unpack the archive.

    Any number of processes may call this at once: one does the work, the others wait. An archive in
    `data_dir` with the right checksum is not downloaded again. The folder gets its name only once all of its
    files are on disk.

    Args:
        archive: what to download.
        data_dir: the folder to keep it in; created if it is missing.

    Raises:
        ConfigError: a download is needed, and the package for it is not installed.
        MissingFileError: the archive cannot be downloaded, or `data_dir` cannot be written to.
        DataError: the download has another checksum, or cannot be unpacked safely.
    """
    remedy = f"download {archive.url} yourself and unpack it into {data_dir}"
    try:
        with Folder.open(data_dir, make=True) as data, _alone(data, f".{archive.file}.lock"):
            # Another process may have done it while this one waited.
            if data.look(archive.folder) is None:
                _unpack(archive, data, remedy)
    except OSError as error:
        if isinstance(error, MissingFileError):
            raise
        if isinstance(error, StorageError):
            raise MissingFileError(str(error)) from error
        reason = error.strerror or error
        raise MissingFileError(
            f"{error.filename or data_dir}: cannot be written ({reason}), expected space for {archive.file} "
            f"and its contents; choose another data folder than {data_dir}, or free space there"
        ) from error
    return data_dir / archive.folder


@contextmanager
def _alone(data: Folder, name: str) -> Iterator[None]:
    """Hold a lock file, waiting for other processes."""
    lock = FileLock(data, name)
    if not lock.acquire(_TIMEOUT_S):
        print(f"samestep: {data.path}: waiting for another process that fetches there", file=sys.stderr)
        while not lock.acquire(_TIMEOUT_S):
            pass
    try:
        yield
    finally:
        lock.release()


def _unpack(archive: Archive, data: Folder, remedy: str) -> None:
    with _archive_in(data, archive, remedy) as file:
        try:
            unpack(file, data, archive.folder, archive.max_bytes)
        except DataError as error:
            raise DataError(f"{data.path / archive.file}: {error}; delete it, then {remedy}") from error


@contextmanager
def _archive_in(data: Folder, archive: Archive, remedy: str) -> Iterator[BufferedReader]:
    """Open the archive in a folder; download it first if it is missing or has another checksum."""
    with ExitStack() as stack:
        try:
            file = stack.enter_context(_open(data, archive.file))
            is_right = _md5_of(file, archive.max_bytes) == archive.md5
        except FileNotFoundError:
            is_right = False
        if not is_right:
            _download(archive, data, remedy)
            file = stack.enter_context(_open(data, archive.file))
        file.seek(0)
        yield file


def _open(data: Folder, name: str) -> BufferedReader:
    """Open a regular file; refuse pipes and devices, which may never end."""
    with data.naming(name):
        file = open_regular(data.path / name, inside=data)
    if file is None:
        raise DataError(f"{data.path / name}: is not a regular file, expected an archive: remove it")
    return file


def _md5_of(file: BufferedReader, max_bytes: int) -> str:
    if os.fstat(file.fileno()).st_size > max_bytes:
        return "of another file"
    return hashlib.file_digest(file, "md5").hexdigest()


def _download(archive: Archive, data: Folder, remedy: str) -> None:
    """Download the file under a temporary name, check it and rename it."""
    unfinished = f".{archive.file}.unfinished"
    data.unlink(unfinished)  # left by a killed process
    try:
        with data.create(unfinished) as file:
            found = _transfer(archive, file, remedy)
            file.flush()
            os.fsync(file.fileno())
        if found != archive.md5:
            raise DataError(
                f"{archive.url}: what was fetched does not have the MD5 checksum {archive.md5}; run again, "
                f"or {remedy}"
            )
        data.rename(unfinished, archive.file)
        data.flush()
    finally:
        with suppress(OSError):
            data.unlink(unfinished)


def _transfer(archive: Archive, file: BinaryIO, remedy: str) -> str:
    """Download the archive to an open file, and return its MD5 checksum."""
    transfer = _Transfer(archive, file)
    try:
        with extra("cifar10"):
            from requests import RequestException
        transfer.watch()
    except (ConfigError, DataError, MissingFileError) as error:
        raise type(error)(f"{archive.url}: {error}; run again, or {remedy}") from error
    except Exception as error:  # requests' are OSErrors; bad answers raise others, such as UnicodeError
        if isinstance(error, OSError) and not isinstance(error, RequestException):
            raise
        raise MissingFileError(
            f"{archive.url}: cannot be fetched ({_reason(error)}), expected {archive.file}; check the "
            f"connection and run again, or {remedy}"
        ) from error
    return transfer.md5.hexdigest()


class _Transfer(threading.Thread):
    """Downloads in a thread that can be abandoned, as name look-up and headers have no overall timeout."""

    def __init__(self, archive: Archive, file: BinaryIO) -> None:
        super().__init__(daemon=True)
        self.md5 = hashlib.md5(usedforsecurity=False)
        self._archive = archive
        self._file = file
        self._num_bytes = 0
        self._total: int | None = None
        self._error: Exception | None = None
        self._is_left = False

    def watch(self) -> None:
        """Start, show progress and wait; raise the thread's error, or an error if it is too slow."""
        begin_s = time.monotonic()
        self.start()
        with _progress(self._archive.file) as show:
            while self.is_alive():
                self.join(_POLL_S)
                show(self._num_bytes, self._total)
                self._check_speed(time.monotonic() - begin_s)
        if self._error is not None:
            raise self._error

    def _check_speed(self, elapsed_s: float) -> None:
        if self.is_alive() and (elapsed_s - _TIMEOUT_S) * _BYTES_PER_S > self._num_bytes:
            self._is_left = True
            raise MissingFileError(
                f"has sent {self._num_bytes} bytes in {elapsed_s:.0f} s, expected {_BYTES_PER_S} a second"
            )

    def run(self) -> None:
        try:
            self._fetch()
        except Exception as error:  # `watch` raises it
            self._error = error

    def _fetch(self) -> None:
        import requests

        headers = {"Accept-Encoding": "identity"}  # or requests would decompress without a limit on the size
        url = self._archive.url
        with requests.get(url, headers=headers, stream=True, timeout=_TIMEOUT_S) as response:
            response.raise_for_status()
            length = response.headers.get("Content-Length", "")
            self._total = int(length) if length.isdecimal() else None
            for chunk in response.iter_content(_CHUNK_BYTES):
                self._num_bytes += len(chunk)
                if self._is_left:
                    return
                if self._num_bytes > self._archive.max_bytes:
                    raise DataError(f"sends more than the {self._archive.max_bytes} bytes that were expected")
                self._file.write(chunk)
                self.md5.update(chunk)


@contextmanager
def _progress(name: str) -> Iterator[Callable[[int, int | None], object]]:
    """Show the bytes received, of the total, on a terminal; nothing without Rich."""
    if find_spec("rich") is None:
        yield lambda num_bytes, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = TextColumn(name), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None)
        yield lambda num_bytes, total: progress.update(task, total=total, completed=num_bytes)


def _reason(error: BaseException) -> str:
    """Return the HTTP status, or the message of the innermost cause."""
    response = getattr(error, "response", None)
    if response is not None:
        return f"HTTP status {response.status_code}"
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return one_line(getattr(error, "strerror", None) or str(error))
