from typing import NamedTuple

import pytest
import torch
from hypothesis import given, strategies as st

from samestep.errors import BatchError
from samestep.summation.placement import even_ranges
from samestep.towers.batch import GlobalBatch

CPU = torch.device("cpu")


class Pair(NamedTuple):
    pictures: torch.Tensor
    names: list


def nest(rows):
    return {"x": torch.arange(rows * 6.0).reshape(rows, 2, 3), "pair": Pair(torch.arange(rows), ["kept", 7])}


@given(st.integers(0, 40), st.integers(1, 12))
def test_slices_put_together_are_the_batch(rows, num_towers):
    batch = nest(rows)
    whole = GlobalBatch.open(batch)
    assert whole.rows == rows
    slices = [whole.take(span, CPU) for span in even_ranges(rows, num_towers)]
    assert torch.equal(torch.cat([part["x"] for part in slices]), batch["x"])
    assert torch.equal(torch.cat([part["pair"].pictures for part in slices]), batch["pair"].pictures)
    assert all(isinstance(part["pair"], Pair) and part["pair"].names == ["kept", 7] for part in slices)


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
        ({"names": ["a"]}, "a dict without tensors"),
        ([], "a list without tensors"),
        (
            (torch.zeros(3), {"scale": torch.tensor(1.0)}),
            r"batch\[1\]\['scale'\] is a 0-dimensional tensor",
        ),
        ({"x": torch.zeros(3, 2), "y": torch.zeros(4)}, r"batch\['y'\] has 4 rows, batch\['x'\] has 3"),
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


@pytest.mark.parametrize(
    "other",
    [
        torch.arange(20.0).reshape(4, 5) + 1,
        torch.arange(20.0).reshape(4, 5).double(),
        torch.arange(20.0).reshape(4, 5, 1),
        torch.arange(20.0).reshape(4, 5).flip(0),
        (torch.arange(20.0).reshape(4, 5), torch.zeros(4)),
    ],
)
def test_other_values_shapes_and_dtypes_have_another_fingerprint(other):
    assert fingerprint(other) != fingerprint(torch.arange(20.0).reshape(4, 5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.int64, torch.complex64])
@pytest.mark.parametrize("shape", [(1,), (5, 0), (3, 1000), (5000, 2)])
def test_fingerprints_are_taken_of_any_shape_and_dtype(shape, dtype):
    assert 0 <= fingerprint(torch.ones(shape, dtype=dtype)) < 2**32
