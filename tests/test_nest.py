"""Nests: what is cut, what is given whole, and what is refused by name."""

import collections
import doctest
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import default_collate

from samestep import BatchError, LocalBatch, TowerLoader, Towers, Whole
from samestep.batches.batch import GlobalBatch
from samestep.batches.copier import Copier
from samestep.batches.nest import tensors
from samestep.summation.placement import even_ranges

CPU = Copier(torch.device("cpu"))


class Encoding(collections.UserDict):
    """Like transformers' BatchEncoding: a UserDict with attributes of its own."""

    def __init__(self, data, encodings=None):
        super().__init__(data)
        self.encodings = encodings

    def __getattr__(self, name):
        if name == "data":
            raise AttributeError(name)
        return self.data[name]


class Pair(NamedTuple):
    x: torch.Tensor
    label: str


@dataclass(frozen=True, slots=True)
class Frozen:
    x: torch.Tensor
    scale: float = 2.0


@dataclass
class Computed:
    x: torch.Tensor
    doubled: torch.Tensor = field(init=False)

    def __post_init__(self):
        self.doubled = self.x * 2


class Names(list):
    pass


def take(batch, start=2, stop=4):
    return GlobalBatch.open(batch).take(range(start, stop), CPU)


X = torch.arange(6.0)


# ---- cut -------------------------------------------------------------------------------------------


def test_arrays_stay_arrays_in_memory_of_their_own():
    array = np.arange(12.0).reshape(6, 2)
    part = take({"a": array})["a"]
    assert type(part) is np.ndarray
    assert part.tolist() == array[2:4].tolist()
    assert part.ctypes.data % 64 == 0
    part[:] = -1
    assert (array >= 0).all()


@pytest.mark.parametrize(
    "array",
    [
        np.array(["a", "bb", "c", "d", "e", "f"]),
        np.array([{"id": n} for n in range(6)], dtype=object),
        np.zeros((6, 0)),
        np.ma.masked_array(np.arange(6), [0, 0, 1, 0, 0, 0]),
        np.zeros(6, dtype=[("x", "f4"), ("y", "i8")]),
        np.asfortranarray(np.arange(12).reshape(6, 2)),
    ],
)
def test_arrays_of_any_dtype_are_cut(array):
    part = take(array)
    assert type(part) is type(array)
    assert part.dtype == array.dtype
    assert part.tolist() == array[2:4].tolist()


def test_mappings_come_back_as_they_are():
    encoding = Encoding({"ids": X}, encodings="kept")
    part = take(encoding)
    assert isinstance(part, Encoding)
    assert part.ids.tolist() == [2, 3]
    assert part.encodings == "kept"
    assert encoding.ids is X
    by_default = collections.defaultdict(list, x=X)
    assert take(by_default).default_factory is list
    assert take(types.MappingProxyType({"x": X}))["x"].tolist() == [2, 3]


def test_tuples_lists_and_dataclasses_come_back_as_they_are():
    part = take([Pair(X, "train"), (X, [X]), Frozen(X), Computed(X)])
    assert isinstance(part, list)
    assert part[0].label == "train"
    assert part[0].x.tolist() == part[1][0].tolist() == part[1][1][0].tolist() == [2, 3]
    assert type(part[2]) is Frozen
    assert (part[2].x.tolist(), part[2].scale) == ([2, 3], 2.0)
    assert part[3].doubled.tolist() == [4, 6]
    assert take(torch.topk(torch.randn(6, 3), 2)).indices.shape == (2, 2)


class Point(tuple):
    """Has arguments and attributes of its own."""

    def __new__(cls, x, *more):
        own = super().__new__(cls, (x, *more))
        own.name = "kept"
        return own


@dataclass
class Lazy:
    x: torch.Tensor
    cache: torch.Tensor = field(init=False)


def test_tuples_with_arguments_of_their_own_and_fields_that_are_not_set():
    point, lazy = take([Point(X, X), Lazy(X)])
    assert (type(point), len(point), point.name, point[1].tolist()) == (Point, 2, "kept", [2, 3])
    assert lazy.x.tolist() == [2, 3]
    assert not hasattr(lazy, "cache")


