import errno
import json
import os
import random
import resource
import shutil
import struct
import subprocess
from collections import Counter

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file
from torch import nn

import samestep
from samestep.checkpoint import durable
from samestep.data.loader import TowerLoader
from samestep.errors import ConfigError, DamagedError, DataError, MissingFileError, StorageError
from samestep.towers.towers import Towers

from . import forgery
from .forgery import contents, parts, reseal, state_of, trained

pytestmark = pytest.mark.sampled(5)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Small steps on several threads wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return forgery.save(tmp_path_factory.mktemp("original") / "one")


@pytest.fixture
def path(original, tmp_path):
    return shutil.copytree(original, tmp_path / "one")


def refused(path, match, kind=DamagedError):
    """Check that nothing is loaded, and say why."""
    into = trained()
    before = state_of(*into)
    with pytest.raises(kind, match=match) as caught:
        forgery.load(path, into)
    assert type(caught.value) is kind
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert state_of(*into) == before
    return str(caught.value)


# ---- there and back ------------------------------------------------------------------------------------


def test_what_is_saved_comes_back_bit_for_bit(path):
    manifest, state = forgery.load(path)
    assert state == state_of(*trained())
    assert (manifest.step, manifest.state) == (7, {"best": 0.5})
    assert manifest.digest == samestep.digest(trained()[0])


def step_of(model, optimizer):
    """Return a closure that takes a step on the same batch each time."""

    def loss():
        optimizer.zero_grad()
        value = model(torch.arange(12.0).reshape(4, 3) / 7).square().sum()
        value.backward()
        return value

    return lambda: optimizer.step(loss)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), amsgrad=True),
    "nadam": lambda p: torch.optim.NAdam(p),
    "asgd": lambda p: torch.optim.ASGD(p),
    "rprop": lambda p: torch.optim.Rprop(p),
    "lbfgs": lambda p: torch.optim.LBFGS(p, max_iter=3),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "groups": lambda p: torch.optim.RMSprop([{"params": q, "lr": 0.01 / i} for i, q in enumerate(p, 1)]),
}
SCHEDULES = {
    "none": lambda o: None,
    "milestones": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 2, 3]),
    "cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=9, cycle_momentum=False),
    "sequence": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.LinearLR(o), torch.optim.lr_scheduler.CosineAnnealingLR(o, 5)],
        milestones=[3],
    ),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
}


@pytest.mark.parametrize(
    ("optimizer", "schedule"), [*((name, "none") for name in OPTIMIZERS), *(("sgd", n) for n in SCHEDULES)]
)
def test_training_goes_on_with_the_same_bits(tmp_path, optimizer, schedule):
    def build():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        chosen = OPTIMIZERS[optimizer](list(model.parameters()))
        return model, chosen, SCHEDULES[schedule](chosen)

    def run(model, optimizer, schedule, num_steps):
        for _ in range(num_steps):
            step_of(model, optimizer)()
            if schedule is not None:
                schedule.step()
        return samestep.digest(model)

    first = build()
    run(*first, 2)
    path = samestep.save(tmp_path / "a", step=2, model=first[0], optimizer=first[1], schedule=first[2])
    again = build()
    samestep.load(path, model=again[0], optimizer=again[1], schedule=again[2])
    second = samestep.save(tmp_path / "b", step=2, model=again[0], optimizer=again[1], schedule=again[2])
    assert contents(path) == contents(second)
    assert run(*again, 3) == run(*first, 3)


def test_a_loss_scale_comes_back(tmp_path):
    model = nn.Linear(1, 1)
    scaler, other = torch.amp.GradScaler("cpu", init_scale=8.0), torch.amp.GradScaler("cpu")
    samestep.load(
        samestep.save(tmp_path / "one", step=1, model=model, scaler=scaler), model=model, scaler=other
    )
    assert other.get_scale() == 8.0


def test_memory_formats_of_optimizer_state_come_back(tmp_path):
    def build():
        model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    model, optimizer = build()
    model(torch.ones(2, 3, 5, 5).to(memory_format=torch.channels_last)).sum().backward()
    optimizer.step()
    path = samestep.save(tmp_path / "one", step=1, model=model, optimizer=optimizer)
    other, other_optimizer = build()
    samestep.load(path, model=other, optimizer=other_optimizer)
    buffers = [
        o.state[m.weight]["momentum_buffer"] for m, o in ((model, optimizer), (other, other_optimizer))
    ]
    assert torch.equal(*buffers)
    assert buffers[0].stride() == buffers[1].stride() != buffers[0].contiguous().stride()


