"""The device of a worker: how it is chosen, and settings that make its kernels deterministic."""

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
    """Return the device for the setting `device` ("auto", "cpu" or "cuda") and a local rank."""
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device = {name!r}: expected one of auto, cpu, cuda")
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("device = 'cuda': torch sees no GPU here; use device 'cpu' or 'auto'")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def gpu_of(device: torch.device) -> str:
    """Return the UUID of a GPU, which is unique across hosts; an empty string for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def has_tf32(device: torch.device) -> bool:
    """Return whether the device can multiply in TF32: NVIDIA GPUs from Ampere on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def make_cuda_deterministic(device: torch.device, *, tf32: bool = False) -> None:
    """Make this GPU current, and turn off nondeterministic kernels, autotuning and, by default, TF32."""
    torch.cuda.set_device(device)
    wanted = ":4096:8"
    if os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", wanted) not in (wanted, ":16:8"):
        warn(
            f"CUBLAS_WORKSPACE_CONFIG={os.environ['CUBLAS_WORKSPACE_CONFIG']} lets cuBLAS change the bits; "
            f"unset it or use {wanted}"
        )
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    # Filling every torch.empty takes time, and helps only programs that read memory before writing to it.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    set_tf32(tf32)


def set_tf32(wanted: bool) -> None:
    """Turn TF32 for products of float32 numbers on or off."""
    # Both of torch's interfaces are needed: the older one alone leaves convolutions to
    # torch.backends.fp32_precision, and after the newer one alone the getters of the older one raise.
    torch.backends.cuda.matmul.allow_tf32 = wanted
    torch.backends.cudnn.allow_tf32 = wanted
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    for products in (cuda.matmul, cudnn.conv, cudnn.rnn):  # type: ignore[attr-defined]
        products.fp32_precision = "tf32" if wanted else "ieee"  # type: ignore[union-attr]
