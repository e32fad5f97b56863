"""What samestep raises: every error that a user can cause or meet has a class here.

    Error                   anything samestep raises on purpose
    ├── ConfigError         a value that was passed in is wrong            (also a ValueError)
    ├── UsageError          calls in an order that cannot be right         (also a RuntimeError)
    ├── BatchError          a batch without rows, weight, or equal lengths (also a ValueError)
    ├── BufferPolicyError         a buffer changed and nobody said how to average (also a RuntimeError)
    ├── DataError           a file on disk does not hold what it should    (also a ValueError)
    │   └── DamagedError    a checkpoint is not what was written
    ├── MissingFileError    a file or folder is not there                  (also a FileNotFoundError)
    ├── StorageError        the disk does not take a file, or give it      (also an OSError)
    ├── LockedError         another process trains in the run folder       (also a RuntimeError)
    ├── DisagreementError   workers of one job do not agree                (also a RuntimeError)
    ├── LostWorkerError     a worker stopped answering                     (also a RuntimeError)
    └── NonFiniteError      a loss or gradient is NaN or infinite          (also an ArithmeticError)

`exit_status` is what the command line exits with: 2 where the input is wrong, 1 where the run failed.
"""

from __future__ import annotations

import reprlib

__all__ = [
    "BatchError",
    "BufferPolicyError",
    "ConfigError",
    "DamagedError",
    "DataError",
    "DisagreementError",
    "Error",
    "LockedError",
    "LostWorkerError",
    "MissingFileError",
    "NonFiniteError",
    "StorageError",
    "UsageError",
    "one_line",
    "shown",
]


class Error(Exception):
    """Anything samestep raises on purpose."""

    exit_status = 2


class ConfigError(Error, ValueError):
    """A value that was passed in is wrong."""


class UsageError(Error, RuntimeError):
    """Calls in an order that cannot be right."""

    exit_status = 1


class BatchError(Error, ValueError):
    """A batch that cannot be cut into towers, or in which nothing counts."""

    exit_status = 1


class BufferPolicyError(Error, RuntimeError):
    """A buffer of the model changed during a pass, and nobody said how to average it."""

    exit_status = 1


class DataError(Error, ValueError):
    """A file on disk does not hold what it should."""


class DamagedError(DataError):
    """A checkpoint is not what was written: an earlier one may be whole."""


class MissingFileError(Error, FileNotFoundError):
    """A file or folder is not there."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class StorageError(Error, OSError):
    """The disk does not take a file, or does not give it: full, read-only, no permission, broken."""


class LockedError(Error, RuntimeError):
    """Another process trains in the run folder."""


class DisagreementError(Error, RuntimeError):
    """Workers of one job do not agree on the model, the batch, or the step."""

    exit_status = 1


class LostWorkerError(Error, RuntimeError):
    """A worker of the job stopped answering."""

    exit_status = 1


class NonFiniteError(Error, ArithmeticError):
    """A loss or a gradient is NaN or infinite."""

    exit_status = 1


def one_line(text: str, max_chars: int = 200) -> str:
    r"""Return text that may stand in a message, whoever wrote it: short, and nothing that moves a cursor.

    Example:
        >>> print(one_line("two\n  lines, \x1b[2J"))
        'two lines, \x1b[2J'
    """
    text = " ".join(text.split())[:max_chars]
    return text if text.isprintable() else ascii(text)


def shown(value: object, max_chars: int = 80) -> str:
    """Return a value as it may stand in a message, whoever wrote it."""
    return one_line(repr(value) if isinstance(value, str) else reprlib.repr(value), max_chars)
