"""A number that passes carry on, in all the ways in which losses take it: it is told, also to one worker."""

import pytest

from .written_code import check_told

pytestmark = pytest.mark.sampled(20)

PROGRAM = """import math
import random
import statistics
from collections import deque

import numpy as np
import torch
import torch.nn.functional as F

import samestep


class Kept:
    def __init__(self):
        self.mean, self.count, self.history, self.recent = 0.3, 1, [0.3], deque([0.3], maxlen=4)
        self.array, self.grown, self.by_name, self.text = np.array([0.3]), np.zeros(0), {{"mean": 0.3}}, "0.3"

    def update(self, loss):
        self.mean = 0.9 * self.mean + 0.1 * loss
        self.count += 1
        self.history.append(loss)
        self.recent.append(loss)
        self.array = 0.9 * self.array + 0.1 * loss
        self.grown = np.append(self.grown, loss)
        self.by_name["mean"] = self.mean
        self.text = str(self.mean)


def program(job):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    towers, kept = samestep.Towers(model, 7, job=job), Kept()
    for step in range(2):
        made = torch.Generator().manual_seed(step)
        rows, labels = torch.randn(21, 4, generator=made), torch.randint(3, (21,), generator=made)
        for tower in towers((rows, labels)):
            x, y = tower.batch
            losses = F.cross_entropy(model(x), y, reduction="none")
            loss = {loss}
            kept.update(losses.mean().item())
            tower.backward(loss)
        towers.average()
        optimizer.step()
    return samestep.digest(model)
"""

LOSSES = """
losses.mean() * kept.mean
losses.mean() * kept.by_name["mean"]
losses.mean() * float(kept.text)
losses.mean() * float(f"{kept.mean:.3f}")
losses.mean() * round(kept.mean, 1)
losses.mean() * int(10 * kept.mean)
losses.mean() * math.exp(-kept.mean)
losses.mean() * np.float32(kept.mean)
losses.mean() * (2 if losses.mean().item() > kept.mean else 1)
(losses * torch.full((len(losses),), kept.mean)).mean()
(losses * torch.tensor([[kept.mean, 1.0]]).sum()).mean()
(losses * torch.tensor(kept.mean, dtype=torch.bfloat16)).mean()
(losses * torch.linspace(0, kept.mean, len(losses))).mean()
(losses * torch.tensor([kept.mean**k for k in range(len(losses))])).mean()
(losses * torch.as_tensor(np.ones(len(losses), np.float32) * np.float32(kept.mean))).mean()
losses.clamp(max=kept.mean).mean()
losses.pow(kept.mean).mean()
torch.where(losses > kept.mean, losses, 2 * losses).mean()
torch.lerp(losses, 2 * losses, kept.mean).mean()
torch.add(losses, losses, alpha=kept.mean).mean()
torch.addcmul(losses, losses, losses, value=kept.mean).mean()
F.dropout(losses, min(0.9, kept.mean)).mean()
F.softplus(losses, beta=kept.mean).mean()
F.leaky_relu(losses - 1, kept.mean).mean()
F.huber_loss(losses, torch.zeros_like(losses), delta=kept.mean)
F.cross_entropy(model(x), y, label_smoothing=min(0.9, kept.mean))
F.cross_entropy(model(x), y, weight=torch.tensor([kept.mean, 1.0, 1.0]), reduction="sum") / len(y)
losses.mean() * torch.frombuffer(bytearray(np.float32(kept.mean).tobytes()), dtype=torch.float32)[0]
(losses * torch.from_numpy(kept.array).float()).mean()
(losses * (1 + torch.from_numpy(kept.grown).float().sum())).mean()
losses.mean() * (sum(kept.recent) / len(kept.recent))
losses.mean() * torch.tensor(list(kept.recent)).mean()
losses.mean() * torch.tensor(kept.history).mean()
losses.mean() * torch.tensor(kept.history[-2:]).sum()
losses.mean() * torch.tensor(kept.history).sort().values[0]
losses.mean() * torch.tensor(kept.history).topk(1).values[0]
losses.mean() * torch.tensor(np.array(kept.history, dtype=np.float32)).mean()
losses.mean() * sum(0.5**k * each for k, each in enumerate(reversed(kept.history)))
losses.mean() * statistics.median(kept.history)
losses.mean() * float(np.quantile(kept.history, 0.5))
losses.mean() * float(np.dot(kept.history, kept.history))
losses.mean() * len(kept.history)
losses.mean() * (1.0 + (len(kept.history) > 2))
losses.mean() * dict(enumerate(kept.history)).get(1, 1.0)
losses.mean() * (1 + kept.count % 2)
losses.mean() * (2 if kept.count > 3 else 1)
losses.mean() * 0.9**kept.count
losses.mean() * math.cos(kept.count)
losses.mean() * [1.0, 2.0, 3.0][kept.count % 3]
losses.mean() * float(np.interp(kept.count, [0, 10], [0, 1]))
losses.mean() * (1 + random.Random(kept.count).random())
losses.mean() * (1 + np.random.default_rng(kept.count).random())
losses.mean() * (1 + torch.rand((), generator=torch.Generator().manual_seed(kept.count)))
losses.mean() * torch.arange(kept.count).sum()
losses.mean() * torch.eye(kept.count).sum()
losses.mean() * torch.ones(2, kept.count).sum()
losses.repeat(kept.count).sum() / len(losses)
(losses * torch.arange(float(len(losses))).roll(kept.count)).mean()
losses[kept.count % len(losses)]
losses.narrow(0, kept.count % len(losses), 1).mean()
losses.kthvalue(1 + kept.count % len(losses)).values
"""


@pytest.mark.sampled(50)
@pytest.mark.parametrize("loss", LOSSES.strip().splitlines())
def test_weights_do_not_depend_on_the_workers_unless_it_is_told(loss, tmp_path):
    check_told(PROGRAM.format(loss=loss), tmp_path / "numbers.py", is_seen_alone=True)
