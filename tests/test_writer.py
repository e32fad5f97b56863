import errno
import threading

import pytest
import torch
from torch import nn

from samestep.app import writer as module
from samestep.app.run_folder import all_checkpoints, checkpoint_path
from samestep.app.writer import CheckpointWriter
from samestep.checkpoint.durable import storage, write_whole
from samestep.checkpoint.files import read, write
from samestep.checkpoint.objects import TrainingObjects
from samestep.checkpoint.snapshot import take_snapshot
from samestep.errors import StorageError
from samestep.identity import digest


class SlowDisk:
    """A disk that takes a snapshot only when it is allowed to."""

    def __init__(self):
        self.may_go_on = threading.Event()
        self.num_started = 0

    def write(self, snapshot, path):
        self.num_started += 1
        assert self.may_go_on.wait(30)
        return write(snapshot, path)


class FullDisk:
    def write(self, snapshot, path):
        with storage(path):
            raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def disk(monkeypatch):
    disk = SlowDisk()
    monkeypatch.setattr(module, "write", disk.write)
    yield disk
    disk.may_go_on.set()


def training():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step():
        optimizer.zero_grad()
        model(torch.randn(8, 3)).square().sum().backward()
        optimizer.step()

    return model, optimizer, step


def test_training_goes_on_while_a_snapshot_is_written_and_never_gets_into_it(tmp_path, disk):
    model, optimizer, step = training()
    with CheckpointWriter(tmp_path, keep_last=3) as writer:
        step()
        expected = digest(model), digest(optimizer.state_dict()["state"][0])
        writer.write(take_snapshot(TrainingObjects(model=model, state={"optimizer": optimizer}), 1))
        for _ in range(5):
            step()
            writer.check()
        assert all_checkpoints(tmp_path) == []
        disk.may_go_on.set()
    snapshot = read(checkpoint_path(tmp_path, 1)).snapshot
    momentum = {"momentum_buffer": snapshot.tensors["optimizer.state.0.momentum_buffer"]}
    assert (digest(snapshot.weights), digest(momentum)) == expected


def test_the_next_waits_for_the_one_before(tmp_path, disk):
    model, _, _ = training()
    snapshots = [take_snapshot(TrainingObjects(model=model), step) for step in (1, 2)]
    with CheckpointWriter(tmp_path, keep_last=3) as writer:
        writer.write(snapshots[0])
        second = threading.Thread(target=writer.write, args=[snapshots[1]])
        second.start()
        second.join(0.2)
        assert second.is_alive()
        assert disk.num_started == 1
        disk.may_go_on.set()
        second.join(30)
    assert disk.num_started == 2
    assert [path.name for path in all_checkpoints(tmp_path)] == ["step-00000001", "step-00000002"]


def failed(writer):
    writer.write(take_snapshot(TrainingObjects(model=nn.Linear(1, 1)), 2))
    while not writer._pending.done():
        pass


def test_a_full_disk_is_told_at_the_next_step_and_earlier_checkpoints_stay(tmp_path, monkeypatch):
    with CheckpointWriter(tmp_path, keep_last=1) as writer:
        writer.write(take_snapshot(TrainingObjects(model=nn.Linear(1, 1)), 1))
        writer.wait()
        monkeypatch.setattr(module, "write", FullDisk().write)
        for tell in (writer.check, writer.wait, lambda: writer.write(None)):
            failed(writer)
            with pytest.raises(StorageError, match=r"step-00000002: cannot be written \(No space left"):
                tell()
            writer.check()
    assert read(all_checkpoints(tmp_path)[-1]).manifest.step == 1


def test_a_full_disk_is_told_at_the_end(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module, "write", FullDisk().write)
    with pytest.raises(StorageError, match="free space"), CheckpointWriter(tmp_path, keep_last=1) as writer:
        failed(writer)
    writer = CheckpointWriter(tmp_path, keep_last=1)
    failed(writer)
    writer.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)  # the run ends for this other reason
    assert capsys.readouterr().err.count("free space on the disk\n") == 1


def test_files_are_replaced_whole(tmp_path):
    file = tmp_path / "new" / "settings.json"
    for text in ("one", "two"):
        write_whole(file, text)
        assert file.read_text() == text
    assert [entry.name for entry in file.parent.iterdir()] == ["settings.json"]
    with pytest.raises(StorageError, match=r"settings\.json"):
        write_whole(file / "settings.json", "three")
