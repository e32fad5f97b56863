"""The simulator itself: deterministic, any order of workers, as harsh as a network, workers isolated."""

import random

import numpy as np
import pytest
import torch

from samestep.errors import LostWorkerError
from samestep.workers.collectives import gather_objects

from .cases import mostly_long
from .simulation import GARBAGE, Faults, Killed, World, simulate, values

SEEDS = range(12)


def talk(job):
    """Gather objects and wait at barriers a few times."""
    for number in range(3):
        job.barrier(f"barrier {number}")
        gather_objects(job.transport, "x" * job.rank, f"objects {number}")
    return job.rank


def events_of(seed, world_size=3):
    world = World(world_size, seed)
    world.run(talk)
    return world.events


def one_way(job, send, receive):
    """Let worker 0 send something to worker 1."""
    if job.rank == 0:
        return send(lambda tensors: job.transport.post({1: tensors}, {}, "greeting"))
    return receive(lambda tensors: job.transport.post({}, {0: tensors}, "greeting"))


# ---- schedules ---------------------------------------------------------------------------------------


@pytest.mark.long
def test_each_seed_gives_a_schedule_of_its_own():
    schedules = [events_of(seed) for seed in SEEDS]
    assert [events_of(seed) for seed in SEEDS] == schedules
    assert len({tuple(events) for events in schedules}) == len(SEEDS)


def test_events_are_recorded_with_worker_and_time():
    events = events_of(0)
    posts = [(rank, what) for rank, kind, what, _ in events if kind == "post"]
    assert [what for rank, what in posts if rank == 1] == [
        f"{what} {number}" for number in range(3) for what in ("barrier", "objects", "objects")
    ]
    assert {kind for _, kind, _, _ in events} == {"post", "wait"}
    times = [time for *_, time in events]
    assert times == sorted(times)
    assert times[-1] > 0


def test_any_worker_may_be_ahead():
    first = {events_of(seed)[0][0] for seed in SEEDS}
    last = {events_of(seed)[-1][0] for seed in SEEDS}
    assert first == last == {0, 1, 2}


def test_one_worker_runs_at_a_time():
    running = set()

    def work(job):
        for _ in range(5):
            assert not running
            running.add(job.rank)
            sum(range(10_000))  # long enough for another thread to interfere
            running.remove(job.rank)
            job.barrier("barrier")

    for seed in SEEDS:
        values(work, 4, seed)


# ---- messages ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "expected", "what"),
    [
        ([4], [3], "greeting"),
        ([4], [5], "greeting"),
        ([4], [4, 4], "greeting"),
        ([4, 4], [8], "greeting"),
        ([4], [4], "farewell"),
    ],
)
@pytest.mark.parametrize("seed", range(4))
def test_no_worker_can_catch_a_mismatch_of_messages(seed, sent, expected, what):
    def work(job):
        post = job.transport.post
        try:
            if job.rank == 0:
                post({1: [torch.ones(size) for size in sent]}, {}, "greeting").wait()
            else:
                post({}, {0: [torch.ones(size) for size in expected]}, what).wait()
        except Exception:
            return "caught"

    with pytest.raises(AssertionError, match=r"0 sends \('greeting', \[.*\]\), 1 expects \("):
        simulate(work, 2, seed)


def test_a_tensor_holds_garbage_until_its_message_has_arrived():
    def receive(post):
        tensor = torch.ones(3)
        pending = post([tensor])
        before = tensor.view(torch.uint8).tolist()
        pending.wait()
        return before, tensor.tolist()

    def send(post):
        post([torch.full((3,), 7.0)]).wait()

    for seed in SEEDS:
        found = values(lambda job: one_way(job, send, receive), 2, seed)[1]
        assert found == ([GARBAGE] * 12, [7.0] * 3)


@pytest.mark.parametrize("waits", [False, True])
def test_some_seed_finds_a_sender_that_writes_before_it_waits(waits):
    def receive(post):
        tensor = torch.empty(3)
        post([tensor]).wait()
        return tensor.tolist()

    def send(post):
        tensor = torch.full((3,), 7.0)
        pending = post([tensor])
        if waits:
            pending.wait()
        tensor.zero_()
        pending.wait()

    arrived = [values(lambda job: one_way(job, send, receive), 2, seed)[1] for seed in SEEDS]
    assert ([0.0] * 3 in arrived) != waits
    assert [7.0] * 3 in arrived


