"""`samestep report`: a run folder as one HTML page. Nothing else in the folder is changed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from statistics import fmean
from typing import Any

from samestep.app.extras import extra
from samestep.app.loggers.json_lines import FILE, read_lines
from samestep.app.reporting.charts import (
    COLORS,
    FAINT,
    MARKS,
    Line,
    draw_band,
    draw_curves,
    draw_timeline,
    draw_towers,
)
from samestep.app.reporting.history import Curve, History, Mark, Stretch
from samestep.app.reporting.page import Html, figure, page, section, table, tiles
from samestep.app.run_folder import search
from samestep.app.settings import read_values
from samestep.checkpoint.durable import storage, write_whole
from samestep.checkpoint.manifest import Manifest
from samestep.errors import ConfigError, MissingFileError, shown

__all__ = ["write_report"]

_MAX_CHARTS = 24  # of metrics
_MAX_STRETCHES = 100
_MAX_MARKS_NAMED = 6
_MAX_ROWS = 200


def write_report(run_dir: Path, output: Path | None = None) -> Path:
    """Write the page of a run, and return its path.

    Args:
        run_dir: the run folder; the run may still be training.
        output: the path of the page; by default report.html in the run folder.

    Raises:
        ConfigError: matplotlib is not installed, or `output` is a folder.
        DataError: the settings cannot be read, or the newest checkpoint has a newer format.
        MissingFileError: there is no run in the folder.
        StorageError: a file cannot be read, or the page cannot be written.
    """
    with extra("report"):
        import matplotlib  # noqa: F401
    file = run_dir / "report.html" if output is None else output
    if os.path.isdir(file):
        raise ConfigError(f"{file}: is a folder; expected a file to write, such as {file / 'report.html'}")
    run = _Run.read(run_dir)
    write_whole(file, _page(run))
    return file


@dataclass(frozen=True)
class _Run:
    """The contents of a run folder."""

    run_dir: Path
    settings: Mapping[str, Any]
    history: History
    manifest: Manifest | None
    damaged: Sequence[str]

    @classmethod
    def read(cls, run_dir: Path) -> _Run:
        settings: Mapping[str, Any] = {}
        history = History()
        with suppress(MissingFileError):  # a script's `Trainer` writes no settings
            settings = read_values(run_dir)
        with storage(run_dir, "read"), suppress(FileNotFoundError):
            history = History.of(read_lines(run_dir))
        found = search(run_dir)
        if not settings and not history.stretches and found.found is None:
            raise MissingFileError(
                f"{run_dir / FILE}: not found; expected a run folder, as training writes it"
            )
        manifest = None if found.found is None else found.found.manifest
        return cls(run_dir, settings, history, manifest, [reason for _, reason in found.damaged])

    @property
    def name(self) -> str:
        last = self.history.stretches[-1].text("name") if self.history.stretches else ""
        return last or str(self.settings.get("recipe", "training"))


def _page(run: _Run) -> str:
    history = run.history
    parts = [
        tiles(_summary(run)),
        section("Training", _training(run), of="charts", note=_explained(history.marks)),
        section("Towers", _towers(run), of="charts", note=_TOWERS),
        section("Evaluation", _evaluations(run), of="charts"),
        section("Starts, checkpoints and ends", _timeline(history.stretches)),
        section("Last values", _last_values(history)),
        section("Newest whole checkpoint", _checkpoint(run)),
        section("Settings", _settings(run.settings)),
    ]
    now = datetime.now().astimezone()
    return page(
        run.name, str(run.run_dir.absolute()), parts, f"Written by samestep report, {now:%Y-%m-%d %H:%M %Z}"
    )


_TOWERS = "Each tower is a slice of the global batch; over many steps their losses should be similar."


def _summary(run: _Run) -> dict[str, object]:
    history = run.history
    if not history.stretches:
        return {"state": "nothing measured yet"}
    last = history.stretches[-1]
    values: dict[str, object] = {"state": _state(last, is_last=True), "step": _steps(history, last)}
    for curve in history.named("loss/total (smoothed)"):
        values["loss (smoothed)"] = _number(curve.values[-1])
    for curve in list(history.metrics.values())[:4]:
        values[curve.name] = _number(curve.values[-1])
    values["time"] = _duration(sum(stretch.times_s[-1] - stretch.times_s[0] for stretch in history.stretches))
    values["workers"] = last.workers
    for curve in history.named("step/rows per second"):
        values["rows per second"] = f"{fmean(curve.values[-10:]):,.0f}"
    for curve in history.named("step/peak memory, GiB"):
        total = last.start.get("memory_bytes")
        of = f" of {total / 2**30:.1f}" if isinstance(total, int) and 0 < total < 2**60 else ""
        values["peak memory"] = f"{max(curve.values):.2f}{of} GiB"
    return values


def _steps(history: History, last: Stretch) -> str:
    total = last.start.get("steps")
    of = f" of {total:,}" if isinstance(total, int) and 0 < total < 2**53 else ""
    return f"{history.last_step:,}{of}"


# ---- charts ----------------------------------------------------------------------------------------------


def _training(run: _Run) -> list[Html]:
    named = run.history.named
    terms = [
        curve
        for name, curve in run.history.training.items()
        if name.startswith("loss/") and name.endswith(" (smoothed)") and name != "loss/total (smoothed)"
    ]
    rates = [c for name, c in run.history.training.items() if name.startswith("step/learning rate")]
    tested = [c for c in run.history.metrics.values() if c.name == "loss" or c.name.endswith(" loss")]
    loss = [
        *(Line(curve, COLORS[0], "faint") for curve in named("loss/total")),
        *(Line(curve, COLORS[0]) for curve in named("loss/total (smoothed)")),
        *(Line(curve, COLORS[1]) for curve in tested[:1]),
    ]
    charts = [
        ("Loss", "loss", loss),
        ("Terms of the loss (smoothed)", "loss", _lines(terms)),
        ("Learning rate", "learning rate", _lines(rates, may_be_log=False)),
        ("Gradient norm", "2-norm", _lines(named("step/gradient norm"))),
        ("Gradient noise scale", "rows", _lines(named("step/gradient noise scale"))),
        ("Throughput", "rows per second", _lines(named("step/rows per second"))),
    ]
    return [
        figure(title, draw_curves(title, unit, lines, run.history.marks), _legend(lines))
        for title, unit, lines in charts
        if lines
    ]


def _explained(marks: Sequence[Mark]) -> str:
    """Return a sentence that explains the vertical lines."""
    newest = "; ".join(mark.text for mark in marks[-_MAX_MARKS_NAMED:])
    before = f"{len(marks) - _MAX_MARKS_NAMED:,} earlier ones; " if len(marks) > _MAX_MARKS_NAMED else ""
    return f"Vertical lines: {before}{newest}." if marks else ""


def _lines(curves: Sequence[Curve], *, may_be_log: bool = True) -> list[Line]:
    pairs = zip(curves, COLORS, strict=False)
    return [Line(curve, color, may_be_log=may_be_log) for curve, color in pairs]


def _legend(lines: Sequence[Line]) -> dict[str, tuple[str, str]]:
    keys = {
        line.curve.name.removeprefix("loss/").removeprefix("step/"): (
            "\N{BOX DRAWINGS HEAVY HORIZONTAL}",
            line.color + FAINT * (line.style == "faint"),
        )
        for line in lines
    }
    return keys if len(keys) > 1 else {}


def _towers(run: _Run) -> list[Html]:
    curves = run.history.towers()
    if len(curves) < 2:
        return []
    title, newest = "Towers' losses: median, middle half, all", "Mean loss of each tower, newest quarter"
    means = [fmean(curve.values[-max(1, len(curve.values) // 4) :]) for curve in curves]
    return [
        figure(title, draw_band(title, "loss", curves, run.history.marks)),
        figure(newest, draw_towers(newest, "loss", means)),
    ]


def _evaluations(run: _Run) -> list[Html]:
    charts = []
    for curve in list(run.history.metrics.values())[:_MAX_CHARTS]:
        lines = [Line(curve, COLORS[2])]
        svg = draw_curves("a metric of the evaluations", "value", lines, run.history.marks)
        charts.append(figure(curve.name, svg))
    return charts


# ---- tables ----------------------------------------------------------------------------------------------


def _timeline(stretches: Sequence[Stretch]) -> list[Html]:
    if not stretches:
        return []
    title = "Steps over time"
    chart = figure(title, draw_timeline(title, stretches[-_MAX_STRETCHES:]), MARKS)
    head = ("started", "steps", "lasted", "workers", "device", "checkpoints", "ended")
    rows = [
        (
            f"{datetime.fromtimestamp(stretch.times_s[0]).astimezone():%Y-%m-%d %H:%M:%S}",
            f"{stretch.steps[0]:,} to {max(stretch.steps):,}",
            _duration(stretch.times_s[-1] - stretch.times_s[0]),
            stretch.workers,
            stretch.text("device"),
            len(stretch.checkpoints),
            _state(stretch, is_last=stretch is stretches[-1]),
        )
        for stretch in stretches[-_MAX_STRETCHES:]
    ]
    return [Html(f'<div class="charts">\n{chart}</div>\n'), table(head, rows, numbers=("checkpoints",))]


def _state(stretch: Stretch, *, is_last: bool) -> str:
    if stretch.ending is None:
        return "running, or killed" if is_last else "killed"
    return stretch.ending


def _last_values(history: History) -> list[Html]:
    curves = [*history.metrics.values(), *history.training.values()][:_MAX_ROWS]
    rows = [
        (c.name, _number(c.values[-1]), _number(min(c.values)), _number(max(c.values)), f"{c.steps[-1]:,}")
        for c in curves
    ]
    head = ("scalar", "last", "lowest", "highest", "at step")
    return [table(head, rows, numbers=head[1:])] if rows else []


def _checkpoint(run: _Run) -> list[Html]:
    rows: list[tuple[str, object]] = []
    if run.manifest is not None:
        rows = [("step", f"{run.manifest.step:,}"), ("weights, sha256", run.manifest.digest)]
        rows += _plain(run.manifest.fingerprint)
    rows += [("not whole", reason) for reason in run.damaged]
    return [table(("", ""), rows[:_MAX_ROWS])] if rows else []


def _settings(settings: Mapping[str, Any]) -> list[Html]:
    return [table(("setting", "value"), _plain(settings)[:_MAX_ROWS])] if settings else []


def _plain(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(name, v if isinstance(v, str) else shown(v)) for name, v in values.items()]


def _number(value: float) -> str:
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}" if abs(value) < 1e15 else f"{value:.3e}"


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(max(0.0, seconds))))
