"""A dispatch mode that begins and ends with a tower's pass, and can be paused in it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

__all__ = ["PassMode", "not_followed"]

_is_off = ContextVar("_is_off", default=False)


@contextmanager
def not_followed() -> Iterator[None]:
    """Turn off each `PassMode` in this thread, for a tool that inspects passes with a mode of its own."""
    token = _is_off.set(True)
    try:
        yield
    finally:
        _is_off.reset(token)


class PassMode(TorchDispatchMode):
    """Sees the operators of a pass, unless another dispatch mode is active, which may not expect this one.

    Attributes:
        follows: whether it looks at the operators of this pass.
        is_paused: whether it does not look at them now.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.follows, self.is_paused = False, True
        self._thread = 0  # in which the pass began

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Let compiled code stay compiled under this mode."""
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Look at nothing inside compiled code."""
        return True

    def begin(self, *, follows: bool = True) -> None:
        """Begin a pass; without `follows`, be active and look at nothing."""
        is_possible = _get_current_dispatch_mode() in (None, self) and not _is_off.get()
        self.follows = follows and is_possible
        self._thread = threading.get_ident()
        if is_possible:
            self.is_paused = not follows
            self._enter()

    @property
    def is_in_its_thread(self) -> bool:
        """Whether this is the thread in which the pass began."""
        return threading.get_ident() == self._thread

    def pause(self) -> None:
        """Look at nothing, until `resume`."""
        self.is_paused = True
        if _get_current_dispatch_mode() is self:  # not if the pass has entered a mode of its own since
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def resume(self) -> None:
        """Go on after `pause`; not in another thread, whose operators would be followed ever after."""
        if self.follows and self.is_in_its_thread:
            self.is_paused = False
            self._enter()

    def _enter(self) -> None:
        if _get_current_dispatch_mode() is None:
            self.__enter__()  # type: ignore[no-untyped-call]
