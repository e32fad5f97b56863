"""Simulated workers that may be lost while others come: with what the launcher does for real ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from samestep.errors import LostWorkerError

from .simulation import Faults, Message, Worker, World

LATEST = 40  # so long it may take the launcher to see what has happened


class Town(World):
    """A world in which the others go on when a worker is killed, and newcomers join them.

    Args:
        world_size: workers of the first generation.
        seed: of all delays.
        faults: by the number of a worker; newcomers have the numbers after those of the first generation.
        arrivals: when newcomers come, by the world's clock.

    Attributes:
        was_early: whether one was killed before all could go on without it.
    """

    workers: list[Citizen]

    def __init__(
        self, world_size: int, seed: int, faults: Faults | None = None, *, arrivals: Sequence[int] = ()
    ) -> None:
        super().__init__(0, seed, faults)
        self.workers = [Citizen(number, self) for number in range(world_size + len(arrivals))]
        self.lists: list[tuple[int, ...]] = [tuple(range(world_size))]  # of members; the last may be empty
        self.was_early = False
        self.is_done = False  # whether one has done all there is to do
        self.generations: dict[int, int] = {}  # of messages, by their id
        self._planned: list[tuple[int, Callable[[], None]]] = []
        for worker in self.workers[:world_size]:
            worker.generation = 0
        for worker, time in zip(self.workers[world_size:], arrivals, strict=True):
            worker.arrives = time

    @property
    def is_closed(self) -> bool:
        return not self.lists[-1]

    def plan(self, act: Callable[[], None]) -> None:
        """Have the launcher do something soon."""
        self._planned.append((self.time + self.random.randrange(LATEST), act))

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
        first = self.workers[: len(self.lists[0])]
        self.was_early |= is_killed and not all(worker.goes_on for worker in first)
        self.plan(lambda: self.see_end(number, is_killed=is_killed))

    def send(self, source: int, target: int, tensors: Sequence[Tensor]) -> Message:
        if self.workers[source].is_gone(target):  # the connection is closed
            return Message([], 0)
        sent = super().send(source, target, tensors)
        self.generations[id(self.sent[source, target][-1])] = self.workers[source].generation
        return sent

    def see_end(self, number: int, *, is_killed: bool) -> None:
        """Do what `Replacement` does when a worker has ended."""
        if self.is_closed:
            return
        left = [each for each in self.lists[-1] if each not in self.gone]
        trained = [each for each in left if not self.workers[each].is_newcomer]
        self.is_done |= self.workers[number].outcome.error is None
        if self.is_done:
            left = trained  # newcomers are sent away
        if (
            not trained
            or not all(self.workers[each].goes_on for each in trained)
            or not (is_killed or self.is_done or self.workers[number].is_newcomer)
        ):
            self.lists.append(())
        elif len(left) < len(self.lists[-1]):
            self.lists.append(tuple(left))

    def let_in(self, number: int) -> None:
        if not self.is_closed and not self.is_done and number not in self.gone:
            self.lists.append((*self.lists[-1], number))


class Citizen(Worker):
    """A worker whose rank may change, and its transport; see `samestep.workers.transport.Renewable`."""

    world: Town

    def __init__(self, number: int, world: Town) -> None:
        super().__init__(number, world)
        self.generation = -1  # whose messages it takes; −1 outside of all
        self.waits = False  # for the others to meet again
        self.left = -1  # the generation that it was in before
        self.goes_on = False
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
        """Whether it came later, and does not train yet."""
        return self.number >= len(self.world.lists[0]) and not self.goes_on

    def rank_of(self, number: int) -> int:
        return self.members.index(number)

    def number_of(self, rank: int) -> int:
        return self.members[rank]

    def is_gone(self, peer: int) -> bool:
        """Say whether another one has left this worker's generation; those who have come for it are there."""
        other = self.world.workers[peer]
        is_coming = other.waits and other.left < self.generation == len(self.world.lists) - 1
        return super().is_gone(peer) or not (other.generation == self.generation or is_coming)

    def lost_targets(self, peers: Iterable[int]) -> list[int]:
        return [peer for peer in peers if self.is_gone(peer)]

    # ---- what `Renewable` asks for ---------------------------------------------------------------------

    def is_outside(self) -> bool:
        return self.generation < 0

    def is_due(self) -> bool:
        return len(self.world.lists) - 1 > self.generation

    def term(self) -> tuple[str, int]:
        return "town", self.generation

    def can_go_on(self) -> None:
        self.goes_on = True

    def finish(self) -> None:
        pass

    def has_finished(self) -> bool:
        return False

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
        self.wait_until(lambda: self.is_in_vain or self.all_have_come(before), 10**9)
        self.waits = False
        if self.is_in_vain:
            raise LostWorkerError("the workers meet again: the job ends")
        self.generation, self.loss = len(world.lists) - 1, None
        for (_, target), queue in world.sent.items():  # of a generation that it has never seen
            while target == self.number and queue and world.generations[id(queue[0])] < self.generation:
                queue.popleft()

    @property
    def is_in_vain(self) -> bool:
        return self.world.is_closed or (self.is_newcomer and self.world.is_done)

    def all_have_come(self, before: int) -> bool:
        """Say whether all members of a newer generation are there."""
        newest, members = len(self.world.lists) - 1, self.world.lists[-1]
        others = [self.world.workers[number] for number in members]
        have_come = all(each.generation == newest or (each.waits and each.left < newest) for each in others)
        return newest > before and self.number in members and have_come
