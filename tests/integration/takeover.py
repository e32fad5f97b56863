"""Workers killed and stopped at random moments of runs that go on without them, and with newcomers.

python -m tests.integration.takeover [--kills N] [--stops N] [--seed SEED] [--keep DIR]

Each run has a launcher, 2 to 4 workers, evaluations and checkpoints every few steps, and some have loader
processes. It must end with exit status 0 and the weights of the run that nothing disturbs, with the numbers
of each step once in metrics.jsonl, and leave no process behind. Faults that come too late are tried again.

The table says what was tried, how often the job trained on without the worker (hit), and of these: how many
were in runs that ended otherwise than they should, in runs that ended with the right weights, in runs in
which all workers that nobody struck were the same processes until the end; and the time to the next step.
"""

import argparse
import contextlib
import itertools
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from samestep.app.loggers.json_lines import read_lines

from .nursery import SAMESTEP, Nursery, Processes, digests_of

STEPS = 400
RECIPES: dict[str, tuple[object, ...]] = {"digits": (), "hanging": ("--loader-processes", 1)}
TRAINING = ("--towers", 7, "--batch-size", 40, "--log-every", 1, "--evaluate-every", 5)
LONGEST_S = 300
MOST_MISSED = 20
"""How many runs in a row may end before a fault has hit."""

_END = 10
"""No fault is meant for the last steps: a worker that is killed when it has done its part ends the job."""

KINDS = {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP}
USUAL = ("; going on with ", "[c10d] waitForInput", "connectFullMesh failed")
"""What may be said; torch does the latter two where one is killed in the moment in which workers connect."""

VICTIMS = ("worker 0", "another worker", "a newcomer")


@dataclass(frozen=True)
class Fault:
    """A signal to a worker.

    Attributes:
        kind: its name.
        victim: what the worker was.
        pid: that of the worker.
        time_s: when it was sent, in seconds since the epoch.
        hit: whether the others trained on without the worker.
        lost_s: how long it took to the next step; None for newcomers, for whom nobody waits.
    """

    kind: str
    victim: str
    pid: int
    time_s: float
    hit: bool = False
    lost_s: float | None = None


@dataclass
class Run:
    """A run, and who belongs to it, as far as its messages tell.

    Attributes:
        seen: all its workers.
        struck: those that got a signal.
        gone: those that ended before the last step.
        members: those that train, in the order of their ranks.
        is_same: whether it ended with the right weights.
    """

    launcher: Processes
    num_workers: int
    folder: Path
    steps: int
    faults: list[Fault] = field(default_factory=list)
    problem: str = ""
    is_same: bool = False
    seen: set[int] = field(default_factory=set)
    struck: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)
    members: list[int] = field(default_factory=list)
    num_told: int = -1

    @property
    def step(self) -> int:
        """The newest step that it has told of."""
        return int((re.findall(r": step (\d+),", self.launcher.stdout()) or ["0"])[-1])

    def newcomers(self) -> list[int]:
        """Find out who the members are, and return those that are to become some."""
        running = [pid for pid in self.launcher.started_by(0) if state_of(pid) not in "ZX"]
        if self.step < self.steps and not self.launcher.ended():
            self.gone |= self.seen - set(running)
        self.seen.update(running)
        running = [pid for pid in running if pid not in self.struck]
        told = re.findall(r"going on with (\d+) worker", self.launcher.stderr())
        if len(told) != self.num_told:
            self.num_told, self.members = len(told), running[: int([self.num_workers, *told][-1])]
        self.members = [pid for pid in self.members if pid in running]
        return [pid for pid in running if pid not in self.members]

    @property
    def has_restarted(self) -> bool:
        """Whether a worker has ended on the way that nobody struck."""
        return bool(self.gone - self.struck)

    def wait(self, seconds: float) -> None:
        """See for a while who comes and goes."""
        deadline_s = time.monotonic() + seconds
        while time.monotonic() < deadline_s:
            self.newcomers()
            time.sleep(0.01)

    def strike(self, chance: random.Random, kind: str) -> None:
        """Strike a worker or a newcomer, but never the last worker."""
        newcomers = self.newcomers()
        victims = self.members if len(self.members) > 1 else []
        if newcomers and chance.random() < 0.1:  # each costs a pause before the next one
            victims = newcomers
        if victims:
            victim = chance.choice(victims)
            index = 2 if victim in newcomers else victim != self.members[0]
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, KINDS[kind])
                self.struck.add(victim)
                self.faults.append(Fault(kind, VICTIMS[index], victim, time.time()))

    def end(self) -> None:
        """Kill what is left: stopped workers do not see that their launcher is gone."""
        self.launcher.signal(signal.SIGKILL)
        for pid in self.seen & sessions():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


