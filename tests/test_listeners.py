"""Sockets that listen where the system has no IPv6, or no loopback address."""

import socket

import pytest

from samestep.errors import ConfigError
from samestep.workers.listeners import loopback_listener, open_listener


def test_hosts_without_ipv6_listen_too(monkeypatch):
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    with open_listener() as listener:
        assert listener.family == socket.AF_INET
        socket.create_connection(("127.0.0.1", listener.getsockname()[1])).close()


def test_a_loopback_without_an_address_is_one_line(monkeypatch):
    def unreachable(*arguments, **options):
        raise OSError(101, "Network is unreachable")

    loopback_listener().close()
    monkeypatch.setattr(socket, "create_connection", unreachable)
    with pytest.raises(ConfigError, match=r"not work .Network is unreachable.: bring it up"):
        loopback_listener()
