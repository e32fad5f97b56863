"""The gradient noise scale: how large a batch pays off, estimated from the towers' gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["GradientNorms", "NoiseScale"]

_DECAY = 0.9
"""Decay of the exponential averages, per measurement."""

_SETTLED = 10


@dataclass
class NoiseScale:
    r"""The gradient noise scale, smoothed over the steps at which it is measured.

    .. math:: B_\text{noise} = \frac{\operatorname{tr} \Sigma}{|G|^2}

    with G the gradient over all data and Σ the covariance of a row's gradient. In a batch of this many rows,
    noise and gradient have the same size. Doubling a smaller batch saves nearly half the steps; doubling a
    larger one saves few. Both estimates are smoothed before the division, because a ratio of noisy numbers
    is biased.

    References:
        McCandlish, Kaplan, Amodei & OpenAI Dota Team, "An Empirical Model of Large-Batch Training", 2018,
        section 2.2 and appendix A.1. https://arxiv.org/abs/1812.06162
    """

    signal: float = 0.0  # the smoothed estimate of |G|²
    noise: float = 0.0  # the smoothed estimate of tr Σ
    num_measured: int = 0

    @property
    def value(self) -> float | None:
        """The noise scale in rows; infinite if noise hides the gradient; None before any measurement."""
        if self.num_measured == 0:
            return None
        return self.noise / self.signal if self.signal > 0 else math.inf

    @property
    def is_settled(self) -> bool:
        """Whether there have been enough measurements to act on the value."""
        return self.num_measured >= _SETTLED

    def measure(self, norms: GradientNorms) -> None:
        """Add one step's norms; ignore them if they are not finite, or if fewer than two towers count."""
        found = norms.estimate()
        if found is None or not all(map(math.isfinite, found)):
            return
        signal, noise = found
        # Both start from 0 and decay alike, so the bias of the start cancels in their ratio.
        self.signal = _DECAY * self.signal + (1 - _DECAY) * signal
        self.noise = _DECAY * self.noise + (1 - _DECAY) * noise
        self.num_measured += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.signal = float(state["signal"])
        self.noise = float(state["noise"])
        self.num_measured = int(state["num_measured"])


@dataclass(frozen=True)
class GradientNorms:
    """The norms of the gradients of one step."""

    squares: Sequence[float]  # squared 2-norm of each tower's mean gradient; NaN if its count is 0
    counts: Sequence[float]
    rows: Sequence[int]
    average: float  # the squared 2-norm of the average over all towers

    @property
    def of_towers(self) -> list[float]:
        """The 2-norm of each tower's own mean gradient."""
        return [math.sqrt(square) for square in self.squares]

    def estimate(self) -> tuple[float, float] | None:
        r"""Return unbiased estimates of |G|² and tr Σ, or None where fewer than two towers count.

        Tower t has :math:`b_t` of B rows and the share :math:`\omega_t` of the count; its mean gradient is
        :math:`g_t`, and the average is :math:`g = \sum_t \omega_t g_t`. Rows are drawn independently, so the
        variance of :math:`\omega_t (g_t - G)` is :math:`v b_t / B`, where v is that of g. Hence

        .. math:: \mathrm{E} \Big[\sum_t \omega_t |g_t|^2 - |g|^2\Big]
            = v \Big(\sum_t \frac{b_t}{B \omega_t} - 1\Big), \quad
            \mathrm{E} |g|^2 = |G|^2 + v, \quad \operatorname{tr} \Sigma = B v.

        With T towers of b rows each and rows as counts, the factor is T − 1, and these are the estimators of
        McCandlish et al. for batch sizes b and T·b (appendix A.1).
        """
        towers = [each for each in zip(self.squares, self.counts, self.rows, strict=True) if each[1] > 0]
        if len(towers) < 2:
            return None
        count = math.fsum(count for _, count, _ in towers)
        num_rows = sum(rows for _, _, rows in towers)
        spread = math.fsum(c / count * square for square, c, _ in towers) - self.average
        factor = math.fsum(rows / num_rows * (count / c) for _, c, rows in towers) - 1
        variance = spread / factor
        return self.average - variance, num_rows * variance
