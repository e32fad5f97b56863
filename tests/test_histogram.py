import math

import numpy as np
import pytest
import torch

from samestep.app.loggers.histogram import Histogram


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_values", [1, 1000, 600_000])
def test_histograms_count_as_numpy_does(dtype, num_values):
    values = torch.randn(num_values, generator=torch.Generator().manual_seed(0)).to(dtype)
    histogram = Histogram.of(values.reshape(-1, 1))
    exact = values.double().numpy()
    span = (exact.min(), exact.max())
    expected, _ = np.histogram(exact, bins=30, range=span) if num_values > 1 else ([1] + [0] * 29, None)
    assert (histogram.lowest, histogram.highest) == span
    assert list(histogram.counts) == list(expected)
    assert histogram.total == pytest.approx(exact.sum(), rel=1e-9, abs=1e-9)
    assert histogram.squares == pytest.approx(np.square(exact).sum())


@pytest.mark.parametrize(
    ("values", "lowest", "highest", "num"),
    [
        (torch.tensor([1.0, math.nan, 3.0, math.inf, -math.inf]), 1, 3, 2),
        (torch.full((7,), 2.5), 2.5, 2.5, 7),
        (torch.tensor([0.0, 1e-45]), 0, torch.tensor(1e-45).item(), 2),
        (torch.tensor([-3e38, 3e38]), torch.tensor(-3e38).item(), torch.tensor(3e38).item(), 2),
        (torch.tensor([-1.7e308, 1.7e308], dtype=torch.float64), -1.7e308, 1.7e308, 2),
        (torch.tensor([4.0, 0.0, 5.0]).to_sparse(), 4, 5, 2),
        (torch.tensor([3 + 4j, 0j]), 0, 5, 2),
        (torch.tensor([True, False, True]), 0, 1, 3),
    ],
)
def test_histograms_of_unusual_values(values, lowest, highest, num):
    histogram = Histogram.of(values)
    assert (histogram.lowest, histogram.highest, sum(histogram.counts)) == (lowest, highest, num)


@pytest.mark.parametrize("values", [torch.zeros(0), torch.full((3,), math.nan)])
def test_there_is_no_histogram_of_nothing(values):
    assert Histogram.of(values) is None
