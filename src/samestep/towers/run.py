"""One step on one worker: its towers run one after the other; their gradients are summed and sent."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import InitVar, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from samestep.batches.batch import LocalBatch
from samestep.buffers.kept_buffers import KeptBuffers
from samestep.errors import BatchError, UsageError
from samestep.streams import keep_globals, seed_globals, stream_seed, tower_seed
from samestep.summation.buckets import Average
from samestep.summation.exchange import Exchange
from samestep.summation.gradient_sum import GradientSum
from samestep.summation.scalars import TowerScalars
from samestep.towers.counts import Count, count_slices, wrong_counts
from samestep.towers.losses import Contribution, Losses, NamedCounts
from samestep.towers.replica import Replica
from samestep.towers.tower import Tower
from samestep.watching.losses.loss_forms import LossForm
from samestep.watching.model.optimizer_steps import note_outside_gradients, open_steps
from samestep.watching.pass_check import PassCheck, leaves_of
from samestep.watching.passes.differences import compare_workers
from samestep.workers.collectives import gather_rows

__all__ = ["StepRun"]


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.opened: list[StepRun] = []  # steps whose passes have begun and not ended


_thread_state = _ThreadState()


@dataclass(eq=False, repr=False)
class StepRun:
    """One step on this worker, from the batch to the averaged gradients."""

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
        self._check = PassCheck(replica.parameters, replica.buffers, self.watch.flow.messages)
        if self.watch.follows:
            replica.loss_forms.start_step()
        self._is_dropped = self._is_replay = False
        self.is_interrupted = False  # whether another step's passes began in this thread meanwhile
        self.parameters = replica.parameters
        self.plan = self.exchange.plan
        self.own_towers = self.plan.placement.towers(self.job.rank)
        self.losses = Losses(self.local.rows, is_whole_batch=self.plan.is_whole_batch)
        self._buffers = replica.buffers
        self._gradients: GradientSum = replica.gradient_sum(self.plan)
        every, num_towers = replica.settings.noise_every, self.plan.placement.num_towers
        is_noise_due = every > 0 and self.step % every == 0 and num_towers > 1
        self._gradients.start(self.exchange, measures=is_noise_due and not self.plan.is_whole_batch)
        self._scalars: dict[int, TowerScalars] = {}
        self._done: set[int] = set()
        self._turn: Tower | None = None
        self._passes = ExitStack()
        self._has_begun = False
        self._ends = -1, -1  # the first and the last of this worker's towers that have rows
        self._kept: KeptBuffers | None = None
        self.is_complete = False  # whether all of this worker's towers have run

    @property
    def ranges(self) -> list[range]:
        """Each tower's rows of the global batch."""
        return self.local.ranges(self.plan.placement.num_towers)

    def count(self, counts: Mapping[str, Count]) -> None:
        """Compute what each named sum of the loss counts in each tower, on all workers."""
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
            self.local = replace(self.local, slices={})  # nothing counts, so no pass is needed

    def turns(self) -> Iterator[Tower]:
        """Yield the towers that have rows, in order; seed each one's streams and reset the buffers first."""
        rows = self.ranges
        with self._passes:
            self._begin_passes()
            # `finish` closes this as well, because a program that calls `next` may not exhaust the generator.
            self._passes.enter_context(keep_globals(self.job.device))
            self._passes.callback(self.watch.end_pass)
            self._passes.callback(self._buffers.end_passes)
            self._buffers.start_step()
            self.watch.start_loop(self.local.batch_tensors)
            self._has_begun = True
            self._ends = min(self.local.slices, default=-1), max(self.local.slices, default=-1)
            for index in self.local.slices:
                self.exchange.stopwatch.start()
                with self._failing_together():
                    batch = self.local.slices[index]
                self._buffers.start_tower()
                seed_globals(tower_seed(self.seed, self.step, index), self.job.device)
                self.watch.start_pass(index)
                self._turn = tower = Tower(index, batch, len(rows[index]), self)
                if not self._is_replay and self.watch.follows:
                    self._follow(tower, batch)
                del batch
                yield tower
                self.watch.end_pass()
                self.exchange.stopwatch.stop()
                self._turn = None
                if self._is_dropped:
                    return
                with self._failing_together():
                    self._check_done(tower)
                del tower  # frees its rows before the next tower's are read

    def _follow(self, tower: Tower, batch: Any) -> None:
        rows = self.local.row_tensors(batch, tower.rows)
        is_comparable = self.local.has_only_tensors(batch, tower.rows)
        self.watch.follow(tower._index, tower.rows, rows, is_comparable=is_comparable)

    def note_index(self) -> None:
        """Note that the program has read the index of the current tower."""
        self.watch.flow.reads.note_index()

    def _begin_passes(self) -> None:
        """End other steps' passes in this thread: during these, global generators are seeded for a tower."""
        opened = _thread_state.opened
        for other in opened[:]:
            other.is_interrupted = True
            other.put_back()
        opened.append(self)
        self._passes.callback(opened.remove, self)
        if not self._is_replay:
            open_steps[self] = self.parameters

    def drop(self) -> None:
        """Abandon the step: restore random streams and buffers, and set all gradients to None."""
        self._is_dropped = True
        open_steps.pop(self, None)
        self.put_back()
        self._gradients.clear()

    def put_back(self) -> None:
        """Restore the random streams and the model's buffers from before the step."""
        self._passes.close()
        if self._has_begun:
            self._buffers.put_back()
        if self._kept is not None:
            self._kept.restore(only_changed=True)
            self._kept = None

    def keep_buffers(self, kept: KeptBuffers) -> None:
        """Have `put_back` restore these, from before a loss of the whole batch, instead of those it left."""
        self._kept = kept

    def replay(self) -> Generator[Tower]:
        """Yield the towers of a finished step once more, with the current weights.

        A tower's backward leaves the gradient of its summed loss in `p.grad`. At the end, each `p.grad` is
        restored, and the buffers get their values from before the step.
        """
        averaged = [parameter.grad for parameter in self.parameters]
        self._is_replay, self.scaler = True, None
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
        if tower._index not in self._done:
            raise self._check.not_handed_in(tower)
        if not self._is_replay:
            self.watch.end_turn(f"step {self.step}, tower {tower._index}")

    def take_mean(self, tower: Tower, loss: Tensor | Mapping[str, Tensor]) -> None:
        """Run backward from a tower's mean loss, or from its named sums; see `Tower.backward`."""
        with self._failing_together():
            self._check_turn(tower)
            form = self.watch.form_of(loss)
            found = self.losses.from_mean(tower, loss)
        self._take(tower, found)
        if form is not None:
            named = self.losses.named
            self._check_form(tower, form, None if named is None else named.of_tower(tower._index))

    def _check_form(self, tower: Tower, form: LossForm, counts: Mapping[str, float] | None) -> None:
        """Warn of a loss that is no mean over the tower's rows, or no sum, if it comes with counts."""
        with self._failing_together():
            self._replica.loss_forms.note(repr(tower), tower.rows, form, counts)
            if tower._index == self._ends[1]:
                self._replica.loss_forms.check(repr(tower), self.plan.placement, self.local.rows)

    def take_sum(self, tower: Tower, total: Tensor, count: float | Tensor) -> None:
        """Run backward from a tower's summed loss; see `Tower.backward_sum`."""
        with self._failing_together():
            self._check_turn(tower)
            form = self.watch.form_of({"total": total}, count)
            found = self.losses.from_sum(tower, total, count)
        self._take(tower, found)
        if form is not None:
            self._check_form(tower, form, {"total": float(count)})

    @contextmanager
    def _failing_together(self) -> Iterator[None]:
        """Send an error that the block raises to all workers, so that the step ends on each of them."""
        try:
            yield
        except Exception as error:
            if self._is_replay:  # on this worker only
                raise
            # Stand-ins of `samestep.check` share a process: another one runs while this one waits.
            self.watch.stop_looking()
            self.exchange.fail(error)

    def _check_turn(self, tower: Tower) -> None:
        if self._is_dropped:
            raise UsageError(
                f"{tower!r}: step {self.step} was abandoned during this tower's turn, by abandon() or "
                "another towers(batch): finish each loop, and call its average(), before the next one"
            )
        if not self._is_replay and self.exchange.is_over:
            raise UsageError(f"{tower!r}: step {self.step} has ended, because a worker raised an error in it")
        if self.is_interrupted:
            raise UsageError(
                f"{tower!r}: a loop over other Towers began during this tower's turn: run one loop after the "
                "other, or put both models into one nn.ModuleList with one Towers"
            )
        if tower._index in self._done or tower is not self._turn:
            why = "has run backward already" if tower._index in self._done else "is not the current tower"
            raise UsageError(
                f"{tower!r} {why}: call backward once for each tower, inside the loop over towers(batch)"
            )
        self.check_forward(tower)

    def check_forward(self, tower: Tower) -> None:
        """Check that a tower's forward left no gradients behind and called no torch.distributed functions."""
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
            with self._failing_together():
                raise found from error

    def add(
        self, tower: Tower, loss: Contribution, backward: Callable[[], None] | None, leaves: Iterable[Tensor]
    ) -> None:
        """Record a tower's scalars, run `backward`, unless it is None, and take the resulting gradients.

        `leaves` are the leaf tensors of the graph that `backward` traverses.
        """
        self._done.add(tower._index)
        self.watch.stop_looking()
        if self._is_replay:
            if backward is not None:
                backward()
            return
        self.losses.note(loss)
        who = f"step {self.step}, tower {tower._index}"
        first, last = self._ends
        is_last = tower._index == last
        with self._failing_together():
            self.watch.check_pass(who, loss.total, is_outer=is_last or tower._index == first)
            self._replica.check_hooks()
            counters, moments = self._buffers.counters(), self._buffers.moments(tower._index, tower.rows)
        self._scalars[tower._index] = TowerScalars(loss.count, loss.sums, counters, moments)
        if is_last:
            self._start_exchange()
        # Only the first tower can be checked: later, `p.grad` may hold a sibling's sum, which would hide that
        # a gradient arrives in two parts.
        is_checked = self.watch.looks and tower._index == first
        # In a backward that is followed, `p.grad` holds this tower's gradient, and nothing else.
        is_followed = self.watch.follows and self.watch.flow.own_code.is_expected
        at_once = not (self._replica.has_reentrant or is_checked or is_followed)
        if self.watch.follows and backward is not None:
            backward = partial(self._follow_backward, who, backward)
        if is_checked:
            self._check.start_backward()
        self._gradients.backward(tower._index, backward, is_last=is_last, at_once=at_once)
        if is_checked:
            with self._failing_together():
                self._check.check_backward(who)
        self._replica.has_reentrant |= self._gradients.comes_twice
        note_outside_gradients(leaves)
        self.is_complete = is_last
        self.watch.go_on()

    def _follow_backward(self, who: str, backward: Callable[[], None]) -> None:
        is_comparable = not self.plan.is_whole_batch  # else it begins with gradients of the tower's outputs
        gradients = self.watch.flow.run_backward(backward, self.parameters, is_comparable=is_comparable)
        with self._failing_together():
            self.watch.flow.check_gradients(who, gradients)

    def leaves(self, losses: Iterable[Tensor]) -> list[Tensor]:
        """Return the leaf tensors of the losses' graph, if the watch checks this step."""
        if self._is_replay or not self.watch.looks:
            return []
        leaves, is_reentrant = leaves_of(losses)
        self._replica.has_reentrant |= is_reentrant
        return leaves

    def _start_exchange(self) -> None:
        """Pass the scalars of this worker's towers to the exchange; towers without rows count 0."""
        buffers, like = self.plan.buffers, torch.zeros(0, dtype=torch.float64, device=self.job.device)
        sizes = (self.plan.num_sums, buffers.num_counters, buffers.num_moments)
        for tower in set(self.own_towers) - self._scalars.keys():
            self._scalars[tower] = TowerScalars(0.0, *map(like.new_zeros, sizes))
        self.exchange.start([self._scalars[tower] for tower in self.own_towers])

    def check_complete(self) -> None:
        """Check that all of this worker's towers that have rows have run."""
        missing = [tower for tower in self.local.slices if tower not in self._done]
        if missing:
            which = f"tower{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
            verb = "has" if len(missing) == 1 else "have"
            raise UsageError(
                f"average() at step {self.step}: {which} {verb} not run: expected each tower to run "
                "once; to leave the step, call abandon() instead"
            )

    def finish(self) -> list[Average]:
        """Finish the exchange and return this worker's averages."""
        self.exchange.stopwatch.stop()
        try:
            self._passes.close()
            if not self.local.slices:
                next(self.turns(), None)  # a worker without rows may have skipped the loop
                self._start_exchange()
            open_steps.pop(self, None)
            with self._failing_together():
                self.watch.end_step(f"step {self.step}: a pass")
            return self._gradients.finish()
        except Exception:
            self.drop()
            raise

    def check_beside(self, *, bits_must_match: bool) -> None:
        """Compare what losses depend on beside the model between workers, if their hashes of it differ."""
        if self.exchange.differs_beside:
            where, transport = self.exchange.where, self.job.transport
            compare_workers(self.watch.flow, transport, where, bits_must_match=bits_must_match)

    def wrong_counts(self) -> BatchError | None:
        """Return an error if the towers' counts are wrong."""
        counts = self.exchange.scalars.counts * self.losses.unit
        return wrong_counts(self.step, self.plan.sums, counts, self.losses.has_count)

    def squares(self) -> Tensor | None:
        """Return the squared gradient norm of each of this worker's towers, if this step measures them."""
        return self._gradients.squares()

    def gather(self, values: Tensor, what: str) -> Tensor:
        """Gather tensors with one row per tower: [own towers, ...] on each worker -> [T, ...] on all."""
        sizes = [len(towers) for towers in self.plan.placement.ranges]
        return gather_rows(self.job.transport, values, sizes, f"{self.exchange.where}, {what}")

    def update_buffers(self) -> None:
        """Update the model's buffers from the passes of all towers."""
        scalars, rows = self.exchange.scalars, self.local.rows
        # Towers without rows come last.
        num_ran = sum(map(bool, self.ranges))
        self._buffers.finish(scalars.moments, rows, scalars.counters[:num_ran])
