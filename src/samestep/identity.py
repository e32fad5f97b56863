"""A hash of a model's weights (`digest`), and a record of what else the bits depend on (`fingerprint`)."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import sys
import zlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

import samestep
from samestep.errors import ConfigError, one_line, who_has_what

__all__ = [
    "Fingerprint",
    "changes",
    "check_same",
    "checksum",
    "checksum_of",
    "compare",
    "digest",
    "fingerprint",
    "is_compiled",
    "memory_of",
    "plain_names",
    "precisions",
    "uncompiled",
]

T = TypeVar("T")
Fingerprint = Mapping[str, str | int | bool | None]

_HARDWARE = ("CPU", "GPU")
_VARIABLES = ("ATEN_CPU_CAPABILITY", "CUBLAS_WORKSPACE_CONFIG", "MKL_CBWR", "ONEDNN_MAX_CPU_ISA")


def digest(model: nn.Module | Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of all weights, as 64 hexadecimal digits.

    The hash covers each tensor's name, shape, dtype and bytes (row-major, whatever its memory format;
    little-endian), in order of name. The tensors are those of `model.state_dict()`: parameters and
    persistent buffers. A model has the same digest before and after `torch.compile`.

    Args:
        model: a module, or a mapping from names to tensors of any dtype on any device.

    Returns:
        The hash, in lower case.

    Example:
        >>> digest({"weight": torch.zeros(2)})[:16]
        '93100c8e2288b19c'
    """
    if not isinstance(model, nn.Module | Mapping):
        raise ConfigError(
            f"model is a {type(model).__name__}: expected an nn.Module or a mapping of tensors; `samestep "
            "digest PATH` prints the digest of a run or a checkpoint"
        )
    tensors = plain_names(model.state_dict() if isinstance(model, nn.Module) else model)
    sha256 = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        if not isinstance(tensor, Tensor):  # a module's extra state
            continue
        sha256.update(f"{name}\0{tuple(tensor.shape)}\0{tensor.dtype}\0".encode())
        sha256.update(memory_of(tensor.detach().cpu().contiguous().resolve_conj().resolve_neg()))
    return sha256.hexdigest()


_Memory = ctypes.c_char * sys.maxsize  # one type for all sizes: making one takes longer than a checksum
_LANES = 1024
_BLOCK_BYTES = 8 * _LANES
_FEW_BLOCKS = 16  # below this, a CRC takes less time than the fixed cost of NumPy's sums


def checksum(content: Any) -> int:
    """Return a 32-bit checksum of a contiguous buffer at the speed of memory, or the CRC-32 of a small one.

    It hashes the row and column sums of a matrix of 64-bit integers in which each row is a block of 8 KB:
    changing one value, or swapping two different ones, changes at least one of the sums.
    """
    num_blocks = memoryview(content).nbytes // _BLOCK_BYTES
    if num_blocks < _FEW_BLOCKS:
        return zlib.crc32(content)
    blocks = np.frombuffer(content, np.int64, num_blocks * _LANES).reshape(num_blocks, _LANES)
    crc = zlib.crc32(np.frombuffer(content, np.uint8)[num_blocks * _BLOCK_BYTES :].data)
    return zlib.crc32(blocks.sum(0), zlib.crc32(blocks.sum(1), crc))


def memory_of(tensor: Tensor, elements: slice = slice(None)) -> memoryview:
    """Return the memory of a contiguous tensor on the host, or of a range of its elements; it keeps it alive.

    `Tensor.numpy` is not used, because torch would then refuse to resize the tensor.
    """
    start, stop, _ = elements.indices(tensor.numel())
    size, address = tensor.element_size(), tensor.data_ptr()
    if not address and start < stop:
        raise ConfigError(f"a {type(tensor).__name__} has no memory of its own: expected a plain tensor")
    memory = _Memory.from_address(address + start * size)
    memory.tensor = tensor  # type: ignore[attr-defined]
    return memoryview(memory)[: max(0, stop - start) * size].cast("B")


def checksum_of(tensor: Tensor, elements: slice = slice(None)) -> int:
    """Return the checksum of a contiguous tensor on the host, or of a range of its elements."""
    memory = memory_of(tensor, elements)
    return checksum(memory) if memory.nbytes else 0


# torch.compile wraps a module in another one, as a child of this name:
# https://github.com/pytorch/pytorch/blob/main/torch/_dynamo/eval_frame.py
_COMPILED = "_orig_mod"


def plain_names(entries: Mapping[str, T]) -> dict[str, T]:
    """Return a module's entries, in order, under the names that they had before `torch.compile`.

    Example:
        >>> plain_names({"_orig_mod.0.weight": 1, "1._orig_mod.bias": 2})
        {'0.weight': 1, '1.bias': 2}
    """
    plain = {".".join(part for part in n.split(".") if part != _COMPILED): e for n, e in entries.items()}
    # If names coincide, the user has a module of this name: keep them.
    return plain if len(plain) == len(entries) else dict(entries)


def uncompiled(value: T) -> T:
    """Return the module inside `torch.compile`'s wrapper, and anything else as it is."""
    inner = value._modules.get(_COMPILED) if isinstance(value, nn.Module) else None
    return value if inner is None else inner  # type: ignore[return-value]


def is_compiled(value: object) -> bool:
    """Say whether this is a module or function that `torch.compile` has compiled or will compile."""
    # `isinstance` would ask a proxy, which may load its target.
    if issubclass(type(value), nn.Module):
        return uncompiled(value) is not value or value._compiled_call_impl is not None  # type: ignore[attr-defined]
    # https://github.com/pytorch/pytorch/blob/main/torch/_dynamo/eval_frame.py
    known = vars(value) if type(value) is FunctionType else {}
    return "_torchdynamo_orig_callable" in known and not known.get("_torchdynamo_disable")


