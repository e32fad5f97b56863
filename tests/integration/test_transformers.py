"""Their Trainer with towers, in processes: the same bits and the same figures on any number of workers."""

from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("transformers_program.py")


@pytest.fixture
def printed(nursery, tmp_path):
    """Run the program on some workers, or by plain python, and return the lines that worker 0 prints."""
    pytest.importorskip("transformers")
    pytest.importorskip("peft")

    def run(num_workers, *words):
        finished = nursery.run([PROGRAM, *words], tmp_path / "output", num_workers)
        assert finished.wait() == [0] * (num_workers or 1), finished.stderr()
        lines = finished.stdout().splitlines()
        return {line.partition(" ")[0]: line for line in lines if not line.startswith("{")}

    return run


@pytest.mark.packages
def test_the_same_runs_on_one_worker_and_on_two(printed, tmp_path):
    alone = printed(None, tmp_path / "alone")
    assert alone.keys() == {"saved", "lora", "bf16"}
    assert printed(2, tmp_path / "two") == alone


@pytest.mark.packages
def test_others_go_on_where_two_workers_were(printed, tmp_path):
    two = printed(2, tmp_path / "two")
    assert printed(3, tmp_path / "three") == two
    for num_workers in (None, 3):
        words = (tmp_path / f"resumed {num_workers}", tmp_path / "two" / "saved" / "checkpoint-3")
        assert printed(num_workers, *words)["saved"] == two["saved"]
