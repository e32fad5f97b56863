"""One check: records placements in order, compares them, and concludes."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from samestep.checking import findings
from samestep.checking.findings import Finding
from samestep.checking.program_warnings import each_warning_once
from samestep.checking.recorder import Subject, Trial, record
from samestep.checking.recording import Recording, compiled_again, first_difference, held_differences
from samestep.checking.stand_ins import run_stand_ins
from samestep.checking.surroundings import Place
from samestep.checking.workers import Workers, recordings, why_not_elsewhere
from samestep.errors import DisagreementError
from samestep.workers.job import init

__all__ = ["Examination", "Plan"]

_MAX_HELD_NOTES = 3
_STAND_INS = (
    "stand-ins took the workers' places, and share the globals, environment and caches of this process"
)
_COMPILED = (
    "which code runs may depend on the shapes that a worker has met before; compile with dynamic=False, or "
    "let T divide the batch"
)


@dataclass(frozen=True)
class Plan:
    """What to record."""

    steps: int
    workers: Sequence[int]  # the numbers of workers to compare with one
    processes: bool  # whether to run workers in real processes, too
    device: str  # as for `samestep.init`
    threads: int  # CPU threads of each worker


class _Placement(NamedTuple):
    """A number of workers, in processes or as stand-ins in this process."""

    num_workers: int
    in_processes: bool


class Examination:
    """Records a reference and compares everything else with it."""

    def __init__(self, subject: Subject, plan: Plan) -> None:
        self.notes: list[str] = []  # what was not checked, or may matter later
        self.digest = ""  # of the reference's weights after its last step
        self._subject = subject
        self._plan = plan
        self._why_not: str | None = None
        self._held: dict[Place, None] = {}
        self._shown: set[tuple[str, str]] = set()  # warnings
        self._changed: set[Place] = set()
        self._numbers = itertools.count()
        self._cleanup = contextlib.ExitStack()
        self._workers: Workers | None = None

    def run(self) -> Finding | None:
        """Return the first fault, None if there is none."""
        threads = torch.get_num_threads()
        self._job = init(self._plan.device, threads=self._plan.threads)
        if self._plan.processes:
            self._why_not = why_not_elsewhere(self._subject)
        with self._cleanup, each_warning_once(self._shown):
            try:
                return self._find()
            except DisagreementError as error:  # before the first step
                return findings.explain_disagreement(error)
            finally:
                torch.set_num_threads(threads)

    def _find(self) -> Finding | None:
        alone = _Placement(1, in_processes=False)
        (reference,) = self._record(alone)
        self.digest = reference.digest
        finding = self._fault([reference], alone) or findings.explain_error([reference])
        for placement in self._placements():
            if finding is None:
                others = self._record(placement)
                self._held.update(dict.fromkeys(held_differences(reference, others)))
                finding = self._fault(others, placement) or self._differs(reference, others, placement)
                finding = finding or findings.explain_error(others)
        self._add_notes(reference, finding)
        return finding

    def _placements(self) -> Iterator[_Placement]:
        """Yield what to compare with one worker, the quickest first."""
        yield _Placement(1, in_processes=False)
        for in_processes in (False, True) if self._has_processes else (False,):
            for num_workers in self._plan.workers:
                yield _Placement(num_workers, in_processes)

    @property
    def _has_processes(self) -> bool:
        return self._plan.processes and self._why_not is None

    def _fault(self, found: list[Recording], placement: _Placement) -> Finding | None:
        """Return a fault that shows in one recording alone, after another one that has all operators."""
        finding = findings.fault_of(found)
        if finding is None:
            return None
        return findings.fault_of(self._record(placement, operators=True)) or finding

    def _differs(
        self, reference: Recording, others: list[Recording], placement: _Placement
    ) -> Finding | None:
        difference = first_difference(reference, others)
        if difference is None:
            return None
        (watched,) = self._record(_Placement(1, in_processes=False), operators=True)
        closer = first_difference(watched, self._record(placement, operators=True), self._changed)
        if closer is None:
            return findings.explain_vanished(difference, placement.num_workers, compiled_again(reference))
        return findings.explain(closer, placement.num_workers)

    def _add_notes(self, reference: Recording, finding: Finding | None) -> None:
        if finding is not None:
            return
        if self._plan.workers and not self._has_processes:
            how = "check with processes=True as well"
            if self._why_not is not None:
                how = (
                    f"build and batch cannot be sent to another process ({self._why_not}); define build in a "
                    "file"
                )
            self.notes.append(f"{_STAND_INS}: {how}")
        again = compiled_again(reference)
        if again is not None:
            self.notes.append(f"torch.compile compiled again in {again}: {_COMPILED}")
        if not reference.has_moved:
            self.notes.append("no weight has changed in these steps, so no update was checked")
        changed = [place for place in self._held if place in self._changed]
        self.notes += [self._held_note(place) for place in changed[:_MAX_HELD_NOTES]]

    def _held_note(self, place: Place) -> str:
        is_shared = place.owner.startswith(("the Python module", "the class"))
        if is_shared and not self._has_processes:
            return f"{place} is changed by a pass, and stand-ins share it"
        return f"{place} is not the same in all placements, but had no effect on these steps"

    def _record(self, placement: _Placement, *, operators: bool = False) -> list[Recording]:
        trial = Trial(next(self._numbers), self._plan.steps, operators, frozenset(self._shown))
        if placement.in_processes:
            outcomes = self._processes().record(self._subject, trial, placement.num_workers)
        else:
            work = partial(record, self._subject, trial=trial)
            outcomes = run_stand_ins(work, self._job, placement.num_workers)
        found = recordings(outcomes)
        self._changed.update(*(recording.changed for recording in found))
        return found

    def _processes(self) -> Workers:
        if self._workers is None:
            plan = self._plan
            workers = Workers(max(plan.workers), device=plan.device, threads=plan.threads)
            self._workers = self._cleanup.enter_context(workers)
        return self._workers
