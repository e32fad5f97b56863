"""What programs decide by results of their own towers, of which each worker has others: a warning."""

import copy
import math
import random
import time
from collections import defaultdict, deque
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.init import constant_
from torch.nn.utils import prune
from torch.optim import LBFGS, SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset, TensorDataset, WeightedRandomSampler

import samestep
from samestep import Evaluation, Step, Towers

from .cases import mostly_long
from .nets import batch_of, loss_of, net, run_passes
from .simulation import simulate

pytestmark = pytest.mark.sampled

WORKERS = mostly_long([2, 1, 3], 1)
DATA = TensorDataset(*batch_of(0, 24).values(), torch.arange(24))
KEPT = SimpleNamespace(mean=torch.zeros(()), losses=[])


def made(job):
    model = net()
    return model, Towers(model, 6, job=job), SGD(model.parameters(), lr=0.1)


def epoch_of(model, towers, optimizer, number=0):
    """Take two steps; return the sum of this worker's losses."""
    total = 0.0
    for step in range(2):
        for tower in towers(batch_of(2 * number + step)):
            loss = loss_of(model, tower.batch)
            total += loss.item()
            tower.backward(loss)
        towers.average()
        optimizer.step()
    return total


# ---- wrong -----------------------------------------------------------------------------------------


def best_weights(job):
    model, towers, optimizer = made(job)
    best = math.inf
    for epoch in range(2):
        loss = epoch_of(model, towers, optimizer, epoch)
        if loss < best:
            best, kept = loss, copy.deepcopy(model.state_dict())
    model.load_state_dict(kept)


def best_model(job):
    model, towers, optimizer = made(job)
    best, kept = math.inf, None
    for epoch in range(2):
        loss = epoch_of(model, towers, optimizer, epoch)
        best, kept = (loss, copy.deepcopy(model)) if loss < best else (best, kept)
    assert kept is not None


def begun_anew(job):
    """A layer, when the losses seem to be too high."""
    model, towers, optimizer = made(job)
    for epoch in range(2):
        if epoch_of(model, towers, optimizer, epoch) > 1e3:
            model[0].reset_parameters()


def whole_batch_by_passes(job):
    """A loss of all outputs, by a count of the forwards that this worker has run."""
    model, towers, optimizer = made(job)
    count = 0

    def forward(batch):
        nonlocal count
        count += 1
        return model(batch["x"])

    for step in range(2):
        towers.whole_batch(batch_of(step), forward, lambda outputs, _: outputs.square().mean() * 0.99**count)
        towers.average()
        optimizer.step()


def whole_batch_step_by_passes(job):
    """The same in a `Step`."""
    _, towers, optimizer = made(job)
    sums = []

    def forward(model, batch):
        sums.append(batch["x"].sum())
        return model(batch["x"])

    def loss(model, outputs, batch):
        return outputs.square().mean() * len(sums)

    step = Step(towers, loss, optimizer, forward=forward)
    for number in range(2):
        step(batch_of(number))


def saved(job, path):
    model, towers, optimizer = made(job)
    state = {"best": math.inf}
    for _epoch in range(2):
        losses = []
        for step in range(2):
            for tower in towers(batch_of(step)):
                loss = loss_of(model, tower.batch)
                losses.append(loss.detach())
                tower.backward(loss)
            towers.average()
            optimizer.step()
        mean = torch.stack(losses).mean()
        is_best = job.rank == 0 and mean < state["best"]
        state["best"] = min(state["best"], mean)
        if is_best:
            torch.save(model.state_dict(), path / "best.pt")


class Stopping:
    """Stops after some epochs without a better loss."""

    def __init__(self, patience):
        self.patience, self.count, self.best, self.has_stopped = patience, 0, math.inf, False

    def __call__(self, loss):
        if loss < self.best:
            self.best, self.count = loss, 0
            return
        self.count += 1
        if self.count >= self.patience:
            self.has_stopped = True


def early_end(job):
    model, towers, optimizer = made(job)
    stopping = Stopping(1)
    for epoch in range(2):
        stopping(epoch_of(model, towers, optimizer, epoch))
        if stopping.has_stopped:
            break


def early_return(job):
    model, towers, optimizer = made(job)
    history = deque(maxlen=2)
    for epoch in range(2):
        history.append(epoch_of(model, towers, optimizer, epoch))
        if len(history) == 2 and history[1] > history[0]:
            return


def steps_until(job):
    model, towers, optimizer = made(job)
    loss = math.inf
    while loss > 100:
        loss = epoch_of(model, towers, optimizer)


def rows_until(job):
    model, towers, optimizer = made(job)
    seen = 0
    while seen < 4:
        for tower in towers(batch_of(0)):
            seen += tower.rows
            tower.backward(loss_of(model, tower.batch))
        towers.average()
        optimizer.step()


def plateau(job):
    model, towers, optimizer = made(job)
    schedule = ReduceLROnPlateau(optimizer)
    for epoch in range(2):
        schedule.step(epoch_of(model, towers, optimizer, epoch))


def learning_rate(job):
    model, towers, optimizer = made(job)
    for epoch in range(2):
        loss = epoch_of(model, towers, optimizer, epoch)
        if loss > 1e6:
            optimizer.param_groups[0]["lr"] /= 2


def update_that_is_left_out(job):
    model, towers, optimizer = made(job)
    for step in range(2):
        for tower in towers(batch_of(step)):
            loss = loss_of(model, tower.batch)
            tower.backward(loss)
        towers.average()
        if loss.item() < 1e6:
            optimizer.step()


def update_after_a_continue(job):
    model, towers, optimizer = made(job)
    for step in range(2):
        is_finite = True
        for tower in towers(batch_of(step)):
            loss = loss_of(model, tower.batch)
            is_finite &= math.isfinite(loss.item())
            tower.backward(loss)
        towers.average()
        if not is_finite:
            print("skipped")
            continue
        optimizer.step()


class Saver:
    """Saves weights unless a value is worse than the best one."""

    def __init__(self, path):
        self.path, self.best = path, math.inf

    def __call__(self, model, value):
        if value >= self.best:
            print("not better")
            return
        self.best = value
        torch.save(model.state_dict(), self.path)


def saved_after_a_return(job, path):
    model, towers, optimizer = made(job)
    save = Saver(path / f"{job.rank}.pt")
    for epoch in range(2):
        save(model, epoch_of(model, towers, optimizer, epoch))


