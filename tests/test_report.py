"""`samestep report`: one page of a run, whatever is in its folder."""

import json
import os
import re
import sys
from html.parser import HTMLParser

import pytest

from samestep import cli
from samestep.app.loggers import json_lines
from samestep.app.reporting import report
from samestep.app.reporting.charts import Line, draw_band, draw_curves, draw_timeline, draw_towers
from samestep.app.reporting.history import Curve, History, Mark
from samestep.app.reporting.report import write_report

from .cases import mostly_long
from .test_trainer import run

pytest.importorskip("matplotlib")


TAGS = {
    *(
        "html",
        "head",
        "meta",
        "title",
        "style",
        "body",
        "header",
        "main",
        "footer",
        "section",
        "h1",
        "h2",
        "h3",
    ),
    *(
        "p",
        "dl",
        "div",
        "dt",
        "dd",
        "figure",
        "figcaption",
        "ul",
        "li",
        "span",
        "table",
        "thead",
        "tbody",
        "tr",
    ),
    *("th", "td", "svg", "defs", "g", "path", "use", "text", "clippath", "rect"),
}
ATTRIBUTES = {
    *("lang", "charset", "name", "content", "http-equiv", "class", "style", "scope", "tabindex", "role"),
    *(
        "aria-label",
        "xmlns",
        "xmlns:xlink",
        "width",
        "height",
        "viewbox",
        "version",
        "type",
        "d",
        "id",
        "x",
        "y",
    ),
    *("transform", "xlink:href", "clip-path"),
}


