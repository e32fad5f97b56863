import copy
import doctest
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import samestep
from samestep import Towers
from samestep.errors import BufferPolicyError, ConfigError

from .cases import mostly_long

pytestmark = pytest.mark.sampled(5)

FLOAT64 = torch.float64


def batch_of(rows, dtype=torch.float32):
    return torch.randn(rows, 3, generator=torch.Generator().manual_seed(rows), dtype=dtype)


def run(towers, batch):
    for tower in towers(batch):
        tower.backward(towers.model(tower.batch).square().mean())
    return towers.average()


class Keeper(nn.Module):
    """One linear layer and one buffer, which `change(module, x)` changes in every forward."""

    def __init__(self, value, change, persistent=True):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 2)
        self.change = change
        self.register_buffer("memory", value, persistent=persistent)

    def forward(self, x):
        with torch.no_grad():
            self.change(self, x)
        return self.linear(x)


def add_sum(module, x):
    module.memory += x.sum(0)


def replace(module, x):
    module.memory = 0.9 * module.memory + 0.1 * x.mean(0)


def replace_with_history(module, x):
    with torch.enable_grad():
        module.memory = 0.9 * module.memory + 0.1 * module.linear(x).mean()


def count_rows(module, x):
    module.memory += len(x)


def number(module, x):
    module.memory += 1


def enqueue(module, x):
    place = int(module.memory[-1, 0])
    module.memory[place] = (100 * x[0]).to(module.memory.dtype)
    module.memory[-1] = (place + 1) % (len(module.memory) - 1)


def slices(batch, num_towers):
    return [part for part in torch.tensor_split(batch, num_towers) if len(part)]


def buffers_of_towers(model, batch, num_towers):
    """The slow twin: a copy of the model for every tower; return (rows, buffer at its end)."""
    ended = []
    for part in slices(batch, num_towers):
        copied = copy.deepcopy(model)
        copied(part)
        ended.append((len(part), copied.memory.detach()))
    return ended


# ---- "mean" ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [add_sum, replace, replace_with_history])
@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize(("rows", "num_towers"), mostly_long([(7, 3), (3, 5), (4, 1), (8, 8)], 2))
def test_mean_is_the_towers_mean_weighted_by_rows(rows, num_towers, change, persistent):
    model = Keeper(torch.ones(3, dtype=FLOAT64), change, persistent).double()
    towers = Towers(model, num_towers, buffers={"memory": "mean"})
    own = model.memory
    for steps in range(2):
        batch = batch_of(rows + steps, FLOAT64)
        ended = buffers_of_towers(model, batch, num_towers)
        run(towers, batch)
        expected = sum(count * value for count, value in ended) / len(batch)
        assert torch.allclose(model.memory, expected, rtol=1e-14)
    assert model.memory is own  # a forward may replace it, a step does not
    assert not model.memory.requires_grad


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_mean_of_equal_values_is_that_value(dtype):
    value = torch.randn(50, generator=torch.Generator().manual_seed(1)).to(dtype)
    model = Keeper(value.clone(), lambda module, x: module.memory.add_(0))
    run(Towers(model, 7, buffers={"memory": "mean"}), batch_of(23))
    assert torch.equal(model.memory, value)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64])
def test_only_floating_point_buffers_have_a_mean(dtype):
    model = Keeper(torch.zeros(3, dtype=dtype), number)
    with pytest.raises(ConfigError, match=f"memory is {dtype}, and only floating-point buffers.*'first'"):
        Towers(model, 2, buffers={"mem*": "mean"})


# ---- "first" ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "change"),
    [
        (torch.zeros(3), add_sum),
        (torch.ones(3), replace),
        (torch.zeros((), dtype=torch.int64), count_rows),
        (torch.full((1,), 2**62 + 1), count_rows),
        (torch.zeros(5, 3, dtype=torch.int16), enqueue),
        (torch.zeros(9, 3), enqueue),
        (torch.zeros(3, dtype=torch.bool), lambda module, x: module.memory.logical_xor_(x[0] > 0)),
        (torch.zeros(3, dtype=torch.complex64), add_sum),
        (torch.zeros(3), lambda module, x: module.memory.fill_(-0.0 if x[0, 0] > 0 else torch.inf)),
        (torch.zeros(0), lambda module, x: module.memory.add_(1)),
        (torch.zeros(3, 3).t(), add_sum),
    ],
)
def test_first_is_what_tower_0_ends_with(value, change):
    model = Keeper(value.clone(), change)
    towers = Towers(model, 3, buffers={"memory": "first"})
    for rows in (7, 5, 2):
        batch = batch_of(rows)
        _, expected = buffers_of_towers(model, batch, 3)[0]
        run(towers, batch)
        assert samestep.digest({"": model.memory}) == samestep.digest({"": expected})


