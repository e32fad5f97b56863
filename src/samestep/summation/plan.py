"""The plan of a step's exchange: a frozen value, rebuilt whenever the model or the kind of step changes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from samestep.summation.buckets import (
    DEFAULT_BUCKET_BYTES,
    Bucket,
    Owners,
    Piece,
    lay_out_buckets,
    lay_out_shards,
)
from samestep.summation.layout import Layout
from samestep.summation.placement import Placement
from samestep.summation.tree import subtrees

__all__ = ["BufferLayout", "ParameterLayout", "Plan", "grad_dtype"]

Named = tuple[tuple[str, str], ...]
"""Descriptions by name, in the model's order."""


def grad_dtype(parameter: Tensor) -> torch.dtype:
    """Return the dtype of a parameter's gradients: `grad_dtype`, or the parameter's dtype if that is None."""
    return parameter.grad_dtype or parameter.dtype


@dataclass(frozen=True)
class ParameterLayout:
    """A trainable parameter, and how its gradient is summed."""

    name: str  # as in `model.named_parameters()`
    gradient: Layout
    dtype: torch.dtype  # of the parameter itself
    is_sparse: bool = False  # whether the gradient may be sparse; it is then sent apart from the buckets

    def __str__(self) -> str:
        kind = ", perhaps sparse" if self.is_sparse else ""
        layout = self.gradient
        dtypes = f"{self.dtype}" if layout.dtype == self.dtype else f"{self.dtype}, summed in {layout.dtype}"
        return f"{layout.shape} strides {layout.strides} {dtypes}{kind}"


@dataclass(frozen=True)
class BufferLayout:
    """What each tower contributes to the model's buffers."""

    kinds: Named = ()  # each buffer's shape, dtype and policy, in words
    num_counters: int = 0  # C, integer buffers that count
    num_moments: int = 0  # S, numbers that are added over the towers
    modes: Named = ()  # of the layers with statistics: training or eval, by the statistics' names


@dataclass(frozen=True)
class Plan:
    """All that determines the messages of a step; it must be the same on all workers."""

    placement: Placement
    parameters: tuple[ParameterLayout, ...]  # those that require grad, in the model's order
    buckets: tuple[Bucket, ...]
    buffers: BufferLayout = BufferLayout()
    layers: Named = ()  # the type of each module
    sums: tuple[str, ...] = ()  # names of the loss's sums; none if it is one sum without a name
    is_whole_batch: bool = False  # whether the loss is computed from the whole batch
    new_tensors: Named = ()  # tensors added to the model that do not have worker 0's values yet
    version: int = 0  # how often tensors have been added

    @classmethod
    def of(
        cls,
        placement: Placement,
        parameters: tuple[ParameterLayout, ...],
        buffers: BufferLayout = BufferLayout(),
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ) -> Plan:
        """Make the plan for these parameters, including their buckets."""
        layouts = [None if each.is_sparse else each.gradient for each in parameters]
        buckets = lay_out_buckets(layouts, bucket_bytes, placement.num_workers)
        return cls(placement, parameters, buckets, buffers)

    def sharded(self, owners: Owners) -> Plan:
        """Return the plan of a step in which each worker gets only the averages of its shard."""
        return replace(self, buckets=tuple(lay_out_shards(bucket, owners) for bucket in self.buckets))

    def with_all_shared(self) -> Plan:
        """Return the plan without new tensors, for use after their values have been shared."""
        return replace(self, new_tensors=()) if self.new_tensors else self

    @property
    def is_whole(self) -> bool:
        """Whether every worker averages all buckets, because they are small."""
        return all(bucket.is_whole for bucket in self.buckets)

    @property
    def is_sharded(self) -> bool:
        """Whether each worker gets only the averages of its shard, apart from sparse ones."""
        return self.buckets[0].is_sharded

    @cached_property
    def shards(self) -> list[list[Piece]]:
        """The pieces whose averages each worker gets, if the plan is sharded."""
        workers = range(self.placement.num_workers)
        return [[piece for each in self.buckets for piece in each.sections[w].pieces] for w in workers]

    @cached_property
    def spans(self) -> list[list[range]]:
        """Each worker's range of towers, as whole subtrees of the canonical tree."""
        return [subtrees(towers, self.placement.num_towers) for towers in self.placement.ranges]

    @property
    def num_bytes(self) -> int:
        """The size of one subtree's sums in all buckets, in bytes."""
        return sum(bucket.num_elements * bucket.dtype.itemsize for bucket in self.buckets)

    @cached_property
    def order(self) -> list[int]:
        """The indices of the parameters, in the order of their averages."""
        return [*(index for bucket in self.buckets for index in bucket.parameters), *self.sparse]

    @cached_property
    def sparse(self) -> tuple[int, ...]:
        """The indices of the parameters that may get sparse gradients."""
        return tuple(index for index, each in enumerate(self.parameters) if each.is_sparse)

    @property
    def num_sums(self) -> int:
        """The number of sums in a tower's loss, K."""
        return max(1, len(self.sums))

    @cached_property
    def description(self) -> dict[str, str | Mapping[str, str]]:
        """The plan in words, for the error if workers differ."""
        kind = "of the whole batch" if self.is_whole_batch else ", ".join(map(repr, self.sums)) or "one sum"
        sizes = f"{[bucket.num_elements for bucket in self.buckets]} elements in buckets"
        averages, shards = "on all workers", ""
        if self.is_sharded:
            averages = "in shards, because neither keep_gradients nor a hook on optimizer.step needs all"
            shards = str([[(piece.parameter, piece.elements) for piece in own] for own in self.shards])
        return {
            "placement": str(self.placement.cuts),
            "loss": kind,
            "averages": averages,
            "shards": shards,
            "layer": dict(self.layers),
            "trained parameter": {each.name: str(each) for each in self.parameters},
            "buffer": dict(self.buffers.kinds),
            "mode of": dict(self.buffers.modes),
            "new tensor": dict(self.new_tensors),
            "changes of tensors": str(self.version),
            "sizes": f"{sizes}, {self.buffers.num_counters} counters, {self.buffers.num_moments} moments",
        }

    @cached_property
    def fingerprint(self) -> int:
        """A 63-bit hash of the plan."""
        words = hashlib.blake2b(repr(self.description).encode(), digest_size=8).digest()
        return int.from_bytes(words, "little") >> 1
