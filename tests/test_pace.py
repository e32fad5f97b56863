"""Towers that move to faster workers: the same cuts everywhere, worth their change, and never other bits."""

import random
from itertools import combinations, islice
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from samestep import Towers, digest
from samestep.errors import AbandonedError, ConfigError, DisagreementError
from samestep.summation.placement import Placement
from samestep.towers import pace
from samestep.towers.pace import Pace, fastest, slowest_ns
from samestep.workers import stopwatch
from samestep.workers.stopwatch import Stopwatch

from .cases import mostly_long
from .simulation import simulate, values

TIMES = st.lists(st.integers(1, 10**10), min_size=1, max_size=4)
MS = 10**6


# ---- cuts ------------------------------------------------------------------------------------------


@given(TIMES, st.integers(0, 4), st.integers(0, 10**10))
def test_no_cuts_are_faster(tower_ns, more, subtree_ns):
    num_towers = len(tower_ns) + more
    inner = combinations(range(1, num_towers), len(tower_ns) - 1)
    best = min(slowest_ns(Placement((0, *cuts, num_towers)), tower_ns, subtree_ns) for cuts in inner)
    assert slowest_ns(fastest(tower_ns, num_towers, subtree_ns), tower_ns, subtree_ns) == best


@settings(max_examples=30)
@given(TIMES, st.integers(0, 300))
def test_no_shares_of_many_towers_are_faster(tower_ns, more):
    num_towers = len(tower_ns) + more
    shares = [1] * len(tower_ns)
    for _ in range(more):  # the next tower goes where it is done first
        worker = min(range(len(shares)), key=lambda w: (shares[w] + 1) * tower_ns[w])
        shares[worker] += 1
    expected = max(share * ns for share, ns in zip(shares, tower_ns, strict=True))
    assert slowest_ns(fastest(tower_ns, num_towers), tower_ns) == expected


@pytest.mark.long
def test_whole_subtrees_are_preferred_where_they_cost_no_time():
    assert fastest([10, 10], num_towers=9).cuts == (0, 4, 9)  # 1 + 2 subtrees, not 2 + 3
    assert fastest([10, 11], num_towers=9).cuts == (0, 5, 9)
    assert fastest([10, 11], num_towers=9, subtree_ns=20).cuts == (0, 4, 9)
    assert fastest([1] * 64, num_towers=2**16).num_workers == 64


# ---- what is followed --------------------------------------------------------------------------------


