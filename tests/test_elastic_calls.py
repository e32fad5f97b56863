"""Which calls of an `Elastic` newcomers start with, and calls that raise."""

import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import samestep
from samestep.app.calls import Call, LoopStart, Place, call_of

from .cases import mostly_long
from .simulation import Faults
from .town import Town, check_outcomes


def calls(names):
    """Return the calls of a program as `LoopStart` sees them, one per letter."""
    return [Call(name, Place("train.py:1", (0,))) for name in names]


@pytest.mark.parametrize(
    ("made", "start"),
    [
        ("", None),
        ("a", "a"),
        ("ea", "e"),
        ("aa", "a"),
        ("abab", "a"),
        ("eabab", "a"),  # e before the loop
        ("aaasaaas", "a"),  # s at the end of each epoch
        ("cccgcccg", "c"),
        ("abababcdcdcd", "c"),  # another loop
        ("abbabb", "b"),  # until a newcomer has started with a
    ],
)
def test_the_start_of_the_loop_is_its_first_call_that_is_made_again(made, start):
    found = LoopStart()
    for number, call in enumerate(calls(made)):
        found.note(call, number)
        found.note(call, number)  # as it is repeated after a loss
    assert found.name == start
    assert [call.name for call in calls(sorted(set(made))) if found.is_at(call)] == [*(start or "")]


def test_the_start_may_be_a_call_of_the_same_name_at_another_place():
    found = LoopStart()
    before, step, evaluate = (Call(name, Place("train.py:1", (at,))) for at, name in enumerate("ese"))
    for number, call in enumerate((before, step, evaluate, step)):
        found.note(call, number)
    assert found.is_at(step)


def test_a_call_that_newcomers_turned_out_not_to_start_with_is_no_start_any_more():
    found = LoopStart()
    evaluate, step = calls("es")
    for number, call in enumerate((step, step, evaluate)):
        found.note(call, number)
    found.refuse(step, evaluate)
    for number, call in enumerate((step, step, step), 3):
        found.note(call, number)
    assert found.is_at(evaluate)
    assert not found.is_at(step)


def test_calls_are_told_apart_by_function_place_and_plain_arguments():
    model = nn.Linear(1, 1)
    place, names = Place("train.py:7", (7, 7, 4, 12)), {id(model): "model"}
    call = call_of(partial(nn.Linear.forward, model, 3, "a", [1], 0.5, None), place, names)
    assert str(call) == "Linear.forward(model, 3, 'a', list, 0.5, None) in train.py:7"
    other = call_of(partial(nn.Linear.forward, nn.Linear(1, 1), 3, "a", [1], 0.5, None), place, names)
    assert call == other
    assert not call.can_be(other, ())
    assert call_of(partial(partial(max, 1, key=None), 2), place, {}).can_be(
        call_of(partial(max, 1, 2, None), place, {}), ()
    )
    elsewhere = replace(call, place=Place("train.py:7", (7, 7, 14, 20)))
    assert call != elsewhere
    assert call.can_be(elsewhere, ())  # made at another place by this worker alone
    assert not call.can_be(elsewhere, {elsewhere})
    assert str(call_of(model, None, names)) == "Linear()"


def test_what_lambdas_take_from_around_them_counts_as_arguments():
    def arguments(work):
        return call_of(work, None, {}).arguments

    k, batch = 3, samestep.LocalBatch(4, {}, position=7, fingerprint=0xAB)
    assert arguments(lambda: print(k, batch)) == ("batch 000000ab", "3")
    assert arguments(lambda k=2: k) == ("2",)
    assert arguments(lambda: later) == ()

    def step():
        return k

    assert arguments(step) == ()
    later = 0  # has no value when the lambda above is passed


def test_the_condition_of_a_loop_is_one_place_although_python_compiles_it_twice():
    places = []

    def call():
        places.append(Place.of_caller())
        return len(places) < 3

    while call():
        pass
    assert len(places) == 3
    assert len(set(places)) == 1
    call(), call()
    assert len(set(places)) == 3


def made(job, number=0):
    """Return a model, its towers and its optimizer."""
    torch.manual_seed(number)
    model = nn.Linear(2, 1)
    return model, samestep.Towers(model, 5, job=job), torch.optim.Adam(model.parameters(), lr=0.1)


def take_step(model, towers, optimizer, factor=1.0):
    for tower in towers(torch.full((6, 2), 1.0 + towers.step)):
        tower.backward(factor * model(tower.batch).square().mean())
    towers.average()
    optimizer.step()


