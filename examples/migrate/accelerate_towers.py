"""Accelerate for devices, precision and trackers; samestep's towers for the average."""

from accelerate import Accelerator
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

accelerator = Accelerator(cpu=True)  # creates the process group, which samestep uses
job = samestep.init("cpu")
model = LanguageModel()
optimizer = accelerator.prepare(optimizer_of(model))  # leave the model unwrapped: only towers may average
towers = samestep.Towers(model, BATCH_ROWS // MICRO_ROWS, job=job, seed=0)
for batch in batches():
    for tower in towers(batch):
        with accelerator.autocast():
            total = token_losses(model, tower.batch, reduction="sum")
        tower.backward_sum(total, num_tokens(tower.batch))  # not accelerator.backward
    towers.average()
    optimizer.step()
if job.is_first:
    print_distance(model)
    print("weights sha256", samestep.digest(model))
job.close()
