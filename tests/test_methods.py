"""Methods of training, as papers and tutorials write them: one digest on 1, 2 and 3 workers, and the
gradient of the plain loop over towers in float64; or an error on every worker, or a warning, that names what
to write."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import samestep
from samestep import Towers
from samestep.summation.placement import even_ranges

from .cases import mostly_long
from .nets import batch_of, loss_of, net
from .simulation import simulate, values

pytestmark = pytest.mark.sampled

TOWERS = mostly_long([7, 4], 1)


def norm_net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def check_gradients(model, batch, loss, num_towers):
    """Compare the gradients with those of the loop over towers by hand, in float64."""
    oracle = copy.deepcopy(model).double()
    oracle.zero_grad()
    for rows in even_ranges(len(batch["y"]), num_towers):
        part = {"x": batch["x"][rows.start : rows.stop].double(), "y": batch["y"][rows.start : rows.stop]}
        (loss(oracle, part) * len(rows) / len(batch["y"])).backward()
    for (name, p), q in zip(model.named_parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(p.grad.double(), q.grad, rtol=1e-4, atol=1e-6, msg=name)


def train(model, job, num_towers, loss=loss_of, *, steps=3, checks=True, **settings):
    towers = Towers(model, num_towers, job=job, **settings)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(steps):
        batch = batch_of(step, 21 - step % 3)
        for tower in towers(batch):
            tower.backward(loss(model, tower.batch))
        towers.average()
        if checks:
            check_gradients(model, batch, loss, num_towers)
        optimizer.step()
    return samestep.digest(model)


def digests(program, num_towers):
    return {value for num in (1, 2, 3) for value in values(lambda job: program(job, num_towers), num, num)}


def errors(program, num_towers, num_workers):
    outcomes = simulate(lambda job: program(job, num_towers), num_workers, num_workers)
    assert all(isinstance(outcome.error, samestep.Error) for outcome in outcomes), outcomes
    return [outcome.text for outcome in outcomes]


# ---- nets that live for one pass ---------------------------------------------------------------------


def a_copy_that_learns_in_each_pass(job, num_towers):
    def loss(model, batch):
        quick = copy.deepcopy(model)
        F.cross_entropy(quick(batch["x"]), batch["y"]).backward()
        torch.optim.SGD(quick.parameters(), 0.1).step()
        with torch.no_grad():
            target = quick(batch["x"])
        return (model(batch["x"]) - target).square().mean()

    return train(norm_net(), job, num_towers, loss)


def a_copy_that_the_loop_still_holds_at_its_end(job, num_towers):
    model = norm_net()
    towers = Towers(model, num_towers, job=job)
    for step in range(3):
        for tower in towers(batch_of(step)):
            twin = copy.deepcopy(model)
            tower.backward((model(tower.batch["x"]) - twin(tower.batch["x"]).detach() - 1).square().mean())
        towers.average()
        torch.optim.SGD(model.parameters(), 0.1).step()
        assert not twin[1].running_mean.isnan().any()
    return samestep.digest(model)


def a_random_net_drawn_in_each_pass(job, num_towers):
    def loss(model, batch):
        with torch.no_grad():
            target = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))(batch["x"])
        return (model(batch["x"]) - target).square().mean()

    return train(norm_net(), job, num_towers, loss, checks=False)


OF_ONE_PASS = [
    a_copy_that_the_loop_still_holds_at_its_end,
    a_random_net_drawn_in_each_pass,
    a_copy_that_learns_in_each_pass,
]


@pytest.mark.long
@pytest.mark.parametrize("num_towers", TOWERS)
@pytest.mark.parametrize("program", OF_ONE_PASS)
def test_nets_that_live_for_one_pass_may_change_their_buffers(program, num_towers):
    assert len(digests(program, num_towers)) == 1


def a_teacher_that_runs_in_one_tower_of_each_step(job, num_towers):
    teacher, seen = norm_net(), []

    def loss(model, batch):
        if len(seen) % num_towers == 0:
            teacher(batch["x"])
        seen.append(batch)
        return loss_of(model, batch)

    return train(net(), job, num_towers, loss, checks=False)


@pytest.mark.parametrize("num_towers", TOWERS)
def test_a_net_that_runs_again_in_the_next_step_is_refused_there(num_towers):
    (text,) = errors(a_teacher_that_runs_in_one_tower_of_each_step, num_towers, 1)
    assert "step 1, tower 0 changed running_mean" in text
    assert "BatchNorm1d" in text


@pytest.mark.parametrize("num_workers", mostly_long([1, 3, 2], 2))
def test_an_average_of_weights_that_passes_update_is_refused(num_workers):
    def program(job, num_towers):
        average = torch.optim.swa_utils.AveragedModel(net())

        def loss(model, batch):
            average.update_parameters(model)
            return (model(batch["x"]) - average(batch["x"]).detach() - 1).square().mean()

        return train(net(), job, num_towers, loss, checks=False)

    texts = errors(program, 7, num_workers)
    assert all("n_averaged" in text and "update it after average()" in text for text in texts)


# ---- buffers that a backward writes to ---------------------------------------------------------------


class GradientScale(nn.Module):
    """A layer that divides gradients by a moving average of their size."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, size):
            ctx.size = size
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            ctx.size.lerp_(gradient.abs().mean(), 0.1)
            return gradient / ctx.size, None

    def __init__(self):
        super().__init__()
        self.register_buffer("size", torch.ones(()))

    def forward(self, x):
        return self.Scaled.apply(x, self.size)


