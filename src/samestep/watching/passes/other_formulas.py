"""Derivatives that torch computes by other formulas, with other bits, while a dispatch mode is active."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["OtherFormulas"]

_aten: Any = torch.ops.aten

_OPERATORS = {
    *(_aten.prod, _aten.cumprod, _aten._linalg_det, _aten.linalg_lstsq, _aten.ormqr),
    _aten.masked_fill.Tensor,
}
"""Operators whose derivatives have two formulas, found by trying those of PyTorch 2.13's own tests; see
`areAnyTensorSubclassLike` in
https://github.com/pytorch/pytorch/blob/main/torch/csrc/autograd/FunctionsManual.cpp"""

_FORWARD_MODE = {_aten._has_same_storage_numel, _aten._efficientzerotensor, _aten._make_dual}
"""Operators that torch runs for derivatives in forward mode, many of which have two formulas."""


class OtherFormulas:
    """Finds whether following a program changes the bits of its derivatives.

    A worker follows step 0 and some later ones, such as the first one after a resume. So that these have the
    bits of the same steps elsewhere, a backward with such formulas is never followed, and forwards in which
    they run are always run under a mode.

    Attributes:
        in_backward: whether this pass's backward may have such formulas.
        in_forwards: whether such formulas have run in forwards that were followed.
    """

    def __init__(self) -> None:
        self.in_backward = self.in_forwards = False

    def start_pass(self) -> None:
        """Forget the pass before."""
        self.in_backward = False

    def note(self, func: Any) -> None:
        """Note an operator of a forward."""
        kind = getattr(func, "overloadpacket", func)  # one of higher order has none
        if kind in _FORWARD_MODE:
            self.in_backward = self.in_forwards = True
        elif kind in _OPERATORS or func in _OPERATORS:
            self.in_backward = True
        elif self.in_backward and not self.in_forwards:
            # Within a backward of the program's own, such as `torch.autograd.grad`.
            self.in_forwards = torch._C._current_graph_task_id() >= 0
