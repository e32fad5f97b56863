"""A step that is abandoned, by whom and wherever, is as if it had not begun: the next bits are the same."""

import contextlib
import functools
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import nn

import samestep
from samestep import AbandonedError, Placement, Towers
from samestep.summation import buckets

from .simulation import simulate, values

STEPS = 3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(9, 4, sparse=True)
        self.norm = nn.BatchNorm1d(4)
        self.linear = nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x):
        hidden = self.norm(self.words(x).mean(1))
        self.seen.mul_(0.5).add_(hidden.detach().mean(0))
        return self.linear(F.dropout(hidden, 0.2))


def words_of(step):
    return torch.randint(9, (15, 2), generator=torch.Generator().manual_seed(step))


def loss_of(model, words):
    return model(words).square().mean()


def train(job, kind="plain", statistics="mean", bucket_bytes=2**20, leave=lambda step, rank, where: False):
    """Train; a worker for which `leave` is true abandons the first attempt at a step at that point."""
    model = Net()
    towers = Towers(
        model, 7, job=job, statistics=statistics, buffers={"seen": "mean"}, bucket_bytes=bucket_bytes
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(STEPS):
        for attempt in (0, 1):
            where = (step, job.rank, attempt)
            try:
                run_towers(towers, kind, step, lambda at, w=where: w[2] == 0 and leave(w[0], w[1], at))
                report = towers.average()
                break
            except (AbandonedError, KeyError):
                assert attempt == 0
                towers.abandon()
                assert all(p.grad is None for p in model.parameters())
        optimizer.step()
        assert report.step == step
    return samestep.digest(model)


def run_towers(towers, kind, step, leaves_at):
    model, words = towers.model, words_of(step)
    counts = {"rows": len} if kind == "counts" else None
    if leaves_at("before") and kind != "whole":
        for _ in towers(words, counts=counts):
            break
        raise KeyError
    if kind == "whole":

        def loss(outputs, batch):
            return outputs.square().mean()

        def forward(part):
            if leaves_at("whole"):
                raise KeyError
            return model(part)

        towers.whole_batch(words, forward, loss)
    else:
        for tower in towers(words, counts=counts):
            if leaves_at(tower.index):
                raise KeyError
            total = loss_of(model, tower.batch)
            tower.backward(total if counts is None else {"rows": total * tower.rows})
    if leaves_at("after"):
        raise KeyError


POINTS = ["before", "whole", "after", *range(7)]


@pytest.fixture(scope="module")
def expected():
    known = {}

    def digest(kind, statistics):
        if (kind, statistics) not in known:
            known[kind, statistics] = values(lambda job: train(job, kind, statistics), 1)[0]
        return known[kind, statistics]

    return digest


@pytest.mark.long
@settings(max_examples=15, deadline=None)
@given(st.data())
def test_whoever_abandons_whatever_step_the_bits_stay(expected, data):
    kind = data.draw(st.sampled_from(["plain", "counts", "whole"]))
    statistics = data.draw(st.sampled_from(["mean", "pooled"]))
    num_workers = data.draw(st.integers(1, 4))
    who = data.draw(
        st.dictionaries(
            st.integers(0, STEPS - 1),
            st.dictionaries(st.integers(0, num_workers - 1), st.sampled_from(POINTS), max_size=num_workers),
        )
    )
    bucket_bytes = data.draw(st.sampled_from([16, 64, 2**20]))
    seed = data.draw(st.integers(0, 99))

    def leave(step, rank, where):
        return who.get(step, {}).get(rank) == where

    def work(job):
        return train(job, kind, statistics, bucket_bytes, leave)

    assert set(values(work, num_workers, seed)) == {expected(kind, statistics)}


def test_the_next_batch_abandons_a_step_that_was_left_open():
    def work(job):
        model = Net()
        towers = Towers(model, 7, job=job, buffers={"seen": "mean"})
        for step in range(2):
            for tower in towers(words_of(step)):
                if tower.index % 2:
                    break
                tower.backward(loss_of(model, tower.batch))
            assert towers.step == step
            for tower in towers(words_of(step)):
                tower.backward(loss_of(model, tower.batch))
            towers.average()
            torch.optim.SGD(model.parameters(), 0.1).step()
        return samestep.digest(model)

    assert len({value for num in (1, 2, 3) for value in values(work, num)}) == 1


def test_a_loop_that_an_error_keeps_open_is_in_nobodys_way():
    first, second = (Towers(Net(), 4, buffers={"seen": "mean"}) for _ in range(2))
    torch.manual_seed(0)
    expected = torch.rand(())
    torch.manual_seed(0)
    loop = first(words_of(0))  # as a notebook keeps the frames of an error
    next(loop)
    for tower in second(words_of(0)):
        tower.backward(loss_of(second.model, tower.batch))
    second.average()
    assert torch.rand(()) == expected
    first.abandon()


def test_abandoning_without_a_step_or_after_the_average_does_nothing():
    model = Net()
    towers = Towers(model, 3, buffers={"seen": "mean"})
    towers.abandon()
    for tower in towers(words_of(0)):
        tower.backward(loss_of(model, tower.batch))
    towers.average()
    towers.abandon()
    assert towers.step == 1
    assert model.linear.weight.grad is not None


def test_an_open_step_is_neither_saved_nor_loaded_into(tmp_path):
    """Its buffers are in the middle of a pass, and other workers wait for its messages."""
    model = Net()
    towers = Towers(model, 3, buffers={"seen": "mean"})
    saved = samestep.save(tmp_path / "before", model=model, towers=towers)
    for _ in towers(words_of(0)):
        break
    with pytest.raises(samestep.UsageError, match=r"cannot save .*after in step 0: call .* abandon"):
        samestep.save(tmp_path / "after", model=model, towers=towers)
    with pytest.raises(samestep.UsageError, match=r"cannot load .*before in step 0: call .* abandon"):
        samestep.load(saved, model=model, towers=towers)
    towers.abandon()
    samestep.save(tmp_path / "after", model=model, towers=towers)


def test_a_step_that_was_abandoned_cannot_be_averaged():
    model = Net()
    towers = Towers(model, 3, buffers={"seen": "mean"})
    for tower in towers(words_of(0)):
        tower.backward(loss_of(model, tower.batch))
    towers.abandon()
    with pytest.raises(samestep.UsageError, match="without a batch"):
        towers.average()


def test_pooled_layers_and_generators_are_as_before():
    model = Net()
    towers = Towers(model, 3, statistics="pooled", buffers={"seen": "mean"})
    before = samestep.digest(model), torch.get_rng_state()
    turns = iter(towers(words_of(0)))
    tower = next(turns)
    tower.backward(loss_of(model, tower.batch))
    assert model.norm.momentum == 1.0
    towers.abandon()
    assert model.norm.momentum == 0.1
    assert not model.norm._forward_hooks
    assert samestep.digest(model) == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert next(turns, None) is None


@pytest.mark.long
def test_other_cuts_after_an_abandoned_step():
    def work(job):
        model = Net()
        towers = Towers(model, 7, job=job, buffers={"seen": "mean"}, bucket_bytes=64)
        for tower in towers(words_of(0)):
            if tower.index == 4:
                towers.abandon()
                break
            tower.backward(loss_of(model, tower.batch))
        with contextlib.suppress(AbandonedError, samestep.UsageError):
            towers.average()
        if job.world_size > 1:
            towers.placement = Placement((0, *range(2, 1 + job.world_size), 7))
        for tower in towers(words_of(0)):
            tower.backward(loss_of(model, tower.batch))
        towers.average()
        torch.optim.SGD(model.parameters(), 0.1).step()
        return samestep.digest(model)

    assert len({value for num in (1, 2, 3) for value in values(work, num)}) == 1


# ---- interrupts inside the exchange ------------------------------------------------------------------


def interrupt():
    raise KeyboardInterrupt


def train_interrupted(job, kind, bucket_bytes, moment, fails):
    """Train; this worker is interrupted once, at some moment of step 1, in which the plan is another one."""
    model = Net()
    towers = Towers(model, 7, job=job, buffers={"seen": "mean"}, bucket_bytes=bucket_bytes)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(STEPS):
        model.linear.bias.requires_grad_(step != 1)
        if step == 1 and moment is not None:
            number, is_after = moment
            job.transport.calls[job.transport.num_events + number, is_after] = interrupt
        for attempt in range(3):
            try:
                here = fails if (step, attempt) == (1, 0) else None
                run_towers(towers, kind, step, lambda at, here=here: at == here)
                towers.average()
                break
            except (KeyboardInterrupt, KeyError, AbandonedError):
                towers.abandon()
        optimizer.step()
    return samestep.digest(model)


@functools.cache
def uninterrupted(kind):
    return values(lambda job: train_interrupted(job, kind, 64, None, None), 1)[0]


@pytest.mark.long
@settings(max_examples=20, deadline=None)
@given(
    st.tuples(st.integers(1, 18), st.booleans()),
    st.sampled_from(["plain", "counts", "whole"]),
    st.sampled_from([16, 64, 2**20]),
    st.sampled_from([None, None, 2, "after"]),
    st.booleans(),
    st.integers(0, 99),
)
def test_an_interrupt_in_an_exchange_ends_the_step_on_all_or_is_said_to_come_too_late(
    moment, kind, bucket_bytes, fails, in_shards, seed
):
    def work(job):
        return train_interrupted(job, kind, bucket_bytes, moment if job.rank == 1 else None, fails)

    expected = uninterrupted(kind)
    with mock.patch.object(buckets, "_SMALL_BYTES", 0 if in_shards else 2**19):
        outcomes = simulate(work, 2 + seed % 2, seed)
    texts = [outcome.text for outcome in outcomes]
    if any(texts):
        assert "was interrupted during an exchange" in texts[1] or texts[1].startswith("KeyboardInterrupt")
        assert all("is gone" in text for text in texts[:1] + texts[2:] if text)
    assert {outcome.value for outcome in outcomes if outcome.error is None} <= {expected}


def test_after_an_error_that_all_workers_meet_at_the_end_the_step_can_be_taken_again():
    """Towers that count differently are found when everything has been sent."""

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(2, 1)
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

        def forward(self, x):
            self.calls += 1
            return self.linear(x)

    def work(job):
        model = Counting()
        towers = Towers(model, 4, job=job)
        batch = torch.randn(8, 2, generator=torch.Generator().manual_seed(0))
        for tower in towers(batch):
            losses = [model(tower.batch).mean() for _ in range(1 + tower.index % 2)]
            tower.backward(losses[0])
        with pytest.raises(samestep.BufferPolicyError, match="integer buffers must count the same"):
            towers.average()
        assert model.linear.weight.grad is None
        assert model.calls == 0
        for tower in towers(batch):
            tower.backward(model(tower.batch).mean())
        assert towers.average().step == 0
        return samestep.digest(model)

    assert len({value for num in (1, 2, 3) for value in values(work, num)}) == 1
