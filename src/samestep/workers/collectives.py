"""Collectives for all that is not gradients, made of `Transport.post`; all workers must call them."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from samestep.errors import Error
from samestep.workers.transport import Pending, Transport

__all__ = ["broadcast", "gather_objects", "gather_rows", "post_to_all", "unbroken"]


@contextmanager
def unbroken(transport: Transport, what: str) -> Iterator[None]:
    """After an interrupt in this block, some messages have gone and some have not: send no others.

    They would be mistaken for those. Signal handlers may raise anything, so whatever is not an `Error` counts
        as an interrupt.
    """
    try:
        yield
    except Error:
        raise
    except BaseException:
        transport.give_up(what)
        raise


def gather_rows(transport: Transport, values: Tensor, sizes: Sequence[int], what: str) -> Tensor:
    """Return the rows of all workers, in their order, given this worker's and how many each has.

    `values` is [rows, ...], else of the same shape and dtype on all; `what` names it if a worker is lost.
    """
    parts = [values.new_empty(size, *values.shape[1:]) for size in sizes]
    parts[transport.rank] = values.contiguous()
    with unbroken(transport, what):
        post_to_all(transport, [[part] for part in parts], what).wait()
    return torch.cat(parts)


def post_to_all(transport: Transport, tensors: Sequence[Sequence[Tensor]], what: str) -> Pending:
    """Start to send this worker's tensors to all others, and to receive theirs."""
    others = [worker for worker in range(transport.world_size) if worker != transport.rank]
    outgoing = dict.fromkeys(others, tensors[transport.rank])
    return transport.post(outgoing, {worker: tensors[worker] for worker in others}, what)


def gather_objects(transport: Transport, value: Any, what: str) -> list[Any]:
    """Return the values of all workers, in their order, given this worker's; they must be picklable."""
    if transport.world_size == 1:
        return [value]
    own = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    with unbroken(transport, what):
        sizes = gather_rows(
            transport, torch.tensor([len(own)], device="cpu"), [1] * transport.world_size, what
        ).tolist()
        parts = gather_rows(transport, own, sizes, what).split(sizes)
    return [
        value if worker == transport.rank else pickle.loads(part.numpy().tobytes())
        for worker, part in enumerate(parts)
    ]


def broadcast(transport: Transport, tensors: Sequence[Tensor], what: str) -> None:
    """Fill the tensors of all workers, contiguous and alike in shape, with those of worker 0.

    In each round, every worker that has them sends them to one that has not.
    """
    rank, num_ready = transport.rank, 1
    while num_ready < transport.world_size:
        outgoing, incoming = {}, {}
        if rank < num_ready and rank + num_ready < transport.world_size:
            outgoing[rank + num_ready] = tensors
        elif num_ready <= rank < 2 * num_ready:
            incoming[rank - num_ready] = tensors
        with unbroken(transport, what):
            transport.post(outgoing, incoming, what).wait()
        num_ready *= 2
