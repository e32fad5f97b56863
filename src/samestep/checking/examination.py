"""One check: which placements are recorded, in what order, and what follows from it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from samestep.checking import findings
from samestep.checking.attributes import Place
from samestep.checking.findings import Finding
from samestep.checking.recorder import ChangedBufferError, Subject, Trial, record
from samestep.checking.recording import Recording, first_difference, held_differences
from samestep.checking.workers import Workers, why_not_elsewhere
from samestep.errors import DisagreementError
from samestep.workers.job import init

__all__ = ["Examination", "Plan"]

_MAX_HELD_NOTES = 3


@dataclass(frozen=True)
class Plan:
    """What to record.

    Attributes:
        steps: how many to take.
        workers: the numbers of workers to compare with one.
        processes: whether to compare with real processes, too.
        device: as for `samestep.init`.
        threads: CPU threads of each worker.
    """

    steps: int
    workers: Sequence[int]
    processes: bool
    device: str
    threads: int


@dataclass(frozen=True)
class _Placement:
    """Some workers: processes, or fresh models that stand in for them in this one."""

    num_workers: int
    in_processes: bool


class Examination:
    """Records a reference and compares everything else with it.

    Attributes:
        notes: what was not examined, or may matter later.
        digest: of the reference's weights after its last step.
    """

    def __init__(self, subject: Subject, plan: Plan) -> None:
        self.notes: list[str] = []
        self.digest = ""
        self._subject = subject
        self._plan = plan
        self._numbers = itertools.count()
        self._cleanup = contextlib.ExitStack()
        self._workers: Workers | None = None

    def run(self) -> Finding | None:
        """Return the first fault."""
        threads = torch.get_num_threads()
        self._job = init(self._plan.device, threads=self._plan.threads)
        self._check_pickling()
        with self._cleanup:
            try:
                return self._find()
            except ChangedBufferError as error:
                return findings.explain_buffers(error)
            except DisagreementError as error:
                return findings.explain_disagreement(error)
            finally:
                torch.set_num_threads(threads)

    def _find(self) -> Finding | None:
        alone = _Placement(1, in_processes=False)
        (reference,) = self._record(alone)
        self.digest = reference.digest
        finding = self._changed_settings([reference], alone)
        held: dict[Place, None] = {}
        for placement in self._placements():
            if finding is not None:
                return finding
            others = self._record(placement)
            held.update(dict.fromkeys(held_differences(reference, others)))
            finding = self._changed_settings(others, placement) or self._differs(reference, others, placement)
        if finding is None:
            self.notes += [
                f"{place} is not the same in all placements, without effect on these steps"
                for place in list(held)[:_MAX_HELD_NOTES]
            ]
        return finding

    def _placements(self) -> Iterator[_Placement]:
        """Yield what to compare with one worker: what is quick first."""
        for in_processes in (False, True) if self._plan.processes else (False,):
            for num_workers in self._plan.workers if in_processes else (1, *self._plan.workers):
                yield _Placement(num_workers, in_processes)

    def _changed_settings(self, recordings: list[Recording], placement: _Placement) -> Finding | None:
        finding = findings.changed_settings(recordings)
        if finding is None:
            return None
        return findings.changed_settings(self._record(placement, operators=True)) or finding

    def _differs(
        self, reference: Recording, others: list[Recording], placement: _Placement
    ) -> Finding | None:
        difference = first_difference(reference, others)
        if difference is None:
            return None
        (watched,) = self._record(_Placement(1, in_processes=False), operators=True)
        closer = first_difference(watched, self._record(placement, operators=True))
        if closer is None:
            return findings.explain_vanished(difference, placement.num_workers)
        return findings.explain(closer, placement.num_workers)

    def _check_pickling(self) -> None:
        why = why_not_elsewhere(self._subject) if self._plan.processes else None
        if why is not None:
            self.notes.append(
                "checked in this process alone, with a fresh model for each worker, because build and batch "
                f"cannot be sent to another ({why}): define build in a file to check real workers"
            )
            self._plan = replace(self._plan, processes=False)

    def _record(self, placement: _Placement, *, operators: bool = False) -> list[Recording]:
        trial = Trial(next(self._numbers), self._plan.steps, operators)
        if placement.in_processes:
            return self._processes().record(self._subject, trial, placement.num_workers)
        return [record(self._subject, self._job, replace(trial, stand_ins=placement.num_workers))]

    def _processes(self) -> Workers:
        if self._workers is None:
            plan = self._plan
            workers = Workers(max(plan.workers), device=plan.device, threads=plan.threads)
            self._workers = self._cleanup.enter_context(workers)
        return self._workers
