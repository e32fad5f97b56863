"""The cost, while nothing fails, of being ready to continue without a worker.

    python benchmarks/takeover_cost.py [--workers 2] [--blocks 40] [--steps 50]

A `Trainer` trains a net on the digits, and then a loop in `samestep.Elastic` does. In alternating blocks of
steps, they are ready to continue without a worker (they record states before a step, and look for newcomers),
or they are not. Printed are the median step time of each kind, and their ratio.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import samestep
from samestep.recipes.digits.data import Digits

NAMES = ("without", "with")


class Times:
    """Times steps, in alternating blocks that are ready to continue without a worker or not."""

    def __init__(self, job: samestep.Job, steps: int) -> None:
        self._job, self._steps = job, steps
        self._renewable = job.renewable
        self._taken_s: dict[str, list[float]] = {name: [] for name in NAMES}
        self._since_s = 0.0

    def begin(self, step: int) -> None:
        """Record when a step begins; at the first step of a block, switch readiness on or off."""
        if step % self._steps == 0:
            is_ready = step // self._steps % 2
            self._job.__dict__["renewable"] = self._renewable if is_ready else None
            self._since_s = 0.0
        now_s = time.perf_counter()
        if self._since_s:
            self._taken_s[NAMES[(step - 1) // self._steps % 2]].append(now_s - self._since_s)
        self._since_s = now_s

    def line(self, what: str) -> str:
        """Return a line of the table."""
        without, ready = (statistics.median(self._taken_s[name]) for name in NAMES)
        spread = [statistics.quantiles(self._taken_s[name], n=4) for name in NAMES]
        ranges = " | ".join(f"{1e3 * low:.2f} to {1e3 * high:.2f}" for low, _, high in spread)
        return f"| {what} | {1e3 * without:.3f} | {1e3 * ready:.3f} | {ready / without:.4f} | {ranges} |"

    def end(self) -> None:
        """Switch readiness on again, as the end of the job expects."""
        self._job.__dict__["renewable"] = self._renewable


class Timer(samestep.Callback):
    """Times a trainer's steps."""

    def __init__(self, times: Times) -> None:
        self._times = times

    def before_step(self, trainer: samestep.Trainer, batch: Any) -> None:
        """Record when a step begins."""
        self._times.begin(trainer.step.towers.step)

    def on_end(self, trainer: samestep.Trainer) -> None:
        """Switch readiness on again."""
        self._times.end()


def parts(job: samestep.Job) -> dict[str, Any]:
    """Return the objects of a run."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU())
    model.append(nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10_000)
    towers = samestep.Towers(model, 8, job=job)
    loader = samestep.TowerLoader(Digits("train", augment=True), 512, towers)
    return {
        "model": model,
        "towers": towers,
        "loader": loader,
        "optimizer": optimizer,
        "scheduler": scheduler,
    }


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the mean over a tower's rows."""
    return F.cross_entropy(model(batch[0]), batch[1])


def main() -> None:
    """Train in both ways, and print the table."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--blocks", type=int, default=40)
    options.add_argument("--steps", type=int, default=50, help="in a block")
    chosen = options.parse_args()
    num_steps = chosen.blocks * chosen.steps

    def trainer(job: samestep.Job) -> Times:
        state, times = parts(job), Times(job, chosen.steps)
        step = samestep.Step(state["towers"], loss, state["optimizer"], scheduler=state["scheduler"])
        with tempfile.TemporaryDirectory() as run_dir:
            samestep.Trainer(
                step,
                state["loader"],
                run_dir=run_dir,
                steps=num_steps,
                log_every=num_steps,
                checkpoint_every=num_steps,
                callbacks=[Timer(times)],
            ).run()
        return times

    def loop(job: samestep.Job) -> Times:
        state, times = parts(job), Times(job, chosen.steps)
        step = samestep.Step(state["towers"], loss, state["optimizer"])
        with samestep.Elastic(**state) as elastic:
            while state["towers"].step < num_steps:
                for batch in state["loader"]:
                    times.begin(state["towers"].step)
                    elastic(step, batch)
                    state["scheduler"].step()
            times.end()
        return times

    def work(job: samestep.Job) -> None:
        lines = [trainer(job).line("Trainer"), loop(job).line("Elastic")]
        if job.is_first:
            print("| | without, ms | with, ms | ratio | without, quartiles | with, quartiles |")
            print("|---|---:|---:|---:|---:|---:|", *lines, sep="\n")

    samestep.launch(work, workers=chosen.workers, device="cpu")


if __name__ == "__main__":
    main()
