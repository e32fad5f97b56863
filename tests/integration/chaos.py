"""Faults at random moments of a run, which goes on each time on another number of workers.

python -m tests.integration.chaos [--faults N] [--seed SEED]    prints what was tried, and how it ended
"""

import argparse
import itertools
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .nursery import SHORT, STEPS, Nursery, Processes, digests_of, steps_of

MAX_WORKERS = 4
LAST_AIM = STEPS - 8
"""No fault is aimed at a later step: the run would be over before it strikes."""


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
        self.workers.wait_for_step(self.random.randint(self.first_step + 1, self.first_step + 8))
        time.sleep(self.random.uniform(0, 0.03))

    def unfinished(self) -> set[tuple[str, int]]:
        """Return what is being written, or was left half-written, in the checkpoints' folder."""
        if not self.checkpoints.exists():
            return set()
        with os.scandir(self.checkpoints) as entries:
            return {(entry.name, entry.inode()) for entry in entries if entry.name.startswith(".")}

    def wait(self, *, victim: int, others: int) -> bool:
        """Wait for the end, and say whether it was this one."""
        statuses = self.workers.wait()
        return all(status == (victim if w == self.victim else others) for w, status in enumerate(statuses))


Strike = Callable[[Target], bool]
KINDS: dict[str, tuple[int, Strike]] = {}
"""What can happen: at least how many workers it takes, and what does it and says whether it hit."""


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
    return -9 in target.workers.wait()


@kind("SIGKILL of one worker inside an exchange", min_workers=2)
def kill_in_exchange(target: Target) -> bool:
    """One that waits for another, which is held up."""
    target.wait_for_a_moment()
    held_up = (target.victim + 1) % target.num_workers
    target.workers.signal(signal.SIGSTOP, held_up)
    target.workers.wait_until_it_waits(target.victim)
    target.workers.signal(signal.SIGKILL, target.victim)
    target.workers.signal(signal.SIGCONT, held_up)
    return target.wait(victim=-9, others=1)


@kind("SIGSTOP of one worker", min_workers=2)
def stop(target: Target) -> bool:
    target.wait_for_a_moment()
    target.workers.signal(signal.SIGSTOP, target.victim)
    while target.workers.ended() < target.num_workers - 1:
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
        is_same: whether every checkpoint that is there afterwards is whole, and that of the run that
            nothing interrupts.
    """

    kind: str
    num_workers: int
    hit: bool
    is_same: bool


def strike(
    nursery: Nursery, folder: Path, kinds: list[str], seed: int, whole: dict[int, str]
) -> Iterator[Outcome]:
    """Strike with each kind of fault in turn, until it has hit; a run that comes near its end is finished."""
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
        assert start(run, num_workers).wait() == [0] * num_workers
        assert digests_of(folder / f"run{run}")[STEPS] == whole[STEPS]

    run = 0
    for name in kinds:
        min_workers, fault = KINDS[name]
        hit = False
        while not hit:
            checkpoints = folder / f"run{run}" / "checkpoints"
            first_step = max(steps_of(checkpoints.parent), default=0)
            if first_step + 8 > LAST_AIM:
                finish(run)
                run += 1
                continue
            workers = start(
                run, chance.randint(min_workers, MAX_WORKERS), "--timeout", 6 if fault is stop else 15
            )
            hit = fault(Target(workers, checkpoints, chance, first_step))
            found = digests_of(checkpoints.parent)
            yield Outcome(name, len(workers.pids), hit, all(whole[step] == found[step] for step in found))
    finish(run)


def table(outcomes: list[Outcome]) -> str:
    """Return one line for each kind of fault."""
    tried = Counter(outcome.kind for outcome in outcomes)
    hit = Counter(outcome.kind for outcome in outcomes if outcome.hit)
    same = Counter(outcome.kind for outcome in outcomes if outcome.is_same)
    lines = ["| fault | tried | hit | same bits |", "|---|---:|---:|---:|"]
    lines += [f"| {name} | {tried[name]} | {hit[name]} | {same[name]} |" for name in KINDS]
    lines += [f"| all | {tried.total()} | {hit.total()} | {same.total()} |"]
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
    with tempfile.TemporaryDirectory() as folder, Nursery() as nursery:
        whole = nursery.whole_run(Path(folder) / "whole")
        outcomes = []
        for outcome in strike(nursery, Path(folder), kinds, chosen.seed, whole):
            outcomes.append(outcome)
            if sys.stderr.isatty():
                print(f"\r{len(outcomes)} faults", end="\r", file=sys.stderr, flush=True)
    print(table(outcomes))
    return 0 if all(outcome.is_same for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
