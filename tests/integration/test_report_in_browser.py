"""A report in a real browser: nothing fails, each chart has its size, and nothing is wider than the page."""

import html
import json
import shutil
import subprocess

import pytest

from samestep.app.reporting.report import write_report

from ..test_report import HOSTILE, start, trained, written
from ..test_trainer import run

BROWSER = shutil.which("chromium")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="there is no chromium on the PATH"),
]
WIDTHS = 1280, 390  # a laptop, a phone

# The page in frames of these widths, and what is measured there, as text: the browser's own windows cannot be
# as narrow as a phone. A frame's page is measured by the page around it, as its own policy allows no script.
FRAMES = """<!DOCTYPE html><title>frames</title><pre id="found"></pre>%s<script>
const measure = frame => {
  const page = frame.contentDocument, box = element => element.getBoundingClientRect();
  const inside = element => element.closest(".wide") === null || element.matches(".wide");
  return {
    charts: [...page.querySelectorAll("svg")].map(svg => [box(svg).width, box(svg).height]),
    texts: [...page.querySelectorAll("svg text")].map(text => [box(text).height, box(text).right]),
    beyond: [...page.body.querySelectorAll("*")].filter(inside)
      .filter(e => box(e).right > page.documentElement.clientWidth + 1 || box(e).left < -1)
      .map(e => e.outerHTML.slice(0, 99)),
    width: page.documentElement.scrollWidth,
    marks: [...page.querySelectorAll("g > title")].map(({parentNode: mark}) => {
      mark.scrollIntoView();
      const {x, y, width, height} = box(mark);
      return mark.contains(page.elementFromPoint(x + width / 2, y + height / 2));
    }),
    scripts: page.scripts.length,
    ink: frame.contentWindow.getComputedStyle(page.querySelector("svg text")).fill,
    paper: frame.contentWindow.getComputedStyle(page.body).backgroundColor,
  };
};
addEventListener("load", () => {
  found.textContent = JSON.stringify([...document.querySelectorAll("iframe")].map(measure));
});
</script>"""


def browse(folder, *arguments):
    """Return what the browser writes to stdout, and the messages of its console."""
    quiet = (
        *(
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--disable-sync",
        ),
        *("--disable-background-networking", "--disable-component-update", "--hide-scrollbars"),
        *("--enable-logging=stderr", "--v=0", f"--user-data-dir={folder / 'profile'}"),
    )
    done = subprocess.run(
        [BROWSER, *quiet, *arguments], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def looked_at(folder, content, scheme="light"):
    """Return what is measured of a page at each width."""
    frames = "".join(
        f'<iframe width="{width}" height="900" style="border: 0; color-scheme: {scheme}" '
        f'srcdoc="{html.escape(content)}"></iframe>'
        for width in WIDTHS
    )
    (folder / "frames.html").write_text(FRAMES % frames)
    dom, messages = browse(folder, "--dump-dom", (folder / "frames.html").as_uri())
    assert messages == []
    text = dom.partition('<pre id="found">')[2].partition("</pre>")[0]
    return json.loads(html.unescape(text))


def check(found, num_charts):
    for measured, width in zip(found, WIDTHS, strict=True):
        assert measured["width"] == width, measured["beyond"]
        assert not measured["beyond"]
        assert measured["scripts"] == 0
        assert len(measured["charts"]) == num_charts
        assert all(250 < w < width and 0.4 < h / w < 0.8 for w, h in measured["charts"]), measured["charts"]
        assert all(measured["marks"])  # a mouse hits what says why
        assert all(height >= 9 and right < width for height, right in measured["texts"])  # can be read


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_run_is_laid_out_on_a_laptop_and_a_phone(tmp_path, scheme):
    run_dir = tmp_path / "run"
    run(run_dir, 2, max_seconds=1e-9, log_every=1)
    run(run_dir, 3, log_every=1, evaluate_every=5)
    content = write_report(run_dir).read_text()
    found = looked_at(tmp_path, content, scheme)
    check(found, content.count("<figure>"))
    assert all(measured["marks"] for measured in found)
    brightness = [[sum(map(int, color[4:-1].split(","))) for color in (m["ink"], m["paper"])] for m in found]
    assert all((ink > paper + 300) == (scheme == "dark") for ink, paper in brightness)


def test_names_of_strangers_neither_run_nor_widen_the_page(tmp_path):
    names = [*HOSTILE, "x" * 9999]
    lines = [
        start(name=names[0], device=names[1]),
        trained(1, **{f"loss/{name} (smoothed)": 1.0 for name in names}),
        {"step": 1, "time": 1, **dict.fromkeys(names, 0.5)},
        {"step": 1, "time": 1, "event": "end", "reason": names[-1]},
    ]
    written(tmp_path, *lines, settings={name: name for name in names})
    content = write_report(tmp_path).read_text()
    check(looked_at(tmp_path, content), content.count("<figure>"))


def test_the_page_itself_opens_without_a_message(tmp_path):
    written(tmp_path, start(), trained(1))
    dom, messages = browse(tmp_path, "--dump-dom", write_report(tmp_path).as_uri())
    assert messages == []
    assert "Newest whole checkpoint" not in dom
    assert dom.count("<svg") == 2  # the loss, and the timeline
