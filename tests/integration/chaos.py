"""Faults at random moments of a run, which goes on each time on another number of workers.

python -m tests.integration.chaos [--faults N] [--seed SEED]    prints what was tried, and how it ended

It runs unattended, also under `nice` on a busy machine: a fault that came too late is tried again, one that
went wrong is told with its output and does not end the others, and whatever ends it, the table is printed.
"""

import argparse
import contextlib
import itertools
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from samestep.errors import Error

from .nursery import SHORT, STEPS, Nursery, Processes, digests_of, steps_of

MAX_WORKERS = 4
LAST_AIM = STEPS - 8
"""No fault is aimed at a later step: the run would be over before it strikes."""

LONGEST_S = 300
"""How long anything may take on a busy machine."""

MOST_TRIES = 20
"""How often one fault may come too late or miss."""


@dataclass
class Target:
    """A job that is running, and what a fault may need to hit it."""

    workers: Processes
    checkpoints: Path
    random: random.Random
    first_step: int

    def __post_init__(self) -> None:
        self.num_workers = len(self.workers.pids)
        self.victim = self.random.randrange(self.num_workers)

    def wait_for_a_moment(self) -> None:
        """Wait for some step, and then for some part of the next."""
        step = self.random.randint(self.first_step + 1, self.first_step + 8)
        self.workers.wait_for_step(step, timeout_s=LONGEST_S)
        time.sleep(self.random.uniform(0, 0.03))

    def unfinished(self) -> set[tuple[str, int]]:
        """Return what is being written, or was left half-written, in the checkpoints' folder."""
        if not self.checkpoints.exists():
            return set()
        with os.scandir(self.checkpoints) as entries:
            return {(entry.name, entry.inode()) for entry in entries if entry.name.startswith(".")}

    def wait(self, *, victim: int, others: int) -> bool:
        """Wait for the end, which must be this one."""
        statuses = self.workers.wait(LONGEST_S)
        expected = [victim if worker == self.victim else others for worker in range(self.num_workers)]
        assert statuses == expected, f"worker {self.victim} was hit: {statuses}, expected {expected}"
        return True


Strike = Callable[[Target], bool]
KINDS: dict[str, tuple[int, Strike]] = {}
"""What can happen: at least how many workers it takes, and what does it and says whether it hit.

One that ends otherwise than it should raises an `AssertionError`; so may one that comes too late.
"""


def kind(name: str, *, min_workers: int = 1) -> Callable[[Strike], Strike]:
    def note(strike: Strike) -> Strike:
        KINDS[name] = (min_workers, strike)
        return strike

    return note


@kind("SIGTERM to one worker")
def terminate(target: Target) -> bool:
    target.wait_for_a_moment()
    target.workers.signal(signal.SIGTERM, target.victim)
    return target.wait(victim=143, others=143)


@kind("SIGINT to all workers")
def interrupt(target: Target) -> bool:
    target.wait_for_a_moment()
    target.workers.signal(signal.SIGINT)
    return target.wait(victim=130, others=130)


@kind("SIGKILL of one worker", min_workers=2)
def kill_one(target: Target) -> bool:
    target.wait_for_a_moment()
    target.workers.signal(signal.SIGKILL, target.victim)
    return target.wait(victim=-9, others=1)


@kind("SIGKILL of all workers")
def kill_all(target: Target) -> bool:
    target.wait_for_a_moment()
    target.workers.signal(signal.SIGKILL)
    return target.wait(victim=-9, others=-9)


@kind("SIGKILL of all workers before the first step")
def kill_early(target: Target) -> bool:
    time.sleep(target.random.uniform(0, 0.3))
    target.workers.signal(signal.SIGKILL)
    return target.wait(victim=-9, others=-9)


@kind("SIGKILL of all workers inside a checkpoint's write")
def kill_in_checkpoint(target: Target) -> bool:
    before = target.unfinished()
    while not target.unfinished() - before:
        assert not target.workers.ended(), target.workers.output()
    time.sleep(target.random.uniform(0, 0.003))
    target.workers.signal(signal.SIGKILL)
    return target.wait(victim=-9, others=-9) and bool(target.unfinished() - before)


@kind("SIGTERM, and SIGKILL of all workers while they stop")
def kill_while_stopping(target: Target) -> bool:
    target.wait_for_a_moment()
    target.workers.signal(signal.SIGTERM)
    time.sleep(target.random.uniform(0, 0.03))
    target.workers.signal(signal.SIGKILL)
    return -9 in target.workers.wait(LONGEST_S)


@kind("SIGKILL of one worker inside an exchange", min_workers=2)
def kill_in_exchange(target: Target) -> bool:
    """One that waits for another, which is held up."""
    target.wait_for_a_moment()
    held_up = (target.victim + 1) % target.num_workers
    target.workers.signal(signal.SIGSTOP, held_up)
    target.workers.wait_until_it_waits(target.victim, LONGEST_S)
    target.workers.signal(signal.SIGKILL, target.victim)
    target.workers.signal(signal.SIGCONT, held_up)
    return target.wait(victim=-9, others=1)


