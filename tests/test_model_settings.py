"""What a model is set to beside its tensors: a warning where a checkpoint's run had set it otherwise."""

import warnings

import pytest
import torch
from torch import nn

import samestep
from samestep.errors import DataError

from .simulation import values
from .test_trainer import trainer_of

pytestmark = pytest.mark.sampled


class Net(nn.Module):
    """Has a dropout, a batch norm, and a temperature, which is a plain number."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(6, 2)
        self.temperature = 1.0
        self.calls = 0

    def forward(self, batch):
        self.calls = len(batch)
        return self.last(self.drop(self.norm(self.first(batch)))) / self.temperature


def setup(job, compiled=False):
    torch.manual_seed(0)
    model = Net()
    trained = torch.compile(model, backend="eager") if compiled else model
    towers = samestep.Towers(trained, 5, job=job)
    return model, trained, towers, torch.optim.SGD(model.parameters(), lr=0.1)


def step(model, towers, optimizer):
    batch = torch.randn(15, 4, generator=torch.Generator().manual_seed(towers.step))
    for tower in towers(batch):
        tower.backward(model(tower.batch).square().mean())
    towers.average()
    optimizer.step()


def freeze(model):
    model.first.requires_grad_(requires_grad=False)
    model.first.weight.grad = model.first.bias.grad = None


def run(path, change, change_at_load, *, compiled=False, num_workers=1):
    """Save after three steps, of which the last two follow a change; return what is warned after a load."""

    def work(job):
        model, trained, towers, optimizer = setup(job)
        step(trained, towers, optimizer)
        change(model)
        for _ in range(2):
            step(trained, towers, optimizer)
        samestep.save(path, model=trained, towers=towers, optimizer=optimizer)
        model, trained, towers, optimizer = setup(job, compiled)
        samestep.load(path, model=trained, towers=towers, optimizer=optimizer)
        change_at_load(model)
        for _ in range(2):
            step(trained, towers, optimizer)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        values(work, num_workers)
    return [str(each.message) for each in caught]


def unchanged(model):
    pass


CHANGES = {
    "first.weight frozen, now trained; first.bias frozen, now trained": freeze,
    "layer norm in eval mode, now in training mode": lambda model: model.norm.eval(),
    "drop.p = 0.1, now 0.5": lambda model: setattr(model.drop, "p", 0.1),
    "temperature = 0.9, now 1.0": lambda model: setattr(model, "temperature", 0.9),
}
WAYS = [(3, False), (1, True), (3, True), (1, False)]
"""How many workers train it, and whether it is compiled."""


@pytest.mark.long
@pytest.mark.parametrize(("num_workers", "compiled"), WAYS)
@pytest.mark.parametrize("what", CHANGES)
def test_what_loading_does_not_restore_is_named_once(what, compiled, num_workers, tmp_path):
    change = CHANGES[what]
    found = run(tmp_path / "saved", change, unchanged, compiled=compiled, num_workers=num_workers)
    assert found == [
        f"step 3: the checkpoint was saved with {what}: loading does not restore this, and an "
        "uninterrupted run would have continued with it; set it again before the first step"
    ]


@pytest.mark.long
@pytest.mark.parametrize("change", CHANGES.values())
def test_what_the_program_sets_again_gives_no_warning(change, tmp_path):
    assert run(tmp_path / "saved", change, change) == []


@pytest.mark.long
def test_what_the_program_sets_otherwise_is_its_own_choice(tmp_path):
    def other(model):
        model.drop.p, model.temperature = 0.2, 0.8
        model.norm.eval()
        model.last.requires_grad_(requires_grad=False)

    def change(model):
        model.drop.p, model.temperature = 0.1, 0.9

    assert run(tmp_path / "saved", change, other) == []


def test_many_are_counted(tmp_path):
    def change(model):
        for each in CHANGES.values():
            each(model)

    (found,) = run(tmp_path / "saved", change, unchanged)
    assert " and 1 more: loading does not restore this" in found


def test_a_checkpoint_of_no_step_has_nothing_to_compare(tmp_path):
    model, _, towers, _ = setup(samestep.init("cpu"))
    model.eval()
    samestep.save(tmp_path / "saved", model=model, towers=towers)
    model, trained, towers, optimizer = setup(samestep.init("cpu"))
    samestep.load(tmp_path / "saved", model=trained, towers=towers)
    step(trained, towers, optimizer)


@pytest.mark.long
def test_settings_are_kept_through_a_load_without_a_step(tmp_path):
    def again(model):
        towers, loaded = samestep.Towers(model, 5), model
        samestep.load(tmp_path / "saved", model=loaded, towers=towers)
        samestep.save(tmp_path / "again", model=loaded, towers=towers)

    run(tmp_path / "saved", CHANGES["temperature = 0.9, now 1.0"], unchanged)
    model, _, _, _ = setup(samestep.init("cpu"))
    again(model)
    model, trained, towers, optimizer = setup(samestep.init("cpu"))
    samestep.load(tmp_path / "again", model=trained, towers=towers)
    with pytest.warns(UserWarning, match=r"temperature = 0\.9, now 1\.0"):
        step(trained, towers, optimizer)


@pytest.mark.parametrize("saved", [3, {"p": [1]}, {"p": "x" * 999}, {1: 2}])
def test_settings_of_no_checkpoint_are_refused(saved):
    _, _, towers, _ = setup(samestep.init("cpu"))
    with pytest.raises(DataError, match=r"^invalid settings of the model: .{1,80}$"):
        towers._expect(saved)


class Freezing(samestep.Callback):
    """Freezes the first layer at step 4, and only then."""

    def after_step(self, trainer, report):
        if trainer.step.towers.step == 4:
            trainer.model[0].requires_grad_(requires_grad=False)


@pytest.mark.long
def test_a_layer_that_a_callback_froze_before_an_interruption_is_named(tmp_path):
    def train(job, steps):
        return trainer_of(job, tmp_path / "run", steps=steps, callbacks=[Freezing()]).run()

    values(lambda job: train(job, 8), 3)
    with pytest.warns(UserWarning, match=r"^step 8: the checkpoint was saved with 0\.weight frozen, now"):
        values(lambda job: train(job, 12), 3)
