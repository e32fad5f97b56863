"""Programs whose passes keep something, at random: they are told of it unless each pass sets it anew."""

import random
import re
from textwrap import indent

import pytest

from .cases import seeds
from .written_code import imported, ran

OBJECT = """class Box:
    def __init__(self, value):
        self.value = value

    def read(self):
        return self.value

    def write(self, value):
        self.value = value
"""
HISTORY = """class Box:
    def __init__(self, value):
        self.history = [value]

    def __call__(self):
        return self.history[-1]

    def update(self, value):
        self.history.append(value)
"""
PROPERTY = """class Box:
    def __init__(self, value):
        self._value = value

    @property
    def value(self):
        return self._value

    @value.setter
    def value(self, value):
        self._value = value
"""
FROZEN = """@dataclasses.dataclass(frozen=True)
class Box:
    value: object
"""
CELL = """def cell(value):
    def read():
        return value

    def write(new):
        nonlocal value
        value = new

    return read, write
"""
DEFAULT = """def memory(new=None, kept={}):
    if new is not None:
        kept["value"] = new
    return kept["value"]
"""
CLASS = "class Kept:\n    value = 1.0\n"

HOLDERS = [
    ("", "kept = {}", "kept", "kept = {}"),
    ("", "model.kept = {}", "model.kept", "model.kept = {}"),
    ("", "model[1].kept = {}", "model[1].kept", "model[1].kept = {}"),
    ("", "kept = types.SimpleNamespace(value={})", "kept.value", "kept.value = {}"),
    ("", "kept = dict(value={})", "kept['value']", "kept['value'] = {}"),
    ("", "kept = dict(value={})", "kept.get('value')", "kept.update(value={})"),
    ("", "kept = dict(a=dict(b={}))", "kept['a']['b']", "kept['a']['b'] = {}"),
    ("", "kept = [{}]", "kept[0]", "kept[0] = {}"),
    ("", "kept = [{}]", "kept[-1]", "kept.append({})"),
    ("", "kept = collections.deque([{}], maxlen=3)", "kept[-1]", "kept.append({})"),
    ("", "kept = np.array([float({})])", "float(kept[0])", "kept[0] = {}"),
    ("", "kept = torch.tensor(float({}))", "kept", "kept = torch.as_tensor({}).float()"),
    ("", "kept = torch.tensor(float({}))", "kept", "kept.copy_(torch.as_tensor({}))"),
    ("", "kept = torch.tensor(float({}))", "kept.item()", "kept.fill_(float({}))"),
    ("", "read = functools.partial(float, {})", "read()", "read = functools.partial(float, {})"),
    ("Box = collections.namedtuple('Box', 'value')", "kept = Box({})", "kept.value", "kept = Box({})"),
    (CLASS, "Kept.value = {}", "Kept.value", "Kept.value = {}"),
    (OBJECT, "kept = Box({})", "kept.value", "kept.value = {}"),
    (OBJECT, "kept = Box({})", "kept.read()", "kept.write({})"),
    (HISTORY, "kept = Box({})", "kept()", "kept.update({})"),
    (PROPERTY, "kept = Box({})", "kept.value", "kept.value = {}"),
    (FROZEN, "kept = Box({})", "kept.value", "kept = dataclasses.replace(kept, value={})"),
    (CELL, "read, write = cell({})", "read()", "write({})"),
    (DEFAULT, "memory({})", "memory()", "memory({})"),
]
"""Code of the module, of its preparation, to read it, and to set it."""

VALUES = [
    *("loss.detach()", "loss.item()", "x.mean()", "x.mean().item()", "outputs.detach().mean()"),
    *("0.9 * {} + 0.1 * loss.item()", "0.9 * {} + 0.1 * loss.detach()", "{} + loss.item()", "{} + x.sum()"),
    *(
        "max(0.5 * float({}), loss.item())",
        "random.random()",
        "torch.rand(()).item()",
        "float(x.numpy().mean())",
    ),
]
"""What passes keep, perhaps computed from what they have kept."""

USES = [
    "x = x + 0.05 * {}",
    "x = F.dropout(x, p=min(0.5, abs(float({})) / 10))",
    "loss = loss * (1 + 0.1 * {})",
    "loss = loss / (1 + abs({}))",
    "loss = loss * torch.tensor([1.0, 0.1 * float({})]).sum()",
    "loss = loss * float(np.exp(-0.1 * float({})))",
    "weight = math.tanh(float({}))\nloss = loss * (1 + 0.1 * weight)",
    "weight = min(1.0, float({}) / 5)\nloss = loss * (1 + weight)",
    "loss = loss + 0.01 * (outputs - {}).square().mean()",
    "loss = F.cross_entropy(outputs / (1 + 0.1 * abs({})), y)",
    "loss = F.cross_entropy(outputs, y, label_smoothing=min(0.5, abs(float({})) / 20))",
    "if float({}) > 1000:\n    loss = loss * 2",
    "loss = loss * (2 if float({}) > 1000 else 1)",
    "loss = loss * (1 + max(0.0, float({}) - 1000))",
]

PASS = """{before_pass}
{use_before}
outputs = net(x)
loss = F.cross_entropy(outputs, y)
{use_after}
{keep}
"""

