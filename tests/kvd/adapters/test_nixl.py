"""`nixl_store` and `nixl_store_dynamic` on NIXL's POSIX back end: the contract's own examples, O_DIRECT, full disks, owners."""

import contextlib
import json
import logging
import mmap
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvd.tiers.adapters import registry
from kvd.tiers.adapters.base import Adapter, AdapterConfigError, AdapterError, Item, Loaded, Stored, Want
from kvd.tiers.adapters.kind import Eviction
from kvd.tiers.adapters.nixl import Transfers
from kvd.tiers.adapters.nixl_dynamic import NixlDynamicAdapter
from kvd.tiers.adapters.nixl_store import MANIFEST, NixlStoreAdapter
from tests.kvd.adapters.test_conformance import SIZES, body, get, ident, put
from tests.kvd.tiers.ram_tier import running
from tests.support.processes import run_cli, run_python
from tests.support.servers import MotoServer, Server

pytestmark = pytest.mark.real("nixl")

CONTRACT = (
    '{"type": "nixl_store", "backend": "POSIX", '
    '"backend_params": {"file_path": "/data/lmcache/l2", "use_direct_io": "false"}, "pool_size": 64}'
)
"""The example of the contract, as it stands there."""


def contract(folder: Path, **more: Any) -> Adapter:
    spec = json.loads(CONTRACT.replace("/data/lmcache/l2", str(folder)))
    (adapter,) = registry.build([{**spec, **more}])
    return adapter


@contextlib.contextmanager
def opened(adapter: Adapter) -> Iterator[Adapter]:
    adapter.open()
    try:
        yield adapter
    finally:
        adapter.close()


def pool(folder: Path, files: int = 8, **more: Any) -> NixlStoreAdapter:
    return NixlStoreAdapter("pool", folder, files, Transfers("pool", "nixl_store", "POSIX", {}), **more)


