"""The epochs of a run: the order of the examples in each, and how it is cut into batches."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from samestep.arguments import check_switch, whole
from samestep.data.order import CustomOrder, Order, numbered
from samestep.errors import ConfigError, warn
from samestep.streams import generator

__all__ = ["Epochs"]


class Epochs:
    """The epochs of a dataset; every one has the same number of batches.

    Args:
        dataset: what has a length.
        batch_size: rows of the global batch.
        seed: of the order.
        shuffle: whether to draw a new permutation for each epoch; None: if there is no `order`.
        order: the program's own.
        drop_last: whether to leave out an epoch's last batch if it is incomplete.

    Attributes:
        newest: the newest epoch of a program's own order, and the checksum of its indices; None before it.

    Raises:
        ConfigError: an argument is wrong, or an epoch has no batch.
    """

    newest: tuple[int, ...] | None = None

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        seed: int,
        shuffle: bool | None,
        order: Order | None,
        drop_last: bool,
    ) -> None:
        if shuffle is not None:
            check_switch("shuffle", shuffle)
        check_switch("drop_last", drop_last)
        if order is not None and shuffle:
            raise ConfigError("shuffle has no effect beside order: leave it out, or let order shuffle")
        self._dataset = dataset
        self._num_examples = len(dataset)
        self.batch_size = whole("batch_size", batch_size, 1, "the rows of the global batch")
        self.seed = whole("seed", seed)
        self.shuffle = order is None if shuffle is None else shuffle
        self.drop_last = drop_last
        self._custom = None if order is None else CustomOrder.check(order, self.seed, len(dataset))
        if len(self) == 0:
            raise ConfigError(
                f"batch_size = {batch_size} with drop_last leaves no batch of {self.num_rows} examples: "
                f"expected batch_size <= {self.num_rows}, or drop_last=False"
            )

    @property
    def settings(self) -> dict[str, int | None]:
        """What must be the same to continue a run."""
        order = None if self._custom is None else self._custom.checksum
        names = ("batch_size", "seed", "shuffle", "drop_last")
        return {"examples": len(self._dataset), "order": order, **{n: getattr(self, n) for n in names}}

    @property
    def num_rows(self) -> int:
        """Rows of epoch 0."""
        return self._num_examples if self._custom is None else self._custom.num_rows

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return self._num_batches(self.num_rows)

    def order(self, epoch: int, *, compares: bool) -> NDArray[np.int64]:
        """Return the numbers of an epoch's examples in their global order, int64 [rows]; see `Request`.

        If the epoch has begun, `compares` says to warn if it began with another order.
        """
        if self._custom is not None:
            return self._custom_order(self._custom, epoch, compares=compares)
        if not self.shuffle:
            return np.arange(self._num_examples, dtype=np.int64)
        shuffled = torch.randperm(
            self._num_examples, generator=generator(self.seed, "order", epoch), device="cpu"
        )
        return np.asarray(shuffled.numpy(), dtype=np.int64)

    def checksum(self, order: NDArray[np.int64]) -> int:
        """Return the part of an epoch's order in the fingerprints of its batches, if it is a program's own.

        So workers find different orders in the epoch's first step.
        """
        return 0 if self._custom is None else zlib.crc32(order.tobytes())

    def rows(self, order: NDArray[np.int64], position: int) -> NDArray[np.int64]:
        """Return the examples of a batch, out of those of its epoch."""
        start = position % len(self) * self.batch_size
        return order[start : start + self.batch_size]

    def check_length(self) -> None:
        """Check that the dataset has the length that it had at first, unless an order chooses from it."""
        if self._custom is None and len(self._dataset) != self._num_examples:
            raise ConfigError(
                f"dataset has {len(self._dataset)} examples, it had {self._num_examples} when this "
                "TowerLoader was made: make a new one, or let order=... choose from the examples there are"
            )

    def _custom_order(self, custom: CustomOrder, epoch: int, *, compares: bool) -> NDArray[np.int64]:
        order = custom(epoch, len(self._dataset))
        if self._num_batches(len(order)) != len(self):
            raise ConfigError(
                f"order({self.seed}, {epoch}) gives {len(order)} indices, epoch 0 has {self.num_rows}: "
                f"expected {len(self)} batches of {self.batch_size} rows in every epoch; repeat indices, or "
                "leave some out"
            )
        before, self.newest = self.newest, (epoch, zlib.crc32(order.tobytes()))
        if compares and before is not None and before[0] == epoch and before != self.newest:
            warn(
                f"order({self.seed}, {epoch}) gives other indices than when this epoch began, so examples "
                "are repeated or left out: expected a function of seed and epoch; compute an order that "
                "depends on the training at an epoch's end, and keep it in the checkpoint"
            )
        return numbered(order)

    def _num_batches(self, num_rows: int) -> int:
        return num_rows // self.batch_size if self.drop_last else -(-num_rows // self.batch_size)
