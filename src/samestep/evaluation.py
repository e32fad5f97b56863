"""Exact counts over a split: each example once, and the same figures for any placement."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep.batch import GlobalBatch
from samestep.checkpoint import load, newest
from samestep.experiment import Experiment, Settings
from samestep.job import Job
from samestep.summaries import write_figures

__all__ = ["count_split", "describe", "evaluate", "evaluate_run"]

_CHUNK_ROWS = 250


def evaluate_run(settings: Settings, job: Job) -> int:
    """Print the figures of a run's newest checkpoint on the test examples.

    Returns:
        The exit status, 0.

    Raises:
        MissingFileError: there is no checkpoint.
    """
    path = newest(settings.run_dir)
    experiment = settings.build(job)
    average = None if experiment.step.average is None else experiment.step.average.module
    manifest = load(path, model=experiment.model, average=average)
    figures = evaluate(experiment, job)
    if job.is_first:
        write_figures(settings.run_dir, manifest.step, figures)
        print(f"step {manifest.step}: {describe(figures)}")
    return 0


def describe(figures: Mapping[str, float]) -> str:
    """Return figures as text."""
    return ", ".join(f"{name} {value:.4f}" for name, value in figures.items())


def evaluate(experiment: Experiment, job: Job) -> Mapping[str, float]:
    """Return the figures of the experiment's model on its test examples, on every worker."""
    model = experiment.evaluated
    was_training = model.training
    model.eval()
    counts = count_split(experiment, model, job)
    model.train(was_training)
    return experiment.figures(counts)


@torch.no_grad()
def count_split(experiment: Experiment, model: nn.Module, job: Job) -> Tensor:
    """Add up the counts over all test examples.

    Workers take fixed chunks in turn, so that every chunk has the same shape, and so the same bits,
    wherever it is computed; integers add up exactly.
    """
    total = torch.zeros((), dtype=torch.int64)
    num_rows = len(experiment.test)
    # Every worker counts the first chunk, so that those without one of their own have a shape to add to.
    for start in range(0, num_rows, _CHUNK_ROWS):
        if start and start // _CHUNK_ROWS % job.world_size != job.rank:
            continue
        examples = np.arange(start, min(start + _CHUNK_ROWS, num_rows))
        batch = GlobalBatch.open(experiment.test.batch(examples, np.zeros(len(examples), np.uint64)))
        counts = experiment.count(model, batch.take(range(len(examples)), job.device)).cpu()
        total = total + (counts if start or job.is_first else torch.zeros_like(counts))
    if job.world_size > 1:
        dist.all_reduce(total)
    return total