def test_every_tower_starts_from_the_shared_value():
    seen = []
    model = Keeper(torch.zeros(3), add_sum)
    model.register_forward_pre_hook(lambda module, args: seen.append(module.memory.clone()))
    towers = Towers(model, 3, buffers={"memory": "first"})
    run(towers, batch_of(6))
    after = model.memory.clone()
    run(towers, batch_of(6))
    assert all(not start.any() for start in seen[:3])
    assert all(torch.equal(start, after) for start in seen[3:])


@pytest.mark.parametrize("policy", ["mean", "first"])
def test_a_buffer_that_changes_its_shape_is_an_error(policy):
    def grow(module, x):
        module.memory = torch.cat([module.memory, x[0]])

    towers = Towers(Keeper(torch.zeros(3), grow), 2, buffers={"memory": policy})
    with pytest.raises(
        BufferPolicyError, match=r"memory is float32 \[6\] on cpu, but was float32 \[3\] on cpu"
    ):
        run(towers, batch_of(4))


@pytest.mark.parametrize("policy", ["mean", "first"])
def test_a_buffer_that_is_resized_in_place_is_an_error(policy):
    towers = Towers(
        Keeper(torch.zeros(3), lambda module, x: module.memory.resize_(4)), 2, buffers={"memory": policy}
    )
    with pytest.raises(BufferPolicyError, match=r"memory is float32 \[4\] on cpu, but was"):
        run(towers, batch_of(4))


# ---- "ignore" --------------------------------------------------------------------------------------


def test_an_ignored_buffer_goes_on_from_pass_to_pass():
    model = Keeper(torch.zeros(3, dtype=FLOAT64), add_sum).double()
    towers = Towers(model, 3, buffers={"memory": "ignore"})
    total = torch.zeros(3, dtype=FLOAT64)
    for rows in (7, 5):
        batch = batch_of(rows, FLOAT64)
        run(towers, batch)
        for part in slices(batch, 3):
            total += part.sum(0)
    assert torch.equal(model.memory, total)


def test_an_ignored_counter_may_count_rows():
    model = Keeper(torch.zeros((), dtype=torch.int64), count_rows)
    run(Towers(model, 3, buffers={"memory": "ignore"}), batch_of(7))
    assert model.memory == 7


def test_an_ignored_buffer_may_be_made_by_a_forward():
    model = Keeper(None, lambda module, x: setattr(module, "memory", x.clone()))
    run(Towers(model, 3, buffers={"memory": "ignore"}), batch_of(7))
    assert model.memory.shape == (2, 3)


# ---- patterns --------------------------------------------------------------------------------------


def two_keepers():
    return nn.Sequential(
        Keeper(torch.ones(3), replace), nn.Linear(2, 3), nn.BatchNorm1d(3), Keeper(torch.ones(3), replace)
    )


def test_the_first_pattern_that_matches_decides():
    model = two_keepers()
    twin = copy.deepcopy(model)
    batch = batch_of(8)
    run(Towers(model, 2, buffers={"3.*": "first", "*.memory": "mean"}), batch)
    ended = []
    for part in slices(batch, 2):
        copied = copy.deepcopy(twin)
        copied(part)
        ended.append(copied)
    assert torch.equal(model[3].memory, ended[0][3].memory)
    assert torch.allclose(model[0].memory, (ended[0][0].memory + ended[1][0].memory) / 2)


@pytest.mark.parametrize(
    ("policies", "message"),
    [
        ({"memroy": "mean"}, r"buffers\['memroy'\] matches no buffer: the model has 0.memory, 3.memory"),
        ({"0.Memory": "mean"}, r"matches no buffer"),
        ({"2.*": "mean"}, r"matches only 2.running_mean, .*use the statistics argument for those"),
        ({"*.memory": "mean", "0.*": "first"}, r"buffers\['0.\*'\] has no effect: earlier patterns match"),
        ({"*.memory": "median"}, r"= 'median': expected one of mean, first, ignore"),
    ],
)
def test_patterns_that_cannot_be_right(policies, message):
    with pytest.raises(ConfigError, match=message):
        Towers(two_keepers(), 2, buffers=policies)


@pytest.mark.parametrize("policy", ["mean", "first"])
def test_an_expanded_buffer_cannot_have_a_policy(policy):
    model = nn.Linear(3, 2)
    model.register_buffer("scale", torch.ones(1).expand(3))
    with pytest.raises(ConfigError, match=f"= '{policy}': scale is expanded.* register a clone"):
        Towers(model, 2, buffers={"scale": policy})
    run(Towers(model, 2, buffers={"scale": "ignore"}), batch_of(8))
    model.register_buffer("scale", model.scale.clone())
    run(Towers(model, 2, buffers={"scale": policy}), batch_of(8))


