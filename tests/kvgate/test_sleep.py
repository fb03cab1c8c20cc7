"""The sleep machine: through the gate, over real sockets, against an engine that sleeps, refuses, lies and dies."""

import asyncio
import contextlib
import time
from pathlib import Path

import pytest

from kvgate.sleep import State
from tests.kvgate.fake_engine import FakeEngine
from tests.kvgate.harness import eventually, running_gate, write_config

pytestmark = pytest.mark.asyncio


def one(path: Path, engine: FakeEngine, **more: object) -> Path:
    return write_config(path / "models.yaml", {"tiny": {"host": "127.0.0.1", "port": engine.port}}, **more)


def sleepy(path: Path, engine: FakeEngine, **policy: object) -> Path:
    return one(path, engine, sleep_manager={"idle_threshold_seconds": 0.2, **policy})


async def test_idle_model_sleeps_and_a_request_wakes_it(tmp_path: Path) -> None:
    async with FakeEngine() as engine, running_gate(sleepy(tmp_path, engine)) as client:
        assert (await client.complete())[0] == 200
        await client.until(State.ASLEEP)
        assert engine.sleeping
        sleep = next(call for call in engine.calls if call.path == "/sleep")
        assert (sleep.query, sleep.body) == ([("level", "1")], b"")  # vLLM reads the query string only
        assert (await client.complete())[0] == 200
        assert engine.served_while_asleep == 0
        assert engine.count("/reset_prefix_cache") == 1


async def test_model_that_was_never_asked_sleeps_too(tmp_path: Path) -> None:
    async with FakeEngine() as engine, running_gate(sleepy(tmp_path, engine)) as client:
        await client.until(State.ASLEEP)


async def test_never_sleeps_in_the_middle_of_a_stream(tmp_path: Path) -> None:
    async with FakeEngine() as engine, running_gate(sleepy(tmp_path, engine, idle_threshold_seconds=0.1)) as client:
        status, body, _ = await client.complete(stream=True, chunks=10, pause=0.1)
        assert status == 200
        assert body.endswith(b"data: [DONE]\n\n")
        await client.until(State.ASLEEP)
        assert engine.slept_while_running == 0
        assert engine.order[0] == "hi"
        assert engine.order.index("sleep") > 0


async def test_engine_busy_past_the_gate_is_not_slept(tmp_path: Path) -> None:
    async with FakeEngine(busy=2) as engine, running_gate(sleepy(tmp_path, engine)) as client:
        await asyncio.sleep(0.6)
        assert engine.count("/sleep") == 0
        assert client.machine().state in {State.AWAKE, State.DRAINING}
        engine.busy = 0
        await client.until(State.ASLEEP)


async def test_twenty_requests_at_once_are_one_wake_up_in_order(tmp_path: Path) -> None:
    async with FakeEngine(sleeping=True, wake_delay=0.2) as engine, running_gate(one(tmp_path, engine)) as client:
        asking = []
        for i in range(20):
            asking.append(asyncio.create_task(client.complete(prompt=str(i))))
            await eventually(lambda i=i: client.gate.traffic.models["tiny"].requests_total == i + 1)
        answers = await asyncio.gather(*asking)
        assert [status for status, _, _ in answers] == [200] * 20
        assert engine.count("/wake_up") == 1
        assert engine.order == ["wake", *map(str, range(20))]
        assert engine.served_while_asleep == 0


async def test_manual_sleep_drains_the_stream_first_and_later_requests_wake_it(tmp_path: Path) -> None:
    async with FakeEngine() as engine, running_gate(one(tmp_path, engine)) as client:
        stream = asyncio.create_task(client.complete(prompt="stream", stream=True, chunks=6, pause=0.1))
        await eventually(lambda: engine.running == 1)
        sleeping = asyncio.create_task(client.ask("/action/sleep/tiny", method="POST"))
        await client.until(State.DRAINING)
        late = asyncio.create_task(client.complete(prompt="late"))
        status, body, _ = await sleeping
        assert (status, body["success"]) == (200, True)
        assert (await stream)[1].endswith(b"data: [DONE]\n\n")
        assert (await late)[0] == 200
        assert engine.order == ["stream", "sleep", "wake", "late"]
        assert engine.slept_while_running == 0


async def test_manual_sleep_of_a_model_that_stays_busy_is_409_and_it_serves_on(tmp_path: Path) -> None:
    async with FakeEngine() as engine:
        config = one(tmp_path, engine, sleep_manager={"drain_timeout_seconds": 0.2})
        async with running_gate(config) as client:
            stream = asyncio.create_task(client.complete(stream=True, chunks=10, pause=0.1))
            await eventually(lambda: engine.running == 1)
            status, body, _ = await client.ask("/action/sleep/tiny", method="POST")
            assert (status, body["success"]) == (409, False)
            assert "busy" in body["message"]
            assert (await client.complete())[0] == 200
            assert (await stream)[1].endswith(b"data: [DONE]\n\n")
            assert engine.count("/sleep") == 0


