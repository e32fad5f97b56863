"""Fault injection for the whole protocol of a run: each seed gives a schedule of steps and faults.

python -m tests.schedules [--count N] [--seed S] [--model] [--processes P]    prints what happened in them

A schedule is a run of a few steps on simulated workers, with injected faults: exceptions, interrupts,
signals, time limits, settings that differ, kills, stalls. Without a model the steps are those of
`tests/protocol.py`; with one they are those of `Towers`. `tests/judge.py` checks the results.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch

from samestep.app import interruption
from samestep.summation import buckets
from samestep.summation.placement import Placement

from .judge import Trial, judge
from .program import ATTEMPTS, Place, train
from .protocol import PlainTowers, weights_after_each_step
from .simulation import TIMEOUT, Faults, World
from .small_model import ModelTowers, weights_on_one_worker

KINDS = ("plain", "plain", "counts", "whole")


@dataclass(frozen=True)
class Task:
    """What all workers do in a step."""

    placement: Placement
    trained: tuple[int, ...]  # the parameters that require grad
    kind: str
    is_measured: bool  # whether something is gathered after the averages


@dataclass(frozen=True)
class Failure:
    """An exception in a worker's own code."""

    worker: int
    step: int
    attempt: int
    place: Place
    how: str  # "abandon" the step, "tell" the others as samestep's checks do, or "leave" the program


@dataclass(frozen=True)
class Apart:
    """A worker with a different value in a step."""

    worker: int
    step: int
    what: str  # "rows", "rate" or "plan"


@dataclass(frozen=True)
class Schedule:
    """A run and its faults."""

    seed: int
    sizes: tuple[int, ...]  # of the parameters
    sparse: tuple[int, ...]  # indices of parameters with sparse gradients
    bucket_bytes: int
    in_shards: bool
    tasks: tuple[Task, ...]
    checkpoint_every: int
    retries: bool  # whether the program takes an abandoned step again
    failures: tuple[Failure, ...] = ()
    apart: Apart | None = None
    faults: Faults = field(default_factory=Faults)
    interrupts: tuple[tuple[int, int, bool], ...] = ()  # (worker, event, whether after it)
    signals: tuple[tuple[int, int, bool], ...] = ()
    max_seconds: float | None = None
    checkpoint_minutes: float | None = None

    @property
    def num_workers(self) -> int:
        return self.tasks[0].placement.num_workers

    @property
    def num_towers(self) -> int:
        return self.tasks[0].placement.num_towers


# ---- from a seed -------------------------------------------------------------------------------------


def schedule_of(seed: int) -> Schedule:
    chance = random.Random(seed)
    num_workers = chance.choice((1, 2, 2, 2, 3, 3, 4))
    num_towers = chance.randint(num_workers, 7)
    sizes = tuple(chance.choice((1, 3, 17)) for _ in range(chance.randint(1, 4)))
    placements = [random_placement(chance, num_towers, num_workers) for _ in range(2)]
    trained = [tuple(sorted(chance.sample(range(len(sizes)), chance.randint(1, len(sizes))))), all_of(sizes)]
    tasks = tuple(
        Task(chance.choice(placements), chance.choice(trained), chance.choice(KINDS), chance.random() < 0.3)
        for _ in range(chance.randint(1, 4))
    )
    return Schedule(
        seed,
        sizes,
        sparse=(0,) if len(sizes) > 1 and chance.random() < 0.1 else (),
        bucket_bytes=chance.choice((1, 80, 10**6)),
        in_shards=chance.random() < 0.4,
        tasks=tasks,
        checkpoint_every=chance.choice((1, 2, 3, 9)),
        retries=chance.random() < 0.7,
        **what_happens(chance, tasks),
    )


def all_of(sizes: Iterable[int]) -> tuple[int, ...]:
    return tuple(range(len(list(sizes))))


def random_placement(chance: random.Random, num_towers: int, num_workers: int) -> Placement:
    return Placement((0, *sorted(chance.sample(range(1, num_towers), num_workers - 1)), num_towers))


