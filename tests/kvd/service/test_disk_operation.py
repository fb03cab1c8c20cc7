"""The disk tier as an operator meets it: what durability is promised, a directory that fails, damage found and repaired, reading
ahead, and a start that reads no values."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from kvd.tiers.adapters.disk import DiskAdapter
from tests.kvd.disk.helpers import identity, put, value
from tests.kvd.disk.simstorage import SimStorage
from tests.support.daemon import MakeDaemon
from tests.support.processes import run_cli, wait_until

pytestmark = pytest.mark.real("kvd")

MIB = 1 << 20


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def content(number: int) -> bytes:
    return key(number) * 2000


@pytest.mark.parametrize("durability", ["none", "group", "fsync"])
def test_what_is_promised_is_what_was_asked_for(kvd_daemon: MakeDaemon, durability: str) -> None:
    """An answer names the durability reached, never a better one; the weakest of a flush."""
    order = ["none", "group", "fsync"]
    daemon = kvd_daemon("--durability", durability, max_bytes="8MiB", tier="64MiB")
    with daemon.client(timeout_s=20) as client:
        reached = client.put(key(1), content(1), wait="tier").durability
        assert reached in order[: order.index(durability) + 1]
        assert durability != "fsync" or reached == "fsync"
        flushed = client.flush()
        assert flushed == ("fsync" if durability == "fsync" else flushed)
        assert flushed in order
        assert client.put(key(2), b"v").durability == "none", "without waiting nothing is promised"
    assert daemon.run("drain", "--json").json()["durability"] in order


def test_a_directory_that_fails_is_served_without_and_said(kvd_daemon: MakeDaemon, tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    daemon = kvd_daemon(*[word for path in paths for word in ("--long-path", path)], "--long-bytes", "128MiB", max_bytes="8MiB")
    with daemon.client(timeout_s=20) as client:
        assert all(client.put_many([(key(i), content(i)) for i in range(60)], wait="tier"))
    assert daemon.run("status", "--json").json()["health"] == "HEALTH_OK"
    daemon.stop()
    (paths[0] / "00000000000000ff.kvcache").mkdir()  # no region file, and not to be read
    names = sorted(path.name for path in paths[0].iterdir() if path.is_file() and path.suffix == ".kvcache")
    (paths[0] / names[0]).rename(tmp_path / "aside")
    (paths[0] / names[0]).mkdir()
    daemon.start()
    with daemon.client(timeout_s=20) as client:
        got = client.get_many([key(i) for i in range(60)])
        assert all(data in (None, content(i)) for i, data in enumerate(got))
        assert 5 < sum(data is not None for data in got) < 55
        assert all(client.put_many([(key(i), content(i)) for i in range(60, 80)], wait="tier"))
    told = daemon.run("status", "--json")
    assert (told.rc, told.json()["health"]) == (0, "HEALTH_WARN")
    assert [check["code"] for check in told.json()["checks"]] == ["TIER_DEGRADED"]
    assert "serving without it" in daemon.text()


def test_a_folder_that_is_removed_under_the_daemon_is_said(kvd_daemon: MakeDaemon, tmp_path: Path) -> None:
    daemon = kvd_daemon("--long-path", tmp_path / "tier", "--long-bytes", "64MiB", max_bytes="8MiB")
    with daemon.client(timeout_s=5) as client:
        assert all(client.put_many([(key(i), content(i)) for i in range(20)], wait="tier"))
        shutil.rmtree(tmp_path / "tier")
        assert client.put(key(30), content(30)), "RAM takes it"
        wait_until(lambda: daemon.run("status", "--json").json()["health"] != "HEALTH_OK", timeout_s=20, what="status to say it")
        assert [client.get(key(i)) for i in (0, 30)] == [content(0), content(30)]
    codes = {check["code"] for check in daemon.run("status", "--json").json()["checks"]}
    assert codes & {"TIER_DOWN", "TIER_DEGRADED"}
    assert "does not keep what is in it: its files were removed" in daemon.text()
    daemon.stop()
    daemon.start()
    assert daemon.run("status", "--json").json()["health"] == "HEALTH_OK", "the folder is made anew"


def test_a_failing_device_is_an_error_of_the_tier_and_of_nobody_else(kvd_daemon: MakeDaemon, tmp_path: Path) -> None:
    inner = {"type": "disk", "path": str(tmp_path / "tier"), "max_bytes": "64MiB"}
    spec = {"type": "fault_inject", "inner": inner, "error_rate": 1.0}
    daemon = kvd_daemon("--l2-adapter", json.dumps(spec), max_bytes="4MiB")
    with daemon.client(timeout_s=5) as client:
        for i in range(80):
            assert client.put(key(i), bytes(200_000)), "an accepted client is served, tier or no tier"
            assert client.get(key(i)) == bytes(200_000)

    def down() -> bool:
        told = daemon.run("status", "--json")
        return told.rc == 1 and "TIER_DOWN" in [check["code"] for check in told.json()["checks"]]

    wait_until(down, timeout_s=20, interval_s=0.2, what="the tier to be called down")


def test_damage_is_found_and_repaired_while_the_daemon_is_stopped(kvd_daemon: MakeDaemon) -> None:
    daemon = kvd_daemon(max_bytes="8MiB", tier="64MiB")
    with daemon.client(timeout_s=20) as client:
        assert all(client.put_many([(key(i), content(i)) for i in range(40)], wait="tier"))
    busy = daemon.run("verify", str(daemon.tier))
    assert busy.rc != 0, "not under a daemon that has it open"
    assert "in use" in busy.stderr
    daemon.stop()
    assert run_cli("kvd", "verify", daemon.tier).rc == 0
    for region in daemon.tier.glob("*.kvcache"):
        data = region.read_bytes()
        if (at := data.find(content(7))) >= 0:
            with region.open("r+b") as file:
                file.seek(at + 1000)
                file.write(b"\xff")
    found = run_cli("kvd", "verify", daemon.tier, "--json")
    assert found.rc == 1
    assert found.json()["schema"] == "kvd.verify/1"
    repaired = run_cli("kvd", "verify", daemon.tier, "--repair", "--json")
    assert (repaired.rc, repaired.json()["directories"][0]["repaired"]) == (0, 1)
    assert run_cli("kvd", "verify", daemon.tier).rc == 0
    daemon.start()
    with daemon.client(timeout_s=20) as client:
        got = client.get_many([key(i) for i in range(40)])
        assert [i for i in range(40) if got[i] is None] == [7]
        assert all(data in (None, content(i)) for i, data in enumerate(got))
        assert client.stats()["corruptions_total"] == 0


def test_damage_that_is_read_is_said_once_a_file_with_its_place(kvd_daemon: MakeDaemon) -> None:
    daemon = kvd_daemon(max_bytes="8MiB", tier="64MiB")
    with daemon.client(timeout_s=20) as client:
        assert all(client.put_many([(key(i), content(i)) for i in range(40)], wait="tier"))
    daemon.stop()
    (region,) = daemon.tier.glob("*.kvcache")
    data = region.read_bytes()
    with region.open("r+b") as file:
        for number in (7, 11, 23):
            file.seek(data.find(content(number)) + 1000)
            file.write(b"\xff")
    daemon.start()
    with daemon.client(timeout_s=20) as client:
        got = client.get_many([key(i) for i in range(40)])
        assert [i for i in range(40) if got[i] is None] == [7, 11, 23]
        assert client.stats()["tiers"][0]["corruptions_total"] == 3
    lines = [line for line in daemon.text().splitlines() if "a damaged value" in line]
    assert len(lines) == 1
    assert str(region) in lines[0]
    assert f"at offset {data.find(content(7)) - 4096}" in lines[0]
    assert f"kvd verify --repair {region.parent} drops all of them" in lines[0]


def test_a_lost_deletes_log_is_said_counted_and_shown(kvd_daemon: MakeDaemon) -> None:
    """As an operator meets it: the log file is gone, so no value is served, and log, stats, status and verify say why."""
    daemon = kvd_daemon(max_bytes="8MiB", tier="64MiB")
    with daemon.client(timeout_s=20) as client:
        assert all(client.put_many([(key(i), content(i)) for i in range(40)], wait="tier"))
        assert client.delete([key(i) for i in range(5)]) == 5
    daemon.stop()
    (daemon.tier / "deletes.kvlog").unlink()
    found = run_cli("kvd", "verify", daemon.tier)
    assert found.rc == 1
    assert "deletes.kvlog is missing: which values are deleted is not known" in found.stdout
    daemon.start()
    with daemon.client(timeout_s=20) as client:
        assert client.get_many([key(i) for i in range(40)]) == [None] * 40
        tier = client.stats()["tiers"][0]
        assert (tier["given_up_total"], tier["corruptions_total"], tier["entries"]) == (40, 1, 0)
        assert client.put(key(1), b"again", wait="tier")
    status = daemon.run("status", "--json").json()
    assert "TIER_GIVEN_UP" in [check["code"] for check in status["checks"]]
    assert len([line for line in daemon.text().splitlines() if "deletes.kvlog is missing" in line]) == 1
    daemon.restart()
    with daemon.client(timeout_s=20) as client:
        assert client.get(key(1)) == b"again"
    assert daemon.run("status", "--json").json()["health"] == "HEALTH_OK"


def test_a_look_up_reads_ahead_what_follows_in_the_prefix(kvd_daemon: MakeDaemon) -> None:
    """All of a pinned prefix comes up from the moment it was looked up, before anybody asks for its values."""
    daemon = kvd_daemon(max_bytes="16MiB", tier="64MiB")
    with daemon.client(timeout_s=20) as client:
        assert all(client.put_many([(key(i), content(i)) for i in range(50)], wait="tier"))
        client.delete([key(i) for i in range(50)], arena_only=True)
        found = client.prefix([key(i) for i in range(60)], pin_s=10)
        assert found.length == 50
        wait_until(lambda: client.stats()["promotions_total"] == 50, what="the prefix to come up by itself")
        with client.claim(found.token) as lease:
            assert [view is not None and bytes(view) for view in lease.views] == [content(i) for i in range(50)]


@pytest.mark.parametrize("ended", ["closed", "killed"])
def test_a_start_reads_what_lies_there_and_not_its_values(ended: str) -> None:
    """The bytes read at a start follow the number of values, whatever they and the budget weigh."""

    def read_at_start(length: int, budget: int) -> int:
        io = SimStorage()

        def adapter(**more: Any) -> DiskAdapter:
            made = DiskAdapter("disk", Path("/sim"), budget, io=io, free_floor_bytes=0, housekeeping_s=0.0, **more)
            made.open()
            return made

        first = adapter()
        for number in range(60):
            assert put(first, identity(number), value(number, length))
        if ended == "closed":
            first.close()
        else:
            io.kill()
        total = [0]

        def count(call: str, path: Path, size: int) -> None:
            total[0] += size if call == "preadv" else 0

        io.fault = count  # type: ignore[assignment]
        again = adapter()
        io.fault = None
        assert again.usage().entries == 60
        again.close()
        return total[0]

    small, large = read_at_start(5000, 8 * MIB), read_at_start(400_000, 64 * MIB)
    assert large < 60 * 400_000 / 2, "it read the values"
    if ended == "closed":  # else what was written last is looked at, to know where it was torn
        assert large < 4 * small + 2 * MIB
