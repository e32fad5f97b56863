"""The history of a run, read from its metrics.jsonl: curves over steps, and stretches from start to end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from samestep.errors import one_line, shown

__all__ = ["Curve", "History", "Mark", "Stretch"]

_MAX_NAMES = 1000
_MAX_WORKERS = 1 << 20
_MAX_VALUE = 1e100  # limits of an axis with larger values may overflow


@dataclass
class Curve:
    """A scalar over the steps at which it was measured."""

    name: str
    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Mark:
    """A step at which the workers or the placement of the towers changed.

    Attributes:
        step: number of steps taken before the change.
        text: describes the change, without any text from the file.
    """

    step: int
    text: str


@dataclass
class Stretch:
    """A part of a run from a start to its end.

    Attributes:
        start: the line of the start event.
        times_s: the times of all lines, in seconds since the epoch.
        steps: the steps of all lines.
        checkpoints: indices in `steps` of the lines of checkpoints.
        moves: marks where towers moved.
        ending: the reason in the line of the end event; None if there is no such line.
    """

    start: Mapping[str, Any]
    times_s: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    checkpoints: list[int] = field(default_factory=list)
    moves: list[Mark] = field(default_factory=list)
    ending: str | None = None

    @property
    def workers(self) -> str:
        """The number of workers, and the towers of each."""
        return f"{shown(self.start.get('workers'))}{_in_brackets(self.start)}"

    @property
    def mark(self) -> Mark:
        """The mark of the start."""
        workers = self.start.get("workers")
        is_number = isinstance(workers, int) and 0 < workers < _MAX_WORKERS
        who = f"{workers} worker{'s' * (workers != 1)}" if is_number else "other workers"
        return Mark(self.steps[0], f"step {self.steps[0]:,}: going on with {who}{_in_brackets(self.start)}")

    def text(self, name: str) -> str:
        """Return a value of the start event as text; empty if there is none."""
        value = self.start.get(name)
        return one_line(value, 80) if isinstance(value, str) else "" if value is None else shown(value)

    def add(self, line: Mapping[str, Any]) -> None:
        """Add a line: that of the start, or a later one."""
        if line.get("event") == "checkpoint":
            self.checkpoints.append(len(self.steps))
        if line.get("event") == "placement" and _placed(line):
            step = int(line["step"])
            self.moves.append(Mark(step, f"step {step:,}: towers placed {_placed(line)}"))
        self.times_s.append(float(line["time"]))
        self.steps.append(int(line["step"]))
        if line.get("event") == "end":
            reason = line.get("reason")
            self.ending = one_line(reason) if isinstance(reason, str) else "unknown"


@dataclass
class History:
    """The history of a run.

    Attributes:
        training: the curves of training scalars, by name.
        metrics: the curves of evaluation metrics, by name.
        stretches: the parts of the run from each start to its end, oldest first.
    """

    training: dict[str, Curve] = field(default_factory=dict)
    metrics: dict[str, Curve] = field(default_factory=dict)
    stretches: list[Stretch] = field(default_factory=list)

    @classmethod
    def of(cls, lines: Iterable[Mapping[str, Any]]) -> History:
        """Build the history from the lines of a run; see `read_lines`."""
        history = cls()
        for line in lines:
            if line.get("event") == "start" or not history.stretches:
                history.stretches.append(Stretch(line if line.get("event") == "start" else {}))
            history.stretches[-1].add(line)
            if not isinstance(line.get("event"), str):
                _add(history.training if "step/seconds" in line else history.metrics, line)
        return history

    def named(self, *names: str) -> list[Curve]:
        """Return the training curves with these names, if they exist."""
        return [self.training[name] for name in names if name in self.training]

    def towers(self) -> list[Curve]:
        """Return the curves of the towers' losses, in order."""
        found = {}
        for name, curve in self.training.items():
            first, _, rest = name.partition("/")
            number = rest.removesuffix("/loss")
            if first == "towers" and rest != number and number.isascii() and number.isdecimal():
                found[int(number[:9])] = curve
        return [found[number] for number in sorted(found)]

    @property
    def marks(self) -> list[Mark]:
        """The marks of all changes of workers or placement, in order of time."""
        found = [mark for stretch in self.stretches for mark in (stretch.mark, *stretch.moves)]
        return found[1:]

    @property
    def last_step(self) -> int:
        """The highest step of any line."""
        return max((max(stretch.steps) for stretch in self.stretches), default=0)


def _placed(line: Mapping[str, Any]) -> str:
    """Return the number of towers of each worker, such as "4 + 3"; empty if the line has none."""
    towers = line.get("towers")
    is_list = isinstance(towers, list) and all(isinstance(count, int) for count in towers)
    return one_line(" + ".join(map(str, towers[:64])), 80) if is_list and towers else ""


def _in_brackets(line: Mapping[str, Any]) -> str:
    return f" ({_placed(line)} towers)" if _placed(line) else ""


def _add(curves: dict[str, Curve], line: Mapping[str, Any]) -> None:
    for name, value in line.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _MAX_VALUE
        if name in ("step", "time") or not is_number:
            continue
        if name not in curves:
            if len(curves) >= _MAX_NAMES and not name.startswith("towers/"):
                continue
            curves[name] = Curve(name)
        curves[name].steps.append(int(line["step"]))
        curves[name].values.append(float(value))
