"""Collectives for everything except gradients, built on `Transport.post`; all workers must call them."""

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
    """If the block is interrupted, stop all further messages: they could be taken for those not yet sent.

    Any exception except a samestep `Error` counts as an interrupt: signal handlers may raise anything.
    """
    try:
        yield
    except Error:
        raise
    except BaseException:
        transport.give_up(what)
        raise


def gather_rows(transport: Transport, values: Tensor, sizes: Sequence[int], what: str) -> Tensor:
    """Concatenate the rows of all workers, in order of rank; `sizes` has the number of rows of each.

    `values` is [rows, ...], with the same shape after rows and the same dtype on all workers. `what` is the
    message's name in an error.
    """
    parts = [values.new_empty(size, *values.shape[1:]) for size in sizes]
    parts[transport.rank] = values.contiguous()
    with unbroken(transport, what):
        post_to_all(transport, [[part] for part in parts], what).wait()
    return torch.cat(parts)


def post_to_all(transport: Transport, tensors: Sequence[Sequence[Tensor]], what: str) -> Pending:
    """Start to send this worker's tensors to all others, and to receive theirs; `tensors` is by rank."""
    others = [worker for worker in range(transport.world_size) if worker != transport.rank]
    outgoing = dict.fromkeys(others, tensors[transport.rank])
    return transport.post(outgoing, {worker: tensors[worker] for worker in others}, what)


def gather_objects(transport: Transport, value: Any, what: str) -> list[Any]:
    """Return the values of all workers, in order of rank; they must be picklable."""
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
    """Copy worker 0's tensors into those of all workers, which are contiguous and have the same shapes.

    In each round, every worker that has the values sends them to one that does not.
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
