"""Loops with `Elastic`, which continue after losses; `tests/takeovers.py` runs longer programs."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import samestep
from samestep.errors import ConfigError, DataError, DisagreementError, LostWorkerError, UsageError

from .cases import mostly_long
from .simulation import Faults, Killed, World, values
from .town import Town, check_outcomes


def made(job, *names):
    """Return the state for `Elastic`, and a (model, towers, optimizer) for each name."""
    torch.manual_seed(0)
    models = [nn.Linear(2, 1) for _ in names]
    all_towers = [samestep.Towers(model, 3, job=job) for model in models]
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.1) for model in models]
    state = {"model": models[0], "towers": all_towers[0], "optimizer": optimizers[0]}
    for name, *rest in list(zip(names, models, all_towers, optimizers, strict=True))[1:]:
        state |= {f"{name} {n}": each for n, each in enumerate(rest)}
    return state, list(zip(models, all_towers, optimizers, strict=True))


def take_step(model, towers, optimizer):
    for tower in towers(torch.full((6, 2), 1.0 + towers.step)):
        tower.backward(model(tower.batch).square().mean())
    report = towers.average()
    optimizer.step()
    return report.loss


@pytest.mark.sampled(50)
@pytest.mark.parametrize("seed", range(6))
def test_two_models_with_towers_of_their_own(seed):
    def work(job):
        state, parts = made(job, "one", "two")
        with samestep.Elastic(**state) as elastic:
            while parts[0][1].step < 4:
                for number, part in enumerate(parts):
                    elastic(lambda part=part: take_step(*part)) if number else elastic(take_step, *part)
        return [samestep.digest(model) for model, _, _ in parts]

    check_outcomes(Town(3, seed, Faults(killed={seed % 3: 10 + 3 * seed}), arrivals=[seed * 50]), work)


def test_towers_that_are_not_passed_to_elastic_are_an_error():
    def work(job):
        state, parts = made(job, "one", "two")
        del state["two 1"]
        with samestep.Elastic(**state) as elastic:
            for part in parts * 9:
                elastic(take_step, *part)

    outcomes = Town(3, 0, Faults(killed={0: 30})).run(work)
    for outcome in outcomes[1:]:
        assert isinstance(outcome.error, UsageError), outcome.text
        assert "for 3 workers, and the job has 2 now: pass them to samestep.Elastic, too" in outcome.text


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:step 4, tower .. its loss depends on mean of kept")  # also a warning
def test_state_kept_in_passes_is_found_once_the_remaining_workers_have_several_towers():
    """On three workers each tower has its own mean; on two, two towers share one."""

    def work(job):
        state, [(model, towers, optimizer)] = made(job, "one")
        kept = {}

        def take_step():
            for tower in towers(torch.full((6, 2), 1.0 + towers.step)):
                values = model(tower.batch) - kept.get("mean", 0)
                kept["mean"] = values.detach().mean()
                tower.backward(values.square().mean())
            towers.average()
            optimizer.step()

        with samestep.Elastic(**state) as elastic:
            while towers.step < 9:
                elastic(take_step)

    outcomes = Town(3, 0, Faults(killed={0: 20})).run(work)
    for outcome in outcomes[1:]:
        assert isinstance(outcome.error, samestep.Error), outcome.text
        assert "its loss depends on rows or random numbers of tower" in outcome.text


class Holder:
    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.state_dict, self.load_state_dict = optimizer.state_dict, optimizer.load_state_dict


@pytest.mark.parametrize(
    ("make", "wrap", "warns"),
    [
        (lambda towers: torch.optim.Adam(towers.model.parameters()), None, True),
        (lambda towers: torch.optim.Adam(towers.model.parameters()), lambda own: own, False),
        (lambda towers: torch.optim.Adam(towers.model.parameters()), Holder, False),
        (lambda towers: torch.optim.SGD(towers.model.parameters(), 0.1), None, False),  # has no state
        (lambda towers: torch.optim.Adam(nn.Linear(2, 2).parameters()), None, False),
        (lambda towers: samestep.ShardedOptimizer(towers, torch.optim.Adam, lr=0.1), lambda own: own, False),
    ],
)
def test_an_optimizer_that_is_not_passed_to_elastic_is_a_warning(recwarn, make, wrap, warns):
    model = nn.Linear(2, 1)
    towers = samestep.Towers(model, 3)
    optimizer = make(towers)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    torch.optim.Adam(model.parameters()).step()  # from an earlier part of the program
    with samestep.Elastic(
        model=model, towers=towers, optimizer=None if wrap is None else wrap(optimizer)
    ) as elastic:
        elastic(take_step, model, towers, optimizer)
        elastic(take_step, model, towers, optimizer)
    texts = [str(each.message) for each in recwarn]
    assert sum("is not part of the state of Elastic" in text for text in texts) == warns


def test_workers_that_make_different_calls_raise():
    def work(job):
        state, [part] = made(job, "one")
        with samestep.Elastic(**state) as elastic:
            elastic(take_step, *part)
            if job.rank == 1:
                elastic(print)
            elastic(take_step, *part)

    outcomes = Town(3, 0).run(work)
    assert all(isinstance(outcome.error, DisagreementError) for outcome in outcomes)
    text = "DisagreementError: step 1: worker 1 has call = print, the others have a step"
    assert [outcome.text for outcome in outcomes] == [text] * 3


def loop_with_a_counter(job, *, stops_early=False):
    """Take 8 steps, not `while towers.step < 8`; newcomers begin with 0."""
    state, [part] = made(job, "one")
    num_steps = 2 if stops_early and job.is_newcomer else 8
    with samestep.Elastic(**state) as elastic:
        for _ in range(num_steps):
            elastic(take_step, *part)
    return samestep.digest(part[0])


@pytest.mark.parametrize("seed", mostly_long([3, *range(12)], 1))
def test_a_newcomer_whose_loop_goes_on_after_the_end_exits(capsys, seed):
    town = Town(2, seed, Faults(killed={0: 26} if seed % 4 == 0 else {}), arrivals=[200])
    check_outcomes(town, loop_with_a_counter, LostWorkerError)  # of one that comes too late
    if seed == 3:
        assert town.workers[2].goes_on
        assert isinstance(town.workers[2].outcome.error, SystemExit)
        text = capsys.readouterr().err
        assert "the end of the Elastic block: workers that have joined go on with take_step(model, " in text
        assert text.count("so they exit (docs/elastic.md)") == 1


def test_a_newcomer_whose_loop_ends_before_the_others_is_an_error():
    town = Town(2, 3, arrivals=[200])
    outcomes = town.run(partial(loop_with_a_counter, stops_early=True))
    assert town.workers[2].goes_on
    for outcome in outcomes:
        assert isinstance(outcome.error, DisagreementError)
        assert "worker 2 has call = the end of the Elastic block, the others have a step" in outcome.text


@pytest.mark.parametrize("events", mostly_long([range(22, 26), range(20, 28)], 1), ids=str)
def test_a_call_that_is_interrupted_after_its_average_cannot_be_repeated(events):
    def work(job):
        state, [part] = made(job, "one")

        def step():
            take_step(*part)
            job.barrier("something else")

        with samestep.Elastic(**state) as elastic:
            while part[1].step < 4:
                elastic(step)

    found = set()
    for event in events:
        outcomes = Town(3, 1, Faults(killed={0: event})).run(work)
        found |= {str(outcome.error) for outcome in outcomes if isinstance(outcome.error, UsageError)}
    assert found
    assert all("had averaged a step in this call, but before the call ended" in text for text in found)


def test_a_result_that_cannot_be_sent_is_an_error_without_newcomers_too():
    def work(job):
        state, _ = made(job, "one")
        with samestep.Elastic(**state) as elastic:
            elastic(lambda: lambda: None)

    for outcome in Town(2, 0).run(work):
        assert isinstance(outcome.error, UsageError)
        assert "returned a function, which cannot be sent to another worker" in outcome.text


@pytest.mark.parametrize("make", [lambda: Town(2, 0), lambda: World(2, 0)])
def test_weights_that_differ_after_the_last_step_are_found_at_the_end(make):
    def work(job):
        state, ((model, towers, optimizer),) = made(job, "one")
        with samestep.Elastic(**state) as elastic:
            elastic(take_step, model, towers, optimizer)
            if job.is_first:
                model.weight.data.mul_(2)

    for outcome in make().run(work):
        assert isinstance(outcome.error, DisagreementError)
        assert "step 1, the end: worker 0 has hash of the weights in weight = " in outcome.text


def test_without_a_renewable_transport_calls_are_just_made():
    state, [part] = made(samestep.Job(torch.device("cpu")), "one")
    with samestep.Elastic(**state) as elastic:
        assert elastic(lambda: lambda: 7)() == 7
        assert elastic(take_step, *part) > 0
    assert part[1].step == 1


def test_state_without_a_state_dict_is_an_error():
    state, _ = made(samestep.Job(torch.device("cpu")), "one")
    with pytest.raises(ConfigError, match="best is a float: expected an object with a state_dict"):
        samestep.Elastic(**state, best=0.5)
    with pytest.raises(ConfigError, match="loader is a list: expected an object with a state_dict"):
        samestep.Elastic(**state, loader=[1, 2])
    with pytest.raises(ConfigError, match="averaged_model is a dict: expected a module with the averages"):
        samestep.Elastic(**state, averaged_model={})


class Unsendable:
    def state_dict(self):
        return {"when": object()}

    def load_state_dict(self, state):
        pass


def test_state_that_cannot_be_sent_is_an_error_before_a_worker_joins():
    def work(job):
        state, [part] = made(job, "one")
        with samestep.Elastic(**state, clock=Unsendable()) as elastic:
            elastic(take_step, *part)

    for outcome in Town(2, 0).run(work):
        assert isinstance(outcome.error, ConfigError), outcome.text
        assert "clock" in outcome.text
        assert "object" in outcome.text


class History:
    """Keeps a list, and gets a new one whenever its state is loaded."""

    def __init__(self):
        self.losses = []

    def state_dict(self):
        return {"losses": self.losses}

    def load_state_dict(self, state):
        self.losses = state["losses"]


@pytest.mark.long
@pytest.mark.parametrize("events", [range(14, 30, 2), range(9, 60)], ids=str)
def test_a_list_that_the_program_found_before_a_call_is_still_in_use_after_it(events):
    def work(job):
        state, [part] = made(job, "one")
        history = History()
        with samestep.Elastic(**state, history=history) as elastic:
            while part[1].step < 5:
                history.losses.append(elastic(take_step, *part))
        return history.losses

    for event in events:
        check_outcomes(Town(3, event, Faults(killed={event % 3: event})), work)


class Centred(nn.Linear):
    """Keeps a mean in a buffer that checkpoints leave out."""

    def __init__(self):
        super().__init__(2, 1)
        self.register_buffer("mean", torch.zeros(2), persistent=False)

    def forward(self, x):
        found = super().forward(x - self.mean)
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return found


@pytest.mark.sampled
@pytest.mark.parametrize("seed", mostly_long(range(12), 3))
def test_buffers_that_checkpoints_leave_out_are_sent_to_workers_that_join(seed):
    def work(job):
        torch.manual_seed(0)
        model = Centred()
        towers = samestep.Towers(model, 3, job=job, buffers={"mean": "mean"})
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        with samestep.Elastic(model=model, towers=towers, optimizer=optimizer) as elastic:
            while towers.step < 6:
                elastic(take_step, model, towers, optimizer)
        return samestep.digest(model), model.mean.tolist()

    town = Town(3, seed, Faults(killed={seed % 3: 10 + seed}), arrivals=[seed * 20])
    check_outcomes(town, work, LostWorkerError)  # of a newcomer that comes too late


def rows_of(tower, num_towers, epoch, seed):
    """Return a tower's shard of a stream: 13 numbers for tower 0, 12 for the others."""
    return [torch.tensor([float(epoch + n)]) for n in range(tower, 37, num_towers)]


