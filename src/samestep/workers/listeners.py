"""Sockets that listen for the other workers of this host, or of all hosts."""

from __future__ import annotations

import socket
from contextlib import suppress

from samestep.errors import ConfigError

__all__ = ["loopback_listener", "open_listener"]

_CONNECT_S = 5.0


def loopback_listener() -> socket.socket:
    """Return a socket that listens on 127.0.0.1, at a port that the system chooses.

    Raises:
        ConfigError: processes of this host cannot connect to each other, as in some containers.
    """
    try:
        with socket.create_server(("127.0.0.1", 0)) as probe:  # succeeds even if nobody can connect
            socket.create_connection(probe.getsockname(), timeout=_CONNECT_S).close()
        return socket.create_server(("127.0.0.1", 0), backlog=socket.SOMAXCONN)
    except OSError as error:
        raise ConfigError(
            "several workers of one host find each other over its loopback address 127.0.0.1, which does not "
            f"work ({error.strerror or error}): bring it up, as by `ip link set lo up`, or use one worker"
        ) from error


def open_listener(port: int = 0) -> socket.socket:
    """Return a socket that listens on all IPv4 and IPv6 addresses of this host.

    Args:
        port: the port; by default the system chooses.
    """
    if socket.has_dualstack_ipv6():
        with suppress(OSError):  # IPv6 may be supported but disabled
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))