def taken(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*.bin"))


def test_the_contracts_own_pool_holds_as_many_chunks_as_it_has_files(tmp_path: Path) -> None:
    size = 1 << 20
    with opened(contract(tmp_path / "l2")) as adapter:
        assert put(adapter, 0, b"tail").ok, "a short value first does not settle the size of the others"
        adapter.delete([ident(0)])
        for number in range(64):
            assert put(adapter, number, body(number, size)).ok
        assert adapter.usage().entries == 64
        assert adapter.usage().bytes_used == 64 * (4096 + size) == adapter.usage().bytes_limit
        assert all(get(adapter, number, size) == body(number, size) for number in range(64))
        assert put(adapter, 64, body(64, size)).ok
        assert adapter.counters.evictions == 1
        assert get(adapter, 0, size) is Loaded.MISS
        assert taken(tmp_path) == adapter.usage().bytes_used
        before = adapter.usage()
    with opened(contract(tmp_path / "l2")) as adapter:
        assert adapter.usage() == before
        assert get(adapter, 64, size) == body(64, size)
        assert put(adapter, 65, body(65, size)).ok
        assert adapter.counters.evictions == 1
        assert adapter.delete([ident(number) for number in range(66)]) == 64
        assert taken(tmp_path) == 0


def test_the_contracts_eviction_counts_files(tmp_path: Path) -> None:
    rule = {"eviction_policy": "LRU", "trigger_watermark": 0.8, "eviction_ratio": 0.2}
    with opened(contract(tmp_path / "l2", eviction=rule)) as adapter:
        for number in range(51):
            assert put(adapter, number, body(number, 3000 if number % 2 else 60_000)).ok
        assert adapter.counters.evictions == 0
        assert put(adapter, 51).ok
        assert adapter.counters.evictions == 11, "a fifth of 51 files"


@pytest.mark.parametrize(
    "given",
    [
        CONTRACT,
        (
            '{"type": "nixl_store", "backend": "GDS", "backend_params": {"file_path": "/data/nvme/l2", "use_direct_io": "true"},'
            ' "pool_size": 128}'
        ),
        (
            '{"type": "nixl_store", "backend": "POSIX",'
            ' "backend_params": {"file_path": "/data/lmcache/l2", "use_direct_io": "false"},'
            ' "pool_size": 128, "eviction": {"eviction_policy": "LRU", "trigger_watermark": 0.8, "eviction_ratio": 0.2}}'
        ),
        (
            '{"type": "nixl_store", "backend": "GDS", "backend_params": {"file_path": "/data/nvme/l2", "use_direct_io": "true"},'
            ' "pool_size": 256, "eviction": {"eviction_policy": "LRU", "trigger_watermark": 0.9, "eviction_ratio": 0.1}}'
        ),
    ],
)
def test_every_example_of_the_contract_is_understood(given: str) -> None:
    (adapter,) = registry.build([registry.parse_spec(given)])
    assert adapter.type == "nixl_store"


@pytest.mark.skipif(os.geteuid() != 0, reason="changing owner needs root")
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_directory_that_may_not_be_written(tmp_path: Path, dynamic: bool) -> None:
    """As another user: root may write everywhere."""
    spec: dict[str, Any] = {"type": "nixl_store_dynamic" if dynamic else "nixl_store", "backend": "POSIX"}
    spec["backend_params"] = {"file_path": ".", **({"max_capacity_gb": 1} if dynamic else {})}
    spec |= {} if dynamic else {"pool_size": 4}
    code = (
        "import os\n"
        "from kvd.tiers.adapters import registry\n"
        "from kvd.tiers.adapters.base import AdapterError\n"
        f"os.chdir({str(tmp_path)!r}); os.setgroups([])\n"
        f"(adapter,) = registry.build([{spec!r}])\n"
        "(getattr(adapter, '_transfers', None) or adapter._pool.transfers).open()  # the library lies where only root reads\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "try: adapter.open()\n"
        "except AdapterError as error: print(error.message)\n"
    )
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    ran = run_python(code)
    assert ran.stdout.strip() == f"{spec['type']}: cannot use {tmp_path}: Permission denied", ran.stderr


def test_a_daemon_with_the_contracts_pool(tmp_path: Path) -> None:
    keys = [bytes([i]) * 32 for i in range(40)]
    with running(contract(tmp_path / "l2"), max_bytes=32 << 20) as daemon, daemon.client() as client:
        for i, key in enumerate(keys):
            assert client.put(key, bytes([i]) * 300_000)
        client.flush()
        daemon.evict_all()
        assert client.prefix(keys).length == 40
        assert client.get_many(keys) == [bytes([i]) * 300_000 for i in range(40)]
    with running(contract(tmp_path / "l2"), max_bytes=4 << 20) as daemon, daemon.client() as client:
        assert client.get_many(keys) == [bytes([i]) * 300_000 for i in range(40)]


@pytest.mark.parametrize("given", [4096, "4KiB", 70_000, 0, "x"])
def test_a_file_too_small_for_any_chunk_is_refused_at_the_start(tmp_path: Path, given: Any) -> None:
    with pytest.raises(AdapterConfigError, match=r"adapter nixl_store \(nixl_store\): field 'backend_params': 'file_size'"):
        contract(tmp_path, backend_params={"file_path": str(tmp_path), "file_size": given})


def test_a_value_larger_than_its_file_is_refused_and_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bounded = {"file_path": str(tmp_path / "l2"), "use_direct_io": "false", "file_size": "68KiB"}
    with caplog.at_level(logging.WARNING), opened(contract(tmp_path, backend_params=bounded)) as adapter:
        assert put(adapter, 1, bytes(64 << 10)).ok
        for number in (2, 3):
            assert put(adapter, number, bytes((64 << 10) + 1)) == Stored(False, "too_large")
        assert adapter.usage().bytes_limit == 64 * (68 << 10)
    assert caplog.text.count("leave file_size out, or make it 73728 at least") == 1


@pytest.mark.parametrize("dynamic", [False, True])
def test_direct_io_from_aligned_memory_and_from_any(tmp_path: Path, dynamic: bool) -> None:
    arena = memoryview(mmap.mmap(-1, 1 << 20))
    if dynamic:
        transfers = Transfers("direct", "nixl_store_dynamic", "POSIX", {})
        adapter: Adapter = NixlDynamicAdapter("direct", tmp_path / "l2", 64 << 20, transfers, direct=True)
    else:
        adapter = pool(tmp_path / "l2", 2 * len(SIZES), direct=True)
    adapter.attach(arena)
    with opened(adapter):
        for number, size in enumerate(SIZES):
            value = body(number, size)
            room = -(-size // 4096) * 4096
            arena[: len(arena)] = b"\xee" * len(arena)
            arena[:size] = value
            arena[size:room] = bytes(room - size)
            assert adapter.store([Item(ident(number), arena[:size], padded=arena[:room])])[0].ok
            assert put(adapter, 100 + number, value).ok
            for key in (number, 100 + number):
                assert get(adapter, key, size) == value
                arena[:size] = b"\xee" * size
                assert adapter.load([Want(ident(key), arena[:size], arena[:room])]) == [Loaded.OK]
                assert bytes(arena[:size]) == value


def test_one_daemon_a_pool(tmp_path: Path) -> None:
    with opened(pool(tmp_path / "l2")) as one:
        with pytest.raises(AdapterError, match="in use by another daemon"):
            pool(tmp_path / "l2").open()
        assert put(one, 1).ok
    with opened(pool(tmp_path / "l2")) as again:
        assert get(again, 1) == body(1)


def test_a_larger_and_a_smaller_pool(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(pool(tmp_path / "l2", 4)) as adapter:
        for number in range(4):
            put(adapter, number)
    with opened(pool(tmp_path / "l2", 8)) as adapter:
        for number in range(4, 8):
            assert put(adapter, number).ok
        assert all(get(adapter, number) == body(number) for number in range(8))
    with opened(pool(tmp_path / "l2", 2)) as adapter:
        assert adapter.usage().entries == 2
        assert "6 values dropped with the files of the larger pool" in caplog.text
        assert put(adapter, 9).ok
        assert adapter.usage().entries == 2
        assert len(list((tmp_path / "l2").glob("obj_*"))) == 2, "nobody would find what is in the others"


def test_somebody_elses_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(AdapterConfigError, match=r"is no kvtools.nixl folder and holds 'thesis.tex'"):
        pool(tmp_path).open()
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("{", "is damaged"),
        ('{"format": "kvtools.nixl", "version": 1}', "is damaged"),
        (
            '{"format": "kvtools.nixl", "version": 9, "generation": 1}',
            "holds kvtools.nixl version 9, this kvd reads kvtools.nixl version 1",
        ),
    ],
)
def test_another_manifest_is_refused_by_name(tmp_path: Path, text: str, line: str) -> None:
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(AdapterConfigError, match=line):
        pool(tmp_path).open()


def test_fs_and_the_dynamic_store_do_not_read_each_other(tmp_path: Path) -> None:
    dynamic = {"type": "nixl_store_dynamic", "backend": "POSIX"}
    (one,) = registry.build([{**dynamic, "backend_params": {"file_path": str(tmp_path / "l2"), "max_capacity_gb": "1"}}])
    with opened(one):
        put(one, 1)
    (other,) = registry.build([{"type": "fs", "base_path": str(tmp_path / "l2")}])
    with pytest.raises(AdapterConfigError, match=r"is no kvtools.fs folder"):
        other.open()


def test_files_that_are_not_to_be_kept(tmp_path: Path) -> None:
    parameters = {"file_path": str(tmp_path / "l2"), "use_direct_io": "false", "max_capacity_gb": 0.01, "shard_dirs": "true"}
    spec = {"type": "nixl_store_dynamic", "backend": "posix", "backend_params": parameters}
    for keep in (True, False, True):
        (adapter,) = registry.build([{**spec, "persist_enabled": keep}])
        with opened(adapter):
            put(adapter, 1)
        assert len(list((tmp_path / "l2").rglob("*.kv"))) == keep


@pytest.mark.parametrize("thing", ["directory", "link", "fifo"])
def test_something_else_in_a_slots_place(tmp_path: Path, thing: str) -> None:
    (tmp_path / "elsewhere").write_bytes(b"mine")
    with opened(pool(tmp_path / "l2", 1)):
        pass
    slot = tmp_path / "l2" / "obj_0.bin"
    {"directory": slot.mkdir, "link": lambda: slot.symlink_to(tmp_path / "elsewhere"), "fifo": lambda: os.mkfifo(slot)}[thing]()
    with opened(pool(tmp_path / "l2", 1)) as adapter:
        assert adapter.usage().entries == 0
        with pytest.raises(AdapterError):
            put(adapter, 1)
        assert get(adapter, 1) is Loaded.MISS
    assert (tmp_path / "elsewhere").read_bytes() == b"mine"


def test_a_link_in_the_place_of_a_value_is_not_followed_when_that_goes(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(b"mine")
    with opened(pool(tmp_path / "l2", 1)) as adapter:
        put(adapter, 1)
        (tmp_path / "l2" / "obj_0.bin").unlink()
        (tmp_path / "l2" / "obj_0.bin").symlink_to(tmp_path / "elsewhere")
        assert adapter.delete([ident(1)]) == 1
    assert (tmp_path / "elsewhere").read_bytes() == b"mine"


def test_few_descriptors_for_many_files(tmp_path: Path) -> None:
    with opened(pool(tmp_path / "l2", 500)) as adapter:
        before = len(os.listdir("/proc/self/fd"))
        for number in range(300):
            assert put(adapter, number, b"x").ok
        assert len(os.listdir("/proc/self/fd")) <= before + 2


def test_what_was_pinned_by_a_load_is_not_given_away(tmp_path: Path) -> None:
    """Loads while every file changes hands: bytes that were stored, or nothing."""
    from concurrent.futures import ThreadPoolExecutor

    with opened(pool(tmp_path / "l2", 3)) as adapter:

        def write(number: int) -> None:
            put(adapter, number % 12, bytes([number % 12]) * 40_000)

        def read(number: int) -> bool:
            value = get(adapter, number % 12, 40_000)
            assert isinstance(value, Loaded) or value == bytes([number % 12]) * 40_000
            return isinstance(value, bytes)

        with ThreadPoolExecutor(4) as writers, ThreadPoolExecutor(4) as readers:
            list(zip(writers.map(write, range(400)), readers.map(read, range(400)), strict=True))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    mount = tmp_path / "mount"
    mount.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(mount)]).returncode:
        pytest.skip("cannot mount here")
    try:
        yield mount / "l2"
    finally:
        subprocess.run(["umount", str(mount)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_full_disk_evicts_as_if_it_were_the_limit(small_disk: Path, dynamic: bool, caplog: pytest.LogCaptureFixture) -> None:
    def make(rule: Eviction | None) -> Adapter:
        if dynamic:
            transfers = Transfers("small", "nixl_store_dynamic", "POSIX", {})
            return NixlDynamicAdapter("small", small_disk, 64 << 20, transfers, eviction=rule)
        return pool(small_disk, 64, eviction=rule)

    with opened(make(None)) as adapter:
        for number in range(30):
            assert put(adapter, number, body(number, 200_000)).ok
        assert get(adapter, 29, 200_000) == body(29, 200_000)
        assert adapter.counters.evictions > 15
        assert caplog.text.count("no room left on its file system") == 1
    with opened(make(Eviction("noop"))) as adapter:
        reasons = [put(adapter, number, body(number, 200_000)).reason for number in range(50, 65)]
        assert set(reasons) <= {"", "full"}
        assert reasons[-1] == "full"


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ({"backend": "NFS"}, "field 'backend': not one of POSIX, GDS, GDS_MT, HF3FS, OBJ"),
        ({"backend": "OBJ"}, "field 'backend_params': 'bucket' is missing"),
        ({"pool_size": 0}, "field 'pool_size'"),
        ({"backend_params": {}}, "field 'backend_params': 'file_path' is missing"),
        (
            {"backend_params": {"file_path": "/x", "use_direct_io": "perhaps"}},
            "field 'backend_params': 'use_direct_io': not true or",
        ),
    ],
)
def test_what_cannot_be_meant(tmp_path: Path, more: dict[str, Any], line: str) -> None:
    with pytest.raises(AdapterConfigError) as caught:
        contract(tmp_path, **more)
    assert caught.value.message.startswith(f"adapter nixl_store (nixl_store): {line}")


