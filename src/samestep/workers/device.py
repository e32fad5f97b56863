"""The device of a worker: which one, how many there are, and kernels that give the same bits each time."""

from __future__ import annotations

import os

import torch

from samestep.errors import ConfigError, warn

__all__ = [
    "device_named",
    "gpu_of",
    "has_tf32",
    "make_cuda_deterministic",
    "set_tf32",
]


def device_named(name: str, local_rank: int) -> torch.device:
    """Return the device that a setting names, on the worker with this local rank."""
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device = {name!r}: expected one of auto, cpu, cuda")
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("device = 'cuda': torch sees no GPU here; use device 'cpu' or 'auto'")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def gpu_of(device: torch.device) -> str:
    """Return what tells this GPU from all others, on any host; nothing for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def has_tf32(device: torch.device) -> bool:
    """Say whether the device can multiply in TF32: NVIDIA GPUs from Ampere on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def make_cuda_deterministic(device: torch.device, *, tf32: bool = False) -> None:
    """Choose the device, and kernels without random order, autotuning or, unless asked for, TF32."""
    torch.cuda.set_device(device)
    wanted = ":4096:8"
    if os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", wanted) not in (wanted, ":16:8"):
        warn(
            f"CUBLAS_WORKSPACE_CONFIG={os.environ['CUBLAS_WORKSPACE_CONFIG']} lets cuBLAS change the bits; "
            f"unset it or use {wanted}"
        )
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    # By default this fills every torch.empty, only for programs that read memory before they write to it.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    set_tf32(tf32)


def set_tf32(wanted: bool) -> None:
    """Let the GPU multiply float32 numbers in TF32, or not."""
    # Through both of torch's interfaces: the older one alone leaves convolutions to
    # torch.backends.fp32_precision, and after the newer one alone the older one's getters raise.
    torch.backends.cuda.matmul.allow_tf32 = wanted
    torch.backends.cudnn.allow_tf32 = wanted
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    for products in (cuda.matmul, cudnn.conv, cudnn.rnn):  # type: ignore[attr-defined]
        products.fp32_precision = "tf32" if wanted else "ieee"  # type: ignore[union-attr]
