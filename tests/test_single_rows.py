"""A warning before the first step where batch norm would get a tower of one row; and only there."""

import warnings
from itertools import product

import pytest
import torch
from torch import nn

from samestep import Towers
from samestep.data.loader import TowerLoader

ALL_REMEDIES = "drop_last=True or {} or at most 2 towers"


def model_with(layer):
    return nn.Sequential(nn.Linear(2, 3), layer)


def loader_of(model, examples, batch_size, num_towers=4, **options):
    """Make a loader; return it with the warnings."""
    towers = Towers(model, num_towers)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = TowerLoader(torch.randn(examples, 2), batch_size, towers, **options)
    assert all(warning.filename == __file__ for warning in caught)
    return loader, [str(warning.message) for warning in caught]


@pytest.mark.parametrize(
    ("examples", "batch_size", "drop_last", "expected"),
    [
        (64, 16, False, None),
        (8, 8, False, None),
        (
            69,
            16,
            False,
            ("the last batch of an epoch has 5 rows, and 3", "drop_last=True or {} or at most 2 towers"),
        ),
        (65, 16, False, ("the last batch of an epoch has 1 row, and 1", "drop_last=True or {}")),
        (69, 16, True, None),
        (70, 7, True, ("a batch has 7 rows, and 1", "{} or at most 3 towers")),
        (5, 16, False, ("the last batch of an epoch has 5 rows, and 3", "{} or at most 2 towers")),
    ],
)
def test_the_warning_has_the_numbers_and_the_remedy(examples, batch_size, drop_last, expected):
    _, said = loader_of(model_with(nn.BatchNorm1d(3)), examples, batch_size, drop_last=drop_last)
    if expected is None:
        assert said == []
        return
    rows, remedy = expected
    refused = "of 4 towers get only one, which BatchNorm1d (model.1) refuses as [1, features]"
    assert said == [f"{rows} {refused}: use {remedy.format('another batch_size')}"]


@pytest.mark.long
@pytest.mark.parametrize("num_towers", [3, 1, 2])
def test_it_warns_where_torch_would_refuse_and_nowhere_else(num_towers):
    for examples, batch_size, drop_last in product(range(1, 9), range(1, 9), (False, True)):
        if drop_last and batch_size > examples:
            continue
        model = model_with(nn.BatchNorm1d(3))
        loader, said = loader_of(model, examples, batch_size, num_towers, drop_last=drop_last)
        assert bool(said) == is_refused(model, loader), (examples, batch_size, drop_last)


def is_refused(model, loader):
    try:
        for batch in loader:
            for rows in batch.slices.values():
                model(rows)
    except ValueError:  # expected more than 1 value per channel
        return True
    return False


@pytest.mark.parametrize(
    "layer", [nn.BatchNorm1d(3).eval(), nn.BatchNorm2d(3), nn.LayerNorm(3), nn.Identity()]
)
def test_other_layers_and_frozen_ones_take_one_row(layer):
    assert loader_of(model_with(layer), 5, 5)[1] == []


def test_a_compiled_model_is_named_as_the_model():
    model = torch.compile(model_with(nn.BatchNorm1d(3)), backend="eager")
    assert "BatchNorm1d (model.1)" in loader_of(model, 5, 5)[1][0]
