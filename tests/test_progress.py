"""Batches that are taken from a loader, and not used before its state is saved."""

import itertools
import queue
import threading
import warnings
from contextlib import nullcontext

import pytest
import torch

from samestep import StreamLoader, TowerLoader, Towers, Trainer, save
from samestep.towers.step import Step


class Run:
    """A model with a loader of 5 batches in an epoch, the last of them incomplete."""

    def __init__(self, kind=TowerLoader):
        self.model = torch.nn.Linear(1, 1)
        self.towers = Towers(self.model, 2)
        source = torch.arange(18.0)[:, None] if kind is TowerLoader else shard
        self.loader = kind(source, 4, self.towers)
        self.seen = []

    def step(self, batch):
        for tower in self.towers(batch):
            tower.backward(self.model(tower.batch).square().mean())
        self.towers.average()
        self.seen.append(batch.position)

    def save(self, path, lost=None):
        """Save the run, and expect a warning of these batches."""
        match = None if lost is None else rf"{lost} not used by a step"
        with pytest.warns(UserWarning, match=match) if lost else nullcontext():
            save(path, model=self.model, towers=self.towers, loader=self.loader)


def shard(tower, num_towers, epoch, seed):
    yield from torch.arange(10.0)[:, None]


@pytest.fixture(params=[TowerLoader, StreamLoader])
def run(request):
    return Run(request.param)


@pytest.fixture(autouse=True)
def _all_warnings_are_errors():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def ahead(loader, num_batches):
    """Read in a thread, as a program's own prefetcher does."""
    batches = queue.Queue()
    thread = threading.Thread(target=lambda: [*map(batches.put, itertools.islice(loader, num_batches))])
    thread.start()
    thread.join()
    while not batches.empty():
        yield batches.get()


# ---- batches that are lost -----------------------------------------------------------------------------


def test_zip_takes_a_batch_more(run, tmp_path):
    for batch, _ in zip(run.loader, range(2), strict=False):
        run.step(batch)
    run.save(tmp_path, "batch 2 was")


def test_break_before_a_step_drops_a_batch(run, tmp_path):
    for batch in run.loader:
        if run.towers.step == 3:
            break
        run.step(batch)
    run.save(tmp_path, "batch 3 was")


def test_a_thread_that_reads_ahead(run, tmp_path):
    for batch in itertools.islice(ahead(run.loader, 4), 2):
        run.step(batch)
    run.save(tmp_path, "batches 2 to 3 were")


def test_cycle_repeats_batches_of_a_loader_that_has_gone_on(run, tmp_path):
    for batch in itertools.islice(itertools.cycle(itertools.islice(run.loader, 4)), 5):
        run.step(batch)
    run.save(tmp_path, "batches 1 to 3 were")


def test_a_step_that_is_abandoned_as_the_loop_ends(run, tmp_path):
    def loop():
        for batch in run.loader:
            if run.towers.step == 2:
                next(run.towers(batch))
                raise KeyboardInterrupt
            run.step(batch)

    with pytest.raises(KeyboardInterrupt):
        loop()
    run.towers.abandon()
    run.save(tmp_path, "batch 2 was")


def test_another_position_forgets_them(tmp_path):
    run = Run()
    for batch, _ in zip(run.loader, range(2), strict=False):
        run.step(batch)
    run.loader.position = 2
    run.save(tmp_path)
    run.step(next(iter(run.loader)))
    assert run.seen == [0, 1, 2]


# ---- batches that are not ------------------------------------------------------------------------------


def test_all_are_used(run, tmp_path):
    for num, batch in zip(range(3), run.loader, strict=False):
        run.step(batch)
        run.save(tmp_path / str(num))
    run.save(tmp_path / "after")
    for batch in run.loader:
        run.step(batch)
        if run.towers.step == 4:
            break
    run.save(tmp_path / "break")
    for batch in run.loader:
        run.step(batch)
    run.save(tmp_path / "epoch")


def test_skipped_on_purpose(run, tmp_path):
    for batch in run.loader:
        if batch.position in (0, 2, 4):
            run.save(tmp_path / str(batch.position))
            continue
        run.step(batch)
    run.save(tmp_path / "end")


def test_an_incomplete_batch_ends_a_loop(tmp_path):
    run = Run()
    for batch in run.loader:
        if batch.rows < run.loader.batch_size:
            break
        run.step(batch)
    run.save(tmp_path)


def test_an_abandoned_step_in_a_loop_that_goes_on(run, tmp_path):
    for batch in itertools.islice(run.loader, 4):
        if batch.position % 2:
            next(run.towers(batch))
            run.towers.abandon()
        else:
            run.step(batch)
        run.save(tmp_path / str(batch.position))


def test_an_evaluation_loader_and_loaders_in_turn(tmp_path):
    run, other = Run(), Run()
    second = TowerLoader(torch.arange(12.0)[:, None], 3, run.towers)
    for one, two in zip(run.loader, second, strict=False):
        run.step(one)
        run.step(two)
        run.save(tmp_path / str(run.towers.step))
        for _ in other.loader:
            break
    assert second.state_dict()["position"] == 4


def test_a_glance_at_the_first_batch(run, tmp_path):
    next(iter(run.loader))
    run.save(tmp_path / "first")
    for batch in run.loader:
        run.step(batch)
    run.save(tmp_path / "second")


def test_batches_taken_together_and_all_used(run, tmp_path):
    batches = iter(run.loader)
    for _ in range(2):
        for batch in [next(batches), next(batches)] * 2:
            run.step(batch)
        run.save(tmp_path / str(run.towers.step))


def test_a_trainer(tmp_path):
    run = Run()
    step = Step(run.towers, lambda m, x: m(x).square().mean(), torch.optim.SGD(run.model.parameters(), 0.1))
    Trainer(step, run.loader, run_dir=tmp_path, steps=7, checkpoint_every=3).run()
    assert run.loader.position == 7


def test_a_save_before_the_step_that_uses_the_batch(run, tmp_path):
    def loop():
        for batch in run.loader:
            run.save(tmp_path)
            run.step(batch)
            if run.towers.step == 3:
                break

    with pytest.warns(UserWarning, match="a state was saved at batch 1, before a step had used batch 0"):
        loop()


def test_an_incomplete_batch_that_is_lost_where_steps_use_such_batches(tmp_path):
    run = Run()
    for batch in run.loader:
        run.step(batch)
    for batch, _ in zip(run.loader, range(4), strict=False):
        run.step(batch)
    run.save(tmp_path, "batch 9 was")


def test_a_batch_that_is_used_once_more(run, tmp_path):
    held = []
    for batch in itertools.islice(run.loader, 3):
        held.append(batch)
        run.step(batch)
        run.step(held[0])
    run.save(tmp_path)
