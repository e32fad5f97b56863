"""What a run measures and what happens to it, one JSON object a line, in RUN_DIR/metrics.jsonl."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from samestep.app.callbacks import Logger
from samestep.app.lock import RunLock
from samestep.app.memory import total_bytes
from samestep.checkpoint.durable import parse_json, read_file
from samestep.checkpoint.folder import Folder
from samestep.summation.placement import Placement
from samestep.towers.report import Report

if TYPE_CHECKING:
    from samestep.app.trainer import Trainer

__all__ = ["FILE", "JsonLines", "read_lines"]

FILE = "metrics.jsonl"
"""Its name in a run's folder."""

_IN_TRAINING = "step/seconds"
_MAX_BYTES = 1 << 30
_MAX_STEP = 1 << 53
_MAX_TIME_S = 1 << 36  # in a year that a date can have


class JsonLines(Logger):
    """Writes a line for each call of `log`, and for each start, checkpoint and end of the run.

    Each has "step", the steps taken, and "time" in seconds since the epoch; the scalars by their names, or
    "event" with what there is to say of it. When a run is continued, lines of later steps are dropped, but
    for starts and ends.
    """

    reads_gradients = False

    def __init__(self, lock: RunLock) -> None:
        self._lock = lock
        self._kept: set[tuple[int, bool]] = set()  # what was measured, by step, and whether in training
        self._file: BinaryIO | None = None
        self._placement: Placement | None = None

    def on_start(self, trainer: Trainer) -> None:
        """Begin the file, or go on with it."""
        kept = _lines_until(self._lock.folder, trainer.step.towers.step)
        self._file = _written(kept, self._lock.folder)
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
        """Note that other workers go on."""
        self._write(trainer.step.towers.step, event="end", reason=why)
        self._start(trainer)

    def after_step(self, trainer: Trainer, report: Report) -> None:
        """Note where towers have moved."""
        placement = trainer.step.towers.placement
        if placement != self._placement:
            self._placement = placement
            self._write(report.step + 1, event="placement", towers=[len(own) for own in placement.ranges])

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write a line, unless an earlier worker 0 has."""
        if (step, _IN_TRAINING in scalars) in self._kept:
            return
        own = {"step", "time", "event"} & scalars.keys()  # of a recipe's evaluation
        self._write(
            step, **{f"evaluation/{name}" if name in own else name: scalars[name] for name in scalars}
        )

    def after_checkpoint(self, trainer: Trainer, path: Path) -> None:
        """Note a checkpoint."""
        # Steps have been taken while it was written.
        self._write(int(path.name.removeprefix("step-")), event="checkpoint", name=path.name)

    def on_end(self, trainer: Trainer) -> None:
        """Close the file."""
        if self._file is not None:
            self._write(trainer.step.towers.step, event="end", reason=trainer.ending)
            self._file.close()

    def _write(self, step: int, **values: Any) -> None:
        assert self._file is not None
        line = json.dumps({"step": step, "time": round(time.time(), 3), **values})
        self._file.write(f"{line}\n".encode())
        self._file.flush()


def read_lines(run_dir: Path, *, inside: Folder | None = None) -> list[dict[str, Any]]:
    """Return the lines of a run, without those that are damaged."""
    content = read_file(run_dir / FILE, _MAX_BYTES, inside=inside)
    return [line for text in content.splitlines() if (line := _parse(text)) is not None]


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
    """Return the lines that are not after a step."""
    lines = [] if folder.look(FILE) is None else read_lines(folder.path, inside=folder)
    return [line for line in lines if line["step"] <= step or line.get("event") in ("start", "end")]


def _written(lines: Sequence[Mapping[str, Any]], folder: Folder) -> BinaryIO:
    """Open the file for writing, with these lines."""
    unfinished = f".{FILE}.unfinished"
    folder.unlink(unfinished)  # of a run that was killed
    file = folder.create(unfinished)
    for line in lines:
        file.write(json.dumps(line).encode() + b"\n")
    file.flush()
    folder.rename(unfinished, FILE)
    return file
