"""Partial sums across simulated workers, against the tree and the sum that a few lines compute."""

import functools
import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from samestep.errors import DisagreementError, UsageError
from samestep.summation.exchange import Exchange
from samestep.summation.gradient_sum import GradientSum
from samestep.summation.layout import Layout
from samestep.summation.placement import Placement
from samestep.summation.plan import BufferLayout, ParameterLayout, Plan
from samestep.summation.scalars import TowerScalars

from .oracle import add, tree
from .simulation import simulate, values

pytestmark = pytest.mark.sampled(5)

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def placement_of(draw):
    num_towers = draw(st.integers(1, 9))
    inner = draw(st.sets(st.integers(1, max(1, num_towers - 1)), max_size=3)) - {num_towers}
    return Placement((0, *sorted(inner), num_towers))


@st.composite
def problems(draw):
    """A placement, parameters of several kinds, and for each tower a gradient or None for each of them."""
    placement = placement_of(draw)
    shapes = draw(st.lists(st.sampled_from([(), (1,), (3,), (40, 5), (2, 3, 2)]), min_size=1, max_size=5))
    kinds = draw(st.lists(st.sampled_from(DTYPES), min_size=len(shapes), max_size=len(shapes)))
    seed = draw(st.integers(0, 2**20))
    parameters = tuple(
        ParameterLayout(f"p{n}", Layout.of(torch.zeros(shape), dtype), dtype)
        for n, (shape, dtype) in enumerate(zip(shapes, kinds, strict=True))
    )
    used = draw(
        st.lists(
            st.lists(st.booleans(), min_size=len(shapes), max_size=len(shapes)),
            min_size=placement.num_towers,
            max_size=placement.num_towers,
        )
    )
    counts = draw(st.lists(st.integers(0, 5), min_size=len(used), max_size=len(used)))
    bucket_bytes = draw(st.sampled_from([1, 100, 500, 10**6]))
    return placement, parameters, used, counts, bucket_bytes, seed


def gradient_of(parameter, tower, seed):
    generator = torch.Generator().manual_seed(seed + 100 * tower + len(parameter.name))
    exponents = torch.randint(-3, 4, parameter.gradient.shape, generator=generator).double()
    values = torch.randn(parameter.gradient.shape, generator=generator, dtype=torch.float64) * 2**exponents
    return values.to(parameter.gradient.dtype)


def quotient(total, count):
    """The one division, in float32 for half precision."""
    if total is None or count == 1:
        return total
    if total.dtype in (torch.float16, torch.bfloat16):
        return (total.float() / count).to(total.dtype)
    return total / count


def scalars_of(tower, count):
    like = torch.arange(2, dtype=torch.float64)
    return TowerScalars(float(count), like[:1] + tower, like + count, like / 3 + tower)


def exchange_gradients(job, problem):
    """Run the gradients of one worker's towers through a gradient sum and an exchange."""
    placement, layouts, used, counts, bucket_bytes, seed = problem
    plan = Plan.of(placement, layouts, BufferLayout((), 2, 2), bucket_bytes)
    parameters = [torch.zeros(each.gradient.shape, dtype=each.dtype, requires_grad=True) for each in layouts]
    towers = placement.towers(job.rank)
    sums = GradientSum(plan, parameters, towers)
    exchange = Exchange(job, plan, {"step": 3}, flags=lambda: 1 << job.rank)
    sums.start(exchange, measures=False)
    exchange.start([scalars_of(tower, counts[tower]) for tower in towers])
    for tower in towers:
        loss = torch.zeros((), dtype=torch.float64)
        for parameter, layout, is_used in zip(parameters, layouts, used[tower], strict=True):
            if is_used:
                loss = loss + (parameter * gradient_of(layout, tower, seed)).double().sum()
        backward = loss.backward if loss.requires_grad else None
        sums.backward(tower, backward, is_last=tower == towers[-1])
    found = {each.parameter: each.gradient for each in sums.finish()}
    scalars = exchange.scalars
    summed = (scalars.counts.tolist(), scalars.loss_sums[:, 0].tolist(), scalars.counters.sum().item())
    return [found[n] for n in range(len(layouts))], summed, scalars.moments.tolist(), exchange.flags


