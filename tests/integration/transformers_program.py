"""Train small models with `samestep.integrations.transformers`, and print what each run ends in.

python transformers_program.py FOLDER [CHECKPOINT]: with CHECKPOINT, go on from there and train nothing else.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import peft
import torch

from samestep import digest
from tests.small_language import gpt2, llama, sentences, trainer_of


class Stream(torch.utils.data.IterableDataset):
    """Sentences without a number of them."""

    def __iter__(self):
        return iter(sentences(27, seed=1))


def metrics(predictions):
    right = predictions.predictions[:, :-1] == predictions.label_ids[:, 1:]
    return {"right": int(right.sum()), "rows": len(predictions.predictions)}


def run(name, model, folder, checkpoint=None, **more):
    """Train with evaluations; in these, 27 sentences are four batches, the last one short."""
    evaluation = {"eval_dataset": sentences(27, seed=1), "eval_strategy": "epoch", "compute_metrics": metrics}
    trainer = trainer_of(model, folder / name, **evaluation | more, num_train_epochs=2)
    trainer.preprocess_logits_for_metrics = lambda logits, labels: logits.argmax(-1)
    trainer.train(resume_from_checkpoint=checkpoint)
    timeless = [
        sorted((key, value) for key, value in logs.items() if not key.endswith(("runtime", "_per_second")))
        for logs in trainer.state.log_history[:-1]  # the last tells of this call alone
    ]
    if trainer.is_world_process_zero():
        print(
            name, digest(trainer.model), timeless, trainer.state.best_model_checkpoint is not None, flush=True
        )


def main(folder, *checkpoint):
    torch.manual_seed(0)
    saving = {"save_strategy": "epoch", "load_best_model_at_end": True, "metric_for_best_model": "right"}
    run("saved", gpt2(dropout=0.1), Path(folder), *checkpoint, **saving)
    if not checkpoint:
        lora = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
        adapted = peft.get_peft_model(llama(attention_dropout=0.1), lora)
        run("lora", adapted, Path(folder), activation_checkpointing=True)
        run(
            "bf16",
            llama(attention_dropout=0.1),
            Path(folder),
            bf16=True,
            neftune_noise_alpha=5.0,
            eval_dataset=Stream(),
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
