import pytest

from .nursery import SAMESTEP, SHORT, Nursery


@pytest.fixture(scope="session")
def nursery():
    with Nursery() as started:
        yield started


@pytest.fixture
def start(nursery, tmp_path):
    """Start workers that train in tmp_path/run."""

    def start_run(num_workers, *options, recipe="digits"):
        words = ("train", recipe, *SHORT, "--run-dir", tmp_path / "run", *options)
        return nursery.start(words, num_workers, tmp_path / "output")

    return start_run


@pytest.fixture
def run(nursery, tmp_path_factory):
    """Run `samestep WORDS` to its end, as a user does; return the process."""

    def run_samestep(*words, expect=0):
        finished = nursery.run((*SAMESTEP, *words), tmp_path_factory.mktemp("output"))
        assert finished.wait() == [expect], finished.stderr()
        return finished

    return run_samestep


@pytest.fixture(scope="session")
def whole(nursery, tmp_path_factory):
    """The digests after each step of a run without interruptions."""
    return nursery.whole_run(tmp_path_factory.mktemp("whole"))
