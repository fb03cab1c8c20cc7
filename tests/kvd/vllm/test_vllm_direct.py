"""A real engine that moves its chunks past the daemon: it gets them back after every restart, and answers the same.

Its memory is the host's, so what moves the bytes is plain direct I/O; staging on a device is tried with torch's CPU device
and the stand-in for hipFile and cuFile, whose "device memory" that is.
"""

import threading
import types
import warnings
from typing import Any

import pytest

from kvd.connector import device_mover
from kvd.connector.direct_io import LibraryIO
from kvd.connector.link import wait_up
from kvd.connector.metrics import Counters
from kvd.connector.plan import Load, Move, Save
from kvd.connector.settings import read_settings
from kvd.connector.staging import DeviceStaging
from tests.kvd.connector.gds import StandIn, built, standin
from tests.kvd.vllm.test_vllm_layouts import DENSE, block, engine
from tests.support.daemon import MakeDaemon
from tests.support.engine import Engine, EngineError, model, prompt
from tests.support.processes import wait_until

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the engine's imports warn of what its own libraries do
    import torch
    from vllm.v1.kv_cache_layout import KVCacheLayout

    from kvd.connector.attach import Links, find_layouts
    from kvd.connector.device_mover import DeviceMover
    from kvd.connector.groups import groups_of, unit_bytes_of
    from kvd.connector.keys import DIRECT_CHUNK_BYTES, chunk_tokens
    from kvd.connector.worker import Worker

__all__ = ["built", "standin"]

pytestmark = [pytest.mark.vllm, pytest.mark.real("vllm"), pytest.mark.real("kvd"), pytest.mark.timeout(240)]


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert (one["tokens"], one["logprobs"]) == (other["tokens"], other["logprobs"])


@pytest.mark.parametrize(("kind", "chunk"), [("llama", "auto"), ("sliding", "256")])
def test_chunks_in_files_survive_engine_and_daemon(kvd_daemon: MakeDaemon, kind: str, chunk: str) -> None:
    daemon = kvd_daemon(max_bytes="64MiB", tier="1GiB")
    environ = {"KVD_AIS": "require", "KVD_CHUNK_TOKENS": chunk, "KVD_DIRECT_STAGING": "64MiB"}
    prompts = [prompt(1000, 1), prompt(1024, 2)]
    with Engine(model(kind), daemon.socket, env=environ) as first:
        for one in prompts:
            first.generate([one])
        own = [first.one(one) for one in prompts]
        assert [out["cached"] for out in own] == [992, 992]
        assert "kvd: GPU-direct by posix" in first.text()
    daemon.restart(kill=True)
    with Engine(model(kind), daemon.socket, env=environ) as second:
        for one, wanted in zip(prompts, own, strict=True):
            warm = second.one(one)
            assert warm["cached"] == 992
            same(warm, wanted)
        metrics = second.metrics()
        assert metrics["vllm:kvd_direct_load_bytes"] == metrics["vllm:kvd_load_bytes"] > 0
        assert metrics["vllm:kvd_errors"] == metrics["vllm:kvd_load_failures"] == 0
        free, total = second.ask("free_blocks")
        assert free == total - 1
    with daemon.client() as client:
        assert client.stats()["tiers"][0]["direct_loads_total"] > 0


@pytest.mark.parametrize("ais", ["off", "require"])
def test_blocks_that_a_window_gives_up_within_a_prompt_are_saved_before(kvd_daemon: MakeDaemon, ais: str) -> None:
    """In a prompt computed in pieces the third gets the first one's blocks of the window: nothing announces it."""
    daemon = kvd_daemon(max_bytes="64MiB", tier="256MiB")
    environ = {"KVD_AIS": ais, "KVD_CHUNK_TOKENS": "256", "KVD_DIRECT_STAGING": "64MiB"}
    pieces = {"max_num_batched_tokens": 512, "enable_chunked_prefill": True, "max_model_len": 2048}
    one = prompt(1500, 5)
    with Engine(model("sliding"), daemon.socket, env=environ, **pieces) as first:
        first.generate([one])
        own = first.one(one)
        assert own["cached"] == 1472
    with daemon.client() as client:
        client.flush(timeout_s=20)
    with Engine(model("sliding"), daemon.socket, env=environ, **pieces) as second:
        warm = second.one(one)
        assert warm["cached"] == 1472
        same(warm, own)
        assert second.metrics()["vllm:kvd_errors"] == 0


def test_a_reset_drops_what_is_in_files_too(kvd_daemon: MakeDaemon) -> None:
    daemon = kvd_daemon(max_bytes="64MiB", tier="256MiB")
    one = prompt(600, 3)
    with Engine(model(), daemon.socket, env={"KVD_AIS": "require", "KVD_CHUNK_TOKENS": "128", "KVD_RESET": "clear"}) as only:
        only.generate([one])
        assert only.ask("reset", connector=True)
        assert only.one(one)["cached"] == 0


def test_an_engine_that_requires_what_is_not_there_does_not_start(kvd_daemon: MakeDaemon) -> None:
    daemon = kvd_daemon(max_bytes="64MiB")
    refused = Engine(model(), daemon.socket, env={"KVD_AIS": "require"})
    with pytest.raises(EngineError, match=r"KVD_AIS=require, but GPU-direct \(posix\) does not work here.*no_tier"):
        refused.wait()
    refused.stop()


