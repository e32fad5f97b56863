"""The errors that samestep raises.

    Error                    the base class of all of them
    ├── ConfigError          an argument or setting has a wrong value        (also a ValueError)
    ├── UsageError           a method was called in a wrong way or order     (also a RuntimeError)
    ├── AbandonedError       another worker abandoned the step               (also a RuntimeError)
    ├── BatchError           a batch that has no rows, or counts nothing, …  (also a ValueError)
    ├── BufferPolicyError    a buffer changed that has no policy             (also a RuntimeError)
    ├── DataError            a file does not hold what it should             (also a ValueError)
    │   └── DamagedError     a checkpoint is not what was written
    ├── MissingFileError     a file or folder does not exist                 (also a FileNotFoundError)
    ├── StorageError         a file cannot be written or read                (also an OSError)
    ├── LockedError          another process trains in the run folder        (also a RuntimeError)
    ├── DisagreementError    the workers of a job have different values      (also a RuntimeError)
    ├── LostWorkerError      a worker exited or stopped answering            (also a RuntimeError)
    ├── LoaderError          a loader process was killed, or hangs           (also a RuntimeError)
    └── NonFiniteError       a loss or gradient is NaN or infinite           (also an ArithmeticError)

`exit_status` is what the command line exits with: 2 where the input is wrong, 1 where the run failed.
"""

from __future__ import annotations

import inspect
import re
import reprlib
import warnings
from collections import Counter
from collections.abc import Sequence

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
    """A method was called in a wrong way, or in a wrong order."""

    exit_status = 1


class AbandonedError(Error, RuntimeError):
    """Another worker abandoned the step, so nobody takes it; see `Towers.abandon`."""

    exit_status = 1


class BatchError(Error, ValueError):
    """A batch that cannot be cut into towers, or in which nothing counts."""

    exit_status = 1


class BufferPolicyError(Error, RuntimeError):
    """A buffer of the model changed during a pass, and has no policy; see `Towers(buffers=...)`."""

    exit_status = 1


class DataError(Error, ValueError):
    """A file does not hold what it should."""


class DamagedError(DataError):
    """A checkpoint is not what was written: an earlier one may be whole."""


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
    """A worker of the job exited, was interrupted among messages, or did not answer within the timeout."""

    exit_status = 1


class LoaderError(Error, RuntimeError):
    """A process in which a loader reads was killed, or has not answered within the timeout."""

    exit_status = 1


class NonFiniteError(Error, ArithmeticError):
    """A loss or a gradient is NaN or infinite."""

    exit_status = 1


def one_line(text: str, max_chars: int = 200) -> str:
    r"""Return text from an unknown source for a message: one short line, without control characters.

    Example:
        >>> print(one_line("two\n  lines, \x1b[2J"))
        two lines, \x1b[2J
    """
    text = " ".join(text.split())[:max_chars]
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def shown(value: object, max_chars: int = 80) -> str:
    """Return a value from an unknown source for a message: its `repr`, on one short line."""
    return one_line(repr(value) if isinstance(value, str) else reprlib.repr(value), max_chars)


def warn(message: str) -> None:
    """Warn in the user's line that called samestep, or torch which called it, however deep this is."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and _is_ours(frame.f_globals.get("__name__", "")):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in ("samestep", "torch")


def calls_differ(one: tuple[int, str], other: tuple[int, str]) -> DisagreementError:
    """Return the error of two workers, each with what it calls, alike on both."""
    (first, here), (second, there) = sorted((one, other))
    return DisagreementError(
        f"worker {first} is at {here!r}, and worker {second} at {there!r}: expected all workers to make the "
        "same calls in the same order"
    )


def kind_of_call(what: str) -> str:
    """Return what must be the same on all workers in the name of a message: all but numbers and brackets.

    The messages of a step have its number, too, and say more where workers are at different ones; a path in
    brackets may lead to one folder from several hosts.

    >>> kind_of_call("step 12, writing a checkpoint (/runs/1)")
    'step , writing a checkpoint'
    """
    return _MAY_DIFFER.sub("", what)


_MAY_DIFFER = re.compile(r" \(.*\)|\d+")


def who_has_what(name: str, values: Sequence[object]) -> str:
    """Say which workers have another value than most.

    >>> who_has_what("towers", [8, 7, 8])
    'worker 1 has towers = 7, the others have 8'
    """
    texts = [str(value) for value in values]
    usual, count = Counter(texts).most_common(1)[0]
    has_usual = 1 < count != len(texts) / 2
    odd = [w for w, text in enumerate(texts) if text != usual] if has_usual else range(len(texts))
    said = ", ".join(f"worker {worker} has {name} = {texts[worker]}" for worker in odd)
    return f"{said}, the others have {usual}" if has_usual else said
