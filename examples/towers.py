"""An existing training loop on towers: run it as it is, or with `torchrun --nproc-per-node 2`."""

import torch
import torch.nn.functional as F
from torch import nn

import samestep
from samestep.recipes.digits.data import Digits

job = samestep.init("cpu")
torch.manual_seed(0)
model = nn.Sequential(
    nn.Flatten(), nn.Linear(64, 100), nn.BatchNorm1d(100), nn.ReLU(), nn.Dropout(0.2), nn.Linear(100, 10)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
towers = samestep.Towers(model, 8, job=job, seed=0)
loader = samestep.TowerLoader(Digits("train", augment=True), batch_size=256, towers=towers, seed=0)

for epoch in range(5):
    for batch in loader:
        for tower in towers(batch):  # only the towers placed on this worker
            pictures, labels = tower.batch
            tower.backward(F.cross_entropy(model(pictures), labels))
        report = towers.average()  # every worker now holds the same p.grad
        optimizer.step()
    if job.is_first:
        print(f"epoch {epoch}: loss {report.loss:.4f} over {report.rows} rows, |grad| {report.grad_norm:.3f}")

if job.is_first:
    print("weights sha256", samestep.digest(model))
job.close()