@kind("SIGSTOP of one worker", min_workers=2)
def stop(target: Target) -> bool:
    target.wait_for_a_moment()
    target.workers.signal(signal.SIGSTOP, target.victim)
    deadline_s = time.monotonic() + LONGEST_S
    while target.workers.ended() < target.num_workers - 1 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    target.workers.signal(signal.SIGKILL, target.victim)
    return target.wait(victim=-9, others=1)


# ---- many of them ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What one fault did.

    Attributes:
        kind: its name.
        num_workers: that were running.
        hit: whether it struck as it should, which chance decides for some.
        is_late: whether it did not, and the run was over by then.
        is_same: whether every checkpoint that is there afterwards is whole, and that of the run that
            nothing interrupts.
        problem: how it ended otherwise than it should; empty where it did not.
    """

    kind: str
    num_workers: int
    hit: bool
    is_late: bool
    is_same: bool
    problem: str = ""


def strike(
    nursery: Nursery, folder: Path, kinds: list[str], seed: int, whole: dict[int, str]
) -> Iterator[Outcome]:
    """Strike with each kind of fault in turn, until it has hit; a run that comes near its end is finished.

    A run in which something went wrong is left as it is, and another one begun.
    """
    chance = random.Random(seed)
    attempts = itertools.count()

    def start(run: int, num_workers: int, *options: object) -> Processes:
        words = (
            "train",
            "digits",
            *SHORT,
            "--run-dir",
            folder / f"run{run}",
            "--checkpoint-every",
            3,
            *options,
        )
        return nursery.start(words, num_workers, folder / f"output{next(attempts)}")

    def finish(run: int) -> None:
        num_workers = chance.randint(1, MAX_WORKERS)
        workers = start(run, num_workers)
        statuses = workers.wait(LONGEST_S)
        assert statuses == [0] * num_workers, f"{statuses} {workers.output()}"
        assert digests_of(folder / f"run{run}")[STEPS] == whole[STEPS]
        shutil.rmtree(folder / f"run{run}")

    run = 0
    for name in kinds:
        min_workers, fault = KINDS[name]
        for _ in range(MOST_TRIES):
            run_dir = folder / f"run{run}"
            first_step = max(steps_of(run_dir), default=0)
            if first_step + 8 > LAST_AIM:
                finish(run)
                run += 1
                run_dir, first_step = folder / f"run{run}", 0
            timeout_s = 6 if fault is stop else LONGEST_S // 5
            workers = start(run, chance.randint(min_workers, MAX_WORKERS), "--timeout", timeout_s)
            target = Target(workers, run_dir / "checkpoints", chance, first_step)
            outcome = result(name, target, whole)
            yield outcome
            run += bool(outcome.problem)
            if outcome.hit:
                break
    finish(run)


def result(name: str, target: Target, whole: dict[int, str]) -> Outcome:
    """Strike once, and look at what is left."""
    hit, is_same, found, problem = False, False, dict[int, str](), ""
    try:
        hit = KINDS[name][1](target)
    except (AssertionError, OSError, ValueError) as error:  # the last two where /proc knows of it no more
        problem = f"{name}: {type(error).__name__}: {error}\n{target.workers.output()}"
    try:
        found = digests_of(target.checkpoints.parent)
        is_same = all(whole[step] == found[step] for step in found)
    except Error as error:
        problem += f"{name}: {error}"
    is_late = not hit and STEPS in found
    return Outcome(name, target.num_workers, hit, is_late, is_same, "" if is_late else problem)


def table(outcomes: list[Outcome]) -> str:
    """Return one line for each kind of fault."""
    columns = {
        "tried": Counter(outcome.kind for outcome in outcomes),
        "too late": Counter(outcome.kind for outcome in outcomes if outcome.is_late),
        "hit": Counter(outcome.kind for outcome in outcomes if outcome.hit),
        "went wrong": Counter(outcome.kind for outcome in outcomes if outcome.problem),
        "same bits": Counter(outcome.kind for outcome in outcomes if outcome.is_same),
    }
    lines = [f"| fault | {' | '.join(columns)} |", f"|---{'|---:' * len(columns)}|"]
    for name in KINDS:
        lines.append(f"| {name} | {' | '.join(str(column[name]) for column in columns.values())} |")
    lines.append(f"| all | {' | '.join(str(column.total()) for column in columns.values())} |")
    return "\n".join(lines)


def main() -> int:
    """Strike many times, and print the table."""
    options = argparse.ArgumentParser()
    options.add_argument("--faults", type=int, default=300)
    options.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    chosen = options.parse_args()
    chance = random.Random(chosen.seed)
    kinds = list(itertools.islice(itertools.cycle(KINDS), chosen.faults))
    chance.shuffle(kinds)
    print(f"seed {chosen.seed}", flush=True)
    outcomes: list[Outcome] = []
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: print(table(outcomes), flush=True))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        nursery = stack.enter_context(Nursery())
        whole = nursery.whole_run(folder / "whole")
        for outcome in strike(nursery, folder, kinds, chosen.seed, whole):
            outcomes.append(outcome)
            if outcome.problem:
                print(outcome.problem, flush=True)
            if sys.stderr.isatty():
                print(f"\r{len(outcomes)} faults", end="\r", file=sys.stderr, flush=True)
    return 0 if all(outcome.is_same and not outcome.problem for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
