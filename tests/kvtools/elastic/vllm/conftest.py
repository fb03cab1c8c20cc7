"""These suites share the nursery of the connector's, where that runs too: engines are forked from one that has imported all."""

from collections.abc import Iterator

import pytest

from tests.support.engine import Nursery


@pytest.fixture(scope="session", autouse=True)
def _nursery() -> Iterator[None]:
    if Nursery.current is not None:
        yield
        return
    Nursery.current = Nursery()
    yield
    Nursery.current.stop()
    Nursery.current = None
