import random
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils.data import ChainDataset, IterableDataset, get_worker_info

from samestep import Step, Towers, digest
from samestep.batches.batch import LocalBatch
from samestep.data.epochs import Epochs
from samestep.data.loader import TowerLoader
from samestep.data.readers import BatchedDataset
from samestep.errors import BatchError, ConfigError, NonFiniteError, UsageError
from samestep.streams import generator, seed_globals, stream_seed, uniforms
from samestep.summation.placement import Placement, even_ranges

from .cases import mostly_long
from .jobs import job_of
from .simulation import values

CPU = torch.device("cpu")
NUM_EXAMPLES, BATCH_SIZE, NUM_TOWERS = 23, 7, 5
MODEL = torch.nn.Linear(1, 1)
ALONE = Placement.even(NUM_TOWERS, 1)

# From Python 3.12 on, fork warns where a library has started threads; loader processes use none of them.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")


class Noisy:
    """Each example comes with a number from every global generator, and says how many threads read it."""

    def __init__(self, length=NUM_EXAMPLES):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, example):
        noise = torch.tensor([torch.rand(()), random.random(), np.random.rand()], dtype=torch.float64)
        return {"example": example, "noise": noise, "threads": torch.get_num_threads()}


class NoisyBatches:
    def __len__(self):
        return NUM_EXAMPLES

    def batch(self, examples, seeds):
        return {"example": torch.from_numpy(examples), "noise": torch.from_numpy(uniforms(seeds, 3))}


class TooFewRows(NoisyBatches):
    def batch(self, examples, seeds):
        return torch.zeros(len(examples) - 1)


class HuggingFaceLike(Noisy):
    """Has a method `batch` that is about something else."""

    def batch(self, batch_size, drop_last_batch=False):
        raise NotImplementedError


class Unread(Noisy):
    def __getitem__(self, example):
        raise AssertionError("nothing should be read")


def collate_with_noise(rows):
    return {"example": torch.tensor([row["example"] for row in rows]), "noise": torch.rand(len(rows))}


def make_loader(dataset=None, placement=ALONE, rank=0, *, batch_size=BATCH_SIZE, seed=3, **options):
    towers = SimpleNamespace(model=MODEL, placement=placement, job=job_of(rank, placement.num_workers))
    return TowerLoader(Noisy() if dataset is None else dataset, batch_size, towers, seed=seed, **options)


def at_once(batch):
    """Read a batch's slices now, in order."""
    return replace(batch, slices=dict(batch.slices))


def read(loader, epochs=2):
    return [at_once(batch) for _ in range(epochs) for batch in loader]


def merge(workers):
    """Put the workers' parts of each batch together."""
    merged = []
    for parts in zip(*workers, strict=True):
        assert len({(part.rows, part.position) for part in parts}) == 1
        slices = {tower: batch for part in parts for tower, batch in part.slices.items()}
        assert len(slices) == sum(len(part.slices) for part in parts)
        merged.append(LocalBatch(parts[0].rows, slices, parts[0].position))
    return merged


def read_everywhere(num_workers, **options):
    placement = Placement.even(NUM_TOWERS, num_workers)
    return merge(
        [read(make_loader(placement=placement, rank=rank, **options)) for rank in range(num_workers)]
    )


def assert_same_bits(batches, expected):
    assert len(batches) == len(expected) > 0
    for batch, other in zip(batches, expected, strict=True):
        assert (batch.rows, batch.position) == (other.rows, other.position)
        assert list(batch.slices) == list(other.slices)
        for tower, tensors in batch.slices.items():
            assert all(torch.equal(tensors[name], other.slices[tower][name]) for name in tensors)


def examples_of(batches):
    return [e for batch in batches for part in batch.slices.values() for e in part["example"].tolist()]


