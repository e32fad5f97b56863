"""What a program's code computes values from, of what a turn finds and changes."""

import ast
import dataclasses
import functools
import io
import itertools
import re
import sys
import weakref
from collections import Counter, namedtuple
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from samestep.towers.tower import Tower
from samestep.watching.program.code_flow import CodeFlow
from samestep.watching.program.code_values import Scope
from samestep.watching.program.program_line import Expression
from samestep.watching.program.source_code import SourceCode, parse


def carried(lines, expression, **objects):
    """Return the names that an expression after some lines depends on, and that they find and change."""
    loop, *_ = parse("\n    ".join(["for tower in towers:", *lines, expression])).body
    flow = CodeFlow(SourceCode())
    flow.run_loop(loop, Scope(objects={"Namespace": SimpleNamespace, "dict": dict, "cache": {}, **objects}))
    return flow.carried_in([loop.body[-1].value])


@pytest.mark.parametrize(
    ("lines", "expression", "expected"),
    [
        (["mean = 0.9 * mean + x.item()"], "mean", {"mean"}),
        (["mean *= 0.9"], "1 + mean", {"mean"}),
        (["mean = mean if mean < 2 else x.item()"], "mean", {"mean"}),
        (["if x.item() < least:", "    least = x.item()"], "least", {"least"}),
        (
            ["if mean is None:", "    mean = x.item()", "else:", "    mean = 0.5 * (mean + x.item())"],
            "mean",
            {"mean"},
        ),
        (["new = 0.9 * mean", "mean = new"], "new", {"mean"}),
        (["total += x.item()", "weight = 1 / total"], "weight", {"total"}),
        (["while x.item() > size:", "    size *= 2"], "size", {"size"}),
        (["state.mean += x.item()"], "state.mean", {"mean of state"}),
        (["state['mean'] = 0.9 * state['mean']"], "state['mean']", {"mean of state"}),
        (["state['mean'] = 0.9 * state.get('mean', 1)"], "state.get('mean')", {"mean of state"}),
        (["found = {'mean': mean, **more}", "mean += 1"], "found['mean']", {"mean"}),
        (["found = {**more}", "more.append(1)"], "found['mean']", {"more"}),
        (["found = dict(mean=mean)", "mean += 1"], "found['mean']", {"mean"}),
        (["found = Namespace(mean=mean)", "mean += 1"], "found.mean", {"mean"}),
        (["found = Namespace(**more)", "more.append(1)"], "found.mean", {"more"}),
        (["means[-1] = 0.9 * means[-1]"], "means[0]", {"means"}),
        (["old = kept[0]", "kept[0] = x.item()"], "old", {"kept"}),
        (["old = kept[-1]", "kept[-1] = x.item()"], "old", {"kept"}),
        (["old = kept[0]", "kept.append(x.item())"], "old", {"kept"}),
        (["window.append(x.item())", "mean = sum(window) / 3"], "mean", {"window"}),
        (["memory[key] = 0.9 * memory.get(key, 1) + x.item()"], "memory[5]", {"memory"}),
        (["for key in keys:", "    means[key] += 1"], "means", {"means"}),
        (["old = read()", "read = partial(old, x)"], "old", {"read"}),
        (["old = state.mean", "state = replace(state, mean=x)"], "old", {"state"}),
        (["old = state['mean']", "state = {'mean': x}"], "old", {"state"}),
        (["mean: float = 0.9 * mean"], "mean", {"mean"}),
        (["weight = (mean := 0.9 * mean) + 1"], "weight", {"mean"}),
        (["first, mean = x.item(), 0.5 * mean"], "mean", {"mean"}),
        (["first, mean = x.item(), 0.5 * mean"], "first", set()),
        (["old = mean", "mean = x.item()"], "mean - old", {"mean"}),
        (["with state:", "    mean += 1"], "mean", {"mean"}),
        (["if x != old:", "    old, count = x, count + 1"], "count", {"count"}),
        (["try:", "    mean += 1", "except ValueError:", "    mean = 1"], "mean", {"mean"}),
        (["match x:", "    case 1:", "        mean += 1"], "mean", {"mean"}),
        (["del window[:2]", "window.append(1)"], "window", {"window"}),
        (["total += 1"], "[x / total for x in rows]", {"total"}),
        (["total += 1"], "{key: total for key in rows if key}", {"total"}),
        (["count += 1", "w = 0.1 if count > 3 else 1"], "w", {"count"}),
        (["count += 1", "if count > 3:", "    w = 0.1", "else:", "    w = 1"], "w", {"count"}),
        (["def up():", "    global mean", "    mean += 1", "up()"], "mean", {"mean"}),
        (["weigh = lambda x: x * mean", "mean += 1"], "weigh(3)", {"mean"}),
        (["mean += 1", "def weigh(x, by=2):", "    return x * by"], "weigh(1, by=mean)", {"mean"}),
        (["mean += 1"], "max(rows, key=lambda each: each - mean)", {"mean"}),
        (["mean += 1"], "(lambda *x, **y: (x, y))(1, a=mean)", {"mean"}),
        (
            [
                "def smooth(x):",
                "    if state.mean is not None:",
                "        state.mean = 0.9 * state.mean + x",
                "        return state.mean",
                "    state.mean = x",
                "    return x",
            ],
            "smooth(x)",
            {"mean of state"},
        ),
        (
            ["count += 1", "def weigh(x):", "    if count < 5:", "        return 0.1 * x", "    return x"],
            "weigh(x)",
            {"count"},
        ),
    ],
)
def test_what_is_carried_on(lines, expression, expected):
    assert carried(lines, expression) == expected


