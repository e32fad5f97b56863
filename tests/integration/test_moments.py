"""The command line, started as users do, and hit at moments from its first import on."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

LATER_S = tuple(0.2 * moment for moment in range(1, 41))
"""Workers are started, import torch, look for each other and train."""


@pytest.fixture
def hit(tmp_path):
    """Start training on some workers and signal it after some seconds; return its status and stderr."""

    words = [
        "train",
        "digits",
        "--steps",
        "100000",
        "--log-every",
        "1000",
        "--run-dir",
        str(tmp_path / "run"),
    ]
    command = [sys.executable, "-m", "samestep", *words]

    def hit_at(after_s, number, num_workers=2, *, group=False):
        tag = f"hit-{time.time_ns()}"
        process = subprocess.Popen(
            [*command, "--workers", str(num_workers)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=listen_to_interrupts,
            env={**os.environ, "HIT": tag, "TMPDIR": str(tmp_path)},
        )
        try:
            time.sleep(after_s)
            (os.killpg if group else os.kill)(process.pid, number)
            process.wait(timeout=40)
            assert_gone(tag)
            return process.returncode, process.communicate()[1].splitlines()
        finally:
            process.kill()

    return hit_at


def listen_to_interrupts():
    """As in a terminal: what a script starts with `&` ignores Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def assert_gone(tag, timeout_s=5):
    """Wait for all processes with a tag in their environment to end."""
    deadline_s = time.monotonic() + timeout_s
    while found := [path for path in Path("/proc").glob("[0-9]*") if is_tagged(path, tag.encode())]:
        assert time.monotonic() < deadline_s, [(path / "cmdline").read_text() for path in found]
        time.sleep(0.02)


def is_tagged(path, tag):
    try:
        return tag in (path / "environ").read_bytes()
    except OSError:
        return False


def check_interrupted(outcome, number):
    status, errors = outcome
    if len(errors) > 1 and not any(line.endswith("in main") for line in errors):
        assert errors[-1] == "KeyboardInterrupt", errors  # Python had not come as far as to our first line
    else:
        assert (status in (128 + number, -number), len(errors) <= 1) == (True, True), errors


@pytest.mark.parametrize(
    ("after_s", "group"),
    [(0.1, True), *(pytest.param(0.5, group, marks=pytest.mark.long) for group in (True, False))],
)
def test_an_interrupt_before_anything_is_imported_is_silent(hit, after_s, group):
    check_interrupted(hit(after_s, signal.SIGINT, group=group), signal.SIGINT)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("number", "group"), [(signal.SIGINT, True), (signal.SIGINT, False), (signal.SIGTERM, False)]
)
def test_a_signal_at_any_moment_is_at_most_one_line(hit, number, group):
    for after_s in LATER_S:
        check_interrupted(hit(after_s, number, group=group), number)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_nothing_outlives_a_launcher_that_is_killed_at_any_moment(hit):
    for index, after_s in enumerate(LATER_S):
        assert hit(after_s, signal.SIGKILL, 2 + index % 3) == (-signal.SIGKILL, [])
