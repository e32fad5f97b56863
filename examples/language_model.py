"""A language model on lines of uneven length: all tokens of the batch count equally, and padding does not.

The loss is Σ (losses of all tokens) / (number of tokens), over the whole batch. The mean of the towers' means
would differ from it, because towers have different numbers of tokens.
"""

import argparse
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

import samestep

STEPS, PADDING = 200, -100

source = Path(argparse.__file__).read_bytes()  # a text that every machine has
lines = [torch.tensor(list(line)) for line in source.splitlines(keepends=True) if line.strip()]
train, test = lines[: len(lines) * 9 // 10], lines[len(lines) * 9 // 10 :]


def pad(lines):
    """Pad one tower's lines, int64 [rows, length of the longest]; lengths may differ between towers."""
    return pad_sequence(lines, batch_first=True, padding_value=PADDING)


class LanguageModel(nn.Module):
    """Tokens [rows, length] -> logits [rows, length - 1, 256] of each next token."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(256, 64)
        self.gru = nn.GRU(64, 128, batch_first=True)
        self.head = nn.Linear(128, 256)

    def forward(self, tokens):
        hidden, _ = self.gru(self.embedding(tokens[:, :-1].clamp(min=0)))
        return self.head(hidden)


def loss_of(model, tokens):
    """Return the loss summed over the tokens, and their number; `Step` divides once, over all towers."""
    targets = tokens[:, 1:]
    logits = model(tokens)
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PADDING, reduction="sum")
    return samestep.LossSum(total, (targets != PADDING).sum())


def bits(model, tokens):
    loss = loss_of(model, tokens)
    return {"bits per byte": (loss.total / math.log(2), loss.count)}


def main(job):
    torch.manual_seed(0)
    model = LanguageModel().to(job.device)
    towers = samestep.Towers(model, 8, job=job, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    step = samestep.Step(towers, loss_of, optimizer, clip_norm=1.0)
    loader = samestep.TowerLoader(train, 64, towers, seed=0, collate_fn=pad)
    evaluate = samestep.Evaluation(test, bits, collate_fn=pad)
    samestep.Trainer(step, loader, run_dir="runs/language_model", steps=STEPS, evaluate=evaluate).run()


samestep.launch(main, workers="auto", towers=8)
