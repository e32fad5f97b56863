"""Each promise of docs/promises.md, alone and on several workers."""

import json
import re
from functools import cache
from pathlib import Path

import pytest

import samestep

from ..cases import mostly_long
from . import promises
from .test_placements import run_program

DOCS = Path(__file__).parents[2] / "docs" / "promises.md"


@cache
def alone(name):
    return json.loads(json.dumps(promises.PROMISES[name](samestep.init("cpu"))))


@pytest.fixture(scope="module")
def results(nursery, tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    return cache(lambda num_workers: run_program(nursery, promises, folder / str(num_workers), num_workers))


@pytest.mark.filterwarnings("ignore:computed from the number of workers")  # as many towers
@pytest.mark.parametrize("num_workers", mostly_long([2, 3], 1))
@pytest.mark.parametrize("name", promises.PROMISES)
def test_the_promise_is_kept(results, name, num_workers):
    for found in results(num_workers):
        assert found[name] == alone(name)


def test_each_promise_is_in_the_docs():
    listed = re.findall(r"`([a-z0-9_]{20,})`", DOCS.read_text())
    assert set(promises.PROMISES) <= set(listed)
