"""HTML without scripts or external resources, with all text escaped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from samestep.errors import one_line

__all__ = ["Html", "figure", "page", "section", "table", "tiles"]


class Html(str):
    """Text that is already HTML, and so is not escaped."""


def text(value: object, max_chars: int = 200) -> Html:
    """Return any value as HTML: one short, escaped line."""
    return value if isinstance(value, Html) else Html(escape(one_line(str(value), max_chars)))


def page(title: str, note: str, parts: Iterable[Html], end: str) -> str:
    """Return a whole page.

    Args:
        title: the title and heading.
        note: a line below the heading.
        parts: the sections of the page.
        end: the last line.
    """
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'\">\n"
        f"<title>{text(title)}</title>\n<style>{_CSS}</style>\n</head>\n<body>\n"
        f"<header>\n<h1>{text(title)}</h1>\n<p>{text(note)}</p>\n</header>\n<main>\n"
        f"{''.join(parts)}</main>\n<footer>{text(end)}</footer>\n</body>\n</html>\n"
    )


def section(title: str, parts: Sequence[Html], note: str = "", *, of: str = "") -> Html:
    """Return a section with a heading; nothing if it has no parts.

    Args:
        title: the heading.
        parts: the contents.
        note: a sentence below the heading.
        of: the CSS class of an element around the parts; empty for no such element.
    """
    if not parts:
        return Html()
    said = f"<p>{text(note, 500)}</p>\n" if note else ""
    inside = "".join(parts)
    inside = f'<div class="{of}">\n{inside}</div>\n' if of else inside
    return Html(f"<section>\n<h2>{text(title)}</h2>\n{said}{inside}</section>\n")


def tiles(values: Mapping[str, object]) -> Html:
    """Return values with their names, side by side."""
    inside = "".join(f"<div><dt>{text(k)}</dt><dd>{text(v)}</dd></div>\n" for k, v in values.items())
    return Html(f'<dl class="tiles">\n{inside}</dl>\n')


def figure(title: str, svg: str, legend: Mapping[str, tuple[str, str]] | None = None) -> Html:
    """Return a chart with a caption.

    Args:
        title: the caption.
        svg: the chart.
        legend: the mark and colour of each item, by name.
    """
    keys = "".join(
        f'<li><span style="color:{color}">{mark}</span> {text(name, 60)}</li>'
        for name, (mark, color) in (legend or {}).items()
    )
    keys = f"<ul>{keys}</ul>" if keys else ""
    return Html(f"<figure>\n<figcaption><h3>{text(title, 80)}</h3>{keys}</figcaption>\n{svg}</figure>\n")


def table(head: Sequence[str], rows: Iterable[Sequence[object]], *, numbers: Sequence[str] = ()) -> Html:
    """Return a table, which scrolls on its own if it is too wide.

    Args:
        head: the names of the columns; the cells of the first column are row headers.
        rows: the cells.
        numbers: the names of columns to align to the right.
    """

    def cell(kind: str, column: str, value: object) -> str:
        scope = {"td": "", "th": ' scope="row"'}.get(kind, ' scope="col"')
        number = ' class="n"' if column in numbers else ""
        return f"<{kind[:2]}{scope}{number}>{text(value)}</{kind[:2]}>"

    heads = "".join(cell("th of a column", name, name) for name in head)
    body = "".join(
        f"<tr>{''.join(cell('td' if i else 'th', head[i], v) for i, v in enumerate(row))}</tr>\n"
        for row in rows
    )
    return Html(
        f'<div class="wide" tabindex="0"><table>\n<thead><tr>{heads}</tr></thead>\n'
        f"<tbody>\n{body}</tbody>\n</table></div>\n"
    )


_CSS = """
:root { color-scheme: light dark; --ink: #1d232a; --soft: #5d6670; --paper: #f6f7f8; --card: #fff;
  --grid: #e3e6e9; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #dfe4e9; --soft: #98a2ad; --paper: #14181c; --card: #1c2126; --grid: #333a42; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem; max-width: 84rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; margin: 0; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
h3 { font-size: .95rem; margin: 0; }
p { margin: .2rem 0 .8rem; }
header p, section > p, footer, dt, figcaption ul { color: var(--soft); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .75rem; }
.tiles > div, figure, .wide { background: var(--card); border: 1px solid var(--grid); border-radius: .5rem; }
.tiles > div { padding: .6rem .8rem; }
dt { font-size: .82rem; }
dd { margin: 0; font-size: 1.15rem; font-variant-numeric: tabular-nums; }
.charts { display: grid; gap: .75rem; margin-bottom: .75rem;
  grid-template-columns: repeat(auto-fill, minmax(min(20rem, 100%), 1fr)); }
figure { margin: 0; padding: .8rem .8rem .4rem; display: flex; flex-direction: column; min-width: 0; }
figcaption { flex: 1; }
figcaption ul { list-style: none; margin: 0 0 .3rem; padding: 0; font-size: .8rem; }
figcaption li { display: inline-block; margin-right: .9rem; }
svg { display: block; width: 100%; height: auto; }
svg text { font-family: system-ui, sans-serif !important; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .88rem; overflow-wrap: normal; }
th, td { padding: .3rem .8rem; text-align: left; vertical-align: top; }
tbody th { font-weight: 500; white-space: nowrap; }
tbody tr { border-top: 1px solid var(--grid); }
thead th { color: var(--soft); font-weight: 500; white-space: nowrap; }
.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
code { font-size: .92em; }
footer { margin-top: 2rem; font-size: .82rem; }
"""
