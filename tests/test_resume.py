"""`samestep train` on a folder that holds a run: what it goes on from, what it refuses, and what it says."""

import contextlib
import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel

import samestep
from samestep import cli, recipes
from samestep.app import evaluate_run, lock
from samestep.app.evaluation import Evaluation
from samestep.app.lock import RunLock
from samestep.app.run_folder import all_checkpoints, checkpoint_path
from samestep.app.settings import Settings
from samestep.errors import StorageError
from samestep.recipes.digits.data import Digits
from samestep.recipes.digits.recipe import accuracy, loss_of
from samestep.summation.placement import Placement
from samestep.workers.job import Job

from .forgery import contents, reseal
from .jobs import job_of
from .runs import train

JOB = Job(torch.device("cpu"))


@dataclass(frozen=True)
class Tiny(Settings):
    """A small net on the digits, with averages and an epoch of three batches."""

    towers: int = 3
    batch_size: int = 500
    steps: int = 8
    checkpoint_every: int = 2
    keep_checkpoints: int = 4
    device: str = "cpu"
    learning_rate: float = 0.1
    data_dir: Path | None = None

    recipe: ClassVar[str] = "tiny"
    hidden: ClassVar[int] = 5
    stop_before: ClassVar[int | None] = None
    free: ClassVar[frozenset[str]] = Settings.free | {"data_dir"}

    def build(self, job):
        torch.manual_seed(self.seed)
        model = nn.Sequential(
            nn.Flatten(), nn.Linear(64, self.hidden), nn.Dropout(0.1), nn.Linear(self.hidden, 10)
        )
        towers = samestep.Towers(model, self.towers, job=job, seed=self.seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=self.learning_rate, momentum=0.9)

        def loss(model, batch):
            if towers.step == self.stop_before:
                raise KeyboardInterrupt
            return loss_of(model, batch)

        average = AveragedModel(model)
        step = samestep.Step(
            towers, loss, optimizer, scheduler=StepLR(optimizer, 3, 0.5), averaged_model=average
        )
        loader = samestep.TowerLoader(Digits("train", augment=True), self.batch_size, towers, seed=self.seed)
        return self.trainer(step, loader, evaluate=Evaluation(Digits("test", augment=False), accuracy))


