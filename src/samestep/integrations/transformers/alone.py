"""Hides the other workers from transformers and Accelerate: only samestep's job knows them."""

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
    """Join the job over Accelerate's process group; replace a group without gloo, which CPU tensors need."""
    if dist.is_initialized() and "gloo" not in dist.get_backend_config():
        dist.destroy_process_group()
    return init(device, tf32=tf32)


def work_alone(args: TrainingArguments, job: Job) -> None:
    """Let transformers not wrap, shard, gather or divide anything; only worker 0 writes files."""
    state = args.distributed_state
    state.distributed_type, state.num_processes = DistributedType.NO, 1
    state.process_index, state.local_process_index = job.rank, local_rank()
    torch.set_num_threads(job.threads)  # Accelerate changes the number for each TrainingArguments
    args._n_gpu = min(args._n_gpu, 1)  # no DataParallel
    args.accelerator_config.dispatch_batches = False  # or only process 0 would read an IterableDataset
