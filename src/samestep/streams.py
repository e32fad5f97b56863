"""(seed, purpose, …) -> random numbers. No stream depends on a worker, a rank or a device index."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_leaves

__all__ = [
    "GlobalStreams",
    "generator",
    "keep_globals",
    "seed_globals",
    "stream_seed",
    "tower_seed",
    "uniforms",
]


def stream_seed(seed: int, purpose: str, *indices: int) -> int:
    """Return the 63-bit seed of one stream: a BLAKE2b hash of seed, purpose and indices.

    Args:
        seed: the run's seed.
        purpose: what the stream is for, such as "tower" or "example".
        indices: which one, such as (step, tower) or (epoch, example).

    Example:
        >>> stream_seed(0, "tower", 10, 3) == stream_seed(0, "tower", 10, 3) != stream_seed(0, "tower", 10, 4)
        True
    """
    name = repr((int(seed), purpose, *map(int, indices))).encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 1


def tower_seed(seed: int, step: int, tower: int) -> int:
    """Return the seed of a tower's stream in a step; each of its passes in the step starts from this seed."""
    return stream_seed(seed, "tower", step, tower)


def generator(seed: int, purpose: str, *indices: int, device: torch.device | str = "cpu") -> torch.Generator:
    """Return a new torch generator for a stream (see `stream_seed`)."""
    return torch.Generator(device=device).manual_seed(stream_seed(seed, purpose, *indices))


@dataclass(frozen=True)
class GlobalStreams:
    """The states of the process's global random generators.

    These are torch's default generators (the CPU's and the device's), Python's `random` and NumPy's
    legacy global generator.
    """

    device: torch.device
    torch_cpu: Tensor
    torch_device: Tensor | None
    python: tuple[Any, ...]
    numpy: Any

    @classmethod
    def capture(cls, device: torch.device) -> GlobalStreams:
        """Read the current states."""
        on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        on_cpu = torch.default_generator.get_state()
        return cls(device, on_cpu, on_device, random.getstate(), np.random.get_state())

    def has_changed(self) -> bool:
        """Whether the generators' states differ from these now."""
        now = GlobalStreams.capture(self.device)
        pairs = zip(tree_leaves(self.state_dict()), tree_leaves(now.state_dict()), strict=True)
        return not all(
            torch.equal(one, other) if isinstance(one, Tensor) else one == other for one, other in pairs
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the states as tensors, numbers and strings."""
        version, words, python_gauss = self.python
        kind, key, *numpy_rest = self.numpy
        return {
            "torch": self.torch_cpu,
            "device": self.torch_device,
            "python": [version, torch.tensor(words, device="cpu"), python_gauss],
            "numpy": [kind, torch.from_numpy(key.astype(np.int64)), *numpy_rest],
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any], device: torch.device) -> GlobalStreams:
        """Restore from `state_dict`'s result; the device's state only if `device` is a GPU."""
        version, words, python_gauss = state["python"]
        kind, key, *numpy_rest = state["numpy"]
        return cls(
            device,
            state["torch"],
            state["device"] if device.type == "cuda" else None,
            (version, tuple(words.tolist()), python_gauss),
            (kind, key.numpy().astype(np.uint32), *numpy_rest),
        )

    def restore(self) -> None:
        """Set the generators to these states."""
        torch.default_generator.set_state(self.torch_cpu)
        if self.torch_device is not None:
            torch.cuda.set_rng_state(self.torch_device, self.device)
        random.setstate(self.python)
        np.random.set_state(self.numpy)


@contextmanager
def keep_globals(device: torch.device) -> Iterator[None]:
    """Restore the process's global generators on exit; see `GlobalStreams`."""
    streams = GlobalStreams.capture(device)
    try:
        yield
    finally:
        streams.restore()


def seed_globals(value: int, device: torch.device) -> None:
    """Seed the process's global generators (see `GlobalStreams`) from one 63-bit number."""
    torch.default_generator.manual_seed(value)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(value)
    random.seed(value)
    np.random.seed(value & 0xFFFF_FFFF)


def uniforms(seeds: NDArray[np.uint64], count: int) -> NDArray[np.float64]:
    r"""Return `count` uniform random numbers for each seed; a row depends on its own seed alone.

    .. math:: u_{ik} = 2^{-53} \lfloor 2^{-11} \mathrm{mix}(s_i + (k + 1) \gamma) \rfloor

    where γ and mix are those of SplitMix64. Each number is a hash of (seed, k), so all are computed at once.

    Args:
        seeds: uint64 [n], such as those of `stream_seed`.
        count: numbers for each seed, at least 0.

    Returns:
        float64 [n, count], in [0, 1).

    Example:
        >>> uniforms(np.array([7, 8], dtype=np.uint64), 2).round(3)
        array([[0.39 , 0.017],
               [0.619, 0.612]])

    References:
        Steele, Lea & Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
        https://doi.org/10.1145/2660193.2660195
    """
    counters = np.arange(1, count + 1, dtype=np.uint64) * _SPLITMIX_GAMMA
    bits = _splitmix(np.asarray(seeds, dtype=np.uint64)[:, None] + counters)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


_SPLITMIX_GAMMA = np.uint64(0x9E37_79B9_7F4A_7C15)


def _splitmix(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return bits ^ (bits >> np.uint64(31))
