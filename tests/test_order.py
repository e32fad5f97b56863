"""An epoch's order from the user: any function of seed and epoch to indices."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import SubsetRandomSampler, WeightedRandomSampler

from samestep import Step, Towers
from samestep.data.loader import TowerLoader
from samestep.data.order import REPEAT, numbered
from samestep.errors import ConfigError, DisagreementError
from samestep.streams import stream_seed
from samestep.summation.placement import Placement

from .simulation import simulate
from .test_loader import (
    MODEL,
    NUM_EXAMPLES,
    Noisy,
    NoisyBatches,
    assert_same_bits,
    at_once,
    examples_of,
    make_loader,
    merge,
    read,
    read_everywhere,
)

WEIGHTS = torch.arange(NUM_EXAMPLES).double()


def weighted(seed, epoch):
    return WeightedRandomSampler(WEIGHTS, 30)  # draws from torch's global generator


def subset(seed, epoch):
    return SubsetRandomSampler(range(0, NUM_EXAMPLES, 2))


def with_numpy(seed, epoch):
    return np.random.permutation(NUM_EXAMPLES)[:10]


def repeated(seed, epoch):
    return [5, 5, 5, random.randrange(NUM_EXAMPLES), 5]


@pytest.mark.parametrize("order", [weighted, subset, with_numpy, repeated])
@pytest.mark.parametrize("dataset", [Noisy(), NoisyBatches()])
def test_every_placement_reads_the_same(order, dataset):
    torch.manual_seed(99)  # what has been drawn before must not matter
    expected = read_everywhere(1, order=order, dataset=dataset)
    torch.manual_seed(98)
    for num_workers in (2, 3):
        assert_same_bits(read_everywhere(num_workers, order=order, dataset=dataset), expected)
    loader = make_loader(order=order, dataset=dataset)
    epochs = examples_of(expected[: len(loader)]), examples_of(expected[len(loader) :])
    assert len(epochs[0]) == len(epochs[1]) == len(list(order(0, 0)))
    assert epochs[0] != epochs[1]


def test_a_run_goes_on_in_the_middle_of_an_epoch_with_other_workers():
    expected = read_everywhere(1, order=weighted)
    loader = make_loader(order=weighted)
    batches = (batch for _ in range(2) for batch in loader)
    for _ in range(7):
        next(batches)
    rest = []
    for rank in range(2):
        other = make_loader(order=weighted, placement=Placement.even(5, 2), rank=rank)
        other.load_state_dict(loader.state_dict())
        assert (other.epoch, len(other)) == (1, 5)
        rest.append([at_once(batch) for batch in other])
    assert_same_bits(merge(rest), expected[7:])


def test_a_permutation_is_what_shuffle_reads():
    found = read(make_loader(order=lambda seed, epoch: torch.randperm(NUM_EXAMPLES)))
    assert_same_bits(found, read(make_loader()))


def test_an_example_has_another_stream_each_time():
    for dataset in (Noisy(), NoisyBatches()):
        batches = read(make_loader(dataset, order=repeated))
        noises = [noise.tolist() for b in batches for part in b.slices.values() for noise in part["noise"]]
        assert len({tuple(noise) for noise in noises}) == 10
    (first, *_) = read(make_loader(order=repeated), epochs=1)
    drawn = torch.Generator().manual_seed(stream_seed(3, "example", 0, 5 + 2 * REPEAT))
    assert first.slices[2]["noise"][0][0] == torch.rand((), generator=drawn).double()


@pytest.mark.parametrize("length", [0, 1, 40])
def test_numbers_count_repeats(length):
    indices = np.random.default_rng(0).integers(0, 9, length)
    expected, seen = [], dict.fromkeys(range(9), 0)
    for index in indices.tolist():
        expected.append(index + REPEAT * seen[index])
        seen[index] += 1
    assert numbered(indices).tolist() == expected


def test_a_dataset_may_grow_within_an_epoch():
    class Growing:
        def __init__(self):
            self.rows = [torch.tensor([float(i)]) for i in range(4)]

        def __len__(self):
            return len(self.rows)

        def __getitem__(self, example):
            return self.rows[example]

    class InOneCall(Growing):
        def batch(self, examples, seeds):
            return torch.stack([self.rows[example] for example in examples])

    for dataset in (Growing(), InOneCall()):
        for batch in make_loader(dataset, batch_size=4, order=lambda seed, epoch: [0, 1, 2, 3] * 3):
            assert torch.cat([*batch.slices.values()]).flatten().tolist() == [0, 1, 2, 3]
            dataset.rows.append(torch.tensor([99.0]))


def test_workers_with_other_orders_find_out_in_the_first_step_of_an_epoch():
    def work(job):
        towers = Towers(torch.nn.Linear(1, 1), 2, job=job)
        step = Step(towers, lambda model, x: model(x).mean(), torch.optim.SGD(towers.model.parameters(), 0.1))
        data = torch.arange(8.0)[:, None]
        # They differ in the last batch, and only in the second epoch.
        loader = TowerLoader(data, 2, towers, order=lambda s, epoch: [*range(7), 7 - epoch * job.rank])
        for _ in range(2):
            for batch in loader:
                step(batch)

    for outcome in simulate(work, 2):
        assert isinstance(outcome.error, DisagreementError)
        assert "step 4" in outcome.text
        assert "batch fingerprint" in outcome.text


@pytest.mark.parametrize(
    ("order", "named"),
    [
        (lambda seed, epoch: [], r"order\(3, 0\) gives no indices: expected int64 \[n\]"),
        (lambda seed, epoch: [0.5], r"order\(3, 0\) gives float64 \[1\]: expected int64 \[n\]"),
        (lambda seed, epoch: torch.ones(23, dtype=bool), r"order\(3, 0\) gives bool \[23\]"),
        (lambda seed, epoch: [[1], [2]], r"order\(3, 0\) gives int64 \[2, 1\]"),
        (
            lambda seed, epoch: [0, 23],
            r"order\(3, 0\) gives the index 23: expected 0 to 22, as the dataset has 23",
        ),
        (lambda seed, epoch: [0, -1], r"order\(3, 0\) gives the index -1: expected 0 to 22"),
        ([3, 1, 2], "order is a list: expected a function"),
    ],
)
def test_orders_that_are_no_indices_are_refused(order, named):
    with pytest.raises(ConfigError, match=named):
        make_loader(order=order)


def test_an_order_that_is_another_one_each_time_is_refused():
    own = np.random.default_rng(0)
    with pytest.raises(ConfigError, match=r"order\(3, 0\) gives different indices when it is called again"):
        make_loader(order=lambda seed, epoch: own.permutation(NUM_EXAMPLES))


def test_every_epoch_has_as_many_batches():
    loader = make_loader(order=lambda seed, epoch: range(20 + epoch))
    assert len(loader) == 3
    assert [batch.rows for batch in read(loader, epochs=2)] == [7, 7, 6, 7, 7, 7]
    with pytest.raises(
        ConfigError, match=r"order\(3, 2\) gives 22 indices, epoch 0 has 20: expected 3 batches"
    ):
        next(iter(loader))


def test_an_order_and_shuffle_exclude_each_other():
    with pytest.raises(ConfigError, match="shuffle has no effect beside order"):
        make_loader(order=weighted, shuffle=True)
    assert make_loader(order=weighted).shuffle is False


def test_the_state_of_a_run_with_another_order_is_refused():
    state = make_loader(order=weighted).state_dict()
    make_loader(order=lambda seed, epoch: list(weighted(seed, epoch))).load_state_dict(state)
    for other in (make_loader(order=with_numpy), make_loader(shuffle=False)):
        with pytest.raises(ConfigError, match=f"from a run with order = {state['order']}, not"):
            other.load_state_dict(state)
    with pytest.raises(ConfigError, match="from a run with order = None, not"):
        make_loader(order=weighted).load_state_dict(make_loader(shuffle=False).state_dict())


def test_a_short_last_batch_of_an_order_is_looked_at():
    model = torch.nn.Sequential(MODEL, torch.nn.BatchNorm1d(1))
    order = lambda seed, epoch: range(15)  # noqa: E731 - a batch of 10 and one of 5
    TowerLoader(Noisy(), 10, Towers(model, 5), order=lambda seed, epoch: range(20))
    with pytest.warns(UserWarning, match="the last batch of an epoch has 5 rows"):
        TowerLoader(Noisy(), 10, Towers(model, 5), order=order)
