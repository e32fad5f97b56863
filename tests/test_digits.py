import functools
import gzip
import pickle
from importlib import resources

import numpy as np
import pytest
import torch

from samestep.data.readers import BatchedDataset
from samestep.errors import ConfigError, DataError
from samestep.recipes.digits.data import NUM_TRAIN, Digits, load_digits
from samestep.streams import stream_seed, uniforms

MEAN, STD = 4.88, 6.02


def seeds(count):
    return np.array([stream_seed(0, "example", 0, i) for i in range(count)], dtype=np.uint64)


def pixels(standardised):
    """Undo the standardisation: [n, 1, 8, 8] -> [n, 8, 8], 0..16."""
    return standardised[:, 0].numpy() * STD + MEAN


def test_the_file_holds_what_its_source_holds():
    pictures, labels = load_digits()
    assert pictures.shape == (1797, 8, 8)
    assert pictures.dtype == np.uint8
    assert (pictures.min(), pictures.max()) == (0, 16)
    # The counts and the sum of pixels that scikit-learn's copy has.
    assert np.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert pictures.sum() == 561718
    assert pictures[0, 0].tolist() == [0, 0, 5, 13, 9, 1, 0, 0]


def test_the_splits_are_parts_of_the_whole():
    train, test = Digits("train", augment=False), Digits("test", augment=False)
    assert (len(train), len(test)) == (NUM_TRAIN, 360) == (1437, 360)
    together = [
        pixels(split.batch(np.arange(len(split)), seeds(len(split)))[0]).round() for split in (train, test)
    ]
    pictures, _ = load_digits()
    assert sorted(p.astype(np.uint8).tobytes() for p in np.concatenate(together)) == sorted(
        p.tobytes() for p in pictures
    )


def test_the_split_never_changes():
    _, labels = Digits("test", augment=False).batch(np.arange(12), seeds(12))
    assert labels.tolist() == [1, 9, 2, 0, 7, 6, 4, 1, 7, 3, 8, 4]


@pytest.mark.parametrize("augment", [False, True])
def test_pictures_are_standardised(augment):
    digits = Digits("train", augment)
    pictures, labels = digits.batch(np.arange(len(digits)), seeds(len(digits)))
    assert (pictures.shape, pictures.dtype) == ((1437, 1, 8, 8), torch.float32)
    assert (labels.shape, labels.dtype) == ((1437,), torch.int64)
    tolerance = 0.1 if augment else 0.01
    assert abs(pictures.mean()) < tolerance
    assert abs(pictures.std() - 1) < tolerance


@pytest.mark.parametrize("augment", [False, True])
def test_a_row_depends_on_its_own_example_and_seed_alone(augment):
    digits = Digits("train", augment)
    examples = np.array([5, 700, 5, 1436, 0])
    pictures, labels = digits.batch(examples, seeds(5))
    for row in range(5):
        picture, label = digits.batch(examples[row : row + 1], seeds(5)[row : row + 1])
        assert torch.equal(pictures[row : row + 1], picture)
        assert torch.equal(labels[row : row + 1], label)
    assert torch.equal(pictures[0], pictures[2]) == (not augment)


def test_augmentation_shifts_by_a_pixel_and_scales_the_contrast():
    """Beside the vectorised shift, one pixel at a time."""
    count = 40
    plain = pixels(Digits("train", augment=False).batch(np.arange(count), seeds(count))[0])
    augmented = pixels(Digits("train", augment=True).batch(np.arange(count), seeds(count))[0])
    for picture, result, (down, right, contrast) in zip(
        plain, augmented, uniforms(seeds(count), 3), strict=True
    ):
        for row in range(8):
            for column in range(8):
                y, x = row + int(down * 3) - 1, column + int(right * 3) - 1
                pixel = picture[y, x] if 0 <= y < 8 and 0 <= x < 8 else 0.0
                assert result[row, column] == pytest.approx(pixel * (0.8 + 0.4 * contrast), abs=1e-4)


def test_single_examples_draw_from_torch_s_generator():
    digits = Digits("train", augment=True)
    assert isinstance(digits, BatchedDataset)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        first, label = digits[3]
        second, _ = digits[3]
        torch.manual_seed(0)
        again, _ = digits[3]
    assert (first.shape, label.shape) == ((1, 8, 8), ())
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_digits_travel_to_loader_processes():
    digits = Digits("test", augment=True)
    copy = pickle.loads(pickle.dumps(digits))
    assert torch.equal(copy.batch(np.arange(9), seeds(9))[0], digits.batch(np.arange(9), seeds(9))[0])


def test_another_split_is_refused():
    with pytest.raises(ConfigError, match="split = 'validation': expected train or test"):
        Digits("validation", augment=False)


ORIGINAL = (resources.files("samestep.recipes.digits") / "digits.csv.gz").read_bytes()
LINES = gzip.decompress(ORIGINAL)
zipped = functools.partial(gzip.compress, compresslevel=1)


@pytest.mark.parametrize(
    ("damaged", "named"),
    [
        (b"", "table"),
        (b"not gzip", "is not a gzipped table of numbers"),
        (ORIGINAL[:-100], "is not a gzipped table of numbers"),
        (ORIGINAL[:900] + b"\0\0" + ORIGINAL[902:], "is not a gzipped table of numbers"),
        (zipped(LINES.replace(b"0,", b"x,", 1)), "is not a gzipped table of numbers"),
        (zipped(LINES.replace(b"0,", b"", 1)), "is not a gzipped table of numbers"),
        (zipped(LINES.split(b"\n", 1)[1]), r"shape \(1796, 65\), expected \(1797, 65\)"),
        (zipped(LINES.replace(b"16,", b"17,", 1)), "expected pixels 0..16 and labels 0..9"),
        (zipped(b"\xff" + LINES), "is not a gzipped table of numbers"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, damaged, named):
    file = tmp_path / "digits.csv.gz"
    file.write_bytes(damaged)
    with pytest.raises(DataError, match=named) as error:
        load_digits(file)
    assert str(file) in str(error.value)
    assert "\n" not in str(error.value)
