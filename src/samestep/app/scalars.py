"""The scalars that training logs: losses, learning rates, speed, memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from samestep.app.memory import peak_bytes
from samestep.app.throughput import Throughput
from samestep.towers.report import Report, mean_losses, total_loss
from samestep.towers.step import Step

__all__ = ["Before", "Scalars", "Terms"]

Terms = Callable[[nn.Module], Mapping[str, float | Tensor]]
"""terms(model) -> {name: value} of the loss terms that depend only on the weights."""

_DECAY = 0.9
_MOST_REPORTS = 100  # that are kept until `read`: small tensors of many steps fragment the heap


@dataclass(frozen=True)
class Before:
    """Values from before a step's update: the terms of the loss, and the learning rates."""

    terms: Mapping[str, float | Tensor]
    learning_rates: Sequence[float]

    @classmethod
    def of(cls, step: Step, terms: Terms | None) -> Before:
        """Read the values; call this before the step."""
        with torch.no_grad():
            found = terms(step.towers.model) if terms is not None else {}
        # A user's own optimizer may have no "lr"; `Scalars.read` leaves NaN out.
        return cls(found, [float(group.get("lr", math.nan)) for group in step.optimizer.param_groups])


@dataclass
class Scalars:
    """Collects the reports of steps, and returns their scalars; see `Logger.log`.

    Losses are those of the newest step, with smoothed ones over all steps; speed is the mean since `read`.
    """

    device: torch.device
    _throughput: Throughput = field(default_factory=Throughput)
    _smoothed: dict[str, _Smoothed] = field(default_factory=dict)
    _recent: list[tuple[Report, Before]] = field(default_factory=list)

    def add(self, report: Report, before: Before) -> None:
        """Add a step; its losses stay on the device for some steps, because each copy waits for the GPU."""
        self._throughput.add(report.rows)
        if len(self._recent) == _MOST_REPORTS:
            self._smooth()
        self._recent.append((report, before))

    def leave_out(self, seconds: float) -> None:
        """Leave out time in which no step ran from the speed."""
        self._throughput.leave_out(seconds)

    def read(self) -> dict[str, float]:
        """Return the finite scalars by name, and start a new period."""
        report, before = self._recent[-1]
        rows_per_s, batch_s = self._throughput.read()
        rates = before.learning_rates
        names = [f"step/learning rate{f'/{index}' * (len(rates) > 1)}" for index in range(len(rates))]
        found = {
            **self._losses(),
            **{f"towers/{tower}/loss": loss for tower, loss in enumerate(report.tower_losses)},
            **dict(zip(names, rates, strict=True)),
            "step/rows per second": rows_per_s,
            "step/seconds": batch_s,
            "step/gradient norm": report.grad_norm,
            "step/gradient noise scale": math.nan if report.noise_scale is None else report.noise_scale,
            "step/peak memory, GiB": peak_bytes(self.device) / 2**30,
        }
        return {name: value for name, value in found.items() if math.isfinite(value)}

    def _losses(self) -> dict[str, float]:
        """Return the losses of the newest step, and the smoothed ones."""
        newest = self._smooth()
        return {f"loss/{name}": value for name, value in newest.items()} | {
            f"loss/{name} (smoothed)": self._smoothed[name].value for name in newest
        }

    def _smooth(self) -> dict[str, float]:
        """Update the smoothed losses with all recent steps, and return the losses of the newest one."""
        sums = torch.stack([report.loss_sums for report, _ in self._recent])
        counts = torch.stack([report.counts for report, _ in self._recent])
        names, all_terms = self._recent[-1][0].names, [before.terms for _, before in self._recent]
        self._recent.clear()
        named: dict[str, float] = {}
        for total, means, terms in zip(
            total_loss(sums, counts).tolist(), mean_losses(sums, counts).tolist(), all_terms, strict=True
        ):
            named = {"total": total, **dict(zip(names, means, strict=False))}
            named |= {name: float(value) for name, value in terms.items()}
            for name, value in named.items():
                self._smoothed.setdefault(name, _Smoothed()).add(value)
        return named


@dataclass
class _Smoothed:
    """An exponential average without bias at the start: Σ 0.9ᵏ xₖ / Σ 0.9ᵏ, for the value k steps ago.

    It restarts when a run is resumed. After 100 steps, the values before have a weight of 0.9¹⁰⁰ < 0.003%.
    """

    total: float = 0.0
    weight: float = 0.0

    def add(self, value: float) -> None:
        if math.isfinite(value):  # a single NaN would make all later averages NaN
            self.total = _DECAY * self.total + value
            self.weight = _DECAY * self.weight + 1

    @property
    def value(self) -> float:
        return self.total / self.weight if self.weight else math.nan
