"""`Towers` with a small model, taking the steps of a schedule."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import samestep
from samestep import Job, Placement, Towers

from .protocol import RATE, Script

if TYPE_CHECKING:
    from .schedules import Schedule, Task
