"""Models with convolutions, norms, dropout, buffers of their own, tied, unused and sparse parameters."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def convnet() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 6, 3, stride=2),
        nn.BatchNorm2d(6, momentum=None),
        nn.Dropout(0.3),
        nn.Flatten(),
        nn.Linear(6 * 9, 5),
    ).to(memory_format=torch.channels_last)


def perceptron(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(6)
    return nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Dropout(0.1), nn.Linear(33, 5)).to(dtype)


class Memories(nn.Module):
    """Buffers that a forward changes: a codebook, a queue, flags, a moving average, a counter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.linear = nn.Linear(21, 5)
        self.register_buffer("codes", torch.randn(5, 7))
        self.register_buffer("queue", torch.zeros(12, 7))
        self.register_buffer("place", torch.zeros(1, dtype=torch.int16))
        self.register_buffer("seen", torch.zeros(5, dtype=torch.bool))
        self.register_buffer("scale", torch.ones(()), persistent=False)
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            nearest = torch.cdist(x, self.codes).argmin(1)
            members = F.one_hot(nearest, 5).to(x.dtype)
            self.codes += 0.1 * (members.t() @ x)
            self.seen |= members.any(0)
            for row in x:
                self.queue[int(self.place)] = row
                self.place[0] = (self.place[0] + 1) % len(self.queue)
            self.scale = 0.9 * self.scale + 0.1 * x.abs().mean()
            self.passes = self.passes + 1
        hidden = [x / self.scale, self.codes[nearest] * self.seen.sum(), self.queue.mean(0).expand_as(x)]
        return self.linear(torch.cat(hidden, 1) + self.passes)


MEMORIES = {"codes": "mean", "scale": "mean", "queue": "first", "place": "first", "seen": "first"}


class Branches(nn.Module):
    """Uses `rare` where a row says so and `never` never; has tied weights, two dtypes, a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Linear(7, 7)
        self.tied = nn.Linear(7, 7)
        self.tied.weight = self.first.weight
        self.rare = nn.Linear(7, 7)
        self.never = nn.Linear(7, 7)
        self.wide = nn.Parameter(torch.ones(7, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.ones(7), requires_grad=False)
        self.last = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.tied(torch.tanh(self.first(x))) * self.frozen
        hidden = (hidden * self.wide).float()
        if x[0, 0] > 0.8:
            hidden = hidden + self.rare(x)
        return self.last(hidden)


class Words(nn.Module):
    """Sparse embeddings: `words` for all, `bag`, `rare` where a row says so, `never`; and dense layers."""

    def __init__(self, num_words: int = 40) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.words = nn.Embedding(num_words, 6, sparse=True, padding_idx=0)
        self.bag = nn.EmbeddingBag(num_words, 6, sparse=True, mode="mean")
        self.rare = nn.Embedding(num_words, 6, sparse=True)
        self.never = nn.Embedding(num_words, 6, sparse=True)
        self.last = nn.Sequential(nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 5))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.words(x[:, :4]).sum(1) + self.bag(x[:, 2:])
        if x[0, 0] > 30:
            hidden = hidden + self.rare(x[:, 1])
        return self.last(hidden)
