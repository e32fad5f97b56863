"""On the disk, not only in the system's memory: what must survive a power cut."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["flush"]


def flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
