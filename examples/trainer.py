"""A custom model, dataset and loss; `Trainer` adds checkpoints, resume, evaluation and more."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import samestep

inputs = torch.randn(2000, 8, generator=torch.Generator().manual_seed(0))
train, test = (TensorDataset(part, (part[:, :3].prod(1) > 0).long()) for part in inputs.split(1500))


def accuracy(model, batch):
    return {"accuracy": ((model(batch[0]).argmax(1) == batch[1]).sum(), len(batch[1]))}


def main(job):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 2)).to(job.device)
    towers = samestep.Towers(model, 8, job=job, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    step = samestep.Step(towers, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), optimizer)
    loader = samestep.TowerLoader(train, batch_size=100, towers=towers, seed=0)
    evaluate = samestep.Evaluation(test, accuracy)
    samestep.Trainer(
        step, loader, run_dir="runs/mine", steps=600, evaluate=evaluate, evaluate_every=200
    ).run()


samestep.launch(main, workers="auto", towers=8)
