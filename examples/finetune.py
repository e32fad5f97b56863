"""Fine-tuning: a net trained on the digits 0 to 4 learns 5 to 9, first its new head, then all layers."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset, random_split

import samestep
from samestep.recipes.digits.data import load_digits

STEPS, THAW_AT = 200, 100


def digits(low, high):
    """Return training and test examples of the digits from low to high."""
    pictures, labels = map(torch.from_numpy, load_digits())
    chosen = (labels >= low) & (labels <= high)
    examples = TensorDataset(pictures[chosen, None] / 16, labels[chosen] - low)
    return random_split(examples, [0.8, 0.2], torch.Generator().manual_seed(0))


def loss_of(model, batch):
    pictures, labels = batch
    return F.cross_entropy(model(pictures), labels)


def accuracy(model, batch):
    pictures, labels = batch
    return {"accuracy": ((model(pictures).argmax(1) == labels).sum(), len(labels))}


def train(job, name, model, parameters, data, callbacks=()):
    train, test = data
    towers = samestep.Towers(model, 8, job=job, seed=0)
    step = samestep.Step(towers, loss_of, torch.optim.AdamW(parameters, lr=1e-3))
    loader = samestep.TowerLoader(train, 64, towers, seed=0)
    evaluate = samestep.Evaluation(test, accuracy)
    options = {"run_dir": f"runs/{name}", "steps": STEPS, "callbacks": callbacks, "name": name}
    samestep.Trainer(step, loader, evaluate=evaluate, **options).run()


class Thaw(samestep.Callback):
    """Freezes a part of the model until a given step."""

    def __init__(self, part, at_step):
        self.part, self.at_step = part, at_step

    def before_step(self, trainer, batch):
        # Depends only on the step, so a resumed run does the same.
        is_thawed = trainer.step.towers.step >= self.at_step
        self.part.requires_grad_(is_thawed)
        self.part.train(is_thawed)  # while frozen, batch norm uses its running statistics


def main(job):
    torch.manual_seed(0)
    encoder = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten()),
    ).to(job.device)

    # Pretrain a net; yours may come from a file: encoder.load_state_dict(torch.load(...)).
    model = nn.Sequential(encoder, nn.Linear(512, 5).to(job.device))
    train(job, "pretrain", model, model.parameters(), digits(0, 4))

    head = nn.Linear(512, 5).to(job.device)
    groups = [{"params": head.parameters()}, {"params": encoder.parameters(), "lr": 1e-4}]
    train(job, "finetune", nn.Sequential(encoder, head), groups, digits(5, 9), [Thaw(encoder, THAW_AT)])


samestep.launch(main, workers="auto", towers=8)
