"""Which hosts are lost: those whose launcher has not counted on for a while, by this host's own clock."""

import time

import pytest
from torch.distributed import HashStore

from samestep.app.launching import hosts
from samestep.app.launching.hosts import Ending, Hosts


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets."""

    class Clock:
        now_s = 0.0

        def run(self, seconds, *looking):
            end_s = self.now_s + seconds
            while self.now_s < end_s:
                self.now_s += 0.2
                for each in looking:
                    each.look()

    found = Clock()
    monkeypatch.setattr(time, "monotonic", lambda: found.now_s)
    return found


@pytest.fixture
def pair(clock):
    store = HashStore()
    return Hosts(store, 0), Hosts(store, 7)


def test_one_that_counts_is_there_and_one_that_does_not_is_lost(pair, clock):
    here, there = pair
    clock.run(60, here, there)
    assert (here.lost, there.lost) == (set(), set())
    assert list(here.names) == [0, 7]
    clock.run(hosts.LOST_S - 1, here)
    assert here.lost == set()
    clock.run(2, here)
    assert here.lost == {7}


def test_one_to_which_a_connection_has_ended_is_lost_sooner_if_it_does_not_count(pair, clock):
    here, _ = pair
    here.look({7})
    clock.run(hosts.CUT_S - 0.3, here)
    assert here.lost == set()
    clock.run(0.6, here)
    assert here.lost == {7}


def test_one_of_which_only_workers_were_lost_is_there(pair, clock):
    here, there = pair
    for _ in range(5):
        here.look({7})
        clock.run(60, here, there)
        clock.run(hosts.LOST_S - 0.5, here)  # what was lost then is no reason any more
        assert here.lost == set()
        there.look()


def test_that_a_connection_has_ended_is_known_also_when_the_workers_have_met_again(pair, clock):
    here, there = pair
    clock.run(1, here, there)
    here.look({7})
    there.look()  # just before it was killed
    clock.run(hosts.CUT_S + 0.5, here)
    assert here.lost == {7}


def test_one_that_was_suspended_itself_judges_nobody(pair, clock):
    here, there = pair
    clock.run(1, here, there)
    clock.now_s += 1000  # the other one, too, or not
    here.look()
    assert here.lost == set()
    clock.run(60, here, there)
    assert here.lost == set()


def test_why_a_host_ends_the_job_is_told_to_the_others_once(pair):
    here, there = pair
    there.end("failed", 2)
    here.end("was stopped by SIGTERM", 143)
    for each in pair:
        each.look()
    assert (here.ending, there.ending) == (Ending(here.names[7], "failed", 2), None)


def test_whoever_has_the_store_waits_for_the_others_or_until_they_are_lost(pair, clock, monkeypatch):
    here, there = pair
    monkeypatch.setattr(time, "sleep", lambda _: clock.run(0.2, there))
    here.leave()
    there.look()
    assert there.lost == {0}
    asked = []
    here.wait_for_others(lambda: asked.append(1) or len(asked) > 50)
    assert len(asked) == 51  # it would wait still
    monkeypatch.setattr(time, "sleep", lambda _: clock.run(0.2))
    here.wait_for_others(lambda: False)  # nothing is heard any more
    assert here.lost == {7}


def test_one_that_has_left_is_not_waited_for(pair):
    here, there = pair
    there.leave()
    here.look()
    here.wait_for_others(lambda: pytest.fail("it waits"))


# ---- of a job to which one does not belong -----------------------------------------------------------


def test_a_job_runs_while_any_host_counts(clock, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: clock.run(seconds))
    store = HashStore()
    assert not hosts.is_running(store)  # nobody has ever been there
    here, there = Hosts(store, 0), Hosts(store, 7)
    begin_s = clock.now_s
    assert not hosts.is_running(store)
    assert clock.now_s - begin_s >= hosts.LOST_S

    def count(seconds):
        clock.run(seconds, there)

    monkeypatch.setattr(time, "sleep", count)
    here.leave()
    assert hosts.is_running(store)
    monkeypatch.setattr(time, "sleep", lambda seconds: clock.run(seconds) or there.leave())
    assert not hosts.is_running(store)
