"""Programs whose workers `tests/takeovers.py` kills: a `Trainer`, a hand-written loop, and a small one."""

import io
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import samestep
from samestep.checkpoint.files import read
from samestep.workers.agreement import from_first_worker

STEPS, TOWERS, EPOCHS = 6, 5, 3


@dataclass(frozen=True)
class Program:
    """A program to run with faults.

    Attributes:
        train: `train(job, run_dir)` -> a result that must be the same under all faults.
        events: a fault happens after fewer than this many of a worker's messages.
        longest: newcomers arrive, and workers are cut off, before this time of the world's clock.
        checkpoints: `checkpoints(run_dir)` -> the digests of the existing checkpoints, by step.
    """

    train: Callable
    events: int
    longest: int
    checkpoints: Callable

    def undisturbed(self):
        """Return the result and the checkpoints of a run on one worker, without faults."""
        with redirect_stdout(io.StringIO()), TemporaryDirectory() as folder:
            returned = self.train(samestep.Job(torch.device("cpu")), Path(folder))
            return returned, self.checkpoints(Path(folder))


def measure(model, batch):
    return {"loss": (model(batch[0]).square().sum(), len(batch[0]))}


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.2), nn.Linear(4, 1))


def parts_around(model, job, generator):
    """Return towers for a model, a dataset, its loader and an optimizer."""
    towers = samestep.Towers(model, TOWERS, job=job, noise_every=2)
    data = torch.utils.data.TensorDataset(torch.randn(26, 3, generator=generator))
    loader = samestep.TowerLoader(data, 14, towers)  # the last batch of an epoch has 12 rows
    return towers, data, loader, torch.optim.AdamW(model.parameters(), lr=0.1)


def terms(model):
    return {"decay": sum(parameter.square().sum() for parameter in model.parameters())}


def whole(pattern):
    """Return a function that reads all checkpoints with matching names; a damaged one raises."""

    def checkpoints(run_dir):
        manifests = [read(path).manifest for path in run_dir.glob(pattern)]
        return {manifest.step: manifest.digest for manifest in manifests}

    return checkpoints


# ---- a Trainer ---------------------------------------------------------------------------------------


class Decay(samestep.Callback):
    """Changes the learning rate before steps and after evaluations, unfreezes a layer, adds noise to weights.

    Before each step, it switches a layer's mode, and whether a parameter is trained.
    From some step on, it keeps the running statistics. It counts evaluations itself, and draws the noise from
    the global generator.
    """

    count = 0

    def before_step(self, trainer, batch):
        trainer.step.optimizer.param_groups[0]["lr"] *= 0.97
        dropout, bias = trainer.model[3], trainer.model[-1].bias
        dropout.train(not dropout.training)
        bias.requires_grad_(not bias.requires_grad)

    def after_step(self, trainer, report):
        if report.step == 1:
            trainer.model[0].requires_grad_(True)
        if report.step == 3:
            trainer.model[1].eval()
        with torch.no_grad():
            trainer.model[-1].weight.add_(torch.randn(1, 4), alpha=0.01)

    def after_evaluation(self, trainer, metrics):
        self.count += 1
        if self.count % 2 == 0:
            for group in trainer.step.optimizer.param_groups:
                group["lr"] /= 2

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def train_with_trainer(job, run_dir):
    """Train; return the digest."""
    torch.manual_seed(0)  # for the callback's noise
    generator = torch.Generator().manual_seed(0)
    model = net()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    model[0].requires_grad_(False)
    towers, data, loader, optimizer = parts_around(model, job, generator)
    step = samestep.Step(towers, lambda model, batch: model(batch[0]).square().mean(), optimizer)
    trainer = samestep.Trainer(
        step,
        loader,
        run_dir=run_dir if job.is_first else run_dir / "of another worker",
        steps=STEPS,
        evaluate=samestep.Evaluation(data, measure, rows=8),
        terms=terms,
        evaluate_every=1,
        callbacks=[Decay()],
        checkpoint_every=3,
        log_every=1,
    )
    return trainer.run().digest


# ---- a hand-written loop -----------------------------------------------------------------------------


class Best:
    """State that the loop itself keeps."""

    def __init__(self):
        self.losses = []

    def state_dict(self):
        return {"losses": self.losses}

    def load_state_dict(self, state):
        self.losses = state["losses"]


def train_in_a_loop(job, run_dir):
    """Train for some epochs; return the digest, the averages' digest, and the loss of each epoch."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = net()
    towers, data, loader, optimizer = parts_around(model, job, generator)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    best, evaluation = Best(), samestep.Evaluation(data, measure, rows=8)
    state = {"model": model, "towers": towers, "loader": loader, "averaged_model": averaged}
    state |= {"optimizer": optimizer, "scheduler": scheduler, "best": best}

    def step(batch):
        scale = torch.rand(()) + 0.5  # from the global generator
        optimizer.param_groups[0]["weight_decay"] *= 1.1
        for tower in towers(batch):
            tower.backward(scale * model(tower.batch[0]).square().mean())
        report = towers.average()
        optimizer.step()
        averaged.update_parameters(model)
        return report.loss

    with samestep.Elastic(**state) as elastic:
        while loader.epoch < EPOCHS:
            losses = [elastic(step, batch) for batch in loader]
            scheduler.step()
            found = elastic(evaluation, model, job)
            best.losses = [*best.losses, found["loss"]]
            elastic(samestep.save, run_dir / f"{towers.step}", **state)
        assert losses
    return samestep.digest(model), samestep.digest(averaged), best.losses


# ---- a small one -------------------------------------------------------------------------------------


def train_small(job, run_dir):
    """Train one weight, and write it to a file after every second step."""
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    towers = samestep.Towers(model, TOWERS, job=job, noise_every=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        for tower in towers(batch):
            tower.backward(model(tower.batch).square().mean())
        towers.average()
        optimizer.step()

    def write():
        path = run_dir / f"{towers.step}.txt"
        from_first_worker(job, lambda: path.write_text(str(model.weight.item())))

    with samestep.Elastic(model=model, towers=towers, optimizer=optimizer) as elastic:
        while towers.step < STEPS:
            elastic(step, BATCHES[towers.step])
            if towers.step % 2 == 0:
                elastic(write)
    return model.weight.item()


BATCHES = [torch.randn(7, 1, generator=torch.Generator().manual_seed(n)) for n in range(STEPS)]


def read_numbers(run_dir):
    return {int(path.stem): path.read_text() for path in run_dir.glob("*.txt")}


PROGRAMS = {
    "trainer": Program(train_with_trainer, 160, 2_000, whole("checkpoints/step-*")),
    "loop": Program(train_in_a_loop, 160, 2_000, whole("[0-9]")),
    "small": Program(train_small, 90, 1_000, read_numbers),
}
