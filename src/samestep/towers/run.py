"""One step on one worker: its towers take turns, and what they hand in is added up and sent."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import InitVar, dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from samestep.buffers.outside import graph_of, note_outside_gradients, open_steps
from samestep.errors import BatchError, UsageError
from samestep.streams import keep_globals, seed_globals, tower_seed
from samestep.summation.buckets import Average
from samestep.summation.exchange import Exchange
from samestep.summation.gradient_sum import GradientSum
from samestep.summation.gradients import like_parameter
from samestep.summation.norms import Norms, gather_norms, squared_sum, total_norm
from samestep.summation.scalars import TowerScalars
from samestep.towers.batch import LocalBatch
from samestep.towers.counts import (
    Count,
    LossSum,
    NamedCounts,
    count_slices,
    is_known_to_count,
    loss_sum,
    wrong_counts,
)
from samestep.towers.hooks import noting_twice
from samestep.towers.noise import GradientNorms
from samestep.towers.replica import Replica
from samestep.towers.report import Report
from samestep.towers.tower import Tower
from samestep.workers.collectives import gather_rows
from samestep.workers.rendezvous import num_messages

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
        self._is_dropped = False
        self.is_interrupted = False  # by the passes of another step in this thread
        self.parameters = replica.parameters
        self.plan = self.exchange.plan
        self.own_towers = self.plan.placement.towers(self.job.rank)
        self._counts: NamedCounts | None = None
        self._has_count = False  # whether a tower of this worker is known to count something
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
        self.averaged: list[nn.Parameter] = []  # that have an average
        self.own_averages: list[Average] | None = None  # of this worker's share, where they are not `p.grad`
        self.is_complete = False  # whether the last of this worker's towers has run

    @property
    def _unit(self) -> int:
        """The largest power of two that is at most the batch's rows: the unit of sums and counts.

        Scaling by it is exact. It keeps sums of gradients at the size of means, which float16 needs, and
        makes the division at the root one by 1 where the batch is a power of two. A loss of the whole batch
        is no sum over rows; its unit is 1.
        """
        return 1 if self.plan.is_whole_batch else 1 << (self.local.rows.bit_length() - 1)

    def count(self, counts: Mapping[str, Count]) -> None:
        """Find out what the sums of the loss count in the towers of all workers."""
        try:
            own = count_slices(counts, self.own_towers, self.local.slices, self.job.device)
        except Exception as error:
            self.exchange.fail(error)
        self._counts = NamedCounts(tuple(counts), self.exchange.compare(own), self.local.rows)
        if not any(self._counts.totals):
            self.local = replace(self.local, slices={})  # nothing counts, so no pass is worth its time

    def turns(self) -> Iterator[Tower]:
        """Yield the towers that have rows, in order, each under its own streams, from the shared buffers."""
        rows = self.local.ranges(self.plan.placement.num_towers)
        with self._passes:
            self._begin_passes()
            # `finish` closes this too: whoever calls `next` on the generator may never reach its end.
            self._passes.enter_context(keep_globals(self.job.device))
            self._passes.callback(self.watch.outside.stop_looking)
            self._passes.callback(self._buffers.end_passes)
            self._buffers.start_step()
            self._has_begun = True
            for index in self.local.slices:
                self.exchange.stopwatch.start()
                with self._telling_others():
                    batch = self.local.slices[index]
                self._buffers.start_tower()
                seed_globals(tower_seed(self.seed, self.step, index), self.job.device)
                self.watch.start_pass()
                self._turn = tower = Tower(index, batch, len(rows[index]), self)
                self._num_messages = num_messages()
                del batch
                yield tower
                self.exchange.stopwatch.stop()
                self._turn = None
                if self._is_dropped:
                    return
                with self._telling_others():
                    self._check_done(tower)
                del tower  # its rows, before those of the next one are read

    def _begin_passes(self) -> None:
        """End the passes of another step that are open in this thread, whose streams this one would keep."""
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

        In its turn, a tower leaves the gradient of its sum on the parameters. Afterwards they have those of
        before, and the buffers their values from before the step.
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
            called = "the loop went on before backward was called"
            if self._has_gradients():
                called = "loss.backward() was called instead of tower.backward(loss)"
            raise UsageError(f"{tower!r}: {called}; call tower.backward(loss) once for every tower")

    def _has_gradients(self) -> bool:
        return any(parameter.grad is not None for parameter in self.parameters)

    def take_mean(self, tower: Tower, loss: Tensor | Mapping[str, Tensor]) -> None:
        """Take a tower's mean loss, or its sums by name; see `Tower.backward`."""
        with self._telling_others():
            self._check_turn(tower)
            share = tower.rows / self._unit
            if self._counts is not None:
                found = self._counts.loss_sum(repr(tower), loss, tower.index, share, self._unit)
            elif isinstance(loss, Mapping):
                raise UsageError(
                    f"{tower!r}: loss is a mapping, but the step was started without counts: start it with "
                    "towers(batch, counts={name: count, ...}), or Step(..., counts=...)"
                )
            else:
                found = loss_sum(f"{tower!r}: loss", loss, share, share)
        self._take(tower, found)

    def take_sum(self, tower: Tower, total: Tensor, count: float | Tensor) -> None:
        """Take a tower's sum and its count; see `Tower.backward_sum`."""
        with self._telling_others():
            self._check_turn(tower)
            if self._counts is not None:
                raise UsageError(
                    f"{tower!r}: backward_sum cannot be used in a step that was started with counts; call "
                    "tower.backward({name: sum})"
                )
            if isinstance(count, Tensor) and count.numel() != 1:
                raise UsageError(f"{tower!r}: count has shape {tuple(count.shape)}, expected one number")
            if not isinstance(count, (int, float, Tensor)):
                raise UsageError(f"{tower!r}: count is {count!r}, expected a number or 0-dim tensor")
            if isinstance(count, Tensor) and count.requires_grad:
                raise UsageError(
                    f"{tower!r}: count requires grad: expected what the sum is divided by, such as a number "
                    "of tokens; where a loss has several terms, hand in their sum"
                )
            found = loss_sum(f"{tower!r}: total", total, 1 / self._unit, count / self._unit)
        self._take(tower, found)

    @contextmanager
    def _telling_others(self) -> Iterator[None]:
        """End the step on all workers where this one finds an error."""
        try:
            yield
        except Exception as error:
            if self._gradients is None:  # a closer look, of this worker alone
                raise
            self.watch.outside.stop_looking()  # while this one waits, another may run in this process
            self.exchange.fail(error)

    def _check_turn(self, tower: Tower) -> None:
        if self._gradients is not None and self.exchange.is_over:
            raise UsageError(f"{tower!r}: step {self.step} is over, because a worker met an error in it")
        if self.is_interrupted:
            raise UsageError(
                f"{tower!r}: in its turn, a loop over other Towers began: let the loops follow each other, "
                "or make one Towers of both models, in an nn.ModuleList"
            )
        if tower.index in self._done or tower is not self._turn:
            why = "has run backward already" if tower.index in self._done else "is not the current tower"
            raise UsageError(
                f"{tower!r} {why}: call backward once for each tower, inside the loop over towers(batch)"
            )
        if self._has_gradients():
            raise UsageError(
                f"{tower!r}: parameters have gradients already; call tower.backward(loss) instead of "
                "loss.backward(), whose gradients are not averaged"
            )

    def _take(self, tower: Tower, loss: LossSum) -> None:
        self._check_messages(tower)
        scaled = loss.total if self.scaler is None else self.scaler.scale(loss.total)
        backward = partial(self._backward, scaled) if loss.total.requires_grad else None
        self.add(tower, loss, backward, self.look_at_graph([loss.total]))

    def _check_messages(self, tower: Tower) -> None:
        if num_messages() != self._num_messages:
            with self._telling_others():
                raise UsageError(
                    f"{tower!r}: its pass called torch.distributed, but workers differ in how many passes "
                    "they run, and in their rows: do it after average(), whose report is of all towers"
                )

    def _backward(self, loss: Tensor) -> None:
        try:
            loss.backward()
        except RuntimeError as error:
            if "backward through the graph a second time" not in str(error):
                raise
            with self._telling_others():
                raise UsageError(
                    f"{self._turn!r}: its loss shares a part of its graph with the tower before: compute all "
                    "that has a gradient within the loop over towers, or detach it"
                ) from error

    def add(
        self, tower: Tower, loss: LossSum, backward: Callable[[], None] | None, leaves: Iterable[Tensor]
    ) -> None:
        """Note a tower's scalars, run its `backward`, if there is one, and take the gradients it leaves.

        `leaves` are those of the graph that backward goes through.
        """
        self._done.add(tower.index)
        self.watch.outside.stop_looking()
        if self._gradients is None:
            if backward is not None:
                backward()
            return
        self._has_count |= is_known_to_count(loss.count)
        with self._telling_others():
            self.watch.check_pass(f"step {self.step}, tower {tower.index}")
            counters, moments = self._buffers.counters(), self._buffers.moments(tower.index, tower.rows)
        self._scalars[tower.index] = TowerScalars(loss.count, loss.sums, counters, moments)
        is_last = tower.index == max(self.local.slices)
        if is_last:
            self._start_exchange()
        # The first tower has no sibling whose sum would hide that a gradient comes in two parts.
        is_look = self.watch.looks and tower.index == min(self.local.slices)
        at_once = not (self._replica.has_reentrant or is_look)
        with noting_twice(self.parameters if is_look else ()) as twice:
            self._gradients.backward(tower.index, backward, is_last=is_last, at_once=at_once)
        self._replica.has_reentrant |= bool(twice)
        note_outside_gradients(leaves)
        self.is_complete = is_last

    def look_at_graph(self, losses: Iterable[Tensor]) -> list[Tensor]:
        """Return the leaves of the losses' graph, in a step that looks.

        Note whether backward may come to a parameter twice.
        """
        if not self.watch.looks or self._gradients is None:
            return []
        nodes = list(graph_of(losses))
        if any(node.name() == "CheckpointFunctionBackward" for node in nodes):  # reentrant
            self._replica.has_reentrant = True
        return [node.variable for node in nodes if hasattr(node, "variable")]

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

    def wrong_counts(self) -> BatchError | None:
        """Return what is wrong with the towers' counts, if anything is."""
        counts = self.exchange.scalars.counts * self._unit
        return wrong_counts(self.step, self.plan.sums, counts, self._has_count)

    def take(self, averages: Sequence[Average]) -> list[Average]:
        """Give the averages to the parameters, or, where each worker has a share of them, to `own_averages`.

        Return them in the dtypes of the parameters' gradients, without those that are absent.
        """
        taken = [
            each._replace(gradient=like_parameter(each.gradient, self.parameters[each.parameter]))
            for each in averages
            if each.gradient is not None
        ]
        if self.plan.is_shared_out:
            self.own_averages = taken
        else:
            for index, _, gradient in taken:
                self.parameters[index].grad = gradient
        return taken

    def norms(self, averages: Sequence[Average]) -> list[Norms]:
        """Return the norms of all averages, alike on all workers, given those that this one got."""
        layouts = zip(self.parameters, self.plan.parameters, strict=True)
        dtypes = [parameter.grad_dtype or layout.gradient.dtype for parameter, layout in layouts]
        norms = gather_norms(self.job, self.plan, averages, dtypes, f"{self.exchange.where}, norms")
        self.averaged = [self.parameters[index] for index in norms]
        return [*norms.values()]

    def noise(self, average: Sequence[Norms]) -> GradientNorms | None:
        """Return the norms of the towers' gradients and of the average, in a step that measures them.

        The average is given by the norms of the blocks of each gradient.
        """
        own = None if self._gradients is None else self._gradients.squares()
        if own is None:
            return None
        scale = 1.0 if self.scaler is None else self.scaler.get_scale()
        counts, sums = self.exchange.scalars.counts, self.gather(own, "norms")
        squares = torch.where(counts > 0, sums / scale**2 / counts.square(), torch.nan).tolist()
        rows = [len(part) for part in self.local.ranges(len(squares))]
        square = squared_sum([*chain.from_iterable(average)], counts.device)
        return GradientNorms(squares, counts.tolist(), rows, float(square / scale**2))

    def gather(self, values: Tensor, what: str) -> Tensor:
        """Return a tensor with a row for each tower, [T, ...], from those of every worker's towers."""
        sizes = [len(towers) for towers in self.plan.placement.ranges]
        return gather_rows(self.job.transport, values, sizes, f"{self.exchange.where}, {what}")

    def update_buffers(self) -> None:
        """Give the model's buffers the values that all towers' passes make together."""
        scalars, rows = self.exchange.scalars, self.local.rows
        # Those without rows come last.
        num_ran = sum(map(bool, self.local.ranges(self.plan.placement.num_towers)))
        self._buffers.finish(scalars.moments, rows, scalars.counters[:num_ran])

    def rows_of_workers(self) -> list[int]:
        """Return how many rows each worker's towers had."""
        rows = self.local.ranges(self.plan.placement.num_towers)
        return [sum(len(rows[tower]) for tower in towers) for towers in self.plan.placement.ranges]

    def report(self, norms: Sequence[Norms], **more: Any) -> Report:
        """Return the step's report, given the norms of the blocks of each averaged gradient.

        `more` are the attributes that only `Towers` knows.
        """
        scalars = self.exchange.scalars
        # The loss of a whole batch is tower 0's.
        num_counted = 1 if self.plan.is_whole_batch else len(scalars.counts)
        counts = scalars.counts[:num_counted, None] * self._unit
        if self._counts is not None:
            counts = self._counts.counts.to(counts.device)
        loss_sums = scalars.loss_sums[:num_counted] * self._unit
        more |= {"names": self.plan.sums, "flags": self.exchange.flags}
        norm = total_norm(norms)
        if self.scaler is not None:
            norm = norm / self.scaler.scale(torch.ones_like(norm))
        return Report(self.step, self.local.rows, loss_sums, counts, norm, **more)