def from_a_stream(towers, elastic, take, loader):
    """Take the steps of an epoch and one of the next; each call gets its batch itself."""

    def step():
        batch = loader.next_batch()
        if batch is not None:
            take(batch)

    while loader.position < 4:
        elastic(step)


def of_small_batches(towers, elastic, take, loader):
    small = [torch.full((1 + n % 3, 1), float(n)) for n in range(11)]  # two instead of three in the last step
    for batch in towers.slices(small[3 * towers.step :]):
        elastic(take, batch)


@pytest.mark.sampled(50)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("loop", [from_a_stream, of_small_batches])
def test_batches_of_streams_and_slices_are_made_again_after_a_loss(loop, seed):
    def work(job):
        torch.manual_seed(0)
        model = nn.Linear(1, 1)
        towers = samestep.Towers(model, 3, job=job, noise_every=0)
        loader = samestep.StreamLoader(rows_of, 12, towers) if loop is from_a_stream else None
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

        def take(batch):
            for tower in towers(batch):
                tower.backward(model(tower.batch).square().mean())
            towers.average()
            optimizer.step()

        with samestep.Elastic(model=model, towers=towers, optimizer=optimizer, loader=loader) as elastic:
            loop(towers, elastic, take, loader)
        return towers.step, samestep.digest(model)

    alone = work(samestep.Job(torch.device("cpu")))
    assert alone[0] == 4
    town = Town(2, seed, Faults(killed={seed % 2: 9 + 2 * seed}), arrivals=[30 * seed])
    outcomes = town.run(work)
    for outcome, worker in zip(outcomes, town.workers, strict=True):
        is_right = outcome.value == alone or isinstance(outcome.error, Killed)
        ends_alone = worker.is_newcomer and isinstance(outcome.error, LostWorkerError | SystemExit)
        assert is_right or ends_alone, outcome.text
    assert sum(isinstance(outcome.error, Killed) for outcome in outcomes) == 1
    assert not town.was_early


