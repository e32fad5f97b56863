"""Summaries for TensorBoard: losses, speed, weights, gradients, activations and input pictures.

Training writes into RUN_DIR/summaries and `samestep eval` into RUN_DIR/summaries/evaluation, because
TensorBoard follows only the newest file in a folder. The step of a value is the number of steps taken, as for
checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from samestep.app.callbacks import PERIOD, Logger
from samestep.app.evaluation import evaluation_mode
from samestep.app.extras import extra
from samestep.app.loggers.activations import Output, layers_of, outputs_of
from samestep.app.loggers.event_file import EventFile, delete_event_files
from samestep.app.loggers.histogram import Histogram
from samestep.arguments import whole
from samestep.batches.batch import GlobalBatch, LocalBatch
from samestep.batches.copier import Copier
from samestep.towers.report import Report

if TYPE_CHECKING:
    from tensorboard.compat.proto.summary_pb2 import Summary

    from samestep.app.trainer import Trainer

__all__ = ["Panels", "TensorBoard", "delete_summaries", "write_metrics"]

Panels = Callable[[nn.Module, Any], Tensor]
"""panels(model, batch) -> uint8 [n, 3, height, width]."""

_FOLDER = "summaries"
_OF_EVALUATION = "evaluation"
_NUM_PICTURES = 4


class TensorBoard(Logger):
    """Writes summaries for TensorBoard to RUN_DIR/summaries. It needs tensorboard.

    At every step that is a multiple of `every` it writes

        loss/total, loss/NAME           the loss, its named sums, and its terms; each also with " (smoothed)",
                                        an exponential average over steps with decay 0.9
        towers/T/loss                   each tower's own loss
        step/...                        learning rate, speed, memory, gradient norm and noise scale
        weights/NAME                    histogram of the weights after the update
        weight gradients/NAME           histogram of the averaged gradient
        outputs/NAME, sparsity/NAME     histogram and share of zeros of a layer's output in the first tower of
                                        worker 0
        pictures/0 ... 3                the first pictures, if the batch's first tensor is [n, 1 or 3, h, w]
        towers/T/pictures/0 ... 3       with `panels`, instead of these: the panels of the first rows of each
                                        of worker 0's towers, with the weights after the update

    and after an evaluation its metrics. The logger does not change the bits of a run. If the model has layers
    inside `torch.compile`, outputs are left out, because hooks would cause them to be compiled again.

    Args:
        every: steps between summaries.
        panels: `panels(model, batch)` -> uint8 [n, 3, height, width], pictures for the first rows of a tower;
            called without gradients and with the model in evaluation mode.

    Raises:
        ConfigError: tensorboard is not installed, or `every` is not a number of steps.
    """

    every: int

    def __init__(self, every: int = 100, *, panels: Panels | None = None) -> None:
        with extra("tensorboard"):
            import tensorboard  # noqa: F401
        self.every = whole("every", every, 1, PERIOD)
        self._panels = panels
        self._file: EventFile | None = None
        self._watching = ExitStack()
        self._outputs: Mapping[str, Output] = {}
        self._trainer: Trainer | None = None
        self._batch: Any = None

    def on_start(self, trainer: Trainer) -> None:
        """Create the event file."""
        self._trainer = trainer
        self._file = EventFile(Path(trainer.run_dir) / _FOLDER, purge_step=trainer.step.towers.step + 1)

    def before_step(self, trainer: Trainer, batch: Any) -> None:
        """Start to record the outputs of layers, if summaries are due after this step."""
        towers = trainer.step.towers
        if self._file is None or not self._file.is_open or (towers.step + 1) % self.every:
            return
        self._batch = batch
        layers: list[tuple[str, nn.Module]] = []
        with self._file.tolerating():
            layers = layers_of(towers.model)
        self._outputs = self._watching.enter_context(outputs_of(layers, self._file.tolerating))

    def after_step(self, trainer: Trainer, report: Report) -> None:
        """Stop recording."""
        self._watching.close()

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write the summaries of a step, or the metrics of an evaluation."""
        if self._file is not None and self._file.is_open:
            self._file.write(step, self._summaries(scalars))
            self._batch, self._outputs = None, {}

    def on_end(self, trainer: Trainer) -> None:
        """Close the file."""
        self._watching.close()
        if self._file is not None:
            self._file.close()

    def _summaries(self, scalars: Mapping[str, float]) -> Iterator[Summary]:
        from torch.utils.tensorboard.summary import image

        sparsity = {f"sparsity/{name}": output.sparsity for name, output in self._outputs.items()}
        for tag, value in {**scalars, **sparsity}.items():
            yield _scalar(tag, value)
        if self._batch is None:  # after an evaluation
            return
        for tag, histogram in self._histograms():
            if histogram is not None:
                yield histogram.summary(tag)
        for tag, picture in self._pictures(self._batch):
            yield image(tag, picture, dataformats="CHW")

    def _histograms(self) -> Iterator[tuple[str, Histogram | None]]:
        assert self._trainer is not None
        for name, parameter in self._trainer.model.named_parameters():
            yield f"weights/{name}", Histogram.of(parameter)
            if parameter.grad is not None:
                yield f"weight gradients/{name}", Histogram.of(parameter.grad)
        for name, output in self._outputs.items():
            yield f"outputs/{name}", output.histogram

    @torch.no_grad()
    def _pictures(self, batch: Any) -> Iterator[tuple[str, Tensor]]:
        trainer, panels = self._trainer, self._panels
        assert trainer is not None
        if panels is None:
            yield from ((f"pictures/{index}", picture) for index, picture in enumerate(_pictures(batch)))
            return
        model = trainer.evaluated
        copier = Copier(trainer.job.device)
        with evaluation_mode(model):
            for tower, part in batch.slices.items():
                whole = GlobalBatch.open(part)
                shown = panels(model, whole.take(range(min(_NUM_PICTURES, whole.rows)), copier)).cpu()
                yield from ((f"towers/{tower}/pictures/{i}", picture) for i, picture in enumerate(shown))


