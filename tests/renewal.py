"""A simulated worker whose group of workers changes: an implementation of `Renewable`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from samestep.errors import LostWorkerError

from .simulation import TIMEOUT, Killed, Worker

if TYPE_CHECKING:
    from .town import Town


class Citizen(Worker):
    """A worker whose rank may change, and its transport; see `samestep.workers.transport.Renewable`."""

    world: Town

    def __init__(self, number: int, world: Town) -> None:
        super().__init__(number, world)
        self.generation = -1  # −1 before it has joined one
        self.waits = False  # whether it waits for others in `regroup`
        self.left = -1  # its generation before the last `regroup`
        self.goes_on = False
        self.is_doomed = False  # whether it ends as killed the next time it waits
        self.arrives = 0

    @property
    def members(self) -> tuple[int, ...]:
        return (self.number,) if self.generation < 0 else self.world.lists[self.generation]

    @property
    def rank(self) -> int:
        return self.members.index(self.number)

    @rank.setter
    def rank(self, rank: int) -> None:
        pass

    @property
    def world_size(self) -> int:
        return len(self.members)

    @property
    def is_newcomer(self) -> bool:
        """Whether it is not of the first generation, and does not train yet."""
        return self.number >= len(self.world.lists[0]) and not self.goes_on

    @property
    def is_ready(self) -> bool:
        return super().is_ready or (self.is_running and self.is_doomed)

    def wait_until(self, condition: Callable[[], bool], longest: float) -> None:
        super().wait_until(condition, longest)
        if self.is_doomed:
            self.world.note_fault(self.number, "killed")
            raise Killed

    def note_event(self, kind: str, what: str) -> None:
        if self.is_doomed:
            raise Killed
        super().note_event(kind, what)

    def rank_of(self, number: int) -> int:
        return self.members.index(number)

    def number_of(self, rank: int) -> int:
        return self.members[rank]

    def is_gone(self, peer: int) -> bool:
        """Return whether a worker has left this one's generation; one that waits to join it is not gone."""
        other = self.world.workers[peer]
        is_coming = other.waits and other.left < self.generation == len(self.world.lists) - 1
        if (peer in self.world.cut) != (self.number in self.world.cut):  # only the list shows it
            return self.number not in self.world.cut and peer not in self.world.lists[-1]
        return super().is_gone(peer) or not (other.generation == self.generation or is_coming)

    def accuse(self, peers: Sequence[int], generation: int | None = None) -> None:
        self.world.accuse(self.number, peers, self.generation if generation is None else generation)

    def lost_worker(self, what: str, lost: Sequence[int]) -> LostWorkerError:
        """Return the error for lost workers; if none is lost, one has only left the group to regroup."""
        if lost:
            return super().lost_worker(what, lost)
        self.loss = "another worker did not answer"
        return LostWorkerError(f"{what}: {self.loss}")

    def lost_targets(self, peers: Iterable[int]) -> list[int]:
        return [peer for peer in peers if self.is_gone(peer)]

    # ---- the methods of `Renewable` --------------------------------------------------------------------

    def is_outside(self) -> bool:
        return self.generation < 0

    def is_due(self) -> bool:
        return len(self.world.lists) - 1 > self.generation and self.number not in self.world.cut

    def term(self) -> tuple[str, int]:
        return "town", self.generation

    def can_go_on(self) -> None:
        self.goes_on = True

    def finish(self) -> None:
        pass

    def has_finished(self) -> bool:
        return False

    def send_away(self, ranks: Sequence[int]) -> None:
        numbers = [self.number_of(rank) for rank in ranks]
        if self.number in numbers:
            self.generation = -1
        for number in numbers:
            self.world.plan(partial(self.world.kill, number))

    def regroup(self) -> None:
        world, before = self.world, self.generation
        if self.is_outside():
            self.wait_until(lambda: False, max(0, self.arrives - world.time))
        self.note_event("meet", "")
        self.generation, self.left, self.waits = -1, before, True
        for queues in (world.sent, world.expected):
            for (_, target), queue in queues.items():
                if target == self.number:
                    queue.clear()
        if before < 0:
            world.plan(lambda: world.let_in(self.number))
        have_come, accused = self.wait_for_others(before), -1
        while not (have_come or self.is_in_vain) and before >= 0 and accused < len(world.lists):
            accused = len(world.lists)
            self.accuse_missing(before)
            have_come = self.wait_for_others(before)
        self.waits = False
        if not have_come:
            raise LostWorkerError("regrouping the workers: the job ends, or the others do not come")
        self.generation, self.loss = len(world.lists) - 1, None
        for (_, target), queue in world.sent.items():  # drop messages of generations that it was not in
            while target == self.number and queue and world.generations[id(queue[0])] < self.generation:
                queue.popleft()

    def accuse_missing(self, before: int) -> None:
        """Report members that do not come; without a new list nobody is lost, so ask for the same one."""
        world, newest = self.world, len(self.world.lists) - 1
        if newest > before:
            self.accuse([n for n in world.lists[-1] if not world.workers[n].waits], newest)
        else:
            world.plan(partial(world.begin_again, before))

    def wait_for_others(self, before: int) -> bool:
        """Wait until all members of a newer generation are there, or until the job ends."""
        self.wait_until(lambda: self.is_in_vain or self.all_have_come(before), TIMEOUT)
        return self.all_have_come(before)

    @property
    def is_in_vain(self) -> bool:
        is_over = self.world.is_closed or (self.is_newcomer and self.world.is_done)
        return is_over and self.number not in self.world.cut

    def all_have_come(self, before: int) -> bool:
        """Return whether all members of a newer generation are there."""
        newest, members = len(self.world.lists) - 1, self.world.lists[-1]
        others = [self.world.workers[number] for number in members]
        cut = self.world.cut
        have_come = all(
            each.generation == newest or (each.waits and each.left < newest and each.number not in cut)
            for each in others
        )
        return newest > before and self.number in members and have_come and self.number not in cut
