import copy
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from torch import nn

import samestep
from samestep import Step, Towers
from samestep.errors import ConfigError, NonFiniteError, UsageError
from samestep.summation.buckets import lay_out_buckets
from samestep.summation.layout import Layout
from samestep.summation.sparse import add, empty, find_sparse, measure, stored, tensors_of

from .cases import mostly_long
from .integration.placements.batches import texts
from .integration.placements.models import Words
from .integration.placements.sparse import layout
from .nets import loss_of, sparse_tensor

ROWS, WIDTH = 6, 2


def sparse(rows, values=None, num_rows=ROWS):
    values = torch.ones(len(rows), WIDTH) if values is None else torch.tensor(values).reshape(-1, WIDTH)
    return sparse_tensor(rows, values, (num_rows, WIDTH))


def same_bits(left, right):
    return torch.equal(left, right) and torch.equal(left.signbit(), right.signbit())


# ---- one tower's and two towers' gradients ---------------------------------------------------------


@st.composite
def sparse_towers(draw):
    """Towers' gradients, some None, some with the same row twice; and weights."""
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    lists = draw(st.lists(st.none() | st.lists(st.integers(0, ROWS - 1), max_size=9), min_size=1, max_size=9))
    towers = [
        None if rows is None else sparse(rows, torch.randn(len(rows), WIDTH, generator=random).tolist())
        for rows in lists
    ]
    return towers, [draw(st.integers(1, 9)) for _ in towers]


def twin(leaves):
    """The sum along the canonical tree of gradients that were made dense; None adds nothing."""
    if len(leaves) == 1:
        return leaves[0]
    middle = 1 << (len(leaves) - 1).bit_length() - 1
    left, right = twin(leaves[:middle]), twin(leaves[middle:])
    if left is None or right is None:
        return right if left is None else left
    return left + right


@given(sparse_towers())
def test_the_average_has_the_values_of_the_dense_twin(towers_and_weights):
    towers, weights = towers_and_weights
    parameter = torch.zeros(ROWS, WIDTH)
    before = [None if g is None else (g._indices().clone(), g._values().clone()) for g in towers]
    [(average, _)] = samestep.average_gradients([[(gradient, parameter)] for gradient in towers], weights)
    leaves = [
        None if g is None else g.coalesce().to_dense() * w for g, w in zip(towers, weights, strict=True)
    ]
    expected = twin(leaves)
    if expected is None:
        assert average is None
        return
    assert average.is_sparse
    assert average.is_coalesced()
    assert torch.equal(average.to_dense(), expected / sum(weights))
    assert average._nnz() == len({row for g in towers if g is not None for row in g._indices()[0].tolist()})
    truth = sum(
        g.to_dense().double() * w for g, w in zip(towers, weights, strict=True) if g is not None
    ) / sum(weights)
    assert torch.allclose(average.to_dense().double(), truth, rtol=1e-5, atol=1e-6)
    for gradient, was in zip(towers, before, strict=True):
        if gradient is not None:
            assert torch.equal(gradient._indices(), was[0])
            assert torch.equal(gradient._values(), was[1])


def test_a_row_that_one_of_two_has_keeps_its_bits():
    left, right = sparse([1, 3], [-0.0, 1.0, -0.0, 2.0]), sparse([3, 4], [-0.0, 1.0, -0.0, 3.0])
    total = add(left.coalesce(), right.coalesce())
    assert total.indices().tolist() == [[1, 3, 4]]
    assert same_bits(total.values(), torch.tensor([[-0.0, 1.0], [-0.0, 3.0], [-0.0, 3.0]]))


def test_sparse_and_dense_make_dense_in_either_order():
    gradient, dense = sparse([4, 1, 4]).coalesce(), torch.full((ROWS, WIDTH), 10.0)
    expected = dense + gradient.to_dense()
    assert torch.equal(add(gradient, dense), expected)
    assert torch.equal(dense, torch.full((ROWS, WIDTH), 10.0))
    total = add(dense, gradient)
    assert total is dense
    assert torch.equal(total, expected)


def test_gradients_with_other_sparse_dimensions_make_dense():
    weight = torch.zeros(ROWS, WIDTH, requires_grad=True)
    torch.gather(weight, 1, torch.tensor([[0], [1], [1], [0], [0], [0]]), sparse_grad=True).sum().backward()
    entries, rows = weight.grad.coalesce(), sparse([2]).coalesce()
    assert entries.sparse_dim() == 2
    assert torch.equal(add(rows, entries), rows.to_dense() + entries.to_dense())
    assert torch.equal(add(entries, entries).to_dense(), 2 * entries.to_dense())