async def test_request_waits_for_the_minimum_sleep(tmp_path: Path) -> None:
    async with FakeEngine() as engine, running_gate(one(tmp_path, engine, sleep_manager={"min_sleep_duration": 0.5})) as client:
        await client.ask("/action/sleep/tiny", method="POST")
        started = time.monotonic()
        assert (await client.complete())[0] == 200
        assert time.monotonic() - started > 0.35


async def test_request_gives_up_with_503_when_the_minimum_sleep_is_longer_than_its_queue_time(tmp_path: Path) -> None:
    async with FakeEngine() as engine:
        config = one(tmp_path, engine, sleep_manager={"min_sleep_duration": 30}, router={"queue_timeout_seconds": 0.2})
        async with running_gate(config) as client:
            await client.ask("/action/sleep/tiny", method="POST")
            status, body, headers = await client.complete()
            assert (status, body["error"]["code"]) == (503, "model_unavailable")
            assert 20 <= int(headers["Retry-After"]) <= 30
            assert engine.count("/wake_up") == 0
            # By force it wakes at once, and the pending wake-up is not a second one.
            status, body, _ = await client.ask("/action/wakeup/tiny?force=1", method="POST")
            assert (status, body["state"]) == (200, "awake")
            assert engine.count("/wake_up") == 1


async def test_without_wakeup_on_request_a_sleeping_model_is_503(tmp_path: Path) -> None:
    async with (
        FakeEngine(sleeping=True) as engine,
        running_gate(one(tmp_path, engine, sleep_manager={"wakeup_on_request": False})) as client,
    ):
        status, _, headers = await client.complete()
        assert status == 503
        assert int(headers["Retry-After"]) > 0
        assert engine.count("/wake_up") == 0


async def test_sleep_refused_by_the_engine_serves_on_and_backs_off(tmp_path: Path) -> None:
    async with FakeEngine(sleep_status=500) as engine, running_gate(sleepy(tmp_path, engine, idle_threshold_seconds=0.1)) as client:
        await eventually(lambda: client.machine().sleep_failures_total >= 1)
        assert (await client.complete())[0] == 200
        await eventually(lambda: engine.count("/sleep") == 2)
        first, second = [call.when for call in engine.calls if call.path == "/sleep"]
        assert second - first >= 1.0
        assert "HTTP 500" in client.machine().last_error


async def test_engine_that_lies_about_sleep_and_wake_is_found_out(tmp_path: Path) -> None:
    async with (
        FakeEngine(ignore_sleep=True) as engine,
        running_gate(one(tmp_path, engine, sleep_manager={"wake_tries": 2})) as client,
    ):
        status, body, _ = await client.ask("/action/sleep/tiny", method="POST")
        assert (status, body["success"]) == (502, False)
        assert client.machine().state is State.AWAKE
        engine.ignore_sleep, engine.ignore_wake = False, True
        await client.ask("/action/sleep/tiny", method="POST")
        status, body, _ = await client.ask("/action/wakeup/tiny", method="POST")
        assert (status, body["success"]) == (502, False)
        assert client.machine().state is State.FAILED


async def test_engine_without_sleep_mode_is_served_and_left_alone(tmp_path: Path) -> None:
    async with FakeEngine(dev_mode=False) as engine, running_gate(sleepy(tmp_path, engine)) as client:
        await eventually(lambda: client.machine().can_sleep is False)
        assert (await client.complete())[0] == 200
        await asyncio.sleep(0.5)
        assert engine.count("/sleep") == 1
        status, body, _ = await client.ask("/action/sleep/tiny", method="POST")
        assert status == 502
        assert "VLLM_SERVER_DEV_MODE" in body["message"]


async def test_failed_wake_up_is_visible_answers_503_and_is_tried_again(tmp_path: Path) -> None:
    async with (
        FakeEngine(sleeping=True, wake_status=500) as engine,
        running_gate(one(tmp_path, engine, sleep_manager={"wake_tries": 2})) as client,
    ):
        answers = await asyncio.gather(*(client.complete() for _ in range(3)))
        assert [(status, body["error"]["code"]) for status, body, _ in answers] == [(503, "model_unavailable")] * 3
        assert all("Retry-After" in headers for _, _, headers in answers)
        assert engine.count("/wake_up") == 2
        _, body, _ = await client.ask("/models")
        assert body["models"]["tiny"]["state"] == "failed"
        assert "HTTP 500" in body["models"]["tiny"]["last_error"]
        engine.wake_status = 200
        await client.until(State.AWAKE)
        assert (await client.complete())[0] == 200


async def test_state_is_taken_from_the_engine_at_start(tmp_path: Path) -> None:
    async with FakeEngine(sleeping=True) as engine, running_gate(one(tmp_path, engine)) as client:
        assert client.machine().state is State.ASLEEP
        assert (await client.complete())[0] == 200


