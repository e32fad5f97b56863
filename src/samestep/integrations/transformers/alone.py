"""Their Trainer, and Accelerate, see a process without others; the others are known to samestep's job."""

from __future__ import annotations

from functools import cache

import torch
import torch.distributed as dist
from accelerate.utils import DistributedType
from transformers import TrainingArguments

from samestep.workers.environment import local_rank
from samestep.workers.job import Job, init

__all__ = ["join", "work_alone"]


@cache  # a process has one process group
def join(device: str, *, tf32: bool) -> Job:
    """Join the job: over Accelerate's process group, but for one that carries GPU tensors alone."""
    if dist.is_initialized() and "gloo" not in dist.get_backend_config():
        dist.destroy_process_group()
    return init(device, tf32=tf32)


def work_alone(args: TrainingArguments, job: Job) -> None:
    """Let nothing of theirs wrap, shard, gather or divide; the first worker is the one that writes."""
    state = args.distributed_state
    state.distributed_type, state.num_processes = DistributedType.NO, 1
    state.process_index, state.local_process_index = job.rank, local_rank()
    torch.set_num_threads(job.threads)  # Accelerate sets others for each TrainingArguments
    args._n_gpu = min(args._n_gpu, 1)  # no DataParallel
    args.accelerator_config.dispatch_batches = False  # else process 0 alone would read an IterableDataset
