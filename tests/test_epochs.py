"""Tests of the order of examples in each epoch, and of its batches."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from samestep.data.epochs import Epochs
from samestep.errors import ConfigError


def epochs_of(num_examples, batch_size, **options):
    defaults = {"seed": 0, "shuffle": None, "order": None, "drop_last": False}
    return Epochs(range(num_examples), batch_size, **{**defaults, **options})


@given(st.integers(1, 30), st.integers(1, 12), st.integers(0, 3), st.booleans(), st.booleans())
def test_batches_hold_each_example_once(num_examples, batch_size, epoch, shuffle, drop_last):
    if drop_last and num_examples < batch_size:
        with pytest.raises(ConfigError, match="leaves no batch"):
            epochs_of(num_examples, batch_size, shuffle=shuffle, drop_last=drop_last)
        return
    epochs = epochs_of(num_examples, batch_size, shuffle=shuffle, drop_last=drop_last)
    order = epochs.order(epoch, compares=False)
    first = epoch * len(epochs)
    batches = [epochs.rows(order, position) for position in range(first, first + len(epochs))]
    assert all(len(batch) == batch_size for batch in batches[:-1])
    found = np.concatenate(batches)
    left_out = num_examples % batch_size if drop_last else 0
    assert len(found) == len(set(found)) == num_examples - left_out
    assert found.tolist() == (order.tolist() if shuffle else list(range(num_examples)))[: len(found)]


def test_an_epoch_that_goes_on_in_another_order_gets_one_warning():
    orders = iter([[2, 0, 1]] * 3 + [[0, 1, 2]] * 2)
    epochs = epochs_of(3, 2, order=lambda seed, epoch: next(orders))  # two calls check epoch 0
    assert epochs.checksum(epochs.order(0, compares=True)) != 0
    with pytest.warns(UserWarning, match=r"order\(0, 0\) gives other indices than when this epoch began"):
        epochs.order(0, compares=True)
    epochs.order(0, compares=True)


def test_only_an_order_of_the_program_is_part_of_fingerprints():
    epochs = epochs_of(3, 2)
    assert epochs.checksum(epochs.order(0, compares=False)) == 0
    assert epochs.settings == {
        "examples": 3,
        "order": None,
        "batch_size": 2,
        "seed": 0,
        "shuffle": True,
        "drop_last": False,
    }
