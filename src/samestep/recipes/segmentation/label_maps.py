"""A folder of pictures and a folder of label maps, paired by name and checked before use."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from samestep.checkpoint.durable import open_regular, storage
from samestep.errors import DataError, MissingFileError, one_line
from samestep.workers.collectives import gather_objects
from samestep.workers.job import Job

__all__ = ["LabelMaps"]

_PICTURES, _LABELS = (".png", ".jpg", ".jpeg"), (".png",)  # suffixes
_PICTURE_MODES = ("RGB", "RGBA", "L", "LA", "P", "CMYK")
_FORMATS = {".png": ["PNG"], ".jpg": ["JPEG"], ".jpeg": ["JPEG"]}
# Pillow raises these for damaged files; Image.UnidentifiedImageError is an OSError.
_UNREADABLE = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)


class LabelMaps:
    """Pictures and label maps in the folders `pictures` and `labels`, paired by their names without suffix.

    A picture is a PNG or JPEG with 8 bits per channel, in colour or grey. A label map is a PNG with one 8-bit
    channel or a palette; its values (not its colours) are the labels. Hidden files and other suffixes are
    ignored. Pairs are sorted by name.

    Args:
        folder: the folder that holds `pictures` and `labels`.
        num_classes: the number of classes; labels are 0 to `num_classes` - 1.
        ignore_label: the label of pixels without a class.

    Raises:
        MissingFileError: a folder is missing, or a picture or label map has no partner.
        DataError: a file cannot be opened, is of another kind, or differs from its partner in size.
    """

    def __init__(self, folder: Path, num_classes: int, *, ignore_label: int = 255) -> None:
        self.num_classes = num_classes
        self.ignore_label = ignore_label
        self.pairs = _pairs(folder / "pictures", folder / "labels")
        for picture, labels in self.pairs:
            _check_kinds(picture, labels)

    def __len__(self) -> int:
        """Return the number of pictures."""
        return len(self.pairs)

    def read(self, example: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Return one picture, uint8 [height, width, 3], and its label map, uint8 [height, width].

        Raises:
            DataError: a file is damaged, or a label is neither a class nor the ignore label.
        """
        picture, path = self.pairs[example]
        labels = _read(path)
        self._check_labels(path, labels)
        return _read(picture, "RGB"), labels

    def check(self, job: Job) -> None:
        """Read all pictures and label maps once, each on one worker.

        Args:
            job: the job, all workers of which must call this.

        Raises:
            DataError: as for `read`; the same error on every worker.
        """
        own = self._first_problem(range(job.rank, len(self), job.world_size))
        for problem in gather_objects(job.transport, own, "check of the label maps"):
            if problem is not None:
                raise DataError(problem)

    def _first_problem(self, examples: Iterable[int]) -> str | None:
        try:
            for example in examples:
                self.read(example)
        except DataError as error:
            return str(error)
        return None

    def _check_labels(self, path: Path, labels: NDArray[np.uint8]) -> None:
        wrong = np.argwhere((labels >= self.num_classes) & (labels != self.ignore_label))
        if len(wrong):
            row, column = wrong[0].tolist()
            raise DataError(
                f"{path}: label {labels[row, column]} in row {row}, column {column} (and in {len(wrong) - 1} "
                f"more pixels), expected 0 to {self.num_classes - 1}, or {self.ignore_label} to ignore; "
                "correct the label map, or set --classes or --ignore-label"
            )


def _pairs(pictures: Path, labels: Path) -> list[tuple[Path, Path]]:
    """Return pairs of a picture and a label map, sorted by name."""
    found = _by_stem(pictures, _PICTURES)
    maps = _by_stem(labels, _LABELS)
    if not found:
        raise DataError(f"{pictures}: no picture there, expected files {_named(_PICTURES)}; add some")
    for stem in sorted(found.keys() ^ maps.keys()):
        if stem in found:
            raise MissingFileError(
                f"{labels / stem}.png: not there, expected the label map of {found[stem]}; add it, or remove "
                "the picture"
            )
        raise MissingFileError(
            f"{pictures / stem}: no such file {_named(_PICTURES)}, expected the picture of {maps[stem]}; "
            "add it, or remove the label map"
        )
    return [(found[stem], maps[stem]) for stem in sorted(found)]


def _by_stem(folder: Path, suffixes: tuple[str, ...]) -> dict[str, Path]:
    if not os.path.isdir(folder):
        raise MissingFileError(
            f"{folder}: no such folder, expected one with files {_named(suffixes)}; add it"
        )
    with storage(folder, "read"):
        paths = sorted(folder.iterdir())
    found: dict[str, Path] = {}
    for path in paths:
        if path.suffix.lower() not in suffixes or path.name.startswith("."):
            continue
        if path.stem in found:
            raise DataError(
                f"{path}: {found[path.stem].name} has the same name, expected one; remove the other"
            )
        found[path.stem] = path
    return found


def _named(suffixes: tuple[str, ...]) -> str:
    return " or ".join(suffixes)


def _check_kinds(picture: Path, labels: Path) -> None:
    """Check kind and size, reading only the files' headers."""
    mode, size, depth = _look(picture)
    # Pillow silently keeps only the upper 8 of 16 bits per channel.
    if mode not in _PICTURE_MODES or depth > 8:
        raise DataError(
            f"{picture}: its pixels are {mode} of {depth} bits, expected 8 bits a channel; convert it"
        )
    mode, size_of_labels, depth = _look(labels)
    # Pillow scales grey values of fewer bits up to 255, but not the indices of a palette.
    if mode != "P" and (mode, depth) != ("L", 8):
        raise DataError(
            f"{labels}: its pixels are {mode} of {depth} bits, expected one channel of 8 bits, or a palette; "
            "convert it so that values are labels"
        )
    if size_of_labels != size:
        raise DataError(
            f"{labels}: {_pixels(size_of_labels)}, expected the {_pixels(size)} of {picture}; replace the "
            "one that is wrong"
        )


def _look(path: Path) -> tuple[str, tuple[int, int], int]:
    """Return a file's Pillow mode, (width, height), and bits per channel."""
    with _opened(path) as (image, file):
        if image.format != "PNG":
            return image.mode, image.size, 8
        if getattr(image, "is_animated", False):
            raise DataError(f"{path}: is animated, expected a single picture; save one frame of it")
        file.seek(0)
        bit_depth = file.read(25)[-1]  # in IHDR, which is always the first chunk
        return image.mode, image.size, bit_depth


def _read(path: Path, mode: str | None = None) -> NDArray[np.uint8]:
    with _opened(path) as (image, _):
        return np.array(image if mode is None else image.convert(mode), dtype=np.uint8)


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Image.Image, BinaryIO]]:
    """Open a picture; turn errors inside the block into a `DataError`."""
    try:
        opened = open_regular(path)
        if opened is None:
            raise OSError("it is not a regular file")
        with opened as file, Image.open(file, formats=_FORMATS[path.suffix.lower()]) as image:
            yield image, file
    except DataError:
        raise
    except _UNREADABLE as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> DataError:
    why, kind = one_line(str(error), 120), path.suffix[1:].upper()
    return DataError(f"{path}: cannot be read ({why}), expected a whole {kind} file; restore it")


def _pixels(size: tuple[int, int]) -> str:
    width, height = size
    return f"{width}×{height} pixels"