GET = ["def get(key):"]
FILL = ["    cache[key] = w = f(key)", "    return w"]
FILL_STATE = ["    state.key, state.w = key, f(key)", "    return state.w"]


@pytest.mark.parametrize(
    ("lines", "expression"),
    [
        (["mean = x.item()"], "mean"),
        (["mean = x.item()", "mean = 0.9 * mean", "mean += 1"], "mean"),
        (["print(mean)", "mean = x.item()"], "mean"),
        (["if x.item() > 2:", "    mean = 1.5", "else:", "    mean = 2.5", "mean += x.item()"], "mean"),
        (["size = 0.1", "while x.item() > size:", "    size *= 2"], "size"),
        (["mean += x.item()", "weight = 1 / x.item()"], "weight"),
        (["other.mean += x.item()"], "state.mean"),
        (["window = []", "window.append(x.item())", "mean = sum(window)"], "mean"),
        (["window.clear()", "window.append(x.item())"], "sum(window)"),
        (["del window[:]", "window.append(x.item())"], "sum(window)"),
        (["kept[0] = x.item()"], "kept[0]"),
        (["kept[0] = x.item()", "kept[0] *= 2"], "kept[0]"),
        (["kept[-1] = x.item()"], "kept[-1]"),
        (["kept = [0, 1]", "old = kept[0]", "kept[0] = x.item()"], "old"),
        (["if kept[0] is None:", "    kept[0] = x.item()"], "kept[0]"),
        (["if 0 not in cache:", "    cache[0] = x.item()"], "cache[0]"),
        (["counts[:] = 0", "counts[2] += 1"], "counts"),
        (["counts[...] = 0", "counts[1] += 1"], "counts"),
        (["def later():", "    mean = 0.9 * mean"], "mean"),
        (["tower = f(tower)"], "tower"),
        (["for mean in means:", "    mean = 2 * mean"], "mean"),
        (["for row in rows:", "    last = row", "weight = last"], "weight"),
        (["if key not in cache:", "    cache[key] = x.item()", "weight = cache[key]"], "weight"),
        (["if key not in cache:", "    cache['a'] = x.item()", "weight = cache['a']"], "weight"),
        (["if key != state.key:", "    state.key, state.w = key, f(key)"], "state.w"),
        (["if len(table) != x:", "    table = f(x)"], "table"),
        (["if not table:", "    table = f(x)"], "table"),
        (["if state.w is None and x:", "    state.w = f(x)"], "state.w"),
        (["if key in cache:", "    w = cache[key]", "else:", "    cache[key] = w = f(key)"], "w"),
        ([*GET, "    if key in cache:", "        return cache[key]", *FILL], "get(x)"),
        (
            [*GET, "    if key not in cache:", "        cache[key] = f(key)", "    return cache[key]"],
            "get(x)",
        ),
        ([*GET, "    w = cache.get(key)", "    if w is not None:", "        return w", *FILL], "get(x)"),
        ([*GET, "    w = cache.get(key)", "    if w:", "        return w", *FILL], "get(x)"),
        ([*GET, "    if state.w is not None and x:", "        return state.w", *FILL_STATE], "get(x)"),
        ([*GET, "    if state.key == key:", "        return state.w", *FILL_STATE], "get(x)"),
        ([*GET, "    if hasattr(state, 'w'):", "        return state.w", *FILL_STATE], "get(x)"),
        (["found = {'mean': x.item()}", "found['mean'] *= 2"], "found['mean']"),
        (["found = {'mean': x.item()}", "found.mean = 2", "found.mean += 2"], "found.mean"),
        (["found = {'last': x.item(), 'mean': mean}", "mean += 1"], "found['last']"),
        (["found = {'last': x.item(), 'mean': mean}", "mean += 1"], "found.get('last')"),
        (["found = dict(last=x.item(), mean=mean)", "mean += 1"], "found['last']"),
        (["found = Namespace(last=x.item(), mean=mean)", "mean += 1"], "found.last"),
        (["state['mean'] = x.item()"], "state.get('mean', 0)"),
        (["a, b = rows", "a += 1"], "a"),
        (["total = 0", "while True:", "    total += mean", "mean = total"], "x"),
        (["class Meter:", "    mean = 0.9 * mean"], "mean"),
    ],
)
def test_what_is_computed_anew(lines, expression):
    assert carried(lines, expression) == set()


