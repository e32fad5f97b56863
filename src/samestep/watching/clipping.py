"""Finds gradients that a program clips before they exist, as the source code of its step shows.

`clip_grad_norm_` of parameters without gradients does nothing, in silence.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from samestep.errors import warn
from samestep.watching.program.code_flow import CodeFlow
from samestep.watching.program.code_values import Scope
from samestep.watching.program.program_line import ProgramLine, frames_of_program
from samestep.watching.program.source_code import SourceCode

__all__ = ["Clipping"]


class Clipping:
    """The clipping of gradients between the beginning of a step, which is now, and `average()`.

    Args:
        source: where functions are found.
    """

    def __init__(self, source: SourceCode) -> None:
        self._source = source
        frame = next(frames_of_program(), None)
        self._begun = None if frame is None else (frame.f_code, frame.f_lineno)

    def check(self, parameters: Iterable[Tensor]) -> None:
        """Warn if the program has clipped gradients of these parameters, and has called `average()` now.

        Both must be in the function that began the step.
        """
        frame = next(frames_of_program(), None)
        if frame is None or self._begun is None or frame.f_code is not self._begun[0]:
            return
        known, flow, scope = {id(each) for each in parameters}, CodeFlow(self._source), Scope.of_frame(frame)
        lines = range(self._begun[1], frame.f_lineno)
        for call in _calls(self._source.body(frame.f_code), lines):
            is_clip = bool(call.args) and flow.object_at(call.func, scope) is clip_grad_norm_
            if is_clip and not known.isdisjoint(map(id, _parameters(call.args[0], flow, scope))):
                line = ProgramLine(frame.f_code.co_filename, call.lineno)
                warn(
                    f"gradients are clipped before average() ({line}), when parameters have none yet, so "
                    "nothing is clipped: clip after average()"
                )
                return


def _calls(body: Iterable[ast.stmt], lines: range) -> Iterator[ast.Call]:
    nodes = (node for statement in body for node in ast.walk(statement))
    return (each for each in nodes if isinstance(each, ast.Call) and each.lineno in lines)


def _parameters(node: ast.expr, flow: CodeFlow, scope: Scope) -> Iterable[object]:
    """Return the parameters that an expression is: `module.parameters()`, or a list; none if not known."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "parameters":
        module = flow.object_at(node.func.value, scope)
        return module.parameters() if isinstance(module, nn.Module) else ()
    found = flow.object_at(node, scope)
    return found if isinstance(found, (list, tuple)) else ()
