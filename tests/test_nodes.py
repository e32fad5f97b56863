"""The options that name a job's hosts."""

import pytest

from samestep.app.launching.nodes import Nodes
from samestep.errors import ConfigError

BAD_NUMBERS = ("0", "", "3:2", "0:2", "1:", ":2", "a", "1:2:3", "-1", "1.5", "10001", "\u0663")
BAD_ENDPOINTS = ("", "a:", ":1", "a:b", "a:0", "a:65536", "a b:1", "::1:80", "[::1", "a:1:2")


@pytest.mark.parametrize(
    ("nnodes", "endpoint", "expected"),
    [
        ("3", "gpu-1:4000", (3, 3, "gpu-1", 4000)),
        ("1:10000", "10.0.0.1", (1, 10_000, "10.0.0.1", 29400)),
        ("2:4", "[fe80::1%eth0]:80", (2, 4, "fe80::1%eth0", 80)),
        ("2", "[::1]", (2, 2, "::1", 29400)),
    ],
)
def test_what_the_options_say(nnodes, endpoint, expected):
    nodes = Nodes.of(nnodes, endpoint, "mine")
    assert (nodes.fewest, nodes.most, nodes.host, nodes.port) == expected
    assert nodes.job_id == "mine"


def test_one_host_needs_none():
    assert Nodes.of(None, None) is None


@pytest.mark.parametrize(
    ("nnodes", "endpoint", "job_id", "said"),
    [
        ("2", None, "a", "--rdzv-endpoint is missing: several hosts need --nnodes and --rdzv-endpoint"),
        (None, "a:1", "a", "--nnodes is missing"),
        ("2", "a:1", "", "--rdzv-id '': expected 1 to 100 printable ASCII characters"),
        ("2", "a:1", "a\nb", "--rdzv-id"),
        *((n, "a:1", "a", f"--nnodes '{n}': expected a number of hosts, or MIN:MAX") for n in BAD_NUMBERS),
        *(("2", e, "a", "--rdzv-endpoint .*: expected HOST or HOST:PORT, such as") for e in BAD_ENDPOINTS),
    ],
)
def test_what_they_cannot_say(nnodes, endpoint, job_id, said):
    with pytest.raises(ConfigError, match=f"^{said}"):
        Nodes.of(nnodes, endpoint, job_id)
