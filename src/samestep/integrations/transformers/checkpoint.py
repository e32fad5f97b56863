"""The extra file in a checkpoint of transformers: the state of the towers and the loader."""

from __future__ import annotations

import json
from pathlib import Path

from samestep.checkpoint.durable import write_whole
from samestep.data.loader import TowerLoader
from samestep.errors import ConfigError, DamagedError, MissingFileError, one_line
from samestep.towers.towers import Towers

__all__ = ["read_state", "write_state"]

_STATE_FILE = "samestep.json"


def write_state(folder: str, towers: Towers, loader: TowerLoader) -> None:
    """Write the state into a checkpoint's folder, atomically."""
    state = {"towers": towers.state_dict(), "loader": loader.state_dict()}
    write_whole(Path(folder, _STATE_FILE), json.dumps(state))


def read_state(folder: str, towers: Towers, loader: TowerLoader) -> None:
    """Restore the state from a checkpoint's folder.

    Raises:
        MissingFileError: there is no such file, as in a checkpoint of the original Trainer.
        DamagedError: the file is not what was written.
        ConfigError: the state is from another number of towers, batch size, ...
    """
    file = Path(folder, _STATE_FILE)
    try:
        state = json.loads(file.read_text())
        towers.load_state_dict(state["towers"])
        loader.load_state_dict(state["loader"])
    except FileNotFoundError:
        raise MissingFileError(
            f"{file} does not exist: expected a checkpoint of this Trainer, saved without save_only_model; "
            "load weights alone with from_pretrained"
        ) from None
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        why = one_line(f"{type(error).__name__}: {error}")
        raise DamagedError(f"{file} is damaged ({why}): go on from an older checkpoint") from None
