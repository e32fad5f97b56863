"""The timeline of a takeover: a real job of 3 workers, one of them killed, as a table and a picture.

    python benchmarks/takeover_timeline.py [--victim 1] [--picture docs/pictures/takeover.svg]

A pass takes 20 ms and mostly waits, as for a GPU, so that three workers and a newcomer have room on two
cores. The victim kills itself in its second pass of a step. The workers and their launcher record the time of
each event in the table, by a clock that all processes of a machine share. The job ends a few steps after
another worker has joined.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from timeline_job import KILL_AT, LAUNCHER, NUM_WORKERS
from timeline_picture import Mark, Panel, Span, draw

JOB = Path(__file__).with_name("timeline_job.py")


@dataclass(frozen=True)
class Event:
    """An event that one process recorded; its time is relative to the kill."""

    who: int
    what: str
    kind: str
    at_ms: float
    more: Mapping[str, Any]


@dataclass(frozen=True)
class Moment:
    """A row of the table."""

    at_ms: float
    who: str
    lane: int
    text: str


class Events:
    """All events that the processes of a job recorded."""

    def __init__(self, folder: Path) -> None:
        lines = [json.loads(line) for file in folder.glob("*.jsonl") for line in file.open()]
        lines.sort(key=lambda line: line["time_ns"])
        begin_ns = next(line["time_ns"] for line in lines if line["what"] == "killed")
        self.all = [
            Event(
                line.pop("who"),
                line.pop("what"),
                line.pop("kind"),
                (line.pop("time_ns") - begin_ns) / 1e6,
                line,
            )
            for line in lines
        ]
        self.victim = next(event.who for event in self.all if event.what == "killed")
        self.newcomer = NUM_WORKERS
        self.left = [who for who in range(NUM_WORKERS) if who != self.victim]

    def first(self, what: str, kind: str, who: int, after_ms: float = 0.0) -> float:
        """Return the time of the first such event after a moment."""
        found = (e for e in self.all if (e.what, e.kind, e.who) == (what, kind, who) and e.at_ms > after_ms)
        return next(found).at_ms

    def next_of(self, what: str, kind: str, after_ms: Mapping[int, float]) -> dict[int, float]:
        """Return the time of each worker's first such event after its own moment."""
        return {who: self.first(what, kind, who, at_ms) for who, at_ms in after_ms.items()}

    def spans(self, what: str, who: int) -> Iterator[tuple[float, float, Mapping[str, Any]]]:
        """Yield the beginning and end of each time a process did something, and further fields."""
        found = [e for e in self.all if (e.what, e.who) == (what, who)]
        for begin, end in pairwise(found):
            if (begin.kind, end.kind) == ("begin", "end"):
                yield begin.at_ms, end.at_ms, begin.more
        if found and found[-1].kind == "begin":  # it was killed
            yield found[-1].at_ms, 0.0, found[-1].more


def moments(events: Events) -> list[Moment]:
    """Return the rows of the table; an event of several workers counts when the last one reaches it."""
    newcomer, all_left = events.newcomer, " and ".join(map(str, events.left))
    workers, new = f"workers {all_left}", f"worker {newcomer}"
    everyone = f"workers {', '.join(map(str, events.left))} and {newcomer}"
    found = []

    def add(at_ms: Mapping[int, float], who: str, text: str) -> Mapping[int, float]:
        last_ms, lane = max((ms, lane) for lane, ms in at_ms.items())
        found.append(Moment(last_ms, who, lane, text))
        return at_ms

    def launcher(what: str, text: str, after_ms: float = 0.0) -> None:
        add({LAUNCHER: events.first(what, "at", LAUNCHER, after_ms)}, "launcher", text)

    def meet(at_ms: Mapping[int, float], who: str, *texts: str) -> None:
        whats = (
            ("list", "end"),
            ("connect", "end"),
            ("compare", "end"),
            ("pass", "begin"),
            ("average", "end"),
        )
        for (what, kind), text in zip(whats, texts, strict=True):
            at_ms = add(events.next_of(what, kind, at_ms), who, text)

    add({events.victim: 0.0}, f"worker {events.victim}", f"is killed in a pass of step {KILL_AT}")
    launcher("becomes", f"sees it, and writes a new list: {all_left}")
    launcher("started", f"starts worker {newcomer}, in the place of worker {events.victim}")
    lost_ms = events.next_of("regroup", "begin", dict.fromkeys(events.left, 0.0))
    add(lost_ms, workers, "have noticed, in the exchange, and put back buffers and generators")
    left_ms = add(events.next_of("list", "begin", lost_ms), workers, "have left their process group")
    met = (
        "have come, as the list says",
        "are connected: a new process group",
        "know how far all are; towers are placed",
    )
    meet(left_ms, workers, *met, f"begin step {KILL_AT} again", f"have taken step {KILL_AT}, on 2 workers")
    add({newcomer: events.first("imports", "end", newcomer, -1e9)}, new, "has imported torch and samestep")
    ready_ms = events.first("ready", "at", newcomer)
    add({newcomer: ready_ms}, new, "has built model and data: it is ready")
    launcher(
        "becomes", f"sees it, and writes a new list: {all_left.replace(' and', ',')} and {newcomer}", ready_ms
    )
    told_ms = events.next_of("regroup", "begin", dict.fromkeys(events.left, ready_ms))
    add(told_ms, workers, "know of it, from the first of them, after a step")
    met = (
        "have come, as the list says",
        "are connected",
        f"are alike: worker {newcomer} has taken the others' state",
    )
    meet(told_ms | {newcomer: ready_ms}, everyone, *met, "begin the next step, on 3 workers", "have taken it")
    return sorted(found, key=lambda moment: moment.at_ms)


