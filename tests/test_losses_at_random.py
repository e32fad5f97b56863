"""Losses at random: there is a warning if, and only if, the gradient depends on the number of towers."""

import random
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from samestep import Towers

from .cases import seeds
from .written_code import imported

MEANS = [
    "F.cross_entropy(z, y)",
    "F.cross_entropy(z, y, label_smoothing=0.1)",
    "F.cross_entropy(z, y, reduction='sum') / len(x)",
    "F.cross_entropy(z, y, reduction='none').mean()",
    "(F.cross_entropy(z, y, reduction='none') / n).sum()",
    "(F.cross_entropy(z, y, reduction='none') * scale).sum() / n",
    "sum(F.cross_entropy(z, y, reduction='none')) / n",
    "sum(F.cross_entropy(row[None], label[None]) for row, label in zip(z, y)) / n",
    "-z.log_softmax(1).gather(1, y[:, None]).mean()",
    "-(soft * z.log_softmax(1)).sum(1).mean()",
    "-torch.distributions.Categorical(logits=z).log_prob(y).mean()",
    "F.kl_div(z.log_softmax(1), soft, reduction='batchmean')",
    "F.mse_loss(v, t)",
    "F.mse_loss(v, t, reduction='sum') / v.numel()",
    "F.smooth_l1_loss(v, t)",
    "(v - t).square().sum(1).mean()",
    "(v - t).square().sum() / x.shape[0]",
    "1 / n * (v - t).square().sum()",
    "(v - t).square().sum().div(n)",
    "(v - t).flatten() @ (v - t).flatten() / n",
    "torch.linalg.vector_norm(v - t) ** 2 / n",
    "(v - t).norm(dim=1).mean()",
    "(v - t).norm(1) / v.numel()",
    "torch.stack([(v - t)[:, i].square().mean() for i in range(3)]).mean()",
    "F.triplet_margin_loss(v, t, soft)",
    "(1 - F.cosine_similarity(v, t)).mean()",
    "F.softplus(-v[:, 0]).mean()",
    "-0.5 * torch.sum(1 + v - t.square() - v.exp(), dim=1).mean()",
    "-0.5 * torch.sum(1 + v - t.square() - v.exp()) / n",
    "(v.logsumexp(1) ** 2).mean()",
    "torch.nanmean((v - t).abs())",
]
"""Over rows: their gradients are the same for any number of towers."""

OTHERS = [
    "F.cross_entropy(z, y, reduction='sum')",
    "F.cross_entropy(z, y, reduction='sum') / 3",
    "sum(F.cross_entropy(z, y, reduction='none'))",
    "(v - t).square().sum()",
    "(v - t).flatten() @ (v - t).flatten()",
    "F.mse_loss(v, t) * n",
    "F.kl_div(z.log_softmax(1), soft, reduction='sum')",
    "-0.5 * torch.sum(1 + v - t.square() - v.exp())",
    "F.mse_loss(v, t).sqrt()",
    "(v - t).norm()",
    "torch.exp(F.cross_entropy(z, y))",
    "F.cross_entropy(v @ t.T, torch.arange(n))",
    "torch.cdist(v, t).mean()",
    "(v - t).square().mean(1).max()",
    "(v - t).square().mean(1).topk(2)[0].mean()",
    "1 - 2 * (v.sigmoid() * soft).sum() / (v.sigmoid() + soft).sum()",
]

WEIGHTS = [
    "0.5",
    "2",
    "50",
    "1e-4",
    "c.small",
    "c.part",
    "(1 - c.part)",
    "c.large",
    "c.temperature**2",
    "c.tensor",
]
FORMS = ["{term}", "{weight} * ({term})", "({term}) * {weight}", "({term}) / c.sigma"]
SUMS = [
    "{} + {}",
    "{} + {} + 1e-3 * weights",
    "torch.stack([{}, {}]).mean()",
    "sum([{}, {}])",
    "c.part * ({} + {})",
]
SETTINGS = SimpleNamespace(
    small=1e-3, part=0.3, large=25.0, temperature=4.0, sigma=0.2, tensor=torch.tensor(0.4)
)
NUM_TOWERS = 7
ROWS = 59, 59, 59, 63
"""Of batches; the last one gives towers of equal sizes."""


def written(seed):
    """Return the code of a loss."""
    draw = random.Random(seed)
    others = OTHERS if seed % 3 == 0 else MEANS
    terms = [draw.choice(MEANS), draw.choice(others)][seed % 2 :]
    draw.shuffle(terms)
    lines = ["n = len(x)", "weights = sum(p.square().sum() for p in model.parameters())"]
    for number, term in enumerate(terms):
        form = draw.choice(FORMS).format(term=term, weight=draw.choice(WEIGHTS))
        lines += [f"term_{number} = {form}"]
        lines += [f"term_{number} = term_{number} * {draw.choice(WEIGHTS)}"] if draw.random() < 0.3 else []
    loss = draw.choice(SUMS).format("term_0", "term_1") if len(terms) == 2 else "term_0 + 1e-3 * weights"
    body = "".join(f"    {line}\n" for line in [*lines, f"return {loss}"])
    arguments = "c, model, x, y, z, v, t, soft, scale"
    return f"import torch\nimport torch.nn.functional as F\n\n\ndef loss_of({arguments}):\n{body}"


def gradient_of(loss_of, num_rows, num_towers):
    """Return the gradient of so many rows with so many towers, and what warnings said."""
    draw = torch.Generator().manual_seed(1)
    normal = lambda *shape: torch.randn(*shape, generator=draw, dtype=torch.float64)  # noqa: E731
    labels = torch.randint(3, (num_rows,), generator=draw)
    batch = (
        normal(num_rows, 8),
        labels,
        normal(num_rows, 3),
        normal(num_rows, 3).softmax(1),
        normal(num_rows).abs(),
    )
    torch.manual_seed(0)
    model = nn.Linear(8, 6).double()
    towers = Towers(model, num_towers)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for tower in towers(batch):
            x, y, t, soft, scale = tower.batch
            z, v = model(x).split(3, dim=1)
            tower.backward(loss_of(SETTINGS, model, x, y, z, v, t, soft, scale))
        towers.average()
    return torch.cat([p.grad.flatten() for p in model.parameters()]), [str(each.message) for each in told]


@pytest.mark.parametrize("seed", seeds(400, 1))
def test_a_warning_says_whether_the_gradient_depends_on_the_number_of_towers(seed, tmp_path):
    code = written(seed)
    module = imported(code, tmp_path / f"loss_{seed}.py")
    num_rows = ROWS[seed % len(ROWS)]
    gradient, told = gradient_of(module.loss_of, num_rows, NUM_TOWERS)
    expected, _ = gradient_of(module.loss_of, num_rows, 1)
    depends = not torch.allclose(gradient, expected, rtol=1e-6, atol=1e-9)
    assert bool(told) == depends, f"{code}\n{told}"
