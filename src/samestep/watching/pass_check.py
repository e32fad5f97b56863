"""Checks of a tower's pass that `Watch` does not make: gradients, messages, buffers in backward."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Sequence

from torch import Tensor

from samestep.buffers.model_buffers import ModelBuffers
from samestep.errors import BufferPolicyError, UsageError
from samestep.watching.losses.graph import graph_of
from samestep.watching.passes.messages import Messages

__all__ = ["PassCheck", "has_freed_graph", "leaves_of"]

_grad = operator.attrgetter("grad")


class PassCheck:
    """Checks the passes of one step, one tower after the other. Errors name the `tower`."""

    def __init__(self, parameters: Sequence[Tensor], buffers: ModelBuffers, messages: Messages) -> None:
        self._parameters, self._buffers, self._messages = parameters, buffers, messages

    def check_forward(self, tower: object) -> None:
        """Check what a tower's forward has left behind, before samestep runs backward."""
        if self._has_gradients():
            self._let_go_of_zeros()
            if self._has_gradients():
                raise UsageError(
                    f"{tower!r}: parameters already have gradients; call tower.backward(loss), or leave it "
                    "to whole_batch, instead of loss.backward(), which is not averaged; for gradients of "
                    "inputs, as for adversarial examples, use torch.autograd.grad(loss, inputs)"
                )
        self._messages.check(tower, counts=True)

    def start_backward(self) -> None:
        """Note which buffers a tower's forward has changed."""
        self._changed = self._buffers.changed()

    def check_backward(self, who: str) -> None:
        """Refuse buffers that only backward changes; activation checkpointing may repeat a forward's."""
        late = sorted(self._buffers.changed() - self._changed)
        if late:
            raise BufferPolicyError(
                f"{who}: backward changed {', '.join(late)}, but a tower's buffers are read when "
                "tower.backward is called: change them in the forward, or after average()"
            )

    def not_handed_in(self, tower: object) -> UsageError:
        """Return the error for a loop that continued without a tower's loss."""
        called, more = "the loop went on before backward was called", ""
        if self._has_gradients():
            called = "loss.backward() was called, or p.grad was set, instead of tower.backward(loss)"
            more = (
                "; gradients that you make yourself, such as clipped ones of each example, are passed by "
                "tower.backward_sum(total, count), where total is the sum over all parameters p of "
                "(p * g).sum(), with g the detached sum of p's gradients over the rows"
            )
        return UsageError(f"{tower!r}: {called}; call tower.backward(loss) once for every tower{more}")

    def _has_gradients(self) -> bool:
        return any(map(operator.is_not, map(_grad, self._parameters), itertools.repeat(None)))

    def _let_go_of_zeros(self) -> None:
        """Drop zeros that `zero_grad(set_to_none=False)` left after a backward of the program's own."""
        for parameter in self._parameters:
            if parameter.grad is not None and not parameter.grad.is_sparse and not parameter.grad.any():
                parameter.grad = None

    def explain(self, tower: object, error: RuntimeError) -> UsageError | None:
        """Return the error for a backward that reached another tower's graph."""
        if not has_freed_graph(error):
            return None
        return UsageError(
            f"{tower!r}: its loss shares part of its graph with the tower before: compute everything that "
            "needs a gradient inside the loop over towers, or detach it"
        )


def has_freed_graph(error: RuntimeError) -> bool:
    """Say whether torch has raised this because a backward has freed the graph already."""
    return "backward through the graph a second time" in str(error)


def leaves_of(losses: Iterable[Tensor]) -> tuple[list[Tensor], bool]:
    """Return the leaves of the losses' graph, and whether backward may reach a parameter twice."""
    nodes = list(graph_of(losses))
    is_reentrant = any(node.name() == "CheckpointFunctionBackward" for node in nodes)
    return [node.variable for node in nodes if hasattr(node, "variable")], is_reentrant