def table(found: Sequence[Moment]) -> str:
    """Return the table, with the moments' numbers in the picture."""
    lines = ["| | ms | who | what |", "|---:|---:|---|---|"]
    lines += [f"| {n} | {m.at_ms:,.0f} | {m.who} | {m.text} |" for n, m in enumerate(found, 1)]
    return "\n".join(lines)


# ---- the picture -----------------------------------------------------------------------------------------

PASS, STEP, EXCHANGE, LEAVE = "a tower's pass", "a step", "waits for the others", "leaves its group"
MEET, CONNECT, COMPARE = "meets the others", "connects", "compares, takes state, agrees"
IMPORT, BUILD = "imports", "builds model and data"
KINDS = {
    **{PASS: "#2f7fb8", STEP: "#6ba3cf", EXCHANGE: "#98a3ae", LEAVE: "#d9730d", MEET: "#c2569b"},
    **{CONNECT: "#7d5cc6", COMPARE: "#2a9d5c", IMPORT: "#a0723d", BUILD: "#1797a6"},
}


def lane_of(who: int) -> str:
    """Return the name of a process."""
    return "launcher" if who == LAUNCHER else f"worker {who}"


def work_of(events: Events, who: int) -> Iterator[Span]:
    """Yield all spans of a worker."""
    lane = lane_of(who)
    for begin_ms, end_ms, more in events.spans("pass", who):
        yield Span(lane, PASS, begin_ms, end_ms, str(more["tower"]) * (end_ms != 0.0))
    lists = list(events.spans("list", who))
    for begin_ms, _, _ in events.spans("regroup", who):
        yield Span(lane, LEAVE, begin_ms, next(begin for begin, _, _ in lists if begin > begin_ms))
    for what, kind in {"average": EXCHANGE, "list": MEET, "connect": CONNECT, "compare": COMPARE}.items():
        for begin_ms, end_ms, _ in events.spans(what, who):
            yield Span(lane, kind, begin_ms, end_ms)
    if who == events.newcomer:
        begin_ms, end_ms, _ = next(events.spans("imports", who))
        yield Span(lane, IMPORT, events.first("started", "at", LAUNCHER), end_ms, IMPORT)
        yield Span(lane, BUILD, end_ms, events.first("ready", "at", who), BUILD)


def steps_of(events: Events, who: int) -> Iterator[Span]:
    """Yield the steps of a worker, and its other spans."""
    averages = [end_ms for _, end_ms, _ in events.spans("average", who)]
    begins = {more["step"]: begin_ms for begin_ms, _, more in reversed([*events.spans("pass", who)])}
    for begin_ms in begins.values():
        end_ms = next((end_ms for end_ms in averages if end_ms > begin_ms), 0.0)
        yield Span(lane_of(who), STEP, begin_ms, end_ms)
    yield from (span for span in work_of(events, who) if span.kind not in (PASS, EXCHANGE))


def panels(events: Events, found: Sequence[Moment]) -> list[Panel]:
    """Return the panels to draw, each a stretch of time."""
    at = {number: moment.at_ms for number, moment in enumerate(found, 1)}
    ready_ms = events.first("ready", "at", NUM_WORKERS)
    told_ms = min(events.first("regroup", "begin", who, ready_ms) for who in events.left)
    redone_ms = next(m.at_ms for m in found if "have taken step" in m.text)
    stretches = [
        (f"Worker {events.victim} is killed", -90.0, redone_ms + 40, 50.0),
        ("The job goes on, while another one gets ready", redone_ms, told_ms, 1000.0),
        (f"Worker {NUM_WORKERS} joins", told_ms - 90, found[-1].at_ms + 40, 50.0),
    ]
    made = []
    for index, (title, begin_ms, end_ms, tick_ms) in enumerate(stretches):
        whole = index != 1
        who = [each for each in range(-1, NUM_WORKERS + 1) if each != events.victim or index == 0]
        spans = [s for each in who[1:] for s in (work_of if whole else steps_of)(events, each)]
        marks = [
            Mark(lane_of(m.lane), n, at[n]) for n, m in enumerate(found, 1) if begin_ms < m.at_ms < end_ms
        ]
        lives = {lane_of(each): life_of(events, each) for each in who}
        made.append(Panel(title, begin_ms, end_ms, tick_ms, lives, spans, marks))
    return made


def life_of(events: Events, who: int) -> tuple[float, float]:
    """Return when a process starts and ends, as far as the picture shows."""
    begin_ms = events.first("started", "at", LAUNCHER) if who == events.newcomer else -1e9
    return begin_ms, 0.0 if who == events.victim else 1e9


def main() -> None:
    """Run the job, print the table, and draw the picture."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--victim", type=int, default=1, choices=range(NUM_WORKERS))
    options.add_argument("--picture", type=Path)
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(JOB), folder, str(chosen.victim)]
        subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
        events = Events(Path(folder))
    found = moments(events)
    print(table(found))
    if chosen.picture is not None:
        says = f"A takeover over time: {'; '.join(f'{m.at_ms:,.0f} ms: {m.who} {m.text}' for m in found)}"
        chosen.picture.write_text(draw(panels(events, found), KINDS, says))


if __name__ == "__main__":
    main()
