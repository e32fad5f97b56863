import io
import os
import shutil
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from samestep import cli
from samestep.errors import DataError, MissingFileError
from samestep.recipes.segmentation.label_maps import LabelMaps
from samestep.workers.job import Job

JOB = Job(torch.device("cpu"))
SIZES = {"a": (20, 30), "b": (17, 40), "c": (33, 21)}  # height, width


def make_pair(name):
    random = np.random.default_rng(ord(name))
    picture = random.integers(0, 256, (*SIZES[name], 3), dtype=np.uint8)
    labels = random.choice(np.array([0, 1, 2, 255], dtype=np.uint8), SIZES[name])
    return picture, labels


def write(path, values):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(values).save(path)


@pytest.fixture
def folder(tmp_path):
    for name in SIZES:
        picture, labels = make_pair(name)
        write(tmp_path / "pictures" / f"{name}.png", picture)
        write(tmp_path / "labels" / f"{name}.png", labels)
    return tmp_path


def test_pairs_are_those_in_the_files_by_name(folder):
    (folder / "pictures" / ".hidden.png").write_text("x")
    (folder / "labels" / "notes.txt").write_text("x")
    maps = LabelMaps(folder, 3)
    maps.check(JOB)
    assert len(maps) == 3
    for example, name in enumerate("abc"):
        for found, expected in zip(maps.read(example), make_pair(name), strict=True):
            assert found.dtype == np.uint8
            assert np.array_equal(found, expected)


@pytest.mark.parametrize("mode", ["L", "LA", "RGBA", "P", "CMYK"])
def test_pictures_of_other_kinds_become_colours(folder, mode):
    image = Image.fromarray(make_pair("a")[0]).convert(mode)
    (folder / "pictures" / "a.png").unlink()
    image.save(folder / "pictures" / ("a.jpg" if mode == "CMYK" else "a.PNG"))
    assert LabelMaps(folder, 3).read(0)[0].shape == (20, 30, 3)


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_a_palette_does_not_change_labels(folder, bits):
    labels = make_pair("a")[1] % 4
    image = Image.fromarray(labels).convert("P")
    image.putpalette([200, 10, 10, 5, 90, 5, 1, 2, 3, 77, 77, 7])
    image.putdata(labels.ravel().tolist())
    image.save(folder / "labels" / "a.png", bits=bits)
    assert np.array_equal(LabelMaps(folder, 4).read(0)[1], labels)


