"""The modes of a model's layers, training or evaluation, which all towers of a step must see alike."""

from __future__ import annotations

import operator
import zlib
from typing import NoReturn

from torch import nn

from samestep.errors import UsageError

__all__ = ["Modes"]

_is_training = operator.attrgetter("training")


class Modes:
    """Compares in which modes towers hand in their losses and, in steps that look, layers run."""

    def __init__(self, model: nn.Module) -> None:
        self._names, self._modules = zip(*model.named_modules(), strict=True)
        self.start_step()

    def start_step(self) -> None:
        """Forget those of the step before."""
        self._noted: list[bool] | None = None  # when the first loss of the step was handed in
        self._ran: dict[nn.Module, bool] = {}  # in the passes before this one
        self.start_pass()

    def start_pass(self) -> None:
        """Begin a tower's pass."""
        self._runs: dict[nn.Module, bool] = {}

    def note(self, module: nn.Module) -> None:
        """Note the mode in which a layer first runs in this pass."""
        self._runs.setdefault(module, module.training)

    def check(self, who: str) -> None:
        """Raise if `who` ran, or hands in its loss, in another mode than a tower before it."""
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

    def hash(self) -> int:
        """Return a 32-bit number of the modes in which losses were handed in; 0 where none was."""
        return 0 if self._noted is None else zlib.crc32(bytes(map(bool, self._noted)))

    def in_words(self) -> list[str]:
        """Return them, layer by layer."""
        modes = self._current() if self._noted is None else self._noted
        return [self._in_words(*each) for each in enumerate(modes)]

    def _current(self) -> list[bool]:
        return list(map(_is_training, self._modules))

    def _in_words(self, number: int, is_training: bool) -> str:
        layer = f"{self._names[number] or 'the model'} ({type(self._modules[number]).__name__})"
        return f"{layer} in {'training' if is_training else 'eval'} mode"

    def _fail(self, who: str, did: str, what: str) -> NoReturn:
        raise UsageError(
            f"{who} {did} with {what}, and an earlier tower did not; which towers see such a change "
            "depends on the number of workers: let each pass put back what it sets, such as by model.train() "
            "after model.eval(), or do it after average()"
        )
