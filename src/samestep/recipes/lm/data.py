"""A stream of tokens as inputs of a model: windows of equal length, with document boundaries."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from samestep.checkpoint.durable import open_regular, storage
from samestep.errors import ConfigError, DataError, MissingFileError

__all__ = ["IGNORED", "Stream", "Windows", "fingerprint", "open_tokens"]

Stream: TypeAlias = NDArray[np.uint8] | NDArray[np.uint16] | NDArray[np.uint32]
"""Token ids, in memory or mapped from a file."""

IGNORED = -100
"""The target that pads the last window and does not count."""

_BLOCK, _NUM_BLOCKS = 1 << 14, 1 << 12


class Windows:
    """A stream cut into windows of equal length (a `BatchedDataset`).

    Window n has the tokens from n × context on as inputs, and those from n × context + 1 on as targets. So
    each token except the first of the stream is a target once; the last window is padded with targets that
    do not count. The token that ends a document is the last target of that document and the first input of
    the next.

    Args:
        stream: token ids, [tokens].
        context: the length of a window, in tokens.
        vocabulary: the number of tokens; ids are 0 to `vocabulary` - 1.
        border: the token that ends a document; None if the stream is one document.
        name: the stream's name, for errors.

    Raises:
        ConfigError: `context` is below 1.
        DataError: there are fewer than two tokens; from `batch`, a token is not in the vocabulary.

    Example:
        >>> stream = np.frombuffer(b".one.two.", dtype=np.uint8)
        >>> windows = Windows(stream, 5, vocabulary=256, border=ord("."))
        >>> inputs, targets, starts = windows.batch(np.arange(2), np.zeros(2, dtype=np.uint64))
        >>> [bytes(row) for row in inputs.tolist()]
        [b'.one.', b'two..']
        >>> starts.tolist(), targets[1].tolist()
        ([[0, 0, 0, 0, 4], [0, 0, 0, 3, 4]], [119, 111, 46, -100, -100])
    """

    def __init__(
        self,
        stream: Stream,
        context: int,
        *,
        vocabulary: int,
        border: int | None = None,
        name: str = "stream",
    ) -> None:
        if context < 1:
            raise ConfigError(f"context = {context}: expected at least 1 token")
        if len(stream) < 2:
            raise DataError(f"{name}: {len(stream)} tokens, expected at least 2, one to predict from another")
        self.stream, self.context, self.vocabulary = stream, context, vocabulary
        self.border, self.name = border, name

    def __len__(self) -> int:
        """Return the number of windows."""
        return -(-self.num_targets // self.context)

    @property
    def num_targets(self) -> int:
        """The number of tokens that count: all except the first."""
        return len(self.stream) - 1

    def batch(self, examples: NDArray[np.int64], seeds: NDArray[np.uint64]) -> tuple[Tensor, Tensor, Tensor]:
        """Return inputs, targets and starts, int64 [n, context] each.

        An input's start is the index in its window where its document starts; 0 if the document starts in an
        earlier window.

        Args:
            examples: indices of windows, int64 [n].
            seeds: unused.
        """
        inputs = np.full((len(examples), self.context), self.border or 0, dtype=np.int64)
        targets = np.full((len(examples), self.context), IGNORED, dtype=np.int64)
        for row, example in enumerate(examples.tolist()):
            tokens = self._read(example * self.context)
            inputs[row, : len(tokens) - 1], targets[row, : len(tokens) - 1] = tokens[:-1], tokens[1:]
        starts = np.zeros_like(inputs)
        if self.border is not None:
            indices = np.where(inputs == self.border, np.arange(self.context), 0)
            starts = np.maximum.accumulate(indices, axis=1)
        return torch.from_numpy(inputs), torch.from_numpy(targets), torch.from_numpy(starts)

    def _read(self, start: int) -> Stream:
        tokens = self.stream[start : start + self.context + 1]
        wrong = np.flatnonzero(tokens >= self.vocabulary)
        if len(wrong):
            raise DataError(
                f"{self.name}: token {start + wrong[0]} is {tokens[wrong[0]]}, expected 0 to "
                f"{self.vocabulary - 1}; set --vocabulary and --token-dtype as the tokenizer has them"
            )
        return tokens


def open_tokens(path: Path, dtype: str) -> Stream:
    """Memory-map a flat file of token ids without a header, as `numpy.ndarray.tofile` writes it.

    Args:
        path: the file.
        dtype: "uint8", "uint16" or "uint32", little-endian.

    Raises:
        MissingFileError: there is no such file.
        DataError: it is not a regular file, is empty, or its size is not a multiple of a token's.
        StorageError: it cannot be read.
    """
    kind = np.dtype(dtype).newbyteorder("<")
    with storage(path, "read"):
        if not path.exists():
            raise MissingFileError(
                f"{path}: not there, expected token ids of {dtype}; write it, or change --data-dir"
            )
        opened = open_regular(path)
        if opened is None:
            raise DataError(f"{path}: not a file, expected token ids of {dtype}; replace it")
        with opened as file:
            num_bytes = os.fstat(file.fileno()).st_size
            if not num_bytes:
                raise DataError(f"{path}: empty, expected token ids of {dtype}; write them again")
            if num_bytes % kind.itemsize:
                raise DataError(
                    f"{path}: {num_bytes} bytes, expected a multiple of the {kind.itemsize} of a {dtype}; "
                    "write it again, or set --token-dtype"
                )
            return np.memmap(file, dtype=kind, mode="r")


def fingerprint(stream: Stream) -> str:
    """Return a SHA-256 of a stream: of all tokens up to 67 million, else of 4,096 evenly spaced blocks."""
    starts = range(0, len(stream), _BLOCK)
    if len(starts) > _NUM_BLOCKS:
        starts = range(0, len(stream), len(stream) // _NUM_BLOCKS)
    sha = hashlib.sha256(f"{len(stream)} {stream.dtype.name}".encode())
    for start in starts:
        sha.update(np.ascontiguousarray(stream[start : start + _BLOCK]).data)
    return sha.hexdigest()