@settings(deadline=None, max_examples=120)
@given(problems(), st.integers(0, 2**20))
def test_every_worker_gets_the_average_along_the_tree(problem, seed):
    placement, layouts, used, counts, _, gradients_seed = problem
    count = sum(counts) or 1
    expected = []
    for index, layout in enumerate(layouts):
        leaves = [
            gradient_of(layout, tower, gradients_seed) if used[tower][index] else None
            for tower in range(placement.num_towers)
        ]
        expected.append(quotient(tree(leaves, add), count))
    of_towers = [scalars_of(tower, count) for tower, count in enumerate(counts)]
    moments = tree([each.moments for each in of_towers], add).tolist()
    found = values(lambda job: exchange_gradients(job, problem), placement.num_workers, seed)
    for gradients, summed, total, flags in found:
        for gradient, right in zip(gradients, expected, strict=True):
            assert (gradient is None) == (right is None)
            assert gradient is None or (gradient.dtype == right.dtype and torch.equal(gradient, right))
            assert gradient is None or torch.equal(gradient.signbit(), right.signbit())
        assert summed[0] == counts
        assert summed[1] == [float(tower) for tower in range(placement.num_towers)]
        assert summed[2] == sum(2 * count + 1 for count in counts)
        assert total == moments
        assert flags == (1 << placement.num_workers) - 1


# ---- errors ------------------------------------------------------------------------------------------


def plan_of(num_workers, bucket_bytes=100, **kind):
    layouts = tuple(
        ParameterLayout(f"p{n}", Layout((9,), (1,), torch.float32), torch.float32) for n in range(4)
    )
    plan = Plan.of(Placement.even(5, num_workers), layouts, BufferLayout((), 1, 1), bucket_bytes)
    return Plan(plan.placement, plan.parameters, plan.buckets, plan.buffers, **kind)


def nodes_of(plan, rank, bucket):
    return [
        (span, [torch.ones(9) * len(span) for _ in plan.buckets[bucket].parameters])
        for span in plan.spans[rank]
    ]


def scalars_for(plan, rank):
    ones = torch.ones(1, dtype=torch.float64)
    return [TowerScalars(1.0, ones.expand(plan.num_sums), ones, ones) for _ in plan.placement.towers(rank)]


def run(job, plan, *, fails_before=None, must_match=7, error=None):
    """Exchange ones; a worker may fail before it sends one of its buckets."""
    exchange = Exchange(job, plan, {"step": 3, "rows": must_match})
    if plan.sums:
        if fails_before == -1:
            exchange.fail(error)
        num_towers = len(plan.placement.towers(job.rank))
        exchange.compare(torch.ones(num_towers, len(plan.sums), dtype=torch.float64))
    exchange.start(scalars_for(plan, job.rank))
    for bucket in range(len(plan.buckets)):
        if fails_before == bucket:
            exchange.fail(error)
        exchange.send(nodes_of(plan, job.rank, bucket))
    if fails_before == len(plan.buckets):
        exchange.fail(error)
    return exchange.finish([[] for _ in plan.spans[job.rank]])


@pytest.mark.parametrize("sums", [(), ("a", "b")])
@pytest.mark.parametrize("bucket", range(-1, 4))
@pytest.mark.parametrize("seed", range(4))
def test_an_error_before_the_last_bucket_reaches_everybody(bucket, sums, seed):
    if bucket == -1 and not sums:
        return

    def work(job):
        plan = plan_of(job.world_size, bucket_bytes=1, sums=sums)
        assert len(plan.buckets) == 4
        return run(job, plan, fails_before=bucket if job.rank == 1 else None, error=MemoryError("too much"))

    outcomes = simulate(work, 3, seed)
    assert outcomes[1].text == "MemoryError: too much"
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.text == "DisagreementError: step 3: worker 1 failed: MemoryError: too much"


def test_an_error_after_the_last_bucket_is_told_by_its_worker_alone():
    """It has committed to the step: the others have all they need, unless they find that it is gone."""
    num_complete = 0
    for seed in range(20):

        def work(job):
            plan = plan_of(job.world_size, bucket_bytes=10**6)
            return run(job, plan, fails_before=1 if job.rank == 1 else None, error=UsageError("late"))

        outcomes = simulate(work, 3, seed)
        assert outcomes[1].text == "UsageError: late"
        for outcome in (outcomes[0], outcomes[2]):
            assert outcome.error is None or " is gone" in outcome.text
            for _, _, gradient in outcome.value or ():
                assert torch.equal(gradient, torch.ones(9))
                num_complete += 1
    assert num_complete


def test_errors_of_several_workers_are_all_told():
    def work(job):
        plan = plan_of(job.world_size, bucket_bytes=1)
        return run(job, plan, fails_before=job.rank, error=MemoryError(f"on {job.rank}"))

    for rank, outcome in enumerate(simulate(work, 3)):
        assert outcome.error is not None
        assert f"on {rank}" in outcome.text or "failed: MemoryError: on" in outcome.text


