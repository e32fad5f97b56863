"""Which hosts are lost: those whose launcher has not counted on for a while, by this host's own clock."""

import time

import pytest
from torch.distributed import HashStore

from samestep.app import hosts
from samestep.app.hosts import Ending, Hosts


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
