import errno
import fcntl
import os
import re
import shutil
import signal
import socket
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


@pytest.mark.long
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


# ---- what is planted -----------------------------------------------------------------------------------


def precious(run_dir):
    (run_dir.parent / "precious").write_text("mine")
    return run_dir.parent / "precious"


PLANTED = {
    "link": lambda lock: lock.symlink_to(precious(lock.parent)),
    "second name": lambda lock: lock.hardlink_to(precious(lock.parent)),
    "pipe": os.mkfifo,
    "folder": os.mkdir,
    "socket": lambda lock: socket.socket(socket.AF_UNIX).bind(os.path.relpath(lock)),
    "link to nothing": lambda lock: lock.symlink_to(lock.with_name("nothing")),
}


@pytest.mark.filterwarnings("ignore:unclosed <socket")
@pytest.mark.parametrize("kind", PLANTED)
def test_what_is_no_lock_is_refused_and_never_written_to(tmp_path, kind, monkeypatch):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    monkeypatch.chdir(run_dir)
    PLANTED[kind](run_dir / "lock")
    before = os.listdir(run_dir)
    with pytest.raises(StorageError, match=f"{run_dir}/lock: ") as caught:
        RunLock(run_dir, JOB, wait_s=0).__enter__()
    assert caught.value.exit_status == 2
    assert "\n" not in str(caught.value)
    assert os.listdir(run_dir) == before
    assert precious(run_dir).read_text() == "mine"


def test_a_file_of_the_user_s_that_has_the_name_keeps_its_text(tmp_path):
    (tmp_path / "lock").write_text("dependencies:\n")
    with RunLock(tmp_path, JOB), pytest.raises(LockedError, match="another process trains there"):
        RunLock(tmp_path, JOB, wait_s=0).__enter__()
    assert (tmp_path / "lock").read_text() == "dependencies:\n"


@pytest.mark.parametrize("kind", ["file", "link to nothing", "pipe"])
def test_checkpoints_that_are_no_folder_are_found_at_the_start(tmp_path, kind):
    path = tmp_path / "checkpoints"
    {"file": os.mknod, "pipe": os.mkfifo, "link to nothing": PLANTED["link to nothing"]}[kind](path)
    with pytest.raises(StorageError, match=f"{path}: cannot be written") as caught:
        RunLock(tmp_path, JOB).__enter__()
    assert caught.value.exit_status == 2
    path.unlink()
    with RunLock(tmp_path, JOB, wait_s=0):
        pass


# ---- what happens to the folder while it is held -----------------------------------------------------------


def moved(run_dir):
    run_dir.rename(run_dir.with_name("elsewhere"))
    return run_dir


def replaced(run_dir):
    moved(run_dir).mkdir()
    (run_dir / "lock").touch()
    (run_dir / "checkpoints").mkdir()
    return run_dir


def linked(run_dir):
    replaced(run_dir).rename(run_dir.with_name("other"))
    run_dir.symlink_to(run_dir.with_name("other"))
    return run_dir


def deleted(run_dir):
    shutil.rmtree(run_dir)
    return run_dir


def deleted_and_made(run_dir):
    deleted(run_dir).mkdir()
    return run_dir


def file(run_dir):
    moved(run_dir).touch()
    return run_dir


def without_lock(run_dir):
    (run_dir / "lock").unlink()
    return run_dir / "lock"


def other_lock(run_dir):
    without_lock(run_dir).touch()
    return run_dir / "lock"


def without_checkpoints(run_dir):
    return moved(run_dir / "checkpoints")


def other_checkpoints(run_dir):
    (run_dir / "other").mkdir()
    moved(run_dir / "checkpoints").symlink_to(run_dir / "other")
    return run_dir / "checkpoints"


CHANGES = (
    *(moved, replaced, linked, deleted, deleted_and_made, file),
    *(without_lock, other_lock, without_checkpoints, other_checkpoints),
)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_folder_that_is_another_one_is_not_written_to(tmp_path, change):
    run_dir = tmp_path / "run"
    with RunLock(run_dir, JOB) as held:
        held.check()
        place = change(run_dir)
        for write in (held.check, lambda: held.checkpoints):
            with pytest.raises(StorageError) as caught:
                write()
            assert str(caught.value) == (
                f"{place}: was moved, deleted or replaced during the run: nothing more is written "
                "there; put it back, or choose another --run-dir"
            )
            assert caught.value.exit_status == 1