def saved_by_the_else(job, path):
    model, towers, optimizer = made(job)
    best = math.inf
    for epoch in range(2):
        loss = epoch_of(model, towers, optimizer, epoch)
        if loss < best:
            best = loss
        else:
            continue
        torch.save(model.state_dict(), path / f"{job.rank}.pt")


def clipped(job):
    model, towers, optimizer = made(job)
    total = epoch_of(model, towers, optimizer)
    run_passes(towers, batch_of(2))
    towers.average()
    nn.utils.clip_grad_norm_(model.parameters(), max_norm=10 + total)
    optimizer.step()


def step_that_is_left_out(job):
    model, towers, optimizer = made(job)
    step = Step(towers, loss_of, optimizer)
    for number in range(2):
        total = epoch_of(model, towers, optimizer, number)
        if total < 1e6:
            step(batch_of(number))


def hidden_states(job):
    torch.manual_seed(0)
    model = nn.GRU(6, 6, batch_first=True)
    towers = Towers(model, 6, job=job)
    optimizer = SGD(model.parameters(), lr=0.1)
    hidden = torch.zeros(12, 6)
    for step in range(2):
        last = []
        for tower in towers((torch.randn(12, 3, 6), hidden)):
            output, state = model(tower.batch[0], tower.batch[1][None].contiguous())
            last.append(state[0].detach())
            tower.backward(output.square().mean())
        towers.average()
        optimizer.step()
        if step == 0 and len(last) == 6:
            hidden = torch.cat(last)


def priorities(job):
    model, towers, optimizer = made(job)
    weights = torch.ones(24)
    x, y, _ = DATA.tensors
    for _step in range(1):
        chosen = weights.multinomial(12)
        for tower in towers((x[chosen], y[chosen], chosen)):
            rows, labels, numbers = tower.batch
            losses = F.cross_entropy(model(rows), labels, reduction="none")
            weights[numbers] = losses.detach()
            tower.backward(losses.mean())
        towers.average()
        optimizer.step()


def sampler(job):
    model, towers, optimizer = made(job)
    weights = dict.fromkeys(range(24), 1.0)
    for _epoch in range(1):
        order = WeightedRandomSampler(list(weights.values()), 24)
        for batch in DataLoader(DATA, batch_size=12, sampler=order):
            for tower in towers(batch):
                rows, labels, numbers = tower.batch
                losses = F.cross_entropy(model(rows), labels, reduction="none")
                for number, loss in zip(numbers.tolist(), losses.tolist(), strict=True):
                    weights[number] = loss
                tower.backward(losses.mean())
            towers.average()
            optimizer.step()


def line_search(job):
    model, towers, _ = made(job)
    optimizer = LBFGS(model.parameters(), max_iter=1)

    def closure():
        total = 0.0
        for tower in towers(batch_of(0)):
            loss = loss_of(model, tower.batch)
            total += loss.item()
            tower.backward(loss)
        towers.average()
        return total

    optimizer.step(closure)


def weight_of_the_loss(job):
    model, towers, optimizer = made(job)
    weight = 1.0
    for step in range(2):
        losses = []
        for tower in towers(batch_of(step)):
            loss = loss_of(model, tower.batch)
            losses.append(loss.item())
            tower.backward(weight * loss)
        towers.average()
        optimizer.step()
        if sum(losses) > 1e6:
            weight = 0.5


def weight_in_a_loss_function(job):
    class Loss:
        weight = 1.0

        def __init__(self):
            self.outputs = []

        def __call__(self, model, batch):
            self.outputs.append(model(batch["x"]).detach())
            return self.weight * loss_of(model, batch)

        def adapt(self):
            self.weight = 0.5 if torch.cat(self.outputs).mean() > 1e6 else 1.0
            self.outputs.clear()

    _model, towers, optimizer = made(job)
    loss_fn = Loss()
    step = Step(towers, loss_fn, optimizer)
    for number in range(2):
        step(batch_of(number))
        loss_fn.adapt()


@dataclass
class Trainer:
    """A program in a class."""

    model: nn.Module
    towers: Towers
    optimizer: torch.optim.Optimizer
    best: float = 0.0
    correct: int = 0

    def train_one(self, tower):
        output = self.model(tower.batch["x"])
        self.correct += (output.argmax(1) == tower.batch["y"]).sum().item()
        tower.backward(F.cross_entropy(output, tower.batch["y"]))

    def step(self, batch):
        for tower in self.towers(batch):
            self.train_one(tower)
        self.towers.average()
        self.optimizer.step()

    def accuracy(self):
        return self.correct / 24

    def fit(self):
        for epoch in range(2):
            self.correct = 0
            for step in range(2):
                self.step(batch_of(2 * epoch + step))
            self.keep_if_best()

    def keep_if_best(self):
        accuracy = self.accuracy()
        if accuracy > self.best:
            self.best = accuracy
            self.kept = {name: value.clone() for name, value in self.model.state_dict().items()}


def of_a_class(job):
    Trainer(*made(job)).fit()


class Best:
    """Keeps the weights with the best value of a name."""

    def __init__(self, name):
        self.name, self.value = name, math.inf

    def on_epoch(self, model, values):
        if values[self.name] < self.value:
            self.value = values[self.name]
            self.kept = copy.deepcopy(model.state_dict())


def called_back(job, name):
    model, towers, optimizer = made(job)
    callbacks = [Best(name)]
    for epoch in range(2):
        values = {"train": epoch_of(model, towers, optimizer, epoch), "seconds": time.perf_counter()}
        values["val"] = loss_of(model, batch_of(9)).item()
        for callback in callbacks:
            getattr(callback, "on_epoch")(model, values)  # noqa: B009


def of_callbacks(job):
    called_back(job, "train")


def of_a_loss_function(job):
    model, towers, optimizer = made(job)
    losses, best = [], math.inf

    def loss_fn(model, batch):
        loss = loss_of(model, batch)
        losses.append(loss.item())
        return loss

    step = Step(towers, loss_fn, optimizer)
    for number in range(2):
        losses.clear()
        step(batch_of(number))
        if sum(losses) < best:
            best = sum(losses)
            kept = copy.deepcopy(model)
    assert kept is not model


