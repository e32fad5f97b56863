"""One worker's gradient sums in a step: added as they arrive, sent as soon as a bucket is complete."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from samestep.errors import UsageError
from samestep.summation import sparse
from samestep.summation.bucket_exchange import Node
from samestep.summation.buckets import Average
from samestep.summation.exchange import Exchange
from samestep.summation.gradients import (
    Gradients,
    add_gradients,
    as_real,
    like_parameter,
)
from samestep.summation.norms import Norms, norms_of, squared_sum
from samestep.summation.plan import ParameterLayout, Plan, grad_dtype
from samestep.summation.tree import TreeSum

__all__ = ["GradientSum"]


class GradientSum:
    """Adds the gradients of one worker's towers along the canonical tree.

    Call `start`, `backward` for each tower, then `finish`. Gradients are moved from `p.grad`, not copied. If
    the sum of a tower's left sibling in the tree is available, it is put back into `p.grad` first, so that
    autograd itself adds to it. During the backward of the last tower with rows, hooks on the parameters
    detect when all gradients of a bucket are there, and the bucket is added up and sent. Gradients that may
    be sparse are added separately: each tower's gradient is coalesced first, and the sums are sent at the
    end.

    A step that measures norms does not use autograd to add, because it needs each tower's own gradient. The
    additions are the same, and so are the bits; it needs memory for one more gradient.

    Attributes:
        comes_twice: whether some backward added to a parameter's gradient twice.
    """

    def __init__(self, plan: Plan, parameters: Sequence[Tensor], towers: range) -> None:
        self.plan = plan
        self._parameters = parameters
        self._towers = towers
        self._dtypes = [None if each.is_sparse else each.gradient.dtype for each in plan.parameters]
        layouts = zip(parameters, plan.parameters, strict=True)
        # Whether autograd accumulates gradients in the dtypes in which they are summed.
        self._have_same_dtypes = all(each.gradient.dtype == grad_dtype(p).to_real() for p, each in layouts)
        self._bucket_of = {i: n for n, bucket in enumerate(plan.buckets) for i in bucket.parameters}
        self._exchange: Exchange | None = None
        self.comes_twice = False
        self._clear()
        self._hooks = self._hook() if plan.placement.num_workers > 1 else []

    def _hook(self) -> list[RemovableHandle]:
        # A weak reference, because Python's garbage collector does not see references from these hooks.
        call = partial(_call, WeakMethod(self._gradient_is_ready))
        # A pass may freeze a parameter; if it does not put that back, the end of the step tells.
        trained = ((index, self._parameters[index]) for index in self._bucket_of)
        return [
            parameter.register_post_accumulate_grad_hook(partial(call, index))
            for index, parameter in trained
            if parameter.requires_grad
        ]

    def _clear(self) -> None:
        num_towers = self.plan.placement.num_towers
        self._dense: TreeSum[Gradients] = TreeSum(num_towers, add=add_gradients)
        self._sparse: TreeSum[Gradients] = TreeSum(num_towers, add=add_gradients)
        self._norms: dict[int, dict[int, Norms]] | None = None  # by tower and parameter
        self._in_grad = range(self._towers.start, self._towers.start)  # the towers whose sum is in `p.grad`
        self._missing: list[set[int]] = []  # for each bucket, parameters still without the last gradient
        self._num_sent = 0
        self._ready: set[int] | None = None  # parameters whose gradients the current backward has produced
        self._last: Sequence[Node] | None = None  # sums of the last bucket: sending it commits the worker

    def start(self, exchange: Exchange, *, measures: bool) -> None:
        """Begin a step; `measures` says whether to compute the norms of each tower's gradient."""
        self._clear()
        self._exchange = exchange
        self._norms = {} if measures else None
        for parameter in self._parameters:
            parameter.grad = None

    def backward(
        self, tower: int, backward: Callable[[], None] | None, *, is_last: bool, at_once: bool = True
    ) -> None:
        """Run a tower's backward, in tower order, and move the gradients from `p.grad` to the sums.

        For the last tower with rows, buckets are sent while backward runs. `at_once` says that backward adds
        to each parameter's gradient only once. If it is False, buckets are sent after backward, and autograd
        does not add to a sibling's sum.
        """
        self._in_grad = range(tower, tower + 1)
        if at_once:
            self._put_sibling_back()
        if is_last and at_once:
            self._missing = [set(bucket.parameters) for bucket in self.plan.buckets]
        if backward is not None:
            with self._noting_what_is_ready(needs_hooks=not (at_once or self._hooks)):
                backward()
        if self.plan.sparse:
            self._sparse.push(range(tower, tower + 1), self._take(self.plan.sparse))
        if is_last:
            self._send_rest()
        else:
            self._dense.push(self._in_grad, self._take(range(len(self._parameters))))

    @contextmanager
    def _noting_what_is_ready(self, *, needs_hooks: bool) -> Iterator[None]:
        self._ready = set()
        hooks = self._hook() if needs_hooks else []
        try:
            yield
        finally:
            self._ready = None
            for hook in hooks:
                hook.remove()

    def finish(self) -> list[Average]:
        """Send the remaining buckets, and return this worker's averages."""
        assert self._exchange is not None
        self._check_clean()
        self._send_rest()
        last, self._last = self._last, None  # so that a gradient is freed once the caller drops it
        self._exchange.send(last)
        del last
        if self.plan.sparse:
            self._push_absent(self._sparse, len(self.plan.sparse))
        exchange, self._exchange = self._exchange, None
        return exchange.finish([gradients for _, gradients in self._sparse.nodes])

    def squares(self) -> Tensor | None:
        """Return the squared norm of each tower's gradient, float64 [towers]; None if not measured."""
        if self._norms is None:
            return None
        device = self._parameters[0].device
        # In the order of the parameters, because gradients may arrive in different orders.
        norms = [self._norms.get(tower, {}) for tower in self._towers]
        return torch.stack(
            [squared_sum([n for index in sorted(each) for n in each[index]], device) for each in norms]
        )

    def clear(self) -> None:
        """Drop the sums of an abandoned step, and all gradients in `p.grad`."""
        self._clear()
        for parameter in self._parameters:
            parameter.grad = None

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()

    def _gradient_is_ready(self, index: int, _: Tensor) -> None:
        """Record that backward has produced a parameter's gradient, and send complete buckets, in order."""
        if self._ready is None:
            return
        if index in self._ready:
            self._check_again(index)
        self._ready.add(index)
        if not self._missing:
            return
        self._missing[self._bucket_of[index]].discard(index)
        while self._num_sent < len(self._missing) - 1 and not self._missing[self._num_sent]:
            self._send_next()

    def _check_again(self, index: int) -> None:
        """Raise if the first part of this gradient was already added to a sibling's sum, or sent."""
        self.comes_twice = True
        if len(self._in_grad) > 1 or self._bucket_of[index] < self._num_sent:
            self._fail(
                f"parameter {self.plan.parameters[index].name} got a gradient twice in one backward "
                "(reentrant activation checkpointing does that); use torch.utils.checkpoint with "
                "use_reentrant=False"
            )

    def _check_clean(self) -> None:
        for parameter, layout in zip(self._parameters, self.plan.parameters, strict=True):
            if parameter.grad is not None:
                self._fail(
                    f"{layout.name} has a gradient that did not come from tower.backward(loss), and would "
                    "not be averaged: call backward() on penalties and the like after average()"
                )

    def _send_rest(self) -> None:
        """Send the remaining buckets except the last one, which `finish` sends."""
        self._missing = []
        while self._num_sent < len(self.plan.buckets) - 1:
            self._send_next()
        if self._last is None:
            self._last = self._fold_next()

    def _send_next(self) -> None:
        assert self._exchange is not None
        self._exchange.send(self._fold_next())

    def _fold_next(self) -> Sequence[Node]:
        """Finish the sums of the next bucket; return one for each of this worker's subtrees."""
        parameters = self.plan.buckets[self._num_sent].parameters
        self._num_sent += 1
        folded: TreeSum[Gradients] = TreeSum(self._dense.num_leaves, add=add_gradients)
        for span, gradients in self._dense.nodes:
            folded.push(span, [gradients[index] for index in parameters])
            for index in parameters:
                gradients[index] = None
        if self._in_grad:
            folded.push(self._in_grad, self._take(parameters))
        self._push_absent(folded, len(parameters))
        return folded.nodes

    def _push_absent(self, total: TreeSum[Gradients], num_parameters: int) -> None:
        """Push absent gradients for the towers without rows, which come last."""
        without = range(self._in_grad.stop, self._towers.stop)
        total.push_leaves(without, [[None] * num_parameters for _ in without])

    def _put_sibling_back(self) -> None:
        """Put the sum of the tower's left sibling into `p.grad`, so that autograd adds to it."""
        can_add = self._have_same_dtypes and self._norms is None
        left = self._dense.pop_sibling(self._in_grad) if can_add else None
        if left is None:
            return
        span, gradients = left
        self._in_grad = range(span.start, self._in_grad.stop)
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = None if gradient is None else like_parameter(gradient, parameter)

    def _take(self, indices: Sequence[int]) -> Gradients:
        """Take gradients from `p.grad`, in the dtypes in which they are summed; measure norms if needed."""
        taken: Gradients = []
        for index in indices:
            parameter = self._parameters[index]
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None:
                if gradient.dtype != self._dtypes[index] or gradient.layout is not torch.strided:
                    gradient = self._as_summed(gradient, self.plan.parameters[index])
                if self._norms is not None:
                    self._norms.setdefault(self._in_grad.start, {})[index] = norms_of(gradient)
            taken.append(gradient)
        return taken

    def _as_summed(self, gradient: Tensor, layout: ParameterLayout) -> Tensor:
        """Return a gradient in the dtype in which it is summed; in new memory if it may be sparse."""
        if not (layout.is_sparse or gradient.is_sparse):
            gradient = as_real(gradient)
        gradient = gradient.to(layout.gradient.dtype)
        if layout.is_sparse:
            gradient = sparse.owned(gradient)
        elif gradient.is_sparse:
            self._fail(
                f"{layout.name} got a sparse gradient, which was not expected: list the parameter in "
                "Towers(..., sparse_parameters=[...]), or set sparse=True on its nn.Embedding or "
                "nn.EmbeddingBag before Towers is made"
            )
        return gradient

    def _fail(self, problem: str) -> None:
        assert self._exchange is not None
        self._missing = []  # so that the rest of this backward sends nothing
        self._exchange.fail(UsageError(f"{self._exchange.where}: {problem}"))


def _call(method: WeakMethod[Any], index: int, parameter: Tensor) -> None:
    """Call a hook, unless its owner is gone."""
    hook = method()
    if hook is not None:
        hook(index, parameter)
