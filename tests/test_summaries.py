import math
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.optim.lr_scheduler import StepLR

from samestep import cli, recipes
from samestep.app.evaluation import Evaluation
from samestep.app.hooks import Hooks
from samestep.app.lock import RunLock
from samestep.app.loggers.tensorboard import TensorBoard, write_metrics
from samestep.app.run_folder import all_checkpoints
from samestep.app.settings import Settings
from samestep.batches.batch import LocalBatch
from samestep.checkpoint.saving import load
from samestep.data.loader import TowerLoader
from samestep.identity import digest
from samestep.recipes.digits.data import Digits
from samestep.recipes.digits.recipe import accuracy
from samestep.towers.step import Step
from samestep.towers.towers import Towers
from samestep.workers.job import Job

from .jobs import job_of
from .runs import train

pytestmark = pytest.mark.sampled(5)

JOB = Job(torch.device("cpu"))
DECAY = 0.01
LAYERS = ["0", "2", "5"]
PARAMETERS = ["0.weight", "0.bias", "1.weight", "1.bias", "5.weight", "5.bias"]


def decay_of(model):
    return {"weight decay": DECAY * model[5].weight.square().sum()}


@dataclass(frozen=True)
class Tiny(Settings):
    """A small net on the digits, with all that summaries show; `bad_step` is NaN, or raises `error`."""

    towers: int = 4
    batch_size: int = 32
    steps: int = 8
    log_every: int = 3

    recipe: ClassVar[str] = "tiny"
    bad_step: ClassVar[int | None] = None
    error: ClassVar[BaseException | None] = None

    def build(self, job):
        torch.manual_seed(self.seed)
        layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Dropout(0.2)]
        model = nn.Sequential(*layers, nn.Linear(144, 10))
        towers = Towers(model, self.towers, job=job, seed=self.seed, noise_every=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def loss_of(model, batch):
            loss = F.cross_entropy(model(batch[0]), batch[1]) + decay_of(model)["weight decay"]
            if towers.step + 1 != self.bad_step:
                return loss
            if self.error is not None:
                raise self.error
            return loss * math.nan

        step = Step(towers, loss_of, optimizer, scheduler=StepLR(optimizer, 2, 0.5), clip_norm=1.0)
        loader = TowerLoader(Digits("train", augment=True), self.batch_size, towers, seed=self.seed)
        return self.trainer(
            step, loader, evaluate=Evaluation(Digits("test", augment=False), accuracy), terms=decay_of
        )


@pytest.fixture(autouse=True)
def without_failure(monkeypatch):
    monkeypatch.setattr(Tiny, "bad_step", None)
    monkeypatch.setattr(Tiny, "error", None)


def take_steps(run_dir, trainer, num_steps, every, between=None):
    """Take steps with summaries, and return their reports."""
    trainer.run_dir, trainer.steps, trainer.loggers = run_dir, 1000, [TensorBoard(every)]
    reports = []
    with RunLock(run_dir, JOB) as lock, Hooks(trainer, lock) as hooks:
        for batch, step in zip(trainer.loader, range(num_steps), strict=False):
            hooks.before_step(batch)
            reports.append(trainer.step(batch))
            hooks.after_step(reports[-1])
            if between is not None:
                between(step)
    return reports


def a_trainer(step, batches, **options):
    """A trainer for a step on batches that are at hand."""
    trainer = Tiny().build(JOB)
    trainer.step, trainer.loader = step, batches
    for name, value in {"terms": None, **options}.items():
        setattr(trainer, name, value)
    return trainer


def read(folder):
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0, "images": 0})
    return events.Reload()


def scalars(folder, tag):
    return {event.step: event.value for event in read(folder).Scalars(tag)}


def same(found, expected):
    """Compare with values that were rounded to float32 when they were written."""
    assert found.keys() == expected.keys()
    assert list(found.values()) == pytest.approx(list(expected.values()), rel=1e-6)


def hooks_of(model):
    return [hook for layer in model.modules() for hook in layer._forward_hooks.values()]


