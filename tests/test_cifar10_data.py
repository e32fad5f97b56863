import io
import mmap
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from samestep.data.loader import TowerLoader
from samestep.data.readers import BatchedDataset
from samestep.errors import ConfigError, DataError, Error, MissingFileError
from samestep.recipes.cifar10.data import CLASS_NAMES, Cifar10, Cifar10Pictures, ensure_cifar10
from samestep.recipes.cifar10.pictures import central_pictures, distort_pictures
from samestep.streams import stream_seed
from samestep.towers.towers import Towers

NAMES = [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]
NUM, RECORD = 20, 3073


def seeds(count):
    return np.array([stream_seed(0, "example", 0, i) for i in range(count)], dtype=np.uint64)


def make_records(name):
    random = np.random.default_rng(NAMES.index(name))
    records = random.integers(0, 256, (NUM, RECORD), dtype=np.uint8)
    records[:, 0] %= 10
    return records


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "cifar-10-batches-bin"
    folder.mkdir()
    for name in NAMES:
        make_records(name).tofile(folder / name)
    return folder.parent


@pytest.fixture
def damaged(data_dir, tmp_path):
    """A copy of the folder, for tests that break it."""
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    for name in NAMES:
        (folder / name).write_bytes((data_dir / folder.name / name).read_bytes())
    return folder


def slow_records(path):
    """Record after record, as the format is described."""
    with io.BytesIO(path.read_bytes()) as file:
        while label := file.read(1):
            pixels = np.frombuffer(file.read(3072), dtype=np.uint8)
            yield label[0], pixels.reshape(3, 32, 32)


@pytest.mark.parametrize("split", ["train", "test"])
def test_records_are_those_in_the_files(data_dir, split):
    names = NAMES[:5] if split == "train" else NAMES[5:]
    expected = [r for name in names for r in slow_records(data_dir / "cifar-10-batches-bin" / name)]
    records = Cifar10(split, data_dir, num_records=NUM)
    pictures = records.pictures(np.arange(len(records)))
    assert (pictures.shape, pictures.dtype) == ((len(expected), 3, 32, 32), np.uint8)
    assert records.labels.tolist() == [label for label, _ in expected]
    assert np.array_equal(pictures, np.stack([picture for _, picture in expected]))
    assert len(CLASS_NAMES) == 10


@given(examples=st.lists(st.integers(0, 5 * NUM - 1), max_size=30))
def test_any_records_in_any_order(data_dir, examples):
    records = Cifar10("train", data_dir, num_records=NUM)
    everything = np.concatenate([make_records(name) for name in NAMES[:5]])[:, 1:]
    pictures = records.pictures(np.array(examples, dtype=np.int64))
    assert np.array_equal(pictures.reshape(-1, 3072), everything[examples])


def test_the_folder_itself_can_be_named(data_dir):
    folder = data_dir / "cifar-10-batches-bin"
    assert len(Cifar10("test", folder, num_records=NUM)) == NUM
    assert ensure_cifar10(folder) == ensure_cifar10(data_dir) == folder


def test_files_are_mapped_not_read(data_dir):
    for file in Cifar10("train", data_dir, num_records=NUM)._files:
        assert not file.flags.writeable
        while isinstance(file, np.ndarray):
            file = file.base
        assert isinstance(file, mmap.mmap)


def test_records_travel_to_loader_processes_by_name(data_dir):
    records = Cifar10("train", data_dir, num_records=NUM)
    pickled = pickle.dumps(records)
    assert len(pickled) < RECORD
    assert np.array_equal(pickle.loads(pickled).pictures(np.arange(7)), records.pictures(np.arange(7)))


