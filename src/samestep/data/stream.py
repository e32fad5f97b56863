"""A worker's slices in the order of the run, read ahead one tower after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch.utils.data import DataLoader

from samestep.data.readers import BatchedReader, Reader, Request

__all__ = ["RequestSampler", "Stream", "read_ahead"]

_NUM_AHEAD = 2


class RequestSampler:
    """Gives DataLoader requests for indices: those set last, each time that it is iterated over."""

    def __init__(self) -> None:
        self.requests: Iterator[Request] = iter(())

    def __iter__(self) -> Iterator[Request]:
        return self.requests


class Stream:
    """Slices that are read ahead in order. Those that have gone by are read again, where they are asked for.

    Args:
        requests: in the order of their places.
        reader: reads one again.
        loader: reads ahead, from what `sampler` is given; None for a thread of this process.
        sampler: the loader's.
    """

    def __init__(
        self,
        requests: Iterable[Request],
        reader: BatchedReader | Reader,
        loader: DataLoader[Any] | None,
        sampler: RequestSampler,
    ) -> None:
        self._reader = reader
        self._asked: deque[Request] = deque()
        self._wanted = self._last = (-1, -1)
        self._requests = sampler.requests = self._noted(requests)
        self._source: Generator[Any] | None
        if loader is None:
            self._source = read_ahead(reader, self._requests)
        else:
            self._source = (batch for batch in loader)

    def take(self, request: Request) -> Any:
        """Return a tower's batch; slices before it that nobody asked for are dropped."""
        self._wanted = max(self._wanted, request.place)
        while self._source is not None and self._last < request.place:
            try:
                batch = next(self._source)
            except BaseException:
                self.close()  # what comes next is not known any more
                raise
            self._last = self._asked.popleft().place
            if self._last == request.place:
                return batch
        return self._reader[request]

    def close(self) -> None:
        """Read nothing ahead any more."""
        if self._source is not None:
            self._source.close()
            self._source = None
            self._requests.close()  # it refers to this, and a DataLoader to it

    def _noted(self, requests: Iterable[Request]) -> Generator[Request]:
        """Note each request that is read: the slices come in the same order."""
        for request in requests:
            if request.place >= self._wanted:
                self._asked.append(request)
                yield request


def read_ahead(reader: BatchedReader | Reader, requests: Iterable[Request]) -> Generator[Any]:
    """Read in a background thread, ahead of the passes."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="samestep-loader")
    try:
        waiting: deque[Future[Any]] = deque()
        for request in requests:
            waiting.append(pool.submit(reader.__getitem__, request))
            if len(waiting) > _NUM_AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