def test_a_batch_that_holds_itself_is_refused():
    batch = {"x": X}
    batch["self"] = batch
    with pytest.raises(
        BatchError, match="batch is a dict that holds itself, or is nested too deeply: expected"
    ):
        take(batch)


@pytest.mark.parametrize("kind", [list, tuple, Names])
def test_a_sequence_with_an_entry_a_row_is_cut(kind):
    part = take({"x": X, "names": kind("abcdef")})["names"]
    assert type(part) is (tuple if kind is tuple else list)
    assert list(part) == ["c", "d"]


def test_entries_may_be_anything_without_tensors():
    notes = [{"id": n, "boxes": [[n]]} for n in range(6)]
    assert take({"x": X, "notes": notes})["notes"] == notes[2:4]
    objects = [object() for _ in range(6)]
    assert take((X, objects))[1] == objects[2:4]


def test_a_batch_needs_no_tensors():
    assert GlobalBatch.open({"text": ["a", "b", "c"]}).rows == 3
    assert take({"text": ["a", "b", "c"]}, 1, 3) == {"text": ["b", "c"]}


def test_what_torch_collates_is_cut():
    rows = [{"x": torch.tensor([n]), "name": f"n{n}", "pair": (f"a{n}", f"b{n}")} for n in range(5)]
    part = take(default_collate(rows), 3, 5)
    assert part["name"] in (["n3", "n4"], ("n3", "n4"))
    assert [list(column) for column in part["pair"]] == [["a3", "a4"], ["b3", "b4"]]


def test_targets_of_a_detection_are_cut_where_they_are_one_a_row():
    pictures = torch.zeros(4, 3, 8, 8)
    targets = [{"boxes": torch.ones(n, 4), "labels": torch.zeros(n)} for n in (1, 3, 0, 4)]
    for all_targets in (targets, tuple(targets)):
        part = take((pictures, all_targets))[1]
        assert type(part) is type(all_targets)
        torch.testing.assert_close(part, all_targets[2:4], rtol=0, atol=0)
        part[1]["boxes"].zero_()  # a pass may write to its rows
        assert all_targets[3]["boxes"].all()


def test_views_of_a_batch_are_cut_where_they_are_columns():
    views = [{"x": X, "mask": X > 2}, {"x": X + 1, "mask": X > 3}]
    part = take({"y": X, "views": views})["views"]
    assert [view["x"].tolist() for view in part] == [[2, 3], [3, 4]]


# ---- given whole -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        0.5,
        1j,
        "train",
        b"x",
        torch.float16,
        torch.device("cpu"),
        np.float32(2),
        (224, 224),
        (),
        (None, 1.0),
    ],
)
def test_scalars_and_tuples_of_numbers_are_given_whole(value):
    assert take({"x": X, "value": value})["value"] == value


def test_whole_gives_the_value_itself():
    for value in ({"a", "b"}, [224, 224], torch.tensor(2.0), {"weights": torch.ones(3)}, object()):
        assert take({"x": X, "value": Whole(value)})["value"] is value


def test_towers_give_it_whole():
    towers = Towers(torch.nn.Linear(1, 1), 3)
    for tower in towers({"x": X[:, None], "weights": Whole([1.0, 2.0]), "ids": list("abcdef")}):
        assert tower.batch["weights"] == [1.0, 2.0]
        assert len(tower.batch["ids"]) == 2
        tower.backward(towers.model(tower.batch["x"]).mean())
    towers.average()


# ---- refused ---------------------------------------------------------------------------------------


class Graph:
    pass


