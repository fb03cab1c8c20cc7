"""Traps of the engine's connector interface that decide how ours works, on a real engine: where one is mended, we may do more."""

import json
import os
import subprocess
import types
import warnings
from pathlib import Path

import pytest

from tests.support.engine import PYTHON, model

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the engine's imports warn of what its own libraries do
    from vllm.config import KVTransferConfig

    from kvd.connector import connector

pytestmark = [pytest.mark.vllm, pytest.mark.real("vllm"), pytest.mark.timeout(120)]

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
def test_a_synchronous_load_that_fails_spoils_other_requests() -> None:
    """Why nothing is loaded layer by layer (KvdConnector.wait_for_layer_load): blocks count as cached before they are filled."""
    environ = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    words = [str(PYTHON), "-m", "tests.kvd.vllm.sync_trap", str(model())]
    ran = subprocess.run(words, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=100, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    assert len(found) == 3
    assert found["second"] != found["first"], "the engine mended it: loads could overlap with their own forward pass"


def test_whatever_is_found_is_loaded_in_the_background() -> None:
    one = object.__new__(connector.KvdConnector)
    for found in (64, 0, None):
        one._scheduler = types.SimpleNamespace(match=lambda request, computed, found=found: found)
        assert one.get_num_new_matched_tokens(None, 0) == (found, found == 64)


@pytest.mark.parametrize(("role", "late"), [("kv_producer", False), ("kv_both", True), ("kv_consumer", True)])
def test_the_outermost_role_says_whether_blocks_are_freed_late(monkeypatch: pytest.MonkeyPatch, role: str, late: bool) -> None:
    """Before a transport the outermost connector is a producer: the engine then frees blocks that a step still writes into."""
    outermost = types.SimpleNamespace(_kv_transfer_config=KVTransferConfig(kv_connector="MultiConnector", kv_role=role))
    monkeypatch.setattr(connector, "has_kv_transfer_group", lambda: True)
    monkeypatch.setattr(connector, "get_kv_transfer_group", lambda: outermost)
    assert connector._frees_late() is late
    monkeypatch.setattr(connector, "has_kv_transfer_group", lambda: False)
    assert not connector._frees_late(), "what is not known is fenced"