class Page(HTMLParser):
    """The tags, attributes, texts and links of a page."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.attributes, self.links, self.texts, self.open = set(), set(), set(), [], []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attributes}
        self.links |= {value for name, value in attributes if "href" in name or name == "src"}
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if data.strip() and self.open[-1] != "style":
            self.texts.append(data)


def page_of(run_dir):
    html = write_report(run_dir).read_text()
    page = Page(html)
    assert not page.open
    assert page.tags <= TAGS
    assert page.attributes <= ATTRIBUTES
    assert all(link.startswith("#") for link in page.links)
    assert set(re.findall(r"https?://[^\"]*", html)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    return page


def written(run_dir, *lines, settings=None):
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if settings is not None:
        (run_dir / "settings.json").write_text(json.dumps(settings))
    return run_dir


def start(step=0, time=0.0, **values):
    return {"step": step, "time": time, "event": "start", "workers": 2, "towers": [4, 3], **values}


def trained(step, time=0.0, loss=1.0, **values):
    return {"step": step, "time": time, "loss/total": loss, "step/seconds": 1.0, **values}


# ---- what it shows ---------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_run_that_was_stopped_and_went_on_with_others_is_shown_as_it_was(tmp_path):
    run(tmp_path, 3, steps=15, max_seconds=1e-9, log_every=1)
    result = run(tmp_path, 1, steps=15, log_every=1, evaluate_every=5)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    page = page_of(tmp_path)
    texts = " ".join(page.texts)
    assert "3 (3 + 2 + 2 towers)" in texts
    assert "1 (7 towers)" in texts
    assert page.texts.count("--max-seconds") == 1
    assert page.texts.count("done") == 2  # the state, and the last row
    assert result.digest in page.texts
    titles = ("Loss", "Learning rate", "Gradient norm", "Throughput", "accuracy", "Steps over time")
    assert all(title in page.texts for title in (*titles, "Mean loss of each tower, newest quarter"))
    assert f"{result.metrics['accuracy']:.4g}" in page.texts
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert after.keys() - before.keys() == {tmp_path / "report.html"}
    assert all(after[path] == content for path, content in before.items())


@pytest.mark.long
def test_a_start_without_an_end_was_killed_unless_it_is_the_last(tmp_path):
    page = page_of(written(tmp_path, start(), trained(5, 1.0), start(3, 2.0), trained(4, 3.0)))
    assert "killed" in page.texts
    assert page.texts.count("running, or killed") == 2


def moved(step, time, *towers):
    return {"step": step, "time": time, "event": "placement", "towers": towers}


@pytest.mark.long
def test_where_a_run_went_on_with_other_workers_is_marked_and_told(tmp_path):
    lost = {"step": 20, "time": 2.0, "event": "end", "reason": "worker 1 is gone"}
    lines = [start(), trained(10, 1.0), lost, start(20, 2.0, workers=1, towers=[7]), trained(30, 3.0)]
    lines += [start(30, 4.0), trained(40, 5.0), moved(40, 5.0, 5, 2), trained(50, 6.0)]
    marks = [
        "step 20: going on with 1 worker (7 towers)",
        "step 30: going on with 2 workers (4 + 3 towers)",
        "step 40: towers placed 5 + 2",
    ]
    page = page_of(written(tmp_path, *lines))
    assert f"Vertical lines: {'; '.join(marks)}." in page.texts
    assert [text for text in page.texts if text in marks] == marks  # in the one chart over steps
    assert "worker 1 is gone" in page.texts


def test_of_many_marks_the_newest_are_told(tmp_path, undrawn):
    page = page_of(written(tmp_path, *(start(step, float(step)) for step in range(9)), trained(9, 9.0)))
    (told,) = [text for text in page.texts if text.startswith("Vertical lines: ")]
    assert told.startswith("Vertical lines: 2 earlier ones; step 3: going on with 2 workers")
    assert told.endswith("step 8: going on with 2 workers (4 + 3 towers).")


def test_what_is_missing_is_left_out(tmp_path):
    page = page_of(written(tmp_path, settings={"recipe": "mine"}))
    assert "nothing measured yet" in page.texts
    assert "mine" in page.texts
    assert "Training" not in page.texts


# ---- whatever is in the folder ---------------------------------------------------------------------------

HOSTILE = (
    "</script><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "$\\frac{",
    "\ud800",
    "a\nb\x1b[2J",
)
LOSSES = {"towers/0/loss": 1.0, "towers/1/loss": 2.0}
ODD = (None, True, 2**62, -1, 1e308, -1e308, 5e-324, 10**400, [], {"a": []}, "x" * 99_999, *HOSTILE)


@pytest.fixture
def undrawn(monkeypatch):
    """Leave out the drawing, which is most of the time."""
    monkeypatch.setattr("samestep.app.reporting.charts._svg", lambda *_: "<svg></svg>")


@pytest.mark.parametrize("odd", ODD, ids=lambda value: repr(value)[:20])
def test_no_value_of_a_file_breaks_the_page(tmp_path, undrawn, odd):
    lines = [
        start(workers=odd, steps=odd, name=odd, device=odd, memory_bytes=odd, towers=odd),
        start(1, towers=[odd] * 9),
        trained(1, **dict.fromkeys(("loss/total (smoothed)", "towers/0/loss", "step/peak memory, GiB"), odd)),
        trained(2, **LOSSES, **{"step/learning rate": odd}),
        {"step": 2, "time": 1, "event": "checkpoint", "name": odd},
        {"step": 2, "time": 1, "event": odd},
        {"step": 2, "time": 1, "event": "placement", "towers": odd},
        {"step": 2, "time": 1, "event": "placement", "towers": [odd, 10**400]},
        {"step": 2, "time": 1, "event": "end", "reason": odd},
    ]
    page_of(written(tmp_path, *lines, settings={"recipe": odd, "x": odd}))


@pytest.mark.parametrize("name", [*HOSTILE, "towers/²/loss", "towers//loss", "towers/9999999999999/loss", ""])
def test_no_name_of_a_file_breaks_the_page(tmp_path, undrawn, name):
    names = {f"{prefix}{name}": 1.0 for prefix in ("", "loss/", "step/learning rate/", "towers/")}
    settings = {"recipe": name, name: name}
    page_of(
        written(
            tmp_path,
            start(name=name),
            trained(1, **names),
            {**names, "step": 1, "time": 2},
            settings=settings,
        )
    )


@pytest.mark.long
def test_a_page_stays_small_whatever_there_is_of_anything(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "_MAX_CHARTS", 2)
    many = {f"loss/{i} (smoothed)": 1.0 for i in range(3000)}
    lines = [start(i, float(i)) for i in range(3000)]
    lines += [trained(1, **many), {"step": 1, "time": 1, **{f"metric {i}": i for i in range(3000)}}]
    page_of(written(tmp_path, *lines, settings={f"setting {i}": i for i in range(3000)}))
    assert (tmp_path / "report.html").stat().st_size < 2_000_000


MARKS = [Mark(0, "step 0: going on"), Mark(2**53, "step 9: towers placed")]


@pytest.mark.sampled
@pytest.mark.parametrize(
    "values",
    mostly_long(
        [
            [1e99, -1e99],
            [5e-324, 1.0],
            [1.0] * 3,
            [0.0],
            [-1.0, 1e-9],
            [0.0, 1e9],
            [1e-99, 1e99],
            [1.0, -1.0] * 50,
        ],
        3,
    ),
    ids=lambda values: str(values[:3]),
)
def test_any_values_can_be_drawn(values):
    curve = Curve("x", [2**53 - i for i in range(len(values))], values)
    for drawn in (
        draw_curves("x", "y", [Line(curve, "#000000"), Line(curve, "#000000", "faint")], MARKS),
        draw_band("x", "y", [curve, curve]),
        draw_towers("x", "y", values),
    ):
        assert drawn.startswith("<svg ")
        assert not re.search(r"\bnan\b|\binf\b", drawn)


@pytest.mark.sampled(50)
@pytest.mark.parametrize("scale", [1.0, 1e7, 1e-7])
def test_negative_numbers_have_a_minus_sign(scale):
    curve = Curve("x", [0, 1], [-2 * scale, -scale])
    labels = re.findall(r">([^<>]*\d[^<>]*)</text>", draw_curves("x", "y", [Line(curve, "#000000")]))
    assert sum(label.startswith("\N{MINUS SIGN}") for label in labels) > 2
    assert not any("-" in label for label in labels)


@pytest.mark.sampled(50)
@pytest.mark.parametrize("times", [[0, 0], [5, 1], [1e-3, 6e10]])
def test_any_times_can_be_drawn(times):
    lines = [start(0, times[0]), {"step": 2**52, "time": times[1], "event": "end", "reason": "done"}]
    assert draw_timeline("x", History.of(lines).stretches).startswith("<svg ")


def test_a_curve_of_many_points_is_thinned_to_what_can_be_seen():
    curve = Curve("x", list(range(200_000)), [float(i * 7919 % 1000) for i in range(200_000)])
    assert len(draw_curves("x", "y", [Line(curve, "#000000")])) < 400_000


# ---- what is refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.rmdir(), "metrics.jsonl: not found; expected a run folder"),
        (lambda path: None, "metrics.jsonl: not found; expected a run folder"),
        (lambda path: [path.rmdir(), path.touch()], "cannot be read (Not a directory)"),
        (lambda path: os.mkfifo(path / "metrics.jsonl"), "metrics.jsonl: is not a regular file"),
        (lambda path: (path / "metrics.jsonl").mkdir(), "metrics.jsonl: is not a regular file"),
        (lambda path: (path / "settings.json").write_text("["), "settings.json: cannot be read"),
        (lambda path: (path / "metrics.jsonl").write_text("x" * 99), "has 99 bytes, expected at"),
    ],
)
def test_what_is_no_run_is_refused_in_a_line(tmp_path, capsys, monkeypatch, make, message):
    monkeypatch.setattr(json_lines, "_MAX_BYTES", 98)
    (tmp_path / "run").mkdir()
    make(tmp_path / "run")
    before = sorted(tmp_path.rglob("*"))
    assert cli.main(["report", str(tmp_path / "run")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert sorted(tmp_path.rglob("*")) == before


def test_the_page_goes_where_it_is_asked_to(tmp_path, capsys):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    written(run_dir, start(), trained(1))
    assert cli.main(["report", str(run_dir), "--output", str(tmp_path / "new" / "a.html")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'new' / 'a.html'}\n"
    assert (tmp_path / "new" / "a.html").read_text().startswith("<!DOCTYPE html>")
    assert not (run_dir / "report.html").exists()


def test_a_page_that_would_replace_a_folder_is_refused(tmp_path, capsys):
    written(tmp_path, start(), trained(1))
    (tmp_path / "pages").mkdir()
    before = sorted(tmp_path.rglob("*"))
    assert cli.main(["report", str(tmp_path), "--output", str(tmp_path / "pages")]) == 2
    line = f"samestep: error: {tmp_path}/pages: is a folder; expected a file to write, such as "
    assert capsys.readouterr().err == f"{line}{tmp_path}/pages/report.html\n"
    assert sorted(tmp_path.rglob("*")) == before


def test_without_matplotlib_the_extra_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["report", str(tmp_path)]) == 2
    assert "pip install 'samestep[report]'" in capsys.readouterr().err
