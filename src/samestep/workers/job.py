"""One process's view of the job."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.distributed as dist

from samestep.arguments import positive
from samestep.errors import ConfigError, LostWorkerError, warn
from samestep.workers.collectives import gather_rows
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
from samestep.workers.rendezvous import has_group, join
from samestep.workers.transport import Alone, Renewable, Transport

__all__ = ["Job", "init"]


@dataclass(frozen=True)
class Job:
    """One process's view of the job.

    Attributes:
        device: what this worker computes on.
        threads: CPU threads of this worker; part of what the bits depend on.
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
        """This worker's number, 0 <= rank < world_size; passed on as `worker` elsewhere."""
        return self.transport.rank

    @property
    def world_size(self) -> int:
        """Workers in the job, W."""
        return self.transport.world_size

    @property
    def is_first(self) -> bool:
        """Whether this is worker 0, the one that prints and writes."""
        return self.rank == 0 and not self.is_newcomer

    @cached_property
    def renewable(self) -> Renewable | None:
        """The transport, where workers may be lost and others come; None where a loss ends the job."""
        return self.transport if isinstance(self.transport, Renewable) else None

    @property
    def is_newcomer(self) -> bool:
        """Whether this worker is alone until it joins others that train already."""
        return self.renewable is not None and self.renewable.is_outside()

    def barrier(self, what: str = "barrier") -> None:
        """Wait for all workers; raise a `LostWorkerError` if one is gone or silent."""
        gather_rows(
            self.transport, torch.zeros(1, dtype=torch.uint8, device="cpu"), [1] * self.world_size, what
        )

    @property
    def is_closed(self) -> bool:
        """Whether this worker has left the job."""
        return self.transport.is_closed

    def close(self) -> None:
        """Leave the job, once all workers do; called again, it does nothing."""
        if self.is_closed:
            return
        try:
            self.barrier("end")
        except LostWorkerError:
            if self.renewable is None or not self.renewable.has_finished():
                raise  # otherwise the others have done the lost worker's work
        self.transport.close()


def init(
    device: str = "auto", *, threads: int = 1, tf32: bool = False, timeout_s: float = DEFAULT_TIMEOUT_S
) -> Job:
    """Join the job: read torchrun's environment, pick the device, make kernels deterministic.

    Workers that have made torch's process group themselves, as under `mp.spawn`, are those of the job.
    Without a launcher or such a group this is a job of one worker. Call it once, before the model is built,
    and before anything random: all workers go on from the first one's global generators, those of torch,
    `random` and `np.random`, so that a program without a seed, too, builds the same on each.

    Args:
        device: "cpu", "cuda" (the GPU of this worker's local rank, shared where there are fewer GPUs
            than workers), or "auto": CUDA where there is a GPU.
        threads: CPU threads. The bits of CPU kernels depend on it, so it is never chosen for you.
        tf32: let the GPU multiply float32 numbers that are rounded to 11 significant bits: faster, other
            bits, still the same on any placement. There is a warning where the device has no such products.
        timeout_s: seconds to wait for another worker, or for a loader's processes, before they count as
            lost. Time in which all workers were stopped does not count.

    Returns:
        The job, to be passed to `Towers`.

    Raises:
        ConfigError: an unknown device, no GPU for "cuda", threads out of range, or an environment that no
            launcher makes, such as RANK without WORLD_SIZE, or another program at MASTER_PORT; or a process
            group that is not of the launcher's workers.
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
        end_with_parent(signal.SIGTERM)  # torchrun's workers would outlive a killed launcher
    return Job(chosen, threads, join(chosen, timeout_s), timeout_s)
