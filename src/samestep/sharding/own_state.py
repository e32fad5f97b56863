"""The state that one worker's optimizer keeps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Set
from typing import Any

from torch import Tensor

from samestep.errors import UsageError

__all__ = ["OwnState"]


class OwnState(defaultdict[Tensor, Any]):
    """`Optimizer.state` of this worker's shards.

    Code that looks up a parameter which others update, fully or in part, would find nothing, and go on
    without what it finds on a single worker.

    Args:
        state: to begin with.
        elsewhere: ids of these parameters.

    Raises:
        UsageError: one of them is looked up.
    """

    def __init__(self, state: Mapping[Tensor, Any], elsewhere: Set[int]) -> None:
        super().__init__(dict, state)
        self._elsewhere = elsewhere

    def __missing__(self, key: Tensor) -> Any:
        self._check(key)
        return super().__missing__(key)

    def __contains__(self, key: object) -> bool:
        self._check(key)
        return super().__contains__(key)

    def __setitem__(self, key: Tensor, value: Any) -> None:
        self._check(key)
        super().__setitem__(key, value)

    def get(self, key: Tensor, default: Any = None) -> Any:
        """Return a parameter's state."""
        self._check(key)
        return super().get(key, default)

    def pop(self, key: Tensor, *default: Any) -> Any:
        """Take out a parameter's state."""
        self._check(key)
        return super().pop(key, *default)

    def _check(self, key: object) -> None:
        if id(key) in self._elsewhere and isinstance(key, Tensor):
            raise UsageError(
                f"optimizer.state of a parameter of shape {list(key.shape)}: other workers have it, or a "
                "part of it; change what state_dict() returns, and pass that to load_state_dict(), on all "
                "workers"
            )
