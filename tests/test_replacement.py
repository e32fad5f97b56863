"""`samestep.save` over what is there: killed at any moment, and beside things that are not a checkpoint's."""

import errno
import fcntl
import os
import shutil
import signal
import threading
import warnings

import pytest
import safetensors.torch
import torch
from torch import nn

import samestep
from samestep.checkpoint import files
from samestep.checkpoint.folder import Folder
from samestep.errors import ConfigError, DamagedError, StorageError

from . import forgery
from .cases import mostly_long
from .forgery import contents

CALLS = {
    os: ("mkdir", "rename", "unlink", "rmdir", "fdopen"),
    fcntl: ("flock",),
    safetensors.torch: ("save_file",),
    shutil: ("copymode",),
    Folder: ("exchange",),
}
"""What changes something on the disk; to be killed before other calls is to be killed after one of these."""


class Killer:
    """Counts the calls that change the disk, and kills the process before one of them."""

    def __init__(self, victim):
        self.count, self.victim = 0, victim

    def install(self):
        for module, names in CALLS.items():
            for name in names:
                setattr(module, name, self.wrapped(getattr(module, name)))

    def wrapped(self, function):
        def call(*arguments, **options):
            if self.count == self.victim:
                os.kill(os.getpid(), signal.SIGKILL)
            self.count += 1
            return function(*arguments, **options)

        return call


def killed_before(victim, path):
    """Save in a process that dies before one of its calls; say whether it came to that."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: of threads, which do nothing here
        child = os.fork()
    if child == 0:
        try:
            Killer(victim).install()
            save(path, 2)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


MODEL = nn.Linear(2, 1)


def save(path, step):
    return samestep.save(path, model=MODEL, step=step, value=torch.zeros(3))


def step_of(path):
    return samestep.load(path, model=nn.Linear(2, 1)).step


@pytest.mark.parametrize(
    ("before", "exchanges"),
    mostly_long([("one", True), (None, True), ("one", False), (".one.replaced", False)], 1),
    ids=["over another by renameat2", "new", "over another by two renames", "after one that was killed"],
)
def test_a_save_that_is_killed_leaves_the_old_or_the_new(tmp_path, monkeypatch, before, exchanges):
    is_there = before is not None
    if not exchanges:
        monkeypatch.setattr(Folder, "exchange", lambda *_: False)
    path, original = tmp_path / "runs" / "one", save(tmp_path / "original", 1)
    found = set()
    for victim in range(1000):
        shutil.rmtree(path.parent, ignore_errors=True)
        if is_there:
            shutil.copytree(original, path.with_name(before))
        if not killed_before(victim, path):
            break
        assert path.parent.exists() or not is_there
        if is_there or os.path.lexists(path):
            found.add(step_of(path))  # or an error: nothing whole was left
        save(path, 3)
        assert step_of(path) == 3
        assert os.listdir(path.parent) == ["one"]
    assert victim >= 10  # it did go through the wrapped calls
    assert found == ({1, 2} if is_there else {2})


def test_the_digest_of_one_that_is_being_replaced_is_found(tmp_path):
    from samestep.app.run_folder import read_digest

    path = save(tmp_path / "one", 1)
    path.rename(tmp_path / ".one.replaced")
    assert read_digest(path) == samestep.digest(MODEL)


def test_two_at_once_do_not_mix(tmp_path, monkeypatch):
    """The second says so; the first is what is there."""
    entered, go_on = threading.Event(), threading.Event()
    write_files = files._write_files

    def wait(snapshot, folder):
        entered.set()
        assert go_on.wait(30)
        write_files(snapshot, folder)

    monkeypatch.setattr(files, "_write_files", wait)
    first = threading.Thread(target=save, args=[tmp_path / "one", 1])
    first.start()
    assert entered.wait(30)
    monkeypatch.setattr(files, "_write_files", write_files)
    with pytest.raises(StorageError, match=r"\.one\.unfinished: another process writes there: wait, or"):
        save(tmp_path / "one", 2)
    go_on.set()
    first.join()
    assert step_of(tmp_path / "one") == 1
    assert os.listdir(tmp_path) == ["one"]


def test_one_that_is_replaced_while_it_is_read_is_read_again(tmp_path, monkeypatch):
    path = save(tmp_path / "one", 1)
    original, times = files._content, []

    def replace_first(file, folder, max_bytes):
        if file.name == "model.safetensors" and not times:
            times.append(save(path, 2))
        return original(file, folder, max_bytes)

    monkeypatch.setattr(files, "_content", replace_first)
    assert step_of(path) == 2


# ---- what is not ours ----------------------------------------------------------------------------------


def notes(path):
    path.mkdir()
    (path / "notes.txt").write_text("mine")


def with_notes(path):
    forgery.save(path)
    (path / "notes.txt").write_text("mine")


def file(path):
    path.write_text("mine")


PRECIOUS = {
    notes: "notes.txt: does not belong to a checkpoint, so its folder is not replaced: choose another path",
    with_notes: "notes.txt: does not belong to a checkpoint",
    file: "is not a folder, so it is not replaced: choose another path",
    os.mkfifo: "is not a folder, so it is not replaced",
}


@pytest.mark.parametrize("name", ["one", ".one.unfinished", ".one.replaced"])
@pytest.mark.parametrize("make", PRECIOUS, ids=lambda make: make.__name__)
def test_what_is_not_a_checkpoint_is_never_replaced_or_deleted(tmp_path, make, name):
    make(tmp_path / name)
    before = contents(tmp_path)
    with pytest.raises(StorageError, match=PRECIOUS[make]) as caught:
        save(tmp_path / "one", 2)
    assert str(tmp_path / name) in str(caught.value)
    assert contents(tmp_path) == before
    assert os.listdir(tmp_path) == [name]


def test_empty_folders_and_what_systems_put_there_are_replaced(tmp_path):
    path = tmp_path / "one"
    path.mkdir()
    save(path, 1)
    for name in (".DS_Store", "Thumbs.db"):
        (path / name).write_bytes(b"\0")
    save(path, 2)
    assert step_of(path) == 2


@pytest.mark.parametrize("path", [".", "..", "/", "runs/.."])
def test_a_path_without_a_name(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="expected the name of a folder, such as runs/a/last"):
        save(path, 1)
    assert os.listdir(tmp_path) == []


def test_a_folder_that_is_gone(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(StorageError, match="No such file or directory"):
        save("one", 1)


def test_a_system_that_cannot_exchange_and_then_fails_keeps_the_old_one(tmp_path, monkeypatch):
    path = save(tmp_path / "one", 1)
    rename = Folder.rename

    def fail(folder, name, to):
        if name == ".one.unfinished":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rename(folder, name, to)

    monkeypatch.setattr(Folder, "exchange", lambda *_: False)
    monkeypatch.setattr(Folder, "rename", fail)
    with pytest.raises(StorageError, match="Input/output error"):
        save(path, 2)
    assert step_of(path) == 1
    assert os.listdir(tmp_path) == ["one"]


def test_names_in_the_folder_of_a_checkpoint_do_not_hide_damage(tmp_path):
    path = save(tmp_path / "one", 1)
    (path / "model.safetensors").rename(path / "Model.safetensors")
    with pytest.raises(DamagedError, match=r"model.safetensors: is not there"):
        step_of(path)
