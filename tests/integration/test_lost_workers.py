"""A worker that dies or hangs: the others find it, say which one and in which step, and end."""

import random
import re
import signal
import time

import pytest

from ..cases import mostly_long
from .nursery import SHORT, STEPS, digests_of

TIMEOUT_S = 4


def the_others_report(workers, victim, how):
    """Check what the others say of the victim, and return the first step that they name.

    One that notices late may find that another has noticed, and left.
    """
    others = set(range(len(workers.pids))) - {victim}
    found = []
    for worker in others:
        left = "|".join(map(str, others - {worker}))
        who = rf"worker (?:({victim}) {how}|(?:{left}) is gone) \("
        reported = rf"samestep: error: step (\d+), (?:gradients|averages|norms|checkpoint .*): {who}"
        found.append(re.search(reported, workers.output(worker)))
        assert found[-1], workers.output(worker)
    assert any(match[2] for match in found)
    steps = [int(match[1]) for match in found]
    assert max(steps) - min(steps) <= 1  # what the victim had sent may have let one of them go on
    return min(steps)


@pytest.mark.long  # found in the same way as one that hangs
def test_a_stopped_worker_is_found_within_the_timeout(start, whole, tmp_path):
    workers = start(3, "--timeout", TIMEOUT_S, "--checkpoint-every", "4")
    workers.wait_for_step(5)
    workers.signal(signal.SIGSTOP, 1)
    begin_s = time.monotonic()
    while workers.ended() < 2:
        assert time.monotonic() - begin_s < 3 * TIMEOUT_S
        time.sleep(0.01)
    workers.signal(signal.SIGKILL, 1)
    assert workers.wait() == [1, -signal.SIGKILL, 1]
    assert the_others_report(workers, 1, f"did not answer for {TIMEOUT_S} s") >= 4
    step, found = digests_of(tmp_path / "run").popitem()
    assert found == whole[step]


@pytest.mark.parametrize("num_left", mostly_long([1, 2], 1))
def test_a_killed_worker_is_found(start, whole, tmp_path, num_left):
    workers = start(num_left + 1, "--timeout", 15, "--checkpoint-every", "4")
    workers.wait_for_step(9)
    workers.signal(signal.SIGKILL, num_left)
    assert workers.wait(timeout_s=30) == [1] * num_left + [-signal.SIGKILL]
    assert the_others_report(workers, num_left, "is gone") >= 8
    assert digests_of(tmp_path / "run")[8] == whole[8]
    assert start(num_left).wait() == [0] * num_left
    assert digests_of(tmp_path / "run")[STEPS] == whole[STEPS]


@pytest.mark.long
@pytest.mark.parametrize(
    "tries", [1, 3, pytest.param(300, marks=[pytest.mark.slow, pytest.mark.timeout(7200)])]
)
def test_every_kill_ends_all_others_with_one_line_that_names_the_victim(nursery, tmp_path, tries):
    chance = random.Random(tries)
    for _ in range(tries):
        num_workers = chance.choice([2, 3, 4])
        victim = chance.randrange(num_workers)
        options = ("--steps", 400, "--fresh", "--run-dir", tmp_path / "run", "--timeout", 60)
        workers = nursery.start(("train", "digits", *SHORT, *options), num_workers, tmp_path / "output")
        workers.wait_for_step(chance.randint(1, 30))
        time.sleep(chance.uniform(0, 0.03))
        workers.signal(signal.SIGKILL, victim)
        begin_s = time.monotonic()
        expected = [-signal.SIGKILL if worker == victim else 1 for worker in range(num_workers)]
        assert workers.wait() == expected
        assert time.monotonic() - begin_s < 20  # not after the timeout
        for worker in set(range(num_workers)) - {victim}:
            line = rf"samestep: error: step \d+, \w+: worker {victim} is gone \(.*\)\n"
            assert re.fullmatch(line, workers.stderr(worker)), workers.stderr(worker)


@pytest.mark.parametrize("where", mostly_long(["forward", "loading"], 1))
def test_a_worker_that_hangs_in_its_own_code_is_found_within_the_timeout(start, where):
    workers = start(2, "--timeout", TIMEOUT_S, "--hang", where, recipe="hanging")
    begin_s = time.monotonic()
    while workers.ended() == 0:
        assert time.monotonic() - begin_s < 20
        time.sleep(0.01)
    workers.signal(signal.SIGKILL, 1)
    assert workers.wait() == [1, -signal.SIGKILL]
    assert the_others_report(workers, 1, f"did not answer for {TIMEOUT_S} s") == 5


@pytest.mark.long
def test_a_worker_that_never_comes_is_missed_at_the_start(start):
    workers = start(2, "--timeout", 2)
    workers.signal(signal.SIGSTOP, 1)
    while workers.ended() == 0:
        time.sleep(0.01)
    assert "samestep: error: start of 2 workers: worker 1 did not join within 2 s\n" in workers.output()
    workers.signal(signal.SIGKILL, 1)
    assert workers.wait() == [1, -signal.SIGKILL]


@pytest.mark.long
def test_workers_that_were_all_stopped_for_longer_than_the_timeout_go_on(start, whole, tmp_path):
    workers = start(3, "--timeout", TIMEOUT_S)
    workers.wait_for_step(5)
    workers.signal(signal.SIGSTOP)
    time.sleep(TIMEOUT_S + 1)
    workers.signal(signal.SIGCONT)
    assert workers.wait() == [0, 0, 0]
    assert digests_of(tmp_path / "run")[STEPS] == whole[STEPS]


def test_an_interrupt_ends_the_wait_for_workers_that_have_not_come(start):
    workers = start(2)
    workers.signal(signal.SIGSTOP, 1)
    workers.wait_until_it_waits(0)
    time.sleep(0.5)
    workers.signal(signal.SIGINT, 0)
    begin_s = time.monotonic()
    while workers.ended() == 0:
        assert time.monotonic() - begin_s < 10
        time.sleep(0.01)
    workers.signal(signal.SIGKILL, 1)
    assert workers.wait() == [-signal.SIGINT, -signal.SIGKILL]
    assert workers.stderr(0) == ""
