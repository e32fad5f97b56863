"""What travels in rounds of its own: buckets cut into shards, sparse gradients; absent ones beside −0.0."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import nn

from samestep import Towers
from samestep.errors import UsageError
from samestep.summation.exchange import Exchange
from samestep.summation.gradient_sum import GradientSum
from samestep.summation.layout import Layout
from samestep.summation.placement import Placement
from samestep.summation.plan import ParameterLayout, Plan
from samestep.summation.scalars import TowerScalars

from .oracle import add, tree
from .simulation import simulate, values
from .test_exchange import quotient

pytestmark = pytest.mark.sampled(5)

CUTS = [(0, 7), (0, 3, 7), (0, 1, 7), (0, 2, 6, 7), (0, 1, 2, 7), (0, 2, 3, 5, 7)]
COUNT = 5.0


def plan_for(shapes, placement, bucket_bytes):
    layouts = [Layout.of(torch.zeros(shape), torch.float32) for shape in shapes]
    parameters = (ParameterLayout(f"p{n}", each, torch.float32) for n, each in enumerate(layouts))
    return Plan.of(placement, tuple(parameters), bucket_bytes=bucket_bytes)


def average(job, plan, gradients, fails_at=None):
    """Return the average of gradients[tower][parameter]; a worker may fail in the turn of a tower."""
    towers = plan.placement.towers(job.rank)
    parameters = [torch.zeros(each.gradient.shape, requires_grad=True) for each in plan.parameters]
    sums, exchange = GradientSum(plan, parameters, towers), Exchange(job, plan, {"step": 3})
    sums.start(exchange, measures=False)
    nothing = torch.zeros(0, dtype=torch.float64)
    exchange.start([TowerScalars(COUNT * (tower == 0), torch.ones(1), nothing, nothing) for tower in towers])
    for tower in towers:
        used = [(p, g) for p, g in zip(parameters, gradients[tower], strict=True) if g is not None]
        loss = sum((p * g).sum() for p, g in used)
        if tower == fails_at:
            parameters[0].register_hook(lambda _: exchange.fail(UsageError("out of luck")))
        sums.backward(tower, loss.backward if used else None, is_last=tower == towers[-1])
    found = {each.parameter: each.gradient for each in sums.finish()}
    return [found[index] for index in range(len(parameters))]


def assert_all_get_the_average_along_the_tree(plan, gradients, seed):
    expected = [quotient(tree(list(leaves), add), COUNT) for leaves in zip(*gradients, strict=True)]
    for found in values(lambda job: average(job, plan, gradients), plan.placement.num_workers, seed):
        for ours, theirs in zip(found, expected, strict=True):
            assert (ours is None) == (theirs is None)
            assert ours is None or torch.equal(ours, theirs)
            assert ours is None or torch.equal(ours.signbit(), theirs.signbit())


# ---- buckets cut into shards -------------------------------------------------------------------------


LARGE = [(70_001,), (3,), (300, 301), (80_000,)]


@pytest.mark.parametrize("bucket_bytes", [1, 400_000, 10**7])
@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_large_buckets_are_averaged_shard_by_shard(cuts, bucket_bytes):
    plan = plan_for(LARGE, Placement(cuts), bucket_bytes)
    assert len(cuts) == 2 or not all(bucket.is_whole for bucket in plan.buckets)
    generator = torch.Generator().manual_seed(bucket_bytes)
    gradients = [
        [
            torch.randn(shape, generator=generator) if (n + tower) % 3 else None
            for n, shape in enumerate(LARGE)
        ]
        for tower in range(7)
    ]
    assert_all_get_the_average_along_the_tree(plan, gradients, seed=1)


@pytest.mark.parametrize("fails_at", [1, 6])
@pytest.mark.parametrize("bucket_bytes", [1, 10**7])
@pytest.mark.parametrize("cuts", [(0, 2, 7), (0, 2, 6, 7)], ids=str)
def test_an_error_reaches_everybody_while_large_buckets_travel(cuts, bucket_bytes, fails_at):
    placement = Placement(cuts)
    plan = plan_for(LARGE, placement, bucket_bytes)
    gradients = [[torch.ones(shape) for shape in LARGE]] * 7
    failing = placement.owner(fails_at)
    for seed in range(3):
        outcomes = simulate(lambda job: average(job, plan, gradients, fails_at), len(cuts) - 1, seed)
        texts = [outcome.text for outcome in outcomes]
        assert texts.pop(failing) == "UsageError: out of luck"
        assert set(texts) == {f"DisagreementError: step 3: worker {failing} failed: out of luck"}


# ---- absent gradients --------------------------------------------------------------------------------


@pytest.mark.long
@settings(max_examples=100)
@given(st.data(), st.sampled_from(CUTS), st.integers(0, 2**20))
def test_an_absent_gradient_does_not_change_the_sign_of_a_zero(data, cuts, seed):
    shapes = [(3,), (2, 2)]
    one = st.sampled_from([None, -0.0, -0.0, 0.0, 1.0])
    drawn = data.draw(st.lists(st.tuples(one, one), min_size=7, max_size=7))
    gradients = [
        [None if v is None else torch.full(shape, v) for v, shape in zip(row, shapes, strict=True)]
        for row in drawn
    ]
    plan = plan_for(shapes, Placement(cuts), 1)
    assert_all_get_the_average_along_the_tree(plan, gradients, seed)


# ---- sparse gradients --------------------------------------------------------------------------------


class Words(nn.Module):
    """Two sparse tables, one of which few rows use, beside a dense layer."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(30, 4, sparse=True)
        self.rare = nn.Embedding(30, 4, sparse=True)
        self.last = nn.Linear(4, 3)

    def forward(self, batch):
        found = self.words(batch["words"]).sum(1)
        is_rare = batch["words"][:, 0] > 24
        if is_rare.any():
            found = found + is_rare[:, None] * self.rare(batch["words"][:, 0])
        return F.cross_entropy(self.last(found), batch["label"])


def stored_gradients(model):
    """All that a gradient stores, as numbers that tell −0.0 from 0.0."""
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if gradient is None:
            yield name, None, None
        elif gradient.is_sparse:
            assert gradient.is_coalesced()
            yield name, gradient.indices().tolist(), gradient.values().view(torch.int32).tolist()
        else:
            yield name, None, gradient.view(torch.int32).tolist()


@pytest.mark.long
@pytest.mark.parametrize("rows", [19, 3, 28])
def test_sparse_gradients_have_the_same_bits_on_any_number_of_workers(rows):
    def work(job):
        torch.manual_seed(6)
        model = Words()
        towers = Towers(model, 7, job=job, bucket_bytes=50)
        found = []
        for step, cuts in enumerate(cuts for cuts in CUTS * 2 if len(cuts) == job.world_size + 1):
            towers.placement = Placement(cuts)
            generator = torch.Generator().manual_seed(step % 2)
            batch = {
                "words": torch.randint(30, (rows, 5), generator=generator),
                "label": torch.randint(3, (rows,), generator=generator),
            }
            for tower in towers(batch):
                tower.backward(model(tower.batch))
            towers.average()
            found.append(list(stored_gradients(model)))
        return found[:2]

    (alone,) = values(work, 1)
    assert any(indices is not None for _, indices, _ in alone[0])
    for num_workers in (2, 3, 4):
        for seed in range(3):
            assert values(work, num_workers, seed) == [alone] * num_workers
