import hashlib

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from samestep.errors import ConfigError
from samestep.identity import digest, plain_names

WEIGHTS = {"a": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "b": torch.tensor(5, dtype=torch.int64)}


def test_the_digest_is_of_names_shapes_dtypes_and_bytes():
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).numpy().astype("<f4").tobytes()
    parts = b"a\0(2, 2)\0torch.float32\0" + values + b"b\0()\0torch.int64\0" + (5).to_bytes(8, "little")
    assert digest(WEIGHTS) == hashlib.sha256(parts).hexdigest()


def test_the_order_of_the_mapping_does_not_matter():
    assert digest(dict(reversed(WEIGHTS.items()))) == digest(WEIGHTS)


@pytest.mark.parametrize(
    "changed",
    [
        {"a": torch.tensor([[1.0, 2.0], [3.0, 4.0000005]])},
        {"a": torch.tensor([1.0, 2.0, 3.0, 4.0])},
        {"a": torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)},
        {"c": torch.zeros(0)},
    ],
)
def test_any_change_changes_it(changed):
    assert digest(WEIGHTS | changed) != digest(WEIGHTS)


def test_zero_has_two_signs():
    assert digest({"a": torch.tensor(0.0)}) != digest({"a": torch.tensor(-0.0)})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.bool, torch.complex64])
def test_all_dtypes_have_a_digest(dtype):
    assert digest({"a": torch.ones(3, dtype=dtype)}) != digest({"a": torch.zeros(3, dtype=dtype)})


def test_views_that_torch_computes_when_read_count_with_their_values():
    values = torch.tensor([1 + 2j, 3 - 4j])
    assert digest({"a": values.conj()}) == digest({"a": values.conj().resolve_conj()})
    assert digest({"a": values.conj().imag}) == digest({"a": torch.tensor([-2.0, 4.0])})


def test_tensors_can_be_resized_afterwards():  # those whose memory NumPy has seen can not
    weight = torch.zeros(2)
    digest({"a": weight})
    assert weight.resize_(5).shape == (5,)


def test_a_tensor_without_memory_of_its_own_is_refused():
    class Wrapper(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            return args[0]

    wrapper = torch.Tensor._make_wrapper_subclass(Wrapper, (2,))
    with pytest.raises(ConfigError, match="a Wrapper has no memory of its own: expected a plain tensor"):
        digest({"a": wrapper})


def test_the_memory_format_does_not_matter():
    pictures = torch.randn(2, 3, 4, 5)
    channels_last = pictures.to(memory_format=torch.channels_last)
    assert channels_last.stride() != pictures.stride()
    assert digest({"a": channels_last}) == digest({"a": pictures})


class Extra(nn.BatchNorm1d):
    def get_extra_state(self):
        return {"not": "a tensor"}

    def set_extra_state(self, state):
        pass


def test_a_module_counts_parameters_and_persistent_buffers():
    model = nn.Sequential(nn.Linear(3, 4), Extra(4))
    before = digest(model)
    assert before == digest(model.state_dict())
    model.register_buffer("scratch", torch.randn(2), persistent=False)
    assert digest(model) == before
    model[1].running_mean += 1
    assert digest(model) != before


def compiled(module):
    return torch.compile(module, backend="eager")


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)))


def compiled_in_part():
    model = net()
    model[1] = compiled(model[1])
    model[1]._orig_mod[1] = compiled(model[1]._orig_mod[1])
    return model


@pytest.mark.parametrize(
    "build", [lambda: compiled(net()), compiled_in_part, lambda: compiled(compiled_in_part())]
)
def test_a_compiled_model_is_the_model(build):
    model = build()
    assert any("_orig_mod" in name for name in model.state_dict())
    assert digest(model) == digest(model.state_dict()) == digest(net())
    averaged, plain = AveragedModel(model), AveragedModel(net())
    for one, other in ((averaged, model), (plain, net())):
        one.update_parameters(other)
    assert digest(averaged) == digest(plain)


def test_names_stay_apart_where_a_user_s_own_module_is_called_like_a_compiled_one():
    entries = {"a.weight": torch.zeros(1), "a._orig_mod.weight": torch.ones(1)}
    assert plain_names(entries) == entries
    assert len({digest(entries), digest({"a.weight": entries["a.weight"]})}) == 2