async def test_engine_slept_and_woken_by_hand_is_noticed(tmp_path: Path) -> None:
    async with FakeEngine() as engine, running_gate(one(tmp_path, engine)) as client:
        engine.sleeping = True
        await client.until(State.ASLEEP)
        engine.sleeping = False
        await client.until(State.AWAKE)


async def test_engine_that_goes_away_fails_and_comes_back_awake(tmp_path: Path) -> None:
    async with FakeEngine() as engine, running_gate(one(tmp_path, engine)) as client:
        await client.ask("/action/sleep/tiny", method="POST")
        await engine.stop()
        await client.until(State.FAILED)
        status, _, headers = await client.complete()
        assert (status, "Retry-After" in headers) == (503, True)
        engine.sleeping = False  # a restarted engine is awake
        await engine.start()
        await client.until(State.AWAKE)
        assert (await client.complete())[0] == 200


async def test_requests_wait_for_an_engine_that_is_still_starting(tmp_path: Path) -> None:
    engine = await FakeEngine().start()
    await engine.stop()
    config = one(tmp_path, engine, router={"health_failures": 100})
    async with running_gate(config, wait=False) as client:
        asking = asyncio.create_task(client.complete())
        await asyncio.sleep(0.3)
        assert client.machine().state is State.STARTING
        assert (await client.ask("/readyz"))[0] == 503
        async with engine:
            assert (await asking)[0] == 200
            assert (await client.ask("/readyz"))[0] == 200


async def test_level_mode_and_tags_travel_in_the_query_string(tmp_path: Path) -> None:
    async with FakeEngine() as engine, running_gate(one(tmp_path, engine)) as client:
        await client.ask("/action/sleep/tiny?level=2&mode=wait", method="POST")
        status, body, _ = await client.ask("/action/wakeup/tiny?tags=weights", method="POST")
        assert (status, body["state"]) == (200, "asleep")
        status, body, _ = await client.ask("/action/wakeup/tiny", method="POST")
        assert (status, body["state"]) == (200, "awake")
        queries = [(call.path, call.query) for call in engine.calls if call.path in {"/sleep", "/wake_up", "/collective_rpc"}]
        assert queries == [
            ("/sleep", [("level", "2"), ("mode", "wait")]),
            ("/wake_up", [("tags", "weights")]),
            # After level 2 a full wake-up brings the weights back before the cache.
            ("/wake_up", [("tags", "weights")]),
            ("/collective_rpc", []),
            ("/wake_up", [("tags", "kv_cache")]),
        ]


async def test_client_that_leaves_does_not_take_the_wake_up_with_it(tmp_path: Path) -> None:
    async with FakeEngine(sleeping=True, wake_delay=0.3) as engine, running_gate(one(tmp_path, engine)) as client:
        first = asyncio.create_task(client.complete(prompt="leaves"))
        await client.until(State.WAKING)
        second = asyncio.create_task(client.complete(prompt="stays"))
        await eventually(lambda: client.gate.router.backends["tiny"].lane.waiting == 2)
        first.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await first
        assert (await second)[0] == 200
        assert engine.order == ["wake", "stays"]
        assert engine.count("/wake_up") == 1


async def test_nobody_left_waiting_means_no_wake_up(tmp_path: Path) -> None:
    async with FakeEngine() as engine:
        config = one(tmp_path, engine, sleep_manager={"min_sleep_duration": 0.5}, router={"queue_timeout_seconds": 0.1})
        async with running_gate(config) as client:
            await client.ask("/action/sleep/tiny", method="POST")
            assert (await client.complete())[0] == 503
            await asyncio.sleep(0.6)
            assert (engine.count("/wake_up"), client.machine().state) == (0, State.ASLEEP)


async def test_sleep_and_wake_are_idempotent(tmp_path: Path) -> None:
    async with FakeEngine() as engine, running_gate(one(tmp_path, engine)) as client:
        assert (await client.ask("/action/wakeup/tiny", method="POST"))[1]["message"] == "already awake"
        answers = await asyncio.gather(*(client.ask("/action/sleep/tiny", method="POST") for _ in range(5)))
        assert {(status, body["success"]) for status, body, _ in answers} == {(200, True)}
        assert (await client.ask("/action/sleep/tiny", method="POST"))[1]["message"] == "already asleep"
        answers = await asyncio.gather(*(client.ask("/action/wakeup/tiny", method="POST") for _ in range(5)))
        assert {(status, body["success"]) for status, body, _ in answers} == {(200, True)}
        assert (engine.count("/sleep"), engine.count("/wake_up")) == (1, 1)


async def test_engine_that_cannot_say_whether_it_sleeps_is_remembered(tmp_path: Path) -> None:
    async with FakeEngine(mute=True) as engine, running_gate(sleepy(tmp_path, engine)) as client:
        assert (await client.complete())[0] == 200
        await client.until(State.ASLEEP)
        await asyncio.sleep(0.3)  # some health checks later
        assert client.machine().state is State.ASLEEP
        assert (await client.complete())[0] == 200
        assert (engine.count("/wake_up"), engine.served_while_asleep) == (1, 0)
