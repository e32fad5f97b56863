"""A small GPT: n-gram embeddings, rotary positions, RMS norm, and no attention across documents."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["GPT", "Attention", "NgramEmbedding", "Sizes", "rotate"]

_ROTARY_BASE = 10_000.0
_EMBEDDING_STD = 0.02
_HASH_FACTOR, _HASH_MODULUS = 1_000_003, 2**31 - 1


@dataclass(frozen=True)
class Sizes:
    """The sizes of a `GPT`.

    Attributes:
        vocabulary: the number of tokens.
        width: features of a token; a multiple of twice `heads`.
        depth: the number of blocks, each of attention and a perceptron.
        heads: the number of attention heads.
        context: the longest row, in tokens.
        ngrams: the length of the longest n-gram with an embedding, in tokens; 1 for tokens alone.
        ngram_slots: the number of embeddings for the n-grams of each length.
        tied_head: whether the head shares the weight of the tokens' embedding.
    """

    vocabulary: int = 256
    width: int = 128
    depth: int = 4
    heads: int = 4
    context: int = 256
    ngrams: int = 4
    ngram_slots: int = 8192
    tied_head: bool = False


class GPT(nn.Module):
    """A decoder: tokens [rows, length] -> logits of the next tokens [rows, length, vocabulary].

    A row may hold several documents, one after the other. A token attends only to itself and earlier tokens
    of its own document, and positions count from the document's start: a document has the same logits as in
    a row of its own.

    References:
        Radford et al., "Language models are unsupervised multitask learners", 2019, for the pre-norm blocks;
        Su et al., "RoFormer", 2021, https://arxiv.org/abs/2104.09864, for the positions;
        Zhang & Sennrich, "Root mean square layer normalization", 2019, https://arxiv.org/abs/1910.07467;
        So et al., "Primer", 2021, https://arxiv.org/abs/2109.08668, for the squared ReLU.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width, heads = sizes.width, sizes.heads
        self.context = sizes.context
        self.embedding = NgramEmbedding(sizes.vocabulary, width, sizes.ngrams, sizes.ngram_slots)
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(sizes.depth))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, sizes.vocabulary, bias=False)
        self._initialize()
        if sizes.tied_head:
            self.head.weight = self.embedding.tokens.weight
        angles = _angles(sizes.context, width // heads)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.head.weight.device

    def forward(self, tokens: Tensor, starts: Tensor) -> Tensor:
        """Return logits of the next tokens.

        Args:
            tokens: int64 [rows, length].
            starts: int64 [rows, length], the index in its row where each token's document starts.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device) - starts
        turns = self.cos[positions][:, None], self.sin[positions][:, None]  # [rows, 1, length, features / 2]
        is_seen = (starts[:, None, :, None] == starts[:, None, None, :]).tril()  # [rows, 1, length, length]
        features = self.embedding(tokens, positions)
        for block in self.blocks:
            features = block(features, turns, is_seen)
        logits: Tensor = self.head(self.norm(features))
        return logits

    def _initialize(self) -> None:
        """Draw the weights; at first, blocks add zero and the head gives all tokens the same logit."""
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
            elif isinstance(layer, nn.Embedding):
                nn.init.normal_(layer.weight, std=_EMBEDDING_STD)
        for block in self.blocks:
            assert isinstance(block, _Block)
            nn.init.zeros_(block.attention.out.weight)
            nn.init.zeros_(block.down.weight)
        nn.init.zeros_(self.head.weight)


class NgramEmbedding(nn.Module):
    """The sum of the embeddings of a token and of the n-grams that end with it.

    A hash selects an n-gram's embedding, so some n-grams share one. No n-gram spans two documents.

    Args:
        vocabulary: the number of tokens.
        width: features of an embedding.
        ngrams: the length of the longest n-gram, in tokens.
        slots: the number of embeddings for the n-grams of each length.

    References:
        Pagnoni et al., "Byte latent transformer", 2024, https://arxiv.org/abs/2412.09871, section 3.2.1.
    """

    def __init__(self, vocabulary: int, width: int, ngrams: int, slots: int) -> None:
        super().__init__()
        self.slots = slots
        self.tokens = nn.Embedding(vocabulary, width)
        self.ngrams = nn.ModuleList(nn.Embedding(slots, width) for _ in range(ngrams - 1))

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return features [rows, length, width].

        Args:
            tokens: int64 [rows, length].
            positions: each token's position in its document, int64 [rows, length].
        """
        features: Tensor = self.tokens(tokens)
        ids = tokens
        for before, embedding in enumerate(self.ngrams, 1):
            earlier = F.pad(tokens, (before, 0))[:, : tokens.shape[1]] + 1
            earlier = earlier.masked_fill(positions < before, 0)  # before the document
            ids = (ids * _HASH_FACTOR + earlier) % _HASH_MODULUS
            features = features + embedding(ids % self.slots)
        return features


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, heads)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, features: Tensor, turns: tuple[Tensor, Tensor], is_seen: Tensor) -> Tensor:
        features = features + self.attention(self.attention_norm(features), turns, is_seen)
        added: Tensor = self.down(F.relu(self.up(self.norm(features))).square())
        return features + added


class Attention(nn.Module):
    """Multi-head attention with rotary positions: [rows, length, width] -> [rows, length, width].

    Args:
        width: features of a token; a multiple of twice `heads`.
        heads: the number of heads.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, features: Tensor, turns: tuple[Tensor, Tensor], is_seen: Tensor) -> Tensor:
        """Return the attention's output for each token.

        Args:
            features: [rows, length, width].
            turns: cosines and sines of the positions' angles, [rows, 1, length, features of a head / 2].
            is_seen: the attention mask, bool [rows, 1, length, length].
        """
        heads = self.query_key_value(features).unflatten(-1, (3, self.heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)  # [rows, heads, length, -1]
        query, key = rotate(query, *turns), rotate(key, *turns)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=is_seen)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


def rotate(features: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Multiply features, with the first half as real and the second as imaginary parts, by e^(i angle).

    Example:
        >>> rotate(torch.tensor([1.0, 0.0]), torch.tensor([0.0]), torch.tensor([1.0]))
        tensor([0., 1.])
    """
    real, imaginary = features.chunk(2, dim=-1)
    return torch.cat([real * cos - imaginary * sin, real * sin + imaginary * cos], dim=-1)


def _angles(length: int, features: int) -> Tensor:
    """Return float32 [length, features / 2]: position × base^(-2i / features)."""
    rates = _ROTARY_BASE ** (-torch.arange(0, features, 2, dtype=torch.float64) / features)
    return torch.outer(torch.arange(length, dtype=torch.float64), rates).float()
