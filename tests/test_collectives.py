"""What workers say to each other, on simulated transports, against what one process would compute."""

import contextlib
from unittest import mock

import pytest
import torch
from hypothesis import given, strategies as st

from samestep import Job
from samestep.errors import LostWorkerError
from samestep.workers.collectives import broadcast, gather_objects, gather_rows

from .simulation import Faults, Killed, World, simulate, values

WORKERS = range(1, 8)
seeds = st.integers(0, 2**20)


def rows_of(rank, size, dtype=torch.float32, columns=3):
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 100, (size, columns), generator=generator).to(dtype)


# ---- gathering ---------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 4), min_size=1, max_size=7), st.integers(0, 3), seeds)
def test_rows_of_all_workers_in_their_order(sizes, columns, seed):
    expected = torch.cat([rows_of(rank, size, columns=columns) for rank, size in enumerate(sizes)])

    def work(job):
        own = rows_of(job.rank, sizes[job.rank], columns=columns)
        found = gather_rows(job.transport, own, sizes, "rows")
        assert torch.equal(own, rows_of(job.rank, sizes[job.rank], columns=columns))
        found.mul_(2)  # it is nobody else's
        return found

    for found in values(work, len(sizes), seed):
        assert found.shape == expected.shape
        assert torch.equal(found, 2 * expected)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("num_workers", [1, 3])
def test_rows_keep_their_dtype_and_need_not_be_contiguous(dtype, num_workers):
    def work(job):
        wide = rows_of(job.rank, 4, dtype)
        return gather_rows(job.transport, wide.t(), [3] * job.world_size, "rows")

    expected = torch.cat([rows_of(rank, 4, dtype).t() for rank in range(num_workers)])
    for found in values(work, num_workers):
        assert found.dtype == dtype
        assert torch.equal(found, expected)


@given(st.lists(st.integers(0, 3000), min_size=1, max_size=7), seeds)
def test_objects_of_other_sizes_in_their_order(sizes, seed):
    objects = [{"rank": rank, "text": "é" * size, "none": None} for rank, size in enumerate(sizes)]

    def work(job):
        own = objects[job.rank]
        found = gather_objects(job.transport, own, "objects")
        return found if found[job.rank] is own else None

    assert values(work, len(sizes), seed) == [objects] * len(sizes)


# ---- from worker 0 -----------------------------------------------------------------------------------


@given(st.sampled_from(WORKERS), seeds)
def test_tensors_of_worker_0_on_all(num_workers, seed):
    shapes = [(), (0,), (5,), (2, 3)]
    dtypes = [torch.float64, torch.float32, torch.bfloat16, torch.int64]

    def tensors_of(rank):
        return [torch.full(shape, rank + 1, dtype=d) for shape, d in zip(shapes, dtypes, strict=True)]

    def work(job):
        tensors = tensors_of(job.rank)
        broadcast(job.transport, tensors, "tensors")
        return tensors

    for found in values(work, num_workers, seed):
        assert all(torch.equal(mine, first) for mine, first in zip(found, tensors_of(0), strict=True))


@pytest.mark.parametrize("num_workers", WORKERS)
def test_a_broadcast_takes_as_many_rounds_as_w_has_bits(num_workers):
    """A worker posts in every round, and those who have the tensors double."""
    sent = []

    def work(job):
        class Recorded:
            rank, world_size = job.rank, job.world_size

            def post(self, outgoing, incoming, what):
                sent.extend((job.rank, target) for target in outgoing)
                return job.transport.post(outgoing, incoming, what)

        broadcast(Recorded(), [torch.ones(1)], "tensors")
        return job.transport.num_events // 2

    assert values(work, num_workers) == [(num_workers - 1).bit_length()] * num_workers
    assert sorted(target for _, target in sent) == list(range(1, num_workers))
    assert all(target - source == 1 << target.bit_length() - 1 for source, target in sent)


# ---- waiting -----------------------------------------------------------------------------------------


@given(st.sampled_from(WORKERS), seeds)
def test_nobody_leaves_a_barrier_before_all_have_come(num_workers, seed):
    came = []

    def work(job):
        came.append(job.rank)
        job.barrier()
        return len(came)

    assert values(work, num_workers, seed) == [num_workers] * num_workers


CALLS = {
    "rows": lambda transport: gather_rows(transport, torch.ones(2), [2] * transport.world_size, "it"),
    "objects": lambda transport: gather_objects(transport, "x" * transport.rank, "it"),
    "tensors": lambda transport: broadcast(transport, [torch.ones(2)], "it"),
    "barrier": lambda transport: Job(torch.device("cpu"), transport=transport).barrier("it"),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("num_workers", [2, 3, 5])
def test_a_killed_worker_is_named_and_nobody_hangs(name, num_workers):
    call = CALLS[name]
    whole = World(num_workers, 0)
    whole.run(lambda job: call(job.transport))
    for lost in range(num_workers):
        for event in range(1, whole.workers[lost].num_events + 1):
            faults = Faults(killed={lost: event})
            outcomes = simulate(lambda job: call(job.transport), num_workers, event, faults)
            assert isinstance(outcomes.pop(lost).error, Killed)
            errors = [outcome.error for outcome in outcomes if outcome.error is not None]
            assert all(isinstance(e, LostWorkerError) and str(e).startswith("it: worker") for e in errors)
            if name != "tensors" and event < whole.workers[lost].num_events:
                assert len(errors) == len(outcomes)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, TimeoutError])
@pytest.mark.parametrize("moment", [(1, False), (1, True), (2, False), (2, True), (3, False), (4, True)])
def test_after_an_interrupt_nothing_can_be_posted_that_others_would_take_for_the_rest(error, moment):
    def work(job):
        if job.rank == 1:
            job.transport.calls[moment] = mock.Mock(side_effect=error)
        with pytest.raises(error) if job.rank == 1 else contextlib.nullcontext():
            gather_objects(job.transport, "before", "agreement")
        return gather_objects(job.transport, "after", "checkpoint")

    texts = [outcome.text for outcome in simulate(work, 3)]
    assert texts[1] == ("LostWorkerError: checkpoint: worker 1 was interrupted in the middle of agreement")
    assert all(text.startswith("LostWorkerError: ") for text in texts)
