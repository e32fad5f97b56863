"""Gradient accumulation by hand: the mean of the slices' means."""

from problem import MICRO_ROWS, LanguageModel, batches, optimizer_of, print_distance, token_losses

model = LanguageModel()
optimizer = optimizer_of(model)
for batch in batches():
    optimizer.zero_grad()
    slices = batch.split(MICRO_ROWS)
    for tokens in slices:
        loss = token_losses(model, tokens) / len(slices)  # as if each slice had as many tokens
        loss.backward()
    optimizer.step()
print_distance(model)
