"""A `Trainer`, or a loop of one's own, on simulated workers that are killed, and newcomers, at any message.

python -m tests.takeovers --count 3000 [--loop]   try many seeds, and print what happened
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
from torch import nn

import samestep
from samestep.app.json_lines import FILE, read_lines
from samestep.app.run_folder import all_checkpoints
from samestep.checkpoint.files import read
from samestep.errors import LostWorkerError

from . import elastic_loop
from .renewal import Town
from .simulation import Faults, Killed

STEPS, TOWERS = 6, 5


class Decay(samestep.Callback):
    """Halves the learning rate after every second evaluation: by a count of its own."""

    count = 0

    def after_evaluation(self, trainer, metrics):
        self.count += 1
        if self.count % 2 == 0:
            for group in trainer.step.optimizer.param_groups:
                group["lr"] /= 2

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def measure(model, batch):
    return {"loss": (model(batch[0]).square().sum(), len(batch[0]))}


def terms(model):
    return {"decay": sum(parameter.square().sum() for parameter in model.parameters())}


def train(job, run_dir):
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.2), nn.Linear(4, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    towers = samestep.Towers(model, TOWERS, job=job, noise_every=2)
    data = torch.utils.data.TensorDataset(torch.randn(26, 3, generator=generator))
    loader = samestep.TowerLoader(data, 14, towers)  # the last batch of an epoch has 12 rows
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step = samestep.Step(towers, lambda model, batch: model(batch[0]).square().mean(), optimizer)
    trainer = samestep.Trainer(
        step,
        loader,
        run_dir=run_dir,
        steps=STEPS,
        evaluate=samestep.Evaluation(data, measure, rows=8),
        terms=terms,
        evaluate_every=1,
        callbacks=[Decay()],
        checkpoint_every=3,
        log_every=1,
    )
    return trainer.run().digest


def run(seed, run_dir, train=train):
    """Train under what a seed brings; return the world and how each worker ended."""
    chance = random.Random(seed)
    world_size = chance.randrange(1, 5)
    arrivals = [chance.randrange(2_000) for _ in range(chance.randrange(min(3, TOWERS - world_size + 1)))]
    victims = chance.sample(range(world_size + len(arrivals)), chance.randrange(world_size + 1))
    killed = {victim: chance.randrange(1, 160) for victim in victims}
    town = Town(world_size, seed, Faults(killed=killed), arrivals=arrivals)
    with quietly():
        return town, town.run(lambda job: train(job, run_dir))


@contextmanager
def quietly():
    """Print nothing."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        yield


def undisturbed(run_dir, train=train):
    """Return what the run ends with to which nothing happens."""
    with quietly():
        return train(samestep.Job(torch.device("cpu")), run_dir)


def judge(town, outcomes, expected, run_dir):
    """Return what is wrong with how the workers ended; nothing, if all is right."""
    first = len(town.lists[0])
    is_killed = [isinstance(outcome.error, Killed) for outcome in outcomes]
    trained = [n for n, worker in enumerate(town.workers) if n < first or worker.goes_on]
    for number, outcome in enumerate(outcomes):
        if outcome.error is None and outcome.value != expected:
            return f"worker {number} has other bits"
        expected_errors = (
            (Killed, LostWorkerError) if number in trained else (Killed, LostWorkerError, SystemExit)
        )
        if not (outcome.error is None or isinstance(outcome.error, expected_errors)):
            return f"worker {number}: {outcome.text}"
        if outcome.error is not None and number in trained and not (is_killed[number] or town.was_early):
            return f"worker {number} did not go on: {outcome.text}"
    if not town.was_early and not all(is_killed[number] for number in trained):
        return wrong_files(run_dir, sum(is_killed))
    return None


def wrong_files(run_dir, num_killed):
    """Return what is wrong with what a run has written."""
    if (run_dir / FILE).exists():
        lines = [line for line in read_lines(run_dir) if "loss/total" in line]
        steps = [line["step"] for line in lines]
        if len(set(steps)) < len(steps) or steps != sorted(steps) or STEPS - len(steps) > num_killed:
            return f"steps in {FILE}: {steps}"
        if not all("loss/decay" in line for line in lines):
            return f"terms lack in {FILE}"
        newest = all_checkpoints(run_dir)[-1]
    else:
        newest = run_dir / f"{STEPS}"
    return None if read(newest).manifest.step == STEPS else "there is no checkpoint of the last step"


def try_one(seed, expected, train=train):
    """Return what happened under a seed, and what is wrong with it."""
    with TemporaryDirectory() as folder:
        run_dir = Path(folder)
        town, outcomes = run(seed, run_dir, train)
        problem = judge(town, outcomes, expected, run_dir)
    kinds = Counter(kind for _, kind, _, _ in town.events)
    seen = Counter({"schedules": 1, "workers killed": kinds["killed"], "generations": len(town.lists)})
    seen["runs that ended before all could go on"] = int(town.was_early)
    seen["newcomers that trained"] = sum(w.goes_on for w in town.workers[len(town.lists[0]) :])
    seen["workers with the digest of the undisturbed run"] = sum(o.value == expected for o in outcomes)
    return seen, problem


def main():
    """Try many, and print what happened in them."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--count", type=int, default=300)
    options.add_argument("--seed", type=int, default=0, help="the first one")
    options.add_argument("--processes", type=int, default=1)
    options.add_argument("--loop", action="store_true", help="a loop of one's own instead of a Trainer")
    chosen = options.parse_args()
    program = elastic_loop.train if chosen.loop else train
    torch.set_num_threads(1)
    begin_s, seen, failed = time.monotonic(), Counter(), []
    with TemporaryDirectory() as folder:
        expected = undisturbed(Path(folder), program)
    seeds = range(chosen.seed, chosen.seed + chosen.count)
    with ProcessPoolExecutor(chosen.processes, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        tried = pool.map(partial(try_one, expected=expected, train=program), seeds, chunksize=10)
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
