"""Every worker's copy of the model: fit to be trained, the same structure, and worker 0's values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from samestep.buffers.policies import Rule, assign_rules
from samestep.buffers.slots import find_slots
from samestep.buffers.statistics import Mode, check_norms
from samestep.errors import ConfigError, Error
from samestep.summation.placement import Placement
from samestep.summation.sparse import find_sparse
from samestep.workers.agreement import agree
from samestep.workers.job import Job

__all__ = ["agree_on_setup", "job_alone", "start_from_first_worker"]


def job_alone(model: nn.Module) -> Job:
    """Return the job of this process alone, on the model's device.

    Raises:
        ConfigError: there are several workers.
    """
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise ConfigError("job is missing: there are several workers, so pass job=samestep.init()")
    parameter = next(model.parameters(), None)
    return Job(torch.device("cpu") if parameter is None else parameter.device)


def agree_on_setup(
    model: nn.Module,
    num_towers: int,
    job: Job,
    settings: Mapping[str, Any],
    sparse_parameters: Sequence[nn.Parameter] = (),
) -> Placement:
    """Check the model and the settings on every worker, then that they are the same on all.

    Args:
        model: to be trained.
        num_towers: T.
        job: all its workers must call this.
        settings: what must be the same everywhere; among it `statistics` and `buffers`, as for `Towers`.
        sparse_parameters: as for `Towers`.

    Raises:
        ConfigError: T or W is out of range, or the model cannot be trained.
        DisagreementError: a worker differs, or failed its checks.
    """
    error: Error | None = None
    placement = Placement(1, 1)
    sparse: list[str] = []
    try:
        _check_model(model, job)
        _check_buffers(model, job, settings["statistics"], settings["buffers"])
        sparse = find_sparse(model, sparse_parameters)
        placement = Placement(num_towers, job.world_size)
    except Error as found:
        error = found
    tensors = [] if error is not None else _describe(model)
    rules = list(settings["buffers"].items())  # because their order counts
    values = {**settings, "buffers": rules, "model": tensors, "sparse parameters": sparse}
    agree(job, values, where="Towers", error=error)
    return placement


def _describe(model: nn.Module) -> list[str]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return [f"{n} {tuple(t.shape)} {t.dtype} requires_grad={t.requires_grad}" for n, t in named]


def _check_model(model: nn.Module, job: Job) -> None:
    _check_tensors("parameter", model.named_parameters(), job)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            f"{type(model).__name__} has no parameter that requires grad: there is nothing to train"
        )


def _check_buffers(model: nn.Module, job: Job, statistics: Mode, rules: Mapping[str, Rule]) -> None:
    _check_tensors("buffer", model.named_buffers(), job)
    check_norms(model, statistics)
    assign_rules(find_slots(model), rules)


def _check_tensors(kind: str, named: Iterable[tuple[str, Tensor]], job: Job) -> None:
    for name, tensor in named:
        if nn.parameter.is_lazy(tensor):
            raise ConfigError(f"{kind} {name} has no shape yet: run the model once before making Towers")
        if tensor.device != job.device:
            raise ConfigError(
                f"{kind} {name} is on {tensor.device}, the worker's device is {job.device}: "
                "call model.to(job.device) first"
            )


def start_from_first_worker(model: nn.Module, job: Job) -> None:
    """Give every worker the tensors of worker 0, as DistributedDataParallel does."""
    if job.world_size == 1:
        return
    for tensor in (*model.parameters(), *model.buffers()):
        with torch.no_grad(), job.together("Towers"):
            values = tensor.detach().contiguous()
            dist.broadcast(values.reshape(-1).view(torch.uint8), 0)  # no backend knows all dtypes
            tensor.copy_(values)