def evaluate(model, job):
    job.barrier()
    with torch.no_grad():
        return float(model(torch.ones(2)))


def with_two_models(job, loop):
    one, two = made(job), made(job, 1)
    names = ("second", "second_towers", "second_optimizer")
    state = dict(zip(("model", "towers", "optimizer", *names), (*one, *two), strict=True))
    with samestep.Elastic(**state) as elastic:
        loop(elastic, one, two)
    return samestep.digest(one[0]), samestep.digest(two[0])


def steps_of_two_objects(elastic, one, two):
    def loss(model, batch):
        return model(batch).square().mean()

    first, second = samestep.Step(one[1], loss, one[2]), samestep.Step(two[1], loss, two[2])
    while one[1].step < 4:
        elastic(first, torch.full((6, 2), 1.0 + one[1].step)), elastic(second, torch.ones(6, 2))


def lambdas(elastic, one, two):
    while one[1].step < 4:
        elastic(lambda: take_step(*one)), elastic(lambda: take_step(*two))


def one_call_in_a_loop(elastic, one, two):
    while two[1].step < 4:
        for part in (one, two):
            elastic(take_step, *part)


def partials(elastic, one, two):
    while two[1].step < 4:
        for part in (one, two):
            elastic(partial(take_step, *part))


def a_place_for_worker_0(elastic, one, two):
    while one[1].step < 5:
        if one[1].job.is_first:
            print(elastic(take_step, *one))
        else:
            elastic(take_step, *one)
        if one[1].job.is_first:
            print(elastic(evaluate, one[0], one[1].job))
        else:
            elastic(evaluate, one[0], one[1].job)


def two_loops(elastic, one, two):
    while one[1].step < 2:
        elastic(take_step, *one)
    while two[1].step < 4:
        elastic(take_step, *two)
        elastic(evaluate, two[0], two[1].job)


def an_evaluation_before_the_loop(elastic, one, two):
    if one[1].step == 0:
        elastic(evaluate, one[0], one[1].job)
    while one[1].step < 4:
        elastic(take_step, *one)
        elastic(evaluate, one[0], one[1].job)


def an_evaluation_at_each_other_step(elastic, one, two):
    while one[1].step < 5:
        if one[1].step % 2 == 0:
            elastic(evaluate, one[0], one[1].job)
        elastic(take_step, *one)


LOOPS = [
    steps_of_two_objects,
    lambdas,
    one_call_in_a_loop,
    partials,
    a_place_for_worker_0,
    two_loops,
    an_evaluation_before_the_loop,
    an_evaluation_at_each_other_step,
]


@pytest.mark.sampled(50)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("loop", LOOPS)
def test_newcomers_start_with_the_call_that_the_others_make(loop, seed):
    town = Town(2, seed, Faults(killed={seed % 2: 20 + 3 * seed}), arrivals=[40 * seed, 300])
    check_outcomes(town, partial(with_two_models, loop=loop), samestep.errors.LostWorkerError)


def parts_with_loaders(job, *batch_sizes):
    model, towers, optimizer = made(job)
    rows = torch.arange(26.0).view(13, 2) / 10
    loaders = [samestep.TowerLoader(rows, size, towers) for size in batch_sizes]

    def step(batch):
        for tower in towers(batch):
            tower.backward(model(tower.batch).square().mean())
        towers.average()
        optimizer.step()

    return {"model": model, "towers": towers, "optimizer": optimizer}, loaders, step


def several_steps_with_a_batch(job):
    state, [loader], step = parts_with_loaders(job, 5)
    with samestep.Elastic(**state, loader=loader) as elastic:
        while loader.epoch < 2:
            for batch in loader:
                for _ in range(2):
                    elastic(lambda batch=batch: step(batch))
    return samestep.digest(state["model"])


def loaders_one_after_the_other(job):
    state, loaders, step = parts_with_loaders(job, 4, 8)
    with samestep.Elastic(**state, first=loaders[0], second=loaders[1]) as elastic:
        for loader in loaders:
            while loader.epoch < 2:
                for batch in loader:
                    elastic(step, batch)
    return samestep.digest(state["model"])


@pytest.mark.long
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("work", [several_steps_with_a_batch, loaders_one_after_the_other])
def test_newcomers_start_with_the_batch_that_the_others_use(work, seed):
    town = Town(2, seed, Faults(killed={seed % 2: 20 + 3 * seed}), arrivals=[40 + 40 * seed])
    check_outcomes(town, work, samestep.errors.LostWorkerError)


