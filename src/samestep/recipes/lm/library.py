"""The source files of Python's standard library, which is on every machine with Python, as documents."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from samestep.checkpoint.durable import storage
from samestep.errors import MissingFileError

__all__ = ["BORDER", "is_held_out", "library_files", "read_library"]

BORDER = 0
"""The byte before and after each file; no Python source can hold it."""

_TESTS = {"test", "tests", "idle_test"}
_OTHERS = {"site-packages", "dist-packages", "lib-dynload", "__pycache__"}
_TABLES = {"encodings", "pydoc_data"}  # generated
_OF_THE_MACHINE = ("_sysconfigdata", "sitecustomize", "usercustomize")
_HELD_OUT_PART = 16


def library_files(root: Path | None = None) -> list[str]:
    """Return the names of the source files, sorted, with slashes.

    Leaves out tests, installed packages, generated tables, and files that differ from machine to machine.

    Args:
        root: the library's folder; by default that of the running Python.

    Raises:
        MissingFileError: there is no source file.
    """
    root = _root() if root is None else root
    with storage(root, "read"):
        names = sorted(_walk(root))
    if not names:
        raise MissingFileError(
            f"{root}: no source files of the standard library there; pass your own texts with --data-dir"
        )
    return names


def read_library(split: Literal["train", "val"], root: Path | None = None) -> NDArray[np.uint8]:
    """Return the files of one split, uint8 [bytes], with the border byte before the first and after each.

    Args:
        split: "train", or "val" for the held-out files, about one in 16.
        root: the library's folder; by default that of the running Python.

    Raises:
        MissingFileError: there is no source file.
        StorageError: a file cannot be read.

    Example:
        >>> text = read_library("val")
        >>> text.dtype, text[0], text[-1]
        (dtype('uint8'), np.uint8(0), np.uint8(0))
    """
    root = _root() if root is None else root
    border = bytes([BORDER])
    documents = [b""]
    for name in library_files(root):
        if is_held_out(name) == (split == "val"):
            with storage(root / name, "read"):
                documents.append((root / name).read_bytes())
    return np.frombuffer(border.join([*documents, b""]), dtype=np.uint8)


def is_held_out(name: str) -> bool:
    """Return whether a file is in the split "val", by a hash of its name."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % _HELD_OUT_PART == 0


def _root() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _walk(root: Path) -> Iterator[str]:
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not _is_left_out(name)]
        for name in files:
            if name.endswith(".py") and not name.startswith(_OF_THE_MACHINE):
                yield (Path(folder) / name).relative_to(root).as_posix()


def _is_left_out(folder: str) -> bool:
    return folder in _TESTS | _OTHERS | _TABLES or folder.startswith("config-")
