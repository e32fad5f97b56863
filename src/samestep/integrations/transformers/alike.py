"""Comparisons of the workers before and after training, for what no step compares."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import fields
from typing import Any

import transformers

from samestep.watching.weight_hash import WeightHash
from samestep.workers.agreement import agree
from samestep.workers.job import Job

__all__ = ["SameWeights", "compare_runs"]

_MAY_DIFFER = (
    *("output_dir", "run_name", "report_to", "disable_tqdm", "local_rank", "debug", "skip_memory_metrics"),
    *("log_level", "log_level_replica", "log_on_each_node", "logging_dir", "save_total_limit"),
    *("save_on_each_node", "resume_from_checkpoint", "push_to_hub", "project", "do_train", "do_eval"),
    *("do_predict", "dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers"),
    *("dataloader_prefetch_factor", "dataloader_multiprocessing_context", "accelerator_config"),
)
_PREFIXES = ("hub_", "ddp_", "trackio_")


def compare_runs(job: Job, args: transformers.TrainingArguments, train_dataset: Any) -> None:
    """Raise on all workers if arguments or the number of rows differ between workers.

    Steps find most differences, but not those in a tower's loss, such as label smoothing. If one worker saves
    a checkpoint and another does not, the error in the next step would not name the reason.
    """
    names = [field.name for field in fields(transformers.TrainingArguments)]
    compared = [name for name in names if name not in _MAY_DIFFER and not name.startswith(_PREFIXES)]
    found = args.to_dict()
    rows = len(train_dataset) if isinstance(train_dataset, Sized) else None
    same = {"argument": {name: repr(found.get(name)) for name in compared}, "rows of train_dataset": rows}
    agree(job, same, where="train")


class SameWeights(transformers.TrainerCallback):  # type: ignore[misc]
    """Raises on all workers if training ends with different weights on one of them.

    Each step compares a part of the weights. After the last step, a callback may have written to the weights,
    or workers may have loaded different best checkpoints.
    """

    def __init__(self, job: Job) -> None:
        self._job = job

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Compare the weights."""
        if self._job.world_size > 1:
            hashes = WeightHash.of_parameters(model).by_name()
            agree(self._job, {"hash of the weights in": hashes}, where="the end of training")
