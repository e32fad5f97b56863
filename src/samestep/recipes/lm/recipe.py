"""A small GPT on bytes: by default, on the source files of Python's standard library.

Ends with the bits per byte on held-out files, compared with `xz -9`, and with a sample of text.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from samestep.app.evaluation import Evaluation
from samestep.app.trainer import Trainer
from samestep.data.loader import TowerLoader
from samestep.errors import ConfigError
from samestep.recipes.lm.data import IGNORED, Windows, fingerprint, open_tokens
from samestep.recipes.lm.held_out import HeldOut
from samestep.recipes.lm.library import BORDER, read_library
from samestep.recipes.lm.model import GPT, Sizes
from samestep.recipes.lm.sample import Sample
from samestep.recipes.lm.settings import LmSettings
from samestep.sharding.sharded_optimizer import ShardedOptimizer
from samestep.streams import stream_seed
from samestep.towers.losses import LossSum
from samestep.towers.step import Step
from samestep.towers.towers import Towers
from samestep.workers.agreement import agree
from samestep.workers.job import Job

__all__ = ["GPT", "LmSettings"]

_EVALUATED_TOKENS = 4096


def build(settings: LmSettings, job: Job) -> Trainer:
    """Build the training run."""
    train, held_out = (_open(settings, split) for split in ("train", "val"))
    check_same(train, held_out, job)
    step = _make_step(settings, job)
    loader = TowerLoader(train, settings.batch_size, step.towers, seed=settings.seed)
    rows = max(1, _EVALUATED_TOKENS // settings.context)
    metrics = HeldOut(held_out, settings.is_of_bytes)
    evaluation = Evaluation(held_out, nats_of, metrics=metrics, rows=rows)
    sample = Sample(held_out.border or 0, settings.sample, settings.seed)
    has_sample = settings.is_of_bytes and settings.sample > 0
    return settings.trainer(step, loader, evaluate=evaluation, callbacks=[sample] if has_sample else [])


def _open(settings: LmSettings, split: Literal["train", "val"]) -> Windows:
    options = {"vocabulary": settings.vocabulary}
    if settings.data_dir is None:
        name = "the standard library"
        return Windows(read_library(split), settings.context, border=BORDER, name=name, **options)
    path = settings.data_dir / f"{split}.bin"
    stream = open_tokens(path, settings.token_dtype)
    return Windows(stream, settings.context, border=settings.document_end, name=str(path), **options)


def check_same(train: Windows, held_out: Windows, job: Job) -> None:
    """Raise an error on all workers unless they have the same tokens."""
    same = {"tokens to train on": train, "held-out tokens": held_out}
    agree(job, {name: fingerprint(windows.stream) for name, windows in same.items()}, where="data")


def _make_step(settings: LmSettings, job: Job) -> Step:
    torch.manual_seed(stream_seed(settings.seed, "weights"))
    sizes = Sizes(**{field.name: getattr(settings, field.name) for field in fields(Sizes)})
    model = GPT(sizes).to(job.device)
    if settings.compile:
        _check_compiler(job)
        model.compile(dynamic=False)  # compile each shape by itself: the same code on every placement
    towers = Towers(model, settings.towers, job=job, seed=settings.seed, placement=settings.placement)
    groups = groups_of(model, settings)
    make = partial(ShardedOptimizer, towers, AdamW) if settings.shard_optimizer else AdamW
    optimizer = make(groups, lr=settings.learning_rate, betas=(0.9, 0.95), fused=True)
    return Step(
        towers,
        loss_of,
        optimizer,
        clip_norm=settings.clip_norm,
        scheduler=LambdaLR(optimizer, partial(cosine, warmup=settings.warmup, steps=settings.steps)),
        autocast=settings.autocast_dtype,
    )


def _check_compiler(job: Job) -> None:
    names = [os.environ["CXX"]] if "CXX" in os.environ else ["g++", "clang++"]
    if job.device.type == "cpu" and not any(map(shutil.which, names)):
        raise ConfigError(
            f"--compile: no C++ compiler found ({' or '.join(names)}); install one, name it in CXX, or leave "
            "--compile out"
        )


def groups_of(model: GPT, settings: LmSettings) -> list[dict[str, Any]]:
    """Return parameter groups for an optimizer: embeddings, other matrices, and the rest.

    Embeddings have a higher learning rate, as each gets a gradient in few steps. Only matrices decay.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Embedding)]
    embeddings = [layer.weight for layer in layers if layer.weight is not model.head.weight]
    others = [p for p in model.parameters() if not any(p is weight for weight in embeddings)]
    return [
        {"params": embeddings, "lr": settings.learning_rate * settings.embedding_rate, "weight_decay": 0.0},
        {"params": [p for p in others if p.ndim > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in others if p.ndim <= 1], "weight_decay": 0.0},
    ]


def cosine(step: int, *, warmup: int, steps: int) -> float:
    """Return the learning rate of a step, counted from 0, as a fraction of the highest.

    >>> [round(cosine(step, warmup=2, steps=6), 3) for step in range(7)]
    [0.5, 1.0, 1.0, 0.854, 0.5, 0.146, 0.0]
    """
    if step < warmup:
        return (step + 1) / warmup
    return (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, steps - warmup)))) / 2


def loss_of(model: nn.Module, batch: Any) -> LossSum:
    """Return the cross-entropy summed over the tokens that count, and their number."""
    inputs, targets, starts = batch
    logits = model(inputs, starts).flatten(0, 1)
    total = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return LossSum(total, (targets != IGNORED).sum())


def nats_of(model: nn.Module, batch: Any) -> Mapping[str, tuple[Tensor, Tensor]]:
    """Return the same for held-out tokens, summed in float64."""
    inputs, targets, starts = batch
    logits = model(inputs, starts).flatten(0, 1)
    nats = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="none")
    return {"nats": (nats.double().sum(), (targets != IGNORED).sum())}