def what_happens(chance: random.Random, tasks: tuple[Task, ...]) -> dict[str, Any]:
    num_workers = tasks[0].placement.num_workers
    last_event = 6 + 9 * len(tasks)  # about the number of a worker's events

    def moments(probability: float) -> tuple[tuple[int, int, bool], ...]:
        if chance.random() > probability:
            return ()
        number = chance.choice((1, 1, 2))
        return tuple(
            (chance.randrange(num_workers), chance.randint(1, last_event), chance.random() < 0.5)
            for _ in range(number)
        )

    def lost(probability: float) -> dict[int, int]:
        return {worker: event for worker, event, _ in moments(probability)}

    stalled = {worker: (event, chance.choice((500, 20 * TIMEOUT))) for worker, event in lost(0.15).items()}
    apart = None
    if num_workers > 1 and chance.random() < 0.12:
        what = chance.choice(("rows", "rate", "plan"))
        apart = Apart(chance.randrange(num_workers), chance.randrange(len(tasks)), what)
    return {
        "failures": tuple(failure(chance, tasks) for _ in range(chance.choice((0, 0, 1, 1, 2)))),
        "apart": apart,
        "faults": Faults(lost(0.2), lost(0.06), stalled),
        "interrupts": moments(0.15),
        "signals": moments(0.25),
        "max_seconds": chance.choice((None, None, None, 0, 50, 300)),
        "checkpoint_minutes": chance.choice((None, None, 0.1, 2)),
    }


def failure(chance: random.Random, tasks: tuple[Task, ...]) -> Failure:
    step = chance.randrange(len(tasks))
    task = tasks[step]
    worker = chance.randrange(task.placement.num_workers)
    tower = chance.choice(task.placement.towers(worker))
    places: list[Place] = ["begin", "after", tower, tower, (tower, chance.choice(task.trained))]
    if task.kind == "counts":
        places.append("count")
    how = chance.choice(("abandon", "abandon", "tell", "leave"))
    return Failure(worker, step, chance.randrange(ATTEMPTS - 1), chance.choice(places), how)


# ---- a run -------------------------------------------------------------------------------------------


class Clock:
    """Replaces the module `time` in samestep by a simulated world's clock."""

    def __init__(self, world: World) -> None:
        self.monotonic = lambda: float(world.time)


def try_schedule(schedule: Schedule, *, with_model: bool = False) -> Counter[str]:
    """Run and judge a schedule; return counts of what happened, or raise an `AssertionError`."""
    kind = ModelTowers if with_model else PlainTowers
    expected = (weights_on_one_worker if with_model else weights_after_each_step)(schedule)
    world = World(schedule.num_workers, schedule.seed, schedule.faults, draws=with_model)
    with (
        mock.patch.object(buckets, "_SMALL_BYTES", 0 if schedule.in_shards else 2**19),
        mock.patch.object(interruption, "time", Clock(world)),
    ):
        log: list[Any] = []
        outcomes = world.run(lambda job: train(job, schedule, log, kind))
        return judge(Trial(schedule, world, log, outcomes, expected))


def command_for(seed: int, *, with_model: bool) -> str:
    return f"python -m tests.schedules --seed {seed} --count 1{' --model' * with_model}"


def run(seeds: Iterable[int], *, with_model: bool = False) -> tuple[Counter[str], list[str]]:
    """Run the schedules of all seeds; return counts of what happened, and a text for each failure."""
    seen: Counter[str] = Counter()
    failed = []
    for seed in seeds:
        try:
            seen += try_schedule(schedule_of(seed), with_model=with_model)
        except AssertionError as error:
            failed.append(f"{command_for(seed, with_model=with_model)}\n    {error}")
    return seen, failed


def run_all(seeds: range, num_processes: int, *, with_model: bool) -> tuple[Counter[str], list[str]]:
    """Run the schedules of all seeds in several processes."""
    parts = [seeds[start : start + 500] for start in range(0, len(seeds), 500)]
    seen: Counter[str] = Counter()
    failed: list[str] = []
    with ProcessPoolExecutor(num_processes, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for number, (more, wrong) in enumerate(pool.map(partial(run, with_model=with_model), parts), 1):
            seen += more
            failed += wrong
            if sys.stderr.isatty():
                print(f"\r{number} of {len(parts)} parts", end="\r", file=sys.stderr, flush=True)
    return seen, failed


def main() -> int:
    """Run many schedules, and print counts of what happened in them."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--count", type=int, default=2000)
    options.add_argument("--seed", type=int, default=0, help="the first one")
    options.add_argument("--model", action="store_true", help="run `Towers` with a small model")
    options.add_argument("--processes", type=int, default=1)
    chosen = options.parse_args()
    begin_s = time.monotonic()
    seeds = range(chosen.seed, chosen.seed + chosen.count)
    seen, failed = run_all(seeds, chosen.processes, with_model=chosen.model)
    print(f"{chosen.count:,} schedules from seed {chosen.seed} on, in {time.monotonic() - begin_s:.0f} s")
    for name, number in sorted(seen.items()):
        print(f"{number:11,}  {name}")
    print(f"{len(failed):11,}  failed")
    for line in failed[:20]:
        print(line)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