def test_plain_values_come_back(tmp_path):
    values = {
        "numbers": [1, -0.0, 1e-300, float("inf"), float("-inf"), True, None, 2**70],
        "names": {"a.b": torch.zeros(1), "a": {"b": torch.ones(2)}, "$": "dollar", "": ()},
        "keys": {0: "zero", (1, None): [torch.tensor(3, dtype=torch.int8)], True: "yes"},
        "counter": Counter({3: 2, "x": 1}),
        "text": "ü\n\ud800",
    }
    path = samestep.save(tmp_path / "one", step=1, model=nn.Linear(1, 1), **values)
    assert str(samestep.load(path, model=nn.Linear(1, 1)).state) == str(values)


def test_a_model_s_extra_state_comes_back(tmp_path):
    class Odd(nn.Linear):
        note = ("a", 1)

        def get_extra_state(self):
            return {"note": self.note}

        def set_extra_state(self, state):
            self.note = state["note"]

    model, other = Odd(1, 1), Odd(1, 1)
    model.note = ("b", 2)
    samestep.load(samestep.save(tmp_path / "one", step=1, model=model), model=other)
    assert other.note == ("b", 2)
    assert samestep.digest(other) == samestep.digest(model)


def test_weights_are_safetensors_that_any_tool_reads(path):
    assert torch.equal(load_file(path / "model.safetensors")["0.weight"], trained()[0][0].weight)


def test_tied_weights_and_memory_formats(tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 3)).to(memory_format=torch.channels_last)
    model[1].weight = model[0].weight
    path = samestep.save(tmp_path / "one", step=1, model=model)
    digest = samestep.digest(model)
    with torch.no_grad():
        model[0].weight.zero_()
    samestep.load(path, model=model)
    assert samestep.digest(model) == digest


def test_nothing_unfinished_is_left_and_others_may_read(tmp_path):
    model, _, _ = trained()
    samestep.save(tmp_path / "one", step=1, model=model)
    path = samestep.save(tmp_path / "one", step=2, model=model)
    assert [path.name for path in tmp_path.iterdir()] == ["one"]
    assert len({file.stat().st_mode for file in path.iterdir()}) == 1
    assert samestep.load(path, model=model).step == 2


def test_a_link_is_replaced_not_followed(tmp_path):
    elsewhere = forgery.save(tmp_path / "elsewhere")
    before = contents(elsewhere)
    for name in ("one", ".one.unfinished", ".one.replaced"):
        (tmp_path / name).symlink_to(elsewhere)
    path = forgery.save(tmp_path / "one", step=8)
    assert forgery.load(path)[0].step == 8
    assert contents(elsewhere) == before
    assert {entry.name for entry in tmp_path.iterdir()} == {"one", "elsewhere"}


@pytest.mark.parametrize("value", [object(), torch.complex, {1, 2}, b"bytes", [{"deep": print}]])
def test_state_that_cannot_be_written_is_named(tmp_path, value):
    with pytest.raises(ConfigError, match=r"thing(\.0\.deep)? is a .*: a checkpoint holds"):
        samestep.save(tmp_path / "one", step=1, model=nn.Linear(1, 1), thing=value)
    model = nn.Linear(1, 1)
    model.register_buffer("phase", torch.zeros(1, dtype=torch.complex128))
    with pytest.raises(ConfigError, match=r"model: phase is .*complex128, which safetensors cannot hold"):
        samestep.save(tmp_path / "one", step=1, model=model)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (nn.Linear(2, 1, device="meta"), "it is on the meta device"),
        (nn.LazyLinear(1), "its layer is lazy and has not run yet"),
    ],
)
def test_tensors_without_values_are_named(tmp_path, layer, why):
    sentence = f"weight has no values, because {why}: give it some first, or leave it out"
    with pytest.raises(ConfigError, match=f"^head.{sentence}$"):
        samestep.save(tmp_path / "one", step=1, model=nn.Linear(1, 1), head=layer)
    with pytest.raises(ConfigError, match=f"^model: {sentence}$"):
        samestep.save(tmp_path / "one", step=1, model=layer)
    assert list(tmp_path.iterdir()) == []