@pytest.mark.parametrize(
    "gradient",
    [
        None,
        torch.randn(ROWS, WIDTH),
        sparse([]).coalesce(),
        sparse([2, 5, 2], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]).coalesce(),
        torch.eye(ROWS)[:, :WIDTH].to_sparse(),
    ],
    ids=["absent", "dense", "empty", "rows", "entries"],
)
def test_a_gradient_arrives_in_the_memory_made_for_its_size(gradient):
    layout = Layout((ROWS, WIDTH), (WIDTH, 1), torch.float32)
    arrived = empty(layout, measure(gradient), torch.device("cpu"))
    for to_fill, part in zip(tensors_of(arrived), tensors_of(gradient), strict=True):
        to_fill.copy_(part)
    if gradient is None:
        assert arrived is None
        return
    assert arrived.is_sparse == gradient.is_sparse
    assert not gradient.is_sparse or arrived.is_coalesced()
    assert measure(arrived) == measure(gradient)
    assert torch.equal(stored(arrived), stored(gradient))
    assert torch.equal(arrived.to_dense(), gradient.to_dense())


# ---- which parameters ------------------------------------------------------------------------------


def test_weights_of_sparse_embeddings_are_found_once_and_others_must_be_listed():
    model = nn.ModuleDict(
        {
            "dense": nn.Embedding(3, 2),
            "frozen": nn.Embedding(3, 2, sparse=True).requires_grad_(False),
            "bag": nn.EmbeddingBag(3, 2, sparse=True),
            "head": nn.Linear(2, 3),
            "tied": nn.Embedding(3, 2, sparse=True),
        }
    )
    model["tied"].weight = model["head"].weight
    assert find_sparse(model, []) == ["bag.weight", "head.weight"]
    assert find_sparse(model, [model["dense"].weight]) == ["dense.weight", "bag.weight", "head.weight"]
    with pytest.raises(ConfigError, match=r"sparse_parameters\[1\] is not a parameter of ModuleDict"):
        Towers(model, 2, sparse_parameters=[model["dense"].weight, model["frozen"].weight])


def test_sparse_parameters_are_in_no_bucket_and_there_is_always_one():
    layout = Layout((4,), (1,), torch.float32)
    (bucket,) = lay_out_buckets([layout, None, layout], 1000, 2)
    assert bucket.parameters == (2, 0)
    (bucket,) = lay_out_buckets([None, None, None], 1000, 2)
    assert bucket.parameters == ()


# ---- steps -----------------------------------------------------------------------------------------


def words(dtype=torch.float32, *, is_sparse=True):
    model = Words().to(dtype)
    model.last[1].p = 0.0
    for module in (model.words, model.bag, model.rare, model.never):
        module.sparse = is_sparse
    return model


def run(towers, batch):
    for tower in towers(batch):
        tower.backward(loss_of(towers.model, tower.batch))
    return towers.average()


@pytest.mark.sampled
@pytest.mark.parametrize("num_towers", mostly_long([1, 5, 7, 2, 32], 3))
def test_a_step_has_the_values_of_the_dense_one(num_towers):
    for batch in texts(3, 30):
        model, dense = words(torch.float64), words(torch.float64, is_sparse=False)
        report = run(Towers(model, num_towers), batch)
        expected = run(Towers(dense, num_towers), batch)
        for ours, theirs in zip(model.parameters(), dense.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            if ours.grad is not None:
                assert torch.allclose(ours.grad.to_dense(), theirs.grad, rtol=1e-12, atol=1e-15)
        assert model.words.weight.grad.is_coalesced()
        assert model.words.weight.grad._nnz() < len(model.words.weight)
        assert model.never.weight.grad is None
        assert report.grad_norm == pytest.approx(expected.grad_norm, rel=1e-12)


def test_the_gradient_is_that_of_the_unsplit_batch():
    batch = texts(1, 30)[0]
    batch["x"][:, 0].clamp_(max=30)  # `rare` depends on a tower's first row
    model, whole = words(torch.float64), words(torch.float64)
    run(Towers(model, 7), batch)
    loss_of(whole, batch).backward()
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        if ours.grad is not None:
            assert torch.allclose(ours.grad.to_dense(), theirs.grad.to_dense(), rtol=1e-12, atol=1e-15)


def test_the_average_is_that_of_the_towers_gradients_bit_for_bit():
    model, batch = words(), texts(1, 32)[0]
    run(Towers(model, 8), batch)
    tower_grads = []
    for part in range(8):
        other = words()
        loss = loss_of(other, {name: tensor[4 * part : 4 * part + 4] for name, tensor in batch.items()})
        loss.backward()
        tower_grads.append([(p.grad, p) for p in other.parameters()])
    for ours, (theirs, _) in zip(model.parameters(), samestep.average_gradients(tower_grads), strict=True):
        assert layout(ours.grad) == layout(theirs)
        assert ours.grad is None or same_bits(stored(ours.grad), stored(theirs))


def test_sums_are_kept_in_another_dtype():
    model = words(torch.bfloat16)
    batch = texts(1, 30)[0]
    run(Towers(model, 7, accumulate_dtype=torch.float32), batch)
    gradient = model.words.weight.grad
    assert gradient.dtype == torch.bfloat16
    assert gradient.is_coalesced()


@pytest.mark.sampled(50)
@pytest.mark.parametrize("kind", ["sgd", "adagrad", "sparse_adam"])
def test_optimizers_take_the_average(kind):
    model = nn.Embedding(40, 5, sparse=True)
    dense = copy.deepcopy(model)
    dense.sparse = False
    make = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
        "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
        "sparse_adam": lambda p: torch.optim.SparseAdam(p, lr=0.1),
    }[kind]
    optimizers = make(model.parameters()), make(dense.parameters())
    for batch in texts(3, 20):
        for each, optimizer in zip((model, dense), optimizers, strict=True):
            towers = Towers(each, 7)
            for tower in towers(batch):
                tower.backward(each(tower.batch["x"]).pow(3).mean())
            towers.average()
            if kind == "sparse_adam" and each is dense:
                each.weight.grad = each.weight.grad.to_sparse(1)
            with torch.sparse.check_sparse_tensor_invariants(enable=True):
                optimizer.step()
    assert torch.allclose(model.weight, dense.weight, rtol=1e-5)


