"""How a model's own buffers are combined: `Towers(..., buffers={pattern: policy})`.

- `"mean"`: what the towers end with is averaged, weighted by rows, in float64. For floating-point buffers:
  moving averages, codebooks.
- `"first"`: what tower 0 ends with is the next value, to the bit. For any dtype: queues and their positions,
  the vectors of spectral norm.
- `"ignore"`: a pass sees what the pass before it on the same worker left. The buffer's bits may depend on the
  placement, and so may those of the weights if they depend on the buffer.

Vectors of torch's spectral norms, and buffers of its observers for quantisation, have "first" by default.
With the first two, every tower starts the step from the shared value, and ends with what the buffer holds
when `tower.backward` is called. Patterns are those of `fnmatch` over names of `model.named_buffers()`; the
first that matches decides.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Literal, get_args

from torch.nn.utils import parametrizations
from torch.nn.utils.spectral_norm import SpectralNorm

from samestep.buffers.named_buffers import NamedBuffer
from samestep.buffers.statistics import is_statistic
from samestep.errors import ConfigError

__all__ = ["Policy", "assign_policies", "check_policies"]

Policy = Literal["mean", "first", "ignore"]

_MOST_NAMES = 20


def check_policies(buffers: Sequence[NamedBuffer], policies: Mapping[str, Policy]) -> None:
    """Check that each pattern names a policy, and decides for some buffer."""
    deciding = set(_deciding_patterns(buffers, policies).values())
    for pattern, policy in policies.items():
        if policy not in get_args(Policy):
            raise ConfigError(
                f"buffers[{pattern!r}] = {policy!r}: expected one of {', '.join(get_args(Policy))}"
            )
        if pattern not in deciding:
            raise _no_effect(pattern, buffers)


def assign_policies(buffers: Sequence[NamedBuffer], policies: Mapping[str, Policy]) -> dict[str, Policy]:
    """Return the policy of each buffer that has one, by the buffer's name."""
    patterns = _deciding_patterns(buffers, policies)
    for buffer in buffers:
        if buffer.name in patterns:
            _check(buffer, patterns[buffer.name], policies[patterns[buffer.name]])
    follow: dict[str, Policy] = {buffer.name: "first" for buffer in buffers if _follows_first_tower(buffer)}
    return follow | {name: policies[pattern] for name, pattern in patterns.items()}


def _follows_first_tower(buffer: NamedBuffer) -> bool:
    """Whether a buffer is one of torch's own that a forward updates from the shared value."""
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
    """Return the first pattern that matches, by the buffer's name."""
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
    if policy == "mean" and tensor is not None and not tensor.is_floating_point():
        raise ConfigError(
            f"buffers[{pattern!r}] = 'mean': {buffer.name} is {tensor.dtype}, and only floating-point "
            f"buffers can be averaged; put {buffer.name!r}: 'first' before it"
        )


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
