"""Charts as inline SVG: they use the page's text colour, and contain no text from a run's files."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from samestep.app.reporting.history import Curve, Mark, Stretch

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["COLORS", "FAINT", "MARKS", "Line", "draw_band", "draw_curves", "draw_timeline", "draw_towers"]

COLORS = ("#3b82c4", "#d9730d", "#2a9d5c", "#8f6bd1", "#1797a6", "#a0723d", "#c2569b", "#7f8790")
"""Colours of curves, in order: each has a contrast of at least 3 to white and to black."""

FAINT = "66"
"""Alpha value to append to a colour, for a transparent curve."""
MARKS = {
    "start": ("●", COLORS[0]),
    "checkpoint": ("▲", COLORS[2]),
    "interrupted": ("×", "#d1495b"),
    "done": ("■", COLORS[0]),
}
"""Marks and colours of `draw_timeline`."""

_INK, _GRID = "#010203", "#020304"  # placeholders that `_svg` replaces by the page's own colours
_STYLE: Mapping[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "samestep",  # deterministic ids: the same run gives the same page
    "text.parse_math": False,
    "font.size": 8.5,
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor"), _INK),
    "axes.grid": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
    "lines.linewidth": 1.4,
    "lines.markersize": 3.5,
    "path.simplify_threshold": 0.5,
}
_SIZE_INCHES = 4.1, 2.3
_HUGE = 50.0
"""The axis is logarithmic if the ratio of the largest value to the smallest is above this."""


@dataclass(frozen=True)
class Line:
    """A curve and its appearance."""

    curve: Curve
    color: str
    style: Literal["plain", "faint"] = "plain"
    may_be_log: bool = True


def draw_curves(title: str, unit: str, lines: Sequence[Line], marks: Sequence[Mark] = ()) -> str:
    """Draw scalars over steps.

    Args:
        title: the label for screen readers.
        unit: the label of the vertical axis.
        lines: the curves, later ones drawn above earlier ones.
        marks: steps to mark by a vertical line, with a text that appears under the mouse.
    """

    def draw(axes: Axes) -> None:
        for line in lines:
            few = len(line.curve.steps) <= 40
            look = "o-" if few and line.style == "plain" else "-"
            color = line.color + FAINT * (line.style == "faint")
            axes.plot(line.curve.steps, line.curve.values, look, color=color)
        _over_steps(axes, unit, marks)
        _scale(axes, [value for line in lines if line.may_be_log for value in line.curve.values])

    return _svg(title, draw)


def draw_band(title: str, unit: str, curves: Sequence[Curve], marks: Sequence[Mark] = ()) -> str:
    """Draw the spread of curves: their median, the middle half, and the range, over steps."""
    by_step: dict[int, list[float]] = {}
    for curve in curves:
        for step, value in zip(curve.steps, curve.values, strict=True):
            by_step.setdefault(step, []).append(value)
    steps = sorted(by_step)
    bounds = np.array([np.quantile(by_step[step], (0, 0.25, 0.5, 0.75, 1)) for step in steps]).T

    def draw(axes: Axes) -> None:
        for low, high, alpha in ((0, 4, 0.18), (1, 3, 0.35)):
            axes.fill_between(steps, bounds[low], bounds[high], color=COLORS[0], alpha=alpha, linewidth=0)
        axes.plot(steps, bounds[2], "o-" if len(steps) <= 40 else "-", color=COLORS[0])
        _over_steps(axes, unit, marks)
        _scale(axes, bounds.ravel().tolist())

    return _svg(title, draw)


def draw_towers(title: str, unit: str, means: Sequence[float]) -> str:
    """Draw one value per tower."""

    def draw(axes: Axes) -> None:
        axes.plot(range(len(means)), means, "o", color=COLORS[0])
        axes.set_xlabel("tower")
        axes.set_ylabel(unit)
        axes.locator_params(axis="x", integer=True)
        axes.margins(y=0.25)

    return _svg(title, draw)


def draw_timeline(title: str, stretches: Sequence[Stretch]) -> str:
    """Draw steps over time, with each start, checkpoint and end."""
    start_s = min(min(stretch.times_s) for stretch in stretches)
    end_s = max(max(stretch.times_s) for stretch in stretches)
    unit, unit_s = next(
        ((name, size) for name, size in _TIMES if end_s - start_s >= 2 * size), ("seconds", 1.0)
    )

    places: dict[str, list[tuple[float, float]]] = {name: [] for name in ("way", *MARKS)}
    for stretch in stretches:
        way = [
            ((time_s - start_s) / unit_s, float(step))
            for time_s, step in zip(stretch.times_s, stretch.steps, strict=True)
        ]
        is_over = stretch.ending is not None or stretch is not stretches[-1]
        places["way"] += [*way, (math.nan, math.nan)]
        places["start"].append(way[0])
        places["checkpoint"] += [way[index] for index in stretch.checkpoints]
        places["done" if stretch.ending == "done" else "interrupted"] += way[-1:] * is_over

    def draw(axes: Axes) -> None:
        for name, found in places.items():
            mark, color = MARKS.get(name, ("", COLORS[0]))
            times, steps = [time for time, _ in found], [step for _, step in found]
            axes.plot(times, steps, _SHAPES.get(mark, "-"), color=color)
        axes.set_xlabel(f"{unit} since the first start")
        axes.set_ylabel("step")
        axes.yaxis.set_major_formatter(_plain)

    return _svg(title, draw)


_SHAPES = {"●": "o", "▲": "^", "×": "X", "■": "s"}
_TIMES = (("days", 86_400.0), ("hours", 3600.0), ("minutes", 60.0))


def _over_steps(axes: Axes, unit: str, marks: Sequence[Mark]) -> None:
    for mark in marks[-50:]:
        axes.axvline(mark.step, color=_INK, alpha=0.5, linewidth=0.8, linestyle=(0, (2, 2)))
        # An invisible, wider line, which is easier to hit with a mouse.
        axes.axvline(mark.step, color=_INK, alpha=0, linewidth=7, zorder=9).set_gid(mark.text)
    axes.set_xlabel("step")
    axes.set_ylabel(unit)
    axes.xaxis.set_major_formatter(_plain)
    axes.locator_params(axis="x", nbins=5, integer=True)


def _scale(axes: Axes, values: Sequence[float]) -> None:
    """Choose a logarithmic axis if all values are positive and their ratio is above `_HUGE`."""
    from matplotlib.ticker import LogLocator, NullFormatter

    if values and min(values) > 0 and max(values) / min(values) > _HUGE:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(numticks=6))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(_plain)


def _plain(value: float, position: float | None = None) -> str:
    """Format a number beside an axis, without mathematical typesetting."""
    is_long = value and not 1e-3 <= abs(value) < 1e6
    return (f"{value:.3g}" if is_long else f"{value:,.6g}").replace("-", "\N{MINUS SIGN}")


def _svg(title: str, draw: Callable[[Axes], None]) -> str:
    import matplotlib.style
    from matplotlib.figure import Figure

    with matplotlib.style.context(["default", dict(_STYLE)]):
        figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
        draw(figure.subplots())
        file = StringIO()
        names = ("Creator", "Date", "Format", "Type")
        figure.savefig(file, format="svg", transparent=True, metadata=dict.fromkeys(names))
    text = file.getvalue()
    text = text[text.index("<svg") :].replace(_INK, "currentColor").replace(_GRID, "var(--grid)")
    text = re.sub(r'<g id="(step [^"]*)">', r"<g><title>\1</title>", text)  # the texts of marks
    text = re.sub(r'<g id="[^"]*">', "<g>", text)  # ids would be repeated in each chart of the page
    return text.replace("<svg ", f'<svg role="img" aria-label="{title}" ', 1)
