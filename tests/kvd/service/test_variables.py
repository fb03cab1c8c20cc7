"""Variables of the daemon: older names are accepted under a notice, or what there is in their place is named; empty is unset."""

import pytest

from kvd.service.settings import SETTINGS, older_names
from kvtools.config import resolve
from tests.support.daemon import MakeDaemon


def lines(environ: dict[str, str]) -> list[str]:
    return older_names(resolve(SETTINGS, flags={}, environ=environ), environ)


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"KVD_SOCKET": "/a"}, []),
        ({"INFERA_KVD_SOCKET": "/a"}, ["INFERA_KVD_SOCKET is accepted; its name here is KVD_SOCKET"]),
        ({"INFERA_KVD_SOCKET": "/a", "KVD_SOCKET": "/b"}, []),
        ({"INFERA_KVD_ARENA_HUGETLB": "1"}, ["INFERA_KVD_ARENA_HUGETLB is accepted; its name here is KVD_HUGEPAGES"]),
        ({"INFERA_KVD_LONG_FSYNC": "1"}, ["INFERA_KVD_LONG_FSYNC has no meaning here: kvd serve --durability fsync"]),
        ({"INFERA_KVD_MAX_BYTES": "1G"}, ["INFERA_KVD_MAX_BYTES has no meaning here"]),
        ({"INFERA_KVD_CHUNK_TOKENS": "512"}, []),  # an engine's
    ],
)
def test_each_older_name_is_answered(environ: dict[str, str], said: list[str]) -> None:
    assert lines(environ) == said


@pytest.mark.real("kvd")
def test_the_daemons_log_has_them(kvd_daemon: MakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERA_KVD_MAX_BYTES", "1G")
    assert "WARNING kvd: INFERA_KVD_MAX_BYTES has no meaning here" in kvd_daemon(max_bytes="1MiB").text()


@pytest.mark.parametrize("name", ["KVD_SOCKET", "KVD_LONG_CONFIG", "KVD_GDS_L1_PATH"])
def test_an_empty_path_is_none_and_not_the_current_directory(name: str) -> None:
    setting = next(one.name for one in SETTINGS if one.environment[0] == name)
    assert resolve(SETTINGS, flags={}, environ={name: ""})[setting].value is None
