import copy
import doctest
import itertools
import random
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import ChainDataset, DataLoader, IterableDataset, get_worker_info

from samestep import Job, Placement, Step, StreamLoader, TowerLoader, Towers, digest
from samestep.errors import BatchError, ConfigError, DisagreementError, UsageError
from samestep.streams import stream_seed

from .cases import mostly_long
from .simulation import simulate, values

NUM_TOWERS, BATCH_SIZE = 7, 16
SIZES = [
    14,
    13,
    30,
    8,
    9,
    12,
    9,
]  # examples of each shard: towers 0 and 1 have 3 rows, the others 2; tower 3 ends first

# From Python 3.12 on, fork warns where a library has started threads; loader processes use none of them.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),  # more than cores
]


def noise():
    return torch.tensor([torch.rand(()), random.random(), np.random.rand()], dtype=torch.float64)


def uneven(tower, num_towers, epoch, seed):
    assert num_towers == NUM_TOWERS
    for number in range(SIZES[tower]):
        yield {"id": 1000 * epoch + 100 * tower + number, "noise": noise()}


def from_start(tower, num_towers, epoch, seed, start):
    for number in range(start, SIZES[tower]):
        yield {"id": 1000 * epoch + 100 * tower + number, "noise": noise()}


class Asking(IterableDataset):
    """Gives each loader process its part, and keeps its place in itself."""

    def __init__(self, length=100):
        self.numbers = iter(())
        self.length, self.epoch = length, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        worker = get_worker_info()
        self.numbers = iter(range(worker.id, self.length, worker.num_workers))
        return self

    def __next__(self):
        return {"id": 1000 * self.epoch + next(self.numbers), "noise": noise()}


class NotAsking(Asking):
    """Gives all to everybody."""

    def __iter__(self):
        for number in range(self.length):
            yield {"id": 1000 * self.epoch + number, "noise": noise()}


class Plain:
    def __iter__(self):
        return iter(range(100))


def make_towers(job):
    torch.manual_seed(0)
    return Towers(torch.nn.Linear(1, 1), NUM_TOWERS, job=job)


def read(job, source, epochs=2, placements=(), **options):
    """Return the tower's batches of some epochs, the placement of batch n being placements[n]."""
    towers = make_towers(job)
    loader = StreamLoader(source, BATCH_SIZE, towers, seed=3, **options)
    found = []
    for epoch in range(epochs):
        assert loader.epoch == epoch
        for batch in loader:
            found.append((batch.position, batch.rows, dict(batch.slices)))
            if placements:
                towers.placement = Placement(placements[len(found) % len(placements)])
    assert loader.position == len(found)
    return found


def merged(workers):
    """Put the workers' parts of each batch together."""
    found = []
    for parts in zip(*workers, strict=True):
        assert len({(position, rows) for position, rows, _ in parts}) == 1
        slices = {tower: batch for *_, own in parts for tower, batch in own.items()}
        assert list(slices) == list(range(NUM_TOWERS))
        found.append(slices)
    return found


def bits(batches):
    return [
        {tower: {name: each.tolist() for name, each in part.items()} for tower, part in slices.items()}
        for slices in batches
    ]


def read_everywhere(num_workers, source=uneven, **options):
    return bits(merged(values(lambda job: read(job, source, **options), num_workers)))


# ---- the same everywhere ---------------------------------------------------------------------------


@pytest.mark.parametrize("source", [uneven, from_start, Asking(), NotAsking()])
def test_every_placement_reads_the_same(source):
    expected = read_everywhere(1, source)
    assert len(expected) == (8 if callable(source) else 10)  # 2 epochs
    for num_workers in (2, 3):
        assert read_everywhere(num_workers, source) == expected


