import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from samestep.errors import ConfigError
from samestep.recipes.cifar10.pictures import central_pictures, distort_pictures
from samestep.streams import stream_seed, uniforms


def seeds(count):
    return np.array([stream_seed(0, "example", 0, i) for i in range(count)], dtype=np.uint64)


def noise(count, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, 3, 32, 32), dtype=np.uint8)


def flat(count):
    """Nearly one colour each, where the smallest standard deviation counts and cancellation is worst."""
    colours = np.random.default_rng(1).integers(0, 255, (count, 3, 1, 1), dtype=np.uint8)
    speck = np.zeros((1, 1, 32, 32), dtype=np.uint8)
    speck[..., 16, 16] = 1
    return colours + speck


def grey(count):
    """Three equal channels that differ in a single pixel."""
    return np.broadcast_to(flat(count)[:, :1], (count, 3, 32, 32)).copy()


def literal(picture, chances, size, brightness):
    """The definition, step by step in float64, for one picture; `chances` of down, right, flip, contrast."""
    top, left = (int(chance * (32 - size + 1)) for chance in chances[:2])
    x = picture[:, top : top + size, left : left + size].astype(np.float64)
    if chances[2] < 0.5:
        x = x[:, :, ::-1]
    x = x + brightness
    mean = x.mean(axis=(1, 2), keepdims=True)
    x = (x - mean) * (0.2 + 1.6 * chances[3]) + mean
    return (x - x.mean()) / max(x.std(), 1 / np.sqrt(x.size))


@pytest.mark.parametrize("size", [1, 2, 7, 24, 31, 32])
@pytest.mark.parametrize("make", [noise, flat, grey])
def test_distortions_are_those_of_the_definition(make, size):
    pictures = make(24)
    brightness = np.random.default_rng(2).uniform(-63, 63, len(pictures))
    twins = [
        literal(picture, chances, size, b)
        for picture, chances, b in zip(pictures, uniforms(seeds(24), 4), brightness, strict=True)
    ]
    assert np.abs(distort_pictures(pictures, seeds(24), size).numpy() - np.stack(twins)).max() < 1e-5


@pytest.mark.parametrize("size", [1, 7, 24, 32])
def test_the_middle_is_that_of_the_definition(size):
    pictures = np.concatenate([noise(8), flat(8), grey(8), np.full((1, 3, 32, 32), 255, dtype=np.uint8)])
    start = (32 - size) // 2
    x = pictures[:, :, start : start + size, start : start + size].astype(np.float64)
    std = np.maximum(x.std(axis=(1, 2, 3), keepdims=True), 1 / np.sqrt(x[0].size))
    twins = (x - x.mean(axis=(1, 2, 3), keepdims=True)) / std
    assert np.abs(central_pictures(pictures, size).numpy() - twins).max() < 1e-5


def test_the_middle_of_24_starts_at_4():
    pictures = np.zeros((1, 3, 32, 32), dtype=np.uint8)
    pictures[:, :, 4, 4] = 255
    assert (central_pictures(pictures)[0, :, 0, 0] > 1).all()


@pytest.mark.parametrize("make", [lambda p: distort_pictures(p, seeds(len(p))), central_pictures])
def test_what_comes_out_is_channels_last(make):
    pictures = make(noise(5))
    assert (pictures.shape, pictures.dtype) == ((5, 3, 24, 24), torch.float32)
    assert pictures.is_contiguous(memory_format=torch.channels_last)
    assert make(noise(0).reshape(0, 3, 32, 32)).shape == (0, 3, 24, 24)


@pytest.mark.long
@given(rows=st.lists(st.integers(0, 39), min_size=1, max_size=40), size=st.sampled_from([5, 24, 32]))
def test_a_row_depends_on_its_own_picture_and_seed_alone(rows, size):
    pictures = np.concatenate([noise(20), flat(10), grey(10)])
    together = distort_pictures(pictures, seeds(40), size)
    assert torch.equal(distort_pictures(pictures[rows], seeds(40)[rows], size), together[rows])
    middle = central_pictures(pictures, size)
    assert torch.equal(central_pictures(pictures[rows], size), middle[rows])


