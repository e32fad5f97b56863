"""Workers agree, or all hear why not: on simulated transports, under any delays."""

import pytest
import torch
from hypothesis import given, strategies as st

from samestep.errors import ConfigError, DataError, DisagreementError, LostWorkerError
from samestep.workers.agreement import agree, difference, from_first_worker

from .simulation import Faults, Killed, World, simulate, values

pytestmark = pytest.mark.sampled(5)

WORKERS = range(1, 8)
seeds = st.integers(0, 2**20)


def agree_on(everyone, seed=0, **more):
    """Let each worker come with its values; return what each is told."""

    def work(job):
        return agree(job, everyone[job.rank], where="start", **more)

    return [outcome.text for outcome in simulate(work, len(everyone), seed)]


# ---- values ------------------------------------------------------------------------------------------


@pytest.mark.long
@given(st.sampled_from(WORKERS), seeds)
def test_workers_that_agree_get_the_messages_of_all(num_workers, seed):
    def work(job):
        must_match = {"towers": 8, "names": ["a", "b"], "none": None}
        return agree(job, must_match, where="start", message={"rank": job.rank})

    expected = [{"rank": rank} for rank in range(num_workers)]
    assert values(work, num_workers, seed) == [expected] * num_workers


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        ([8, 7], "worker 0 has towers = 8, worker 1 has towers = 7"),
        ([8, 7, 8], "worker 1 has towers = 7, the others have 8"),
        ([7, 8, 8], "worker 0 has towers = 7, the others have 8"),
        ([1, 2, 3], "worker 0 has towers = 1, worker 1 has towers = 2, worker 2 has towers = 3"),
        ([8, 7, 8, 9, 8], "worker 1 has towers = 7, worker 3 has towers = 9, the others have 8"),
        ([8, 8, 7, 7], ", ".join(f"worker {n} has towers = {8 - n // 2}" for n in range(4))),
        ([8, None, 8], "worker 1 has towers = None, the others have 8"),
        ([["a"], ["a", "b"], ["a"]], "worker 1 has towers[1] = b, the others have nothing"),
        ([["a"], [], ["a"]], "worker 1 has towers[0] = nothing, the others have a"),
        ([[], ["a"], ["b"]], "worker 0 has towers[0] = nothing, worker 1 has towers[0] = a, "
         "worker 2 has towers[0] = b"),
        ([(0, 1, 3), (0, 2, 3)], "worker 0 has towers[1] = 1, worker 1 has towers[1] = 2"),
        ([None, [], None], "worker 1 has towers = [], the others have None"),
        ([None, {"a": 1}, {"a": 1}], "worker 0 has towers a = nothing, the others have 1"),
        ([{}, None, None], "worker 0 has towers = {}, the others have None"),
    ],
)  # fmt: skip
def test_a_difference_is_told_to_all_by_worker(found, sentence):
    texts = agree_on([{"same": 1, "towers": value, "later": n} for n, value in enumerate(found)])
    assert texts == [f"DisagreementError: start: {sentence}"] * len(found)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=7), seeds)
def test_all_are_told_the_same_and_none_is_missed(found, seed):
    texts = agree_on([{"towers": value} for value in found], seed)
    assert len(set(texts)) == 1
    assert (texts[0] == "") == (len(set(found)) == 1)
    named = {f"worker {rank} has towers = {value}" for rank, value in enumerate(found)}
    usual = max(found, key=found.count)
    if texts[0].endswith(f"the others have {usual}"):
        assert 2 * found.count(usual) != len(found)
        named = {f"worker {rank} has towers = {value}" for rank, value in enumerate(found) if value != usual}
    if texts[0]:
        said = texts[0].removeprefix("DisagreementError: start: ").split(", ")
        assert {part for part in said if not part.startswith("the others")} == named


@pytest.mark.parametrize("odd", [0, 1, 2])
@pytest.mark.parametrize(
    ("value", "sentence"),
    [(7, "more = 7"), ({"a": 7}, "more a = 7"), ([7], "more[0] = 7"), ([], "more = []")],
)
def test_what_one_worker_alone_has_is_a_difference(odd, value, sentence):
    everyone = [{"same": 1, **({"more": value} if rank == odd else {})} for rank in range(3)]
    text = f"DisagreementError: start: worker {odd} has {sentence}, the others have nothing"
    assert agree_on(everyone) == [text] * 3


def test_no_difference():
    assert difference([{"a": [1], "b": None}] * 3) is None


# ---- errors ------------------------------------------------------------------------------------------