def test_an_epoch_ends_on_all_workers_where_the_first_tower_cannot_fill_its_rows():
    ids = [batch[3]["id"] for batch in read_everywhere(3)]
    assert ids == [
        [300, 301],
        [302, 303],
        [304, 305],
        [306, 307],
        *[[n, n + 1] for n in range(1300, 1307, 2)],
    ]


@pytest.mark.parametrize("source", [Asking(), NotAsking()])
def test_each_tower_reads_every_t_th_example(source):
    for tower, batch in read_everywhere(2, source)[0].items():
        rows = 3 if tower < 2 else 2
        assert batch["id"] == [tower + NUM_TOWERS * n for n in range(rows)]


def test_any_other_iterable_is_split_too():
    batch, *_ = read(make_towers(None).job, Plain(), epochs=1)
    assert {tower: part.tolist() for tower, part in batch[2].items()} == {
        tower: [tower + NUM_TOWERS * n for n in range(3 if tower < 2 else 2)] for tower in range(NUM_TOWERS)
    }


def test_each_example_has_its_own_stream():
    batches = read_everywhere(1)
    for number, batch in enumerate(batches):
        for tower, part in batch.items():
            rows = 3 if tower < 2 else 2
            for row, (first, *_) in enumerate(part["noise"]):
                seed = stream_seed(3, "stream", number // 4, tower, number % 4 * rows + row)
                drawn = torch.rand((), generator=torch.Generator().manual_seed(seed))
                assert first == drawn.double()
    assert len({each[2] for batch in batches for part in batch.values() for each in part["noise"]}) == 8 * 16


def test_collating_has_its_own_stream_and_the_global_generators_are_left_alone():
    def collate(rows):
        return {"id": torch.tensor([row["id"] for row in rows]), "noise": torch.rand(len(rows))}

    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    loader = StreamLoader(uneven, BATCH_SIZE, make_towers(None), seed=3, collate_fn=collate)
    torch.manual_seed(5)
    for batch in loader:
        for tower, part in batch.slices.items():
            stream = torch.Generator().manual_seed(stream_seed(3, "collate", batch.position, tower))
            assert torch.equal(part["noise"], torch.rand(len(part["noise"]), generator=stream))
    assert torch.equal(torch.rand(3), expected)
    assert get_worker_info() is None


@pytest.mark.parametrize(("source", "loader_processes"), mostly_long([(uneven, 3), (Asking(), 2)], 1))
def test_loader_processes_read_the_same(source, loader_processes):
    options = {"num_workers": loader_processes, "multiprocessing_context": "fork"}
    found = read(make_towers(None).job, source, **options)
    assert bits([slices for *_, slices in found]) == read_everywhere(1, source)


# ---- the position ----------------------------------------------------------------------------------


@pytest.mark.sampled(50)
@pytest.mark.parametrize(("source", "stopped_after"), [(uneven, 3), (from_start, 4), (NotAsking(), 6)])
def test_a_run_goes_on_from_a_position_with_other_workers(source, stopped_after):
    expected = read_everywhere(1, source)

    def begin(job):
        loader = StreamLoader(source, BATCH_SIZE, make_towers(job), seed=3)
        batches = (batch for _ in range(2) for batch in loader)
        found = [next(batches) for _ in range(stopped_after)]
        return [dict(batch.slices) for batch in found], loader.state_dict()

    def go_on(state, job):
        loader = StreamLoader(source, BATCH_SIZE, make_towers(job), seed=3)
        loader.load_state_dict(state)
        found = [(batch.position, batch.rows, dict(batch.slices)) for batch in loader]
        while loader.epoch < 2:
            found += [(batch.position, batch.rows, dict(batch.slices)) for batch in loader]
        return found

    for before, after in ((1, 3), (3, 2), (2, 1)):
        started = values(begin, before)
        states = [state for _, state in started]
        assert all(state == states[0] for state in states)
        rest = bits(merged(values(partial(go_on, states[0]), after)))
        assert rest == expected[stopped_after:]


def test_a_function_that_takes_a_start_reads_nothing_that_was_read():
    starts = []

    def noted(tower, num_towers, epoch, seed, start):
        starts.append(start)
        return from_start(tower, num_towers, epoch, seed, start)

    towers = make_towers(None)
    loader = StreamLoader(noted, BATCH_SIZE, towers, seed=3)
    loader.load_state_dict({**loader.state_dict(), "position": 3, "batches_of_epoch": 3})
    next(iter(loader))
    assert starts == [0, 0, 0, 9, 9, 6, 6, 6, 6, 6]  # the run's first examples are compared


@pytest.mark.parametrize(
    "options", mostly_long([{}, {"num_workers": 2, "multiprocessing_context": "fork"}], 1)
)
def test_placements_may_change_between_any_two_batches(options):
    cuts = [(0, 3, 7), (0, 1, 7), (0, 6, 7), (0, 6, 7)]
    workers = values(lambda job: read(job, uneven, placements=cuts, **options), 2)
    for rank, found in enumerate(workers):
        assert [[*slices] for *_, slices in found][1:4] == [
            [*range(*cuts[number % 4][rank : rank + 2])] for number in (1, 2, 3)
        ]
    assert bits(merged(workers)) == read_everywhere(1)


def test_the_state_of_another_run_is_refused():
    loader = StreamLoader(uneven, BATCH_SIZE, make_towers(None))
    state = loader.state_dict()
    settings = {"batch_size": 16, "seed": 0, "towers": 7}
    place = {"position": 0, "epoch": 0, "batches_of_epoch": 0, "first_examples": None}
    assert state == {**place, **settings}
    for name, value in settings.items():
        with pytest.raises(ConfigError, match=f"loader is from a run with {name} = 9, not {value}: use"):
            loader.load_state_dict({**state, name: 9})


def test_an_old_iteration_cannot_go_on_beside_a_new_one():
    loader = StreamLoader(uneven, BATCH_SIZE, make_towers(None))
    old = iter(loader)
    next(old)
    next(iter(loader))
    with pytest.raises(UsageError, match="position is 2, this iteration is at 1"):
        next(old)


# ---- steps -----------------------------------------------------------------------------------------


def train(job, **options):
    towers = make_towers(job)
    step = Step(
        towers,
        lambda model, batch: (
            model(batch["noise"][:, :1].float() + batch["id"][:, None] / 1e4).square().mean()
        ),
        torch.optim.SGD(towers.model.parameters(), lr=0.1),
    )
    loader = StreamLoader(uneven, BATCH_SIZE, towers, seed=3)
    for _ in range(2):
        for batch in loader:
            assert step(batch).rows == BATCH_SIZE
    assert towers.step == 8
    return digest(towers.model)


def test_any_number_of_workers_takes_the_same_steps():
    (expected,) = values(train, 1)
    for num_workers in (2, 3):
        assert set(values(train, num_workers)) == {expected}


def test_the_next_batch_is_read_between_two_steps():
    towers = make_towers(None)
    batches = iter(StreamLoader(uneven, BATCH_SIZE, towers))
    batch = next(batches)
    for tower in towers(batch):
        tower.backward(towers.model(tower.batch["noise"][:, :1].float()).mean())
    with pytest.raises(UsageError, match=r"cannot read the next batch in step 0: call average\(\)"):
        next(batches)


# ---- errors ----------------------------------------------------------------------------------------


def test_an_error_of_one_worker_is_raised_on_all():
    def broken(tower, num_towers, epoch, seed):
        for number in range(10):
            if (tower, number) == (6, 5):
                raise OSError("no such file")
            yield {"id": number, "noise": noise()}

    outcomes = simulate(lambda job: read(job, broken), 3)
    assert [type(outcome.error) for outcome in outcomes] == [DisagreementError, DisagreementError, OSError]
    assert outcomes[2].error.__notes__ == ["samestep: in example 5 of tower 6's shard in epoch 0"]
    for outcome in outcomes[:2]:
        assert outcome.text.endswith("batch 2 of the stream: worker 2 failed: OSError: no such file")


@pytest.mark.parametrize("num_workers", [1, 3])
def test_a_stream_without_a_whole_batch_is_an_error_on_all_workers(num_workers):
    def short(tower, num_towers, epoch, seed):
        return [1] * (1 if tower > 4 else 9)

    for outcome in simulate(lambda job: read(job, short), num_workers):
        assert isinstance(outcome.error, BatchError)
        assert (
            "epoch 0 of the stream has no batch: tower 5's shard ended after 1 examples, but a batch takes 2"
            in outcome.text
        )


def test_a_stream_that_is_another_one_each_time_is_refused():
    def shuffled(tower, num_towers, epoch, seed):
        return np.random.default_rng().permutation(1000)

    with pytest.raises(
        UsageError, match="tower 0 gets different examples when they are read again: expected a sou"
    ):
        next(iter(StreamLoader(shuffled, BATCH_SIZE, make_towers(None))))


class Numbers(IterableDataset):
    def __iter__(self):
        return iter(range(1000))


class Shuffled(IterableDataset):
    """Shuffles by a generator of its own, which goes on from one tower to the next."""

    own = random.Random(0)

    def __iter__(self):
        numbers = list(range(1000))
        self.own.shuffle(numbers)
        return iter(numbers)


def counting():
    counted = itertools.count()
    return lambda rows: torch.tensor(rows) + next(counted)


def centering():
    kept = {}
    return lambda rows: torch.tensor(rows) - kept.setdefault("first", rows[0])


@pytest.mark.parametrize("num_processes", [1, 0])
@pytest.mark.parametrize(("source", "collate"), [(Shuffled(), None), (Numbers(), counting())])
def test_state_that_goes_on_from_tower_to_tower_is_refused(source, collate, num_processes):
    loader = StreamLoader(
        source, BATCH_SIZE, make_towers(None), collate_fn=collate, num_workers=num_processes
    )
    with pytest.raises(UsageError, match="tower 0 gets different examples when they are read again"):
        next(iter(loader))


def test_state_of_the_first_rows_in_a_loader_process_is_refused():
    loader = StreamLoader(Numbers(), BATCH_SIZE, make_towers(None), collate_fn=centering(), num_workers=1)
    with pytest.raises(UsageError, match="tower 0 gets different examples when they are read again"):
        next(iter(loader))


def test_a_stream_that_is_another_one_on_each_worker_is_refused_on_all():
    def by_rank(rank, tower, num_towers, epoch, seed):
        return range(rank, 1000, 2)

    for outcome in simulate(lambda job: read(job, partial(by_rank, job.rank)), 2):
        assert isinstance(outcome.error, DisagreementError)
        assert "StreamLoader: worker 0 has checksum of tower 0's first examples = " in outcome.text
        assert outcome.text.endswith("not on process, rank or time (docs/data.md)")


def test_a_run_that_goes_on_with_another_stream_is_warned():
    loader = StreamLoader(uneven, BATCH_SIZE, make_towers(None), seed=3)
    next(iter(loader))
    for source in (uneven, from_start):  # the same one, written otherwise
        same = StreamLoader(source, BATCH_SIZE, make_towers(None), seed=3)
        same.load_state_dict(loader.state_dict())
        next(iter(same))
    other = StreamLoader(NotAsking(), BATCH_SIZE, make_towers(None), seed=3)
    other.load_state_dict(loader.state_dict())
    with pytest.warns(
        UserWarning, match="the stream begins with different examples than in the run that is continued"
    ):
        next(iter(other))


def test_a_dataset_that_asks_for_its_part_too_late_is_refused():
    class Late(IterableDataset):
        def __iter__(self):
            yield 0
            worker = get_worker_info()
            yield from range(worker.id, 100, worker.num_workers)

    with pytest.raises(UsageError, match=r"Late called get_worker_info\(\) after its first"):
        next(iter(StreamLoader(Late(), BATCH_SIZE, make_towers(None))))


class Lines(IterableDataset):
    def __init__(self, path):
        self.file = open(path)  # noqa: SIM115 - the test is of a dataset that does this

    def __iter__(self):
        yield from map(float, self.file)


@pytest.mark.parametrize("options", [{}, {"num_workers": 1, "multiprocessing_context": "fork"}])
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_a_source_that_holds_an_open_file_is_refused(tmp_path, options):
    path = tmp_path / "lines"
    path.write_text("\n".join(map(str, range(40))))
    lines = Lines(path)
    loader = StreamLoader(lines, BATCH_SIZE, make_towers(None), **options)
    with pytest.raises(ConfigError) as caught:
        next(iter(loader))
    lines.file.close()
    with pytest.raises(TypeError) as cause:
        copy.deepcopy(lines)
    assert str(caught.value) == (
        f"source is a Lines that cannot be copied for each tower (TypeError: {cause.value}): expected one "
        "that opens files and connections in its __iter__, or make_shard(tower, num_towers, epoch, seed) -> "
        "iterable"
    )


def test_numpys_integers_are_integers():
    loader = StreamLoader(Asking(), np.int64(BATCH_SIZE), make_towers(None), seed=np.int64(0))
    assert type(loader.batch_size) is int
    assert next(iter(loader)).rows == BATCH_SIZE


class Shuffled(IterableDataset):
    """Gives a shuffled list to everybody."""

    def __iter__(self):
        ids = list(range(98))
        random.shuffle(ids)
        for number in ids:
            yield {"id": number, "noise": noise()}


class ShuffledByBuffer(NotAsking):
    def __iter__(self):
        buffer = []
        for number in range(98):
            buffer.append(number)
            if len(buffer) > 10:
                yield {"id": buffer.pop(torch.randint(len(buffer), ()))}
        yield from ({"id": number} for number in buffer)


class ShuffledThenSplit(IterableDataset):
    def __iter__(self):
        ids = np.random.permutation(98).tolist()
        worker = get_worker_info()
        for number in ids[worker.id :: worker.num_workers]:
            yield {"id": number, "noise": noise()}


class ShuffledBySeed(IterableDataset):
    """Reads the seed of its loader process, and not its part."""

    def __iter__(self):
        for number in np.random.default_rng(get_worker_info().seed).permutation(98).tolist():
            yield {"id": number, "noise": noise()}


class ShuffledBySharedSeed(IterableDataset):
    def __iter__(self):
        worker = copy.copy(get_worker_info())
        ids = np.random.default_rng(worker.seed - worker.id).permutation(98).tolist()
        for number in ids[worker.id :: worker.num_workers]:
            yield {"id": number, "noise": noise()}


@pytest.mark.parametrize("num_workers", mostly_long([0, 2], 1))
@pytest.mark.parametrize(
    "source", [Shuffled, ShuffledByBuffer, ShuffledThenSplit, ShuffledBySeed, ShuffledBySharedSeed]
)
def test_a_source_may_shuffle_with_the_global_generators(source, num_workers):
    loader = StreamLoader(source(), 2 * NUM_TOWERS, make_towers(None), num_workers=num_workers)
    orders = []
    for _ in range(2):
        parts = [part for batch in loader for part in batch.slices.values()]
        orders.append([number for part in parts for number in part["id"].tolist()])
        assert sorted(orders[-1]) == list(range(98))
        if "noise" in parts[0]:
            drawn = [tuple(row) for part in parts for row in part["noise"].tolist()]
            assert len(set(drawn)) == 98
    assert orders[0] != orders[1]


class Sized(NotAsking):
    def __len__(self):
        return self.length


def test_a_stream_may_have_a_length():
    chain = ChainDataset([Sized(40), Sized(60)])
    assert len(chain) == 100
    first = next(iter(StreamLoader(chain, BATCH_SIZE, make_towers(None))))
    assert [part["id"].tolist() for part in first.slices.values()][:3] == [[0, 7, 14], [1, 8, 15], [2, 9]]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"batch_size": 6}, r"batch_size = 6: expected an int >= 7"),
        ({"batch_size": 16.0}, r"batch_size = 16.0: expected an int >= 7"),
        ({"source": [1, 2]}, "source is a list, which has a length and indices: use a TowerLoader"),
        ({"source": iter([1])}, "source is a list_iterator, which can be read only once"),
        ({"source": uneven(0, 7, 0, 0)}, "source is a generator, which can be read only once"),
        ({"source": DataLoader(Asking())}, "source is a DataLoader: pass its dataset"),
        ({"source": 5}, "source is a int: expected an iterable"),
        (
            {"source": lambda tower: []},
            r"<lambda> cannot be called with \(tower, num_towers, epoch, seed\) \(too",
        ),
        ({"shuffle": True}, "shuffle is not an option of StreamLoader: a stream has the order of its source"),
        ({"drop_last": False}, "drop_last is not an option of StreamLoader"),
        ({"persistent_workers": True}, "persistent_workers is not an option of StreamLoader"),
    ],
)
def test_settings_that_cannot_be_right_are_refused(options, named):
    with pytest.raises(ConfigError, match=named):
        StreamLoader(**{"source": uneven, "batch_size": 16, "towers": make_towers(None), **options})