def test_a_stream_batch_made_outside_of_its_call_is_an_error():
    state, [(_, towers, _)] = made(samestep.Job(torch.device("cpu")), "one")
    loader = samestep.StreamLoader(rows_of, 3, towers)
    with samestep.Elastic(**state, loader=loader) as elastic:
        for batch in loader:
            with pytest.raises(UsageError, match=r"call loader\.next_batch\(\) inside the call"):
                elastic(len, batch)
            break


def test_a_loader_batch_is_read_again_for_other_towers():
    def work(job):
        towers = samestep.Towers(nn.Linear(1, 1), 3, job=job)
        loader = samestep.TowerLoader([10, 11, 12, 13, 14, 15], 6, towers, shuffle=False)
        batches = iter(loader)
        batch = next(batches)
        towers.placement = samestep.Placement((0, 1, 3))
        return [list(map(torch.Tensor.tolist, each.slices.values())) for each in (batch.again(), *batches)]

    assert values(work, 2) == [[[[10, 11]]], [[[12, 13], [14, 15]]]]


def test_small_batches_made_by_a_single_worker_get_a_fingerprint_once_there_are_others():
    """A single worker does not compute fingerprints."""

    def work(job):
        towers = samestep.Towers(nn.Linear(1, 1), 3, job=job)
        towers._may_change_workers = True
        [batch] = towers.slices(torch.ones(3, 1, 1))
        if job.rank == 0:
            batch = replace(batch, slices=dict.fromkeys(range(3), torch.ones(1, 1)), fingerprint=0)
        for tower in towers(batch):
            tower.backward(towers.model(tower.batch).sum())
        return towers.average().rows

    assert values(work, 2) == [3, 3]


