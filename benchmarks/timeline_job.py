"""The job that `takeover_timeline.py` runs; each process records the times of events in a file.

python timeline_job.py FOLDER VICTIM
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

BEGIN_NS = time.monotonic_ns()  # before anything large is imported

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import samestep  # noqa: E402
from samestep.app import loop  # noqa: E402
from samestep.app.launching.roster import Roster  # noqa: E402
from samestep.app.launching.worker_process import WorkerProcess  # noqa: E402
from samestep.towers.run import StepRun  # noqa: E402
from samestep.towers.towers import Towers  # noqa: E402
from samestep.workers.environment import NUMBER  # noqa: E402
from samestep.workers.generations import Generations  # noqa: E402
from samestep.workers.members import Key, Members  # noqa: E402

NUM_WORKERS, NUM_TOWERS, ROWS = 3, 7, 140
KILL_AT, STEPS_AFTER = 12, 4
PASS_S = 0.02
LAUNCHER = -1
Batch = tuple[Tensor, Tensor]


class Notes:
    """A process's file of events, flushed by line, so that a killed process loses none."""

    def __init__(self, folder: Path) -> None:
        self.who = int(os.environ.get(NUMBER, LAUNCHER))
        self._file = (folder / f"{self.who}.jsonl").open("a", buffering=1)
        self.write("imports", "begin", BEGIN_NS)
        self.write("imports", "end")

    def write(self, what: str, kind: str = "at", time_ns: int | None = None, **more: Any) -> None:
        """Record that something begins, ends or happens at this moment."""
        now_ns = time.monotonic_ns() if time_ns is None else time_ns
        line = {"who": self.who, "what": what, "kind": kind, "time_ns": now_ns, **more}
        self._file.write(json.dumps(line) + "\n")

    def around(self, owner: Any, name: str, what: str) -> None:
        """Record when a function is called, and when it returns or raises."""
        function = getattr(owner, name)

        @wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            self.write(what, "begin")
            try:
                return function(*arguments, **options)
            finally:
                self.write(what, "end")

        setattr(owner, name, call)

    def before(self, owner: Any, name: str, what: str, more: Callable[..., dict[str, Any] | None]) -> None:
        """Record when a function is called, with fields that `more` makes of its arguments, unless None."""
        function = getattr(owner, name)

        @wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            fields = more(*arguments, **options)
            if fields is not None:
                self.write(what, **fields)
            return function(*arguments, **options)

        setattr(owner, name, call)

    def passes(self) -> None:
        """Record each pass of a tower."""
        turns = StepRun.turns

        def noted(run: StepRun) -> Iterator[samestep.Tower]:
            for tower in turns(run):
                self.write("pass", "begin", step=run.step, tower=tower.index)
                yield tower
                self.write("pass", "end")

        StepRun.turns = noted  # type: ignore[method-assign, assignment]


def note_all(notes: Notes) -> None:
    """Record all events of this process."""
    notes.passes()
    notes.around(Towers, "average", "average")
    notes.around(loop.Loop, "_regroup", "regroup")
    notes.around(Members, "advance", "list")
    notes.around(Generations, "_meet", "connect")
    notes.around(loop.Loop, "_catch_up", "compare")
    notes.before(Members, "say", "ready", lambda _, key, *about: {} if key is Key.READY else None)
    notes.before(Roster, "_replace", "becomes", lambda _, old, new: {"members": json.loads(new)[1]})
    notes.before(WorkerProcess, "__init__", "started", lambda _, number, *others: {"number": number})


class Ending(samestep.Callback):
    """Ends the run a few steps after another worker has joined."""

    def __init__(self) -> None:
        self.count = 0

    def after_step(self, trainer: samestep.Trainer, report: samestep.Report) -> None:
        """Count the steps with all workers after the kill."""
        self.count += report.step > KILL_AT and trainer.job.world_size == NUM_WORKERS
        if self.count == STEPS_AFTER:
            trainer.stop()


def train(job: samestep.Job, folder: Path, victim: int, notes: Notes) -> None:
    """Train, and kill a worker in its second pass of a step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 400), nn.Tanh(), nn.Linear(400, 10))
    towers = samestep.Towers(model, NUM_TOWERS, job=job, seed=0)
    data = torch.utils.data.TensorDataset(torch.randn(4000, 64), torch.randint(10, (4000,)))
    optimizer = torch.optim.AdamW(model.parameters())
    num_passes = 0

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        nonlocal num_passes
        time.sleep(PASS_S / 2)
        num_passes += notes.who == victim and towers.step == KILL_AT
        if num_passes == 2:
            notes.write("killed")
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(PASS_S / 2)
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    step = samestep.Step(towers, loss, optimizer)
    loader = samestep.TowerLoader(data, ROWS, towers)
    run_dir = folder / "run"
    samestep.Trainer(step, loader, run_dir=run_dir, steps=1000, log_every=1000, callbacks=[Ending()]).run()


def work(folder: Path, victim: int) -> None:
    """Be the launcher, or a worker."""
    notes = Notes(folder)
    note_all(notes)
    samestep.launch(lambda job: train(job, folder, victim, notes), NUM_WORKERS)


if __name__ == "__main__":
    work(Path(sys.argv[1]), int(sys.argv[2]))