# ---- the experiment ------------------------------------------------------------------------------------


def towers_and_loader(num_towers=4, seed=3, batch_size=5, examples=12, **options):
    towers = Towers(nn.Linear(2, 1), num_towers, seed=seed)
    return towers, TowerLoader(list(range(examples)), batch_size, towers, seed=seed + 1, **options)


def take_steps(towers, loader, num_steps):
    while towers.step < num_steps:
        for batch in loader:
            for tower in towers(batch):
                rows = tower.batch[:, None] * torch.tensor([1.0, 2.0])
                tower.backward(towers.model(rows).square().mean())
            towers.average()
            if towers.step == num_steps:
                return


def test_step_noise_scale_and_position_come_back(tmp_path):
    towers, loader = towers_and_loader()
    take_steps(towers, loader, 4)
    assert towers.noise.value is not None
    path = samestep.save(tmp_path / "one", model=towers.model, towers=towers, loader=loader)
    other, other_loader = towers_and_loader()
    manifest = samestep.load(path, model=other.model, towers=other, loader=other_loader)
    assert (manifest.step, other.step, other_loader.position) == (4, 4, 4)
    assert (other.state_dict(), other_loader.state_dict()) == (towers.state_dict(), loader.state_dict())
    assert other.noise.value == towers.noise.value
    assert manifest.state == samestep.load(path, model=other.model).state == {}


def test_towers_refuse_the_state_of_others():
    towers, _ = towers_and_loader()
    state = towers.state_dict()
    assert state == {"towers": 4, "seed": 3, "step": 0, "noise": towers.noise.state_dict()}
    for name in ("towers", "seed"):
        with pytest.raises(
            ConfigError, match=f"towers is from a run with {name} = 9, not {state[name]}: use"
        ):
            towers.load_state_dict({**state, "step": 2, name: 9})
    assert towers.state_dict() == state


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_towers": 3}, "the state of towers is from a run with towers = 4, not 3: use the same value"),
        ({"seed": 9}, "is from a run with seed = 3, not 9"),
        ({"batch_size": 4}, "is from a run with batch_size = 5, not 4"),
        ({"examples": 13}, "is from a run with examples = 12, not 13"),
        ({"shuffle": False}, "is from a run with shuffle = True, not False"),
        ({"drop_last": True}, "is from a run with drop_last = False, not True"),
    ],
)
def test_another_experiment_is_refused(tmp_path, change, message):
    towers, loader = towers_and_loader()
    take_steps(towers, loader, 1)
    path = samestep.save(tmp_path / "one", model=towers.model, towers=towers, loader=loader)
    other, other_loader = towers_and_loader(**change)
    before = samestep.digest(other.model)
    with pytest.raises(ConfigError, match=message) as caught:
        samestep.load(path, model=other.model, towers=other, loader=other_loader)
    assert caught.value.exit_status == 2
    assert str(caught.value).startswith(f"{path}: ")
    assert (samestep.digest(other.model), other.step, other_loader.position) == (before, 0, 0)


def test_what_was_not_saved_cannot_be_loaded(path):
    towers, loader = towers_and_loader()
    for name, target in {"towers": towers, "loader": loader, "rng": True}.items():
        with pytest.raises(DataError, match=f"was saved without {name}$"):
            samestep.load(path, model=trained()[0], **{name: target})


