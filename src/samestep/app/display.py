"""What training shows on the terminal: where it runs, a line now and then, and a progress bar."""

from __future__ import annotations

import math
import os
import shutil
import socket
import sys
from datetime import datetime

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from samestep.app.settings import Settings
from samestep.app.throughput import Throughput
from samestep.towers.report import Report
from samestep.towers.towers import Towers
from samestep.workers.collectives import gather_objects
from samestep.workers.job import Job

__all__ = ["Display", "print_placement"]


def print_placement(towers: Towers) -> None:
    """Print one line for each worker, in order: where it is, and the towers that it runs."""
    job = towers.job
    placed = ", ".join(map(str, towers.placement.towers(job.rank)))
    device = str(job.device)
    if job.device.type == "cuda":
        device += f" ({torch.cuda.get_device_name(job.device)})"
    line = f"worker {job.rank} on {socket.gethostname()}, {device}, {job.threads} threads: towers {placed}"
    lines = gather_objects(job.transport, line, "placement of the workers")
    if job.is_first:
        print(*lines, sep="\n", flush=True)


class Display:
    """A line every `log_every` steps, above a progress bar on a terminal; only worker 0 prints."""

    def __init__(self, settings: Settings, job: Job, towers: Towers) -> None:
        first_step = towers.step
        self._settings = settings
        self._noise = towers.noise
        self._is_first = job.is_first
        self._throughput = Throughput()
        self._console = _console()
        self._bar = Progress(
            TextColumn(settings.recipe),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}  {task.fields[rate]} rows/s "),
            TimeRemainingColumn(),
            console=self._console,
            disable=not (self._is_first and self._console.is_terminal),
        )
        self._task = self._bar.add_task("", total=settings.steps, completed=first_step, loss="-", rate="-")
        self._print_start(job, first_step)

    def __enter__(self) -> Display:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, report: Report) -> None:
        """Show one more step."""
        if not self._is_first:
            return
        self._throughput.add(report.rows)
        step = report.step + 1
        self._bar.update(self._task, completed=step)
        if step % self._settings.log_every == 0 or step == self._settings.steps:
            rows_per_s, batch_s = self._throughput.read()
            self._bar.update(self._task, loss=f"{report.loss:.4f}", rate=f"{rows_per_s:,.0f}")
            line = f"{datetime.now():%Y-%m-%d %H:%M:%S}: step {step}, loss = {report.loss:.2f} "
            line += f"({rows_per_s:.1f} rows/sec; {batch_s:.3f} sec/batch)"
            self._console.print(line, soft_wrap=True)
        if step % self._settings.summary_every == 0 or step == self._settings.steps:
            self._print_noise_scale()

    def _print_noise_scale(self) -> None:
        scale = self._noise.value
        if self._noise.is_settled and scale is not None and math.isfinite(scale):
            rounded = float(f"{scale:.2g}")  # it is an estimate
            line = f"noise scale {rounded:,.0f} rows: batches up to about that size pay off"
            self._console.print(line, soft_wrap=True)

    def _print_start(self, job: Job, first_step: int) -> None:
        if not self._is_first:
            return
        settings = self._settings
        print(
            f"{settings.recipe}: {settings.towers} towers on {job.world_size} "
            f"worker{'s' * (job.world_size > 1)} ({job.device.type}), batches of {settings.batch_size} rows"
        )
        if first_step:
            print(f"{settings.run_dir} is at step {first_step} of {settings.steps}; --fresh starts over")


def _console() -> Console:
    width = height = None
    if {"COLUMNS", "LINES"} & os.environ.keys():  # Rich raises on some values, and shows nothing in 0 columns
        width, height = shutil.get_terminal_size()
    return Console(file=sys.stdout, width=width, height=height, markup=False, emoji=False, highlight=False)