def test_every_tag_is_there_at_the_steps_that_are_due(tmp_path):
    take_steps(tmp_path, Tiny().build(JOB), 5, every=2)
    events = read(tmp_path / "summaries")
    tags = events.Tags()
    assert set(tags["scalars"]) == {
        *("loss/total", "loss/total (smoothed)", "loss/weight decay", "loss/weight decay (smoothed)"),
        *(f"towers/{tower}/loss" for tower in range(4)),
        *(f"sparsity/{name}" for name in LAYERS),
        *("step/learning rate", "step/rows per second", "step/seconds", "step/gradient norm"),
        *("step/gradient noise scale", "step/peak memory, GiB"),
    }
    assert set(tags["histograms"]) == {
        *(f"weights/{name}" for name in PARAMETERS),
        *(f"weight gradients/{name}" for name in PARAMETERS),
        *(f"outputs/{name}" for name in LAYERS),
    }
    assert set(tags["images"]) == {f"pictures/{index}" for index in range(4)}
    assert {e.step for tag in tags["scalars"] for e in events.Scalars(tag)} == {2, 4}
    assert {e.step for tag in tags["histograms"] for e in events.Histograms(tag)} == {2, 4}
    assert {(e.step, e.width, e.height) for tag in tags["images"] for e in events.Images(tag)} == {
        (2, 8, 8),
        (4, 8, 8),
    }


@pytest.mark.long
def test_losses_are_those_of_the_reports(tmp_path):
    reports = take_steps(tmp_path, Tiny().build(JOB), 5, every=1)
    folder = tmp_path / "summaries"
    same(scalars(folder, "loss/total"), {r.step + 1: r.loss for r in reports})
    same(scalars(folder, "towers/3/loss"), {r.step + 1: r.tower_losses[3] for r in reports})
    same(scalars(folder, "step/gradient norm"), {r.step + 1: r.grad_norm for r in reports})


@pytest.mark.parametrize("most", [1, 2, 100])
def test_the_smoothed_loss_counts_every_step_however_many_reports_are_kept(monkeypatch, tmp_path, most):
    monkeypatch.setattr("samestep.app.scalars._MOST_REPORTS", most)
    reports = take_steps(tmp_path, Tiny().build(JOB), 6, every=3)

    def smoothed(step):
        decays = [0.9 ** (step - earlier) for earlier in range(1, step + 1)]
        values = [report.loss for report in reports[:step]]
        return float(np.average(values, weights=decays))

    same(scalars(tmp_path / "summaries", "loss/total (smoothed)"), {3: smoothed(3), 6: smoothed(6)})


@pytest.mark.long
def test_terms_and_the_learning_rate_are_those_that_the_step_was_taken_with(tmp_path):
    experiment = Tiny().build(JOB)
    expected = decay_of(experiment.model)["weight decay"].item()
    take_steps(tmp_path, experiment, 4, every=1)
    folder = tmp_path / "summaries"
    assert scalars(folder, "loss/weight decay")[1] == pytest.approx(expected)
    same(scalars(folder, "step/learning rate"), {1: 0.1, 2: 0.1, 3: 0.05, 4: 0.05})


def test_each_group_of_parameters_has_its_learning_rate(tmp_path):
    experiment = Tiny().build(JOB)
    groups = experiment.step.optimizer.param_groups
    groups.append({**groups[0], "params": [groups[0]["params"].pop()], "lr": 0.7})
    experiment.step.scheduler = None
    take_steps(tmp_path, experiment, 1, every=1)
    assert scalars(tmp_path / "summaries", "step/learning rate/1")[1] == pytest.approx(0.7)


def test_histograms_hold_the_weights_after_the_update_and_the_average_that_made_it(tmp_path):
    experiment = Tiny().build(JOB)
    take_steps(tmp_path, experiment, 2, every=2)
    events = read(tmp_path / "summaries")
    for name, parameter in experiment.model.named_parameters():
        for kind, values in (("weights", parameter.detach()), ("weight gradients", parameter.grad)):
            (event,) = events.Histograms(f"{kind}/{name}")
            found = event.histogram_value
            assert (found.min, found.max, found.num) == (values.min(), values.max(), values.numel())
            assert sum(found.bucket) == values.numel()
            assert found.sum == pytest.approx(float(values.double().sum()))
            assert found.sum_squares == pytest.approx(float(values.double().square().sum()))


