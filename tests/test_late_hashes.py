"""Hashes that are ready one step later, as on a GPU: paired by step, and unknown to workers that join."""

import copy

import pytest
import torch
from torch import nn

import samestep
from samestep import ShardedOptimizer, Towers
from samestep.errors import AbandonedError, DisagreementError, LostWorkerError, UsageError
from samestep.sharding import update
from samestep.watching.model import watched_tensors, weight_hash

from .cases import mostly_long
from .simulation import Faults, simulate, values
from .town import Town, check_outcomes


class LateHashes(weight_hash.Hashes):
    """Computed at once, but not ready until they are asked for."""

    def __init__(self, pieces=()):
        super().__init__(pieces)
        self.is_ready = not pieces

    def by_name(self):
        self.is_ready = True
        return super().by_name()


@pytest.fixture(autouse=True)
def late_hashes(monkeypatch):
    monkeypatch.setattr(weight_hash, "Hashes", LateHashes)
    monkeypatch.setattr(watched_tensors, "Hashes", LateHashes)
    monkeypatch.setattr(update, "Hashes", LateHashes)


def parts(job):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    model.register_buffer("nothing", torch.zeros(0))
    return model, Towers(model, 7, job=job), torch.optim.SGD(model.parameters(), 0.1)


def batch_of(step):
    return torch.randn(14, 4, generator=torch.Generator().manual_seed(step))


def take_step(model, towers, optimizer):
    for tower in towers(batch_of(towers.step)):
        tower.backward(model(tower.batch).square().mean())
    towers.average()
    optimizer.step()


def leaving(job, leavers):
    """Take steps; at its first attempt, step s is left by the worker `leavers[s]`."""
    model, towers, optimizer = parts(job)
    leavers = dict(leavers)
    while towers.step < 6:
        leaver = leavers.pop(towers.step, None)
        try:
            for tower in towers(batch_of(towers.step)):
                tower.backward(model(tower.batch).square().mean())
            if leaver is not None and leaver % job.world_size == job.rank:
                towers.abandon()
                continue
            towers.average()
        except AbandonedError:
            towers.abandon()
            continue
        optimizer.step()
    return samestep.digest(model)


@pytest.mark.long
@pytest.mark.parametrize("num_workers", [3, 1, 2])
@pytest.mark.parametrize("leavers", [{1: 0}, {1: 1, 2: 0}, {0: 2, 3: 1, 4: 1, 5: 0}])
def test_steps_that_are_taken_again_give_no_error(leavers, num_workers):
    expected = values(lambda job: leaving(job, {}), 1)
    assert values(lambda job: leaving(job, leavers), num_workers, num_workers) == expected * num_workers


@pytest.mark.parametrize("num_workers", mostly_long([3, 1, 2], 2))
def test_a_write_through_data_is_found_a_step_later(num_workers):
    def work(job):
        model, towers, optimizer = parts(job)
        for step in range(4):
            for tower in towers(batch_of(step)):
                if step == 1 and tower.index == 0:
                    model[2].bias.data += 1
                tower.backward(model(tower.batch).square().mean())
            towers.average()
            optimizer.step()

    for rank, outcome in enumerate(simulate(work, num_workers, num_workers)):
        assert isinstance(outcome.error, DisagreementError if rank else UsageError)
        assert "step 1: a pass wrote to 2.bias" in outcome.text


@pytest.mark.parametrize("num_workers", mostly_long([3, 2], 1))
def test_weights_that_differ_are_found_a_step_later(num_workers):
    def work(job):
        model, towers, optimizer = parts(job)
        while towers.step < 4:
            take_step(model, towers, optimizer)
            if towers.step == 2 and job.rank == 1:
                model[0].weight.data[0, 0] += 1

    for outcome in simulate(work, num_workers, num_workers):
        assert isinstance(outcome.error, DisagreementError)
        assert "step 3: worker " in outcome.text
        assert "hash of the weights in 0.weight" in outcome.text


def sharded(job, failing=None):
    """Take steps; at step 2 the update fails on the worker `failing`, and all go back to the state before."""
    model, towers, _ = parts(job)
    optimizer = ShardedOptimizer(towers, torch.optim.AdamW, lr=0.1)
    num_parameters = len(optimizer.param_groups[0]["params"])
    while towers.step < 5:
        before = copy.deepcopy([model.state_dict(), towers.state_dict(), optimizer.state_dict()])
        for tower in towers(batch_of(towers.step)):
            tower.backward(model(tower.batch).square().mean())
        towers.average()
        if towers.step == 3 and failing == job.rank:
            optimizer.param_groups[0]["params"].append(torch.zeros(1))
        if towers.step != 3 or failing is None:
            optimizer.step()
            continue
        for match in (
            None,
            "step 2, the update failed, after some workers had" if job.world_size > 1 else None,
        ):
            with pytest.raises((UsageError, DisagreementError), match=match):
                optimizer.step()
        del optimizer.param_groups[0]["params"][num_parameters:]
        for each, state in zip((model, towers, optimizer), before, strict=True):
            each.load_state_dict(state)
        failing = None
    return samestep.digest(model)


@pytest.mark.long
@pytest.mark.parametrize("num_workers", [3, 1, 2])
def test_an_update_that_failed_on_one_worker_gives_no_error_after_a_checkpoint_is_loaded(num_workers):
    expected = values(sharded, 1)
    for failing in range(num_workers):
        found = values(lambda job, failing=failing: sharded(job, failing), num_workers)
        assert found == expected * num_workers


def elastic(job):
    model, towers, optimizer = parts(job)
    with samestep.Elastic(model=model, towers=towers, optimizer=optimizer) as elastic:
        while towers.step < 6:
            elastic(take_step, model, towers, optimizer)
    return samestep.digest(model)


@pytest.mark.sampled
@pytest.mark.parametrize("seed", mostly_long(range(20), 4))
def test_workers_that_join_do_not_know_the_step_before(seed):
    town = Town(3, seed, Faults(killed={seed % 3: 12 + seed}), arrivals=[seed * 20])
    check_outcomes(town, elastic, LostWorkerError)  # of a newcomer that comes too late
