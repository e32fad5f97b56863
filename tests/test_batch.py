import copy
import weakref
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import samestep
from samestep import LocalBatch, Towers
from samestep.batches.batch import GlobalBatch, Slices
from samestep.batches.columns import Whole
from samestep.batches.copier import Copier
from samestep.errors import BatchError
from samestep.summation.placement import even_ranges

from .simulation import simulate

pytestmark = pytest.mark.sampled(5)

CPU = Copier(torch.device("cpu"))


class Pair(NamedTuple):
    pictures: torch.Tensor
    name: str


def nest(rows):
    return {"x": torch.arange(rows * 6.0).reshape(rows, 2, 3), "pair": Pair(torch.arange(rows), "kept")}


@given(st.integers(0, 40), st.integers(1, 12))
def test_slices_put_together_are_the_batch(rows, num_towers):
    batch = nest(rows)
    whole = GlobalBatch.open(batch)
    assert whole.rows == rows
    slices = [whole.take(span, CPU) for span in even_ranges(rows, num_towers)]
    assert torch.equal(torch.cat([part["x"] for part in slices]), batch["x"])
    assert torch.equal(torch.cat([part["pair"].pictures for part in slices]), batch["pair"].pictures)
    assert all(isinstance(part["pair"], Pair) and part["pair"].name == "kept" for part in slices)


def test_a_slice_is_a_copy_in_memory_of_its_own():
    batch = torch.arange(14.0).reshape(7, 2)
    part = GlobalBatch.open(batch).take(range(3, 5), CPU)
    assert part.untyped_storage().nbytes() == 2 * 2 * 4
    assert part.data_ptr() % 64 == 0
    part.fill_(-1.0)
    assert torch.equal(batch, torch.arange(14.0).reshape(7, 2))


@pytest.mark.parametrize(
    ("batch", "named"),
    [
        ({"name": "a"}, "batch is a dict without tensors"),
        ((), "batch is a tuple without tensors"),
        (
            (torch.zeros(3), {"scale": torch.tensor(1.0)}),
            r"batch\[1\]\['scale'\] is a 0-dimensional tensor",
        ),
        (
            {"x": torch.zeros(3, 2), "y": torch.zeros(4)},
            r"batch\['y'\] has 4 rows, batch\['x'\] has 3: .* use samestep.Whole\(batch\['y'\]\) to give it",
        ),
        (
            (torch.zeros(9, 4, 2), torch.zeros(4)),
            r"if the second dimension of batch\[0\] is its rows, transpose it; use samestep.Whole\(batch",
        ),
    ],
)
def test_batches_that_cannot_be_cut_are_refused(batch, named):
    with pytest.raises(BatchError, match=named):
        GlobalBatch.open(batch)


def fingerprint(batch):
    return GlobalBatch.open(batch).fingerprint()


def test_the_same_values_have_the_same_fingerprint():
    assert fingerprint(nest(9)) == fingerprint(nest(9))
    values = torch.arange(20.0).reshape(4, 5)
    assert fingerprint(values.t().contiguous().t()) == fingerprint(values)
    assert fingerprint(values.clone().requires_grad_()) == fingerprint(values)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_of_nested_tensors_only_the_number_and_the_dtype_count(layout):
    x, one = torch.ones(4, 2), torch.ones(3, 2)
    marks = [
        fingerprint({"x": x, "n": Whole(torch.nested.nested_tensor(rows, layout=layout, dtype=dtype))})
        for rows, dtype in [([x, one], None), ([one, x], None), ([one], None), ([x, one], torch.half)]
    ]
    assert marks[0] == marks[1]
    assert len(set(marks)) == 3


def test_keys_that_are_spelled_alike_are_two_columns():
    x, y = torch.ones(4, 2), torch.zeros(4)
    assert fingerprint({1: x, "a": y}) == fingerprint({"a": y, 1: x})
    assert fingerprint({1: x, "1": y}) == fingerprint({"1": y, 1: x}) != fingerprint({1: y, "1": x})
    assert fingerprint({1: x, "1": "of all", None: 3}) == fingerprint({"1": "of all", None: 3, 1: x})


