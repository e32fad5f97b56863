"""The launcher's lists of workers, and the workers that follow them: threads on one store."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import DistError, HashStore

from samestep.app.launching.roster import Roster
from samestep.errors import LostWorkerError
from samestep.workers import members
from samestep.workers.members import Key, Members


@pytest.fixture
def store():
    return HashStore()


def advance(*workers, timeout_s=10.0):
    """Let workers wait for the next generation at once; return the stores that they meet in."""
    with ThreadPoolExecutor(len(workers)) as pool:
        return list(pool.map(lambda worker: worker.advance(timeout_s), workers))


def test_all_of_a_list_meet_in_a_store_of_their_own(store):
    roster = Roster(store, range(2))
    workers = [Members(store, number) for number in range(3)]
    assert [worker.are_known for worker in workers] == [True, True, False]
    first = advance(*workers[:2])
    roster.let_in([2])
    assert roster.without([0])
    second = advance(*workers[1:])
    assert [worker.rank for worker in workers[1:]] == [0, 1]
    assert workers[1].current == workers[2].current == members.Generation(2, (1, 2))
    first[0].set("name", "before")
    second[0].set("name", "after")
    assert [found.get("name") for found in (*first, *second)] == [b"before"] * 2 + [b"after"] * 2


def test_who_waits_for_one_that_is_lost_meanwhile_follows_the_next_list(store):
    roster = Roster(store, range(3))
    workers = [Members(store, number) for number in range(2)]
    threading.Timer(0.1, roster.without, ([2],)).start()
    advance(*workers)
    assert [worker.current.number for worker in workers] == [1, 1]


def test_one_that_does_not_come_is_named(store):
    Roster(store, range(3))
    with pytest.raises(LostWorkerError, match=r"^workers 0, 2 did not join within 0.1 s$"):
        Members(store, 1).advance(0.1)


def test_a_newcomer_that_is_never_let_in_is_told_so(store):
    Roster(store, range(2))
    with pytest.raises(LostWorkerError, match=r"^the others did not join within 0.1 s$"):
        Members(store, 2).advance(0.1)


def test_nobody_waits_where_the_job_ends(store):
    roster = Roster(store, range(2))
    threading.Timer(0.1, roster.close).start()
    with pytest.raises(LostWorkerError, match=r"^the job ends$"):
        Members(store, 1).advance(10)
    roster.close()
    assert Members(store, 1).newest().number == 1  # once is enough


def test_a_newer_list_is_looked_up_now_and_then(store, monkeypatch):
    roster = Roster(store, [0])
    worker = Members(store, 0)
    worker.advance(10)
    assert not worker.has_newer()
    roster.let_in([1])
    monkeypatch.setattr(members, "_DUE_S", 60)
    assert not worker.has_newer()
    monkeypatch.setattr(members, "_DUE_S", 0)
    assert worker.has_newer()


def test_a_list_that_is_older_than_the_group_says_nothing_about_a_loss(store, monkeypatch):
    monkeypatch.setattr(members, "_LOOK_S", 60)
    roster = Roster(store, range(2))
    workers = [Members(store, number) for number in range(3)]
    advance(*workers[:2])
    assert workers[0].loss() is None
    roster.let_in([2])
    advance(*workers)
    assert workers[0].loss() is None
    roster.without([2])
    monkeypatch.setattr(members, "_LOOK_S", 0)
    assert workers[0].loss() == "worker 2 is gone (reported by the launchers)"


def test_a_worker_whose_launcher_is_gone_finds_no_newer_list(store, monkeypatch):
    def newest(self):
        raise DistError("Broken pipe")

    monkeypatch.setattr(Members, "newest", newest)
    assert not Members(store, 0).has_newer()


def test_those_who_part_while_nobody_is_lost_meet_again(store):
    roster = Roster(store, range(2))
    workers = [Members(store, number) for number in range(2)]
    advance(*workers)  # and then, the connection between them breaks
    with ThreadPoolExecutor(2) as pool:
        meeting = [pool.submit(worker.advance, 0.5) for worker in workers]
        while not roster.is_asked_again():
            time.sleep(0.01)
        roster.begin_again()
        assert [each.result(10) is not None for each in meeting] == [True, True]
    assert [worker.current for worker in workers] == [members.Generation(1, (0, 1))] * 2


def test_one_that_waits_in_vain_for_another_list_is_told_so(store):
    Roster(store, range(2))
    workers = [Members(store, number) for number in range(2)]
    advance(*workers)
    with pytest.raises(LostWorkerError, match=r"^the others did not join within 0\.1 s$"):
        workers[0].advance(0.1)


def test_one_that_hangs_is_accused_also_where_a_newcomer_gave_up_just_then(store):
    roster = Roster(store, range(2))
    workers = [Members(store, number) for number in range(2)]
    advance(*workers)
    roster.let_in([2])
    with ThreadPoolExecutor(1) as pool:
        meeting = pool.submit(workers[0].advance, 0.3)
        while roster.silent() != [1, 2]:
            time.sleep(0.01)
        roster.without([2])
        while roster.silent() != [1]:
            time.sleep(0.01)
        roster.without([1])
        meeting.result(10)
    assert workers[0].current.members == (0,)


def test_the_launcher_learns_who_goes_on_is_ready_or_silent_or_could_not_connect(store):
    roster = Roster(store, range(2))
    workers = [Members(store, number) for number in range(3)]
    advance(*workers[:2])
    workers[0].say(Key.GOES_ON)
    assert [roster.go_on([0]), roster.go_on([0, 1]), roster.go_on([])] == [True, False, True]
    workers[2].say(Key.READY)
    assert roster.ready([2, 3]) == [2]
    workers[1].accuse(0)
    workers[1].accuse(-1)  # of a group that was not made
    assert roster.silent() == [0]
    assert not roster.is_asked_again()
    workers[0].say(Key.AGAIN, workers[0].current.number)
    assert roster.is_asked_again()
    roster.begin_again()
    assert not roster.is_asked_again()


def test_who_does_not_come_is_accused_but_not_who_waits_in_vain_for_another_one(store):
    roster = Roster(store, range(3))
    workers = [Members(store, number) for number in range(3)]
    advance(*workers)
    workers[0].accuse(1)
    workers[1].accuse(2)
    assert roster.silent() == [2]
    roster.begin_again()  # of which two do not come
    assert roster.silent() == []
    with pytest.raises(LostWorkerError, match=r"^workers 1, 2 did not join within 0\.1 s$"):
        workers[0].advance(0.1)
    assert roster.silent() == [1, 2]
