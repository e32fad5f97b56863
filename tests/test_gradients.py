import itertools
import math

import pytest
import torch
from hypothesis import given, strategies as st

from samestep.errors import ConfigError
from samestep.summation.gradients import add_gradients, average_gradients, divide
from samestep.summation.tree import TreeSum, subtrees

from .nets import sparse_tensor
from .oracle import tree as twin


def nodes_of(leaves):
    """All subtrees of the canonical tree, as ranges."""
    nodes = []

    def join(left, right):
        nodes.append(range(left.start, right.stop))
        return nodes[-1]

    twin([range(leaf, leaf + 1) for leaf in leaves], join)
    return nodes + [range(leaf, leaf + 1) for leaf in leaves]


def parenthesise(left, right):
    return f"({left}+{right})"


def fold(num_leaves, leaves, add, values):
    total = TreeSum(num_leaves, add=add)
    for leaf in leaves:
        total.push(range(leaf, leaf + 1), values[leaf])
    return total


@st.composite
def splits(draw):
    """Leaves cut into contiguous workers, each with at least one."""
    num_leaves = draw(st.integers(1, 70))
    inner = st.sets(st.integers(1, num_leaves - 1)) if num_leaves > 1 else st.just(set())
    cuts = [0, *sorted(draw(inner)), num_leaves]
    return num_leaves, [range(a, b) for a, b in itertools.pairwise(cuts)]


def sum_by_workers(num_leaves, workers, add, values):
    """Fold in each worker, then finish the tree from what the workers hold."""
    finish = TreeSum(num_leaves, add=add)
    for leaves in workers:
        for span, value in fold(num_leaves, leaves, add, values).nodes:
            finish.push(span, value)
    return finish.root()


@pytest.mark.parametrize(
    ("num_leaves", "expected"),
    [(1, "0"), (3, "((0+1)+2)"), (4, "((0+1)+(2+3))"), (7, "(((0+1)+(2+3))+((4+5)+6))")],
)
def test_the_parentheses_are_those_of_rfc_6962(num_leaves, expected):
    assert fold(num_leaves, range(num_leaves), parenthesise, list(map(str, range(9)))).root() == expected


@given(splits())
def test_any_split_into_workers_gives_the_parentheses_of_the_recursive_twin(split):
    num_leaves, workers = split
    names = list(map(str, range(num_leaves)))
    assert sum_by_workers(num_leaves, workers, parenthesise, names) == twin(names, parenthesise)


@given(splits(), st.integers(0, 2**32 - 1))
def test_any_split_into_workers_gives_the_bits_of_the_recursive_twin(split, seed):
    num_leaves, workers = split
    random = torch.Generator().manual_seed(seed)
    # Magnitudes from 1e-6 to 1e6, so that another order would round otherwise.
    scale = 10 ** (torch.rand(num_leaves, 1, generator=random) * 12 - 6)
    values = list(torch.randn(num_leaves, 5, generator=random) * scale)
    assert torch.equal(sum_by_workers(num_leaves, workers, torch.add, values), twin(values, torch.add))


def test_another_order_has_other_bits():
    values = list(torch.randn(13, 100, generator=torch.Generator().manual_seed(0)))
    assert not torch.equal(twin(values, torch.add), sum(values[1:], start=values[0]))


@pytest.mark.parametrize("num_leaves", [*range(1, 20), 33, 64, 100])
def test_few_values_are_alive_while_towers_are_folded(num_leaves):
    for start in range(num_leaves):
        total = TreeSum(num_leaves, add=parenthesise)
        for num_pushed, leaf in enumerate(range(start, num_leaves), 1):
            total.push(range(leaf, leaf + 1), "")
            assert len(total.nodes) <= 2 * math.log2(num_pushed + 2) - 2 + 1e-9
            if start == 0:
                assert len(total.nodes) <= math.floor(math.log2(num_pushed)) + 1


