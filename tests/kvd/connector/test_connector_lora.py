"""An adapter's weights are part of where its chunks are stored, and one that is in doubt stores nothing."""

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvd.connector.lora import IN_DOUBT, Adapters, whose
from tests.kvd.connector.scheduler_bench import FakeRequest


@dataclass
class Lora:
    """What is read of vLLM's LoRARequest."""

    lora_path: str
    lora_name: str = "them"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "adapter"
    place.mkdir()
    (place / "adapter_model.safetensors").write_bytes(b"one" * 100)
    (place / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 16}')
    return place


def replace(path: Path, text: bytes) -> None:
    """As a trainer does: another file under the same name, of the same size and time."""
    times = path.stat().st_mtime_ns
    other = path.with_suffix(".new")
    other.write_bytes(text)
    os.utime(other, ns=(times, times))
    other.replace(path)


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_files_replaced_in_place_are_another_adapter_after_a_restart(folder: Path, name: str) -> None:
    before = Adapters().mark(Lora(str(folder)))
    assert before
    assert Adapters().mark(Lora(str(folder), "other")) == before
    replace(folder / name, (folder / name).read_bytes()[:-1] + b" ")
    after = Adapters().mark(Lora(str(folder)))
    assert after not in (None, before)


def test_no_adapter_has_no_mark_and_tenants_and_adapters_are_kept_apart() -> None:
    assert Adapters().mark(None) == ""
    assert whose("acme", "") == "acme"
    assert len({whose(tenant, mark) for tenant in ("", "acme") for mark in ("", "aa", "bb")}) == 6


def test_files_that_change_while_the_engine_runs_leave_the_adapter_in_doubt(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    adapters = Adapters()
    with caplog.at_level(logging.WARNING):
        assert adapters.mark(Lora(str(folder)))
        replace(folder / "adapter_model.safetensors", b"two" * 100)
        assert [adapters.mark(Lora(str(folder))) for _ in range(3)] == [None] * 3
    assert caplog.text.count("nothing is stored or loaded for adapter 'them'") == 1


@pytest.mark.parametrize("gone", ["all", "weights"])
def test_an_adapter_that_cannot_be_read_here_is_in_doubt(folder: Path, gone: str, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "adapter_model.safetensors").unlink()
    path = str(folder.parent / "nowhere") if gone == "all" else str(folder)
    assert Adapters().mark(Lora(path)) is None
    assert "cannot be read here" in caplog.text


def test_chunks_of_an_adapter_lie_apart_by_its_weights(bench: Any, folder: Path) -> None:
    def salt(**more: Any) -> bytes:
        found: bytes = bench().scheduler.arrived(FakeRequest("r", 512, **more)).salt
        return found

    plain, before = salt(), salt(lora_request=Lora(str(folder)))
    assert salt(lora_request=Lora(str(folder))) == before != plain
    replace(folder / "adapter_model.safetensors", b"two" * 100)
    assert salt(lora_request=Lora(str(folder))) not in (before, plain)


def test_of_an_adapter_in_doubt_nothing_is_stored_or_loaded_and_the_daemon_is_told_why(bench: Any, folder: Path) -> None:
    one = bench()
    assert one.compute(FakeRequest("before", 1024, lora_request=Lora(str(folder))))
    replace(folder / "adapter_model.safetensors", b"two" * 100)
    request = FakeRequest("after", 1024, lora_request=Lora(str(folder)))
    assert one.scheduler.match(request, 0) == 0
    plan = one.run(request, 0, 1024)
    assert plan.saves == []
    assert [unsaved.why for unsaved in plan.unsaved] == [IN_DOUBT]


def test_files_newer_than_the_engine_may_not_be_what_it_loaded(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = Adapters((folder / "adapter_model.safetensors").stat().st_ctime_ns - 1)
    with caplog.at_level(logging.WARNING):
        assert before.mark(Lora(str(folder))) is None
        assert before.mark(Lora(str(folder))) is None
    assert len(caplog.records) == 1
    assert "until the engine restarts: its files are newer than this engine" in caplog.text
    assert Adapters().mark(Lora(str(folder)))
