"""Tiers beside what they stand on, in turn and in the same run: software cost, not the medium's.

fs: 256 MiB of values through the adapter, by as many threads as a tier has, beside one thread that writes a file and renames
it, and reads it into a buffer. In memory (tmpfs), where the file system is quick and what we add shows most.
resp, s3, mooncake_store: the same bytes through the library's own client alone, one call a value, from as many threads; on a
real redis-server, moto's S3 and a Mooncake pool (its quickest calls: in place, on registered memory), over loopback. Every
load is verified by the adapter; the yardstick verifies nothing.
hit: what five tiers add to a look-up and a lease of keys that are in the arena.
"""

import contextlib
import json
import mmap
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from kvd.store.retention import Retention
from kvd.tiers.adapters import registry
from kvd.tiers.adapters.base import Adapter, Item, Loaded, Want
from kvd.tiers.adapters.fs import FsAdapter
from kvd.tiers.adapters.nixl import address
from kvd.wire.client import Client
from kvtools.units import format_size
from tests.bench.disk import identity
from tests.bench.measure import Result, in_turn, medians
from tests.support.daemon import Daemon
from tests.support.servers import MooncakePool, MotoServer, RedisServer

SIZES = (1 << 20, 16 << 20, 64 << 20)
ROUND_BYTES = 256 << 20
CALL_BYTES = 16 << 20
STORE_THREADS, LOAD_THREADS = 4, 8


