"""Text that a model makes up."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from samestep.app.callbacks import Callback
from samestep.app.evaluation import evaluation_mode
from samestep.app.trainer import Trainer
from samestep.recipes.lm.model import GPT
from samestep.streams import generator

__all__ = ["Sample", "draw", "readable"]


@torch.no_grad()
def draw(model: GPT, first: int, length: int, generator: torch.Generator) -> list[int]:
    """Return a document, token by token, each drawn with the probability that the model gives it.

    It ends with `length` tokens, or before `first` is drawn again.

    Args:
        model: of logits.
        first: the token that comes before a document.
        length: of the document, at most.
        generator: on the CPU, which draws.
    """
    tokens = [first]
    while len(tokens) <= length:
        seen = torch.tensor([tokens[-model.context :]], device=model.device)
        # What is compiled would be compiled for each length.
        logits = model.forward(seen, torch.zeros_like(seen))[0, -1].float().cpu()
        token = int(torch.multinomial(logits.softmax(0), 1, generator=generator))
        if token == first:
            break
        tokens.append(token)
    return tokens[1:]


def readable(document: bytes) -> str:
    r"""Return bytes as text that any terminal can show, with escapes for what is no text.

    Example:
        >>> print(readable(b"a = 1\x1b\xff"))
        a = 1\x1b\xff
    """
    text = document.decode("utf-8", errors="backslashreplace")
    shown = (c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
    return "".join(shown)


class Sample(Callback):
    """Prints a document of bytes by the model after each evaluation.

    Args:
        first: the byte that comes before a document.
        length: of the document, at most.
        seed: of the stream that it is drawn from.
    """

    reads_gradients = False

    def __init__(self, first: int, length: int, seed: int) -> None:
        self._first, self._length, self._seed = first, length, seed

    def after_evaluation(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """Print it, on worker 0."""
        if not trainer.job.is_first:
            return
        model = trainer.evaluated
        assert isinstance(model, GPT)
        with evaluation_mode(model):
            document = draw(model, self._first, self._length, generator(self._seed, "sample"))
        print(readable(bytes(document)), flush=True)