class TensorDict(dict):
    """As the class of that name, whose keys are rows."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return NotImplemented

    def to_dict(self):
        return dict(self)


@pytest.mark.parametrize(
    ("batch", "named"),
    [
        ({"x": X, "graph": Graph()}, r"batch\['graph'\] is a .*Graph, .*samestep\.Whole\(batch\['graph'\]\)"),
        ({"x": X, "ids": {1, 2}}, r"batch\['ids'\] is a set, which cannot be cut"),
        ((X, Frozen(Graph())), r"batch\[1\]\.x is a .*Graph"),
        ((X, Pair(X, Graph())), r"batch\[1\]\.label is a .*Graph"),
        ([X, iter("ab")], r"batch\[1\] is a str.*iterator"),
        (Graph(), "batch is a .*Graph"),
        ({"x": X.to_sparse()}, r"batch\['x'\] is a torch\.sparse_coo tensor, which cannot be cut.*Whole"),
        ({"x": pack_sequence([X, X[:3]])}, r"batch\['x'\] is a PackedSequence.*pack_padded"),
        (TensorDict(x=X), r"batch is a .*TensorDict, which cannot be cut .*pass batch\.to_dict\(\)"),
        ({"x": torch.tensor(1.0)}, r"batch\['x'\] is a 0-dimensional tensor: .*samestep\.Whole\("),
        ({"x": X, "n": np.array(1.0)}, r"batch\['n'\] is a 0-dimensional array"),
        (
            {"x": X, "size": [224, 224]},
            r"batch\['size'\] is a list of 2 entries, batch\['x'\] has 6 rows: .*W",
        ),
        ({"x": X, "names": ("a", "b")}, r"batch\['names'\] is a tuple of 2 entries"),
        ({"x": X, "names": []}, r"batch\['names'\] is a list of 0 entries"),
        ({"x": X, "y": [X, {"z": X[1:]}]}, r"batch\['y'\]\[1\]\['z'\] has 5 rows, batch\['x'\] has 6"),
        (
            {"y": X, "x": [X[:1], X[:2]]},
            r"batch\['x'\]\[0\] has 1 rows, .* np.fromiter\(batch\['x'\], object\)",
        ),
        (
            [X[:1], X[:2]],
            r"batch\[1\] has 2 rows, batch\[0\] has 1: .*if batch has .*fromiter\(batch, object\)",
        ),
        ([(X[:3], {"y": X[:1]})], r"batch\[0\]\[1\]\['y'\] has 1 rows, .*np.fromiter\(batch, object\)"),
        ({"names": ["a"], "x": X}, r"batch\['names'\] is a list of 1 entries, batch\['x'\] has 6 rows"),
        ({"a": np.zeros(3), "x": X}, r"batch\['x'\] has 6 rows, batch\['a'\] has 3"),
        ({"epoch": 3, "name": "x"}, "batch is a dict without tensors, arrays or lists"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(batch, named):
    with pytest.raises(BatchError, match=named):
        GlobalBatch.open(batch)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_refused(layout):
    nested = torch.nested.nested_tensor([X, X[:3]], layout=layout)
    with pytest.raises(BatchError, match=r"batch\['n'\] is a nested tensor, which cannot be cut"):
        GlobalBatch.open({"x": X[:2], "n": nested})


def test_lists_that_can_be_read_in_two_ways_are_refused():
    square = [{"boxes": torch.zeros(3, 4)} for _ in range(3)]
    strings = [("a1", "a2"), ("b1", "b2")]
    for batch in ((X[:3], square), square, strings, {"x": X[:2], "pairs": strings}):
        with pytest.raises(BatchError, match=r"batch.* of [23] entries and can be read in two ways.*dict of"):
            GlobalBatch.open(batch)
    with pytest.raises(
        BatchError, match=r"batch\[1\] is a list of 3 entries and cannot be read in either way"
    ):
        GlobalBatch.open((X, square))


@pytest.mark.parametrize(
    "batch",
    [
        (Pair(X, X), None, {"epoch": 3}),
        ({"x": X, "y": X}, {"u": X}),
        [Frozen(X), {"x": X}],
        (Pair(X[:2], X[:2]), "name"),
    ],
)
def test_entries_of_different_kinds_are_no_rows(batch):
    part = GlobalBatch.open(batch).take(range(1, 2), CPU)
    assert [len(each) for each in tensors(part)] == [1] * len([*tensors(batch)])


def test_batches_of_two_loaders_are_not_taken_for_rows():
    labelled, unlabelled = {"x": X[:2], "y": X[:2]}, {"x": X}
    with pytest.raises(BatchError, match=r"batch is a tuple of 2 entries with 2, 6 rows: expected the same"):
        GlobalBatch.open((labelled, unlabelled))
    rows = ({"x": X[:2], "box": X[:3]}, {"x": X, "box": X[:1]})
    assert GlobalBatch.open(rows).rows == 2  # one entry per row, as neither can be a batch


@pytest.mark.parametrize("make", [lambda one, two: (one, two), lambda one, two: {"x": one, "y": two}])
def test_loaders_batches_within_a_batch_are_refused(make):
    towers = Towers(torch.nn.Linear(1, 1), 2)
    one, two = (TowerLoader(X[:, None], 4, towers, seed=seed) for seed in range(2))
    for batch in zip(one, two, strict=True):
        with pytest.raises(BatchError, match=r"batch\[.*\] is a batch of a loader.*StackDataset"):
            towers(make(*batch))


@pytest.mark.parametrize("entries", [[X[:1], X[:2], X[:3]], [X[:2]] * 3, [(X[:1], {"y": X[:2]})] * 3])
def test_an_array_of_objects_has_one_entry_a_row_which_is_a_copy(entries):
    whole = GlobalBatch.open({"x": np.fromiter(entries, object), "y": torch.zeros(3)})
    before = whole.fingerprint()
    part = whole.take(range(1, 3), CPU)
    for entry, expected in zip(part["x"], entries[1:], strict=True):
        for mine, theirs in zip(tensors(entry), tensors(expected), strict=True):
            assert torch.equal(mine, theirs)
            mine += 1
    assert whole.fingerprint() == before


# ---- all towers' parts are the batch ---------------------------------------------------------------


def nests(rows):
    columns = st.sampled_from(
        [torch.arange(rows * 2.0).reshape(rows, 2), np.arange(rows), [str(n) for n in range(rows)]]
    )
    return st.recursive(
        columns,
        lambda inner: (
            st.dictionaries(st.text(max_size=2), inner, min_size=1, max_size=3)
            | st.builds(lambda x: Pair(x, "kept"), inner)
            | st.builds(Frozen, inner)
            | st.builds(lambda x, y: (torch.zeros(rows), x, y), inner, inner)
        ),
        max_leaves=6,
    )


def numbers(value):
    """Return all that a nest holds as one flat list."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.reshape(-1).tolist() if value.ndim == 1 else value[:, 0].tolist()
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, Frozen):
        return numbers(value.x)
    if isinstance(value, Pair):
        return numbers(value.x)
    return [n for each in value for n in ([each] if isinstance(each, str) else numbers(each))]