@pytest.mark.parametrize("seed", range(4))
def test_numbers_that_must_match_are_compared(seed):
    outcomes = simulate(lambda job: run(job, plan_of(3), must_match=7 + (job.rank == 2)), 3, seed)
    for outcome in outcomes:
        assert outcome.text == "DisagreementError: step 3: worker 2 has rows = 8, the others have 7"


def test_all_may_change_to_another_plan():
    def work(job):
        old, new = plan_of(3), plan_of(3, bucket_bytes=1)
        exchange = Exchange(job, old, {"step": 3})
        exchange.change_to(new)
        return [(index, gradient.tolist()) for index, _, gradient in run(job, new)]

    for found in values(work, 3):
        assert sorted(found) == [(n, [1.0] * 9) for n in range(4)]


@pytest.mark.parametrize("changed", [[1], [0, 2]])
@pytest.mark.parametrize("seed", range(4))
def test_a_plan_that_only_some_change_to_stops_all(changed, seed):
    def work(job):
        old, new = plan_of(3), plan_of(3, sums=("a",))
        if job.rank in changed:
            Exchange(job, old, {"step": 3, "rows": 7}).change_to(new)
            return run(job, new)
        return run(job, old)

    for outcome in simulate(work, 3, seed):
        assert isinstance(outcome.error, DisagreementError)
        assert "has loss = one sum" in outcome.text or "has loss = 'a'" in outcome.text


@pytest.mark.parametrize("seed", range(4))
def test_plans_that_differ_where_nobody_saw_a_change_stop_all(seed):
    """Their messages have the same sizes, so only the fingerprint tells."""

    def work(job):
        layers = (("(model)", "Linear" if job.rank == 1 else "Conv1d"),)
        return run(job, plan_of(job.world_size, layers=layers))

    for outcome in simulate(work, 3, seed):
        assert outcome.text == (
            "DisagreementError: step 3: worker 1 has layer (model) = Linear, the others have Conv1d"
        )


def test_counts_are_gathered_before_the_passes():
    def work(job):
        plan = plan_of(job.world_size, sums=("a", "b"))
        towers = plan.placement.towers(job.rank)
        own = torch.tensor([[tower, 10.0 * tower] for tower in towers], dtype=torch.float64)
        return Exchange(job, plan, {"step": 3}).compare(own).tolist()

    for found in values(work, 3):
        assert found == [[float(tower), 10.0 * tower] for tower in range(5)]


# ---- memory ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [2, 3])
def test_averages_are_given_away(num_workers):
    """No later step writes to what an earlier one has returned."""

    def work(job):
        plan = plan_of(job.world_size)
        first = [each.gradient for each in run(job, plan)]
        copies = [gradient.clone() for gradient in first]
        for gradient in first:
            gradient.mul_(3)
        second = [each.gradient for each in run(job, plan)]
        assert all(torch.equal(gradient, 3 * copy) for gradient, copy in zip(first, copies, strict=True))
        return all(torch.equal(gradient, torch.ones(9)) for gradient in second)

    assert all(values(work, num_workers))


def test_the_transport_never_adds():
    """The bits of a sum that depends on its parentheses are those of the tree, on any placement."""
    leaves = [1.0, 2.0**-24, 2.0**-24, -1.0, 2.0**-25]
    expected = functools.partial(tree, add=lambda left, right: left + right)(
        [torch.tensor(leaf) for leaf in leaves]
    )
    assert not math.isclose(float(expected), sum(leaves), rel_tol=1e-9)

    def work(job):
        placement = Placement.even(5, job.world_size)
        layout = ParameterLayout("p", Layout((1,), (1,), torch.float32), torch.float32)
        plan = Plan.of(placement, (layout,))
        parameter = torch.zeros(1, requires_grad=True)
        sums = GradientSum(plan, [parameter], placement.towers(job.rank))
        exchange = Exchange(job, plan, {"step": 0})
        sums.start(exchange, measures=False)
        towers = placement.towers(job.rank)
        one = torch.zeros(0, dtype=torch.float64)
        exchange.start([TowerScalars(float(t == 0), torch.ones(1), one, one) for t in towers])
        for tower in towers:
            sums.backward(tower, (parameter * leaves[tower]).sum().backward, is_last=tower == towers[-1])
        return {each.parameter: each.gradient for each in sums.finish()}[0]

    for num_workers in range(1, 6):
        assert all(torch.equal(found[0], expected) for found in values(work, num_workers, num_workers))
