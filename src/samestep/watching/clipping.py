"""Finds gradients that a program clips before they exist, as the source code of its step shows.

`clip_grad_norm_` of parameters without gradients does nothing, in silence.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Set
from os.path import basename
from types import CodeType
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from samestep.errors import warn
from samestep.watching.program.code_values import Scope, attribute_of
from samestep.watching.program.program_line import frames_of_program
from samestep.watching.program.source_code import SourceCode

__all__ = ["Clipping"]


class Clipping:
    """The clipping of gradients between the beginning of a step and `average()`."""

    def __init__(self) -> None:
        self._begun: tuple[CodeType, int] | None = None

    def start_step(self) -> None:
        """Note the function, and the line, that begins the step."""
        frame = next(frames_of_program(), None)
        self._begun = None if frame is None else (frame.f_code, frame.f_lineno)

    def end_step(self, parameters: Iterable[Tensor]) -> None:
        """Warn if the program has clipped gradients of these parameters since then.

        It must have called `average` in the function that began the step.
        """
        begun, self._begun = self._begun, None
        frame = None if begun is None else next(frames_of_program(), None)
        if begun is None or frame is None or frame.f_code is not begun[0]:
            return
        known, variables = {id(each) for each in parameters}, Scope.of_frame(frame).objects
        for call in _calls(SourceCode().body(frame.f_code), range(begun[1], frame.f_lineno)):
            if _object(call.func, variables) is clip_grad_norm_ and _has_one_of(known, call, variables):
                where = f"{basename(frame.f_code.co_filename)}, line {call.lineno}"
                warn(
                    f"gradients are clipped before average() ({where}), when parameters have none yet, so "
                    "nothing is clipped: clip after average()"
                )
                return


def _calls(body: Iterable[ast.stmt], lines: range) -> Iterator[ast.Call]:
    nodes = (node for statement in body for node in ast.walk(statement))
    return (each for each in nodes if isinstance(each, ast.Call) and each.lineno in lines)


def _object(node: ast.expr, variables: Mapping[str, Any]) -> Any:
    """Return what a variable, or an attribute of one, is; None for other expressions."""
    match node:
        case ast.Name(id=name):
            return variables.get(name)
        case ast.Attribute(value=of, attr=name):
            return attribute_of(_object(of, variables), name)
    return None


def _has_one_of(known: Set[int], call: ast.Call, variables: Mapping[str, Any]) -> bool:
    """Say whether a call gets some of these parameters, as a list or by `parameters()`."""
    match call.args:
        case [ast.Call(func=ast.Attribute(value=of, attr="parameters")), *_]:
            found = _object(of, variables)
            given = list(found.parameters()) if isinstance(found, nn.Module) else ()
        case [node, *_]:
            given = _object(node, variables)
        case _:
            return False
    return isinstance(given, (list, tuple)) and any(id(each) in known for each in given)
