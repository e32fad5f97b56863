"""How a step begins: cut the batch, and agree with the other workers on the plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any

import torch

from samestep.arguments import check_kind
from samestep.batches.batch import LocalBatch, cut
from samestep.summation.exchange import Exchange
from samestep.summation.plan import Plan
from samestep.towers.division import Division
from samestep.towers.replica import Kind, Replica
from samestep.towers.run import StepRun
from samestep.watching.must_match import FIRST_EXAMPLE, MustMatch
from samestep.workers.collectives import gather_objects

__all__ = ["Opening", "StepOptions"]


@dataclass(frozen=True)
class StepOptions:
    """The options of a step; see `Towers.__call__`."""

    scaler: torch.amp.GradScaler | None = None
    flags: Callable[[], int] = int
    must_match: Mapping[str, Any] | None = None
    division: Division | None = None  # which worker gets which averages; None: every worker gets all
    pass_function: Callable[[Any], Any] | None = None  # of a tower's batch; None if the program has the loop

    def __post_init__(self) -> None:
        check_kind("must_match", self.must_match, (Mapping, NoneType), "a mapping from names to values")


class Opening:
    """Begins the steps of a `Towers`.

    Attributes:
        plan: the plan that all workers last agreed on.
        exchange: the exchange in which a plan was last agreed on; an interrupt may have broken it off.
    """

    def __init__(self, replica: Replica, plan: Plan, *, has_regrouped: bool) -> None:
        self._has_regrouped = has_regrouped  # since the last step
        self._replica = replica
        self._job = replica.job
        self.plan = plan
        self.exchange: Exchange | None = None

    def open(self, step: int, batch: Any, kind: Kind, options: StepOptions, pass_ns: int) -> StepRun:
        """Cut the batch; if the plan has changed, agree on it with the other workers.

        `pass_ns` is how long this worker's passes of the previous step took.
        """
        local, plan, error, compared = LocalBatch(0, {}), self.plan, None, 0
        self._replica.dropped.start_step(step, self._replica.parameters)
        try:
            plan = self._replica.plan(kind)
            is_read_twice = bool(kind.sums) or kind.is_whole_batch
            local = cut(batch, kind.placement, self._job, is_read_twice=is_read_twice)
            compared = 0 if local.compared is None else local.compared()
        except Exception as found:
            error = found
        numbers = _numbers(step, local, compared)
        if error is not None or plan.fingerprint != self.plan.fingerprint:
            self.exchange = Exchange(self._job, self.plan, numbers)
            plan = self._agree_on(plan, kind, self.exchange, error)
        self.plan = plan
        watch = self._replica.watch
        watch.start_step(step, self._job.world_size, options.pass_function)
        rest = MustMatch(self._settings(options), watch, compared, local.rows, local.fingerprint)
        exchange = Exchange(self._job, plan, numbers, rest=rest, flags=options.flags, pass_ns=pass_ns)
        return StepRun(step, self._replica.settings.seed, local, self._replica, exchange, options.scaler)

    def _settings(self, options: StepOptions) -> dict[str, Any]:
        """Return settings that must be the same on all workers, by name."""
        settings = {"CPU threads": torch.get_num_threads(), "default dtype": torch.get_default_dtype()}
        settings |= options.must_match or {}
        if options.scaler is not None and self._job.device.type == "cpu":  # reading it from a GPU would wait
            settings["loss scale"] = options.scaler.get_scale()
        return settings

    def _agree_on(self, plan: Plan, kind: Kind, exchange: Exchange, error: Exception | None) -> Plan:
        with exchange.unbroken():
            if error is not None:
                exchange.fail(error)
            if self._has_regrouped:
                exchange.change_to(replace(plan.with_all_shared(), version=0))
                new = gather_objects(self._job.transport, self._replica.new.state, exchange.where)
                self._replica.take_over(new)
                plan, self._has_regrouped = self._replica.plan(kind), False
            else:
                exchange.change_to(plan)
            return self.send_new_tensors(plan)

    def send_new_tensors(self, plan: Plan) -> Plan:
        """Copy worker 0's values of new tensors to all workers; return the plan without new tensors."""
        self._replica.start_from_first_worker()
        return plan.with_all_shared()

    def come_to(self, what: str, step: int) -> None:
        """Check that all workers have reached the call `what`; raise on all if another one is in a step."""
        numbers = _numbers(step, LocalBatch(0, {}), call=what)
        Exchange(self._job, self.plan, numbers).change_to(self.plan)


def _numbers(step: int, local: LocalBatch, compared: int = 0, call: str = "a step") -> dict[str, int | str]:
    """Return the numbers in the header of a step's first message that describe the call and its batch."""
    rows = {"rows": local.rows, "batch fingerprint": local.fingerprint}
    return {"step": step, "call": call, **rows, FIRST_EXAMPLE: compared}
