import numpy as np
import pytest
import torch

from samestep.data.readers import BatchedDataset
from samestep.errors import BatchError, ConfigError
from samestep.recipes.segmentation.crops import RandomCrops, WholePictures
from samestep.streams import stream_seed, uniforms

SIZES = [(20, 30), (17, 40), (9, 21), (16, 16), (20, 30)]  # height, width


class Source:
    """Pictures whose first channel is their label map."""

    def __len__(self):
        return len(SIZES)

    def read(self, example):
        picture = np.random.default_rng(example).integers(0, 255, (*SIZES[example], 3), dtype=np.uint8)
        return picture, picture[:, :, 0]


def seeds(count):
    return np.array([stream_seed(0, "example", 0, i) for i in range(count)], dtype=np.uint64)


def slow_crop(picture, size, down, right, flip):
    """Pixel after pixel."""
    crop = np.full((size, size, 3), 127, dtype=np.uint8)
    labels = np.full((size, size), 255, dtype=np.uint8)
    height, width, _ = picture.shape
    top, left = int(down * (max(0, height - size) + 1)), int(right * (max(0, width - size) + 1))
    for row in range(size):
        for column in range(size):
            y, x = top + row, left + (size - 1 - column if flip < 0.5 else column)
            if y < height and x < width:
                crop[row, column] = picture[y, x]
                labels[row, column] = picture[y, x, 0]
    return crop, labels


def as_bytes(pictures):
    """Undo the scaling: [n, 3, h, w] -> uint8 [n, h, w, 3]."""
    return pictures.permute(0, 2, 3, 1).add(1).mul(127.5).round().to(torch.uint8).numpy()


@pytest.mark.parametrize("size", [16, 9, 40])
def test_crops_are_those_of_the_slow_twin(size):
    examples = np.tile(np.arange(len(SIZES)), 6)
    pictures, labels = RandomCrops(Source(), size).batch(examples, seeds(len(examples)))
    assert (pictures.dtype, labels.dtype) == (torch.float32, torch.uint8)
    assert pictures.is_contiguous(memory_format=torch.channels_last)
    chances = uniforms(seeds(len(examples)), 3)
    for row, example in enumerate(examples):
        crop, expected = slow_crop(Source().read(example)[0], size, *chances[row])
        assert np.array_equal(as_bytes(pictures)[row], crop)
        assert np.array_equal(labels[row].numpy(), expected)


def test_a_row_depends_on_its_own_example_and_seed_alone():
    crops = RandomCrops(Source(), 12)
    assert isinstance(crops, BatchedDataset)
    examples = np.array([3, 0, 3, 2])
    pictures, labels = crops.batch(examples, seeds(4))
    for row in range(4):
        alone = crops.batch(examples[row : row + 1], seeds(4)[row : row + 1])
        assert torch.equal(alone[0][0], pictures[row])
        assert torch.equal(alone[1][0], labels[row])
    assert not torch.equal(pictures[0], pictures[2])


def test_whole_pictures_are_as_they_are():
    pictures, labels = WholePictures(Source()).batch(np.array([0, 4]), seeds(2))
    for row, example in enumerate((0, 4)):
        assert np.array_equal(as_bytes(pictures)[row], Source().read(example)[0])
        assert np.array_equal(labels[row].numpy(), Source().read(example)[1])


def test_whole_pictures_of_different_sizes_are_refused():
    with pytest.raises(BatchError, match="whole pictures of 17×40, 20×30 pixels in one batch: take one"):
        WholePictures(Source()).batch(np.array([0, 1, 4]), seeds(3))


def test_a_size_below_one_is_refused():
    with pytest.raises(ConfigError, match="crop size = 0: expected at least 1 pixel"):
        RandomCrops(Source(), 0)
