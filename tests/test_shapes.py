import math

import numpy as np
import pytest

from samestep.errors import ConfigError
from samestep.recipes.segmentation.shapes import CLASS_NAMES, Shapes, _distance


def test_a_picture_follows_from_seed_split_and_number():
    def draw(split, seed, example):
        return b"".join(values.tobytes() for values in Shapes(split, seed).read(example))

    keys = [("train", 0, 5), ("train", 0, 6), ("test", 0, 5), ("train", 1, 5)]
    assert len({draw(*key) for key in keys}) == 4
    assert [draw(*key) for key in keys] == [draw(*key) for key in keys]


def test_label_maps_hold_all_classes_and_outlines_to_ignore():
    shapes = Shapes("test", ignore_label=9)
    assert (len(Shapes("train")), len(shapes)) == (1000, 200)
    labels = np.stack([shapes.read(example)[1] for example in range(100)])
    shares = np.bincount(labels.ravel(), minlength=10) / labels.size
    assert set(np.flatnonzero(shares)) == {*range(len(CLASS_NAMES)), 9}
    assert shares[0] > 0.5
    assert all(0.02 < share < 0.2 for share in shares[1:4])
    assert 0.01 < shares[9] < 0.1


def test_a_colour_says_nothing_about_a_class():
    """The mean colours of the classes are alike, and no grey is a shape."""
    shapes = Shapes("train")
    pictures, labels = (np.stack(values) for values in zip(*map(shapes.read, range(300)), strict=True))
    means = np.stack([pictures[labels == label].mean(axis=0) for label in (1, 2, 3)])
    assert np.ptp(means, axis=0).max() < 25
    assert abs(np.ptp(pictures[labels == 0].mean(axis=0))) < 1


@pytest.mark.parametrize(
    ("label", "area"), [(1, math.pi), (2, 2.0), (3, 3 * math.sqrt(3) / 4)], ids=CLASS_NAMES[1:]
)
def test_shapes_have_the_area_of_their_radius(label, area):
    found = 0
    for seed in range(40):
        distance = _distance(label, np.random.default_rng(seed))
        inside = distance < 0
        if inside[[0, -1]].any() or inside[:, [0, -1]].any():
            continue
        radius = np.random.default_rng(seed).uniform(8, 14)
        assert inside.sum() == pytest.approx(area * radius**2, rel=0.08)
        found += 1
    assert found > 10


def test_another_split_is_refused():
    with pytest.raises(ConfigError, match="split = 'validation': expected train or test"):
        Shapes("validation")
