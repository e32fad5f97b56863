"""Arguments of the wrong type or value: one line that says which, and what was expected."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import samestep
from samestep.errors import ConfigError

ROWS = torch.randn(20, 2)


def loss_of(model, batch):
    return model(batch).square().mean()


class Parts:
    """What the calls below are made with."""

    def __init__(self):
        self.model = nn.Linear(2, 1)
        self.towers = samestep.Towers(self.model, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.step = samestep.Step(self.towers, loss_of, self.optimizer)
        self.loader = samestep.TowerLoader(ROWS, 10, self.towers)

    def towers_with(self, num_towers=2, **options):
        return samestep.Towers(self.model, num_towers, **options)

    def step_with(self, loss_fn=loss_of, **options):
        return samestep.Step(self.towers, loss_fn, self.optimizer, **options)

    def loader_with(self, dataset=ROWS, **options):
        return samestep.TowerLoader(dataset, 10, self.towers, **options)

    def trainer_with(self, step=None, **options):
        return samestep.Trainer(step or self.step, self.loader, run_dir="runs/none", steps=2, **options)

    def saved(self, path="none", **objects):
        return samestep.save(path, **{"model": self.model, **objects})


CALLS = {
    "towers = '2': expected an int >= 1": lambda p: p.towers_with("2"),
    "towers = 2.5: expected an int >= 1": lambda p: p.towers_with(2.5),
    "towers = True: expected an int >= 1": lambda p: p.towers_with(True),
    "towers = 0: expected an int >= 1": lambda p: p.towers_with(0),
    "job is a str: expected the job that samestep.init returned": lambda p: p.towers_with(job="cpu"),
    "seed = 1.5: expected an int": lambda p: p.towers_with(seed=1.5),
    "buffers is a str: expected a mapping from name patterns to policies": lambda p: p.towers_with(
        buffers="mean"
    ),
    "bucket_bytes = 25000000.0: expected an int >= 1": lambda p: p.towers_with(bucket_bytes=25e6),
    "accumulate_dtype is a str: expected a torch.dtype": lambda p: p.towers_with(accumulate_dtype="float32"),
    "sparse_parameters is a bool: expected a list of parameters": lambda p: p.towers_with(
        sparse_parameters=True
    ),
    "a cut = 1.5: expected an int": lambda p: samestep.Placement((0, 1.5, 2)),
    "cuts is a int: expected the ends of the workers' ranges, such as (0, 3, 8)": lambda p: (
        samestep.Placement(8)
    ),
    "must_match is a int: expected a mapping from names to values": lambda p: p.towers(ROWS, must_match=3),
    "forward is a int: expected a function of a tower's batch": lambda p: p.towers.whole_batch(
        ROWS, 3, loss_of
    ),
    "loss is a int: expected a function of all outputs and the batch": lambda p: p.towers.whole_batch(
        ROWS, p.model, 3
    ),
    "batches is a int: expected an iterable of small batches, such as a DataLoader": lambda p: (
        p.towers.slices(3)
    ),
    "towers is a Linear: expected the samestep.Towers of the model": lambda p: samestep.Step(
        p.model, loss_of, p.optimizer
    ),
    "loss_fn is a int: expected a function loss_fn(model, batch)": lambda p: p.step_with(3),
    "loss_fn is torch's MSELoss, a function of outputs and labels: expected one of the": lambda p: (
        p.step_with(nn.MSELoss())
    ),
    "clip_norm = '1': expected a number above 0, or None": lambda p: p.step_with(clip_norm="1"),
    "averaged_model is a Linear: expected an AveragedModel of torch, or a module with "
    "update_parameters(model)": lambda p: p.step_with(averaged_model=p.model),
    "towers is a Linear: expected the samestep.Towers of the model ": lambda p: samestep.TowerLoader(
        ROWS, 10, p.model
    ),
    "dataset is a DataLoader: expected its dataset, or use TowerLoader.from_dataloader": lambda p: (
        p.loader_with(DataLoader(ROWS))
    ),
    "shuffle = 'no': expected True or False": lambda p: p.loader_with(shuffle="no"),
    "drop_last = 1: expected True or False": lambda p: p.loader_with(drop_last=1),
    "seed = None: expected an int": lambda p: p.loader_with(seed=None),
    "collate_fn is a int: expected a function of a list of examples": lambda p: p.loader_with(collate_fn=3),
    "num_workers = -1: expected an int >= 0, the loader processes of each worker": lambda p: p.loader_with(
        num_workers=-1
    ),
    "dataset is a int without a length: expected a map-style dataset": lambda p: samestep.Evaluation(
        3, loss_of
    ),
    "measure is a Tensor: expected a function measure(model, batch)": lambda p: samestep.Evaluation(
        ROWS, ROWS
    ),
    "metrics is a str: expected a function of the totals": lambda p: samestep.Evaluation(
        ROWS, loss_of, metrics="accuracy"
    ),
    "rows = 2.5: expected an int >= 1, the examples in a batch of the evaluation": lambda p: (
        samestep.Evaluation(ROWS, loss_of, rows=2.5)
    ),
    "path is a int: expected the path of the checkpoint's folder": lambda p: p.saved(3),
    "model is a OrderedDict: expected an nn.Module, not its state_dict": lambda p: p.saved(
        model=p.model.state_dict()
    ),
    "towers is a Linear: expected the samestep.Towers of the model  ": lambda p: p.saved(towers=p.model),
    "averaged_model is a int: expected a module with the averages": lambda p: p.saved(averaged_model=3),
    "model is a str: expected an nn.Module or a mapping of tensors; `samestep digest": lambda p: (
        samestep.digest("runs/a")
    ),
    "towers is a NoneType: expected the samestep.Towers of the model": lambda p: samestep.Elastic(
        model=p.model, towers=None
    ),
    "what to call is a int: expected a function, with its arguments after it": lambda p: samestep.Elastic(
        model=p.model, towers=p.towers
    )(3),
    "threads = '2': expected an int": lambda p: samestep.init("cpu", threads="2"),
    "timeout_s = '10': expected a number above 0, in seconds": lambda p: samestep.init("cpu", timeout_s="10"),
    "timeout_s = inf: expected a number above 0, in seconds": lambda p: samestep.init(
        "cpu", timeout_s=float("inf")
    ),
    "main is a str: expected a function main(job)": lambda p: samestep.launch("main", 2),
    "step is a Towers: expected a samestep.Step": lambda p: p.trainer_with(p.towers),
    "evaluate is a function: expected a samestep.Evaluation, or None": lambda p: p.trainer_with(
        evaluate=loss_of
    ),
    "evaluate is the class Evaluation: expected a samestep.Evaluation, or None": lambda p: p.trainer_with(
        evaluate=samestep.Evaluation
    ),
    "callbacks is a Callback: expected a list of samestep.Callback objects": lambda p: p.trainer_with(
        callbacks=samestep.Callback()
    ),
    "one of callbacks is the class Callback: expected a samestep.Callback": lambda p: p.trainer_with(
        callbacks=[samestep.Callback]
    ),
    "one of loggers is a int: expected a samestep.Logger": lambda p: p.trainer_with(loggers=[3]),
    "terms is a dict: expected a function of the model": lambda p: p.trainer_with(terms={"decay": 1.0}),
    "must_match is a list: expected a mapping from names to plain values": lambda p: p.trainer_with(
        must_match=["lr"]
    ),
}


@pytest.mark.parametrize(("message", "call"), CALLS.items(), ids=CALLS)
def test_what_does_not_fit_is_named(message, call, tmp_path, monkeypatch):
    samestep.init("cpu")
    monkeypatch.chdir(tmp_path)
    parts = Parts()
    with pytest.raises(ConfigError, match=f"^{re.escape(message.strip())}"):
        call(parts)
    assert list(Path().iterdir()) == []


def test_numbers_of_numpy_are_numbers():
    import numpy as np

    samestep.init("cpu", threads=np.int64(1), timeout_s=np.float32(5))
    model = nn.Linear(2, 1)
    towers = samestep.Towers(model, np.int64(2), seed=np.int32(3))
    assert type(towers.num_towers) is int
    loader = samestep.TowerLoader(ROWS, 10, towers, seed=np.int64(3))
    assert next(iter(loader)).rows == 10


def test_whole_numbers_of_numpy_are_saved_as_those_of_python(tmp_path):
    model = torch.nn.Linear(1, 1)
    towers = samestep.Towers(model, 2, seed=np.int64(3), noise_every=np.int64(20))
    samestep.save(tmp_path / "one", model=model, towers=towers)
    samestep.load(tmp_path / "one", model=model, towers=samestep.Towers(model, 2, seed=3))
