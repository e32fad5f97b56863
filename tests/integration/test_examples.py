"""The programs in examples/ run, and print the same on one worker and on two."""

import sys
from pathlib import Path

from .test_digits import run

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_an_existing_loop_on_towers():
    alone = run(sys.executable, EXAMPLES / "towers.py").stdout
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert run(*launcher, EXAMPLES / "towers.py").stdout == alone
    assert alone.splitlines()[-1].startswith("weights sha256 ")
