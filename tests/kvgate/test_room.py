"""Waking where it fits: who sleeps to make room, who waits, and what becomes of the limits, on real segments."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from kvgate.sleep import State
from kvtools.segments import pool
from tests.kvgate.fake_engine import FakeEngine
from tests.kvgate.harness import Client, eventually, running_gate, write_config
from tests.kvgate.process import gate, instance, notes

GIB = 1 << 30


@contextlib.asynccontextmanager
async def crowd(
    folder: Path, *names: str, segments: dict[str, str] | None = None, size: str = "80GiB", **more: object
) -> AsyncIterator[tuple[Client, dict[str, FakeEngine]]]:
    """Engines of 30 GiB and at least 10 GiB of KV each, on one device of 80 GiB: two fit. All but the first two sleep."""
    async with contextlib.AsyncExitStack() as stack:
        engines = {name: await stack.enter_async_context(FakeEngine(model=name, sleeping=i > 1)) for i, name in enumerate(names)}
        models = {
            name: {"host": "127.0.0.1", "port": engine.port, "devices": [0], "weights_bytes": "30GiB", "kv_bytes": "10GiB"}
            for name, engine in engines.items()
        }
        for name, segment in (segments or {}).items():
            models[name]["segment"] = segment
        config = write_config(folder / "models.yaml", models, devices={0: size}, **more)
        client = await stack.enter_async_context(running_gate(config))
        yield client, engines


@pytest.mark.asyncio
async def test_the_least_recently_used_idle_model_sleeps_to_make_room(tmp_path: Path) -> None:
    async with crowd(tmp_path, "a", "b", "c") as (client, engines):
        await client.complete("b")
        await client.complete("a")
        assert (await client.complete("c"))[0] == 200
        assert {name: client.machine(name).state for name in engines} == {"a": State.AWAKE, "b": State.ASLEEP, "c": State.AWAKE}
        assert (await client.complete("b"))[0] == 200
        assert (client.machine("a").state, engines["a"].count("/sleep"), engines["c"].count("/sleep")) == (State.ASLEEP, 1, 0)


@pytest.mark.asyncio
async def test_busy_models_are_waited_for(tmp_path: Path) -> None:
    async with crowd(tmp_path, "a", "b", "c") as (client, engines):
        streams = [asyncio.create_task(client.complete(name, stream=True, chunks=8, pause=0.1)) for name in ("a", "b")]
        await eventually(lambda: engines["a"].running == engines["b"].running == 1)
        assert (await client.complete("c"))[0] == 200
        for stream in streams:
            assert (await stream)[1].endswith(b"data: [DONE]\n\n")
        assert engines["a"].slept_while_running == engines["b"].slept_while_running == 0
        assert engines["a"].count("/sleep") + engines["b"].count("/sleep") == 1


@pytest.mark.asyncio
async def test_no_room_in_time_is_503_and_wakes_nobody(tmp_path: Path) -> None:
    async with crowd(tmp_path, "a", "b", "c", router={"queue_timeout_seconds": 0.6}) as (client, engines):
        streams = [asyncio.create_task(client.complete(name, stream=True, chunks=20, pause=0.1)) for name in ("a", "b")]
        await eventually(lambda: engines["a"].running == engines["b"].running == 1)
        status, body, headers = await client.complete("c")
        assert (status, body["error"]["code"], "Retry-After" in headers) == (503, "model_unavailable", True)
        await eventually(lambda: not client.machine("c").in_transition)
        assert engines["c"].count("/wake_up") == 0
        await asyncio.gather(*streams)


@pytest.mark.asyncio
@pytest.mark.real("segments")
async def test_limits_of_the_awake_models_share_what_the_weights_leave(tmp_path: Path, shm_name: Callable[[], str]) -> None:
    segments = {name: shm_name() for name in ("a", "b", "c")}
    for name in segments.values():
        pool.create_pool(name, 70 * GIB)
    pool.write_usage(segments["a"], 14 * GIB, 0)
    async with crowd(tmp_path, "a", "b", "c", segments=segments, size="85GiB") as (client, _):
        await client.complete("a")
        assert (await client.complete("c"))[0] == 200
        # 85 GiB less two times 30 of weights are 25 for two pools: a keeps the 14 it uses, c has the rest.
        assert [pool.read_pool(segments[name]).limit_bytes for name in ("a", "c")] == [14 * GIB, 11 * GIB]
        assert client.machine("b").state is State.ASLEEP


@pytest.mark.asyncio
@pytest.mark.real("segments")
async def test_who_stays_awake_gets_the_memory_back(tmp_path: Path, shm_name: Callable[[], str]) -> None:
    segments = {name: shm_name() for name in ("a", "b")}
    for name in segments.values():
        pool.create_pool(name, 70 * GIB)
    async with crowd(tmp_path, "a", "b", segments=segments) as (client, _):
        await client.ask("/action/sleep/a", method="POST")
        await eventually(lambda: pool.read_pool(segments["b"]).limit_bytes == 50 * GIB)
        assert (await client.complete("a"))[0] == 200
        limits = [pool.read_pool(segment).limit_bytes for segment in segments.values()]
        assert limits == [10 * GIB, 10 * GIB]


def test_engines_that_do_not_fit_together_start_one_by_one(tmp_path: Path) -> None:
    sizes = {"devices": [0], "weights_bytes": "50GiB"}
    with gate(tmp_path, instances=[instance(name, tmp_path, **sizes) for name in ("a", "b")], devices={0: "80GiB"}) as running:
        running.until(lambda: (running.state("a"), running.state("b")) == ("asleep", "awake"))
        assert running.ask("/v1/completions", {"model": "a", "prompt": "x"})[0] == 200
        assert (running.state("a"), running.state("b")) == ("awake", "asleep")
        assert (len(notes(tmp_path, "a")), len(notes(tmp_path, "b"))) == (1, 1)
