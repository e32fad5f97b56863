"""Lightning Fabric's `no_backward_sync`: a custom loop and divisor; devices and wrapping by Fabric."""

import os

import torch.distributed as dist
from lightning_fabric import Fabric
from problem import MICRO_ROWS, LanguageModel, batches, optimizer_of, print_distance, token_losses

fabric = Fabric(accelerator="cpu", devices=int(os.environ.get("WORLD_SIZE", "1")))
fabric.launch()
model, optimizer = fabric.setup(module := LanguageModel(), optimizer_of(module))
for batch in batches():
    optimizer.zero_grad()
    slices = batch.tensor_split(fabric.world_size)[fabric.global_rank].split(MICRO_ROWS)
    for tokens in slices:
        with fabric.no_backward_sync(model, enabled=tokens is not slices[-1]):
            fabric.backward(token_losses(model, tokens) / len(slices))
    optimizer.step()
if fabric.is_global_zero:
    print_distance(module)
del model  # a group that outlives the interpreter may abort the process: pytorch#190489
if dist.is_initialized():
    dist.destroy_process_group()