def test_towers_know_the_step(tmp_path):
    towers, _ = towers_and_loader()
    with pytest.raises(
        ConfigError, match="step = 4 was passed with towers, which know the step: leave step out"
    ):
        samestep.save(tmp_path / "one", model=towers.model, towers=towers, step=4)
    assert samestep.load(samestep.save(tmp_path / "one", model=towers.model), model=towers.model).step == 0


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("towers", {"step": "x"}),
        ("towers", {"noise": None}),
        ("towers", {"seed": []}),
        ("loader", {"position": -1}),
        ("loader", {"position": 1.5}),
        ("rng", {"python": [3]}),
        ("rng", {"numpy": ["PCG64", {"$tensor": "rng.numpy.1"}, 0, 0, 0.0]}),
        ("rng", {"torch": {"$tensor": "rng.python.1"}, "python": [3, {"$tensor": "rng.torch"}, None]}),
    ],
)
def test_forged_state_of_this_library_s_own_objects_is_refused(tmp_path, name, change):
    towers, loader = towers_and_loader()
    objects = {"model": towers.model, "towers": towers, "loader": loader, "rng": True}
    path = samestep.save(tmp_path / "one", **objects)
    take_steps(towers, loader, 3)
    forge_state(path, lambda outline: outline["own"][name].update(change))
    before = (str(towers.state_dict()), loader.position, samestep.digest(towers.model), random.getstate())
    numbers = torch.get_rng_state()
    with pytest.raises((DataError, ConfigError), match=f"^{path}") as caught:
        samestep.load(path, **objects)
    assert "\n" not in str(caught.value)
    after = (str(towers.state_dict()), loader.position, samestep.digest(towers.model), random.getstate())
    assert after == before
    assert torch.equal(torch.get_rng_state(), numbers)


# ---- what does not fit ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(nn.Linear(3, 4)), r"'1.[a-z_]+' is .* in the file, nothing in the model"),
        (
            nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5)),
            r"is float32 \[4, 3\] in the file, float32 \[5, 3\] in the model",
        ),
        (
            nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double(),
            r"float32 \[4, 3\] in the file, float64 \[4, 3\] in",
        ),
        (
            nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(1, 1)),
            r"'2.weight' is nothing in the file",
        ),
        (nn.Linear(3, 4), r"'weight' is nothing in the file, float32 \[4, 3\] in"),
    ],
)
def test_another_model_is_refused(path, model, message):
    before = samestep.digest(model)
    with pytest.raises(DataError, match=rf"model.safetensors: does not fit the model: .*{message}"):
        samestep.load(path, model=model)
    with pytest.raises(DataError, match="was saved without averaged_model"):
        samestep.load(path, model=trained()[0], averaged_model=model)
    assert samestep.digest(model) == before


def test_another_optimizer_is_refused(path):
    model, adamw, _ = trained()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    weight = torch.optim.AdamW([model[0].weight], lr=0.1)
    groups = torch.optim.AdamW([{"params": layer.parameters()} for layer in (model[0], model[1])], lr=0.1)
    targets = {
        "it has 1 parameter groups, this optimizer has 2: before loading, add those that the run has added": {
            "optimizer": groups
        },
        "optimizer is from a 'AdamW', not a SGD": {"optimizer": sgd},
        "params is .0, 1, 2, 3., expected 1 values": {"optimizer": weight},
        "was saved without critic; it has optimizer, schedule, best": {"critic": adamw},
        "best is a float, which has no load_state_dict": {"best": 0.0},
        "best is from a None, not a Linear": {"best": nn.Linear(1, 1)},
    }
    before = [str(o.state_dict()) for o in (adamw, sgd, weight)], samestep.digest(model)
    for message, target in targets.items():
        with pytest.raises((DataError, ConfigError), match=message):
            samestep.load(path, model=model, **target)
    assert ([str(o.state_dict()) for o in (adamw, sgd, weight)], samestep.digest(model)) == before


class Picky:
    """Fails when it is loaded; the first part of it has changed by then."""

    def __init__(self):
        self.values = [0, 0]

    def state_dict(self):
        return {"values": self.values}

    def load_state_dict(self, state):
        self.values[0] = state["values"][0]
        if state["values"][0] == "bad":
            raise RuntimeError("no such value\nat all")
        self.values[1] = state["values"][1]


def test_a_load_that_fails_half_way_changes_nothing(tmp_path):
    model, optimizer, _ = trained()
    first, second = Picky(), Picky()
    first.values, second.values = [1, 2], ["bad", 3]
    saved = {"model": model, "optimizer": optimizer, "first": first, "second": second}
    path = samestep.save(tmp_path / "one", step=1, **saved)
    into = parts()
    before = state_of(*into)
    first, second = Picky(), Picky()
    with pytest.raises(DataError, match=r"of second does not fit \(RuntimeError: no such value at all\)"):
        samestep.load(path, model=into[0], optimizer=into[1], first=first, second=second)
    assert (first.values, second.values, state_of(*into)) == ([0, 0], [0, 0], before)


