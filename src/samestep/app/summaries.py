"""What TensorBoard shows of a run: losses, speed, weights, gradients, activations and input pictures.

Worker 0 writes into RUN_DIR/summaries, evaluation into RUN_DIR/summaries/evaluation, because TensorBoard
follows only the newest file of a folder. Values stand at the number of steps taken, as checkpoints do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from samestep.app.activations import Output, layers_of, outputs_of
from samestep.app.event_file import EventFile
from samestep.app.experiment import Experiment
from samestep.app.histogram import Histogram
from samestep.app.throughput import Throughput
from samestep.towers.batch import GlobalBatch, LocalBatch
from samestep.towers.copier import Copier
from samestep.towers.report import Report, mean_losses, total_loss

if TYPE_CHECKING:
    from tensorboard.compat.proto.summary_pb2 import Summary

__all__ = ["FOLDER", "Summaries", "write_metrics"]

FOLDER = "summaries"
"""The folder inside a run's that holds its summaries."""

_DECAY = 0.9
_NUM_PICTURES = 4


class Summaries:
    """Writes the summaries of a training run, on worker 0; on the others it does nothing.

        with Summaries(run_dir, experiment, every=100) as summaries:
            for batch in experiment.loader:
                with summaries.watch():
                    report = experiment.step(batch)
                summaries.write(report, batch)

    At every step that is a multiple of `every` it writes

        loss/total, loss/NAME           the loss, its sums that have a name, and its terms; and each with
                                        " (smoothed)": the exponential average over steps, decay 0.9
        towers/T/loss                   each tower's own loss
        step/...                        learning rate, rows per second, gradient norm and noise scale
        weights/NAME, gradients/NAME    histograms after the update, and of the average that made it
        activations/NAME, sparsity/NAME what layers gave in this worker's first tower; share of zeros
        pictures/0 ... 3                the first pictures, if the batch's first tensor is [n, 1 or 3, h, w]
        towers/T/pictures/0 ... 3       instead, where the experiment has panels: those of the first rows of
                                        each of this worker's towers, with the weights after the update

    The bits of a run are the same with and without it. Layers inside `torch.compile` are left out,
    because hooks would have them compiled again.

    Args:
        run_dir: the folder of the run; what an earlier run wrote there for later steps is hidden.
        experiment: at the step where training begins.
        every: steps between summaries.
    """

    def __init__(self, run_dir: Path, experiment: Experiment, *, every: int = 100) -> None:
        towers = experiment.step.towers
        self._experiment = experiment
        self._every = every
        self._throughput = Throughput()
        self._smoothed: dict[str, _Smoothed] = {}
        self._recent: list[tuple[Tensor, Tensor, Mapping[str, float | Tensor]]] = []
        self._terms: Mapping[str, float | Tensor] = {}
        self._learning_rates: list[float] = []
        self._outputs: Mapping[str, Output] = {}
        self._file: EventFile | None = None
        if towers.job.is_first:
            self._file = EventFile(run_dir / FOLDER, purge_step=towers.step + 1)

    def __enter__(self) -> Summaries:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Record what the summaries of a step need: before it, and, where they are due, inside the model."""
        if self._file is None or not self._file.is_open:
            yield
            return
        layers: list[tuple[str, nn.Module]] = []
        with self._file.tolerating():
            layers = self._prepare()
        with outputs_of(layers, self._file.tolerating) as self._outputs:
            yield

    def _prepare(self) -> list[tuple[str, nn.Module]]:
        """Keep what the update changes, and return the layers whose outputs are due in this step."""
        step = self._experiment.step
        with torch.no_grad():
            self._terms = self._experiment.terms(step.towers.model) if self._experiment.terms else {}
        self._learning_rates = [float(group["lr"]) for group in step.optimizer.param_groups]
        is_due = (step.towers.step + 1) % self._every == 0
        return layers_of(step.towers.model) if is_due else []

    def write(self, report: Report, batch: Any) -> None:
        """Take in a step that was watched, and write its summaries where they are due.

        Args:
            report: of the step.
            batch: that it was taken on.
        """
        if self._file is None or not self._file.is_open:
            return
        self._throughput.add(report.rows)
        # Read only when they are written: on a GPU each reading is a wait.
        self._recent.append((report.loss_sums, report.counts, self._terms))
        if (report.step + 1) % self._every == 0:
            self._file.write(report.step + 1, self._summaries(report, batch))

    def _summaries(self, report: Report, batch: Any) -> Iterator[Summary]:
        from torch.utils.tensorboard.summary import image

        for tag, value in self._scalars(report).items():
            if math.isfinite(value):
                yield _scalar(tag, value)
        for tag, histogram in self._histograms():
            if histogram is not None:
                yield histogram.summary(tag)
        for tag, picture in self._pictures(batch):
            yield image(tag, picture, dataformats="CHW")

    def _scalars(self, report: Report) -> dict[str, float]:
        rows_per_s, _ = self._throughput.read()
        rates = self._learning_rates
        names = [f"step/learning rate{f'/{index}' * (len(rates) > 1)}" for index in range(len(rates))]
        return {
            **self._losses(report.names),
            **{f"towers/{tower}/loss": loss for tower, loss in enumerate(report.tower_losses)},
            **dict(zip(names, rates, strict=True)),
            "step/rows per second": rows_per_s,
            "step/gradient norm": report.grad_norm,
            "step/gradient noise scale": math.nan if report.noise_scale is None else report.noise_scale,
            **{f"sparsity/{name}": output.sparsity for name, output in self._outputs.items()},
        }

    def _losses(self, names: Sequence[str]) -> dict[str, float]:
        """Fold the steps since the last summaries into the smoothed losses, and return the newest."""
        sums, counts, terms = zip(*self._recent, strict=True)
        of_steps = torch.stack(sums), torch.stack(counts)
        self._recent.clear()
        named: dict[str, float] = {}
        for total, means, others in zip(
            total_loss(*of_steps).tolist(), mean_losses(*of_steps).tolist(), terms, strict=True
        ):
            named = {"total": total, **dict(zip(names, means, strict=False))}
            named |= {name: float(value) for name, value in others.items()}
            for name, value in named.items():
                self._smoothed.setdefault(name, _Smoothed()).add(value)
        return {f"loss/{name}": value for name, value in named.items()} | {
            f"loss/{name} (smoothed)": self._smoothed[name].value for name in named
        }

    def _histograms(self) -> Iterator[tuple[str, Histogram | None]]:
        for name, parameter in self._experiment.model.named_parameters():
            yield f"weights/{name}", Histogram.of(parameter)
            if parameter.grad is not None:
                yield f"gradients/{name}", Histogram.of(parameter.grad)
        for name, output in self._outputs.items():
            yield f"activations/{name}", output.histogram

    @torch.no_grad()
    def _pictures(self, batch: Any) -> Iterator[tuple[str, Tensor]]:
        panels = self._experiment.panels
        if panels is None:
            yield from ((f"pictures/{index}", picture) for index, picture in enumerate(_pictures(batch)))
            return
        model = self._experiment.evaluated
        copier = Copier(self._experiment.step.towers.job.device)
        with _evaluating(model):
            for tower, part in batch.slices.items():
                whole = GlobalBatch.open(part)
                shown = panels(model, whole.take(range(min(_NUM_PICTURES, whole.rows)), copier)).cpu()
                yield from ((f"towers/{tower}/pictures/{i}", picture) for i, picture in enumerate(shown))


def write_metrics(run_dir: Path, step: int, metrics: Mapping[str, float]) -> None:
    """Write the metrics of an evaluation; call it on one worker.

    Args:
        run_dir: the run folder.
        step: of the checkpoint that was evaluated.
        metrics: by name, which becomes the tag.
    """
    folder = run_dir / FOLDER
    with suppress(OSError):  # which the file meets, too
        folder.mkdir(exist_ok=True)
    file = EventFile(folder / "evaluation")
    file.write(step, (_scalar(name, value) for name, value in metrics.items()))
    file.close()


def _scalar(tag: str, value: float) -> Summary:
    # Imported here, because it takes a fifth of a second and only worker 0 needs it.
    from torch.utils.tensorboard.summary import scalar

    return scalar(tag, value)


@dataclass
class _Smoothed:
    """An exponential average without a bias at the start: the sum of decayed values over that of decays.

    It starts again when a run is continued, which after 100 steps makes a difference of 0.9¹⁰⁰ < 0.003%.
    """

    total: float = 0.0
    weight: float = 0.0

    def add(self, value: float) -> None:
        if math.isfinite(value):  # a step that was skipped must not hide all later ones
            self.total = _DECAY * self.total + value
            self.weight = _DECAY * self.weight + 1

    @property
    def value(self) -> float:
        return self.total / self.weight if self.weight else math.nan


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode, and each of its layers back into the mode that it was in."""
    modes = [(layer, layer.training) for layer in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for layer, was_training in modes:
            layer.training = was_training


def _pictures(batch: Any) -> list[Tensor]:
    """Return the first pictures of this worker, each uint8 or float in [0, 1], [1 or 3, h, w]."""
    parts = batch.slices.values() if isinstance(batch, LocalBatch) else [batch]
    found: list[Tensor] = []
    for part in parts:
        if len(found) == _NUM_PICTURES:
            break  # a slice is read when it is asked for
        first = next((value for value in pytree.tree_leaves(part) if isinstance(value, Tensor)), None)
        if first is not None and first.ndim == 4 and first.shape[1] in (1, 3):
            found += first[: _NUM_PICTURES - len(found)]
    return [picture if picture.dtype == torch.uint8 else _stretched(picture.float()) for picture in found]


def _stretched(picture: Tensor) -> Tensor:
    """Return a standardised picture with its darkest value at 0 and its brightest at 1."""
    darkest, brightest = picture.aminmax()
    return (picture - darkest) / (brightest - darkest).clamp(min=1e-12)
