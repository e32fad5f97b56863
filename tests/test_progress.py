"""Which batches of a loader count: one that is taken and not used comes again, also in a resumed run."""

import itertools
import queue
import threading
import warnings
from contextlib import nullcontext

import pytest
import torch

from samestep import LocalBatch, StreamLoader, TowerLoader, Towers, Trainer, load, save
from samestep.errors import UsageError
from samestep.towers.step import Step

pytestmark = pytest.mark.sampled(5)


class Run:
    """A model with a loader of 5 batches in an epoch, the last of a TowerLoader incomplete."""

    def __init__(self, kind=TowerLoader):
        self.kind = kind
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

    def save(self, path, warning=None):
        """Save the run, and expect a warning."""
        with pytest.warns(UserWarning, match=warning) if warning else nullcontext():
            save(path, model=self.model, towers=self.towers, loader=self.loader)

    def goes_on_at(self, position, path):
        """Save the run, and check which batch comes next, here and in a run that continues."""
        self.save(path)
        other = Run(self.kind)
        load(path, model=other.model, towers=other.towers, loader=other.loader)
        for each in (self, other):
            assert (each.loader.position, each.loader.epoch) == (position, position // 5)
            assert next(iter(each.loader)).position == position


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


# ---- batches that come again ---------------------------------------------------------------------------


def test_zip_takes_a_batch_more(run, tmp_path):
    for batch, _ in zip(run.loader, range(2), strict=False):
        run.step(batch)
    run.goes_on_at(2, tmp_path)


@pytest.mark.parametrize("num_steps", [3, 4])
def test_break_before_a_step(run, tmp_path, num_steps):
    for batch in run.loader:
        if run.towers.step == num_steps:
            break
        run.step(batch)
    run.goes_on_at(num_steps, tmp_path)


def test_an_iterator_that_is_held(run, tmp_path):
    batches = (batch for _ in range(2) for batch in run.loader)
    for batch, _ in zip(batches, range(6), strict=False):
        run.step(batch)
    run.goes_on_at(6, tmp_path)


def test_next_batch_before_a_step(tmp_path):
    run = Run(StreamLoader)
    while (batch := run.loader.next_batch()) is not None and run.towers.step < 2:
        run.step(batch)
    run.goes_on_at(2, tmp_path)


@pytest.mark.long
def test_a_glance_before_the_loop(run, tmp_path):
    def program(path):
        run = Run(kind)
        if path.exists():
            load(path, model=run.model, towers=run.towers, loader=run.loader)
        next(iter(run.loader))
        for batch in run.loader:
            run.step(batch)
            if run.towers.step in (2, 3):
                save(path, model=run.model, towers=run.towers, loader=run.loader)
                return run.seen
        return None

    kind = run.kind
    assert program(tmp_path / "one") + program(tmp_path / "one") == [1, 2, 3]


def test_a_thread_that_reads_ahead(run, tmp_path):
    for batch in itertools.islice(ahead(run.loader, 4), 2):
        run.step(batch)
    run.goes_on_at(2, tmp_path)


def test_a_thread_that_reads_ahead_over_the_end_of_an_epoch(run, tmp_path):
    for batch in itertools.islice(ahead((batch for _ in range(2) for batch in run.loader), 7), 4):
        run.step(batch)
        run.save(tmp_path)
    other = Run(run.kind)
    load(tmp_path, model=other.model, towers=other.towers, loader=other.loader)
    assert (other.loader.epoch, next(iter(other.loader)).position) == (0, 4)


def test_one_batch_is_taken_ahead(run, tmp_path):
    batches = iter(run.loader)
    following = next(batches)
    while following is not None:
        batch, following = following, next(batches, None)
        run.step(batch)
        assert run.loader.state_dict()["position"] == batch.position + 1
    run.goes_on_at(5, tmp_path)


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
    run.goes_on_at(2, tmp_path)


def test_a_batch_in_another_form_is_used_by_the_step_that_follows(run, tmp_path):
    for batch in run.loader:
        own = LocalBatch(batch.rows, dict(batch.slices), batch.position, batch.fingerprint)
        run.step(own if batch.position else batch)
        if run.towers.step == 3:
            break
    run.goes_on_at(3, tmp_path)


def test_a_loop_makes_other_batches_of_all(run, tmp_path):
    for batch, _ in zip(run.loader, range(2), strict=False):
        run.step(LocalBatch(batch.rows, dict(batch.slices), batch.position, batch.fingerprint))
    run.goes_on_at(2, tmp_path)


def test_steps_with_another_loaders_batches_use_none_of_these(tmp_path):
    run, other = Run(), Run()
    other.towers, other.model = run.towers, run.model
    other.loader = TowerLoader(torch.arange(40.0)[:, None], 4, run.towers)
    for _ in range(2):
        for each in (run, other):
            for batch, _ in zip(each.loader, range(2), strict=False):
                each.step(batch)
    assert run.seen == other.seen == [0, 1, 2, 3]


def test_iterations_that_never_go_on_are_refused(run):
    run.step(next(iter(run.loader)))
    for _ in range(100):
        assert next(iter(run.loader)).position == 1
    with pytest.raises(UsageError, match="100 iterations in a row have begun with batch 1"):
        next(iter(run.loader))


def test_without_steps_all_batches_count(run):
    for batch in run.loader:
        assert run.loader.position == run.loader.state_dict()["position"] == batch.position + 1
        if batch.position == 2:
            break
    assert next(iter(run.loader)).position == 3


# ---- batches that are lost -----------------------------------------------------------------------------

AGAIN = "batches from 0 on were used again after their iteration had ended"


@pytest.mark.parametrize("num_steps", [6, 8])
def test_cycle_repeats_batches_of_a_loader_that_has_gone_on(run, tmp_path, num_steps):
    for batch in itertools.islice(itertools.cycle(itertools.islice(run.loader, 4)), num_steps):
        run.step(batch)
    run.save(tmp_path, AGAIN)


def test_a_list_of_batches_is_saved_before_its_last_use(run, tmp_path):
    batches = [*itertools.islice(run.loader, 3)]
    for batch in (batches * 2)[:5]:
        run.step(batch)
    run.save(tmp_path, AGAIN)


def test_one_of_two_batches_is_chosen(run, tmp_path):
    def loop():
        batches = iter(run.loader)
        for _ in range(2):
            first, _ = next(batches), next(batches)
            run.step(first)
            run.save(tmp_path)

    with pytest.warns(
        UserWarning, match="a state was saved at batch 1, which had been taken, but has not been"
    ):
        loop()


def test_another_position_is_set(tmp_path):
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
    assert run.loader.epoch == 1


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
    for batch in run.loader:
        run.save(tmp_path)
        assert run.loader.position == batch.position
        if run.towers.step == 3:
            break
        run.step(batch)
    run.goes_on_at(3, tmp_path)


def test_a_state_before_the_first_step(run):
    batch = next(iter(run.loader))
    assert run.loader.state_dict()["position"] == 1  # it is not known yet that a step is to use the batch
    with pytest.warns(UserWarning, match="a state was saved at batch 1, before a step had used batch 0"):
        run.step(batch)


def test_an_incomplete_batch_that_a_loop_looks_at_and_ends_with(tmp_path):
    run = Run()
    for batch in run.loader:
        run.step(batch)
    for batch in run.loader:
        if batch.rows < 4 and run.towers.step == 9:
            break
        run.step(batch)
    run.save(tmp_path, "batch 9 was not used by a step")


def test_a_batch_that_is_used_once_more(run, tmp_path):
    held = []
    for batch in itertools.islice(run.loader, 3):
        held.append(batch)
        run.step(batch)
        run.step(held[0])
    run.save(tmp_path)


def test_lists_of_batches_that_are_used_several_times(run, tmp_path):
    for _ in range(2):
        for batch in [*itertools.islice(run.loader, 2)] * 3:
            run.step(batch)
        run.save(tmp_path)
    run.goes_on_at(4, tmp_path)
