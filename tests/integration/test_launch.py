"""Real jobs: how each kind of ending reaches the user."""

import os
import signal
import textwrap
import time

import pytest

from samestep.app.interruption import ECHO_S
from samestep.app.launching.launch import GRACE_S

from ..cases import mostly_long

JOB = """
import os, signal, sys, time
from samestep.errors import ConfigError
from samestep.app.launching.launch import run_command, run_worker

WORKER = int(os.environ.get("RANK", "-1"))

def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\\n")  # in one piece, unlike print
    sys.stdout.flush()

def barrier():
    import torch.distributed as dist
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    dist.barrier()

def main():
{body}
    return 0

def start():
    return run_command([sys.executable, *sys.argv], {num_workers}, threads=2)

sys.exit(run_worker(start if WORKER < 0 else main))
"""


@pytest.fixture
def start(nursery, tmp_path):
    """Start a job whose workers run `body`."""

    def start_job(body, num_workers=2):
        script, temporary = tmp_path / "job.py", tmp_path / "temporary"
        indented = textwrap.indent(body.strip(), "    ")
        script.write_text(JOB.format(body=indented, num_workers=num_workers))
        temporary.mkdir()
        return nursery.start_program([script], tmp_path / "output", TMPDIR=str(temporary))

    return start_job


@pytest.fixture
def run(start):
    """Run a job to its end and return (exit status, lines of stdout, lines of stderr)."""

    def run_job(body, num_workers=2):
        return outcome(start(body, num_workers))

    return run_job


def outcome(process, timeout_s=60):
    (status,) = process.wait(timeout_s)
    return status, process.stdout().splitlines(), process.stderr().splitlines()


def wait_for(process, num_lines, timeout_s=60):
    """Wait for lines that its workers write, and return them."""
    deadline_s = time.monotonic() + timeout_s
    while process.stdout().count("\n") < num_lines:
        assert process.ended() == 0, process.output()
        assert time.monotonic() < deadline_s, process.output()
        time.sleep(0.002)
    return process.stdout().splitlines()


def test_success_passes_output_through_and_nothing_else(run, tmp_path):
    body = """
barrier()
say(WORKER, *(os.environ[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TORCH_CPP_LOG_LEVEL")))
sys.stderr.write("a warning\\n") if WORKER == 1 else None
"""
    status, out, err = run(body)
    assert (status, sorted(out)) == (0, ["0 2 2 ERROR", "1 2 2 ERROR"])
    assert err == ["a warning"]
    assert list((tmp_path / "temporary").iterdir()) == []


def test_the_first_exception_is_shown_once_and_its_consequences_are_not(run):
    body = """
barrier()
if WORKER == 1:
    raise ZeroDivisionError("no such number")
barrier()
"""
    status, _, err = run(body, num_workers=3)
    assert status == 1
    assert err[0] == "Traceback (most recent call last):"
    assert err[-2:] == [
        "ZeroDivisionError: no such number",
        "samestep: worker 1 of 3 failed; the job was stopped",
    ]
    assert sum("Error" in line and not line.startswith(" ") for line in err) == 1


def test_an_error_of_all_workers_is_one_line(run):
    status, _, err = run('raise ConfigError("towers = 0: expected at least 1")')
    assert (status, err) == (2, ["samestep: error: towers = 0: expected at least 1"])


def test_an_error_of_one_worker_is_one_line(run):
    body = """
barrier()
if WORKER == 1:
    raise ConfigError("row 7: expected 3 columns")
barrier()
"""
    status, _, err = run(body)
    assert (status, err) == (2, ["samestep: error: row 7: expected 3 columns"])


def test_a_killed_worker_is_named_with_its_signal(run):
    body = """
barrier()
if WORKER == 1:
    say(os.getpid())
    os.kill(os.getpid(), signal.SIGKILL)
barrier()
"""
    status, out, err = run(body)
    expected = f"samestep: worker 1 of 2 (pid {out[0]}) was killed by SIGKILL; the job was stopped"
    assert (status, err) == (1, [expected])


