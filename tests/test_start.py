"""Workers compare their settings before they do anything, or hear why one of them cannot start."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from samestep.app.settings import Settings
from samestep.app.start import compare_settings, refuse, refusing
from samestep.errors import ConfigError, LostWorkerError
from samestep.workers.agreement import agree

from .simulation import simulate


@dataclass(frozen=True)
class Tiny(Settings):
    """A recipe for these tests."""

    data_dir: Path | None = None
    loader_processes: int = 0
    rate: float = 0.1
    recipe: ClassVar[str] = "tiny"

    def build(self, job):
        raise AssertionError("nothing may be built")


class Other(Tiny):
    recipe: ClassVar[str] = "other"


def errors_of(*everyone, command=None, seed=0):
    """Start each worker with its settings; return what they are told: a `ConfigError`, or nothing."""
    commands = command or ["train"] * len(everyone)
    outcomes = simulate(
        lambda job: compare_settings(job, everyone[job.rank], commands[job.rank]), len(everyone), seed
    )
    assert all(outcome.error is None or type(outcome.error) is ConfigError for outcome in outcomes)
    assert all(outcome.error is None or outcome.error.exit_status == 2 for outcome in outcomes)
    return {str(outcome.error) for outcome in outcomes}


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_like_workers_start(num_workers):
    assert errors_of(*[Tiny(steps=7)] * num_workers) == {"None"}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"steps": 30}, "--steps = 30, the others have 1000"),
        ({"batch_size": 64}, "--batch-size = 64, the others have 256"),
        ({"rate": 0.2}, "--rate = 0.2, the others have 0.1"),
        ({"seed": 1}, "--seed = 1, the others have 0"),
        ({"towers": 9}, "--towers = 9, the others have 8"),
        ({"threads": 2}, "--threads = 2, the others have 1"),
        ({"checkpoint_every": 5}, "--checkpoint-every = 5, the others have 1000"),
        ({"log_every": 5}, "--log-every = 5, the others have 50"),
        ({"max_seconds": 5.0}, "--max-seconds = 5.0, the others have None"),
        ({"fresh": True}, "--fresh = True, the others have False"),
        ({"run_dir": Path("a")}, "--run-dir = a, the others have runs/unnamed"),
        ({"data_dir": Path("a")}, "--data-dir = given, the others have left out"),
    ],
)
@pytest.mark.parametrize("odd", [0, 1, 2])
def test_other_settings_are_told_to_all(changed, said, odd):
    everyone = [Tiny(**changed) if rank == odd else Tiny() for rank in range(3)]
    expected = f"start: worker {odd} has {said}: start all workers with the same command line"
    assert errors_of(*everyone) == {expected}


def test_two_workers_of_which_neither_is_usual():
    said = "start: worker 0 has --steps = 20, worker 1 has --steps = 30: "
    assert errors_of(Tiny(steps=20), Tiny(steps=30)) == {
        said + "start all workers with the same command line"
    }


def test_another_recipe_or_command_is_told_first():
    assert (
        "worker 0 has recipe = tiny, worker 1 has recipe = other:" in errors_of(Tiny(), Other(seed=1)).pop()
    )
    told = errors_of(Tiny(), Tiny(seed=1), command=["train", "eval"]).pop()
    assert "worker 0 has command = train, worker 1 has command = eval:" in told


def test_machines_may_have_the_data_where_they_like():
    assert errors_of(Tiny(data_dir=Path("a")), Tiny(data_dir=Path("b"), loader_processes=4)) == {"None"}


# ---- a worker that cannot start ------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_what_keeps_one_from_starting_ends_all(num_workers, seed, monkeypatch):
    def work(job):
        if job.rank != 1:
            return compare_settings(job, Tiny(), "train")
        return agree(job, {}, where="start", error=ConfigError("towers = 0: expected more"))

    outcomes = simulate(work, num_workers, seed)
    assert [type(outcome.error) for outcome in outcomes] == [ConfigError] * num_workers
    assert str(outcomes[1].error) == "towers = 0: expected more"
    others = {str(outcome.error) for rank, outcome in enumerate(outcomes) if rank != 1}
    assert others == {"start: worker 1 failed: towers = 0: expected more"}


def test_one_worker_has_nobody_to_tell(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ConfigError, match="no"), refusing():
        raise ConfigError("no")


def test_an_error_is_raised_even_where_nobody_hears_it(monkeypatch):
    def lost(*_, **__):
        raise LostWorkerError("nobody")

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("samestep.app.start.init", lost)
    with pytest.raises(ConfigError, match="no"):
        refuse(ConfigError("no"))
    with pytest.raises(LostWorkerError), refusing():
        raise LostWorkerError("there is nobody to tell")
