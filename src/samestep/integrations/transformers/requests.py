"""Shares what callbacks request on one worker, such as to stop, with all workers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import transformers

from samestep.workers.collectives import gather_rows
from samestep.workers.job import Job

__all__ = ["SharedRequests", "may_ask_alone"]

_REQUESTS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")


def may_ask_alone(callbacks: Iterable[Any]) -> bool:
    """Return whether one of these callbacks may request something on one worker only.

    Callbacks of transformers decide by the arguments and steps, which are the same on all workers. But a
    program may add an `EarlyStoppingCallback` on one worker only.
    """
    return any(
        isinstance(each, transformers.EarlyStoppingCallback)
        or not type(each).__module__.startswith(("transformers.", "samestep."))
        for each in callbacks
    )


class SharedRequests(transformers.TrainerCallback):  # type: ignore[misc]
    """Sets each flag of `TrainerControl` that is set on any worker; runs after all other callbacks.

    This is a message of five bytes after each event that the training loop acts on. `on_log` is such an event
    only when the loop logs a step, because a program may call `log` itself, on one worker only.

    Attributes:
        is_on: whether there are other workers, and a callback that may request something.
        has_stopped_epoch: whether a callback stopped the last epoch.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self.is_on = self.has_stopped_epoch = False
        self._will_log = False
        self._logged_step = 0

    def come_last(self, handler: Any) -> None:
        """Move behind callbacks that were added since."""
        if handler.callbacks[-1] is not self:
            if self in handler.callbacks:
                handler.callbacks.remove(self)
            handler.callbacks.append(self)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Note that the loop does not log this step again."""
        self._will_log, self._logged_step = False, state.global_step
        self.has_stopped_epoch = False

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Share the requests after a step."""
        self._share(state, control)
        self._will_log = control.should_log and state.global_step > self._logged_step

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Share the requests after an epoch."""
        self.on_step_end(args, state, control)
        self.has_stopped_epoch = control.should_epoch_stop

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Share the requests after a log of the loop."""
        if self._will_log:
            self._will_log, self._logged_step = False, state.global_step
            self._share(state, control)

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Share the requests after an evaluation."""
        self._share(state, control)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Share the requests after a checkpoint."""
        self._share(state, control)

    def _share(self, state: Any, control: Any) -> None:
        if not self.is_on:
            return
        num_workers, num_requests = self._job.world_size, len(_REQUESTS)
        own = torch.tensor([bool(getattr(control, name)) for name in _REQUESTS], device="cpu").byte()
        where = f"requests of callbacks after step {state.global_step}"
        found = gather_rows(self._job.transport, own, [num_requests] * num_workers, where)
        for name, is_set in zip(_REQUESTS, found.view(num_workers, -1).any(0).tolist(), strict=True):
            setattr(control, name, is_set)