def test_a_worker_that_leaves_without_a_word_is_named_with_its_status(run):
    status, out, err = run("say(os.getpid()) or os._exit(3) if WORKER == 0 else time.sleep(60)")
    expected = f"samestep: worker 0 of 2 (pid {out[0]}) exited with status 3; the job was stopped"
    assert (status, err) == (1, [expected])


def test_a_signal_reaches_workers_that_may_finish_first(start):
    body = """
def finish(number, frame):
    time.sleep(0.5)
    say("finished on", signal.Signals(number).name)
    sys.exit(128 + number)
signal.signal(signal.SIGTERM, finish)
say("ready")
while True:  # a signal that comes just before a sleep does not end it
    time.sleep(0.1)
"""
    process = start(body)
    assert wait_for(process, 2) == ["ready"] * 2
    process.signal(signal.SIGTERM)
    assert outcome(process) == (143, ["ready"] * 2 + ["finished on SIGTERM"] * 2, [])


def test_an_interrupted_worker_without_a_handler_prints_nothing(start):
    process = start('say("ready") or time.sleep(60)')
    assert wait_for(process, 2) == ["ready"] * 2
    process.signal(signal.SIGINT)
    assert outcome(process) == (130, ["ready"] * 2, [])


def test_what_fails_after_a_signal_is_still_shown(start):
    body = """
def finish(number, frame):
    raise OSError("no space left for the checkpoint")
signal.signal(signal.SIGTERM, finish if WORKER == 0 else signal.SIG_DFL)
say("ready")
while True:  # a signal that comes just before a sleep does not end it
    time.sleep(0.1)
"""
    process = start(body)
    wait_for(process, 2)
    process.signal(signal.SIGTERM)
    status, _, err = outcome(process)
    assert (status, err[-1]) == (143, "OSError: no space left for the checkpoint")


@pytest.mark.long
def test_a_second_signal_kills_workers_that_do_not_listen(start):
    body = """
signal.signal(signal.SIGTERM, lambda number, frame: say("heard"))
say(os.getpid())
while True:
    time.sleep(1)
"""
    process = start(body)
    pids = [int(line) for line in wait_for(process, 2)]
    process.signal(signal.SIGTERM)
    assert wait_for(process, 4)[2:] == ["heard"] * 2
    time.sleep(ECHO_S)
    begin = time.monotonic()
    process.signal(signal.SIGTERM)
    assert process.wait() == [143]
    assert time.monotonic() - begin < 10
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize(
    "doing",
    mostly_long(
        [
            "samestep.init('cpu') if WORKER == 0 else time.sleep(60)",  # looking for each other
            "samestep.init('cpu') and time.sleep(60)",
            "samestep.init('cpu') if WORKER == 1 else time.sleep(60)",
            "time.sleep(60)",  # or importing
        ],
        1,
    ),
)
def test_workers_of_a_launcher_that_is_killed_end_too(start, tmp_path, doing):
    process = start(f"import samestep\nsay(os.getpid())\n{doing}")
    pids = [int(line) for line in wait_for(process, 2)]
    process.signal(signal.SIGKILL)
    deadline_s = time.monotonic() + 30
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    assert list((tmp_path / "temporary").iterdir()) == []


def test_a_stopped_worker_does_not_keep_a_failed_job_waiting(start):
    body = """
if WORKER == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(0.5)
raise ConfigError("no")
"""
    begin = time.monotonic()
    process = start(body)
    assert outcome(process) == (2, [], ["samestep: error: no"])
    assert time.monotonic() - begin < GRACE_S


@pytest.mark.slow
def test_a_worker_that_does_not_listen_is_killed_after_the_grace_period(start):
    body = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
say(os.getpid())
if WORKER == 0:
    raise ConfigError("no")
time.sleep(1000)
"""
    process = start(body)
    pids = [int(line) for line in wait_for(process, 2)]
    begin = time.monotonic()
    assert outcome(process, GRACE_S + 30) == (2, list(map(str, pids)), ["samestep: error: no"])
    assert GRACE_S - 1 < time.monotonic() - begin < GRACE_S + 15
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