def test_a_pattern_over_everything_leaves_statistics_alone():
    model = two_keepers()
    run(Towers(model, 2, buffers={"*": "first"}), batch_of(8))
    assert model[2].num_batches_tracked == 1


def test_a_pattern_without_buffers_to_match():
    with pytest.raises(ConfigError, match="matches no buffer: the model has none of its own"):
        Towers(nn.Linear(3, 2), 2, buffers={"memory": "first"})


def test_a_long_list_of_buffers_is_cut():
    model = nn.Sequential(*(Keeper(torch.ones(3), replace) for _ in range(25)))
    with pytest.raises(ConfigError, match=r"0.memory, .* 19.memory and 5 more$"):
        Towers(model, 2, buffers={"queue": "first"})


@pytest.mark.parametrize("policy", ["mean", "first"])
def test_a_policy_for_a_buffer_without_a_value(policy):
    model = Keeper(None, lambda module, x: setattr(module, "memory", x.clone()))
    with pytest.raises(ConfigError, match=r"memory has no value before the first .* or use 'ignore'"):
        Towers(model, 2, buffers={"memory": policy})


# ---- without a policy --------------------------------------------------------------------------------


def message_of(model, batch, num_towers=2):
    with pytest.raises(BufferPolicyError) as caught:
        run(Towers(model, num_towers), batch)
    return str(caught.value)


@pytest.mark.parametrize("change", [add_sum, replace])
def test_the_error_gives_the_argument_to_write(change):
    model = Keeper(torch.zeros(3), change)
    message = message_of(copy.deepcopy(model), batch_of(4))
    start = "step 0, tower 0 changed memory, which has no policy: choose one, such as Towers(..., buffers="
    assert message.startswith(start)
    policies = eval(message.partition("buffers=")[2].partition(");")[0])
    assert policies == {"memory": "first"}
    run(Towers(model, 2, buffers=policies), batch_of(4))


def test_many_buffers_are_said_by_the_ends_of_their_names():
    model = nn.Sequential(
        *(Keeper(torch.zeros(3), lambda module, x: module.memory.add_(1)) for _ in range(5)), nn.Linear(2, 2)
    )
    for keeper in model[:4]:
        keeper.linear = nn.Linear(3, 3)
    message = message_of(copy.deepcopy(model), batch_of(4))
    assert "changed 0.memory, 1.memory, 2.memory" in message
    assert "buffers={'*memory': 'first'})" in message
    run(Towers(model, 2, buffers={"*memory": "first"}), batch_of(4))


def test_a_buffer_that_a_forward_fills():
    def fill(module, x):
        if module.memory is None:
            module.memory = x.mean(0)

    model = Keeper(None, fill)
    assert message_of(copy.deepcopy(model), batch_of(4)) == (
        "step 0, tower 0 set memory, which was None before: run the model once before making Towers "
        "or, if it does not affect the weights, use Towers(..., buffers={'memory': 'ignore'})"
    )
    model(batch_of(4))
    run(Towers(model, 2), batch_of(4))


def test_a_buffer_that_a_backward_changes():
    model = Keeper(torch.zeros(()), lambda module, x: None)

    def hook(gradient):
        model.memory.add_(1)

    model.linear.weight.register_hook(hook)
    with pytest.warns(UserWarning, match=r"a hook on linear\.weight sees each tower's summed gradient"):
        message = message_of(model, batch_of(4), num_towers=1)
    assert message.startswith("step 0: a pass changed memory")


def test_statistics_of_a_norm_that_is_no_layer_of_torch():
    """Which torch writes to without counting a version."""

    class Norm(Keeper):
        def forward(self, x):
            mean, var = self.memory.view(2, 3)
            return self.linear(F.batch_norm(x, mean, var, training=True))

    model = Norm(torch.ones(6), None)
    assert message_of(copy.deepcopy(model), batch_of(4)).startswith("step 0: a pass changed memory")
    run(Towers(model, 2, buffers={"memory": "mean"}), batch_of(4))
    assert not model.memory.eq(1).any()


def test_a_buffer_that_stays_nan_has_not_changed():
    towers = Towers(Keeper(torch.full((3,), torch.nan), lambda module, x: None), 2)
    run(towers, batch_of(4))


def test_a_norm_that_thaws_within_a_step_is_named():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[1].eval()
    turns = Towers(model, 2)(batch_of(8))
    tower = next(turns)
    model[1].train()
    with pytest.raises(
        BufferPolicyError, match=r"tower 0 ran 1 in training mode.*switch modes between steps"
    ):
        tower.backward(model(tower.batch).mean())


