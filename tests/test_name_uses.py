"""What code computes values from and carries on from pass to pass, as its source shows."""

import ast

import pytest

from samestep.watching.name_uses import carried_sources, names_read, plain_name
from samestep.watching.program_line import Expression, ProgramLine
from samestep.watching.source_code import SourceCode


def source_of(path, lines, number=1):
    path.write_text("\n".join(lines))
    return SourceCode([ProgramLine(str(path), number)])


def sources(path, lines, name):
    """Return what a loop over towers that has these lines computes a value from, and carries on."""
    source = source_of(path, ["for tower in towers(batch):", *(f"    {line}" for line in lines)])
    return carried_sources({plain_name(name)}, source.of_passes([]))


@pytest.mark.parametrize(
    ("lines", "name", "expected"),
    [
        (["mean = 0.9 * mean + x.item()"], "mean", {"mean"}),
        (["mean *= 0.9"], "mean", {"mean"}),
        (["mean = mean if mean < 2 else x.item()"], "mean", {"mean"}),
        (["if x.item() < least:", "    least = x.item()"], "least", {"least"}),
        (
            ["if mean is None:", "    mean = x.item()", "else:", "    mean = 0.5 * (mean + x.item())"],
            "mean",
            {"mean"},
        ),
        (["new = 0.9 * mean", "mean = new"], "mean", {"mean"}),
        (["new = 0.9 * mean", "mean = new"], "new", {"mean"}),
        (["total += x.item()", "weight = 1 / total"], "weight", {"total"}),
        (["while x.item() > size:", "    size *= 2"], "size", {"size"}),
        (["state.mean += x.item()"], "mean of state", {"mean of state"}),
        (["state['mean'] = 0.9 * state['mean']"], "mean of state", {"mean of state"}),
        (["means[-1] = 0.9 * means[-1]"], "means[0]", {"means"}),
        (["window.append(x.item())", "mean = sum(window) / 3"], "mean", {"window"}),
        (["memory[key] = 0.9 * memory.get(key, 1) + x.item()"], "memory[5]", {"memory"}),
        (["for key in keys:", "    means[key] += 1"], "means", {"means"}),
        (["meter.update(x.item())", "weight = meter.mean"], "weight", {"meter"}),
        (["mean: float = 0.9 * mean"], "mean", {"mean"}),
        (["weight = (mean := 0.9 * mean) + 1"], "weight", {"mean"}),
        (["first, mean = x.item(), 0.5 * mean"], "mean", {"mean"}),
    ],
)
def test_what_is_carried_on(tmp_path, lines, name, expected):
    assert sources(tmp_path / "program.py", lines, name) == expected


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        (["mean = x.item()"], "mean"),
        (["mean = x.item()", "mean = 0.9 * mean", "mean += 1"], "mean"),
        (["print(mean)", "mean = x.item()"], "mean"),
        (["if x.item() > 2:", "    mean = 1.5", "else:", "    mean = 2.5", "mean += x.item()"], "mean"),
        (["size = 0.1", "while x.item() > size:", "    size *= 2"], "size"),
        (["mean += x.item()", "weight = 1 / x.item()"], "weight"),
        (["other.mean += x.item()"], "mean of state"),
        (["window = []", "window.append(x.item())", "mean = sum(window)"], "mean"),
        (["def later():", "    mean = 0.9 * mean"], "mean"),
        (["tower = f(tower)"], "tower"),
        (["for mean in means:", "    mean = 2 * mean"], "mean"),
        (["for row in rows:", "    last = row", "weight = last"], "weight"),
        (["if key not in cache:", "    cache[key] = x.item()", "weight = cache[key]"], "weight"),
        (["found = {'mean': x.item()}", "found['mean'] *= 2"], "mean of found"),
        (["old = mean", "mean = x.item()", "print(mean - old)"], "mean"),
    ],
)
def test_what_is_computed_anew(tmp_path, lines, name):
    assert sources(tmp_path / "program.py", lines, name) == set()


def test_another_loop_does_not_count(tmp_path):
    lines = ["mean = x.item()", "", "for row in rows:", "    mean += row"]
    assert sources(tmp_path / "program.py", lines, "mean") == set()


@pytest.mark.parametrize("text", ["for x in towers(batch)\n  mean +=", "\0", ""])
def test_what_is_not_python_is_not_known(tmp_path, text):
    source = source_of(tmp_path / "program.py", [text])
    assert carried_sources({"mean"}, source.of_passes([])) == set()


def test_what_has_no_file_is_not_known():
    source = SourceCode([ProgramLine("<stdin>", 1)])
    assert carried_sources({"mean"}, source.of_passes([])) == set()
    code = compile("mean", "<stdin>", "eval")
    assert source.names_in(Expression(code, 1)) == set()


def test_functions_count_for_what_they_share():
    def update(new):
        nonlocal mean
        mean += new

    def reset():
        nonlocal mean, best
        print(mean, best)
        mean = best = 0.0

    def compute(rows):
        for row in rows:
            if row:
                share = row
        return share

    mean = best = 1.0
    functions = [each.__code__ for each in (update, reset, compute)]
    bodies = SourceCode([]).of_passes(functions)
    assert carried_sources({"mean"}, bodies) == {"mean"}
    assert carried_sources({"best", "share"}, bodies) == set()


def test_the_function_with_the_loop_does_not_count():
    def train(program, batch):
        program.mean *= 2
        for _ in batch:
            yield SourceCode(list(ProgramLine.all_running()))

    class Program:
        mean = 1.0

    (source,) = train(Program(), [1])
    assert carried_sources({"mean of program"}, source.of_passes([train.__code__])) == set()
    assert carried_sources({"mean of program"}, SourceCode([]).of_passes([train.__code__])) != set()


def test_the_expression_that_runs_is_found():
    others = [1, 2]
    found = [others, Expression.current()]
    assert found[1] is not None
    assert SourceCode([]).names_in(found[1]) == names_read(ast.parse("Expression.current()"))


def test_a_choice_counts_unless_it_fills_what_it_asks_for(tmp_path):
    path = tmp_path / "program.py"
    path.write_text("if loss > least:\n    loss = f(loss)\nif size < rows:\n    size, table = g(rows), 0\n")
    source, code = SourceCode([]), compile(path.read_text(), str(path), "exec")
    calls = [
        Expression(code, at)
        for at, place in enumerate(code.co_positions())
        if place[2:] in [(11, 18), (18, 25)]
    ]
    assert set().union(*map(source.names_in, calls)) == {"f", "loss", "least", "g", "rows"}
