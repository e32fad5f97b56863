import copy

import pytest
import torch
from torch import nn

from samestep import Towers, digest
from samestep.errors import ConfigError, UsageError

pytestmark = pytest.mark.sampled(5)

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


def norm_of(kind, shape, rows, **settings):
    """Return a net with one norm, and a batch for it whose statistics have something to measure."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(shape[-1], shape[-1]), kind(shape[0], **settings)).double()
    generator = torch.Generator().manual_seed(rows)
    return model, torch.randn(rows, *shape, generator=generator, dtype=FLOAT64) * 2 + 3


def statistics_of(norm):
    return [norm.running_mean.clone(), norm.running_var.clone(), norm.num_batches_tracked.clone()]


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


LAYERS = [
    (nn.BatchNorm1d, (5,), {}),
    (nn.BatchNorm1d, (3, 4), {"affine": False}),
    (nn.BatchNorm2d, (3, 2, 4), {"momentum": None}),
    (nn.BatchNorm3d, (3, 2, 2, 4), {"affine": False, "momentum": None}),
    (nn.InstanceNorm1d, (3, 4), {"track_running_stats": True}),
    (nn.InstanceNorm2d, (3, 2, 4), {"track_running_stats": True, "affine": True, "momentum": 0.3}),
    (nn.InstanceNorm3d, (3, 2, 2, 4), {"track_running_stats": True}),
]


@pytest.mark.parametrize(("kind", "shape", "settings"), LAYERS)
def test_all_norms_can_be_pooled(kind, shape, settings):
    model, batch = norm_of(kind, shape, 11, **settings)
    whole = copy.deepcopy(model)
    towers = Towers(model, 4, statistics="pooled")
    for _ in range(3):
        run(towers, batch)
        whole(batch)
    for ours, theirs in zip(statistics_of(model[1]), statistics_of(whole[1]), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-12)


@pytest.mark.parametrize(("kind", "shape", "settings"), LAYERS)
def test_all_norms_can_be_averaged(kind, shape, settings):
    model, batch = norm_of(kind, shape, 11, **settings)
    towers = Towers(model, 4)
    for _ in range(3):
        ended = []
        for part in torch.tensor_split(batch, 4):
            copied = copy.deepcopy(model)
            copied(part)
            ended.append((len(part), statistics_of(copied[1])))
        run(towers, batch)
        for index, ours in enumerate(statistics_of(model[1])[:2]):
            expected = sum(rows * found[index] for rows, found in ended) / 11
            assert torch.allclose(ours, expected, rtol=1e-13)
        assert torch.equal(model[1].num_batches_tracked, ended[0][1][2])


@pytest.mark.parametrize("mode", ["mean", "pooled", "first"])
def test_norms_without_running_statistics_need_nothing(mode):
    model, batch = norm_of(nn.BatchNorm1d, (5,), 8, track_running_stats=False)
    run(Towers(model, 3, statistics=mode), batch)
    assert not list(model.buffers())


@pytest.mark.parametrize("mode", ["mean", "pooled", "first"])
def test_statistics_that_a_norm_does_not_track_any_more(mode):
    model, batch = norm_of(nn.BatchNorm1d, (5,), 8)
    model[1].track_running_stats = False
    run(Towers(model, 3, statistics=mode), batch)
    assert not model[1].running_mean.any()
    assert model[1].running_var.eq(1).all()


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


@pytest.mark.long
@pytest.mark.parametrize("mode", ["mean", "pooled", "first"])
def test_norms_freeze_and_thaw_between_steps(mode):
    """As in a loop that runs the unsplit model while the norm is frozen: nothing of it is left behind."""
    model, twin = norm_net(), norm_net()
    towers = Towers(model, 3, statistics=mode)
    other = Towers(twin, 3, statistics=mode)
    for rows, is_training in ((7, True), (8, False), (9, True), (6, False), (7, True)):
        model[1].train(is_training)
        before = statistics_of(model[1])
        run(towers, pictures(rows))
        if is_training:
            run(other, pictures(rows))
            before = statistics_of(twin[1])
        assert all(map(torch.equal, statistics_of(model[1]), before))
    assert model[1].num_batches_tracked == 3


@pytest.mark.parametrize("mode", ["mean", "pooled", "first"])
def test_only_one_of_two_norms_is_frozen(mode):
    model = nn.Sequential(*norm_net(), nn.BatchNorm2d(4).double())
    model[1].eval()
    before = statistics_of(model[1])
    run(Towers(model, 3, statistics=mode), pictures(7))
    assert all(map(torch.equal, statistics_of(model[1]), before))
    assert model[3].num_batches_tracked == 1


class Branch(nn.Module):
    """Uses its norm in the towers that `uses` says."""

    def __init__(self, norm=None):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3, dtype=FLOAT64))
        self.norm = nn.BatchNorm1d(3, momentum=None).double() if norm is None else norm
        self.uses = set()
        self.tower = 0

    def forward(self, x):
        x = x * self.scale
        return self.norm(x) if self.tower in self.uses else x


def run_branches(towers, batch):
    for tower in towers(batch):
        towers.model.tower = tower.index
        tower.backward(towers.model(tower.batch).square().mean())
    towers.average()


def rows_of(count):
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(count), dtype=FLOAT64) + 2


@pytest.mark.parametrize("uses", [{2}, {0}, {1, 2}])
def test_a_norm_that_some_towers_do_not_use(uses):
    """Pooled over those that did; averaged with the shared values of those that did not."""
    batch, parts = rows_of(10), rows_of(10).tensor_split(4)
    for mode in ("mean", "pooled", "first"):
        model = Branch()
        model.uses = uses
        whole = copy.deepcopy(model.norm)
        run_branches(Towers(model, 4, statistics=mode), batch)
        if mode == "pooled":
            whole(torch.cat([parts[tower] for tower in sorted(uses)]))
            expected = statistics_of(whole)
        else:
            ended = []
            for tower, part in enumerate(parts):
                copied = copy.deepcopy(whole)
                if tower in uses:
                    copied(part)
                ended.append(statistics_of(copied))
            sums = [sum(len(p) * s[i] for p, s in zip(parts, ended, strict=True)) / 10 for i in range(2)]
            expected = ended[0] if mode == "first" else [*sums, torch.tensor(1)]
        for ours, theirs in zip(statistics_of(model.norm), expected, strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-12)


@pytest.mark.parametrize("mode", ["mean", "pooled", "first"])
def test_a_norm_that_no_tower_uses_stays_as_it_is(mode):
    model = Branch(nn.BatchNorm1d(3))
    model.norm.running_mean.normal_()
    before = statistics_of(model.norm)
    run_branches(Towers(model, 4, statistics=mode), rows_of(10))
    assert all(map(torch.equal, statistics_of(model.norm), before))


@pytest.mark.parametrize("mode", ["mean", "pooled", "first"])
def test_a_tower_without_rows_hands_in_nothing(mode):
    model, fewer = norm_net(), norm_net()
    run(Towers(model, 5, statistics=mode), pictures(3))
    run(Towers(fewer, 3, statistics=mode), pictures(3))
    for ours, theirs in zip(statistics_of(model[1]), statistics_of(fewer[1]), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-14)


def test_first_statistics_are_tower_zeros_beside_infinite_ones():
    model = norm_net(torch.float32)
    batch = pictures(6, torch.float32)
    mean, _, _ = whole_batch_statistics(model, [batch[:3]])
    batch[4:] = torch.inf
    towers = Towers(model, 2, statistics="first")
    for tower in towers(batch):
        tower.backward(
            model(tower.batch).square().mean() if tower.index == 0 else 0 * model(tower.batch).sum()
        )
    towers.average()
    assert torch.equal(model[1].running_mean, mean)


@pytest.mark.parametrize("mode", ["mean", "pooled", "first"])
def test_buffers_that_a_checkpoint_puts_in_place(mode):
    """`load_state_dict(assign=True)` puts other tensors where the layer keeps its statistics."""
    model, twin = norm_net(), norm_net()
    towers, other = Towers(model, 3, statistics=mode), Towers(twin, 3, statistics=mode)
    run(towers, pictures(7))
    run(other, pictures(7))
    statistics = {n: t.clone() for n, t in twin.state_dict().items() if "running" in n or "num" in n}
    twin.load_state_dict(statistics, strict=False, assign=True)
    run(towers, pictures(8))
    run(other, pictures(8))
    assert all(map(torch.equal, statistics_of(model[1]), statistics_of(twin[1])))


@pytest.mark.parametrize("mode", ["mean", "pooled", "first"])
def test_lazy_norms_once_they_have_a_shape(mode):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.LazyBatchNorm2d()).double()
    with pytest.raises(ConfigError, match=r"parameter 1.weight has no shape yet"):
        Towers(model, 3, statistics=mode)
    model(pictures(2))
    twin = copy.deepcopy(model)
    run(Towers(model, 1, statistics=mode), pictures(7))
    twin(pictures(7))
    for ours, theirs in zip(statistics_of(model[1]), statistics_of(twin[1]), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-12)


def test_lazy_norms_without_parameters_have_no_shape_either():
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.LazyBatchNorm2d(affine=False))
    with pytest.raises(ConfigError, match=r"buffer 1.running_mean has no shape yet: run the model once"):
        Towers(model, 3)


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
    with pytest.raises(UsageError, match=r"1, a BatchNorm2d, ran 2 times in one pass.*statistics='mean'"):
        run(Towers(model, 2, statistics="pooled"), pictures(8))
    assert model[1].momentum == 0.1


def test_a_norm_that_runs_twice_can_be_averaged():
    model = norm_net()
    model.append(nn.Conv2d(4, 4, 1).double())
    model.append(model[1])
    found = [whole_batch_statistics(model, [part]) for part in pictures(8).tensor_split(2)]
    run(Towers(model, 2), pictures(8))
    assert torch.allclose(model[1].running_mean, (found[0][0] + found[1][0]) / 2, rtol=1e-14)
    assert torch.allclose(model[1].running_var, (found[0][1] + found[1][1]) / 2, rtol=1e-14)
    assert model[1].num_batches_tracked == 2


def test_a_pass_may_look_at_a_norm_in_eval_mode_before_its_forward():
    plain, looking = norm_net(), norm_net()
    run(Towers(plain, 2, statistics="pooled"), pictures(8))
    towers = Towers(looking, 2, statistics="pooled")
    for tower in towers(pictures(8)):
        with torch.no_grad():
            looking.eval()(tower.batch)
        tower.backward(looking.train()(tower.batch).square().mean())
    towers.average()
    assert all(map(torch.equal, statistics_of(plain[1]), statistics_of(looking[1])))


@pytest.mark.parametrize("is_training", [True, False])
def test_sync_batch_norm_is_refused_with_the_remedy(is_training):
    model = nn.SyncBatchNorm.convert_sync_batchnorm(norm_net()).train(is_training)
    with pytest.raises(
        ConfigError, match=r"1 is a SyncBatchNorm.*the bits would depend on.*'pooled'"
    ) as caught:
        Towers(model, 2)
    remedy = str(caught.value).partition("undo it (")[2].partition(")")[0]
    exec(remedy, {"layer": model[1], "nn": nn})
    run(Towers(model.train(), 2, statistics="pooled"), pictures(8))
    plain = norm_net()
    run(Towers(plain, 2, statistics="pooled"), pictures(8))
    assert digest(model) == digest(plain)


def test_an_unknown_mode_is_refused():
    with pytest.raises(ConfigError, match="statistics = 'median': expected one of mean, pooled, first"):
        Towers(norm_net(), 2, statistics="median")
