import errno
import re
import threading

import pytest
import torch
from torch import nn

from samestep.app import writer as module
from samestep.app.lock import RunLock
from samestep.app.run_folder import all_checkpoints, checkpoint_path
from samestep.app.writer import CheckpointWriter
from samestep.checkpoint.durable import storage
from samestep.checkpoint.files import read, write
from samestep.checkpoint.objects import TrainingObjects
from samestep.checkpoint.snapshot import take_snapshot
from samestep.errors import StorageError
from samestep.identity import digest
from samestep.workers.job import Job

from .simulation import Faults, World, simulate


class SlowDisk:
    """A disk that takes a snapshot only when it is allowed to."""

    def __init__(self):
        self.may_go_on = threading.Event()
        self.num_started = 0

    def write(self, snapshot, path, parent):
        self.num_started += 1
        assert self.may_go_on.wait(30)
        return write(snapshot, path, parent)


class FullDisk:
    def write(self, snapshot, path, parent):
        with storage(path):
            raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def disk(monkeypatch):
    disk = SlowDisk()
    monkeypatch.setattr(module, "write", disk.write)
    yield disk
    disk.may_go_on.set()


@pytest.fixture
def lock(tmp_path):
    return RunLock(tmp_path, Job(torch.device("cpu")))


def training():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step():
        optimizer.zero_grad()
        model(torch.randn(8, 3)).square().sum().backward()
        optimizer.step()

    return model, optimizer, step


def test_training_goes_on_while_a_snapshot_is_written_and_never_gets_into_it(tmp_path, lock, disk):
    model, optimizer, step = training()
    with lock, CheckpointWriter(lock, keep_last=3) as writer:
        step()
        expected = digest(model), digest(optimizer.state_dict()["state"][0])
        objects = TrainingObjects(model=model, state={"optimizer": optimizer})
        writer.write(1, lambda: take_snapshot(objects, 1))
        for _ in range(5):
            step()
        assert all_checkpoints(tmp_path) == []
        disk.may_go_on.set()
    snapshot = read(checkpoint_path(tmp_path, 1)).snapshot
    momentum = {"momentum_buffer": snapshot.tensors["optimizer.state.0.momentum_buffer"]}
    assert (digest(snapshot.weights), digest(momentum)) == expected


def test_the_next_waits_for_the_one_before(tmp_path, lock, disk):
    model, _, _ = training()
    snapshots = [take_snapshot(TrainingObjects(model=model), step) for step in (1, 2)]
    with lock, CheckpointWriter(lock, keep_last=3) as writer:
        writer.write(1, lambda: snapshots[0])
        second = threading.Thread(target=writer.write, args=[2, lambda: snapshots[1]])
        second.start()
        second.join(0.2)
        assert second.is_alive()
        assert disk.num_started == 1
        disk.may_go_on.set()
        second.join(30)
    assert disk.num_started == 2
    assert [path.name for path in all_checkpoints(tmp_path)] == ["step-00000001", "step-00000002"]


def failed(writer):
    writer.write(2, lambda: take_snapshot(TrainingObjects(model=nn.Linear(1, 1)), 2))
    while not writer.has_failed:
        pass


def test_a_full_disk_is_told_at_the_next_checkpoint_and_earlier_ones_stay(tmp_path, lock, monkeypatch):
    with lock, CheckpointWriter(lock, keep_last=1) as writer:
        writer.write(1, lambda: take_snapshot(TrainingObjects(model=nn.Linear(1, 1)), 1))
        writer.wait()
        monkeypatch.setattr(module, "write", FullDisk().write)
        for tell in (writer.wait, lambda: writer.write(3, None)):
            failed(writer)
            with pytest.raises(StorageError, match=r"step-00000002: cannot be written \(No space left"):
                tell()
            assert not writer.has_failed
    assert read(all_checkpoints(tmp_path)[-1]).manifest.step == 1


def test_a_full_disk_is_told_at_the_end(lock, monkeypatch, capsys):
    monkeypatch.setattr(module, "write", FullDisk().write)
    with lock:
        with pytest.raises(StorageError, match="free space"), CheckpointWriter(lock, keep_last=1) as writer:
            failed(writer)
        writer = CheckpointWriter(lock, keep_last=1)
        failed(writer)
        writer.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)  # the run ends for this other reason
    assert capsys.readouterr().err.count("free space on the disk\n") == 1


def in_a_job(tmp_path, work):
    """Return what a worker of a job does with the run's writer, once it has written a first checkpoint."""

    def worker(job):
        with RunLock(tmp_path, job) as lock, CheckpointWriter(lock, keep_last=3) as writer:
            writer.write(1, lambda: take_snapshot(TrainingObjects(model=nn.Linear(1, 1)), 1))
            writer.wait()
            work(writer)

    return worker


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "tell",
    [lambda writer: writer.wait(), lambda writer: writer.write(3, None)],
    ids=["the last", "one of several"],
)
def test_a_full_disk_is_told_by_all_workers_alike(tmp_path, monkeypatch, tell, seed):
    def work(writer):
        monkeypatch.setattr(module, "write", FullDisk().write)
        writer.write(2, lambda: take_snapshot(TrainingObjects(model=nn.Linear(1, 1)), 2))
        tell(writer)

    outcomes = simulate(in_a_job(tmp_path, work), 3, seed)
    path = checkpoint_path(tmp_path, 2)
    line = f"StorageError: {path}: cannot be written (No space left on device); free space on the disk"
    assert [outcome.text for outcome in outcomes] == [line] * 3
    assert [path.name for path in all_checkpoints(tmp_path)] == ["step-00000001"]


def test_who_waits_in_vain_for_a_stalled_disk_says_for_which_checkpoint(tmp_path):
    def work(writer):
        writer.write(2, lambda: take_snapshot(TrainingObjects(model=nn.Linear(1, 1)), 2))

    what = f"step 2, writing a checkpoint ({checkpoint_path(tmp_path, 2)})"
    world = World(2, 0)
    world.run(in_a_job(tmp_path, work))
    event = [text for rank, _, text, _ in world.events if rank == 0].index(what) + 1
    _, other = simulate(in_a_job(tmp_path, work), 2, 0, Faults(stopped={0: event}))
    assert re.fullmatch(
        f"LostWorkerError: {re.escape(what)}: (worker 0|another worker) did not answer .*", other.text
    )
