"""Packages that `pip install samestep` leaves out, and the extra of ours that brings them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from samestep.errors import ConfigError

__all__ = ["extra"]


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Say which extra to install where an import inside does not find a package.

    Raises:
        ConfigError: the package and the command that installs it.

    Example:
        >>> with extra("tensorboard"):
        ...     import tensorboard
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "samestep"):
            raise
        raise ConfigError(f"{package} is not installed: pip install 'samestep[{name}]'") from None