def cuts_of(times, *, placement=None, rows=1200, step_ns=700 * MS, follower=None):
    """Return the cuts after each step whose workers have these times a tower, in any unit."""
    placement = placement or Placement.even(12, len(times[0]))
    follower, found = follower or Pace(), []
    before = [0] * len(times[0])
    for now in times:
        own = [rows * len(towers) // 12 for towers in placement.ranges]
        placement = follower.follow(placement, own, before)
        before = [time * len(towers) * step_ns for time, towers in zip(now, placement.ranges, strict=True)]
        found.append(placement.cuts)
    return found


def test_half_the_speed_is_followed_after_eight_stretches_and_back_again():
    found = cuts_of([(1, 2)] * 20 + [(1, 1)] * 20)  # from 16 to 24 there is too little of either
    assert found == [(0, 6, 12)] * 8 + [(0, 8, 12)] * 24 + [(0, 6, 12)] * 8


def test_many_short_steps_are_one_stretch():
    found = cuts_of([(1, 2)] * 200, step_ns=5 * MS)
    ends = [step for step, cuts in enumerate(found) if cuts == (0, 8, 12)]
    assert ends[0] == 8 * 10  # stretches of ten steps of 60 ms, from the second step on


@pytest.mark.long
@given(st.integers(0, 10**6), st.integers(2, 4))
def test_noise_is_not_followed(seed, num_workers):
    chance = random.Random(seed)
    times = [[chance.randint(95, 105) for _ in range(num_workers)] for _ in range(40)]
    assert set(cuts_of(times)) == {Placement.even(12, num_workers).cuts}


def test_a_load_that_goes_elsewhere_is_not_followed():
    assert set(cuts_of([(1, 2), (2, 1)] * 40)) == {(0, 6, 12)}
    assert set(cuts_of([(1, 1)] * 5 + [(1, 100)] * 2 + [(1, 1)] * 30)) == {(0, 6, 12)}


def test_less_than_a_twentieth_is_not_followed():
    follower, even = Pace(), Placement.even(1000, 2)
    for _ in range(40):
        assert follower.follow(even, (500, 500), (100 * 10**9, 108 * 10**9)) is even
    for _ in range(9):
        found = follower.follow(even, (500, 500), (100 * 10**9, 112 * 10**9))
        if found is not even:
            assert len(found.towers(0)) in range(525, 532)
            return
    raise AssertionError


def test_steps_of_which_a_time_is_missing_do_not_count():
    known = cuts_of([(1, 2)] * 9)
    assert known[-1] == (0, 8, 12)
    follower, even = Pace(), Placement.even(12, 2)
    for rows, pass_ns in [((9, 0), (9, 9)), ((9, 9), (9, 9)), ((9, 9), (0, 9)), ((0, 9), (0, 9))] * 30:
        assert follower.follow(even, rows, [ns * 10**9 for ns in pass_ns]) is even


def test_other_workers_are_measured_afresh():
    follower = Pace()
    cuts_of([(1, 2, 2)] * 7, follower=follower)
    found = cuts_of([(1, 2)] * 10, follower=follower)
    assert found == [(0, 6, 12)] * 8 + [(0, 8, 12)] * 2


def test_rows_count_not_towers():
    """A worker whose towers have twice the rows is not slow, because it takes twice as long."""
    follower, even = Pace(), Placement.even(12, 2)
    for _ in range(40):
        assert follower.follow(even, (200, 100), (2 * 10**9, 10**9)) is even


# ---- a step's time -----------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    """One clock for all workers, which goes on in passes only. Nobody waits."""
    clock = SimpleNamespace(ns=0, perf_counter_ns=lambda: clock.ns)
    monkeypatch.setattr(stopwatch, "time", clock)
    monkeypatch.setattr(pace, "_STRETCH_NS", 0)
    return clock


def test_a_stopwatch_stands_still_while_it_is_paused(clock):
    watch = Stopwatch(torch.device("cpu"))
    with watch.paused():
        clock.ns += 1
    for _ in range(2):
        watch.start()
        watch.start()
        clock.ns += 10
        with watch.paused():
            clock.ns += 100
        clock.ns += 1000
        watch.stop()
        clock.ns += 10000
    assert watch.read_ns() == 2 * 1010


def a_net():
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3))


def train(job, clock, slowness, placement="auto", steps=30, each_step=lambda step, model, job: None):
    """Take steps of all kinds; return the digest, and each one's cuts and the pass time before it."""
    model, generator = a_net(), torch.Generator().manual_seed(1)
    towers = Towers(model, 7, job=job, placement=placement, bucket_bytes=60)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for step in range(steps):
        each_step(step, model, job)
        batch = torch.randn((14, 9, 5)[step % 5 % 3], 5, generator=generator)
        kind = step % 4
        seen.append((towers.placement.cuts, towers._placing.pass_ns))

        def loss_of(output, step=step):
            clock.ns += MS * slowness(job.rank, step)
            return output.square().mean()

        if kind == 3:
            spread = lambda outputs, batch: outputs.std(0).sum()  # noqa: E731
            towers.whole_batch(batch, lambda x: (loss_of(x), model(x))[1], spread)
        else:
            counts = {"rows": len} if kind == 2 else None
            turns = towers(batch, counts=counts)
            if kind == 1:
                turns = islice(turns, len(towers._run.local.slices))  # which ends before `turns` does
            for tower in turns:
                loss = loss_of(model(tower.batch))
                tower.backward({"rows": loss * tower.rows} if counts else loss)
        clock.ns += MS * (kind != 1)
        towers.average()
        clock.ns += MS
        optimizer.step()
        optimizer.zero_grad()
    return digest(model), seen


@pytest.mark.long
def test_the_passes_are_timed_and_not_what_they_wait_for(clock):
    runs = values(lambda job: train(job, clock, lambda rank, step: 1 + rank, "even", 12), 3)
    for rank, (_, seen) in enumerate(runs):
        for step, (cuts, pass_ns) in enumerate(seen[1:]):
            rows = (14, 9, 5)[step % 5 % 3]
            towers = [tower for tower in range(cuts[rank], cuts[rank + 1]) if tower < rows]
            assert pass_ns == len(towers) * (1 + rank) * MS


