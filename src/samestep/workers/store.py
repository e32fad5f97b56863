"""The key-value store through which workers find each other: opened by the launcher or by worker 0."""

from __future__ import annotations

import errno
import os
import socket
import time
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from samestep.errors import ConfigError, LostWorkerError, one_line
from samestep.workers.environment import rank, world_size
from samestep.workers.listeners import open_listener
from samestep.workers.waiter import in_thread

__all__ = ["join_store", "open_store", "reach_store"]

_VARIABLES = "MASTER_ADDR and MASTER_PORT"
_RETRY_S = 0.1
_OPEN_S = 30.0
_ANSWER_S = 1.0


def open_store(listener: socket.socket) -> Store:
    """Open a store for the workers of this host on a listening socket, which it takes over."""
    return _connected(listener.getsockname()[:2], listener, _OPEN_S, _VARIABLES)


def reach_store(timeout_s: float) -> Store:
    """Return the store at MASTER_ADDR and MASTER_PORT, with this timeout.

    Worker 0 opens it, unless the launcher has done so, as with torch's `env://`. Unlike `env://`, this raises
    a short error if it fails, and does not wait forever if another program listens at the port.

    Raises:
        ConfigError: worker 0 cannot listen on the port.
        LostWorkerError: there is no store within the timeout.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    opens = rank() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    listener = _listen(port) if opens else None
    options = {"world_size": world_size(), "multi_tenant": True}
    store = _connected((host, port), listener, timeout_s, _VARIABLES, **options)
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def join_store(host: str, port: int, timeout_s: float) -> tuple[Store, bool]:
    """Return the store of several hosts, and whether this process has opened it.

    It opens the store if the address is one of this host's and the port is free.

    Raises:
        LostWorkerError: there is no store within the timeout.
    """
    listener = None
    with suppress(OSError):  # another process of this host listens there
        if _is_own(host):
            listener = open_listener(port)
    return _connected((host, port), listener, timeout_s, "--rdzv-endpoint"), listener is not None


def _is_own(host: str) -> bool:
    """Return whether an address is one of this host's: only those can be bound."""
    for family, kind, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM):
        with suppress(OSError), socket.socket(family, kind) as probe:
            probe.bind(address)
            return True
    return False


def _connected(
    address: tuple[str, int], listener: socket.socket | None, timeout_s: float, named: str, **options: Any
) -> Store:
    """Open the store on a listening socket, or connect to it once it is open.

    `named` names the settings that the address comes from, for errors. torch's store is created in a thread,
    because it has no timeout for the first answer of the program that it connects to.
    """
    deadline_s = time.monotonic() + timeout_s
    try:
        if listener is None:
            _wait_for_listener(address, deadline_s)
        else:
            options |= {"is_master": True, "master_listen_fd": listener.detach()}
        left_s = max(1.0, deadline_s - time.monotonic())
        options |= {"wait_for_workers": False, "timeout": timedelta(seconds=left_s)}
        return in_thread(partial(TCPStore, *address, **options), left_s + _ANSWER_S)
    # UnicodeError: the name cannot be that of a host.
    except (LostWorkerError, OSError, UnicodeError, dist.DistError) as error:
        is_silent, where = isinstance(error, LostWorkerError), one_line("{}:{}".format(*address))
        why = "what listens there does not answer" if is_silent else one_line(str(error).partition(". ")[0])
        raise LostWorkerError(
            f"cannot reach the job's store, where workers meet, at {where} (from {named}): {why}"
        ) from error


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
        except (OSError, UnicodeError):
            if time.monotonic() + _RETRY_S > deadline_s:
                raise
        time.sleep(_RETRY_S)