def check_same(saved: Mapping[str, Any], current: Mapping[str, Any], owner: str) -> None:
    """Refuse state from a run with other settings.

    Args:
        saved: a state with all entries of `current`, and perhaps more.
        current: the settings that must be the same.
        owner: names the object in the message.

    Raises:
        ConfigError: an entry differs.

    Example:
        >>> check_same({"seed": 1, "step": 7}, {"seed": 0}, "towers")
        Traceback (most recent call last):
        samestep.errors.ConfigError: the state of towers is from a run with seed = 1, not 0: ...
    """
    for name, value in current.items():
        if saved.get(name) != value:
            raise ConfigError(
                f"the state of {owner} is from a run with {name} = {one_line(repr(saved.get(name)))}, not "
                f"{value!r}: use the same value, or start a new run in another folder"
            )


def fingerprint(device: torch.device) -> Fingerprint:
    """Return what the bits on this worker depend on; it is the same for every placement on equal machines.

    Args:
        device: of this worker.
    """
    entries: dict[str, str | int | bool | None] = {
        "device": device.type,
        "CPU": _cpu(),
        "CPU kernels": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "default dtype": str(torch.get_default_dtype()),
        "float32 on CPU": precisions(torch.backends.mkldnn),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "Python": platform.python_version(),
        "samestep": samestep.__version__,
        "torch": torch.__version__,
        "NumPy": np.__version__,
        **_libraries(),
        **{name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }
    return entries | (_gpu(device) if device.type == "cuda" else {})


def changes(before: Fingerprint, now: Fingerprint) -> list[str]:
    """Say which entries differ.

    Example:
        >>> changes({"threads": 1, "torch": "2.12"}, {"threads": 2, "torch": "2.12"})
        ['threads = 1, now 2']
    """
    names = [*before, *(name for name in now if name not in before)]
    return [
        f"{one_line(name)} = {one_line(str(before.get(name)))}, now {one_line(str(now.get(name)))}"
        for name in names
        if before.get(name) != now.get(name)
    ]


def compare(fingerprints: Sequence[Fingerprint]) -> tuple[list[str], list[str]]:
    """Say where the fingerprints of a job's workers differ.

    Args:
        fingerprints: of all workers, by rank.

    Returns:
        errors: differences in software, threads or flags, which change kernels or rounding.
        warnings: different models of CPU or GPU, and different CPU kernels that follow from them.

    Example:
        >>> compare([{"CPU": "a", "torch": "2.13"}, {"CPU": "b", "torch": "2.13"}])
        ([], ['worker 0 has CPU = a, worker 1 has CPU = b'])
    """
    names = list(dict.fromkeys(name for each in fingerprints for name in each))
    values = {name: [each.get(name) for each in fingerprints] for name in names}
    differing = {name: found for name, found in values.items() if len(set(found)) > 1}
    if "device" in differing:  # then all entries about GPUs differ, too
        return [who_has_what("device", differing["device"])], []
    errors: list[str] = []
    warnings: list[str] = []
    for name, found in differing.items():
        follows = name == "CPU kernels" and _follows(values["CPU"], found)
        said = who_has_what(one_line(name), [one_line(str(value)) for value in found])
        (warnings if follows or name in _HARDWARE else errors).append(said)
    return errors, warnings


def _follows(causes: Sequence[object], effects: Sequence[object]) -> bool:
    """Say whether equal causes have equal effects."""
    return len(set(zip(causes, effects, strict=True))) == len(set(causes))


def _gpu(device: torch.device) -> dict[str, str | int | bool | None]:
    return {
        "GPU": torch.cuda.get_device_name(device),
        "float32 on GPU": precisions(torch.backends.cuda, torch.backends.cudnn),
        "cuDNN benchmark": torch.backends.cudnn.benchmark,
        "CUDA": torch.version.cuda,
        "cuDNN": torch.backends.cudnn.version(),
    }


def precisions(*backends: object) -> str:
    """Name the precisions (ieee, tf32, bf16; none is torch's default) in which backends compute float32.

    This reads torch's newer interface, because the older one raises once the newer one has been used.
    """
    set_for = [
        f"{name} {getattr(backend, name).fp32_precision}"
        for backend in backends
        for name in ("matmul", "conv", "rnn")
        if hasattr(getattr(backend, name, None), "fp32_precision")
    ]
    return ", ".join(set_for)


@cache
def _cpu() -> str:
    """Return the CPU's model, with numbers that distinguish models of the same name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:  # not Linux
        return platform.processor() or platform.machine()
    known = dict(re.split(r"\s*:\s*", line, maxsplit=1) for line in lines if ":" in line)
    numbers = [f"{name} {known[name]}" for name in ("cpu family", "model", "stepping") if name in known]
    return f"{known.get('model name', platform.machine())} ({', '.join(numbers)})"


@cache
def _libraries() -> Fingerprint:
    """Return the versions of the CPU's kernel libraries that torch was built with."""
    built_with = torch.__config__.show()
    patterns = {"oneDNN": r"MKL-DNN (v[\d.]+)", "MKL": r"Math Kernel Library Version (\S+)"}
    found = {name: re.search(pattern, built_with) for name, pattern in patterns.items()}
    return {name: match[1] for name, match in found.items() if match}
