"""What programs do around a step, such as validate and log: works on any number of workers, or is refused."""

import copy
import random
import tempfile
from collections import defaultdict

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import samestep
from samestep import Error, Evaluation, ShardedOptimizer, Step, TowerLoader, Towers
from samestep.errors import DisagreementError, UsageError

from .cases import mostly_long
from .nets import batch_of, loss_of, net, run_passes, take_step
from .simulation import simulate, values

pytestmark = pytest.mark.sampled

KEPT, REFUSED = {}, {}


def kept(function):
    """A program that must end with the same on 1, 2 and 3 workers."""
    KEPT[function.__name__] = function
    return function


def refused(error, *words, alone=True):
    """A program that must end on every worker with this error, whose text has these words.

    Without `alone`, it is in order on one worker.
    """

    def register(function):
        REFUSED[function.__name__] = (function, error, words, alone)
        return function

    return register


@pytest.mark.parametrize("num_workers", mostly_long([3, 1, 2], 1))
@pytest.mark.parametrize("name", REFUSED)
def test_all_workers_are_told(name, num_workers):
    work, error, words, alone = REFUSED[name]
    if num_workers == 1 and not alone:
        values(work, 1)
        return
    for outcome in simulate(work, num_workers, num_workers):
        assert isinstance(outcome.error, Error), outcome
        assert isinstance(outcome.error, (error, DisagreementError)), outcome.text
        assert all(word in outcome.text for word in words), outcome.text


@pytest.mark.sampled(50)
@pytest.mark.parametrize("num_workers", [3, 2])
@pytest.mark.parametrize("name", KEPT)
def test_any_number_of_workers_takes_the_same_steps(name, num_workers):
    found = {value for num in (1, num_workers) for value in map(str, values(KEPT[name], num, num))}
    assert len(found) == 1


def dropout_net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))


def train(model, job, steps=3, after=None, loss=loss_of, num_towers=7):
    towers = Towers(model, num_towers, job=job)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(steps):
        run_passes(towers, batch_of(step), loss)
        towers.average()
        optimizer.step()
        if after is not None:
            after()
    return samestep.digest(model)


# ---- the modes of layers -----------------------------------------------------------------------------


@refused(DisagreementError, "in eval mode", "in training mode", "call train()", alone=False)
def a_validation_on_the_first_worker_that_leaves_its_mode(job):
    model = dropout_net()

    def validate():
        if job.is_first:
            model.eval()(batch_of(9)["x"])

    train(model, job, after=validate)


@refused(UsageError, "tower", "in eval mode", "model.train()")
def a_validation_in_each_pass_that_leaves_its_mode(job):
    model = dropout_net()

    def loss(model, batch):
        found = loss_of(model, batch)
        model.eval()(batch["x"])
        return found

    train(model, job, loss=loss)


@refused(UsageError, "tower", "in eval mode")
def a_mode_that_the_forward_of_a_whole_batch_leaves(job):
    model = dropout_net()

    def forward(batch):
        found = model(batch["x"])
        model.eval()
        return found

    Towers(model, 7, job=job).whole_batch(batch_of(0), forward, lambda found, batch: found.std())


@kept
def a_mode_that_each_pass_sets_where_a_worker_has_no_rows(job):
    model = dropout_net()
    towers = Towers(model, 7, job=job)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step, rows in enumerate((9, 2, 1, 9)):
        run_passes(towers, batch_of(step, rows), lambda model, batch: loss_of(model.train(), batch))
        towers.average()
        optimizer.step()
        model.eval()
    return samestep.digest(model)


@kept
def modes_that_each_pass_sets_and_puts_back(job):
    model = dropout_net().eval()

    def loss(model, batch):
        with torch.no_grad():
            target = model.eval()(batch["x"])
        return loss_of(model.train(), batch) + (model(batch["x"]) - target).square().mean()

    return train(model, job, after=model.eval, loss=loss)


@kept
def a_layer_in_eval_mode_while_the_others_train(job):
    model = dropout_net()
    model[2].eval()
    return train(model, job)


# ---- Towers, batches and reports as objects ----------------------------------------------------------


@refused(UsageError, "was abandoned during this tower's turn", "average()")
def a_loop_within_a_loop(job):
    towers = Towers(dropout_net(), 7, job=job)
    for tower in towers(batch_of(0)):
        run_passes(towers, batch_of(1))
        tower.backward(loss_of(towers.model, tower.batch))


