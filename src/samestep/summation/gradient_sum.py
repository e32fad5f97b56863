"""One worker's gradients during a step: added as they come, sent as soon as a bucket is full."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from samestep.errors import UsageError
from samestep.summation import sparse
from samestep.summation.exchange import Exchange
from samestep.summation.gradients import Gradients, add_gradients, norms_of, squared_sum
from samestep.summation.plan import Plan, grad_dtype
from samestep.summation.tree import TreeSum

__all__ = ["GradientSum"]


class GradientSum:
    """Adds the gradients of one worker's towers along the canonical tree: `start`, `backward`, `finish`.

    Gradients are taken off the parameters, not copied. Where a tower's left sibling in the tree is at hand,
    its sum is put back on the parameters first, and autograd itself adds to it. The gradients of the last
    tower with rows are not kept: hooks on the parameters notice when backward has produced a bucket's worth
    of them, and the bucket is folded and sent. Gradients that may be sparse are folded apart: each
    tower's is coalesced by itself, and they are sent at the end.

    A step that measures keeps each tower's gradients apart until their norms are taken, and folds them
    then: the same additions, so the same bits, for one more gradient in memory.

    Args:
        plan: what all workers have agreed on.
        parameters: those of the plan, in its order.
        towers: this worker's.
    """

    def __init__(self, plan: Plan, parameters: Sequence[Tensor], towers: range) -> None:
        self.plan = plan
        self._parameters = parameters
        self._towers = towers
        self._dtypes = [each.gradient.dtype for each in plan.parameters]
        self._bucket_of = {i: n for n, bucket in enumerate(plan.buckets) for i in bucket.parameters}
        self._exchange: Exchange | None = None
        self._clear()
        self._hooks = self._add_hooks() if plan.placement.num_workers > 1 else []

    def _clear(self) -> None:
        num_towers = self.plan.placement.num_towers
        self._dense: TreeSum[Gradients] = TreeSum(num_towers, add=add_gradients)
        self._sparse: TreeSum[Gradients] = TreeSum(num_towers, add=add_gradients)
        self._norms: dict[int, dict[int, list[Tensor]]] | None = None
        self._live = range(self._towers.start, self._towers.start)
        self._missing: list[set[int]] = []
        self._num_sent = 0

    def start(self, exchange: Exchange, *, measures: bool) -> None:
        """Begin a step.

        Args:
            exchange: where the partial sums go.
            measures: whether to take the norms of each tower's gradient.
        """
        self._clear()
        self._exchange = exchange
        self._norms = {} if measures else None
        for parameter in self._parameters:
            parameter.grad = None

    def backward(self, tower: int, backward: Callable[[], None] | None, *, is_last: bool) -> None:
        """Run a tower's backward, in tower order, and take the gradients that it leaves on the parameters.

        Args:
            tower: its index.
            backward: None where there are no gradients.
            is_last: whether to send what it produces, because no other tower of this worker has rows.
        """
        self._live = range(tower, tower + 1)
        self._put_sibling_back()
        if is_last:
            self._missing = [set(bucket.parameters) for bucket in self.plan.buckets]
        if backward is not None:
            backward()
        if self.plan.sparse:
            self._sparse.push(range(tower, tower + 1), self._take_sparse())
        if is_last:
            self._send_rest()
        else:
            self._dense.push(self._live, self._take(range(len(self._parameters))))

    def finish(self) -> list[tuple[int, Tensor | None]]:
        """Send what is not sent yet, and return (parameter index, averaged gradient) for each parameter."""
        assert self._exchange is not None
        self._send_rest()
        if self.plan.sparse:
            for tower in range(self._live.stop, self._towers.stop):
                self._sparse.push(range(tower, tower + 1), [None] * len(self.plan.sparse))
        exchange, self._exchange = self._exchange, None
        return exchange.finish([gradients for _, gradients in self._sparse.nodes])

    def squares(self) -> Tensor | None:
        """Return the squared norm of what each of this worker's towers handed in, float64 [towers].

        None in a step that does not measure.
        """
        if self._norms is None:
            return None
        device = self._parameters[0].device
        # Parameters in their own order, whatever the one in which their gradients came.
        norms = [self._norms.get(tower, {}) for tower in self._towers]
        return torch.stack(
            [squared_sum([n for index in sorted(each) for n in each[index]], device) for each in norms]
        )

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()

    def _add_hooks(self) -> list[RemovableHandle]:
        def hook(index: int) -> Callable[[Tensor], None]:
            return lambda _: self._gradient_is_ready(index)

        return [
            parameter.register_post_accumulate_grad_hook(hook(index))
            for index, parameter in enumerate(self._parameters)
            if index in self._bucket_of
        ]

    def _gradient_is_ready(self, index: int) -> None:
        """Note that backward has finished a parameter's gradient; send the buckets that are whole."""
        if not self._missing:
            return
        missing = self._missing[self._bucket_of[index]]
        if index not in missing:
            name = self.plan.parameters[index].name
            self._fail(
                f"parameter {name} got a gradient twice in one backward (reentrant activation checkpointing "
                "does that); use torch.utils.checkpoint with use_reentrant=False"
            )
        missing.discard(index)
        while self._num_sent < len(self._missing) and not self._missing[self._num_sent]:
            self._send_next()

    def _send_rest(self) -> None:
        while self._num_sent < len(self.plan.buckets):
            self._send_next()
        self._missing = []

    def _send_next(self) -> None:
        """Fold the next bucket's last gradients, in the order that all workers share, and send it."""
        assert self._exchange is not None
        parameters = self.plan.buckets[self._num_sent].parameters
        self._num_sent += 1
        folded: TreeSum[Gradients] = TreeSum(self._dense.num_leaves, add=add_gradients)
        for span, gradients in self._dense.nodes:
            folded.push(span, [gradients[index] for index in parameters])
            for index in parameters:
                gradients[index] = None
        if self._live:
            folded.push(self._live, self._take(parameters))
        for tower in range(self._live.stop, self._towers.stop):  # those without rows come last
            folded.push(range(tower, tower + 1), [None] * len(parameters))
        self._exchange.send(folded.nodes)

    def _put_sibling_back(self) -> None:
        """Let autograd add to the sum of the tower's left sibling, where there is one of the right dtype."""
        left = self._dense.pop_sibling(self._live) if self._norms is None else None
        if left is None:
            return
        span, gradients = left
        pairs = list(zip(self._parameters, gradients, strict=True))
        if any(g is not None and g.dtype != grad_dtype(parameter) for parameter, g in pairs):
            self._dense.push(span, gradients)
            return
        self._live = range(span.start, self._live.stop)
        for parameter, gradient in pairs:
            parameter.grad = gradient

    def _take(self, indices: Sequence[int]) -> Gradients:
        """Take gradients for the buckets, where sparse ones do not belong."""
        gradients = self._take_any([index for index in indices if index in self._bucket_of])
        for index, gradient in gradients.items():
            if gradient is not None and gradient.is_sparse:
                self._fail(
                    f"{self.plan.parameters[index].name} got a sparse gradient, which was not expected: "
                    "list the parameter in Towers(..., sparse_parameters=[...]), or set sparse=True on its "
                    "nn.Embedding or nn.EmbeddingBag before Towers is made"
                )
        self._measure(gradients)
        return [gradients.get(index) for index in indices]

    def _take_sparse(self) -> Gradients:
        taken = self._take_any(self.plan.sparse)
        gradients = {i: None if gradient is None else sparse.owned(gradient) for i, gradient in taken.items()}
        self._measure(gradients)
        return list(gradients.values())

    def _take_any(self, indices: Sequence[int]) -> dict[int, Tensor | None]:
        taken: dict[int, Tensor | None] = {}
        for index in indices:
            gradient, self._parameters[index].grad = self._parameters[index].grad, None
            if gradient is not None and gradient.dtype != self._dtypes[index]:
                gradient = gradient.to(self._dtypes[index])
            taken[index] = gradient
        return taken

    def _measure(self, gradients: Mapping[int, Tensor | None]) -> None:
        """In a step that measures, note the norms of what the current tower has just produced."""
        if self._norms is None:
            return
        norms = self._norms.setdefault(self._live.start, {})
        for index, gradient in gradients.items():
            if gradient is not None:
                norms[index] = norms_of(gradient)

    def _fail(self, problem: str) -> None:
        assert self._exchange is not None
        self._missing = []  # what else this backward produces is dropped
        self._exchange.fail(UsageError(f"{self._exchange.where}: {problem}"))
