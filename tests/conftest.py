import gc
import multiprocessing
import signal
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from hypothesis import settings

# The same examples in every run, so that a failure is about the change at hand; no deadline, because
# machines that run tests are busy.
settings.register_profile("samestep", deadline=None, derandomize=True, database=None, max_examples=60)
settings.load_profile("samestep")


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="torch sees no GPU"))
    # What all tests have imported is not looked through for garbage, and what they make less often.
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


@pytest.fixture(scope="session")
def forkserver():
    """Starts processes that have nothing of this one, without each importing all anew."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded"])
    return context


@pytest.fixture
def elsewhere(forkserver):
    """Call a function in a process in which nothing has been called yet, and return what it returns."""

    def call(function, *arguments):
        with ProcessPoolExecutor(1, forkserver) as pool:
            return pool.submit(function, *arguments).result(timeout=100)

    return call


@pytest.fixture
def heeds_hangups():
    """A suite that nohup has started ignores SIGHUP, and so would all that a test starts."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(autouse=True)
def one_thread():
    """Compute with one thread, as workers do, whatever a test before this one has left."""
    torch.set_num_threads(1)