def save_black(path, bits, colours):
    """Write what Pillow does not: grey of other than 8 bits, and colours of more."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 30, 20, bits, {1: 0, 2: 4, 3: 2, 4: 6}[colours], 0, 0, 0)
    pixels = zlib.compress((b"\0" + bytes(30 * bits * colours // 8)) * 20)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    )


PICTURE, LABELS = make_pair("a")
FAULTS = {
    "no folder": (
        lambda root: shutil.rmtree(root),
        MissingFileError,
        "pictures: no such folder, expected one with files .png or .jpg or .jpeg; add it",
    ),
    "no label maps": (
        lambda root: shutil.rmtree(root / "labels"),
        MissingFileError,
        "labels: no such folder, expected one with files .png; add it",
    ),
    "empty folders": (
        lambda root: [path.unlink() for path in root.glob("*/*.png")],
        DataError,
        "pictures: no picture there, expected files .png or .jpg or .jpeg; add some",
    ),
    "a picture alone": (
        lambda root: (root / "labels" / "b.png").unlink(),
        MissingFileError,
        "labels/b.png: not there, expected the label map of ",
    ),
    "a label map alone": (
        lambda root: (root / "pictures" / "b.png").unlink(),
        MissingFileError,
        "pictures/b: no such file .png or .jpg or .jpeg, expected the picture of ",
    ),
    "two of one name": (
        lambda root: write(root / "pictures" / "b.jpg", PICTURE),
        DataError,
        "pictures/b.png: b.jpg has the same name, expected one; remove the other",
    ),
    "another size": (
        lambda root: write(root / "labels" / "a.png", LABELS[:, :29]),
        DataError,
        "labels/a.png: 29×20 pixels, expected the 30×20 pixels of ",
    ),
    "a label map in colour": (
        lambda root: write(root / "labels" / "a.png", PICTURE),
        DataError,
        "labels/a.png: its pixels are RGB of 8 bits, expected one channel of 8 bits, or a palette; convert",
    ),
    "a label map of 16 bits": (
        lambda root: write(root / "labels" / "a.png", LABELS.astype(np.uint16)),
        DataError,
        "labels/a.png: its pixels are I;16 of 16 bits",
    ),
    "a label map of 1 bit": (
        lambda root: write(root / "labels" / "a.png", LABELS > 0),
        DataError,
        "labels/a.png: its pixels are 1 of 1 bits",
    ),
    "a label map of 4 bits": (
        lambda root: save_black(root / "labels" / "a.png", 4, 1),
        DataError,
        "labels/a.png: its pixels are L of 4 bits",
    ),
    "a picture of 16 bits": (
        lambda root: write(root / "pictures" / "a.png", LABELS.astype(np.uint16)),
        DataError,
        "pictures/a.png: its pixels are I;16 of 16 bits, expected 8 bits a channel; convert it",
    ),
    "a picture of 16 bits and three colours": (
        lambda root: save_black(root / "pictures" / "a.png", 16, 3),
        DataError,
        "pictures/a.png: its pixels are RGB of 16 bits, expected 8 bits a channel; convert it",
    ),
    "a picture of 16 bits and alpha": (
        lambda root: save_black(root / "pictures" / "a.png", 16, 4),
        DataError,
        "pictures/a.png: its pixels are RGBA of 16 bits, expected 8 bits a channel; convert it",
    ),
    "an animated picture": (
        lambda root: animate(root / "pictures" / "a.png"),
        DataError,
        "pictures/a.png: is animated, expected a single picture; save one frame of it",
    ),
    "a pipe": (
        lambda root: replace(root / "pictures" / "a.png", os.mkfifo),
        DataError,
        "pictures/a.png: cannot be read (it is not a regular file), expected a whole PNG file; restore it",
    ),
    "a device": (
        lambda root: replace(root / "labels" / "a.png", lambda path: path.symlink_to("/dev/zero")),
        DataError,
        "labels/a.png: cannot be read (it is not a regular file), expected a whole PNG file; restore it",
    ),
    "a folder of that name": (
        lambda root: replace(root / "labels" / "a.png", Path.mkdir),
        DataError,
        "labels/a.png: cannot be read (",
    ),
    "more pixels than memory": (
        lambda root: enlarge(root / "pictures" / "a.png"),
        DataError,
        "pictures/a.png: cannot be read (Image size (10000000000 pixels) exceeds limit of ",
    ),
    "no class": (
        lambda root: write(
            root / "labels" / "b.png", np.where(make_pair("b")[1] == 2, 9, 0).astype(np.uint8)
        ),
        DataError,
        "labels/b.png: label 9 in row ",
    ),
    "no PNG": (
        lambda root: (root / "labels" / "a.png").write_bytes(b"what"),
        DataError,
        "labels/a.png: cannot be read (",
    ),
    "an empty file": (
        lambda root: (root / "pictures" / "a.png").write_bytes(b""),
        DataError,
        "pictures/a.png: cannot be read (",
    ),
    "a JPEG for a label map": (
        lambda root: Image.fromarray(LABELS).save(root / "labels" / "a.png", format="JPEG"),
        DataError,
        "labels/a.png: cannot be read (",
    ),
    "a truncated picture": (
        lambda root: cut_short(root / "pictures" / "c.png"),
        DataError,
        "pictures/c.png: cannot be read (",
    ),
    "a truncated label map": (
        lambda root: cut_short(root / "labels" / "c.png"),
        DataError,
        "labels/c.png: cannot be read (",
    ),
}


def replace(path, make):
    path.unlink()
    make(path)


def animate(path):
    frames = [Image.fromarray(PICTURE), Image.fromarray(PICTURE[::-1])]
    frames[0].save(path, save_all=True, append_images=frames[1:])


def enlarge(path):
    """Let the header say 100,000×100,000 pixels."""
    content = path.read_bytes()
    header = b"IHDR" + struct.pack(">II", 100_000, 100_000) + content[24:29]
    path.write_bytes(content[:12] + header + struct.pack(">I", zlib.crc32(header)) + content[33:])


def cut_short(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_told_in_one_line(folder, name):
    damage, kind, message = FAULTS[name]
    damage(folder)
    with pytest.raises(kind) as raised:
        LabelMaps(folder, 3).check(JOB)
    assert str(folder) in str(raised.value)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    assert raised.value.exit_status == 2


@pytest.mark.parametrize("name", ["a picture alone", "a truncated picture", "no class"])
@pytest.mark.parametrize("split", ["train", "test"])
def test_the_command_line_tells_faults_of_either_split(tmp_path, folder, split, name, capsys):
    data = tmp_path / "data"
    for copy in ("train", "test"):
        shutil.copytree(folder, data / copy, ignore=shutil.ignore_patterns("data"))
    damage, _, message = FAULTS[name]
    damage(data / split)
    line = f"train segmentation --data-dir {data} --run-dir {tmp_path / 'run'} --workers 1 --classes 3"
    assert cli.main(line.split()) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert message in printed.err
    assert not (tmp_path / "run" / "settings.json").exists()


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["png", "jpeg"])
def test_damaged_bytes_are_refused_or_do_no_harm(tmp_path, kind):
    """Whatever byte is another one, and wherever a file ends: an error of ours, or a picture of that size."""
    whole = io.BytesIO()
    Image.fromarray(PICTURE).save(whole, format=kind)
    path = tmp_path / "pictures" / f"a.{kind}"
    write(tmp_path / "labels" / "a.png", LABELS)
    random = np.random.default_rng(0)
    refused = 0
    path.parent.mkdir()
    for place in sorted({*range(120), *random.integers(0, len(whole.getvalue()), 80).tolist()}):
        for damage in (truncated, flipped):
            path.write_bytes(damage(whole.getvalue(), place))
            try:
                picture, _ = LabelMaps(tmp_path, 3).read(0)
                assert picture.shape == PICTURE.shape
            except DataError:
                refused += 1
    assert refused > 200 if kind == "png" else refused > 50


def truncated(content, place):
    return content[:place]


def flipped(content, place):
    return content[:place] + bytes([content[place] ^ 0x55]) + content[place + 1 :]
