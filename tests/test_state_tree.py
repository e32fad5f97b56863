import json
import math
from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from samestep.checkpoint.durable import parse_json
from samestep.checkpoint.state_tree import from_outline, to_outline
from samestep.errors import ConfigError

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64)
TENSORS = st.builds(
    lambda shape, dtype, seed: torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from(DTYPES),
    st.integers(0, 9),
)
KEYS = st.one_of(st.text(max_size=3), st.sampled_from(("$", "$tuple", "a.b", "a", "b")))
ODD_KEYS = st.one_of(st.integers(), st.booleans(), st.none(), st.tuples(st.integers(), st.text(max_size=2)))
NESTS = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), TENSORS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(ODD_KEYS, inner, max_size=3),
        st.dictionaries(KEYS, st.integers(), max_size=3).map(Counter),
    ),
    max_leaves=8,
)


def same(one, other):
    """Compare types, order of entries and every bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        layout = (one.dtype, one.shape, one.stride())
        return layout == (other.dtype, other.shape, other.stride()) and repr(one.tolist()) == repr(
            other.tolist()
        )
    if isinstance(one, dict):
        return same(list(one.items()), list(other.items()))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return repr(one) == repr(other)


@given(NESTS)
@settings(max_examples=30)
def test_nests_come_back(nest):
    tensors = {}
    outline = to_outline(nest, "state", tensors)
    text = json.dumps(outline, allow_nan=False)
    found = from_outline(parse_json(text.encode()), tensors)
    assert same(found, nest)
    again = {}
    assert json.dumps(to_outline(found, "state", again), allow_nan=False) == text
    assert again.keys() == tensors.keys()


@given(st.permutations(range(4)), st.lists(st.integers(1, 3), min_size=4, max_size=4))
def test_orders_in_memory_come_back(order, shape):
    count = math.prod(shape)
    dense = torch.arange(count).reshape([shape[axis] for axis in order])
    tensor = dense.permute(sorted(range(4), key=order.__getitem__))
    tensors = {}
    outline = to_outline(tensor, "t", tensors)
    found = from_outline(outline, {name: value.contiguous() for name, value in tensors.items()})
    assert torch.equal(found, tensor)
    axes = [axis for axis in range(4) if shape[axis] > 1]  # the stride of the others means nothing
    assert [found.stride(axis) for axis in axes] == [tensor.stride(axis) for axis in axes]


@pytest.mark.parametrize("value", [{1}, b"", object(), math.sqrt, st, OrderedDict(a=[{"b": torch.float32}])])
def test_what_is_no_state_is_refused(value):
    with pytest.raises(ConfigError, match=r"state(\.a\.0\.b)? is a "):
        to_outline(value, "state", {})


def test_numbers_of_other_libraries_become_plain():
    assert type(to_outline(np.float64(0.1), "lr", {})) is float


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.float32(0.1), r"state\.0 is a number of NumPy, float32: expected Python's, as its item\(\)"),
        (np.int64(3), r"state\.0 is a number of NumPy, int64: expected"),
        (np.arange(3), r"state\.0 is an array of NumPy: expected a tensor, as torch\.from_numpy returns"),
        (nn.Linear(1, 1), r"state\.0 is a Linear inside another value: pass it .*, as state_0=\.\.\."),
    ],
)
def test_what_can_be_a_state_is_said(value, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        to_outline([value], "state", {})
