"""Processes and devices: the only place that reads the launcher's environment or makes a process group."""

from __future__ import annotations

import gc
import os
import re
import signal
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from samestep.errors import ConfigError, Error, LostWorkerError
from samestep.workers.process import end_with_parent, keep_freed_memory
from samestep.workers.rendezvous import join

__all__ = [
    "DEFAULT_TIMEOUT_S",
    "Job",
    "check_threads",
    "device_named",
    "environment",
    "error_file",
    "init",
    "is_lost_connection",
    "launched_by_samestep",
    "lost_worker",
    "may_restart",
    "num_cores",
    "rank",
    "under_launcher",
    "worker_environment",
]

DEFAULT_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Job:
    """One process's view of the job.

    Attributes:
        device: what this worker computes on.
        rank: this worker's number, 0 <= rank < world_size; passed on as `worker` elsewhere.
        world_size: workers in the job, W.
        threads: CPU threads of this worker; part of what the bits depend on.
        timeout_s: seconds after which a worker that does not answer counts as lost.
    """

    device: torch.device
    rank: int = 0
    world_size: int = 1
    threads: int = 1
    timeout_s: float = DEFAULT_TIMEOUT_S

    @property
    def is_first(self) -> bool:
        """Whether this is worker 0, the one that prints and writes."""
        return self.rank == 0

    def barrier(self, what: str = "barrier") -> None:
        """Wait for all workers.

        Raises:
            LostWorkerError: one of them is gone, or has not come within the timeout.
        """
        if self.world_size > 1:
            with self.together(what):
                dist.barrier()

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Around a collective: say what it was for where a worker does not take part.

        Raises:
            LostWorkerError: in place of what the backend raises.
        """
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, Error) or not is_lost_connection(error):
                raise
            raise lost_worker(what, "another worker", self.timeout_s, error) from error

    def close(self) -> None:
        """Leave the process group, if there is one, once all workers do."""
        if dist.is_available() and dist.is_initialized():
            self.barrier("end")
            gc.collect()  # a group that outlives the interpreter aborts the process; see pytorch#190489
            dist.destroy_process_group()


def lost_worker(what: str, who: str, timeout_s: float, error: RuntimeError) -> LostWorkerError:
    """Return the error that says who did not take part in what, and whether it is gone or silent."""
    why = (
        re.sub(r"^\[\S+\] ", "", str(error)).partition("\n")[0].partition(". ")[0]
    )  # without gloo's source line
    is_silent = ("timed out" in why.lower() or "timeout" in why.lower()) and "refused" not in why
    how = f"did not answer for {timeout_s:g} s" if is_silent else "is gone"
    return LostWorkerError(f"{what}: {who} {how} ({why})")


def is_lost_connection(error: BaseException) -> bool:
    """Whether an exception of torch's is about another process that is gone or silent."""
    # gloo has no exception type of its own: a RuntimeError that begins with its source file.
    return isinstance(error, dist.DistError) or "/gloo/" in str(error)


def under_launcher() -> bool:
    """Whether a launcher such as torchrun started this process and gave it a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launched_by_samestep() -> bool:
    """Whether `samestep.app.launch` started this process, and so shows the errors of all workers itself."""
    return "SAMESTEP_LAUNCHED" in os.environ


def may_restart() -> bool:
    """Whether the launcher starts failed workers again by itself."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0


def rank() -> int:
    """Return this worker's number, 0 where there is no launcher."""
    return int(os.environ.get("RANK", "0"))


def error_file() -> Path | None:
    """Return the file in which torch's launcher looks for this worker's error; None without a launcher."""
    name = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(name) if name else None


@contextmanager
def worker_environment(threads: int, signals: list[str]) -> Iterator[None]:
    """Set, for a while, what workers inherit from the process that launches them.

    Args:
        threads: CPU threads of each worker, also for the libraries that size their pools at start.
        signals: names of the signals that torch's launcher passes on to the workers.
    """
    wanted = {
        "SAMESTEP_LAUNCHED": "1",
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(signals),
    }
    with environment(wanted):
        yield


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
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


def num_cores() -> int:
    """Return how many CPU cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS has no affinity


def init(device: str = "auto", *, threads: int = 1, timeout_s: float = DEFAULT_TIMEOUT_S) -> Job:
    """Join the job: read torchrun's environment, pick the device, make kernels deterministic.

    Without a launcher this is a job of one worker. Call it once, before the model is built.

    Args:
        device: "cpu", "cuda" (the GPU of this worker's local rank, shared where there are fewer GPUs
            than workers), or "auto": CUDA where there is a GPU.
        threads: CPU threads. The bits of CPU kernels depend on it, so it is a setting, never a guess.
        timeout_s: seconds to wait for another worker before it counts as lost.

    Returns:
        The job, to be passed to `Towers`.

    Raises:
        ConfigError: an unknown device, no GPU for "cuda", or threads below 1.
        LostWorkerError: the workers have not found each other within the timeout.
    """
    check_threads(threads)
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    chosen = device_named(device, local_rank)
    torch.set_num_threads(threads)
    if chosen.type == "cpu":
        keep_freed_memory()
    else:
        _make_cuda_deterministic(chosen)
    if not under_launcher():
        return Job(chosen, threads=threads, timeout_s=timeout_s)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent(signal.SIGTERM)  # else the workers of a launcher that was killed would go on
    job = Job(chosen, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), threads, timeout_s)
    if job.world_size > 1 and not dist.is_initialized():
        with job.together(f"start of {job.world_size} workers"):
            join(_backend(chosen), timeout_s)
    return job


def check_threads(threads: int) -> None:
    """Refuse a number of CPU threads below 1."""
    if threads < 1:
        raise ConfigError(f"threads = {threads}: expected at least 1")


def device_named(name: str, local_rank: int) -> torch.device:
    """Return the device that a setting names, on the worker with this local rank."""
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device = {name!r}: expected one of auto, cpu, cuda")
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("device = 'cuda': torch sees no GPU here; use device 'cpu' or 'auto'")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def _backend(device: torch.device) -> str:
    if device.type == "cpu":
        return "gloo"
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    # NCCL refuses two ranks on one GPU; gloo carries CUDA tensors through host memory.
    return "cpu:gloo,cuda:nccl" if local_world_size <= torch.cuda.device_count() else "gloo"


def _make_cuda_deterministic(device: torch.device) -> None:
    torch.cuda.set_device(device)
    wanted = ":4096:8"
    if os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", wanted) not in (wanted, ":16:8"):
        warnings.warn(
            f"CUBLAS_WORKSPACE_CONFIG={os.environ['CUBLAS_WORKSPACE_CONFIG']} lets cuBLAS change the bits; "
            f"unset it or use {wanted}",
            stacklevel=3,
        )
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