def test_a_norm_without_statistics_may_thaw_within_a_step():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, track_running_stats=False)).eval()
    for tower in Towers(model, 2)(batch_of(8)):
        tower.backward(model.train()(tower.batch).square().mean())


def test_a_frozen_norm_that_runs_in_training_mode_all_the_same_is_named():
    class Thaws(nn.BatchNorm1d):
        def forward(self, x):
            self.train()
            output = super().forward(x)
            self.eval()
            return output

    model = nn.Sequential(nn.Linear(3, 3), Thaws(3).eval())
    with pytest.raises(
        BufferPolicyError, match=r"changed 1.running_mean, 1.running_var, of layers in eval mode"
    ):
        run(Towers(model, 2), batch_of(8))


def test_buffers_that_only_a_norm_subclass_keeps_are_watched():
    class Norm(nn.BatchNorm1d):
        def __init__(self, num_features):
            super().__init__(num_features)
            self.register_buffer("largest", torch.zeros(num_features))

        def forward(self, x):
            self.largest.copy_(x.detach().amax(0))
            return super().forward(x)

    with pytest.raises(BufferPolicyError, match=r"changed 0.largest"):
        run(Towers(nn.Sequential(Norm(3)), 2), batch_of(8))
    run(Towers(nn.Sequential(Norm(3)), 2, buffers={"*.largest": "mean"}), batch_of(8))


# ---- counters --------------------------------------------------------------------------------------


def replace_counter(module, x):
    module.memory = module.memory + 1


@pytest.mark.parametrize("change", [number, replace_counter])
@pytest.mark.parametrize(
    "start", [torch.tensor(0), torch.tensor([2**62 + 1]), torch.tensor(3, dtype=torch.uint8)]
)
def test_counters_count_once_a_step(start, change):
    model = Keeper(start.clone(), change)
    towers = Towers(model, 3)
    for _ in range(2):
        run(towers, batch_of(7))
    assert torch.equal(model.memory, start + 2)


def test_a_flag_that_the_first_step_sets():
    model = Keeper(torch.tensor(False), lambda module, x: module.memory.fill_(True))
    run(Towers(model, 3), batch_of(7))
    assert model.memory.item() is True


def test_a_counter_that_depends_on_rows_says_what_to_write():
    model = Keeper(torch.tensor(2**62), count_rows)
    assert message_of(copy.deepcopy(model), batch_of(5)) == (
        f"buffer memory is {2**62 + 2} after tower 1, {2**62 + 3} after tower 0: integer buffers must "
        "count the same in all towers; to keep tower 0's value, use Towers(..., buffers={'memory': 'first'})"
    )
    run(Towers(model, 2, buffers={"memory": "first"}), batch_of(5))
    assert model.memory == 2**62 + 3


# ---- docs/statistics.md ----------------------------------------------------------------------------


@pytest.mark.long
def test_the_page_on_modules_with_buffers_is_true():
    page = Path(__file__).parents[1] / "docs" / "statistics.md"
    found = doctest.testfile(str(page), module_relative=False)
    assert found.attempted > 10
    assert found.failed == 0


# ---- modules that people train -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "normalise", [nn.utils.parametrizations.spectral_norm, nn.utils.spectral_norm], ids=["new", "old"]
)
def test_spectral_norm_trains_with_the_first_towers_vectors(normalise):
    torch.manual_seed(0)
    model = nn.Sequential(normalise(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 1)).double()
    twin = copy.deepcopy(model)
    towers = Towers(model, 3, buffers={"*_[uv]": "first"})
    batch = batch_of(7, FLOAT64)
    run(towers, batch)
    twin(batch).square().mean().backward()  # one power iteration, as in each tower
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-10)
    assert [name for name, _ in model.named_buffers()] == [name for name, _ in twin.named_buffers()]
    for ours, theirs in zip(model.buffers(), twin.buffers(), strict=True):
        assert torch.equal(ours, theirs)


def test_weight_norm_needs_nothing():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), nn.Linear(4, 1))
    run(Towers(model, 3), batch_of(7))


def test_an_observer_with_the_first_towers_range():
    from torch.ao.quantization import FakeQuantize

    model = nn.Sequential(nn.Linear(3, 4), FakeQuantize(), nn.Linear(4, 1))
    twin = copy.deepcopy(model)
    batch = batch_of(7)
    run(Towers(model, 3, buffers={"1.*": "first"}), batch)
    twin(batch[:3])
    for ours, theirs in zip(model.buffers(), twin.buffers(), strict=True):
        assert torch.equal(ours, theirs)