def pictures(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(7, 4, generator=generator), torch.randint(3, (7,), generator=generator)


def with_float16(job, model, towers, optimizer):
    return samestep.Step(
        towers,
        lambda model, batch: nn.functional.cross_entropy(model(batch[0]).float(), batch[1]),
        optimizer,
        autocast=torch.float16,
        clip_norm=0.5,
    )


def of_the_whole_batch(job, model, towers, optimizer):
    def loss(model, outputs, batch):
        return (outputs @ outputs.T).logsumexp(1).mean()

    return samestep.Step(towers, loss, optimizer, forward=lambda model, batch: model(batch[0]))


def with_counts(job, model, towers, optimizer):
    def loss(model, batch):
        found = model(batch[0])
        return {"rows": found.square().sum(), "ones": found[batch[1] == 1].sum()}

    counts = {"rows": lambda batch: len(batch[1]), "ones": lambda batch: (batch[1] == 1).sum()}
    return samestep.Step(towers, loss, optimizer, counts=counts, on_nonfinite="skip")


def unfrozen_later(job, model, towers, optimizer):
    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    step = samestep.Step(towers, loss, optimizer)

    def take(batch):
        model[0].requires_grad_(towers.step >= 2)
        return step(batch)

    return take


@pytest.mark.sampled
@pytest.mark.parametrize("seed", mostly_long([1, 0, 2, 3], 1))
@pytest.mark.parametrize("make", [with_float16, of_the_whole_batch, with_counts, unfrozen_later])
def test_steps_of_other_kinds(make, seed):
    def work(job):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, momentum=0.3), nn.Tanh(), nn.Linear(5, 3))
        towers = samestep.Towers(model, 3, job=job, statistics="pooled")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        step = make(job, model, towers, optimizer)
        scaler = getattr(step, "scaler", None)
        with samestep.Elastic(model=model, towers=towers, optimizer=optimizer, scaler=scaler) as elastic:
            while towers.step < 6:
                elastic(step, pictures(towers.step))
        return samestep.digest(model)

    alone = work(samestep.Job(torch.device("cpu")))
    town = Town(2, seed, Faults(killed={seed % 2: 20 + 10 * seed}), arrivals=[100 * seed])
    for outcome, worker in zip(town.run(work), town.workers, strict=True):
        is_right = outcome.value == alone or isinstance(outcome.error, Killed) or town.was_early
        assert is_right or worker.is_newcomer, outcome.text


