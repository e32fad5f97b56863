"""Finds gradients that a program clips or reads before they exist, as the source code of its step shows.

Until `average()`, parameters have no gradients, so `clip_grad_norm_` does nothing, in silence, and code that
tests `p.grad is not None` does not run.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_

from samestep.errors import warn
from samestep.watching.program.code_flow import CodeFlow
from samestep.watching.program.code_values import Scope
from samestep.watching.program.program_line import ProgramLine, frames_of_program
from samestep.watching.program.source_code import SourceCode

__all__ = ["EarlyGradients"]

_CLIPS = clip_grad_norm_, clip_grads_with_norm_
_LISTS = {"parameters", "named_parameters"}
_RESETS = {"zero_", "detach_", "requires_grad_"}  # as in `zero_grad`


class EarlyGradients:
    """The uses of gradients between the beginning of a step, which is now, and `average()`.

    Args:
        source: where functions are found.
    """

    def __init__(self, source: SourceCode) -> None:
        self._source = source
        frame = next(frames_of_program(), None)
        self._begun = None if frame is None else (frame.f_code, frame.f_lineno)

    def check(self, parameters: Iterable[Tensor]) -> None:
        """Warn if the program has clipped or read gradients of these, and has called `average()` now.

        All must be in the function that began the step.
        """
        frame = next(frames_of_program(), None)
        if frame is None or self._begun is None or frame.f_code is not self._begun[0]:
            return
        nodes = _nodes(self._source.body(frame.f_code), range(self._begun[1], frame.f_lineno))
        known = _Known({id(each) for each in parameters}, CodeFlow(self._source), Scope.of_frame(frame))
        for found, what, instead in (
            (known.clips(nodes), "gradients are clipped", "nothing is clipped: clip"),
            (known.reads(nodes), "p.grad is read", "it is None: read and change it"),
        ):
            if (node := next(found, None)) is not None:
                line = ProgramLine(frame.f_code.co_filename, node.lineno)
                warn(
                    f"{what} before average() ({line}), when parameters have no gradients yet, so {instead} "
                    "after average()"
                )
                return


def _nodes(body: Iterable[ast.stmt], lines: range) -> list[ast.expr]:
    nodes = (node for statement in body for node in ast.walk(statement))
    return [each for each in nodes if isinstance(each, ast.expr) and each.lineno in lines]


class _Known:
    """Recognizes uses of the parameters with these ids in the code of a function that is running."""

    def __init__(self, ids: set[int], flow: CodeFlow, scope: Scope) -> None:
        self._ids, self._flow, self._scope = ids, flow, scope

    def clips(self, nodes: Iterable[ast.expr]) -> Iterator[ast.expr]:
        """Yield the calls that clip their gradients, by one of torch's functions."""
        for node in nodes:
            if isinstance(node, ast.Call) and node.args:
                function = self._object(node.func)
                if any(function is each for each in _CLIPS) and self._are_in(node.args[0]):
                    yield node

    def reads(self, nodes: Sequence[ast.expr]) -> Iterator[ast.expr]:
        """Yield the expressions that read their gradients, other than to reset them."""
        resets, names = set(_resets(nodes)), set(self._names(nodes))
        for node in nodes:
            if isinstance(node, ast.Attribute) and node.attr == "grad" and node not in resets:
                is_read, of = isinstance(node.ctx, ast.Load), node.value
                is_named = isinstance(of, ast.Name) and of.id in names
                if is_read and (is_named or id(self._object(of)) in self._ids):
                    yield node

    def _names(self, nodes: Iterable[ast.expr]) -> Iterator[str]:
        """Yield the variables of comprehensions over these parameters."""
        for node in nodes:
            for each in getattr(node, "generators", ()):
                if self._are_in(each.iter):
                    yield from (part.id for part in ast.walk(each.target) if isinstance(part, ast.Name))

    def _are_in(self, node: ast.expr) -> bool:
        """Whether an expression is `module.parameters()`, or a list, with any of these parameters."""
        if isinstance(node, ast.Call):
            function = node.func
            if not isinstance(function, ast.Attribute) or function.attr not in _LISTS:
                return False
            module = self._object(function.value)
            found: Iterable[object] = module.parameters() if isinstance(module, nn.Module) else ()
        else:
            held = self._object(node)
            found = held if isinstance(held, (list, tuple)) else ()
        return not self._ids.isdisjoint(map(id, found))

    def _object(self, node: ast.expr) -> Any:
        return self._flow.object_at(node, self._scope)


def _resets(nodes: Iterable[ast.expr]) -> Iterator[ast.expr]:
    """Yield what is compared with a constant, as `p.grad is None`, and what is set to zero."""
    for node in nodes:
        if isinstance(node, ast.Compare) and isinstance(node.comparators[0], ast.Constant):
            yield node.left
        elif isinstance(node, ast.Attribute) and node.attr in _RESETS:
            yield node.value
