"""Tests whether an optimizer's parameters can be divided among several optimizers of its class."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from samestep.errors import ConfigError, one_line
from samestep.sharding.shards import Shard
from samestep.streams import keep_globals, seed_globals

__all__ = ["check_groups", "check_separable"]

_NUM_STEPS = 3


def check_separable(
    optimizer_class: type[Optimizer],
    groups: Sequence[Mapping[str, Any]],
    defaults: Mapping[str, Any],
    device: torch.device,
) -> None:
    """Test whether the update of a matrix is the same with and without a second matrix in the optimizer.

    This finds, for example, a norm over all gradients or a step size for all parameters.

    Args:
        optimizer_class: of the optimizer.
        groups: the settings of each of its groups.
        defaults: its other arguments.
        device: of the parameters.

    Raises:
        ConfigError: the updates differ, or the optimizer keeps state that belongs to no single parameter.
    """
    name = optimizer_class.__name__
    settings = [{name: value for name, value in group.items() if name != "params"} for group in groups]
    make = partial(optimizer_class, **defaults)
    train = partial(_train, make, settings, device)
    try:
        with keep_globals(device):
            (both, optimizer), (first, _), (second, _) = train((0, 1)), train((0,)), train((1,))
    except Exception as error:
        why = one_line(f"{type(error).__name__}: {error}")
        raise ConfigError(f"{name} cannot be sharded: with two small matrices, it raised {why}") from error
    if not all(map(torch.equal, both, first + second)):
        raise ConfigError(
            f"{name} cannot be sharded: its update of a parameter depends on other parameters, as with a "
            "norm over all gradients, or on random numbers; use it unsharded, or without that option"
        )
    plain = Optimizer.state_dict, Optimizer.load_state_dict
    is_plain = (optimizer_class.state_dict, optimizer_class.load_state_dict) == plain
    if not (is_plain and all(isinstance(key, Tensor) for key in optimizer.state)):
        raise ConfigError(
            f"{name} cannot be sharded: it keeps state that belongs to no single parameter; use it unsharded"
        )


def _train(
    make: Callable[[Any], Optimizer],
    settings: Sequence[Mapping[str, Any]],
    device: torch.device,
    rows: Sequence[int],
) -> tuple[list[Tensor], Optimizer]:
    """Train one matrix for each row and group; return the matrices row by row, and the optimizer."""
    seed_globals(0, device)
    matrices = [
        [_wave(1 + 2 * row + 3 * n, device).requires_grad_() for n in range(len(settings))] for row in rows
    ]
    each = zip(copy.deepcopy(settings), zip(*matrices, strict=True), strict=True)
    optimizer = make([{**group, "params": list(own)} for group, own in each])
    for step in range(_NUM_STEPS):
        for row, found in zip(rows, matrices, strict=True):
            for n, matrix in enumerate(found):
                matrix.grad = 100 * _wave(2 + step + 5 * row + 7 * n, device)
        optimizer.step()
    return [matrix.detach() for found in matrices for matrix in found], optimizer


def check_groups(optimizer: Optimizer, given: Sequence[Sequence[Shard]]) -> None:
    """Raise a `ConfigError` if an optimizer has not kept the groups of parameters that it was given."""
    kept = [[id(tensor) for tensor in group["params"]] for group in optimizer.param_groups]
    if kept != [[id(shard.tensor) for shard in shards] for shards in given]:
        raise ConfigError(
            f"{type(optimizer).__name__} cannot be sharded: it leaves out parameters, or makes other groups "
            "of them; pass the groups that it makes as params, with a class that keeps them"
        )


def _wave(frequency: int, device: torch.device) -> Tensor:
    return (
        torch.arange(1, 65, dtype=torch.float32, device="cpu").mul(frequency).sin().reshape(8, 8).to(device)
    )
