"""Comparisons of the workers before and after training, for what no step compares."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import contextmanager, suppress
from dataclasses import fields
from itertools import chain
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from samestep.buffers.named_tensors import find_named_buffers, find_named_parameters
from samestep.buffers.policies import Policy, assign_policies
from samestep.errors import Error, one_line
from samestep.watching.model.weight_hash import WeightHash
from samestep.workers.agreement import agree
from samestep.workers.collectives import gather_rows
from samestep.workers.job import Job

__all__ = ["SameWeights", "compare_runs", "nets_beside", "raising_together", "share_error", "weights_of"]

_MAY_DIFFER = (
    *("output_dir", "run_name", "report_to", "disable_tqdm", "local_rank", "debug", "skip_memory_metrics"),
    *("log_level", "log_level_replica", "log_on_each_node", "logging_dir", "save_total_limit"),
    *("save_on_each_node", "resume_from_checkpoint", "push_to_hub", "project", "do_train", "do_eval"),
    *("do_predict", "dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers"),
    *("dataloader_prefetch_factor", "dataloader_multiprocessing_context", "accelerator_config"),
)
_PREFIXES = ("hub_", "ddp_", "trackio_")


def compare_runs(
    job: Job,
    args: transformers.TrainingArguments,
    train_dataset: Any,
    nets: Mapping[str, nn.Module] | None = None,
    *,
    message: Any = None,
) -> list[Any]:
    """Raise on all workers if arguments, the number of rows, or nets beside the model differ between workers.

    Steps find most differences, but not those in a tower's loss, such as label smoothing. If one worker saves
    a checkpoint and another does not, the error in the next step would not name the reason.

    Returns:
        The workers' messages.
    """
    names = [field.name for field in fields(transformers.TrainingArguments)]
    compared = [name for name in names if name not in _MAY_DIFFER and not name.startswith(_PREFIXES)]
    found = args.to_dict()
    rows = len(train_dataset) if isinstance(train_dataset, Sized) else None
    same = {"argument": {name: repr(found.get(name)) for name in compared}, "rows of train_dataset": rows}
    if job.world_size > 1:
        hashes = [_hashes_of(net, {}, f"{name}.") for name, net in (nets or {}).items()]
        same |= _compared(dict(chain.from_iterable(each.items() for each in hashes)))
    return agree(job, same, where="train", message=message)


def nets_beside(model: Any, attributes: Mapping[str, Any]) -> dict[str, nn.Module]:
    """Return the nets among an object's attributes that share no parameter with the model."""
    own = set() if model is None else set(map(id, model.parameters()))
    nets = {name: value for name, value in attributes.items() if isinstance(value, nn.Module)}
    return {name: net for name, net in nets.items() if own.isdisjoint(map(id, net.parameters()))}


@contextmanager
def raising_together(job: Job, same: Mapping[str, Any], *, where: str) -> Iterator[None]:
    """Raise on all workers if this block raises on one of them, or if the values in `same` differ."""
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    agree(job, same, where=where, error=error)


def share_error(error: Exception, job: Job) -> None:
    """Name an error of this worker to the others, whose next call then differs from the one made here.

    If all workers have the same error, such as a missing metric, all make this call, and nothing happens.
    """
    if isinstance(error, Error):  # usually raised on all workers
        return
    what = one_line(f"the end of training by {type(error).__name__}: {error}")
    with suppress(Error):
        gather_rows(
            job.transport, torch.zeros(1, dtype=torch.uint8, device="cpu"), [1] * job.world_size, what
        )


_WEIGHTS = "hash of the weights in"
_REMEDY = (
    "expected the same weights: set the seed before a model is made, and change weights and layers on all "
    "workers alike, as in a callback that merges adapters or casts the model; what worker 0 alone should "
    "save, it may change after the last evaluation"
)


def weights_of(model: nn.Module, policies: Mapping[str, Policy] | None = None) -> dict[str, Any]:
    """Return hashes of a model for `agree`: of all entries of `state_dict`, except ignored buffers.

    Parameters of other classes than `nn.Parameter` are left out: they may have no memory of their own.
    """
    return _compared(_hashes_of(model, policies or {}))


def _compared(hashes: Mapping[str, int]) -> dict[str, Any]:
    return {_WEIGHTS: hashes, f"?{_WEIGHTS}: {_REMEDY}": zlib.crc32(repr(hashes).encode())}


def _hashes_of(net: nn.Module, policies: Mapping[str, Policy], prefix: str = "") -> dict[str, int]:
    buffers = find_named_buffers(net)
    assigned = assign_policies(buffers, policies)
    kept = [each for each in buffers if each.is_persistent and assigned.get(each.name) != "ignore"]
    places = [each for each in (*find_named_parameters(net), *kept) if _has_memory(each.get())]
    return {f"{prefix}{name}": value for name, value in WeightHash(places, (), ()).by_name().items()}


def _has_memory(tensor: Tensor | None) -> bool:
    if tensor is None or type(tensor) not in (nn.Parameter, Tensor):
        return False
    return tensor.layout == torch.strided and not tensor.is_meta


class SameWeights(transformers.TrainerCallback):  # type: ignore[misc]
    """Raises on all workers if training ends with different weights on one of them.

    Each step compares a part of the weights. After the last step, a callback may have written to the weights,
    or workers may have loaded different best checkpoints.

    Args:
        job: this worker's job.
        policies: returns the policies of the model's buffers.
    """

    def __init__(self, job: Job, policies: Callable[[], Mapping[str, Policy]] = dict) -> None:
        self._job = job
        self._policies = policies

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Compare the weights."""
        if self._job.world_size > 1:
            agree(self._job, weights_of(model, self._policies()), where="the end of training")
