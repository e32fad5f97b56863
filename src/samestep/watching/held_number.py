"""Recognizes a number of the program as the very object, because Python does not say who uses a number."""

from __future__ import annotations

import math
import sys
from typing import TypeGuard

import numpy as np

__all__ = ["HeldNumber", "is_number"]


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
        """Whether the program has not replaced it since `note`."""
        return self._count() >= self._num_references

    def _count(self) -> int:
        return sys.getrefcount(self._number[0])


_OWN = HeldNumber(float("0.5"))._count()


def is_number(value: object) -> TypeGuard[float]:
    """Say whether this is a finite float of Python or NumPy, by its type, so that proxies load nothing."""
    return issubclass(type(value), (float, np.floating)) and math.isfinite(value)  # type: ignore[arg-type]