def test_the_number_of_threads_changes_no_bit():
    pictures, threads = noise(300), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = distort_pictures(pictures, seeds(300))
        torch.set_num_threads(3)
        assert torch.equal(distort_pictures(pictures, seeds(300)), alone)
    finally:
        torch.set_num_threads(threads)


def test_the_pictures_are_left_as_they_were():
    pictures = noise(6)
    before = pictures.copy()
    distort_pictures(pictures, seeds(6), 32)
    central_pictures(pictures, 32)
    assert np.array_equal(pictures, before)


NUM = 4000


@pytest.fixture(scope="module")
def ramps():
    """What became of one picture, 4,000 times: red is the column, green the row, blue random."""
    picture = noise(1)[0]
    picture[0], picture[1] = np.arange(32)[None, :], np.arange(32)[:, None]
    return distort_pictures(np.repeat(picture[None], NUM, axis=0), seeds(NUM)).double()


def slope(pictures, channel, axis):
    return pictures[:, channel].diff(dim=axis).mean(dim=(1, 2))


def test_half_of_the_pictures_are_flipped(ramps):
    flipped = slope(ramps, 0, 2) < 0
    assert (slope(ramps, 1, 1) > 0).all(), "upside down"
    assert abs(flipped.double().mean() - 0.5) < 4 * 0.5 / NUM**0.5


def test_crops_are_uniform_over_81_places():
    """A picture whose pixels all differ within a channel tells where its crop began."""
    picture = np.zeros((3, 32, 32), dtype=np.uint8)
    picture[0, :9, :9] = np.arange(1, 82).reshape(9, 9) + 100
    crops = distort_pictures(np.repeat(picture[None], NUM, axis=0), seeds(NUM))
    down, right, flip, _ = uniforms(seeds(NUM), 4).T
    corner = np.where(flip < 0.5, 23, 0)
    assert (crops[np.arange(NUM), 0, 0, corner] > crops[:, 1, 5, 5]).all()
    counts = np.bincount((down * 9).astype(int) * 9 + (right * 9).astype(int), minlength=81)
    chi_squared = ((counts - NUM / 81) ** 2 / (NUM / 81)).sum()
    assert len(counts) == 81
    assert chi_squared < 80 + 4 * np.sqrt(160)


def test_contrast_is_uniform_and_keeps_the_channel_means(ramps):
    """The blue channel's deviation grows with the contrast, the distance between means does not."""
    deviations = ramps[:, 2].std(dim=(1, 2), correction=0)
    gap = (ramps[:, 2].mean(dim=(1, 2)) - ramps[:, 0].mean(dim=(1, 2))).abs()
    contrast = deviations / gap * (127.5 - 15.5) / 73.9  # of uniform bytes, and of the columns' middle
    assert abs(contrast.mean() - 1.0) < 0.05
    assert abs(contrast.std() - 1.6 / 12**0.5) < 0.06
    assert contrast.min() < 0.25
    assert 1.65 < contrast.max() < 2.2


def test_what_is_drawn_for_one_property_says_nothing_of_another():
    correlations = np.corrcoef(uniforms(seeds(NUM), 4).T) - np.eye(4)
    assert np.abs(correlations).max() < 5 / NUM**0.5


def test_standardised_pictures_have_mean_0_and_deviation_1(ramps):
    assert ramps.mean(dim=(1, 2, 3)).abs().max() < 1e-5
    assert (ramps.std(dim=(1, 2, 3), correction=0) - 1).abs().max() < 1e-5


@pytest.mark.parametrize("size", [0, -1, 33])
def test_an_impossible_size_is_refused(size):
    with pytest.raises(ConfigError, match=f"picture size = {size}: expected 1 to 32"):
        distort_pictures(noise(1), seeds(1), size)
    with pytest.raises(ConfigError, match=f"picture size = {size}: expected 1 to 32"):
        central_pictures(noise(1), size)
