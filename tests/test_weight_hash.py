"""The rolling hash covers every byte of the weights once, and sees any one of them change."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from samestep.watching.model.weight_hash import NUM_SLICES, WeightHash

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
]


@dataclass
class Kept:
    name: str
    tensor: Tensor | None

    def get(self):
        return self.tensor


def places(*tensors):
    return [Kept(f"p{index}", tensor) for index, tensor in enumerate(tensors)]


def hashes(watched, steps=NUM_SLICES):
    return [watched.of(step).by_name() for step in range(steps)]


def flip(tensor, byte):
    tensor.view(-1).view(torch.uint8)[byte] ^= 1


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_byte_that_changes_is_seen_within_all_slices_and_named(data):
    sizes = data.draw(st.lists(st.integers(0, 120_000), min_size=1, max_size=6))
    kinds = data.draw(st.lists(st.sampled_from(DTYPES), min_size=len(sizes), max_size=len(sizes)))
    kept = places(*(torch.zeros(n, dtype=d) for n, d in zip(sizes, kinds, strict=True)))
    num_fixed = data.draw(st.integers(0, len(kept)))
    watched = WeightHash(kept[:num_fixed], kept[num_fixed:], kept[:num_fixed:2])
    before = hashes(watched)
    changed = data.draw(st.sampled_from([p for p in kept if p.tensor.numel()] or [None]))
    if changed is None:
        return
    flip(changed.tensor, data.draw(st.integers(0, changed.tensor.nbytes - 1)))
    differ = [
        {name for name in old if old[name] != new[name]}
        for old, new in zip(before, hashes(watched), strict=True)
    ]
    assert {name for names in differ for name in names} == {changed.name}


def test_a_slice_is_a_part_of_the_whole():
    kept = places(torch.zeros(1_000_000), torch.zeros(7), torch.zeros(300_000, dtype=torch.float64))
    watched = WeightHash(kept, [], [])
    for step in range(NUM_SLICES):
        pieces = watched._slices[step]
        assert sum(p.elements.stop - p.elements.start for p in pieces) < 70_000


def test_the_hash_of_a_tensor_is_that_of_all_its_slices():
    kept = places(torch.zeros(1_000_000), torch.zeros(7))
    before = WeightHash(kept, [], []).by_name()
    kept[0].tensor[777_777] = 1
    after = WeightHash(kept, [], []).by_name()
    assert after.keys() == before.keys() == {"p0", "p1"}
    assert (after["p0"] == before["p0"], after["p1"] == before["p1"]) == (False, True)


def test_small_weights_are_hashed_whole_at_every_step():
    kept = places(torch.zeros(100), torch.zeros(50))
    assert list(WeightHash(kept, [], []).of(17).by_name()) == ["p0", "p1"]


def test_swapped_values_are_seen():
    kept = places(torch.arange(100.0))
    watched = WeightHash(kept, [], [])
    before = watched.of(0).by_name()
    kept[0].tensor = kept[0].tensor.flip(0)
    assert watched.of(0).by_name() != before


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(6, 8).T,
        torch.randn(8, 6)[:, ::2],
        torch.randn(1, 3).expand(4, 3),
        torch.randn(()),
        torch.randn(0),
        torch.randn(3, dtype=torch.complex64).conj(),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)} {tensor.stride()}",
)
def test_tensors_of_any_layout_are_hashed(tensor):
    watched = WeightHash(places(tensor), [], [])
    before = watched.of(0).by_name()
    assert watched.of(0).by_name() == before
    if tensor.numel():
        tensor.data[(-1,) * tensor.dim()] = 9
        assert watched.of(0).by_name() != before


def test_only_what_a_pass_must_not_change_is_compared_with_the_end_of_the_passes():
    fixed, shared = places(torch.zeros(3)), [Kept("running_mean", torch.zeros(3))]
    watched = WeightHash(fixed, shared, [])
    assert set(watched.of(0).by_name()) == {"p0", "running_mean"}
    assert set(watched.of(0, fixed_only=True).by_name()) == {"p0"}


def test_an_empty_place_is_left_out():
    assert WeightHash(places(None, torch.zeros(2)), [], []).of(0).by_name().keys() == {"p1"}
