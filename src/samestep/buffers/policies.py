"""How buffers that a forward changes are combined: `Towers(..., buffers={pattern: policy})`.

- `"mean"`: the new value is the mean over the towers' values, weighted by rows, computed in float64. For
  floating-point buffers such as moving averages and codebooks.
- `"first"`: the new value is tower 0's, bit for bit. For any dtype, such as queues and their positions, and
  the vectors of spectral norm.
- `"ignore"`: the buffer is not combined; each pass continues from the previous pass on the same worker. The
  buffer's bits may depend on the placement, and so may weights that depend on the buffer.

Vectors of torch's spectral norms, and buffers of its observers for quantisation, have "first" by default.
With "mean" and "first", every tower starts from the shared value, and contributes the buffer's value at the
call of `tower.backward`. Patterns are those of `fnmatch`, matched with names of `model.named_buffers()`; the
first pattern that matches decides.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.utils import parametrizations
from torch.nn.utils.spectral_norm import SpectralNorm

from samestep.buffers.named_tensors import NamedBuffer
from samestep.buffers.statistics import is_statistic
from samestep.errors import ConfigError
from samestep.summation.layout import unexpanded

__all__ = ["Policy", "assign_policies", "check_policies"]

Policy = Literal["mean", "first", "ignore"]

_MOST_NAMES = 20


def check_policies(buffers: Sequence[NamedBuffer], policies: Mapping[str, Policy]) -> None:
    """Raise unless each policy exists, and each pattern decides the policy of some buffer."""
    deciding = set(_deciding_patterns(buffers, policies).values())
    for pattern, policy in policies.items():
        if policy not in get_args(Policy):
            raise ConfigError(
                f"buffers[{pattern!r}] = {policy!r}: expected one of {', '.join(get_args(Policy))}"
            )
        if pattern not in deciding:
            raise _no_effect(pattern, buffers)


def assign_policies(buffers: Sequence[NamedBuffer], policies: Mapping[str, Policy]) -> dict[str, Policy]:
    """Return the policies, by the buffer's name; buffers without a policy are left out."""
    patterns = _deciding_patterns(buffers, policies)
    for buffer in buffers:
        if buffer.name in patterns:
            _check(buffer, patterns[buffer.name], policies[patterns[buffer.name]])
    follow: dict[str, Policy] = {buffer.name: "first" for buffer in buffers if _follows_first_tower(buffer)}
    return follow | {name: policies[pattern] for name, pattern in patterns.items()}


def _follows_first_tower(buffer: NamedBuffer) -> bool:
    """Whether a buffer belongs to torch's spectral norm or to an observer for quantisation."""
    module = buffer.module
    if isinstance(module, parametrizations._SpectralNorm):
        return True
    hooks = [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, SpectralNorm)]
    if any(buffer.attribute in (f"{hook.name}_u", f"{hook.name}_v") for hook in hooks):
        return True
    quantization = sys.modules.get("torch.ao.quantization")  # None if the program does not use it
    kinds = () if quantization is None else (quantization.ObserverBase, quantization.FakeQuantizeBase)
    return isinstance(module, kinds) and buffer.get() is not None


def _deciding_patterns(buffers: Sequence[NamedBuffer], policies: Mapping[str, Policy]) -> dict[str, str]:
    """Return the first matching pattern of each buffer, by the buffer's name."""
    patterns: dict[str, str] = {}
    for pattern in policies:
        for buffer in buffers:
            if fnmatchcase(buffer.name, pattern) and not is_statistic(buffer):
                patterns.setdefault(buffer.name, pattern)
    return patterns


def _check(buffer: NamedBuffer, pattern: str, policy: Policy) -> None:
    tensor = buffer.get()
    if tensor is None and policy != "ignore":
        raise ConfigError(
            f"buffers[{pattern!r}] = {policy!r}: {buffer.name} has no value before the first forward; "
            "run the model once before making Towers, or use 'ignore'"
        )
    if policy != "ignore" and tensor is not None and _is_expanded(tensor):
        raise ConfigError(
            f"buffers[{pattern!r}] = {policy!r}: {buffer.name} is expanded, so elements share memory and it "
            "cannot be written to: register a clone() of it"
        )
    if policy == "mean" and tensor is not None and not tensor.is_floating_point():
        raise ConfigError(
            f"buffers[{pattern!r}] = 'mean': {buffer.name} is {tensor.dtype}, and only floating-point "
            f"buffers can be averaged; put {buffer.name!r}: 'first' before it"
        )


def _is_expanded(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and unexpanded(tensor).shape != tensor.shape


def _no_effect(pattern: str, buffers: Sequence[NamedBuffer]) -> ConfigError:
    own = [buffer.name for buffer in buffers if not is_statistic(buffer)]
    matched = [buffer.name for buffer in buffers if fnmatchcase(buffer.name, pattern)]
    if not matched:
        return ConfigError(f"buffers[{pattern!r}] matches no buffer: the model has {_list(own)}")
    if set(matched).isdisjoint(own):
        return ConfigError(
            f"buffers[{pattern!r}] matches only {_list(matched)}, of normalisation layers: use the "
            "statistics argument for those"
        )
    return ConfigError(
        f"buffers[{pattern!r}] has no effect: earlier patterns match {_list(matched)}; put it first, or "
        "remove it"
    )


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return (", ".join(names[:_MOST_NAMES]) or "none of its own") + more
