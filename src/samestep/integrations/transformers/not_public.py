"""Undocumented parts of transformers that this package uses, and what for."""

from __future__ import annotations

__all__ = ["NOT_PUBLIC"]

NOT_PUBLIC = {
    "Trainer._get_num_items_in_batch": "overridden: a loss is divided by what count_items returns",
    "Trainer._prepare_inputs": "called for each tower, because programs override it",
    "Trainer._save_optimizer_and_scheduler": "overridden: a checkpoint also gets the towers' state",
    "Trainer._load_optimizer_and_scheduler": "overridden: reads that state, before the loop reads data",
    "Trainer._save_rng_state": "overridden: worker 0 alone writes the file",
    "Trainer.save_model(_internal_call)": "overridden: workers wait for a checkpoint's weights",
    "TrainingArguments._n_gpu": "set to 1: no DataParallel around the model",
}
