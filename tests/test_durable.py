import errno
import os
import resource
import socket
from pathlib import Path

import pytest

from samestep.checkpoint.durable import read_file, storage, write_whole
from samestep.checkpoint.folder import Folder
from samestep.errors import DataError, StorageError


def test_files_are_replaced_whole(tmp_path):
    file = tmp_path / "new" / "settings.json"
    for text in ("one", "two"):
        write_whole(file, text)
        assert file.read_text() == text
    assert [entry.name for entry in file.parent.iterdir()] == ["settings.json"]
    with pytest.raises(StorageError, match=r"settings\.json"):
        write_whole(file / "settings.json", "three")


# ---- what is planted -----------------------------------------------------------------------------------


def link(file):
    file.symlink_to(precious(file))


def second_name(file):
    file.hardlink_to(precious(file))


def link_to_a_device(file):
    file.symlink_to("/dev/full")


def endless(file):
    file.symlink_to("/dev/zero")


def link_to_nothing(file):
    file.symlink_to(file.parent / "nothing")


def device(file):
    try:
        os.mknod(file, 0o600 | 0o020000, os.makedev(1, 5))  # of /dev/zero
    except PermissionError:
        pytest.skip("making devices is not permitted here")


def listening(file):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(file))


def precious(file):
    path = file.parent.parent / "precious"
    path.write_text("mine")
    return path


def is_untouched(path):
    return not path.exists() or path.read_text() == "mine"


PLANTED = (link, second_name, link_to_a_device, link_to_nothing, os.mkfifo, device, listening)


@pytest.mark.parametrize("name", ["settings.json", ".settings.json.unfinished"])
@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_what_is_in_the_way_is_replaced_and_never_written_to(tmp_path, monkeypatch, plant, name):
    folder = tmp_path / "run"
    folder.mkdir()
    monkeypatch.chdir(folder)
    plant(folder / name)
    write_whole(folder / "settings.json", "text")
    assert (folder / "settings.json").read_text() == "text"
    assert not (folder / "settings.json").is_symlink()
    assert os.listdir(folder) == ["settings.json"]
    assert is_untouched(folder.parent / "precious")


@pytest.mark.parametrize("name", ["settings.json", ".settings.json.unfinished"])
def test_a_folder_in_the_way_is_an_error_and_stays(tmp_path, name):
    (tmp_path / name).mkdir()
    (tmp_path / name / "notes").write_text("mine")
    with pytest.raises(StorageError, match=f"{tmp_path}/{name}: cannot be written \\(Is a directory\\)"):
        write_whole(tmp_path / "settings.json", "text")
    assert (tmp_path / name / "notes").read_text() == "mine"


# ---- reading -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plant", [os.mkfifo, os.mkdir, device, endless], ids=lambda plant: plant.__name__)
def test_only_regular_files_are_read(tmp_path, plant):
    plant(tmp_path / "file")
    with pytest.raises(DataError, match=f"{tmp_path}/file: is not a regular file"):
        read_file(tmp_path / "file", 100)


def test_no_more_is_read_than_there_may_be(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"12345")
    assert read_file(file, 5) == b"12345"
    with pytest.raises(DataError, match="file: has 5 bytes, expected at most 4"):
        read_file(file, 4)
    os.truncate(file, 2**40)
    with pytest.raises(DataError, match="file: has 1099511627776 bytes, expected at most 5"):
        read_file(file, 5)


def test_nothing_stays_open(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    (tmp_path / "folder").mkdir()
    for _ in range(3):
        write_whole(tmp_path / "file", "text")
        with pytest.raises(DataError):
            read_file(tmp_path / "folder", 1)
        with pytest.raises(StorageError):
            write_whole(tmp_path / "folder", "text")
    assert len(os.listdir("/proc/self/fd")) == before


# ---- disks ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "free space on the disk"),
        (errno.EDQUOT, "free space in the quota"),
        (errno.EROFS, "choose a folder that can be written to"),
        (errno.EIO, "check the disk, or choose another folder"),
        (errno.ESTALE, "check the disk, or choose another folder"),
    ],
)
def test_a_disk_s_error_is_one_line(number, remedy):
    with pytest.raises(StorageError) as caught, storage(Path("a/b")):
        raise OSError(number, os.strerror(number))
    assert str(caught.value) == f"a/b: cannot be written ({os.strerror(number)}); {remedy}"
    assert caught.value.exit_status == 1
    with pytest.raises(StorageError, match="cannot be read") as caught, storage(Path("a/b"), "read"):
        raise OSError(number, os.strerror(number))
    assert caught.value.exit_status == 2


def test_a_limit_on_file_sizes_leaves_the_old_text(tmp_path):
    write_whole(tmp_path / "file", "old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(StorageError, match="raise the limit on file sizes"):
            write_whole(tmp_path / "file", "new" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (tmp_path / "file").read_text() == "old"
    write_whole(tmp_path / "file", "new")
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_file_that_is_made_is_never_one_that_was_put_in_its_place(tmp_path, plant):
    new = tmp_path / "folder" / "new"
    new.parent.mkdir()
    plant(new)
    with Folder.open(new.parent) as folder, pytest.raises(OSError, match="exists"):
        folder.create("new")
    assert is_untouched(tmp_path / "precious")
