"""Management endpoints: the peer's paths and fields, status codes that mean something, and metrics that parse."""

import json
import re
from pathlib import Path

import pytest

from kvgate.front import MODEL_PATHS
from kvgate.sleep import State
from kvtools.segments.stats import instance_of_path, read_stats
from tests.kvgate.fake_engine import FakeEngine
from tests.kvgate.harness import eventually, running_gate, write_config

pytestmark = pytest.mark.asyncio
SLASHED = "org/big-model"


def two(folder: Path, engine: FakeEngine, other: FakeEngine, **more: object) -> Path:
    models = {"tiny": {"host": "127.0.0.1", "port": engine.port}, SLASHED: {"host": "127.0.0.1", "port": other.port}}
    return write_config(folder / "models.yaml", models, **more)


async def test_peers_paths_and_fields(tmp_path: Path) -> None:
    async with FakeEngine() as engine, FakeEngine() as other, running_gate(two(tmp_path, engine, other)) as client:
        await client.complete()
        fields = {"total_requests", "successful_requests", "failed_requests", "request_rate", "avg_response_time"}
        fields |= {"last_activity_time", "idle_time_seconds", "is_idle"}

        assert (await client.ask("/health"))[:2] == (200, {"status": "healthy"})
        assert (await client.ask("/get_server_info"))[1]["status"] == "ok"
        body = (await client.ask("/models"))[1]["models"]
        assert body["tiny"]["endpoint"] == engine.url
        body = (await client.ask("/health/org%2Fbig-model"))[1]
        assert body == {"model": SLASHED, "health": {other.url: True}}
        assert (await client.ask("/health/all"))[1]["health"] == {engine.url: True, other.url: True}
        body = (await client.ask("/traffic/stats?window=30"))[1]
        assert body["window_seconds"] == 30
        assert fields <= set(body["traffic_stats"]["tiny"])
        assert body["traffic_stats"]["tiny"]["total_requests"] == 1
        assert fields <= set((await client.ask("/traffic/stats/org%2Fbig-model"))[1]["model_stats"])
        body = (await client.ask("/models/idle?threshold=0.001"))[1]
        assert (sorted(body["idle_models"]), body["idle_models_count"]) == ([SLASHED, "tiny"], 2)
        assert (body["idle_threshold_seconds"], set(body["idle_model_details"])) == (0.001, {"tiny", SLASHED})
        body = (await client.ask("/models/active?threshold=100&window=5"))[1]
        assert (body["active_models_count"], set(body["active_model_details"])) == (2, {"tiny", SLASHED})
        body = (await client.ask("/sleep/status"))[1]
        assert {"sleeping_models", "sleep_candidates", "auto_sleep_enabled", "idle_threshold_seconds", "wakeup_on_request"} <= set(
            body
        )
        assert {"sleep_candidates", "candidate_details"} <= set((await client.ask("/sleep/candidates"))[1])


async def test_sleep_status_shows_who_sleeps_and_since_when(tmp_path: Path) -> None:
    async with FakeEngine() as engine, FakeEngine() as other, running_gate(two(tmp_path, engine, other)) as client:
        status, body, _ = await client.ask("/action/sleep/org%2Fbig-model", method="POST")
        assert (status, body["model_name"], body["success"], body["message"]) == (200, SLASHED, True, "asleep")
        body = (await client.ask("/sleep/status"))[1]["sleeping_models"]
        assert set(body) == {SLASHED}
        assert body[SLASHED]["manual_sleep"] is True
        assert body[SLASHED]["sleep_start_time"] > 1e9
        assert client.machine("tiny").state is State.AWAKE
        status, body, _ = await client.ask(f"/action/wakeup/{SLASHED}", method="POST")
        assert (status, body["message"]) == (200, "awake")


WRONG = (
    ("GET", "/health/nope", 404),
    ("GET", "/traffic/stats/nope", 404),
    ("POST", "/action/sleep/nope", 404),
    ("POST", "/action/wakeup/nope", 404),
    ("GET", "/traffic/stats?window=0", 400),
    ("GET", "/traffic/stats?window=nan", 400),
    ("GET", "/traffic/stats?window=99999", 400),
    ("GET", "/models/idle?threshold=x", 400),
    ("POST", "/action/sleep/tiny?level=3", 400),
    ("POST", "/action/sleep/tiny?level=1&level=2", 400),
    ("POST", "/action/wakeup/tiny?force=yes", 400),
    ("GET", "/action/sleep/tiny", 405),
    ("GET", "/nowhere", 404),
    ("GET", "/v1/nowhere", 404),
    ("GET", "/v1/completions", 405),
    ("PUT", "/v1/models", 405),
    ("POST", "/action/wakeup/tiny?tags=wieghts", 400),
    ("GET", "/v1/models/nope", 404),
)


async def test_what_cannot_be_answered_is_json_with_the_right_status(tmp_path: Path) -> None:
    async with FakeEngine() as engine, FakeEngine() as other, running_gate(two(tmp_path, engine, other)) as client:
        got = []
        for method, path, _ in WRONG:
            status, body, _ = await client.ask(path, method=method)
            assert body["error"]["message"] if path.startswith("/v1/") else body["error"]
            if path.startswith("/v1/"):
                assert body["error"]["code"] in ("method_not_allowed" if status == 405 else ("not_found", "model_not_found"))
            got.append((method, path, status))
        assert got == list(WRONG)
        assert engine.count("/sleep") == 0


