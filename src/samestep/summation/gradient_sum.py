"""What one worker's towers hand in during a step: folded as it comes, sent as soon as it is whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from samestep.errors import UsageError
from samestep.summation.exchange import Exchange
from samestep.summation.norms import norms_of, squared_sum
from samestep.summation.sparse import leaf
from samestep.summation.tree import Gradients, TreeSum, add_gradients

__all__ = ["Contributions", "TowerFigures", "grad_dtype", "watch_backward"]


def grad_dtype(parameter: Tensor) -> torch.dtype:
    """Return the dtype of a parameter's gradients: torch's `grad_dtype`, where any is allowed its own."""
    return parameter.grad_dtype or parameter.dtype


@dataclass(frozen=True)
class TowerFigures:
    """A tower's numbers: its weight, its loss sums [K], and its counters (1-dim)."""

    weight: float | Tensor
    loss_sums: Tensor
    counters: Tensor


def _stack(figures: Sequence[TowerFigures], like: Tensor) -> Tensor:
    """Return float64 [towers, 1 + K + C]: one row a tower, with as few small kernels as will do."""
    losses = torch.stack([each.loss_sums for each in figures]).to(like)
    weights = [each.weight for each in figures]
    if any(isinstance(weight, Tensor) for weight in weights):
        weighed = torch.stack(
            [torch.as_tensor(w, device=like.device).detach().reshape(()).to(like) for w in weights]
        )
    else:
        weighed = torch.tensor(weights, dtype=like.dtype, device=like.device)
    counters = torch.stack([each.counters for each in figures]).to(like)
    return torch.cat([weighed[:, None], losses, counters], dim=1)


