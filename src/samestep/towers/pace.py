"""Moves towers to faster workers. All arithmetic is in integers, so that all workers find the same placement.

The first message of a step contains how long the worker's passes of the previous step took. Times are
collected in stretches of at least one step and 0.6 seconds. After 8 stretches, ns_w is the median time per
tower on worker w, and the new placement minimizes

    max over w of  ns_w * (towers of w) + subtree_ns * (whole subtrees of these towers)

It is used if it would have lowered this maximum by 5% in at least 6 of the 8 stretches. So a short load on
one worker has no effect, and loaders seldom have to discard batches that they have prefetched.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from statistics import median_low

from samestep.summation.placement import Placement
from samestep.summation.tree import subtrees

__all__ = ["Pace", "fastest", "slowest_ns"]

_NUM_STRETCHES, _NUM_FASTER = 8, 6
_STRETCH_NS = 600_000_000
_REACH = 8  # how many towers away from the best-balanced cuts to try others, for fewer subtrees


class Pace:
    """The measured speed of all workers. It is the same on all of them, because all get the same numbers."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Drop all measurements, for example because the workers have changed."""
        self._rows: Sequence[int] = ()  # of each worker, in the previous step
        self._stretches: list[Sequence[int]] = []  # for each stretch, the time per tower on each worker
        self._steps: list[Sequence[int]] = []  # the same for each step since the last stretch
        self._since_ns = 0

    def follow(
        self, placement: Placement, rows: Sequence[int], pass_ns: Sequence[int], subtree_ns: int = 0
    ) -> Placement:
        """Add the measurements of a step that has ended, and return the placement of the next step.

        Args:
            placement: the placement of this step.
            rows: the number of rows on each worker in this step.
            pass_ns: how long each worker's passes of the previous step took; 0 if unknown.
            subtree_ns: the time that it takes to send one more subtree.
        """
        if len(self._rows) != len(rows):
            self.clear()
        before, self._rows = self._rows, rows
        if not before or 0 in before or 0 in pass_ns:
            return placement
        each = zip(pass_ns, before, strict=True)
        self._steps.append([max(1, ns * sum(before) // (own * placement.num_towers)) for ns, own in each])
        self._since_ns += max(pass_ns)
        if self._since_ns >= _STRETCH_NS:
            self._stretches.append([sum(steps) // len(steps) for steps in zip(*self._steps, strict=True)])
            self._steps, self._since_ns = [], 0
        return self._decide(placement, subtree_ns) if len(self._stretches) == _NUM_STRETCHES else placement

    def _decide(self, placement: Placement, subtree_ns: int) -> Placement:
        stretches, self._stretches = self._stretches, []
        tower_ns = [median_low(times) for times in zip(*stretches, strict=True)]
        found = fastest(tower_ns, placement.num_towers, subtree_ns)
        both = [(slowest_ns(placement, s, subtree_ns), slowest_ns(found, s, subtree_ns)) for s in stretches]
        num_faster = sum(20 * then <= 19 * now for now, then in both)
        return found if num_faster >= _NUM_FASTER else placement


def slowest_ns(placement: Placement, tower_ns: Sequence[int], subtree_ns: int = 0) -> int:
    """Return the time of the slowest worker under a placement."""
    return max(
        ns * len(towers) + subtree_ns * len(subtrees(towers, placement.num_towers))
        for ns, towers in zip(tower_ns, placement.ranges, strict=True)
    )


def fastest(tower_ns: Sequence[int], num_towers: int, subtree_ns: int = 0) -> Placement:
    """Return the placement with the lowest `slowest_ns`; among equals, the one with the fewest subtrees.

    The result is optimal if `subtree_ns` is 0, or if each of the best cuts is at most 8 towers away from the
    best cut for `subtree_ns = 0`.

    >>> fastest([100, 200], num_towers=12).ranges
    (range(0, 8), range(8, 12))
    """
    centres = [0, *accumulate(_shares(tower_ns, num_towers))]
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, (0,))}  # by number of towers placed
    for worker, ns in enumerate(tower_ns):
        missing = len(tower_ns) - worker - 1
        centre, reach = centres[worker + 1], _REACH if missing else 0
        ends = range(max(worker + 1, centre - reach), min(num_towers - missing, centre + reach) + 1)
        found = {}
        for end in ends:
            ways = []
            for start, (slowest, spans, cuts) in best.items():
                if start < end:
                    own = len(subtrees(range(start, end), num_towers))
                    slower = max(slowest, ns * (end - start) + subtree_ns * own)
                    ways.append((slower, spans + own, (*cuts, end)))
            if ways:
                found[end] = min(ways)
        best = found
    return Placement(best[num_towers][2])


def _shares(tower_ns: Sequence[int], num_towers: int) -> list[int]:
    """Return how many towers each worker gets, at least one, to minimize the time of the slowest worker."""

    def within(limit: int) -> list[int]:
        return [max(1, limit // ns) for ns in tower_ns]

    low, high = 0, max(tower_ns) * num_towers
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if sum(within(middle)) >= num_towers else (middle + 1, high)
    shares = within(low)
    for _ in range(sum(shares) - num_towers):
        slowest = max(range(len(shares)), key=lambda w: (shares[w] > 1, shares[w] * tower_ns[w]))
        shares[slowest] -= 1
    return shares