def test_a_newcomer_with_a_different_model_fails_alone():
    def work(job):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3))
        towers = samestep.Towers(model, 3, job=job)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(batch):
            if towers.step >= 2 and len(model) == 1:
                model.append(nn.Linear(3, 3, bias=False))
                nn.init.eye_(model[1].weight)
                optimizer.add_param_group({"params": [model[1].weight]})
            for tower in towers(batch):
                tower.backward(nn.functional.cross_entropy(model(tower.batch[0]), tower.batch[1]))
            towers.average()
            optimizer.step()

        with samestep.Elastic(model=model, towers=towers, optimizer=optimizer) as elastic:
            while towers.step < 8:
                elastic(step, pictures(towers.step))
        return samestep.digest(model)

    alone = work(samestep.Job(torch.device("cpu")))
    town = Town(2, 0, arrivals=[300])
    *first, newcomer = town.run(work)
    assert [outcome.value for outcome in first] == [alone, alone]
    assert isinstance(newcomer.error, DataError), newcomer.text
    assert "the state of another worker" in newcomer.text


def take_eight_steps(job):
    state, [parts] = made(job, "one")
    with samestep.Elastic(**state) as elastic:
        while state["towers"].step < 8:
            elastic(take_step, *parts)


@pytest.mark.long
@pytest.mark.parametrize("events", [range(8, 24, 3), range(8, 24)], ids=str)
def test_a_loss_that_the_launcher_sees_first_is_not_reported_as_a_newcomer(capsys, events):
    """Worker 2 ends with its last message of a step, so no worker waits for it when the list changes."""
    for at in events:
        Town(3, 0, Faults(killed={2: at})).run(take_eight_steps)
    text = capsys.readouterr().err
    assert "samestep: a worker is gone; going on with 2 workers after step " in text
    assert "joined" not in text


@pytest.mark.long
@pytest.mark.parametrize("seeds", [range(6), range(15)], ids=str)
def test_a_loss_is_reported_although_a_newcomer_has_replaced_the_worker(capsys, seeds):
    texts = []
    for seed in seeds:
        Town(2, seed, Faults(killed={0: 24}), arrivals=[100]).run(take_eight_steps)
        texts.append(capsys.readouterr().err)
    together = [text for text in texts if text.count("going on with") == 1 and "with 2 workers" in text]
    assert together
    assert all("worker 0 is gone" in text for text in together)


def normalised(job):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    towers = samestep.Towers(model, 3, job=job)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return model, towers, optimizer


