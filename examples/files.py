"""A custom dataset: pictures in files, read by two loader processes per worker."""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

import samestep
from samestep.recipes.digits.data import load_digits

FOLDER, STEPS, PROCESSES = Path("runs/files/pictures"), 100, 2


class Pictures(torch.utils.data.Dataset):
    """The files FOLDER/SPLIT/LABEL/*.png."""

    def __init__(self, split, augment):
        self.files = sorted((FOLDER / split).glob("*/*.png"))  # the same order on every machine
        self.augment = augment

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        file = self.files[index]
        with Image.open(file) as image:
            pixels = torch.from_numpy(np.array(image, np.float32) / 255)
        if self.augment:
            # Global generators are seeded for each example and epoch, whichever process reads it.
            shift = torch.randint(-1, 2, (2,)).tolist()
            pixels = pixels.roll(shift, (0, 1))
        return pixels[None], int(file.parent.name)


def write_files():
    """Write the built-in digits as files, to stand in for your dataset; FOLDER is there when all are."""
    unfinished = FOLDER.with_suffix(".tmp")
    for index, (pixels, label) in enumerate(zip(*load_digits(), strict=True)):
        file = unfinished / ("train" if index % 5 else "test") / str(label) / f"{index:04}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels * np.uint8(15)).save(file)
    unfinished.rename(FOLDER)


def loss_of(model, batch):
    pictures, labels = batch
    return F.cross_entropy(model(pictures), labels)


def accuracy(model, batch):
    pictures, labels = batch
    return {"accuracy": ((model(pictures).argmax(1) == labels).sum(), len(labels))}


def main(job):
    if job.is_first and not FOLDER.exists():
        write_files()
    job.barrier()  # the others wait for the files

    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(job.device)
    towers = samestep.Towers(model, 8, job=job, seed=0)
    step = samestep.Step(towers, loss_of, torch.optim.AdamW(model.parameters(), lr=3e-3))
    loader = samestep.TowerLoader(
        Pictures("train", augment=True),
        128,
        towers,
        seed=0,
        num_workers=PROCESSES,
        persistent_workers=PROCESSES > 0,
    )
    evaluate = samestep.Evaluation(Pictures("test", augment=False), accuracy)
    samestep.Trainer(step, loader, run_dir="runs/files", steps=STEPS, evaluate=evaluate).run()


samestep.launch(main, workers="auto", towers=8)
