"""Optional packages, and the extra of samestep that installs them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from samestep.errors import ConfigError

__all__ = ["extra"]


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Turn a `ModuleNotFoundError` in the block into an error that names the extra to install.

    Raises:
        ConfigError: a package is not installed; the message has the command that installs it.

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
