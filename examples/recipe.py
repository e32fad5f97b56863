"""trainer.py as a recipe with options: samestep train examples/recipe.py --width 128; see --help."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep


@dataclass(frozen=True)
class Parity(samestep.Settings):
    """Train a perceptron to tell whether a product of three numbers is positive."""

    batch_size: int = 100
    steps: int = 600
    run_dir: Path = Path("runs/parity")
    width: int = 256
    """Hidden units."""

    def build(self, job: samestep.Job) -> samestep.Trainer:
        """Build model, data and step, the same on every worker."""
        torch.manual_seed(self.seed)
        model = nn.Sequential(nn.Linear(8, self.width), nn.ReLU(), nn.Linear(self.width, 2))
        model = model.to(job.device)
        inputs = torch.randn(2000, 8, generator=torch.Generator().manual_seed(0))
        train, test = (TensorDataset(part, (part[:, :3].prod(1) > 0).long()) for part in inputs.split(1500))
        towers = samestep.Towers(model, self.towers, job=job, seed=self.seed, placement=self.placement)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        step = samestep.Step(
            towers,
            lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
            optimizer,
            autocast=self.autocast_dtype,
        )
        loader = samestep.TowerLoader(train, self.batch_size, towers, seed=self.seed)
        return self.trainer(step, loader, evaluate=samestep.Evaluation(test, accuracy))


def accuracy(model, batch):
    """Return the number of correct rows, and the number of rows."""
    return {"accuracy": ((model(batch[0]).argmax(1) == batch[1]).sum(), len(batch[1]))}
