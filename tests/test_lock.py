import errno
import fcntl
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch

from samestep.app import lock
from samestep.app.lock import RunLock
from samestep.errors import LockedError, StorageError
from samestep.workers.job import Job

JOB = Job(torch.device("cpu"))

HOLDER = """
import fcntl, os, sys, time
stream = open(sys.argv[1], "a+")
fcntl.flock(stream, fcntl.LOCK_EX)
stream.truncate(0)
stream.write("PID %d on elsewhere since today" % os.getpid())
stream.flush()
print("held", flush=True)
time.sleep(60)
"""

PARENT = """
import os, sys, time, torch
from pathlib import Path
from samestep.workers.job import Job
from samestep.app.lock import RunLock
with RunLock(Path(sys.argv[1]), Job(torch.device("cpu"))):
    child = os.fork()
    if child:
        print(child, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def start():
    started = []

    def start_program(program, path):
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        return process, process.stdout.readline().strip()

    yield start_program
    for process in started:
        process.kill()
        process.communicate()


def test_a_folder_is_held_by_one_at_a_time(tmp_path):
    run_dir = tmp_path / "runs" / "one"
    with RunLock(run_dir, JOB):
        expected = (
            rf"{run_dir}: PID {os.getpid()} on \S+ since \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d trains there: "
        )
        with pytest.raises(LockedError, match=expected + "wait for it, stop it, or choose another") as caught:
            RunLock(run_dir, JOB, wait_s=0).__enter__()
        assert caught.value.exit_status == 2
    with RunLock(run_dir, JOB, wait_s=0):
        pass
    with pytest.raises(KeyError), RunLock(run_dir, JOB, wait_s=0):
        raise KeyError
    with RunLock(run_dir, JOB, wait_s=0):
        pass


def test_it_waits_for_a_holder_that_dies_and_the_kernel_lets_go(start, tmp_path):
    process, _ = start(HOLDER, tmp_path / "lock")
    with pytest.raises(LockedError, match=f"PID {process.pid} on elsewhere since today trains there"):
        RunLock(tmp_path, JOB, wait_s=0.2).__enter__()
    assert (tmp_path / "lock").read_text() == f"PID {process.pid} on elsewhere since today"
    subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -9 {process.pid}"]).wait(5)
    begin = time.monotonic()
    with RunLock(tmp_path, JOB):
        assert time.monotonic() - begin < lock.WAIT_S


def test_children_do_not_hold_what_their_parent_held(start, tmp_path):
    parent, child = start(PARENT, tmp_path)
    try:
        with pytest.raises(LockedError):
            RunLock(tmp_path, JOB, wait_s=0).__enter__()
        parent.send_signal(signal.SIGKILL)
        parent.wait(5)
        with RunLock(tmp_path, JOB, wait_s=1):
            os.kill(int(child), 0)  # it lives
    finally:
        os.kill(int(child), signal.SIGKILL)


@pytest.mark.parametrize("text", ["", "\x1b[2J", "two\nlines"])
def test_a_holder_that_says_nothing_fit_to_print(tmp_path, text):
    with RunLock(tmp_path, JOB):
        (tmp_path / "lock").write_text(text)
        with pytest.raises(LockedError, match=f"{re.escape(str(tmp_path))}: another process trains there"):
            RunLock(tmp_path, JOB, wait_s=0).__enter__()


def test_a_link_is_not_followed(tmp_path):
    target = tmp_path / "precious"
    target.write_text("mine")
    (tmp_path / "lock").symlink_to(target)
    with pytest.raises(StorageError, match="lock: cannot be written"):
        RunLock(tmp_path, JOB, wait_s=0).__enter__()
    assert target.read_text() == "mine"


def test_a_run_folder_that_is_a_file(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(StorageError, match=r"run: cannot be written \(File exists\); choose another folder"):
        RunLock(tmp_path / "run", JOB).__enter__()


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch, capsys):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(OSError, match="No locks"), RunLock(tmp_path, JOB):
        monkeypatch.setattr(fcntl, "flock", no_locks)
    assert (
        capsys.readouterr().err
        == f"samestep: {tmp_path}: the file system has no locks; do not start a second run there\n"
    )