def state_of(pid: int) -> str:
    """Return what a process does, as /proc calls it; X where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except OSError:
        return "X"


def sessions() -> set[int]:
    """Return the sessions of all processes that run."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, session = entry.read_text().rpartition(") ")[2].split()[:4]
            found |= set() if state in "ZX" else {int(session)}
    return found


class Soak:
    """Runs with faults, one after the other, and what is expected of them."""

    def __init__(self, nursery: Nursery, folder: Path, chance: random.Random, steps: int = STEPS) -> None:
        self._nursery = nursery
        self._folder = folder
        self._chance = chance
        self._steps = steps
        self._whole: dict[str, tuple[str, dict[tuple[int, str], float]]] = {}

    def run(self, number: int, kinds: Sequence[str]) -> Run:
        """Strike with each kind of fault in turn, as long as the run lasts."""
        recipe, num_workers = self._chance.choice([*RECIPES]), self._chance.choice([2, 3, 3, 4])
        self.expect(recipe)
        run = self.start(recipe, num_workers, f"{number}-{recipe}-{num_workers}")
        try:
            self._disturb(run, kinds)
            self.judge(run, recipe)
        except AssertionError as error:
            run.problem = f"{run.folder.name}: {error}\n{run.launcher.stderr()[-2000:]}"
        finally:
            run.end()
        run.faults[:] = timed(run)
        return run

    def start(self, recipe: str, num_workers: int, name: str, *options: object) -> Run:
        """Start a run."""
        folder = self._folder / name
        words = (*SAMESTEP, "train", recipe, *TRAINING, *RECIPES[recipe], "--steps", self._steps, *options)
        own = ("--run-dir", folder / "run", "--checkpoint-every", 20, "--workers", num_workers)
        launcher = self._nursery.start_program((*words, *own), folder)
        return Run(launcher, num_workers, folder, self._steps)

    def expect(self, recipe: str) -> None:
        """Find out how the run of a recipe ends that nothing disturbs."""
        if recipe not in self._whole:
            run = self.start(recipe, 1, f"whole-{recipe}")
            assert run.launcher.wait(LONGEST_S) == [0], run.launcher.output()
            self._whole[recipe] = (
                digests_of(run.folder / "run")[self._steps],
                dict(measured(run.folder / "run")),
            )

    def _disturb(self, run: Run, kinds: Sequence[str]) -> None:
        deadline_s, pending = time.monotonic() + LONGEST_S, list(kinds)
        while not run.launcher.ended():
            if time.monotonic() > deadline_s:
                run.launcher.signal(signal.SIGKILL)
                raise AssertionError("it hangs")
            with contextlib.suppress(FileNotFoundError):  # it ends just now
                if pending and 0 < run.step < self._steps:
                    run.wait(self._chance.choice([0.01, 0.3, 1, 3]) * self._chance.random())
                    num_before = len(run.faults)
                    if run.step < self._steps - _END:
                        run.strike(self._chance, pending[0])
                    del pending[: len(run.faults) - num_before]
                elif run.step:
                    run.newcomers()
            time.sleep(0.01)

    def judge(self, run: Run, recipe: str) -> None:
        """Raise an `AssertionError` unless a run ends as it should."""
        digest, expected = self._whole[recipe]
        statuses = run.launcher.wait(LONGEST_S)
        run.is_same = digests_of(run.folder / "run").get(self._steps) == digest
        assert statuses == [0], f"{statuses}"
        deadline_s = time.monotonic() + 5
        while left := run.seen & sessions():
            assert time.monotonic() < deadline_s, f"still there: {left}"
            time.sleep(0.1)
        assert run.is_same, "other weights"
        assert not run.has_restarted, f"workers that nobody struck have ended: {run.gone - run.struck}"
        found = list(measured(run.folder / "run"))
        own = dict(found)
        twice = sorted({key for key, _ in found if sum(other == key for other, _ in found) > 1})
        assert not twice, f"twice in metrics.jsonl: {twice}"
        assert not expected.keys() - own.keys(), (
            f"not in metrics.jsonl: {sorted(expected.keys() - own.keys())}"
        )
        assert own == expected, "other numbers in metrics.jsonl"
        told = run.launcher.stderr().splitlines()
        strange = [line for line in told if not any(usual in line for usual in USUAL)]
        assert not strange, strange[:5]


