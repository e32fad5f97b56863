"""Seconds per step of samestep's Trainer for transformers and of transformers' own, on one worker.

Both train the same small Llama on the same rows, with one CPU thread: transformers' by gradient accumulation
over T batches, samestep's with T towers on the same rows. Rounds alternate between the two.

    python benchmarks/transformers_trainer.py
"""

import argparse
import statistics
import tempfile
import time
from typing import Any

import torch
import transformers

from samestep.integrations.transformers import Trainer

TOWERS = 4


class Clock(transformers.TrainerCallback):  # type: ignore[misc]
    """Records how long each step takes."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *_: object, **__: object) -> None:
        """Start."""
        self.begin_s = time.perf_counter()

    def on_step_end(self, *_: object, **__: object) -> None:
        """Stop."""
        self.seconds.append(time.perf_counter() - self.begin_s)


def seconds_per_step(
    kind: Any,
    options: dict[str, int],
    sizes: dict[str, int],
    num_steps: int,
    rows: list[dict[str, list[int]]],
) -> list[float]:
    """Train a new model; return how long each step took, without the first two."""
    transformers.set_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        args = transformers.TrainingArguments(
            folder,
            max_steps=num_steps,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=1 if options else TOWERS,
            use_cpu=True,
            **{"report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no"},
        )
        trainer = kind(model, args, train_dataset=rows, callbacks=[clock], **options)
        torch.set_num_threads(1)
        trainer.train()
    return clock.seconds[2:]


def main() -> None:
    """Train with each in turn, and print the times."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--words", type=int, default=128, help="in each row")
    given = parser.parse_args()
    sizes = {
        "vocab_size": 4096,
        "hidden_size": given.hidden_size,
        "intermediate_size": 3 * given.hidden_size,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    }
    words = torch.randint(4096, (512, given.words), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [{"input_ids": each, "labels": each} for each in words]
    kinds: dict[str, tuple[Any, dict[str, int]]] = {
        "theirs": (transformers.Trainer, {}),
        "samestep": (Trainer, {"towers": TOWERS}),
    }
    found: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(given.rounds):
        for name, (kind, options) in kinds.items():
            found[name] += seconds_per_step(kind, options, sizes, given.steps, rows)
    for name, seconds in found.items():
        low, middle, high = statistics.quantiles(seconds, n=4)
        print(f"{name}: {1e3 * middle:.1f} ms a step (quartiles {1e3 * low:.1f} to {1e3 * high:.1f})")
    ratio = statistics.median(found["samestep"]) / statistics.median(found["theirs"])
    fastest = min(found["samestep"]) / min(found["theirs"])
    print(f"samestep / theirs: {ratio:.3f} by medians, {fastest:.3f} by the fastest of {len(seconds)} steps")


if __name__ == "__main__":
    main()
