"""The structure of a batch: columns, which are cut along rows, values, which are not, and nests of both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from samestep.batches.nest import NUMBERS, PLAIN, entries, is_sequence, rebuilt, tensors
from samestep.errors import BatchError

__all__ = [
    "Branch",
    "Column",
    "Node",
    "Undecided",
    "Whole",
    "columns",
    "parse",
    "resolved",
    "unmarked",
    "version_of",
    "wholes",
]

_FLAT = frozenset((str, int, float, bool, bytes, type(None)))
"""Checked first, because long lists mostly hold these."""

_MOST_SIZES = 4


@dataclass(frozen=True)
class Whole:
    """Marks a value in a batch that is not cut: every tower gets all of it.

    Attributes:
        value: any object; `tower.batch` holds it in the same place. Its tensors move to the worker's device.

    Example:
        >>> from samestep import Towers
        >>> towers = Towers(torch.nn.Linear(1, 1), 2)
        >>> batch = {"x": torch.tensor([[1.0], [2.0]]), "weights": Whole(torch.tensor([0.1, 0.9]))}
        >>> next(towers(batch)).batch
        {'x': tensor([[1.]]), 'weights': tensor([0.1000, 0.9000])}
    """

    value: Any


@dataclass(frozen=True)
class Column:
    """A value that is cut along rows: a tensor, an array, or a list or tuple with one entry per row."""

    path: str
    value: Any
    version: int = 0
    in_list: str = ""  # the path of the innermost list that holds this, if any

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(self.value)

    @property
    def is_sequence(self) -> bool:
        """Whether it is a list or a tuple."""
        return isinstance(self.value, list | tuple)


@dataclass(frozen=True)
class Branch:
    """A mapping, dataclass, list or tuple, and its entries by key, attribute or index."""

    nest: Any
    children: dict[Any, Node]


@dataclass(frozen=True)
class Undecided:
    """A list that holds either one entry per row or columns: the number of rows decides which.

    These are lists of nests with tensors (the targets of a detector, or views of a batch) and lists of tuples
    of strings (pairs, or two columns of strings from torch's `default_collate`).
    """

    path: str
    value: Any

    def decided(self, rows: int | None) -> Node:
        """Return a column or a branch; `rows` is None if nothing else in the batch has rows.

        Raises:
            BatchError: both readings are possible, or neither.
        """
        branch = self._as_branch(rows)
        if rows is None and branch is None and isinstance(self.value, tuple):
            self._check_no_batches()
        has_entry_a_row = rows is None or len(self.value) == rows
        if has_entry_a_row and branch is None:
            return Column(self.path, self.value)
        if branch is not None and (not has_entry_a_row or rows == 1 or self._is_mixed()):
            return branch
        what = "can be read in two ways" if branch is not None else "cannot be read in either way"
        raise BatchError(
            f"{self.path} is a {type(self.value).__name__} of {len(self.value)} entries and {what}: expected "
            f"one entry per row, such as np.fromiter({self.path}, object), or columns with the batch's rows, "
            f"such as a dict of them; use samestep.Whole({self.path}) to give it to every tower unchanged"
        )

    def _is_mixed(self) -> bool:
        """Whether entries are of different types, or mappings without a common key, as rows are not."""
        if len(set(map(type, self.value))) > 1:
            return True
        keys = [set(entry) for entry in self.value if isinstance(entry, Mapping)]
        return len(keys) > 1 and not set.intersection(*keys)

    def _check_no_batches(self) -> None:
        """Raise if each entry could be a batch by itself, as where two loaders are read with `zip`."""
        sizes = []
        for entry in self.value:
            branch = Undecided(self.path, (entry,))._as_branch(None)
            if branch is None:
                return
            sizes.append(next((column.rows for column in columns(branch)), 0))
        raise BatchError(
            f"{self.path} is a tuple of {len(sizes)} entries with {', '.join(map(str, sizes[:_MOST_SIZES]))} "
            "rows: expected the same number of rows in all (k·n rows can be reshaped to [n, k, ...]), or, if "
            f"each entry is one row, np.fromiter({self.path}, object)"
        )

    def _as_branch(self, rows: int | None) -> Branch | None:
        children: dict[Any, Node] = {}
        try:
            for index, entry in enumerate(self.value):
                child = children[index] = resolved(parse(entry, f"{self.path}[{index}]", self.path), rows)
                for column in columns(child):
                    rows = column.rows if rows is None else rows
                    if column.rows != rows:
                        return None
        except BatchError:
            return None
        return Branch(self.value, children)


Node: TypeAlias = Column | Whole | Branch | Undecided


def parse(value: Any, path: str = "batch", in_list: str = "") -> Node:
    """Parse a batch.

    Raises:
        BatchError: the batch holds something that can neither be cut nor parsed as a nest.
    """
    if isinstance(value, Whole):
        return value
    if isinstance(value, Tensor | np.ndarray):
        _check_can_be_cut(value, path)
        return Column(path, value, version_of(value), in_list)
    if isinstance(value, PLAIN):
        return Whole(value)
    if is_sequence(value) and not _holds_columns(value):
        return _parse_sequence(value, path)
    held = entries(value)
    if isinstance(value, PackedSequence):
        raise BatchError(
            f"{path} is a PackedSequence, which cannot be cut along rows: expected padded sequences and "
            "their lengths; call pack_padded_sequence on a tower's rows"
        )
    if held is None:
        raise BatchError(
            f"{path} is {_named(value)}, which cannot be cut along rows: expected nested tensors, arrays, "
            f"lists with one entry per row, and numbers; {_remedy(value, path)}"
        )
    in_list = path if isinstance(value, list) else in_list
    return Branch(value, {key: parse(each, path + _step(value, key), in_list) for key, each in held.items()})


def columns(node: Node) -> Iterator[Column]:
    """Iterate over the columns, except those in an `Undecided`."""
    if isinstance(node, Column):
        yield node
    elif isinstance(node, Branch):
        for child in node.children.values():
            yield from columns(child)


def wholes(node: Node) -> Iterator[Any]:
    """Iterate over the values that are not cut."""
    if isinstance(node, Whole):
        yield node.value
    elif isinstance(node, Branch):
        for child in node.children.values():
            yield from wholes(child)


def unmarked(value: Any) -> Any:
    """Return a nest with the values of its `Whole`s in their place."""
    if isinstance(value, Whole):
        return value.value
    held = None if isinstance(value, PLAIN) else entries(value)
    if not held:
        return value
    new = {key: unmarked(entry) for key, entry in held.items()}
    return rebuilt(value, new) if any(new[key] is not held[key] for key in held) else value


def version_of(value: Any) -> int:
    """Return a tensor's version counter, which misses writes through NumPy or `.data`; else 0."""
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def resolved(node: Node, rows: int | None) -> Node:
    """Replace each `Undecided` by a column or a branch, for a batch with this number of rows."""
    if isinstance(node, Undecided):
        return node.decided(rows)
    if isinstance(node, Branch):
        return Branch(node.nest, {key: resolved(child, rows) for key, child in node.children.items()})
    return node


def _parse_sequence(value: Any, path: str) -> Node:
    """Parse a list or tuple that holds tensors, if any, only inside mappings or other nests."""
    if isinstance(value, tuple) and all(isinstance(entry, NUMBERS) for entry in value):
        return Whole(value)
    if _FLAT.issuperset(map(type, value)):
        return Column(path, value)
    has_tensors = next(tensors(value), None) is not None
    if has_tensors or (value and all(map(_is_column_of_strings, value))):
        return Undecided(path, value)
    return Column(path, value)


def _holds_columns(value: Any) -> bool:
    """Whether this is a tensor, array or `Whole`, or nested lists and tuples with one of them."""
    if is_sequence(value):
        return not _FLAT.issuperset(map(type, value)) and any(map(_holds_columns, value))
    return isinstance(value, Tensor | np.ndarray | Whole)


def _is_column_of_strings(value: Any) -> bool:
    return type(value) is tuple and bool(value) and all(isinstance(entry, str) for entry in value)


def _check_can_be_cut(value: Tensor | NDArray[Any], path: str) -> None:
    if isinstance(value, Tensor) and (value.layout != torch.strided or value.is_nested):
        raise BatchError(
            f"{path} is a {'nested' if value.is_nested else value.layout} tensor, which cannot be cut along "
            f"rows: expected a dense one; use samestep.Whole({path}) to give it to every tower unchanged"
        )
    if value.ndim == 0:
        what = "tensor" if isinstance(value, Tensor) else "array"
        raise BatchError(
            f"{path} is a 0-dimensional {what}: expected rows along the first dimension; use "
            f"samestep.Whole({path}) to give it to every tower unchanged"
        )


def _step(nest: Any, key: Any) -> str:
    """Return the part of a path that leads to an entry of a nest."""
    if isinstance(nest, Mapping) or is_sequence(nest):
        return f"[{key!r}]"
    names = getattr(nest, "_fields", None)
    return f".{key}" if names is None else f".{names[key]}"


def _remedy(value: Any, path: str) -> str:
    if hasattr(type(value), "__torch_function__") and hasattr(value, "to_dict"):
        return f"pass {path}.to_dict()"
    return (
        "let samestep.TowerLoader collate each tower's rows separately, or use "
        f"samestep.Whole({path}) to give it to every tower unchanged"
    )


def _named(value: Any) -> str:
    kind = type(value)
    return f"a {kind.__name__}" if kind.__module__ == "builtins" else f"a {kind.__module__}.{kind.__name__}"
