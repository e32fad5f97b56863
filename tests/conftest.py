import gc
import multiprocessing
import signal
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from hypothesis import settings

# The same examples in every run, so that a new failure comes from a change. No deadline, because the
# machines that run tests are busy.
settings.register_profile("samestep", deadline=None, derandomize=True, database=None, max_examples=60)
settings.load_profile("samestep")


# First, as pytest's own hook leaves out what `-m` does not select.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    short_cases = Counter()
    for item in items:
        sampled = item.get_closest_marker("sampled")
        if sampled and not item.get_closest_marker("long"):
            every = sampled.args[0] if sampled.args else 7  # no divisor of the usual numbers of workers
            if short_cases[item.function] % every:
                item.add_marker(pytest.mark.long)
            short_cases[item.function] += 1
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="torch sees no GPU"))
    # Speed: garbage collection skips what the tests have imported, and runs less often.
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


@pytest.fixture(autouse=True, scope="module")
def frozen():
    """Let garbage collection skip what earlier modules have left, too: some trainers collect in each run."""
    gc.freeze()


@pytest.fixture(scope="session")
def forkserver():
    """A context that starts clean processes quickly, as forks of one that has imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded"])
    return context


@pytest.fixture
def elsewhere(forkserver):
    """Call a function in a new process, and return its result."""

    def call(function, *arguments):
        with ProcessPoolExecutor(1, forkserver) as pool:
            return pool.submit(function, *arguments).result(timeout=100)

    return call


@pytest.fixture
def default_signals():
    """Restore the default actions of signals that nohup and shells set to "ignore", for children, too."""
    defaults = {signal.SIGHUP: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, action) for number, action in defaults.items()}
    yield
    for number, action in before.items():
        signal.signal(number, action)


@pytest.fixture(autouse=True)
def one_thread():
    """Compute with one thread, as workers do, whatever the previous test has set."""
    torch.set_num_threads(1)
