"""The launchers of several hosts, which change one list in one store."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import DistError, HashStore, TCPStore

from samestep.app.launching import roster
from samestep.app.launching.roster import PromptStore, Roster
from samestep.errors import LostWorkerError
from samestep.workers.environment import PER_HOST
from samestep.workers.members import Members, host_of

HERE, THERE = [0, 1], [PER_HOST, PER_HOST + 1]


@pytest.fixture
def store():
    return HashStore()


def test_all_hosts_begin_with_the_same_list_and_one_that_joins_finds_it(store):
    both = [Roster(store, [*HERE, *THERE]) for _ in range(2)]
    joining = Roster(store)
    assert [(each.generation, each.members) for each in (*both, joining)] == [(0, (*HERE, *THERE))] * 3
    assert joining.newcomers([0, THERE[1], 2 * PER_HOST]) == {2 * PER_HOST}
    assert [host_of(number) for number in (*HERE, *THERE)] == [0, 0, 1, 1]


def test_to_which_other_hosts_a_connection_has_ended_is_known_for_one_generation(store):
    here, there = (Roster(store, [*HERE, *THERE]) for _ in range(2))
    worker = Members(store, 0)
    worker.current = worker.newest()
    assert there.cut(own=1) == here.cut(own=0) == set()
    worker.report_cut([1, 2, 3])
    assert (here.cut(own=0), there.cut(own=1)) == ({1}, {0})
    here.begin_again()
    assert here.cut(own=0) == set()


def test_what_one_has_not_seen_yet_is_kept(store):
    here, there = (Roster(store, [*HERE, *THERE]) for _ in range(2))
    assert here.without([0])
    there.let_in([PER_HOST + 2])
    assert there.members == (1, *THERE, PER_HOST + 2)
    assert here.without([THERE[0]])
    there.look()
    assert (there.generation, there.members) == (3, (1, THERE[1], PER_HOST + 2))


def test_changes_at_once_are_all_made():
    first = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    stores = [first, *(TCPStore("localhost", first.port, is_master=False) for _ in range(3))]
    rosters = [Roster(store, [0]) for store in stores]

    def change(number):
        for newcomer in range(1, 11):
            rosters[number].let_in([number * PER_HOST + newcomer])
            if newcomer % 2:
                assert rosters[number].without([number * PER_HOST + newcomer])

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(change, range(4)))
    rosters[0].look()
    expected = {host * PER_HOST + newcomer for host in range(4) for newcomer in range(2, 11, 2)}
    assert set(rosters[0].members) == {0} | expected
    assert rosters[0].generation == 4 * 15


def test_the_last_workers_of_all_hosts_are_not_taken_out(store):
    here, there = (Roster(store, [0, PER_HOST]) for _ in range(2))
    assert here.without([0])
    assert not there.without([PER_HOST])
    assert there.members == (PER_HOST,)
    assert here.without([0])  # which is out already: no generation for that
    assert here.generation == 1


def test_no_more_are_let_in_than_there_is_work_for(store):
    here = Roster(store, HERE)
    here.let_in(THERE, most=3)
    here.let_in([THERE[1]], most=3)
    assert (here.generation, here.members) == (1, (*HERE, THERE[0]))
    here.let_in([THERE[1]], most=1)  # which those who train already exceed
    assert here.members == (*HERE, THERE[0])


def test_only_one_of_them_begins_again_and_nobody_where_the_job_ends(store):
    here, there = (Roster(store, HERE) for _ in range(2))
    here.begin_again()
    there.begin_again()
    assert (there.generation, there.members) == (1, tuple(HERE))
    here.close()
    there.let_in(THERE)
    there.begin_again()
    assert not there.without([0]) or there.members == ()
    assert Members(store, 0).newest().number == 2


def test_workers_that_wait_for_the_first_list_are_woken():
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, use_libuv=False)
    theirs = TCPStore("localhost", store.port, is_master=False, use_libuv=False)
    with ThreadPoolExecutor(1) as threads:
        worker = threads.submit(lambda: Members(theirs, 1).are_known)
        threading.Event().wait(0.05)
        Roster(store, [0, 1])
        assert worker.result(10) is True


def test_a_worker_learns_who_was_left_behind_while_it_waits(store, monkeypatch):
    monkeypatch.setattr("samestep.workers.members._LOOK_S", 0)
    here = Roster(store, [*HERE, *THERE])
    worker = Members(store, 0)
    worker.current = worker.newest()
    assert worker.loss() is None
    here.without([THERE[0]])
    assert worker.loss() == "worker 2 is gone (reported by the launchers)"
    here.without(THERE)
    assert worker.loss() == "workers 2, 3 are gone (reported by the launchers)"
    here.close()  # of which it hears when it meets the others
    assert worker.loss() is None


def test_a_store_that_does_not_answer_or_is_gone_is_an_error_in_time(store, monkeypatch):
    monkeypatch.setattr(roster, "_ANSWER_S", 0.2)
    silent, end = PromptStore(store, "a"), threading.Event()
    with pytest.raises(
        LostWorkerError, match=r"^the job's store has not answered for 0\.2 s: this host was cut"
    ):
        silent.ask(lambda store: end.wait(20))
    end.set()

    def fail(store):
        raise DistError("Broken pipe")

    with pytest.raises(LostWorkerError, match=r"^the job's store is gone, and with it the job: run"):
        PromptStore(store, "a").ask(fail)
    with pytest.raises(json.JSONDecodeError):  # any other error is one of ours
        PromptStore(store, "a").ask(lambda store: json.loads("{"))
