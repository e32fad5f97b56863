"""The outputs of each tower's forward: nested tensors, rows first, gathered from all workers."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from samestep.errors import UsageError
from samestep.workers.collectives import gather_objects
from samestep.workers.job import Job

__all__ = ["Outline", "gather", "take_apart"]


class _Kind(NamedTuple):
    """A tensor's dtype, device and shape."""

    dtype: torch.dtype
    device_type: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        shape = ", ".join(["rows", *map(str, self.shape[1:])])
        return f"{str(self.dtype).removeprefix('torch.')} [{shape}] on {self.device_type}"

    def empty(self, device: torch.device) -> Tensor:
        """Return memory for receiving such a tensor from another worker."""
        own_device = device if self.device_type == device.type else "cpu"
        return torch.empty(self.shape, dtype=self.dtype, device=own_device)


@dataclass(frozen=True)
class Outline:
    """The structure of a tower's outputs; in `nest`, each tensor is replaced by its index."""

    kinds: tuple[_Kind, ...]
    nest: Any

    @property
    def spec(self) -> pytree.TreeSpec:
        """How the tensors are nested."""
        return pytree.tree_structure(self.nest)

    @property
    def sizes(self) -> str:
        """The tensors' dtypes and shapes, in words."""
        return ", ".join(f"{str(k.dtype).removeprefix('torch.')} {list(k.shape)}" for k in self.kinds)

    def difference(self, other: Outline) -> str | None:
        """Describe the first difference between two towers' outputs, other than the number of rows."""
        if self.spec != other.spec:
            return f"{self.nest}, {other.nest}"
        pairs = enumerate(zip(map(str, self.kinds), map(str, other.kinds), strict=True))
        return next((f"tensor {n}: {mine}, {theirs}" for n, (mine, theirs) in pairs if mine != theirs), None)


def take_apart(outputs: Any) -> tuple[list[Tensor], Outline]:
    """Return the tensors of a nest, and its structure."""
    tensors, spec = pytree.tree_flatten(outputs)
    if not tensors:
        raise UsageError(
            f"forward returned a {type(outputs).__name__} without tensors: expected dense tensors, rows first"
        )
    for each in tensors:
        if not isinstance(each, Tensor) or each.ndim == 0 or each.layout != torch.strided:
            raise UsageError(f"forward returned {_name(each)}: expected dense tensors, rows first")
    nest = pytree.tree_unflatten(list(range(len(tensors))), spec)
    try:
        pickle.dumps(nest)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UsageError(
            f"forward returned a structure that cannot be sent to other workers ({error}): use dicts and "
            "tuples"
        ) from None
    return tensors, Outline(tuple(_Kind(t.dtype, t.device.type, tuple(t.shape)) for t in tensors), nest)


def _name(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return "a 0-dimensional tensor" if value.ndim == 0 else f"a tensor with the layout {value.layout}"


def gather(
    job: Job, own: Mapping[int, list[Tensor]], own_outlines: Mapping[int, Outline], where: str
) -> tuple[list[list[Tensor]], pytree.TreeSpec]:
    """Return the tensors of all towers that have rows, in tower order, and how they are nested.

    `own` has the tensors of this worker's towers, contiguous; some workers may have none.
    """
    outlines: list[Mapping[int, Outline]] = gather_objects(job.transport, own_outlines, f"{where}, outputs")
    first = outlines[0][0]  # tower 0 always has rows
    for tower, outline in (item for of_worker in outlines for item in of_worker.items()):
        difference = first.difference(outline)
        if difference:
            raise UsageError(
                f"{where}: forward returned different outputs for towers 0 and {tower} ({difference}); only "
                "the numbers of rows may differ"
            )
    tensors = dict(own)
    others = {worker: of_worker for worker, of_worker in enumerate(outlines) if worker != job.rank}
    for of_worker in others.values():
        for tower, outline in of_worker.items():
            tensors[tower] = [kind.empty(job.device) for kind in outline.kinds]
    outgoing = dict.fromkeys(others, _as_bytes(tensors, own_outlines))
    incoming = {worker: _as_bytes(tensors, of_worker) for worker, of_worker in others.items()}
    job.transport.post(outgoing, incoming, f"{where}, outputs").wait()
    return [tensors[tower] for tower in sorted(tensors)], first.spec


def _as_bytes(tensors: Mapping[int, list[Tensor]], towers: Mapping[int, Outline]) -> list[Tensor]:
    """Return views as bytes, because no backend supports all dtypes."""
    return [tensor.view(-1).view(torch.uint8) for tower in towers for tensor in tensors[tower]]
