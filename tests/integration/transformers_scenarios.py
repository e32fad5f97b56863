"""Programs that their Trainer's users write, one after the other in one job; workers print what comes of it.

python transformers_scenarios.py FOLDER [NAMES]
"""

import os
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import peft
import torch
import torch.distributed as dist
from transformers import (
    EarlyStoppingCallback,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    TrainerCallback,
    set_seed,
)

from samestep import Error, digest
from samestep.integrations.transformers import Trainer
from tests.small_language import QUIET, collate, gpt2, llama, sentences, trainer_of

RANK, NUM_WORKERS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
LAST = NUM_WORKERS - 1
SCENARIOS = {}


def scenario(function):
    SCENARIOS[function.__name__] = function
    return function


def model(make=gpt2, **more):
    torch.manual_seed(0)
    return make(**more)


def outcome(trainer):
    """Return what must not depend on the number of workers."""
    logs = [
        sorted((key, value) for key, value in logs.items() if not key.endswith(("runtime", "_per_second")))
        for logs in trainer.state.log_history
    ]
    return digest(trainer.model), trainer.state.global_step, logs[:-1], sorted(logs[-1])[:1]


class Ask(TrainerCallback):
    """Asks for something upon one event, on the last worker alone."""

    def __init__(self, event, flag, step):
        def ask(args, state, control, **_):
            if RANK == LAST and state.global_step == step:
                setattr(control, flag, True)

        setattr(self, event, ask)


def asking(folder, event, flag, step=1, **more):
    with_evaluation = {"eval_dataset": sentences(9), "num_train_epochs": 2, "logging_steps": 2}
    trainer = trainer_of(model(), folder, callbacks=[Ask(event, flag, step)], **with_evaluation | more)
    trainer.train()
    return outcome(trainer), sorted(each.name for each in folder.glob("checkpoint-*"))


@scenario
def a_step_that_one_worker_lets_be_the_last(folder):
    return asking(folder, "on_step_end", "should_training_stop")


@scenario
def an_epoch_that_one_worker_stops(folder):
    return asking(folder, "on_step_end", "should_epoch_stop")


@scenario
def a_checkpoint_that_one_worker_wants(folder):
    return asking(folder, "on_epoch_end", "should_save", step=3)


@scenario
def an_evaluation_and_a_log_that_one_worker_wants(folder):
    return asking(folder, "on_step_end", "should_evaluate"), asking(folder, "on_step_end", "should_log")


@scenario
def training_that_one_worker_stops_after_a_log(folder):
    return asking(folder, "on_log", "should_training_stop", logging_steps=1)


@scenario
def early_stopping_on_one_worker(folder):
    evaluation = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss"}
    saving = {"save_strategy": "steps", "save_steps": 1, "load_best_model_at_end": True}
    stopping = [EarlyStoppingCallback(1)] if RANK == LAST else []
    options = evaluation | saving | {"eval_dataset": sentences(9), "learning_rate": 1.0}
    trainer = trainer_of(model(), folder, num_train_epochs=4, callbacks=stopping, **options)
    trainer.train()
    return outcome(trainer)


class AtEnd(TrainerCallback):
    """Changes the model on worker 0 as training ends."""

    def __init__(self, change):
        self.change = change

    def on_train_end(self, args, state, control, model, **_):
        if RANK == 0:
            self.change(model)


@scenario
def weights_that_worker_0_alone_casts_or_merges_at_the_end(folder):
    lora = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], init_lora_weights=False)
    merged = peft.get_peft_model(model(llama), lora)
    casts, merges = AtEnd(lambda model: model.half()), AtEnd(lambda model: model.merge_adapter())
    found = []
    for each, change in ((model(), casts), (merged, merges)):
        trainer = trainer_of(each, folder, sentences(9), callbacks=[change], eval_dataset=sentences(9))
        trainer.train()
        trainer.save_model(str(folder / "saved"))
        found.append(RANK > 0 or any((folder / "saved").glob("*.safetensors")))
        try:
            trainer.evaluate()
        except Error as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


@scenario
def a_setting_that_is_refused_on_one_worker(folder):
    more = {"gradient_accumulation_steps": 4} if RANK == LAST else {}
    trainer_of(model(), folder, **more).train()


@scenario
def an_argument_that_theirs_refuses_on_one_worker(folder):
    more = {"eval_strategy": "steps"} if RANK == LAST else {}
    trainer_of(model(), folder, **more).train()


@scenario
def a_checkpoint_that_one_worker_does_not_have(folder):
    saving = {"save_strategy": "steps", "save_steps": 1}
    trainer = trainer_of(model(), folder, sentences(9), **saving)
    trainer.train()
    trainer.job.barrier()
    checkpoint = folder / ("nowhere" if RANK == LAST else "checkpoint-1")
    trainer_of(model(), folder / "on", sentences(9), **saving).train(resume_from_checkpoint=str(checkpoint))


@scenario
def a_state_that_one_worker_does_not_have(folder):
    saving = {"save_strategy": "steps", "save_steps": 1}
    trainer = trainer_of(model(), folder, sentences(30), **saving)
    trainer.train()
    trainer.job.barrier()
    checkpoint = folder / "checkpoint-1"
    if RANK == LAST:
        checkpoint = shutil.copytree(checkpoint, folder / "copy")
        (checkpoint / "samestep.json").unlink()
    trainer_of(model(), folder / "on", sentences(30), **saving).train(resume_from_checkpoint=str(checkpoint))


class Generating(Trainer, Seq2SeqTrainer):
    """What a program that summarises or translates writes."""


@scenario
def a_sequence_to_sequence_model_that_generates(folder):
    size = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    ends = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    net = model(lambda: T5ForConditionalGeneration(T5Config(vocab_size=32, **size, **ends)))
    rows = [{**row, "labels": row["input_ids"][::-1][:8]} for row in sentences(30)]
    generating = {"predict_with_generate": True, "generation_max_length": 6, "eval_strategy": "epoch"}
    args = Seq2SeqTrainingArguments(str(folder), per_device_eval_batch_size=4, **QUIET | generating)
    set_seed(0)
    of_sum = lambda found: {"sum": int(found.predictions.sum())}  # noqa: E731
    trainer = Generating(net, args, collate, rows, towers=7, eval_dataset=rows[:9], compute_metrics=of_sum)
    trainer.train()
    predicted = (
        trainer.predict(rows[:9], max_length=5, num_beams=2),
        trainer.predict(rows[:9], do_sample=True),
    )
    return outcome(trainer), [each.predictions.tolist() for each in predicted]


class Reducing(Trainer):
    def compute_loss(self, *arguments, **options):
        loss = super().compute_loss(*arguments, **options)
        dist.all_reduce(loss.detach().clone()) if dist.is_initialized() else None
        return loss


@scenario
def a_loss_that_calls_torch_distributed(folder):
    trainer_of(model(), folder, kind=Reducing).train()


class Raise(TrainerCallback):
    def on_epoch_begin(self, args, state, control, **_):
        if RANK == LAST:
            raise KeyError("a callback broke")


@scenario  # the last one: messages do not fit together any more
def a_callback_that_raises_on_one_worker(folder):
    trainer_of(model(), folder, callbacks=[Raise()]).train()


def main(folder, *names):
    for name in names or SCENARIOS:
        try:
            found = SCENARIOS[name](Path(folder, name))
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
        print(name, found, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
