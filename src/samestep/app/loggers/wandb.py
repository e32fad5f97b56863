"""Weights & Biases: logs a run's settings and scalars through the wandb package."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samestep.app.callbacks import PERIOD, Logger
from samestep.app.extras import extra
from samestep.arguments import whole
from samestep.checkpoint.durable import read_file, write_whole

if TYPE_CHECKING:
    from samestep.app.trainer import Trainer

__all__ = ["ID_FILE", "WandB"]

ID_FILE = "wandb_id.txt"
"""Name of the file in the run folder that holds the id of the run at Weights & Biases."""


class WandB(Logger):
    """Logs to Weights & Biases: the settings as config, and scalars at their steps. It needs wandb.

    A resumed run continues the same wandb run, by the id in `RUN_DIR/wandb_id.txt`; `fresh` starts another
    one. Steps that are repeated after an interruption have the same bits, and wandb keeps the first values.
    The wandb run is marked as failed unless `Trainer.ending` is "done". An error is printed once, and
    training continues without the logger. Log in first (`wandb login`), or set `WANDB_MODE=offline` to keep
    all data in `RUN_DIR/wandb`.

    Args:
        project: the project of the run.
        every: steps between two logs of training scalars; None for the `log_every` of the trainer.
        options: further arguments of `wandb.init`, such as `name`, `tags` or `entity`.

    Raises:
        ConfigError: `every` is not a number of steps.

    Example:
        >>> logger = WandB("digits", every=100, tags=["8 towers"])
        >>> logger.every
        100
    """

    reads_gradients = False

    def __init__(self, project: str, *, every: int | None = None, **options: Any) -> None:
        self.every = None if every is None else whole("every", every, 1, PERIOD)
        self._options = {"project": project, **options}
        self._run: Any = None

    def on_start(self, trainer: Trainer) -> None:
        """Start the wandb run, or continue it."""
        with extra("wandb"):
            import wandb
        run_dir = Path(trainer.run_dir)
        options = {
            "id": _id_of(run_dir),
            "resume": "allow",
            "dir": str(run_dir),
            # Without this, wandb replaces sys.stdout, which the progress bar has replaced as well.
            "settings": wandb.Settings(console="off"),
            **self._options,
        }
        self._run = wandb.init(**options)
        self._run.config.update(_config_of(trainer), allow_val_change=True)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Log scalars."""
        if self._run is not None:
            self._run.log(dict(scalars), step=step)

    def on_end(self, trainer: Trainer) -> None:
        """Finish the wandb run, which a resumed run can continue."""
        run, self._run = self._run, None
        if run is not None:
            run.finish(exit_code=0 if trainer.ending == "done" else 1)


def _id_of(run_dir: Path) -> str:
    """Return the run's wandb id; create one if there is none."""
    file = run_dir / ID_FILE
    found = read_file(file, 1000).decode(errors="replace").strip() if file.exists() else ""
    if not re.fullmatch(r"[a-z0-9]{1,64}", found):
        found = secrets.token_hex(4)
        write_whole(file, f"{found}\n")
    return found


def _config_of(trainer: Trainer) -> dict[str, Any]:
    towers = trainer.step.towers
    return {
        **(trainer.must_match if trainer.settings is None else trainer.settings.plain_values()),
        "recipe": trainer.name,
        "steps": trainer.steps,
        "towers": towers.placement.num_towers,
        "workers": trainer.job.world_size,
        "batch_size": getattr(trainer.loader, "batch_size", None),
    }
