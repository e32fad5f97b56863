import copy

import pytest
import torch
from torch import nn

from samestep import Towers
from samestep.errors import ConfigError, UsageError

FLOAT64 = torch.float64


def norm_net(dtype=FLOAT64, momentum=0.1):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4, momentum=momentum), nn.ReLU()).to(dtype)


def pictures(rows, dtype=FLOAT64, shift=3.0):
    return torch.randn(rows, 2, 6, 6, generator=torch.Generator().manual_seed(rows), dtype=dtype) + shift


def run(towers, batch, model=None):
    for tower in towers(batch):
        tower.backward((model or towers.model)(tower.batch).square().mean())
    return towers.average()


def whole_batch_statistics(model, batches):
    """The oracle: the same layer fed with the unsplit batches."""
    model = copy.deepcopy(model)
    for batch in batches:
        model(batch)
    return model[1].running_mean, model[1].running_var, model[1].num_batches_tracked


@pytest.mark.parametrize("momentum", [0.1, 0.9, None])
@pytest.mark.parametrize(("rows", "num_towers"), [(8, 1), (8, 8), (23, 7), (3, 5)])
def test_pooled_statistics_are_those_of_the_whole_batch(rows, num_towers, momentum):
    model = norm_net(momentum=momentum)
    towers = Towers(copy.deepcopy(model), num_towers, statistics="pooled")
    batches = [pictures(rows), pictures(rows + 1)]
    for batch in batches:
        run(towers, batch)
    norm = towers.model[1]
    mean, var, count = whole_batch_statistics(model, batches)
    assert torch.allclose(norm.running_mean, mean, rtol=1e-13, atol=1e-15)
    assert torch.allclose(norm.running_var, var, rtol=1e-12, atol=1e-15)
    assert torch.equal(norm.num_batches_tracked, count)
    assert norm.momentum == momentum


def test_pooled_statistics_stay_exact_far_from_zero():
    model, batch = norm_net(), pictures(16, shift=1e4)
    towers = Towers(copy.deepcopy(model), 4, statistics="pooled")
    run(towers, batch)
    _, var, _ = whole_batch_statistics(model, [batch])
    assert torch.allclose(towers.model[1].running_var, var, rtol=1e-6)


def test_mean_statistics_are_the_towers_mean_weighted_by_rows():
    model, batch = norm_net(), pictures(7)
    towers = Towers(copy.deepcopy(model), 3)
    run(towers, batch)
    found = [whole_batch_statistics(model, [part]) for part in (batch[:3], batch[3:5], batch[5:])]
    for index, name in enumerate(("running_mean", "running_var")):
        expected = (
            sum(rows * statistics[index] for rows, statistics in zip((3, 2, 2), found, strict=True)) / 7
        )
        assert torch.allclose(getattr(towers.model[1], name), expected, rtol=1e-14)
    assert towers.model[1].num_batches_tracked == 1


def test_first_statistics_are_tower_zeros():
    model, batch = norm_net(), pictures(7)
    towers = Towers(copy.deepcopy(model), 3, statistics="first")
    run(towers, batch)
    mean, var, _ = whole_batch_statistics(model, [batch[:3]])
    assert torch.equal(towers.model[1].running_mean, mean)
    assert torch.equal(towers.model[1].running_var, var)


@pytest.mark.parametrize("mode", ["mean", "pooled", "first"])
def test_frozen_norms_are_left_alone(mode):
    model = norm_net(torch.float32)
    model[1].running_mean.fill_(0.1)
    model[1].eval()
    before = copy.deepcopy(model[1].state_dict())
    run(Towers(model, 3, statistics=mode), pictures(7, torch.float32))
    for name, value in model[1].state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize("mode", ["mean", "pooled", "first"])
def test_norms_that_thaw_later_are_found(mode):
    model = norm_net()
    model[1].eval()
    towers = Towers(model, 3, statistics=mode)
    run(towers, pictures(7))
    model[1].train()
    run(towers, pictures(7))
    assert model[1].num_batches_tracked == 1
    assert model[1].running_mean.abs().sum() > 0


@pytest.mark.parametrize("mode", ["mean", "pooled"])
def test_instance_norm_statistics_are_means_over_instances(mode):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.InstanceNorm2d(4, track_running_stats=True, affine=True)
    ).double()
    whole = copy.deepcopy(model)
    batch = pictures(7)
    run(Towers(model, 3, statistics=mode), batch)
    whole(batch)
    assert torch.allclose(model[1].running_mean, whole[1].running_mean, rtol=1e-13)
    assert torch.allclose(model[1].running_var, whole[1].running_var, rtol=1e-13)


def test_checkpointed_recomputation_counts_once():
    from torch.utils.checkpoint import checkpoint

    model, batch = norm_net(), pictures(8)
    towers = Towers(copy.deepcopy(model), 2)
    plain = Towers(copy.deepcopy(model), 2)
    run(towers, batch, lambda x: checkpoint(towers.model, x, use_reentrant=False))
    run(plain, batch)
    for ours, theirs in zip(towers.model.buffers(), plain.model.buffers(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_norm_that_runs_twice_cannot_be_pooled():
    model = norm_net()
    model.append(nn.Conv2d(4, 4, 1).double())
    model.append(model[1])
    with pytest.raises(UsageError, match="a BatchNorm2d ran 2 times in one pass"):
        run(Towers(model, 2, statistics="pooled"), pictures(8))
    assert model[1].momentum == 0.1


def test_sync_batch_norm_is_refused_with_the_remedy():
    model = nn.SyncBatchNorm.convert_sync_batchnorm(norm_net())
    with pytest.raises(ConfigError, match=r"1 is a SyncBatchNorm.*use BatchNorm with statistics='pooled'"):
        Towers(model, 2)


def test_an_unknown_mode_is_refused():
    with pytest.raises(ConfigError, match="statistics = 'median': expected one of mean, pooled, first"):
        Towers(norm_net(), 2, statistics="median")