def test_activations_are_those_of_the_first_tower_alone(tmp_path):
    experiment = Tiny().build(JOB)
    outputs = []
    experiment.model[3].register_forward_hook(
        lambda _, inputs, output: outputs.append(output.detach().clone())
    )
    take_steps(tmp_path, experiment, 1, every=1)
    assert len(outputs) == 4
    folder = tmp_path / "summaries"
    zeros = float((outputs[0] == 0).double().mean())
    assert scalars(folder, "sparsity/2")[1] == pytest.approx(zeros)
    assert 0.1 < zeros < 0.9
    (event,) = read(folder).Histograms("outputs/2")
    assert event.histogram_value.num == outputs[0].numel()
    assert event.histogram_value.max == float(outputs[0].max())


def test_a_layer_that_works_in_place_does_not_change_what_is_shown_of_the_one_before(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 1))
    towers = Towers(model, 1, job=JOB)
    step = Step(towers, lambda m, x: m(x).square().mean(), torch.optim.SGD(model.parameters(), lr=0.1))
    batch = torch.randn(6, 3)
    lowest = model[0](batch).min().item()
    take_steps(tmp_path, a_trainer(step, [batch]), 1, every=1)
    (event,) = read(tmp_path / "summaries").Histograms("outputs/0")
    assert event.histogram_value.min == pytest.approx(lowest)
    assert lowest < 0
    assert read(tmp_path / "summaries").Tags()["images"] == []


def test_towers_without_rows_have_no_loss(tmp_path):
    take_steps(tmp_path, replace(Tiny(), batch_size=3).build(JOB), 1, every=1)
    tags = read(tmp_path / "summaries").Tags()
    assert "towers/2/loss" in tags["scalars"]
    assert "towers/3/loss" not in tags["scalars"]
    assert len(tags["images"]) == 3


def test_hooks_are_there_only_while_a_step_is_taken_that_is_due(tmp_path):
    experiment = Tiny().build(JOB)
    seen = []
    experiment.step.loss_fn = lambda model, batch: seen.append(len(hooks_of(model))) or model(batch[0]).mean()
    take_steps(tmp_path, experiment, 2, every=2)
    assert seen == [0, 0, 0, 0, 3, 3, 3, 3]
    assert hooks_of(experiment.model) == []


def test_hooks_are_gone_after_a_step_that_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(Tiny, "bad_step", 2)
    monkeypatch.setattr(Tiny, "error", KeyboardInterrupt())
    experiment = Tiny().build(JOB)
    with pytest.raises(KeyboardInterrupt):
        take_steps(tmp_path, experiment, 2, every=2)
    assert hooks_of(experiment.model) == []


def test_compiled_models_are_not_hooked(tmp_path):
    experiment = Tiny().build(JOB)
    experiment.model[0]._compiled_call_impl = object()  # what nn.Module.compile() sets
    experiment.run_dir = tmp_path
    logger = TensorBoard(every=1)
    logger.on_start(experiment)
    logger.before_step(experiment, None)
    assert hooks_of(experiment.model) == []
    logger.on_end(experiment)


@pytest.mark.long
def test_the_bits_are_the_same_with_and_without_summaries(tmp_path):
    digests = set()
    for every in (1, 3, 1000):
        experiment = Tiny().build(JOB)
        take_steps(tmp_path / str(every), experiment, 6, every)
        digests.add(digest(experiment.model))
    assert len(digests) == 1


