"""The model changes between steps: the right gradient, and the same bits for any number of workers."""

import copy
import functools
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import samestep
from samestep import Step, TowerLoader, Towers
from samestep.errors import ConfigError, DisagreementError, UsageError
from samestep.summation.placement import Placement
from samestep.towers.replica import Kind

from . import nets
from .cases import mostly_long
from .simulation import simulate, values

NUM_TOWERS = 7
WORKERS = (1, 2, 3, 4)
MOSTLY_WORKERS = mostly_long([((1, 3),), (WORKERS,)], 1)
CUTS = {  # other ones at every step
    1: [(0, 7)] * 4,
    2: [(0, 1, 7), (0, 6, 7), (0, 4, 7), (0, 3, 7)],
    3: [(0, 1, 2, 7), (0, 5, 6, 7), (0, 1, 6, 7), (0, 2, 5, 7)],
    4: [(0, 1, 2, 3, 7), (0, 4, 5, 6, 7), (0, 2, 3, 6, 7), (0, 1, 4, 5, 7)],
}


def make():
    torch.manual_seed(4)
    return nn.Sequential(
        nn.Linear(5, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Linear(9, 6), nn.Tanh(), nn.Linear(6, 3)
    )


def batch_of(step, rows=19):
    generator = torch.Generator().manual_seed(step)
    return {
        "x": torch.randn(rows, 5, generator=generator),
        "y": torch.randint(3, (rows,), generator=generator),
    }


def loss_of(model, batch):
    dtype = next(model.parameters()).dtype
    return F.cross_entropy(model(batch["x"].to(dtype)), batch["y"])


def true_gradients(model, batch):
    """The mean over all rows in float64: batch norm sees a tower's rows, as `even_ranges` cuts them."""
    model = copy.deepcopy(model).double()
    total = torch.zeros((), dtype=torch.float64)
    for rows in torch.arange(len(batch["x"])).tensor_split(NUM_TOWERS):
        part = {name: tensor[rows] for name, tensor in batch.items()}
        total = total + loss_of(model, part) * len(rows)
    model.zero_grad()
    (total / len(batch["x"])).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def take_step(towers, step, rows=19):
    """Take one step of plain SGD, after comparing the gradients with the truth."""
    model, batch = towers.model, batch_of(step, rows)
    turns = towers(batch)
    expected = true_gradients(model, batch)  # of the weights that all workers have come to
    for tower in turns:
        tower.backward(loss_of(model, tower.batch))
    towers.average()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            scale = expected[name].abs().max()
            assert (parameter.grad - expected[name]).abs().max() <= 1e-5 * scale + 1e-6, name
            assert parameter.grad.dtype == parameter.dtype
            with torch.no_grad():
                parameter -= 0.1 * parameter.grad.to(parameter.dtype)


def other_cuts(model, job, towers, step):
    towers.placement = Placement(CUTS[job.world_size][step])


def thaw(model, job, towers, step):
    model[3].requires_grad_(step % 2 == 0)
    model[0].bias.requires_grad = step < 2


def add(model, job, towers, step):
    if step == 1:
        torch.manual_seed(job.rank)  # another on each worker: all take over worker 0's
        model.append(nn.Linear(3, 3))
        model.insert(2, nn.BatchNorm1d(9))
    if step == 2:
        model[0] = nn.utils.parametrizations.weight_norm(model[0])
    if step == 3:
        del model[-1]


def put_others_in_the_same_places(model, job, towers, step):
    torch.manual_seed(10 * step + job.rank)
    if step == 1:
        model[5] = nn.Linear(6, 3)
    if step == 2:
        model.insert(3, nn.Linear(9, 9))
        model[4] = nn.Linear(9, 6).requires_grad_(False)
    if step == 3:
        model[4] = nn.Linear(9, 6)
        model[6].register_buffer("scale", torch.rand(3) + 1)
        model[6].register_forward_hook(lambda module, args, output: output * module.scale.to(output.dtype))


def cast(model, job, towers, step):
    {0: model.float, 1: model.double, 2: model.double, 3: model.float}[step]()


def replace(model, job, towers, step):
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    for module in model:
        if "weight" in module._parameters and isinstance(module, nn.Linear) and step == 2:
            module.weight = nn.Parameter(module.weight.detach().t().contiguous().t())


def freeze_norms(model, job, towers, step):
    model[1].train(step % 2 == 0)


def everything(model, job, towers, step):
    for change in (other_cuts, add, thaw, cast, replace):
        change(model, job, towers, step)


CHANGES = {
    change.__name__: change
    for change in (
        everything,
        put_others_in_the_same_places,
        freeze_norms,
        other_cuts,
        thaw,
        add,
        cast,
        replace,
    )
}


def train(job, change):
    model = make()
    towers = Towers(model, NUM_TOWERS, job=job, bucket_bytes=200, noise_every=2)
    for step in range(4):
        change(model, job, towers, step)
        take_step(towers, step)
    return samestep.digest(model)


@pytest.mark.sampled
@pytest.mark.parametrize("all_num_workers", MOSTLY_WORKERS, ids=str)
@pytest.mark.parametrize("name", mostly_long(CHANGES, 3))
def test_the_gradient_is_right_and_the_bits_are_the_same_for_any_workers(name, all_num_workers):
    digests = {
        value for num in all_num_workers for value in values(lambda job: train(job, CHANGES[name]), num, num)
    }
    assert len(digests) == 1


def test_frozen_parameters_keep_no_gradient_and_no_hook():
    model = make()
    towers = Towers(model, NUM_TOWERS)
    take_step(towers, 0)
    model[0].requires_grad_(False)
    take_step(towers, 1)
    assert [p.grad is None for p in model[0].parameters()] == [True, True]
    assert towers._replica.parameters == [p for p in model.parameters() if p.requires_grad]


@pytest.mark.long
def test_a_buffer_may_be_where_a_loss_begins():
    """As in libraries that add up regularizers; it is trained by nobody."""

    def work(job):
        torch.manual_seed(0)
        model = nets.net()
        model.register_buffer("zero", torch.tensor(0.0), persistent=False)
        towers = Towers(model, 7, job=job)
        for tower in towers(nets.batch_of(0, 21)):
            loss = model.zero
            loss.requires_grad_()
            tower.backward(loss + F.cross_entropy(model(tower.batch["x"]), tower.batch["y"]))
        towers.average()
        return samestep.digest(model), [parameter.grad.sum().item() for parameter in model.parameters()]

    first, *others = (values(work, num_workers)[0] for num_workers in (1, 2, 3))
    assert others == [first, first]


@pytest.mark.long
def test_a_layer_may_be_frozen_for_a_part_of_each_pass():
    """As a discriminator is."""

    def work(job):
        torch.manual_seed(0)
        model = nets.net()
        towers = Towers(model, 7, job=job)
        for tower in towers(nets.batch_of(0, 21)):
            x, y = tower.batch["x"], tower.batch["y"]
            model[0].requires_grad_(False)
            loss = F.cross_entropy(model(x), y)
            model[0].requires_grad_(True)
            tower.backward(loss + model(x).square().mean())
        towers.average()
        return samestep.digest(model), [parameter.grad for parameter in model.parameters()]

    torch.manual_seed(0)
    model, batch = nets.net().double(), nets.batch_of(0, 21)
    x, y = batch["x"].double(), batch["y"]
    frozen = torch.func.functional_call(
        model, {name: each.detach() for name, each in model[0].named_parameters("0")}, (x,)
    )
    (F.cross_entropy(frozen, y) + model(x).square().mean()).backward()
    found = [outcome for num_workers in (1, 2, 3) for outcome in values(work, num_workers)]
    assert len({digest for digest, _ in found}) == 1
    for _, gradients in found:
        for gradient, parameter in zip(gradients, model.parameters(), strict=True):
            torch.testing.assert_close(gradient.double(), parameter.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_a_change_that_was_there_before_is_not_looked_at_again():
    """Layers that are frozen and thawed at each step, as in a GAN: a step that looks takes much longer."""
    generator = random.Random(0)
    model = make()
    towers = Towers(model, NUM_TOWERS)

    def train_part(first, *, trains_rest):
        model[0].requires_grad_(not first)
        model[-1].requires_grad_(trains_rest)
        model[1].train(first)

    def take_steps():
        looks = []
        for step in range(9):
            train_part(step % 2 == 0, trains_rest=step > 5)
            for tower in towers(batch_of(step)):
                tower.backward(loss_of(model, tower.batch) * generator.random())
            towers.average()
            looks.append(towers._replica.watch.looks)
        return looks

    with pytest.warns(UserWarning, match="drew from generator") as told:
        looks = take_steps()
    assert len(told) == 1
    assert looks == [True, True, False, False, False, False, True, False, False]


def test_a_hash_of_all_weights_is_the_same_in_any_mode():
    """When a run ends, and where a checkpoint is saved, some workers may have met others in another mode."""
    towers = Towers(make(), NUM_TOWERS)
    in_training = list(towers._replica.hashes({}).items())
    towers.model.eval()
    towers._replica.plan(Kind(towers.placement))
    assert list(towers._replica.hashes({}).items()) == in_training


@pytest.mark.parametrize("num_workers", mostly_long([3, 2], 1))
def test_hooks_of_an_earlier_plan_are_removed(num_workers):
    def work(job):
        model = make()
        towers = Towers(model, NUM_TOWERS, job=job)
        for step in range(4):
            other_cuts(model, job, towers, step)
            take_step(towers, step)
        return max(len(p._post_accumulate_grad_hooks) for p in model.parameters())

    if num_workers in CUTS:
        assert set(values(work, num_workers)) == {1}


@pytest.mark.long
def test_no_message_says_that_the_plan_is_the_old_one():
    """Steps of a model that stays as it is take as many posts as ever; the first of another plan more."""

    def work(job):
        model = make()
        towers = Towers(model, NUM_TOWERS, job=job, noise_every=0)
        events = []
        for step in range(5):
            if step == 3:
                model[0].requires_grad_(False)
            before = job.transport.num_events
            take_step(towers, step, rows=21)  # of equal towers, whose losses are compared by a hash
            events.append(job.transport.num_events - before)
        return events

    for events in values(work, 3):
        assert events[0] == events[1] == events[2] == events[4] < events[3]


@pytest.mark.long
def test_flags_are_asked_for_once_a_step_even_if_the_plan_changes():
    def work(job):
        model = make()
        towers = Towers(model, NUM_TOWERS, job=job)
        asked, found = [], []
        for step in range(3):
            model[0].requires_grad_(step != 1)
            flags = functools.partial(asked.append, step)
            for tower in towers(batch_of(step), flags=lambda flags=flags: flags() or 1 << job.rank):
                tower.backward(loss_of(model, tower.batch))
            found.append(towers.average().flags)
        return asked, found

    assert values(work, 3) == [([0, 1, 2], [7, 7, 7])] * 3


# ---- workers that come apart -------------------------------------------------------------------------


SEEDS = pytest.mark.parametrize("seeds", mostly_long([range(2), range(2, 5)], 1), ids=str)


def fails_on_one(change, seeds):
    def work(job):
        model = make()
        towers = Towers(model, NUM_TOWERS, job=job, bucket_bytes=200)
        for step in range(3):
            if step == 1 and job.rank == 1:
                change(model, towers)
            take_step(towers, step)

    return [outcome.text for seed in seeds for outcome in simulate(work, 3, seed)]


@pytest.mark.long
@SEEDS
def test_a_layer_frozen_on_one_worker_stops_all_in_that_step(seeds):
    for text in fails_on_one(lambda model, towers: model[3].requires_grad_(False), seeds):
        assert text.startswith("DisagreementError: step 1: worker 1 has trained parameter 3.weight = nothing")


@pytest.mark.long
@SEEDS
def test_a_model_cast_on_one_worker_stops_all_in_that_step(seeds):
    for text in fails_on_one(lambda model, towers: model.double(), seeds):
        assert text.startswith("DisagreementError: step 1: worker 1 has trained parameter 0.weight = (9, 5)")
        assert "float64, the others have (9, 5)" in text


@pytest.mark.long
@SEEDS
def test_other_cuts_on_one_worker_stop_all_in_that_step(seeds):
    def change(model, towers):
        towers.placement = Placement((0, 1, 2, 7))

    for text in fails_on_one(change, seeds):
        named = "worker 1 has placement = (0, 1, 2, 7), the others have (0, 3, 5, 7)"
        assert text == f"DisagreementError: step 1: {named}"


@pytest.mark.long
@SEEDS
def test_a_layer_in_eval_mode_on_one_worker_stops_all_in_that_step(seeds):
    for text in fails_on_one(lambda model, towers: model[1].eval(), seeds):
        assert text.startswith(
            "DisagreementError: step 1: worker 1 has mode of 1.running_mean = eval, the others"
        )


EDITS = {
    "layer 6 = ReLU, the others have nothing": lambda model: model.append(nn.ReLU()),
    "layer 2 = GELU, the others have Tanh": lambda model: model.__setitem__(2, nn.GELU()),
    "new tensor 5.weight = (3, 6) torch.float32, the others have nothing": (
        lambda model: model.__setitem__(5, nn.Linear(6, 3))
    ),
    "buffer seen = (2,) torch.float32, the others have nothing": (
        lambda model: model.register_buffer("seen", torch.zeros(2))
    ),
    "layer 4 = Linear, the others have Tanh": lambda model: model.__delitem__(4),
    "layer 3 = ParametrizedLinear, the others have Linear": lambda model: weight_norm(model[3]),
}


@pytest.mark.sampled
@SEEDS
@pytest.mark.parametrize("named", mostly_long(EDITS, 4))
def test_an_edit_on_one_worker_stops_all_in_that_step(named, seeds):
    for text in fails_on_one(lambda model, towers: EDITS[named](model), seeds):
        assert text == f"DisagreementError: step 1: worker 1 has {named}"


@pytest.mark.long
@SEEDS
def test_a_layer_of_no_parameters_in_place_of_one_alike_on_one_worker_changes_nothing(seeds):
    texts = fails_on_one(lambda model, towers: model.__setitem__(2, nn.Tanh()), seeds)
    assert texts == [""] * 3 * len(seeds)


@pytest.mark.long
@pytest.mark.parametrize("num_workers", [3, 1, 2, 4])
def test_new_layers_are_shared_though_workers_have_agreed_again(num_workers):
    """As where one is lost, after the change, and before the others' first message."""

    def work(job):
        model = make()
        towers = Towers(model, NUM_TOWERS, job=job)
        take_step(towers, 0)
        torch.manual_seed(100 + job.rank)
        model[5] = nn.Linear(6, 3)
        towers._agree_again()
        take_step(towers, 1)
        take_step(towers, 2)
        return samestep.digest(model)

    assert len(set(values(work, num_workers))) == 1


@SEEDS
def test_a_model_that_cannot_be_trained_on_one_worker_stops_all_in_that_step(seeds):
    def work(job):
        model = make()
        towers = Towers(model, NUM_TOWERS, job=job)
        take_step(towers, 0)
        model.requires_grad_(job.rank != 1)
        for tower in towers(batch_of(1)):
            tower.backward(loss_of(model, tower.batch))
        towers.average()

    texts = [outcome.text for seed in seeds for outcome in simulate(work, 3, seed)]
    reason = "Sequential has no parameter that requires grad: there is nothing to train"
    expected = f"DisagreementError: step 1: worker 1 failed: {reason}"
    assert set(texts) == {f"ConfigError: {reason}", expected}


@pytest.mark.long
@SEEDS
@pytest.mark.parametrize("kind", ["counts", "whole batch"])
def test_another_kind_of_step_on_one_worker_stops_all_in_that_step(kind, seeds):
    def work(job):
        model = make()
        towers = Towers(model, NUM_TOWERS, job=job, bucket_bytes=200)
        take_step(towers, 0)
        if job.rank != 1:
            return take_step(towers, 1)
        if kind == "counts":
            return list(towers(batch_of(1), counts={"rows": lambda part: len(part["x"])}))
        return towers.whole_batch(batch_of(1), lambda part: model(part["x"]), lambda out, _: out.mean())

    for seed in seeds:
        for outcome in simulate(work, 3, seed):
            assert "step 1: worker 1 has loss = " in outcome.text


@pytest.mark.long
@pytest.mark.parametrize("all_num_workers", MOSTLY_WORKERS, ids=str)
def test_kinds_of_steps_may_alternate(all_num_workers):
    def work(job):
        model = make()
        towers = Towers(model, NUM_TOWERS, job=job, bucket_bytes=200)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(6):
            batch = batch_of(step)
            if step % 3 == 0:
                towers.whole_batch(batch, lambda part: model(part["x"]), lambda out, _: out.square().mean())
            for tower in towers(batch, counts={"a": lambda part: len(part["x"])}) if step % 3 == 1 else ():
                tower.backward({"a": loss_of(model, tower.batch) * tower.rows})
            for tower in towers(batch) if step % 3 == 2 else ():
                tower.backward(loss_of(model, tower.batch))
            towers.average()
            optimizer.step()
        return samestep.digest(model)

    assert len({value for num in all_num_workers for value in values(work, num)}) == 1


# ---- the loader and checkpoints ----------------------------------------------------------------------


class Numbers:
    def __len__(self):
        return 34

    def __getitem__(self, index):
        return {"x": torch.full((5,), index / 10) + torch.randn(5), "y": index % 3}


@pytest.mark.long
@pytest.mark.parametrize("num_workers", mostly_long([3, 1, 2, 4], 1))
def test_a_loader_reads_its_rows_under_the_placement_of_their_step(num_workers):
    def work(job):
        model = make()
        towers = Towers(model, NUM_TOWERS, job=job)
        step = Step(towers, loss_of, torch.optim.SGD(model.parameters(), lr=0.1))
        loader = TowerLoader(Numbers(), 20, towers, seed=3)
        for _ in range(2):
            for batch in loader:
                step(batch)
                other_cuts(model, job, towers, towers.step % 4)
        return samestep.digest(model)

    assert set(values(work, num_workers)) == set(values(work, 1))


@pytest.mark.long
def test_state_dicts_go_on_on_other_placements():
    towers = Towers(make(), NUM_TOWERS, seed=5, noise_every=1)
    take_step(towers, 0)
    state = towers.state_dict()
    assert state["step"] == 1
    other = Towers(copy.deepcopy(towers.model), NUM_TOWERS, seed=5)
    other.load_state_dict(state)
    assert (other.step, other.noise.value) == (1, towers.noise.value)
    with pytest.raises(ConfigError, match="the state of towers is from a run with seed = 5, not 0"):
        Towers(make(), NUM_TOWERS).load_state_dict(state)
    with pytest.raises(ConfigError, match="the state of towers is from a run with towers = 7, not 3"):
        Towers(make(), 3, seed=5).load_state_dict(state)


def test_placements_that_do_not_fit():
    towers = Towers(make(), NUM_TOWERS)
    with pytest.raises(ConfigError, match="placement has 8 towers on 1 workers: expected 7 on 1"):
        towers.placement = Placement.even(8, 1)
    with pytest.raises(ConfigError, match=r"placement = \(0, 7\): expected 'even', 'auto', or a samestep"):
        towers.placement = (0, 7)
    next(towers(batch_of(0)))
    with pytest.raises(UsageError, match="cannot set placement in step 0: call average"):
        towers.placement = Placement.even(7, 1)


def test_workers_with_other_settings_are_named():
    def work(job):
        return Towers(make(), NUM_TOWERS, job=job, seed=int(job.rank == 2))

    for outcome in simulate(work, 3):
        assert isinstance(outcome.error, DisagreementError)
        assert outcome.text == "DisagreementError: Towers: worker 2 has seed = 1, the others have 0"


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda layer: [layer], "list of modules: make it an nn.ModuleList"),
        (lambda layer: (layer, layer), "tuple of modules: make it an nn.ModuleList"),
        (lambda layer: {"a": layer}, "dict of modules: make it an nn.ModuleDict"),
    ],
)
def test_layers_in_a_plain_list_are_named_where_there_is_nothing_else_to_train(make, what):
    model = torch.nn.Sequential(torch.nn.ReLU())
    model[0].layers = make(torch.nn.Linear(2, 2))
    with pytest.raises(ConfigError, match=f"nothing to train; 0.layers is a {what}"):
        Towers(model, 2)