def of_scores_that_measure_fills(job):
    model, towers, optimizer = made(job)
    scores, best = [], -math.inf

    def measure(model, batch):
        rows, labels, _ = batch
        hits = model(rows).argmax(1) == labels
        scores.extend(hits.tolist())
        return {"accuracy": (hits.sum(), len(labels))}

    evaluation = Evaluation(DATA, measure, rows=6)
    for epoch in range(2):
        epoch_of(model, towers, optimizer, epoch)
        evaluation(model, job)
        if sum(scores) > best:
            best = sum(scores)
            kept = model.state_dict()
    assert kept


def by_the_clock(job):
    model, towers, optimizer = made(job)
    start, step = time.monotonic(), 0
    while True:
        epoch_of(model, towers, optimizer, step)
        step += 1
        if time.monotonic() - start > 0 and step == 2:
            break


def saves_by_the_clock(job, path):
    model, towers, optimizer = made(job)
    last = time.time()
    for step in range(2):
        epoch_of(model, towers, optimizer, step)
        if time.time() - last > 1e6:
            samestep.save(path / "last", model=model, towers=towers, optimizer=optimizer)
            last = time.time()


def with_examples(job):
    """Return a model with towers and an optimizer, and a function that takes one step and counts labels."""
    model, towers, optimizer = made(job)

    def step(number=0):
        counts = torch.zeros(3)
        for tower in towers(batch_of(number)):
            counts += torch.bincount(tower.batch["y"], minlength=3)
            tower.backward(loss_of(model, tower.batch))
        towers.average()
        return counts

    return model, optimizer, step


def gradient_by_a_count(job):
    model, optimizer, step = with_examples(job)
    counts = step()
    for p in model.parameters():
        p.grad.mul_(21 / counts.sum())
    optimizer.step()


def gradient_that_is_replaced(job):
    _model, optimizer, step = with_examples(job)
    counts = step()
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = p.grad / counts.sum()
    optimizer.step()


def gradient_that_is_left_out(job):
    model, optimizer, step = with_examples(job)
    if step().max() > 1e6:
        for p in model.parameters():
            p.grad = None
    optimizer.step()


def gradients_together(job):
    model, optimizer, step = with_examples(job)
    counts = step()
    grads = [p.grad for p in model.parameters()]
    torch._foreach_mul_(grads, 21 / float(counts.sum()))
    optimizer.step()


def gradient_by_a_function(job):
    model, optimizer, step = with_examples(job)
    limit = 100 / step().sum().item()
    for p in model.parameters():
        torch.clamp_(p.grad, -limit, limit)
    optimizer.step()


def own_update(job):
    model, _optimizer, step = with_examples(job)
    rate = 0.1 / step().sum()
    with torch.no_grad():
        for _name, p in model.named_parameters():
            p -= rate * p.grad


def bias_from_labels(job):
    model, optimizer, step = with_examples(job)
    counts = step()
    optimizer.step()
    with torch.no_grad():
        model[2].bias.copy_(torch.log(counts / counts.sum() + 1e-3))


def bias_by_a_function(job):
    model, optimizer, step = with_examples(job)
    counts = step()
    optimizer.step()
    constant_(model[2].bias, -math.log(counts.sum()))


def unused_code(job):
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 3))
    towers = Towers(model, 6, job=job)
    used = torch.zeros(8)
    for tower in towers({"x": torch.arange(12) % 4, "y": torch.arange(12) % 3}):
        used[tower.batch["x"]] += 1
        tower.backward(loss_of(model, tower.batch))
    towers.average()
    model[0].weight.data[used == 0] = 0.0


def temperature_in_place(job):
    model, towers, optimizer = made(job)
    temperature = torch.ones(())
    for step in range(2):
        losses = []
        for tower in towers(batch_of(step)):
            loss = loss_of(model, tower.batch)
            losses.append(loss.detach())
            tower.backward(loss / temperature)
        towers.average()
        optimizer.step()
        if step:
            temperature.mul_(0.9).add_(0.1 * torch.stack(losses).mean())


def temperature_that_adds_up(job):
    model, towers, optimizer = made(job)
    temperature = torch.ones(())
    for step in range(2):
        losses = []
        for tower in towers(batch_of(step)):
            loss = loss_of(model, tower.batch)
            losses.append(loss.detach())
            tower.backward(loss / temperature)
        towers.average()
        optimizer.step()
        if step:
            temperature *= 0.9
            temperature += 0.1 * torch.stack(losses).mean()


class Noise(nn.Module):
    """Adds noise, of a strength that the program adapts."""

    def __init__(self):
        super().__init__()
        self.register_buffer("strength", torch.zeros(()))

    def forward(self, x):
        return x + self.strength * torch.randn_like(x)


def strength_of_a_layer(job):
    model, towers, optimizer = made(job)
    noise = Noise()
    for step in range(2):
        correct = 0
        for tower in towers(batch_of(step)):
            outputs = model(noise(tower.batch["x"]))
            correct += (outputs.argmax(1) == tower.batch["y"]).sum()
            tower.backward(F.cross_entropy(outputs, tower.batch["y"]))
        towers.average()
        optimizer.step()
        if step:
            noise.strength.copy_(correct / 21)


# ---- what passes keep by the numbers of examples ---------------------------------------------------


def examples_of(epoch):
    """Return an epoch's batch, of all examples in another order, and their numbers."""
    order = torch.randperm(24, generator=torch.Generator().manual_seed(epoch))
    return {"x": DATA.tensors[0][order], "y": DATA.tensors[1][order], "number": order}


