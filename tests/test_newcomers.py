"""Which workers the launcher leaves behind, and whom it starts in their place: shells as workers."""

import json
import os
import signal
import subprocess
import time
from dataclasses import asdict

import pytest
from torch.distributed import HashStore

from samestep.app.launching import hosts, replacement
from samestep.app.launching.failures import Failure
from samestep.app.launching.hosts import Hosts
from samestep.app.launching.replacement import Replacement
from samestep.app.launching.roster import Roster
from samestep.app.launching.worker_process import WorkerProcess
from samestep.errors import LockedError, LostWorkerError
from samestep.workers.environment import PER_HOST
from samestep.workers.members import Key, Members


class Launcher:
    """Has workers that sleep; the tests do what they and the supervisor would do."""

    def __init__(self, folder, num_workers, store=None, host=0, members=None, most=None):
        self.folder, self.workers, self.host = folder, [], host
        self.store = HashStore() if store is None else store
        for local_rank in range(num_workers):
            self.start(local_rank)
        self.roster = Roster(self.store, range(num_workers) if store is None else members)
        self.hosts = Hosts(self.store, host)
        self.replacement = Replacement(self.roster, self.hosts, self.workers, self.start, most)

    def start(self, local_rank):
        number = self.host * PER_HOST + len(self.workers)
        process = subprocess.Popen(["sleep", "60"], start_new_session=True)
        self.workers.append(WorkerProcess(number, local_rank, process, self.folder / f"{number}.json"))

    def go_on(self, *numbers):
        for number in numbers:
            Members(self.store, number).say(Key.GOES_ON)

    def end_with(self, number, status):
        """Let a worker end: by a signal, −n, or as if with an exit status."""
        process = self.workers[number].process
        process.send_signal(-status if status < 0 else signal.SIGKILL)
        process.wait()
        process.returncode = status

    def look(self, until=lambda: True):
        """Do what the supervisor does, once and until something is so."""
        deadline_s = time.monotonic() + 10
        while True:
            for worker in self.workers:
                worker.look()
            self.replacement.look()
            if until():
                return
            assert time.monotonic() < deadline_s
            time.sleep(0.01)

    def left_behind(self):
        return [worker.number for worker in self.workers if worker.is_left_behind]


@pytest.fixture
def launch(tmp_path, monkeypatch):
    monkeypatch.setattr(replacement, "_LOOK_S", 0)
    launched = []

    def start(num_workers, **options):
        launched.append(Launcher(tmp_path, num_workers, **options))
        return launched[-1]

    yield start
    for worker in [worker for each in launched for worker in each.workers]:
        worker.end(signal.SIGKILL)
        worker.process.wait()


def test_one_that_is_killed_is_left_behind_and_another_takes_its_rank(launch):
    job = launch(3)
    job.go_on(0, 1, 2)
    job.end_with(0, -signal.SIGKILL)
    job.look()
    assert (job.roster.members, job.left_behind()) == ((1, 2), [0])
    assert [(worker.number, worker.local_rank) for worker in job.workers[3:]] == [(3, 0)]
    Members(job.store, 3).say(Key.READY)
    job.look()
    assert job.roster.members == (1, 2, 3)
    job.go_on(3)
    job.end_with(1, -signal.SIGKILL)
    job.end_with(2, -signal.SIGSEGV)
    job.look()
    assert (job.roster.members, job.left_behind()) == ((3,), [0, 1, 2])
    assert [worker.local_rank for worker in job.workers[4:]] == [1, 2]


def test_nobody_is_left_behind_before_all_others_can_go_on(launch):
    job = launch(3)
    job.go_on(0, 1)
    job.end_with(1, -signal.SIGKILL)
    job.look()
    assert (job.roster.members, job.left_behind(), len(job.workers)) == ((0, 1, 2), [], 3)


def test_the_last_one_is_not_left_behind(launch):
    job = launch(2)
    job.go_on(0, 1)
    job.end_with(0, -signal.SIGKILL)
    job.end_with(1, -signal.SIGKILL)
    job.look()
    assert job.left_behind() == []


def test_one_that_fails_is_not_left_behind(launch):
    job = launch(2)
    job.go_on(0, 1)
    job.end_with(0, 1)
    job.look()
    assert job.left_behind() == []


