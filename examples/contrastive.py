"""A contrastive loss on towers: run it as it is, or with `torchrun --nproc-per-node 2`.

Each handwritten digit is cut in two, and two small nets learn which halves belong together. The loss
compares every left half of the batch with every right half, so it is no mean over towers: `whole_batch`
takes the place of the inner loop.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import samestep
from samestep.recipes.digits.data import Digits


class Halves(nn.Module):
    """Two encoders and a learnable temperature, as in CLIP."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (
            nn.Sequential(
                nn.Flatten(), nn.Linear(32, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 32)
            )
            for _ in range(2)
        )
        self.log_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, pictures: Tensor) -> tuple[Tensor, Tensor]:
        """Embed both halves of each picture: [rows, 1, 8, 8] -> twice [rows, 32], of length 1."""
        left, right = pictures.chunk(2, dim=-1)
        return F.normalize(self.left(left)), F.normalize(self.right(right))


job = samestep.init("cpu")
torch.manual_seed(0)
model = Halves()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
towers = samestep.Towers(model, 8, job=job, seed=0)
loader = samestep.TowerLoader(Digits("train", augment=True), batch_size=512, towers=towers, seed=0)


def forward(tower_batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Embed one tower's rows; called twice for every tower."""
    pictures, _ = tower_batch
    return model(pictures)


def info_nce(outputs: tuple[Tensor, Tensor], batch: object) -> Tensor:
    """Compare all rows of the batch with each other; called once, on every worker alike."""
    left, right = outputs
    logits = model.log_scale.exp() * left @ right.T
    own = torch.arange(len(logits))
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


for epoch in range(10):
    for batch in loader:
        towers.whole_batch(batch, forward, info_nce)
        report = towers.average()  # every worker now holds the same p.grad
        optimizer.step()
    if job.is_first:
        scale = model.log_scale.exp().item()
        print(f"epoch {epoch}: loss {report.loss:.4f} over {report.rows} rows, scale {scale:.3f}")

if job.is_first:
    print("weights sha256", samestep.digest(model))
job.close()