def test_both_sides_compute_one_size_of_chunks() -> None:
    config, caches = engine(DENSE, KVCacheLayout.LBHNC)
    groups = groups_of(config)
    _, _, layouts = find_layouts(groups, config, caches)
    unit_bytes = unit_bytes_of(config, groups)
    assert unit_bytes == layouts[0].block_bytes, "the engine's account and the tensors'"
    tokens = chunk_tokens(None, 16, unit_bytes)
    assert tokens % 16 == 0
    assert DIRECT_CHUNK_BYTES <= tokens // 16 * unit_bytes < DIRECT_CHUNK_BYTES + unit_bytes
    assert chunk_tokens(512, 16, unit_bytes) == 512, "a number that was given counts more"


@pytest.mark.parametrize("layout", [KVCacheLayout.LBHNC, KVCacheLayout.BLHNC], ids=lambda layout: layout.name)
def test_staging_on_a_device(standin: StandIn, tmp_path: Any, layout: KVCacheLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    config, caches = engine(DENSE, layout)
    storage, device, layouts = find_layouts(groups_of(config), config, caches)
    mover = DeviceMover(storage, device, layouts)
    staging, io = DeviceStaging(mover), LibraryIO("hipfile", standin.path)
    size = -(-staging.value_bytes(0, 4) // 4096) * 4096
    there, back = staging.staging(size), staging.staging(size)
    assert there.address % 4096 == back.address % 4096 == 0
    io.register(there)
    io.register(back)
    path = tmp_path / "region"
    path.write_bytes(bytes(size))
    before = {name: [block(cache, number) for number in range(9)] for name, cache in caches.items()}
    waited: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(mover, "mark", lambda: types.SimpleNamespace(synchronize=lambda: waited.append("device")))
        staging.fill(back)
        assert (waited, back.ready) == (["device"], None), "what is filled for a trial is there at once"
        staging.collect(0, [7, 1, 2, 5], there)
        assert len(waited) == 1, "no step waits for the device"
        staging.settle(there)
        staging.settle(there)
        assert len(waited) == 2, "who moves the bytes waits, once"
    with io.opened(path) as file:
        io.write(file, there, size, 0)
        io.read(file, back, size, 0)
    staging.spread(0, [3, 0, 4, 8], back)
    for name, cache in caches.items():
        for number in range(9):
            assert block(cache, number) == before[name][{3: 7, 4: 2, 8: 5}.get(number, number)]
    host = memoryview(bytearray(size))
    staging.fill(there)
    staging.to_host(there, host)
    assert len(set(host)) > 200
    assert standin["unregistered"] == 0
    io.close()


@pytest.mark.parametrize("room", [1 << 30, 0, 3 * 4 * 1024], ids=["room", "no room", "room for some"])
def test_a_devices_saves_leave_their_blocks_within_the_step(
    kvd_daemon: MakeDaemon, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """What is on its way is not what the engine writes into the blocks afterwards, however late the transfer is."""
    monkeypatch.setattr(device_mover, "STAGING_BYTES", room)
    config, caches = engine(DENSE, KVCacheLayout.LBHNC)
    storage, device, layouts = find_layouts(groups_of(config), config, caches)
    mover = DeviceMover(storage, device, layouts)
    gate = threading.Event()
    land = mover.land
    monkeypatch.setattr(mover, "land", lambda *arguments: gate.wait(20) and land(*arguments))
    settings = read_settings({}, {"KVD_SOCKET": str(kvd_daemon(max_bytes="16MiB").socket)})
    counters = Counters()
    links = Links(settings, counters)
    worker = Worker([b"n" * 32], mover, save_link=links.save(), load_link=links.load(), counters=counters)
    assert wait_up(links.save(), 5)
    assert wait_up(links.load(), 5)
    before = {name: [block(cache, number) for number in range(9)] for name, cache in caches.items()}
    moves = [Move(bytes([n]) * 32, ((n,),)) for n in range(1, 5)]
    worker.save([Save("r", b"s" * 32, tuple(moves))])
    everything = torch.empty(0, dtype=torch.uint8).set_(storage)
    everything.zero_()
    gate.set()
    wait_until(lambda: counters.values()["saves"] == 4)
    assert mover._detached == 0
    worker.start([Load("q", b"s" * 32, tuple(Move(move.key, ((move.blocks[0][0] + 4,),)) for move in moves))])
    wait_until(lambda: "q" in worker.results(()).received)
    for name, cache in caches.items():
        for number in range(1, 5):
            assert block(cache, number + 4) == before[name][number]
    worker.shutdown()


def test_a_devices_saves_that_fail_give_their_memory_back(kvd_daemon: MakeDaemon) -> None:
    daemon = kvd_daemon(max_bytes="16MiB")
    config, caches = engine(DENSE, KVCacheLayout.LBHNC)
    storage, device, layouts = find_layouts(groups_of(config), config, caches)
    mover, counters = DeviceMover(storage, device, layouts), Counters()
    links = Links(read_settings({}, {"KVD_SOCKET": str(daemon.socket)}), counters)
    worker = Worker([b"n" * 32], mover, save_link=links.save(), load_link=links.load(), counters=counters)
    assert wait_up(links.save(), 5)
    assert daemon.run("drain").rc == 0
    worker.save([Save("r", b"s" * 32, (Move(b"k" * 32, ((1,),)),))])
    wait_until(lambda: counters.values()["save_failures"] == 1)
    worker.shutdown()
    assert mover._detached == 0