@pytest.mark.parametrize(
    "other",
    [
        torch.arange(20.0).reshape(4, 5) + 1,
        torch.arange(20.0).reshape(4, 5).double(),
        torch.arange(20.0).reshape(4, 5, 1),
        torch.arange(20.0).reshape(4, 5).flip(0),
        np.arange(20.0).reshape(4, 5),
        (torch.arange(20.0).reshape(4, 5), torch.zeros(4)),
    ],
)
def test_other_values_shapes_and_dtypes_have_another_fingerprint(other):
    assert fingerprint(other) != fingerprint(torch.arange(20.0).reshape(4, 5))


SIZES = [(1, 1), (5, 3), (7, 1024), (64, 777), (129, 2048)]


@given(st.sampled_from(SIZES), st.sampled_from([torch.float32, torch.uint8, torch.bfloat16]), st.data())
@settings(deadline=None)
def test_one_changed_value_is_seen(shape, dtype, data):
    batch = torch.zeros(shape, dtype=dtype)
    before = fingerprint(batch)
    batch.view(-1)[data.draw(st.integers(0, batch.numel() - 1))] = 1
    assert fingerprint(batch) != before


@given(st.sampled_from(SIZES[1:]), st.data())
@settings(deadline=None)
def test_swapped_rows_are_seen(shape, data):
    batch = torch.arange(float(shape[0]))[:, None].expand(shape)
    one, other = data.draw(st.lists(st.integers(0, len(batch) - 1), min_size=2, max_size=2, unique=True))
    order = torch.arange(len(batch))
    order[[one, other]] = order[[other, one]]
    assert fingerprint(batch[order]) != fingerprint(batch)
    names = [f"row {n}" for n in range(len(batch))]
    assert fingerprint([names[n] for n in order]) != fingerprint(names)


def test_the_layout_in_memory_does_not_matter():
    values = torch.randn(64, 3, 40, 40)
    channels_last = values.to(memory_format=torch.channels_last)
    unaligned = torch.cat([torch.zeros(1, dtype=torch.uint8), values.view(torch.uint8).view(-1)])[1:]
    unaligned = np.frombuffer(unaligned.numpy().data, dtype=np.float32).reshape(values.shape)
    assert fingerprint(channels_last) == fingerprint(values)
    assert fingerprint(np.asfortranarray(values.numpy())) == fingerprint(values.numpy())
    assert fingerprint(unaligned) == fingerprint(values.numpy())
    assert fingerprint(values.to(torch.complex64).conj()) == fingerprint(
        values.to(torch.complex64).conj().resolve_conj()
    )


class Opaque:
    pass


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (3, 4),
        ("train", "test"),
        (b"1", b"2"),
        (torch.float16, torch.float32),
        ((224, 224), (224, 225)),
        (samestep.Whole([1, 2]), samestep.Whole([1, 3])),
        (samestep.Whole(torch.zeros(3)), samestep.Whole(torch.ones(3))),
        (samestep.Whole(Opaque()), samestep.Whole({1})),
        (list("abcd"), list("abce")),
        ([{"id": n} for n in range(4)], [{"id": n + 1} for n in range(4)]),
        (
            np.array([{"id": n} for n in range(4)], object),
            np.array([{"id": 2 * n} for n in range(4)], object),
        ),
        (np.array(["a", "b", "c", "d"]), np.array(["a", "b", "c", "e"])),
        ([{"t": torch.zeros(2)}] * 4, [{"t": torch.ones(2)}] * 4),
    ],
)
def test_everything_in_the_nest_counts(one, other):
    x = torch.zeros(4)
    assert fingerprint({"x": x, "y": one}) != fingerprint({"x": x, "y": other})
    assert fingerprint({"x": x, "y": one}) == fingerprint({"x": x.clone(), "y": copy.deepcopy(one)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_workers_with_one_other_value_are_told_so(dtype):
    def work(job):
        model = torch.nn.Linear(40, 1)
        towers = Towers(model, 4, job=job)
        batch = torch.ones(900, 40, dtype=dtype)
        batch[777, 13] += job.rank == 1
        for tower in towers(batch):
            tower.backward(model(tower.batch.float()).mean())
        towers.average()

    for outcome in simulate(work, 3):
        assert "DisagreementError" in outcome.text
        assert "batch fingerprint" in outcome.text
        assert "; expected the whole global batch" in outcome.text


class Unsearched(tuple):
    def __contains__(self, value):
        raise AssertionError("a search for each of T towers takes T² steps")


def test_slices_are_found_without_a_search():
    slices = Slices(Unsearched((1, 2, 5)), lambda tower: 10 * tower)
    assert dict(slices) == {1: 10, 2: 20, 5: 50}
    with pytest.raises(KeyError):
        slices[3]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.int64, torch.complex64])
