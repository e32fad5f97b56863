"""A few real workers on this machine, which record the same steps as one job."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from typing import Any

from samestep.checking.program_warnings import each_warning_once
from samestep.checking.recorder import Subject, Trial, record
from samestep.checking.recording import Recording
from samestep.errors import Error, LostWorkerError, UsageError
from samestep.streams import seed_globals, stream_seed
from samestep.workers.environment import rank_environment, worker_environment
from samestep.workers.interrupts import end_at_once_when_interrupted, interrupts_held
from samestep.workers.job import init
from samestep.workers.listeners import loopback_listener
from samestep.workers.process import end_with_parent
from samestep.workers.process_group import is_lost_connection
from samestep.workers.store import open_store

__all__ = ["Workers", "recordings", "why_not_elsewhere"]


class Workers:
    """Worker processes that are kept for several jobs, one after the other.

    Args:
        most: the largest number of workers in a job.
        device: as for `samestep.init`.
        threads: CPU threads of each worker.
    """

    def __init__(self, most: int, *, device: str, threads: int) -> None:
        self._device = device
        self._threads = threads
        context = multiprocessing.get_context("spawn")
        self._have_started = context.RawValue("b", 0)  # shared memory; set by the first worker
        # The resource tracker warns about what it cleans up after a program was interrupted or killed.
        with _environment(_without_warnings_of("multiprocessing.resource_tracker")):
            self._pool = ProcessPoolExecutor(
                most, mp_context=context, initializer=_start, initargs=(self._have_started,)
            )

    def record(self, subject: Subject, trial: Trial, num_workers: int) -> list[Any]:
        """Run one job, and return what each worker recorded or raised; `subject` must be picklable.

        Raises:
            LostWorkerError: a worker process ended in the middle of its work.
            UsageError: the calling script runs itself again in every worker.
        """
        work = partial(_work, pickle.dumps(subject), trial, self._device, self._threads)
        with loopback_listener() as listener, _environment(worker_environment(self._threads)):
            host, port = listener.getsockname()[:2]
            store = open_store(listener)  # a new one for each job, so that no key is stale
            environments = [rank_environment(rank, num_workers, host, port) for rank in range(num_workers)]
            with interrupts_held():
                futures = [self._pool.submit(work, one) for one in environments]
            wait(futures)
            del store
        outcomes = [future.exception() or future.result() for future in futures]
        if any(isinstance(outcome, BrokenProcessPool) for outcome in outcomes):
            raise self._ended()
        return outcomes

    def _ended(self) -> Error:
        """Return the error for a worker process that ended by itself."""
        if self._have_started.value:
            return LostWorkerError(
                "a worker process ended in the middle of the check, as by os._exit, a crash in C code or a "
                "signal: look at what it printed last, and at the system's log if memory was short; or check "
                "with processes=False"
            )
        return UsageError(
            "a worker process ended before it had done anything: in a script, call samestep.check under "
            "`if __name__ == '__main__':`, because every worker imports the script"
        )

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)


def _without_warnings_of(module: str) -> dict[str, str]:
    filters = [os.environ.get("PYTHONWARNINGS", ""), f"ignore::UserWarning:{module}"]
    return {"PYTHONWARNINGS": ",".join(filter(None, filters))}


def _start(have_started: ctypes.c_byte) -> None:
    have_started.value = 1
    end_with_parent(signal.SIGKILL)
    end_at_once_when_interrupted()


def why_not_elsewhere(subject: Subject) -> str | None:
    """Say why `subject` cannot be sent to another process; None if it can."""
    try:
        pickled = pickle.dumps(subject)
    except Exception as error:  # pickle raises whatever the objects do
        return str(error).partition("\n")[0]
    main = getattr(sys.modules["__main__"], "__file__", None)
    if (b"__main__" in pickled and main is None) or (main is not None and not os.path.isfile(main)):
        return "the program is not in a file"
    return None


def recordings(outcomes: Sequence[Any]) -> list[Recording]:
    """Return what the workers recorded, or raise the error that explains why one did not."""
    errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    found = [outcome for outcome in outcomes if isinstance(outcome, Recording)]
    first = min(errors, key=_is_of_another_worker, default=None)
    is_explained = any(recording.error is not None for recording in found)
    if first is not None and not (is_explained and _is_of_another_worker(first)):
        raise first
    return found


def _is_of_another_worker(error: BaseException) -> bool:
    """Whether an error only reports the loss of another worker."""
    return isinstance(error, LostWorkerError) or is_lost_connection(error)


def _work(pickled: bytes, trial: Trial, device: str, threads: int, own: dict[str, str]) -> Recording:
    """Run one worker of one job."""
    # Import this before the job's process group exists: its functions keep the current group as a default
    # argument, and so keep it open. Otherwise the first optimizer imports it, through torch.compile.
    import torch.distributed.nn  # noqa: F401

    with _environment(own), each_warning_once(set(trial.shown)):
        job = init(device, threads=threads)
        try:
            # Random numbers drawn while the user's code is imported may differ between workers.
            seed_globals(stream_seed(trial.number, "import", job.world_size, job.rank), job.device)
            subject: Subject = pickle.loads(pickled)
            recording = record(subject, job, trial)
            if recording.error is None:  # otherwise others may be in the middle of a step
                job.barrier()
            return recording
        except Exception as error:
            if not _can_be_sent(error):
                raise RuntimeError(f"worker {job.rank} raised {type(error).__qualname__}: {error}") from error
            raise
        finally:
            job.transport.close()  # after an error, too, so that others stop waiting


def _can_be_sent(error: Exception) -> bool:
    """Whether the other process can read this error: an `__init__` with other arguments may prevent it."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return False
    return True


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for a while."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
