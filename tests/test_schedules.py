"""Random runs on random placements under random schedules: the bits are those of one worker.

A failure names its seeds, and `check(problem, [schedule])` repeats it. Runs with faults come from
`tests/schedules.py`; their failures name the command that repeats them.
"""

import random
from functools import cache
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import samestep
from samestep import Towers
from samestep.errors import AbandonedError, BatchError, DisagreementError, UsageError
from samestep.summation.bucket_exchange import SharedBucket
from samestep.summation.exchange import Exchange
from samestep.summation.placement import Placement

from . import schedules
from .cases import mostly_long
from .simulation import Worker, values

BIG = 140_000  # float32 numbers: enough to be sent in shards for W > 1


class Mixed(nn.Module):
    """All that is hard: norms, dropout, sparse, big, half-precision and rarely used parameters."""

    def __init__(self, has_norm, has_big):
        super().__init__()
        self.embedding = nn.EmbeddingBag(12, 4, sparse=True)
        self.first = nn.Linear(9, 6)
        self.norm = nn.BatchNorm1d(6) if has_norm else nn.Identity()
        self.dropout = nn.Dropout(0.3)
        self.sometimes = nn.Linear(6, 6)
        self.never = nn.Linear(2, 2)
        self.in_half = nn.Parameter(torch.linspace(-1, 1, 6).to(torch.bfloat16))
        self.big = nn.Parameter(torch.linspace(-1, 1, BIG)) if has_big else None
        self.table = nn.Parameter(torch.linspace(-1, 1, 72).reshape(12, 6))
        self.last = nn.Linear(6, 3)
        self.fails_in = None

    def forward(self, batch):
        hidden = torch.cat([batch["x"], self.embedding(batch["ids"])], dim=1)
        hidden = self.dropout(self.norm(self.first(hidden))).tanh()
        if batch["x"][0, 0] > 0.5:
            hidden = hidden + self.sometimes(hidden)
        # A sparse gradient here is an error, because the table is not listed as sparse.
        hidden = hidden + F.embedding(batch["ids"][:, 0], self.table, sparse=self.fails_in == "backward")
        if self.big is not None:
            hidden = hidden + (self.big * hidden.mean()).mean()
        return self.last(hidden * self.in_half.float())


