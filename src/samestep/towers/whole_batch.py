r"""Losses of the whole batch: contrastive ones, the χ² of a histogram, all that is no sum over rows.

The mean of towers' gradients is not the gradient of such a loss. For W = 1, a step is this program:

    with torch.no_grad():
        parts = [forward(batch[rows]) for rows in even_ranges(len(batch), T)]
    outputs = torch.cat(parts).requires_grad_()
    loss(outputs, batch).backward()             # the gradient of the outputs, and of the loss's parameters
    for rows in even_ranges(len(batch), T):     # under the same random streams as before
        forward(batch[rows]).backward(outputs.grad[rows])

It costs a second forward, and needs the memory of one tower's activations.

References:
    Gao, Zhang, Han & Callan, "Scaling deep contrastive learning batch size under memory limited setup",
    RepL4NLP 2021. https://arxiv.org/abs/2101.06983
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from samestep.errors import UsageError
from samestep.streams import keep_globals, seed_globals, stream_seed, tower_seed
from samestep.towers.batch import GlobalBatch, LocalBatch
from samestep.towers.copier import Copier, copied
from samestep.towers.nest import mapped
from samestep.towers.outputs import AllOutputs, TowerOutputs, gather
from samestep.workers.job import Job

__all__ = ["Forward", "WholeBatch", "WholeLoss"]

Forward = Callable[[Any], Any]
"""forward(tower_batch) -> outputs: a tensor or nested tensors, rows first."""

WholeLoss = Callable[[Any, Any], Tensor]
"""loss(all_outputs, batch) -> a scalar, from the outputs of all towers and the global batch."""


class WholeBatch:
    """One step's loss of the whole batch, on one worker: `run_ahead`, `differentiate`, `run_again`.

    Args:
        model: `forward` and `loss` use its parameters and buffers.
        job: this process's view of the job.
        forward: see `Forward`.
        loss: see `WholeLoss`.
        seed: of all streams.
        step: number of the step.
    """

    def __init__(
        self, model: nn.Module, job: Job, forward: Forward, loss: WholeLoss, *, seed: int, step: int
    ) -> None:
        self._model = model
        self._job = job
        self._forward = forward
        self._loss = loss
        self._seed = seed
        self._step = step
        self._own: dict[int, TowerOutputs] = {}
        self._all: AllOutputs | None = None
        self._gradients: dict[int, list[Tensor | None]] = {}
        self._of_parameters: list[tuple[Tensor, Tensor]] = []

    def run_ahead(self, slices: Mapping[int, Any]) -> None:
        """Run the towers' forwards without grad, keep copies of their outputs, and leave no other trace.

        Args:
            slices: the batch of each of this worker's towers.
        """
        kept = _KeptBuffers(self._model)
        with keep_globals(self._job.device), torch.no_grad():
            for tower, batch in slices.items():
                seed_globals(tower_seed(self._seed, self._step, tower), self._job.device)
                # A copy, because a forward may write to its batch, and is to see the same again.
                own_batch = mapped(copied, batch)
                try:
                    self._own[tower] = TowerOutputs.open(self._forward(own_batch)).copy()
                finally:
                    kept.restore()
        # Casts of the weights made without grad would serve the second pass and cut it off from them:
        # https://github.com/pytorch/pytorch/issues/112583
        torch.clear_autocast_cache()

    def differentiate(
        self, batch: Any, parameters: Sequence[Tensor], scale: Callable[[Tensor], Tensor] | None
    ) -> Tensor:
        """Gather all outputs, and compute the loss and its gradients, alike on every worker.

        Args:
            batch: the global batch, or a `LocalBatch`.
            parameters: those of the model that the loss itself may use.
            scale: applied to the loss before backward, such as a gradient scaler's.

        Returns:
            The loss, not scaled: 0-dim, float32 or float64.

        Raises:
            UsageError: the loss is not a scalar that requires grad, or towers' outputs differ in more than
                their rows.
        """
        self._all = gather(self._job, self._own, f"step {self._step}")
        for tensor in (tensor for outputs in self._all.tensors for tensor in outputs):
            tensor.requires_grad_(tensor.is_floating_point() or tensor.is_complex())
        with keep_globals(self._job.device):
            seed_globals(stream_seed(self._seed, "whole batch", self._step), self._job.device)
            loss = _checked(self._loss(self._all.concatenated(), self._batch_for_loss(batch)))
            self._keep_gradients(loss if scale is None else scale(loss), parameters)
        return loss.detach().reshape(()).to(self._job.device)

    def run_again(self, tower: int, batch: Any) -> Callable[[], None]:
        """Run a tower's forward as before, and return what pushes the gradient of its outputs through.

        Where that is called, the gradient of the loss's own parameters is part of tower 0's.

        Raises:
            UsageError: the outputs have other shapes than before.
        """
        outputs = TowerOutputs.open(self._forward(batch))
        before = self._own.pop(tower)
        if not outputs.shape.is_like(before.shape):
            raise UsageError(
                f"step {self._step}, tower {tower}: forward returned {_sizes(before)} in the first pass and "
                f"{_sizes(outputs)} in the second: both passes must compute the same"
            )
        return partial(self._push, tower, outputs.tensors)

    def _keep_gradients(self, loss: Tensor, parameters: Sequence[Tensor]) -> None:
        """Differentiate with respect to all outputs and the parameters; keep what this worker needs."""
        assert self._all is not None
        wanted = [
            (n, i) for n, each in enumerate(self._all.tensors) for i, t in enumerate(each) if t.requires_grad
        ]
        sources = [self._all.tensors[tower][index] for tower, index in wanted]
        with self._no_autocast():
            found = torch.autograd.grad(loss, [*sources, *parameters], allow_unused=True)
        of_outputs = dict(zip(wanted, found, strict=False))
        for tower, outputs in self._own.items():
            slices = [of_outputs.get((tower, index)) for index in range(len(outputs.tensors))]
            # Copies, so that the gradient of all towers' outputs can go.
            self._gradients[tower] = [
                None if g is None else g.clone(memory_format=torch.contiguous_format) for g in slices
            ]
        if 0 in self._own:
            of_parameters = zip(parameters, found[len(sources) :], strict=True)
            self._of_parameters = [(p, _as_grad(p, g)) for p, g in of_parameters if g is not None]
        self._all = None

    def _push(self, tower: int, tensors: Sequence[Tensor]) -> None:
        if tower == 0:
            for parameter, gradient in self._of_parameters:
                parameter.grad = gradient  # autograd adds the forward's part to it
            self._of_parameters.clear()
        gradients = self._gradients.pop(tower)
        pairs = [(t, g) for t, g in zip(tensors, gradients, strict=True) if t.requires_grad and g is not None]
        if pairs:
            with self._no_autocast():
                torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])

    def _no_autocast(self) -> torch.autocast:
        return torch.autocast(self._job.device.type, enabled=False)

    def _batch_for_loss(self, batch: Any) -> Any:
        if isinstance(batch, LocalBatch):
            return _AbsentBatch()
        whole = GlobalBatch.open(batch)
        return whole.take(range(whole.rows), Copier(self._job.device))


def _checked(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise UsageError(f"the loss of the whole batch is {found}, expected a scalar tensor")
    if not loss.requires_grad:
        raise UsageError("the loss of the whole batch does not require grad: it depends on no output")
    return loss if loss.dtype in (torch.float32, torch.float64) else loss.float()


def _as_grad(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Return a gradient in memory of its own, laid out as autograd would, so that it can be added to."""
    return gradient if gradient.is_sparse else torch.empty_like(parameter).copy_(gradient)


