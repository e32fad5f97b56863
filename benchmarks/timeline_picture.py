"""A timeline of several processes as SVG: a lane for each process, and numbered moments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Mark", "Panel", "Span", "draw"]

WIDTH, LEFT, RIGHT = 800, 92, 22
LANE, BAR, HEAD, FOOT, GAP, LEGEND = 30, 18, 58, 30, 14, 62
RADIUS, APART = 8.5, 19
_CHAR = 6.2  # width of a character in a bar
_CSS = """
svg { font-family: system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; font-size: 12px }
.paper { fill: #ffffff; stroke: #dfe3e7 } .ink { fill: #1d232a } .soft { fill: #5d6670 }
.lane { stroke: #c3cad1 } .guide { stroke: #8b949e; stroke-dasharray: 1.5 2.5 } .tick { stroke: #e9ecef }
.end { stroke: #d1293d; stroke-width: 2.5; stroke-linecap: round }
.disc { fill: #1d232a } .number { fill: #ffffff; font-size: 10.5px; font-weight: 600; text-anchor: middle }
.title { font-size: 14px; font-weight: 600 } .on { font-size: 10.5px; fill: #ffffff; text-anchor: middle }
@media (prefers-color-scheme: dark) {
  .paper { fill: #1c2126; stroke: #333a42 } .ink { fill: #dfe4e9 } .soft { fill: #98a2ad }
  .lane { stroke: #49525c } .guide { stroke: #77818c } .tick { stroke: #2b3138 }
  .disc { fill: #dfe4e9 } .number { fill: #14181c }
}
"""


@dataclass(frozen=True)
class Span:
    """Something that a process does for a while; the text is drawn if there is room."""

    lane: str
    kind: str
    begin_ms: float
    end_ms: float
    text: str = ""


@dataclass(frozen=True)
class Mark:
    """A moment, with a number that the text explains."""

    lane: str
    number: int
    at_ms: float


@dataclass(frozen=True)
class Panel:
    """A stretch of time.

    Attributes:
        title: the panel's title.
        begin_ms: the beginning.
        end_ms: the end.
        tick_ms: the distance between ticks.
        lives: the lanes from top to bottom, with the start and end of each process.
        spans: what the processes do.
        marks: the moments.
    """

    title: str
    begin_ms: float
    end_ms: float
    tick_ms: float
    lives: Mapping[str, tuple[float, float]]
    spans: Sequence[Span]
    marks: Sequence[Mark]

    @property
    def height(self) -> int:
        """The height in the picture."""
        return HEAD + LANE * len(self.lives) + FOOT

    def x(self, at_ms: float) -> float:
        """Return the x coordinate of a moment."""
        share = (min(max(at_ms, self.begin_ms), self.end_ms) - self.begin_ms) / (self.end_ms - self.begin_ms)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, lane: str) -> float:
        """Return the y coordinate of the middle of a lane."""
        return HEAD + LANE * (list(self.lives).index(lane) + 0.5)

    def has(self, begin_ms: float, end_ms: float) -> bool:
        """Return whether some of that time is in the panel."""
        return begin_ms < self.end_ms and end_ms > self.begin_ms


def draw(panels: Sequence[Panel], kinds: Mapping[str, str], says: str) -> str:
    """Return the picture.

    Args:
        panels: the panels from top to bottom.
        kinds: the spans' colors, by kind.
        says: the text for screen readers.
    """
    height = sum(panel.height + GAP for panel in panels) + LEGEND
    parts, top = [], 0
    for panel in panels:
        parts += [f'<g transform="translate(0 {top})">', *_panel(panel, kinds), "</g>"]
        top += panel.height + GAP
    parts += [f'<g transform="translate(0 {top})">', *_legend(kinds), "</g>"]
    inside = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" role="img" aria-label="{escape(says)}">\n<style>{_CSS}</style>\n'
        f'<rect class="paper" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>\n'
        f"{inside}\n</svg>\n"
    )


def _panel(panel: Panel, kinds: Mapping[str, str]) -> Iterator[str]:
    yield _text(16, 24, panel.title, "ink title")
    yield from _ticks(panel)
    for lane, (begin_ms, end_ms) in panel.lives.items():
        y = panel.y(lane)
        yield _text(16, y + 4, lane, "ink")
        if panel.has(begin_ms, end_ms):
            yield _line(panel.x(begin_ms), y, panel.x(end_ms), y, "lane")
    yield from _bars(panel, kinds)
    yield from _marks(panel)
    yield from _ends(panel)


def _ends(panel: Panel) -> Iterator[str]:
    """Cross out where a process ends."""
    for lane, (_, end_ms) in panel.lives.items():
        if panel.begin_ms <= end_ms <= panel.end_ms:
            x, y = panel.x(end_ms), panel.y(lane)
            yield f'<path class="end" d="M{x - 6:.1f} {y - 6}l12 12m0 -12l-12 12"/>'


def _bars(panel: Panel, kinds: Mapping[str, str]) -> Iterator[str]:
    for span in panel.spans:
        if panel.has(span.begin_ms, span.end_ms):
            yield from _bar(panel, span, kinds[span.kind])


def _ticks(panel: Panel) -> Iterator[str]:
    bottom = panel.height - FOOT
    at_ms = -(-panel.begin_ms // panel.tick_ms) * panel.tick_ms
    while at_ms <= panel.end_ms:
        x = panel.x(at_ms)
        yield _line(x, HEAD, x, bottom + 4, "tick")
        sign = "\N{MINUS SIGN}" * (at_ms < 0)
        label = f"{sign}{abs(at_ms):,.0f}" + " ms" * (at_ms + panel.tick_ms > panel.end_ms)
        yield _text(x, bottom + 17, label, "soft", "middle" if x < WIDTH - 40 else "end")
        at_ms += panel.tick_ms


def _bar(panel: Panel, span: Span, color: str) -> Iterator[str]:
    left, right, y = panel.x(span.begin_ms), panel.x(span.end_ms), panel.y(span.lane)
    width = max(right - left - 0.8, 1)
    yield (
        f'<rect x="{left:.1f}" y="{y - BAR / 2:.1f}" width="{width:.1f}" height="{BAR}" rx="2" '
        f'fill="{color}"><title>{escape(span.kind)}</title></rect>'
    )
    if span.text and width > _CHAR * len(span.text) + 4:
        yield _text(left + width / 2, y + 4, span.text, "on")


def _marks(panel: Panel) -> Iterator[str]:
    marks = sorted(panel.marks, key=lambda mark: (mark.at_ms, mark.number))
    middle = HEAD - 14
    for mark, x in zip(marks, _spread([panel.x(mark.at_ms) for mark in marks]), strict=True):
        at, y = panel.x(mark.at_ms), panel.y(mark.lane)
        points = f"{x:.1f},{middle} {at:.1f},{HEAD} {at:.1f},{y:.1f}"
        yield f'<polyline class="guide" fill="none" points="{points}"/>'
        yield f'<circle class="disc" cx="{at:.1f}" cy="{y:.1f}" r="2.6"/>'
        yield f'<circle class="disc" cx="{x:.1f}" cy="{middle}" r="{RADIUS}"/>'
        yield _text(x, middle + 3.8, str(mark.number), "number")


def _spread(places: Sequence[float]) -> list[float]:
    """Move places apart so that marks do not overlap, and keep their order."""
    found: list[float] = []
    for place in places:
        found.append(max(place, found[-1] + APART) if found else place)
    limit = float(WIDTH - RIGHT)
    for index in reversed(range(len(found))):
        found[index] = min(found[index], limit)
        limit = found[index] - APART
    return found


def _legend(kinds: Mapping[str, str]) -> Iterator[str]:
    x, y = 16.0, 6.0
    for kind, color in kinds.items():
        width = 20 + 6.4 * len(kind) + 18
        if x + width > WIDTH:
            x, y = 16.0, y + 22
        yield f'<rect x="{x}" y="{y}" width="14" height="14" rx="2" fill="{color}"/>'
        yield _text(x + 20, y + 11.5, kind, "soft")
        x += width


def _text(x: float, y: float, text: str, kind: str, anchor: str = "") -> str:
    place = f' text-anchor="{anchor}"' if anchor else ""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}"{place}>{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'