def evaluate(model):
    with torch.no_grad():
        return float(model(torch.ones(2, 2)).sum())


def with_evaluations(job):
    """Switches modes between calls, so that a worker that is a call ahead has another mode."""
    model, towers, optimizer = normalised(job)
    with samestep.Elastic(model=model, towers=towers, optimizer=optimizer) as elastic:
        while towers.step < 4:
            elastic(take_step, model, towers, optimizer)
            was_training = model.training
            model.eval()
            elastic(evaluate, model)
            model.train(was_training)
    return samestep.digest(model)


def with_a_frozen_layer(job):
    """Switches a layer's mode for good in a call, which some workers do not make themselves."""
    model, towers, optimizer = normalised(job)

    def freeze_and_take_step():
        if towers.step == 2:
            model[1].eval()
        take_step(model, towers, optimizer)

    with samestep.Elastic(model=model, towers=towers, optimizer=optimizer) as elastic:
        while towers.step < 5:
            elastic(freeze_and_take_step)
    return samestep.digest(model)


def with_parameters_that_a_call_toggles(job):
    """Freezes a layer for a step and restores it, without `finally`; and inserts a layer once."""
    model, towers, optimizer = normalised(job)

    def toggle_and_take_step():
        if towers.step == 2 and len(model) == 3:
            model.insert(1, nn.Identity())
        flags = [parameter.requires_grad for parameter in model[0].parameters()]
        model[0].requires_grad_(False)
        was_training = model[-2].training
        model[-2].eval()
        take_step(model, towers, optimizer)
        for parameter, flag in zip(model[0].parameters(), flags, strict=True):
            parameter.requires_grad_(flag)
        model[-2].train(was_training)

    with samestep.Elastic(model=model, towers=towers, optimizer=optimizer) as elastic:
        while towers.step < 5:
            elastic(toggle_and_take_step)
            elastic(take_step, model, towers, optimizer)
    return samestep.digest(model)


def with_a_mode_that_a_call_leaves(job):
    model, towers, optimizer = normalised(job)

    def toggle_and_take_step():
        model[1].train(not model[1].training)
        take_step(model, towers, optimizer)

    with samestep.Elastic(model=model, towers=towers, optimizer=optimizer) as elastic:
        while towers.step < 5:
            elastic(toggle_and_take_step)
    return samestep.digest(model)


@pytest.mark.long
@pytest.mark.sampled
@pytest.mark.parametrize("seed", mostly_long(range(40), 3))
@pytest.mark.parametrize(
    "work",
    [
        with_evaluations,
        with_a_frozen_layer,
        with_a_mode_that_a_call_leaves,
        with_parameters_that_a_call_toggles,
    ],
)
def test_modes_of_layers_follow_the_calls(work, seed):
    town = Town(2, seed, Faults(killed={seed % 2: 10 + seed % 29}), arrivals=[seed * 10])
    # A newcomer may come too late, or lack a layer that a call has inserted.
    check_outcomes(town, work, LostWorkerError, DataError)


def adversarial(job):
    """A GAN; its discriminator is frozen in the generator's step, so it has nothing to train there."""
    torch.manual_seed(0)
    generator, critic = nn.Linear(2, 2), nn.Linear(2, 1)
    of_generator, of_critic = (samestep.Towers(net, 3, job=job) for net in (generator, critic))
    optimizers = [torch.optim.SGD(net.parameters(), 0.1) for net in (generator, critic)]
    rows = torch.ones(6, 2)

    def train_critic():
        critic.requires_grad_(True)
        for tower in of_critic(rows):
            made = critic(generator(tower.batch).detach()).mean()
            tower.backward(critic(tower.batch).square().mean() - made)
        of_critic.average()
        optimizers[1].step()

    def train_generator():
        critic.requires_grad_(False)
        for tower in of_generator(rows):
            tower.backward(critic(generator(tower.batch)).mean())
        of_generator.average()
        optimizers[0].step()

    state = {"critic": critic, "of_critic": of_critic, "one": optimizers[0], "two": optimizers[1]}
    with samestep.Elastic(model=generator, towers=of_generator, **state) as elastic:
        while of_generator.step < 4:
            elastic(train_critic)
            elastic(train_generator)
    return samestep.digest(generator), samestep.digest(critic)