@refused(DisagreementError, "loss scale = 256.0", alone=False)
def another_loss_scale_on_one_worker(job):
    model = dropout_net()
    towers = Towers(model, 7, job=job)
    for tower in towers(batch_of(0), scaler=torch.amp.GradScaler("cpu", init_scale=256.0 * (1 + job.rank))):
        tower.backward(loss_of(model, tower.batch))
    towers.average()


@refused(UsageError, "cannot be copied or pickled", "state_dict()")
def a_copy_of_towers(job):
    copy.deepcopy(Towers(dropout_net(), 7, job=job))


@refused(UsageError, "loop over towers(batch)", "tower.batch")
def a_loop_that_takes_a_loaders_batch_apart(job):
    data = torch.utils.data.TensorDataset(torch.randn(9, 6), torch.arange(9))
    for _inputs, _labels in TowerLoader(data, 9, Towers(dropout_net(), 7, job=job)):
        pass


@kept
def reports_compared_and_counted(job):
    towers = Towers(dropout_net(), 7, job=job)
    first = take_step(towers, batch_of(0))
    towers.load_state_dict({**towers.state_dict(), "step": 0})
    again, later = take_step(towers, batch_of(0)), take_step(towers, batch_of(1))
    assert towers.num_towers == 7
    return (
        first == copy.deepcopy(first),
        first == again,
        first == later,
        len({first, copy.deepcopy(first), later}),
    )


@refused(
    DisagreementError,
    "checkpoint",
    "worker 0 has hash of the weights in 0.weight",
    "the same optimizer steps",
    alone=False,
)
def a_checkpoint_of_weights_that_came_apart(job):
    model = net()
    towers = Towers(model, 7, job=job)
    if job.is_first:
        model[0].weight.data.mul_(2)
    samestep.save(tempfile.mkdtemp(), model=model, towers=towers)


@refused(DisagreementError, "checkpoint", "hash of the weights in averaged_model.module.1.", alone=False)
def averages_with_statistics_of_this_workers_rows(job):
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    towers = Towers(model, 7, job=job)
    averages = AveragedModel(model)
    for batch in TowerLoader(examples(), 20, towers):
        for rows in batch.slices.values():
            averages(rows)
    samestep.save(tempfile.mkdtemp(), model=model, averaged_model=averages, towers=towers)


@refused(DisagreementError, "checkpoint", "hash of the weights in teacher.weight", alone=False)
def another_net_of_a_seed_for_each_worker(job):
    model = net()
    towers = Towers(model, 7, job=job)
    torch.manual_seed(job.rank)
    samestep.save(tempfile.mkdtemp(), model=model, towers=towers, teacher=nn.Linear(6, 3))


class Counting(nn.Module):
    """Has a buffer of its own on each worker."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("rows", torch.zeros(()))

    def forward(self, x):
        self.rows += len(x)
        return self.layer(x)


def saved_with_a_critic(job, edit=lambda critic: None):
    """Save two models, each with its own `Towers`; the critic's buffer is that of each worker."""
    torch.manual_seed(0)
    model, critic = net(), Counting()
    towers, of_critic = Towers(model, 7, job=job), Towers(critic, 7, job=job, buffers={"rows": "ignore"})
    take_step(towers, batch_of(0))
    take_step(of_critic, batch_of(0))
    edit(critic)
    samestep.save(tempfile.mkdtemp(), model=model, towers=towers, critic=critic, of_critic=of_critic)
    return samestep.digest(model)


@kept
def another_model_with_a_buffer_that_nobody_shares(job):
    return saved_with_a_critic(job)


@refused(DisagreementError, "checkpoint", "hash of the weights in layer.weight", alone=False)
def another_model_that_came_apart(job):
    saved_with_a_critic(job, lambda critic: critic.layer.weight.data.mul_(1 + job.rank))


@kept
def averages_of_a_buffer_that_nobody_shares(job):
    torch.manual_seed(0)
    model = Counting()
    towers = Towers(model, 7, job=job, buffers={"rows": "ignore"})
    averages = AveragedModel(model, use_buffers=True)
    take_step(towers, batch_of(0))
    averages.update_parameters(model)
    samestep.save(tempfile.mkdtemp(), model=model, averaged_model=averages, towers=towers)
    return [parameter.tolist() for parameter in averages.parameters()]


