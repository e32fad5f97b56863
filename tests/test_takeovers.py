"""Takeover on simulated workers; `python -m tests.takeovers` tries thousands of seeds."""

from functools import cache

import pytest
import torch

import samestep

from .cases import mostly_long
from .renewed_programs import PROGRAMS
from .simulation import Faults, Killed
from .takeovers import judge, quietly, try_one
from .town import Town

NUM_SEEDS = {"trainer": 15, "loop": 10, "small": 60}
FOUND = [
    ("loop", 1035),
    ("small", 55180),
    ("small", 58074),
    ("loop", 1130),
    ("small", 303227),
]  # what was wrong once


@cache
def undisturbed(name):
    return PROGRAMS[name].undisturbed()


def schedules():
    """Yield programs and seeds; of each program, and of what was found, one is in the quick suite, too."""
    yield from mostly_long(FOUND, 1)
    for name, number in NUM_SEEDS.items():
        yield from mostly_long([(name, seed) for seed in range(number)], 1)


@pytest.mark.parametrize(("name", "seed"), [*schedules()])
def test_whatever_happens_to_workers_the_bits_are_the_same(name, seed):
    assert try_one(seed, undisturbed(name), PROGRAMS[name])[1] is None


@pytest.mark.long
@pytest.mark.parametrize("event", [35, 33, 34, *range(36, 44)])  # more than those of one step
def test_what_worker_0_had_no_time_to_log_is_logged_by_the_next_one(event, tmp_path):
    """Killed in the simulation's own way, its last messages would be lost with it, and the step redone."""

    def die():
        raise Killed

    town, program = Town(2, 0, Faults(killed={0: event + 1})), PROGRAMS["trainer"]
    town.workers[0].calls[event, True] = die
    with quietly():
        outcomes = town.run(lambda job: program.train(job, tmp_path))
    assert judge(town, outcomes, undisturbed("trainer"), tmp_path, program) is None


class Meeting(samestep.Callback):
    """Exchanges messages after each step."""

    def after_step(self, trainer, report):
        trainer.job.barrier("a message of the callback")


class MeetingLater(samestep.Callback):
    """Exchanges messages after each evaluation."""

    def after_evaluation(self, trainer, metrics):
        trainer.job.barrier("a message of the callback")


@pytest.mark.sampled
@pytest.mark.parametrize("events", mostly_long([range(32, 56, 4), range(20, 60, 2)], 1), ids=str)
@pytest.mark.parametrize(
    ("callback", "method"), [(Meeting, "after_step"), (MeetingLater, "after_evaluation")]
)
def test_a_worker_that_is_lost_in_messages_of_a_callback_ends_the_run(callback, method, events, tmp_path):
    def count(model, batch):
        return {"mean": (model(batch).sum(), len(batch))}

    def work(job):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 1)
        towers = samestep.Towers(model, 3, job=job)
        loader = samestep.TowerLoader(torch.randn(12, 3), 6, towers)
        step = samestep.Step(
            towers,
            lambda model, batch: model(batch).square().mean(),
            torch.optim.SGD(model.parameters(), 0.1),
        )
        evaluate = samestep.Evaluation(torch.randn(6, 3), count, rows=2)
        settings = {"evaluate": evaluate, "evaluate_every": 1, "callbacks": [callback()]}
        return samestep.Trainer(step, loader, run_dir=tmp_path / f"{event}", steps=3, **settings).run().digest

    texts = []
    for event in events:
        outcomes = Town(2, 0, Faults(killed={0: event})).run(work)
        texts += [outcome.text for outcome in outcomes if isinstance(outcome.error, samestep.Error)]
    assert any(f"a worker was lost while a callback's {method} exchanged messages" in text for text in texts)
