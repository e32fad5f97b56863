"""An event file for TensorBoard that can fail without ending the run."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from samestep.app.extras import extra
from samestep.errors import Error, one_line

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

__all__ = ["EventFile", "delete_event_files"]

_PREFIX = "events.out.tfevents."


class EventFile:
    """A new event file for TensorBoard, flushed after each step; the first error is printed and closes it.

    TensorBoard's own writer does not suffice. It opens its file by name for every event, so after the folder
    was moved it starts a new file at the old path. And it raises errors of the disk later, in a thread and in
    `close`.

    Args:
        folder: the folder of the file; created if it does not exist, but its parent must exist.
        purge_step: hide the events of older files in the folder from this step on; None hides nothing.
    """

    def __init__(self, folder: Path, purge_step: int | None = None) -> None:
        self._folder = folder
        self._file: BinaryIO | None = None
        self._has_failed = False
        with self.tolerating():
            with extra("tensorboard"):
                from tensorboard.compat.proto.event_pb2 import Event, SessionLog

            folder.mkdir(exist_ok=True)
            self._file = _create(folder)
            self._append([Event(file_version="brain.Event:2", wall_time=time.time())])
            if purge_step is not None:
                start = SessionLog(status=SessionLog.START)
                self._append([Event(step=purge_step, session_log=start, wall_time=time.time())])

    @property
    def is_open(self) -> bool:
        """Whether the file is open for writing."""
        return self._file is not None

    @contextmanager
    def tolerating(self) -> Iterator[None]:
        """If an exception is raised in the block, suppress it, close the file, and print the first one."""
        try:
            yield
        except Exception as error:
            self.close()
            if self._has_failed:
                return
            self._has_failed = True
            text = str(error) if isinstance(error, Error) else f"{type(error).__name__}: {error}"
            reason = getattr(error, "strerror", None) or text
            _say(f"{self._folder}: summaries cannot be written ({one_line(reason)}); going on without them")

    def write(self, step: int, summaries: Iterable[Summary]) -> None:
        """Write the summaries of a step; do nothing if the file was closed after an error."""
        if self._file is None:
            return
        with self.tolerating():
            from tensorboard.compat.proto.event_pb2 import Event

            now_s = time.time()
            self._append(Event(step=step, wall_time=now_s, summary=summary) for summary in summaries)

    def close(self) -> None:
        """Close the file."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # errors were reported on writing
                file.close()

    def _append(self, events: Iterable[Event]) -> None:
        from torch.utils.tensorboard import RecordWriter

        assert self._file is not None
        records = BytesIO()
        writer = RecordWriter(records)
        for event in events:
            writer.write(event.SerializeToString())
        self._file.write(records.getvalue())
        self._file.flush()
        if not os.fstat(self._file.fileno()).st_nlink:
            raise FileNotFoundError("the file was deleted")


def delete_event_files(folder: Path) -> None:
    """Delete the event files in a folder, which may be a link, and nothing else there."""
    for file in folder.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # a reader may keep a file of NFS
            file.unlink()


def _create(folder: Path) -> BinaryIO:
    """Create a file with a unique name that TensorBoard recognizes."""
    stem = f"{_PREFIX}{int(time.time()):010}.{socket.gethostname()}.{os.getpid()}"
    for number in count():
        with suppress(FileExistsError):
            return (folder / f"{stem}.{number}").open("xb")
    raise AssertionError


@cache
def _say(line: str) -> None:
    print(f"samestep: {line}", file=sys.stderr, flush=True)
