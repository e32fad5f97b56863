"""What a launcher sets, and what is said of an environment that none would make."""

import os

import pytest
from torch import nn

import samestep
from samestep import cli
from samestep.errors import ConfigError
from samestep.workers.environment import (
    check_environment,
    is_first,
    may_restart,
    note_joined,
    rank_environment,
)

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SAMESTEP_LAUNCHED")
SECOND = rank_environment(1, 3, "127.0.0.1", 29500)

WRONG = [
    ({"RANK": "abc"}, "RANK='abc': expected a whole number, as torchrun sets it; or unset it"),
    ({"RANK": ""}, "RANK='': expected a whole number"),
    ({"RANK": "-1"}, "RANK='-1': expected a whole number"),
    ({"RANK": "1.0"}, "RANK='1.0': expected a whole number"),
    ({"RANK": "²"}, "RANK='²': expected a whole number"),
    ({"RANK": "9" * 5000}, "RANK='9999"),
    ({"RANK": "\x1b[2J\n"}, "RANK='\\x1b[2J\\n': expected a whole number"),
    ({"RANK": "3"}, "RANK=3: expected 0 <= RANK < WORLD_SIZE = 3"),
    ({"WORLD_SIZE": "abc"}, "WORLD_SIZE='abc': expected a whole number"),
    ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0: expected 1 <= WORLD_SIZE <= 65,536"),
    ({"WORLD_SIZE": "100000000"}, "WORLD_SIZE=100000000: expected 1 <= WORLD_SIZE <= 65,536"),
    ({"LOCAL_RANK": "abc"}, "LOCAL_RANK='abc': expected a whole number"),
    ({"MASTER_PORT": "abc"}, "MASTER_PORT='abc': expected a whole number"),
    ({"MASTER_PORT": "65536"}, "MASTER_PORT=65536: expected a port below 65,536"),
    ({"MASTER_PORT": None}, "MASTER_PORT not set: 3 workers need the address"),
    ({"MASTER_ADDR": None, "MASTER_PORT": ""}, "MASTER_ADDR and MASTER_PORT not set"),
    ({"WORLD_SIZE": None}, "RANK is set and WORLD_SIZE is not: expected both"),
    ({"RANK": None}, "WORLD_SIZE is set and RANK is not: expected both"),
]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in (*NAMES, "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_MAX_RESTARTS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def put(monkeypatch):
    """Put variables into the environment of a second worker; None takes one away."""

    def put_variables(**variables):
        for name, value in (SECOND | variables).items():
            if value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)

    return put_variables


def test_what_a_launcher_sets_is_taken(put):
    check_environment()
    assert is_first()
    put()
    check_environment()
    assert not is_first()


def test_a_job_of_one_needs_no_address(put):
    put(RANK="0", WORLD_SIZE="1", MASTER_ADDR=None, MASTER_PORT=None)
    check_environment()
    assert samestep.init("cpu").world_size == 1


@pytest.mark.parametrize(("variables", "problem"), WRONG)
def test_what_no_launcher_sets_is_one_line_for_a_program_and_on_the_command_line(
    put, variables, problem, capsys, tmp_path
):
    put(**variables)
    with pytest.raises(ConfigError) as raised:
        samestep.init("cpu")
    assert str(raised.value).startswith(problem)
    line = ["train", "digits", "--steps", "1", "--run-dir", str(tmp_path / "run")]
    assert cli.main(line) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert printed.err.startswith(f"samestep: error: {problem}")
    assert len(printed.err) < 300


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"])
def test_a_wrong_command_line_is_one_line_whatever_the_environment(put, name, capsys):
    put(**{name: "abc"})
    assert cli.main(["train", "digits", "--steps", "x"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("size", "rank"),
    [
        ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
        ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
        ("PMI_SIZE", "PMI_RANK"),
    ],
)
def test_processes_that_were_started_together_without_ranks_are_told(put, monkeypatch, size, rank):
    """Each of them would train all towers, and none would miss the others."""
    monkeypatch.setenv(size, "4")
    monkeypatch.setenv(rank, "1")
    samestep.init("cpu")  # one of them says it
    monkeypatch.setenv(rank, "0")
    told = rf"4 processes were started together \({size}=4\), without RANK .* with torchrun"
    with pytest.warns(UserWarning, match=told):
        assert samestep.init("cpu").world_size == 1
    with pytest.warns(UserWarning, match=told):
        samestep.Towers(nn.Linear(1, 1), 2)
    put(RANK="0", WORLD_SIZE="1")
    assert samestep.init("cpu").world_size == 1
    put(RANK=None, WORLD_SIZE=None)
    monkeypatch.setenv(size, "1")
    assert samestep.init("cpu").world_size == 1


def test_restarts_are_a_number(monkeypatch):
    assert not may_restart()
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    assert may_restart()
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "abc")
    with pytest.raises(ConfigError, match="TORCHELASTIC_MAX_RESTARTS='abc'"):
        may_restart()


def test_a_place_that_the_process_before_has_taken_is_refused(put):
    put()
    note_joined()
    note_joined()  # by the same process
    taken = os.environ["SAMESTEP_JOINED"].partition(" ")[2]
    put(SAMESTEP_JOINED=f"1 {taken}")
    with pytest.raises(
        ConfigError, match="RANK=1 is the rank of process 1, which started this one: remove RANK"
    ):
        note_joined()
    put(SAMESTEP_JOINED=f"1 {taken}", RANK="2")  # another launcher in between
    note_joined()
