"""Loader processes that are killed, stopped, slow or fail: one error that names the worker.

Each case runs in a process of its own: torch raises what it hears of loader processes at any time.
"""

import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Client
from multiprocessing.reduction import DupFd

import pytest
import torch

from samestep import Job, TowerLoader, Towers
from samestep.data.loader_processes import start_loader_process

CPU = torch.device("cpu")
LONG_S = 30
GONE = r"LoaderError: a loader process of worker 0 is gone: DataLoader worker \(pid(\(s\))? \d+\) "
SILENT = "LoaderError: worker 0: its loader processes have delivered nothing for {} s: .*"
GONE_NOW = r"LoaderError: a loader process of worker 0 is gone: (ConnectionResetError|EOFError):.*"
FORK = {"multiprocessing_context": "fork"}
SERVER = {"multiprocessing_context": "forkserver"}
ALL_TWICE = re.escape(str([[*range(12)]] * 2))


class Reading:
    """Numbers; before the sixth, something else is done."""

    def __init__(self, do):
        self.do = do

    def __len__(self):
        return 12

    def __getitem__(self, example):
        if example == 5:
            self.do()
        return torch.tensor(example)


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def stop():
    time.sleep(0.2)  # till the worker has opened the memory of what it was handed before
    os.kill(os.getpid(), signal.SIGSTOP)


def leave():
    os._exit(3)


def fail():
    raise FileNotFoundError(2, "No such file", "picture.png")


def be_slow():
    time.sleep(0.8)


def read(do, epochs=1, timeout_s=LONG_S, num_workers=2, **options):
    """Read all batches, and return what came."""
    towers = Towers(torch.nn.Linear(1, 1), 2, job=Job(CPU, timeout_s=timeout_s))
    loader = TowerLoader(Reading(do), 2, towers, shuffle=False, num_workers=num_workers, **options)
    return [[int(s.sum()) for batch in loader for s in batch.slices.values()] for _ in range(epochs)]


def read_while_one_is_killed():
    """Do something else meanwhile."""
    towers = Towers(torch.nn.Linear(1, 1), 2)
    batches = iter(TowerLoader(Reading(be_slow), 2, towers, shuffle=False, num_workers=2, **FORK))
    next(batches).slices[0]
    victim = multiprocessing.active_children()[0]
    threading.Timer(0.3, victim.kill).start()
    time.sleep(LONG_S)


def read_with_a_local_function(**options):
    towers = Towers(torch.nn.Linear(1, 1), 2)
    loader = TowerLoader(Reading(be_slow), 2, towers, collate_fn=lambda rows: rows, num_workers=1, **options)
    return [[*batch.slices.values()] for batch in loader]


CASES = {
    "killed": (read, (kill,), FORK, GONE + "(is killed by signal: Killed|exited unexpectedly).*"),
    "killed, no child of ours": (read, (kill,), SERVER, f"{GONE}exited unexpectedly.*|{GONE_NOW}"),
    "killed, meanwhile": (read_while_one_is_killed, (), {}, GONE + r"is killed .*\(out of memory\?\)"),
    "left": (read, (leave,), FORK, f"{GONE}exited unexpectedly.*|{GONE_NOW}"),
    "stopped": (read, (stop,), {"timeout": 0.5}, SILENT.format(r"0\.5")),
    "stopped, persistent": (
        read,
        (stop,),
        FORK | {"timeout_s": 1, "persistent_workers": True},
        SILENT.format(1),
    ),
    "slow": (read, (be_slow,), FORK | {"epochs": 2}, ALL_TWICE),
    "slow, persistent": (read, (be_slow,), FORK | {"epochs": 2, "persistent_workers": True}, ALL_TWICE),
    "failed": (read, (fail,), FORK, r"FileNotFoundError: (.|\n)*samestep: in example 5 of the dataset\s*"),
    "not to be sent": (
        read_with_a_local_function,
        (),
        SERVER,
        r"ConfigError: num_workers = 1: the dataset, or a function of it, cannot be sent to loader processes "
        r"\(.*<lambda>.*\): define it at the top level of a module, or, on Linux, pass "
        "multiprocessing_context='fork'",
    ),
    "failed here": (
        read,
        (fail,),
        {"num_workers": 0},
        r"FileNotFoundError: .*\['samestep: in .*'\]",
    ),
}


def serve(name, results):
    torch.set_num_threads(1)
    work, values, options, _ = CASES[name]
    try:
        text = str(work(*values, **options))
    except Exception as error:
        text = f"{type(error).__name__}: {error}{getattr(error, '__notes__', '')}"
    results.put((name, text))


@pytest.fixture(scope="module")
def found(forkserver):
    """For each case: what came of it, and how the process ended."""
    results = forkserver.SimpleQueue()
    workers = {name: forkserver.Process(target=serve, args=(name, results)) for name in CASES}
    for worker in workers.values():
        worker.start()
    for worker in workers.values():
        worker.join(100)
        worker.kill()
    answers = {}
    while not results.empty():
        name, text = results.get()
        answers[name] = (text, workers[name].exitcode)
    return answers


@pytest.mark.parametrize("name", CASES)
def test_loader_processes(found, name):
    text, exit_status = found[name]
    assert re.fullmatch(CASES[name][-1], text), text
    assert exit_status == 0


# ---- a worker that dies while a slice is handed to it ----------------------------------------------------


def offer(connection, errors):
    """Be a loader process, from which its worker may take a file."""
    sys.stderr = errors.open("w", buffering=1)
    start_loader_process(0)
    connection.send(DupFd(0))
    time.sleep(LONG_S)


def break_off(pids, errors, is_killed):
    """Be a worker that does not take it, and then is killed, or is not."""
    ours, theirs = multiprocessing.Pipe()
    loader_process = multiprocessing.get_context("fork").Process(target=offer, args=(theirs, errors))
    loader_process.start()
    pids.put(loader_process.pid)
    address, _ = ours.recv()._id
    Client(address, authkey=multiprocessing.current_process().authkey).close()
    time.sleep(0.2)
    if is_killed:
        kill()
    while "Error" not in errors.read_text():
        time.sleep(0.01)
    loader_process.kill()


@pytest.mark.long
@pytest.mark.parametrize("is_killed", [True, False])
def test_a_loader_process_whose_worker_dies_says_nothing(forkserver, tmp_path, is_killed):
    pids, errors = forkserver.SimpleQueue(), tmp_path / "errors"
    worker = forkserver.Process(target=break_off, args=(pids, errors, is_killed))
    worker.start()
    worker.join(LONG_S)
    assert worker.exitcode == (-signal.SIGKILL if is_killed else 0)
    with suppress(ProcessLookupError):
        for pid in [pids.get()] * 100:
            os.kill(pid, 0)
            time.sleep(0.05)
    assert ("Traceback" in errors.read_text()) == (not is_killed)
