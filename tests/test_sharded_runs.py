"""Steps, checkpoints and runs with a sharded optimizer: those of the plain one, on any number of workers."""

import math

import pytest
import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import samestep
from samestep import LostWorkerError, ShardedOptimizer, Step, Towers

from .cases import mostly_long
from .simulation import Faults, Killed, values
from .test_sharded_optimizer import ALONE, Net, batch_of, loss_of, make, same
from .test_trainer import examples
from .town import Town


def parts(job, *, sharded, **settings):
    """All that belongs to a run with a schedule, an average of weights and clipping."""
    model = Net()
    towers = Towers(model, 7, job=job, noise_every=2)
    optimizer = make(towers, AdamW, sharded=sharded, params=model.parameters(), lr=0.02)
    settings = {
        "clip_norm": 0.5,
        "scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, 12),
        "averaged_model": AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
        **settings,
    }
    return Step(towers, loss_of, optimizer, **settings)


def take(step, count):
    """Take steps; in the third the gradient is not finite, and after it a layer is thawed."""
    reports = []
    for _ in range(count):
        batch = batch_of(step.towers.step)
        if step.towers.step == 2:
            batch["x"][4] = math.nan
        if step.towers.step == 3:
            step.towers.model.frozen.requires_grad_(True)
        reports.append(step(batch))
    return reports


def ending(step):
    averaged = step.averaged_model.module
    return samestep.digest(step.towers.model), samestep.digest(averaged), step.optimizer.state_dict()


@pytest.mark.long
@pytest.mark.parametrize("settings", [{"on_nonfinite": "skip"}, {"autocast": torch.float16}], ids=str)
def test_a_step_clips_skips_and_averages_weights_as_unsharded(settings):
    def work(job, *, sharded):
        step = parts(job, sharded=sharded, **settings)
        reports = take(step, 6)
        assert [report.skipped for report in reports] == [False, False, True, False, False, False]
        return reports, ending(step)

    expected = work(ALONE, sharded=False)
    for num_workers in (1, 2, 4):
        for found in values(lambda job: work(job, sharded=True), num_workers):
            assert same(found[1], expected[1])
            assert [r.grad_norm for r in found[0]] == pytest.approx(
                [r.grad_norm for r in expected[0]], nan_ok=True
            )


def saved(job, path, *, sharded, count=3):
    step = parts(job, sharded=sharded, on_nonfinite="skip")
    take(step, count)
    samestep.save(path, **state_of(step))
    return ending(step)


def state_of(step):
    names = ("towers", "averaged_model", "optimizer", "scheduler")
    return {"model": step.towers.model, **{name: getattr(step, name) for name in names}}


def bytes_of(path):
    return {file.name: file.read_bytes() for file in path.iterdir()}


def gone_on(job, path, *, sharded):
    step = parts(job, sharded=sharded, on_nonfinite="skip")
    if step.towers.step == 0:
        take(step, 1)  # so that there is something to replace
    step.towers.model.frozen.requires_grad_(True)
    samestep.load(path, **state_of(step))
    for entry in step.optimizer.state.values():
        assert all(t.untyped_storage().nbytes() == t.nbytes for t in entry.values())  # not all workers' parts
    take(step, 3)
    return ending(step)


@pytest.fixture(scope="module")
def unsharded(tmp_path_factory):
    """A checkpoint of a plain run, after a layer was thawed, and how a run from it ends."""
    path = tmp_path_factory.mktemp("plain") / "checkpoint"
    saved(ALONE, path, sharded=False, count=5)
    return path, gone_on(ALONE, path, sharded=False)


@pytest.mark.parametrize("num_workers", mostly_long([3, 1], 1))
def test_checkpoints_have_the_bytes_of_unsharded_ones(tmp_path, unsharded, num_workers):
    values(lambda job: saved(job, tmp_path / "sharded", sharded=True, count=5), num_workers)
    assert bytes_of(tmp_path / "sharded") == bytes_of(unsharded[0])


@pytest.mark.long
@pytest.mark.parametrize("num_workers", [4, 1, 2])
def test_and_are_loaded_on_any_number_of_workers(unsharded, num_workers):
    path, expected = unsharded
    for found in values(lambda job: gone_on(job, path, sharded=True), num_workers):
        assert same(found, expected)


class OneCycleLR:
    """Takes no state."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        if state:
            raise KeyError("total_steps")


def test_what_does_not_fit_changes_nothing(unsharded):
    def work(job):
        step = parts(job, sharded=True)
        take(step, 1)
        before = ending(step)
        objects = {"model": step.towers.model, "towers": step.towers}
        other = ShardedOptimizer(step.towers, AdamW, step.towers.model.conv.parameters())
        with pytest.raises(samestep.DataError, match="its state of optimizer does not fit"):
            samestep.load(unsharded[0], **objects, optimizer=other)
        with pytest.raises(samestep.DataError, match="its state of scheduler does not fit"):
            samestep.load(unsharded[0], **objects, optimizer=step.optimizer, scheduler=OneCycleLR())
        return same(ending(step), before)

    assert values(work, 2) == [True] * 2


def trainer_of(job, run_dir, *, sharded, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 80), nn.Dropout(0.2), nn.ReLU(), nn.Linear(80, 2))
    towers = Towers(model, 7, job=job, seed=3)
    optimizer = make(towers, AdamW, sharded=sharded, params=model.parameters(), lr=0.01)
    step = Step(towers, lambda m, batch: nn.functional.cross_entropy(m(batch[0]), batch[1]), optimizer)
    loader = samestep.TowerLoader(examples(), 10, towers, seed=3)
    return samestep.Trainer(step, loader, run_dir=run_dir, checkpoint_every=5, **options)


@pytest.mark.long
def test_a_trainer_resumes_on_other_workers_sharded_or_not(tmp_path):
    plain = trainer_of(ALONE, tmp_path / "plain", sharded=False, steps=15).run()
    path = tmp_path / "sharded"
    values(lambda job: trainer_of(job, path, sharded=True, steps=6).run(), 3)
    trainer_of(ALONE, path, sharded=False, steps=8).run()
    found = values(lambda job: trainer_of(job, path, sharded=True, steps=15).run(), 2)
    assert found == [plain] * 2
    first, second = (folder / "checkpoints" / "step-00000015" for folder in (tmp_path / "plain", path))
    assert bytes_of(first) == bytes_of(second)


@pytest.mark.long
def test_nobody_goes_on_without_a_lost_worker(tmp_path, capsys):
    outcomes = Town(3, 0, Faults(killed={1: 60})).run(
        lambda job: trainer_of(job, tmp_path, sharded=True, steps=30).run()
    )
    assert isinstance(outcomes[1].error, Killed)
    for rank in (0, 2):
        assert isinstance(outcomes[rank].error, LostWorkerError)
    line = "samestep: the optimizer is sharded, so all workers end if one is lost; the same command then"
    assert capsys.readouterr().err.count(line) == 1
    plain = trainer_of(ALONE, tmp_path / "plain", sharded=False, steps=30).run()
    assert values(lambda job: trainer_of(job, tmp_path, sharded=True, steps=30).run(), 2) == [plain] * 2


def test_nor_in_a_loop_of_one_s_own(capsys):
    def work(job):
        step = parts(job, sharded=True)
        with samestep.Elastic(**state_of(step)) as elastic:
            while step.towers.step < 20:
                elastic(step, batch_of(step.towers.step))

    outcomes = Town(3, 1, Faults(killed={2: 60})).run(work)
    assert all(isinstance(outcomes[rank].error, LostWorkerError) for rank in (0, 1))
    assert "the optimizer is sharded" in capsys.readouterr().err
