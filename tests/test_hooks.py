"""Hooks on parameters, looked at whenever somebody may have put one."""

import warnings
from functools import partial

import pytest
import torch
from torch import nn

from samestep import Towers, UsageError
from samestep.watching.model.hooks import HookCheck

X = torch.ones(4, 3)


def take_step(towers):
    for tower in towers(X):
        tower.backward(towers.model(tower.batch).mean())
    towers.average()


def test_hooks_are_found_whatever_was_there_before():
    model = nn.Linear(3, 2)
    look = partial(HookCheck(["weight", "bias"], list(model.parameters())), warns=True)
    look()
    for _ in range(2):
        hook = model.bias.register_post_accumulate_grad_hook(lambda _: None)
        for _ in range(2):
            with pytest.raises(UsageError, match=r"^bias: a post-accumulate-grad hook"):
                look()
        hook.remove()
        look()


def test_a_hook_on_a_gradient_is_told_once_in_the_users_line():
    model = nn.Linear(3, 2)
    towers = Towers(model, 2)
    take_step(towers)
    for parameter in model.parameters():
        hook = parameter.register_hook(lambda gradient: gradient)
        with pytest.warns(
            UserWarning, match=r"^a hook on (weight|bias) sees each tower's summed gradient"
        ) as told:
            take_step(towers)
        assert [each.filename for each in told] == [__file__]
        hook.remove()
        with warnings.catch_warnings():
            parameter.register_hook(lambda gradient: gradient)
            take_step(towers)
