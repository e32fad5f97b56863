"""The problem that all programs of this folder solve: a small language model on sentences of uneven length.

The loss is the mean over all tokens of a batch of 16 sentences; padding does not count. A process may hold
4 sentences at a time. `truth` is the reference: the same training on whole batches in float64.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed.nn  # import before init: it keeps the current process group alive
import torch.nn.functional as F
from torch import Tensor, nn

WORDS, PADDING = 24, -100
BATCH_ROWS, MICRO_ROWS, EPOCHS, LEARNING_RATE = 16, 4, 3, 1.0


class LanguageModel(nn.Module):
    """Tokens int64 [rows, length] -> logits [rows, length - 1, words] for each next token."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, 32)
        self.hidden = nn.Linear(64, 64)
        self.output = nn.Linear(64, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        """Predict each token from the two before it."""
        words = self.embedding(tokens.clamp(min=0))
        before = F.pad(words, (0, 0, 1, 0))[:, :-1]
        pairs = torch.cat([before, words], dim=2)[:, :-1]
        return self.output(torch.tanh(self.hidden(pairs)))


def sentences() -> Tensor:
    """Return walks of 2 to 20 tokens around a circle, padded, int64 [100, 20]. The last batch has 4."""
    generator = torch.Generator().manual_seed(0)
    strides = torch.randint(1, 4, (100, 1), generator=generator)
    starts = torch.randint(0, WORDS, (100, 1), generator=generator)
    lengths = torch.randint(2, 21, (100, 1), generator=generator)
    places = torch.arange(20)
    return torch.where(places < lengths, (starts + strides * places) % WORDS, PADDING)


def batches() -> Iterator[Tensor]:
    """Yield the batches of all epochs."""
    for _ in range(EPOCHS):
        yield from sentences().split(BATCH_ROWS)


def num_tokens(tokens: Tensor) -> Tensor:
    """Count the tokens to predict, as a 0-dim int64 tensor."""
    return (tokens[:, 1:] != PADDING).sum()


def token_losses(model: nn.Module, tokens: Tensor, reduction: str = "mean") -> Tensor:
    """Return the cross-entropy of the next tokens; padding does not count."""
    logits = model(tokens)
    return F.cross_entropy(
        logits.flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=PADDING, reduction=reduction
    )


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of all programs."""
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)


def truth() -> nn.Module:
    """Return the model after training on whole batches in float64."""
    model = LanguageModel().double()
    optimizer = optimizer_of(model)
    for batch in batches():
        optimizer.zero_grad()
        token_losses(model, batch).backward()
        optimizer.step()
    return model


def print_distance(model: nn.Module) -> None:
    """Print how far the weights are from the truth, relative to how far training moved them."""
    start, end = _weights(LanguageModel()), _weights(truth())
    error = (_weights(model) - end).norm() / (end - start).norm()
    print(f"distance from the truth {error:.1e}")


def _weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().double().flatten() for parameter in model.parameters()])