@kept
def a_checkpoint_after_a_layer_was_replaced_at_random(job):
    """The next step gives all workers the first one's values."""
    model = net()
    towers = Towers(model, 7, job=job)
    torch.manual_seed(job.rank)
    model[0] = nn.Linear(6, 8)
    samestep.save(tempfile.mkdtemp(), model=model, towers=towers)
    take_step(towers, batch_of(0))
    return samestep.digest(model)


# ---- data --------------------------------------------------------------------------------------------


def examples():
    return list(torch.randn(20, 6, generator=torch.Generator().manual_seed(3)))


def train_on(job, data, *, make_loader=TowerLoader, after=lambda towers: None, **options):
    model = net()
    towers = Towers(model, 7, job=job)
    step = Step(towers, lambda m, x: m(x).square().mean(), torch.optim.SGD(model.parameters(), 0.1))
    for _ in range(2):
        for batch in make_loader(data, 8, towers, **options):
            step(batch)
            after(towers)
    return samestep.digest(model)


OTHER_DATA = (DisagreementError, "worker", "first example", "sort directory listings")


@refused(*OTHER_DATA, alone=False)
def a_dataset_in_another_order_on_each_worker(job):
    train_on(job, random.Random(job.rank).sample(examples(), 20))


@refused(*OTHER_DATA, alone=False)
def a_dataset_of_which_each_worker_has_a_part(job):
    train_on(job, examples()[job.rank * 6 :][:6])


@refused(*OTHER_DATA, alone=False)
def a_batched_dataset_that_differs(job):
    rows = torch.stack(examples()) + job.rank

    class Batched:
        def __len__(self):
            return 20

        def batch(self, examples, seeds):
            return rows[torch.from_numpy(examples)]

    train_on(job, Batched())


@refused(UsageError, "collate_fn", "called again", "a generator, a counter")
def a_collate_fn_with_a_generator_of_its_own(job):
    own = torch.Generator().manual_seed(0)
    train_on(job, examples(), collate_fn=lambda rows: torch.stack(rows) * torch.rand(6, generator=own))


@kept
def a_collate_fn_that_draws_and_takes_its_examples_apart(job):
    def collate(rows):
        rows = [row.pop("x") for row in rows]
        return torch.stack(rows) * torch.rand(6)

    return train_on(job, Popped(), collate_fn=collate)


@refused(DisagreementError, "first example", "in it or in collate_fn", alone=False)
def a_collate_fn_that_keeps_the_mean_of_its_first_rows(job):
    kept = {}

    def collate(rows):
        rows = torch.stack(rows)
        return rows - kept.setdefault("mean", rows.mean(0))

    train_on(job, examples(), collate_fn=collate)


class Scaled:
    """Examples times a number that the program sets."""

    scale = 1.0

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return examples()[index] * self.scale


@refused(DisagreementError, "step 2", "first example", alone=False)
def a_dataset_that_one_worker_changes_between_two_steps(job):
    data = Scaled()

    def change(towers):
        if job.is_first and towers.step == 2:
            data.scale = 0.5

    train_on(job, data, after=change)


class InOwnBuffer:
    """A `collate_fn` that returns the same memory each time."""

    def __init__(self):
        self.rows = torch.empty(8, 6)

    def __call__(self, rows):
        return torch.stack(rows, out=self.rows[: len(rows)])


