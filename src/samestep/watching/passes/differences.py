"""Compares between workers what their losses depend on beside the model, and how they compute them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

from samestep.errors import DisagreementError
from samestep.watching.passes.beside import Found
from samestep.watching.passes.flow import FlowWatch
from samestep.workers.collectives import gather_objects
from samestep.workers.transport import Transport

__all__ = ["Difference", "compare_workers", "find_difference"]


class Difference(NamedTuple):
    """A value that differs between two workers.

    Attributes:
        is_certain: whether several passes of one worker read it, so that it belongs to no tower.
    """

    name: str
    workers: tuple[int, int]
    is_certain: bool

    def __str__(self) -> str:
        one, two = self.workers
        return f"{self.name}, which is not part of the model, and differs between workers {one} and {two}"


def compare_workers(flow: FlowWatch, transport: Transport, where: str, *, bits_must_match: bool) -> None:
    """Raise on all workers if what losses depend on beside the model differs between them.

    If no worker runs several towers, it may be what each tower has for itself: then warn, once; also if
    workers compute their losses or gradients in different ways, unless their bits may differ.

    Raises:
        DisagreementError: names the value and two workers.
    """
    own = flow.beside.found(), flow.operators.outcomes if bits_must_match else {}
    found, outcomes = zip(*gather_objects(transport, own, f"{where}, comparison"), strict=True)
    difference = find_difference(found)
    if difference is None:
        flow.operators.check_workers(where, outcomes)
        return
    message = (
        f"{where}: losses depend on {difference}; each worker may have computed it from its own towers after "
        "average(), or from its own random numbers: compute it from the whole batch, the report, or what "
        "towers.gather() returns; keep it in a buffer with a policy, Towers(..., buffers={pattern: policy}); "
        "or pass a net as Towers(model, ..., also=net)"
    )
    if difference.is_certain:
        raise DisagreementError(message)
    flow.beside.warn(f"{message}; keep what is of one tower in a dict, by tower.index")


def find_difference(all_found: Sequence[Found]) -> Difference | None:
    """Return the first value that differs between workers, of those that belong to no tower if there are any.

    >>> from samestep.watching.passes.beside import Used
    >>> one = Used(5, frozenset({(3,)}), is_of_several=True, may_be_of_tower=False)
    >>> print(find_difference([{"center": one}, {"center": one._replace(checksum=7)}]))
    center, which is not part of the model, and differs between workers 0 and 1
    """
    found = list(_differences(all_found))
    return min(found, key=lambda each: not each.is_certain, default=None)


def _differences(all_found: Sequence[Found]) -> Iterator[Difference]:
    for name in dict.fromkeys(name for found in all_found for name in found):
        has = [(worker, found[name]) for worker, found in enumerate(all_found) if name in found]
        for (first, one), (second, two) in combinations(has, 2):
            is_certain = one.is_of_several or two.is_of_several
            is_compared = is_certain or not (one.may_be_of_tower or two.may_be_of_tower)
            if is_compared and one.checksum != two.checksum and one.kinds & two.kinds:
                yield Difference(name, (first, second), is_certain)
