"""One step on one worker: its towers take turns, and what they hand in is added up and sent."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import InitVar, dataclass, replace
from functools import partial

import torch
from torch import Tensor

from samestep.batches.batch import LocalBatch
from samestep.errors import BatchError, DisagreementError, UsageError
from samestep.streams import keep_globals, seed_globals, stream_seed, tower_seed
from samestep.summation.buckets import Average
from samestep.summation.exchange import Exchange
from samestep.summation.gradient_sum import GradientSum
from samestep.summation.scalars import TowerScalars
from samestep.towers.counts import Count, count_slices, wrong_counts
from samestep.towers.losses import Contribution, Losses, NamedCounts
from samestep.towers.replica import Replica
from samestep.towers.tower import Tower
from samestep.watching.beside import difference_beside
from samestep.watching.outside import note_outside_gradients, open_steps
from samestep.watching.pass_check import PassCheck, leaves_of
from samestep.workers.collectives import gather_objects, gather_rows

__all__ = ["StepRun"]


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.opened: list[StepRun] = []  # whose passes have begun, and have not ended


_of_thread = _OfThread()


@dataclass(eq=False, repr=False)
class StepRun:
    """A step of this worker, from its batch to its average."""

    step: int
    seed: int
    local: LocalBatch
    replica: InitVar[Replica]
    exchange: Exchange
    scaler: torch.amp.GradScaler | None

    def __post_init__(self, replica: Replica) -> None:
        self.job = replica.job
        self.watch = replica.watch
        self._replica = replica
        self._check = PassCheck(replica.parameters, replica.buffers)
        replica.label_means.start_step()
        self._is_dropped = False
        self.is_interrupted = False  # by the passes of another step in this thread
        self.parameters = replica.parameters
        self.plan = self.exchange.plan
        self.own_towers = self.plan.placement.towers(self.job.rank)
        self.losses = Losses(self.local.rows, is_whole_batch=self.plan.is_whole_batch)
        self._buffers = replica.buffers
        self._gradients: GradientSum | None = replica.gradient_sum(self.plan)
        every, num_towers = replica.settings.noise_every, self.plan.placement.num_towers
        is_noise_due = every > 0 and self.step % every == 0 and num_towers > 1
        self._gradients.start(self.exchange, measures=is_noise_due and not self.plan.is_whole_batch)
        self._scalars: dict[int, TowerScalars] = {}
        self._done: set[int] = set()
        self._turn: Tower | None = None
        self._passes = ExitStack()
        self._has_begun = False
        self.is_complete = False  # whether the last of this worker's towers has run

    @property
    def ranges(self) -> list[range]:
        """The rows of the global batch that each tower has."""
        return self.local.ranges(self.plan.placement.num_towers)

    def count(self, counts: Mapping[str, Count]) -> None:
        """Find the counts of the loss's sums in the towers of all workers."""
        try:
            own = count_slices(
                counts,
                self.own_towers,
                self.local.slices,
                self.job.device,
                seed_of=partial(stream_seed, self.seed, "counts", self.step),
                counts_twice=self.watch.looks,
            )
        except Exception as error:
            self.exchange.fail(error)
        self.losses.named = named = NamedCounts(tuple(counts), self.exchange.compare(own), self.local.rows)
        if not any(named.totals):
            self.local = replace(self.local, slices={})  # nothing counts, so no pass is worth its time

    def turns(self) -> Iterator[Tower]:
        """Yield the towers that have rows, in order, each under its own streams, from the shared buffers."""
        rows = self.ranges
        with self._passes:
            self._begin_passes()
            # `finish` closes this too: whoever calls `next` on the generator may never reach its end.
            self._passes.enter_context(keep_globals(self.job.device))
            self._passes.callback(self.watch.end_pass)
            self._passes.callback(self._buffers.end_passes)
            self._buffers.start_step()
            self._has_begun = True
            for index in self.local.slices:
                self.exchange.stopwatch.start()
                with self._telling_others():
                    batch = self.local.slices[index]
                self._buffers.start_tower()
                seed_globals(tower_seed(self.seed, self.step, index), self.job.device)
                self.watch.start_pass(index)
                self._turn = tower = Tower(index, batch, len(rows[index]), self)
                self._check.start()
                if self._gradients is not None:
                    self.watch.follow(index, self.local.row_tensors(batch, tower.rows))
                del batch
                yield tower
                self.watch.end_pass()
                self.exchange.stopwatch.stop()
                self._turn = None
                if self._is_dropped:
                    return
                with self._telling_others():
                    self._check_done(tower)
                del tower  # frees its rows before those of the next one are read

    def _begin_passes(self) -> None:
        """End open passes of other steps in this thread: their random streams are not the program's."""
        opened = _of_thread.opened
        for other in opened[:]:
            other.is_interrupted = True
            other.put_back()
        opened.append(self)
        self._passes.callback(opened.remove, self)
        if self._gradients is not None:
            open_steps[self] = self.parameters

    def drop(self) -> None:
        """Leave the step: streams and buffers are as before it, gradients are None."""
        self._is_dropped = True
        open_steps.pop(self, None)
        self.put_back()
        if self._gradients is not None:
            self._gradients.clear()

    def put_back(self) -> None:
        """Leave the streams and the model's buffers as they were before the step."""
        self._passes.close()
        if self._has_begun:
            self._buffers.put_back()

    def replay(self) -> Generator[Tower]:
        """Run the towers of a finished step once more, with the weights as they are now.

        In a tower's turn, the parameters hold the gradient of its sum. Afterwards they hold their earlier
        gradients again, and the buffers their values from before the step.
        """
        averaged = [parameter.grad for parameter in self.parameters]
        self._gradients = self.scaler = None
        self._done.clear()
        self.put_back()
        try:
            for tower in self.turns():
                for parameter in self.parameters:
                    parameter.grad = None
                yield tower
        finally:
            self.put_back()
            for parameter, gradient in zip(self.parameters, averaged, strict=True):
                parameter.grad = gradient

    def _check_done(self, tower: Tower) -> None:
        if tower.index not in self._done:
            raise self._check.not_handed_in(tower)

    def take_mean(self, tower: Tower, loss: Tensor | Mapping[str, Tensor]) -> None:
        """Take a tower's mean loss, or its sums by name; see `Tower.backward`."""
        with self._telling_others():
            self._check_turn(tower)
            found = self.losses.from_mean(tower, loss)
            if self.watch.looks and self.losses.named is None:
                self._replica.label_means.look(tower, found.total)
        self._take(tower, found)
        if self.watch.looks and self.losses.named is None:
            with self._telling_others():
                self._replica.label_means.compare(tower, self.watch.flow.divisors)

    def take_sum(self, tower: Tower, total: Tensor, count: float | Tensor) -> None:
        """Take a tower's sum and its count; see `Tower.backward_sum`."""
        with self._telling_others():
            self._check_turn(tower)
            found = self.losses.from_sum(tower, total, count)
        self._take(tower, found)

    @contextmanager
    def _telling_others(self) -> Iterator[None]:
        """End the step on all workers where this one finds an error."""
        try:
            yield
        except Exception as error:
            if self._gradients is None:  # a replay, on this worker only
                raise
            self.watch.stop_looking()  # while this one waits, another may run in this process
            self.exchange.fail(error)

    def _check_turn(self, tower: Tower) -> None:
        if self._is_dropped:
            raise UsageError(
                f"{tower!r}: step {self.step} was abandoned during this tower's turn, by abandon() or "
                "another towers(batch): finish each loop, and call its average(), before the next one"
            )
        if self._gradients is not None and self.exchange.is_over:
            raise UsageError(f"{tower!r}: step {self.step} has ended, because a worker raised an error in it")
        if self.is_interrupted:
            raise UsageError(
                f"{tower!r}: a loop over other Towers began during this tower's turn: run one loop after the "
                "other, or put both models into one nn.ModuleList with one Towers"
            )
        if tower.index in self._done or tower is not self._turn:
            why = "has run backward already" if tower.index in self._done else "is not the current tower"
            raise UsageError(
                f"{tower!r} {why}: call backward once for each tower, inside the loop over towers(batch)"
            )
        self.check_forward(tower)

    def check_forward(self, tower: Tower) -> None:
        """Check what a tower's forward has left."""
        self._check.check_forward(tower)

    def _take(self, tower: Tower, loss: Contribution) -> None:
        scaled = loss.total if self.scaler is None else self.scaler.scale(loss.total)
        backward = partial(self._backward, tower, scaled) if loss.total.requires_grad else None
        self.add(tower, loss, backward, self.leaves([loss.total]))

    def _backward(self, tower: Tower, loss: Tensor) -> None:
        try:
            loss.backward()
        except RuntimeError as error:
            found = self._check.explain(tower, error)
            if found is None:
                raise
            with self._telling_others():
                raise found from error

    def add(
        self, tower: Tower, loss: Contribution, backward: Callable[[], None] | None, leaves: Iterable[Tensor]
    ) -> None:
        """Note a tower's scalars, run its `backward`, if there is one, and take the gradients it leaves.

        `leaves` are those of the graph that backward goes through.
        """
        self._done.add(tower.index)
        self.watch.stop_looking()
        if self._gradients is None:
            if backward is not None:
                backward()
            return
        self.losses.note(loss)
        who = f"step {self.step}, tower {tower.index}"
        first, last = min(self.local.slices), max(self.local.slices)
        is_last = tower.index == last
        with self._telling_others():
            self.watch.check_pass(who, loss.total, is_outer=is_last or tower.index == first)
            counters, moments = self._buffers.counters(), self._buffers.moments(tower.index, tower.rows)
        self._scalars[tower.index] = TowerScalars(loss.count, loss.sums, counters, moments)
        if is_last:
            self._start_exchange()
        # The first tower has no sibling whose sum would hide that a gradient comes in two parts.
        is_look = self.watch.looks and tower.index == first
        at_once = not (self._replica.has_reentrant or is_look)
        if is_look:
            self._check.start_backward()
        self._gradients.backward(tower.index, backward, is_last=is_last, at_once=at_once)
        if is_look:
            with self._telling_others():
                self._check.check_backward(who)
        self._replica.has_reentrant |= self._gradients.comes_twice
        note_outside_gradients(leaves)
        self.is_complete = is_last
        self.watch.go_on()

    def leaves(self, losses: Iterable[Tensor]) -> list[Tensor]:
        """Return the leaves of the losses' graph, in a step that looks."""
        if self._gradients is None or not self.watch.looks:
            return []
        leaves, is_reentrant = leaves_of(losses)
        self._replica.has_reentrant |= is_reentrant
        return leaves

    def _start_exchange(self) -> None:
        """Give the scalars of all this worker's towers to the exchange; those without rows count 0."""
        buffers, like = self.plan.buffers, torch.zeros(0, dtype=torch.float64, device=self.job.device)
        sizes = (self.plan.num_sums, buffers.num_counters, buffers.num_moments)
        for tower in self.own_towers:
            if tower not in self._scalars:
                self._scalars[tower] = TowerScalars(0.0, *map(like.new_zeros, sizes))
        self.exchange.start([self._scalars[tower] for tower in self.own_towers])

    def check_complete(self) -> None:
        """Check that all of this worker's towers have handed in."""
        missing = [tower for tower in self.local.slices if tower not in self._done]
        if missing:
            which = f"tower{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
            verb = "has" if len(missing) == 1 else "have"
            raise UsageError(
                f"average() at step {self.step}: {which} {verb} not run; every tower must run once"
            )

    def finish(self) -> list[Average]:
        """Return the averages that this worker gets."""
        assert self._gradients is not None
        self.exchange.stopwatch.stop()
        try:
            self._passes.close()
            if not self.local.slices:
                next(self.turns(), None)  # there may have been no loop
                self._start_exchange()
            open_steps.pop(self, None)
            with self._telling_others():
                self.watch.end_step(f"step {self.step}: a pass")
            return self._gradients.finish()
        except Exception:
            self.drop()
            raise

    def check_beside(self) -> None:
        """Raise on all workers if what losses depend on beside the model differs between them."""
        if not self.exchange.differs_beside:
            return
        where = self.exchange.where
        own = self.watch.flow.beside.found_unchanged()
        found = gather_objects(self.job.transport, own, f"{where}, comparison")
        difference = difference_beside(found)
        if difference:
            raise DisagreementError(
                f"{where}: losses depend on {difference}, as does what each worker makes of its own towers "
                "after average(), or of its own random numbers: make it of the whole batch, or of what is "
                "gathered from all workers; or keep it in a buffer with a policy, Towers(..., "
                "buffers={pattern: policy}); or pass a net as Towers(model, ..., also=net)"
            )

    def wrong_counts(self) -> BatchError | None:
        """Return what is wrong with the towers' counts, if anything is."""
        counts = self.exchange.scalars.counts * self.losses.unit
        return wrong_counts(self.step, self.plan.sums, counts, self.losses.has_count)

    def squares(self) -> Tensor | None:
        """Return the squared norms of this worker's towers' gradients, in a step that measures them."""
        return None if self._gradients is None else self._gradients.squares()

    def gather(self, values: Tensor, what: str) -> Tensor:
        """Return a tensor with a row for each tower, [T, ...], from those of every worker's towers."""
        sizes = [len(towers) for towers in self.plan.placement.ranges]
        return gather_rows(self.job.transport, values, sizes, f"{self.exchange.where}, {what}")

    def update_buffers(self) -> None:
        """Give the model's buffers the values that all towers' passes make together."""
        scalars, rows = self.exchange.scalars, self.local.rows
        # Those without rows come last.
        num_ran = sum(map(bool, self.ranges))
        self._buffers.finish(scalars.moments, rows, scalars.counters[:num_ran])
