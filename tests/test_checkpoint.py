import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import samestep
from samestep.checkpoint import all_checkpoints, checkpoint_path, keep_last, newest, read_digest
from samestep.errors import DataError, MissingFileError


def trained():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.randn(8, 3)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def fresh():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    return model, torch.optim.AdamW(model.parameters(), lr=1.0)


def test_what_is_saved_comes_back_bit_for_bit(tmp_path):
    model, optimizer = trained()
    path = samestep.save(
        tmp_path / "one", step=7, model=model, average=model, optimizer=optimizer, position=7
    )
    other, other_optimizer = fresh()
    manifest = samestep.load(path, model=other, average=other, optimizer=other_optimizer)
    assert manifest.step == 7
    assert manifest.digest == samestep.digest(other) == samestep.digest(model) == read_digest(path)
    assert str(other_optimizer.state_dict()) == str(optimizer.state_dict())


def test_weights_are_safetensors_that_any_tool_reads(tmp_path):
    model, _ = trained()
    path = samestep.save(tmp_path / "one", step=1, model=model)
    assert torch.equal(load_file(path / "model.safetensors")["0.weight"], model[0].weight)


def test_tied_weights_and_memory_formats(tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 3)).to(memory_format=torch.channels_last)
    model[1].weight = model[0].weight
    path = samestep.save(tmp_path / "one", step=1, model=model)
    digest = samestep.digest(model)
    with torch.no_grad():
        model[0].weight.zero_()
    samestep.load(path, model=model)
    assert samestep.digest(model) == digest


def test_nothing_unfinished_is_left(tmp_path):
    model, _ = trained()
    samestep.save(tmp_path / "one", step=1, model=model)
    samestep.save(tmp_path / "one", step=2, model=model)
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


@pytest.mark.parametrize("file", ["model.safetensors", "training.pt"])
@pytest.mark.parametrize("damage", ["truncate", "flip", "remove"])
def test_damage_is_named(tmp_path, file, damage):
    model, _ = trained()
    path = samestep.save(tmp_path / "one", step=1, model=model)
    content = bytearray((path / file).read_bytes())
    if damage == "remove":
        (path / file).unlink()
    else:
        content[-1] ^= 1
        (path / file).write_bytes(content[:-5] if damage == "truncate" else content)
    before = samestep.digest(model)
    with pytest.raises((DataError, MissingFileError), match=file):
        samestep.load(path, model=model)
    assert samestep.digest(model) == before


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        ("", "is no manifest"),
        ("[]", "is no manifest"),
        ('{"format": 99}', "format 99 is newer than 1"),
        ("{}", "is no"),
    ],
)
def test_manifests_that_are_none(tmp_path, manifest, message):
    model, _ = trained()
    path = samestep.save(tmp_path / "one", step=1, model=model)
    (path / "manifest.json").write_text(manifest)
    with pytest.raises(DataError, match=message):
        samestep.load(path, model=model)


def test_another_model_does_not_fit(tmp_path):
    model, _ = trained()
    path = samestep.save(tmp_path / "one", step=1, model=model)
    with pytest.raises(DataError, match="does not fit the model"):
        samestep.load(path, model=nn.Linear(3, 4))


def test_the_last_ones_are_kept(tmp_path):
    model, _ = trained()
    for step in (1, 20, 300):
        samestep.save(checkpoint_path(tmp_path, step), step=step, model=model)
    keep_last(tmp_path, 2)
    assert [path.name for path in all_checkpoints(tmp_path)] == ["step-00000020", "step-00000300"]
    assert newest(tmp_path).name == "step-00000300"
    assert json.loads((newest(tmp_path) / "manifest.json").read_text())["step"] == 300


def test_no_checkpoint(tmp_path):
    with pytest.raises(MissingFileError, match="no checkpoint there"):
        newest(tmp_path)