@pytest.mark.parametrize("shape", [(1,), (5, 0), (3, 1000), (5000, 2)])
def test_fingerprints_are_taken_of_any_shape_and_dtype(shape, dtype):
    assert 0 <= fingerprint(torch.ones(shape, dtype=dtype)) < 2**32


# ---- turns -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["global", "slices"])
def test_no_more_than_two_towers_rows_are_in_memory(given):
    batch = torch.randn(64, 40)
    made = []

    def make(tower):
        made.append(tower)
        return batch[4 * tower : 4 * tower + 4].clone()

    towers = Towers(torch.nn.Linear(40, 1), 16)
    alive = weakref.WeakSet()
    local = LocalBatch(64, Slices(range(16), make))
    for tower in towers(batch if given == "global" else local):
        alive.add(tower.batch)
        assert len(alive) <= 1  # at its turn: the loop lets go of a tower after the next one's rows are there
        tower.backward(towers.model(tower.batch).square().mean())
        del tower
    assert made == ([] if given == "global" else list(range(16)))
    towers.average()


def test_rows_are_read_at_a_tower_s_turn():
    made = []
    towers = Towers(torch.nn.Linear(2, 1), 3)
    turns = towers(LocalBatch(3, Slices(range(3), lambda t: made.append(t) or torch.ones(1, 2))))
    assert made == []
    for tower in turns:
        assert made == list(range(tower.index + 1))
        tower.backward(towers.model(tower.batch).mean())
    towers.average()


def test_a_batch_that_is_written_to_before_all_turns_is_refused():
    towers = Towers(torch.nn.Linear(2, 1), 3)
    batch = {"x": torch.ones(6, 2)}
    turns = towers(batch)
    tower = next(turns)
    tower.backward(towers.model(tower.batch["x"]).mean())
    batch["x"].mul_(2)
    with pytest.raises(BatchError, match=r"batch\['x'\] was modified after the step began"):
        next(turns)


def test_a_batch_may_be_written_to_after_the_last_turn():
    towers = Towers(torch.nn.Linear(2, 1), 3)
    batch = torch.ones(6, 2)
    for _ in range(2):
        for tower in towers(batch):
            tower.backward(towers.model(tower.batch).mean())
        batch.mul_(2)
        towers.average()


def test_batches_made_in_inference_mode_are_cut():
    with torch.inference_mode():
        batch = torch.ones(6, 2)
    assert GlobalBatch.open(batch).take(range(2), CPU).shape == (2, 2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_rows_on_a_gpu_are_those_of_the_host():
    device = torch.device("cuda", 0)
    batch = {"x": torch.randn(64, 1 << 16), "pinned": torch.randn(64, 1 << 16).pin_memory()}
    expected = batch["x"].clone(), batch["pinned"].clone()
    model = torch.nn.Linear(1 << 16, 1, device=device)
    towers = Towers(model, 16, job=samestep.Job(device))
    for tower in towers(batch):
        rows = slice(4 * tower.index, 4 * tower.index + 4)
        assert torch.equal(tower.batch["x"].cpu(), expected[0][rows])
        assert torch.equal(tower.batch["pinned"].cpu(), expected[1][rows])
        tower.backward(model(tower.batch["x"]).mean())
    batch["pinned"].zero_()
    towers.average()