@pytest.mark.parametrize("num_workers", mostly_long([3, 2], 1))
def test_towers_leave_a_slow_worker_and_the_bits_stay(clock, num_workers):
    def slow_then_fast(rank, step):
        return 5 if rank == 1 and step < 20 else 2

    def work(job):
        return train(job, clock, slow_then_fast, steps=44)

    ((expected, _),) = values(work, 1)
    runs = values(work, num_workers, seed=num_workers)
    assert [found for found, _ in runs] == [expected] * num_workers
    cuts = [[cuts for cuts, _ in seen] for _, seen in runs]
    assert cuts == [cuts[0]] * num_workers
    assert [*dict.fromkeys(cuts[0])][:2] == {
        2: [(0, 4, 7), (0, 5, 7)],
        3: [(0, 3, 5, 7), (0, 3, 4, 7)],
    }[num_workers]
    # Of three workers one runs three towers in any case.
    assert (cuts[0][-1] != cuts[0][18]) == (num_workers == 2)


@pytest.mark.long
@pytest.mark.parametrize("num_workers", [2, 3])
def test_whoever_is_slow_when_the_bits_stay(clock, monkeypatch, num_workers):
    monkeypatch.setattr(pace, "_NUM_STRETCHES", 1)
    monkeypatch.setattr(pace, "_NUM_FASTER", 1)
    times = [
        [random.Random(f"{rank} {step}").choice((1, 1, 4, 9)) for step in range(40)] for rank in range(3)
    ]

    def thaw(step, model, job):
        model[0].requires_grad_(step % 3 > 0)  # a new plan at many a step, with new cuts or without

    def work(job):
        return train(job, clock, lambda rank, step: times[rank][step], each_step=thaw)

    ((expected, _),) = values(work, 1)
    runs = values(work, num_workers, seed=num_workers)
    assert [found for found, _ in runs] == [expected] * num_workers
    assert len({cuts for cuts, _ in runs[0][1]}) > 3


@pytest.mark.long
def test_an_abandoned_step_does_not_count(clock):
    """Worker 1 leaves each third step; all take it again, and move the same towers at the same step."""

    def work(job, leaves=True):
        model = a_net()
        towers = Towers(model, 7, job=job, placement="auto")
        cuts, attempt = [], 0
        while towers.step < 24:
            attempt += 1
            is_left = leaves and attempt % 3 == 2
            batch = torch.randn(14, 5, generator=torch.Generator().manual_seed(towers.step))
            try:
                for tower in towers(batch):
                    clock.ns += MS * (1 + 2 * (job.rank == 1)) * (50 if is_left else 1)
                    tower.backward(model(tower.batch).square().mean())
                    if is_left and job.rank == 1:
                        towers.abandon()
                        break
                else:
                    towers.average()
                    with torch.no_grad():
                        model[0].weight -= 0.1 * model[0].weight.grad
                    cuts.append(towers.placement.cuts)
            except AbandonedError:
                towers.abandon()
        return digest(model), cuts

    expected = values(lambda job: work(job, leaves=False), 2)
    assert expected[0] == expected[1]
    assert (0, 6, 7) in expected[0][1]
    assert values(work, 2, seed=1) == expected


@pytest.mark.long
def test_a_placement_set_by_hand_stays_until_it_is_auto_again(clock):
    def work(job):
        model = a_net()
        towers = Towers(model, 7, job=job, placement=Placement((0, 2, 7)))
        found = []
        for step in range(60):
            if step in (10, 30, 40):
                towers.placement = {10: "auto", 30: "even", 40: Placement((0, 6, 7))}[step]
            found.append(towers.placement.cuts)
            for tower in towers(torch.ones(14, 5)):
                clock.ns += MS
                tower.backward(model(tower.batch).square().mean())
            towers.average()
        return found

    for found in values(work, 2):
        expected = [*[(0, 2, 7)] * 19, *[(0, 4, 7)] * 11, *[(0, 4, 7)] * 10, *[(0, 6, 7)] * 20]
        assert found == expected


def test_placements_that_differ_or_do_not_exist_are_refused_by_name():
    outcomes = simulate(lambda job: Towers(a_net(), 7, job=job, placement=["even", "auto"][job.rank]), 2)
    for outcome in outcomes:
        assert isinstance(outcome.error, DisagreementError)
        assert "placement = " in outcome.text
    with pytest.raises(ConfigError, match=r"^placement = 'fast': expected 'even', 'auto', or a samestep\.Pl"):
        Towers(a_net(), 7).placement = "fast"
    with pytest.raises(ConfigError, match=r"^placement has 7 towers on 2 workers: expected 7 on 1$"):
        Towers(a_net(), 7, placement=Placement((0, 2, 7)))
