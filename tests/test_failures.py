import numpy as np
import pytest
import torch

from samestep.app.launching.failures import Failure, root_cause
from samestep.errors import ConfigError, DataError, LostWorkerError, NonFiniteError


def raise_(error):
    raise error


def failure(time_ns, **attributes):
    return Failure("", 1, time_ns=time_ns, **attributes)


def test_a_line_has_no_escape_codes_and_an_end():
    text = Failure.of(ConfigError("\x1b[2J\udcff" + "×" * 5000)).text
    assert text.startswith(r"samestep: error: \x1b[2J\udcff×")
    assert len(text) < 2100


@pytest.mark.parametrize(("error", "status"), [(ConfigError("a\nb"), 2), (NonFiniteError("a\nb"), 1)])
def test_an_error_is_one_line_and_its_own_exit_status(error, status):
    described = Failure.of(error)
    assert (described.text, described.exit_status) == ("samestep: error: a b\n", status)


def test_the_notes_of_an_error_are_on_its_line():
    error = DataError("no JPEG")
    error.add_note("samestep: in example 3 of the dataset")
    assert Failure.of(error).text == "samestep: error: no JPEG; in example 3 of the dataset\n"


def test_any_other_exception_is_its_traceback():
    try:
        raise KeyError("x")
    except KeyError as error:
        described = Failure.of(error)
    assert described.text.startswith("Traceback (most recent call last):\n")
    assert described.text.endswith("KeyError: 'x'\n")
    assert described.exit_status == 1


@pytest.mark.parametrize(
    ("allocate", "reason"),
    [
        (lambda: torch.empty(2**60, dtype=torch.uint8), "DefaultCPUAllocator: "),
        (lambda: np.empty(2**60, np.uint8), "Unable to allocate 1.00 EiB for an array"),
        (lambda: bytes(2**62), "MemoryError"),
        (lambda: raise_(torch.OutOfMemoryError("CUDA\nout")), "CUDA out"),
    ],
)
def test_what_memory_has_no_room_for_is_one_line(allocate, reason):
    with pytest.raises((RuntimeError, MemoryError)) as raised:
        allocate()
    described = Failure.of(raised.value)
    assert described.text.startswith("samestep: error: out of memory: ")
    assert reason in described.text
    assert described.text.endswith(
        "; lower the batch size, or raise the number of towers, so that each has fewer rows\n"
    )
    assert (described.text.count("\n"), described.exit_status) == (1, 1)
    assert not described.is_error  # one worker has met it: it is told whichever that is


@pytest.mark.parametrize(
    ("error", "status"), [(KeyboardInterrupt(), 130), (SystemExit(143), 143), (SystemExit(None), 0)]
)
def test_leaving_on_purpose_says_nothing(error, status):
    described = Failure.of(error)
    assert (described.text, described.exit_status) == ("", status)


def test_leaving_with_a_sentence_is_that_sentence():
    described = Failure.of(SystemExit("no more data"))
    assert (described.text, described.exit_status, described.is_echo) == ("no more data\n", 1, False)


def test_what_a_worker_writes_is_read_back(tmp_path):
    written = Failure.of(DataError("über.bin: 3 bytes"))
    written.write(tmp_path / "error.json")
    assert Failure.read(tmp_path / "error.json") == written
    assert [path.name for path in tmp_path.iterdir()] == ["error.json"]


def test_nothing_written_is_nothing_read(tmp_path):
    assert Failure.read(tmp_path / "error.json") is None


def test_the_first_by_time_is_the_cause():
    assert root_cause([(0, failure(20)), (1, failure(10)), (2, failure(30))])[0] == 1


@pytest.mark.parametrize(
    "echo",
    [
        LostWorkerError("step 3: worker 1 is gone"),
        RuntimeError("[/third_party/gloo/transport/tcp/pair.cc:553] Connection closed by peer"),
        KeyboardInterrupt(),
        SystemExit(143),
    ],
)
def test_a_consequence_is_not_the_cause_even_when_it_comes_first(echo):
    consequence = Failure.of(echo)
    assert root_cause([(0, consequence), (1, failure(consequence.time_ns + 1))])[0] == 1


def test_a_lost_worker_is_the_cause_where_there_is_no_other():
    assert root_cause([(2, Failure.of(LostWorkerError("worker 0 is gone")))])[0] == 2


def test_an_interrupted_worker_is_the_one_that_the_others_lost():
    lost, interrupted = Failure.of(LostWorkerError("worker 1 is gone")), Failure.of(KeyboardInterrupt())
    assert root_cause([(0, lost), (1, interrupted)])[0] == 1


def test_an_exception_comes_before_a_death_without_a_word():
    assert root_cause([(0, failure(10, is_recorded=False)), (1, failure(20))])[0] == 1


def test_a_death_without_a_word_comes_before_a_lost_connection():
    killed = failure(20, is_recorded=False)
    assert root_cause([(0, failure(10, is_echo=True)), (1, killed)]) == (1, killed)
