"""Counting over the test examples on several workers, of which one fails or is lost."""

import random
import re

import numpy as np
import pytest
import torch
from torch import nn

from samestep import Job
from samestep.app.evaluation import Evaluation
from samestep.errors import DisagreementError, LostWorkerError, UsageError

from .simulation import Faults, Killed, simulate, values

NUM_WORKERS = 3


class Numbers:
    """The numbers from 0; from some number on there are none."""

    def __init__(self, missing_from=1000):
        self.missing_from = missing_from

    def __len__(self):
        return 20

    def batch(self, examples, seeds):
        if examples[-1] >= self.missing_from:
            raise FileNotFoundError(f"{examples[-1]}.png")
        return torch.from_numpy(examples)


def counted(missing_from_on_1=1000, faults=None):
    """Return how each worker ended that counts in chunks of four: worker 1 those from 4 and from 16."""
    models = [nn.Dropout().train() for _ in range(NUM_WORKERS)]

    def work(job):
        evaluation = Evaluation(
            Numbers(missing_from_on_1 if job.rank == 1 else 1000),
            lambda model, batch: {"n": (batch.sum(), len(batch)), "training": (model.training, 1)},
            rows=4,
        )
        totals = evaluation.totals(models[job.rank], job)
        return [int(total) for total in (totals["n"][1], totals["n"][0], totals["training"][0])]

    outcomes = simulate(work, NUM_WORKERS, faults=faults)
    assert all(model.training for model in models)
    return outcomes


def test_each_example_is_counted_once():
    assert [outcome.value for outcome in counted()] == [[20, 190, 0]] * NUM_WORKERS


@pytest.mark.parametrize("first", [4, 16])
def test_an_error_of_one_worker_ends_all(first):
    outcomes = counted(first)
    assert isinstance(outcomes[1].error, FileNotFoundError)
    for outcome in (outcomes[0], outcomes[2]):
        assert isinstance(outcome.error, DisagreementError)
        name = f"{first + 3}.png"
        assert str(outcome.error) == f"evaluation: worker 1 failed: FileNotFoundError: {name}"


@pytest.mark.parametrize("event", range(1, 5))
def test_a_worker_that_is_lost_is_named(event):
    outcomes = counted(faults=Faults(killed={1: event}))
    assert isinstance(outcomes[1].error, Killed)
    for outcome in (outcomes[0], outcomes[2]):
        if outcome.error is None:  # what the lost one had sent was all
            assert outcome.value == [20, 190, 0]
        else:
            assert isinstance(outcome.error, LostWorkerError)
            assert str(outcome.error).startswith("evaluation: worker ")
    assert event == 4 or any(outcome.error for outcome in outcomes[::2])


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize(
    ("make", "draw"),
    [
        (torch.Generator, lambda own: torch.rand(1, generator=own)),
        (random.Random, lambda own: own.random()),
        (np.random.default_rng, lambda own: own.random()),
    ],
)
def test_a_generator_of_its_own_is_told_of(make, draw, num_workers):
    def evaluate(job):
        own = make()

        def measure(model, batch):
            return {"sum": (batch.sum() * draw(own), 1)}

        Evaluation([1.0] * 20, measure, rows=4)(nn.Identity(), job)

    with pytest.warns(UserWarning, match="an evaluation drew from own, a random generator") as told:
        simulate(evaluate, num_workers)
    assert len(told) == num_workers


def test_what_it_draws_from_the_global_generators_is_the_same_on_any_workers():
    def measure(model, batch):
        return {"sum": (torch.rand(1).item() + np.random.rand() + random.random(), 1)}

    def evaluate(job):
        return Evaluation([1.0] * 20, measure, rows=4)(nn.Identity(), job)["sum"]

    assert values(evaluate, 1)[0] == values(evaluate, 2)[1] == values(evaluate, 3)[2]


# ---- what one batch leaves to the next one of the same worker --------------------------------------------


def noted_of(measure, num_workers):
    """Return what is measured of 20 numbers, and the buffers afterwards."""

    def evaluate(job):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Dropout())
        model.register_buffer("seen", torch.zeros(()))
        found = Evaluation([torch.tensor([float(n)]) for n in range(20)], measure, rows=4)(model, job)
        return found, [*model.buffers()], model.training

    ((found, buffers, is_training), *others) = values(evaluate, num_workers)
    assert is_training
    assert all(other[0] == found for other in others)
    return found, [buffer.tolist() for buffer in buffers]


def leaves_training_mode(model, batch):
    found = model(batch)
    model.train()
    return {"sum": (found.sum(), len(batch))}


def leaves_statistics(model, batch):
    found = model(batch)
    model.train()(batch)
    model.eval()
    return {"sum": (found.sum(), len(batch))}


def leaves_a_count(model, batch):
    model.seen += len(batch)
    return {"seen": (model.seen.clone(), 1)}


@pytest.mark.parametrize("measure", [leaves_training_mode, leaves_statistics, leaves_a_count])
def test_what_a_batch_leaves_on_the_model_does_not_reach_the_next_one(measure):
    assert noted_of(measure, 1) == noted_of(measure, 2) == noted_of(measure, 3)


# ---- what is refused -------------------------------------------------------------------------------------


def test_weights_that_have_come_apart_are_refused():
    def evaluate(job):
        model = nn.Linear(1, 1)
        nn.init.constant_(model.weight, job.rank == 1)
        nn.init.zeros_(model.bias)
        Evaluation([torch.zeros(1)] * 20, lambda model, x: {"sum": (model(x).sum(), 1)}, rows=4)(model, job)

    for outcome in simulate(evaluate, NUM_WORKERS):
        assert isinstance(outcome.error, DisagreementError)
        assert "evaluation: worker 1 has hash of the weights in weight = " in str(outcome.error)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (None, r"measure: 'x' holds None: expected numbers, or tensors"),
        ("one", r"measure: 'x' holds 'one': expected numbers"),
        ([[1, 2], [3]], r"measure: 'x' holds \[\[1, 2\], \[3\]\]: expected numbers"),
    ],
)
def test_what_cannot_be_added_up_is_refused(found, message):
    evaluation = Evaluation([1.0] * 20, lambda model, x: {"x": (found, 1)}, rows=4)
    for outcome in simulate(lambda job: evaluation(nn.Identity(), job), 2):
        assert isinstance(outcome.error, UsageError | DisagreementError)
        assert re.search(message, str(outcome.error))


@pytest.mark.parametrize("found", [None, 0.5, {"x": None}, {"x": "one"}, {"x": torch.ones(2)}])
def test_metrics_that_are_no_numbers_are_refused(found):
    evaluation = Evaluation([1.0], lambda model, x: {"x": (1, 1)}, metrics=lambda totals: found)
    with pytest.raises(UsageError, match=r"metrics returned .*: expected a dict of numbers by name"):
        evaluation(nn.Identity(), Job(torch.device("cpu")))