async def test_model_cards(tmp_path: Path) -> None:
    engines = FakeEngine(), FakeEngine(model="not-our-name")
    async with engines[0] as engine, engines[1] as other, running_gate(two(tmp_path, engine, other)) as client:
        await eventually(lambda: client.gate.router.backends["tiny"].card)
        body = (await client.ask("/v1/models"))[1]
        cards = {card["id"]: card for card in body["data"]}
        assert set(cards) == {"tiny", SLASHED}
        assert (cards["tiny"]["owned_by"], cards["tiny"]["max_model_len"], cards["tiny"]["state"]) == ("fake", 4096, "awake")
        assert (cards[SLASHED]["owned_by"], cards[SLASHED]["object"]) == ("kvgate", "model")
        assert (await client.ask(f"/v1/models/{SLASHED}"))[1]["id"] == SLASHED


async def test_an_engine_that_serves_another_name_is_remarked_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with FakeEngine(model="org/other") as engine, FakeEngine(model="second") as second:
        models = {"tiny": {"host": "127.0.0.1", "port": engine.port}, "second": {"host": "127.0.0.1", "port": second.port}}
        async with running_gate(write_config(tmp_path / "m.yaml", models)) as client:
            await eventually(lambda: all(backend.card for backend in client.gate.router.backends.values()))
    told = [record.getMessage() for record in caplog.records if "answers 404 to this name" in record.getMessage()]
    assert told == ["tiny: its engine serves 'org/other' and answers 404 to this name: see --served-model-name"]


async def test_metrics_parse_and_agree_with_the_stats_segment(tmp_path: Path) -> None:
    async with FakeEngine() as engine, FakeEngine() as other:
        path = two(tmp_path, engine, other)
        async with running_gate(path) as client:
            for _ in range(3):
                await client.complete()
            await client.complete(status=500)
            status, text, _ = await client.ask("/metrics")
            assert status == 200
            values = {}
            for line in text.decode().splitlines():
                if not line.startswith("#"):
                    found = re.fullmatch(r"(kvgate_[a-z_]+)(?:\{([^}]*)\})? (\S+)", line)
                    assert found, line
                    assert (found[1], found[2]) not in values
                    values[found[1], found[2]] = float(found[3])
            assert values["kvgate_requests_total", 'model="tiny"'] == 4
            assert values["kvgate_requests_failed_total", 'model="tiny"'] == 1
            assert values["kvgate_state", 'model="tiny"'] == 1
            assert values["kvgate_latency_seconds_bucket", 'model="tiny",le="+Inf"'] == 4
            assert values["kvgate_latency_seconds_count", 'model="tiny"'] == 4

            segment = Path("/dev/shm") / f"kvtools.gate.{instance_of_path(path)}"
            await eventually(lambda: read_stats(segment).get("requests_total", model="tiny") == 4)
            reading = read_stats(segment)
            assert reading.alive
            assert reading.get("requests_failed_total", model="tiny") == 1
            assert reading.get("latency_seconds_bucket", model="tiny", le="+Inf") == 4
        assert not segment.exists()


async def test_reload_keeps_streams_and_counts(tmp_path: Path) -> None:
    import asyncio

    async with FakeEngine() as engine, FakeEngine() as other:
        path = two(tmp_path, engine, other)
        async with running_gate(path) as client:
            stream = asyncio.create_task(client.complete(stream=True, chunks=8, pause=0.1))
            kept = asyncio.create_task(client.complete(SLASHED, stream=True, chunks=8, pause=0.1))
            await eventually(lambda: engine.running == other.running == 1)
            write_config(
                path, {SLASHED: {"host": "127.0.0.1", "port": other.port}, "new": {"host": "127.0.0.1", "port": engine.port}}
            )
            status, body, _ = await client.ask("/admin/reload", method="POST")
            assert (status, body["added"], body["removed"], body["unchanged"]) == (200, ["new"], ["tiny"], [SLASHED])
            assert (await client.complete())[0] == 404
            assert (await client.complete("new"))[0] == 200
            assert (await stream)[1].endswith(b"data: [DONE]\n\n")
            assert (await kept)[1].endswith(b"data: [DONE]\n\n")
            assert client.gate.traffic.models[SLASHED].succeeded_total == 1


async def test_reload_of_a_broken_file_changes_nothing(tmp_path: Path) -> None:
    async with FakeEngine() as engine, FakeEngine() as other:
        path = two(tmp_path, engine, other)
        async with running_gate(path) as client:
            path.write_text("models: {tiny: {prot: 1}}")
            status, body, _ = await client.ask("/admin/reload", method="POST")
            assert (status, body["success"]) == (400, False)
            assert "models.tiny: needs 'port'" in body["error"]
            assert (await client.complete())[0] == 200


async def test_openapi_document_and_routes_are_the_same(tmp_path: Path) -> None:
    async with FakeEngine() as engine, FakeEngine() as other, running_gate(two(tmp_path, engine, other)) as client:
        status, document, _ = await client.ask("/openapi.json")
        assert (status, document["openapi"]) == (200, "3.1.0")
        described = {(path, method.upper()) for path, item in document["paths"].items() for method in item}
        routed = {(path, "POST") for path in MODEL_PATHS}
        routed |= {("/v1/cache/prewarm/{job}", "GET"), ("/v1/cache/engine", "GET")}
        for route in client.gate.app.routes:
            assert route.methods is not None
            routed |= {(route.path.replace(":path", ""), method) for method in route.methods - {"HEAD"}}
        assert described == routed
        references = re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document))
        assert set(references) == set(document["components"]["schemas"])