def step_on(model, **settings):
    return Step(Towers(model, 7), loss_of, torch.optim.SGD(model.parameters(), lr=0.1), **settings)


def test_clipping_and_float16_see_what_the_gradient_stores():
    batch = texts(1, 30)[0]
    for settings in ({}, {"autocast": torch.float16}):
        model, dense = words(), words(is_sparse=False)
        report = step_on(model, clip_norm=0.01, **settings)(batch)
        expected = step_on(dense, clip_norm=0.01, **settings)(batch)
        assert report.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
        assert report.grad_norm > 0.01
        clipped = math.sqrt(
            sum(p.grad.to_dense().square().sum() for p in model.parameters() if p.grad is not None)
        )
        assert clipped == pytest.approx(0.01, rel=1e-3)
        for ours, theirs in zip(model.parameters(), dense.parameters(), strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-6)


def test_sparse_rows_that_are_not_finite_stop_the_step():
    model = nn.Embedding(40, 5, sparse=True)
    with torch.no_grad():
        model.weight[7] = math.inf
    towers = Towers(model, 4)
    step = Step(towers, lambda m, x: m(x).square().mean(), torch.optim.SGD(model.parameters(), lr=0.1))
    before = samestep.digest(model)
    with pytest.raises(NonFiniteError, match="tower 2, rows 4 to 5"):
        step(torch.tensor([[1], [2], [3], [4], [7], [5], [6], [8]]))
    assert samestep.digest(model) == before
    assert not step(torch.tensor([[1], [2], [3], [4]])).skipped


def test_what_a_backward_function_returned_is_left_alone():
    returned = []

    class Lookup(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight):
            return weight[1]

        @staticmethod
        def backward(ctx, gradient):
            returned.append(gradient[None].clone())
            return sparse_tensor([1], returned[-1], (6, 2), is_coalesced=True)

    model = Table()
    towers = Towers(model, 1, sparse_parameters=[model.table])
    for tower in towers(torch.ones(6, 1)):
        tower.backward(Lookup.apply(model.table).sum())
    towers.average()
    assert model.table.grad.values().tolist() == [[1.0, 1.0]]
    assert returned[0].tolist() == [[1.5, 1.5]]  # six rows in units of four


# ---- gradients of another kind than expected -------------------------------------------------------


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.arange(12.0).reshape(6, 2))

    def forward(self, rows):
        return F.embedding(rows, self.table, sparse=True)


def test_a_sparse_gradient_where_none_is_expected_is_refused_until_it_is_listed():
    model, batch = Table(), torch.arange(6)
    towers = Towers(model, 3)
    for _ in range(2):
        tower = next(towers(batch))
        with pytest.raises(UsageError, match=r"step 0: table got a sparse gradient.*sparse_parameters=\["):
            tower.backward(model(tower.batch).square().mean())
    towers = Towers(model, 3, sparse_parameters=[model.table])
    for tower in towers(batch):
        tower.backward(model(tower.batch).square().mean())
    towers.average()
    assert model.table.grad.is_sparse
    assert torch.allclose(model.table.grad.to_dense(), model.table.detach() / 6)


@pytest.mark.parametrize("towers_with_dense", [[], [0], [1], [2], [0, 1, 2]])
def test_one_dense_gradient_makes_a_dense_average(towers_with_dense):
    model, batch = Table().double(), torch.tensor([0, 0, 1, 2, 2, 2])
    towers = Towers(model, 3, sparse_parameters=[model.table])

    def loss(rows, is_dense):
        found = model(rows)
        return (found @ model.table.T if is_dense else found).square().mean()

    for tower in towers(batch):
        tower.backward(loss(tower.batch, tower.index in towers_with_dense))
    towers.average()
    averaged, model.table.grad = model.table.grad, None
    assert averaged.is_sparse == (not towers_with_dense)
    total = sum(loss(batch[2 * t : 2 * t + 2], t in towers_with_dense) for t in range(3))
    (total / 3).backward()
    assert torch.allclose(averaged.to_dense(), model.table.grad.to_dense(), rtol=1e-12)
