"""Prewarm straight to kvd: a real daemon with a disk tier behind the gate, and an engine that sleeps on."""

import asyncio
import hashlib
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from yarl import URL

from kvgate import prewarm
from kvgate.errors import BadRequest
from kvgate.sleep import State
from tests.kvgate.fake_engine import FakeEngine
from tests.kvgate.harness import running_gate, write_config
from tests.support.daemon import Daemon

pytestmark = [pytest.mark.asyncio, pytest.mark.real("kvd")]
COUNT = 12
KEYS = [hashlib.sha256(str(i).encode()).digest() for i in range(COUNT)]
SPACES = [hashlib.sha256(name).digest() for name in (b"rank 0", b"rank 1")]
DATA = bytes(range(256)) * 256


@pytest.fixture
def stored(kvd_daemon: Callable[..., Daemon]) -> Daemon:
    """A daemon whose values are on disk only."""
    daemon = kvd_daemon("--durability", "fsync", tier="256MiB")
    with daemon.client() as client:
        for space in SPACES:
            done = client.put_many([(key, DATA) for key in KEYS], namespace=space, wait="tier")
            assert {result.durability for result in done} == {"fsync"}
            client.clear(arena_only=True, namespace=space)
    return daemon


def config(folder: Path, engine: FakeEngine, socket: object = None, **more: Any) -> Path:
    model: dict[str, Any] = {"host": "127.0.0.1", "port": engine.port}
    if socket is not None:
        model["kvd_socket"] = str(socket)
    return write_config(folder / "models.yaml", {"tiny": model}, **more)


def body(**changed: Any) -> dict[str, Any]:
    return {"model": "tiny", "keys": [key.hex() for key in KEYS], "namespaces": [space.hex() for space in SPACES], **changed}


def arena_entries(daemon: Daemon) -> int:
    with daemon.client() as client:
        return int(client.stats()["entries"])


async def test_values_come_up_and_the_sleeping_model_is_not_woken(tmp_path: Path, stored: Daemon) -> None:
    async with FakeEngine() as engine, running_gate(config(tmp_path, engine, stored.socket)) as client:
        await client.ask("/action/sleep/tiny", method="POST")
        assert await asyncio.to_thread(arena_entries, stored) == 0
        status, told, _ = await client.ask(prewarm.PATH, body(wait=True))
        assert (status, told) == (200, {"accepted": True, "n_keys": COUNT, "namespaces": 2, "resident": 2 * COUNT})
        assert await asyncio.to_thread(arena_entries, stored) == 2 * COUNT
        assert client.machine().state is State.ASLEEP
        traffic = (await client.ask("/traffic/stats"))[1]["traffic_stats"]["tiny"]
        assert traffic["total_requests"] == 0, "warming is no use of the model"


async def test_it_is_accepted_at_once_and_done_soon(tmp_path: Path, stored: Daemon) -> None:
    async with FakeEngine() as engine, running_gate(config(tmp_path, engine, stored.socket)) as client:
        status, told, _ = await client.ask(prewarm.PATH, body())
        assert (status, told) == (202, {"accepted": True, "n_keys": COUNT, "namespaces": 2})
        for _ in range(200):
            if await asyncio.to_thread(arena_entries, stored) == 2 * COUNT:
                break
            await asyncio.sleep(0.05)
        assert await asyncio.to_thread(arena_entries, stored) == 2 * COUNT
        status, told, _ = await client.ask(prewarm.PATH, body(keys=[], wait=True))
        assert (status, told) == (200, {"accepted": True, "n_keys": 0, "namespaces": 2, "resident": 0})
        missing = [hashlib.sha256(b"nowhere").hexdigest()]
        status, told, _ = await client.ask(prewarm.PATH, body(keys=missing, wait=True, deadline_s=5))
        assert (status, told["resident"]) == (200, 0)


async def test_what_is_for_the_engine_goes_to_the_engine(tmp_path: Path, stored: Daemon) -> None:
    async with FakeEngine() as engine, running_gate(config(tmp_path, engine, stored.socket)) as client:
        for other in ({"prompt": "hello"}, {"block_hashes": ["ab" * 16]}, {"messages": []}):
            await client.ask(prewarm.PATH, {"model": "tiny", **other})
        assert engine.count(prewarm.PATH) == 3


