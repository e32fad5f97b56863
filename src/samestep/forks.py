"""What a forked process closes: it may outlive its worker, which all others take for gone then."""

from __future__ import annotations

import os
import weakref
from typing import Protocol

__all__ = ["close_in_child"]


class _Connections(Protocol):
    def close(self) -> None: ...


_open: weakref.WeakSet[_Connections] = weakref.WeakSet()


def close_in_child(connections: _Connections) -> None:
    """Have a forked process close what it inherits of these."""
    _open.add(connections)


def _close_all() -> None:
    for connections in _open:
        connections.close()


os.register_at_fork(after_in_child=_close_all)
