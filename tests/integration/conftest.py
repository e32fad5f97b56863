import pytest

from .nursery import SHORT, Nursery


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


@pytest.fixture(scope="session")
def whole(nursery, tmp_path_factory):
    """The digest after each step of the run that nothing interrupts."""
    return nursery.whole_run(tmp_path_factory.mktemp("whole"))