async def test_the_job_of_an_engine_is_asked_of_that_engine(tmp_path: Path) -> None:
    async with FakeEngine() as engine, FakeEngine() as other:
        models = {"tiny": {"host": "127.0.0.1", "port": engine.port}, "org/two": {"host": "127.0.0.1", "port": other.port}}
        async with running_gate(write_config(tmp_path / "models.yaml", models)) as client:
            assert (await client.ask("/v1/cache/prewarm/ab12?model=org%2Ftwo"))[0] == 200
            assert (await client.ask("/v1/cache/engine?model=tiny"))[0] == 200
            assert (other.count("/v1/cache/prewarm/ab12"), engine.count("/v1/cache/engine")) == (1, 1)
            status, told, _ = await client.ask("/v1/cache/prewarm/ab12")
            assert (status, told["error"]["message"]) == (400, "model parameter is required. Add ?model=NAME.")
            assert (await client.ask("/v1/cache/prewarm/ab12?model=nope"))[0] == 404
            for hidden in ("/v1/cache/engine/../../sleep", "/v1/cache/prewarm/a%2Fb", "/v1/cache/engines"):
                seen = len(engine.calls)
                answer = await client.ask(URL(client.base + hidden + "?model=tiny", encoded=True))
                assert (answer[0], [call.path for call in engine.calls[seen:] if "cache" in call.path]) == (404, [])
            await other.stop()
            assert (await client.ask("/v1/cache/prewarm/ab12?model=org%2Ftwo"))[0] == 503
            for path in ("/v1/cache/keys", "/v1/cache/why"):
                assert (await client.ask(path, {"model": "tiny", "prompt": "x"}))[0] == 200
                assert engine.count(path) == 1


async def test_a_daemon_that_dies_or_hangs_is_503(tmp_path: Path, stored: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    async with FakeEngine() as engine, running_gate(config(tmp_path, engine, stored.socket)) as client:
        stored.signal(signal.SIGSTOP)
        with monkeypatch.context() as patch:
            patch.setattr(prewarm, "PING_S", 0.5)
            status, told, headers = await client.ask(prewarm.PATH, body())
        assert (status, told["error"]["code"], headers["Retry-After"]) == (503, "model_unavailable", "1")
        stored.signal(signal.SIGCONT)
        stored.kill9()
        status, told, _ = await client.ask(prewarm.PATH, body())
        assert status == 503
        assert f"no kvd answers at {stored.socket}" in told["error"]["message"]
        await asyncio.to_thread(stored.start)
        assert (await client.ask(prewarm.PATH, body(wait=True)))[:2][1]["resident"] == 2 * COUNT


async def test_without_a_socket_or_with_an_unknown_model(tmp_path: Path) -> None:
    async with FakeEngine() as engine, running_gate(config(tmp_path, engine)) as client:
        status, told, _ = await client.ask(prewarm.PATH, body())
        assert (status, told["error"]["message"]) == (
            503,
            "tiny: no kvd_socket is configured. Set it beside the model in models.yaml.",
        )
        assert (await client.ask(prewarm.PATH, body(model="nope")))[0] == 404


async def test_only_so_many_at_once(tmp_path: Path, stored: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, end = threading.Semaphore(0), threading.Event()

    async def stuck(self: prewarm.Prewarm, client: Any, asked: prewarm.Asked) -> int:
        begun.release()
        while not end.is_set():
            await asyncio.sleep(0.01)
        return 0

    monkeypatch.setattr(prewarm.Prewarm, "_run", stuck)
    async with FakeEngine() as engine, running_gate(config(tmp_path, engine, stored.socket)) as client:
        answers = [await client.ask(prewarm.PATH, body()) for _ in range(prewarm.MAX_JOBS + 1)]
        assert [answer[0] for answer in answers] == [202] * prewarm.MAX_JOBS + [429]
        end.set()


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"keys": ["ab"]}, "keys"),
        ({"keys": ["zz" * 32]}, "keys"),
        ({"keys": [" " + "ab" * 31 + "c"]}, "keys"),
        ({"keys": "ab" * 32}, "keys"),
        ({"keys": None}, "keys"),
        ({"keys": [7]}, "keys"),
        ({"namespaces": []}, "namespaces"),
        ({"namespaces": ["ab"]}, "namespaces"),
        ({"deadline_s": 0}, "deadline_s"),
        ({"deadline_s": "soon"}, "deadline_s"),
        ({"deadline_s": 1e9}, "deadline_s"),
        ({"wait": "yes"}, "wait"),
        ({"keys": ["ab" * 32] * 40_000}, "keys"),
        ({"model": 7}, "model"),
    ],
)
async def test_what_cannot_be_meant_names_the_field(changed: dict[str, Any], field: str) -> None:
    data = msgspec.json.encode(body(**changed))
    assert prewarm.for_daemon(data)
    with pytest.raises(BadRequest) as caught:
        prewarm.read(data)
    assert caught.value.param == field
