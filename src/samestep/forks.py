"""Closes connections in forked processes: a child that outlives its worker would hide the worker's end."""

from __future__ import annotations

import os
import weakref
from typing import Protocol

__all__ = ["close_in_child"]


class _Connections(Protocol):
    def close(self) -> None: ...


_open: weakref.WeakSet[_Connections] = weakref.WeakSet()


def close_in_child(connections: _Connections) -> None:
    """Have each process that is forked from this one close these connections."""
    _open.add(connections)


def _close_all() -> None:
    for connections in _open:
        connections.close()


os.register_at_fork(after_in_child=_close_all)
