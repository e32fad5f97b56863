"""What workers must have alike before their loop and after it, where no step compares it."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import fields
from typing import Any

import transformers
from torch import nn

from samestep.buffers.named_buffers import NamedBuffer, find_named_parameters
from samestep.watching.weight_hash import WeightHash
from samestep.workers.agreement import agree
from samestep.workers.job import Job

__all__ = ["SameWeights", "compare_runs", "hashes_of"]

_MAY_DIFFER = (
    *("output_dir", "run_name", "report_to", "disable_tqdm", "local_rank", "debug", "skip_memory_metrics"),
    *("log_level", "log_level_replica", "log_on_each_node", "logging_dir", "save_total_limit"),
    *("save_on_each_node", "resume_from_checkpoint", "push_to_hub", "project", "do_train", "do_eval"),
    *("do_predict", "dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers"),
    *("dataloader_prefetch_factor", "dataloader_multiprocessing_context", "accelerator_config"),
)
_PREFIXES = ("hub_", "ddp_", "trackio_")


def compare_runs(job: Job, args: transformers.TrainingArguments, train_dataset: Any) -> None:
    """Raise on all workers where one has other arguments than the others, or another number of rows.

    A step would find the most of it, but not what changes each tower's loss, such as label smoothing; and
    where the one saves, and the other does not, it would not say why.
    """
    names = [field.name for field in fields(transformers.TrainingArguments)]
    compared = [name for name in names if name not in _MAY_DIFFER and not name.startswith(_PREFIXES)]
    found = args.to_dict()
    rows = len(train_dataset) if isinstance(train_dataset, Sized) else None
    same = {"argument": {name: repr(found.get(name)) for name in compared}, "rows of train_dataset": rows}
    agree(job, same, where="train")


class SameWeights(transformers.TrainerCallback):  # type: ignore[misc]
    """Raises on all workers where training ends with other weights on one of them.

    A step compares some of the weights of the step before. After the last one, a callback may have written to
    them, or another checkpoint may be the best one.
    """

    def __init__(self, job: Job) -> None:
        self._job = job

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Compare them."""
        if self._job.world_size > 1:
            agree(self._job, {"hash of the weights in": hashes_of(model)}, where="the end of training")


def hashes_of(model: nn.Module) -> dict[str, list[int]]:
    """Return hashes of all parameters, by name."""
    held = list(filter(_has_memory, find_named_parameters(model)))
    hashes: dict[str, list[int]] = {}
    for piece in WeightHash(held, (), ()).of_all():
        for name, value in piece.items():
            hashes.setdefault(name, []).append(value)
    return hashes


def _has_memory(place: NamedBuffer) -> bool:
    """Whether a parameter's bytes can be read; those of other classes may have no memory of their own."""
    parameter = place.get()
    return type(parameter) is nn.Parameter and not parameter.is_meta