def test_other_workers_write_nothing(tmp_path):
    experiment = Tiny(run_dir=tmp_path).build(JOB)
    experiment.step.towers._job = job_of(1, 2)
    with Hooks(experiment, RunLock(tmp_path, JOB)) as hooks:
        hooks.before_step(None)
        assert hooks_of(experiment.model) == []
        hooks.after_step(SimpleNamespace(step=0))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_a_run_that_goes_on_replaces_what_it_repeats(tmp_path, monkeypatch):
    settings = Tiny(run_dir=tmp_path / "stopped", checkpoint_every=4, summary_every=1)
    with monkeypatch.context() as failing:
        failing.setattr(Tiny, "bad_step", 7)
        failing.setattr(Tiny, "error", KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            train(settings, JOB)
    assert list(scalars(settings.run_dir / "summaries", "loss/total")) == [1, 2, 3, 4, 5, 6]
    train(settings, JOB)
    train(replace(settings, run_dir=tmp_path / "whole"), JOB)
    noise_scales = [scalars(path / "summaries", "step/gradient noise scale") for path in tmp_path.iterdir()]
    assert noise_scales[0] == noise_scales[1]
    assert noise_scales[0].keys() & {7, 8}  # it is not told where it is infinite
    for tag in ("loss/total", "towers/1/loss", "step/learning rate"):
        events = read(settings.run_dir / "summaries").Scalars(tag)
        assert [event.step for event in events] == [1, 2, 3, 4, 5, 6, 7, 8]
        assert {e.step: e.value for e in events} == scalars(tmp_path / "whole" / "summaries", tag)


@pytest.mark.long
def test_starting_over_deletes_old_summaries(tmp_path):
    train(Tiny(run_dir=tmp_path, summary_every=1), JOB)
    train(Tiny(run_dir=tmp_path, summary_every=4, fresh=True), JOB)
    assert list(scalars(tmp_path / "summaries", "loss/total")) == [4, 8]
    assert list(scalars(tmp_path / "summaries", "test accuracy")) == [8]


def test_metrics_of_evaluations_stand_at_their_checkpoints_steps(tmp_path):
    write_metrics(tmp_path, 4, {"precision @ 1": 0.5})
    write_metrics(tmp_path, 8, {"precision @ 1": 0.75})
    assert scalars(tmp_path / "summaries" / "evaluation", "precision @ 1") == {4: 0.5, 8: 0.75}


def test_a_loss_that_is_not_finite_ends_the_run_and_leaves_the_last_checkpoint(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(recipes, "RECIPES", {"tiny": Tiny})
    monkeypatch.setattr(Tiny, "bad_step", 6)
    options = f"--run-dir {tmp_path} --workers 1 --checkpoint-every 4 --summary-every 1"
    assert cli.main(f"train tiny {options}".split()) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith(
        "samestep: error: step 5: the averaged gradient is not finite (tower 0, rows 0 to 7"
    )
    model = Tiny().build(JOB).model
    manifest = load(all_checkpoints(tmp_path)[-1], model=model)
    assert manifest.step == 4
    assert manifest.digest == digest(model)
    assert all(bool(value.isfinite().all()) for value in model.state_dict().values())
    assert list(scalars(tmp_path / "summaries", "loss/total")) == [1, 2, 3, 4, 5]


def test_sums_with_names_are_shown(tmp_path):
    model = nn.Linear(3, 1)
    step = Step(
        Towers(model, 2, job=JOB),
        lambda model, x: {"a": model(x).sum(), "b": model(x).square().sum()},
        torch.optim.SGD(model.parameters(), lr=0.1),
        counts={"a": len, "b": torch.numel},
    )
    reports = take_steps(tmp_path, a_trainer(step, [torch.randn(6, 3)] * 4), 4, every=2)
    folder = tmp_path / "summaries"
    for name in ("a", "b"):
        same(scalars(folder, f"loss/{name}"), {n: reports[n - 1].losses[name] for n in (2, 4)})
    same(scalars(folder, "loss/total"), {n: reports[n - 1].loss for n in (2, 4)})
    assert len(scalars(folder, "loss/b (smoothed)")) == 2


def test_pictures_are_stretched_to_the_whole_range(tmp_path):
    from samestep.app.loggers.tensorboard import _pictures

    pictures = torch.randn(2, 3, 5, 6) * 7
    found = _pictures(LocalBatch(6, {2: (pictures, 0), 3: (pictures.mul(255).byte(), 0), 4: (pictures, 0)}))
    assert [picture.shape for picture in found] == [(3, 5, 6)] * 4
    assert [(float(p.min()), float(p.max())) for p in found[:2]] == [(0, 1), (0, 1)]
    assert found[2].dtype == torch.uint8
    assert _pictures((torch.zeros(2, 4, 5, 6), torch.zeros(2, 3, 5, 6))) == []
    assert len(_pictures({"x": torch.full((9, 1, 2, 2), 3.0)})) == 4