def losses_of(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def losses_in_a_dict(job):
    model, towers, optimizer = made(job)
    last = {}
    for epoch in range(3):
        for tower in towers(examples_of(epoch)):
            losses, numbers = losses_of(model, tower.batch), tower.batch["number"].tolist()
            weights = torch.tensor([last.get(number, 1.0) for number in numbers])
            tower.backward((losses * weights).mean())
            for number, loss in zip(numbers, losses.tolist(), strict=True):
                last[number] = loss
        towers.average()
        optimizer.step()


def losses_in_a_list(job):
    model, towers, optimizer = made(job)
    last = [1.0] * 24
    for epoch in range(3):
        for tower in towers(examples_of(epoch)):
            losses, numbers = losses_of(model, tower.batch), tower.batch["number"].tolist()
            tower.backward((losses * torch.tensor([last[number] for number in numbers])).mean())
            for number, loss in zip(numbers, losses.tolist(), strict=True):
                last[number] = loss
        towers.average()
        optimizer.step()


def losses_in_an_array(job):
    model, towers, optimizer = made(job)
    last = np.ones(24, dtype=np.float32)
    for epoch in range(3):
        for tower in towers(examples_of(epoch)):
            losses, numbers = losses_of(model, tower.batch), tower.batch["number"].numpy()
            tower.backward((losses * torch.from_numpy(last[numbers])).mean())
            last[numbers] = losses.detach().numpy()
        towers.average()
        optimizer.step()


def losses_in_an_update(job):
    model, towers, optimizer = made(job)
    last = {}
    for epoch in range(3):
        for tower in towers(examples_of(epoch)):
            losses, numbers = losses_of(model, tower.batch), tower.batch["number"].tolist()
            tower.backward((losses * torch.tensor([last.get(number, 1.0) for number in numbers])).mean())
            last.update(zip(numbers, losses.tolist(), strict=True))
        towers.average()
        optimizer.step()


class Losses:
    """Those of each example so far, in the loss function of a `Step`."""

    def __init__(self):
        self.kept = {}

    def means(self, numbers):
        found = [self.kept.get(number, [1.0]) for number in numbers]
        return torch.tensor([sum(each) / len(each) for each in found])

    def loss_of(self, model, batch):
        losses, numbers = losses_of(model, batch), batch["number"].tolist()
        weights = self.means(numbers)
        for number, loss in zip(numbers, losses.tolist(), strict=True):
            if number not in self.kept:
                self.kept[number] = []
            self.kept[number].append(loss)
        return (losses * weights).mean()


def losses_of_an_object(job):
    _, towers, optimizer = made(job)
    losses = Losses()
    step = Step(towers, losses.loss_of, optimizer)
    for epoch in range(3):
        step(examples_of(epoch))


class Kept:
    """A loss function that keeps its losses."""

    def __init__(self):
        self.losses = []

    def __call__(self, model, batch):
        loss = loss_of(model, batch)
        self.losses.append(loss.item())
        return loss

    def last(self):
        return sum(self.losses[-3:]) / 3


class Slower(samestep.Callback):
    def __init__(self, optimizer, value_of):
        self.optimizer, self.value_of = optimizer, value_of

    def after_step(self, trainer, report):
        if self.value_of(report) > 1e6:
            self.optimizer.param_groups[0]["lr"] *= 0.9


class Patience(samestep.Callback):
    """Stops after a step that is no better than the best, by the losses of a function or by reports."""

    def __init__(self, kept=None):
        self.kept, self.best = kept, math.inf

    def after_step(self, trainer, report):
        loss = report.loss if self.kept is None else self.kept.last()
        if loss > self.best:
            trainer.stop()
        self.best = min(loss, self.best)


def train(job, path, callback_of):
    _, towers, optimizer = made(job)
    kept = Kept()
    loader = samestep.TowerLoader([{"x": DATA[n][0], "y": DATA[n][1]} for n in range(24)], 12, towers)
    step = Step(towers, kept, optimizer)
    run = path / str(job.world_size)
    samestep.Trainer(step, loader, run_dir=run, steps=4, callbacks=[callback_of(kept, optimizer)]).run()


def slower_by_a_callback(job, path):
    train(job, path, lambda kept, optimizer: Slower(optimizer, lambda report: kept.last()))


def stopped_by_a_callback(job, path):
    train(job, path, lambda kept, optimizer: Patience(kept))


def best_of_elastic_calls(job, path):
    model, towers, optimizer = made(job)
    best, state = math.inf, {"model": model, "towers": towers, "optimizer": optimizer}

    def step(batch):
        total = 0.0
        for tower in towers(batch):
            loss = loss_of(model, tower.batch)
            total += loss.item()
            tower.backward(loss)
        towers.average()
        optimizer.step()
        return total

    with samestep.Elastic(**state) as elastic:
        while towers.step < 2:
            total = elastic(step, batch_of(towers.step))
            if total < best:
                best = total
                torch.save(model.state_dict(), path / f"{job.rank}.pt")


def data_by_a_callback(job, path):
    """Of a class that is defined beside what it changes, and sets anew in `before_step` what passes keep."""
    _, towers, optimizer = made(job)
    data, kept = Levels(), Kept()
    loader = samestep.TowerLoader(data, 12, towers)

    class Harder(samestep.Callback):
        def before_step(self, trainer, batch):
            kept.losses = [1.0]

        def after_step(self, trainer, report):
            loader.dataset.level = 1 + kept.last()

    step, run = Step(towers, kept, optimizer), path / str(job.world_size)
    samestep.Trainer(step, loader, run_dir=run, steps=3, callbacks=[Harder()]).run()


class Levels(Dataset):
    """Scales its examples by a level, and has a weight for each."""

    def __init__(self, level=1.0):
        self.level, self.weights = level, torch.ones(24)

    def __len__(self):
        return 24

    def __getitem__(self, number):
        x, y, _ = DATA[number]
        return {"x": x * self.level, "y": y, "number": number, "weight": self.weights[number]}


def level_of_the_data(job):
    model, towers, optimizer = made(job)
    data = Levels()
    loader = samestep.TowerLoader(data, 12, towers)
    for _epoch in range(2):
        losses = []
        for batch in loader:
            for tower in towers(batch):
                loss = loss_of(model, tower.batch)
                losses.append(loss.item())
                tower.backward(loss)
            towers.average()
            optimizer.step()
        data.level = sum(losses) / len(losses)


def weights_in_the_data(job):
    model, towers, optimizer = made(job)
    data = Levels()
    loader = samestep.TowerLoader(data, 12, towers)
    for _epoch in range(2):
        for batch in loader:
            for tower in towers(batch):
                losses = losses_of(model, tower.batch)
                data.weights[tower.batch["number"]] = losses.detach()
                tower.backward((losses * tower.batch["weight"]).mean())
            towers.average()
            optimizer.step()


def order_by_losses(job):
    model, towers, optimizer = made(job)
    last = np.ones(24)
    order = lambda seed, epoch: WeightedRandomSampler(last, 24)  # noqa: E731
    loader = samestep.TowerLoader(Levels(), 24, towers, order=order)
    for batch in loader:
        for tower in towers(batch):
            losses = losses_of(model, tower.batch)
            last[tower.batch["number"].numpy()] = losses.detach().numpy()
            tower.backward(losses.mean())
        towers.average()
        optimizer.step()


def validated_on_own_rows(job):
    model, towers, optimizer = made(job)
    schedule = ReduceLROnPlateau(optimizer)
    loader = samestep.TowerLoader(Levels(), 12, towers, shuffle=False)
    for step in range(2):
        take(model, towers, optimizer, step)
        total = 0.0
        for batch in loader:
            for rows in batch.slices.values():
                total += loss_of(model, rows).item()
        schedule.step(total)


def take(model, towers, optimizer, step):
    """Take a step; return this worker's last loss."""
    for tower in towers(batch_of(step)):
        loss = loss_of(model, tower.batch)
        tower.backward(loss)
    towers.average()
    optimizer.step()
    return loss.item()


def frozen_layer(job):
    model, towers, optimizer = made(job)
    for step in range(2):
        if take(model, towers, optimizer, step) > 1e6:
            model[0].requires_grad_(False)


def frozen_bias(job):
    model, towers, optimizer = made(job)
    for step in range(2):
        if take(model, towers, optimizer, step) > 1e6:
            model[0].bias.requires_grad = False


def setting_of_a_layer(job):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.1))
    towers, optimizer = Towers(model, 6, job=job), SGD(model.parameters(), lr=0.1)
    for step in range(2):
        model[1].p = min(0.5, take(model, towers, optimizer, step) * 0)


