"""Workers as threads that take turns."""

import random

import pytest
import torch

from samestep.checking.stand_ins import run_stand_ins
from samestep.errors import LostWorkerError
from samestep.workers.collectives import broadcast, gather_objects
from samestep.workers.job import Job

JOB = Job(torch.device("cpu"))


@pytest.mark.parametrize("num_workers", [1, 2, 3, 5])
def test_each_has_a_transport_of_its_own(num_workers):
    def work(job):
        found = gather_objects(job.transport, job.rank**2, "squares")
        rank = torch.tensor([job.rank])
        broadcast(job.transport, [rank], "rank")
        return job.world_size, found, rank.item()

    squares = [rank**2 for rank in range(num_workers)]
    assert run_stand_ins(work, JOB, num_workers) == [(num_workers, squares, 0)] * num_workers


def test_the_last_starts_and_each_runs_until_it_has_to_wait():
    ran = []

    def work(job):
        ran.append(job.rank)
        job.barrier()
        ran.append(job.rank)

    run_stand_ins(work, JOB, 3)
    assert ran == [2, 1, 0, 0, 2, 1]


def test_each_has_random_generators_of_its_own():
    def work(job):
        torch.manual_seed(job.rank)
        random.seed(job.rank)
        drawn = []
        for _ in range(2):
            drawn.append((torch.rand(()).item(), random.random()))
            gather_objects(job.transport, None, "barrier")
        return drawn

    before = torch.random.get_rng_state()
    assert run_stand_ins(work, JOB, 3) == [
        run_stand_ins(lambda job, rank=rank: work(Named(job, rank)), JOB, 1)[0] for rank in range(3)
    ]
    torch.random.set_rng_state(before)
    run_stand_ins(work, JOB, 2)
    assert torch.equal(torch.random.get_rng_state(), before)


class Named:
    """A job of one worker with another number."""

    def __init__(self, job, rank):
        self.rank, self.transport = rank, job.transport


def test_messages_arrive_in_order_whoever_is_waited_for_first():
    def work(job):
        other = 1 - job.rank
        into = [torch.zeros(1), torch.zeros(1)]
        posted = [
            job.transport.post({other: [torch.full((1,), 10.0 * job.rank + n)]}, {other: [into[n]]}, "n")
            for n in range(2)
        ]
        posted[1].wait()
        posted[0].wait()
        return [each.item() for each in into]

    assert run_stand_ins(work, JOB, 2) == [[10, 11], [0, 1]]


def test_one_that_fails_is_missed_by_the_others():
    def work(job):
        if job.rank == 1:
            raise ZeroDivisionError("planted")
        job.barrier("step 7")

    first, second, third = run_stand_ins(work, JOB, 3)
    assert isinstance(second, ZeroDivisionError)
    for error in (first, third):
        assert isinstance(error, LostWorkerError)
        assert str(error).startswith("step 7: worker ")
