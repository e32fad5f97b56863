"""The elements of a parameter that one worker updates, and the optimizer's state for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from samestep.errors import UsageError
from samestep.summation.layout import in_order
from samestep.workers.agreement import hand_over
from samestep.workers.job import Job

__all__ = ["Shard", "gather"]

Entry = Mapping[str, Any]
"""An optimizer's state for a parameter, by name."""


class Shard:
    """The elements of a parameter that one worker updates, in memory order.

    Attributes:
        tensor: what that worker's optimizer gets: the parameter itself, or a flat view of it.
        memory: a view of the elements as bytes, for messages.
    """

    memory: Tensor
    _view: Tensor

    def __init__(self, parameter: Tensor, elements: range, worker: int) -> None:
        self.parameter = parameter
        self.elements = elements
        self.worker = worker
        self.is_whole = len(elements) == parameter.numel()
        self._format = parameter.shape, parameter.stride()
        self._pointer = -1
        self.look()
        self.tensor = parameter if self.is_whole else self._view.detach()
        if not self.is_whole:
            self.tensor.grad_dtype = None  # gradients may have any dtype

    def look(self) -> None:
        """Follow the parameter to its current memory.

        Raises:
            UsageError: its shape or memory format has changed.
        """
        parameter = self.parameter
        if parameter.data_ptr() == self._pointer and parameter.dtype == self._view.dtype:
            return
        if (parameter.shape, parameter.stride()) != self._format:
            shape, strides = self._format
            raise UsageError(
                f"a parameter of shape {list(shape)}, strides {strides}, now has {list(parameter.shape)}, "
                f"{parameter.stride()}: create the ShardedOptimizer after such a change, or create a new one"
            )
        self._pointer = parameter.data_ptr()
        self._view = self._of(parameter)
        self.memory = self._view.view(torch.uint8)

    def _of(self, tensor: Tensor) -> Tensor:
        """Return these elements of a tensor that has the parameter's shape."""
        whole = in_order(tensor.detach(), self.parameter.stride())
        return whole[self.elements.start : self.elements.stop]

    def begin(self) -> None:
        """Show the optimizer the parameter's current elements and gradient."""
        if self.is_whole:
            return
        self.tensor.data = self._view
        gradient = self.parameter.grad
        if gradient is not None:
            self.tensor.grad = self._of(gradient)

    def end(self) -> None:
        """Drop the reference to the gradient."""
        if not self.is_whole:
            self.tensor.grad = None

    def part_of(self, entry: Entry) -> Entry:
        """Return the state for these elements, given a plain optimizer's state for the parameter."""
        return entry if self.is_whole else {name: self._part(value) for name, value in entry.items()}

    def check(self, entry: Entry) -> None:
        """Raise a `ValueError` if a state for the parameter has tensors that cannot be cut as it is."""
        for name, value in () if self.is_whole else entry.items():
            if isinstance(value, Tensor) and value.ndim and value.shape != self.parameter.shape:
                shapes = f"{list(value.shape)}, the parameter {list(self.parameter.shape)}"
                raise ValueError(f"loaded state dict: {name} of a parameter has shape {shapes}")

    def _part(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.ndim == 0:
            return value
        return self._of(value).clone()  # a view would keep the whole tensor alive


def gather(
    shards: Sequence[Sequence[Shard]], kept: Mapping[Tensor, Entry], job: Job, targets: Sequence[int]
) -> dict[Tensor, Entry]:
    """Return a plain optimizer's state, in host memory, on some workers; all must call this.

    Args:
        shards: of each parameter.
        kept: the state of this worker's shards.
        job: of this worker.
        targets: the workers that get the state; the result is empty on the others.
    """
    own = [
        (number, shard.elements.start, pytree.tree_map_only(Tensor, _copy, dict(kept[shard.tensor])))
        for number, found in enumerate(shards)
        for shard in found
        if shard.worker == job.rank and shard.tensor in kept
    ]
    parts: dict[int, dict[int, Entry]] = {}
    for worker in range(job.world_size):
        nest = own if worker == job.rank else None
        what = f"the optimizer's state on worker {worker}"
        nest = hand_over(nest, job, worker, [target for target in targets if target != worker], what)
        for number, start, entry in nest if nest and job.rank in targets else ():
            parts.setdefault(number, {})[start] = entry
    parameters = [found[0].parameter for found in shards]
    return {parameters[number]: _joined(parameters[number], parts[number]) for number in sorted(parts)}


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _joined(parameter: Tensor, parts: Mapping[int, Entry]) -> Entry:
    """Return a plain optimizer's state for a parameter, given its parts' states by first element."""
    first = parts[min(parts)]
    if len(parts) == 1:
        return first
    return {name: _join(parameter, {start: parts[start][name] for start in parts}) for name in first}


def _join(parameter: Tensor, values: Mapping[int, Any]) -> Any:
    first = values[min(values)]
    if not isinstance(first, Tensor) or first.ndim == 0:
        return first
    whole = torch.empty_like(parameter, dtype=first.dtype, device=first.device, requires_grad=False)
    for start, value in values.items():
        in_order(whole, whole.stride())[start : start + len(value)] = value
    return whole