def rate_by_a_history(job):
    model, towers, optimizer = made(job)
    history = defaultdict(list)
    for step in range(2):
        history["loss"].append(take(model, towers, optimizer, step))
        for group in optimizer.param_groups:
            group.update(lr=0.1 + 0 * float(np.mean(history["loss"][-3:])))


def rate_by_a_history_of_names(job):
    model, towers, optimizer = made(job)
    names = ("loss", "other")
    history = {name: [] for name in names}
    for step in range(2):
        for name in names:
            history[name].append(take(model, towers, optimizer, step))
        optimizer.param_groups[0]["lr"] = 0.1 + 0 * history["other"][-1]


def pruned_by_results(job):
    model, towers, optimizer = made(job)
    for step in range(2):
        loss = take(model, towers, optimizer, step)
        if step == 1:
            prune.random_unstructured(model[0], "weight", min(0.5, loss * 0))


def other_optimizer(job):
    model, towers, optimizer = made(job)
    for step in range(2):
        if take(model, towers, optimizer, step) > 1e6:
            optimizer = SGD(model.parameters(), lr=0.01)


def rate_by_a_tensor(job):
    model, towers, optimizer = made(job)
    passes = torch.zeros(1)
    for step in range(2):
        for tower in towers(batch_of(step)):
            tower.backward(loss_of(model, tower.batch))
            passes += 1
        towers.average()
        optimizer.param_groups[0]["lr"] = 0.1 + 0 * passes.item()


def rate_by_a_tensor_in_place(job):
    model, towers, optimizer = made(job)
    passes = torch.zeros(1)
    for step in range(2):
        for tower in towers(batch_of(step)):
            tower.backward(loss_of(model, tower.batch))
            passes.add_(1)
        towers.average()
        optimizer.param_groups[0]["lr"] = 0.1 + 0 * float(passes)


def rate_by_an_array(job):
    model, towers, optimizer = made(job)
    passes = np.zeros(1)
    for step in range(2):
        for tower in towers(batch_of(step)):
            tower.backward(loss_of(model, tower.batch))
            passes += 1
        towers.average()
        optimizer.param_groups[0]["lr"] = 0.1 + 0 * float(passes[0])


def rate_by_a_length(job):
    model, towers, optimizer = made(job)
    passes = []
    for step in range(2):
        for tower in towers(batch_of(step)):
            tower.backward(loss_of(model, tower.batch))
            passes.append(step)
        towers.average()
        optimizer.param_groups[0]["lr"] = 0.1 + 0 * len(passes)


def rate_by_a_number(job):
    model, towers, optimizer = made(job)
    passes, rate = 0, 0.1
    for step in range(2):
        for tower in towers(batch_of(step)):
            tower.backward(loss_of(model, tower.batch))
            passes = passes + 1
        towers.average()
        optimizer.param_groups[0]["lr"] = rate + 0 * passes


def rate_by_a_librarys_object(job):
    """Its attributes may be anything, but are no buffers."""
    model, towers, optimizer = made(job)
    kept = copy.copy(KEPT)
    for step in range(2):
        kept.mean.zero_()
        for tower in towers(batch_of(step)):
            loss = loss_of(model, tower.batch)
            tower.backward(loss)
            kept.mean.add_(loss.detach())
        towers.average()
        optimizer.param_groups[0]["lr"] = 0.1 + 0 * kept.mean.item()


def rate_by_a_librarys_list(job):
    model, towers, optimizer = made(job)
    kept = copy.copy(KEPT)
    for step in range(2):
        for tower in towers(batch_of(step)):
            loss = loss_of(model, tower.batch)
            tower.backward(loss)
            kept.losses.append(loss.item())
        towers.average()
        optimizer.param_groups[0]["lr"] = 0.1 + 0 * kept.losses[-1]


def rate_by_a_global_object(job):
    model, towers, optimizer = made(job)
    for step in range(2):
        KEPT.mean.zero_()
        for tower in towers(batch_of(step)):
            loss = loss_of(model, tower.batch)
            tower.backward(loss)
            KEPT.mean.add_(loss.detach())
        towers.average()
        optimizer.param_groups[0]["lr"] = 0.1 + 0 * KEPT.mean.item()


def rate_by_random_numbers(job):
    model, towers, optimizer = made(job)
    for step in range(2):
        for tower in towers(batch_of(step)):
            tower.backward(loss_of(model, tower.batch))
            drawn = random.random()
        towers.average()
        optimizer.param_groups[0]["lr"] = 0.1 + 0 * drawn


def clipped_by_random_numbers(job):
    model, towers, _ = made(job)
    for step in range(2):
        for tower in towers(batch_of(step)):
            tower.backward(loss_of(model, tower.batch))
            drawn = torch.rand(1).item() + np.random.rand()
        towers.average()
        nn.utils.clip_grad_norm_(model.parameters(), 1e6 + drawn)