def test_another_folder_mounted_over_it(tmp_path):
    with RunLock(tmp_path, JOB) as held:
        if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", tmp_path], capture_output=True).returncode:
            pytest.skip("mounting is not permitted here")
        try:
            with pytest.raises(StorageError, match=f"{tmp_path}: was moved, deleted or replaced"):
                held.check()
        finally:
            subprocess.run(["umount", tmp_path], check=True)
        held.check()


def test_a_folder_that_still_has_its_path_is_written_to(tmp_path, monkeypatch):
    run_dir = tmp_path / "run"
    monkeypatch.chdir(tmp_path)
    with RunLock(run_dir.relative_to(tmp_path), JOB) as held:
        moved(run_dir).symlink_to(tmp_path / "elsewhere")
        monkeypatch.chdir("/")
        held.check()


def test_a_run_folder_that_is_a_file(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(StorageError, match=r"run: cannot be written \(File exists\); choose another folder"):
        RunLock(tmp_path / "run", JOB).__enter__()


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch, capsys):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with RunLock(tmp_path, JOB):
        pass
    assert (
        capsys.readouterr().err
        == f"samestep: {tmp_path}: the file system has no locks; do not start a second run there\n"
    )


# ---- one job, of which several generations may hold the folder ---------------------------------------------


class Term:
    """The transport of a job whose workers change, of which only the generation is looked at."""

    def __init__(self, name, generation):
        self.name, self.generation = name, generation
        self.rank, self.world_size, self.is_closed = 0, 1, False

    def term(self):
        return self.name, self.generation

    def is_outside(self):
        return False

    def nothing(self, *_):
        return False

    empty = post = give_up = close = is_due = can_go_on = finish = has_finished = send_away = regroup = (
        nothing
    )


def held_by(run_dir, name, generation, **options):
    return RunLock(run_dir, Job(torch.device("cpu"), transport=Term(name, generation)), **options)


def test_a_later_generation_takes_over_from_one_that_still_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "_CLAIM_S", 0.05)
    before, after = held_by(tmp_path, "a", 0), held_by(tmp_path, "a", 2)
    num_open = len(os.listdir("/proc/self/fd"))
    with before, after:
        after.take_over()
        after.check()
        with pytest.raises(
            StorageError, match=r"PID .*, job a, generation 2 trains .* job a, generation 0, was left behind"
        ):
            before.check()
        third = held_by(tmp_path, "a", 3)
        third.take_over()
        for left_behind in (before, after):
            with pytest.raises(
                StorageError, match=r"generation 3 trains there: this worker, of .* writes nothing more"
            ):
                _ = left_behind.checkpoints
        third.check()
        third.__exit__()
    assert len(os.listdir("/proc/self/fd")) == num_open


@pytest.mark.parametrize(("name", "generation"), [("b", 5), ("a", 1), ("a", 0)])
def test_only_a_later_generation_of_the_same_job_takes_over(tmp_path, name, generation):
    with held_by(tmp_path, "a", 1) as holder:
        with pytest.raises(LockedError, match=r"PID .* job a, generation 1 trains there"):
            held_by(tmp_path, name, generation, wait_s=0).take_over()
        holder.check()


def test_one_that_was_left_behind_does_not_take_over_what_is_free(tmp_path):
    with held_by(tmp_path, "a", 4):
        pass
    with pytest.raises(StorageError, match="generation 4 trains there"):
        held_by(tmp_path, "a", 3).take_over()
    with held_by(tmp_path, "b", 0) as other:  # a later run
        other.check()


def test_what_was_claimed_is_locked_once_it_is_free(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "_CLAIM_S", 0.05)
    before, after = held_by(tmp_path, "a", 0), held_by(tmp_path, "a", 1)
    before.__enter__()
    after.take_over()
    before.__exit__()
    other = held_by(tmp_path, "b", 0, wait_s=0)  # in the moment before it looks again
    with other, pytest.raises(StorageError, match="job b, generation 0 trains there"):
        after.check()
    after.__exit__()
    with held_by(tmp_path, "c", 0) as before:
        after = held_by(tmp_path, "c", 1)
        after.take_over()
    after.check()
    with pytest.raises(LockedError):
        held_by(tmp_path, "d", 0, wait_s=0).__enter__()
    after.__exit__()
