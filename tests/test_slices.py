"""Small batches, T of them a step: `Towers.slices`, and `LocalBatch.tower_rows` that it is made of."""

from collections import UserDict

import pytest
import torch
from torch import nn

from samestep import BatchError, ConfigError, DisagreementError, LocalBatch, Step, Towers, digest
from samestep.errors import NonFiniteError

from .simulation import simulate, values

pytestmark = pytest.mark.sampled(5)

NUM_TOWERS = 7
ROWS = [4, 4, 2, 4, 1, 4, 4, 3, 4, 4, 4]  # of 11 small batches: one whole step, and 4 of the next


def small_batches(rows=ROWS):
    return list(torch.randn(sum(rows), 3, generator=torch.Generator().manual_seed(1)).split(rows))


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=0.5), nn.Dropout(0.3), nn.Linear(4, 1))


def loss_of(model, x):
    return model(x).square().mean()


def train(job):
    model = make_model()
    towers = Towers(model, NUM_TOWERS, job=job, noise_every=1, statistics="pooled")
    reports = []
    for batch in towers.slices(small_batches([max(n, 2) for n in ROWS])):
        for tower in towers(batch):
            assert tower.rows == len(tower.batch)
            tower.backward(loss_of(model, tower.batch))
        reports.append(towers.average())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
    found = [(r.loss, r.noise_scale, str(r.tower_grad_norms)) for r in reports]  # NaN without rows
    return digest(model), [r.rows for r in reports], found


@pytest.mark.long
def test_any_number_of_workers_takes_the_same_steps():
    expected = values(train, 1)[0]
    assert expected[1] == [24, 15]
    for num_workers in (2, 3):
        assert values(train, num_workers) == [expected] * num_workers


def test_the_noise_is_that_of_towers_with_their_own_rows():
    rows = [9, 2, 2, 2, 2, 2, 2]
    towers = Towers(make_model(), NUM_TOWERS, noise_every=1)
    for tower in towers(next(towers.slices(small_batches(rows)))):
        tower.backward(loss_of(towers.model, tower.batch))
    report = towers.average()
    mean_square = sum(n / 21 * norm**2 for n, norm in zip(rows, report.tower_grad_norms, strict=True))
    variance = (mean_square - report.grad_norm**2) / (NUM_TOWERS - 1)
    signal, noise = towers.noise.signal, towers.noise.noise
    assert noise / signal == pytest.approx(21 * variance / (report.grad_norm**2 - variance))


def test_small_batches_of_the_towers_own_sizes_are_the_whole_batch():
    def step(batch_of):
        towers = Towers(make_model(), NUM_TOWERS, noise_every=1)
        for tower in towers(batch_of(towers)):
            tower.backward(loss_of(towers.model, tower.batch))
        report = towers.average()
        return report.loss, report.grad_norm, report.tower_losses, towers.noise.state_dict()

    batches = small_batches([3, 3, 2, 2, 2, 2, 2])
    assert step(lambda towers: next(towers.slices(batches))) == step(lambda towers: torch.cat(batches))


@pytest.mark.parametrize("num_workers", [1, 3])
def test_the_gradient_is_that_of_the_mean_over_all_rows(num_workers):
    def gradients(job):
        torch.manual_seed(0)
        model = nn.Linear(3, 1).double()
        towers = Towers(model, NUM_TOWERS, job=job)
        found = []
        for batch in towers.slices(each.double() for each in small_batches()):
            for tower in towers(batch):
                tower.backward(loss_of(model, tower.batch))
            towers.average()
            found.append(model.weight.grad)
        return found

    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    for found in values(gradients, num_workers):
        for gradient, batches in zip(found, (small_batches()[:7], small_batches()[7:]), strict=True):
            (expected,) = torch.autograd.grad(loss_of(model, torch.cat(batches).double()), model.weight)
            assert torch.allclose(gradient, expected, rtol=1e-12, atol=0)


def test_an_iterator_may_write_each_small_batch_to_the_same_memory():
    def reused():
        memory = torch.empty(4, 3)
        for batch in small_batches([4] * 7):
            yield memory.copy_(batch)

    towers = Towers(make_model(), NUM_TOWERS)
    (batch,) = towers.slices(reused())
    assert all(torch.equal(batch.slices[tower], each) for tower, each in enumerate(small_batches([4] * 7)))


class Graphs:
    """What cannot be cut, and is never."""

    def __init__(self, x):
        self.x = x