def with_a_new_layer(job):
    """Adds a layer between two calls; its values come from worker 0, which may be lost meanwhile."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2))
    towers = samestep.Towers(model, 3, job=job)
    with samestep.Elastic(model=model, towers=towers) as elastic:
        while towers.step < 4:
            if towers.step == 2 and len(model) == 1:
                model.append(nn.Linear(2, 2))
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            elastic(take_step, model, towers, optimizer)
    return samestep.digest(model)


def with_another_head(job):
    """Replaces a layer between two calls."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    towers = samestep.Towers(model, 3, job=job)
    with samestep.Elastic(model=model, towers=towers) as elastic:
        while towers.step < 5:
            elastic(take_step, model, towers, torch.optim.SGD(model.parameters(), 0.1))
            if towers.step in (2, 4):
                torch.manual_seed(towers.step)
                model[1] = nn.Linear(2, 1)
    return samestep.digest(model)


@pytest.mark.sampled
@pytest.mark.parametrize("seed", mostly_long([3, *range(3), *range(4, 36)], 3))
@pytest.mark.parametrize("work", [adversarial, with_a_new_layer, with_another_head])
def test_models_that_change_between_calls(work, seed):
    town = Town(2, seed % 3, Faults(killed={seed % 2: 10 + seed}), arrivals=[seed * 12] if seed % 4 else [])
    check_outcomes(town, work, Exception)


def test_what_lost_workers_have_kept_is_not_gathered():
    def work(job):
        state, [(model, towers, optimizer)] = made(job, "one")
        kept = {}

        def step():
            kept.clear()
            for tower in towers(torch.full((6, 2), 1.0 + towers.step)):
                kept[tower.index] = tower.index
                tower.backward(model(tower.batch).square().mean())
            towers.average()
            optimizer.step()

        gathered = []
        with samestep.Elastic(**state) as elastic:
            while towers.step < 4:
                elastic(step)
                gathered.append(elastic(towers.gather, kept))
        return gathered

    texts = set()
    for event in range(11, 24, 2):
        for outcome in Town(2, 0, Faults(killed={0: event})).run(work):
            assert outcome.error is not None or outcome.value == [[0, 1, 2]] * 4
            texts.add(outcome.text)
    assert any("a worker that is lost takes what its towers have kept along" in text for text in texts)


def unfrozen_in_a_call(elastic, model, towers, optimizer):
    def step():
        if towers.step == 2:
            unfreeze(model, optimizer)
        take_step(model, towers, optimizer)

    while towers.step < 5:
        elastic(step)


def unfrozen_between_calls(elastic, model, towers, optimizer):
    while towers.step < 5:
        if towers.step == 2 and len(optimizer.param_groups) == 1:
            unfreeze(model, optimizer)
        elastic(take_step, model, towers, optimizer)


def unfreeze(model, optimizer):
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": [*model[0].parameters()], "lr": 0.01})


@pytest.mark.long
@pytest.mark.sampled
@pytest.mark.parametrize("seed", mostly_long([7, 9, *range(7), 8, 10, 11], 2))
@pytest.mark.parametrize("loop", [unfrozen_in_a_call, unfrozen_between_calls])
def test_parameter_groups_that_a_call_adds_are_removed_before_it_is_repeated_and_handed_over(loop, seed):
    def work(job):
        model, towers, _ = normalised(job)
        model[0].requires_grad_(False)
        optimizer = torch.optim.Adam(model[1:].parameters(), lr=0.1)
        with samestep.Elastic(model=model, towers=towers, optimizer=optimizer) as elastic:
            loop(elastic, model, towers, optimizer)
        return samestep.digest(model), [group["lr"] for group in optimizer.param_groups]

    # The newcomer comes once another worker is lost: there are only three towers.
    town = Town(3, seed, Faults(killed={seed % 3: 24 + 2 * seed}), arrivals=[200 + 40 * seed])
    check_outcomes(town, work, LostWorkerError)  # of a newcomer that comes too late
