"""The cost of watching a step: the time in its checks, as a share of the step.

    python benchmarks/checks.py [--steps 128] [--compare 2000]

One worker on one CPU thread, in CPU time. In a step of each model, this times: the check of the model and its
hooks, the records before the passes, the checks after each pass and after the last, and the hash of the
batch. The steps are those from 257 on, of which every 32nd has the wider check of graphs and of nets beside
the model. The overhead of timing, with cold caches, is measured in each pass by timing an empty call, and
subtracted. Reported separately: how long a step takes in which values are followed, as in steps 0, 1, 32,
64, 128, 256 and so on; and with its backward, as in step 0 and where code of the program runs in backward.

With `--compare`, steps of the digits net with and without the checks, in random order. This also counts what
the checks evict from the caches.
"""

from __future__ import annotations

import argparse
import functools
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import samestep
from samestep.batches.batch import GlobalBatch
from samestep.towers.replica import Replica
from samestep.towers.run import StepRun
from samestep.watching.model.dropped_gradients import DroppedGradients
from samestep.watching.pass_check import PassCheck
from samestep.watching.watch import Watch
from step import SUBJECTS, Subject, loss_of, pictures, sgd


def start_no_look(watch: Watch, *_: object) -> None:
    """Begin a step without checks."""
    watch.looks = watch.follows = False


def nothing(*_: object, **__: object) -> None:
    """Do nothing, in every pass."""


CHECKS: dict[tuple[type, str], Callable[..., Any]] = {
    (Replica, "plan"): lambda replica, kind: replica._plans[kind],
    (Replica, "check_hooks"): nothing,
    (Watch, "start_step"): start_no_look,
    (Watch, "check_pass"): nothing,
    (Watch, "end_turn"): nothing,
    (Watch, "end_step"): nothing,
    (Watch, "form_of"): nothing,
    (Watch, "start_loop"): nothing,
    (DroppedGradients, "start_step"): nothing,
    (DroppedGradients, "note_average"): nothing,
    (PassCheck, "check_forward"): nothing,
    (StepRun, "leaves"): lambda run, losses: [],
    (GlobalBatch, "fingerprint"): lambda batch, *_: 0,
}
"""The functions to time, and what a step without checks calls instead."""


def deep_net() -> nn.Module:
    """Return 50 layers with batch norm: 200 parameters, 150 buffers."""
    layers: list[nn.Module] = [nn.Linear(64, 128)]
    for _ in range(50):
        layers += [nn.Linear(128, 128), nn.BatchNorm1d(128), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(128, 10))


class Clock:
    """Measures the CPU time in some functions; nested calls count once."""

    def __init__(self) -> None:
        self.spent_s: dict[str, list[float]] = defaultdict(list)
        self._is_running = False

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the function to time its calls."""

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if self._is_running:
                return function(*args, **kwargs)
            self._is_running = True
            started = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.spent_s[name].append(time.thread_time() - started)
                self._is_running = False

        return wrapper

    def totals_s(self) -> dict[str, float]:
        """Return the time in each function without the overhead of timing, the longest first."""
        empty_s = statistics.mean(self.spent_s["nothing"])
        totals = {name: sum(times) - len(times) * empty_s for name, times in self.spent_s.items()}
        return dict(sorted(totals.items(), key=lambda each: -each[1]))


def main() -> None:
    """Print one line for each model."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--compare", type=int, default=0, help="rounds of a step with checks and one without")
    arguments = parser.parse_args()
    steps = arguments.steps
    torch.set_num_threads(1)
    if arguments.compare:
        compare(arguments.compare)
        return
    clock = Clock()
    for kind, name in CHECKS:
        setattr(kind, name, clock.timed(f"{kind.__name__}.{name}", getattr(kind, name)))
    do_nothing = clock.timed("nothing", nothing)
    subjects = {**SUBJECTS, "50 layers": Subject(deep_net, pictures(64), sgd, 128)}
    for label, subject in subjects.items():
        for num_towers in (2, 8):
            towers = samestep.Towers(subject.build(), num_towers)
            batch = subject.batch(subject.rows * num_towers)
            step_s(towers, batch)
            towers._step = 257  # the next step in which values are followed is 512
            clock.spent_s.clear()
            times = [step_s(towers, batch, do_nothing) for _ in range(steps)]
            totals_s = clock.totals_s()
            checks_s = sum(totals_s.values()) / steps
            median_s = statistics.median(times)
            parts = ", ".join(f"{name} {1e6 * s / steps:.0f}" for name, s in totals_s.items() if s)
            share = checks_s / median_s
            longer = followed_s(towers, batch, with_backward=False) / median_s
            longest = followed_s(towers, batch, with_backward=True) / median_s
            print(
                f"{label}, {num_towers} towers: step {1e3 * median_s:.2f} ms, checks {1e6 * checks_s:.0f} us "
                f"= {100 * share:.2f}% ({parts}); a step that is followed {longer:.2f} times as long, "
                f"with its backward {longest:.2f} times"
            )


def compare(rounds: int) -> None:
    """Print how much longer steps with checks take than steps without, and the spread of 200 resamples."""
    has_checks = True

    def switched(check: Callable[..., Any], instead: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: (check if has_checks else instead)(*args, **kwargs)

    for (kind, name), instead in CHECKS.items():
        setattr(kind, name, switched(getattr(kind, name), instead))
    subject, draw = SUBJECTS["digits"], random.Random(0)
    for num_towers in (2, 8):
        # Don't measure the noise scale, which would add time to every 20th step.
        towers = samestep.Towers(subject.build(), num_towers, noise_every=0)
        batch = subject.batch(subject.rows * num_towers)
        times: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(rounds):
            for has_checks in draw.sample((True, False), 2):
                times[has_checks].append(step_s(towers, batch))
        has_checks = True
        found = 100 * (statistics.median(times[True]) / statistics.median(times[False]) - 1)
        drawn = [[draw.choices(each, k=rounds) for each in times.values()] for _ in range(200)]
        ratios = sorted(100 * (statistics.median(a) / statistics.median(b) - 1) for a, b in drawn)
        print(f"digits, {num_towers} towers: {found:.1f}% longer [{ratios[10]:.1f}, {ratios[190]:.1f}]")


def step_s(towers: samestep.Towers, batch: Any, in_each_pass: Callable[[], None] = nothing) -> float:
    """Return the CPU time of a step, in seconds."""
    started = time.thread_time()
    for tower in towers(batch):
        tower.backward(loss_of(towers.model, tower.batch))
        in_each_pass()
    towers.average()
    spent_s = time.thread_time() - started
    towers.model.zero_grad()
    return spent_s


def followed_s(towers: samestep.Towers, batch: Any, *, with_backward: bool) -> float:
    """Return the median time of steps in which values are followed."""
    times = []
    for _ in range(9):
        towers._step = 64
        towers._replica.watch.flow.own_code.is_expected = with_backward
        times.append(step_s(towers, batch))
    return statistics.median(times)


if __name__ == "__main__":
    main()
