"""CIFAR-10: 60,000 colour pictures of 32×32 pixels in ten classes, in its native binary format."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from samestep.errors import ConfigError, DataError, MissingFileError
from samestep.recipes.cifar10.download import Archive, fetch
from samestep.recipes.cifar10.pictures import central_pictures, check_size, distort_pictures

__all__ = ["CLASS_NAMES", "Cifar10", "Cifar10Pictures", "ensure_cifar10"]

CLASS_NAMES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)
"""The names of the labels 0 to 9."""

_URL, _FILE = "https://www.cs.toronto.edu/~kriz/", "cifar-10-binary.tar.gz"
_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
_FOLDER = "cifar-10-batches-bin"
_BATCHES = {"train": tuple(f"data_batch_{i}.bin" for i in range(1, 6)), "test": ("test_batch.bin",)}
_SHAPE = (3, 32, 32)
_RECORD_BYTES = 1 + 3 * 32 * 32


def ensure_cifar10(data_dir: Path, *, base_url: str = _URL, md5: str = _MD5) -> Path:
    """Return the folder of the batch files; if it is missing, download and unpack the archive first.

    Any number of processes may call this at once: one downloads, the others wait. An archive in `data_dir`
    with the right checksum is not downloaded again.

    Args:
        data_dir: the folder that holds `cifar-10-batches-bin`, or that folder itself.
        base_url: where `cifar-10-binary.tar.gz` is served.
        md5: the archive's MD5 checksum, in hexadecimal digits.

    Raises:
        MissingFileError: the archive cannot be downloaded, or `data_dir` cannot be written to.
        DataError: the download is not the expected archive.
    """
    archive = Archive(f"{base_url.rstrip('/')}/{_FILE}", md5, _FOLDER)
    return _find(data_dir) or fetch(archive, data_dir)


def _find(data_dir: Path) -> Path | None:
    """Return the folder that holds any batch file: `cifar-10-batches-bin` or `data_dir` itself."""
    names = [name for split in _BATCHES.values() for name in split]
    folders = (data_dir / _FOLDER, data_dir)
    return next((folder for folder in folders if any(os.path.exists(folder / name) for name in names)), None)


class Cifar10:
    """The records of one split, in memory-mapped files, which processes share.

    A file holds 10,000 records of one label byte and 3,072 pixel bytes, channel by channel. Opening a file
    checks its size and labels; after that, only requested records are read.

    Args:
        split: "train" (five files) or "test" (one file).
        data_dir: the folder that holds `cifar-10-batches-bin`, or that folder itself.
        num_records: the expected number of records in each file.

    Raises:
        ConfigError: `split` is neither.
        MissingFileError: a batch file is missing.
        DataError: a batch file is truncated, has another number of records, or a label above 9.

    References:
        https://www.cs.toronto.edu/~kriz/cifar.html
    """

    def __init__(self, split: Literal["train", "test"], data_dir: Path, *, num_records: int = 10_000) -> None:
        if split not in _BATCHES:
            raise ConfigError(f"split = {split!r}: expected train or test")
        folder = _find(data_dir) or data_dir / _FOLDER
        self.split = split
        self._settings = (split, folder, num_records)
        self._files = [_open(folder / name, num_records) for name in _BATCHES[split]]
        self.labels: NDArray[np.int64] = np.concatenate([file[:, 0] for file in self._files]).astype(np.int64)
        """int64 [records], 0 to 9: an index of `CLASS_NAMES`."""

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self.labels)

    def __reduce__(self) -> tuple[object, ...]:
        # Pickling a memory map copies all its data, so let the other process open the files instead.
        return _reopen, self._settings

    def pictures(self, examples: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return pictures, uint8 [n, 3, 32, 32], of the examples, int64 [n]."""
        records = np.empty((len(examples), _RECORD_BYTES), dtype=np.uint8)
        files, rows = np.divmod(examples, len(self._files[0]))
        # Faster than one fancy index per file, unless a call asks for hundreds of examples.
        for record, file, row in zip(records, files.tolist(), rows.tolist(), strict=True):
            record[:] = self._files[file][row]
        return records[:, 1:].reshape(-1, *_SHAPE)


class Cifar10Pictures:
    """Pictures and labels as inputs of a model (a `BatchedDataset`).

    Args:
        records: the split.
        distort: True, for training, applies `distort_pictures` with each example's own random stream; False,
            for testing, crops the middle of each picture.
        picture_size: height and width in pixels; 32 for whole pictures.

    Raises:
        ConfigError: `picture_size` is below 1 or above 32.
    """

    def __init__(self, records: Cifar10, *, distort: bool, picture_size: int = 24) -> None:
        check_size(picture_size)
        self.records = records
        self.distort = distort
        self.picture_size = picture_size

    def __len__(self) -> int:
        """Return the number of pictures."""
        return len(self.records)

    def batch(self, examples: NDArray[np.int64], seeds: NDArray[np.uint64]) -> tuple[Tensor, Tensor]:
        """Return pictures, float32 [n, 3, size, size], channels last in memory, and labels, int64 [n].

        Args:
            examples: indices of pictures in the split, int64 [n].
            seeds: seeds of the pictures' random streams, uint64 [n]; unused without `distort`.
        """
        pictures = self.records.pictures(examples)
        labels = torch.from_numpy(self.records.labels[examples])
        if self.distort:
            return distort_pictures(pictures, seeds, self.picture_size), labels
        return central_pictures(pictures, self.picture_size), labels


def _reopen(split: Literal["train", "test"], folder: Path, num_records: int) -> Cifar10:
    return Cifar10(split, folder, num_records=num_records)


def _open(path: Path, num_records: int) -> NDArray[np.uint8]:
    """Memory-map a batch file, uint8 [records, 3073], and check it."""
    remedy = f"delete {path.parent} and fetch it again, or unpack {_FILE} there yourself"
    try:
        _check_length(path, num_records, remedy)
        values = np.memmap(path, dtype=np.uint8, mode="r")
    except (FileNotFoundError, NotADirectoryError):
        missing = f"{path}: not there, expected {num_records} records of CIFAR-10; {remedy}"
        raise MissingFileError(missing) from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error}); {remedy}") from error
    records = values.view(np.ndarray).reshape(num_records, _RECORD_BYTES)
    _check_labels(path, records[:, 0], remedy)
    return records


def _check_length(path: Path, num_records: int, remedy: str) -> None:
    size = path.stat().st_size
    found, rest = divmod(size, _RECORD_BYTES)
    if rest:
        raise DataError(
            f"{path}: of {size} bytes, the last {rest}, from offset {size - rest} on, are no whole record; "
            f"expected {num_records} records of {_RECORD_BYTES} bytes; {remedy}"
        )
    if found != num_records:
        raise DataError(
            f"{path}: {found} records ({size} bytes), expected {num_records} of {_RECORD_BYTES} bytes; "
            f"{remedy}"
        )


def _check_labels(path: Path, labels: NDArray[np.uint8], remedy: str) -> None:
    wrong = np.flatnonzero(labels >= len(CLASS_NAMES))
    if len(wrong):
        first = int(wrong[0])
        raise DataError(
            f"{path}: record {first} at offset {first * _RECORD_BYTES} has label {labels[first]}, "
            f"expected 0 to 9; {remedy}"
        )