WRONG = {
    best_weights: "whether Sequential.state_dict runs",
    best_model: "whether copy.deepcopy runs",
    whole_batch_by_passes: "the loss of the whole batch",
    whole_batch_step_by_passes: "the loss of the whole batch",
    begun_anew: "whether Linear.reset_parameters runs",
    saved: "whether torch.save runs",
    early_end: "the end of the loop over steps",
    early_return: "the end of the loop over steps",
    steps_until: "the loop over steps",
    rows_until: "the loop over steps",
    plateau: "metrics of ReduceLROnPlateau",
    learning_rate: "a learning rate",
    update_that_is_left_out: "whether SGD.step runs",
    update_after_a_continue: "whether SGD.step runs",
    saved_after_a_return: "whether (Sequential.state_dict|torch.save) runs",
    saved_by_the_else: "whether (Sequential.state_dict|torch.save) runs",
    clipped: "max_norm of clip_grad_norm_",
    step_that_is_left_out: "whether Step runs",
    hidden_states: "batch of Towers",
    priorities: "batch of Towers",
    sampler: "the batches of the loop",
    line_search: "closure of LBFGS",
    weight_of_the_loss: "the loss of later passes",
    losses_in_a_dict: "the loss of later passes",
    losses_in_a_list: "the loss of later passes",
    losses_in_an_array: "the loss of later passes",
    losses_in_an_update: "the loss of later passes",
    losses_of_an_object: "the loss of later passes",
    weight_in_a_loss_function: "the loss of later passes",
    temperature_in_place: "the loss of later passes",
    temperature_that_adds_up: "the loss of later passes",
    strength_of_a_layer: "the loss of later passes",
    gradient_by_a_count: "a gradient",
    gradient_that_is_replaced: "a gradient",
    gradient_that_is_left_out: "a gradient",
    gradients_together: "gradients or weights",
    gradient_by_a_function: "a gradient",
    own_update: "a weight",
    bias_from_labels: "a weight",
    bias_by_a_function: "a weight",
    unused_code: "a weight",
    of_a_class: "whether Sequential.state_dict runs",
    of_callbacks: "whether Sequential.state_dict runs",
    of_a_loss_function: "whether copy.deepcopy runs",
    of_scores_that_measure_fills: "whether Sequential.state_dict runs",
    level_of_the_data: "the batches of the loop",
    weights_in_the_data: "the batches of the loop",
    order_by_losses: "the batches of the loop",
    validated_on_own_rows: "metrics of ReduceLROnPlateau",
    frozen_layer: "what is trained",
    frozen_bias: "what is trained",
    setting_of_a_layer: "a setting of Dropout",
    rate_by_a_history: "a learning rate",
    rate_by_a_history_of_names: "a learning rate",
    rate_by_a_tensor: "a learning rate",
    rate_by_a_tensor_in_place: "a learning rate",
    rate_by_an_array: "a learning rate",
    rate_by_a_length: "a learning rate",
    rate_by_a_number: "a learning rate",
    rate_by_a_librarys_object: "a learning rate",
    rate_by_a_librarys_list: "a learning rate",
    rate_by_a_global_object: "a learning rate",
    rate_by_random_numbers: "a learning rate",
    clipped_by_random_numbers: "max_norm of clip_grad_norm_",
    pruned_by_results: "amount of random_unstructured",
    other_optimizer: r"whether SGD\(\.\.\.\) runs",
    slower_by_a_callback: "a learning rate",
    data_by_a_callback: "the batches of the loop",
    stopped_by_a_callback: "whether Trainer.stop runs",
    best_of_elastic_calls: "whether (Sequential.state_dict|torch.save) runs",
    by_the_clock: "the end of the loop over steps",
    saves_by_the_clock: "whether samestep.save runs",
}


def run(program, num_workers, path):
    if "path" in program.__code__.co_varnames[: program.__code__.co_argcount]:
        return simulate(lambda job: program(job, path), num_workers)
    return simulate(program, num_workers)


@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize("program", WRONG, ids=lambda program: program.__name__)
def test_it_is_named(program, num_workers, tmp_path):
    whose = "this worker's clock" if "clock" in program.__name__ else "the passes of this worker"
    whose = "the rows of this worker" if program is validated_on_own_rows else whose
    with pytest.warns(UserWarning, match=f"computed from {whose} alone: {WRONG[program]} ") as caught:
        outcomes = run(program, num_workers, tmp_path)
    errors = [outcome.text for outcome in outcomes if outcome.error is not None]
    assert all(
        "checksum of the batch's first example" in each for each in errors
    )  # workers compare data, too
    assert {str(each.message).count("line ") for each in caught} == {1}


# ---- right -----------------------------------------------------------------------------------------


class Meter:
    """A running mean for the log."""

    def __init__(self):
        self.total = self.count = 0

    def update(self, value, rows):
        self.total += value * rows
        self.count += rows

    @property
    def mean(self):
        return self.total / max(1, self.count)


def logged(job):
    model, towers, optimizer = made(job)
    losses, seconds = Meter(), Meter()
    best, lines = math.inf, []
    for step in range(3):
        start = time.perf_counter()
        for tower in towers(batch_of(step)):
            loss = loss_of(model, tower.batch)
            losses.update(loss.item(), tower.rows)
            tower.backward(loss)
        towers.average()
        optimizer.step()
        seconds.update(time.perf_counter() - start, 1)
        if job.is_first and step % 2 == 0:
            lines.append(f"{losses.mean:.3f} in {seconds.mean:.1f} s")
        if losses.mean < best:
            best = losses.mean
            lines.append(f"best {best}")


def decided_by_all(job, path):
    model, towers, optimizer = made(job)
    schedule, best, bad = ReduceLROnPlateau(optimizer), math.inf, 0
    for step in range(3):
        kept = {}
        for tower in towers(batch_of(step)):
            loss = loss_of(model, tower.batch)
            kept[tower.index] = loss.detach()
            tower.backward(loss)
        report = towers.average()
        optimizer.step()
        schedule.step(report.loss)
        mean = torch.stack(towers.gather(kept)).mean().item()
        if mean < best:
            best, bad = mean, 0
            samestep.save(path / f"{step}", model=model, towers=towers)
        else:
            bad += 1
        if bad > 3 or report.loss < 0:
            break


def reduced(total):
    if not dist.is_initialized():
        return total
    total = torch.tensor(total)
    dist.all_reduce(total)
    return total.item()


def added_by_collectives(job):
    model, towers, optimizer = made(job)
    best = math.inf
    for epoch in range(2):
        total = torch.tensor(epoch_of(model, towers, optimizer, epoch))
        if job.world_size > 1 and dist.is_initialized():
            dist.all_reduce(total)
        if total.item() < best or reduced(total) < best:
            kept = copy.deepcopy(model.state_dict())
    assert kept


