"""Checkpoints for tests, and hands that change them: by accident, or with a manifest that agrees."""

import hashlib
import json
import shutil
from copy import deepcopy
from functools import cache

import safetensors.torch
import torch
from torch import nn

import samestep
from samestep.checkpoint.manifest import Manifest
from samestep.identity import digest


def parts():
    """Return a model, and an optimizer and a schedule that have never taken a step."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 5])


def trained():
    """Return the same after a step."""
    return deepcopy(_trained())


@cache
def _trained():
    torch.manual_seed(0)
    model, optimizer, schedule = parts()
    model(torch.randn(8, 3)).square().sum().backward()
    optimizer.step()
    schedule.step()
    return model, optimizer, schedule


def save(path, step=7):
    model, optimizer, schedule = trained()
    return samestep.save(path, step=step, model=model, optimizer=optimizer, schedule=schedule, best=0.5)


def load(path, into=None):
    """Load into fresh parts, and return what there is then."""
    model, optimizer, schedule = into or parts()
    manifest = samestep.load(path, model=model, optimizer=optimizer, schedule=schedule)
    return manifest, state_of(model, optimizer, schedule)


def state_of(model, optimizer, schedule):
    """Return all state as text, each bit of it."""
    tensors = {
        f"{number} {name}": tensor.clone()
        for number, entries in optimizer.state_dict()["state"].items()
        for name, tensor in entries.items()
    }
    rest = (optimizer.state_dict()["param_groups"], schedule.state_dict())
    return f"{digest(model)} {digest(tensors)} {rest}"


def reseal(path, **changes):
    """Make the manifest agree with the files again, as a hostile writer would."""
    file = path / "manifest.json"
    values = json.loads(file.read_text()) | changes
    contents = {name: (path / name).read_bytes() for name in values["files"] if (path / name).is_file()}
    files = {name: [len(c), hashlib.sha256(c).hexdigest()] for name, c in contents.items()}
    try:
        weights = digest(safetensors.torch.load(contents["model.safetensors"]))
    except Exception:
        weights = values["digest"]
    seal(
        file,
        {"digest": weights, "files": files, **values, **changes}
        | {"digest": weights, "files": files}
        | changes,
    )


def seal(file, values):
    """Write a manifest with the SHA-256 that these values need."""
    values = {name: value for name, value in values.items() if name != "sha256"}
    text = json.dumps(values, indent=2) + "\n"
    values["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    file.write_text(json.dumps(values, indent=2) + "\n")


def manifest_of(path):
    file = path / "manifest.json"
    return Manifest.parse(file.read_bytes(), file)


def contents(folder):
    """Return the bytes of all files below a folder, by their paths."""
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


def copy(path, name):
    return shutil.copytree(path, path.with_name(name), symlinks=True)
