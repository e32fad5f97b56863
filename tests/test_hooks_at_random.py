"""Programs with hooks and backwards of their own: they take the same steps, or are told."""

import random
from textwrap import indent

import pytest

from .cases import seeds
from .written_code import check_told

BODIES = [
    *("return g * 0.5", "return g.clamp(-0.01, 0.01)", "return g.sign()", "return None", "return g.clone()"),
    *("return g / (g.norm() + 1)", "return g - g.mean(0)", "return g if g.sum() > 0 else -g"),
    *("return g + 0.01 * model[0].weight.detach().mean()", "return g * (1 + step)"),
    *("return g * torch.rand(())", "return g + 0.01 * torch.randn_like(g)", "return g * random.random()"),
    *("return g * torch.rand((), generator=generator)", "g.data.mul_(0.5)", "g.data.clamp_(-0.1, 0.1)"),
    *("held.append(g)", "held.append(g.detach().clone())", "held.append(g.norm().item())"),
    "held.append(g.detach().mean())\nreturn g * (1 + 0.1 * torch.stack(held).mean())",
    "held.append(g.norm().item())\nreturn g / (1 + max(held))",
    "state['norm'] = 0.9 * state.get('norm', 1.0) + 0.1 * g.detach().norm()",
    "state['norm'] = 0.9 * state.get('norm', 1.0) + 0.1 * g.detach().norm()\nreturn g / state['norm']",
    "state['norm'] = g.detach().norm()",
    "return g * state.get('norm', 1.0)",
    "state['count'] = state.get('count', 0) + 1",
    "state['count'] = state.get('count', 0) + 1\nreturn g * 0.99 ** state['count']",
    "state['count'] = state.get('count', 0) + 1\nif state['count'] % 2:\n    return g * 0.5",
    "return g * 0.5 if state.get('count', 0) > 2 else g",
    "if 'first' not in state:\n    state['first'] = g.detach().abs().mean()\nreturn g / state['first']",
    "mask = state.setdefault('mask', torch.rand(g.shape[1:]) < 0.5)\nreturn g * mask",
    "if job.rank == 0:\n    return g * 0.5",
    "if job.rank == 0:\n    held.append(g.norm().item())",
    "with torch.no_grad():\n    center.lerp_(g.detach().mean(), 0.1)\nreturn g - center",
    "return g - center",
]
"""What a hook does with a tensor."""

PLACES = {
    "forward": "model[{at}].register_forward_hook(lambda _, given, outputs: hook(outputs))",
    "before": "model[{at}].register_forward_pre_hook(lambda _, given: hook(given[0]))",
    "backward": "model[{at}].register_full_backward_hook(lambda _, inner, outer: all_of(hook(inner[0])))",
    "before backward": "model[{at}].register_full_backward_pre_hook(lambda _, outer: all_of(hook(outer[0])))",
    "parameter": "model[0].weight.register_hook(hook)",
    "function": "model[{at}].register_forward_hook(lambda _, given, outputs: Own.apply(outputs, hook))",
    "loss": "",  # in the pass
    "outputs": "",
    "accumulated": "model[0].weight.register_post_accumulate_grad_hook(lambda p: hook(p.grad))",
}
"""Where it is registered."""

BETWEEN = [
    *(
        "pass",
        "pass",
        "held.clear()",
        "state.clear()",
        "state['count'] = 0",
        "center.zero_()",
        "center.fill_(step)",
    ),
    *("handle.remove()", "center.fill_(report.loss)", "if job.rank == 0:\n    state['count'] = 1"),
    *("generator.manual_seed(step)", "state['norm'] = report.grad_norm", "held[:] = held[-2:]"),
    *("if held:\n    center.fill_(float(torch.as_tensor(held[-1]).sum()))", "state['norm'] = 1.0"),
]
"""What the program does between two steps."""

IN_PASSES = [
    *("pass", "pass", "pass", "held.clear()", "state.clear()", "generator.manual_seed(0)", "center.zero_()"),
    "loss = loss + 0.01 * center",
]
"""What passes do between loss and backward."""

NO_HOOK = "handle = torch.zeros(1, requires_grad=True).register_hook(print)"

PROGRAM = """import random

import torch
import torch.nn.functional as F
from torch import nn

import samestep


def batch_of(step):
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(24, 6, generator=generator)
    return inputs, torch.randint(3, (24,), generator=generator)


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, hook):
        ctx.hook = hook
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        found = ctx.hook(g)
        return g if found is None else found, None


def all_of(found):
    return None if found is None else (found,)


def program(job):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 3))
    towers = samestep.Towers(model, {num_towers}, job=job)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(0)
    held, state, center, step = [], {{}}, torch.zeros(()), 0

    def hook(g):
{body}

{start}
    for step in range(3):
{at_step}
        for tower in towers(batch_of(step)):
            x, y = tower.batch
{at_pass}
            outputs = model(x)
            loss = F.cross_entropy(outputs, y)
{in_pass}
            tower.backward(loss)
{after}
        report = towers.average()
        optimizer.step()
{between}
    return samestep.digest(model)
"""


def written(seed):
    """Return the code of a program with a hook, or a backward of its own."""
    draw = random.Random(seed)
    kind, where = draw.choice(list(PLACES)), draw.choice(["start", "start", "start", "step", "pass"])
    in_pass = [draw.choice(IN_PASSES)]
    if kind in ("loss", "outputs"):
        in_pass.insert(0, f"{kind}.register_hook(hook)")
    parts = {"start": NO_HOOK, "step": "pass", "pass": "pass"}
    if PLACES[kind]:
        parts[where] = "handle = " + PLACES[kind].format(at=draw.choice([1, 3]))
    return PROGRAM.format(
        num_towers=draw.choice([4, 6]),
        body=indent(draw.choice(BODIES), " " * 8),
        start=indent(parts["start"], " " * 4),
        at_step=indent(parts["step"], " " * 8),
        at_pass=indent(parts["pass"], " " * 12),
        in_pass=indent("\n".join(in_pass), " " * 12),
        after=indent("handle.remove()" if where == "pass" else "pass", " " * 12),
        between=indent(draw.choice(BETWEEN), " " * 8),
    )


@pytest.mark.parametrize("seed", seeds(200, 0))
def test_weights_do_not_depend_on_the_workers_unless_it_is_told(seed, tmp_path):
    check_told(written(seed), tmp_path / f"hooks_{seed}.py", ignored="a hook on 0.weight sees")
