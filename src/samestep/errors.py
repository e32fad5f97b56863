"""The errors that samestep raises.

    Error                    the base class of all of them
    ├── ConfigError          an argument or setting has a wrong value        (also a ValueError)
    ├── UsageError           a method was called in a wrong way or order     (also a RuntimeError)
    ├── AbandonedError       another worker abandoned the step               (also a RuntimeError)
    ├── BatchError           a batch has no rows, or counts nothing, …       (also a ValueError)
    ├── BufferPolicyError    a buffer without a policy changed               (also a RuntimeError)
    ├── DataError            a file does not hold what it should             (also a ValueError)
    │   └── DamagedError     a checkpoint differs from what was written
    ├── MissingFileError     a file or folder does not exist                 (also a FileNotFoundError)
    ├── StorageError         a file cannot be written or read                (also an OSError)
    ├── LockedError          another process trains in the run folder        (also a RuntimeError)
    ├── DisagreementError    the workers of a job have different values      (also a RuntimeError)
    ├── LostWorkerError      a worker exited or stopped answering            (also a RuntimeError)
    ├── LoaderError          a loader process was killed, or hangs           (also a RuntimeError)
    └── NonFiniteError       a loss or gradient is NaN or infinite           (also an ArithmeticError)

`exit_status` is the exit status of the command line: 2 if the input is wrong, 1 if the run failed.
"""

from __future__ import annotations

import inspect
import re
import reprlib
import warnings
from collections import Counter
from collections.abc import Sequence
from types import FrameType

__all__ = [
    "AbandonedError",
    "BatchError",
    "BufferPolicyError",
    "ConfigError",
    "DamagedError",
    "DataError",
    "DisagreementError",
    "Error",
    "LoaderError",
    "LockedError",
    "LostWorkerError",
    "MissingFileError",
    "NonFiniteError",
    "StorageError",
    "UsageError",
    "calls_differ",
    "kind_of_call",
    "one_line",
    "shown",
    "warn",
    "who_has_what",
]


class Error(Exception):
    """The base class of all errors that samestep raises."""

    exit_status = 2


class ConfigError(Error, ValueError):
    """An argument or a setting has a wrong value."""


class UsageError(Error, RuntimeError):
    """A method was called in a wrong way or order."""

    exit_status = 1


class AbandonedError(Error, RuntimeError):
    """Another worker abandoned the step, so no worker takes it; see `Towers.abandon`."""

    exit_status = 1


class BatchError(Error, ValueError):
    """A batch cannot be cut into towers, or nothing in it counts."""

    exit_status = 1


class BufferPolicyError(Error, RuntimeError):
    """A buffer without a policy changed during a pass; see `Towers(buffers=...)`."""

    exit_status = 1


class DataError(Error, ValueError):
    """A file does not hold what it should."""


class DamagedError(DataError):
    """A checkpoint differs from what was written. An earlier checkpoint may be intact."""


class MissingFileError(Error, FileNotFoundError):
    """A file or folder does not exist."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class StorageError(Error, OSError):
    """A file cannot be written or read: the disk is full, read-only or broken, or permission is missing."""

    exit_status = 1


class LockedError(Error, RuntimeError):
    """Another process trains in the run folder."""


class DisagreementError(Error, RuntimeError):
    """The workers of a job have different models, batches, settings or steps, or another worker failed."""

    exit_status = 1


class LostWorkerError(Error, RuntimeError):
    """A worker exited, was interrupted in the middle of a message, or did not answer within the timeout."""

    exit_status = 1


class LoaderError(Error, RuntimeError):
    """A loader process was killed, or did not answer within the timeout."""

    exit_status = 1


class NonFiniteError(Error, ArithmeticError):
    """A loss or a gradient is NaN or infinite."""

    exit_status = 1


def one_line(text: str, max_chars: int = 200) -> str:
    r"""Return untrusted text as one short line without control characters, for a message.

    Example:
        >>> print(one_line("two\n  lines, \x1b[2J"))
        two lines, \x1b[2J
    """
    text = " ".join(text.split())[:max_chars]
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def shown(value: object, max_chars: int = 80) -> str:
    """Return the `repr` of an untrusted value as one short line, for a message."""
    return one_line(repr(value) if isinstance(value, str) else reprlib.repr(value), max_chars)


def warn(message: str) -> None:
    """Warn at the innermost line of user code on the stack, whether it called samestep or torch."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and is_ours(frame):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def is_ours(frame: FrameType) -> bool:
    """Say whether a frame runs code of samestep or torch."""
    return package_of(frame) in ("samestep", "torch")


def package_of(frame: FrameType) -> str:
    """Return the name of the top-level package, or module, whose code a frame runs."""
    return str(frame.f_globals.get("__name__")).partition(".")[0]


def calls_differ(one: tuple[int, str], other: tuple[int, str]) -> DisagreementError:
    """Return the error for two workers that make different calls, given as (worker, call) in any order."""
    (first, here), (second, there) = sorted((one, other))
    return DisagreementError(
        f"worker {first} is at {here!r}, and worker {second} at {there!r}: expected all workers to make the "
        "same calls in the same order"
    )


def kind_of_call(what: str) -> str:
    """Return the part of a message's name that must be the same on all workers: no numbers, no brackets.

    Messages contain the number of their step, and comparing that gives a better error. A path in brackets may
    differ between hosts for the same folder.

    >>> kind_of_call("step 12, writing a checkpoint (/runs/1)")
    'step , writing a checkpoint'
    """
    return _MAY_DIFFER.sub("", what)


_MAY_DIFFER = re.compile(r" \(.*\)|\d+")


def who_has_what(name: str, values: Sequence[object]) -> str:
    """Say which workers' values differ from most, or list all values if there is no majority.

    >>> who_has_what("towers", [8, 7, 8])
    'worker 1 has towers = 7, the others have 8'
    """
    texts = [str(value) for value in values]
    usual, count = Counter(texts).most_common(1)[0]
    has_usual = 1 < count != len(texts) / 2
    odd = [w for w, text in enumerate(texts) if text != usual] if has_usual else range(len(texts))
    said = ", ".join(f"worker {worker} has {name} = {texts[worker]}" for worker in odd)
    return f"{said}, the others have {usual}" if has_usual else said
