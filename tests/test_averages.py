"""An `AveragedModel` goes on after a checkpoint as it would have without one."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import samestep
from samestep.checkpoint.objects import AverageCount
from samestep.errors import DataError
from samestep.recipes.cifar10.recipe import WeightAverage

pytestmark = pytest.mark.sampled(5)

KINDS = {
    "of all": AveragedModel,
    "exponential": lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
    "by a function": lambda model: AveragedModel(model, avg_fn=lambda a, p, n: a + (p - a) / (2 + n)),
    "with buffers": lambda m: AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True),
    "cifar10": WeightAverage,
}


def build(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    return model, KINDS[kind](model)


def update(model, averaged, steps):
    """Change the model's weights and statistics as training would, and take them into the averages."""
    for step in steps:
        torch.manual_seed(step)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))
            model(torch.randn(8, 3))
        averaged.update_parameters(model)


def digests(model, averaged):
    return samestep.digest(model), samestep.digest(averaged)


def with_a_break(kind, folder):
    model, averaged = build(kind)
    update(model, averaged, range(3))
    path = samestep.save(folder / "one", model=model, averaged_model=averaged)
    again = build(kind)
    samestep.load(path, model=again[0], averaged_model=again[1])
    assert digests(*again) == digests(model, averaged)
    update(*again, range(3, 6))
    return digests(*again)


def without(kind):
    whole = build(kind)
    update(*whole, range(6))
    return digests(*whole)


@pytest.mark.parametrize("kind", KINDS)
def test_averages_go_on_with_the_same_bits(tmp_path, kind):
    assert with_a_break(kind, tmp_path) == without(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_count_that_is_lost_shows(tmp_path, kind, monkeypatch):
    """torch copies the weights over the averages at the first update."""
    monkeypatch.setattr(AverageCount, "load_state_dict", lambda self, state: None)
    monkeypatch.setattr(samestep, "digest", lambda m: samestep.identity.digest(dict(m.named_parameters())))
    found, expected = with_a_break(kind, tmp_path), without(kind)
    assert found[0] == expected[0]
    assert found[1] != expected[1]


def test_the_averages_on_disk_have_the_model_s_own_names(tmp_path):
    model, averaged = build("of all")
    update(model, averaged, range(3))
    path = samestep.save(tmp_path / "one", model=model, averaged_model=averaged)
    model.load_state_dict(load_file(path / "averaged_model.safetensors"))
    assert samestep.digest(model) == samestep.digest(averaged.module)
    bare = build("of all")[0]
    samestep.load(path, model=build("of all")[0], averaged_model=bare)
    assert samestep.digest(bare) == samestep.digest(averaged.module)


def test_another_module_may_hold_the_averages(tmp_path):
    model, averaged = build("of all")
    update(model, averaged, range(3))
    path = samestep.save(tmp_path / "one", model=model, averaged_model=averaged.module)
    again = build("of all")
    samestep.load(path, model=again[0], averaged_model=again[1].module)
    assert samestep.digest(again[1].module) == samestep.digest(averaged.module)
    before = digests(*again)
    with pytest.raises(
        DataError, match="saved without the number of updates, as averaged_model was a plain module; pass"
    ):
        samestep.load(path, model=again[0], averaged_model=again[1])
    assert digests(*again) == before


class Noted(AveragedModel):
    """Has state of its own."""

    def __init__(self, model):
        super().__init__(model)
        self.register_buffer("largest", torch.zeros(2))


def test_all_state_of_a_subclass_comes_back(tmp_path):
    model = nn.Linear(1, 1)
    averaged, other = Noted(model), Noted(model)
    averaged.largest.fill_(3)
    path = samestep.save(tmp_path / "one", model=model, averaged_model=averaged)
    samestep.load(path, model=model, averaged_model=other)
    assert samestep.digest(other) == samestep.digest(averaged)


def compiled(module):
    return torch.compile(module, backend="eager")


def compiled_in_part(model):
    model[2] = compiled(model[2])
    return model


@pytest.mark.long
@pytest.mark.parametrize("change", [compiled, compiled_in_part])
@pytest.mark.parametrize("compile_first", [True, False])
def test_checkpoints_see_through_torch_compile(tmp_path, change, compile_first):
    def objects(is_compiled):
        model, _ = build("of all")
        model = change(model) if is_compiled else model
        averaged = AveragedModel(model)
        optimizer = torch.optim.AdamW(model.parameters())
        other = change(build("of all")[0]) if is_compiled else build("of all")[0]
        return {"model": model, "averaged_model": averaged, "optimizer": optimizer, "other": other}

    first, second = objects(compile_first), objects(not compile_first)
    update(first["model"], first["averaged_model"], range(3))
    update(first["other"], AveragedModel(first["other"]), range(9, 11))
    path = samestep.save(tmp_path / "one", **first)
    assert not any("_orig_mod" in file.read_text(errors="replace") for file in path.iterdir())
    samestep.load(path, **second)
    for name in ("model", "averaged_model", "other"):
        assert samestep.digest(second[name]) == samestep.digest(first[name])
    for each in (first, second):
        update(each["model"], each["averaged_model"], range(3, 6))
    assert samestep.digest(second["averaged_model"]) == samestep.digest(first["averaged_model"])


@pytest.mark.long
def test_averages_that_are_compiled_themselves(tmp_path):
    model, averaged = build("of all")
    update(model, averaged, range(2))
    path = samestep.save(tmp_path / "one", model=model, averaged_model=compiled(averaged))
    again = build("of all")
    samestep.load(path, model=again[0], averaged_model=again[1])
    assert digests(*again) == digests(model, averaged)