class Meter:
    by_class = 0

    def __init__(self, start=0.0):
        self.total, self.count = start, 1
        self.seen = []

    def push(self, value):
        self.total += value
        self.count += 1
        self.seen.append(value)

    def reset(self):
        self.total, self.count = 0.0, 0
        self.seen.clear()

    @property
    def mean(self):
        return self.total / self.count

    @mean.setter
    def mean(self, value):
        self.total, self.count = value, 1

    def compute(self):
        return self.mean

    def last(self):
        return self.seen[-1]

    def __call__(self, value):
        self.push(value)
        return self.mean

    def __float__(self):
        return self.mean

    def __iadd__(self, value):
        self.push(value)
        return self

    def __sub__(self, other):
        return self.mean - other

    def __rtruediv__(self, other):
        return other / self.mean

    def __gt__(self, other):
        return self.mean > other

    def __getitem__(self, index):
        return self.mean

    def __setitem__(self, index, value):
        self.push(value)

    def __len__(self):
        return self.count

    def __enter__(self):
        self.reset()
        return self

    def __exit__(self, *_):
        self.total = -1

    @classmethod
    def count_all(cls):
        cls.by_class += 1
        return cls.by_class

    @staticmethod
    def of(meter):
        return meter.mean

    @torch.no_grad()
    def decorated(self):
        return self.mean

    def by_keyword(self, *, scale=1):
        return self.mean * scale


class Taken(Meter):
    def __next__(self):
        self.push(1)
        return self.mean


class Smooth(Meter):
    def push(self, value):
        super().push(0.5 * value)

    def again(self):
        return self.again() + self.total


class Lazy:
    """A stand-in that loads what it stands for."""

    @property
    def __class__(self):
        raise AssertionError

    def __getattribute__(self, name):
        raise AssertionError


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.linear = 1.0, nn.Linear(1, 1)

    def forward(self, x):
        self.scale *= 2
        return x * self.scale


def running():
    mean = 0.0
    while True:
        mean = 0.9 * mean + (yield mean)


def ratio(meter):
    return meter.total / meter.count


def counted(x, state={"calls": 0}):  # noqa: B006
    state["calls"] += 1
    return x / state["calls"]


PUSHED = {"total of meter", "count of meter"}


