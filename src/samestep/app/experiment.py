"""The parts of one training run, which a recipe's settings make."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from samestep.data.loader import TowerLoader
from samestep.data.readers import BatchedDataset
from samestep.towers.step import Step

__all__ = ["Experiment"]


@dataclass(frozen=True)
class Experiment:
    """The parts of one training run.

    Attributes:
        step: takes one training step.
        loader: gives its batches.
        test: the examples to evaluate on.
        count: `count(model, batch)` -> int64 tensor of counts that add up over batches.
        metrics: turns the summed counts into named metrics, the main one first.
        terms: `terms(model)` -> those terms of the loss that depend on the weights alone, by name, for the
            summaries; worker 0 calls it before each step, without gradients.
        panels: `panels(model, batch)` -> uint8 [n, 3, height, width], what the summaries show of the rows of
            a tower instead of the input pictures; worker 0 calls it on the first rows of each of its
            towers, without gradients and with the model in evaluation mode.
        test_chunk_rows: test examples that are evaluated at once; 1 where their shapes differ.
    """

    step: Step
    loader: TowerLoader
    test: BatchedDataset
    count: Callable[[nn.Module, Any], Tensor]
    metrics: Callable[[Tensor], Mapping[str, float]]
    terms: Callable[[nn.Module], Mapping[str, float | Tensor]] | None = None
    panels: Callable[[nn.Module, Any], Tensor] | None = None
    test_chunk_rows: int = 250

    @property
    def model(self) -> nn.Module:
        """The model in training."""
        return self.step.towers.model

    @property
    def evaluated(self) -> nn.Module:
        """The model to evaluate: with the moving averages of the weights, where they are kept."""
        return self.step.averaged_model.module if self.step.averaged_model is not None else self.model
