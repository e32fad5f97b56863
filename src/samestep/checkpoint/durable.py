"""Files that survive a power cut once written, and are checked when they are read."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from samestep.errors import Error, StorageError, shown

__all__ = ["flush", "make_folder", "parse_json", "remove", "storage", "write_whole"]

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


def flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Make a folder, and those above it, if they are not there; names that are new are on the disk then."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        flush(path.parent)


def remove(path: Path) -> None:
    """Delete a folder with all that is in it, or a file, or a link, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def storage(path: Path, action: str = "written") -> Iterator[None]:
    """Turn the system's error for `path`, or a file in it, into one line.

    Args:
        path: what is worked on.
        action: what cannot be done to it, in the past participle.

    Raises:
        StorageError: in place of an `OSError`.
    """
    try:
        yield
    except Error:
        raise
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "check the disk, or choose another folder")
        where = path if error.filename is None else error.filename
        why = error.strerror or str(error)
        raise StorageError(f"{where}: cannot be {action} ({why}); {remedy}") from error


def write_whole(file: Path, text: str) -> None:
    """Write a text file, replacing what is there: readers find the old text or the new, never a part.

    Raises:
        StorageError: it cannot be written.
    """
    unfinished = file.with_name(f".{file.name}.unfinished")
    with storage(file):
        make_folder(file.parent)
        unfinished.write_text(text, encoding="utf-8")
        flush(unfinished)
        unfinished.replace(file)
        flush(file.parent)


def parse_json(content: bytes) -> Any:
    """Return the value of a JSON text in UTF-8.

    Raises:
        ValueError: it is not JSON; or a name appears twice in an object, it holds NaN or an infinity, it is
            nested too deeply, or a number has too many digits.

    Example:
        >>> parse_json(b'{"step": 1, "step": 2}')
        Traceback (most recent call last):
        ValueError: 'step' appears twice in an object
    """
    try:
        return json.loads(content.decode(), object_pairs_hook=_once_each, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"{shown(name)} appears twice in an object")
        values[name] = value
    return values


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number")