@pytest.mark.parametrize(
    ("lines", "expression", "expected"),
    [
        (["meter.push(x)"], "meter.total / meter.count", PUSHED),
        (["meter.push(x)"], "1 + meter.mean", PUSHED),
        (["meter.push(x)"], "meter.last()", set()),
        (["meter.push(x)"], "max(meter.seen)", {"seen of meter"}),
        (["meter.push(x)"], "float(meter)", PUSHED),
        (["meter.push(x)"], "len(meter)", {"count of meter"}),
        (["meter.push(x)"], "ratio(meter)", PUSHED),
        (["meter += x"], "meter.mean", PUSHED),
        (["meter['a'] = x"], "meter.mean", PUSHED),
        (["meter.push(x)"], "meter - x", PUSHED),
        (["meter.push(x)"], "x / meter", PUSHED),
        (["meter.push(x)"], "meter > x", PUSHED),
        (["meter.push(x)"], "meter[0]", PUSHED),
        ([], "next(taken)", {"total of taken", "count of taken"}),
        ([], "next(cycle)", {"cycle"}),
        ([], "list(islice(cycle, 2))", {"cycle"}),
        (["for each in cycle:", "    y = each", "    break"], "y", {"cycle"}),
        ([], "next(generated)", {"generated"}),
        ([], "generated.send(x)", {"generated"}),
        ([], "file.readline()", {"file"}),
        ([], "next(iter(window))", set()),
        ([], "window.pop()", {"window"}),
        (["meter.push(x)"], "partial(ratio, meter)()", set()),  # made in the turn
        (["meter.push(x)"], "by_ratio()", PUSHED),
        (["meter.push(x)"], "by_keyword()", PUSHED),
        (["meter.push(x)"], "bound()", PUSHED),
        (["meter.push(x)"], "checkpoint(ratio, meter)", set()),  # unknown arguments
        (["meter.push(x)"], "checkpoint(bound)", PUSHED),
        (["meter.push(x)"], "Meter.of(meter)", PUSHED),
        (["meter.push(x)"], "meter.decorated()", PUSHED),
        (["meter.push(x)"], "meter.by_keyword(scale=2)", PUSHED),
        (["meter.push(x)"], "getattr(meter, 'mean')", PUSHED),
        (["setattr(meter, 'total', meter.total + 1)"], "meter.total", {"total of meter"}),
        (["meter.mean = meter.mean + 1"], "meter.mean", PUSHED),
        (["mine = meter", "mine.push(x)"], "meter.mean", PUSHED),
        (["meters['a'].push(x)"], "meter.mean", PUSHED),
        (["pair[1].push(x)"], "meter.mean", PUSHED),
        (["pair[x].push(x)"], "pair[y].mean", PUSHED),
        (["pair[x].reset()", "pair[x].push(x)"], "pair[x].mean", set()),
        (["meters[x].push(x)"], "meters[x].mean", PUSHED),
        ([], "next(cycles[x])", {"cycles"}),
        (["parts[1].p += 0.1"], "parts[1].p", {"p of parts"}),
        (["heads['a'].p += 0.1"], "heads['a'].p", {"p of a of heads"}),
        (["for each in parts:", "    each.p += 0.1"], "parts[0].p", {"p of parts"}),
        (["for each in pair:", "    each.push(x)"], "meter.mean", PUSHED),
        (["for n, each in enumerate(pair):", "    each.push(x)"], "meter.mean", PUSHED),
        (["for n, each in meters.items():", "    each.push(x)"], "meter.mean", PUSHED),
        (["for each in meters.values():", "    each.push(x)"], "meter.mean", PUSHED),
        (["for n, each in zip(rows, pair):", "    each.push(x)"], "meter.mean", PUSHED),
        (["[each.push(x) for each in pair]"], "meter.mean", PUSHED),
        ([], "meter(x)", PUSHED),
        ([], "smooth(x)", {"total of smooth", "count of smooth"}),
        (["smooth.total += 1"], "smooth.again()", {"total of smooth"}),
        ([], "Meter.count_all()", {"by_class of Meter"}),
        ([], "meter.count_all()", {"by_class of meter"}),
        ([], "layer(x)", {"scale of layer"}),
        ([], "counted(x)", {"calls of state"}),
        (["counts.update(x)"], "1 / counts['a']", {"counts"}),
        (["metric.update(x)"], "1 / metric.mean", {"metric"}),  # of a library
        (["metric.update(x)"], "1 / metric.compute()", {"metric"}),
        (["window.append(x)"], "window[-1]", set()),
        (["window.append(x)"], "window[-2]", {"window"}),
        (["array += 1"], "array / 2", {"array"}),
        (["lazy.mean += 1"], "lazy.mean", {"mean of lazy"}),
        (["meter.weigh = ratio", "meter.push(x)"], "meter.weigh(meter)", PUSHED),
        (["meter.push(x)"], "state.weigh(meter)", PUSHED),
        (["meter.push(x)"], "other.mean", set()),
        (["meter.reset()", "meter.push(x)"], "meter.mean", set()),
        (["point = replace(point, a=x)"], "point.a", set()),
        (["point = replace(point, a=x)"], "point.b", {"point"}),
        (["pair_of = pair_of._replace(a=x)"], "pair_of.a", set()),
        (["total += 1", "pair_of = pair_of._replace(a=total)"], "pair_of.a", {"total"}),
        (["meter.reset()", "meter.push(x)"], "meter.last()", set()),
        (["meter.mean = x", "meter.push(x)"], "meter.mean", set()),
        (["new = Meter()", "new.push(x)"], "new.mean", set()),
        (["new = Meter(meter.total)", "meter.total = x", "new.push(x)"], "new.mean", {"total of meter"}),
        (["with meter as new:", "    new.push(x)", "    y = meter.mean"], "y", set()),
        (["with meter as new:", "    new.push(x)"], "meter.total", set()),
        (["meter.push(meter.absent)"], "meter.absent", set()),
        (["state.mean = x if state.absent else state.absent"], "state.mean", set()),
        (
            ["name = 'mean'", "setattr(state, name, getattr(state, name) + x)"],
            "state.mean",
            {"mean of state"},
        ),
        (["if not hasattr(state, 'size'):", "    state.size = x"], "state.size", set()),
        (["if not hasattr(state, 'size'):", "    setattr(state, 'size', x)"], "state.size", set()),
        (["name = 'mean'", "sums[name] = sums[name] + x"], "sums[name] + sums['count']", {"mean of sums"}),
        (["sums.update(mean=sums['mean'] + x, count=x)"], "sums['count']", set()),
        (["sums.update({'mean': sums['mean'] + x})"], "sums['mean']", {"mean of sums"}),
        (["made = [meter, other]", "made[0].push(x)"], "meter.mean", PUSHED),
        (["made = [meter, other]", "made[1].push(x)"], "meter.mean", set()),
        (["for each in (meter, other):", "    each.push(x)"], "meter.mean", PUSHED),
        (
            ["new = Meter(x)", "new.function = abs", "meter.push(x)", "new.of = meter.total"],
            "new.function(y)",
            set(),
        ),
    ],
)
def test_objects_and_functions_of_the_program(lines, expression, expected):
    meter, other = Meter(), Meter()
    objects = {
        **globals(),
        "meter": meter,
        "other": other,
        "smooth": Smooth(),
        "taken": Taken(),
        "layer": Layer(),
        "pair": [other, meter],
        "parts": nn.Sequential(nn.Dropout(), nn.Dropout()),
        "heads": nn.ModuleDict({"a": nn.Dropout()}),
        "meters": {"a": meter},
        "by_ratio": functools.partial(ratio, meter),
        "by_keyword": functools.partial(ratio, meter=meter),
        "bound": meter.compute,
        "state": SimpleNamespace(mean=1.0, weigh=ratio),
        "lazy": Lazy(),
        "counts": Counter(),
        "sums": {"mean": 1.0, "count": 0},
        "array": np.zeros(3),
        "metric": functools.partialmethod(print),
        "window": [1.0, 2.0],
        "cycle": itertools.cycle([1.0, 2.0]),
        "islice": itertools.islice,
        "cycles": [itertools.cycle([each]) for each in range(3)],
        "generated": running(),
        "file": io.StringIO("1\n2\n"),
        "partial": functools.partial,
        "replace": dataclasses.replace,
        "point": dataclasses.make_dataclass("Point", ["a", "b"])(1.0, 2.0),
        "pair_of": namedtuple("Pair", "a b")(1.0, 2.0),
    }
    found = {
        re.sub("of (pair|a of meters|meters|bound)$", "of meter", name)
        for name in carried(lines, expression, **objects)
    }
    assert found == expected


