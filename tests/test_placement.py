import pytest
from hypothesis import given, strategies as st

from samestep.errors import ConfigError
from samestep.summation.placement import Placement, even_ranges


@st.composite
def placements(draw):
    num_towers = draw(st.integers(1, 70))
    if draw(st.booleans()):
        return Placement.even(num_towers, draw(st.integers(1, num_towers)))
    inner = draw(st.sets(st.integers(1, num_towers), max_size=9)) - {num_towers}
    return Placement((0, *sorted(inner), num_towers))


@given(st.integers(0, 200), st.integers(1, 40))
def test_even_ranges_cover_everything_once_and_in_order(length, parts):
    ranges = even_ranges(length, parts)
    assert len(ranges) == parts
    assert [index for span in ranges for index in span] == list(range(length))


@given(st.integers(0, 200), st.integers(1, 40))
def test_even_ranges_differ_by_at_most_one_and_the_longer_come_first(length, parts):
    sizes = [len(span) for span in even_ranges(length, parts)]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@given(placements())
def test_every_tower_has_one_owner_and_every_worker_a_tower(placement):
    ranges = list(placement.ranges)
    assert ranges == [placement.towers(worker) for worker in range(placement.num_workers)]
    assert all(len(towers) > 0 for towers in ranges)
    owners = [placement.owner(tower) for tower in range(placement.num_towers)]
    assert owners == [worker for worker, towers in enumerate(ranges) for _ in towers]


@pytest.mark.parametrize(
    ("num_towers", "num_workers", "named"),
    [(0, 1, "towers = 0"), (8, 0, "workers = 0"), (8, 9, "workers = 9"), (8, -1, "workers = -1")],
)
def test_counts_out_of_range_are_refused(num_towers, num_workers, named):
    with pytest.raises(ConfigError, match=named):
        Placement.even(num_towers, num_workers)


@pytest.mark.parametrize("cuts", [(), (0,), (1, 4), (0, 0, 4), (0, 3, 3), (0, 4, 2), (0, -1)])
def test_cuts_that_leave_a_worker_without_towers_are_refused(cuts):
    with pytest.raises(ConfigError, match=r"cuts = \(.*every worker runs at least one tower"):
        Placement(cuts)


@pytest.mark.parametrize("num_towers", [2**20 + 1, 2**31, 2**63])
def test_there_are_no_more_towers_than_a_step_can_list(num_towers):
    with pytest.raises(ConfigError, match=rf"^towers = {num_towers}: expected at most 1048576, because"):
        Placement.even(num_towers, 3)
    assert Placement.even(2**20, 3).num_towers == 2**20
