"""The options of a job of several hosts, with torchrun's names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from samestep.errors import ConfigError, shown
from samestep.workers.process import DEFAULT_TIMEOUT_S

__all__ = ["DEFAULT_ID", "Nodes"]

DEFAULT_ID = "samestep"

_DEFAULT_PORT = 29400  # torchrun's
_MOST = 10_000


@dataclass(frozen=True)
class Nodes:
    """How many hosts a job has, and where they meet.

    Attributes:
        fewest: number of hosts with which the job can begin.
        most: largest number of hosts.
        host: name or address of the host that has the store.
        port: port of the store.
        job_id: name of the job, which distinguishes it from others that meet there.
        timeout_s: how long to wait for the other hosts.
        most_workers: largest number of workers, at most one per tower; others wait until a worker is lost.
        must_match: values by name that must be the same on a host that joins.
    """

    fewest: int
    most: int
    host: str
    port: int
    job_id: str
    timeout_s: float = DEFAULT_TIMEOUT_S
    most_workers: int | None = None
    must_match: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, nnodes: str | None, endpoint: str | None, job_id: str = DEFAULT_ID) -> Nodes | None:
        """Parse the options; return None for a job of this host alone.

        Raises:
            ConfigError: an option is missing or malformed.

        Example:
            >>> nodes = Nodes.of("2:4", "gpu-1")
            >>> nodes.fewest, nodes.most, nodes.host, nodes.port
            (2, 4, 'gpu-1', 29400)
        """
        if (nnodes is None) != (endpoint is None):
            missing = "--rdzv-endpoint" if endpoint is None else "--nnodes"
            raise ConfigError(
                f"{missing} is missing: several hosts need --nnodes and --rdzv-endpoint, one neither"
            )
        if nnodes is None or endpoint is None:
            return None
        if not re.fullmatch(r"[ -~]{1,100}", job_id):
            raise ConfigError(f"--rdzv-id {shown(job_id)}: expected 1 to 100 printable ASCII characters")
        return cls(*_numbers(nnodes), *_address(endpoint), job_id)


def _numbers(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d{1,5})(?::(\d{1,5}))?", text, re.ASCII)
    fewest, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= fewest <= most <= _MOST:
        raise ConfigError(
            f"--nnodes {shown(text)}: expected a number of hosts, or MIN:MAX, from 1 to {_MOST:,}"
        )
    return fewest, most


def _address(text: str) -> tuple[str, int]:
    found = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+(?:%\w+)?)\]|([^\s:\[\]]+))(?::(\d{1,5}))?", text, re.ASCII)
    port = int(found[3] or _DEFAULT_PORT) if found else 0
    if found is None or not 1 <= port < 2**16:
        raise ConfigError(f"--rdzv-endpoint {shown(text)}: expected HOST or HOST:PORT, such as gpu-1:29400")
    return found[1] or found[2], port