def _sizes(outputs: TowerOutputs) -> str:
    return ", ".join(f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in outputs.tensors)


class _KeptBuffers:
    """All buffers of a model as they were, tensors and values."""

    def __init__(self, model: nn.Module) -> None:
        self._registries = [(module._buffers, dict(module._buffers)) for module in model.modules()]
        found = {id(b): b for _, held in self._registries for b in held.values() if b is not None}
        self._buffers = [buffer for buffer in found.values() if not buffer.is_inference()]
        self._values = [buffer.detach().clone() for buffer in self._buffers]

    @torch.no_grad()
    def restore(self) -> None:
        """Put them back: all of them, because batch norm writes to its buffers without a new version."""
        for registry, held in self._registries:
            if [*map(id, registry.values())] != [*map(id, held.values())]:
                registry.clear()
                registry.update(held)
        if self._buffers:
            torch._foreach_copy_(self._buffers, self._values)


class _AbsentBatch:
    """Stands for the global batch where every worker has its own rows only."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise UsageError(
            "the loss uses its batch, but the batch is a LocalBatch, of which each worker has only its own "
            "rows: return what the loss needs, such as labels, from forward"
        )

    __getattr__ = __getitem__ = __iter__ = __len__ = __contains__ = _refuse

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        cls()._refuse()