def forge_state(path, change):
    """Change the decoded training.json, and reseal."""
    file = path / "training.json"
    outline = json.loads(file.read_text())
    change(outline)
    file.write_text(json.dumps(outline))
    reseal(path)


def group(outline):
    return outline["state"]["optimizer"]["param_groups"][0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda o: group(o).update(lr="x"), "lr is 'x', expected a value like"),
        (lambda o: group(o).update(betas=[0.9]), r"betas is \[0.9\], expected 2 values"),
        (lambda o: group(o).update(params=[0, 1, 2, 2]), "has parameters .*, the optimizer has 4"),
        (lambda o: group(o).update(params=[0, 1, 2, 9]), "has parameters .*, the optimizer has 4"),
        (lambda o: o["state"]["optimizer"].pop("state"), "it lacks [0-9]+ of the tensors"),
        (lambda o: o["state"].update(schedule={"last_epoch": []}), "last_epoch is .., expected a value like"),
        (lambda o: o["state"].update(schedule=[]), "expected a dict"),
        (lambda o: o["kinds"].update(schedule="StepLR"), "schedule is from a 'StepLR', not a MultiStepLR"),
        (lambda o: o["extra"].update(model=None), "invalid extra state of the model: None"),
        (lambda o: o["extra"]["model"].update({"0.weight": 1}), "invalid extra state of the model: "),
    ],
)
def test_forged_state_of_other_kinds_is_refused(path, change, message):
    forge_state(path, change)
    into = trained()
    before = state_of(*into)
    with pytest.raises(DataError, match=message):
        forgery.load(path, into)
    assert state_of(*into) == before


def test_forged_shapes_are_refused(path):
    file = path / "training.safetensors"
    tensors = load_file(file)
    name = "optimizer.state.0.exp_avg"
    safetensors.torch.save_file({**tensors, name: torch.zeros(2, 2)}, file)
    reseal(path)
    refused(
        path, r"'exp_avg' of parameter 0 is float32 \[2, 2\], the parameter is float32 \[4, 3\]", DataError
    )


# ---- damage --------------------------------------------------------------------------------------------

FILES = ("manifest.json", "model.safetensors", "training.json", "training.safetensors")


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", ["truncate", "flip", "append", "empty", "remove"])
def test_damage_is_named(path, file, damage):
    content = bytearray((path / file).read_bytes())
    changed = {
        "truncate": content[:-5],
        "flip": content[:-20] + bytes([content[-20] ^ 1]) + content[-19:],
        "append": content + b"{}",
        "empty": b"",
    }
    (path / file).unlink()
    if damage in changed:
        (path / file).write_bytes(changed[damage])
    message = refused(path, file)
    assert message.endswith("; use another checkpoint")


def pipe(file):
    file.unlink()
    os.mkfifo(file)


def linked(file):
    file.rename(file.parent.with_name(file.name))
    file.symlink_to(file.parent.with_name(file.name))


def folder(file):
    file.unlink()
    file.mkdir()


def endless(file):
    file.unlink()
    file.symlink_to("/dev/zero")


def sparse(file):
    os.truncate(file, 128 * 2**30)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (pipe, "is not a regular file"),
        (linked, "is a link"),
        (endless, "is a link"),
        (folder, "not a regular file|directory"),
        (sparse, "has 137438953472 bytes, expected at most"),
    ],
)
def test_other_things_than_files_are_refused(path, file, kind, message):
    kind(path / file)
    refused(path, f"{file}: .*({message})")


def test_what_others_have_put_beside_it_is_not_looked_at(path):
    for name in (".DS_Store", "._model.safetensors", "Thumbs.db", ".nfs0001", "notes.txt"):
        (path / name).write_bytes(b"\0")
    (path / "lost+found").mkdir()
    os.mkfifo(path / "training.pt")
    assert forgery.load(path)[1] == state_of(*trained())


def test_a_link_is_no_checkpoint(path, tmp_path):
    link = tmp_path / "two"
    link.symlink_to(path)
    refused(link, "is a link, expected a folder")
    file = tmp_path / "three"
    file.write_text("")
    refused(file, "is a file, expected a folder")


