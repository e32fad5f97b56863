"""The store in which workers find each other: opened by their launcher or by worker 0."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from samestep.errors import ConfigError, LostWorkerError, one_line
from samestep.workers.environment import rank, world_size
from samestep.workers.process import open_listener

__all__ = ["join_store", "open_store", "reach_store"]

_VARIABLES = "MASTER_ADDR and MASTER_PORT"
_RETRY_S = 0.1
_OPEN_S = 30.0
_ANSWER_S = 1.0


def open_store(listener: socket.socket) -> Store:
    """Open a store for the workers of this host, at the address of a socket that it takes over."""
    host, port = listener.getsockname()[:2]
    connect = partial(TCPStore, host, port, is_master=True, master_listen_fd=listener.detach())
    return _connected(connect, (host, port), _OPEN_S)


def reach_store(timeout_s: float) -> tuple[Store, int, int]:
    """Return the store at MASTER_ADDR and MASTER_PORT, rank and world size, as torch's `env://` does.

    Worker 0 opens it, unless the launcher has. Where that fails, torch prints dozens of lines, or waits for
    ever if something else listens there.

    Raises:
        ConfigError: worker 0 cannot have the port.
        LostWorkerError: there is no store within the timeout.
    """
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    deadline_s = time.monotonic() + timeout_s
    options: dict[str, Any] = {}
    if rank() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        options = {"is_master": True, "master_listen_fd": _listen(address[1]).detach()}
    else:
        _wait_for_listener(address, deadline_s)
    remaining_s = max(1.0, deadline_s - time.monotonic())
    connect = partial(TCPStore, *address, world_size(), multi_tenant=True, **options)
    return _connected(connect, address, remaining_s), rank(), world_size()


def join_store(host: str, port: int, timeout_s: float) -> tuple[Store, bool]:
    """Return the store of several hosts, and whether it is opened here: the address is this host's and free.

    Raises:
        LostWorkerError: there is none within the timeout.
    """
    options: dict[str, Any] = {}
    with suppress(OSError):  # another process of this host has opened it
        if _is_own(host):
            options = {"is_master": True, "master_listen_fd": open_listener(port).detach()}
    deadline_s = time.monotonic() + timeout_s
    try:
        if not options:
            _wait_for_listener((host, port), deadline_s)
        remaining_s = max(1.0, deadline_s - time.monotonic())
        return _connected(partial(TCPStore, host, port, **options), (host, port), remaining_s), bool(options)
    except LostWorkerError as error:
        raise LostWorkerError(str(error).replace(_VARIABLES, "--rdzv-endpoint")) from error


def _is_own(host: str) -> bool:
    """Say whether an address is one of this host's: others cannot be bound."""
    for family, kind, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM):
        with suppress(OSError), socket.socket(family, kind) as probe:
            probe.bind(address)
            return True
    return False


def _connected(connect: partial[TCPStore], address: tuple[str, int], timeout_s: float) -> Store:
    """Connect in a thread: torch has no deadline for the first answer of what it has connected to."""
    found: list[Any] = []

    def work() -> None:
        try:
            found.append(connect(wait_for_workers=False, timeout=timedelta(seconds=timeout_s)))
        except dist.DistError as error:
            found.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(timeout_s + _ANSWER_S)
    if not found:
        raise _unreachable(address, "what listens there does not answer")
    if isinstance(found[0], BaseException):
        raise _unreachable(address, str(found[0]).partition(". ")[0]) from found[0]
    store: Store = found[0]
    return store


def _listen(port: int) -> socket.socket:
    """Listen on all addresses of this host."""
    try:
        return open_listener(port)
    except OSError as error:
        why = "another program does" if error.errno == errno.EADDRINUSE else error.strerror
        problem = f"MASTER_PORT={port}: worker 0 cannot listen there ({why}); choose a free port"
        raise ConfigError(problem) from error


def _wait_for_listener(address: tuple[str, int], deadline_s: float) -> None:
    while True:
        try:
            socket.create_connection(address, timeout=max(_RETRY_S, deadline_s - time.monotonic())).close()
            return
        except (OSError, UnicodeError) as error:  # the latter where the name can be no host's
            if time.monotonic() + _RETRY_S > deadline_s:
                raise _unreachable(address, str(error)) from error
        time.sleep(_RETRY_S)


def _unreachable(address: tuple[str, int], why: str) -> LostWorkerError:
    where = one_line("{}:{}".format(*address))
    return LostWorkerError(
        f"no store of this job at {_VARIABLES}, {where}, where its workers find each other ({one_line(why)})"
    )
