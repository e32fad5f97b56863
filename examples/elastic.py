"""A custom loop that continues when a worker is killed: `python examples/elastic.py`, on all cores."""

import torch
import torch.nn.functional as F
from torch import nn

import samestep
from samestep.recipes.digits.data import Digits


def main(job: samestep.Job) -> None:
    """Train on the digits for five epochs; every worker runs this, including those that join later."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 100), nn.ReLU(), nn.Dropout(0.2), nn.Linear(100, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    towers = samestep.Towers(model, 8, job=job, seed=0)
    loader = samestep.TowerLoader(Digits("train", augment=True), batch_size=64, towers=towers, seed=0)
    state = {
        "model": model,
        "towers": towers,
        "loader": loader,
        "optimizer": optimizer,
        "scheduler": scheduler,
    }

    def step(batch: samestep.LocalBatch) -> samestep.Report:
        for tower in towers(batch):
            pictures, labels = tower.batch
            tower.backward(F.cross_entropy(model(pictures), labels))
        report = towers.average()
        optimizer.step()
        return report

    with samestep.Elastic(**state) as elastic:
        while loader.epoch < 5:
            for batch in loader:
                report = elastic(step, batch)  # repeats the step if a worker is lost
            scheduler.step()
            if job.is_first:
                print(f"epoch {loader.epoch}: loss {report.loss:.4f} on {job.world_size} workers", flush=True)
    if job.is_first:
        print("weights sha256", samestep.digest(model))


if __name__ == "__main__":
    samestep.launch(main, towers=8, device="cpu")