def test_no_checkpoint(tmp_path):
    with pytest.raises(MissingFileError, match="does not exist; expected a checkpoint"):
        samestep.load(tmp_path / "none", model=nn.Linear(1, 1))


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not the manifest"),
        ("[]", "it is not a JSON object"),
        ("null", "it is not a JSON object"),
        (DEEP, "nested too deeply"),
        ('{"a": ' * 50_000, "nested too deeply|Expecting value"),
        ("9" * 5000, "is not the manifest"),
        ('{"step": 1, "step": 2}', "'step' appears twice in an object"),
        ('{"step": NaN}', "NaN is not a JSON number"),
        ('{"format": 99}', "its content does not have the SHA-256 that it holds"),
        ('{"sha256": [1]}', "its content does not have the SHA-256 that it holds"),
        ("\ud800", "is not the manifest"),
        (" " * 2**20 + "{}", "expected at most 1048576"),
    ],
)
def test_manifests_that_are_none(path, text, message):
    (path / "manifest.json").write_bytes(text.encode(errors="surrogatepass"))
    refused(path, message)


def test_what_no_memory_can_hold_is_not_read(path):
    manifest = forgery.manifest_of(path)
    files = {name: list(entry) for name, entry in manifest.files.items()}
    sparse(path / "model.safetensors")
    values = json.loads((path / "manifest.json").read_text())
    values["files"] = files | {"model.safetensors": [128 * 2**40, "0" * 64]}
    forgery.seal(path / "manifest.json", values)
    refused(
        path,
        "needs 140737488[0-9]* bytes by its manifest, but this machine has [0-9]+ bytes of memory$",
        DataError,
    )


def test_memory_that_is_forbidden_is_one_line(path, monkeypatch):
    """As `ulimit -v` does; nothing else of this process would live with it."""

    def fail(*_, **__):
        raise MemoryError

    monkeypatch.setattr(durable, "open", fail, raising=False)
    refused(path, r"manifest\.json: cannot be read: there is not enough memory for it", StorageError)


def test_a_newer_format_is_not_damage(path):
    reseal(path, format=2, news={})
    refused(path, "format 2 is newer than 1: update samestep", DataError)


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        *(("format", value) for value in (0, -1, "1", 1.0, None, True)),
        *(("step", value) for value in (-1, 1.0, "1", None, True, 2**63, [])),
        *(("fingerprint", value) for value in ([], None, {"threads": []}, {"threads": 0.5})),
        *(("digest", value) for value in (1, "", "A" * 64, "0" * 63)),
        *(("files", value) for value in ([], {}, {"model.safetensors": 5}, {"model.safetensors": [1, "x"]})),
        *(
            ("files", {name: [1, "0" * 64]})
            for name in ("../../x.json", "/etc/passwd", "a/b.json", "x.pt", "")
        ),
        ("surprise", 1),
    ],
)
def test_forged_manifests_are_refused(path, entry, value):
    reseal(path, **{entry: value})
    refused(
        path,
        "manifest.json: is not the manifest of a checkpoint|manifest.json: lists the files none, expected",
    )


@pytest.mark.parametrize("name", ["../one/model.safetensors", "extra.safetensors", "training.pt"])
def test_forged_file_names_are_refused(path, name):
    files = {n: list(entry) for n, entry in forgery.manifest_of(path).files.items()}
    reseal(path, files=files | {name: files["model.safetensors"]})
    refused(
        path,
        r"manifest.json: (is not the manifest of a checkpoint \(invalid files:|lists the files .*, expected)",
    )


def test_forged_digests_are_refused(path):
    reseal(path, digest="0" * 64)
    refused(path, "its weights do not have the manifest's digest")


@pytest.mark.parametrize(
    "header",
    [
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 1 << 40]}},
        {"a": {"dtype": "F32", "shape": [1 << 40, 1 << 40], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F33", "shape": [1], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}},
        {"a": 1},
        [],
    ],
)
@pytest.mark.parametrize("file", ["model.safetensors", "training.safetensors"])
def test_headers_that_lie_are_refused(path, file, header):
    text = json.dumps(header).encode()
    (path / file).write_bytes(struct.pack("<Q", len(text)) + text + b"\0\0\0\0")
    reseal(path)
    refused(path, f"{file}: is not a safetensors file")