def test_pictures_for_training_and_testing(data_dir):
    records = Cifar10("train", data_dir, num_records=NUM)
    examples = np.array([3, 99, 3])
    distorted, labels = Cifar10Pictures(records, distort=True, picture_size=28).batch(examples, seeds(3))
    assert torch.equal(distorted, distort_pictures(records.pictures(examples), seeds(3), 28))
    assert (labels.dtype, labels.tolist()) == (torch.int64, records.labels[examples].tolist())
    dataset = Cifar10Pictures(records, distort=False)
    assert isinstance(dataset, BatchedDataset)
    assert len(dataset) == 5 * NUM
    assert torch.equal(dataset.batch(examples, seeds(3))[0], central_pictures(records.pictures(examples)))


def test_loader_processes_change_no_bit(data_dir):
    dataset = Cifar10Pictures(Cifar10("train", data_dir, num_records=NUM), distort=True)
    towers = Towers(torch.nn.Linear(1, 1), 4)
    inline, ahead = (
        [batch.slices for batch in TowerLoader(dataset, 32, towers, num_workers=workers)]
        for workers in (0, 1)
    )
    assert len(inline) == 4
    for one, other in zip(inline, ahead, strict=True):
        assert one.keys() == other.keys()
        for tower in one:
            assert torch.equal(one[tower][0], other[tower][0])
            assert one[tower][0].stride() == other[tower][0].stride()
            assert torch.equal(one[tower][1], other[tower][1])


def test_a_missing_file_is_named(damaged):
    (damaged / "data_batch_3.bin").unlink()
    assert len(Cifar10("test", damaged.parent, num_records=NUM)) == NUM
    with pytest.raises(MissingFileError, match=r"data_batch_3\.bin: not there, expected 20 records") as error:
        Cifar10("train", damaged.parent, num_records=NUM)
    assert f"delete {damaged} and fetch it again" in str(error.value)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(MissingFileError, match=r"cifar-10-batches-bin/test_batch\.bin: not there"):
        Cifar10("test", tmp_path / "nowhere")


def truncate(path, num_bytes):
    path.write_bytes(path.read_bytes()[:num_bytes])


def relabel(path, record, label):
    values = bytearray(path.read_bytes())
    values[record * RECORD] = label
    path.write_bytes(values)


@pytest.mark.parametrize(
    ("damage", "reported"),
    [
        (lambda path: truncate(path, 19 * RECORD + 7), "of 58394 bytes, the last 7, from offset 58387 on"),
        (lambda path: truncate(path, 5), "of 5 bytes, the last 5, from offset 0 on"),
        (lambda path: truncate(path, 0), r"0 records \(0 bytes\), expected 20 of 3073 bytes"),
        (lambda path: truncate(path, 18 * RECORD), r"18 records \(55314 bytes\), expected 20"),
        (lambda path: relabel(path, 13, 10), "record 13 at offset 39949 has label 10, expected 0 to 9"),
        (lambda path: relabel(path, 19, 255), "record 19 at offset 58387 has label 255, expected 0 to 9"),
        (lambda path: (path.unlink(), path.mkdir()), "test_batch.bin"),
    ],
)
def test_a_damaged_file_is_refused(damaged, damage, reported):
    path = damaged / "test_batch.bin"
    damage(path)
    with pytest.raises(DataError, match=reported) as error:
        Cifar10("test", damaged.parent, num_records=NUM)
    assert isinstance(error.value, Error)
    assert str(error.value).startswith(f"{path}: ")
    assert str(error.value).endswith("or unpack cifar-10-binary.tar.gz there yourself")
    assert "\n" not in str(error.value)


def test_ten_thousand_records_are_expected(data_dir):
    with pytest.raises(DataError, match=r"20 records \(61460 bytes\), expected 10000 of 3073 bytes"):
        Cifar10("test", data_dir)


def test_another_split_is_refused(data_dir):
    with pytest.raises(ConfigError, match="split = 'validation': expected train or test"):
        Cifar10("validation", data_dir)


@pytest.mark.parametrize("size", [0, 33])
def test_an_impossible_size_is_refused_at_once(data_dir, size):
    with pytest.raises(ConfigError, match=f"picture size = {size}: expected 1 to 32"):
        Cifar10Pictures(Cifar10("test", data_dir, num_records=NUM), distort=False, picture_size=size)
