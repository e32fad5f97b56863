"""A run's scalars and events in RUN_DIR/metrics.jsonl, one JSON object per line."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from samestep.app.callbacks import Logger
from samestep.app.lock import RunLock
from samestep.app.memory import total_bytes
from samestep.checkpoint.durable import open_regular, parse_json, read_file, replaced
from samestep.checkpoint.folder import Folder
from samestep.errors import DataError, one_line
from samestep.summation.placement import Placement
from samestep.towers.report import Report

if TYPE_CHECKING:
    from samestep.app.trainer import Trainer

__all__ = ["FILE", "JsonLines", "last_checkpoint", "read_last_line", "read_lines"]

FILE = "metrics.jsonl"
"""Name of the file in the run folder."""

_IN_TRAINING = "step/seconds"  # a scalar that only lines of training have
_MAX_BYTES = 1 << 30
_MOST_TAIL_BYTES = 1 << 16
_MAX_STEP = 1 << 53
_MAX_TIME_S = 1 << 36  # the year 4147, which `datetime` can represent


class JsonLines(Logger):
    """Writes a line for each call of `log`, and for each event: start, placement, checkpoint and end.

    Each line has "step", the number of steps taken, and "time" in seconds since the epoch. In addition it has
    the scalars by name, or "event" and the event's details. When a run is resumed from a checkpoint, lines of
    later steps are removed, except starts and ends.
    """

    reads_gradients = False

    def __init__(self, lock: RunLock) -> None:
        self._lock = lock
        self._kept: set[tuple[int, bool]] = set()  # (step, whether in training) of lines already in the file
        self._file: BinaryIO | None = None
        self._placement: Placement | None = None

    def on_start(self, trainer: Trainer) -> None:
        """Create the file, or continue an earlier one."""
        kept = _lines_until(self._lock.folder, trainer.step.towers.step)
        content = b"".join(json.dumps(line).encode() + b"\n" for line in kept)
        self._file = replaced(FILE, content, self._lock.folder)
        self._kept = {(line["step"], _IN_TRAINING in line) for line in kept if "event" not in line}
        self._start(trainer)

    def _start(self, trainer: Trainer) -> None:
        job, placement = trainer.job, trainer.step.towers.placement
        self._placement = placement
        self._write(
            trainer.step.towers.step,
            event="start",
            workers=job.world_size,
            towers=[len(own) for own in placement.ranges],
            device=str(job.device.type),
            memory_bytes=total_bytes(job.device),
            steps=trainer.steps,
            name=trainer.name,
        )

    def on_regroup(self, trainer: Trainer, why: str) -> None:
        """Write an end and a start, because the number of workers has changed."""
        self._write(trainer.step.towers.step, event="end", reason=why)
        self._start(trainer)

    def after_step(self, trainer: Trainer, report: Report) -> None:
        """Write the placement if towers have moved."""
        placement = trainer.step.towers.placement
        if placement != self._placement:
            self._placement = placement
            self._write(report.step + 1, event="placement", towers=[len(own) for own in placement.ranges])

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write a line, unless it was in the file at the start, as from an earlier worker 0."""
        if (step, _IN_TRAINING in scalars) in self._kept:
            return
        own = {"step", "time", "event"} & scalars.keys()  # names that an evaluation's metrics may have
        self._write(
            step, **{f"evaluation/{name}" if name in own else name: scalars[name] for name in scalars}
        )

    def after_checkpoint(self, trainer: Trainer, path: Path) -> None:
        """Write the checkpoint's step and name."""
        # The step of the name: the trainer has taken further steps meanwhile.
        self._write(int(path.name.removeprefix("step-")), event="checkpoint", name=path.name)

    def on_end(self, trainer: Trainer) -> None:
        """Write the end, and close the file."""
        if self._file is not None:
            self._write(trainer.step.towers.step, event="end", reason=trainer.ending)
            self._file.close()

    def _write(self, step: int, **values: Any) -> None:
        assert self._file is not None
        line = json.dumps({"step": step, "time": round(time.time(), 3), **values})
        self._file.write(f"{line}\n".encode())
        self._file.flush()


def read_lines(run_dir: Path, *, inside: Folder | None = None) -> list[dict[str, Any]]:
    """Return the lines of a run, except damaged ones."""
    content = read_file(run_dir / FILE, _MAX_BYTES, inside=inside)
    return [line for text in content.splitlines() if (line := _parse(text)) is not None]


def read_last_line(run_dir: Path) -> dict[str, Any] | None:
    """Return the last line of a run without reading the others; None if there is none, or it is damaged."""
    opened = open_regular(run_dir / FILE)
    if opened is None:
        return None
    with opened as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - _MOST_TAIL_BYTES))
        lines = stream.read().splitlines()
    return _parse(lines[-1]) if lines else None


def last_checkpoint(run_dir: Path) -> str | None:
    """Return the name of the last checkpoint that the file names; None if there is none, or no such file."""
    lines: list[dict[str, Any]] = []
    with suppress(OSError, DataError):  # then `JsonLines` meets the same error, which is printed
        lines = read_lines(run_dir)
    named = [line.get("name") for line in lines if line.get("event") == "checkpoint"]
    return one_line(str(named[-1]), 80) if named else None


def _parse(text: bytes) -> dict[str, Any] | None:
    try:
        line = parse_json(text)
    except ValueError:
        return None
    if not isinstance(line, dict):
        return None
    step, time_s = line.get("step"), line.get("time")
    is_line = isinstance(step, int) and 0 <= step < _MAX_STEP
    return line if is_line and isinstance(time_s, float | int) and 0 <= time_s < _MAX_TIME_S else None


def _lines_until(folder: Folder, step: int) -> list[dict[str, Any]]:
    """Return the lines up to a step, and all starts and ends."""
    lines = [] if folder.look(FILE) is None else read_lines(folder.path, inside=folder)
    return [line for line in lines if line["step"] <= step or line.get("event") in ("start", "end")]
