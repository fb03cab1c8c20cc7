"""The entry point that runs in each of the engine's processes."""

import pytest

from kvd.connector.plugin import warn_of_left_out


@pytest.mark.parametrize(
    ("environ", "warned"),
    [
        ({}, False),
        ({"VLLM_PLUGINS": "kvd"}, False),
        ({"KVTOOLS_SEGMENT": "M"}, False),
        ({"KVTOOLS_SEGMENT": "M", "VLLM_PLUGINS": "kvd"}, True),
        ({"KVTOOLS_SEGMENT": "M", "VLLM_PLUGINS": "kvd,kvtools"}, False),
    ],
)
def test_an_elastic_pool_that_is_kept_out_is_said(environ: dict[str, str], warned: bool, caplog: pytest.LogCaptureFixture) -> None:
    warn_of_left_out(environ)
    assert ("VLLM_PLUGINS=kvd keeps the elastic pool of KVTOOLS_SEGMENT out" in caplog.text) == warned
