"""A worker's slices (towers' batches) in the order of the run, read ahead one tower after the other."""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from samestep.batches.nest import PLAIN, entries
from samestep.data.readers import COMPARED, BatchedReader, Reader, Request

__all__ = ["RequestSampler", "Stream", "read_ahead"]

_NUM_AHEAD = 2
_SMALL_BYTES = 4 << 20  # a call for each of many small towers would cost more than reading ahead saves

_Place: TypeAlias = tuple[int, int]  # a batch's position, and a tower
_Examples: TypeAlias = Mapping[int, NDArray[np.int64]]


class RequestSampler:
    """A sampler for DataLoader with requests as its indices; each iteration yields those set last."""

    def __init__(self) -> None:
        self.requests: Iterator[Request] = iter(())

    def __iter__(self) -> Iterator[Request]:
        return self.requests


class Stream:
    """Reads slices ahead, in order; a slice that is requested again, or late, is read again on the spot.

    One call reads one tower, or several of a batch that together hold at most 4 MiB.

    Args:
        requests: one for each batch, in order.
        reader: reads the requests.
        read: reads the requests of `sampler` ahead; None to read ahead in a thread of this process.
        sampler: the sampler of the DataLoader behind `read`.
        row_bytes: an estimate of the bytes of a row, until the first slice is read.
    """

    def __init__(
        self,
        requests: Iterator[Request],
        reader: BatchedReader | Reader,
        read: Callable[[], Generator[dict[int, Any]]] | None,
        sampler: RequestSampler,
        row_bytes: float = math.inf,
    ) -> None:
        self.row_bytes = row_bytes
        self._reader = reader
        self._asked: deque[Request] = deque()
        self._held: dict[_Place, Any] = {}
        self._wanted = self._last = (-1, -1)
        self._requests = sampler.requests = self._split(requests)
        self._source: Generator[dict[int, Any]] | None
        self._source = read_ahead(reader, self._requests) if read is None else read()

    def take(self, request: Request, tower: int) -> Any:
        """Return a tower's slice, or for COMPARED the number to compare; drop those before it."""
        place = request.position, tower
        self._wanted = max(self._wanted, place)
        while self._source is not None and self._last < place:
            self._held = {}
            self._held = self._next(self._source)
            self._last = max(self._held)
        return self._held.pop(place) if place in self._held else self.read(request, tower)

    def close(self) -> None:
        """Stop reading ahead."""
        if self._source is not None:
            self._source.close()
            self._source = None
            self._requests.close()  # it refers to this stream, and the DataLoader to it
            self._held = {}

    def _next(self, source: Iterator[dict[int, Any]]) -> dict[_Place, Any]:
        try:
            slices = next(source)
        except BaseException:
            self.close()  # the source's place in the order is unknown now
            raise
        request = self._asked.popleft()
        for tower, rows in list(request.examples.items())[:1]:
            self.row_bytes = _num_bytes(slices[tower]) / len(rows)
        return {(request.position, tower): batch for tower, batch in slices.items()}

    def read(self, request: Request, tower: int) -> Any:
        """Read a tower's slice, or the number to compare, now."""
        examples = {tower: request.examples[tower]} if tower != COMPARED else {}
        if tower not in (COMPARED, 0):
            request = request.without_comparison()
        return self._reader[replace(request, examples=examples)][tower]

    def _split(self, requests: Iterator[Request]) -> Generator[Request]:
        """Split requests into parts to read, and record them: their slices return in the same order."""
        for request in requests:
            for number, part in enumerate(self._parts(request)):
                if (request.position, max(part, default=COMPARED)) >= self._wanted:
                    if number:  # what is compared is read with the first part
                        request = request.without_comparison()
                    self._asked.append(replace(request, examples=part))
                    yield self._asked[-1]

    def _parts(self, request: Request) -> Generator[_Examples]:
        part: dict[int, NDArray[np.int64]] = {}
        num_bytes = 0.0
        for tower, rows in request.examples.items():
            num_bytes += len(rows) * self.row_bytes
            if part and num_bytes > _SMALL_BYTES:
                yield part
                part, num_bytes = {}, len(rows) * self.row_bytes
            part[tower] = rows
        if part or request.compared is not None:
            yield part


def _num_bytes(value: Any) -> float:
    """Return the bytes of a nest's tensors, arrays and plain values; infinity if it holds anything else."""
    if isinstance(value, Tensor | np.ndarray):
        return math.inf if isinstance(value, np.ndarray) and value.dtype.hasobject else value.nbytes
    if isinstance(value, PLAIN):
        return sys.getsizeof(value)
    held = entries(value)
    return math.inf if held is None else sum(map(_num_bytes, held.values()))


def read_ahead(reader: BatchedReader | Reader, requests: Iterator[Request]) -> Generator[dict[int, Any]]:
    """Read in a background thread, up to two requests ahead."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="samestep-loader")
    try:
        waiting: deque[Future[dict[int, Any]]] = deque()
        for request in requests:
            waiting.append(pool.submit(reader.__getitem__, request))
            if len(waiting) > _NUM_AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
