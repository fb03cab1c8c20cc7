"""The engines of these suites come from one nursery: the imports of a vLLM take longer than anything it does here."""

from collections.abc import Iterator

import pytest

from tests.support.engine import Nursery


@pytest.fixture(scope="session", autouse=True)
def _nursery() -> Iterator[None]:
    Nursery.current = Nursery()
    yield
    Nursery.current.stop()
    Nursery.current = None