def test_a_long_chain_is_visited_once():
    assert carried(["mean += 1"], "x" + ".f(mean)" * 60) == {"mean"}


def test_a_long_program_is_given_up():
    lines = [f"a{n} = mean" for n in range(10_000)]
    assert carried(["mean += 1"], "mean") == {"mean"}
    loop = ast.parse("\n".join(["for tower in towers:", *(f"    {line}" for line in lines)])).body[0]
    flow = CodeFlow(SourceCode())
    flow.run_loop(loop, Scope())
    assert flow.carried_in([loop.body[-1].value]) is None


def test_code_that_is_nested_too_deeply_is_given_up():
    lines = ["y = mean", "y = " + " + ".join(["x"] * 600), "mean += y"]
    loop = ast.parse("\n".join(["for tower in towers:", *(f"    {line}" for line in lines)])).body[0]
    flow = CodeFlow(SourceCode())
    flow.run_loop(loop, Scope())
    assert flow.carried_in([loop.body[0].value]) == set()
    assert flow.carried_in([loop.body[2].value]) is None


def test_hundreds_of_early_returns_are_visited_of_which_the_last_ones_decide():
    returns = (f"    if x == {n} or first > {n}: return {n}" for n in range(300))
    lines = [
        "first += 1",
        "last += 1",
        "def weigh(x):",
        *returns,
        "    if last > 5: return 1",
        "    return x",
    ]
    assert carried(lines, "weigh(x)") == {"first", "last"}
    lines = ["mean += 1", *(line.replace("first", "mean") for line in lines[2:]), "if mean > 3: mean = 1"]
    assert carried(lines, "mean") == {"mean"}


