"""`check`: takes a few steps in several placements, and finds where they first differ."""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from samestep.arguments import check_switch, whole
from samestep.batches.batch import LocalBatch
from samestep.batches.copier import Copier
from samestep.batches.nest import entries
from samestep.checking.examination import Examination, Plan
from samestep.checking.findings import Finding
from samestep.checking.recorder import Subject
from samestep.errors import ConfigError, UsageError, shown
from samestep.summation.placement import Placement
from samestep.towers.root import Also, together
from samestep.towers.step import LossFunction, Step
from samestep.towers.towers import Towers
from samestep.workers.environment import under_launcher
from samestep.workers.job import Job

__all__ = ["NUM_STEPS", "WORKERS", "BuildResult", "CheckResult", "check", "examine"]

_Optimizer = torch.optim.Optimizer | None
BuildResult = (
    tuple[nn.Module, LossFunction]
    | tuple[nn.Module, LossFunction, _Optimizer]
    | tuple[nn.Module, LossFunction, _Optimizer, Also | None]
)
"""What `build` returns: a new model, its loss function and optionally its optimizer (default: plain SGD)."""

NUM_STEPS = 3
WORKERS = (2, 3)


@dataclass(frozen=True)
class CheckResult:
    """What a check found; `print` it to read it.

    Attributes:
        finding: the first fault; None where there is none.
        placements: how many workers took the steps, for each run in order.
        towers: T.
        steps: how many were taken.
        digest: of the weights after the last step of the first run; "" if that run did not end.
        notes: what was not checked, or may matter later.
        name: of the recipe that was checked, if any.

    Example:
        >>> result = CheckResult(None, (1, 1, 2), towers=4, steps=3, digest="...")
        >>> result.same, str(result)
        (True, 'same bits: 4 towers, 3 steps, placements 1, 1, 2 workers')
    """

    finding: Finding | None
    placements: Sequence[int]
    towers: int
    steps: int
    digest: str
    notes: Sequence[str] = ()
    name: str = ""

    @property
    def same(self) -> bool:
        """Whether all placements took the same steps, and no other fault was found."""
        return self.finding is None

    def __str__(self) -> str:
        notes = [f"note: {note}" for note in self.notes]
        if self.finding is not None:
            return "\n".join([str(self.finding), *notes])
        what = [self.name, _count(self.towers, "tower"), _count(self.steps, "step")]
        placements = f"placements {', '.join(map(str, self.placements))} workers"
        return "\n".join([f"same bits: {', '.join([*filter(None, what), placements])}", *notes])


def check(  # noqa: PLR0913 - what is run, and how, each with a default
    build: Callable[[], BuildResult],
    batch: Any,
    towers: int = 8,
    *,
    steps: int = NUM_STEPS,
    workers: Sequence[int] = WORKERS,
    processes: bool = True,
    device: str = "auto",
    threads: int = 1,
    autocast: torch.dtype | None = None,
    **options: Any,
) -> CheckResult:
    """Take a few steps in several placements, and find the first module and operator that differ.

    One worker takes the steps, twice, and then each number of `workers` does. The check compares, in every
    step, each tower's rows, its loss and every parameter's gradient; then the averages and every worker's
    weights. If something differs, it repeats both runs and watches every operator. An exception of the
    program is raised, and each of its warnings is shown once.

    Args:
        build: makes a new model and returns `(model, loss_fn)`, `(model, loss_fn, optimizer)` or `(model,
            loss_fn, optimizer, also)`, as `Step` and `Towers` take them; an optimizer of None is plain SGD.
            It is called once for every run and worker.
        batch: the global batch for every step, any nest of tensors, rows first; or an iterable of such
            batches, such as a DataLoader, of which the first `steps` are used in turn.
        towers: T, part of the experiment like the batch size.
        steps: how many to take.
        workers: the numbers of workers to compare with one; those above `towers` are left out.
        processes: run each worker also in a process of its own, unless `build` cannot be pickled. Otherwise
            workers are only stand-ins, threads of this process that each call `build()`: quicker, but they
            share its globals, environment, caches and imports; a note says so.
        device: as for `samestep.init`, which is called.
        threads: CPU threads of each worker.
        autocast: as for `samestep.Step`.
        options: of `samestep.Towers`, such as `seed` and `statistics`.

    Returns:
        The result. A difference raises no exception; `result.same` is then False.

    Raises:
        ConfigError: an argument is out of range, `build` returns anything else or the same model again,
            or this process is itself a worker.
        BatchError: the batch cannot be cut into towers.
        LostWorkerError: a worker process ended in the middle of the check.
        NonFiniteError: a loss or a gradient is NaN or infinite.
        UsageError: a script calls this without `if __name__ == "__main__":`.

    Example:
        >>> def build():
        ...     return torch.nn.Linear(2, 1), lambda model, x: model(x).square().mean()
        >>> print(check(build, torch.randn(10, 2), towers=4, processes=False))
        same bits: 4 towers, 3 steps, placements 1, 1, 2, 3 workers
        note: stand-ins took the workers' places, and share the globals, environment and caches of ...
    """
    if not callable(build):
        raise ConfigError(
            f"build is a {type(build).__name__}: expected a function that makes a model and returns "
            "(model, loss_fn), (model, loss_fn, optimizer) or (model, loss_fn, optimizer, also)"
        )
    _check_numbers(steps, workers)
    check_switch("processes", processes)
    Placement.even(towers, 1)
    subject = _Built(build, _batches(batch, steps), towers, autocast, options)
    return examine(subject, towers, Plan(steps, tuple(workers), processes, device, threads))


