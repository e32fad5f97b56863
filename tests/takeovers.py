"""Runs on simulated workers that are killed, stopped, stalled or cut off at any message, with newcomers.

python -m tests.takeovers --count 3000 [--program NAME]    run many seeds, and print what happened
"""

import argparse
import io
import random
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from samestep.app.loggers.json_lines import FILE, read_lines
from samestep.errors import LostWorkerError

from .renewed_programs import PROGRAMS, STEPS, TOWERS
from .simulation import TIMEOUT, Faults, Killed
from .town import Town


def run(seed, run_dir, program):
    """Train with the faults and newcomers of a seed; return the world and each worker's outcome."""
    chance = random.Random(seed)
    world_size = chance.randrange(1, 5)
    num_arrivals = chance.randrange(min(3, TOWERS - world_size + 1))
    arrivals = [chance.randrange(program.longest) for _ in range(num_arrivals)]
    victims = chance.sample(range(world_size + num_arrivals), chance.randrange(world_size + 1))
    events = {victim: chance.randrange(1, program.events) for victim in victims}
    kinds = {victim: chance.choice(["killed"] * 4 + ["stopped", "stalled"]) for victim in victims}
    killed, stopped, stalled = (
        {victim: events[victim] for victim in victims if kinds[victim] == kind}
        for kind in ("killed", "stopped", "stalled")
    )
    slow = {victim: (event, chance.randrange(3 * TIMEOUT)) for victim, event in stalled.items()}
    town = Town(world_size, seed, Faults(killed, stopped, slow), arrivals=arrivals)
    if world_size > 1 and chance.random() < 0.2:
        numbers = chance.sample(range(world_size), chance.randrange(1, world_size))
        town.at(chance.randrange(program.longest), partial(town.cut_off, numbers))
    with quietly():
        return town, town.run(lambda job: program.train(job, run_dir))


@contextmanager
def quietly():
    """Discard all output of the block."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        yield


def judge(town, outcomes, expected, run_dir, program):
    """Return what is wrong with the outcomes, checkpoints or logs; None if nothing is."""
    result, checkpoints = expected
    first = len(town.lists[0])
    is_killed = [isinstance(outcome.error, Killed) for outcome in outcomes]
    trained = [n for n, worker in enumerate(town.workers) if n < first or worker.goes_on]
    for number, outcome in enumerate(outcomes):
        if outcome.error is None and outcome.value != result:
            return f"worker {number} has other bits"
        others = () if number in trained else (SystemExit,)
        if not (outcome.error is None or isinstance(outcome.error, (Killed, LostWorkerError, *others))):
            return f"worker {number}: {outcome.text}"
        if outcome.error is not None and number in trained and not (is_killed[number] or town.was_early):
            return f"worker {number} did not go on: {outcome.text}"
    found = program.checkpoints(run_dir)
    if any(checkpoints[step] != digest for step, digest in found.items()):
        return "a checkpoint has other bits"
    if not town.was_early and not all(is_killed[number] for number in trained):
        if STEPS not in found:
            return "there is no checkpoint of the last step"
        return wrong_lines(run_dir, sum(is_killed)) if (run_dir / FILE).exists() else None
    return None


def wrong_lines(run_dir, num_killed):
    """Return what is wrong with a run's log, which may lack one step for each killed worker, or None."""
    lines = [line for line in read_lines(run_dir) if "loss/total" in line]
    steps = [line["step"] for line in lines]
    if steps != sorted(set(steps)) or STEPS - len(steps) > num_killed:
        return f"steps in {FILE}: {steps}"
    return None if all("loss/decay" in line for line in lines) else f"terms lack in {FILE}"


def try_one(seed, expected, program):
    """Run and judge one seed; return counts of what happened, and what is wrong, or None."""
    with TemporaryDirectory() as folder:
        run_dir = Path(folder)
        town, outcomes = run(seed, run_dir, program)
        problem = judge(town, outcomes, expected, run_dir, program)
    has_ended = any(outcome.error is None for outcome in outcomes)
    kinds = Counter(kind for _, kind, _, _ in town.events)
    seen = Counter({"schedules": 1, "generations": len(town.lists)})
    seen |= {f"workers {kind}": kinds[kind] for kind in ("killed", "stopped", "stalled", "cut off")}
    seen["runs that ended before all could go on"] = int(town.was_early)
    seen["runs of which nobody was left"] = int(not has_ended and not town.was_early)
    seen["newcomers that trained"] = sum(w.goes_on for w in town.workers[len(town.lists[0]) :])
    seen["workers with the result of the undisturbed run"] = sum(o.value == expected[0] for o in outcomes)
    return seen, problem


def _try(seed, name, expected):
    return try_one(seed, expected, PROGRAMS[name])


def main():
    """Run many seeds, and print counts of what happened."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--count", type=int, default=300)
    options.add_argument("--seed", type=int, default=0, help="the first one")
    options.add_argument("--processes", type=int, default=1)
    options.add_argument("--program", choices=PROGRAMS, default="trainer")
    chosen = options.parse_args()
    program = PROGRAMS[chosen.program]
    torch.set_num_threads(1)
    begin_s, seen, failed = time.monotonic(), Counter(), []
    expected = program.undisturbed()
    seeds = range(chosen.seed, chosen.seed + chosen.count)
    with ProcessPoolExecutor(chosen.processes, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        tried = pool.map(partial(_try, name=chosen.program, expected=expected), seeds, chunksize=10)
        for seed, (found, problem) in zip(seeds, tried, strict=True):
            seen += found
            failed += [f"seed {seed}: {problem}"] if problem else []
    print(f"{chosen.count:,} schedules from seed {chosen.seed} on, in {time.monotonic() - begin_s:.0f} s")
    for name, number in seen.items():
        print(f"{number:11,}  {name}")
    print(f"{len(failed):11,}  failed", *failed[:20], sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
