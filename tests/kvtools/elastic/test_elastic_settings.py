"""Settings from the environment, kvcached's words for them, and the plug-in's refusals."""

import os
import sys
from pathlib import Path

import pytest

from kvtools.elastic.settings import Settings, claim, read_settings
from kvtools.elastic.vllm_plugin import GRACE_S, patient
from kvtools.errors import Refused, UsageError
from tests.support.processes import run_python


def test_defaults() -> None:
    assert read_settings({}) == Settings(None)
    assert read_settings({"KVTOOLS_SEGMENT": "VLLM_MODEL_1"}).segment == "VLLM_MODEL_1"


def test_every_setting() -> None:
    found = read_settings(
        {
            "KVTOOLS_SEGMENT": "a",
            "KVTOOLS_LIMIT": "4G",
            "KVTOOLS_PAGE_SIZE": "4 MiB",
            "KVTOOLS_MIN_RESERVED_PAGES": "0",
            "KVTOOLS_MAX_RESERVED_PAGES": "3",
            "KVTOOLS_PREALLOC": "off",
            "KVTOOLS_MIN_FREE": "1G",
            "KVTOOLS_IDLE_RELEASE": "5m",
        }
    )
    assert found == Settings("a", 4 << 30, 4 << 20, 0, 3, False, 1 << 30, 300.0)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("KVTOOLS_SEGMENT", ""),
        ("KVTOOLS_SEGMENT", "a/b"),
        ("KVTOOLS_SEGMENT", "kvtools.kvd.x"),
        ("KVTOOLS_SEGMENT", "x.kvtools"),
        ("KVTOOLS_SEGMENT", "x" * 256),
        ("KVTOOLS_SEGMENT", "x" * 250),  # no room for its sidecar's name
        ("KVTOOLS_LIMIT", "0"),
        ("KVTOOLS_LIMIT", "-1G"),
        ("KVTOOLS_PAGE_SIZE", "2 pages"),
        ("KVTOOLS_MIN_RESERVED_PAGES", "-1"),
        ("KVTOOLS_MIN_RESERVED_PAGES", "11"),
        ("KVTOOLS_PREALLOC", "maybe"),
        ("KVTOOLS_IDLE_RELEASE", "soon"),
    ],
)
def test_what_cannot_be_meant_is_an_error_that_names_the_variable(variable: str, value: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_settings({variable: value})
    assert variable in str(caught.value)


def test_kvcacheds_variables_are_understood_with_a_notice() -> None:
    found = read_settings(
        {
            "ENABLE_KVCACHED": "true",
            "KVCACHED_IPC_NAME": "my model/1",
            "KVCACHED_PAGE_SIZE_MB": "4",
            "KVCACHED_MIN_RESERVED_PAGES": "1",
            "KVCACHED_MAX_RESERVED_PAGES": "2",
            "KVCACHED_PAGE_PREALLOC_ENABLED": "false",
        }
    )
    assert (found.segment, found.page_size, found.min_reserved_pages, found.max_reserved_pages, found.prealloc) == (
        "my-model-1", 4 << 20, 1, 2, False,
    )  # fmt: skip
    assert found.notices[0] == "ENABLE_KVCACHED is understood: the elastic pool is on, segment my-model-1 (KVCACHED_IPC_NAME)"
    assert "KVCACHED_PAGE_SIZE_MB is understood; its name here is KVTOOLS_PAGE_SIZE" in found.notices
    assert read_settings({"ENABLE_KVCACHED": "1"}).segment == f"kvcached_vLLM_{os.getpgrp()}"


def test_ours_win_and_theirs_alone_mean_nothing() -> None:
    assert read_settings({"KVCACHED_IPC_NAME": "x"}).segment is None
    found = read_settings(
        {"ENABLE_KVCACHED": "1", "KVCACHED_IPC_NAME": "x", "KVTOOLS_SEGMENT": "y", "KVTOOLS_MIN_RESERVED_PAGES": "3"}
    )
    assert (found.segment, found.min_reserved_pages, found.notices) == ("y", 3, ())


def test_kvcached_beside_it() -> None:
    with pytest.raises(Refused, match="would both replace the KV cache"):
        claim({"ENABLE_KVCACHED": "true", "KVTOOLS_SEGMENT": "a"}, kvcached_installed=True)
    assert "stays off" in claim({"ENABLE_KVCACHED": "true"}, kvcached_installed=True)
    assert claim({"KVTOOLS_SEGMENT": "a"}, kvcached_installed=True) == ""
    assert claim({"ENABLE_KVCACHED": "true", "KVTOOLS_SEGMENT": "a"}, kvcached_installed=False) == ""


@pytest.mark.parametrize(
    ("asked", "of_requests", "given"),
    [(0, 0, GRACE_S), (0.0, None, GRACE_S), (0, 30, 0), (7.5, 0, 7.5), (None, 0, None)],
    ids=["none at all", "not set", "all of it is used up", "some", "vLLM's own"],
)
def test_a_server_that_ends_leaves_its_engine_core_time_to_end(
    asked: float | None, of_requests: float | None, given: float
) -> None:
    class Manager:
        _request_shutdown_timeout = of_requests

        def shutdown(self, timeout: float | None = None) -> float | None:
            return timeout

    assert patient(Manager.shutdown)(Manager(), timeout=asked) == given
    assert patient(Manager.shutdown)(Manager(), asked) == given


REGISTER = "from kvtools.elastic.vllm_plugin import register; register()"
BARE = dict.fromkeys(("KVTOOLS_SEGMENT", "ENABLE_KVCACHED", "KVCACHED_IPC_NAME"), "")


def test_without_its_variable_the_plug_in_imports_nothing() -> None:
    ran = run_python(f"import sys; {REGISTER}; print(sorted(set(sys.modules) & {{'vllm', 'torch', 'ctypes'}}))", env=BARE)
    assert (ran.rc, ran.stdout) == (0, "[]\n"), ran.stderr


def test_kvcached_that_is_installed_is_found_and_refused(tmp_path: Path) -> None:
    (tmp_path / "kvcached.py").write_text("raise RuntimeError('nobody may import this')\n")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    env = {**BARE, "PYTHONPATH": path, "ENABLE_KVCACHED": "true", "KVTOOLS_SEGMENT": "a"}
    ran = run_python(REGISTER, env=env)
    assert ran.rc == 1
    last = ran.stderr.strip().splitlines()[-1]
    assert last.startswith("RuntimeError: kvtools: kvcached is installed here and ENABLE_KVCACHED is set")
    assert "pip uninstall kvcached" in last
    ran = run_python(REGISTER, env={**env, "KVTOOLS_SEGMENT": ""})
    assert ran.rc == 0
    assert "kvtools' elastic pool stays off" in ran.stderr


@pytest.mark.parametrize("version", ["0.19.1", "0.34.0", "main"])
def test_another_version_of_the_engine_is_refused(tmp_path: Path, version: str) -> None:
    (tmp_path / "vllm.py").write_text(f"__version__ = {version!r}\n")
    env = {**BARE, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]), "KVTOOLS_SEGMENT": "a"}
    ran = run_python(REGISTER, env=env)
    last = ran.stderr.strip().splitlines()[-1]
    assert last.startswith(
        f"RuntimeError: kvtools: the elastic pool knows vLLM 0.32, 0.33, and this is {version} (unset KVTOOLS_SEGMENT"
    )
