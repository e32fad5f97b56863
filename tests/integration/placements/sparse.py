"""Sparse gradients."""

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import samestep

from ...nets import loss_of, take_step
from .batches import texts
from .losses import kept_sum
from .models import Words
from .scenario import scenario


def layout(gradient: Tensor | None) -> str:
    """Say what kind of gradient it is, and how much it stores."""
    if gradient is None or not gradient.is_sparse:
        return "none" if gradient is None else "dense"
    assert gradient.is_coalesced()
    return f"{gradient._nnz()} rows"


@scenario
def sparse_embeddings(job: samestep.Job) -> str:
    model = Words().to(job.device)
    towers = samestep.Towers(model, 7, job=job, bucket_bytes=300)
    embeddings = [model.words.weight, model.bag.weight, model.rare.weight, model.never.weight]
    adam = torch.optim.SparseAdam(embeddings, lr=0.01)
    sgd = torch.optim.SGD(model.last.parameters(), lr=0.1, momentum=0.9)
    seen = []
    for batch in texts(5, 30):
        report = take_step(towers, batch)
        seen.append([report.grad_norm, *(layout(parameter.grad) for parameter in embeddings)])
        adam.step()
        sgd.step()
    assert "none" in {step[3] for step in seen} != {"none"}
    assert {step[4] for step in seen} == {"none"}
    return f"{samestep.digest(model)} {seen}"


@scenario
def sparse_steps_clipped_and_summed_in_float64(job: samestep.Job) -> str:
    model = Words().to(job.device)
    towers = samestep.Towers(model, 5, job=job, accumulate_dtype=torch.float64)
    with torch.sparse.check_sparse_tensor_invariants(enable=True):
        step = samestep.Step(
            towers, kept_sum, torch.optim.Adagrad(model.parameters(), lr=0.05), clip_norm=0.3
        )
        losses = [step(batch).loss for batch in texts(4, 24)]
    return f"{samestep.digest(model)} {losses}"


@scenario
def sparse_steps_in_float16(job: samestep.Job) -> str:
    model = Words().to(job.device)
    towers = samestep.Towers(model, 6, job=job)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = samestep.Step(towers, loss_of, optimizer, autocast=torch.float16, clip_norm=1.0)
    losses = [step(batch).loss for batch in texts(4, 24)]
    return f"{samestep.digest(model)} {losses}"


@scenario
def sparse_parameters_alone(job: samestep.Job) -> str:
    """No dense gradient at all, tokens that one tower alone has, and half-precision rows."""
    torch.manual_seed(10)
    model = nn.Embedding(1000, 5, sparse=True, dtype=torch.bfloat16).to(job.device)
    towers = samestep.Towers(model, 7, job=job)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    seen = []
    for batch in texts(4, 30, 1000):
        for tower in towers(batch):
            tower.backward(F.cross_entropy(model(tower.batch["x"]).float().sum(1), tower.batch["y"]))
        towers.average()
        seen.append(layout(model.weight.grad))
        optimizer.step()
    return f"{samestep.digest(model)} {seen}"


@scenario
def sparse_and_dense_gradients_of_one_parameter(job: samestep.Job) -> str:
    """Tied to the output layer in some towers; there the gradient is dense, and so is the average."""
    torch.manual_seed(11)
    model = nn.Embedding(30, 8, sparse=True).to(job.device)
    towers = samestep.Towers(model, 7, job=job)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    seen = []
    for number, batch in enumerate(texts(6, 21, 30)):
        for tower in towers(batch):
            hidden = model(tower.batch["x"]).mean(1)
            tied = tower.index in (number, number + 2) and number > 1
            tower.backward(((hidden @ model.weight.T if tied else hidden) ** 3).mean())
        seen.append((towers.average().grad_norm, layout(model.weight.grad)))
        optimizer.step()
    assert seen[0][1].endswith("rows")
    assert seen[2][1] == seen[5][1] == "dense"
    return f"{samestep.digest(model)} {seen}"


def peak_bytes(function: Callable[[], object]) -> int:
    """Return the most memory that torch held at a time for tensors made in `function`."""
    with torch.profiler.profile(
        profile_memory=True,
        activities=[torch.profiler.ProfilerActivity.CPU],
        acc_events=True,  # else 2.11 and 2.12 warn: https://github.com/pytorch/pytorch/pull/180387
    ) as profile:
        function()
    changes = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in changes))


@scenario
def ten_million_rows(job: samestep.Job) -> str:
    """A dense gradient, or a flat buffer for one, would take 160 MB."""
    model = nn.Embedding(10_000_000, 4, sparse=True, _weight=torch.zeros(10_000_000, 4)).to(job.device)
    towers = samestep.Towers(model, 7, job=job)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    words = torch.arange(0, 10_000_000, 123_457)[:70].reshape(14, 5)

    def step() -> None:
        for tower in towers(words):
            tower.backward((model(tower.batch) - tower.batch[..., None]).square().mean())
        towers.average()
        optimizer.step()

    assert [peak_bytes(step) < 1e6 for _ in range(2)] == [True, True]
    assert layout(model.weight.grad) == "70 rows"
    return samestep.digest({"gradient": model.weight.grad.coalesce().values(), "rows": model.weight[words]})
