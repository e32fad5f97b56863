import errno
import json
import os
import re
import shutil

import pytest
import torch

from samestep import cli
from samestep.app.run_folder import (
    all_checkpoints,
    checkpoint_path,
    clear,
    find_newest,
    newest_whole,
    prune,
    read_digest,
    search,
    set_aside,
    tidy,
)
from samestep.checkpoint.folder import Folder
from samestep.errors import DataError, MissingFileError

from . import forgery


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """A run with checkpoints at steps 1, 20 and 300."""
    run_dir = tmp_path_factory.mktemp("run")
    for step in (1, 20, 300):
        forgery.save(checkpoint_path(run_dir, step), step)
    return run_dir


@pytest.fixture
def run_dir(originals, tmp_path):
    return shutil.copytree(originals, tmp_path / "run")


def held(run_dir):
    return Folder.open(run_dir / "checkpoints")


def names(run_dir):
    return [path.name for path in sorted((run_dir / "checkpoints").iterdir())]


def test_the_newest_is_found(run_dir):
    assert [path.name for path in all_checkpoints(run_dir)] == [
        "step-00000001",
        "step-00000020",
        "step-00000300",
    ]
    result = search(run_dir)
    assert (result.found.path, result.found.manifest.step, result.damaged) == (
        checkpoint_path(run_dir, 300),
        300,
        (),
    )
    assert search(run_dir, newer_than=300).found is None
    assert search(run_dir, refused={checkpoint_path(run_dir, 300)}).found.manifest.step == 20


def truncated(path):
    with (path / "model.safetensors").open("r+b") as stream:
        stream.truncate(100)


def flipped(path):
    content = bytearray((path / "training.safetensors").read_bytes())
    content[-1] ^= 4
    (path / "training.safetensors").write_bytes(content)


def incomplete(path):
    (path / "training.json").unlink()


def without_words(path):
    (path / "manifest.json").write_bytes(b"")


def without_manifest(path):
    (path / "manifest.json").unlink()


def empty(path):
    shutil.rmtree(path)
    path.mkdir()


def linked(path):
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


def file(path):
    shutil.rmtree(path)
    path.write_bytes(b"")


def renamed(path):
    shutil.rmtree(path)
    shutil.copytree(path.with_name("step-00000001"), path)


DAMAGE = {
    truncated: r"/model.safetensors: has 100 bytes, expected \d+",
    flipped: "/training.safetensors: its SHA-256 is not the manifest's",
    incomplete: "/training.json: is not there",
    without_words: "/manifest.json: is not the manifest of a checkpoint .*",
    without_manifest: "/manifest.json: is not there",
    empty: "/manifest.json: is not there",
    linked: ": is a link, expected a folder",
    file: ": is a file, expected a folder",
    renamed: ": holds step 1",
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_a_damaged_one_is_named_and_set_aside_and_the_one_before_used(run_dir, damage, capsys):
    path = checkpoint_path(run_dir, 300)
    damage(path)
    before = names(run_dir)
    result = newest_whole(run_dir)
    assert result.found.manifest.step == 20
    assert (names(run_dir), capsys.readouterr().err) == (before, "")
    set_aside(result, held(run_dir))
    expected = f"samestep: {re.escape(str(path))}{DAMAGE[damage]}; set aside as step-00000300.damaged\n"
    assert re.fullmatch(expected, capsys.readouterr().err)
    assert names(run_dir) == ["step-00000001", "step-00000020", "step-00000300.damaged"]
    assert newest_whole(run_dir).damaged == ()


def test_several_damaged_ones(run_dir, capsys):
    truncated(checkpoint_path(run_dir, 300))
    incomplete(checkpoint_path(run_dir, 20))
    (run_dir / "checkpoints" / "step-00000300.damaged").mkdir()
    set_aside(newest_whole(run_dir), held(run_dir))
    assert len(capsys.readouterr().err.splitlines()) == 2
    assert names(run_dir) == [
        "step-00000001",
        "step-00000020.damaged",
        "step-00000300.damaged",
        "step-00000300.damaged-2",
    ]


def test_none_whole_is_an_error_and_stays_one(run_dir, capsys):
    for path in all_checkpoints(run_dir):
        truncated(path)
    before = names(run_dir)
    for _ in range(2):
        with pytest.raises(
            DataError, match="none of its 3 checkpoints is whole: restore one, choose another"
        ):
            newest_whole(run_dir)
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 3
        assert all(line.endswith("; not used") for line in lines)
    assert names(run_dir) == before
    for path in all_checkpoints(run_dir):
        path.rename(f"{path}.damaged")
    with pytest.raises(DataError, match="none of its 3 checkpoints is whole"):
        newest_whole(run_dir)


def test_a_newer_format_ends_the_search(run_dir):
    forgery.reseal(checkpoint_path(run_dir, 300), format=2)
    with pytest.raises(DataError, match="format 2 is newer"):
        newest_whole(run_dir)


def test_one_that_the_run_deletes_while_it_is_read_is_not_damaged(run_dir, monkeypatch):
    from samestep.app import run_folder

    read, gone = run_folder.read, checkpoint_path(run_dir, 300)

    def delete_first(path):
        if path == gone:
            shutil.rmtree(path)
        return read(path)

    monkeypatch.setattr(run_folder, "read", delete_first)
    result = search(run_dir)
    assert (result.found.manifest.step, result.damaged) == (20, ())


def test_what_a_killed_run_left_is_deleted_and_nothing_else(run_dir):
    folder = run_dir / "checkpoints"
    others = [".DS_Store", ".step-1.unfinished", ".step-by-step.deleted", "step-00000001.damaged"]
    for name in (".step-00000400.unfinished", ".step-00000001.deleted", *others):
        (folder / name).mkdir()
    tidy(held(run_dir))
    assert names(run_dir) == sorted([*others, "step-00000001", "step-00000020", "step-00000300"])
    assert newest_whole(run_dir).found.manifest.step == 300


def test_one_that_cannot_be_deleted_yet_is_deleted_later(run_dir, monkeypatch):
    """On NFS, a file that a reader has open keeps its folder."""
    remove = Folder.remove

    def fail(*_):
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))

    monkeypatch.setattr(Folder, "remove", fail)
    prune(held(run_dir), keep_last=2)
    assert names(run_dir) == [".step-00000001.deleted", "step-00000020", "step-00000300"]
    monkeypatch.setattr(Folder, "remove", remove)
    prune(held(run_dir), keep_last=2)
    assert names(run_dir) == ["step-00000020", "step-00000300"]


