"""Summaries of a run on several workers."""

import re

import pytest

from ..test_summaries import scalars


@pytest.mark.long
def test_several_workers_print_their_towers_in_order_and_one_writes(run, tmp_path):
    options = "--workers 2 --towers 5 --steps 2 --summary-every 1 --log-device-placement --device cpu"
    lines = run("train", "digits", *options.split(), "--run-dir", tmp_path).stdout().splitlines()
    assert re.fullmatch(r"worker 0 on \S+, cpu, 1 threads: towers 0, 1, 2", lines[0])
    assert re.fullmatch(r"worker 1 on \S+, cpu, 1 threads: towers 3, 4", lines[1])
    assert len([path for path in (tmp_path / "summaries").iterdir() if path.is_file()]) == 1
    assert list(scalars(tmp_path / "summaries", "towers/4/loss")) == [1, 2]
