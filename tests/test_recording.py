"""What is recorded of a step, operator by operator."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import samestep
from samestep.checking.recorder import Trial, record
from samestep.checking.recording import When, first_difference, held_differences
from samestep.checking.stand_ins import run_stand_ins

from . import planted


class Everything(nn.Module):
    """Layers with scratch memory, sparse gradients, recomputation, a tied weight and a derived one."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8, sparse=True)
        self.attention = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.rnn = nn.LSTM(8, 8, 2, dropout=0.2, batch_first=True)
        self.tied, self.again = nn.Linear(8, 8), nn.Linear(8, 8)
        self.again.weight = self.tied.weight
        self.drop = nn.Dropout(0.3)
        self.convolution, self.norm = nn.Conv1d(8, 8, 3), nn.BatchNorm1d(8)
        self.derived = nn.utils.parametrizations.weight_norm(nn.Linear(8, 4))

    def forward(self, x):
        hidden, _ = self.rnn(self.attention(self.embedding(x)))
        hidden = checkpoint(self.recomputed, hidden, use_reentrant=False)
        return self.derived(self.norm(self.convolution(hidden.transpose(1, 2))).amax(2))

    def recomputed(self, hidden):
        return self.drop(self.again(self.tied(hidden)))


def everything(job):
    torch.manual_seed(0)
    model = Everything()
    batch = {"x": torch.randint(0, 20, (11, 5)), "y": torch.randint(0, 4, (11,))}
    towers = samestep.Towers(model, 4, job=job)
    return samestep.Step(towers, planted.loss_of, torch.optim.SGD(model.parameters(), lr=0.1)), [batch] * 2


@pytest.fixture
def job():
    threads = torch.get_num_threads()
    yield samestep.init("cpu")
    torch.set_num_threads(threads)


@pytest.mark.long
@pytest.mark.parametrize("num_workers", [3, 1])
def test_every_operator_is_the_same_for_stand_ins(job, num_workers):
    alone = record(everything, job, Trial(0, steps=2, operators=True))
    work = partial(record, everything, trial=Trial(1, steps=2, operators=True))
    others = run_stand_ins(work, job, num_workers)
    assert len(others) == num_workers
    assert first_difference(alone, others) is None
    assert list(held_differences(alone, others)) == []
    ran = {when: turn.events for other in others for when, turn in other.turns.items()}
    assert ran == {when: turn.events for when, turn in alone.turns.items()}


@pytest.mark.long
def test_turns_are_in_the_order_of_execution(job):
    turns = list(record(everything, job, Trial(0, steps=2)).turns)
    step = [f"tower {tower}" for tower in range(4)] + ["update"]
    assert turns == [When(0, "build"), *(When(number, part) for number in range(2) for part in step)]


@pytest.mark.long
def test_watching_changes_no_bits(job):
    digests = {record(everything, job, Trial(0, 2, operators)).digest for operators in (False, True)}
    assert len(digests) == 1


@pytest.mark.long
def test_modules_of_operators_are_known_forward_and_backward(job):
    turn = record(everything, job, Trial(0, steps=1, operators=True)).turns[When(0, "tower 2")]
    ran = {(event.phase, event.module, event.name) for event in turn.events if event.kind == "operator"}
    for expected in [
        ("forward", "embedding (Embedding)", "aten.embedding.default"),
        ("backward", "embedding (Embedding)", "aten._sparse_coo_tensor_with_dims_and_tensors.default"),
        ("forward", "attention.norm1 (LayerNorm)", "aten.native_layer_norm.default"),
        ("backward", "attention.norm1 (LayerNorm)", "aten.native_layer_norm_backward.default"),
        ("backward", "convolution (Conv1d)", "aten.convolution_backward.default"),
        ("backward", "norm (BatchNorm1d)", "aten.native_batch_norm_backward.default"),
        ("backward", "again (Linear)", "aten.mm.default"),
        ("forward", "the model (Everything)", "aten.amax.default"),
        ("forward", "the loss function", "aten.nll_loss_forward.default"),
        ("backward", "the loss function", "aten.nll_loss_backward.default"),
    ]:
        assert expected in ran
    gradients = [event.name for event in turn.events if event.kind == "gradient"]
    assert sorted(gradients) == sorted(dict(Everything().named_parameters()))


def test_names_of_what_a_pass_finds(job):
    turn = record(everything, job, Trial(0, steps=1, operators=True)).turns[When(0, "tower 0")]
    found = {name for event in turn.events for name, _ in event.outside}
    assert {"tensor 0 of the batch", "tensor 1 of the batch", "parameter embedding.weight"} <= found
    unnamed = [event.phase for event in turn.events if any(not name for name, _ in event.outside)]
    assert unnamed == ["backward"]  # what the backward pass starts from
