"""One step of a worker: whose turn it is, under which streams, and what is left of a step that fails."""

import random

import numpy as np
import pytest
import torch
from torch import nn

import samestep
from samestep import Towers
from samestep.errors import BatchError, DisagreementError, UsageError

from .cases import mostly_long
from .simulation import values


def make():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))


def batch_of(rows=12):
    return torch.randn(rows, 3, generator=torch.Generator().manual_seed(rows))


def hand_in(towers, tower):
    tower.backward(towers.model(tower.batch).square().mean())


def states():
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()


def take_step(towers, batch):
    for tower in towers(batch):
        hand_in(towers, tower)
    return towers.average()


# ---- turns -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [1, 2, 3, 5])
def test_each_worker_runs_its_own_towers_in_order_with_their_rows(num_workers):
    def work(job):
        towers = Towers(make(), 5, job=job)
        seen = []
        for tower in towers(batch_of(12)):
            seen.append((tower.index, tower.rows, tower.batch.tolist()))
            hand_in(towers, tower)
        towers.average()
        return seen

    seen = [turn for turns in values(work, num_workers) for turn in turns]
    rows = [rows.tolist() for rows in batch_of(12).tensor_split(5)]
    assert seen == [(tower, len(part), part) for tower, part in enumerate(rows)]


def draws_in_passes(num_workers):
    def work(job):
        towers = Towers(make(), 5, job=job, seed=7)
        found = []
        for tower in towers(batch_of(12)):
            found.append((torch.rand(2).tolist(), random.random(), np.random.rand()))
            hand_in(towers, tower)
        towers.average()
        return found

    return [each for found in values(work, num_workers) for each in found]


def test_a_tower_draws_the_same_wherever_it_runs():
    first = draws_in_passes(1)
    assert draws_in_passes(2) == draws_in_passes(3) == first
    assert len({str(each) for each in first}) == 5


def test_a_towers_representation_says_which_one_it_is():
    assert repr(next(Towers(make(), 5)(batch_of(12)))) == "Tower(index=0, rows=3)"


# ---- streams -----------------------------------------------------------------------------------------


def all_turns(towers, batch):
    take_step(towers, batch)


def fail_in_the_first_pass(towers, batch):
    for tower in towers(batch):
        hand_in(towers, tower)
        raise KeyError("x")


def an_exception_in_the_body(towers, batch):
    with pytest.raises(KeyError):
        fail_in_the_first_pass(towers, batch)


def a_break(towers, batch):
    for tower in towers(batch):
        hand_in(towers, tower)
        break


def a_tower_that_hands_nothing_in(towers, batch):
    with pytest.raises(UsageError, match="the loop went on before backward was called"):
        for _ in towers(batch):
            pass


def turns_that_somebody_holds_on_to(towers, batch):
    turns = towers(batch)
    for _ in range(5):
        hand_in(towers, next(turns))
    towers.average()
    turns_held.append(turns)


def average_within_the_loop(towers, batch):
    for tower in towers(batch):
        hand_in(towers, tower)
        if tower.index == 4:
            towers.average()


turns_held = []
ENDS = [
    all_turns,
    an_exception_in_the_body,
    a_break,
    a_tower_that_hands_nothing_in,
    turns_that_somebody_holds_on_to,
    average_within_the_loop,
]


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("statistics", ["mean", "pooled"])
def test_streams_and_layers_are_as_before_whatever_ends_the_loop(end, statistics):
    towers = Towers(make(), 5, statistics=statistics)
    before = states()
    end(towers, batch_of())
    assert states() == before
    assert towers.model[1].momentum == 0.1
    assert not towers.model[1]._forward_hooks
    turns_held.clear()
    assert states() == before


def test_average_within_the_loop_ends_it():
    towers = Towers(make(), 5)
    average_within_the_loop(towers, batch_of())
    assert towers.step == 1
    take_step(towers, batch_of())


def test_averages_may_be_written_to_even_if_average_was_called_in_inference_mode():
    def work(job):
        towers = Towers(make(), 5, job=job)
        for tower in towers(batch_of()):
            hand_in(towers, tower)
        with torch.inference_mode():
            towers.average()
        return nn.utils.clip_grad_norm_(towers.model.parameters(), 0.1).item()

    assert len({norm for num in (1, 2) for norm in values(work, num)}) == 1


# ---- steps that fail ---------------------------------------------------------------------------------


def reports_a_bad_batch(towers, job, batch):
    """Worker 1 fails before its passes. The others hear of it in their last one, or where they have one
    bucket, in average().
    """
    take_step(towers, batch[:0] if job.rank == 1 else batch)


def loses_its_loss(towers, job, batch):
    """Worker 1 fails between the two forwards."""

    def loss(outputs, _):
        return outputs.square().mean() if job.rank != 1 else outputs.square().mean().detach()

    towers.whole_batch(batch, towers.model, loss)
    towers.average()


@pytest.mark.sampled
@pytest.mark.parametrize("seeds", mostly_long([range(2), range(2, 6)], 1), ids=str)
@pytest.mark.parametrize("fails", [reports_a_bad_batch, loses_its_loss])
@pytest.mark.parametrize(
    ("statistics", "bucket_bytes"), mostly_long([("pooled", 1), ("mean", 1), ("mean", 10**6)], 1)
)
def test_a_step_that_one_worker_gives_up_leaves_no_trace_on_any(fails, statistics, bucket_bytes, seeds):
    def work(job):
        towers = Towers(make(), 5, job=job, statistics=statistics, bucket_bytes=bucket_bytes)
        take_step(towers, batch_of())
        before = states(), samestep.digest(towers.model), towers.step
        with pytest.raises((BatchError, UsageError, DisagreementError)):
            fails(towers, job, batch_of())
        assert states() == before[0]
        again = take_step(towers, batch_of())
        return before[1:], samestep.digest(towers.model), again.loss

    def undisturbed(job):
        towers = Towers(make(), 5, job=job, statistics=statistics)
        take_step(towers, batch_of())
        before = samestep.digest(towers.model), towers.step
        return before, (take_step(towers, batch_of()), samestep.digest(towers.model))

    ((before, (report, digest)),) = values(undisturbed, 1)
    for seed in seeds:
        assert set(values(work, 3, seed)) == {(before, digest, report.loss)}


def test_after_an_exception_in_a_pass_the_step_is_open_and_cannot_be_averaged():
    towers = Towers(make(), 5)
    an_exception_in_the_body(towers, batch_of())
    with pytest.raises(UsageError, match=r"average\(\) at step 0: towers 1, 2, 3, 4 have not run"):
        towers.average()
    towers(batch_of())
    assert towers.step == 0


def test_one_tower_that_has_not_run():
    towers = Towers(make(), 2)
    turns = towers(batch_of())
    hand_in(towers, next(turns))
    with pytest.raises(UsageError, match=r"average\(\) at step 0: tower 1 has not run: expected each tower"):
        towers.average()
