"""What watching a step costs: the time in its checks, as a share of the step.

    python benchmarks/checks.py [--steps 128]

One worker on one CPU thread, in CPU time. Timed are, in a step of each model: the look at the model and its
hooks, the notes before the passes, the checks after each, those after the last, and the hash of the batch.
The wider look at graphs and at nets beside the model comes at every 32nd step and is part of it. Apart from
that: how long a step takes whose values are followed, as those of steps 0, 32, 64, 128, 256 and so on are.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import samestep
from samestep.batches.batch import GlobalBatch
from samestep.towers.replica import Replica
from samestep.towers.run import StepRun
from samestep.watching.pass_check import PassCheck
from samestep.watching.watch import Watch
from step import SUBJECTS, Subject, loss_of, pictures, sgd

CHECKS: list[tuple[type, str]] = [
    (Replica, "plan"),
    (Watch, "start_step"),
    (Watch, "check_pass"),
    (Watch, "end_step"),
    (PassCheck, "start"),
    (PassCheck, "check_forward"),
    (StepRun, "leaves"),
    (GlobalBatch, "fingerprint"),
]


def deep_net() -> nn.Module:
    """Return 50 layers with batch norm: 200 parameters, 150 buffers."""
    layers: list[nn.Module] = [nn.Linear(64, 128)]
    for _ in range(50):
        layers += [nn.Linear(128, 128), nn.BatchNorm1d(128), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(128, 10))


def timed(spent: Counter[str], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that adds what it takes, in seconds, to `spent`; not what others in it do twice."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if spent["depth"]:
            return function(*args, **kwargs)
        spent["depth"] += 1
        started = time.thread_time()
        try:
            return function(*args, **kwargs)
        finally:
            spent[name] += time.thread_time() - started  # type: ignore[assignment]
            spent["depth"] -= 1

    return wrapper


def main() -> None:
    """Print one line for each model."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=128)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    spent: Counter[str] = Counter()
    for kind, name in CHECKS:
        setattr(kind, name, timed(spent, name, getattr(kind, name)))
    subjects = {**SUBJECTS, "50 layers": Subject(deep_net, pictures(64), sgd, 128)}
    for label, subject in subjects.items():
        for num_towers in (2, 8):
            towers = samestep.Towers(subject.build(), num_towers)
            batch = subject.batch(subject.rows * num_towers)
            spent.clear()
            times = [step_s(towers, batch) for _ in range(steps)]
            del spent["depth"]
            checks_s = sum(spent.values()) / steps
            median_s = statistics.median(times)
            parts = ", ".join(f"{name} {1e6 * s / steps:.0f}" for name, s in spent.most_common())
            share, longer = checks_s / median_s, followed_s(towers, batch) / median_s
            print(
                f"{label}, {num_towers} towers: step {1e3 * median_s:.2f} ms, checks {1e6 * checks_s:.0f} us "
                f"= {100 * share:.2f}% ({parts}); a step that is followed {longer:.2f} times as long"
            )


def step_s(towers: samestep.Towers, batch: Any) -> float:
    """Return the CPU time of a step, in seconds."""
    started = time.thread_time()
    for tower in towers(batch):
        tower.backward(loss_of(towers.model, tower.batch))
    towers.average()
    return time.thread_time() - started


def followed_s(towers: samestep.Towers, batch: Any) -> float:
    """Return the median time of steps whose values are followed."""
    times = []
    for _ in range(9):
        towers._replica.watch._num_steps = 64
        times.append(step_s(towers, batch))
    return statistics.median(times)


if __name__ == "__main__":
    main()
