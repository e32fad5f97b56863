"""Small sentences, of which some have hardly a label that counts, and small models of transformers."""

import copy

import torch
from torch.nn.functional import cross_entropy
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    TrainingArguments,
    set_seed,
)

from samestep.integrations.transformers import Trainer

TOWERS, ROWS = 7, 3
NUM_SENTENCES = 47  # batches of 21, 21 and 5 rows
WORDS = 32
SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
QUIET = {
    **{"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no"},
    **{"dataloader_pin_memory": False, "per_device_train_batch_size": ROWS, "num_train_epochs": 1},
    "logging_steps": 1,
}
BERT = SMALL | {"vocab_size": WORDS, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def gpt2(dropout=0.0):
    # Its class does not say that its loss shifts the labels.
    drop = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    size = {"n_positions": WORDS, "n_embd": 16, "n_layer": 2, "n_head": 2}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, **size, **drop, **ends))


def llama(**more):
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, **SMALL | more))


def masked():
    return BertForMaskedLM(BertConfig(**BERT))


def classifier():
    return BertForSequenceClassification(BertConfig(**BERT, num_labels=3))


def sentences(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number in range(count):
        length = int(torch.randint(2, 24, (), generator=generator))
        words = torch.randint(1, WORDS, (length,), generator=generator).tolist()
        # A third of the sentences counts whole; the others count their first word, and at most one more.
        labels = (
            words
            if number % 3 == 0
            else [words[0]] + [-100] * (length - 2) + [words[-1] if number % 2 else -100]
        )
        rows.append({"input_ids": words, "labels": labels})
    return rows


def classes(count):
    return [{**row, "labels": row["input_ids"][0] % 3} for row in sentences(count)]


def collate(rows):
    """Pad to the longest of these rows."""
    length = max(len(row["input_ids"]) for row in rows)
    padding = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    rows = [{**row, "attention_mask": [1] * len(row["input_ids"])} for row in rows]

    def column(name):
        values = [row[name] for row in rows]
        if not isinstance(values[0], list):
            return torch.tensor(values)
        return torch.tensor([each + [padding[name]] * (length - len(each)) for each in values])

    return {name: column(name) for name in rows[0]}


def arguments(folder, **more):
    return TrainingArguments(output_dir=str(folder), **QUIET | more)


def trainer_of(model, folder, rows=None, *, kind=Trainer, callbacks=None, **more):
    set_seed(0)
    own = {name: more.pop(name) for name in ("eval_dataset", "compute_metrics", "optimizers") if name in more}
    rows = sentences(NUM_SENTENCES) if rows is None else rows
    return kind(model, arguments(folder, **more), collate, rows, towers=TOWERS, callbacks=callbacks, **own)


def true_loss(model, batch):
    """The mean over all that counts, in float64."""
    model = copy.deepcopy(model).double()
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logits, labels = model(**inputs).logits, batch["labels"]
    if isinstance(model, GPT2LMHeadModel | LlamaForCausalLM):
        logits, labels = logits[:, :-1], labels[:, 1:]
    return model, cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100)
