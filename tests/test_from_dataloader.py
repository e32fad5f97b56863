import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from samestep.data.loader import TowerLoader
from samestep.errors import ConfigError
from samestep.summation.placement import Placement

from .test_loader import (
    ALONE,
    BATCH_SIZE,
    NUM_EXAMPLES,
    Endless,
    Noisy,
    assert_same_bits,
    collate_with_noise,
    examples_of,
    make_loader,
    merge,
    read,
)

# From Python 3.12 on, fork warns where a library has started threads; loader processes use none of them.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")


def taken_over(placement=ALONE, rank=0, *, global_rows=None, **options):
    towers = make_loader(placement=placement, rank=rank)._towers
    has_batches = "batch_sampler" in options
    plain = DataLoader(Noisy(), **({} if has_batches else {"batch_size": BATCH_SIZE}) | options)
    return TowerLoader.from_dataloader(plain, towers, seed=3, batch_size=global_rows)


@pytest.mark.parametrize(
    ("options", "same_as"),
    [
        ({}, {"shuffle": False}),
        ({"shuffle": True}, {}),
        ({"shuffle": True, "drop_last": True}, {"drop_last": True}),
        ({"collate_fn": collate_with_noise}, {"shuffle": False, "collate_fn": collate_with_noise}),
        (
            {"sampler": WeightedRandomSampler(torch.ones(NUM_EXAMPLES), 12)},
            {"order": lambda seed, epoch: WeightedRandomSampler(torch.ones(NUM_EXAMPLES), 12)},
        ),
        ({"sampler": RandomSampler(range(9))}, {"order": lambda seed, epoch: RandomSampler(range(9))}),
        ({"sampler": [3, 1, 2]}, {"order": lambda seed, epoch: [3, 1, 2]}),
        ({"num_workers": 1, "multiprocessing_context": "fork", "prefetch_factor": 3}, {"shuffle": False}),
    ],
)
def test_a_dataloader_is_taken_over(options, same_as):
    assert_same_bits(read(taken_over(**options)), read(make_loader(**same_as)))


def test_every_placement_reads_the_same_and_each_worker_its_own_rows_only():
    sampler = SubsetRandomSampler(range(3, 20))
    expected = read(taken_over(sampler=sampler))
    assert sorted(examples_of(expected)) == sorted([*range(3, 20)] * 2)
    for num_workers in (2, 3):
        placement = Placement.even(5, num_workers)
        parts = [read(taken_over(placement, rank, sampler=sampler)) for rank in range(num_workers)]
        assert_same_bits(merge(parts), expected)


def test_the_global_batch_may_be_another_one():
    assert [batch.rows for batch in read(taken_over(global_rows=20), epochs=1)] == [20, 3]


class Epochs(SequentialSampler):
    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter([self.epoch, 7])


def test_samplers_hear_of_the_epoch():
    loader = taken_over(sampler=Epochs(Noisy()))
    assert examples_of(read(loader, epochs=3)) == [0, 7, 1, 7, 2, 7]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"batch_sampler": [[0, 1], [2]]}, "a batch_sampler of its own"),
        ({"batch_sampler": BatchSampler(range(9), 2, False)}, "a batch_sampler of its own"),
        ({"batch_size": None}, "batch_size=None"),
        ({"generator": torch.Generator(), "shuffle": True}, "a sampler with a generator"),
        ({"generator": torch.Generator()}, "a generator"),
        ({"worker_init_fn": print}, "a worker_init_fn"),
        ({"in_order": False}, "in_order=False"),
        ({"sampler": DistributedSampler(Noisy(), 2, 0)}, "a DistributedSampler"),
    ],
)
def test_what_cannot_be_kept_is_refused(options, named):
    with pytest.raises(ConfigError, match=f"loader has {named}, which a TowerLoader cannot keep: "):
        taken_over(**options)


def test_streams_and_other_things_are_refused():
    towers = make_loader()._towers
    with pytest.raises(ConfigError, match=r"an IterableDataset, .*: give it to samestep.StreamLoader"):
        TowerLoader.from_dataloader(DataLoader(Endless()), towers)
    with pytest.raises(
        ConfigError, match=r"loader is a TensorDataset: expected a torch\.utils.data.DataLoader"
    ):
        TowerLoader.from_dataloader(TensorDataset(torch.zeros(3)), towers)
