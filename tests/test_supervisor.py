"""The supervisor, with shells as workers: what they get, and what becomes of them."""

import os
import signal
import sys
import threading
import time

import pytest

from samestep.app.launching import supervisor
from samestep.app.launching.supervisor import Supervisor
from samestep.errors import LostWorkerError


@pytest.fixture
def run(tmp_path):
    """Run a shell script as each of some workers; return the supervisor after its end."""

    def run_script(script, num_workers=2):
        found = Supervisor(["sh", "-c", script], num_workers, threads=3, folder=tmp_path)
        found.run()
        return found

    return run_script


def statuses(found):
    return [worker.status for worker in found.workers]


def alive(pid):
    return os.path.exists(f"/proc/{pid}")


def test_workers_get_a_place_each_and_an_address_for_all(run, tmp_path):
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR OMP_NUM_THREADS"
    values = " ".join(f"${name}" for name in names.split())
    found = run(f"echo {values} > {tmp_path}/worker-$RANK")
    assert statuses(found) == [0, 0]
    texts = [(tmp_path / f"worker-{rank}").read_text().split() for rank in range(2)]
    assert texts == [["0", "0", "2", "2", "127.0.0.1", "3"], ["1", "1", "2", "2", "127.0.0.1", "3"]]


def test_when_one_fails_the_others_are_told_to_end(run):
    found = run("[ $RANK = 1 ] && exit 5; exec sleep 60", 3)
    assert statuses(found) == [-signal.SIGTERM, 5, -signal.SIGTERM]
    assert [worker.last_signal for worker in found.workers] == [signal.SIGTERM, None, signal.SIGTERM]


def test_those_that_do_not_end_are_killed_after_the_grace_period(run, tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "GRACE_S", 0.3)
    fails = f"while [ ! -e {tmp_path}/ready ]; do sleep 0.01; done; exit 5"
    found = run(
        f"[ $RANK = 1 ] && {{ {fails}; }}; trap '' TERM; : > {tmp_path}/ready; while :; do sleep 0.05; done"
    )
    assert statuses(found) == [-signal.SIGKILL, 5]


def test_a_stopped_worker_is_woken_to_end(run):
    begin_s = time.monotonic()
    found = run("[ $RANK = 1 ] && sleep 0.3 && exit 5; kill -STOP $$; exit 0")
    assert statuses(found) == [-signal.SIGTERM, 5]
    assert time.monotonic() - begin_s < 10


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_passed_on(default_signals, run, tmp_path, number):
    before = signal.getsignal(number)

    def send():
        while len(list(tmp_path.glob("ready-*"))) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    threading.Thread(target=send).start()
    name = number.name.removeprefix("SIG")
    found = run(f"trap 'exit 9' {name}; : > {tmp_path}/ready-$RANK; while :; do sleep 0.05; done")
    assert found.received == number
    assert [worker.last_signal for worker in found.workers] == [number] * 2
    if number != signal.SIGINT:  # which a worker has yet to let through
        assert statuses(found) == [9, 9]
    assert signal.getsignal(number) == before


def test_interrupts_wait_for_a_worker_to_choose_what_they_do(tmp_path):
    program = f"import signal; open('{tmp_path}/held', 'w').write(str(signal.pthread_sigmask(0, ())))"
    Supervisor([sys.executable, "-S", "-c", program], 1, threads=1, folder=tmp_path).run()
    assert (tmp_path / "held").read_text() == str({signal.SIGINT})
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_program_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(LostWorkerError, match=r"start of 2 workers: worker 0 could not .*No such file"):
        Supervisor([str(tmp_path / "nothing")], 2, threads=1, folder=tmp_path).run()


def test_when_one_cannot_be_started_the_others_end(tmp_path, monkeypatch):
    started = []

    class Popen(supervisor.subprocess.Popen):
        def __init__(self, *arguments, **options):
            if len(started) == 2:
                raise BlockingIOError(11, "Resource temporarily unavailable")
            super().__init__(*arguments, **options)
            started.append(self.pid)

    monkeypatch.setattr(supervisor.subprocess, "Popen", Popen)
    with pytest.raises(LostWorkerError, match=r"worker 2 could not be started .*temporarily unavailable"):
        Supervisor(["sleep", "60"], 3, threads=1, folder=tmp_path).run()
    assert not any(map(alive, started))
