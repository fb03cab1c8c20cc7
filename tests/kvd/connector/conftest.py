"""Fixtures of the connector's tests without an engine."""

from collections.abc import Iterator
from typing import Any

import pytest

from kvd.connector.groups import Group
from tests.kvd.connector.scheduler_bench import Bench


@pytest.fixture
def bench() -> Iterator[Any]:
    made: list[Bench] = []

    def make(*groups: Group, **options: Any) -> Bench:
        made.append(Bench(*groups, **options))
        return made[-1]

    yield make
    for one in made:
        one.link.close()
