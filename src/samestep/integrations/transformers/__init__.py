"""Hugging Face's `transformers.Trainer` with towers: the same bits on any number of workers."""

from __future__ import annotations

try:
    from samestep.integrations.transformers.not_public import NOT_PUBLIC
    from samestep.integrations.transformers.trainer import Trainer
except ModuleNotFoundError as error:
    if error.name not in ("accelerate", "transformers"):
        raise
    raise ModuleNotFoundError(
        f"samestep.integrations.transformers needs {error.name}: pip install 'samestep[transformers]'",
        name=error.name,
    ) from None

__all__ = ["NOT_PUBLIC", "Trainer"]
