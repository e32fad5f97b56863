import pytest

from samestep.app.throughput import Throughput


def test_throughput_is_counted_over_wall_time():
    throughput = Throughput()
    throughput.since_s -= 100
    throughput.add(300)
    throughput.add(200)
    assert throughput.read() == pytest.approx((5.0, 50.0), rel=0.01)
    assert throughput.read()[0] == 0


def test_time_without_steps_is_left_out():
    throughput = Throughput()
    throughput.since_s -= 100
    throughput.add(300)
    throughput.leave_out(40)
    assert throughput.read() == pytest.approx((5.0, 60.0), rel=0.01)