def measured(run_dir: Path) -> Iterator[tuple[tuple[int, str], float]]:
    """Yield the loss after each step, and each evaluation's accuracy."""
    for line in read_lines(run_dir):
        for name in ("loss/total", "test accuracy"):
            if name in line:
                yield (line["step"], name), line[name]


def timed(run: Run) -> list[Fault]:
    """Note which faults have hit, and how long it took to the next step: the first with other workers."""
    lines = read_lines(run.folder / "run") if (run.folder / "run").exists() else []
    starts = [(n, line["time"]) for n, line in enumerate(lines) if line.get("event") == "start"]
    found = []
    for fault in run.faults:
        start = next((n for n, time_s in starts if time_s > fault.time_s), len(lines))
        step_s = next((line["time"] for line in lines[start:] if "loss/total" in line), None)
        is_newcomer = fault.victim == VICTIMS[2]
        hit = fault.pid in run.gone and (is_newcomer or step_s is not None)
        lost_s = None if step_s is None or is_newcomer else step_s - fault.time_s
        found.append(replace(fault, hit=hit, lost_s=lost_s))
    return found


COLUMNS = ("tried", "hit", "went wrong", "right digest", "nobody restarted", "median, s", "worst, s")


def table(runs: Sequence[Run]) -> str:
    """Return one line for each kind of fault and victim."""
    lines = [f"| fault | victim | {' | '.join(COLUMNS)} |", f"|---|---{'|---:' * len(COLUMNS)}|"]
    faults = [(fault, run) for run in runs for fault in run.faults]
    for kind, victim in itertools.product(KINDS, VICTIMS):
        lines.append(_line(kind, victim, [f for f in faults if (f[0].kind, f[0].victim) == (kind, victim)]))
    num_wrong = sum(bool(run.problem) for run in runs)
    return "\n".join(
        [*lines, _line("all", "", faults), f"\n{len(runs)} runs, of which {num_wrong} went wrong"]
    )


def _line(kind: str, victim: str, faults: Sequence[tuple[Fault, Run]]) -> str:
    hits = [(fault, run) for fault, run in faults if fault.hit]
    counts = (
        len(faults),
        len(hits),
        sum(bool(run.problem) for _, run in faults),
        sum(run.is_same for _, run in hits),
        sum(not run.has_restarted for _, run in hits),
    )
    lost_s = [fault.lost_s for fault, _ in hits if fault.lost_s is not None]
    times = f"{statistics.median(lost_s):.2f} | {max(lost_s):.2f}" if lost_s else "– | –"
    return f"| {kind} | {victim} | {' | '.join(map(str, counts))} | {times} |"


def soak(nursery: Nursery, folder: Path, kinds: Counter[str], chance: random.Random) -> Iterator[Run]:
    """Run until each kind of fault has hit so often, or none has for a while."""
    runs, num_missed = Soak(nursery, folder, chance), 0
    for number in itertools.count():
        left = list((+kinds).elements())
        if not left or num_missed == MOST_MISSED:
            return
        chance.shuffle(left)
        run = runs.run(number, left)
        yield run
        hits = Counter(fault.kind for fault in run.faults if fault.hit)
        kinds -= hits
        num_missed = 0 if hits else num_missed + 1


def main() -> int:
    """Strike many times, and print the table."""
    options = argparse.ArgumentParser()
    options.add_argument("--kills", type=int, default=300)
    options.add_argument("--stops", type=int, default=100)
    options.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    options.add_argument("--keep", type=Path)
    chosen = options.parse_args()
    kinds = Counter(SIGKILL=chosen.kills, SIGSTOP=chosen.stops)
    print(f"seed {chosen.seed}", flush=True)
    runs: list[Run] = []
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: print(table(runs), flush=True))
        temporary = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        nursery = stack.enter_context(Nursery())
        for run in soak(nursery, chosen.keep or Path(temporary), kinds, random.Random(chosen.seed)):
            runs.append(run)
            hits = sum(fault.hit for fault in run.faults)
            print(run.problem or f"{run.folder.name}: {hits} of {len(run.faults)} faults hit", flush=True)
    return int(any(run.problem for run in runs) or (+kinds).total() > 0)


if __name__ == "__main__":
    sys.exit(main())