def test_whoever_never_lasts_comes_back_later_each_time(launch, monkeypatch):
    job = launch(2)
    job.go_on(0, 1)
    monkeypatch.setattr(replacement.time, "monotonic", lambda: clock_s)
    clock_s, started = 0.0, []
    job.end_with(1, -signal.SIGKILL)
    while clock_s < 200 and len(started) < 9:
        job.replacement.look()
        if not job.workers[-1].is_left_behind:
            started.append(clock_s)
            job.end_with(len(job.workers) - 1, -signal.SIGKILL)
        else:
            clock_s += 1
    assert started == [0, 1, 4, 11, 26, 57, 117, 177]


def test_one_that_has_lasted_is_replaced_at_once(launch, monkeypatch):
    job = launch(2)
    job.go_on(0, 1)
    monkeypatch.setattr(replacement.time, "monotonic", lambda: clock_s)
    clock_s = 0.0
    for number in (1, 2):
        job.end_with(number, -signal.SIGKILL)
        job.replacement.look()
        clock_s += 61
        assert len(job.workers) == number + 2
        job.go_on(number + 1)


def test_why_a_newcomer_failed_is_said_once(launch, capsys):
    job = launch(2)
    job.go_on(0, 1)
    job.end_with(1, -signal.SIGKILL)
    job.look()
    failure = asdict(Failure.of(LockedError("runs: somebody trains there")))
    job.workers[2].error_file.write_text(json.dumps({"samestep": failure}))
    job.end_with(2, 2)
    job.look()
    job.look()
    assert capsys.readouterr().err.splitlines() == [
        "samestep: error: runs: somebody trains there",
        "samestep: a new worker exited with status 2; going on without it",
    ]
    assert job.left_behind() == [1, 2]


@pytest.mark.parametrize("is_newcomer", [False, True])
def test_one_that_is_stopped_while_others_run_is_killed(launch, monkeypatch, is_newcomer):
    monkeypatch.setattr(replacement, "_STOPPED_S", 0.2)
    job = launch(3)
    job.go_on(0, 1, 2)
    victim = 1
    if is_newcomer:
        job.end_with(1, -signal.SIGKILL)
        job.look()
        victim = 3
    os.kill(job.workers[victim].process.pid, signal.SIGSTOP)
    job.look(until=lambda: job.workers[victim].is_left_behind)
    assert job.workers[victim].status == -signal.SIGKILL
    assert job.roster.members == (0, 2)


def test_a_job_that_is_stopped_as_a_whole_is_left_alone(launch, monkeypatch):
    monkeypatch.setattr(replacement, "_STOPPED_S", 0.05)
    job = launch(2)
    job.go_on(0, 1)
    for worker in job.workers:
        os.kill(worker.process.pid, signal.SIGSTOP)
    end_s = time.monotonic() + 0.3
    job.look(until=lambda: time.monotonic() > end_s)
    assert [worker.status for worker in job.workers] == [None, None]


def test_one_for_whom_others_waited_in_vain_is_killed(launch):
    job = launch(2)
    job.go_on(0, 1)
    worker = Members(job.store, 0)
    worker.current = worker.newest()
    worker.accuse(1)
    job.look(until=lambda: job.workers[1].is_left_behind)
    assert job.roster.members == (0,)


def test_those_who_could_not_connect_get_another_list(launch):
    job = launch(2)
    job.go_on(0, 1)
    worker = Members(job.store, 0)
    worker.current = worker.newest()
    worker.say(Key.AGAIN, worker.current.number)
    job.look()
    assert (worker.newest().number, worker.newest().members) == (1, (0, 1))
    job.look()
    assert worker.newest().number == 1


def test_a_newcomer_that_cannot_begin_where_the_others_are_is_ended_and_another_one_comes(launch):
    job = launch(2)
    job.go_on(0, 1)
    job.end_with(0, -signal.SIGKILL)
    job.look()
    Members(job.store, 2).say(Key.READY)
    job.look()
    worker = Members(job.store, 1)
    worker.current = worker.newest()
    worker.say(Key.AWAY, worker.current.members[1])
    job.look(until=lambda: len(job.workers) == 4)
    assert (job.roster.members, job.left_behind(), job.workers[3].local_rank) == ((1,), [0, 2], 0)
    assert not job.roster.is_over()


