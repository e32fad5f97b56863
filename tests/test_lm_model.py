"""The language model's net, beside a plain one: loops, complex numbers, and one document at a time."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from samestep.recipes.lm.model import GPT, Attention, NgramEmbedding, Sizes, rotate

SIZES = Sizes(11, width=16, depth=2, heads=2, context=24, ngrams=3, ngram_slots=50)


def net(**options):
    """Return a net in float64 of which no part is zero, as some are at the start."""
    torch.manual_seed(0)
    model = GPT(replace(SIZES, **options)).double()
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.5)
    return model


def documents(*lengths):
    """Return random documents, int64 [length] each, and the row that they are packed into."""
    generator = torch.Generator().manual_seed(3)
    parts = [torch.randint(0, 11, (length,), generator=generator) for length in lengths]
    starts = [torch.full((length,), sum(lengths[:n])) for n, length in enumerate(lengths)]
    return parts, torch.cat(parts)[None], torch.cat(starts)[None]


def test_a_packed_document_has_the_logits_that_it_has_alone():
    model = net()
    parts, tokens, starts = documents(5, 1, 9, 7)
    together = model(tokens, starts)[0].split([len(part) for part in parts])
    for part, packed in zip(parts, together, strict=True):
        alone = model(part[None], torch.zeros_like(part)[None])[0]
        torch.testing.assert_close(packed, alone, rtol=1e-10, atol=1e-10)


def test_no_gradient_flows_from_one_document_to_another():
    model = net()
    _, tokens, starts = documents(6, 4)
    seen = []
    model.embedding.register_forward_hook(lambda *call: (call[-1].retain_grad(), seen.append(call[-1]))[1])
    model(tokens, starts)[0, 6:].sum().backward()
    reached = seen[0].grad[0].abs().sum(-1) > 0
    assert reached.tolist() == [False] * 6 + [True] * 4


def test_no_token_sees_a_later_one():
    model = net()
    _, tokens, starts = documents(10)
    changed = tokens.clone()
    changed[0, 6] = (changed[0, 6] + 1) % 11
    before, after = model(tokens, starts)[0], model(changed, starts)[0]
    torch.testing.assert_close(before[:6], after[:6], rtol=0, atol=0)
    assert (before[6:] != after[6:]).any(dim=1).all()


def plain_attention(layer, features):
    """Attend in loops over heads and tokens; positions turn complex numbers."""
    length, width = features.shape
    size = width // layer.heads
    rates = 10_000.0 ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    turns = torch.exp(1j * torch.arange(length)[:, None] * rates)
    mixed = torch.zeros_like(features)
    for head in range(layer.heads):
        query, key, value = (
            features @ layer.query_key_value.weight[start + head * size : start + (head + 1) * size].T
            for start in (0, width, 2 * width)
        )
        query, key = (torch.complex(*half.split(size // 2, dim=1)) * turns for half in (query, key))
        for token in range(length):
            scores = (query[token] * key[: token + 1].conj()).real.sum(1) / math.sqrt(size)
            mixed[token, head * size : (head + 1) * size] = scores.softmax(0) @ value[: token + 1]
    return mixed @ layer.out.weight.T


def plain_logits(model, tokens):
    """Return logits of one document, int64 [length], with nothing but sums and products."""

    def norm(features, weight):
        return (
            features
            / (features.square().mean(-1, keepdim=True) + torch.finfo(features.dtype).eps).sqrt()
            * weight
        )

    features = model.embedding(tokens[None], torch.arange(len(tokens))[None])[0]
    for block in model.blocks:
        features = features + plain_attention(block.attention, norm(features, block.attention_norm.weight))
        inner = norm(features, block.norm.weight) @ block.up.weight.T
        features = features + inner.clamp(min=0).square() @ block.down.weight.T
    return norm(features, model.norm.weight) @ model.head.weight.T


def test_the_net_is_what_a_plain_one_computes():
    model = net()
    (part,), tokens, starts = documents(9)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens, starts)[0], plain_logits(model, part), rtol=1e-6, atol=1e-6)


def test_to_rotate_is_to_multiply_complex_numbers():
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(3, 7, 8, generator=generator, dtype=torch.float64)
    angles = torch.randn(7, 4, generator=generator, dtype=torch.float64)
    found = rotate(features, angles.cos(), angles.sin())
    expected = torch.complex(features[..., :4], features[..., 4:]) * torch.exp(1j * angles)
    torch.testing.assert_close(torch.complex(found[..., :4], found[..., 4:]), expected)


def test_scores_depend_on_distances_alone():
    layer = Attention(8, 1).double()
    features = torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    is_seen = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()

    def attended(first):
        angles = (first + torch.arange(5))[None, None, :, None] * torch.tensor(
            [1.0, 0.1, 0.01, 0.001]
        ).double()
        return layer(features, (angles.cos(), angles.sin()), is_seen)

    torch.testing.assert_close(attended(0), attended(17))


def test_ngrams_have_embeddings_that_depend_on_their_tokens_alone():
    embedding = NgramEmbedding(11, 4, 3, 1000)
    tokens = torch.tensor([[1, 2, 3, 0, 1, 2, 3, 1, 2, 3]])
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5, 6]])
    found = embedding(tokens, positions)[0]
    same = [[n for n in range(10) if torch.equal(found[n], found[m])] for m in range(10)]
    # The second 3 is the end of "1 2 3" as the first and third are; "1" after "0" is not as "1" at the start.
    assert same[2] == same[6] == same[9] == [2, 6, 9]
    assert same[0] == [0]
    assert same[4] == [4]
    assert same[5] == [5]  # "0 1 2"
    # No n-gram of the second document holds a token of the first.
    assert torch.equal(found[3:], embedding(tokens[:, 3:], positions[:, 3:])[0])


def test_only_tokens_have_embeddings_where_ngrams_are_one_long():
    model = net(ngrams=1)
    assert len(model.embedding.ngrams) == 0
    _, tokens, starts = documents(8)
    assert torch.equal(model.embedding(tokens, starts), F.embedding(tokens, model.embedding.tokens.weight))


@pytest.mark.parametrize("tied", [True, False])
def test_a_net_starts_with_a_fair_loss(tied):
    torch.manual_seed(0)
    model = GPT(replace(SIZES, vocabulary=256, width=64, tied_head=tied))
    tokens = torch.randint(0, 256, (4, 24), generator=torch.Generator().manual_seed(5))
    logits = model(tokens, torch.zeros_like(tokens))
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    assert float(loss.detach()) == pytest.approx(math.log(256), rel=0.01)
    assert (model.head.weight is model.embedding.tokens.weight) == tied
    assert len(list(model.parameters())) == 1 + 2 + 2 * 6 + 1 + (not tied)
