"""Elastic training in a user's own loop: it continues when workers are lost or join.

All workers make the same calls in the same order, and each call needs all workers, so no worker is more than
one call ahead. If a worker is lost, the others undo the call that has begun, form a new process group, and
repeat the call. A worker that is one call behind takes the state of a worker that has finished the call.
A newcomer takes it, too, where it enters the block, and its first call must be the one that the others
repeat. Otherwise it exits, and later newcomers join at another call.
`Trainer` does the same with its own actions, see `samestep.app.loop`.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import NoneType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar

from torch import nn

from samestep.app.calls import Call, LoopStart, Place, call_of, with_values
from samestep.app.elastic_state import ElasticState, Noted
from samestep.app.regroup import meet_again, renewable_of, report_regroup
from samestep.app.unknown_optimizers import UnknownOptimizers
from samestep.arguments import check_callable, check_kind
from samestep.batches.batch import LocalBatch
from samestep.checkpoint.objects import TrainingObjects
from samestep.checkpoint.snapshot import check_snapshot
from samestep.errors import ConfigError, DisagreementError, LostWorkerError, UsageError, one_line
from samestep.towers.towers import Towers
from samestep.workers.collectives import gather_objects

if TYPE_CHECKING:
    from samestep.app.trainer import Batches

__all__ = ["Elastic"]

P = ParamSpec("P")
T = TypeVar("T")

_END = Call("the end of the Elastic block")
_NONE = Call("no call yet")
_DUE = "a worker is gone"  # the reason if a worker knows only that there is a newer list of workers


@dataclass(frozen=True)
class _Progress:
    """A worker's progress.

    Attributes:
        num_done: number of finished calls; −1 for a newcomer.
        result: the result of the last finished call.
        call: the call that has begun.
        start: which call newcomers start with.
        is_new: whether the worker has joined and its first call has not been compared yet.
        has_joined: whether it has joined at any time.
        is_torn: whether this call has had an effect that cannot be undone.
    """

    num_done: int
    result: Any
    call: Call
    start: LoopStart
    is_new: bool
    has_joined: bool
    is_torn: bool

    @property
    def order(self) -> tuple[int, bool]:
        """What is largest for the worker whose state and call the others take."""
        return self.num_done, not self.is_new


@dataclass(frozen=True)
class _Raised:
    """The result of a call that has raised an exception, which can be sent to another worker."""

    error: Exception

    @classmethod
    def of(cls, error: Exception) -> _Raised:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            return cls(RuntimeError(f"{type(error).__name__}: {error}"))
        return cls(error)


class Elastic:
    """Keeps your own training loop going: repeats a call, such as a step, if a worker is lost during it.

        state = {"model": model, "towers": towers, "loader": loader, "optimizer": optimizer}
        with samestep.Elastic(**state) as elastic:
            while loader.epoch < 5:
                for batch in loader:
                    report = elastic(step, batch)
                elastic(samestep.save, path, **state)

    In a job of `samestep.launch`, the other workers continue if a worker is killed, and a new worker replaces
    it. The new worker runs the script from the beginning, gets the state from another worker when it enters
    the `with` block, and starts at the loop's first call. Under torchrun, and with one process, each call is
    made once.

    - A call contains at most one step, with its update of the weights, or one other action that needs all
      workers. It may run several times, but only the last run has an effect: before a call is repeated, the
      global generators, the layers' modes, which parameters are trained, the loader's position, learning
      rates and the rest of the small state are restored.
    - A worker that is one call behind gets the state and the call's result from a worker that has finished
      it. So results must be picklable.
    - Change weights only inside calls. Between two calls, do only what is the same on all workers, such as a
      scheduler's step.
    - The loop must continue from the state (`loader.epoch`, `towers.step`), as after a checkpoint: a newcomer
      starts in the middle. It exits if its first call is not the one that the others make.
    - A call that raises an exception on all workers has been made: the program may catch it and go on.
    - `job.rank`, `job.world_size` and `job.is_first` change: read them each time you need them.

    Args:
        model: as for `samestep.save`; so are the other arguments.
        towers: the towers of the model; pass towers of other models in `state`.
        loader: a `TowerLoader`, or another loader with a `state_dict`; with a `StreamLoader`, call
            `next_batch()` inside a call.
        averaged_model: torch's `AveragedModel`, or another module that holds averages.
        state: everything else that training changes: objects with a `state_dict`. The states of those that
            are neither modules nor optimizers are copied at each call.

    Raises:
        ConfigError: on construction, an object in `state` has no `state_dict`; where the `with` block
            begins, some of the state cannot be sent to another worker.
        DisagreementError: workers make different calls, or have different weights at the end.
        LostWorkerError: workers are lost, and the others cannot continue.
        UsageError: a worker was lost between an average and the end of its call; a result cannot be
            pickled; or a `StreamLoader`'s batch was read outside of the call.

    Example:
        >>> import torch
        >>> model = nn.Linear(1, 1)
        >>> towers = Towers(model, 2)
        >>> with Elastic(model=model, towers=towers) as elastic:
        ...     elastic(lambda: "made")
        'made'
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        towers: Towers,
        loader: Batches | None = None,
        averaged_model: nn.Module | None = None,
        **state: Any,
    ) -> None:
        check_kind("model", model, nn.Module, "an nn.Module")
        check_kind("towers", towers, Towers, "the samestep.Towers of the model")
        check_kind("averaged_model", averaged_model, (nn.Module, NoneType), "a module with the averages")
        _check({"loader": loader, **state})
        self._job, self._towers = towers.job, towers
        passed: dict[str, Any] = {
            "model": model,
            "towers": towers,
            "loader": loader,
            "averaged_model": averaged_model,
        }
        self._names = {id(each): name for name, each in (passed | state).items()}
        self._state = ElasticState(TrainingObjects(**passed, state=state), self._job)
        self._renewable = renewable_of(self._job, self._state.objects)
        self._unknown = UnknownOptimizers(self._state.towers, self._state.kept)
        self._is_new = self._has_joined = self._job.is_newcomer
        self._num_done = -1 if self._is_new else 0
        self._result: Any = None
        self._call = _NONE
        self._start = LoopStart()
        self._joined: Sequence[int] = ()  # workers that have joined at any time
        self._newcomers: Sequence[int] = ()  # those whose first call is to be compared
        self._known: set[Call] = set()  # calls that have returned picklable results
        self._before: Noted
        self._after: Noted
        self._have_come = False  # whether newcomers joined in the last regroup

    def __enter__(self) -> Elastic:
        self._unknown.start()
        renewable = self._renewable
        if renewable is not None:
            self._before = self._after = self._state.note()
            if self._job.is_newcomer:
                meet_again(self._job, self._catch_up)
            else:
                check_snapshot(self._state.objects)
                renewable.can_go_on()
            for towers in self._state.towers:
                towers._may_change_workers = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for towers in self._state.towers:
            towers._may_change_workers = False
        if kind is None and self._renewable is not None:
            self._make(_END, self._compare)
            self._renewable.finish()
        elif kind is None:
            self._compare()

    def __call__(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return `work(*args, **kwargs)`, or another worker's result of it; all workers must call this."""
        check_callable("what to call", work, "a function, with its arguments after it: elastic(step, batch)")
        if self._state.has_stream:
            _check_in_call((*args, *kwargs.values()))
        if self._renewable is None:
            result = work(*args, **kwargs)
        else:
            made = partial(work, *args, **kwargs)
            self._make(call_of(made, Place.of_caller(), self._names), made)
            result = self._result
        self._unknown.look()
        return result

    def _compare(self) -> None:
        """Compare the weights of all workers: the program may have changed them since the last step."""
        for towers, beside in self._state.objects.compared:
            towers._check_weights(f"step {towers.step}, the end", beside)

    def _make(self, call: Call, work: Callable[[], Any]) -> None:
        self._call, number = call, self._num_done
        due, self._before = self._before, self._state.note()
        if self._is_new:
            self._before = replace(self._before, generators=due.generators)
        self._start.note(call, number)
        while self._num_done == number:
            try:
                self._try(call, work)
            except LostWorkerError as error:
                self._regroup(str(error))
        if isinstance(self._result, _Raised):
            raise self._result.error

    def _try(self, call: Call, work: Callable[[], Any]) -> None:
        renewable = self._renewable
        assert renewable is not None
        if self._newcomers:
            self._compare_first_calls(with_values(call, work, self._state.optimizers))
        if call.name != self._start.name:
            with self._without_latecomers(call):
                self._towers._come_to(call.name)
        if self._job.is_first and self._start.is_at(call) and renewable.is_due():
            # Once worker 0 regroups, the others lose their connection to it, and regroup as well.
            raise LostWorkerError(_DUE)
        try:
            with self._without_latecomers(call):
                result = work()
        except LostWorkerError:
            raise
        except Exception as error:  # on all workers, if the program may go on
            result = _Raised.of(error)
        if call not in self._known:
            _check_picklable(call, result)
            self._known.add(call)
        self._result, self._after = result, self._state.note()
        self._num_done += 1

    # ---- where newcomers start -------------------------------------------------------------------------

    def _compare_first_calls(self, call: Call) -> None:
        """Send newcomers away that start with another call than the one that is being made."""
        assert self._renewable is not None
        calls: list[tuple[Call, set[Call]]] = gather_objects(
            self._job.transport, (call, self._known), "the first calls of new workers"
        )
        trained = [worker for worker in range(len(calls)) if worker not in self._newcomers]
        due = calls[trained[0]][0]
        # The calls that are made at other times; some programs make one call at several places, by rank.
        others = set[Call]().union(*(calls[worker][1] for worker in trained))
        others -= {calls[worker][0] for worker in trained}
        wrong = [w for w in self._newcomers if not due.can_be(calls[w][0], others)]
        if wrong:
            first = calls[wrong[0]][0]
            if first.name != due.name or first in others:  # otherwise, other arguments
                self._start.refuse(due, first)
            why = f"{due}: new workers start with {first}"
            self._send_away(wrong, why, is_to_tell=self._job.rank == trained[0])
        if self._is_new:  # the others may have drawn more since their last call
            self._before.generators.restore()
        self._accept_newcomers()

    @contextmanager
    def _without_latecomers(self, call: Call) -> Iterator[None]:
        """If the others' programs have ended, let workers exit that have joined and go on with this call."""
        try:
            yield
        except DisagreementError as error:
            if self._joined and _END.name in str(error):
                calls = gather_objects(self._job.transport, call, "the calls at the end")
                ended = [worker for worker, each in enumerate(calls) if each == _END]
                late = [worker for worker in range(len(calls)) if worker not in ended]
                if late and set(late) <= set(self._joined) and ended[-1] < late[0]:
                    why = f"{_END.name}: workers that have joined go on with {calls[late[0]]}"
                    self._send_away(late, why, is_to_tell=self._job.rank == ended[0])
            raise

    def _accept_newcomers(self) -> None:
        assert self._renewable is not None
        if self._is_new:
            self._renewable.can_go_on()
        self._is_new, self._newcomers = False, ()

    # ---- regrouping after workers are lost or have joined ----------------------------------------------

    def _regroup(self, why: str) -> None:
        for towers in self._state.towers:
            towers._leave_behind()
        if not self._is_torn:
            self._state.put_back(self._before)
        self._have_come = False
        meet_again(self._job, self._catch_up)
        if self._job.is_first:
            # A loss is reported, even if others have joined since.
            why = "new workers have joined" if self._have_come and why == _DUE else why
            report_regroup(why, self._job, self._towers.step)

    @property
    def _progress(self) -> _Progress:
        done = (self._num_done, self._result)
        joined = (self._is_new, self._has_joined)
        return _Progress(*done, self._call, self._start, *joined, self._is_torn)

    def _catch_up(self) -> None:
        """Exchange progress with the others; take the state of a worker that is ahead of this one."""
        progress: list[_Progress] = gather_objects(
            self._job.transport, self._progress, "how far the workers are"
        )
        ahead = max(progress, key=lambda each: each.order)
        arrived = [worker for worker, each in enumerate(progress) if each.num_done < 0]
        self._check_progress(progress, ahead, arrived)
        behind = [worker for worker, each in enumerate(progress) if each.num_done < ahead.num_done]
        if behind:
            self._hand_over(progress.index(ahead), behind)
        if 0 <= self._num_done < ahead.num_done:  # the others could finish the call: all had begun it
            self._accept_newcomers()
        self._newcomers = [
            w for w, p in enumerate(progress) if p.is_new and (w in arrived or w not in behind)
        ]
        self._joined = [worker for worker, each in enumerate(progress) if each.has_joined]
        self._call, self._start = ahead.call, ahead.start
        self._num_done, self._result = ahead.num_done, ahead.result
        for towers in self._state.towers:
            towers._agree_again()
        self._have_come |= bool(arrived)

    def _check_progress(
        self, progress: Sequence[_Progress], ahead: _Progress, arrived: Sequence[int]
    ) -> None:
        torn = [w for w, p in enumerate(progress) if p.is_torn and p.num_done == ahead.num_done]
        if torn:
            raise UsageError(
                f"{ahead.call.name}: a worker was lost after worker {torn[0]} had averaged a step in this "
                "call, but before the call ended: expected one step per call, and no messages after it"
            )
        if arrived and not ahead.start.is_at(ahead.call):
            why = f"{ahead.call.name}: new workers cannot start at this call"
            self._send_away(arrived, why, is_to_tell=progress[self._job.rank] is ahead)

    def _send_away(self, newcomers: Sequence[int], why: str, *, is_to_tell: bool) -> NoReturn:
        """Let newcomers exit that cannot start at the others' call; later ones may arrive at another call."""
        assert self._renewable is not None
        is_sent_away = self._job.rank in newcomers
        if is_to_tell:
            sys.stderr.write(f"samestep: {why}, so they exit (docs/elastic.md)\n")
        self._renewable.send_away(newcomers)  # before raising: the others wait for a list without them
        raise SystemExit(0) if is_sent_away else LostWorkerError(why)

    def _hand_over(self, source: int, targets: Sequence[int]) -> None:
        """Send the state of worker `source` to the workers `targets`."""
        noted = (self._before, self._after) if self._job.rank == source else ()
        sent = self._state.hand_over(source, targets, noted)
        if sent is not None:
            before, after = self._before, self._after = sent
            self._state.put_back(after if self._num_done >= 0 else self._state.at_entry(before, after))

    @property
    def _is_torn(self) -> bool:
        """Whether a step has been taken in the call that has begun and not ended."""
        return self._state.has_stepped(self._before)


def _check(state: dict[str, Any]) -> None:
    for name, value in state.items():
        if value is not None and not hasattr(value, "load_state_dict"):
            raise ConfigError(f"{name} is a {type(value).__name__}: expected an object with a state_dict")


def _check_in_call(arguments: Sequence[Any]) -> None:
    if any(isinstance(each, LocalBatch) and each.again is None for each in arguments):
        raise UsageError(
            "a StreamLoader's batch was read outside of the call, and its messages cannot be repeated: call "
            "loader.next_batch() inside the call"
        )


def _check_picklable(call: Call, result: Any) -> None:
    """Report at once an error that would otherwise appear only when a worker is lost."""
    try:
        pickle.dumps(result)
    except Exception as error:
        raise UsageError(
            f"{call.name} returned a {type(result).__name__}, which cannot be sent to another worker "
            f"({one_line(str(error))}): expected a picklable result, or None"
        ) from error