def test_once_one_has_done_its_part_nobody_comes_and_nobody_waits_for_it(launch):
    job = launch(4)
    job.go_on(0, 1, 2, 3)
    job.end_with(3, -signal.SIGKILL)
    job.look()
    newcomer = job.workers[4]
    Members(job.store, 4).say(Key.READY)
    job.look()
    job.end_with(0, -signal.SIGKILL)
    job.end_with(1, 0)
    job.look()
    assert job.roster.members == (2,)  # which has lost worker 0 in what worker 1 has done
    assert (job.left_behind(), newcomer.last_signal) == ([0, 3, 4], signal.SIGKILL)


def test_one_that_is_stopped_when_others_have_done_their_part_is_killed(launch, monkeypatch):
    monkeypatch.setattr(replacement, "_STOPPED_S", 0.05)
    job = launch(2)
    job.go_on(0, 1)
    os.kill(job.workers[1].process.pid, signal.SIGSTOP)
    job.end_with(0, 0)
    job.look(until=lambda: job.workers[1].is_left_behind)
    assert job.workers[1].status == -signal.SIGKILL


def test_nobody_is_let_in_or_replaced_once_one_has_finished(launch):
    job = launch(3)
    job.go_on(0, 1, 2)
    job.end_with(0, -signal.SIGKILL)
    job.look()
    Members(job.store, 3).say(Key.READY)
    Members(job.store, 1).finish()
    job.look()
    assert (job.roster.members, job.workers[3].last_signal) == ((1, 2), signal.SIGKILL)
    job.end_with(1, -signal.SIGKILL)
    job.look()
    assert job.left_behind() == [0, 3]  # so the supervisor ends the job


def test_those_who_are_told_to_stop_do_so_without_one_that_is_killed(launch):
    job = launch(3)
    job.go_on(0, 1, 2)
    job.end_with(1, -signal.SIGKILL)
    job.replacement.end()
    assert (job.roster.members, len(job.workers)) == ((0, 2), 3)
    job.end_with(0, 128 + signal.SIGTERM)
    job.replacement.end()
    assert job.roster.members == (2,)


@pytest.mark.parametrize(("go_on", "status"), [((0, 1), 1), ((0,), -signal.SIGKILL)])
def test_nobody_waits_after_a_failure(launch, go_on, status):
    job = launch(3)
    job.go_on(*go_on)
    job.end_with(2, status)
    job.replacement.end()
    assert job.roster.members == ()


# ---- several hosts ---------------------------------------------------------------------------------------


THERE = PER_HOST, PER_HOST + 1


@pytest.fixture
def pair(launch):
    """The launchers of two hosts, with two workers each, all of which go on."""
    store, members = HashStore(), [0, 1, *THERE]
    here, there = (launch(2, store=store, host=host, members=members) for host in range(2))
    here.go_on(*members)
    return here, there


def members_of(*launchers):
    for launcher in launchers:
        launcher.look()
    launchers[0].roster.look()
    return launchers[0].roster.members


def test_a_host_on_which_all_workers_are_killed_starts_others_in_their_place(pair):
    here, there = pair
    there.end_with(0, -signal.SIGKILL)
    there.end_with(1, -signal.SIGKILL)
    assert members_of(here, there) == (0, 1)
    assert [worker.number for worker in there.workers[2:]] == [PER_HOST + 2, PER_HOST + 3]
    Members(there.store, PER_HOST + 3).say(Key.READY)
    assert members_of(here, there) == (0, 1, PER_HOST + 3)
    assert len(here.workers) == 2


def test_the_last_workers_of_two_hosts_that_are_killed_at_once_end_the_job(pair):
    here, there = pair
    for launcher in pair:
        for number in range(2):
            launcher.end_with(number, -signal.SIGKILL)
    assert members_of(here, there) == THERE
    assert [launcher.left_behind() for launcher in pair] == [[0, 1], []]  # so the supervisor there ends it


def test_a_host_that_is_lost_is_left_behind_by_any_other(pair, capsys):
    here, _ = pair
    here.hosts.lost.add(1)
    assert members_of(here) == (0, 1)
    assert (
        capsys.readouterr().err == f"samestep: the host {here.hosts.names[1]} is lost; going on without it\n"
    )
    assert members_of(here) == (0, 1)
    assert capsys.readouterr().err == ""


