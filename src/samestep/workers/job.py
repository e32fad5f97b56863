"""The job, as one worker sees it, and `init`, which joins it."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.distributed as dist

from samestep.arguments import positive
from samestep.errors import ConfigError, LostWorkerError, warn
from samestep.workers.collectives import gather_rows
from samestep.workers.default_group import has_group
from samestep.workers.device import device_named, has_tf32, make_cuda_deterministic
from samestep.workers.environment import (
    check_environment,
    local_rank,
    note_joined,
    under_launcher,
    warn_if_unranked,
    world_size,
)
from samestep.workers.process import (
    DEFAULT_TIMEOUT_S,
    check_threads,
    end_with_parent,
    imports_script,
    keep_freed_memory,
)
from samestep.workers.rendezvous import join
from samestep.workers.transport import Alone, Renewable, Transport

__all__ = ["Job", "init"]


@dataclass(frozen=True)
class Job:
    """The job, as one worker sees it.

    Attributes:
        device: the device that this worker computes on.
        threads: CPU threads of this worker; the bits of CPU kernels depend on it.
        transport: sends messages to the other workers and receives theirs.
        timeout_s: seconds to wait for another process before it counts as lost.

    Example:
        >>> job = Job(torch.device("cpu"))
        >>> job.rank, job.world_size, job.is_first
        (0, 1, True)
    """

    device: torch.device
    threads: int = 1
    transport: Transport = field(default_factory=Alone)
    timeout_s: float = DEFAULT_TIMEOUT_S

    @property
    def rank(self) -> int:
        """This worker's rank, 0 <= rank < world_size; called `worker` in arguments elsewhere."""
        return self.transport.rank

    @property
    def world_size(self) -> int:
        """The number of workers in the job, W."""
        return self.transport.world_size

    @property
    def is_first(self) -> bool:
        """Whether this is worker 0, the one that prints and writes."""
        return self.rank == 0 and not self.is_newcomer

    @cached_property
    def renewable(self) -> Renewable | None:
        """The transport, if workers may be lost and others may join; None if a loss ends the job."""
        return self.transport if isinstance(self.transport, Renewable) else None

    @property
    def is_newcomer(self) -> bool:
        """Whether this worker has not yet joined the others, which are training already."""
        return self.renewable is not None and self.renewable.is_outside()

    def barrier(self, what: str = "barrier") -> None:
        """Wait until all workers call this; raise a `LostWorkerError` if one is gone or silent."""
        gather_rows(
            self.transport, torch.zeros(1, dtype=torch.uint8, device="cpu"), [1] * self.world_size, what
        )

    @property
    def is_closed(self) -> bool:
        """Whether this worker has left the job."""
        return self.transport.is_closed

    def close(self) -> None:
        """Wait until all workers call this, and leave the job; a second call does nothing."""
        if self.is_closed:
            return
        try:
            self.barrier("the end of the job")
        except LostWorkerError:
            if self.renewable is None or not self.renewable.has_finished():
                raise  # otherwise the run is complete, and a loss has no effect
        self.transport.close()


def init(
    device: str = "auto", *, threads: int = 1, tf32: bool = False, timeout_s: float = DEFAULT_TIMEOUT_S
) -> Job:
    """Join the job: read torchrun's environment, choose the device, make kernels deterministic.

    If the program has made torch's process group itself, as under `mp.spawn`, its processes are the workers.
    Without a launcher or such a group this is a job of one worker. Call it once, best before the model is
    built and before anything random: it sets the global generators of torch, `random` and `np.random` to
    worker 0's, so that a program without a seed also draws the same numbers on each worker. (`Towers` copies
    worker 0's weights to all.)

    Args:
        device: "cpu", "cuda" (the GPU of this worker's local rank, shared if there are fewer GPUs than
            workers), or "auto": CUDA if there is a GPU.
        threads: CPU threads. The bits of CPU kernels depend on it, so there is no automatic value.
        tf32: let the GPU round float32 factors to 11 significant bits: faster, with different bits, but still
            the same on any placement. There is a warning if the device does not support it.
        timeout_s: seconds to wait for another worker, or for a loader's processes, before they count as
            lost. Time during which all workers were stopped does not count.

    Returns:
        The job, to pass to `Towers`.

    Raises:
        ConfigError: an unknown device, no GPU for "cuda", threads out of range, an invalid environment, such
            as RANK without WORLD_SIZE, another program at MASTER_PORT, or a process group that does not match
            the launcher's workers.
        LostWorkerError: the workers have not found each other within the timeout.

    Example:
        >>> init("cpu").world_size
        1
    """
    check_threads(threads)
    positive("timeout_s", timeout_s, "in seconds")
    check_environment()
    if imports_script():
        raise ConfigError(
            "init: called while a multiprocessing process, such as a DataLoader's, imports the script: call "
            'it under `if __name__ == "__main__":`'
        )
    chosen = device_named(device, local_rank(default=dist.get_rank() if has_group() else 0))
    torch.set_num_threads(threads)
    if tf32 and not has_tf32(chosen):
        warn(f"tf32=True has no effect on {chosen}: expected a GPU from Ampere on")
    if chosen.type == "cpu":
        keep_freed_memory()
    else:
        make_cuda_deterministic(chosen, tf32=tf32)
    if not (under_launcher() or has_group()):
        warn_if_unranked()
        return Job(chosen, threads, timeout_s=timeout_s)
    if under_launcher() and world_size() > 1:
        note_joined()
    if dist.is_torchelastic_launched():
        end_with_parent(signal.SIGTERM)  # otherwise torchrun's workers outlive a killed launcher
    return Job(chosen, threads, join(chosen, timeout_s), timeout_s)
