"""What workers exchange in an update of a sharded optimizer, and what must be the same on all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor, nn

from samestep.errors import UsageError
from samestep.sharding.shards import Shard
from samestep.watching.model.weight_hash import Hashes, WeightHash
from samestep.workers.transport import Transport

__all__ = ["Update"]


_NOT_AVERAGED = "call towers.average() before optimizer.step(), and zero_grad() to clear other gradients"
_REMOVED = (
    "it is not part of the model; if its layer was replaced, pass the new one's parameters to "
    "add_param_group(), and call zero_grad()"
)


@dataclass(frozen=True)
class _Place:
    """A parameter or its gradient."""

    name: str
    parameter: Tensor
    is_gradient: bool

    def get(self) -> Tensor | None:
        return self.parameter.grad if self.is_gradient else self.parameter


class Update:
    """Updates of the parameters that `Towers` averages, as long as the set of these stays the same.

    Args:
        averaged: these parameters, on which all workers have agreed.
        shards: of each parameter of the optimizer.
        model: names the parameters.
        num_workers: W.

    Attributes:
        parameters: the averaged parameters that are in the optimizer.
        sent: the shards that each worker sends: all of its own, so that sizes do not depend on gradients.
    """

    def __init__(
        self,
        averaged: Sequence[nn.Parameter],
        shards: Sequence[Sequence[Shard]],
        model: nn.Module,
        num_workers: int,
    ) -> None:
        self.averaged = averaged
        known = set(map(id, averaged))
        self._all = list(chain.from_iterable(shards))
        trained = [shard for shard in self._all if id(shard.parameter) in known]
        self.sent = [
            [s for s in trained if s.worker == worker and s.elements] for worker in range(num_workers)
        ]
        self._others = [each[0].parameter for each in shards if id(each[0].parameter) not in known]
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._removed = set(map(id, self._others)) - set(names)
        self.parameters = list({id(shard.parameter): shard.parameter for shard in trained}.values())
        self._names = [names[id(each)] for each in self.parameters]
        self._hashed: list[str] = []
        self._late = Hashes()

    def look(self) -> None:
        """Follow the parameters to their current memory.

        Raises:
            UsageError: a parameter's shape has changed, its gradient is not an average, or all parameters of
                the model have been replaced.
        """
        for shard in self._all:
            shard.look()
        if self.averaged and len(self._removed) == len(self._others) and not self.parameters:
            raise UsageError(
                "none of the optimizer's parameters is part of the model any more, so nothing would be "
                "trained: create the ShardedOptimizer after load_state_dict(..., assign=True) and the like"
            )
        for parameter in self._others:
            if parameter.grad is not None:
                is_removed = id(parameter) in self._removed
                raise UsageError(
                    f"a parameter of shape {list(parameter.shape)} has a gradient that is not an average "
                    f"over all towers: {_REMOVED if is_removed else _NOT_AVERAGED}"
                )

    def contents(self, transport: Transport) -> list[list[Tensor]]:
        """Return each worker's message as bytes: views of the parameters, but a copy of this worker's own."""
        contents = [[shard.memory for shard in shards] for shards in self.sent]
        own = contents[transport.rank]
        if own and transport.world_size > 1:
            memory = transport.empty(sum(map(len, own)), own[0])
            torch.cat(own, out=memory)
            contents[transport.rank] = list(memory.split(list(map(len, own))))
        return contents

    def hashes(self, step: int) -> Mapping[str, int]:
        """Return hashes of a slice of gradients and weights, by name; on a GPU those of the previous step."""
        pairs = zip(self._names, self.parameters, strict=True)
        used = [(n, p) for n, p in pairs if p.grad is not None and not p.grad.is_sparse]
        if [name for name, _ in used] != self._hashed:
            self._hashed = [name for name, _ in used]
            gradients = [_Place(f"the gradient of {name}", p, is_gradient=True) for name, p in used]
            weights = [_Place(name, p, is_gradient=False) for name, p in used]
            self._hash = WeightHash([*gradients, *weights], (), ())
        if not used:
            return {}
        hashes, late = self._hash.of(step), self._late
        self._late = hashes
        return (hashes if hashes.is_ready else late).by_name()