@pytest.mark.parametrize("num_workers", [1, 2])
def test_anything_can_be_a_small_batch_where_rows_are_told(num_workers):
    def take(job, wrap, **options):
        model = make_model()
        towers = Towers(model, NUM_TOWERS, job=job)
        for batch in towers.slices(map(wrap, small_batches([4] * 7)), **options):
            for tower in towers(batch):
                tower.backward(loss_of(model, getattr(tower.batch, "x", tower.batch)))
            towers.average()
        return [parameter.grad.tolist() for parameter in model.parameters()]

    expected = values(lambda job: take(job, lambda x: x), num_workers)
    for rows in (4, lambda batch: len(batch.x)):
        assert values(lambda job, rows=rows: take(job, Graphs, rows=rows), num_workers) == expected
    for outcome in simulate(lambda job: take(job, Graphs), num_workers):
        assert isinstance(outcome.error, BatchError)
        assert "small batch 0 of batch 0: batch is a " in outcome.text
        assert outcome.text.endswith("or say how many rows it has: slices(..., rows=...)")


class Encoding(UserDict):
    """As transformers' `BatchEncoding`: a mapping with attributes of its own."""

    def __init__(self, data, encodings=None):
        super().__init__(data)
        self.encodings = encodings


def test_encodings_are_nests():
    batch = Encoding({"ids": torch.arange(10).reshape(5, 2), "mask": torch.ones(5)}, encodings="kept")
    towers = Towers(nn.Linear(1, 1), 2)
    for whole in (batch, next(towers.slices([batch.copy(), batch.copy()]))):
        part = next(towers(whole)).batch
        assert isinstance(part, Encoding)
        assert part.encodings == "kept"
        assert part["ids"].tolist()[:3] == [[0, 1], [2, 3], [4, 5]]
    assert list(batch["ids"].shape) == [5, 2]


def test_a_gradient_that_is_not_finite_is_traced_to_its_small_batch():
    batches = small_batches()
    batches[2][1] = torch.nan
    towers = Towers(nn.Linear(3, 1), NUM_TOWERS)
    step = Step(towers, loss_of, torch.optim.SGD(towers.model.parameters(), lr=0.1))
    with pytest.raises(
        NonFiniteError, match="tower 2, rows 8 to 9, loss nan, first in the gradient of weight"
    ):
        step(next(towers.slices(batches)))


def test_workers_with_other_small_batches_find_out():
    def work(job):
        towers = Towers(make_model(), NUM_TOWERS, job=job)
        batches = small_batches([2] * 7)
        batches[5] = batches[5] + job.rank
        for batch in towers.slices(batches):
            for tower in towers(batch):
                tower.backward(loss_of(towers.model, tower.batch))
            towers.average()

    for outcome in simulate(work, 2):
        assert isinstance(outcome.error, DisagreementError)
        assert "batch fingerprint" in outcome.text


@pytest.mark.parametrize(
    ("batches", "rows", "named"),
    [
        (
            small_batches(),
            4,
            "small batch 2 of batch 0 has 2 rows: expected 4; without rows=, they are counted",
        ),
        (small_batches(), lambda x: 0, "small batch 0 of batch 0 has 0 rows: expected an int >= 1"),
        (small_batches(), lambda x: 1.5, r"small batch 0 of batch 0 has 1\.5 rows: expected an int >= 1"),
        ([torch.zeros(2, 3), torch.zeros(0, 3)], None, "small batch 1 of batch 0 has 0 rows"),
    ],
)
def test_rows_that_cannot_be_right_are_refused(batches, rows, named):
    with pytest.raises(BatchError, match=named):
        next(Towers(make_model(), NUM_TOWERS).slices(batches, rows=rows))


@pytest.mark.parametrize("rows", [0, "4", 4.0, True, [4, 4]])
def test_rows_that_are_no_number_of_rows_are_refused(rows):
    with pytest.raises(ConfigError, match="rows = "):
        Towers(make_model(), NUM_TOWERS).slices([], rows=rows)


def test_without_small_batches_there_is_no_step():
    assert list(Towers(make_model(), NUM_TOWERS).slices([])) == []


# ---- LocalBatch.tower_rows -------------------------------------------------------------------------


@pytest.mark.parametrize("tower_rows", [[2, 1], [2, 1, 1], [3, 0, 1], [4, -1, 1], [2, 2, 0, 0], []])
def test_rows_of_towers_that_do_not_fit_the_batch_are_refused_on_all_workers(tower_rows):
    def work(job):
        batch = LocalBatch(4, dict.fromkeys(range(3), torch.zeros(1, 3)), tower_rows=tower_rows)
        next(Towers(nn.Linear(3, 1), 3, job=job)(batch))

    for outcome in simulate(work, 2):
        assert ("tower_rows = " in outcome.text) == (tower_rows != [2, 1, 1])


def test_workers_with_other_rows_of_towers_find_out():
    def work(job):
        rows = [2, 1, 1] if job.rank else [1, 2, 1]
        towers = Towers(nn.Linear(3, 1), 3, job=job)
        own = towers.placement.towers(job.rank)
        batch = LocalBatch(4, {tower: torch.zeros(rows[tower], 3) for tower in own}, tower_rows=rows)
        for tower in towers(batch):
            tower.backward(loss_of(towers.model, tower.batch))
        towers.average()

    for outcome in simulate(work, 2):
        assert "batch fingerprint" in outcome.text
