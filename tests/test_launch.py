from concurrent.futures import ThreadPoolExecutor

import pytest

from samestep.app.launching.failures import Failure
from samestep.app.launching.launch import run_command, run_worker
from samestep.errors import ConfigError, LostWorkerError, UsageError

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "SAMESTEP_LAUNCHED", "TORCHELASTIC_ERROR_FILE")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def under(monkeypatch, tmp_path):
    """Make this process believe that it is one worker of three; return where it leaves its error."""

    def start(rank, *, launched=False, error_file=True):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "3")
        if launched:
            monkeypatch.setenv("SAMESTEP_LAUNCHED", "1")
        if error_file:
            monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
        return tmp_path / "error.json"

    return start


def raising(error):
    def main():
        raise error

    return main


def test_workers_are_started_from_the_main_thread_only():
    with ThreadPoolExecutor(1) as pool, pytest.raises(UsageError, match="expected the main thread, which"):
        pool.submit(run_command, ["false"], 2, threads=1).result()


def test_run_worker_returns_what_main_returns(capsys):
    assert [run_worker(lambda: 0), run_worker(lambda: 7)] == [0, 7]
    assert capsys.readouterr() == ("", "")


def test_without_a_launcher_an_error_is_one_line(capsys):
    assert run_worker(raising(ConfigError("towers = 0: expected at least 1"))) == 2
    assert capsys.readouterr() == ("", "samestep: error: towers = 0: expected at least 1\n")


def test_without_a_launcher_a_bug_shows_its_traceback(capsys):
    assert run_worker(raising(ZeroDivisionError("zero"))) == 1
    assert capsys.readouterr().err.endswith("ZeroDivisionError: zero\n")


def test_an_interruption_says_nothing(capsys):
    assert run_worker(raising(KeyboardInterrupt())) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("error", [ConfigError("no"), ValueError("no")])
def test_under_launch_the_worker_leaves_the_telling_to_the_launcher(under, capsys, error):
    path = under(0, launched=True)
    run_worker(raising(error))
    assert capsys.readouterr() == ("", "")
    left = Failure.read(path)
    assert left.text.endswith("no\n")
    assert left.exit_status == Failure.of(error).exit_status


def test_under_launch_success_leaves_nothing(under):
    path = under(0, launched=True)
    assert run_worker(lambda: 0) == 0
    assert not path.exists()


@pytest.mark.parametrize(
    ("rank", "error", "is_written"),
    [
        (0, ConfigError("no"), True),
        (1, ConfigError("no"), False),  # worker 0 says the same, or torchrun shows this one
        (1, ValueError("no"), True),
        (0, LostWorkerError("no"), False),
    ],
)
def test_under_torchrun_what_is_new_is_written_once(under, capsys, rank, error, is_written):
    path = under(rank)
    run_worker(raising(error))
    assert capsys.readouterr().err.endswith("no\n") == is_written
    assert Failure.read(path).text.endswith("no\n")


def test_under_a_launcher_without_error_files_every_worker_speaks(under, capsys):
    under(2, error_file=False)
    assert run_worker(raising(ConfigError("no"))) == 2
    assert capsys.readouterr().err == "samestep: error: no\n"


@pytest.mark.parametrize(("error", "is_written"), [(ConfigError("no"), True), (LostWorkerError("no"), False)])
def test_what_cannot_be_left_for_the_launcher_is_written(under, capsys, monkeypatch, error, is_written):
    monkeypatch.setenv(
        "TORCHELASTIC_ERROR_FILE", str(under(0, launched=True) / "not a folder" / "error.json")
    )
    run_worker(raising(error))
    assert capsys.readouterr().err == ("samestep: error: no\n" if is_written else "")
