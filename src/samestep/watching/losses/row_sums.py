"""Finds losses that are sums over a tower's rows, and by what these were divided."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from samestep.watching.losses.light_terms import LightTerms
from samestep.watching.losses.pass_means import PassMeans
from samestep.watching.losses.rows import Rows, norm_order
from samestep.watching.operators.operator_calls import (
    MEAN,
    OF_LABELS,
    SUM,
    Call,
    number_of,
    reduction_of,
    square_of,
    tensors_in,
)
from samestep.watching.operators.origins import Kept, is_dense, keep_address, storage_of
from samestep.watching.program.program_line import ProgramLine
from samestep.watching.program.running_factors import (
    divides_by_variable,
    multiplies_by_size,
)

__all__ = ["SCALING", "RowSum", "RowSums", "factor_in"]

_ADDING = {"add", "sub", "rsub", "add_", "sub_", "stack"}
_KEEPING = {*_ADDING, "neg", "neg_", "sum", "view", "squeeze", "unsqueeze", "_to_copy", "clone"}
"""Operators whose result is still a sum over rows."""

SCALING = {"mul": 1, "mul_": 1, "div": -1, "div_": -1}
"""Products and quotients: the power of their second argument."""

_CONTRACTING = {"dot", "vdot", "mm", "bmm"}
"""Products that add along the last dimension of their first argument."""

_ROUNDING = 1e-3
_MOST_ELEMENTS = 4096  # of weights whose sum is taken


class RowSum(NamedTuple):
    """A loss that was computed from sums or means over rows, by sums and products.

    Attributes:
        line: where the rows were summed.
        factor: the largest by which a sum was multiplied; 0 if there are means alone.
        undivided: the same for sums that were not divided by a count, without what may be weights of terms.
        weight: the largest by which a term of a sum or a mean was multiplied, except by numbers that are
            written in the code.
        written: the product of these.
        num_terms: of that sum or mean.
        is_own_mean: whether it was divided by the number of its rows or terms.
        is_mixed: whether it was added to a mean.
        is_by_loop: whether a loop has added single rows; their own means are parts of it.
        added: where a term was added to a sum that does not grow with the rows; "" if none was.
    """

    line: str
    factor: float
    undivided: float
    weight: float
    written: float
    num_terms: int
    is_own_mean: bool = False
    is_mixed: bool = False
    is_by_loop: bool = False
    added: str = ""

    @property
    def is_mean(self) -> bool:
        """Whether it is made of means alone."""
        return self.factor == self.undivided == 0

    def over(self, count: int) -> RowSum:
        """Return it divided by a number of terms that it is one of."""
        return self._replace(factor=self.factor / count, weight=self.weight / count)

    def is_sum_over(self, num_rows: int, *, beside_means: bool = False) -> bool:
        """Say whether a sum was divided by less than the number of rows, so that it is no mean.

        Beside means, a sum that was divided by any count may be one of them.
        """
        factor = self.undivided if beside_means else max(self.factor, self.undivided)
        return factor * num_rows > 1 + _ROUNDING


class RowSums:
    """The sums and means over rows that a pass has computed.

    Args:
        rows: the tensors that have rows.
        means: those of the pass; they note an operator before this.
        depends_on_rows: says whether a tensor was computed from the tower's rows or random numbers.
    """

    def __init__(self, rows: Rows, means: PassMeans, depends_on_rows: Callable[[Tensor], bool]) -> None:
        self._rows, self._means, self._light = rows, means, LightTerms(depends_on_rows)
        self.clear()

    def clear(self) -> None:
        """Forget the pass."""
        self._light.clear()
        # By which terms were multiplied, by storage, with what keeps its address from being reused.
        self._factors: dict[int, tuple[float, Kept]] = {}
        # By the tensors' ids; they are kept alive, so that no other one gets their id.
        self._sums: dict[int, tuple[RowSum, Tensor]] = {}
        self._squares: dict[int, tuple[RowSum, Tensor]] = {}  # by norms, which are their roots

    def note(self, call: Call, result: Any, *, takes_rows: bool) -> None:
        """Note an operator that has run; `takes_rows` says whether it took tensors with rows in front."""
        sums = [self._sums[id(each)][0] for each in tensors_in(call.args) if id(each) in self._sums]
        root = square_of(call)
        if sums:
            self._note_sum(call, sums, result)
        elif root is not None and id(root) in self._squares:
            self._sums[id(result)] = self._squares[id(root)][0], result
        elif takes_rows or call.name in _CONTRACTING:
            self._note_terms(call, result)
        self._light.note(call, result, takes_rows=takes_rows)

    def of_losses(self, losses: Mapping[str, Any]) -> dict[str, RowSum]:
        """Return of what sums over the rows losses were computed, if of any, and forget the pass."""
        found = {name: self._sums[id(each)][0] for name, each in losses.items() if id(each) in self._sums}
        self.clear()
        return found

    def _note_sum(self, call: Call, sums: list[RowSum], result: Any) -> None:
        name = call.name
        num_given = len(list(tensors_in(call.args))) if name == "stack" else len(sums)
        if not isinstance(result, Tensor) or result.numel() > num_given:
            return
        divisor = call.args[1] if name in ("div", "div_") else None
        if isinstance(divisor, Tensor) and divisor.requires_grad:
            return  # a quotient, as a Dice loss is
        heaviest = max(sums, key=lambda each: each.weight)
        largest = max(sums, key=lambda each: (each.undivided, each.factor))
        found = heaviest._replace(
            factor=max(each.factor for each in sums),
            undivided=largest.undivided,
            line=largest.line if largest.factor else heaviest.line,
            is_mixed=self._is_mixed(call, sums),
            added=self._added(call, sums),
        )
        if name in SCALING:
            found = self._scaled(found, call, result)
        elif name == "mean":
            found = found.over(call.args[0].numel())
        elif name not in _KEEPING:
            return
        self._sums[id(result)] = found, result

    def _scaled(self, found: RowSum, call: Call, result: Tensor) -> RowSum:
        factor = factor_in(call)
        is_written = _is_written(factor)
        makes_mean = self._makes_mean(found, call, factor, is_written)
        if makes_mean:
            is_own_mean = self._is_of_one(factor, found.num_terms)
            found = found._replace(factor=0.0, undivided=0.0, is_own_mean=is_own_mean)
        else:
            undivided = self._undivided(found, call, factor, is_written)
            found = found._replace(factor=found.factor * factor, undivided=undivided)
        if is_written:
            return found._replace(written=found.written * factor)
        found = found._replace(weight=found.weight * factor)
        is_sum = found.factor == 0 and not makes_mean and self._is_of_all(found)
        return found._replace(factor=1.0, undivided=1.0, is_own_mean=False) if is_sum else found

    def _makes_mean(self, found: RowSum, call: Call, factor: float, is_written: bool) -> bool:
        """Say whether a sum is divided by the number of its rows or terms, or by another count."""
        if found.is_mean or found.is_mixed:
            return False
        if self._is_of_one(factor, found.num_terms):
            return True
        if _divides_by_count(call, is_written):
            return factor * self._rows.num_rows <= 1 + _ROUNDING
        is_product = SCALING[call.name] == 1
        return is_product and not is_written and divides_by_variable()  # as in `2 / len(x) * total`

    def _undivided(self, found: RowSum, call: Call, factor: float, is_written: bool) -> float:
        """Return by what a sum was multiplied that is no mean: not what may be a weight of its term."""
        may_be_mean = _divides_by_count(call, is_written) and not found.is_mixed
        may_be_mean &= factor <= 1 + _ROUNDING  # no count is below one
        is_off = any(map(_is_zero, call.args))  # by a weight that begins at zero
        return 0.0 if may_be_mean or is_off else found.undivided * max(1.0, factor)

    def _is_of_one(self, factor: float, num_terms: int) -> bool:
        """Say whether a factor divides by the number of rows or terms."""
        counts = self._rows.num_rows, num_terms
        return any(math.isclose(factor * each, 1, rel_tol=_ROUNDING) for each in counts)

    def _is_of_all(self, mean: RowSum) -> bool:
        """Say whether a mean was multiplied by its rows or terms, and so is a sum again."""
        counts = self._rows.num_rows, mean.num_terms
        weight = mean.weight * mean.num_terms
        is_of_all = any(math.isclose(weight, each, rel_tol=_ROUNDING) for each in counts)
        return is_of_all and multiplies_by_size(*counts)

    @staticmethod
    def _is_mixed(call: Call, sums: list[RowSum]) -> bool:
        adds_to_mean = call.name in _ADDING and len({each.is_mean for each in sums}) > 1
        return adds_to_mean or any(each.is_mixed for each in sums)

    def _added(self, call: Call, sums: list[RowSum]) -> str:
        is_sum = any(each.is_sum_over(self._rows.num_rows) for each in sums)
        if is_sum and call.name in _ADDING and any(self._light.has(each) for each in tensors_in(call.args)):
            return str(ProgramLine.current())
        return next((each.added for each in sums if each.added), "")

    def _note_terms(self, call: Call, result: Any) -> None:
        name = call.name
        if name in SCALING and self._rows.dimension_of(result) == 0:
            factor = math.prod(map(self._factor_of, call.given)) * factor_in(call)
            self._factors[storage_of(result)] = factor, keep_address(result)
        reduction, order = reduction_of(call.func, call.args, call.kwargs), norm_order(call)
        is_mean = name == "mean" or reduction == MEAN
        if is_mean or name == "sum" or reduction == SUM or order in (1, 2):
            dimension, factor = 0, self._factor_of(call.args[0]) ** (order or 1)
        elif name in _CONTRACTING:
            factor = math.prod(map(self._factor_of, call.given)) * factor_in(call)
            dimension = call.args[0].dim() - 1
        else:
            return
        terms, total = call.args[0], result if isinstance(result, Tensor) else result[0]
        num_terms = call.args[1].numel() if call.func in OF_LABELS else terms.numel()
        is_over_rows = (
            any(each.requires_grad for each in call.given) and self._rows.dimension_of(terms) == dimension
        )
        if num_terms and total.numel() == 1 and is_over_rows:
            held = self._squares if order == 2 else self._sums
            held[id(total)] = self._of_terms(total, factor, num_terms, is_mean=is_mean), total

    def _of_terms(self, total: Tensor, factor: float, num_terms: int, *, is_mean: bool) -> RowSum:
        found = RowSum(str(ProgramLine.current()), factor, factor, factor, 1.0, num_terms)
        if is_mean:
            return found._replace(factor=0.0, undivided=0.0, weight=factor / num_terms, is_own_mean=True)
        if self._is_of_one(factor, num_terms):
            return found._replace(factor=0.0, undivided=0.0, is_own_mean=True)
        return found._replace(undivided=0.0) if self._means.has(total) else found

    def _factor_of(self, tensor: Tensor) -> float:
        return self._factors.get(storage_of(tensor), (1.0, None))[0]


def _divides_by_count(call: Call, is_written: bool) -> bool:
    """Say whether a quotient is by what may be a count: not by a number that the current line has."""
    return SCALING[call.name] == -1 and (not is_written or isinstance(call.args[1], Tensor))


def _is_written(factor: float) -> bool:
    """Say whether the current line has a number by which it multiplies or divides so."""
    numbers = ProgramLine.current().numbers() or []
    return any(math.isclose(factor, each) or math.isclose(factor * each, 1) for each in numbers)


def factor_in(call: Call) -> float:
    """Return the number by which a product multiplies; 0 if by weights that add up to one, as in a mean."""
    factor = 1.0
    for value, power in zip(call.args[:2], (1, SCALING.get(call.name, 1)), strict=True):
        number = number_of(value)
        if number is not None:
            factor *= number**power
        elif isinstance(value, Tensor) and _is_small(value):
            weights = value.detach().double() ** power
            is_mask = bool(((weights == 0) | (weights == 1)).all())
            factor *= is_mask or not math.isclose(abs(float(weights.sum())), 1, rel_tol=_ROUNDING)
    return factor


def _is_zero(value: object) -> bool:
    is_number = isinstance(value, Tensor) and value.numel() == 1 and not value.requires_grad
    return not value if is_number or isinstance(value, (int, float)) else False


def _is_small(tensor: Tensor) -> bool:
    return is_dense(tensor) and not tensor.is_complex() and 1 < tensor.numel() <= _MOST_ELEMENTS