def test_make_shard_must_return_an_iterable():
    with pytest.raises(
        ConfigError, match="none returned a NoneType: expected an iterable of the tower's examples"
    ):
        next(iter(StreamLoader(none, BATCH_SIZE, make_towers(None))))


def none(tower, num_towers, epoch, seed):
    pass


@pytest.mark.parametrize("kind", [StreamLoader, TowerLoader])
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"position": None}, "the state of loader: position = None: expected an int >= 0"),
        ({"position": "x"}, "the state of loader: position = 'x': expected an int >= 0"),
        ({"epoch": 1.5}, "the state of loader: epoch = 1.5: expected an int >= 0"),
        ({"compared": 3}, "the state of loader: compared = 3: expected 3 numbers or None"),
        ({"order_of_epoch": [1, "x"]}, "the state of loader: order_of_epoch = 'x': expected an int"),
        (None, "the state of a loader is a NoneType: expected what its state_dict"),
    ],
)
def test_what_is_no_state_is_refused(kind, change, named):
    loader = kind(uneven if kind is StreamLoader else range(40), BATCH_SIZE, make_towers(None))
    before = loader.state_dict()
    with pytest.raises(ConfigError, match=named) if not {*(change or ())} - {*before} else nullcontext():
        loader.load_state_dict(None if change is None else {**before, **change})
    assert loader.state_dict() == before