def test_what_is_left_of_a_first_checkpoint_is_no_checkpoint(tmp_path):
    (tmp_path / "checkpoints" / ".step-00000400.unfinished").mkdir(parents=True)
    assert newest_whole(tmp_path).found is None
    tidy(held(tmp_path))
    assert newest_whole(tmp_path).found is None


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "kept"),
    [(1, 0, [300]), (2, 0, [20, 300]), (1, 10, [20, 300]), (1, 1, [1, 20, 300]), (5, 0, [1, 20, 300])],
)
def test_the_last_ones_and_milestones_are_kept(run_dir, keep_last, keep_every, kept):
    prune(held(run_dir), keep_last=keep_last, keep_every=keep_every)
    assert names(run_dir) == [f"step-{step:08d}" for step in kept]


def test_clearing_leaves_what_is_not_ours(run_dir):
    folder = run_dir / "checkpoints"
    (folder / "step-00000001.damaged").mkdir()
    (folder / ".step-00000001.unfinished").mkdir()
    (folder / "step-00000002").symlink_to(run_dir)
    others = ["notes", "step-by-step.md", "step-00000001.mine"]
    for name in others:
        (folder / name).write_text("mine")
    clear(held(run_dir))
    assert names(run_dir) == sorted(others)


def test_checkpoints_may_lie_on_another_disk(run_dir, tmp_path):
    (run_dir / "checkpoints").rename(tmp_path / "disk")
    (run_dir / "checkpoints").symlink_to(tmp_path / "disk")
    prune(held(run_dir), keep_last=2)
    assert newest_whole(run_dir).found.manifest.step == 300
    clear(held(run_dir))
    assert list((tmp_path / "disk").iterdir()) == []


def test_no_checkpoint(tmp_path):
    assert newest_whole(tmp_path).found is None
    with pytest.raises(MissingFileError, match="has no checkpoint; train first"):
        find_newest(tmp_path)


def test_what_is_not_there_or_is_a_file_has_no_digest(tmp_path, capsys):
    (tmp_path / "file").touch()
    for name, what in (("none", "not found"), ("file", "not a folder"), ("file/below", "not found")):
        assert cli.main(["digest", str(tmp_path / name)]) == 2
        line = f"samestep: error: {tmp_path / name}: {what}; expected a checkpoint, or a run folder"
        assert capsys.readouterr() == ("", f"{line}\n")


def test_the_digest_is_that_of_the_newest_whole_one(run_dir, capsys):
    path = checkpoint_path(run_dir, 300)
    expected = json.loads((path / "manifest.json").read_text())["digest"]
    for target in (run_dir, path):
        assert cli.main(["digest", str(target)]) == 0
        assert capsys.readouterr() == (f"{expected}\n", "")
    truncated(path)
    before = names(run_dir)
    assert read_digest(run_dir) == expected
    assert capsys.readouterr().err.endswith("model.safetensors: has 100 bytes, expected 608; not used\n")
    assert names(run_dir) == before
    assert cli.main(["digest", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("samestep: error: ")
    assert error.count("\n") == 1


def test_tensors_of_a_found_checkpoint_are_in_host_memory(run_dir):
    snapshot = search(run_dir).found.snapshot
    assert all(tensor.device == torch.device("cpu") for tensor in snapshot.weights.values())