class Contributions:
    """One step's contributions of one worker.

    Gradients are taken off the parameters, not copied, and folded along the canonical tree. Where a
    tower's left sibling in the tree is at hand, its sum stays on the parameters and autograd itself adds
    to it. The gradients of the last tower with rows are not kept: as soon as backward has produced a
    bucket's worth of them, the bucket is folded and sent. Gradients that may be sparse are folded apart: each
    tower's is coalesced by itself, and they are handed over with the rest.

    A step that measures keeps each tower's gradients apart until their norms are taken, and folds them
    then: the same additions, so the same bits, for one more gradient in memory.

    Args:
        exchange: where the partial sums go.
        parameters: those that get gradients; their `grad` must be None.
        dtypes: in which dtype each parameter's gradient is summed.
        towers: this worker's.
        num_towers: of the whole step, T.
        measures: whether to take the norms of each tower's gradient.

    Attributes:
        towers: see above.
        device: of the parameters.
    """

    def __init__(
        self,
        exchange: Exchange,
        parameters: Sequence[Tensor],
        dtypes: Sequence[torch.dtype],
        towers: range,
        num_towers: int,
        *,
        measures: bool = False,
    ) -> None:
        self._exchange = exchange
        self._parameters = parameters
        self._dtypes = dtypes
        self.towers = towers
        self.device = parameters[0].device
        self._figures: list[TowerFigures] = []
        self._moments: TreeSum[Tensor] = TreeSum(num_towers, add=Tensor.add_)
        self._gradients: TreeSum[Gradients] = TreeSum(num_towers, add=add_gradients)
        self._sparse: TreeSum[Gradients] = TreeSum(num_towers, add=add_gradients)
        self._norms: dict[int, dict[int, list[Tensor]]] | None = {} if measures else None
        self._live = range(towers.start, towers.start)
        self._missing: list[set[int]] = []
        self._num_sent = 0

    def add_figures(self, tower: int, figures: TowerFigures, moments: Tensor) -> None:
        """Take a tower's figures and batch-norm moments (float64 [S]), in tower order."""
        self._figures.append(figures)
        self._moments.push(range(tower, tower + 1), moments)

    def send_figures(self) -> None:
        """Send the figures of all this worker's towers; must come before the last backward."""
        self._exchange.figures(_stack(self._figures, self._moments.nodes[0][1]), self._moments.nodes)

    def before_backward(self, tower: int, *, is_last: bool) -> None:
        """Prepare the parameters for a tower's backward; `is_last` says to send what it produces."""
        self._live = range(tower, tower + 1)
        left = self._gradients.pop_sibling(self._live) if self._norms is None else None
        if left is not None and self._can_stay(left[1]):
            self._live = range(left[0].start, tower + 1)
            for parameter, gradient in zip(self._parameters, left[1], strict=True):
                parameter.grad = gradient
        elif left is not None:
            self._gradients.push(*left)
        if is_last:
            self._missing = [set(bucket.parameters) for bucket in self._exchange.buckets]

    def after_backward(self, *, is_last: bool) -> None:
        """Take the gradients that backward has left on the parameters, or send what is not sent yet."""
        if self._exchange.sparse:
            self._sparse.push(range(self._live.stop - 1, self._live.stop), self._take_sparse())
        if is_last:
            self._send_buckets()
        else:
            self._gradients.push(self._live, self._take(range(len(self._parameters))))

    def gradient_ready(self, index: int) -> None:
        """Note that backward has finished a parameter's gradient; send the buckets that are whole."""
        if not self._missing:
            return
        bucket = next((n for n, missing in enumerate(self._missing) if index in missing), None)
        if bucket is None:
            raise UsageError(
                f"parameter {self._exchange.names[index]} got a gradient twice in one backward (reentrant "
                "activation checkpointing does that); use torch.utils.checkpoint with use_reentrant=False"
            )
        self._missing[bucket].discard(index)
        while self._num_sent < len(self._missing) and not self._missing[self._num_sent]:
            self._send_next()

    def send_rest(self) -> None:
        """Send what is not sent yet: buckets with parameters that got no gradient, and sparse gradients."""
        self._send_buckets()
        if self._exchange.sparse:
            for tower in range(self._live.stop, self.towers.stop):
                self._sparse.push(range(tower, tower + 1), [None] * len(self._exchange.sparse))
            self._exchange.sparse_gradients(self._sparse.nodes)

    def _send_buckets(self) -> None:
        while self._num_sent < len(self._exchange.buckets):
            self._send_next()

    def _send_next(self) -> None:
        """Fold the next bucket's last gradients, in the order that all workers share, and send it."""
        bucket = self._exchange.buckets[self._num_sent]
        folded = TreeSum(self._gradients.num_leaves, add=add_gradients)
        for span, gradients in self._gradients.nodes:
            folded.push(span, [gradients[index] for index in bucket.parameters])
            for index in bucket.parameters:
                gradients[index] = None
        if self._live:
            folded.push(self._live, self._take(bucket.parameters))
        for tower in range(self._live.stop, self.towers.stop):  # those without rows come last
            folded.push(range(tower, tower + 1), [None] * len(bucket.parameters))
        self._exchange.bucket(bucket, folded.nodes)
        self._num_sent += 1

    def _can_stay(self, left: Gradients) -> bool:
        """Whether autograd can add to these sums: it wants the dtype of `p.grad`."""
        return all(
            gradient is None or gradient.dtype == grad_dtype(parameter)
            for gradient, parameter in zip(left, self._parameters, strict=True)
        )

    def _take(self, indices: Sequence[int]) -> Gradients:
        """Take gradients for the buckets, where sparse ones do not belong."""
        taken = self._take_any(indices)
        for position, gradient in enumerate(taken):
            if gradient is not None and gradient.is_sparse:
                taken[position] = None
                self._exchange.refuse_sparse(indices[position])
        self._measure(indices, taken)
        return taken

    def _take_sparse(self) -> Gradients:
        indices = [parameter.index for parameter in self._exchange.sparse]
        taken = [None if gradient is None else leaf(gradient) for gradient in self._take_any(indices)]
        self._measure(indices, taken)
        return taken

    def _take_any(self, indices: Sequence[int]) -> Gradients:
        taken: Gradients = []
        for index in indices:
            gradient, self._parameters[index].grad = self._parameters[index].grad, None
            if gradient is not None and gradient.dtype != self._dtypes[index]:
                gradient = gradient.to(self._dtypes[index])
            taken.append(gradient)
        return taken

    def _measure(self, indices: Sequence[int], gradients: Gradients) -> None:
        """In a step that measures, note the norms of what the tower whose turn it is has just produced."""
        if self._norms is None:
            return
        norms = self._norms.setdefault(self._live.start, {})
        for index, gradient in zip(indices, gradients, strict=True):
            if gradient is not None:
                norms[index] = norms_of(gradient)

    @property
    def measures(self) -> bool:
        """Whether the norms of each tower's gradient are taken."""
        return self._norms is not None

    def squares(self) -> Tensor:
        """Return the squared norm of what each of this worker's towers handed in, float64 [towers]."""
        assert self._norms is not None
        return torch.stack([self._square(self._norms.get(tower, {})) for tower in self.towers])

    def _square(self, norms: Mapping[int, Sequence[Tensor]]) -> Tensor:
        """Add the squared norms of parameters, in their own order, whatever the one in which they came."""
        return squared_sum([norm for index in sorted(norms) for norm in norms[index]], self.device)


def watch_backward(parameters: Mapping[int, Tensor], find: Callable[[], Contributions | None]) -> None:
    """Tell the contributions that `find` returns, if any, whenever backward has finished a gradient."""
    for index, parameter in parameters.items():

        def ready(_: Tensor, index: int = index) -> None:
            contributions = find()
            if contributions is not None:
                contributions.gradient_ready(index)

        parameter.register_post_accumulate_grad_hook(ready)