# ---- other packages --------------------------------------------------------------------------------


def test_hugging_face_streams():
    datasets = pytest.importorskip("datasets")

    def examples(files):
        for numbers in files:
            for number in numbers:
                yield {"id": number}

    for num_files in (1, 14):
        parts = [list(range(n, 210, num_files)) for n in range(num_files)]
        source = datasets.IterableDataset.from_generator(examples, gen_kwargs={"files": parts})
        source = source.shuffle(seed=1, buffer_size=5).map(lambda each: {**each, "noise": noise().tolist()})
        for stream in (source, source.with_format("torch")):
            expected = read_everywhere(1, stream, collate_fn=as_arrays)
            ids = [n for batch in expected for part in batch.values() for n in part["id"]]
            assert len(expected) >= 20
            assert len(set(ids[: len(ids) // 2])) == len(ids) // 2
            for num_workers in (2, 3):
                assert read_everywhere(num_workers, stream, collate_fn=as_arrays) == expected
    split = datasets.distributed.split_dataset_by_node
    for outcome in simulate(lambda job: read(job, split(source, job.rank, 2), collate_fn=as_arrays), 2):
        assert isinstance(outcome.error, DisagreementError)


def as_arrays(rows):
    return {name: torch.tensor(np.array([row[name] for row in rows])) for name in rows[0]}


@pytest.mark.filterwarnings(
    "ignore:Exception ignored.*:pytest.PytestUnraisableExceptionWarning"
)  # open files
def test_webdatasets(tmp_path, monkeypatch):
    webdataset = pytest.importorskip("webdataset")
    for file in range(14):
        with webdataset.TarWriter(str(tmp_path / f"{file}.tar")) as tar:
            for number in range(10):
                tar.write({"__key__": f"{number:03}", "id.cls": 100 * file + number})

    def make_shard(tower, num_towers, epoch, seed):
        files = [str(tmp_path / f"{file}.tar") for file in range(tower, 14, num_towers)]
        random.shuffle(files)
        stream = webdataset.WebDataset(files, shardshuffle=False, nodesplitter=None, empty_check=False)
        return stream.shuffle(5, rng=random).decode().to_tuple("id.cls").map(as_row)

    def as_row(example):
        return {"id": example[0], "noise": noise()}

    files = [str(tmp_path / f"{file}.tar") for file in range(14)]
    dataset = webdataset.WebDataset(files, shardshuffle=False, nodesplitter=None)
    dataset = dataset.shuffle(5, seed=1).decode().to_tuple("id.cls").map(as_row)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for source in (make_shard, dataset):
        expected = read_everywhere(1, source)
        ids = [[n for part in batch.values() for n in part["id"]] for batch in expected]
        assert len(expected) == 12
        assert len({n for batch in ids[:6] for n in batch}) == 6 * BATCH_SIZE  # none twice in an epoch
        assert (ids[:6] == ids[6:]) == (source is dataset)
        for num_workers in (2, 3):
            assert read_everywhere(num_workers, source) == expected
    with pytest.raises(UsageError, match="tower 0 gets different examples when they are read again"):
        read_everywhere(1, dataset.shuffle(5))
    with pytest.raises(ValueError, match="explicit nodesplitter"):
        read_everywhere(1, webdataset.WebDataset(files, shardshuffle=False))


# ---- docs/data.md ----------------------------------------------------------------------------------


def test_the_page_shows_what_happens():
    page = Path(__file__).parents[1] / "docs" / "data.md"
    found = doctest.testfile(str(page), module_relative=False)
    assert found.attempted > 20
    assert found.failed == 0


# ---- one batch after the other -------------------------------------------------------------------------


def test_batches_that_are_asked_for_are_those_of_iterations_from_any_position():
    def work(job):
        towers = make_towers(job)
        loader, other = (StreamLoader(uneven, BATCH_SIZE, towers) for _ in range(2))
        states, found = [loader.state_dict()], []
        while loader.epoch < 2:
            found.append(loader.next_batch())
            states.append(loader.state_dict())
        expected = [batch for _ in range(2) for batch in [*other, None]]
        loader.load_state_dict(states[2])  # an iteration has begun
        again = loader.next_batch()
        return [ids(each) for each in (*found, again)], [ids(each) for each in (*expected, expected[2])]

    for found, expected in values(work, 2):
        assert found == expected
        assert None in found


def ids(batch):
    return batch and [part["id"].tolist() for part in batch.slices.values()]


def test_an_epoch_without_a_batch_is_no_end_where_it_is_asked_for_again():
    loader = StreamLoader(lambda *_: iter(()), NUM_TOWERS, make_towers(Job(torch.device("cpu"))))
    for _ in range(2):
        with pytest.raises(BatchError, match="epoch 0 of the stream has no batch"):
            loader.next_batch()