def examine(subject: Subject, towers: int, plan: Plan) -> CheckResult:
    """Run a check by a plan, and return the result.

    Raises:
        ConfigError: this process is itself a worker.
        LostWorkerError: a worker process ended in the middle of the check.
        NonFiniteError: a loss or a gradient is NaN or infinite.
        UsageError: a script calls this without `if __name__ == "__main__":`.
    """
    if under_launcher():
        raise ConfigError("check starts its own workers: run it by plain python or samestep, not by torchrun")
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UsageError("put the call of samestep.check under `if __name__ == '__main__':`")
    plan = replace(plan, workers=tuple(num for num in plan.workers if 1 < num <= towers))
    examination = Examination(subject, plan)
    finding = examination.run()
    return CheckResult(
        finding, (1, 1, *plan.workers), towers, plan.steps, examination.digest, examination.notes
    )


@dataclass(frozen=True)
class _Built:
    """A model from the user's `build`, with the towers and the step that the options ask for."""

    build: Callable[[], BuildResult]
    batches: Sequence[Any]
    towers: int
    autocast: torch.dtype | None
    options: Mapping[str, Any]

    def __call__(self, job: Job) -> tuple[Step, Iterable[Any]]:
        model, loss_fn, optimizer, also = _unpack(self.build())
        together(model, also).to(job.device)
        towers = Towers(model, self.towers, job=job, also=also, **self.options)
        # Large enough to change the weights, and small enough to keep them finite.
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = optimizer or torch.optim.SGD(trainable, lr=1e-3)
        return Step(towers, loss_fn, optimizer, autocast=self.autocast), itertools.cycle(self.batches)


def _unpack(result: Any) -> tuple[nn.Module, LossFunction, torch.optim.Optimizer | None, Also | None]:
    if isinstance(result, tuple) and len(result) in (2, 3, 4):
        model, loss_fn, optimizer, also = (*result, None, None)[:4]
        is_optimizer = optimizer is None or isinstance(optimizer, torch.optim.Optimizer)
        if isinstance(model, nn.Module) and callable(loss_fn) and is_optimizer:
            return model, loss_fn, optimizer, also
    kinds = [type(one).__name__ for one in result] if isinstance(result, tuple) else type(result).__name__
    raise ConfigError(
        f"build() returned {kinds}: expected (model, loss_fn), (model, loss_fn, optimizer) or (model, "
        "loss_fn, optimizer, also)"
    )


def _batches(batch: Any, steps: int) -> list[Any]:
    is_nest = isinstance(batch, Tensor | np.ndarray) or entries(batch) is not None
    batches = [batch] if is_nest or not hasattr(batch, "__iter__") else list(itertools.islice(batch, steps))
    if not batches:
        raise ConfigError(
            f"batch is a {type(batch).__name__} that yields nothing: expected at least one batch"
        )
    if any(isinstance(each, LocalBatch) for each in batches):
        raise ConfigError(
            "batch is a LocalBatch, cut for one placement: pass a global batch, or a plain DataLoader"
        )
    return [Copier(torch.device("cpu")).moved(each) for each in batches]


def _check_numbers(steps: int, workers: Sequence[int]) -> None:
    whole("steps", steps, 1)
    is_sequence = isinstance(workers, Sequence) and not isinstance(workers, str)
    if not is_sequence or not all(isinstance(num, Integral) and num >= 1 for num in workers):
        raise ConfigError(f"workers = {shown(workers)}: expected numbers of workers, such as (2, 3)")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
