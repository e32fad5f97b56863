"""A contrastive loss, which compares every row of the batch with all others, in the memory of one tower.

Each handwritten digit is cut in two, and two small nets learn which halves belong together. Such a loss is
not a mean over towers: with `forward`, `Step` gathers the outputs of all towers and computes the loss once.
"""

import torch
import torch.nn.functional as F
from torch import nn

import samestep
from samestep.recipes.digits.data import Digits

STEPS = 60


class Halves(nn.Module):
    """Two encoders and a learnable temperature, as in CLIP."""

    def __init__(self):
        super().__init__()
        self.left, self.right = (
            nn.Sequential(
                nn.Flatten(), nn.Linear(32, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 32)
            )
            for _ in range(2)
        )
        self.log_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, pictures):
        """Embed both halves of each picture: [rows, 1, 8, 8] -> two [rows, 32] of unit vectors."""
        left, right = pictures.chunk(2, dim=-1)
        return F.normalize(self.left(left)), F.normalize(self.right(right))


def embed(model, batch):
    """Embed one tower's rows; called twice for every tower."""
    pictures, _ = batch
    return model(pictures)


def info_nce(model, outputs, batch):
    """Compare all rows of the batch with each other; called once, with the same inputs on every worker."""
    left, right = outputs
    logits = model.log_scale.exp() * left @ right.T
    own = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


def matches(model, batch):
    """Return the number of left halves that are closest to their own right halves, and the number of rows."""
    left, right = embed(model, batch)
    closest = (left @ right.T).argmax(1)
    return {"matches": ((closest == torch.arange(len(left), device=left.device)).sum(), len(left))}


def main(job):
    torch.manual_seed(0)
    model = Halves().to(job.device)
    towers = samestep.Towers(model, 8, job=job, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    step = samestep.Step(towers, info_nce, optimizer, forward=embed)
    loader = samestep.TowerLoader(Digits("train", augment=True), 512, towers, seed=0)
    evaluate = samestep.Evaluation(Digits("test", augment=False), matches, rows=120)
    samestep.Trainer(step, loader, run_dir="runs/contrastive", steps=STEPS, evaluate=evaluate).run()


samestep.launch(main, workers="auto", towers=8)
