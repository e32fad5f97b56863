"""Checks that all passes run layers in the same mode (training or evaluation), and notes autocast."""

from __future__ import annotations

import operator
import zlib
from typing import NoReturn

import torch
from torch import nn

from samestep.errors import UsageError

__all__ = ["Modes"]

_is_training = operator.attrgetter("training")


class Modes:
    """Compares the layers' modes when a tower passes its loss and, in steps that look, when layers run."""

    def __init__(self, model: nn.Module) -> None:
        self._names, self._modules = zip(*model.named_modules(), strict=True)
        self.start_step()

    def start_step(self, *, notes_autocast: bool = False) -> None:
        """Forget the modes of the previous step."""
        self._noted: list[bool] | None = None  # at the first loss of the step
        self._notes_autocast = notes_autocast
        self.autocast: list[str] = []  # dtypes of the layers in the first pass, if noted
        self._ran: dict[nn.Module, bool] = {}  # in earlier passes
        self.start_pass()

    def start_pass(self) -> None:
        """Begin a tower's pass."""
        self._runs: dict[nn.Module, bool] = {}

    def note(self, module: nn.Module) -> None:
        """Note the mode in which a layer first runs in this pass."""
        self._runs.setdefault(module, module.training)
        if self._notes_autocast and not self._ran:
            self.autocast = sorted({*self.autocast, *_autocast()})

    def check(self, who: str) -> None:
        """Raise if `who` ran layers, or passes its loss, in another mode than an earlier tower."""
        now = self._current()
        if self._noted is None:
            self._noted = now
        elif now != self._noted:
            pairs = enumerate(zip(now, self._noted, strict=True))
            number = next(n for n, (new, old) in pairs if new != old)
            self._fail(who, "ended", self._in_words(number, now[number]))
        for module, mode in self._runs.items():
            if self._ran.setdefault(module, mode) != mode:
                number = next(n for n, each in enumerate(self._modules) if each is module)
                self._fail(who, "ran", self._in_words(number, mode))

    def last(self) -> dict[nn.Module, bool]:
        """Return whether each layer was in training mode, as losses were handed in; empty where none was."""
        return {} if self._noted is None else dict(zip(self._modules, self._noted, strict=True))

    def hash(self) -> int:
        """Return a 32-bit hash of modes and autocast at the first loss; 0 if there was none."""
        if self._noted is None:
            return 0
        return zlib.crc32(bytes(map(bool, self._noted)), zlib.crc32(repr(self.autocast).encode()))

    def in_words(self) -> list[str]:
        """Return the layers' modes, in words."""
        modes = self._current() if self._noted is None else self._noted
        return [self._in_words(*each) for each in enumerate(modes)]

    def _current(self) -> list[bool]:
        return list(map(_is_training, self._modules))

    def _in_words(self, number: int, is_training: bool) -> str:
        layer = f"{self._names[number] or 'the model'} ({type(self._modules[number]).__name__})"
        return f"{layer} in {'training' if is_training else 'eval'} mode"

    def _fail(self, who: str, did: str, what: str) -> NoReturn:
        raise UsageError(
            f"{who} {did} with {what}, unlike an earlier tower; which towers see such a change depends on "
            "the number of workers: let each pass restore the mode, such as by model.train() after "
            "model.eval(), or change it after average()"
        )


def _autocast() -> list[str]:
    enabled = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    return [str(torch.get_autocast_dtype(device)) for device in enabled] or ["no autocast"]
