"""The OpenAPI document and the gate behind it, compared by schemathesis: what it says may be sent is understood, what comes back
is what it says, and what it says is not understood is refused, never a 500."""

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance, status_code_conformance

from tests.kvgate.process import GateProcess, gate, instance

EXAMPLES = 8
SHAPE = [status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GateProcess]:
    folder = tmp_path_factory.mktemp("gate")
    engines = [instance(name, folder) for name in ("one", "org/two")]
    with gate(folder, instances=engines) as process:
        process.until(lambda: {process.state("one"), process.state("org/two")} == {"awake"})
        yield process


def operations(process: GateProcess) -> list[Any]:
    schema = schemathesis.openapi.from_url(process.url + "/openapi.json")
    return [found.ok() for found in schema.get_all_operations()]


@pytest.mark.parametrize("mode", [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE])
def test_every_operation_answers_as_described(running: GateProcess, mode: schemathesis.GenerationMode) -> None:
    asked = 0
    for operation in operations(running):

        @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy(generation_mode=mode))
        def one(case: Any) -> None:
            nonlocal asked
            answer = case.call(timeout=30)
            asked += 1
            assert answer.status_code != 500, answer.text
            if mode is schemathesis.GenerationMode.POSITIVE:
                case.validate_response(answer, checks=SHAPE)

        try:
            one()
        except Unsatisfiable:
            # What has no input but a name in its path cannot be asked wrongly.
            assert mode is schemathesis.GenerationMode.NEGATIVE
            assert not operation.body
    assert asked > 20
    assert "Traceback" not in "".join(running.log)
    assert running.process.poll() is None