@given(splits())
def test_subtrees_cover_a_range_with_the_largest_subtrees_of_the_tree(split):
    num_leaves, workers = split
    nodes = nodes_of(range(num_leaves))
    for leaves in workers:
        spans = subtrees(leaves, num_leaves)
        inside = [set(node) for node in nodes if set(node) <= set(leaves)]
        assert [leaf for span in spans for leaf in span] == list(leaves)
        assert all(span in nodes for span in spans)
        assert not any(set(span) < node for span in spans for node in inside)


@pytest.mark.parametrize("num_leaves", range(1, 41))
def test_a_range_is_at_most_this_many_subtrees(num_leaves):
    height = math.ceil(math.log2(num_leaves))
    ranges = [range(a, b) for b in range(1, num_leaves + 1) for a in range(b)]
    most = max(len(subtrees(leaves, num_leaves)) for leaves in ranges)
    assert most <= max(1, 2 * (height - 1))
    if num_leaves == 2**height and height > 1:
        assert most == 2 * (height - 1)


def test_pop_sibling_takes_back_only_what_belongs_together():
    total = fold(8, range(3), parenthesise, list("abc"))
    assert total.pop_sibling(range(4, 5)) is None
    assert total.pop_sibling(range(3, 4)) == (range(2, 3), "c")
    assert total.nodes == [(range(0, 2), "(a+b)")]


# ---- gradients -------------------------------------------------------------------------------------


@st.composite
def whole_gradients(draw):
    """Towers' gradients and weights, all whole numbers, so that no sum is rounded; some are None."""
    num_towers = draw(st.integers(1, 9))
    gradient = st.none() | st.lists(st.integers(-1000, 1000), min_size=3, max_size=3)
    towers = draw(
        st.lists(st.lists(gradient, min_size=4, max_size=4), min_size=num_towers, max_size=num_towers)
    )
    weights = draw(st.lists(st.integers(0, 50), min_size=num_towers, max_size=num_towers).filter(any))
    return towers, weights


def as_pairs(towers, parameters, dtype=torch.float64):
    def tensor(values):
        return None if values is None else torch.tensor(values, dtype=dtype)

    return [[(tensor(g), p) for g, p in zip(tower, parameters, strict=True)] for tower in towers]


@given(whole_gradients(), st.booleans())
def test_the_average_is_the_weighted_mean_and_none_counts_zero(gradients, is_weighted):
    towers, weights = gradients
    weights = weights if is_weighted else [1] * len(towers)
    parameters = [torch.zeros(3, dtype=torch.float64) for _ in range(4)]
    averages = average_gradients(as_pairs(towers, parameters), weights if is_weighted else None)
    assert [id(parameter) for _, parameter in averages] == [id(parameter) for parameter in parameters]
    for index, (average, _) in enumerate(averages):
        used = [
            (tower[index], w) for tower, w in zip(towers, weights, strict=True) if tower[index] is not None
        ]
        if not used:
            assert average is None
            continue
        total = sum(torch.tensor(g, dtype=torch.float64) * w for g, w in used)
        assert torch.equal(average, total / sum(weights))


