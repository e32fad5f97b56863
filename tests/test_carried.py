"""What code computes a number from and carries on from pass to pass, as its source shows."""

import pytest

from samestep.watching.carried import carried_sources, plain_name
from samestep.watching.program_line import ProgramLine


def sources(path, lines, name, number=1):
    """Return what a loop over towers that has these lines computes a number from, and carries on."""
    path.write_text("\n".join(["for tower in towers(batch):", *(f"    {line}" for line in lines)]))
    return carried_sources(plain_name(name), [ProgramLine(str(path), number)], [])


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
    ],
)
def test_what_is_computed_anew(tmp_path, lines, name):
    assert sources(tmp_path / "program.py", lines, name) == set()


def test_another_loop_does_not_count(tmp_path):
    lines = ["mean = x.item()", "", "for row in rows:", "    mean += row"]
    assert sources(tmp_path / "program.py", lines, "mean") == set()


@pytest.mark.parametrize("text", ["for x in towers(batch)\n  mean +=", "\0", ""])
def test_what_is_not_python_is_not_known(tmp_path, text):
    path = tmp_path / "program.py"
    path.write_text(text)
    assert carried_sources("mean", [ProgramLine(str(path), 1)], []) == set()


def test_no_file_is_not_known():
    assert carried_sources("mean", [ProgramLine("<stdin>", 1)], []) == set()


def test_functions_count():
    def update(new):
        nonlocal mean
        mean += new

    def reset():
        nonlocal mean, best
        print(mean, best)
        mean = best = 0.0

    mean = best = 1.0
    functions = [update.__code__, reset.__code__]
    assert carried_sources("mean", [], functions) == {"mean"}
    assert carried_sources("best", [], functions) == set()
