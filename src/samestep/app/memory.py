"""Peak memory use of a worker, and total memory of its device."""

from __future__ import annotations

import os
import resource
import sys

import torch

__all__ = ["peak_bytes", "total_bytes"]


def peak_bytes(device: torch.device) -> int:
    """Return this process's peak memory in bytes: of its GPU, or for a CPU the peak resident set size."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def total_bytes(device: torch.device) -> int:
    """Return the total memory of the device, in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
