r"""Losses of the whole batch that are not a sum over rows, such as contrastive ones or a histogram's χ².

The mean of the towers' gradients is not the gradient of such a loss. For W = 1, a step is this program:

    with torch.no_grad():
        parts = [forward(batch[rows]) for rows in even_ranges(len(batch), T)]
    outputs = torch.cat(parts).requires_grad_()
    loss(outputs, batch).backward()             # the gradient of the outputs, and of the loss's parameters
    for rows in even_ranges(len(batch), T):     # under the same random streams as before
        forward(batch[rows]).backward(outputs.grad[rows])

It costs a second forward; only one tower's activations are in memory at a time.

References:
    Gao, Zhang, Han & Callan, "Scaling deep contrastive learning batch size under memory limited setup",
    RepL4NLP 2021. https://arxiv.org/abs/2101.06983
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from samestep.batches.batch import GlobalBatch, LocalBatch
from samestep.batches.copier import Copier, copied
from samestep.batches.nest import mapped
from samestep.buffers.kept_buffers import KeptBuffers
from samestep.errors import UsageError
from samestep.streams import keep_globals, seed_globals, stream_seed, tower_seed
from samestep.towers.losses import Contribution, loss_sum
from samestep.towers.outputs import Outline, gather, take_apart
from samestep.towers.run import StepRun
from samestep.towers.tower import Tower
from samestep.watching.model.optimizer_steps import note_outside_gradients
from samestep.watching.pass_check import has_freed_graph
from samestep.watching.repeated import Repeated

__all__ = ["Forward", "WholeLoss", "run_whole_batch"]

Forward = Callable[[Any], Any]
"""forward(tower_batch) -> outputs: a tensor or nested tensors, rows first."""

WholeLoss = Callable[[Any, Any], Tensor]
"""loss(all_outputs, batch) -> a scalar, given the outputs of all towers and the global batch."""


def run_whole_batch(
    run: StepRun, model: nn.Module, batch: Any, forward: Forward, loss: WholeLoss, *, compares_loss: bool
) -> None:
    """Run this worker's towers without grad, the loss of all outputs, and the towers' second passes.

    With `compares_loss`, the loss is compared between workers, and must have the same bits.
    """
    kept = KeptBuffers(model)
    own = _run_first_passes(run, kept, forward)
    run.keep_buffers(kept)  # the loss may write to them
    value = _differentiate(run, own, batch, loss)
    if compares_loss:
        run.watch.note_loss(value)
    value = value.to(run.job.device)
    # The loss may write to weights and buffers, because all workers do the same.
    run.watch.tensors.note(rehash=True)
    for tower in run.turns():
        # The loss counts once, for tower 0. No variable here may keep a tower's outputs alive.
        count = float(tower._index == 0)
        total = Contribution(value, (value * count).reshape(1), count)
        run.add(tower, total, *_run_second_pass(run, tower, own.pop(tower._index), forward))


@dataclass
class _Pass:
    """A tower's first pass: its outputs, and later the loss's gradients with respect to them."""

    outline: Outline
    outputs: list[Tensor]  # contiguous copies without a graph, so that strides are the same on all workers
    repeated: Repeated | None  # only in steps that the watch checks
    gradients: list[Tensor | None] = field(default_factory=list)  # of the outputs
    # For tower 0, each parameter that the loss uses directly, and its gradient from there.
    of_parameters: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    needs_grad: bool = False  # whether all of the loss's gradient flows through outputs

    def backward(self, outputs: Sequence[Tensor], device_type: str) -> None:
        """Run backward from the outputs of the second pass."""
        for parameter, gradient in self.of_parameters:
            parameter.grad = gradient  # autograd adds the gradient through the outputs
        self.of_parameters.clear()
        pairs = zip(outputs, self.gradients, strict=True)
        found = [(t, g) for t, g in pairs if t.requires_grad and g is not None]
        if found:
            with torch.autocast(device_type, enabled=False):
                torch.autograd.backward([t for t, _ in found], [g for _, g in found])


def _run_first_passes(run: StepRun, kept: KeptBuffers, forward: Forward) -> dict[int, _Pass]:
    """Run the first passes, without grad; keep only copies of their outputs, and restore `kept`."""
    own: dict[int, _Pass] = {}
    with keep_globals(run.job.device), torch.no_grad():
        for tower, batch in run.local.slices.items():
            seed_globals(tower_seed(run.seed, run.step, tower), run.job.device)
            # A copy, because a forward may write to its batch, and the second pass needs the same rows.
            own_batch = mapped(copied, batch)
            run.watch.start_pass(tower, is_first_of_two=True)
            try:
                tensors, outline = take_apart(forward(own_batch))
                outputs = [_contiguous_copy(tensor.detach()) for tensor in tensors]
                own[tower] = _Pass(outline, outputs, Repeated(outputs) if run.watch.looks else None)
                run.watch.modes.check(f"step {run.step}, tower {tower}")
                run.watch.check(f"step {run.step}, tower {tower}")
                run.watch.end_turn(f"step {run.step}, tower {tower}")
            finally:
                run.watch.stop_looking()
                kept.restore()
                run.watch.tensors.note()  # restoring buffers writes to them
    # Otherwise the second pass reuses casts of the weights that were made without grad, and gets no gradient:
    # https://github.com/pytorch/pytorch/issues/112583
    torch.clear_autocast_cache()
    return own


def _differentiate(run: StepRun, own: dict[int, _Pass], batch: Any, loss: WholeLoss) -> Tensor:
    """Gather all outputs, replace this worker's by their gradients, and return the unscaled loss."""
    outputs = {tower: each.outputs for tower, each in own.items()}
    outlines = {tower: each.outline for tower, each in own.items()}
    with run.exchange.unbroken():
        run.exchange.compare(torch.zeros(len(run.own_towers), 0, dtype=torch.float64, device="cpu"))
        everyone, spec = gather(run.job, outputs, outlines, f"step {run.step}")
    wanted = [t for tensors in everyone for t in tensors if t.is_floating_point() or t.is_complex()]
    for tensor in wanted:
        tensor.requires_grad_()
    with keep_globals(run.job.device):
        seed_globals(stream_seed(run.seed, "whole batch", run.step), run.job.device)
        columns = [torch.cat(column) for column in zip(*everyone, strict=True)]
        whole = _AbsentBatch()
        if not isinstance(batch, LocalBatch):
            whole = GlobalBatch.open(batch).take(range(run.local.rows), Copier(run.job.device))
        result = loss(pytree.tree_unflatten(columns, spec), whole)
        value = loss_sum("the loss of the whole batch", result, 1.0, 1.0).total
        scaled = value if run.scaler is None else run.scaler.scale(value)
        known = {id(tensor) for tensor in (*wanted, *run.parameters)}
        other_leaves = [leaf for leaf in run.leaves([scaled]) if id(leaf) not in known]
        with torch.autocast(run.job.device.type, enabled=False):
            found = _gradients_of(scaled, [*wanted, *run.parameters, *other_leaves], f"step {run.step}")
    for leaf, gradient in zip(other_leaves, found[len(found) - len(other_leaves) :], strict=True):
        if leaf.grad is None:  # otherwise the program has set the gradient itself
            leaf.grad = gradient
            note_outside_gradients([leaf])
    _store_gradients(own, run.parameters, wanted, found)
    return value.detach().reshape(())