class Values:
    """The values of one size: what is stored, and buffers to load into."""

    def __init__(self, size: int, total: int) -> None:
        self.size = size
        self.count = total // size
        pages = memoryview(mmap.mmap(-1, 2 * total))
        np.frombuffer(pages[:total], np.uint8)[:] = np.random.default_rng(size).integers(0, 255, total, dtype=np.uint8)
        np.frombuffer(pages[total:], np.uint8)[:] = 1  # every page is there before it is timed
        self.data = [pages[i * size : (i + 1) * size] for i in range(self.count)]
        self.into = [pages[total + i * size : total + (i + 1) * size] for i in range(self.count)]

    def calls(self) -> list[range]:
        """What one call of the adapter gets: 16 MiB of values, or one."""
        step = max(1, CALL_BYTES // self.size)
        return [range(start, min(start + step, self.count)) for start in range(0, self.count, step)]


def measure(*, quick: bool = False) -> Iterator[Result]:
    """fs and Mooncake at three sizes, Redis and S3 at two; then what tiers cost a hit."""
    rounds = 3 if quick else 7
    for size in SIZES:
        yield from _fs(Values(size, ROUND_BYTES), rounds)
    for size in SIZES[:2]:
        yield from _redis(Values(size, ROUND_BYTES // 4), rounds)
    for size in SIZES[:2]:
        yield from _s3(Values(size, ROUND_BYTES // 8), rounds)
    for size in SIZES:
        yield from _mooncake(Values(size, ROUND_BYTES // 4), rounds)
    yield from _hits(rounds)


def _fs(values: Values, rounds: int) -> Iterator[Result]:
    root = Path(tempfile.mkdtemp(prefix="kvd-bench-", dir=os.environ.get("KVTOOLS_BENCH_MEMORY", "/dev/shm")))
    try:
        (root / "plain").mkdir()
        adapter = FsAdapter("fs", root / "fs", 4 * ROUND_BYTES)
        adapter.open()
        plain = [root / "plain" / f"{i}.bin" for i in range(values.count)]
        floors = (lambda: _write_files(plain, values.data), lambda: _read_files(plain, values.into))
        yield from _both("fs", "one thread's plain files", adapter, values, floors, (1.0, 1.5), rounds)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _write_files(paths: Sequence[Path], data: Sequence[memoryview]) -> None:
    for path, body in zip(paths, data, strict=True):
        draft = path.with_suffix(".tmp")
        with draft.open("wb", buffering=0) as file:
            file.write(body)
        draft.rename(path)


def _read_files(paths: Sequence[Path], into: Sequence[memoryview]) -> None:
    for path, buffer in zip(paths, into, strict=True):
        with path.open("rb", buffering=0) as file:
            file.readinto(buffer)


def _redis(values: Values, rounds: int) -> Iterator[Result]:
    import redis

    server = RedisServer()
    server.start()
    try:
        server.wait()
        (adapter,) = registry.build([{"type": "resp", "host": "127.0.0.1", "port": server.port, "timeout": 60}])
        adapter.open()
        with contextlib.closing(redis.Redis(port=server.port)) as client, ThreadPoolExecutor(LOAD_THREADS) as threads:

            def put(i: int) -> None:
                client.set(f"plain:{i}", values.data[i])

            def get(i: int) -> None:
                values.into[i][:] = client.get(f"plain:{i}")

            floors = _floors(threads, values, put, get)
            yield from _both("resp", "redis-py alone", adapter, values, floors, (0.8, 0.8), rounds)
        adapter.close()
    finally:
        server.remove()


def _s3(values: Values, rounds: int) -> Iterator[Result]:
    import obstore
    from obstore.store import S3Store

    server = MotoServer()
    server.start()
    try:
        server.wait()
        bucket = "bench-" + secrets.token_hex(4)
        server.request("PUT", f"/{bucket}")
        where = {"endpoint": f"http://127.0.0.1:{server.port}", "access_key_id": "test", "secret_access_key": "test"}
        store = S3Store(bucket, region="us-east-1", **where, client_options={"allow_http": True})
        spec = {"type": "s3", "bucket": bucket, "s3_endpoint": where["endpoint"], "timeout": 60, "s3_num_io_threads": LOAD_THREADS}
        (adapter,) = registry.build([spec | {"aws_access_key_id": "test", "aws_secret_access_key": "test"}])
        adapter.open()
        with ThreadPoolExecutor(LOAD_THREADS) as threads:

            def put(i: int) -> None:
                obstore.put(store, f"plain/{i}", values.data[i], use_multipart=False)

            def get(i: int) -> None:
                values.into[i][:] = memoryview(obstore.get(store, f"plain/{i}").bytes())

            floors = _floors(threads, values, put, get)
            yield from _both("s3", "obstore alone", adapter, values, floors, (0.8, 0.8), rounds)
        adapter.close()
    finally:
        server.remove()


def _mooncake(values: Values, rounds: int) -> Iterator[Result]:
    pool = MooncakePool("1 GB")
    pool.start()
    try:
        pool.wait()
        where = {"master_server_address": f"127.0.0.1:{pool.port}", "local_hostname": "127.0.0.1", "timeout": 60}
        (adapter,) = registry.build([{"type": "mooncake_store", **where}])
        adapter.open()
        client = pool.client()
        for view in (values.data[0], values.into[0]):  # each the first of a row without gaps
            client.register_buffer(address(view), values.size * values.count)
        with ThreadPoolExecutor(LOAD_THREADS) as threads:

            def put(i: int) -> None:
                assert client.upsert_from(f"plain/{i}", address(values.data[i]), values.size) == 0

            def get(i: int) -> None:
                assert client.get_into(f"plain/{i}", address(values.into[i]), values.size) == values.size

            floors = _floors(threads, values, put, get)
            yield from _both("mooncake", "Mooncake's own client alone", adapter, values, floors, (0.8, 0.8), rounds)
        adapter.close()
    finally:
        pool.remove()


HIT_KEYS = 1024


def _hits(rounds: int) -> Iterator[Result]:
    """What five tiers add to a look-up and a lease of keys that are in the arena."""
    root = Path(tempfile.mkdtemp(prefix="kvd-bench-"))
    slots = {"slot_bytes": "64KiB"}
    five: list[dict[str, object]] = [
        {"type": "fs", "base_path": str(root / "fs"), "max_bytes": "1GiB"},
        {"type": "raw_block", "device_path": str(root / "raw"), "capacity_bytes": "256MiB", **slots},
        {"type": "dax", "device_path": str(root / "dax"), "max_dax_size_gb": 0.25, **slots},
        {"type": "mock", "max_size_gb": 1, "mock_bandwidth_gb": 10},
        {
            "type": "nixl_store",
            "backend": "POSIX",
            "backend_params": {"file_path": str(root / "nixl"), "use_direct_io": "false"},
            "pool_size": 2 * HIT_KEYS,
        },
    ]
    keys = [i.to_bytes(32, "big") for i in range(HIT_KEYS)]
    plain = Daemon(max_bytes="128MiB")
    tiered = Daemon(*(word for spec in five for word in ("--l2-adapter", json.dumps(spec))), max_bytes="128MiB")
    try:
        clients = [daemon.start().client(namespace="bench") for daemon in (plain, tiered)]
        for client in clients:
            assert all(client.put_many([(key, key * 128) for key in keys]))
            client.flush()

        def hit(client: Client) -> None:
            with client.read(keys) as lease:
                assert lease.views[-1] is not None

        for word, calls in (
            ("lease", [partial(hit, client) for client in clients]),
            ("prefix", [partial(client.prefix, keys) for client in clients]),
        ):
            none, some = medians(calls, rounds=rounds)
            more = (some - none) / HIT_KEYS * 1e6
            what = f"a {word} of {HIT_KEYS} keys in the arena, us a key: what five tiers add"
            yield Result(
                f"hit_{word}_five_tiers", what, some / HIT_KEYS * 1e6, "us", none / HIT_KEYS * 1e6, more, 10.0, at_most=True
            )
        for client in clients:
            client.close()
    finally:
        plain.remove()
        tiered.remove()
        shutil.rmtree(root, ignore_errors=True)


def _floors(
    threads: ThreadPoolExecutor, values: Values, put: Callable[[int], None], get: Callable[[int], None]
) -> tuple[Callable[[], None], Callable[[], None]]:
    everything = [range(i, i + 1) for i in range(values.count)]
    return (
        partial(_all, threads, lambda call: put(call[0]), everything),
        partial(_all, threads, lambda call: get(call[0]), everything),
    )


def _both(
    name: str,
    beside: str,
    adapter: Adapter,
    values: Values,
    floors: tuple[Callable[[], None], Callable[[], None]],
    budgets: tuple[float, float],
    rounds: int,
) -> Iterator[Result]:
    """Store and load of all values, each beside its floor."""
    items = [Item(identity(i), values.data[i].toreadonly(), Retention.LONG, padded=values.data[i]) for i in range(values.count)]
    wants = [Want(identity(i), values.into[i], values.into[i]) for i in range(values.count)]
    with ThreadPoolExecutor(STORE_THREADS) as writers, ThreadPoolExecutor(LOAD_THREADS) as readers:

        def store(call: range) -> None:
            assert all(stored.ok for stored in adapter.store([items[i] for i in call]))

        def load(call: range) -> None:
            assert set(adapter.load([wants[i] for i in call])) == {Loaded.OK}

        jobs = (
            ("store", partial(_all, writers, store, values.calls())),
            ("load", partial(_all, readers, load, values.calls())),
        )
        for (word, job), floor, budget in zip(jobs, floors, budgets, strict=True):
            took, plain, ratio = in_turn(job, floor, rounds=rounds)
            total = values.size * values.count
            yield Result(
                f"{name}_{word}_{format_size(values.size).replace(' ', '')}",
                f"{name}: {word} of {format_size(values.size)} values, beside {beside}",
                total / took,
                "B/s",
                total / plain,
                ratio,
                budget,
            )


def _all(threads: ThreadPoolExecutor, work: Callable[[range], None], calls: Sequence[range]) -> None:
    list(threads.map(work, calls))
