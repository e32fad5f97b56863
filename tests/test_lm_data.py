"""The language model's data: windows, documents, the standard library, and files of tokens."""

import hashlib
import lzma
import math
import os
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch

from samestep.data.readers import is_batched
from samestep.errors import ConfigError, DataError, MissingFileError
from samestep.recipes.lm import data
from samestep.recipes.lm.data import IGNORED, Windows, fingerprint, open_tokens
from samestep.recipes.lm.held_out import HeldOut
from samestep.recipes.lm.library import BORDER, is_held_out, library_files, read_library

SEEDS = np.zeros(100, dtype=np.uint64)


def windows_of(content, context, border=0, **options):
    stream = np.array(content, dtype=np.uint8)
    return Windows(stream, context, **{"vocabulary": 256, "border": border, **options})


def all_of(windows):
    return windows.batch(np.arange(len(windows)), SEEDS[: len(windows)])


# ---- windows -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("context", [1, 2, 3, 5, 7, 8, 20])
@pytest.mark.parametrize("length", [2, 7, 8, 9])
def test_each_token_but_the_first_is_a_target_once_after_the_one_before_it(context, length):
    windows = windows_of(range(1, length + 1), context)
    inputs, targets, starts = all_of(windows)
    assert is_batched(windows)
    assert {values.shape for values in (inputs, targets, starts)} == {(len(windows), context)}
    assert {values.dtype for values in (inputs, targets, starts)} == {torch.int64}
    counted = targets != IGNORED
    assert targets[counted].tolist() == list(range(2, length + 1))
    assert inputs[counted].tolist() == list(range(1, length))
    assert windows.num_targets == length - 1
    assert counted.flatten().tolist() == [True] * (length - 1) + [False] * (counted.numel() - length + 1)


def test_a_document_begins_with_the_border_and_has_the_next_one_as_its_last_target():
    inputs, targets, starts = all_of(windows_of([0, 5, 6, 0, 0, 7, 8, 9, 0], 8))
    assert inputs.tolist() == [[0, 5, 6, 0, 0, 7, 8, 9]]
    assert targets.tolist() == [[5, 6, 0, 0, 7, 8, 9, 0]]
    assert starts.tolist() == [[0, 0, 0, 3, 4, 4, 4, 4]]


def test_a_document_goes_on_in_the_next_window_from_its_beginning():
    _, _, starts = all_of(windows_of([0, 5, 6, 7, 8, 0, 9, 9, 9], 4))
    assert starts.tolist() == [[0, 0, 0, 0], [0, 1, 1, 1]]


def test_without_a_border_all_is_one_document():
    _, _, starts = all_of(windows_of([0, 5, 0, 0, 7], 4, border=None))
    assert starts.tolist() == [[0, 0, 0, 0]]


def test_a_window_is_the_same_whatever_else_is_read():
    windows = windows_of(np.random.default_rng(0).integers(0, 5, 100), 7)
    together = windows.batch(np.array([3, 14, 3, 0]), SEEDS[:4])
    for row, example in enumerate([3, 14, 3, 0]):
        alone = windows.batch(np.array([example]), SEEDS[:1])
        assert all(torch.equal(whole[row : row + 1], one) for whole, one in zip(together, alone, strict=True))


def test_a_token_that_is_not_in_the_vocabulary_is_named():
    windows = windows_of([1, 2, 3, 4, 5, 9, 1], 2, vocabulary=9, name="data/train.bin")
    windows.batch(np.array([0, 1]), SEEDS[:2])
    with pytest.raises(DataError, match=r"data/train.bin: token 5 is 9, expected 0 to 8; set --vocabulary"):
        windows.batch(np.array([0, 2]), SEEDS[:2])


@pytest.mark.parametrize(
    ("content", "context", "error", "message"),
    [
        ([1, 2], 0, ConfigError, "context = 0: expected at least 1 token"),
        ([1], 4, DataError, "stream: 1 tokens, expected at least 2"),
        ([], 4, DataError, "stream: 0 tokens, expected at least 2"),
    ],
)
def test_what_is_no_stream_of_windows_is_refused(content, context, error, message):
    with pytest.raises(error, match=message):
        windows_of(content, context)


# ---- files of tokens ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32"])
def test_a_file_of_tokens_is_mapped(tmp_path, dtype):
    path = tmp_path / "train.bin"
    highest = np.iinfo(dtype).max
    path.write_bytes(np.array([7, highest, 0], dtype=np.dtype(dtype).newbyteorder("<")).tobytes())
    stream = open_tokens(path, dtype)
    assert isinstance(stream, np.memmap)
    assert stream.tolist() == [7, highest, 0]
    inputs, targets, _ = Windows(stream, 2, vocabulary=2**33).batch(np.array([0]), SEEDS[:1])
    assert (inputs.tolist(), targets.tolist()) == ([[7, highest]], [[highest, 0]])