def test_messages_between_two_workers_keep_their_order():
    def send(post):
        for pending in [post([torch.tensor([number])]) for number in range(5)]:
            pending.wait()

    def receive(post):
        tensors = [torch.zeros(1, dtype=torch.int64) for _ in range(5)]
        for pending in [post([tensor]) for tensor in tensors]:
            pending.wait()
        return [int(tensor) for tensor in tensors]

    for seed in SEEDS:
        assert values(lambda job: one_way(job, send, receive), 2, seed)[1] == [0, 1, 2, 3, 4]


# ---- faults ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["killed", "stopped"])
@pytest.mark.parametrize("event", mostly_long([*range(1, 19, 2), *range(2, 19, 2)], 9))
def test_a_lost_worker_ends_the_others(fault, event):
    for seed in range(3):
        first, lost, last = simulate(talk, 3, seed, Faults(**{fault: {1: event}}))
        assert isinstance(lost.error, Killed)
        for outcome in (first, last):
            # Event 18 is the last wait: the others may already have all that they need.
            assert isinstance(outcome.error, LostWorkerError) or (event == 18 and outcome.error is None)
            assert fault == "stopped" or outcome.error is None or " is gone at " in outcome.text


def test_posting_to_a_worker_that_is_gone_fails_at_once_or_later():
    def work(job):
        if job.rank == 0:
            job.transport.post({1: [torch.ones(1)]}, {}, "greeting").wait()

    kinds = set()
    for seed in range(30):
        world = World(2, seed)
        if "greeting: worker 1 is gone" in world.run(work)[0].text:
            kinds.add(tuple(kind for _, kind, *_ in world.events))
    assert kinds == {("post",), ("post", "wait")}


def test_a_killed_worker_sends_nothing_more():
    def work(job):
        try:
            job.barrier("barrier")
        finally:
            job.transport.post({1 - job.rank: [torch.ones(1)]}, {}, "farewell")

    for seed in SEEDS:
        world = World(2, seed, Faults(killed={0: 2}))
        outcomes = world.run(work)
        assert isinstance(outcomes[0].error, Killed)
        assert not world.sent[0, 1]


def test_a_wait_without_an_answer_reports_a_silent_worker():
    def work(job):
        tensor = torch.empty(1)
        job.transport.post({}, {1 - job.rank: [tensor]}, "greeting").wait()

    for seed in SEEDS:
        texts = sorted(outcome.text for outcome in simulate(work, 2, seed))
        assert texts[0].startswith("LostWorkerError: greeting: another worker did not answer")
        assert texts[1].startswith("LostWorkerError: greeting: ")  # the first to time out is gone


# ---- isolation of workers ----------------------------------------------------------------------------


def draw(job, seed):
    """Seed each generator, and draw from all of them between messages."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    found = []
    for _ in range(4):
        found.append((float(torch.rand(())), random.random(), np.random.rand()))
        job.barrier("barrier")
    return found


def test_each_worker_has_generators_of_its_own():
    alone = [values(lambda job, rank=rank: draw(job, rank), 1)[0] for rank in range(3)]
    for seed in SEEDS:
        assert values(lambda job: draw(job, job.rank), 3, seed) == alone


def test_generators_outside_continue_where_they_were():
    torch.manual_seed(5)
    expected = torch.rand(2).tolist()
    torch.manual_seed(5)
    first = float(torch.rand(()))
    values(lambda job: draw(job, job.rank), 3)
    assert [first, float(torch.rand(()))] == expected


def test_an_exception_is_an_outcome():
    def work(job):
        if job.rank:
            raise KeyError("x")
        return 3

    outcomes = simulate(work, 2)
    assert (outcomes[0].value, outcomes[0].text, outcomes[1].text) == (3, "", "KeyError: 'x'")
    with pytest.raises(KeyError):
        values(work, 2)
