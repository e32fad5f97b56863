"""A loop of one's own in `samestep.Elastic`; `tests/takeovers.py` kills its workers."""

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import samestep

EPOCHS, TOWERS = 3, 5


class Best:
    """What a loop may keep of its own."""

    def __init__(self):
        self.losses = []

    def state_dict(self):
        return {"losses": self.losses}

    def load_state_dict(self, state):
        self.losses = state["losses"]


def measure(model, batch):
    return {"loss": (model(batch[0]).square().sum(), len(batch[0]))}


def train(job, run_dir):
    """Train for some epochs; return the digest, the averages' digest, and the loss of each epoch."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.2), nn.Linear(4, 1))
    towers = samestep.Towers(model, TOWERS, job=job, noise_every=2)
    data = torch.utils.data.TensorDataset(torch.randn(26, 3, generator=generator))
    loader = samestep.TowerLoader(data, 14, towers)  # the last batch of an epoch has 12 rows
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    best, evaluation = Best(), samestep.Evaluation(data, measure, rows=8)
    state = {"model": model, "towers": towers, "loader": loader, "averaged_model": averaged}
    state |= {"optimizer": optimizer, "scheduler": scheduler, "best": best}

    def step(batch):
        scale = torch.rand(()) + 0.5  # of a global generator
        optimizer.param_groups[0]["weight_decay"] *= 1.1
        for tower in towers(batch):
            tower.backward(scale * model(tower.batch[0]).square().mean())
        report = towers.average()
        optimizer.step()
        averaged.update_parameters(model)
        return report.loss

    with samestep.Elastic(**state) as elastic:
        while loader.epoch < EPOCHS:
            losses = [elastic(step, batch) for batch in loader]
            scheduler.step()
            found = elastic(evaluation, model, job)
            best.losses = [*best.losses, found["loss"]]
            elastic(samestep.save, run_dir / f"{towers.step}", **state)
        assert losses
    return samestep.digest(model), samestep.digest(averaged), best.losses