def _gradients_of(loss: Tensor, inputs: Sequence[Tensor], where: str) -> Sequence[Tensor | None]:
    try:
        return torch.autograd.grad(loss, inputs, allow_unused=True)
    except RuntimeError as error:
        if not has_freed_graph(error):
            raise
        raise UsageError(
            f"{where}: the graph of the loss of the whole batch is gone, as after loss.backward(): return "
            "the loss, and leave its gradient to whole_batch"
        ) from error


def _store_gradients(
    own: Mapping[int, _Pass],
    parameters: Sequence[Tensor],
    outputs: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
) -> None:
    """Store the gradients of this worker's outputs, and, for tower 0, those of parameters in the loss.

    `gradients` has those of all towers' outputs, of the parameters, and of other leaf tensors, in this order.
    """
    of_outputs = {id(tensor): gradient for tensor, gradient in zip(outputs, gradients, strict=False)}
    of_leaves = gradients[len(outputs) :]
    for each in own.values():
        # Copies, so that the memory of all towers' gradients can be freed.
        slices = [of_outputs.get(id(tensor)) for tensor in each.outputs]
        each.gradients = [None if gradient is None else _contiguous_copy(gradient) for gradient in slices]
        each.outputs = []
        each.needs_grad = all(gradient is None for gradient in of_leaves)
    if 0 in own:
        of_parameters = zip(parameters, of_leaves, strict=False)
        own[0].of_parameters = [(p, _as_grad(p, g)) for p, g in of_parameters if g is not None]


def _run_second_pass(
    run: StepRun, tower: Tower, first: _Pass, forward: Forward
) -> tuple[Callable[[], None], list[Tensor]]:
    """Run a tower's second forward; return a function that runs backward, and the graph's leaf tensors."""
    outputs, outline = take_apart(forward(tower.batch))
    who = f"step {run.step}, tower {tower._index}"
    if outline.kinds != first.outline.kinds or outline.spec != first.outline.spec:
        raise UsageError(
            f"{who}: forward returned {first.outline.sizes} in the first pass and {outline.sizes} in the "
            "second: both passes must compute the same"
        )
    if first.needs_grad and not any(tensor.requires_grad for tensor in outputs):
        raise UsageError(
            f"{who}: no output of forward requires grad: expected the model's outputs, without detach() and "
            "torch.no_grad()"
        )
    run.check_forward(tower)
    run.watch.check_outputs(who, outputs)
    if run.watch.follows:
        run.watch.flow.note_own(each for each in first.gradients if each is not None)
    difference = None if first.repeated is None else first.repeated.difference(outputs)
    if difference:
        raise UsageError(
            f"{who}: forward's second pass changed {difference}: both passes must compute the same; carry no "
            "state, such as a count or a hidden state, from one pass to the next, and draw from the global "
            "generators, which are seeded the same for both"
        )
    return partial(first.backward, outputs, run.job.device.type), run.leaves(outputs)


def _contiguous_copy(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _as_grad(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Copy a dense gradient into new memory, laid out as autograd would, because autograd adds to it."""
    if gradient.is_sparse:
        return gradient
    return torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)


class _AbsentBatch:
    """Takes the place of the global batch when each worker has only its own rows; raises on any use."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UsageError(
            "the loss uses its batch, but the batch is a LocalBatch, and each worker has only its own rows "
            "of it: return what the loss needs, such as labels, from forward"
        )

    __getattr__ = __getitem__ = __iter__ = __len__ = __contains__ = _refuse

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        cls()._refuse()
