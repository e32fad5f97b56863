"""The state of an `Elastic`: its small part is noted at each call; workers that are behind get all of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from samestep.app.small_states import copied, set_small_state, small_state
from samestep.checkpoint.handover import send_state, take_state
from samestep.checkpoint.objects import TrainingObjects
from samestep.checkpoint.switches import Switches
from samestep.data.loader import TowerLoader
from samestep.data.stream_loader import StreamLoader
from samestep.streams import GlobalStreams
from samestep.towers.towers import Towers
from samestep.workers.job import Job

__all__ = ["ElasticState", "Noted"]

_LARGE = (nn.Module, Optimizer, Towers)
"""The rest of the state is small, and handed over as that."""


@dataclass(frozen=True)
class Noted:
    """A copy of the small part of the state: everything but weights and per-parameter optimizer state."""

    states: Sequence[Any]
    switches: Switches
    generators: GlobalStreams


class ElasticState:
    """All state that training changes.

    Attributes:
        objects: the objects that have it.
        kept: those of them that are not the model or its averages.
        towers: the `Towers` among them.
        optimizers: the optimizers.
    """

    def __init__(self, objects: TrainingObjects, job: Job) -> None:
        self.objects, self._job = objects, job
        large = {name: value for name, value in objects.state.items() if isinstance(value, _LARGE)}
        self._large = replace(objects, state=large)
        all_kept = (objects.towers, objects.loader, *objects.state.values())
        self.kept = [each for each in all_kept if each is not None]
        self.towers = objects.all_towers
        self.optimizers = [each for each in self.kept if isinstance(each, Optimizer)]
        self._small = [each for each in self.kept if not isinstance(each, nn.Module)]

    @property
    def has_stream(self) -> bool:
        """Whether there is a `StreamLoader`."""
        return any(isinstance(each, StreamLoader) for each in self.kept)

    def note(self) -> Noted:
        """Return a copy of the small part, as it is now."""
        states = [copied(small_state(each)) for each in self._small]
        return Noted(states, Switches.now(self.objects), GlobalStreams.capture(self._job.device))

    def put_back(self, noted: Noted) -> None:
        """Restore the small part."""
        for each, state in zip(self._small, noted.states, strict=True):
            set_small_state(each, state)
        noted.switches.restore()
        noted.generators.restore()

    def has_stepped(self, since: Noted) -> bool:
        """Say whether a step has been taken."""
        before = zip(self._small, since.states, strict=True)
        return any(isinstance(each, Towers) and each.step != state["step"] for each, state in before)

    def at_entry(self, before: Noted, after: Noted) -> Noted:
        """Return the state before a call, except that its batches are to be taken, or drawn, again."""
        both = zip(self._small, before.states, after.states, strict=True)
        states = [
            end if each is self.objects.loader or isinstance(each, TowerLoader) else begin
            for each, begin, end in both
        ]
        return replace(before, states=states, generators=after.generators)

    def hand_over(self, source: int, targets: Sequence[int], noted: Sequence[Noted]) -> list[Noted] | None:
        """Send the large part, and what worker `source` has noted, to the workers `targets`.

        All workers call this. On a target, it sets the large part, and returns what was noted.
        """
        more = [(each.states, each.switches.by_name(self.objects), each.generators) for each in noted]
        sent = send_state(self._large, self._job, source, targets, more)
        if sent is None:
            return None
        state, more = sent
        take_state(state, self._large)
        return [Noted(states, Switches.of(self.objects, named), g) for states, named, g in more]