@pytest.mark.parametrize(
    "outline",
    [
        "",
        "[]",
        DEEP,
        '{"a": ' * 400 + "1" + "}" * 400,
        '{"own": {}, "state": {}}',
        '{"own": {}, "state": {}, "kinds": {}, "extra": []}',
        '{"own": {}, "state": {"a": {"$tensor": "none"}}, "kinds": {}, "extra": {}}',
        '{"own": {}, "state": {"a": {"$tensor": ["none"]}}, "kinds": {}, "extra": {}}',
        '{"own": {}, "state": {"a": {"$call": "os.system"}}, "kinds": {}, "extra": {}}',
        '{"own": {}, "state": {"a": {"$tuple": [], "b": 1}}, "kinds": {}, "extra": {}}',
        '{"own": {}, "state": {"a": {"$dict": [[[], 1]]}}, "kinds": {}, "extra": {}}',
        '{"own": {}, "state": {"a": {"$dict": [1]}}, "kinds": {}, "extra": {}}',
        '{"own": {}, "state": {"a": {"$counter": [[1, "x"]]}}, "kinds": {}, "extra": {}}',
        '{"own": {}, "state": {"a": {"$counter": [["a", 1e999]]}}, "kinds": {}, "extra": {}}',
        '{"own": {}, "state": {"a": {"$counter": [["a", 1.5]]}}, "kinds": {}, "extra": {}}',
        '{"own": {}, "state": {"a": -1e999}, "kinds": {}, "extra": {}}',
        '{"own": {}, "state": {"a": {"$float": "1.0"}}, "kinds": {}, "extra": {}}',
        '{"own": {}, "state": {"a": ' + "9" * 5000 + '}, "kinds": {}, "extra": {}}',
        '{"own": {}, "state": {}, "kinds": {}, "extra": {}}',
    ],
)
def test_forged_outlines_are_refused(path, outline):
    (path / "training.json").write_text(outline)
    reseal(path)
    refused(path, "training.json: ")


@pytest.mark.parametrize("order", [[0], [1, 1], [0, 0.5], ["0", "1"], {"0": 1}, 7, [True, False], [2, 1]])
def test_forged_memory_orders_are_refused(path, order):
    def change(outline):
        outline["state"]["optimizer"]["state"]["$dict"][0][1]["exp_avg"]["order"] = order

    forge_state(path, change)
    refused(path, "training.json: ")


# ---- disks ---------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small file system is not permitted here")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_full_disk_is_one_line_and_leaves_what_was_there(small_disk):
    path = forgery.save(small_disk / "one")
    before = contents(small_disk)
    big = nn.Linear(1000, 1000)
    for name in ("one", "two"):
        with pytest.raises(
            StorageError, match=r"No space left on device\); free space on the disk"
        ) as caught:
            samestep.save(small_disk / name, step=8, model=big)
        assert (caught.value.exit_status, "\n" in str(caught.value)) == (1, False)
    assert contents(small_disk) == before
    assert [entry.name for entry in small_disk.iterdir()] == ["one"]
    assert forgery.load(path)[1] == state_of(*trained())


def test_a_limit_on_file_sizes_is_one_line(tmp_path):
    path = forgery.save(tmp_path / "one")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(StorageError, match=r"File too large\); raise the limit on file sizes"):
            samestep.save(tmp_path / "one", step=8, model=nn.Linear(300, 300))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert forgery.load(path)[0].step == 7


def test_a_read_only_disk_is_one_line(small_disk):
    forgery.save(small_disk / "one")
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(
        StorageError, match=r"Read-only file system\); choose a folder that can be written to"
    ):
        forgery.save(small_disk / "two")
    assert forgery.load(small_disk / "one")[0].step == 7


def test_a_file_where_a_folder_should_be_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"cannot be written \((File exists|Not a directory)\)"):
        forgery.save(tmp_path / "file" / "one")


def test_no_permission_is_no_damage(path, tmp_path):
    (path / "model.safetensors").chmod(0)
    if os.access(path / "model.safetensors", os.R_OK):
        pytest.skip("nothing is forbidden to root")
    refused(path, r"cannot be read \(Permission denied\); change its permissions", StorageError)
    tmp_path.chmod(0o500)
    with pytest.raises(StorageError, match="change its permissions, or choose another folder"):
        forgery.save(tmp_path / "two")
    tmp_path.chmod(0o700)


