"""A simulated world in which workers are lost and newcomers join, including the launcher's part in that."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from samestep import Job

from .renewal import Citizen
from .simulation import Faults, Killed, Message, World

LATEST = 40  # the longest time until the launcher sees what has happened
STOPPED = 200  # the time after which a worker that is stopped, or reported as silent, is killed
CUT = 400  # the longest time until the others continue without workers that are cut off


class Town(World):
    """A world in which the other workers continue when one is killed, and newcomers join them.

    Args:
        world_size: the number of workers in the first generation.
        seed: the seed of all delays.
        faults: faults by the number of a worker; newcomers are numbered after the first generation.
        arrivals: the times of the world's clock at which newcomers arrive.

    Attributes:
        was_early: whether a worker was lost before all could continue without it.
    """

    workers: list[Citizen]

    def __init__(
        self, world_size: int, seed: int, faults: Faults | None = None, *, arrivals: Sequence[int] = ()
    ) -> None:
        super().__init__(0, seed, faults)
        self.workers = [Citizen(number, self) for number in range(world_size + len(arrivals))]
        self.lists: list[tuple[int, ...]] = [tuple(range(world_size))]  # members; the last may be empty
        self.was_early = False
        self.is_done = False  # whether a worker has ended without an error
        self.generations: dict[int, int] = {}  # of messages, by their id
        self.cut: set[int] = set()  # workers that cannot reach the other workers or the launcher
        self.accused: set[tuple[int, int]] = set()  # (generation, number)
        self.have_waited: set[tuple[int, int]] = set()
        self._planned: list[tuple[int, Callable[[], None]]] = []
        for worker in self.workers[:world_size]:
            worker.generation = 0
        for worker, time in zip(self.workers[world_size:], arrivals, strict=True):
            worker.arrives = time

    @property
    def all_go_on(self) -> bool:
        """Whether all workers of the first generation can continue after a loss."""
        return all(worker.goes_on for worker in self.workers[: len(self.lists[0])])

    @property
    def is_closed(self) -> bool:
        return not self.lists[-1]

    def at(self, time: int, act: Callable[[], None]) -> None:
        """Call `act` at this time."""
        self._planned.append((time, act))

    def plan(self, act: Callable[[], None], after: int = 0, latest: int = LATEST) -> None:
        """Call `act`, as the launcher, after a random delay."""
        self.at(self.time + after + self.random.randrange(latest), act)

    def note_fault(self, rank: int, kind: str) -> None:
        super().note_fault(rank, kind)
        if kind == "stopped":
            self.plan(lambda: self.kill(rank), STOPPED)

    def kill(self, number: int) -> None:
        """Let a worker end as killed the next time it waits."""
        self.workers[number].is_doomed = True

    def cut_off(self, numbers: Sequence[int]) -> None:
        """Cut workers off from all others; their host kills them, and the others continue without them."""
        present = [number for number in numbers if self.workers[number].is_running]
        self.cut |= set(present)
        for number in present:
            super().note_fault(number, "cut off")
            self.plan(partial(self.kill, number), CUT, CUT)
        self.was_early |= bool(present) and not self.all_go_on
        self.plan(lambda: self.leave_behind(lambda number: number in self.cut), 0, CUT)

    def accuse(self, number: int, peers: Iterable[int], generation: int) -> None:
        """Record that a worker waited for `peers` in vain; peers that did not wait themselves are killed."""
        self.was_early |= not self.all_go_on
        self.have_waited.add((generation, number))
        self.accused |= {(generation, peer) for peer in peers}
        self.plan(self.kill_silent, STOPPED)

    def kill_silent(self) -> None:
        for generation, number in self.accused - self.have_waited:
            if generation == len(self.lists) - 1 and number not in self.cut:
                self.kill(number)

    def more_times(self) -> list[int]:
        return [time for time, _ in self._planned]

    def deliver(self) -> None:
        due = [planned for planned in self._planned if planned[0] <= self.time]
        for planned in due:
            self._planned.remove(planned)
            planned[1]()
        super().deliver()

    def end(self, number: int, *, is_killed: bool) -> None:
        super().end(number, is_killed=is_killed)
        self.was_early |= is_killed and not self.all_go_on
        self.plan(lambda: self.see_end(number, is_killed=is_killed))

    def send(self, source: int, target: int, tensors: Sequence[Tensor], kind: str) -> Message:
        if self.workers[source].is_gone(target):  # the connection is closed
            return Message([], kind, 0)
        if (source in self.cut) != (target in self.cut):
            return Message([], kind, 0)
        sent = super().send(source, target, tensors, kind)
        self.generations[id(self.sent[source, target][-1])] = self.workers[source].generation
        return sent

    def see_end(self, number: int, *, is_killed: bool) -> None:
        """Do what the launcher's `Replacement` does when a worker has ended."""
        if number in self.cut:
            return
        worker = self.workers[number]
        has_exited = isinstance(worker.outcome.error, SystemExit) and worker.goes_on
        self.is_done |= worker.outcome.error is None or has_exited
        is_survivable = is_killed or self.is_done or worker.is_newcomer
        self.leave_behind(lambda each: each in self.gone, is_survivable=is_survivable)

    def leave_behind(self, is_lost: Callable[[int], bool], *, is_survivable: bool = True) -> None:
        """Write the next list, without lost workers; an empty one if the others cannot continue."""
        if self.is_closed:
            return
        left = [number for number in self.lists[-1] if not is_lost(number)]
        trained = [each for each in left if not self.workers[each].is_newcomer]
        if self.is_done:
            left = trained  # newcomers are sent away
        if not is_survivable or not trained or not all(self.workers[each].goes_on for each in trained):
            self.was_early |= not self.all_go_on
            self.lists.append(())
        elif len(left) < len(self.lists[-1]):
            self.lists.append(tuple(left))

    def begin_again(self, generation: int) -> None:
        """Write a list with the same members, none of which was lost."""
        if not self.is_closed and len(self.lists) - 1 == generation:
            self.lists.append(self.lists[-1])

    def let_in(self, number: int) -> None:
        if not self.is_closed and not self.is_done and number not in self.gone:
            self.lists.append((*self.lists[-1], number))


def check_outcomes(town: Town, work: Callable[[Job], Any], *newcomers_fail: type[Exception]) -> None:
    """Run a program alone and in a town: all workers must end with the same result.

    Those that were killed or sent away may end without, newcomers with one of these errors, and all of them
    if a worker was lost early.
    """
    alone = work(Job(torch.device("cpu")))
    for outcome, worker in zip(town.run(work), town.workers, strict=True):
        is_newcomer = worker.number >= len(town.lists[0])
        fails_alone = is_newcomer and isinstance(outcome.error, newcomers_fail)
        may_fail = isinstance(outcome.error, Killed | SystemExit) or fails_alone or town.was_early
        assert outcome.value == alone or may_fail, outcome.text
