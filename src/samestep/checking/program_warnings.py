"""The warnings of a program that runs many times: each is shown once."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

__all__ = ["each_warning_once"]


@contextmanager
def each_warning_once(shown: set[tuple[str, str]]) -> Iterator[None]:
    """Show only warnings that are not in `shown`, and add them to it.

    Warnings of samestep that `check` reports with more detail are not shown.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(a pass drew from|a pass wrote to|passes changed) ")
        show = warnings.showwarning

        def show_once(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            warning = category.__qualname__, str(message)
            if warning not in shown:
                shown.add(warning)
                show(message, category, filename, lineno, file, line)

        warnings.showwarning = show_once
        yield
