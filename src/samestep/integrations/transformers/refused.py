"""Errors for options of `TrainingArguments` and overrides of `transformers.Trainer` that towers rule out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

import transformers
from torch.utils.data import IterableDataset
from transformers import TrainingArguments

from samestep.errors import ConfigError

__all__ = ["check_arguments", "check_order", "check_overrides"]

_OWNED = {
    "get_train_dataloader": "a samestep.TowerLoader reads the rows: override create_loader",
    "get_batch_samples": "a samestep.TowerLoader reads the rows: override create_loader",
    "_get_train_sampler": "the order depends on seed and epoch alone: use args.train_sampling_strategy",
}

_HIDDEN = {
    "training_step": "one call runs all towers of a worker: override compute_loss, which is called for each",
    "get_total_train_batch_size": "it is towers times per_device_train_batch_size",
}
"""What ours does without asking the next class, which counts where that class comes after ours."""


def check_overrides(found: type, ours: type) -> None:
    """Refuse classes that override methods without effect here."""
    place = found.__mro__.index(ours)
    later = found.__mro__[place + 1 : found.__mro__.index(transformers.Trainer)]
    owned = dict.fromkeys(found.__mro__[:place], _OWNED) | dict.fromkeys(later, _OWNED | _HIDDEN)
    for cls, names in owned.items():
        for name in sorted(names.keys() & vars(cls).keys()):
            raise ConfigError(f"{cls.__name__}.{name} has no effect with towers: {names[name]}")


def check_order(found: type, ours: type) -> None:
    """Refuse classes of transformers before ours: they would evaluate on each worker by itself."""
    for cls in found.__mro__[: found.__mro__.index(ours)]:
        if cls.__module__.startswith("transformers."):
            raise ConfigError(
                f"class {found.__name__}: {cls.__name__} comes before samestep's {ours.__name__}: expected "
                f"class {found.__name__}({ours.__name__}, {cls.__name__})"
            )


def check_arguments(args: TrainingArguments, model: Any, train_dataset: Any, towers: int) -> None:
    """Refuse arguments that would change the towers' average, or have no effect."""
    steps = args.gradient_accumulation_steps
    if steps != 1:
        raise ConfigError(
            f"gradient_accumulation_steps = {steps}: expected 1, as a worker runs its towers one after the "
            f"other anyway; for batches {steps} times as large, pass towers={towers * steps}"
        )
    for name, is_right, expected in _EXPECTED:
        value = attrgetter(name)(args)
        if not is_right(value):
            raise ConfigError(f"{name} = {value!r} cannot be used with towers: expected {expected}")
    for what in _sharded(args, model):
        raise ConfigError(f"{what}: towers average whole gradients; expected a whole model on each worker")
    if isinstance(train_dataset, IterableDataset):
        raise ConfigError(
            f"train_dataset is an IterableDataset ({type(train_dataset).__name__}): expected a map-style "
            "dataset, with __len__ and __getitem__"
        )


def _one_of(*values: object) -> Callable[[Any], bool]:
    return lambda value: value in values


_EXPECTED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("auto_find_batch_size", _one_of(False), "False: the batch size is part of the experiment"),
    ("train_sampling_strategy", _one_of("random", "sequential"), "'random' or 'sequential'"),
    ("include_num_input_tokens_seen", _one_of("no", False), "'no'; see trainer.report.count"),
    ("batch_eval_metrics", _one_of(False), "False: metrics of all predictions at once"),
    ("ignore_data_skip", _one_of(False), "False: a run that is resumed goes on in the data where it was"),
    ("accelerator_config.split_batches", _one_of(False), "False: per_device_train_batch_size is a tower's"),
    (
        "accelerator_config.gradient_accumulation_kwargs",
        lambda options: (options or {}).get("num_steps", 1) == 1,
        "num_steps of 1, as a worker runs its towers one after the other anyway",
    ),
    ("dataloader_in_order", _one_of(True), "True: batches always come in order"),
    ("enable_jit_checkpoint", _one_of(False), "False: all workers must stop after the same step"),
    ("torch_compile", _one_of(False), "False; it has not been seen to end in the same bits"),
    ("torch_empty_cache_steps", _one_of(None), "None"),
    ("optim", lambda optim: "lomo" not in str(optim).lower(), "one that takes averaged gradients"),
)


def _sharded(args: TrainingArguments, model: Any) -> Iterator[str]:
    """Yield what would shard the model or average gradients on its own, for the error message."""
    for name in ("deepspeed", "fsdp", "parallelism_config"):
        if getattr(args, name):
            yield f"{name} = {getattr(args, name)!r}"
    kind = args.distributed_state.distributed_type.value
    if kind not in ("NO", "MULTI_CPU", "MULTI_GPU"):
        yield f"accelerate's distributed type {kind}"
    if len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1:
        yield "a model on several devices (hf_device_map)"
    if (getattr(model, "_tp_size", None) or 1) > 1:
        yield "a tensor-parallel model"