def write_metrics(run_dir: Path, step: int, metrics: Mapping[str, float]) -> None:
    """Write the metrics of an evaluation; call this on one worker.

    Args:
        run_dir: the run folder.
        step: the step of the evaluated checkpoint.
        metrics: the metrics by name, which becomes the tag.
    """
    folder = run_dir / _FOLDER
    with suppress(OSError):  # `EventFile` meets the same error and reports it
        folder.mkdir(exist_ok=True)
    file = EventFile(folder / _OF_EVALUATION)
    file.write(step, (_scalar(name, value) for name, value in metrics.items()))
    file.close()


def delete_summaries(run_dir: Path) -> None:
    """Delete the summaries of a run."""
    for folder in (run_dir / _FOLDER, run_dir / _FOLDER / _OF_EVALUATION):
        delete_event_files(folder)


def _scalar(tag: str, value: float) -> Summary:
    # Imported here because the import takes 0.2 s, and only worker 0 needs it.
    from torch.utils.tensorboard.summary import scalar

    return scalar(tag, value)


def _pictures(batch: Any) -> list[Tensor]:
    """Return this worker's first pictures, each [1 or 3, h, w], uint8 or float in [0, 1]."""
    parts = batch.slices.values() if isinstance(batch, LocalBatch) else [batch]
    found: list[Tensor] = []
    for part in parts:
        if len(found) == _NUM_PICTURES:
            break  # before the next slice, which would be read from the loader
        first = next((value for value in pytree.tree_leaves(part) if isinstance(value, Tensor)), None)
        if first is not None and first.ndim == 4 and first.shape[1] in (1, 3):
            found += first[: _NUM_PICTURES - len(found)]
    return [picture if picture.dtype == torch.uint8 else _stretched(picture.float()) for picture in found]


def _stretched(picture: Tensor) -> Tensor:
    """Rescale a picture so that its darkest value is 0 and its brightest is 1."""
    darkest, brightest = picture.aminmax()
    return (picture - darkest) / (brightest - darkest).clamp(min=1e-12)
