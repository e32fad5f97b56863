"""Accelerate's `accumulate`: one loop for any setup, with the division inside."""

from accelerate import Accelerator
from problem import (
    BATCH_ROWS,
    EPOCHS,
    MICRO_ROWS,
    LanguageModel,
    optimizer_of,
    print_distance,
    sentences,
    token_losses,
)
from torch.utils.data import DataLoader

accelerator = Accelerator(cpu=True)
accelerator.gradient_accumulation_steps = BATCH_ROWS // MICRO_ROWS // accelerator.num_processes
model = LanguageModel()
model, optimizer, loader = accelerator.prepare(
    model, optimizer_of(model), DataLoader(sentences(), batch_size=MICRO_ROWS)
)
for _ in range(EPOCHS):
    for tokens in loader:
        with accelerator.accumulate(model):
            accelerator.backward(token_losses(model, tokens))  # divides by the accumulation steps
            optimizer.step()
            optimizer.zero_grad()
if accelerator.is_main_process:
    print_distance(accelerator.unwrap_model(model))
model, optimizer, loader = accelerator.free_memory(model, optimizer, loader)  # they hold the process group
accelerator.end_training()
