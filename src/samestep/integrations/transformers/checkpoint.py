"""The extra file in a checkpoint of transformers: the state of the towers and the loader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from samestep.data.loader import TowerLoader
from samestep.errors import DamagedError, MissingFileError
from samestep.towers.towers import Towers

__all__ = ["read_state", "write_state"]

_STATE_FILE = "samestep.json"


def write_state(folder: str, towers: Towers, loader: TowerLoader) -> None:
    """Write the state into a checkpoint's folder."""
    state = {"towers": towers.state_dict(), "loader": loader.state_dict()}
    Path(folder, _STATE_FILE).write_text(json.dumps(state))


def read_state(folder: str, towers: Towers, loader: TowerLoader) -> None:
    """Restore the state from a checkpoint's folder.

    Raises:
        MissingFileError: there is no such file, as in a checkpoint of the original Trainer.
        DamagedError: the file is not what was written.
        ConfigError: the state is from another number of towers, batch size, ...
    """
    file = Path(folder, _STATE_FILE)
    try:
        state: dict[str, Any] = json.loads(file.read_text())
    except FileNotFoundError:
        raise MissingFileError(
            f"{file} does not exist: expected a checkpoint of this Trainer, saved without save_only_model; "
            "load weights alone with from_pretrained"
        ) from None
    except ValueError as error:
        raise DamagedError(f"{file} is damaged ({error}): go on from an older checkpoint") from None
    towers.load_state_dict(state["towers"])
    loader.load_state_dict(state["loader"])
