"""The device of a worker: which one, how many there are, and kernels that give the same bits each time."""

from __future__ import annotations

import os
import warnings

import torch

from samestep.errors import ConfigError

__all__ = ["check_threads", "device_named", "make_cuda_deterministic", "num_cores"]


def num_cores() -> int:
    """Return how many CPU cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS has no affinity


def check_threads(threads: int) -> None:
    """Refuse a number of CPU threads below 1."""
    if threads < 1:
        raise ConfigError(f"threads = {threads}: expected at least 1")


def device_named(name: str, local_rank: int) -> torch.device:
    """Return the device that a setting names, on the worker with this local rank."""
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device = {name!r}: expected one of auto, cpu, cuda")
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("device = 'cuda': torch sees no GPU here; use device 'cpu' or 'auto'")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def make_cuda_deterministic(device: torch.device) -> None:
    """Choose the device, and kernels without random order, rounding or autotuning."""
    torch.cuda.set_device(device)
    wanted = ":4096:8"
    if os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", wanted) not in (wanted, ":16:8"):
        warnings.warn(
            f"CUBLAS_WORKSPACE_CONFIG={os.environ['CUBLAS_WORKSPACE_CONFIG']} lets cuBLAS change the bits; "
            f"unset it or use {wanted}",
            stacklevel=4,
        )
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
