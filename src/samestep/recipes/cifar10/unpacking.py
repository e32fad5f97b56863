"""Unpacks tar archives safely: plain files only, without links, modes, owners and times."""

from __future__ import annotations

import gzip
import os
import shutil
import tarfile
from contextlib import suppress
from pathlib import PurePosixPath
from typing import BinaryIO

from samestep.checkpoint.folder import Folder
from samestep.errors import DataError, Error, one_line, shown

__all__ = ["unpack"]

_MAX_MEMBERS = 100


def unpack(file: BinaryIO, data: Folder, folder: str, max_bytes: int) -> None:
    """Unpack a gzipped tar file into a temporary folder, flush it to disk, and rename it to `folder`.

    Args:
        file: the archive.
        data: the parent of the new folder.
        folder: its name; the archive must hold files in a folder of this name, and nothing else.
        max_bytes: the largest unpacked size to accept.

    Raises:
        DataError: the archive is damaged, too large, or holds anything else.
        OSError: the disk cannot be written to.
    """
    unfinished = f".{folder}.unfinished"
    data.remove(unfinished)  # left by a killed process
    data.make(unfinished)
    try:
        with data.folder(unfinished) as into:
            _extract(file, folder, into, max_bytes)
            into.flush()
        data.rename(unfinished, folder)
        data.flush()
    except Exception as error:  # tarfile and zlib raise many types for damaged archives
        if isinstance(error, (Error, OSError)) and not isinstance(error, gzip.BadGzipFile):
            raise
        raise DataError(f"cannot be unpacked ({one_line(str(error))})") from error
    finally:
        with suppress(OSError):
            data.remove(unfinished)


def _extract(file: BinaryIO, folder: str, into: Folder, max_bytes: int) -> None:
    """Write the archive's files as new files, with default modes, owners and times."""
    num_members = 0
    with gzip.open(file) as content, _open_tar(content, max_bytes) as tar:
        for member in tar:
            name = _name_of(member, folder)
            num_members += 1
            if num_members > _MAX_MEMBERS:
                raise DataError(f"holds more than {_MAX_MEMBERS} files")
            if name is not None and (source := tar.extractfile(member)):
                with into.create(name) as target:
                    shutil.copyfileobj(source, target)
                    target.flush()
                    os.fsync(target.fileno())
    if not num_members:
        raise DataError(f"holds no folder {folder}, expected one")


def _open_tar(content: gzip.GzipFile, max_bytes: int) -> tarfile.TarFile:
    return tarfile.open(fileobj=_Limited(content, max_bytes), mode="r|")  # type: ignore[call-overload,no-any-return]


class _Limited:
    """A stream that raises an error past a number of bytes."""

    def __init__(self, stream: gzip.GzipFile, max_bytes: int) -> None:
        self._stream = stream
        self._left = self._max_bytes = max_bytes

    def read(self, num_bytes: int) -> bytes:
        """Return the next bytes."""
        content = self._stream.read(min(num_bytes, self._left + 1))
        self._left -= len(content)
        if self._left < 0:
            raise DataError(f"unpacks to more than the {self._max_bytes} bytes that were expected")
        return content


def _name_of(member: tarfile.TarInfo, folder: str) -> str | None:
    """Return the name of a file in the archive's folder; None for that folder itself."""
    path = PurePosixPath(member.name)
    if member.isdir() and path.parts == (folder,):
        return None
    is_plain = member.isreg() and not member.issparse() and path.parts[:-1] == (folder,)
    if not is_plain or path.name == "..":
        raise DataError(
            f"holds {shown(member.name)}, expected only files in the folder {folder}, and no links; do not "
            "trust where it came from"
        )
    return path.name