def test_a_disk_that_fails_is_damage(path, monkeypatch):
    """No disk fails on request; this is what open(2) and read(2) would say."""

    def fail(path, *arguments, **options):
        if path == "manifest.json":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return os_open(path, *arguments, **options)

    os_open = os.open
    monkeypatch.setattr(os, "open", fail)
    refused(path, "manifest.json: Input/output error")


# ---- what Towers(also=...) adds ------------------------------------------------------------------------


def head_and_towers(also, seed):
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    head = also()
    return model, head, Towers(model, 3, also=head)


@pytest.mark.parametrize(
    "also",
    [
        lambda: nn.BatchNorm1d(2),
        lambda: nn.Parameter(torch.randn(2)),
        lambda: {"scale": nn.Parameter(torch.randn(2)), "head": nn.Linear(2, 1)},
    ],
    ids=["module", "parameter", "several"],
)
def test_what_is_trained_beside_the_model_is_in_checkpoints(tmp_path, also):
    model, _, towers = head_and_towers(also, 0)
    samestep.save(tmp_path / "one", model=model, towers=towers)
    other, _, into = head_and_towers(also, 1)
    samestep.load(tmp_path / "one", model=other, towers=into)
    saved, loaded = towers._root.state_dict(), into._root.state_dict()
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)


def test_a_checkpoint_without_what_is_trained_beside_the_model_is_refused(tmp_path):
    model = nn.Linear(3, 2)
    samestep.save(tmp_path / "one", model=model, towers=Towers(model, 3))
    other, _, into = head_and_towers(lambda: nn.Linear(2, 1), 1)
    with pytest.raises(DataError, match=r"was saved without what Towers\(also=...\) adds"):
        samestep.load(tmp_path / "one", model=other, towers=into)


def test_what_is_trained_beside_the_model_is_not_lost(tmp_path):
    model, _, towers = head_and_towers(lambda: nn.Linear(2, 1), 1)
    samestep.save(tmp_path / "one", model=model, towers=towers)
    other = nn.Linear(3, 2)
    with pytest.raises(
        DataError, match=r"holds what Towers\(also=...\) adds; make these Towers with the same"
    ):
        samestep.load(tmp_path / "one", model=other, towers=Towers(other, 3))
    samestep.load(tmp_path / "one", model=other)  # the weights alone


def test_what_other_towers_train_beside_their_model_is_in_checkpoints(tmp_path):
    """As the discriminator's head of a GAN."""
    pairs = [[head_and_towers(lambda: nn.Linear(2, 1), seed + part) for part in (0, 10)] for seed in (0, 1)]
    saved, loaded = ({"model": a[0], "towers": a[2], "b": b[0], "of_b": b[2]} for a, b in pairs)
    samestep.save(tmp_path / "one", **saved)
    samestep.load(tmp_path / "one", **loaded)
    for before, after in zip(*pairs, strict=True):
        assert torch.equal(before[1].weight, after[1].weight)
    with pytest.raises(DataError, match=r"was saved without what Towers\(also=...\) adds for towers of b"):
        samestep.load(tmp_path / "one", **loaded, **{"towers of b": loaded["of_b"]})


class Wrapped(torch.optim.SGD):
    """An optimizer whose state has a layout of its own, as published Lookahead wrappers have it."""

    def state_dict(self):
        return {"fast": super().state_dict(), "count": 3}

    def load_state_dict(self, state):
        super().load_state_dict(state["fast"])
        self.count = state["count"]


def test_an_optimizer_with_a_state_of_its_own_layout_comes_back(tmp_path):
    model = nn.Linear(3, 2)
    samestep.save(tmp_path / "one", model=model, optimizer=Wrapped(model.parameters(), lr=0.1))
    other = nn.Linear(3, 2)
    optimizer = Wrapped(other.parameters(), lr=0.2)
    samestep.load(tmp_path / "one", model=other, optimizer=optimizer)
    assert (optimizer.count, optimizer.param_groups[0]["lr"]) == (3, 0.1)


@pytest.mark.parametrize("step", [-1, 2.5, True, "7"])
def test_a_step_that_is_no_whole_number_is_refused_before_it_is_saved(tmp_path, step):
    with pytest.raises(ConfigError, match=r"step = .*: expected an int >= 0"):
        samestep.save(tmp_path / "one", model=nn.Linear(1, 1), step=step)
    assert not (tmp_path / "one").exists()
