import pytest

from .nursery import Nursery


@pytest.fixture(scope="session")
def nursery():
    with Nursery() as started:
        yield started