@pytest.fixture(autouse=True)
def _global_generators():
    """Leave the global generators to other tests as they were."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    yield
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])


# ---- the same everywhere ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dataset": NoisyBatches()},
        {"collate_fn": collate_with_noise},
        {"drop_last": True, "shuffle": False},
    ],
)
@pytest.mark.parametrize("num_workers", mostly_long([3, 2, 5], 1))
def test_every_placement_reads_the_same(num_workers, options):
    assert_same_bits(read_everywhere(num_workers, **options), read_everywhere(1, **options))


@pytest.mark.sampled
@pytest.mark.parametrize("dataset", mostly_long([NoisyBatches(), Noisy()], 1))
@pytest.mark.parametrize(
    "options",
    [
        {"multiprocessing_context": "fork"},
        {"multiprocessing_context": "forkserver", "persistent_workers": True},  # nothing is inherited
    ],
)
@pytest.mark.usefixtures("forkserver")
def test_loader_processes_read_the_same(dataset, options):
    expected = read(make_loader(dataset))
    seed_globals(99, CPU)  # what the parent has drawn must not matter
    assert_same_bits(read(make_loader(dataset, num_workers=2, **options)), expected)


def test_an_example_has_its_own_stream_in_every_epoch():
    batches = read(make_loader())
    seen = {}
    for batch in batches:
        for part in batch.slices.values():
            for example, noise in zip(part["example"].tolist(), part["noise"], strict=True):
                seen.setdefault(example, []).append(noise)
    for example, noises in seen.items():
        for epoch, noise in enumerate(noises):
            with torch.random.fork_rng():
                torch.manual_seed(stream_seed(3, "example", epoch, example))
                assert noise[0] == torch.rand(()).double()
    assert len({noise[1].item() for noises in seen.values() for noise in noises}) == 2 * NUM_EXAMPLES
    assert len({noise[2].item() for noises in seen.values() for noise in noises}) == 2 * NUM_EXAMPLES


def test_collating_has_its_own_stream_in_every_tower():
    for batch in read(make_loader(collate_fn=collate_with_noise)):
        for tower, part in batch.slices.items():
            stream = generator(3, "collate", batch.position, tower)
            assert torch.equal(part["noise"], torch.rand(len(part["noise"]), generator=stream))


def test_batched_datasets_get_the_seed_of_each_example():
    dataset = NoisyBatches()
    assert isinstance(dataset, BatchedDataset)
    for batch in read(make_loader(dataset)):
        for part in batch.slices.values():
            epoch = batch.position // 4
            seeds = [stream_seed(3, "example", epoch, example) for example in part["example"]]
            assert torch.equal(part["noise"], torch.from_numpy(uniforms(np.array(seeds, dtype=np.uint64), 3)))


def test_tensors_start_where_torch_would_put_them():
    for batch in read(make_loader(NoisyBatches())):
        assert all(tensor.data_ptr() % 64 == 0 for part in batch.slices.values() for tensor in part.values())


def test_examples_are_read_with_one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        batches = read(make_loader(), epochs=1)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert all((part["threads"] == 1).all() for batch in batches for part in batch.slices.values())


@pytest.mark.parametrize("loader_processes", [0, 2])
def test_the_global_generators_are_left_alone(loader_processes):
    def draw():
        return torch.rand(3).tolist(), random.random(), np.random.rand(3).tolist()

    seed_globals(5, CPU)
    expected = draw()
    seed_globals(5, CPU)
    read(make_loader(num_workers=loader_processes), epochs=1)
    assert draw() == expected


# ---- the order -------------------------------------------------------------------------------------


def test_an_epoch_is_the_permutation_of_its_seed_and_number():
    for epoch in range(2):
        order = torch.randperm(NUM_EXAMPLES, generator=generator(3, "order", epoch)).tolist()
        assert examples_of(read(make_loader())[4 * epoch : 4 * epoch + 4]) == order


def test_other_seeds_have_other_orders():
    assert examples_of(read(make_loader(seed=4))) != examples_of(read(make_loader(seed=3)))


def test_without_shuffle_the_order_is_the_dataset_s():
    assert examples_of(read(make_loader(shuffle=False))) == [*range(NUM_EXAMPLES)] * 2


@given(st.integers(1, 40), st.integers(1, 45), st.integers(1, 9), st.booleans())
@settings(max_examples=25)
def test_an_epoch_holds_each_example_once(num_examples, batch_size, num_towers, drop_last):
    if drop_last and batch_size > num_examples:
        return
    loader = make_loader(
        Noisy(num_examples), Placement.even(num_towers, 1), batch_size=batch_size, drop_last=drop_last
    )
    batches = read(loader, epochs=1)
    rows = [batch.rows for batch in batches]
    assert len(loader) == len(batches)
    whole, rest = divmod(num_examples, batch_size)
    assert rows == [batch_size] * whole + [rest] * (rest > 0 and not drop_last)
    examples = examples_of(batches)
    assert len(set(examples)) == len(examples) == sum(rows)
    for batch in batches:
        sizes = [len(span) for span in even_ranges(batch.rows, num_towers) if span]
        assert [len(part["example"]) for part in batch.slices.values()] == sizes
        assert list(batch.slices) == list(range(len(sizes)))


# ---- the position ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", mostly_long([{}, {"num_workers": 2, "persistent_workers": True}, {"num_workers": 2}], 2)
)
def test_a_run_goes_on_from_a_position_in_the_middle(options):
    expected = read(make_loader(), epochs=3)
    loader = make_loader(**options)
    loader.position = 6
    assert loader.epoch == 1
    assert_same_bits([at_once(next(iter(loader)))], expected[6:7])
    assert loader.position == 7  # what was read ahead does not count
    assert_same_bits(read(loader, epochs=2), expected[7:])
    assert (loader.position, loader.epoch) == (12, 3)


def test_setting_the_position_reads_nothing():
    loader = make_loader(Unread())
    loader.position = 10**9
    assert loader.position == 10**9
    assert loader.epoch == 10**9 // 4


def test_the_position_counts_a_batch_when_it_is_handed_out():
    loader = make_loader()
    for count, batch in enumerate(loader, 1):
        assert (batch.position, loader.position) == (count - 1, count)


@pytest.mark.parametrize("position", [-1, 1.0, "1", None, True, np.float64(1)])
def test_positions_that_are_no_counts_are_refused(position):
    loader = make_loader()
    with pytest.raises(ConfigError, match="position = "):
        loader.position = position


def test_an_old_iteration_cannot_go_on_after_the_position_was_set():
    loader = make_loader()
    old = iter(loader)
    next(old)
    loader.position = 0
    with pytest.raises(UsageError, match="position is 0, this iteration is at 1"):
        next(old)


def test_an_old_iteration_cannot_go_on_beside_a_new_one():
    loader = make_loader()
    old = iter(loader)
    next(old)
    next(iter(loader))
    with pytest.raises(UsageError, match="position is 2, this iteration is at 1"):
        next(old)


# ---- placements that change ------------------------------------------------------------------------


@dataclass(frozen=True)
class Cuts:
    """Any contiguous ranges of towers: worker w runs those from cuts[w] to cuts[w + 1]."""

    cuts: tuple[int, ...]

    @property
    def num_towers(self):
        return self.cuts[-1]

    def rows(self, worker, num_rows):
        ranges = even_ranges(num_rows, self.num_towers)
        mine = range(self.cuts[worker], self.cuts[worker + 1])
        return {tower: ranges[tower] for tower in mine if ranges[tower]}


EVERY_STEP = [Cuts(cuts) for cuts in ((0, 1, 5), (0, 4, 5), (0, 2, 5), (0, 4, 5), (0, 3, 5), (0, 1, 5))]
MID_EPOCH = [Cuts((0, 2, 5))] * 3 + [Cuts((0, 4, 5))] * 3 + [Cuts((0, 4, 5))] * 2


def read_under(placements, rank, **options):
    """Read two epochs on one of two workers, of which batch n is asked for under placements[n]."""
    towers = SimpleNamespace(model=MODEL, placement=placements[0], job=job_of(rank, 2))
    loader = TowerLoader(options.pop("dataset"), BATCH_SIZE, towers, seed=3, **options)
    batches = []
    while len(batches) < 8:
        for batch in loader:
            batches.append(at_once(batch))
            towers.placement = placements[len(batches) % len(placements)]
    assert [batch.position for batch in batches] == list(range(8))
    return batches


@pytest.mark.long
@pytest.mark.parametrize("placements", mostly_long([MID_EPOCH, EVERY_STEP], 1))
@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (Noisy(), {}),
        (NoisyBatches(), {}),
        (Noisy(), {"num_workers": 2, "multiprocessing_context": "fork"}),
        (NoisyBatches(), {"num_workers": 2, "persistent_workers": True}),
    ],
    ids=["in process", "background thread", "loader processes", "persistent processes"],
)
def test_each_batch_has_the_rows_of_the_placement_when_it_is_handed_out(dataset, options, placements):
    workers = [read_under(placements, rank, dataset=dataset, **options) for rank in range(2)]
    for rank, batches in enumerate(workers):
        for index, batch in enumerate(batches):
            rows = placements[index % len(placements)].rows(rank, batch.rows)
            assert {t: len(part["example"]) for t, part in batch.slices.items()} == {
                t: len(part) for t, part in rows.items()
            }
    assert_same_bits(merge(workers), read(make_loader(dataset)))


def test_what_was_read_ahead_is_kept_under_an_equal_placement():
    asked = []

    class Counted(NoisyBatches):
        def batch(self, examples, seeds):
            asked.append(len(examples))
            return super().batch(examples, seeds)

    towers = SimpleNamespace(model=MODEL, placement=Cuts((0, 2, 5)), job=job_of(0, 2))
    for batch in TowerLoader(Counted(), BATCH_SIZE, towers):
        assert len([*batch.slices.values()]) == 2
        towers.placement = Cuts((0, 2, 5))
    assert sum(asked) == 3 * 4 + 2 + 3  # three examples again, which all workers compare


# ---- slices one by one -----------------------------------------------------------------------------

READERS = pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (Noisy(), {}),
        (NoisyBatches(), {}),
        (Noisy(), {"num_workers": 2, "multiprocessing_context": "fork"}),
        (Noisy(), {"num_workers": 2, "multiprocessing_context": "fork", "persistent_workers": True}),
    ],
    ids=["in process", "background thread", "loader processes", "persistent processes"],
)


class Noted(Noisy):
    def __init__(self):
        super().__init__()
        self.asked = []

    def __getitem__(self, example):
        self.asked.append(example)
        return super().__getitem__(example)


class Large(Noted):
    """Rows of 4 MiB."""

    def __getitem__(self, example):
        return {**super().__getitem__(example), "rest": torch.zeros(1 << 20)}


def test_slices_are_read_when_they_are_asked_for():
    dataset = Large()
    loader = make_loader(dataset, shuffle=False)
    batch = next(batches := iter(loader))
    assert dataset.asked == []
    batch.slices[0]
    assert dataset.asked == [0, 1, 0]  # one of the first batch is read again, and compared
    batch.slices[1]
    assert dataset.asked == [0, 1, 0, 2, 3]
    assert list(batch.slices) == [0, 1, 2, 3, 4]
    assert len(batch.slices) == 5
    assert 5 not in batch.slices
    batch = next(batches)  # what nobody asked for is not read
    batch.slices[0]
    assert dataset.asked == [0, 1, 0, 2, 3, 7, 8, 7]


def test_small_slices_are_read_together():
    calls = []

    class Counted(NoisyBatches):
        def batch(self, examples, seeds):
            calls.append(len(examples))
            return super().batch(examples, seeds)

    assert_same_bits(read(make_loader(Counted()), epochs=3), read(make_loader(NoisyBatches()), epochs=3))
    assert calls[-5:] == [7, 1, 7, 7, 2]  # the first example of epoch 2 is read again, and compared


@READERS
def test_slices_may_be_read_in_any_order_and_again(dataset, options):
    expected = read(make_loader(dataset), epochs=1)
    found = []
    for batch in make_loader(dataset, **options):
        order = random.Random(batch.position).choices(list(batch.slices), k=4)
        slices = {tower: batch.slices[tower] for tower in order}
        found.append(replace(batch, slices={t: slices.get(t) or batch.slices[t] for t in batch.slices}))
    assert_same_bits(found, expected)


@READERS
def test_batches_may_be_kept_and_read_later(dataset, options):
    expected = read(make_loader(dataset))
    loader = make_loader(dataset, **options)
    first = list(loader)
    batches = iter(loader)
    kept = [next(batches)]
    loader.position = 4
    assert_same_bits([*first, *kept, *list(loader)[1:]], expected)


def test_an_error_while_reading_is_raised_where_the_slice_is_asked_for():
    class Broken(NoisyBatches):
        broken = True

        def batch(self, examples, seeds):
            if self.broken and 4 in examples:
                raise OSError("no such file")
            return super().batch(examples, seeds)

    dataset = Broken()
    expected = read(make_loader(NoisyBatches(), shuffle=False), epochs=1)
    batches = iter(make_loader(dataset, shuffle=False))
    batch = next(batches)
    with pytest.raises(OSError, match="no such file"):
        dict(batch.slices)
    dataset.broken = False
    assert_same_bits([batch, *batches], expected)


def test_a_batch_prints_as_the_slices_that_it_holds():
    batch = next(iter(make_loader(range(7), shuffle=False)))
    assert repr(batch.slices) == repr(dict(batch.slices))


# ---- steps on a loader's batches -------------------------------------------------------------------


class Rows(Noted):
    """Rows of two numbers, one of which may be NaN."""

    def __init__(self, nan=None):
        super().__init__()
        self.nan = nan

    def __getitem__(self, example):
        self.asked.append(example)
        return torch.full((2,), float("nan") if example == self.nan else example / 10)


def square(model, x):
    return model(x).square().mean()


def train(job, kind="mean"):
    torch.manual_seed(0)
    model, dataset = torch.nn.Linear(2, 1), Rows()
    towers = Towers(model, NUM_TOWERS, job=job)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if kind == "whole":
        step = Step(
            towers, lambda model, out, batch: out.square().mean(), optimizer, forward=lambda m, x: m(x)
        )
    elif kind == "counts":
        sums = lambda model, x: {"rows": model(x).square().sum()}  # noqa: E731
        step = Step(towers, sums, optimizer, counts={"rows": len})
    else:
        step = Step(towers, square, optimizer)
    for batch in TowerLoader(dataset, BATCH_SIZE, towers, seed=3):
        step(batch)
    return digest(model), dataset.asked


@pytest.mark.sampled(50)
@pytest.mark.parametrize("num_workers", [3, 2])
@pytest.mark.parametrize("kind", ["mean", "counts", "whole"])
def test_any_number_of_workers_takes_the_same_steps_and_reads_each_example_once(kind, num_workers):
    (expected, asked), *_ = values(lambda job: train(job, kind), 1)
    epochs = Epochs(Rows(), BATCH_SIZE, seed=3, shuffle=None, order=None, drop_last=False)
    again = epochs.order(0, compares=False)[[0, BATCH_SIZE, 2 * BATCH_SIZE]].tolist()
    assert sorted(asked) == sorted([*range(NUM_EXAMPLES), *again])  # the first of three batches, to compare
    found = values(lambda job: train(job, kind), num_workers)
    assert {bits for bits, _ in found} == {expected}
    compared = again * num_workers
    assert sorted(e for _, asked in found for e in asked) == sorted([*range(NUM_EXAMPLES), *compared])


class OwnState(Rows):
    """Rows that depend on more than their index."""

    def __init__(self, kind):
        super().__init__()
        self.draws = {
            "numpy": np.random.default_rng(0).random,
            "python": random.Random(0).random,
            "torch": partial(torch.rand, (), generator=torch.Generator()),
            "counter": partial(len, self.asked),
        }[kind]

    def __getitem__(self, example):
        return super().__getitem__(example) + float(self.draws())


@pytest.mark.parametrize(
    ("kind", "options"),
    [("numpy", {}), ("numpy", {"num_workers": 1}), ("python", {}), ("torch", {}), ("counter", {})],
)
def test_a_dataset_with_a_generator_of_its_own_is_refused(kind, options):
    loader = make_loader(OwnState(kind), **options)
    with pytest.raises(UsageError, match=r"^OwnState: example \d+ is different when it is read again"):
        next(iter(loader)).slices[0]


def test_what_a_pass_writes_to_its_rows_stays_out_of_the_dataset():
    held = [{"boxes": torch.ones(2, 4), "sizes": np.ones(2)} for _ in range(NUM_EXAMPLES)]
    for batch in make_loader(held, collate_fn=list, shuffle=False):
        for rows in batch.slices.values():
            for row in rows:
                row["boxes"].zero_()
                row["sizes"][:] = 0
    assert all(entry["boxes"].all() and entry["sizes"].all() for entry in held)


@pytest.mark.sampled(50)
@READERS
def test_a_gradient_that_is_not_finite_is_traced_by_reading_again(dataset, options):
    del dataset
    model = torch.nn.Linear(2, 1)
    towers = Towers(model, NUM_TOWERS)
    step = Step(towers, square, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = TowerLoader(Rows(nan=4), BATCH_SIZE, towers, shuffle=False, **options)
    with pytest.raises(
        NonFiniteError, match=r"tower 2, rows 4 to 4, loss nan, first in the gradient of weight"
    ):
        step(next(iter(loader)))


def test_the_state_is_the_position_and_what_it_depends_on():
    loader = make_loader()
    next(iter(loader))
    state = loader.state_dict()
    settings = {"batch_size": 7, "seed": 3, "examples": 23, "shuffle": True, "drop_last": False}
    assert state == {"position": 1, "compared": None, "order": None, "order_of_epoch": None, **settings}
    other = make_loader(placement=Placement.even(NUM_TOWERS, 2))
    other.load_state_dict(state)
    assert other.position == 1
    for name in settings:
        with pytest.raises(
            ConfigError, match=f"loader is from a run with {name} = 9, not {settings[name]}: use"
        ):
            other.load_state_dict({**state, "position": 2, name: 9})
    assert other.position == 1


# ---- refusals --------------------------------------------------------------------------------------


class Endless(IterableDataset):
    def __iter__(self):
        return iter(())


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"batch_size": 0}, "batch_size = 0: "),
        ({"batch_size": 2.0}, "batch_size = 2.0: "),
        ({"dataset": Noisy(0)}, r"dataset \(Noisy\) is empty"),
        ({"dataset": Endless()}, "Endless without a length"),
        (
            {"dataset": ChainDataset([Endless()])},
            "ChainDataset without indices.*a StreamLoader reads streams",
        ),
        ({"dataset": {1, 2}}, "set without indices"),
        (
            {"batch_size": 24, "drop_last": True},
            "batch_size = 24 with drop_last leaves no batch of 23 examples",
        ),
        ({"sampler": range(3)}, "sampler is not an option of TowerLoader"),
        ({"batch_sampler": [[1]]}, "batch_sampler is not an option of TowerLoader"),
        ({"generator": torch.Generator()}, "generator is not an option of TowerLoader"),
        ({"worker_init_fn": print}, "worker_init_fn is not an option of TowerLoader"),
        ({"in_order": False}, "in_order is not an option of TowerLoader"),
        ({"dataset": NoisyBatches(), "collate_fn": list}, "collate_fn has no effect on a BatchedDataset"),
    ],
)
def test_settings_that_cannot_be_right_are_refused(options, named):
    with pytest.raises(ConfigError, match=named):
        make_loader(**options)


def test_a_batched_dataset_must_return_a_row_for_each_example():
    with pytest.raises(BatchError, match=r"TooFewRows\.batch returned 1 rows for 2 examples"):
        next(iter(make_loader(TooFewRows()))).slices[0]


def test_a_method_called_batch_alone_makes_no_batched_dataset():
    assert_same_bits(read(make_loader(HuggingFaceLike())), read(make_loader()))


def test_a_dataset_that_grows_is_told_of_instead_of_skipping_rows():
    rows = [torch.ones(1)] * 6
    loader = TowerLoader(rows, 3, Towers(torch.nn.Linear(1, 1), 3))
    assert len(list(loader)) == 2
    rows.append(torch.ones(1))
    with pytest.raises(ConfigError, match=r"dataset has 7 examples, it had 6 .*: make a new one"):
        next(iter(loader))


def test_numpys_integers_are_integers():
    loader = make_loader(batch_size=np.int64(BATCH_SIZE), seed=np.int64(3))
    loader.position = np.int64(1)
    expected = {"position": 1, "batch_size": BATCH_SIZE, "seed": 3}
    state = {name: loader.state_dict()[name] for name in expected}
    assert state == expected
    assert {type(value) for value in state.values()} == {int}
    assert_same_bits(read(loader), read(make_loader())[1:])


class AskingWorker(Noisy):
    def __getitem__(self, example):
        worker = get_worker_info()
        assert worker is None or worker.dataset is self
        seed = torch.initial_seed() if worker is None else worker.seed
        return {"example": example, "seed": seed, "initial": torch.initial_seed()}


def collate_with_seed(rows):
    worker = get_worker_info()
    seed = torch.initial_seed() if worker is None else worker.seed
    seeds = {name: torch.tensor([row[name] for row in rows]) for name in ("example", "seed", "initial")}
    return {**seeds, "collate": torch.tensor([seed, torch.initial_seed()])}


@pytest.mark.long
@pytest.mark.parametrize("collate_fn", [None, collate_with_seed])
def test_the_seed_of_a_loader_process_is_the_examples(collate_fn):
    expected = read(make_loader(AskingWorker(), collate_fn=collate_fn))
    for num_workers in (1, 2):
        found = read(make_loader(AskingWorker(), collate_fn=collate_fn, num_workers=num_workers, timeout=60))
        assert_same_bits(found, expected)
    seeds = [seed for batch in expected for part in batch.slices.values() for seed in part["seed"].tolist()]
    assert len(set(seeds)) == 2 * NUM_EXAMPLES


def test_slices_that_are_read_in_this_process_are_not_in_shared_memory():
    batch = next(iter(make_loader()))
    assert not any(part["noise"].is_shared() for part in batch.slices.values())


# ---- other data of the same length ------------------------------------------------------------------


class Files:
    """Examples with random augmentation; `change` makes them those of another folder."""

    def __init__(self, change=0.0):
        self.change = change

    def __len__(self):
        return NUM_EXAMPLES

    def __getitem__(self, example):
        return torch.tensor([example / 32 + self.change + torch.rand(()).item() + random.random()])


class FilesInBatches(Files):
    def batch(self, examples, seeds):
        return torch.from_numpy(examples[:, None] / 32 + self.change + uniforms(seeds, 1))


ORDERS = {"shuffled": {}, "order": {"order": lambda seed, epoch: torch.randint(NUM_EXAMPLES, (30,))}}


def trained_on(dataset, num_steps, state=None, num_towers=NUM_TOWERS, **options):
    """Take steps from a state, and return the next one."""
    towers = Towers(torch.nn.Linear(1, 1), num_towers)
    loader = TowerLoader(dataset, BATCH_SIZE, towers, **options)
    if state is not None:
        loader.load_state_dict(state)
    while towers.step < num_steps:
        for batch in loader:
            for tower in towers(batch):
                tower.backward(towers.model(tower.batch.float()).mean())
            towers.average()
            if towers.step == num_steps:
                break
    return loader.state_dict()


@pytest.mark.sampled(50)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", [Files, FilesInBatches])
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("num_steps", [37, 2, 8])
def test_a_run_that_continues_with_other_data_gets_a_warning(num_steps, num_workers, kind, order):
    state = trained_on(kind(), num_steps, **ORDERS[order])
    assert state["compared"] is not None
    options = {"num_workers": num_workers, "timeout": 60, **ORDERS[order]}
    assert trained_on(kind(), 1, state, 3, **options)["position"] == num_steps + 1  # warnings are errors
    with pytest.warns(UserWarning, match=r"example \d+ of the dataset, in epoch \d+, is another one"):
        trained_on(kind(0.5), 1, state, 3, **options)


def test_the_warning_comes_once_and_says_what_is_no_fault():
    state = trained_on(Files(), 3)
    with pytest.warns(UserWarning, match=r"is continued: .*; ignore this if the program changes") as found:
        state = trained_on(Files(0.5), 3, state)
    assert len(found) == 1
    assert state["position"] == 6


@pytest.mark.long
def test_a_run_that_goes_back_to_an_earlier_state_reads_its_own_data():
    """As where a worker was lost; the dataset may have a setting that the epoch determines."""
    dataset = Files()
    towers = Towers(torch.nn.Linear(1, 1), NUM_TOWERS)
    loader = TowerLoader(dataset, BATCH_SIZE, towers)
    state = trained_on(dataset, 1)
    for step, batch in zip(range(3), loader, strict=False):
        for tower in towers(batch):
            tower.backward(towers.model(tower.batch.float()).mean())
        towers.average()
        if step == 1:
            dataset.change = 0.5
    loader.load_state_dict(state)
    assert next(iter(loader)).position == 1


def test_an_order_that_depends_on_the_training_is_told_in_the_middle_of_an_epoch():
    weights = torch.zeros(23)
    order = lambda seed, epoch: torch.argsort(weights, stable=True)  # noqa: E731
    loader = make_loader(order=order, shuffle=None)
    next(iter(loader))
    weights[3] = -1
    with pytest.warns(UserWarning, match=r"order\(3, 0\) gives other indices than when this epoch began"):
        next(iter(loader))


def test_only_worker_0_reads_the_example_of_the_last_run():
    state = trained_on(Files(), 3)
    loader = make_loader(Files(0.5), Placement.even(NUM_TOWERS, 2), 1, seed=0)
    loader.load_state_dict(state)
    assert next(iter(loader)).position == 3


# ---- what a slice may hold -------------------------------------------------------------------------


def test_examples_may_hold_themselves():
    rows = [{"x": torch.tensor([float(i)])} for i in range(23)]
    for row in rows:
        row["self"] = row
    loader = make_loader(rows, collate_fn=lambda rows: torch.stack([row["x"] for row in rows]), shuffle=False)
    batch = next(iter(loader))
    assert torch.cat([*batch.slices.values()]).flatten().tolist() == list(range(BATCH_SIZE))
    assert batch.compared() == batch.compared()


def nested(layout, rows):
    return {"x": torch.nested.nested_tensor(rows, layout=layout), "rows": len(rows)}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_collate_fn_may_return_nested_tensors(layout, num_workers):
    dataset = [torch.full((length, 1), length / 8) for length in (2, 4, 3, 1, 5, 2)]
    towers = Towers(torch.nn.Linear(1, 1, bias=False), 2)
    loader = TowerLoader(
        dataset,
        6,
        towers,
        shuffle=False,
        collate_fn=partial(nested, layout),
        num_workers=num_workers,
        timeout=60,
    )
    for batch in loader:
        for tower in towers(batch):
            padded = torch.nested.to_padded_tensor(tower.batch["x"], 0.0)
            tower.backward(towers.model(padded).sum() / tower.batch["rows"])
        assert towers.average().rows == 6
    assert towers.model.weight.grad.item() * 6 == pytest.approx(sum(row.sum().item() for row in dataset))
