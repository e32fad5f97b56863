"""A GAN that draws handwritten digits: two models in one job, each with its own towers."""

import torch
import torch.nn.functional as F
from torch import nn

import samestep
from samestep.recipes.digits.data import load_digits

EPOCHS, NOISE = 80, 16


def main(job):
    torch.manual_seed(0)
    generator = nn.Sequential(
        *(nn.Linear(NOISE, 128), nn.BatchNorm1d(128), nn.ReLU()),
        *(nn.Linear(128, 64), nn.Sigmoid()),
    ).to(job.device)
    discriminator = nn.Sequential(
        *(nn.Linear(64, 128), nn.LeakyReLU(0.2)),
        *(nn.Linear(128, 128), nn.BatchNorm1d(128), nn.LeakyReLU(0.2)),
        nn.Linear(128, 1),
    ).to(job.device)

    # Each net also runs in the other's passes; `also` shares its batch-norm statistics in those steps, too.
    # Two seeds, because the two steps of a batch should not draw the same noise.
    d_towers = samestep.Towers(discriminator, 8, job=job, also=generator, seed=0)
    g_towers = samestep.Towers(generator, 8, job=job, also=discriminator, seed=1)
    d_optimizer = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))

    pictures = torch.from_numpy(load_digits()[0]).flatten(1) / 16  # [1797, 64], from 0 to 1
    loader = samestep.TowerLoader(pictures, 128, d_towers, seed=0, drop_last=True)

    def fakes(rows):
        return generator(torch.randn(rows, NOISE, device=job.device))

    for epoch in range(EPOCHS):
        for batch in loader:
            discriminator.requires_grad_(True)
            generator.requires_grad_(False)
            for tower in d_towers(batch):
                real = discriminator(tower.batch)
                fake = discriminator(fakes(tower.rows))
                tower.backward((F.softplus(-real) + F.softplus(fake)).mean())
            d_report = d_towers.average()
            d_optimizer.step()

            discriminator.requires_grad_(False)
            generator.requires_grad_(True)
            for tower in g_towers(batch):  # uses only the batch's number of rows
                tower.backward(F.softplus(-discriminator(fakes(tower.rows))).mean())
            g_report = g_towers.average()
            g_optimizer.step()
        if job.is_first:
            print(f"epoch {epoch}: discriminator {d_report.loss:.4f}, generator {g_report.loss:.4f}")

    if job.is_first:
        print("weights sha256", samestep.digest(nn.ModuleList([generator, discriminator])))


samestep.launch(main, workers="auto", towers=8)