def test_a_dynamic_store_needs_a_capacity() -> None:
    with pytest.raises(AdapterConfigError, match="'max_capacity_gb' is missing"):
        registry.build([{"type": "nixl_store_dynamic", "backend": "POSIX", "backend_params": {"file_path": "/x"}}])


def test_a_parameter_the_back_end_does_not_know(tmp_path: Path) -> None:
    adapter = contract(tmp_path, backend_params={"file_path": str(tmp_path / "l2"), "use_direct": "true"})
    with pytest.raises(AdapterConfigError, match="field 'backend_params': unknown 'use_direct'") as caught:
        adapter.open()
    assert caught.value.hint == "did you mean 'use_direct_io'?"


@pytest.mark.real("kvd")
@pytest.mark.skipif(bool(list(Path("/dev").glob("nvidia[0-9]*"))), reason="here GDS may well start")
def test_a_back_end_that_does_not_start_ends_the_start(tmp_path: Path) -> None:
    spec = CONTRACT.replace("POSIX", "GDS").replace("/data/lmcache", str(tmp_path))
    ran = run_cli("kvd", "serve", "--socket", str(tmp_path / "s"), "--max-bytes", "1M", "--l2-adapter", spec)
    assert ran.rc == 2
    assert "kvd: error: adapter nixl_store (nixl_store): NIXL's back end GDS does not start: NIXL_ERR_NOT_FOUND" in ran.stderr


