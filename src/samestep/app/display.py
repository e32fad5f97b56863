"""Training's output on the terminal: where it runs, a line every few steps, and a progress bar."""

from __future__ import annotations

import math
import os
import shutil
import socket
import sys
from collections.abc import Mapping
from datetime import datetime
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from samestep.app.callbacks import Logger
from samestep.app.memory import total_bytes
from samestep.summation.placement import Placement
from samestep.towers.report import Report
from samestep.towers.towers import Towers
from samestep.workers.collectives import gather_objects

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from samestep.app.trainer import Trainer
    from samestep.towers.noise import NoiseScale

__all__ = ["Display", "print_placement"]


def print_placement(towers: Towers) -> None:
    """Print one line for each worker, in order of rank: its host, device, threads and towers."""
    job = towers.job
    placed = ", ".join(map(str, towers.placement.towers(job.rank)))
    device = str(job.device)
    if job.device.type == "cuda":
        device += f" ({torch.cuda.get_device_name(job.device)})"
    line = f"worker {job.rank} on {socket.gethostname()}, {device}, {job.threads} threads: towers {placed}"
    lines = gather_objects(job.transport, line, "placement of the workers")
    if job.is_first:
        print(*lines, sep="\n", flush=True)


class Display(Logger):
    """Prints a line every `log_every` steps, and on a terminal a progress bar below."""

    reads_gradients = False

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._noise: NoiseScale | None = None
        self._last_printed = 0.0
        self._memory_bytes = math.inf
        self._placement: Placement | None = None

    def on_start(self, trainer: Trainer) -> None:
        """Print where the run takes place, and show the bar."""
        self._noise = trainer.step.towers.noise
        self._placement = trainer.step.towers.placement
        self._memory_bytes = total_bytes(trainer.job.device)
        _print_start(trainer)
        self._bar = _bar(trainer.name, trainer.step.towers.step, trainer.steps)
        if self._bar is not None:
            self._bar.start()

    def after_step(self, trainer: Trainer, report: Report) -> None:
        """Advance the bar, and print the new placement if towers have moved."""
        placement = trainer.step.towers.placement
        if placement != self._placement:
            self._placement = placement
            towers = " + ".join(str(len(own)) for own in placement.ranges)
            print(f"placement: the workers run {towers} towers from step {report.step + 1} on", flush=True)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=report.step + 1)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Print loss, speed and memory; the trainer itself prints the metrics of evaluations."""
        if "step/seconds" not in scalars:
            return
        loss, rows_per_s = scalars.get("loss/total", math.nan), scalars["step/rows per second"]
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], loss=f"{loss:.4g}", rate=f"{rows_per_s:,.0f}")
        speed = f"{rows_per_s:.1f} rows/sec; {scalars['step/seconds']:.3f} sec/batch"
        memory = f"{scalars['step/peak memory, GiB']:.2f} of {self._memory_bytes / 2**30:.1f} GiB"
        print(
            f"{datetime.now():%Y-%m-%d %H:%M:%S}: step {step}, loss = {loss:#.4g} ({speed}; {memory})",
            flush=True,
        )
        self._print_noise_scale()

    def on_end(self, trainer: Trainer) -> None:
        """Stop the bar."""
        if self._bar is not None:
            self._bar.stop()

    def _print_noise_scale(self) -> None:
        """Print the gradient noise scale if it has changed by a quarter since the last time."""
        scale = None if self._noise is None or not self._noise.is_settled else self._noise.value
        if scale is None or not math.isfinite(scale) or 0.8 < scale / (self._last_printed or math.inf) < 1.25:
            return
        self._last_printed = scale
        rounded = float(f"{scale:.2g}")  # it is an estimate
        print(f"noise scale {rounded:,.0f} rows: batches up to about that size pay off", flush=True)


def _print_start(trainer: Trainer) -> None:
    job, towers = trainer.job, trainer.step.towers
    rows = getattr(trainer.loader, "batch_size", None)
    batches = "" if rows is None else f", batches of {rows} rows"
    workers = f"{job.world_size} worker{'s' * (job.world_size > 1)} ({job.device.type})"
    lines = [f"{trainer.name}: {towers.placement.num_towers} towers on {workers}{batches}"]
    if towers.step:
        over = "fresh=True" if trainer.settings is None else "--fresh"
        lines.append(f"{trainer.run_dir} is at step {towers.step} of {trainer.steps}; {over} starts over")
    print("\n".join(lines), flush=True)


def _bar(name: str, step: int, steps: int) -> Progress | None:
    """Return a progress bar; None if stdout is not a terminal, or Rich is not installed."""
    if not sys.stdout.isatty() or find_spec("rich") is None:
        return None
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn(name),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}  {task.fields[rate]} rows/s "),
        TimeRemainingColumn(),
        console=_console(),
    )
    bar.add_task("", total=steps, completed=step, loss="-", rate="-")
    return bar


def _console() -> Console:
    from rich.console import Console

    width = height = None
    if {"COLUMNS", "LINES"} & os.environ.keys():  # Rich raises on some values, and shows nothing in 0 columns
        width, height = shutil.get_terminal_size()
    return Console(file=sys.stdout, width=width, height=height, markup=False, emoji=False, highlight=False)
