"""Exact counts over the test examples: each counted once, so that the metrics are those of any placement."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from samestep.app.experiment import Experiment
from samestep.app.run_folder import all_checkpoints, find_newest, print_damaged, search
from samestep.app.settings import Settings
from samestep.app.summaries import write_metrics
from samestep.checkpoint.durable import storage
from samestep.checkpoint.files import Found
from samestep.checkpoint.folder import Folder
from samestep.checkpoint.objects import TrainingObjects
from samestep.checkpoint.snapshot import restore
from samestep.towers.batch import GlobalBatch
from samestep.towers.copier import Copier
from samestep.workers.agreement import agree, from_first_worker
from samestep.workers.job import Job

__all__ = ["count_split", "describe", "evaluate", "evaluate_run"]

Weights = Literal["average", "raw"]

_POLL_S = 1.0


def evaluate_run(settings: Settings, job: Job, *, weights: Weights = "average", follow: bool = False) -> int:
    """Print the metrics of a run's newest checkpoint on the test examples, and write them for TensorBoard.

    Args:
        settings: of the run.
        job: all its workers must call this.
        weights: which of the two kinds to evaluate; a run without moving averages has the raw ones only.
        follow: go on with each new checkpoint, until that of the run's last step.

    Returns:
        The exit status, 0.

    Raises:
        MissingFileError: there is no checkpoint, and `follow` is not set.
        DataError: none is whole, and `follow` is not set; or it does not fit the model.
    """
    experiment = settings.build(job)
    average = experiment.step.averaged_model
    model = experiment.model if weights == "raw" or average is None else average.module
    objects = TrainingObjects(model=experiment.model, averaged_model=average)
    newest = from_first_worker(job, lambda: find_newest(settings.run_dir)) if not follow else None
    for found in [newest] if newest is not None else _checkpoints(settings, job):
        restore(found.snapshot, objects, found.path, job)
        metrics = experiment.metrics(count_split(experiment, model, job))
        if job.is_first:
            line = f"{datetime.now():%Y-%m-%d %H:%M:%S}: step {found.manifest.step}: {describe(metrics)}"
            print(line, flush=True)
            write_metrics(settings.run_dir, found.manifest.step, metrics)
    return 0


def _checkpoints(settings: Settings, job: Job) -> Iterator[Found]:
    """Yield the newest whole checkpoint whenever there is a new one, until that of the last step."""
    step, refused = -1, set[Path]()
    if job.is_first and not all_checkpoints(settings.run_dir):
        print(f"{settings.run_dir}: no checkpoint yet; waiting for the first", flush=True)
    with storage(settings.run_dir, "read"):
        held = Folder.open(settings.run_dir) if job.is_first else None
    while step != settings.steps:
        # What worker 0 sees counts, and the others wait for no more than a second.
        look = partial(search, settings.run_dir, newer_than=step, refused=refused, held=held)
        result = from_first_worker(job, look)
        refused.update(path for path, _ in result.damaged)
        if job.is_first:
            print_damaged(result)
        if result.found is None:
            time.sleep(_POLL_S)
            continue
        step = result.found.manifest.step
        yield result.found


def describe(metrics: Mapping[str, float]) -> str:
    """Return metrics as text."""
    return ", ".join(f"{name} = {value:.4f}" for name, value in metrics.items())


def evaluate(experiment: Experiment, job: Job) -> Mapping[str, float]:
    """Return the metrics of the experiment's model on its test examples, on every worker."""
    return experiment.metrics(count_split(experiment, experiment.evaluated, job))


def count_split(experiment: Experiment, model: nn.Module, job: Job) -> Tensor:
    """Add up the counts over all test examples; where one worker meets an error, all raise."""
    own, error = torch.zeros((), dtype=torch.int64), None
    was_training = model.training
    model.eval()
    try:
        own = _count_own(experiment, model, job)
    except Exception as raised:
        error = raised
    model.train(was_training)
    return torch.stack(agree(job, {}, where="evaluation", error=error, message=own)).sum(0)


@torch.no_grad()
def _count_own(experiment: Experiment, model: nn.Module, job: Job) -> Tensor:
    """Add up the counts over this worker's chunks of the test examples.

    Workers take fixed chunks in turn, so that every chunk has the same shape, and so the same bits,
    wherever it is computed; integers add up exactly.
    """
    total = torch.zeros((), dtype=torch.int64)
    num_rows, chunk_rows = len(experiment.test), experiment.test_chunk_rows
    # Every worker counts the first chunk, so that those without one of their own have a shape to add to.
    for start in range(0, num_rows, chunk_rows):
        if start and start // chunk_rows % job.world_size != job.rank:
            continue
        examples = np.arange(start, min(start + chunk_rows, num_rows))
        batch = GlobalBatch.open(experiment.test.batch(examples, np.zeros(len(examples), np.uint64)))
        counts = experiment.count(model, batch.take(range(len(examples)), Copier(job.device))).cpu()
        total = total + (counts if start or job.is_first else torch.zeros_like(counts))
    return total
