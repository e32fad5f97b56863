"""Files that survive a power cut once written, and are checked when they are read."""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from samestep.checkpoint.folder import Folder
from samestep.errors import DataError, Error, StorageError, shown

__all__ = ["open_regular", "parse_json", "read_file", "replaced", "storage", "write_whole"]

_REMEDIES = {
    errno.ENOSPC: "free space on the disk",
    errno.EDQUOT: "free space in the quota",
    errno.EFBIG: "raise the limit on file sizes",
    errno.EROFS: "choose a folder that can be written to",
    errno.EACCES: "change its permissions, or choose another folder",
    errno.EPERM: "change its permissions, or choose another folder",
    errno.ENOTDIR: "choose another folder",
    errno.EEXIST: "choose another folder",
}


@contextmanager
def storage(path: Path, action: str = "written") -> Iterator[None]:
    """Turn an `OSError` for `path`, or for a file in it, into an error of one line.

    Args:
        path: the file or folder in use.
        action: what failed, as a past participle.

    Raises:
        StorageError: in place of an `OSError`; with exit status 2 for "read", where the input is at fault.
    """
    try:
        yield
    except Error:
        raise
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "check the disk, or choose another folder")
        where = path if error.filename is None else error.filename
        why = error.strerror or str(error)
        found = StorageError(f"{where}: cannot be {action} ({why}); {remedy}")
        found.exit_status = 2 if action == "read" else found.exit_status
        raise found from error


def open_regular(
    file: Path, *, inside: Folder | None = None, follow_symlinks: bool = True
) -> BufferedReader | None:
    """Open a regular file; return None for anything else, such as a pipe or device, which may never end.

    Args:
        file: its path.
        inside: the open folder in which to look up the file's name.
        follow_symlinks: whether `file` may be a symbolic link; if not, a link is an error.

    Raises:
        OSError: the file cannot be opened.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | (0 if follow_symlinks else os.O_NOFOLLOW)
    if inside is None:
        descriptor = os.open(file, flags)
    else:
        descriptor = os.open(file.name, flags, dir_fd=inside.descriptor)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return open(descriptor, "rb")
    os.close(descriptor)
    return None


def read_file(file: Path, max_bytes: int, *, inside: Folder | None = None) -> bytes:
    """Return the content of a regular file; pipes and devices are refused, as they may never end.

    Args:
        file: its path; a symbolic link is followed, unless `inside` is passed.
        max_bytes: the largest size to accept.
        inside: the open folder in which to look up the file's name, which must not be a link.

    Raises:
        DataError: it is not a regular file, or too large.
        StorageError: there is not enough memory.
        OSError: it cannot be read.
    """
    try:
        opened = open_regular(file, inside=inside, follow_symlinks=inside is None)
        if opened is None:
            raise DataError(f"{file}: is not a regular file")
        with opened as stream:
            size = os.fstat(stream.fileno()).st_size
            if size > max_bytes:
                raise DataError(f"{file}: has {size} bytes, expected at most {max_bytes}")
            return stream.read(max_bytes)
    except MemoryError:
        raise StorageError(f"{file}: cannot be read: there is not enough memory for it") from None


def write_whole(file: Path, text: str) -> None:
    """Write a text file atomically: a reader finds the old text or the new one, never a part.

    Raises:
        StorageError: the file cannot be written.
    """
    with storage(file), Folder.open(file.parent, make=True) as folder:
        replaced(file.name, text.encode(), folder).close()


def replaced(name: str, content: bytes, folder: Folder) -> BinaryIO:
    """Write a file in an open folder atomically, and leave it open to write more.

    Raises:
        OSError: the file cannot be written.
    """
    unfinished = f".{name}.unfinished"
    folder.unlink(unfinished)  # left by a killed write
    with ExitStack() as stack:
        stream = stack.enter_context(folder.create(unfinished))
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
        folder.rename(unfinished, name)
        folder.flush()
        stack.pop_all()
    return stream


def parse_json(content: bytes) -> Any:
    """Return the value of a JSON text in UTF-8.

    Raises:
        ValueError: the text is not JSON, repeats a name in an object, holds NaN or an infinity, is nested
            too deeply, or holds a number with too many digits.

    Example:
        >>> parse_json(b'{"step": 1, "step": 2}')
        Traceback (most recent call last):
        ValueError: 'step' appears twice in an object
    """
    try:
        return json.loads(
            content.decode(), object_pairs_hook=_once_each, parse_constant=_refuse, parse_float=_finite
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"{shown(name)} appears twice in an object")
        values[name] = value
    return values


def _finite(text: str) -> float:
    value = float(text)
    return _refuse(shown(text)) if math.isinf(value) else value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number")
