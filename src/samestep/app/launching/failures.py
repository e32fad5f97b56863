"""Records of why workers stopped, which workers write for the launcher, and the root cause among them."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from samestep.errors import Error, LostWorkerError, one_line

__all__ = ["Failure", "root_cause"]

INTERRUPTED = 130  # what shells show for SIGINT: 128 + 2


@dataclass(frozen=True)
class Failure:
    """Why one worker stopped.

    Attributes:
        text: the message for the user: one line for a `samestep.Error`, the traceback of any other
            exception, empty if the worker has printed the message itself.
        exit_status: the worker's exit status.
        is_error: whether `text` is the line of a `samestep.Error`, which needs no explanation.
        is_echo: whether the worker ended because *another* worker is gone, or because of a signal.
        is_recorded: whether the worker itself wrote this record.
        was_interrupted: whether the worker ended with a `KeyboardInterrupt`.
        time_ns: time of the failure, in nanoseconds since the epoch.
    """

    text: str
    exit_status: int
    is_error: bool = False
    is_echo: bool = False
    is_recorded: bool = True
    was_interrupted: bool = False
    time_ns: int = field(default_factory=time.time_ns)

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Describe an exception that ended a worker."""
        if isinstance(error, Error):
            notes = [note.removeprefix("samestep: ") for note in getattr(error, "__notes__", ())]
            line = one_line("; ".join([str(error), *notes]), max_chars=2000)
            is_echo = isinstance(error, LostWorkerError)
            return cls(f"samestep: error: {line}\n", error.exit_status, is_error=True, is_echo=is_echo)
        if _is_out_of_memory(error):
            line = one_line(str(error) or type(error).__name__)
            remedy = "lower the batch size, or raise the number of towers, so that each has fewer rows"
            return cls(f"samestep: error: out of memory: {line}; {remedy}\n", 1)
        if isinstance(error, KeyboardInterrupt):
            return replace(cls.of_status(INTERRUPTED), was_interrupted=True)
        if isinstance(error, SystemExit):
            code = error.code or 0
            return cls.of_status(code) if isinstance(code, int) else cls(f"{code}\n", 1)
        return cls("".join(traceback.format_exception(error)), 1, is_echo=_is_lost_connection(error))

    @classmethod
    def of_status(cls, exit_status: int) -> Failure:
        """Describe a worker that has printed the reason itself, or was stopped by a signal."""
        return cls("", exit_status, is_echo=exit_status > 128)

    def write(self, path: Path) -> None:
        """Write this record to the file that torch's launcher reads, in the format that torchrun prints."""
        text = self.text or f"exit status {self.exit_status}"
        message = {
            "message": text,
            "extraInfo": {"py_callstack": text, "timestamp": str(self.time_ns // 10**9)},
        }
        unfinished = path.with_suffix(".tmp")
        unfinished.write_text(json.dumps({"message": message, "samestep": asdict(self)}), encoding="utf-8")
        os.replace(unfinished, path)

    @classmethod
    def read(cls, path: Path) -> Failure | None:
        """Read a worker's record; None if there is no file, or it holds something else."""
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8"))["samestep"])
        except (OSError, ValueError, LookupError, TypeError):
            return None


def _is_lost_connection(error: BaseException) -> bool:
    if "torch" not in sys.modules:  # so there was no connection
        return False
    from samestep.workers.process_group import is_lost_connection

    return is_lost_connection(error)


def _is_out_of_memory(error: BaseException) -> bool:
    # On a CPU, torch raises a plain RuntimeError, which only its text distinguishes from others.
    is_torchs = isinstance(error, RuntimeError) and "DefaultCPUAllocator: " in str(error)
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or is_torchs


def root_cause(failures: Iterable[tuple[int, Failure]]) -> tuple[int, Failure]:
    """Return the worker, and its failure, that caused the others to stop.

    This is the earliest failure, with two exceptions. A lost connection or a signal is the cause only if
    there is no other failure, and then an interrupted worker goes first. A worker that died without a record
    goes after those with one, because its time is only that at which the launcher noticed.
    """
    return min(failures, key=lambda item: (item[1].is_echo, *_order(item[1])))


def _order(failure: Failure) -> tuple[bool, bool, int]:
    is_bystander = failure.is_echo and not failure.was_interrupted
    return is_bystander, not failure.is_recorded, failure.time_ns