def test_a_file_that_holds_no_tokens_is_refused(tmp_path):
    path = tmp_path / "train.bin"

    def refusal(error):
        with pytest.raises(error) as raised:
            open_tokens(path, "uint16")
        text = str(raised.value)
        assert text.startswith(str(path))
        assert "\n" not in text
        return text

    assert "not there, expected token ids of uint16" in refusal(MissingFileError)
    path.mkdir()
    assert "not a file" in refusal(DataError)
    path.rmdir()
    path.write_bytes(b"")
    assert "empty" in refusal(DataError)
    path.write_bytes(b"abc")
    assert "3 bytes, expected a multiple of the 2 of a uint16" in refusal(DataError)
    path.unlink()
    os.mkfifo(path)  # which would be waited for
    assert "not a file" in refusal(DataError)
    path = path / "below"
    assert "not there" in refusal(MissingFileError)


def test_fingerprints_tell_streams_apart(monkeypatch):
    stream = np.arange(100_000, dtype=np.uint16)
    others = [
        stream[:-1],
        stream.astype(np.uint32),
        stream + (np.arange(100_000) == 99_999).astype(np.uint16),
    ]
    assert len({fingerprint(each) for each in [stream, stream.copy(), *others]}) == 4
    monkeypatch.setattr(data, "_NUM_BLOCKS", 2)
    assert len({fingerprint(each) for each in [stream, stream.copy(), stream[:-1]]}) == 2


# ---- the standard library ----------------------------------------------------------------------------


def write_library(root):
    texts = {
        "abc.py": b"import abc\n",
        "json/encoder.py": b"json\n",
        "json/tool.txt": b"no source",
        "empty.py": b"",
        "test/test_abc.py": b"a test",
        "json/tests/test_json.py": b"a test",
        "idlelib/idle_test/test_x.py": b"a test",
        "site-packages/torch/nn.py": b"installed",
        "encodings/cp1.py": b"a table",
        "config-3.11-x86_64/python-config.py": b"of the machine",
        "_sysconfigdata__linux.py": b"of the machine",
        "sitecustomize.py": b"of the machine",
    }
    for number in range(40):
        texts[f"part{number:02}.py"] = b"part %d\n" % number
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(text)
    return texts


def test_sources_of_the_library_are_listed_in_order(tmp_path):
    write_library(tmp_path)
    expected = ["abc.py", "empty.py", "json/encoder.py", *(f"part{number:02}.py" for number in range(40))]
    assert library_files(tmp_path) == expected


def test_each_file_is_a_document_of_one_split(tmp_path):
    texts = write_library(tmp_path)
    files = library_files(tmp_path)
    held_out = [name for name in files if is_held_out(name)]
    assert 0 < len(held_out) < 10
    for split, names in [("val", held_out), ("train", [name for name in files if name not in held_out])]:
        stream = read_library(split, tmp_path)
        assert stream.tobytes() == b"\0" + b"".join(texts[name] + b"\0" for name in names)


def test_which_files_are_held_out_never_changes():
    names = [
        name for name in ("poplib.py", "abc.py", "re/__init__.py", "json/encoder.py") if is_held_out(name)
    ]
    assert names == ["poplib.py", "re/__init__.py"]


def test_the_library_of_this_python_is_read():
    root = Path(sysconfig.get_paths()["stdlib"])
    train, held_out = read_library("train"), read_library("val")
    assert (root / "abc.py").read_bytes() in train.tobytes()
    assert (root / "poplib.py").read_bytes() in held_out.tobytes()
    assert len(train) + len(held_out) - 2 == sum((root / n).stat().st_size + 1 for n in library_files())
    assert int((train == BORDER).sum() + (held_out == BORDER).sum()) - 2 == len(library_files())
    assert 0.01 < len(held_out) / len(train) < 0.15


def test_a_library_without_sources_is_refused(tmp_path):
    with pytest.raises(
        MissingFileError, match="no source files of the standard library there; pass your own texts"
    ):
        library_files(tmp_path)
    with pytest.raises(MissingFileError, match="no source files"):
        library_files(tmp_path / "missing")


# ---- what is said of held-out bytes ------------------------------------------------------------------


def totals(nats, count):
    return {"nats": (torch.tensor(nats, dtype=torch.float64), torch.tensor(count))}


def test_bits_per_byte_stand_beside_those_of_xz():
    text = b"\0" + b"spam and eggs, " * 20 + b"\0"
    windows = windows_of(list(text), 16)
    metrics = HeldOut(windows, is_of_bytes=True)(totals(301 * math.log(2) * 3, 301))
    assert metrics == {
        "bits per byte": pytest.approx(3, abs=1e-12),
        "bits per byte of xz -9": 8 * len(lzma.compress(text[1:], preset=9)) / 301,
    }


def test_other_tokens_have_bits_per_token_alone():
    windows = windows_of([1, 2, 3], 2, border=None)
    metrics = HeldOut(windows, is_of_bytes=False)(totals(4 * math.log(2), 2))
    assert metrics == {"bits per token": pytest.approx(2)}


def test_the_checksum_of_a_stream_is_of_its_bytes():
    stream = np.array([1, 2, 3], dtype=np.uint8)
    assert fingerprint(stream) == hashlib.sha256(b"3 uint8\1\2\3").hexdigest()
