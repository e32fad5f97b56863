"""Towers move to the workers that run them faster. Integers only, so that all workers find the same cuts.

With the first message of a step each worker says how long its passes of the step before took. From the
medians of the last 8 steps, ns_w a tower on worker w, come the cuts that make

    max over w of  ns_w * (towers of w) + subtree_ns * (whole subtrees that these are)

as small as it gets. They are taken where that is a twentieth less than with the present cuts; it is looked
at after 8 steps or more, and after 2 seconds of passes or more, because what loaders have read ahead is
read again after a change.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from statistics import median_low

from samestep.summation.placement import Placement
from samestep.summation.tree import subtrees

__all__ = ["Pace", "fastest", "slowest_ns"]

_WINDOW = 8
_PAUSE_NS = 2 * 10**9
_REACH = 8  # how far from the cuts that share the passes best others are tried, for fewer subtrees


class Pace:
    """What is known of the workers' speed; the same on all workers, if it is given the same."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all, as where other workers run the towers."""
        self._tower_ns: deque[Sequence[int]] = deque(maxlen=_WINDOW)  # of each step, one number a worker
        self._rows: Sequence[int] = ()  # of each worker in the step before
        self._steps = self._pause_ns = 0  # since it was last looked at

    def follow(
        self, placement: Placement, rows: Sequence[int], pass_ns: Sequence[int], subtree_ns: int = 0
    ) -> Placement:
        """Return the next step's placement, at the end of a step.

        Args:
            placement: of this step.
            rows: of each worker in this step.
            pass_ns: how long each worker's passes of the step before took; 0 where that is not known.
            subtree_ns: what it costs to send one more subtree.
        """
        before, self._rows = self._rows, tuple(rows)
        if len(before) != len(pass_ns) or not all(before) or not all(ns > 0 for ns in pass_ns):
            return placement
        towers = placement.num_towers
        means = zip(pass_ns, before, strict=True)
        self._tower_ns.append([max(1, ns * sum(before) // (of_worker * towers)) for ns, of_worker in means])
        self._steps += 1
        self._pause_ns += max(pass_ns)
        if self._steps < _WINDOW or self._pause_ns < _PAUSE_NS:
            return placement
        self._steps = self._pause_ns = 0
        tower_ns = [median_low(of_worker) for of_worker in zip(*self._tower_ns, strict=True)]
        found = fastest(tower_ns, towers, subtree_ns)
        now, then = (slowest_ns(each, tower_ns, subtree_ns) for each in (placement, found))
        return found if 20 * then <= 19 * now else placement


def slowest_ns(placement: Placement, tower_ns: Sequence[int], subtree_ns: int = 0) -> int:
    """Return how long the slowest worker takes."""
    return max(
        ns * len(towers) + subtree_ns * len(subtrees(towers, placement.num_towers))
        for ns, towers in zip(tower_ns, placement.ranges, strict=True)
    )


def fastest(tower_ns: Sequence[int], num_towers: int, subtree_ns: int = 0) -> Placement:
    """Return the placement whose slowest worker is fastest, of those equal the one with fewest subtrees.

    It is exact where subtrees cost nothing, or the cuts that are best then are at most 8 towers off.

    >>> fastest([100, 200], num_towers=12).ranges
    (range(0, 8), range(8, 12))
    """
    centres = [0, *accumulate(_shares(tower_ns, num_towers))]
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, (0,))}  # by where the last worker ends
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
    """Return how many towers each worker gets, at least one, so that the slowest is fastest."""

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