def test_a_host_that_is_killed_as_a_whole_is_left_behind_soon(pair, monkeypatch):
    monkeypatch.setattr(hosts, "CUT_S", 0.3)
    here, there = pair
    worker = Members(here.store, 0)
    worker.current = worker.newest()
    worker.report_cut([2])
    begin_s = time.monotonic()
    while time.monotonic() < begin_s + 0.6:  # its launcher is there: one of its workers was lost
        assert members_of(here, there) == (0, 1, *THERE)
        time.sleep(0.01)
    here.look(until=lambda: here.roster.members == (0, 1))
    assert time.monotonic() < begin_s + hosts.LOST_S


def test_a_host_that_was_left_behind_and_wakes_up_ends(pair):
    here, there = pair
    here.hosts.lost.add(1)
    here.look()
    with pytest.raises(
        LostWorkerError,
        match=r"^the other hosts went on without this one after hearing nothing from it for 1 s or more: ",
    ):
        there.look()


def test_a_host_that_is_lost_too_early_ends_the_job(launch):
    store, members = HashStore(), [0, *THERE]
    here, _ = (launch(number, store=store, host=number - 1, members=members) for number in (1, 2))
    here.go_on(0, THERE[0])
    here.look()
    here.hosts.lost.add(1)
    with pytest.raises(
        LostWorkerError, match=r"^the host .* was lost before the job could go on without it$"
    ):
        here.look()


def test_newcomers_alone_do_not_go_on(launch):
    """They have no state: nobody but those of the lost host had."""
    store = HashStore()
    trains, joins = launch(1, store=store, members=[0]), launch(1, store=store, host=1)
    another = launch(1, store=store, host=2)
    trains.go_on(0)
    for number in (PER_HOST, 2 * PER_HOST):
        Members(store, number).say(Key.READY)
    assert members_of(joins, another) == (0, PER_HOST, 2 * PER_HOST)
    joins.hosts.lost.add(0)
    with pytest.raises(LostWorkerError, match="was lost before the job could go on"):
        joins.look()


def test_a_newcomer_elsewhere_that_does_not_train_yet_keeps_nobody_from_being_replaced(launch):
    store = HashStore()
    trains, joins = launch(2, store=store, members=[0, 1]), launch(1, store=store, host=1)
    trains.go_on(0, 1)
    Members(store, PER_HOST).say(Key.READY)
    assert members_of(joins) == (0, 1, PER_HOST)
    trains.end_with(0, -signal.SIGKILL)
    assert members_of(trains) == (1, PER_HOST)


def test_a_host_joins_with_as_many_workers_as_there_is_work_for(launch):
    store = HashStore()
    trains = launch(2, store=store, members=[0, 1], most=3)
    joins = launch(2, store=store, host=1, most=3)
    trains.go_on(0, 1)
    for number in THERE:
        Members(store, number).say(Key.READY)
    assert members_of(joins, trains) == (0, 1, THERE[0])
    joins.go_on(THERE[0])
    trains.end_with(0, -signal.SIGKILL)
    assert members_of(trains, joins) == (1, *THERE)  # which waited


def test_a_worker_that_is_stopped_is_killed_where_other_hosts_wait_for_it(pair, monkeypatch):
    monkeypatch.setattr(replacement, "_STOPPED_S", 0.05)
    _, there = pair
    for worker in there.workers:
        os.kill(worker.process.pid, signal.SIGSTOP)
    there.look(until=lambda: len(there.left_behind()) == 2)
    assert there.roster.members == (0, 1)


def test_once_a_host_has_done_its_part_newcomers_of_another_are_sent_away(pair):
    here, there = pair
    there.end_with(1, -signal.SIGKILL)
    there.look()
    Members(here.store, 0).finish()
    there.look()
    assert there.workers[2].last_signal == signal.SIGKILL
    there.look()
    assert not there.replacement.is_due


def test_nothing_is_done_any_more_where_another_host_has_ended_the_job(pair):
    here, there = pair
    there.hosts.end("failed", 2)
    here.end_with(0, -signal.SIGKILL)
    here.look()
    assert (here.left_behind(), here.hosts.ending.status) == ([], 2)
