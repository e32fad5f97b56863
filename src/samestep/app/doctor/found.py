"""The properties of a machine that a run depends on."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from samestep.app.launching.num_workers import num_cores
from samestep.app.memory import total_bytes
from samestep.checkpoint.file_lock import hold, let_go
from samestep.errors import Error, one_line, shown
from samestep.identity import fingerprint
from samestep.memory.segments import try_out
from samestep.workers.default_group import MAKE_S, make_group, run_interruptibly
from samestep.workers.listeners import loopback_listener

__all__ = ["Finding", "find", "in_gb"]

_RESERVED_BYTES = 1 << 26
_MAX_CHARS = 120
_PREFIXES = (
    *("ATEN_", "CUBLAS_", "CUDA_", "GLOO_", "GOMP_", "KMP_", "LD_PRELOAD", "MALLOC_", "MKL_", "NCCL_"),
    *("OMP_", "ONEDNN_", "PYTORCH_", "SAMESTEP_", "TORCH_"),
)
"""Prefixes of environment variables that affect kernels, threads, memory or communication."""

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_DEVICES, _SHARED = Path("/dev"), Path("/dev/shm")


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        name: the property.
        text: its value.
        holds: whether samestep can run with this value; False makes the exit status 1.
    """

    name: str
    text: str
    holds: bool = True


def find(device: torch.device) -> Iterator[Finding]:
    """Yield the properties of the machine, including the fingerprint that the bits depend on."""
    yield Finding("system", platform.platform())
    for name, value in fingerprint(device).items():
        yield Finding(name, one_line(str(value), _MAX_CHARS))
    yield from _gpus()
    for look in (
        _cores,
        _memory,
        _backends,
        _environment,
        _shared_memory,
        _temporary_folder,
        _network,
        _locks,
    ):
        try:
            yield look()
        except OSError as error:  # the system does not provide this property
            yield Finding(look.__name__.strip("_").replace("_", " "), f"not known: {one_line(str(error))}")


def in_gb(num_bytes: float) -> str:
    """Format a number of bytes.

    >>> in_gb(2_500_000_000)
    '2.5 GB'
    """
    return f"{num_bytes / 1e9:.1f} GB"


def _cores() -> Finding:
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    return Finding("cores", f"{num_cores()} of {os.cpu_count()}, load {load}")


def _memory() -> Finding:
    text = in_gb(total_bytes(torch.device("cpu")))
    try:
        limit = _CGROUP_LIMIT.read_text().strip()
    except OSError:  # no cgroup limit that this process can read
        limit = ""
    return Finding("memory", f"{text}, limited to {in_gb(int(limit))}" if limit.isdecimal() else text)


def _gpus() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        yield Finding("GPUs", f"none that torch sees{_why_hidden()}")
        return
    for number in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(number)
        text = f"{found.name}, {in_gb(found.total_memory)}, capability {found.major}.{found.minor}"
        yield Finding(f"GPU {number}", text)


def _why_hidden() -> str:
    """Say why torch sees none of the GPUs that NVIDIA's driver has."""
    if not any(_DEVICES.glob("nvidia[0-9]*")):
        return ""
    if torch.version.cuda is None:
        return (
            f", but the machine has some: torch {torch.__version__} was built for CPUs, install one for CUDA"
        )
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return f", but the machine has some: see CUDA_VISIBLE_DEVICES ({shown(chosen)}), and `nvidia-smi`"


def _backends() -> Finding:
    if not dist.is_available():
        return Finding("backends", "none: this torch was built without torch.distributed", holds=False)
    known = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available, "mpi": dist.is_mpi_available}
    there = [name for name, is_available in known.items() if is_available()]
    return Finding("backends", ", ".join(there) or "none", holds="gloo" in there)


def _environment() -> Finding:
    set_here = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES)]
    return Finding("environment", "; ".join(one_line(each, _MAX_CHARS) for each in set_here) or "none set")


def _shared_memory() -> Finding:
    """Check for shared memory, which loader processes and the workers of one host use."""
    try:
        text = f"{_SHARED} has {in_gb(shutil.disk_usage(_SHARED).free)} free"
    except OSError as error:
        text = f"{_SHARED}: {error.strerror}"
    return Finding("shared memory", f"{text}; {_reserve()}")


def _reserve() -> str:
    try:
        try_out(_RESERVED_BYTES)
    except OSError as error:
        return f"memory cannot be reserved: {error.strerror}"
    return f"{_RESERVED_BYTES >> 20} MiB could be reserved"


def _temporary_folder() -> Finding:
    name, chosen = "temporary folder", os.environ.get("TMPDIR")
    try:
        folder = tempfile.gettempdir()
        text = f"{folder}, {in_gb(shutil.disk_usage(folder).free)} free"
    except OSError as error:
        return Finding(name, one_line(str(error)), holds=False)
    if chosen and Path(folder).resolve() != Path(chosen).resolve():
        text += f", because TMPDIR = {shown(chosen)} cannot be written to"
    return Finding(name, text)


def _network() -> Finding:
    names = ", ".join(name for _, name in socket.if_nameindex())
    chosen = os.environ.get("GLOO_SOCKET_IFNAME")
    text = f"{names}; GLOO_SOCKET_IFNAME {'not set' if chosen is None else '= ' + one_line(chosen)}"
    try:
        loopback_listener().close()
        if dist.is_available() and dist.is_gloo_available():
            run_interruptibly(_make_gloo, "a process group")
    except Error as error:
        return Finding("network", f"{text}; {error}", holds=False)
    return Finding("network", f"{text}; 127.0.0.1 answers")


def _make_gloo() -> None:
    """Make a process group, as runs do, and end it."""
    make_group(dist.HashStore(), "", 0, 1, MAKE_S, MAKE_S)  # type: ignore[attr-defined]
    dist.destroy_process_group()


def _locks() -> Finding:
    """Check whether files in the current folder, the default place of runs, can be locked."""
    name = "current folder"
    try:
        with tempfile.TemporaryFile(dir=".") as file:
            held = hold(file.fileno())
            let_go(file.fileno())
    except OSError as error:
        return Finding(name, f"cannot be written to ({error.strerror}): choose another by --run-dir")
    if not held:
        return Finding(name, "files cannot be locked: never start two runs with one run folder at a time")
    return Finding(name, "files can be locked")