def ends_with_an_error(job):
    model, towers, optimizer = made(job)
    for epoch in range(2):
        total = epoch_of(model, towers, optimizer, epoch)
        if not math.isfinite(total):
            torch.save(model.state_dict(), "nan.pt")
            raise FloatingPointError("the loss is not finite")


def left_by_all(job, path):
    model, towers, optimizer = made(job)
    best, last = math.inf, 0.0
    for step in range(3):
        for tower in towers(batch_of(step)):
            loss = loss_of(model, tower.batch)
            last = loss.item()
            tower.backward(loss)
        report = towers.average()
        if not math.isfinite(report.loss):
            print(last)
            continue
        optimizer.step()
        if time.perf_counter() < 0:
            raise TimeoutError
        if report.loss >= best:
            print(last)
            continue
        best = report.loss
        torch.save(model.state_dict(), path / f"{job.rank}.pt")


def evaluated_by_each(job):
    model, towers, optimizer = made(job)
    best = 0
    x, y, _ = DATA.tensors
    for epoch in range(2):
        epoch_of(model, towers, optimizer, epoch)
        with torch.no_grad():
            correct = (model(x).argmax(1) == y).sum().item()
        if correct >= best:
            best, kept = correct, copy.deepcopy(model.state_dict())
    assert kept


def replayed(job):
    model, towers, optimizer = made(job)
    memory = deque(maxlen=40)
    random.seed(0)
    for step in range(30):
        memory.append((torch.randn(6), random.randrange(3)))
        if len(memory) >= 24 and step % 3 == 0:
            rows, labels = zip(*random.sample(memory, 12), strict=True)
            for tower in towers({"x": torch.stack(rows), "y": torch.tensor(labels)}):
                tower.backward(loss_of(model, tower.batch))
            towers.average()
            optimizer.step()


def settings_beside_results(job):
    model, towers, _ = made(job)
    config = {"lr": 0.1, "steps": 2, "loss": None}
    state = {"epoch": 0}
    more = {"loss": 0.0}
    for epoch in range(2):
        optimizer = SGD(model.parameters(), lr=config["lr"])
        for step in range(config["steps"]):
            for tower in towers(batch_of(step)):
                loss = loss_of(model, tower.batch)
                tower.backward(loss)
            towers.average()
            optimizer.step()
            config["loss"] = loss.item()
            more["loss"] = loss.item()
            state.update(loss=loss.item(), epoch=epoch)
            state.update(more)
            if state["epoch"] > 5:
                return


class Expression:
    """One that makes another one when it is compared, as of a data frame's library."""

    __hash__ = None

    def __eq__(self, other):
        return Expression()

    def __bool__(self):
        raise TypeError("an expression has no truth value")

    def __call__(self, model, number):
        return number


EXPRESSION = Expression()


def calls_an_expression(job):
    model, towers, optimizer = made(job)
    EXPRESSION(model, epoch_of(model, towers, optimizer))


def of_another_name(job):
    called_back(job, "val")


def edited_by_all(job):
    model, towers, optimizer = made(job)
    seen, temperature = torch.zeros(3), torch.ones(())
    for step in range(2):
        noise = torch.empty(21, 6)
        for tower in towers(batch_of(step)):
            seen.add_(torch.bincount(tower.batch["y"], minlength=3))
            noise.resize_(tower.rows, 6).normal_()
            outputs = model(tower.batch["x"] + 0.1 * noise) / temperature
            tower.backward(F.cross_entropy(outputs, tower.batch["y"]))
        report = towers.average()
        for p in model.parameters():
            p.grad.mul_(1 / (1 + report.loss))
        optimizer.step()
        temperature.mul_(0.9).add_(0.1 * report.loss)
        seen.zero_()
        with torch.no_grad():
            nn.init.zeros_(model[2].bias)
            model[2].weight.sub_(model[2].weight.mean())


def of_the_same_name(job):
    model, towers, optimizer = made(job)
    mean = 0.1
    for step in range(2):
        sums = []
        for tower in towers(batch_of(step)):
            loss = loss_of(model, tower.batch)
            sums.append([loss.item(), 1.0])
            tower.backward(mean * loss)
        towers.average()
        optimizer.step()
        assert all(count == 1.0 for mean, count in sums if mean > 0)
        for group in optimizer.param_groups:
            group["lr"] = mean


def losses_that_all_gather(job):
    model, towers, optimizer = made(job)
    last = {}
    for epoch in range(3):
        kept = []
        for tower in towers(examples_of(epoch)):
            losses, numbers = losses_of(model, tower.batch), tower.batch["number"].tolist()
            weights = torch.tensor([last.get(number, 1.0) for number in numbers])
            tower.backward((losses * weights).mean())
            kept.append(dict(zip(numbers, losses.tolist(), strict=True)))
        towers.average()
        optimizer.step()
        for each in towers.gather(kept):
            last.update(each)


def tables_in_passes(job):
    """Of a tower's labels, of its length, of its layers; of its number, which it keeps; and for the log."""
    model, towers, optimizer = made(job)
    ramps, outputs, own, confusion = {}, {}, {}, np.zeros((3, 3))
    for epoch in range(3):
        for tower in towers(examples_of(epoch)):
            x, y = tower.batch["x"], tower.batch["y"]
            if (ramp := ramps.get(len(y))) is None:
                ramps[len(y)] = ramp = torch.linspace(0, 1, len(y))
            for number, layer in enumerate(model):
                x = layer(x)
                outputs[number] = x
            by_label = {}
            losses = F.cross_entropy(x, y, reduction="none")
            for label, loss in zip(y.tolist(), losses, strict=True):
                by_label[label] = by_label.get(label, 0) + loss
            shown = torch.zeros(len(y), 3)
            shown[y > 0] = x[y > 0]
            weight = own.get(tower.index, 1.0)
            total = sum(by_label.values()) / len(y) + shown.square().mean() + outputs[0].square().mean()
            tower.backward(total + (ramp * losses).mean() + weight * losses.mean())
            own[tower.index] = 1.0
            for label, guess in zip(y.tolist(), x.argmax(1).tolist(), strict=True):
                confusion[label, guess] += 1
        towers.average()
        optimizer.step()