class Streamed(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(examples())


@kept
def a_collate_fn_that_uses_its_memory_again(job):
    return train_on(job, examples(), collate_fn=InOwnBuffer())


@kept
def a_collate_fn_of_a_stream_that_uses_its_memory_again(job):
    stream = Streamed()
    return train_on(job, stream, make_loader=samestep.StreamLoader, collate_fn=InOwnBuffer())


class Popped:
    def __len__(self):
        return 20

    def __getitem__(self, index):
        return {"x": examples()[index] + torch.randn(6)}


@kept
def batches_smaller_than_the_number_of_workers(job):
    return train_on(job, examples()[:9])  # the last batch has one row


# ---- evaluations -------------------------------------------------------------------------------------


def loss_sum(model, x):
    return {"loss": (model(x).square().sum(), len(x))}


@refused(UsageError, "measure wrote to 0.weight", "a copy of the model")
def an_evaluation_that_writes_to_the_weights(job):
    def measure(model, x):
        model[0].weight.data.mul_(0.99)
        return loss_sum(model, x)

    Evaluation(examples(), measure, rows=4)(net(), job)


@refused(DisagreementError, "evaluation", "rows = 4", alone=False)
def an_evaluation_in_batches_of_other_sizes(job):
    Evaluation(examples(), loss_sum, rows=4 + job.rank)(net(), job)


@refused(DisagreementError, "evaluation", "checksum of example 0", alone=False)
def an_evaluation_of_a_part_on_each_worker(job):
    data = examples()[job.rank :: job.world_size]
    Evaluation(data[:6], loss_sum, rows=4)(net(), job)


@kept
def an_evaluation_in_training_mode_on_other_weights(job):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    model.register_buffer("scale", torch.ones(1).expand(3), persistent=False)
    towers, optimizer = Towers(model, 4, job=job), torch.optim.SGD(model.parameters(), 0.1)
    found = []

    def measure(model, x):
        own = copy.deepcopy(model.state_dict())
        model.train().load_state_dict({n: v if n[0] == "1" else v * 0.5 for n, v in own.items()})
        result = loss_sum(model, x)
        model.load_state_dict(own)
        return result

    for step in range(3):
        take_step(towers, batch_of(step))
        optimizer.step()
        found.append(Evaluation(examples(), measure, rows=4)(model, job))
    return samestep.digest(model), found


# ---- a sharded optimizer's state ---------------------------------------------------------------------


def train_with(optimizer, towers, first, last):
    for step in range(first, last):
        take_step(towers, batch_of(step))
        optimizer.step()


@refused(DisagreementError, "the update", "states that were loaded", alone=False)
def a_sharded_state_that_one_worker_alone_loads(job):
    towers = Towers(net(), 7, job=job)
    optimizer = ShardedOptimizer(towers, torch.optim.AdamW, lr=0.1)
    train_with(optimizer, towers, 0, 1)
    state = optimizer.state_dict()
    train_with(optimizer, towers, 1, 2)
    if job.is_first:
        optimizer.load_state_dict(state)
    train_with(optimizer, towers, 2, 3)


@refused(UsageError, "optimizer.state was replaced", "load_state_dict()")
def a_sharded_state_of_other_parameters(job):
    towers = Towers(net(), 7, job=job)
    optimizer = ShardedOptimizer(towers, torch.optim.AdamW, lr=0.1)
    optimizer.state = {torch.zeros(3): {}}
    train_with(optimizer, towers, 0, 1)


@kept
def a_state_that_is_looked_at_and_started_over(job):
    digests = []
    for make in (
        lambda towers, **options: torch.optim.AdamW(towers.model.parameters(), **options),
        lambda towers, **options: ShardedOptimizer(towers, torch.optim.AdamW, **options),
    ):
        towers = Towers(net(), 7, job=job)
        optimizer = make(towers, lr=0.1)
        train_with(optimizer, towers, 0, 2)
        norms = [entry["exp_avg"].norm() for entry in optimizer.state.values()]
        optimizer.load_state_dict(optimizer.state_dict())
        train_with(optimizer, towers, 2, 3)
        optimizer.state = defaultdict(dict)
        train_with(optimizer, towers, 3, 5)
        assert all(norms)
        digests.append(samestep.digest(towers.model))
    assert digests[0] == digests[1]
    return digests


# ---- the device of tensors that are made without one -------------------------------------------------


@kept
def another_default_device(job):
    """As after `torch.set_default_device("cuda")`: what is made without a device has no values here."""
    data, batches = examples(), [batch_of(step) for step in range(3)]
    sparse = nn.EmbeddingBag(9, 3, sparse=True)
    model = nn.ModuleList([net(), nn.BatchNorm1d(3), sparse])
    towers = Towers(model, 7, job=job, noise_every=1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    ids = {"ids": torch.arange(21, device="cpu")[:, None] % 9}
    with torch.device("meta"):
        for batch in batches:
            for tower in towers(batch | ids, counts={"rows": lambda part: len(part["y"])}):
                found = model[1](model[0](tower.batch["x"])) + sparse(tower.batch["ids"])
                tower.backward({"rows": found.square().sum()})
            report = towers.average()
            optimizer.step()
        towers.whole_batch(batches[0], lambda part: model[0](part["x"]), lambda found, batch: found.std())
        towers.average()
        optimizer.step()
        sharded = ShardedOptimizer(towers, torch.optim.Adam)
        for batch in TowerLoader(data, 20, towers):
            for tower in towers(batch):
                tower.backward(model[0](tower.batch).square().mean())
            towers.average()
            sharded.step()
        found = Evaluation(data, lambda m, x: {"loss": (m[0](x).square().sum(), len(x))}, rows=4)(model, job)
    return samestep.digest(model), found, report.loss, report.tower_losses