LOOP = """for step in range(2):
    batch = batch_of(step)
    {before_step}
    for tower in towers(batch):
        x, y = tower.batch
{pass_}
        tower.backward(loss)
    report = towers.average()
    {after_step}
    optimizer.step()
"""
FUNCTION = """def run(tower):
    {shared}
    x, y = tower.batch
{pass_}
    tower.backward(loss)

for step in range(2):
    batch = batch_of(step)
    {before_step}
    for tower in towers(batch):
        run(tower)
    report = towers.average()
    {after_step}
    optimizer.step()
"""
STEP = """def loss_of(model, batch):
    {shared}
    x, y = batch
{pass_}
    return loss

take_step = samestep.Step(towers, loss_of, optimizer)
for step in range(2):
    batch = batch_of(step)
    {before_step}
    report = take_step(batch)
    {after_step}
"""
WHOLE = """def forward(batch):
    {shared}
    x, y = batch
{pass_}
    return torch.cat([outputs, loss.expand(len(x), 1)], 1)

for step in range(2):
    batch = batch_of(step)
    {before_step}
    towers.whole_batch(batch, forward, lambda found, _: found[:, :3].square().mean() + found[:, 3].mean())
    report = towers.average()
    {after_step}
    optimizer.step()
"""

INSIDE = """for step in range(2):
    {before_step}
    for tower in towers(batch_of(step)):
        x, y = tower.batch
        tower.backward({call})
    report = towers.average()
    {after_step}
    optimizer.step()
"""
CALLS = ["model(x, y)", "torch.func.functional_call(model, dict(model.named_parameters()), (x, y))"]
"""Of a model that computes its own loss: the second one is a library's."""

MODEL = """model = net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
{prepare}
"""
MODEL_INSIDE = """class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        {prepare}

    def forward(self, x, y):
        net = self.net
{pass_}
        return loss

model = Model()
"""

PROGRAM = """import collections
import dataclasses
import functools
import math
import random
import types

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import samestep

{module}

def batch_of(step):
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn({num_rows}, 6, generator=generator)
    return inputs, torch.randint(3, ({num_rows},), generator=generator)


def program(job):
    random.seed(0)
    torch.manual_seed(0)
{model}
    towers = samestep.Towers(model, {num_towers}, job=job)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
{steps}
    return samestep.digest(model)
"""


STEPS = LOOP, FUNCTION, STEP, WHOLE, INSIDE


def inside(code):
    """Return code that keeps in the model what other code keeps in a variable."""
    code = code.replace("model.", "self.").replace("model[", "self.net[")
    return re.sub(r"(?<!\.)\bkept\b(?!=)", "self.kept", code)


def written(seed):
    """Return the code of a program, and whether each of its passes sets anew what it keeps."""
    draw = random.Random(seed)
    steps, is_set_in = draw.choice(STEPS), draw.choice(["", "before_pass", "before_step", "after_step"])
    is_inside = steps is INSIDE
    # Of a function that sets what its argument is, if it has one, no code shows that a call does.
    left_out = (*["read()"] * is_inside, *["memory()"] * (is_set_in == "before_pass"))
    module, *codes = draw.choice([each for each in HOLDERS if each[2] not in left_out])
    prepare, read, write = map(inside, codes) if is_inside else codes
    value, use, start = draw.choice(VALUES), draw.choice(USES), draw.choice(["0.5", "1.0", "0.0"])
    is_used_before = use.startswith("x")
    places = dict.fromkeys(["before_pass", "before_step", "after_step"], "pass")
    if is_set_in:
        places[is_set_in] = write.format("report.loss" if is_set_in == "after_step" else start)
    if is_inside:
        places |= {each: code.replace("self.", "model.") for each, code in places.items() if "step" in each}
    pass_ = PASS.format(
        use_before=use.format(read) if is_used_before else "",
        use_after="" if is_used_before else use.format(read),
        keep=write.format(value.format(read)),
        **places,
    )
    pass_ = indent(pass_, " " * (8 if steps in (LOOP, INSIDE) else 4))
    name = write.partition(" = ")[0]  # a variable of the program, or something else
    shared = f"nonlocal {name}" if name in ("kept", "read") else "pass"
    model = (MODEL_INSIDE if is_inside else MODEL).format(prepare=prepare.format(start), pass_=pass_)
    steps = steps.format(pass_=pass_, shared=shared, call=draw.choice(CALLS), **places)
    code = PROGRAM.format(
        module=module,
        model=indent(model, "    "),
        num_towers=draw.choice([4, 6]),
        num_rows=draw.choice([13, 18, 24]),
        steps=indent(steps, "    "),
    )
    return code, is_set_in == "before_pass"


@pytest.mark.parametrize("seed", seeds(400, 0))
def test_what_passes_carry_on_is_told_of_on_any_number_of_workers(seed, tmp_path):
    code, is_set_anew = written(seed)
    module = imported(code, tmp_path / f"state_{seed}.py")
    digests = set()
    for num_workers in (1, 2, 3):
        found = ran(module.program, num_workers)
        digests |= found.values
        assert bool(found.told) != is_set_anew, f"{num_workers} workers\n{code}\n{found.told}"
    assert len(digests) == 1 or not is_set_anew
