"""What a forward returns for each tower: nested tensors, rows first. Gathering it from all workers."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from samestep.errors import UsageError
from samestep.workers.collectives import gather_objects
from samestep.workers.job import Job

__all__ = ["AllOutputs", "TowerOutputs", "gather"]


class _Kind(NamedTuple):
    """A tensor but for its rows and values."""

    dtype: torch.dtype
    device_type: str
    row: tuple[int, ...]

    def __str__(self) -> str:
        shape = ", ".join(["rows", *map(str, self.row)])
        return f"{str(self.dtype).removeprefix('torch.')} [{shape}] on {self.device_type}"


@dataclass(frozen=True)
class _Shape:
    """A tower's outputs but for their values; `nest` has a number in each tensor's place."""

    kinds: tuple[_Kind, ...]
    rows: tuple[int, ...]
    nest: Any

    @property
    def spec(self) -> pytree.TreeSpec:
        return pytree.tree_structure(self.nest)

    def is_like(self, other: _Shape) -> bool:
        """Whether both are the same, rows included."""
        return self.rows == other.rows and self.difference(other) is None

    def difference(self, other: _Shape) -> str | None:
        """Say where two towers' outputs differ in more than their rows."""
        if self.spec != other.spec:
            return f"{self.nest}, {other.nest}"
        pairs = enumerate(zip_longest(self.kinds, other.kinds))
        return next((f"tensor {n}: {mine}, {theirs}" for n, (mine, theirs) in pairs if mine != theirs), None)


@dataclass(frozen=True)
class TowerOutputs:
    """One tower's outputs, taken apart.

    Attributes:
        tensors: in the order of the nest, each with rows first.
        shape: what they are but for their values.
    """

    tensors: list[Tensor]
    shape: _Shape

    @classmethod
    def open(cls, outputs: Any) -> TowerOutputs:
        """Take a nest apart.

        Raises:
            UsageError: something in it is not a tensor, has no rows, or the nest cannot be sent.
        """
        tensors, spec = pytree.tree_flatten(outputs)
        if not tensors:
            raise UsageError(f"forward returned a {type(outputs).__name__} without tensors")
        for each in tensors:
            if not isinstance(each, Tensor) or each.ndim == 0 or each.layout != torch.strided:
                raise UsageError(f"forward returned {_name(each)}: expected dense tensors, rows first")
        nest = pytree.tree_unflatten(list(range(len(tensors))), spec)
        try:
            pickle.dumps(nest)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise UsageError(
                f"forward returned what cannot be sent to other workers ({error}): use dicts and tuples"
            ) from None
        kinds = tuple(_Kind(t.dtype, t.device.type, tuple(t.shape[1:])) for t in tensors)
        return cls(tensors, _Shape(kinds, tuple(map(len, tensors)), nest))

    def copy(self) -> TowerOutputs:
        """Return contiguous copies without a graph: they look alike on every worker."""
        tensors = [t.detach().clone(memory_format=torch.contiguous_format) for t in self.tensors]
        return TowerOutputs(tensors, self.shape)


def _name(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return "a 0-dimensional tensor" if value.ndim == 0 else f"a tensor with the layout {value.layout}"


@dataclass(frozen=True)
class AllOutputs:
    """All towers' outputs, alike on every worker.

    Attributes:
        tensors: of each tower with rows, in tower order.
        spec: how they are nested.
    """

    tensors: list[list[Tensor]]
    spec: pytree.TreeSpec

    def concatenated(self) -> Any:
        """Return the nest with each tensor's rows of all towers, in tower order."""
        columns = zip(*self.tensors, strict=True)
        return pytree.tree_unflatten([torch.cat(column) for column in columns], self.spec)


def gather(job: Job, own: Mapping[int, TowerOutputs], where: str) -> AllOutputs:
    """Return all towers' outputs on every worker.

    Args:
        job: all its workers must call this.
        own: copies of the outputs of this worker's towers that have rows; some workers may have none.
        where: names the step in messages.

    Raises:
        UsageError: towers' outputs differ in more than their rows.
    """
    own_shapes = {tower: outputs.shape for tower, outputs in own.items()}
    all_shapes: list[dict[int, _Shape]] = gather_objects(job.transport, own_shapes, f"{where}, outputs")
    first = all_shapes[0][0]  # tower 0 always has rows
    for tower, shape in (item for shapes in all_shapes for item in shapes.items()):
        difference = first.difference(shape)
        if difference:
            raise UsageError(
                f"{where}: forward returned different outputs for towers 0 and {tower} ({difference}); only "
                "the numbers of rows may differ"
            )
    tensors = {tower: outputs.tensors for tower, outputs in own.items()}
    others = {worker: shapes for worker, shapes in enumerate(all_shapes) if worker != job.rank}
    for shapes in others.values():
        tensors |= {tower: _empty(shape, job.device) for tower, shape in shapes.items()}
    outgoing = {worker: _as_bytes(tensors, own_shapes) for worker in others}
    incoming = {worker: _as_bytes(tensors, shapes) for worker, shapes in others.items()}
    job.transport.post(outgoing, incoming, f"{where}, outputs").wait()
    return AllOutputs([tensors[tower] for tower in sorted(tensors)], first.spec)


def _empty(shape: _Shape, device: torch.device) -> list[Tensor]:
    return [
        torch.empty(
            (rows, *kind.row), dtype=kind.dtype, device=device if kind.device_type == device.type else "cpu"
        )
        for kind, rows in zip(shape.kinds, shape.rows, strict=True)
    ]


def _as_bytes(tensors: Mapping[int, list[Tensor]], towers: Mapping[int, _Shape]) -> list[Tensor]:
    """Return views that every backend can move, whatever the dtype."""
    return [tensor.view(-1).view(torch.uint8) for tower in towers for tensor in tensors[tower]]