class Problem:
    """A run of a few steps, except its placements, from one seed."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        choice = self.random.choice
        self.seed = seed
        self.num_towers = self.random.randint(1, 9)
        self.has_norm, self.has_big = choice((True, False)), choice((True, False, False))
        self.settings = {
            "statistics": choice(("mean", "pooled")),
            "bucket_bytes": choice((1, 100, 300, 10**6)),
            "accumulate_dtype": choice((None, None, torch.float64)),
            "on_zero_count": "skip",
            "noise_every": choice((1, 1, 2, 0)),
            "seed": seed,
        }
        self.kinds = [choice(("mean", "sum", "counts", "whole")) for _ in range(3)]
        self.rows = [self.num_rows() for _ in self.kinds]
        self.trains_sometimes = [choice((True, True, False)) for _ in self.kinds]

    def num_rows(self):
        fewest = 2 * self.num_towers if self.has_norm else 1  # a norm needs two rows in each tower
        return self.random.randint(fewest, 3 * self.num_towers)

    def batch(self, step):
        generator = torch.Generator().manual_seed(1000 * self.seed + step)
        rows = self.rows[step]
        return {
            "x": torch.randn(rows, 5, generator=generator),
            "y": torch.randint(-3, 3, (rows,), generator=generator),
            "ids": torch.randint(0, 12, (rows, 2), generator=generator),
        }

    def model(self):
        torch.manual_seed(self.seed)
        return Mixed(self.has_norm, self.has_big)


def has_rows_everywhere(towers, rows):
    return towers.placement.ranges[-1].start < rows


def random_cuts(chance, num_towers, num_workers):
    return Placement((0, *sorted(chance.sample(range(1, num_towers), num_workers - 1)), num_towers))


def num_labels(batch):
    return (batch["y"] >= 0).sum()


def labels_of(outputs, batch):
    return F.cross_entropy(outputs, batch["y"], ignore_index=-1, reduction="sum")


def similarity(outputs, batch):
    return (outputs @ outputs.t()).square().mean()


def failing(function, fails):
    def fail(*args):
        raise KeyError("planted")

    return fail if fails else function


def run_step(towers, kind, batch):
    """Take a step of one of four kinds."""
    model, fails_in = towers.model, towers.model.fails_in
    batch = {**batch, "y": batch["y"].clamp(min=-1)[: -1 if fails_in == "batch" else None]}
    if kind == "whole":
        loss = failing(similarity, fails_in == "loss")
        towers.whole_batch(batch, failing(model, fails_in == "forward"), loss)
        return towers.average()
    counts = {"labels": num_labels, "rows": failing(lambda part: len(part["y"]), fails_in == "count")}
    for tower in towers(batch, counts=counts if kind == "counts" else None):
        outputs = model(tower.batch)
        if kind == "counts":
            tower.backward({"labels": labels_of(outputs, tower.batch), "rows": outputs.square().sum()})
        elif kind == "sum":
            tower.backward_sum(labels_of(outputs, tower.batch), num_labels(tower.batch))
        else:
            tower.backward(outputs.square().mean())
    return towers.average()


FAILURES = {
    "mean": ("batch", "backward"),
    "sum": ("batch", "backward"),
    "counts": ("batch", "backward", "count"),
    "whole": ("batch", "backward", "forward", "loss"),
}


def fail_first(job, towers, kind, batch, chance):
    """Try the step with a failure planted on one worker: all raise, and the step can be repeated."""
    failing_worker, fails_in = chance.randrange(job.world_size), chance.choice(FAILURES[kind])
    if job.rank == failing_worker:
        towers.model.fails_in = fails_in
    with pytest.raises((KeyError, AbandonedError, BatchError, DisagreementError, UsageError)) as raised:
        run_step(towers, kind, batch)
    if job.rank != failing_worker:
        named = f"step {towers.step}: worker {failing_worker} "
        how = {AbandonedError: "abandoned the step after KeyError", DisagreementError: "failed: "}
        assert str(raised.value).startswith(named + how[raised.type])
    towers.model.fails_in = None


def train(job, problem, schedule=0, *, fails=False):
    """Take all steps; return what must not depend on the job or on failures."""
    chance = random.Random(schedule)
    model = problem.model()
    towers = Towers(model, problem.num_towers, job=job, **problem.settings)
    reports = []
    for step, kind in enumerate(problem.kinds):
        towers.placement = random_cuts(chance, problem.num_towers, job.world_size)
        model.sometimes.requires_grad_(problem.trains_sometimes[step])
        if fails and has_rows_everywhere(towers, problem.rows[step]):
            fail_first(job, towers, kind, problem.batch(step), chance)
        report = run_step(towers, kind, problem.batch(step))
        numbers = (report.loss, report.count, report.grad_norm, report.noise_scale, report.tower_losses)
        reports.append((kind, report.skipped, *map(str, numbers)))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-0.1)
    return samestep.digest(model), reports


def check(problem_seed, schedules, *, fails=False):
    """Compare schedules of a run with that of one worker."""
    problem = Problem(problem_seed)
    expected = train(samestep.init("cpu"), problem)
    for schedule in schedules:
        num_workers = min(problem.num_towers, random.Random(schedule).randint(2, 4))
        for found in values(
            lambda job, s=schedule: train(job, problem, s, fails=fails), num_workers, schedule
        ):
            assert found == expected, f"problem {problem_seed}, schedule {schedule}, {num_workers} workers"


@pytest.mark.parametrize("problem", mostly_long(range(24), 1))
def test_every_schedule_takes_the_steps_of_one_worker(problem):
    check(problem, range(3 * problem, 3 * problem + 3))


@pytest.mark.parametrize("problem", mostly_long([37, 36, *range(38, 48)], 1))
def test_a_step_that_failed_on_one_worker_can_be_taken_again(problem):
    check(problem, range(2 * problem, 2 * problem + 2), fails=True)


# ---- runs with faults --------------------------------------------------------------------------------


hundred_from = cache(lambda first: schedules.run(range(first, first + 100)))


@pytest.mark.parametrize("first", mostly_long(range(0, 2000, 100), 1))
def test_under_any_faults_the_bits_or_the_error_are_right(first):
    seen, failed = hundred_from(first)
    assert failed == []
    assert seen["schedules"] == 100


@pytest.mark.parametrize("first", mostly_long(range(0, 200, 2), 1))
def test_under_any_faults_with_a_model_the_bits_or_the_error_are_right(first):
    assert schedules.run(range(first, first + 2), with_model=True)[1] == []


FOUND = {
    "a worker lost while an error was sent": (34570, 37605, 67244, 72462, 74801, 83911, 102345),
    "an interrupt while an error was sent": (77013, 98230),
    "an interrupt that became the reported error": (11161, 67796, 96491),
}


@pytest.mark.parametrize("what", FOUND)
def test_failures_that_long_runs_have_found(what):
    assert schedules.run(FOUND[what])[1] == []


@pytest.mark.long
def test_failures_that_long_runs_with_a_model_have_found():
    """A worker that waited while it sent an error recorded other workers' nets as its own."""
    assert schedules.run((200175, 200516, 201427), with_model=True)[1] == []


def test_every_fault_and_ending_occurs_in_some_schedule():
    seen, _ = hundred_from(0)
    errors = ("AbandonedError", "DisagreementError", "KeyboardInterrupt", "Killed", "LostWorkerError")
    assert all(seen[f"workers ended: {error}"] for error in (*errors, "without an error"))
    assert all(seen[f"workers {fault}"] for fault in ("killed", "stopped", "stalled"))


@pytest.mark.long
def test_the_same_seed_gives_the_same_schedule():
    def events(seed):
        trials = []
        with mock.patch.object(schedules, "judge", trials.append):
            schedules.try_schedule(schedules.schedule_of(seed))
        return trials[0].world.events

    assert [events(seed) for seed in range(20)] == [events(seed) for seed in range(20)]


def own_flags(exchange):
    return int(exchange._headers[exchange._job.rank][0])


DEFECTS = {
    "other workers' flags are ignored": (Exchange, "flags", property(own_flags)),
    "headers are not compared": (Exchange, "_check", lambda self, headers: None),
    "nothing waits for messages": (SharedBucket, "wait", lambda self: None),
    "a failing worker sends no error": (Exchange, "fail", lambda self, error: throw(error)),
    "the last statuses are not checked": (Exchange, "_wait_for_last", lambda self: self._buckets[-1].wait()),
    "a worker posts after an interrupt between messages": (Worker, "give_up", lambda self, what: None),
}


def throw(error):
    raise error


@pytest.mark.parametrize("defect", mostly_long(DEFECTS, 3))
def test_the_judge_finds_a_defect(defect):
    with mock.patch.object(*DEFECTS[defect]):
        assert any(schedules.run([seed])[1] for seed in range(300))


# ---- many more ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("problem", range(100, 1100))
def test_thousands_of_schedules(problem):
    check(problem, range(5 * problem, 5 * problem + 5))