@pytest.mark.long
def test_a_newcomer_whose_loop_has_a_counter_of_its_own_is_sent_away(capsys):
    def work(job):
        parts = made(job)
        model, towers, optimizer = parts
        with samestep.Elastic(model=model, towers=towers, optimizer=optimizer) as elastic:
            for number in range(9):  # the newcomer's begins with 0
                elastic(take_step, *parts, 0.5**number)
        return samestep.digest(model)

    town = Town(2, 3, arrivals=[100])
    check_outcomes(town, work)
    assert not town.workers[2].goes_on
    text = capsys.readouterr().err
    assert "take_step(model, towers, optimizer, 0.5, lr=0.1) in test_elastic_calls.py:" in text
    assert (
        "new workers start with take_step(model, towers, optimizer, 1.0, lr=0.1) in test_elastic_calls.py"
        in text
    )
    assert text.count("so they exit") == 1


def with_tensors(job, loop):
    model, towers, optimizer = made(job)

    def step(batch):
        for tower in towers(batch):
            tower.backward(model(tower.batch).square().mean())
        towers.average()
        optimizer.step()

    with samestep.Elastic(model=model, towers=towers, optimizer=optimizer) as elastic:
        loop(elastic, step, towers, optimizer)
    return samestep.digest(model), torch.rand(1).item()


def small_batches(elastic, step, towers, optimizer):
    small = [torch.full((1 + n % 2, 2), float(n)) for n in range(50)]
    for batch in towers.slices(small[5 * towers.step :]):
        elastic(step, batch)


def draws_before_the_call(elastic, step, towers, optimizer):
    while towers.step < 10:
        elastic(step, torch.randn(6, 2))


def draws_in_the_call_and_after_it(elastic, step, towers, optimizer):
    while towers.step < 10:
        elastic(lambda: step(torch.randn(6, 2)))
        torch.randn(1)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("loop", [small_batches, draws_before_the_call, draws_in_the_call_and_after_it])
def test_newcomers_make_and_draw_the_batch_that_the_others_have(loop, seed):
    town = Town(2, seed, Faults(killed={seed % 2: 16 + seed}), arrivals=[100])
    check_outcomes(town, partial(with_tensors, loop=loop), samestep.errors.LostWorkerError)
    assert town.workers[2].goes_on


def batches_without_a_position(elastic, step, towers, optimizer):
    for number in range(10):
        elastic(step, torch.full((6, 2), float(number)))


def batches_in_a_nest(elastic, step, towers, optimizer):
    for number in range(10):
        pair = [{"x": torch.full((6, 2), float(number))}, "unused"]
        elastic(lambda pair=pair: step(pair[0]["x"]))


def a_rate_that_falls_before_the_call(elastic, step, towers, optimizer):
    while towers.step < 10:
        optimizer.param_groups[0]["lr"] *= 0.5
        elastic(step, torch.ones(6, 2))


@pytest.mark.sampled
@pytest.mark.parametrize(
    "loop", [batches_without_a_position, batches_in_a_nest, a_rate_that_falls_before_the_call]
)
def test_a_newcomer_that_starts_with_other_tensors_or_learning_rates_is_sent_away(capsys, loop):
    town = Town(2, 3, arrivals=[100])
    check_outcomes(town, partial(with_tensors, loop=loop))
    assert not town.workers[2].goes_on
    text = capsys.readouterr().err
    assert re.search(r"tensors \w{8}, lr=[\d.]+\) in .*: new workers start with .*tensors \w{8}, lr=", text)
    assert text.count("so they exit") == 1


class TooHigh(Exception):
    def __init__(self, value, limit):
        super().__init__(f"{value} is above {limit}")


@pytest.mark.long
@pytest.mark.sampled
@pytest.mark.parametrize("make_error", [ValueError, lambda: TooHigh(1, 2)])
@pytest.mark.parametrize("events", mostly_long([range(20, 26), range(10, 50)], 1), ids=str)
def test_a_call_that_raises_on_all_workers_is_made_once(make_error, events):
    def work(job):
        model, towers, optimizer = made(job)
        caught = []

        def check():
            evaluate(model, job)
            if towers.step == 2:
                raise make_error()

        with samestep.Elastic(model=model, towers=towers, optimizer=optimizer) as elastic:
            while towers.step < 4:
                elastic(take_step, model, towers, optimizer)
                try:
                    elastic(check)
                except Exception:
                    caught.append(towers.step)
        return samestep.digest(model), caught

    for event in events:
        check_outcomes(Town(3, 1, Faults(killed={event % 3: event})), work)
