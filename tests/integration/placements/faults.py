"""Models, settings and batches that are wrong on worker 1, or on all."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

import samestep
from samestep.recipes.segmentation.label_maps import LabelMaps

from ...nets import take_step
from .batches import batches, texts
from .losses import keep
from .models import MEMORIES, Memories, Words, convnet, perceptron
from .scenario import fault, message_of


def towers_of(
    job: samestep.Job, build: Callable[[], nn.Module] = perceptron, num_towers: int = 8, **options: Any
) -> samestep.Towers:
    return samestep.Towers(build().to(job.device), num_towers, job=job, **options)


def too_few_labels(job: samestep.Job, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the batch, on worker 1 with fewer labels than rows."""
    return batch if job.rank != 1 else {**batch, "y": batch["y"][:5]}


@fault
def different_num_towers(job: samestep.Job) -> str:
    return message_of(lambda: towers_of(job, num_towers=8 if job.rank != 1 else 7))


@fault
def too_few_towers_on_one(job: samestep.Job) -> str:
    return message_of(lambda: towers_of(job, num_towers=8 if job.rank != 1 else 1))


@fault
def different_model(job: samestep.Job) -> str:
    other = nn.Sequential(nn.Linear(7, 32), nn.Tanh(), nn.Linear(32, 5))
    return message_of(lambda: towers_of(job, perceptron if job.rank != 1 else lambda: other))


@fault
def different_policies_for_buffers(job: samestep.Job) -> str:
    policies = MEMORIES if job.rank != 1 else {**MEMORIES, "codes": "first"}
    return message_of(lambda: towers_of(job, Memories, buffers=policies))


@fault
def buffers_without_a_policy(job: samestep.Job) -> str:
    towers = towers_of(job, Memories)
    return message_of(lambda: take_step(towers, batches(1, 16, 7)[0]))


@fault
def different_rows(job: samestep.Job) -> str:
    towers = towers_of(job)
    return message_of(lambda: take_step(towers, batches(1, 16 if job.rank != 1 else 18, 7)[0]))


@fault
def different_values(job: samestep.Job) -> str:
    towers, batch = towers_of(job), batches(1, 16, 7)[0]
    batch["x"] += job.rank == 1
    return message_of(lambda: take_step(towers, batch))


@fault
def bad_batch_on_one(job: samestep.Job) -> str:
    towers, batch = towers_of(job), too_few_labels(job, batches(1, 16, 7)[0])
    return message_of(lambda: take_step(towers, batch))


@fault
def bad_pictures_on_one(job: samestep.Job) -> str:
    """With batch norm, whose statistics travel too, and more than one bucket."""
    towers = towers_of(job, convnet, 7, bucket_bytes=1000)
    batch = too_few_labels(job, batches(1, 14, 3, 8, 8)[0])
    return message_of(lambda: take_step(towers, batch))


@fault
def bad_batch_on_one_with_counts(job: samestep.Job) -> str:
    """What is wrong is reported with the counts, before the first pass."""
    towers, batch = towers_of(job), too_few_labels(job, batches(1, 16, 7)[0])
    return message_of(lambda: towers(batch, counts={"kept": keep}))


@fault
def bad_count_on_one(job: samestep.Job) -> str:
    towers, counts = towers_of(job), {"kept": lambda batch: -1 if job.rank == 1 else 1}
    return message_of(lambda: towers(batches(1, 16, 7)[0], counts=counts))


@fault
def bad_batch_on_all(job: samestep.Job) -> str:
    towers = towers_of(job)
    return message_of(lambda: take_step(towers, {"x": torch.zeros(3, 7), "y": torch.zeros(2)}))


class Table(nn.Module):
    """Looks up rows of a parameter that nothing says to be sparse, where it is in several buckets' way."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(40, 7))
        self.linear = nn.Linear(7, 5)
        self.is_sparse = False

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(F.embedding(x[:, 0], self.table, sparse=self.is_sparse))


@fault
def sparse_gradient_on_worker_1(job: samestep.Job) -> str:
    towers = towers_of(job, Table, 7, bucket_bytes=100)
    towers.model.is_sparse = job.rank == 1
    return message_of(lambda: take_step(towers, texts(1, 16)[0]))


@fault
def different_sparse_parameters(job: samestep.Job) -> str:
    model = Table()
    listed = [model.table] if job.rank != 1 else [model.table, model.linear.weight]
    return message_of(lambda: towers_of(job, lambda: model, 7, sparse_parameters=listed))


@fault
def sparse_parameter_of_another_model_on_one(job: samestep.Job) -> str:
    model = Table()
    listed = [(model if job.rank != 1 else Table()).table]
    return message_of(lambda: towers_of(job, lambda: model, 7, sparse_parameters=listed))


@fault
def bad_texts_on_one(job: samestep.Job) -> str:
    towers, batch = towers_of(job, Words), too_few_labels(job, texts(1, 16)[0])
    return message_of(lambda: take_step(towers, batch))


@fault
def a_wrong_label_map(job: samestep.Job) -> str:
    """Each map is read by one worker alone, here the one of rank 1."""
    with TemporaryDirectory() as folder:
        for index, name in enumerate("abc"):
            for kind, shape in {"pictures": (4, 5, 3), "labels": (4, 5)}.items():
                path = Path(folder) / kind / f"{name}.png"
                path.parent.mkdir(exist_ok=True)
                Image.fromarray(np.full(shape, 7 * (index == 1), dtype=np.uint8)).save(path)
        return message_of(lambda: LabelMaps(Path(folder), 4).check(job))


@fault
def a_step_ahead(job: samestep.Job) -> str:
    towers = towers_of(job)
    towers._step += job.rank == 1
    return message_of(lambda: take_step(towers, batches(1, 16, 7)[0]))
