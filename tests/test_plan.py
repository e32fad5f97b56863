"""A plan is a value: equal ingredients make equal fingerprints, and any other ingredient another one."""

import copy
import dataclasses

import pytest
import torch

from samestep.summation.layout import Layout
from samestep.summation.placement import Placement
from samestep.summation.plan import BufferLayout, ParameterLayout, Plan, grad_dtype
from samestep.workers.agreement import difference

F32, F64 = torch.float32, torch.float64
PLACEMENT = Placement((0, 3, 5))


def parameter(name="0.weight", shape=(4, 3), strides=(3, 1), summed=F32, dtype=F32, is_sparse=False):
    return ParameterLayout(name, Layout(shape, strides, summed), dtype, is_sparse)


def plan(placement=PLACEMENT, parameters=None, buffers=(("0.mean", "mean"),), bucket_bytes=10**6, **kind):
    parameters = parameters or (parameter(), parameter("0.bias", (4,), (1,)))
    counters, moments = kind.pop("counters", 1), kind.pop("moments", 8)
    made = Plan.of(placement, tuple(parameters), BufferLayout(buffers, counters, moments), bucket_bytes)
    return dataclasses.replace(made, **kind)


def with_first(**changed):
    return [parameter(**changed), parameter("0.bias", (4,), (1,))]


OTHERS = {
    "placement = (0, 2, 5)": {"placement": Placement((0, 2, 5))},
    "placement = (0, 3, 6)": {"placement": Placement((0, 3, 6))},
    "loss = 'a', 'b'": {"sums": ("a", "b")},
    "loss = 'a, b'": {"sums": ("a, b",)},
    "loss = 'one sum'": {"sums": ("one sum",)},
    "loss = of the whole batch": {"is_whole_batch": True},
    "trained parameter 0.weight = nothing": {"parameters": with_first(name="1.weight")},
    "trained parameter 0.weight = (3, 4) strides (4, 1) torch.float32": {
        "parameters": with_first(shape=(3, 4), strides=(4, 1))
    },
    "trained parameter 0.weight = (4, 3) strides (1, 4) torch.float32": {
        "parameters": with_first(strides=(1, 4))
    },
    "trained parameter 0.weight = (4, 3) strides (3, 1) torch.bfloat16, summed in torch.float32": {
        "parameters": with_first(dtype=torch.bfloat16)
    },
    "trained parameter 0.weight = (4, 3) strides (3, 1) torch.float64": {
        "parameters": with_first(dtype=F64, summed=F64)
    },
    "trained parameter 0.weight = (4, 3) strides (3, 1) torch.float32, summed in torch.float64": {
        "parameters": with_first(summed=F64)
    },
    "trained parameter 0.weight = (4, 3) strides (3, 1) torch.float32, perhaps sparse": {
        "parameters": with_first(is_sparse=True)
    },
    "trained parameter number 0 = 0.bias": {"parameters": [parameter("0.bias", (4,), (1,)), parameter()]},
    "trained parameter 1.weight = (4, 3) strides (3, 1) torch.float32": {
        "parameters": [*with_first(), parameter("1.weight")]
    },
    "buffer 0.mean = first": {"buffers": (("0.mean", "first"),)},
    "sizes = [32, 32] elements in buckets, 1 counters, 8 moments": {"bucket_bytes": 1},
    "sizes = [64] elements in buckets, 2 counters, 8 moments": {"counters": 2},
    "sizes = [64] elements in buckets, 1 counters, 9 moments": {"moments": 9},
}


def test_equal_ingredients_make_equal_plans():
    assert plan() == plan()
    assert hash(plan()) == hash(plan())
    assert plan().fingerprint == plan().fingerprint == copy.deepcopy(plan()).fingerprint
    assert 0 <= plan().fingerprint < 2**63


def test_nothing_in_a_plan_can_be_changed():
    for value, name in [
        (plan(), "sums"),
        (plan().placement, "cuts"),
        (plan().buckets[0], "num_elements"),
        (plan().parameters[0], "name"),
        (plan().parameters[0].gradient, "shape"),
        (plan().buffers, "num_counters"),
    ]:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, name, None)


@pytest.mark.parametrize("named", OTHERS)
def test_another_ingredient_makes_another_fingerprint_and_is_named(named):
    other = plan(**OTHERS[named])
    assert other != plan()
    assert other.fingerprint != plan().fingerprint
    found = difference([plan().description, other.description, plan().description])
    assert found.startswith(f"worker 1 has {named}, the others have ")


def test_all_others_differ_from_each_other():
    assert len({plan(**other).fingerprint for other in OTHERS.values()}) == len(OTHERS)


def test_spans_are_each_workers_subtrees():
    assert plan(Placement((0, 3, 5))).spans == [[range(2), range(2, 3)], [range(3, 4), range(4, 5)]]
    assert plan(Placement((0, 4, 7))).spans == [[range(4)], [range(4, 7)]]


def test_sparse_parameters_are_in_no_bucket():
    made = plan(parameters=with_first(is_sparse=True))
    assert made.sparse == (0,)
    assert [bucket.parameters for bucket in made.buckets] == [(1,)]


def test_a_loss_of_one_sum_has_one():
    assert (plan().num_sums, plan(sums=("a", "b")).num_sums) == (1, 2)


def test_gradients_are_of_the_dtype_that_torch_allows():
    weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    assert grad_dtype(weight) == torch.bfloat16
    weight.grad_dtype = F32
    assert grad_dtype(weight) == F32
    weight.grad_dtype = None  # any
    assert grad_dtype(weight) == torch.bfloat16