@given(st.integers(1, 13), st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_the_average_has_the_bits_of_the_canonical_order(num_towers, dtype):
    gradients = list(torch.randn(num_towers, 50, generator=torch.Generator().manual_seed(1)).to(dtype))
    parameter = torch.zeros(50, dtype=dtype)
    [(average, _)] = average_gradients([[(gradient, parameter)] for gradient in gradients])
    total = twin(gradients, torch.add)
    assert average.dtype == dtype
    assert torch.equal(
        average, (total.float() / num_towers).to(dtype) if dtype != torch.float64 else total / num_towers
    )


@pytest.mark.parametrize("num_towers", [1, 2, 5])
def test_the_inputs_are_left_as_they_were(num_towers):
    gradients = list(torch.randn(num_towers, 4))
    before = [gradient.clone() for gradient in gradients]
    [(average, _)] = average_gradients([[(gradient, torch.zeros(4))] for gradient in gradients])
    average.fill_(7.0)
    assert all(torch.equal(now, then) for now, then in zip(gradients, before, strict=True))


def sparse(rows, values, num_rows=6):
    return sparse_tensor(rows, values, (num_rows, 2))


def test_sparse_gradients_stay_sparse():
    towers = [
        sparse([1, 4], torch.tensor([[1.0, 2.0], [3.0, 4.0]])),
        sparse([4, 4], torch.tensor([[10.0, 20.0], [30.0, 40.0]])),
        None,
    ]
    [(average, _)] = average_gradients([[(gradient, torch.zeros(6, 2))] for gradient in towers], [1, 2, 1])
    assert average.is_sparse
    expected = torch.zeros(6, 2)
    expected[1] = torch.tensor([1.0, 2.0]) / 4
    expected[4] = torch.tensor([3.0 + 80.0, 4.0 + 120.0]) / 4
    assert torch.equal(average.to_dense(), expected)


def test_one_sparse_gradient_alone_is_only_scaled():
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    [(average, _)] = average_gradients([[(sparse([2, 2], values), torch.zeros(6, 2))]], [8.0])
    assert average.is_sparse
    assert torch.equal(average.to_dense()[2], torch.tensor([4.0, 6.0]))


@pytest.mark.parametrize("num_dense", [1, 2])
def test_sparse_and_dense_gradients_of_one_parameter_add_up(num_dense):
    towers = [sparse([1], torch.tensor([[1.0, 2.0]])), *[torch.ones(6, 2)] * num_dense]
    [(average, _)] = average_gradients([[(gradient, torch.zeros(6, 2))] for gradient in towers])
    assert torch.equal(average * len(towers), towers[0].to_dense() + num_dense)


def test_adding_works_in_place_on_the_left_only():
    left, right = [torch.ones(2), None, None], [torch.full((2,), 2.0), torch.ones(1), None]
    sums = add_gradients(left, right)
    assert sums[0] is left[0]
    assert torch.equal(left[0], torch.full((2,), 3.0))
    assert torch.equal(right[0], torch.full((2,), 2.0))
    assert sums[1] is right[1]
    assert sums[2] is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_divided_by_weights_that_it_cannot_hold(dtype):
    total = torch.tensor([60000.0], dtype=dtype)
    out = torch.empty_like(total)
    divide(total, torch.tensor(1e6, dtype=torch.float64), out=out)
    assert torch.equal(out, (total.float() / 1e6).to(dtype))
    assert out.item() > 0


PARAMETER = torch.zeros(2)
ONE_TOWER = [(torch.ones(2), PARAMETER)]


@pytest.mark.parametrize(
    ("towers", "weights", "named"),
    [
        ([], None, "tower_grads is empty"),
        ([ONE_TOWER], [1.0, 1.0], "weights has 2 entries for 1 towers"),
        ([ONE_TOWER, ONE_TOWER], [1.0, -1.0], "none below 0"),
        ([ONE_TOWER, ONE_TOWER], [0.0, 0.0], "sum above 0"),
        ([ONE_TOWER], [math.nan], "sum above 0"),
        ([ONE_TOWER, ONE_TOWER * 2], None, "tower 1 has 2 gradients, tower 0 has 1"),
        ([ONE_TOWER, [(torch.ones(3), PARAMETER)]], None, r"tower 1, gradient 0 has shape \(3,\)"),
        ([ONE_TOWER, [(torch.ones(1), torch.zeros(1))]], None, "tower 1, gradient 0"),
        ([ONE_TOWER], [math.inf], "a finite sum above 0"),
    ],
)
def test_towers_that_do_not_fit_are_refused(towers, weights, named):
    with pytest.raises(ConfigError, match=named):
        average_gradients(towers, weights)
