"""The segmentation recipe: its net, loss, schedule and metrics, and a run on pictures in a folder."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import samestep
from samestep import cli
from samestep.app.run_folder import read_digest
from samestep.app.settings import read_settings
from samestep.errors import ConfigError
from samestep.recipes import RECIPES
from samestep.recipes.segmentation import shapes
from samestep.recipes.segmentation.recipe import (
    SegmentationNet,
    SegmentationSettings,
    count_pixels,
    decayed,
    loss_of,
    metrics_of,
    panels,
    terms_of,
)
from samestep.recipes.segmentation.shapes import Shapes
from samestep.workers.job import Job

from .runs import train

JOB = Job(torch.device("cpu"))
LOSS = {"ignore_label": 255, "weight_decay": 0.01}


@pytest.fixture
def settings(tmp_path, monkeypatch):
    monkeypatch.setattr(shapes, "NUM_TEST", 20)
    return SegmentationSettings(
        run_dir=tmp_path / "run", device="cpu", towers=4, batch_size=6, steps=4, crop_size=16, width=2
    )


def net(**options):
    torch.manual_seed(0)
    return SegmentationNet(**{"width": 4, **options})


def batch_of(rows, classes=4, ignored=0.3, size=16):
    """Return a batch in which the share of pixels to ignore differs from row to row."""
    generator = torch.Generator().manual_seed(1)
    pictures = torch.randn(rows, 3, size, size, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, classes, (rows, size, size), generator=generator, dtype=torch.uint8)
    shares = torch.linspace(0, 2 * ignored, rows)[:, None, None]
    return pictures, labels.masked_fill(torch.rand(labels.shape, generator=generator) < shares, 255)


# ---- the net -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(16, 16), (17, 30), (1, 1), (33, 8)])
def test_pictures_may_be_of_any_size(size):
    assert net(num_classes=5).eval()(torch.randn(2, 3, *size)).shape == (2, 5, *size)


def test_convolutions_before_norms_have_no_bias_and_he_s_start():
    model = net(width=16)
    convolutions = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Conv2d)}
    assert [name for name, layer in convolutions.items() if layer.bias is not None] == ["head"]
    assert len(convolutions) == 1 + sum(isinstance(layer, nn.BatchNorm2d) for layer in model.modules())
    for layer in convolutions.values():
        expected = math.sqrt(2 / layer.weight[0].numel())
        assert float(layer.weight.detach().std()) == pytest.approx(expected, rel=0.25)
    assert model.head.bias.tolist() == [0, 0, 0, 0]


# ---- the loss ----------------------------------------------------------------------------------------


def gradients_of_towers(model, batch, num_towers):
    towers = samestep.Towers(model, num_towers, job=JOB)
    for tower in towers(batch):
        loss = loss_of(model, tower.batch, **LOSS)
        tower.backward_sum(loss.total, loss.count)
    return towers.average(), [parameter.grad for parameter in model.parameters()]


@pytest.mark.sampled
@pytest.mark.parametrize("num_towers", [1, 3, 5, 7])
def test_pixels_to_ignore_weigh_nothing(num_towers):
    """The gradient is that of the mean over the other pixels of the batch, cut out one by one."""
    model = net().double().eval()
    pictures, labels = batch_of(5)
    labels[4] = 255  # with 5 towers, one that weighs nothing
    valid = (labels != 255).nonzero().tolist()
    logits = model(pictures)
    mean = sum(F.cross_entropy(logits[n, :, y, x], labels[n, y, x].long()) for n, y, x in valid) / len(valid)
    expected = torch.autograd.grad(mean, tuple(model.parameters()))
    report, found = gradients_of_towers(model, (pictures, labels), num_towers)
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12)
    assert report.count == len(valid)
    decay = terms_of(model, weight_decay=0.01)["weight decay"]
    assert report.loss == pytest.approx(float((mean + decay).detach()))


def test_weight_decay_is_on_the_weights_of_convolutions_alone():
    model = net()
    others, weights = decayed(model, 0.01)
    named = {parameter: name for name, parameter in model.named_parameters()}
    assert (weights["weight_decay"], others.get("weight_decay", 0)) == (0.01, 0)
    assert sorted(named[p] for p in weights["params"]) == sorted(
        f"{name}.weight" for name, layer in model.named_modules() if isinstance(layer, nn.Conv2d)
    )
    assert {named[p].rsplit(".")[-1] for p in others["params"] if p.ndim == 1} == {"weight", "bias"}
    assert len(weights["params"]) + len(others["params"]) == len(named)
    expected = 0.01 * sum(weight.detach().square().sum() for weight in weights["params"]) / 2
    assert float(terms_of(model, weight_decay=0.01)["weight decay"].detach()) == pytest.approx(
        float(expected)
    )


def test_an_update_follows_the_gradient_of_the_whole_loss():
    """Beside the decay that the optimizer adds, that of the gradient; and both before Adam scales them."""
    models = [net().double(), net().double()]
    batch = batch_of(4)
    optimizers = [
        torch.optim.Adam(decayed(models[0], 0.01), lr=0.1),
        torch.optim.Adam(models[1].parameters(), lr=0.1),
    ]
    for model, optimizer in zip(models, optimizers, strict=True):
        loss = loss_of(model, batch, **LOSS)
        mean = loss.total / loss.count
        if model is models[1]:
            mean = mean + terms_of(model, weight_decay=0.01)["weight decay"]
        mean.backward()
        optimizer.step()
    for got, wanted in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-10)


@pytest.mark.long
def test_the_learning_rate_falls_to_nothing_along_a_polynomial(settings):
    experiment = replace(settings, steps=5, learning_rate=0.02).build(JOB)
    rates = []
    for batch, _ in zip(experiment.loader, range(5), strict=False):
        rates.append([group["lr"] for group in experiment.step.optimizer.param_groups])
        experiment.step(batch)
    expected = [0.02 * (1 - step / 5) ** 0.9 for step in range(5)]
    assert rates == [pytest.approx([rate, rate]) for rate in expected]
    assert experiment.step.optimizer.param_groups[0]["lr"] == 0


@pytest.mark.long
def test_bfloat16_trains_as_float32_does(settings):
    losses = {}
    for autocast in ("none", "bf16"):
        experiment = replace(settings, autocast=autocast, width=8).build(JOB)
        batch = next(iter(experiment.loader))
        losses[autocast] = [experiment.step(batch).loss for _ in range(4)]
    assert losses["bf16"] == pytest.approx(losses["none"], rel=0.05)
    assert losses["none"][-1] < losses["none"][0]


# ---- the metrics -------------------------------------------------------------------------------------


class Fixed(nn.Module):
    """Predicts what it is given."""

    def __init__(self, predicted, classes):
        super().__init__()
        self.logits = F.one_hot(predicted, classes).permute(0, 3, 1, 2).float()

    def forward(self, _):
        return self.logits


def slow_metrics(labels, predicted, classes):
    """Class after class, pixel after pixel."""
    pixels = [
        (label, guess)
        for label, guess in zip(labels.flatten().tolist(), predicted.flatten().tolist(), strict=True)
        if label != 255
    ]
    ious = []
    for wanted in range(classes):
        both = sum(label == guess == wanted for label, guess in pixels)
        either = sum(wanted in pair for pair in pixels)
        ious += [both / either] if either else []
    return sum(ious) / len(ious), sum(label == guess for label, guess in pixels) / len(pixels)


@pytest.mark.parametrize(("classes", "used"), [(4, 4), (7, 5), (3, 1)])
def test_metrics_are_those_of_the_slow_twin(classes, used):
    _, labels = batch_of(4, used)
    guesses = torch.randint(0, used, labels.shape, generator=torch.Generator().manual_seed(2))
    predicted = torch.where(guesses < used // 2, guesses, labels.long().clamp(max=used - 1))
    totals = count_pixels(Fixed(predicted, classes), (None, labels), ignore_label=255)
    counts, _ = totals["pixels"]
    assert (counts.dtype, counts.shape) == (torch.int64, (classes, classes))
    assert int(counts.sum()) == int((labels != 255).sum())
    metrics = metrics_of(totals)
    assert list(metrics) == ["mean IoU", "pixel accuracy"]
    assert tuple(metrics.values()) == pytest.approx(slow_metrics(labels, predicted, classes))


def test_there_is_no_figure_of_nothing():
    nothing = {"pixels": (torch.zeros(4, 4, dtype=torch.int64), torch.tensor(0))}
    assert all(math.isnan(value) for value in metrics_of(nothing).values())


# ---- the run -----------------------------------------------------------------------------------------


def write_folder(folder, num_pictures=7):
    """Write shapes of different sizes as PNG files."""
    for split in ("train", "test"):
        for example in range(num_pictures):
            height, width = 24 + example, 40 - 5 * example
            for name, values in zip(("pictures", "labels"), Shapes(split).read(example), strict=True):
                path = folder / split / name / f"{example}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(values[:height, :width]).save(path)


OPTIONS = "--workers 1 --towers 3 --batch-size 5 --steps 4 --crop-size 16 --width 2 --device cpu"


def test_a_run_on_a_folder_its_evaluation_and_its_summaries(tmp_path, capsys):
    write_folder(tmp_path / "data")
    run_dir = tmp_path / "run"
    line = (
        f"train segmentation --data-dir {tmp_path / 'data'} --run-dir {run_dir} {OPTIONS} --summary-every 2"
    )
    assert cli.main(line.split()) == 0
    *_, metrics, last = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"mean IoU = 0\.\d{4}, pixel accuracy = 0\.\d{4}", metrics)
    assert re.fullmatch(r"weights sha256 [0-9a-f]{64}", last)
    assert cli.main(["eval", str(run_dir), "--workers", "1"]) == 0
    assert capsys.readouterr().out.strip().endswith(f"step 4: {metrics}")
    assert cli.main(["digest", str(run_dir)]) == 0
    assert capsys.readouterr().out.strip() == last.split()[-1]
    evaluated = EventAccumulator(str(run_dir / "summaries" / "evaluation")).Reload()
    assert evaluated.Tags()["scalars"] == ["mean IoU", "pixel accuracy"]
    shown = EventAccumulator(str(run_dir / "summaries"), size_guidance={"images": 0}).Reload()
    rows_of_towers = {0: 1, 1: 1}  # of the last batch of an epoch: 7 pictures in batches of 5
    assert set(shown.Tags()["images"]) == {
        f"towers/{tower}/pictures/{row}" for tower, rows in rows_of_towers.items() for row in range(rows)
    }
    assert {(e.step, e.width, e.height) for e in shown.Images("towers/0/pictures/0")} == {
        (2, 64, 16),
        (4, 64, 16),
    }
    assert {"loss/total", "loss/weight decay", "step/learning rate/1"} <= set(shown.Tags()["scalars"])


def test_panels_show_picture_label_map_prediction_and_errors(settings):
    experiment = replace(settings, batch_size=20, towers=2).build(JOB)
    batch = next(iter(experiment.loader)).slices[1]
    found = panels(experiment.model.eval(), batch, ignore_label=255)
    pictures, labels = batch
    assert (found.shape, found.dtype) == ((10, 3, 16, 64), torch.uint8)
    picture, label_map, predicted, errors = found.split(16, dim=3)
    assert torch.equal(picture, pictures.add(1).mul(127.5).round().to(torch.uint8))
    is_ignored = (labels == 255)[:, None].expand_as(label_map)
    assert (label_map[is_ignored] == 128).all()
    right = (label_map == predicted).all(dim=1, keepdim=True).expand_as(errors)
    assert (errors[right & ~is_ignored] == 0).all()
    assert (errors[~right & ~is_ignored] == 255).all()


@pytest.mark.long
def test_a_run_goes_on_with_the_same_bits_with_and_without_summaries(settings, tmp_path):
    train(replace(settings, run_dir=tmp_path / "whole", summary_every=1), JOB)
    train(replace(settings, checkpoint_every=3), JOB)
    newest = sorted((settings.run_dir / "checkpoints").iterdir())[-1]
    newest.rename(tmp_path / "aside")
    train(settings, JOB)
    assert read_digest(settings.run_dir) == read_digest(tmp_path / "whole") == read_digest(tmp_path / "aside")


def test_drawn_shapes_and_a_folder_are_not_the_same_experiment(settings, tmp_path):
    settings.write()
    assert read_settings(settings.run_dir, RECIPES) == settings
    with pytest.raises(ConfigError, match="was trained with data_dir = None, not "):
        replace(settings, data_dir=tmp_path).check_same_experiment()
    replace(settings, data_dir=tmp_path).write()
    assert read_settings(settings.run_dir, RECIPES) == replace(settings, data_dir=tmp_path)
    replace(settings, data_dir=tmp_path / "moved").check_same_experiment()
    with pytest.raises(ConfigError, match="not None: use the same value"):
        settings.check_same_experiment()


def test_every_test_picture_counts_once_whatever_its_size(settings, tmp_path):
    write_folder(tmp_path / "data")
    experiment = replace(settings, data_dir=tmp_path / "data").build(JOB)
    counts, _ = experiment.evaluate.totals(experiment.model, JOB)["pixels"]
    maps = [np.array(Image.open(path)) for path in (tmp_path / "data" / "test" / "labels").iterdir()]
    assert len({labels.shape for labels in maps}) == 7
    expected = sum(np.bincount(labels.ravel(), minlength=256)[:4] for labels in maps)
    assert counts.sum(1).tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"classes": 1}, "--classes 1: expected an integer from 2 to 256"),
        ({"classes": 300}, "--classes 300: expected an integer from 2 to 256"),
        ({"classes": 5}, "--classes 5: the shapes that are drawn without --data-dir have 4"),
        ({"ignore_label": 256}, "--ignore-label 256: expected an integer from 0 to 255"),
        ({"ignore_label": -1}, "--ignore-label -1: expected an integer from 0 to 255"),
        ({"crop_size": 15}, "--crop-size 15: expected an integer from 16 to 4096"),
        ({"width": 0}, "--width 0: expected an integer from 1 to 1024"),
        ({"learning_rate": 0.0}, "--learning-rate 0.0: expected a number above 0 and up to"),
        ({"learning_rate": math.nan}, "--learning-rate nan: expected a number above 0"),
        ({"power": -0.5}, "--power -0.5: expected a number from 0 to 100"),
        ({"weight_decay": -1.0}, "--weight-decay -1.0: expected a number from 0 to"),
        ({"loader_processes": -1}, "--loader-processes -1: expected an integer from 0 to 256"),
    ],
)
def test_settings_out_of_range_are_refused(options, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        SegmentationSettings(**options)
