"""Checkpoints that all workers save and load."""

import random
import resource
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import samestep
from samestep.checkpoint.files import read, write
from samestep.checkpoint.objects import TrainingObjects
from samestep.checkpoint.snapshot import restore, take_snapshot
from samestep.streams import seed_globals
from samestep.workers.agreement import from_first_worker

from ...nets import loss_of, take_step
from .batches import batches
from .models import convnet, perceptron
from .scenario import fault, message_of, scenario


@scenario
def from_a_checkpoint(job: samestep.Job) -> str:
    """Worker 0 alone writes and reads; all go on from it, in new objects."""

    def build() -> tuple[TrainingObjects, samestep.Step]:
        model = convnet().to(job.device)
        towers = samestep.Towers(model, 7, job=job, seed=3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3])
        step = samestep.Step(towers, loss_of, optimizer, scheduler=schedule)
        state = {"optimizer": optimizer, "schedule": schedule}
        return TrainingObjects(model=model, towers=towers, state=state), step

    with TemporaryDirectory() as folder:
        path = Path(folder) / "one"
        objects, step = build()
        data = batches(4, 30, 3, 8, 8)
        for index, batch in enumerate(data):
            if index == 2 and job.is_first:
                write(take_snapshot(objects), path)
            step(batch)
        others, step = build()
        restore(from_first_worker(job, lambda: read(path)).snapshot, others, path, job)
        job.barrier()
    assert others.towers.step == 2
    for batch in data[2:]:
        step(batch)
    assert samestep.digest(objects.model) == samestep.digest(others.model)
    return samestep.digest(others.model)


@scenario
def saved_by_all(job: samestep.Job) -> str:
    """A loop that draws its batches from global generators; all workers save, and load into new objects."""

    def build() -> dict[str, Any]:
        torch.manual_seed(8)
        model = convnet().to(job.device)
        towers = samestep.Towers(model, 7, job=job, seed=3, noise_every=1)
        loader = samestep.TowerLoader(list(range(40)), 16, towers)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        return {
            **{"model": model, "towers": towers, "loader": loader},
            **{"averaged_model": averaged, "optimizer": optimizer},
        }

    def train(objects: dict[str, Any], num_steps: int) -> str:
        model, towers = objects["model"], objects["towers"]
        for _, batch in zip(range(num_steps), objects["loader"], strict=False):
            x = torch.randn(batch.rows, 3, 8, 8) + random.random() + np.random.rand()
            take_step(towers, {"x": x, "y": torch.randint(0, 5, (batch.rows,))})
            objects["optimizer"].step()
            objects["averaged_model"].update_parameters(model)
        found = [samestep.digest(model), samestep.digest(objects["averaged_model"]), towers.state_dict()]
        return str([*found, objects["loader"].state_dict()])

    seed_globals(5, job.device)
    objects = build()
    train(objects, 1)
    with TemporaryDirectory() as folder:
        path = from_first_worker(job, lambda: Path(folder) / "one")
        assert samestep.save(path, **objects, rng=True) == path
        expected = train(objects, 2)
        others = build()
        assert samestep.load(path, **others, rng=True).step == 1
        job.barrier()
    assert train(others, 2) == expected
    return expected


@fault
def no_checkpoint_on_worker_0(job: samestep.Job) -> str:
    """The others could not tell: they do not look."""
    return message_of(lambda: from_first_worker(job, lambda: read(Path("nowhere"))))


def save(job: samestep.Job, path: Path, **more: Any) -> object:
    model = perceptron().to(job.device)
    return samestep.save(path, model=model, towers=samestep.Towers(model, 8, job=job), **more)


@fault
def saved_without_towers(job: samestep.Job) -> str:
    """Which workers write cannot be known."""
    return message_of(lambda: samestep.save("path", model=perceptron()))


@fault
def saved_to_a_disk_without_room(job: samestep.Job) -> str:
    """Only worker 0 writes, so only worker 0 sees it."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with TemporaryDirectory() as folder:
        path = from_first_worker(job, lambda: Path(folder) / "one")
        if job.is_first:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        message = message_of(lambda: save(job, path))
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert not any(Path(folder).iterdir())
    return message


@fault
def saved_with_state_that_cannot_be_written(job: samestep.Job) -> str:
    """Found before anything is written."""
    return message_of(lambda: save(job, Path("path"), thing=object()))


@fault
def generators_that_differ_on_one(job: samestep.Job) -> str:
    """One worker has drawn a number more."""
    seed_globals(6, job.device)
    if job.rank == 1:
        random.random()
    return message_of(lambda: save(job, Path("path"), rng=True)).replace("worker 1", "worker 1 failed, and")


@fault
def state_that_cannot_be_loaded_on_one(job: samestep.Job) -> str:
    """All others have loaded it by then, and undo that."""

    class Picky(nn.Linear):
        fails = job.rank == 1

        def load_state_dict(self, state: Mapping[str, Any], *_: Any, **__: Any) -> object:
            if self.fails:
                self.fails = False
                raise ArithmeticError("not today")
            return super().load_state_dict(state)

    model, thing = perceptron().to(job.device), Picky(1, 1)
    towers = samestep.Towers(model, 8, job=job)
    with TemporaryDirectory() as folder:
        path = from_first_worker(job, lambda: Path(folder) / "one")
        samestep.save(path, model=model, towers=towers, thing=thing)
        take_step(towers, batches(1, 16, 7)[0])
        with torch.no_grad():
            thing.weight.add_(1)
        before = (samestep.digest(thing), towers.state_dict())
        message = message_of(lambda: samestep.load(path, model=model, towers=towers, thing=thing))
        job.barrier()
    assert (samestep.digest(thing), towers.state_dict()) == before
    return message


@fault
def a_model_that_does_not_fit_on_one(job: samestep.Job) -> str:
    """Nothing is changed on any worker."""
    model = perceptron()
    saved = perceptron() if job.rank != 1 else nn.Linear(1, 1)
    snapshot = take_snapshot(TrainingObjects(model=saved), 2)
    return message_of(lambda: restore(snapshot, TrainingObjects(model=model), Path("path"), job))