@pytest.fixture(autouse=True)
def tiny_recipe(monkeypatch):
    monkeypatch.setattr(recipes, "RECIPES", {"tiny": Tiny})
    monkeypatch.setattr(Tiny, "hidden", 5)
    monkeypatch.setattr(Tiny, "stop_before", None)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run from the first step to the last."""
    samestep.init("cpu")  # one thread, as in the command
    run_dir = tmp_path_factory.mktemp("whole")
    train(Tiny(run_dir=run_dir), JOB)
    return run_dir


@pytest.fixture
def run_dir(whole, tmp_path):
    shutil.rmtree(whole / "summaries", ignore_errors=True)
    return shutil.copytree(whole, tmp_path / "run")


def run(run_dir, capsys, *options):
    """Run the command; return its status, the lines of stderr, and the digest at the end."""
    capsys.readouterr()
    status = cli.main(["train", "tiny", "--run-dir", str(run_dir), "--workers", "1", *options])
    out, err = capsys.readouterr()
    digest = re.search(r"weights sha256 (\w+)$", out.strip())
    return status, err.splitlines(), digest and digest[1]


def digest_of(run_dir):
    return json.loads((all_checkpoints(run_dir)[-1] / "manifest.json").read_text())["digest"]


def names(run_dir):
    return [path.name for path in sorted((run_dir / "checkpoints").iterdir())]


def kept(run_dir):
    """Return what is in a run folder but for what every start writes."""
    return {name: c for name, c in contents(run_dir).items() if not name.startswith(("lock", "summaries"))}


def truncate(run_dir, step):
    with (checkpoint_path(run_dir, step) / "training.safetensors").open("r+b") as stream:
        stream.truncate(99)


# ---- going on ------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_finished_run_is_only_evaluated(whole, run_dir, capsys):
    before = contents(run_dir / "checkpoints")
    assert run(run_dir, capsys) == (0, [], digest_of(whole))
    assert contents(run_dir / "checkpoints") == before


@pytest.mark.sampled
@pytest.mark.parametrize("stops", [[1, 3, 4], [5]])
def test_any_stops_give_the_same_checkpoints(whole, tmp_path, monkeypatch, stops):
    """Averages, momentum, schedule, step and position: all of it is in the bytes."""
    settings = Tiny(run_dir=tmp_path)
    for stop in stops:
        monkeypatch.setattr(Tiny, "stop_before", stop)
        with pytest.raises(KeyboardInterrupt):
            train(settings, JOB)
    monkeypatch.setattr(Tiny, "stop_before", None)
    train(settings, JOB)
    for step in (2, 4, 6, 8):
        assert contents(checkpoint_path(tmp_path, step)) == contents(checkpoint_path(whole, step))


def test_damaged_checkpoints_are_named_and_set_aside_and_training_goes_on(whole, run_dir, capsys):
    truncate(run_dir, 8)
    (checkpoint_path(run_dir, 6) / "manifest.json").write_bytes(b"")
    checkpoint_path(run_dir, 2).rename(run_dir / "checkpoints" / ".step-00000012.unfinished")
    status, lines, digest = run(run_dir, capsys)
    assert (status, digest) == (0, digest_of(whole))
    endings = [line.rpartition("; ")[2] for line in lines]
    assert endings == ["set aside as step-00000008.damaged", "set aside as step-00000006.damaged"]
    assert all(line.startswith(f"samestep: {run_dir}/checkpoints/") for line in lines)
    assert names(run_dir) == [
        *("step-00000004", "step-00000006", "step-00000006.damaged"),
        *("step-00000008", "step-00000008.damaged"),
    ]
    for step in (4, 6, 8):
        assert contents(checkpoint_path(run_dir, step)) == contents(checkpoint_path(whole, step))


def test_none_whole_starts_nothing_over(whole, run_dir, capsys):
    for step in (2, 4, 6, 8):
        truncate(run_dir, step)
    before = kept(run_dir)
    for _ in range(2):
        status, lines, _ = run(run_dir, capsys)
        assert (status, len(lines)) == (2, 5)
        assert lines[-1].startswith(
            f"samestep: error: {run_dir}: none of its 4 checkpoints is whole: restore"
        )
    assert kept(run_dir) == before
    status, lines, digest = run(run_dir, capsys, "--fresh")
    assert (status, lines, digest) == (0, [], digest_of(whole))


@pytest.mark.sampled
@pytest.mark.parametrize("is_emptied", [False, True])
def test_a_run_whose_checkpoints_are_gone_does_not_start_over(whole, run_dir, capsys, is_emptied):
    shutil.rmtree(run_dir / "checkpoints")
    if is_emptied:  # as the mount point of a disk that is not mounted
        (run_dir / "checkpoints").mkdir()
    before = kept(run_dir)
    for _ in range(2):
        status, lines, _ = run(run_dir, capsys)
        assert (status, len(lines)) == (2, 1)
        assert lines[0].startswith(
            f"samestep: error: {run_dir}: its checkpoints are gone: metrics.jsonl names step-00000008 as the "
            "last one, and checkpoints/ has none: restore"
        )
    assert kept(run_dir) == before
    assert cli.main(["digest", str(run_dir)]) == 2
    assert "its checkpoints are gone" in capsys.readouterr().err
    shutil.copytree(whole / "checkpoints", run_dir / "checkpoints", dirs_exist_ok=True)
    assert run(run_dir, capsys) == (0, [], digest_of(whole))
    shutil.rmtree(run_dir / "checkpoints")
    assert run(run_dir, capsys, "--fresh") == (0, [], digest_of(whole))


def test_a_run_that_ended_before_its_first_checkpoint_starts_again(whole, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Tiny, "stop_before", 4)
    with pytest.raises(KeyboardInterrupt):
        train(Tiny(run_dir=tmp_path, checkpoint_every=100, log_every=1), JOB)
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 4
    monkeypatch.setattr(Tiny, "stop_before", None)
    assert run(tmp_path, capsys) == (0, [], digest_of(whole))


@pytest.mark.parametrize("name", ["settings.json", "metrics.jsonl", "wandb_id.txt"])
def test_starting_over_deletes_no_folder_of_a_file_s_name(run_dir, capsys, name):
    (run_dir / name).unlink(missing_ok=True)
    (run_dir / name).mkdir()
    (run_dir / name / "mine").touch()
    before = kept(run_dir)
    status, lines, _ = run(run_dir, capsys, "--fresh")
    assert (status, lines) == (
        2,
        [f"samestep: error: {run_dir / name}: is a folder, expected a file; move it away"],
    )
    assert kept(run_dir) == before


def test_starting_over_deletes_the_summaries_on_another_disk_and_nothing_else(run_dir, tmp_path, capsys):
    disk = tmp_path / "disk"
    (run_dir / "summaries").symlink_to(disk)
    for folder in ("evaluation", "another run"):
        (disk / folder).mkdir(parents=True)
    ours = {"events.out.tfevents.1.host.2.0", "evaluation/events.out.tfevents.1.host.2.0"}
    others = {"notes", "evaluation/notes", "another run/events.out.tfevents.1.host.2.0"}
    for name in ours | others:
        (disk / name).touch()
    assert run(run_dir, capsys, "--fresh")[0] == 0
    assert (run_dir / "summaries").is_symlink()
    left = contents(disk).keys()
    assert others < left
    assert not ours & left


def test_a_first_checkpoint_that_was_not_finished_is_no_start(whole, tmp_path, capsys):
    unfinished = tmp_path / "checkpoints" / ".step-00000002.unfinished"
    shutil.copytree(checkpoint_path(whole, 2), unfinished)
    assert run(tmp_path, capsys) == (0, [], digest_of(whole))
    assert not unfinished.exists()


def test_old_checkpoints_go_and_milestones_stay(tmp_path):
    train(Tiny(run_dir=tmp_path, checkpoint_every=1, keep_checkpoints=2, keep_every=3), JOB)
    assert names(tmp_path) == [f"step-{step:08d}" for step in (3, 6, 7, 8)]


def test_another_fingerprint_is_said_and_training_goes_on(whole, run_dir, capsys):
    for step in (6, 8):
        truncate(run_dir, step)
    path = checkpoint_path(run_dir, 4)
    fingerprint = json.loads((path / "manifest.json").read_text())["fingerprint"]
    reseal(path, fingerprint=fingerprint | {"threads": 3, "torch": "1.0", "abacus": "wood"})
    status, lines, digest = run(run_dir, capsys)
    assert (status, digest) == (0, digest_of(whole))
    assert lines[0] == (
        f"samestep: {path}: threads = 3, now 1; torch = 1.0, now {torch.__version__}; abacus = wood, now None"
        ": the bits may differ from here on"
    )


# ---- what is refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize("noted", [True, False], ids=["settings.json", "checkpoint"])
@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--learning-rate", "0.2", "with learning_rate = 0.1, not 0.2"),
        ("--autocast", "bf16", "with autocast = none, not bf16"),
        ("--data-dir", "elsewhere", "with data_dir = None, not elsewhere"),
        ("--towers", "4", "with towers = 3, not 4"),
        ("--seed", "1", "with seed = 0, not 1"),
        ("--batch-size", "499", "with batch_size = 500, not 499"),
    ],
)
def test_another_experiment_is_refused_with_both_values(run_dir, capsys, noted, option, value, message):
    if not noted:
        (run_dir / "settings.json").unlink()
    truncate(run_dir, 8)
    before = kept(run_dir)
    status, lines, _ = run(run_dir, capsys, option, value)
    assert status == 2
    (line,) = lines
    assert message in line
    assert kept(run_dir) == before


def test_another_model_is_refused(run_dir, capsys, monkeypatch):
    monkeypatch.setattr(Tiny, "hidden", 6)
    truncate(run_dir, 8)
    before = kept(run_dir)
    status, lines, _ = run(run_dir, capsys)
    assert (status, len(lines)) == (2, 1)
    assert "does not fit the model: '1.weight' is float32 [5, 64] in the file, float32 [6, 64] in" in lines[0]
    assert kept(run_dir) == before


def test_a_newer_format_is_refused(run_dir, capsys):
    reseal(checkpoint_path(run_dir, 8), format=2)
    before = kept(run_dir)
    status, lines, _ = run(run_dir, capsys)
    assert (status, len(lines)) == (2, 1)
    assert lines[0].endswith("format 2 is newer than 1: update samestep")
    assert kept(run_dir) == before


@pytest.mark.parametrize("options", [[], ["--fresh"]])
def test_a_folder_in_use_is_refused(run_dir, capsys, monkeypatch, options):
    monkeypatch.setattr(lock, "WAIT_S", 0.1)
    before = kept(run_dir)
    with RunLock(run_dir, JOB):
        status, (line,), _ = run(run_dir, capsys, *options)
        assert cli.main(["digest", str(run_dir)]) == cli.main(["eval", str(run_dir), "--workers", "1"]) == 0
    assert status == 2
    assert re.fullmatch(rf"samestep: error: {run_dir}: PID \d+ on \S+ since .* trains there: wait .*", line)
    assert kept(run_dir) == before


@pytest.mark.parametrize("value", ["-1", "1.5"])
def test_keeping_every_so_many_steps(capsys, value, tmp_path):
    status, lines, _ = run(tmp_path, capsys, "--keep-every", value)
    assert (status, len(lines)) == (2, 1)
    assert "--keep-every" in lines[0]


# ---- evaluation ----------------------------------------------------------------------------------------


def test_evaluation_names_a_damaged_one_and_uses_the_one_before(run_dir, capsys):
    truncate(run_dir, 8)
    before = kept(run_dir)
    assert cli.main(["eval", str(run_dir), "--workers", "1"]) == 0
    out, err = capsys.readouterr()
    assert re.search(r": step 6: test accuracy = ", out)
    assert re.fullmatch(
        r"samestep: \S+/step-00000008/training.safetensors: has 99 bytes, .*; not used\n", err
    )
    for step in (2, 4, 6):
        truncate(run_dir, step)
    assert cli.main(["eval", str(run_dir), "--workers", "1"]) == 2
    assert "none of its 4 checkpoints is whole" in capsys.readouterr().err
    assert kept(run_dir).keys() == before.keys()


# ---- a folder that is moved ------------------------------------------------------------------------------


@dataclass
class Mover:
    """Changes the run folder when step 3 begins, once the checkpoint of step 2 is on the disk."""

    run_dir: Path
    change: Callable[[], object]
    is_done: bool = False

    def __eq__(self, step):
        if step == 3 and not self.is_done:
            self.is_done = True
            while names(self.run_dir) != ["step-00000002"]:
                time.sleep(0.01)
            self.change()
        return False


@pytest.mark.long
def test_a_run_whose_folder_was_moved_leaves_the_new_one_alone(whole, tmp_path, monkeypatch):
    run_dir, elsewhere = tmp_path / "run", tmp_path / "elsewhere"

    def start_another():
        run_dir.rename(elsewhere)
        shutil.copytree(whole, run_dir)

    monkeypatch.setattr(Tiny, "stop_before", Mover(run_dir, start_another))
    with pytest.raises(StorageError, match=f"{run_dir}: was moved, deleted or replaced") as caught:
        train(Tiny(run_dir=run_dir, keep_checkpoints=1), JOB)
    assert caught.value.exit_status == 1
    assert contents(run_dir) == contents(whole)
    assert names(elsewhere) == ["step-00000002"]
    monkeypatch.setattr(Tiny, "stop_before", None)
    train(Tiny(run_dir=elsewhere), JOB)
    assert digest_of(elsewhere) == digest_of(whole)


def test_a_run_whose_folder_was_deleted_does_not_make_it_again(tmp_path, monkeypatch):
    run_dir = tmp_path / "run"
    monkeypatch.setattr(Tiny, "stop_before", Mover(run_dir, lambda: shutil.rmtree(run_dir)))
    with pytest.raises(StorageError, match=f"{run_dir}.*: was moved, deleted or replaced"):
        train(Tiny(run_dir=run_dir), JOB)
    assert not run_dir.exists()


def test_an_evaluation_that_follows_a_folder_ends_when_it_is_another_one(run_dir, capsys, monkeypatch):
    for step in (4, 6, 8):
        shutil.rmtree(checkpoint_path(run_dir, step))

    def replace(_):
        run_dir.rename(run_dir.with_name("elsewhere"))
        shutil.copytree(run_dir.with_name("elsewhere"), run_dir)

    monkeypatch.setattr(evaluate_run.time, "sleep", replace)
    assert cli.main(["eval", str(run_dir), "--follow", "--workers", "1"]) == 2
    out, err = capsys.readouterr()
    assert out.count(": step 2: ") == 1
    assert err == f"samestep: error: {run_dir}: was moved, deleted or replaced; name the run folder again\n"


def test_an_evaluation_that_follows_a_run_ends_where_the_run_was_stopped_by_its_program(
    run_dir, capsys, monkeypatch
):
    """It looks like a run that a callback ended at step 6, by `Trainer.stop`."""
    shutil.rmtree(checkpoint_path(run_dir, 8))
    metrics = run_dir / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert (lines[-1]["event"], lines[-1]["reason"], lines[-1]["step"]) == ("end", "done", 8)
    waited = []

    def end(_):
        waited.append(metrics.write_text("\n".join(json.dumps(line | {"step": 6}) for line in lines)))

    monkeypatch.setattr(evaluate_run.time, "sleep", end)
    assert cli.main(["eval", str(run_dir), "--follow", "--workers", "1"]) == 0
    assert capsys.readouterr().out.count(": step 6: ") == 1
    assert len(waited) == 1


# ---- the disk ------------------------------------------------------------------------------------------


def test_a_disk_that_fills_up_ends_the_run_in_one_line_and_it_goes_on_later(
    whole, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(Tiny, "free", Tiny.free | {"steps"})
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", tmp_path], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting a small file system is not permitted here")
    try:
        status, lines, _ = run(tmp_path, capsys, "--steps", "4")
        assert (status, lines) == (0, [])
        ballast = tmp_path / "ballast"
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as stream:
            while stream.write(bytes(4096)):
                pass
        before = contents(checkpoint_path(tmp_path, 4))
        status, lines, _ = run(tmp_path, capsys)
        assert status == 1
        (line,) = lines
        assert line.endswith("(No space left on device); free space on the disk")
        assert names(tmp_path) == ["step-00000002", "step-00000004"]
        assert contents(checkpoint_path(tmp_path, 4)) == before
        ballast.unlink()
        assert run(tmp_path, capsys)[::2] == (0, digest_of(whole))
    finally:
        subprocess.run(["umount", tmp_path], check=True)


# ---- the data ------------------------------------------------------------------------------------------

EXAMPLES, BATCH, STEPS = 23, 5, 14


def loader_on(worker, num_workers):
    placement, job = Placement.even(4, num_workers), job_of(worker, num_workers)
    placed = SimpleNamespace(model=nn.Identity(), placement=placement, job=job)
    return samestep.TowerLoader(list(range(EXAMPLES)), BATCH, placed, seed=2)


def read_until(loaders, stop):
    """Let all workers read up to a position; return the examples of each batch, all epochs together."""
    batches = []
    while loaders[0].position < stop:
        for parts in zip(*loaders, strict=True):
            slices = {tower: part for batch in parts for tower, part in batch.slices.items()}
            batches.append([e for tower in sorted(slices) for e in slices[tower].tolist()])
            if loaders[0].position == stop:
                break
    return batches


@given(
    stops=st.lists(st.integers(1, STEPS - 1), max_size=4, unique=True).map(sorted),
    workers=st.lists(st.integers(1, 4), min_size=5, max_size=5),
)
@settings(max_examples=12)
def test_no_example_is_read_twice_or_left_out(tmp_path_factory, stops, workers):
    folder = tmp_path_factory.mktemp("stops")
    model = nn.Linear(1, 1)
    read = []
    for (start, stop), num_workers in zip(pairwise([0, *stops, STEPS]), workers, strict=False):
        loaders = [loader_on(worker, num_workers) for worker in range(num_workers)]
        if start:
            for loader in loaders:
                samestep.load(folder / str(start), model=model, loader=loader)
        read += read_until(loaders, stop)
        samestep.save(folder / str(stop), step=stop, model=model, loader=loaders[0])
    assert read == read_until([loader_on(0, 1)], STEPS)
    epoch = -(-EXAMPLES // BATCH)
    for first in range(0, STEPS - epoch + 1, epoch):
        assert sorted(chain(*read[first : first + epoch])) == list(range(EXAMPLES))