@given(st.integers(3, 12).flatmap(nests), st.integers(1, 5))
def test_no_row_is_lost_or_doubled(batch, num_towers):
    whole = GlobalBatch.open(batch)
    parts = [whole.take(rows, CPU) for rows in even_ranges(whole.rows, num_towers)]
    assert all(type(part) is type(batch) for part in parts)
    assert sorted(map(str, (n for part in parts for n in numbers(part)))) == sorted(map(str, numbers(batch)))


def test_slices_of_a_loader_may_hold_anything():
    held = Graph()
    towers = Towers(torch.nn.Linear(1, 1), 1)
    tower = next(towers(LocalBatch(6, {0: {"x": X, "graph": held, "size": [2, 3]}})))
    assert tower.batch["graph"] is held
    assert tower.batch["size"] == [2, 3]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
def test_whole_in_a_loaders_batch_is_its_value(num_workers):
    held = {"x": X[:2], "all": Whole({"weights": torch.ones(3), "names": ["a"]}), "list": [[Whole(1)], 2]}
    towers = Towers(torch.nn.Linear(1, 1), 2)
    from_collate = TowerLoader(X, 4, towers, collate_fn=lambda rows: held, num_workers=num_workers)
    for batch in (LocalBatch(4, dict.fromkeys(range(2), held)), *towers.slices([held] * 2), *from_collate):
        for tower in towers(batch):
            assert tower.batch["all"]["weights"].tolist() == [1, 1, 1]
            assert (tower.batch["all"]["names"], tower.batch["list"]) == (["a"], [[1], 2])
            tower.backward(towers.model(tower.batch["all"]["weights"][:1]).sum())
        towers.average()
    assert isinstance(held["all"], Whole)


def test_the_page_on_batches_is_true():
    page = Path(__file__).parents[1] / "docs" / "batches.md"
    found = doctest.testfile(str(page), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert (found.failed, found.attempted) == (0, 6)
