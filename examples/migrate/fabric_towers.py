"""Fabric for devices, precision and logging; samestep's towers for the average."""

from lightning_fabric import Fabric
from problem import (
    BATCH_ROWS,
    MICRO_ROWS,
    LanguageModel,
    batches,
    num_tokens,
    optimizer_of,
    print_distance,
    token_losses,
)

import samestep

fabric = Fabric(accelerator="cpu", devices=1)  # this process's device; samestep connects the processes
job = samestep.init("cpu")
module = LanguageModel()
model, optimizer = fabric.setup(module, optimizer_of(module))
towers = samestep.Towers(module, BATCH_ROWS // MICRO_ROWS, job=job, seed=0)
for batch in batches():
    for tower in towers(batch):
        total = token_losses(model, tower.batch, reduction="sum")
        tower.backward_sum(total, num_tokens(tower.batch))  # not fabric.backward
    towers.average()
    optimizer.step()
if job.is_first:
    print_distance(module)
    print("weights sha256", samestep.digest(module))
job.close()