class Bank(nn.Module):
    """Keeps its outputs by examples, in a buffer with a policy."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("bank", torch.zeros(24, 3))

    def forward(self, x, number):
        z, old = self.layer(x), self.bank[number].clone()
        self.bank[number] = z.detach()
        return z, old


class Annealed(nn.Module):
    """Counts steps, and averages its outputs, in buffers with a policy, and computes with them as numbers."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)
        for name in ("added", "counted", "replaced", "mean"):
            self.register_buffer(name, torch.ones(()))

    def forward(self, x):
        z = self.layer(x) / (self.added.item() + self.counted.item() + self.replaced.item())
        self.added.add_(1)
        self.counted += 1
        self.replaced = self.replaced + 1
        self.mean.mul_(0.9).add_(0.1 * z.detach().abs().mean())
        return z / self.mean.item()


class Scaled(NamedTuple):
    """An object without attributes of its own, whose class has a tensor."""

    model: nn.Module

    def __call__(self, x):
        return self.model(x) * self.factor


Scaled.factor = torch.ones(())


def of_a_tuple_with_a_tensor(job):
    model, towers, optimizer = made(job)
    scaled = Scaled(model)
    for step in range(2):
        for tower in towers(batch_of(step)):
            tower.backward(F.cross_entropy(scaled(tower.batch["x"]) * scaled.factor, tower.batch["y"]))
        towers.average()
        optimizer.step()


def annealed_by_buffers(job):
    torch.manual_seed(0)
    model = Annealed()
    towers = Towers(model, 6, job=job, buffers={"*": "mean"})
    optimizer = SGD(model.parameters(), lr=0.1)
    for step in range(33):
        for tower in towers(batch_of(step)):
            tower.backward(loss_of(model, tower.batch))
        towers.average()
        number = model.added.item() + model.counted.item() + model.replaced.item()
        optimizer.param_groups[0]["lr"] = 0.1 / (number + model.mean.item())
        optimizer.step()


def in_a_buffer(job):
    torch.manual_seed(0)
    model = Bank()
    towers = Towers(model, 6, job=job, buffers={"bank": "mean"})
    for epoch in range(2):
        for tower in towers(examples_of(epoch)):
            z, old = model(tower.batch["x"], tower.batch["number"])
            tower.backward(F.cross_entropy(z, tower.batch["y"]) + F.mse_loss(z, old))
        towers.average()


def called_back_with_reports(job, path):
    train(job, path / "slower", lambda kept, optimizer: Slower(optimizer, lambda report: report.loss))
    train(job, path / "patient", lambda kept, optimizer: Patience())


def data_and_layers_by_reports(job):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.1))
    towers, optimizer = Towers(model, 6, job=job), SGD(model.parameters(), lr=0.1)
    data, seen = Levels(), 0
    loader = samestep.TowerLoader(data, 12, towers)
    for _epoch in range(2):
        for batch in loader:
            seen += sum(len(rows["y"]) for rows in batch.slices.values())
            for tower in towers(batch):
                loss = loss_of(model, tower.batch)
                tower.backward(loss)
            report = towers.average()
            optimizer.step()
        model.last = model[0].last = loss.item()
        data.level, model[1].p = report.loss, min(0.5, report.loss / 9)
        if report.loss > 1e6:
            model[0].requires_grad_(False)


def drawn_of_the_step(job):
    """By a generator that each pass seeds by the step; and a batch that is drawn before the passes."""
    model, towers, optimizer = made(job)
    for step in range(2):
        torch.manual_seed(step)
        for tower in towers({"x": torch.randn(21, 6), "y": torch.randint(3, (21,))}):
            drawn = torch.rand(1, generator=torch.Generator().manual_seed(step))
            tower.backward(loss_of(model, tower.batch))
        towers.average()
        optimizer.param_groups[0]["lr"] = 0.1 + drawn.item()
        optimizer.step()


def counted_for_the_log(job):
    model, towers, optimizer = made(job)
    passes, seen, losses = torch.zeros(1), 0, []
    for step in range(2):
        for tower in towers(batch_of(step)):
            loss = loss_of(model, tower.batch)
            tower.backward(loss)
            passes += 1
            seen = seen + tower.rows
            losses.append(loss.item() + random.random())
        towers.average()
        optimizer.step()
    model.log = passes.item(), seen, np.mean(losses)


def set_after_the_passes(job):
    """An entry of an array and a tensor, in a function, for which passes have had something else."""
    model, towers, optimizer = made(job)
    kept, tensor = np.zeros(1), torch.zeros(())

    def take_step(step):
        for tower in towers(batch_of(step)):
            loss = loss_of(model, tower.batch)
            kept[0] = kept[0] + loss.item()
            tensor.copy_(tensor + loss.item())
            tower.backward(loss)
        report = towers.average()
        kept[0] = report.loss
        tensor.copy_(torch.tensor(report.loss))
        optimizer.param_groups[0]["lr"] = 0.1 + float(kept[0]) + float(tensor)
        optimizer.step()

    for step in range(2):
        take_step(step)


class Rows:
    """As of a library of tensors by name."""

    def __init__(self, x, batch_size):
        self.x, self.batch_size = x, batch_size

    @classmethod
    def _of(cls, x, batch_size):
        return cls(x, batch_size=batch_size)

    def doubled(self):
        return self._of(2 * self.x, batch_size=len(self.x))


def made_by_class_methods(job):
    model, towers, optimizer = made(job)
    for step in range(2):
        for tower in towers(batch_of(step)):
            rows = Rows(tower.batch["x"], batch_size=len(tower.batch["x"])).doubled()
            tower.backward(F.cross_entropy(model(rows.x), tower.batch["y"]))
        towers.average()
        optimizer.step()


RIGHT = [
    set_after_the_passes,
    made_by_class_methods,
    annealed_by_buffers,
    of_a_tuple_with_a_tensor,
    drawn_of_the_step,
    counted_for_the_log,
    data_and_layers_by_reports,
    called_back_with_reports,
    losses_that_all_gather,
    tables_in_passes,
    in_a_buffer,
    of_another_name,
    logged,
    decided_by_all,
    added_by_collectives,
    ends_with_an_error,
    left_by_all,
    evaluated_by_each,
    replayed,
    settings_beside_results,
    calls_an_expression,
    edited_by_all,
    of_the_same_name,
]


@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize("program", RIGHT, ids=lambda program: program.__name__)
def test_what_all_workers_decide_alike_is_not(program, num_workers, tmp_path):
    outcomes = run(program, num_workers, tmp_path)
    assert [outcome.error for outcome in outcomes] == [None] * num_workers