def test_the_same_memory_through_two_agents() -> None:
    """Two tiers of one daemon register the one arena each for itself."""
    arena = np.zeros(1 << 20, np.uint8)
    agents = [Transfers(name, "nixl_store", "POSIX", {}) for name in ("one", "two")]
    for agent in agents:
        agent.attach(memoryview(arena))
        agent.open()
    for agent in agents:
        agent.close()
        with pytest.raises(OSError, match="closed"):
            agent.read(0, [(0, memoryview(arena))])


def bucket_pool(server: MotoServer, bucket: str, **more: Any) -> Adapter:
    parameters = {
        "bucket": bucket,
        "prefix": "some/where/",
        "endpoint_override": f"http://127.0.0.1:{server.port}",
        "scheme": "http",
        "region": "us-east-1",
        "use_virtual_addressing": "false",
        "access_key": "env:KVT_ACCESS",
        "secret_key": "test",
        **more,
    }
    (adapter,) = registry.build([{"type": "nixl_store", "backend": "OBJ", "backend_params": parameters, "pool_size": 4}])
    return adapter


@pytest.mark.real("s3")
def test_a_pool_of_objects(servers: dict[str, Server], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVT_ACCESS", "test")
    server = servers["s3"].wait()
    assert isinstance(server, MotoServer)
    bucket = "kvt-" + os.urandom(8).hex()
    server.request("PUT", f"/{bucket}")
    with opened(bucket_pool(server, bucket)) as adapter:
        for number, size in enumerate((0, 5000, 4096, 300_001)):
            assert put(adapter, number, body(number, size)).ok
            assert get(adapter, number, size) == body(number, size)
        assert put(adapter, 4).ok, "evicts"
        assert adapter.usage().entries == 4
        assert get(adapter, 0, 0) is Loaded.MISS
        assert put(adapter, 1, b"shorter").ok
        assert adapter.delete([ident(2)]) == 1
    with opened(bucket_pool(server, bucket)) as adapter:
        assert adapter.usage().entries == 3
        assert [get(adapter, 1, 7), get(adapter, 3, 300_001), get(adapter, 4)] == [b"shorter", body(3, 300_001), body(4)]
        assert get(adapter, 2, 4096) is Loaded.MISS
        for slot in range(4):  # cut off behind the header, and a foreign one
            raw = server.request("GET", f"/{bucket}/some/where/obj_{slot}")
            if raw[8:72] == ident(3):
                server.request("PUT", f"/{bucket}/some/where/obj_{slot}", raw[:5000])
            if raw[8:72] == ident(4):
                server.request("PUT", f"/{bucket}/some/where/obj_{slot}", os.urandom(len(raw)))
        assert get(adapter, 3, 300_001) is Loaded.CORRUPT
        assert get(adapter, 4) is Loaded.CORRUPT
        assert put(adapter, 3, body(3, 300_001)).ok
        assert get(adapter, 3, 300_001) == body(3, 300_001)
    with pytest.raises(AdapterConfigError, match="unknown 'buckett'"):
        bucket_pool(server, bucket, buckett="x").open()
    server.request("PUT", f"/{bucket}/some/where/manifest", b"{}")
    with pytest.raises(AdapterConfigError, match="some/where/manifest is none"):
        bucket_pool(server, bucket).open()
