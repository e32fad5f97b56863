"""Recognizes a number of the program as the very object, because Python does not say who uses a number."""

from __future__ import annotations

import math
import sys
from fractions import Fraction
from typing import TypeGuard

import numpy as np

__all__ = ["HeldNumber", "is_number", "is_simple"]

_SIMPLEST = 256  # the largest denominator


class HeldNumber:
    """A number that the program has: call `note`. An equal number that a pass computes is another object."""

    def __init__(self, number: float) -> None:
        self._number = [number]  # in a list, so that counting its references adds none
        self._num_references = 0

    def note(self) -> int:
        """Count the references to it, and return how many others there are."""
        self._num_references = self._count()
        return self._num_references - _OWN

    @property
    def is_held(self) -> bool:
        """Whether the program had it at the last `note`, and has not replaced it since."""
        return self._count() >= self._num_references > _OWN

    def _count(self) -> int:
        return sys.getrefcount(self._number[0])


_OWN = HeldNumber(float("0.5"))._count()


def is_number(value: object) -> TypeGuard[float]:
    """Say whether this is a finite float of Python or NumPy, by its type, so that proxies load nothing."""
    return issubclass(type(value), (float, np.floating)) and math.isfinite(value)  # type: ignore[arg-type]


def is_simple(number: float) -> bool:
    """Say whether a number is a simple fraction, which passes may compute from numbers of rows or labels."""
    nearest = Fraction(number).limit_denominator(_SIMPLEST)
    return math.isclose(nearest, number, rel_tol=1e-7)
