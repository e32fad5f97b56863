"""What a worker does with its gradients: when hooks send, what is kept, what is refused."""

import gc
import math
import weakref

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import samestep
from samestep.errors import UsageError
from samestep.summation.gradient_sum import GradientSum
from samestep.summation.layout import Layout
from samestep.summation.placement import Placement
from samestep.summation.plan import ParameterLayout, Plan
from samestep.summation.tree import subtrees

from .oracle import add, tree
from .simulation import values


class Recorder:
    """An exchange that notes what is sent, and when."""

    where = "step 3"

    def __init__(self, events=None):
        self.events = [] if events is None else events
        self.sent = []
        self.sparse = None

    def send(self, nodes):
        self.events.append(f"bucket {len(self.sent)}")
        self.sent.append(nodes)

    def finish(self, sparse):
        self.sparse = sparse
        return "finished"

    def fail(self, error):
        raise error


def parameters_of(*shapes, dtype=torch.float32):
    return [torch.ones(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def plan_of(parameters, placement, bucket_bytes=1, sparse=(), summed=None):
    layouts = tuple(
        ParameterLayout(f"p{n}", Layout.of(p, summed or p.dtype), p.dtype, n in sparse)
        for n, p in enumerate(parameters)
    )
    return Plan.of(placement, layouts, bucket_bytes=bucket_bytes)


def run(parameters, plan, worker, loss_of, *, measures=False, with_rows=None):
    """Run one worker's towers; return its sum and the exchange."""
    towers = plan.placement.towers(worker)
    with_rows = towers if with_rows is None else with_rows
    sums, exchange = GradientSum(plan, parameters, towers), Recorder()
    sums.start(exchange, measures=measures)
    for tower in with_rows:
        loss = loss_of(tower)
        sums.backward(tower, None if loss is None else loss.backward, is_last=tower == with_rows[-1])
    assert sums.finish() == "finished"
    return sums, exchange


def leaf(tower, index):
    """The gradient of a tower: numbers whose sum depends on the parentheses; None for some."""
    generator = torch.Generator().manual_seed(31 * tower + index)
    if float(torch.rand((), generator=generator)) < 0.3:
        return None
    return torch.randn(5, generator=generator) * 2.0 ** (tower % 5)


def loss_of_leaves(parameters):
    def loss(tower):
        pairs = [(p, leaf(tower, n)) for n, p in enumerate(parameters)]
        parts = [(p * g).sum() for p, g in pairs if g is not None]
        return sum(parts) if parts else None

    return loss


@st.composite
def placements(draw):
    num_towers = draw(st.integers(1, 12))
    cuts = draw(st.sets(st.integers(1, max(1, num_towers - 1)), max_size=3)) - {num_towers}
    return Placement((0, *sorted(cuts), num_towers))


def bits(gradient):
    return None if gradient is None else gradient.view(torch.int32).tolist()


@given(placements(), st.integers(0, 3), st.sampled_from([1, 40, 1000]), st.integers(0, 12))
def test_what_is_sent_are_the_sums_of_whole_subtrees(placement, worker, bucket_bytes, num_with_rows):
    """With and without norms; the last towers may have no rows."""
    worker %= placement.num_workers
    towers = placement.towers(worker)
    with_rows = towers[: max(1, num_with_rows)]
    for measures in (False, True):
        parameters = parameters_of(5, 5, 5)
        plan = plan_of(parameters, placement, bucket_bytes)
        loss = loss_of_leaves(parameters)
        _, exchange = run(parameters, plan, worker, loss, measures=measures, with_rows=with_rows)
        assert len(exchange.sent) == len(plan.buckets)
        for bucket, nodes in zip(plan.buckets, exchange.sent, strict=True):
            assert [span for span, _ in nodes] == subtrees(towers, placement.num_towers)
            for span, gradients in nodes:
                for index, gradient in zip(bucket.parameters, gradients, strict=True):
                    leaves = [leaf(t, index) if t in with_rows else None for t in span]
                    assert bits(gradient) == bits(tree(leaves, add))
        assert all(p.grad is None for p in parameters)


# ---- hooks -------------------------------------------------------------------------------------------


class Noted(torch.autograd.Function):
    """Notes when backward comes by."""

    @staticmethod
    def forward(ctx, x, events, name):
        ctx.events, ctx.name = events, name
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.events.append(ctx.name)
        return gradient, None, None


def test_a_bucket_is_sent_as_soon_as_backward_has_it():
    events, exchange = [], None
    parameters = parameters_of(2, 2, 2)
    plan = plan_of(parameters, Placement.even(4, 2))
    sums, exchange = GradientSum(plan, parameters, range(2)), Recorder(events)
    sums.start(exchange, measures=False)
    for tower in range(2):
        hidden = torch.ones(2)
        for n, parameter in enumerate(parameters):
            hidden = Noted.apply(hidden * parameter, events, f"p{n}")
        sums.backward(tower, hidden.sum().backward, is_last=tower == 1)
    assert events == ["p2", "p1", "p0", *("p2", "bucket 0", "p1", "bucket 1", "p0")]
    sums.finish()  # which sends the last one: from then on the worker has committed to the step
    assert events[-1] == "bucket 2"
    assert len(exchange.sent) == 3


def test_buckets_go_in_their_order_whatever_the_order_of_backward():
    """The last parameter, in the first bucket, is used first, and gets its gradient last."""
    events = []
    parameters = parameters_of(2, 2, 2)
    plan = plan_of(parameters, Placement.even(2, 2))
    sums = GradientSum(plan, parameters, range(1))
    sums.start(Recorder(events), measures=False)
    hidden = torch.ones(2)
    for n in (2, 1, 0):
        hidden = Noted.apply(hidden * parameters[n], events, f"p{n}")
    sums.backward(0, hidden.sum().backward, is_last=True)
    assert events == ["p0", "p1", "p2", "bucket 0", "bucket 1"]


def test_a_job_of_one_worker_has_no_hooks_and_close_removes_those_of_many():
    for num_workers in (1, 2):
        parameters = parameters_of(2, 3)
        sums = GradientSum(plan_of(parameters, Placement.even(2, num_workers)), parameters, range(1))
        found = [len(p._post_accumulate_grad_hooks or {}) for p in parameters]
        assert found == [num_workers - 1] * 2
        sums.close()
        assert not any(p._post_accumulate_grad_hooks for p in parameters)


def test_hooks_do_nothing_outside_the_last_towers_backward():
    parameters = parameters_of(2)
    sums = GradientSum(plan_of(parameters, Placement.even(4, 2)), parameters, range(2))
    exchange = Recorder()
    sums.start(exchange, measures=False)
    for tower in range(2):
        sums.backward(tower, parameters[0].sum().backward, is_last=tower == 1)
    sums.finish()
    parameters[0].sum().backward()
    assert len(exchange.sent) == 1
    assert parameters[0].grad.tolist() == [1, 1]


# ---- memory ------------------------------------------------------------------------------------------


def alive_at_most(num_towers, *, measures=False):
    """Run all towers on one worker; count the gradients that the sum holds, p.grad's included."""
    (parameter,) = parameters_of(3)
    sums = GradientSum(plan_of([parameter], Placement.even(num_towers, 1)), [parameter], range(num_towers))
    sums.start(Recorder(), measures=measures)
    most = 0
    for tower in range(num_towers):
        before = []

        def backward(before=before):
            before.append(len(sums._dense.nodes) + 1)  # and the one that is being made, or added to
            parameter.sum().backward()

        sums.backward(tower, backward, is_last=tower == num_towers - 1)
        most = max(most, *before)
    return most


@pytest.mark.parametrize("num_towers", range(1, 34))
def test_few_gradients_are_alive(num_towers):
    bound = math.ceil(math.log2(num_towers)) + 1
    assert alive_at_most(num_towers, measures=True) <= bound
    assert alive_at_most(num_towers) <= bound


def test_a_siblings_sum_is_put_back_on_the_parameter():
    """Autograd adds to it in place, so no other gradient is alive; not where the dtype is another one."""
    for summed, are_put_back in ((torch.float32, [False, True, False, True]), (torch.float64, [False] * 4)):
        (parameter,) = parameters_of(3)
        plan = plan_of([parameter], Placement.even(4, 1), summed=summed)
        sums = GradientSum(plan, [parameter], range(4))
        sums.start(exchange := Recorder(), measures=False)
        seen = []
        for tower in range(4):

            def backward(parameter=parameter, seen=seen):
                seen.append(parameter.grad is not None)
                parameter.sum().backward()

            sums.backward(tower, backward, is_last=tower == 3)
        assert seen == are_put_back
        sums.finish()
        ((_, (total,)),) = exchange.sent[0]
        assert total.tolist() == [4, 4, 4]
        assert total.dtype == summed


# ---- norms -------------------------------------------------------------------------------------------


def test_norms_are_those_of_each_towers_own_gradient():
    parameters = parameters_of(5, 5, 5)
    plan = plan_of(parameters, Placement.even(7, 2))
    sums, _ = run(parameters, plan, 0, loss_of_leaves(parameters), measures=True, with_rows=range(3))
    expected = []
    for tower in range(4):
        leaves = [leaf(tower, n) for n in range(3)] if tower < 3 else []
        expected.append(sum(float(g.norm()) ** 2 for g in leaves if g is not None))
    assert sums.squares().tolist() == pytest.approx(expected, rel=1e-6)
    assert sums.squares().dtype == torch.float64


def test_a_step_that_does_not_measure_has_no_norms():
    parameters = parameters_of(5)
    sums, _ = run(parameters, plan_of(parameters, Placement.even(1, 1)), 0, loss_of_leaves(parameters))
    assert sums.squares() is None


# ---- sparse and refused ones -------------------------------------------------------------------------


def embed(table, *ids):
    return F.embedding(torch.tensor(ids), table, sparse=True).sum()


def test_sparse_gradients_are_folded_apart_and_finish_last():
    table, weight = parameters_of((4, 2), 3)
    plan = plan_of([table, weight], Placement((0, 3, 5)), sparse=(0,))

    def loss(tower):
        return weight.sum() + embed(table, tower, tower) if tower != 1 else weight.sum()

    _, exchange = run([table, weight], plan, 0, loss)
    (first,), (second,) = exchange.sparse
    assert first.is_coalesced()
    assert first.indices().tolist() == [[0]]
    assert first.values().tolist() == [[2, 2]]
    assert second.indices().tolist() == [[2]]
    assert [span for span, _ in exchange.sent[0]] == [range(2), range(2, 3)]


@pytest.mark.parametrize("tower", [0, 1])
def test_a_sparse_gradient_that_is_not_expected_is_refused_by_name(tower):
    weight, table = parameters_of(3, (4, 2))
    plan = plan_of([weight, table], Placement.even(4, 2))
    with pytest.raises(UsageError, match=r"^step 3: p1 got a sparse gradient, which was not expected: list"):
        run([weight, table], plan, 0, lambda t: weight.sum() + (embed(table, 1) if t == tower else 0))


def test_a_gradient_that_comes_twice_after_its_bucket_was_sent_is_refused():
    first, weight, other = parameters_of(3, 3, 3)

    def loss(tower):
        def twice(x):
            return x * weight

        x = checkpoint(twice, other * first, use_reentrant=True)
        return checkpoint(twice, x, use_reentrant=True).sum()

    parameters = [first, other, weight]
    with pytest.raises(UsageError, match=r"^step 3: parameter p2 got a gradient twice in one backward"):
        run(parameters, plan_of(parameters, Placement.even(2, 2)), 0, loss)
    # A worker alone sends nothing early, so it need not refuse.
    run(parameters, plan_of(parameters, Placement.even(2, 1)), 0, loss)


def test_what_its_hooks_are_on_is_let_go_of():
    def work(job):
        model = nn.Linear(2, 1)
        towers = samestep.Towers(model, 4, job=job)
        for tower in towers(torch.ones(8, 2)):
            tower.backward(model(tower.batch).mean())
        towers.average()
        return weakref.ref(model.weight)

    weights = values(work, 2)
    gc.collect()
    assert [weight() for weight in weights] == [None, None]
