"""The χ² of a histogram, three ways: run it as it is, or with `torchrun --nproc-per-node 2`.

A net's predictions are counted in bins and compared with target counts. With few entries per bin, the mean of
the towers' χ² is far from the χ² of all predictions, and so is its gradient; a warning says so. `whole_batch`
gives the latter, in the memory of one tower.
"""

import torch
from torch import Tensor, nn

import samestep

ROWS, TOWERS, BINS = 128, 16, 20

job = samestep.init("cpu")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1)).double()
inputs = torch.randn(ROWS, 4, dtype=torch.float64)
centers = torch.linspace(-2, 2, BINS, dtype=torch.float64)
shares = torch.softmax(-(centers**2) / 2, 0)  # target: the normal distribution


def chi_squared(predictions: Tensor, batch: object = None) -> Tensor:
    """Return Σ (counted − wanted)² / wanted over the bins, divided by the number of predictions."""
    near = torch.softmax(-((predictions - centers) ** 2) / 0.02, dim=1)  # [rows, bins]: soft counts
    wanted = shares * len(predictions)
    return ((near.sum(0) - wanted) ** 2 / wanted).sum() / len(predictions)


def gradient() -> Tensor:
    """Return the gradient of all parameters as one vector."""
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def show(name: str, loss: float, truth: Tensor) -> None:
    """Print a loss, and the distance of the gradient from the true one."""
    if job.is_first:
        off = ((gradient() - truth).norm() / truth.norm()).item()
        difference = f"{off:.0%}" if off > 1e-12 else "none but rounding"
        print(f"{name:<20} χ²/n {loss:.6f}  |gradient| {gradient().norm():.6f}  difference {difference}")


loss = chi_squared(model(inputs))  # the truth: all rows at once, which takes their memory
loss.backward()
truth = gradient()
show("unsplit", loss.item(), truth)

towers = samestep.Towers(model, TOWERS, job=job)
towers.whole_batch(inputs, model, chi_squared)
show("whole batch", towers.average().loss, truth)

for tower in towers(inputs):
    tower.backward(chi_squared(model(tower.batch)))
show("average over towers", towers.average().loss, truth)

job.close()
