"""The stats segment of a daemon: sound by its specification alone, fresh, and the same numbers as everywhere else."""

import fcntl
import json
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvd.tiers.adapters.base import Usage
from kvd.wire.client import Client
from tests.kvd.tiers.ram_tier import RamTier, running
from tests.support.daemon import Daemon, MakeDaemon
from tests.support.processes import wait_until

pytestmark = [pytest.mark.real("kvd"), pytest.mark.real("segments")]

HEADER = struct.Struct("<8sIIIIQQQQQQ")
FLOCK = struct.Struct("hhqqi4x")


def read(path: Path) -> tuple[dict[str, Any], dict[str, float]]:
    """(header, values by "name{label=value}"), by the specification; AssertionError for anything unsound in it."""
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        info = os.fstat(fd)
        assert info.st_mode & 0o7777 == 0o644
        for _ in range(8):
            data = os.pread(fd, info.st_size, 0)
            fields = HEADER.unpack_from(data)
            if fields[-1] % 2 == 0 and HEADER.unpack_from(os.pread(fd, HEADER.size, 0))[-1] == fields[-1]:
                break
            time.sleep(0.001)
        else:
            raise AssertionError("never stable in 8 reads")
        names = ["magic", "header", "schema", "count", "flags", "pid", "start", "namespace", "created", "heartbeat", "sequence"]
        header = dict(zip(names, fields, strict=True))
        assert (header["magic"], header["header"]) == (b"KVTSTAT1", 128)
        assert not any(data[HEADER.size : 128])
        probe = FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        header["locked"] = FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, probe)[: FLOCK.size])[0] != fcntl.F_UNLCK
        schema = json.loads(data[128 : 128 + header["schema"]])
        assert len(schema) == header["count"]
        offset = 128 + (header["schema"] + 7 & ~7)
        values = {}
        for i, entry in enumerate(schema):
            assert {"name", "type", "unit", "help", "labels"} <= set(entry)
            assert entry["type"] in ("counter", "gauge", "bucket")
            assert entry["help"]
            (value,) = struct.unpack_from("<d" if entry.get("float") else "<Q", data, offset + 8 * i)
            labels = ",".join(f"{k}={v}" for k, v in sorted(entry["labels"].items()))
            name = f"{entry['name']}{{{labels}}}" if labels else entry["name"]
            assert name not in values, f"{name} twice"
            values[name] = value
        return header, values
    finally:
        os.close(fd)


@pytest.fixture(scope="module")
def daemon(kvd_daemon_module: MakeDaemon) -> Daemon:
    return kvd_daemon_module(max_bytes="8MiB", tier="64MiB")


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    with daemon.client() as made:
        yield made


def start_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19])


def test_an_independent_reader_calls_it_sound(daemon: Daemon) -> None:
    header, values = read(daemon.segment)
    assert header["pid"] == daemon.pid
    assert header["start"] == start_of(daemon.pid)
    assert header["namespace"] == os.stat(f"/proc/{daemon.pid}/ns/pid").st_ino
    assert header["flags"] == 0
    assert header["locked"]
    assert values["arena_bytes_limit"] == 8 << 20


def test_the_share_of_a_tier_that_is_taken_or_that_there_is_no_limit() -> None:
    assert (Usage(1, 4, 1).fraction, Usage(5, 0, 1).fraction, Usage(known=False).fraction) == (0.25, -1.0, -1.0)
    with running(RamTier()) as daemon, daemon.client() as client:
        assert client.stats()["tiers"][0]["usage_fraction"] == -1.0


def test_it_says_what_the_client_is_told(daemon: Daemon, client: Client) -> None:
    client.put_many([(n.to_bytes(32, "big"), b"x" * 10_000) for n in range(20)], wait="tier")
    client.get_many([n.to_bytes(32, "big") for n in range(30)])
    client.put(b"k" * 32, b"v", retention="none")
    told = client.stats()

    def flat() -> dict[str, float]:
        made = {name: value for name, value in told.items() if isinstance(value, int | float)}
        for tier in told["tiers"]:
            labels = f"{{tier={tier['name']},type={tier['type']}}}"
            made |= {f"tier_{name}{labels}": value for name, value in tier.items() if isinstance(value, int | float)}
        return made

    def agrees() -> bool:
        _, values = read(daemon.segment)
        return all(values[name] == value for name, value in flat().items() if name in values)

    wait_until(agrees, what="segment and client to agree")
    _, values = read(daemon.segment)
    assert len(set(flat()) & set(values)) > 30
    assert values["rejections_total{reason=retention_none}"] == told["rejections_total"]["retention_none"] == 1
    assert values["entries_by_retention{retention=long}"] == told["entries_by_retention"]["long"]


def test_a_request_shows_within_a_tenth_of_a_second_and_silence_keeps_the_heart_beating(daemon: Daemon, client: Client) -> None:
    before = read(daemon.segment)[1]["gets_total"]
    client.get(b"k" * 32)
    wait_until(lambda: read(daemon.segment)[1]["gets_total"] == before + 1, timeout_s=1, what="the get to show")
    beats = set()
    end = time.monotonic() + 2.2
    while time.monotonic() < end:
        header, _ = read(daemon.segment)
        assert time.time_ns() - header["heartbeat"] < 2 * 10**9
        beats.add(header["heartbeat"])
        time.sleep(0.05)
    assert len(beats) >= 3


def test_it_is_never_torn_under_load(daemon: Daemon, client: Client) -> None:
    """hits + misses == gets in every single reading, while they race."""
    end = time.monotonic() + 1.0
    readings = 0
    while time.monotonic() < end:
        client.get_many([n.to_bytes(32, "big") for n in range(25)])
        _, values = read(daemon.segment)
        assert values["hits_total"] + values["misses_total"] == values["gets_total"]
        readings += 1
    assert readings > 20


def test_counters_only_rise_and_gauges_come_back(daemon: Daemon, client: Client) -> None:
    client.put(b"k" * 32, b"x" * 10_000)
    first = client.stats()
    with client.read([b"k" * 32]):
        assert client.stats()["leases_active"] == first["leases_active"] + 1
    client.delete([b"k" * 32])
    last = client.stats()
    assert last["leases_active"] == first["leases_active"]
    assert last["entries"] == first["entries"] - 1
    for name, value in first.items():
        if name.endswith("_total") and isinstance(value, int):
            assert last[name] >= value


def test_it_is_gone_after_a_clean_stop_and_replaced_after_a_kill(kvd_daemon: MakeDaemon) -> None:
    daemon = kvd_daemon(max_bytes="4MiB")
    inode = daemon.segment.stat().st_ino
    daemon.kill9()
    assert daemon.segment.exists()
    assert not read(daemon.segment)[0]["locked"]
    daemon.start()
    assert daemon.segment.stat().st_ino != inode
    assert read(daemon.segment)[0]["pid"] == daemon.pid
    daemon.stop()
    assert not daemon.segment.exists()


def test_a_segment_that_somebody_removed_is_made_anew(kvd_daemon: MakeDaemon) -> None:
    daemon = kvd_daemon(max_bytes="4MiB")
    with daemon.client() as client:
        assert client.put(os.urandom(32), b"x")
        daemon.segment.unlink()
        wait_until(daemon.segment.exists, what="the segment to be there again")
        assert client.stats()["sets_total"] == 1
    told = daemon.run("status", "--json")
    assert (told.rc, told.json()["health"], told.json()["sets_total"]) == (0, "HEALTH_OK", 1)