@pytest.mark.long
@given(st.sampled_from(WORKERS), st.sets(st.integers(0, 6)), seeds)
def test_errors_come_out_as_they_are_and_in_words_elsewhere(num_workers, failing, seed):
    failing = {rank for rank in failing if rank < num_workers}

    def error_of(rank):
        return ConfigError(f"towers = {rank}") if rank % 2 else KeyError(rank)

    def work(job):
        error = error_of(job.rank) if job.rank in failing else None
        return agree(job, {"differs": job.rank if failing else 0}, where="start", error=error)

    sentences = [
        f"worker {rank} failed: {'' if rank % 2 else 'KeyError: '}{error_of(rank)}"
        for rank in sorted(failing)
    ]
    for rank, outcome in enumerate(simulate(work, num_workers, seed)):
        if rank in failing:
            assert outcome.error.args == error_of(rank).args
            assert type(outcome.error) is type(error_of(rank))
        elif failing:
            assert outcome.text == f"DisagreementError: start: {'; '.join(sentences)}"
        else:
            assert outcome.error is None


@pytest.mark.parametrize("num_workers", [2, 3, 5])
def test_a_worker_killed_at_any_event_ends_all_or_none(num_workers):
    def work(job):
        return agree(job, {"towers": 8}, where="start", message=job.rank)

    events = 4  # a post and a wait for the sizes, and for what is said
    assert all(worker.num_events == events for worker in ran(num_workers, work).workers)
    for lost in range(num_workers):
        for event in range(1, events + 1):
            outcomes = simulate(work, num_workers, event, Faults(killed={lost: event}))
            assert isinstance(outcomes.pop(lost).error, Killed)
            for outcome in outcomes:
                if outcome.error is None:
                    assert event == events
                    assert outcome.value == list(range(num_workers))
                else:
                    assert isinstance(outcome.error, LostWorkerError)
                    assert outcome.text.startswith("LostWorkerError: start: worker ")


def ran(num_workers, work):
    world = World(num_workers, 0)
    world.run(work)
    return world


# ---- worker 0 ----------------------------------------------------------------------------------------


def nest():
    return {
        "weights": [torch.arange(6.0).reshape(2, 3).t(), torch.ones((), dtype=torch.bfloat16)],
        "empty": torch.empty(0, 3),
        "mask": torch.tensor([True, False]),
        "big": torch.arange(100_000),
        "step": 7,
        "none": None,
    }


@pytest.mark.parametrize("num_workers", WORKERS)
def test_all_get_what_worker_0_found_and_it_alone_looks(num_workers):
    looked = []

    def work(job):
        return from_first_worker(job, lambda: looked.append(job.rank) or nest())

    for found in values(work, num_workers, num_workers):
        expected = nest()
        assert found.keys() == expected.keys()
        assert (found["step"], found["none"]) == (7, None)
        pairs = [(found[name], expected[name]) for name in ("empty", "mask", "big")]
        pairs += zip(found["weights"], expected["weights"], strict=True)
        for ours, theirs in pairs:
            assert ours.dtype == theirs.dtype
            assert ours.stride() == theirs.stride()
            assert torch.equal(ours, theirs)
    assert looked == [0]


@pytest.mark.long
@given(st.sampled_from(WORKERS), seeds)
def test_an_error_of_worker_0_is_the_same_on_all(num_workers, seed):
    def fail():
        raise DataError("state.bin: 3 bytes, expected 4")

    outcomes = simulate(lambda job: from_first_worker(job, fail), num_workers, seed)
    assert {outcome.text for outcome in outcomes} == {"DataError: state.bin: 3 bytes, expected 4"}


@pytest.mark.parametrize(
    ("error", "why"), [(KeyError("x"), " (KeyError: 'x')"), (KeyboardInterrupt(), ""), (SystemExit(3), "")]
)
def test_any_other_exception_stays_on_worker_0_and_ends_the_others(error, why):
    def fail():
        raise error

    first, *others = simulate(lambda job: from_first_worker(job, fail), 4)
    assert first.error is error
    assert {outcome.text for outcome in others} == {f"LostWorkerError: worker 0 failed{why}"}


def test_worker_0_killed_at_work_ends_the_others():
    def die():
        raise Killed

    for seed in range(5):
        first, *others = simulate(lambda job: from_first_worker(job, die), 3, seed, Faults(killed={0: 1}))
        assert isinstance(first.error, Killed)
        assert all("what worker 0 found: worker" in outcome.text for outcome in others)


def test_disagreements_are_errors_of_their_own():
    with pytest.raises(DisagreementError):
        values(lambda job: agree(job, {"rank": job.rank}, where="start"), 2)
