"""With samestep: towers return sums and counts, and only the totals are divided."""

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

job = samestep.init("cpu")
model = LanguageModel()
optimizer = optimizer_of(model)
towers = samestep.Towers(model, BATCH_ROWS // MICRO_ROWS, job=job, seed=0)
for batch in batches():
    for tower in towers(batch):
        total = token_losses(model, tower.batch, reduction="sum")
        tower.backward_sum(total, num_tokens(tower.batch))
    towers.average()
    optimizer.step()
if job.is_first:
    print_distance(model)
    print("weights sha256", samestep.digest(model))
job.close()