@pytest.mark.parametrize("num_workers", mostly_long([1, 3, 2], 2))
@pytest.mark.parametrize("num_towers", TOWERS)
@pytest.mark.parametrize("policy", ["mean", "first"])
def test_a_buffer_that_only_the_backward_changes_is_refused(policy, num_towers, num_workers):
    def program(job, num_towers):
        model = nn.Sequential(net(), GradientScale())
        return train(model, job, num_towers, checks=False, buffers={"1.size": policy})

    texts = errors(program, num_towers, num_workers)
    assert all("backward changed 1.size" in text and "after average()" in text for text in texts)


class Codes(nn.Module):
    """A layer with a moving average of what it has seen."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.linear = nn.Linear(6, 3)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x):
        x = self.linear(x)
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
        return x


@pytest.mark.long
@pytest.mark.parametrize("num_towers", TOWERS)
@pytest.mark.parametrize("statistics", ["pooled", "mean", "first"])
def test_a_forward_that_the_backward_runs_again_changes_buffers_once(statistics, num_towers):
    def program(job, num_towers):
        model = nn.Sequential(Codes(), nn.BatchNorm1d(3, momentum=None))

        def loss(model, batch):
            return F.cross_entropy(checkpoint(model, batch["x"], use_reentrant=False), batch["y"])

        settings = {"buffers": {"0.mean": "mean"}, "statistics": statistics}
        return train(model, job, num_towers, loss, checks=False, **settings)

    def plain(job, num_towers):
        model = nn.Sequential(Codes(), nn.BatchNorm1d(3, momentum=None))
        settings = {"buffers": {"0.mean": "mean"}, "statistics": statistics}
        return train(model, job, num_towers, checks=False, **settings)

    assert digests(program, num_towers) == digests(plain, num_towers)


# ---- means over labels -------------------------------------------------------------------------------


def tokens_of(step, rows=15):
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(1, 9, (rows, 6), generator=generator)
    lengths = torch.randint(2, 7, (rows, 1), generator=generator)
    return torch.where(torch.arange(6) < lengths, tokens, 0)


def language_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(9, 5), nn.Linear(5, 9))


def logits_and_labels(model, tokens):
    return model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()


def take_language_steps(towers, batches, hand_in):
    for batch in batches:
        for tower in towers(batch):
            hand_in(tower)
        towers.average()
    return samestep.digest(towers.model)


@pytest.mark.parametrize("ignored", [0, -100])
@pytest.mark.parametrize("num_workers", mostly_long([1, 3, 2], 2))
@pytest.mark.parametrize("num_towers", TOWERS)
def test_a_mean_over_labels_that_towers_have_more_or_fewer_of_is_told_of(num_towers, num_workers, ignored):
    def program(job):
        towers = Towers(language_model(), num_towers, job=job)

        def hand_in(tower):
            logits = towers.model(tower.batch["tokens"])[:, :-1].transpose(1, 2)
            tower.backward(F.cross_entropy(logits, tower.batch["labels"], ignore_index=ignored))

        tokens = [tokens_of(step) for step in range(3)]
        batches = [{"tokens": t, "labels": torch.where(t > 0, t, ignored)[:, 1:]} for t in tokens]
        return take_language_steps(towers, batches, hand_in)

    with pytest.warns(UserWarning, match=r"a mean over labels: \d+ in Tower\(.*backward_sum") as caught:
        values(program, num_workers, num_workers)
    assert len(caught) <= num_workers  # once each


def of_their_sum(tower, model):
    logits, labels = logits_and_labels(model, tower.batch)
    tower.backward_sum(F.cross_entropy(logits, labels, ignore_index=0, reduction="sum"), (labels > 0).sum())


def of_sequences_without_padding(tower, model):
    logits, labels = logits_and_labels(model, tower.batch.clamp(min=1))
    tower.backward(F.cross_entropy(logits, labels))


def of_as_many_in_each_row(tower, model):
    tower.batch[:, 1:] = tower.batch[:, 1:].clamp(min=1)
    tower.batch[:, -1] = -100
    logits, labels = logits_and_labels(model, tower.batch.clamp(min=0))
    tower.backward(F.cross_entropy(logits, torch.where(labels == 0, -100, labels)))


def of_classes_beside_a_mask(tower, model):
    mask = tower.batch = (tower.batch > 0).long()
    labels = mask.sum(1)
    tower.backward(F.cross_entropy(model(mask)[:, 0], labels, ignore_index=0))


def of_places_in_a_text(tower, model):
    """As where an answer begins; what lies beyond the text is ignored, by a number that words have, too."""
    logits = model(tower.batch).mean(-1)
    tower.backward(F.cross_entropy(logits, tower.batch[:, 0] * 0, ignore_index=2))


def of_classes_of_some_rows(tower, model):
    labels = torch.arange(len(tower.batch)) + tower.index
    tower.batch = {"tokens": tower.batch, "labels": torch.where(labels % 3 == 0, -100, labels % 4)}
    tower.backward(F.cross_entropy(model(tower.batch["tokens"])[:, 0], tower.batch["labels"]))


@pytest.mark.parametrize(
    "hand_in",
    [
        of_their_sum,
        of_sequences_without_padding,
        of_as_many_in_each_row,
        of_classes_beside_a_mask,
        of_places_in_a_text,
    ],
)
def test_other_losses_over_labels_are_not_told_of(hand_in):
    model = language_model()
    take_language_steps(Towers(model, 4), map(tokens_of, range(3)), lambda tower: hand_in(tower, model))


def test_a_mean_over_labels_of_some_rows_is_told_of():
    model = language_model()
    with pytest.warns(UserWarning, match=r"a mean over labels: \d+ in Tower\("):
        take_language_steps(
            Towers(model, 4), [tokens_of(0)], lambda tower: of_classes_of_some_rows(tower, model)
        )


def of_weighted_classes(tower, model):
    logits, labels = logits_and_labels(model, tower.batch)
    return F.cross_entropy(logits, labels, weight=torch.arange(9.0))


def of_masked_tokens(tower, model):
    logits, labels = logits_and_labels(model, tower.batch)
    each = F.cross_entropy(logits, labels, reduction="none")
    return (each * (labels > 0)).sum() / (labels > 0).sum().clamp(min=1)


def of_masked_tokens_by_number(tower, model):
    logits, labels = logits_and_labels(model, tower.batch)
    each = F.cross_entropy(logits, labels, reduction="none")
    return (each * (labels > 0)).sum() / (labels > 0).sum().item()


def of_tokens_that_a_mask_selects(tower, model):
    logits, labels = logits_and_labels(model, tower.batch)
    return F.cross_entropy(logits, labels, reduction="none")[labels > 0].mean(0)


def of_squares_that_a_mask_selects(tower, model):
    logits, labels = logits_and_labels(model, tower.batch)
    return F.mse_loss(logits[labels > 0], F.one_hot(labels, 9).float()[labels > 0])


def of_labels_that_a_mask_selects(tower, model):
    logits, labels = logits_and_labels(model, tower.batch)
    return F.cross_entropy(logits[labels > 0], labels[labels > 0])


def of_masked_tokens_by_a_mean(tower, model):
    logits, labels = logits_and_labels(model, tower.batch)
    mask = (labels > 0).float()
    return (F.cross_entropy(logits, labels, reduction="none") * mask).mean() / mask.mean()


def of_masked_tokens_by_a_reciprocal(tower, model):
    logits, labels = logits_and_labels(model, tower.batch)
    each = F.cross_entropy(logits, labels, reduction="none") * (labels > 0)
    return each.sum() * (1 / (int((labels > 0).sum()) + 1e-5))


def of_weighted_tokens(tower, model):
    logits, labels = logits_and_labels(model, tower.batch)
    weights = 0.3 * labels
    return (F.cross_entropy(logits, labels, reduction="none") * weights).sum() / (weights.sum() + 1e-6)


def of_tokens_by_normalized_weights(tower, model):
    logits, labels = logits_and_labels(model, tower.batch)
    weights = 0.3 * labels
    weights = weights / weights.sum()
    return (F.cross_entropy(logits, labels, reduction="none") * weights).sum()


def of_tokens_by_a_normalized_mask(tower, model):
    logits, labels = logits_and_labels(model, tower.batch)
    mask = (labels > 0).float()
    return (mask / mask.mean().clamp(min=0.1) * F.cross_entropy(logits, labels, reduction="none")).mean()


def of_several_tasks(tower, model):
    """As many means as rows."""
    logits, labels = logits_and_labels(model, tower.batch)
    tasks = [(labels > 0) & (labels < 3), labels > 2, labels > 4]
    return sum(logits[task].square().mean() for task in tasks[: len(tower.batch)])


DIVIDED = r"entries \(a sum divided by their number or weights\): [\d.]+ in Tower\("


@pytest.mark.parametrize("num_workers", mostly_long([1, 3, 2], 2))
@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (of_weighted_classes, r"labels, by their weights: [\d.]+ in Tower\("),
        (of_masked_tokens, DIVIDED),
        (of_masked_tokens_by_number, DIVIDED),
        (of_tokens_that_a_mask_selects, r"a mean over entries: \d+ in Tower\("),
        (of_squares_that_a_mask_selects, r"a mean over entries: \d+ in Tower\("),
        (of_labels_that_a_mask_selects, r"a mean over labels: \d+ in Tower\("),
        (of_masked_tokens_by_a_mean, DIVIDED),
        (of_masked_tokens_by_a_reciprocal, DIVIDED),
        (of_weighted_tokens, DIVIDED),
        (of_tokens_by_normalized_weights, DIVIDED),
        (of_tokens_by_a_normalized_mask, DIVIDED),
        (of_several_tasks, r"a mean over entries: \d+ in Tower\("),
    ],
)
def test_a_sum_that_each_tower_divides_by_its_own_count_is_told_of(loss, words, num_workers):
    def program(job):
        towers = Towers(language_model(), 6, job=job)
        hand_in = lambda tower: tower.backward(loss(tower, towers.model))  # noqa: E731
        return take_language_steps(towers, map(tokens_of, range(3)), hand_in)

    with pytest.warns(UserWarning, match=words + ".*backward_sum") as caught:
        values(program, num_workers, num_workers)
    assert len(caught) <= num_workers  # once each


def by_its_rows(tower, model):
    logits, labels = logits_and_labels(model, tower.batch)
    return F.cross_entropy(logits, labels, reduction="sum") / len(labels)


def by_another_loss(tower, model):
    loss = F.cross_entropy(*logits_and_labels(model, tower.batch))
    return loss / loss.detach()


def with_a_penalty_on_weights(tower, model):
    """Its mean is over as many entries for any number of rows."""
    return by_its_rows(tower, model) / 4 + model[0].weight.square().mean()


def of_trimmed_rows(tower, model):
    length = int((tower.batch > 0).sum(1).max())
    return F.mse_loss(model(tower.batch[:, :length]), torch.zeros(len(tower.batch), length, 9))


def of_trimmed_labels(tower, model):
    """All labels, of fewer columns in some towers: each row weighs the same."""
    length = int((tower.batch > 0).sum(1).max())
    logits = model(tower.batch[:, :length]).transpose(1, 2)
    return F.cross_entropy(logits, tower.batch[:, :length])


def of_each_row(tower, model):
    losses = [model(row[row > 0]).square().mean() for row in tower.batch]
    return torch.stack(losses).mean()


def of_some_rows(tower, model):
    """A mean for each row with more than three tokens, and 0 for the others."""
    rows = [row[row > 0] for row in tower.batch]
    nothing = model(tower.batch).sum() * 0
    return sum((model(row).square().mean() for row in rows if len(row) > 3), nothing) / len(rows)


def with_a_metric(tower, model):
    """Means that no gradient of the loss flows through."""
    logits, labels = logits_and_labels(model, tower.batch)
    F.cross_entropy(logits[labels > 0], labels[labels > 0])
    return by_its_rows(tower, model)


def times_its_count(tower, model):
    """A mean of labels, as a model may return it, made a sum again, and one of chunks."""
    logits, labels = logits_and_labels(model, tower.batch)
    total = F.cross_entropy(logits, labels, ignore_index=0) * (labels > 0).sum()
    chunks = sum(part.square().mean() * (len(part) / len(tower.batch)) for part in logits[::5].split(2))
    return total / len(tower.batch) + chunks


def of_mixed_labels(tower, model):
    """Mixup, with parts whose reciprocals are whole numbers in some towers."""
    logits, labels = logits_and_labels(model, tower.batch)
    part = (0.25, 0.2)[tower.index % 2]
    other = labels.roll(1)
    return part * F.cross_entropy(logits, labels) + (1 - part) * F.cross_entropy(logits, other)


def of_some_refinements(tower, model):
    """The mean over a number of terms that is drawn for each tower."""
    num_terms = 1 + tower.index % 3
    logits = model(tower.batch)
    return sum((logits - term).square().mean() * (term < num_terms) for term in range(3)) / num_terms


def by_equal_weights(tower, model):
    logits, labels = logits_and_labels(model, tower.batch)
    each, weights = F.cross_entropy(logits, labels, reduction="none"), torch.full((len(labels),), 0.7)
    normalized = weights / weights.sum()
    sums = (each * weights).sum() / weights.sum() + (each * normalized).sum()
    return sums + (each * (normalized * len(normalized))).mean()


@pytest.mark.sampled(50)
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("num_rows", [15, 18, 9])
@pytest.mark.parametrize(
    "loss",
    [
        by_its_rows,
        by_another_loss,
        with_a_penalty_on_weights,
        of_trimmed_rows,
        of_trimmed_labels,
        of_each_row,
        of_some_rows,
        with_a_metric,
        times_its_count,
        of_mixed_labels,
        of_some_refinements,
        by_equal_weights,
    ],
)
def test_means_over_what_rows_have_alike_are_not_told_of(loss, num_rows):
    model = language_model()
    hand_in = lambda tower: tower.backward(loss(tower, model))  # noqa: E731
    take_language_steps(Towers(model, 6), [tokens_of(0, num_rows)], hand_in)


def test_a_recomputed_loss_is_not_run_again_for_the_look():
    model, runs = language_model(), []

    def loss(tokens):
        runs.append(tokens)
        logits, labels = logits_and_labels(model, tokens)
        return F.cross_entropy(logits, labels, ignore_index=0)

    towers = Towers(model, 3)
    with pytest.warns(UserWarning, match="a mean over labels"):
        take_language_steps(
            towers, [tokens_of(0)], lambda t: t.backward(checkpoint(loss, t.batch, use_reentrant=False))
        )
    assert len(runs) == 6


# ---- gradients of inputs, and tensors that are swapped -----------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("num_towers", TOWERS)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_adversarial_inputs_by_a_backward_whose_gradients_are_zeroed(set_to_none, num_towers):
    def adversarial(model, batch):
        x = batch["x"].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(loss_of(model, {**batch, "x": x}), x)
        return loss_of(model, {**batch, "x": batch["x"] + 0.1 * gradient.sign()})

    def by_backward(model, batch):
        x = batch["x"].clone().requires_grad_()
        loss_of(model, {**batch, "x": x}).backward()
        model.zero_grad(set_to_none=set_to_none)
        return loss_of(model, {**batch, "x": batch["x"] + 0.1 * x.grad.sign()})

    def program(job, num_towers):
        return train(net(), job, num_towers, by_backward, checks=False)

    assert digests(program, num_towers) == digests(
        lambda job, num_towers: train(net(), job, num_towers, adversarial), num_towers
    )


@pytest.mark.parametrize("num_workers", mostly_long([1, 3, 2], 2))
def test_adversarial_inputs_by_a_backward_that_leaves_gradients_are_refused(num_workers):
    def loss(model, batch):
        x = batch["x"].clone().requires_grad_()
        loss_of(model, {**batch, "x": x}).backward()
        return loss_of(model, {**batch, "x": batch["x"] + 0.1 * x.grad.sign()})

    texts = errors(lambda job, t: train(net(), job, t, loss, checks=False), 7, num_workers)
    assert all("torch.autograd.grad(loss, inputs)" in text for text in texts)


@pytest.mark.long
@pytest.mark.parametrize("num_towers", TOWERS)
def test_weights_may_be_swapped_with_those_of_another_net(num_towers):
    def program(job, num_towers):
        model, other = net(), copy.deepcopy(net())
        towers = Towers(model, num_towers, job=job)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(4):
            for tower in towers(batch_of(step)):
                tower.backward(loss_of(model, tower.batch))
            towers.average()
            check_gradients(model, batch_of(step), loss_of, num_towers)
            optimizer.step()
            if step == 1:
                for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
                    torch.utils.swap_tensors(mine, theirs)
        return samestep.digest(model)

    assert len(digests(program, num_towers)) == 1