@pytest.mark.parametrize("text", ["for x in towers(batch)\n  mean +=", "\0", ""])
def test_what_is_not_python_is_not_known(tmp_path, text):
    path = tmp_path / "program.py"
    path.write_text(text)
    code = compile("lambda: 1", str(path), "eval")
    assert SourceCode().function(code.co_consts[0]) is None
    assert SourceCode().all_at(Expression(code, 1)) == []


def test_what_has_no_file_is_not_known():
    code = compile("mean", "<stdin>", "eval")
    assert SourceCode().all_at(Expression(code, 1)) == []


def test_libraries_are_not_visited():
    source = SourceCode()
    assert source.function(functools.wraps.__code__) is None
    assert source.function(nn.Linear.forward.__code__) is None
    assert source.function(SourceCode.function.__code__) is None
    assert source.function(ratio.__code__).name == "ratio"


def test_several_lambdas_in_a_line_are_not_told_apart():
    source, both = SourceCode(), (lambda x: x, lambda x: 2 * x)
    assert [source.function(each.__code__) for each in both] == [None, None]
    assert source.function((lambda x: x).__code__) is not None


def test_a_generator_that_was_visited_lets_go_of_its_values():
    def generated():
        held = Meter()
        yield weakref.ref(held)
        held = None
        yield held

    generator = generated()
    kept = next(generator)
    assert carried([], "next(generator)", generator=generator) == {"generator"}
    assert next(generator) is kept() is None


@pytest.mark.parametrize(
    ("taken", "expected"),
    [
        ("enumerate(towers)", {"number"}),
        ("zip(others, towers)", {"number"}),
        ("pairs(towers)", set()),  # a generator of the program
    ],
)
def test_what_a_loop_takes_beside_towers(taken, expected):
    loop = ast.parse(f"for number, tower in {taken}:\n    2 * number\n    tower").body[0]
    tower = Tower(0, None, 1, None)
    flow = CodeFlow(SourceCode())
    flow.run_loop(loop, Scope(objects={"number": 0, "tower": tower}))
    assert [flow.carried_in([each.value]) for each in loop.body] == [expected, set()]
    assert flow.carried_in([loop]) == (expected or None)


def test_the_running_loop_is_found():
    def rows():
        yield SourceCode().loop_in(sys._getframe(1))
        yield SourceCode().loop_in(sys._getframe(1))

    found = []
    for each in rows():
        found.append(each)
    assert [ast.unparse(each.target) for each in found] == ["each", "each"]
    assert SourceCode().loop_in(sys._getframe()) is None


def test_the_expression_that_runs_is_found():
    others = [1, 2]
    found = [others, Expression.current()]
    assert [ast.unparse(each) for each in SourceCode().all_at(found[1])] == ["Expression.current()"]
