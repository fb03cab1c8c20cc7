"""Requests through the gate to a fake engine over real sockets: what passes, what does not, and who gets blamed."""

import asyncio
import io
import json
import re
import time
from pathlib import Path

import aiohttp
import pytest

from kvgate.front import MODEL_PATHS
from kvgate.protocol import BoundedProtocol
from kvgate.proxy import Answer
from kvgate.sleep import State
from tests.kvgate.fake_engine import FakeEngine
from tests.kvgate.harness import eventually, running_gate, write_config

pytestmark = pytest.mark.asyncio


def one(path: Path, engine: FakeEngine, **more: object) -> Path:
    return write_config(path / "models.yaml", {"tiny": {"host": "127.0.0.1", "port": engine.port}}, **more)


async def test_body_headers_and_query_reach_the_engine_unchanged(tmp_path: Path) -> None:
    async with FakeEngine() as engine, running_gate(one(tmp_path, engine)) as client:
        raw = b'{ "model" : "tiny",\n "prompt":"\\u00e9", "unknown_field": [1, 2.50] }'
        headers = {"content-type": "application/json; x=1", "x-request-id": "abc", "authorization": "Bearer k", "te": "trailers"}
        async with client.session.post(client.base + "/v1/completions?a=%2Fb&c", data=raw, headers=headers) as answer:
            assert answer.status == 200
        call = next(call for call in engine.calls if call.path == "/v1/completions")
        assert call.body == raw
        assert call.query == [("a", "/b")]
        sent = dict(call.headers)
        assert sent["content-type"] == "application/json; x=1"
        assert sent["x-request-id"] == "abc"
        assert sent["authorization"] == "Bearer k"
        assert "te" not in sent
        assert sent["host"] == f"127.0.0.1:{engine.port}"


async def test_a_header_beyond_ascii_arrives_as_it_was_sent(tmp_path: Path) -> None:
    async with FakeEngine() as engine, running_gate(one(tmp_path, engine)) as client:
        host, port = client.base.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = b'{"model":"tiny"}'
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-user: J\xc3\xbcrgen\r\ncontent-length: %d\r\n\r\n" % len(body)
        writer.write(head + body)
        assert b" 200 " in await asyncio.wait_for(reader.readline(), 3)
        writer.close()
        call = next(call for call in engine.calls if call.path == "/v1/completions")
        assert dict(call.headers)["x-user"].encode("latin-1") == b"J\xc3\xbcrgen"


async def test_every_model_path_is_passed_on(tmp_path: Path) -> None:
    async with FakeEngine() as engine, running_gate(one(tmp_path, engine)) as client:
        for path in sorted(MODEL_PATHS):
            status, body, _ = await client.ask(path, {"model": "tiny", "prompt": path})
            assert (status, body["echo"], engine.count(path)) == (200, path, 1)


async def test_upstream_status_body_and_headers_pass_through(tmp_path: Path) -> None:
    async with FakeEngine() as engine, running_gate(one(tmp_path, engine)) as client:
        for count, status in enumerate((400, 404, 422, 429, 500, 503), 1):
            headers = {"Retry-After": "7", "X-Own": "y", "X-Kept": "z", "Connection": "x-own"}
            got, body, headers = await client.complete(status=status, headers=headers)
            assert (got, body) == (status, {"error": {"message": "as asked", "code": status}})
            assert (headers["Retry-After"], headers["X-Kept"]) == ("7", "z")
            assert "X-Own" not in headers  # named in Connection: meant for the gate only
            assert client.gate.traffic.models["tiny"].failed_total == count


async def test_stream_arrives_event_by_event(tmp_path: Path) -> None:
    async with FakeEngine() as engine, running_gate(one(tmp_path, engine)) as client:
        body = {"model": "tiny", "stream": True, "fake": {"chunks": 4, "pause": 0.1}}
        seen = []
        async with client.session.post(client.base + "/v1/completions", json=body) as answer:
            assert answer.content_type == "text/event-stream"
            async for piece in answer.content.iter_any():
                seen.append((time.monotonic(), piece))
        assert len(seen) >= 4
        assert seen[3][0] - seen[0][0] > 0.2  # as they come, not all at the end
        assert b"".join(piece for _, piece in seen).count(b"data: ") == 6
        record = client.gate.traffic.models["tiny"]
        assert (record.succeeded_total, record.completion_tokens_total, record.stream_chunks_total) == (1, 7, 6)
        stats = client.gate.traffic.stats("tiny", 60, 300)
        assert stats["first_byte_seconds"]["p50"] < stats["latency_seconds"]["p50"] - 0.2


async def test_malformed_event_stream_passes_byte_for_byte(tmp_path: Path) -> None:
    async with FakeEngine() as engine, running_gate(one(tmp_path, engine)) as client:
        status, body, _ = await client.complete(stream=True, mode="malformed", chunks=1)
        assert status == 200
        assert body.startswith(b"\xff\xfe not an event\n: \ndata:{]\r\r")
        assert body.endswith(b"data: [DONE]\n\n")


async def test_stream_longer_than_every_timeout_is_not_cut(tmp_path: Path) -> None:
    limits = {"first_byte_timeout_seconds": 0.4, "idle_timeout_seconds": 0.4, "queue_timeout_seconds": 0.4}
    async with FakeEngine() as engine, running_gate(one(tmp_path, engine, router=limits)) as client:
        status, body, _ = await client.complete(stream=True, chunks=12, pause=0.1)
        assert status == 200
        assert body.count(b"data: ") == 14


async def test_client_disconnect_closes_the_upstream_request(tmp_path: Path) -> None:
    async with FakeEngine() as engine, running_gate(one(tmp_path, engine)) as client:
        body = {"model": "tiny", "stream": True, "fake": {"chunks": 1000, "pause": 0.02}}
        answer = await client.session.post(client.base + "/v1/completions", json=body)
        await answer.content.readany()
        assert engine.running == 1
        answer.close()
        await eventually(lambda: engine.aborted == 1 and engine.running == 0)
        record = client.gate.traffic.models["tiny"]
        await eventually(lambda: record.cancelled_total == 1)
        assert (record.in_flight, record.failed_total, record.succeeded_total) == (0, 0, 0)
        assert client.gate.router.backends["tiny"].lane.running == 0


async def test_client_that_leaves_before_the_answer_closes_the_upstream_request(tmp_path: Path) -> None:
    async with FakeEngine() as engine, running_gate(one(tmp_path, engine)) as client:
        with pytest.raises(TimeoutError):
            await client.ask(
                "/v1/completions", {"model": "tiny", "fake": {"mode": "hang"}}, timeout=aiohttp.ClientTimeout(total=0.2)
            )
        await eventually(lambda: engine.aborted == 1)
        await eventually(lambda: client.gate.router.backends["tiny"].lane.running == 0)


async def test_hanging_engine_is_504_within_the_first_byte_timeout(tmp_path: Path) -> None:
    async with FakeEngine() as engine, running_gate(one(tmp_path, engine, router={"first_byte_timeout_seconds": 0.2})) as client:
        started = time.monotonic()
        status, body, _ = await client.complete(mode="hang")
        assert (status, body["error"]["code"]) == (504, "upstream_timeout")
        assert time.monotonic() - started < 2
        await eventually(lambda: engine.aborted == 1)


async def test_half_an_answer_never_looks_whole(tmp_path: Path) -> None:
    async with FakeEngine() as engine, running_gate(one(tmp_path, engine, router={"idle_timeout_seconds": 0.2})) as client:
        with pytest.raises(aiohttp.ClientError):
            await client.complete(mode="half")
        await eventually(lambda: client.gate.traffic.models["tiny"].failed_total == 1)


async def test_engine_that_breaks_off_before_answering_is_502_and_asked_once(tmp_path: Path) -> None:
    async with FakeEngine() as engine, running_gate(one(tmp_path, engine)) as client:
        status, body, _ = await client.complete(mode="reset")
        assert (status, body["error"]["code"]) == (502, "upstream_broken")
        assert engine.count("/v1/completions") == 1


@pytest.mark.parametrize("status", [101, 600, 999])
async def test_a_status_that_answers_no_request_is_502_and_the_request_is_over(tmp_path: Path, status: int) -> None:
    async with FakeEngine() as engine, running_gate(one(tmp_path, engine)) as client:
        got, body, _ = await client.complete(status=status)
        assert (got, body["error"]["code"]) == (502, "upstream_broken")
        assert str(status) in body["error"]["message"]
        record = client.gate.traffic.models["tiny"]
        assert (record.in_flight, record.failed_total) == (0, 1)
        assert client.gate.router.backends["tiny"].lane.idle


async def test_whatever_goes_wrong_inside_the_gate_the_request_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that stayed in flight would keep its model awake for ever."""

    async def fail(*_: object) -> None:
        raise KeyError("a slip of ours")

    async with FakeEngine() as engine, running_gate(one(tmp_path, engine)) as client:
        monkeypatch.setattr(Answer, "relay", fail)
        assert (await client.complete())[0] == 500
        record = client.gate.traffic.models["tiny"]
        assert (record.in_flight, record.failed_total) == (0, 1)


@pytest.mark.parametrize("said", [b"GARBAGE\r\n\r\n", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: -5\r\n\r\n"])
async def test_an_engine_that_speaks_no_http_is_told_in_plain_words(tmp_path: Path, said: bytes) -> None:
    async with FakeEngine() as engine, running_gate(one(tmp_path, engine)) as client:
        status, body, _ = await client.complete(raw=said.decode())
        assert status == 502
        message = body["error"]["message"]
        assert re.search("it closed the connection|what it sent is no HTTP", message)
        assert not set("<>\n\\") & set(message), message


async def test_engine_that_dies_in_a_stream_ends_it_with_an_error_event(tmp_path: Path) -> None:
    async with FakeEngine() as engine, running_gate(one(tmp_path, engine)) as client:
        body = {"model": "tiny", "stream": True, "fake": {"chunks": 9, "break_after": 2}}
        got = b""
        async with client.session.post(client.base + "/v1/completions", json=body) as answer:
            try:
                async for piece in answer.content.iter_any():
                    got += piece
            except aiohttp.ClientError:
                cut = True
            else:
                cut = False
        assert cut
        events = [json.loads(line[6:]) for line in got.decode().split("\n") if line.startswith("data: ")]
        assert len(events) == 3
        assert events[-1]["error"]["code"] == "upstream_broken"
        assert client.gate.traffic.models["tiny"].failed_total == 1


async def test_no_connection_is_tried_again_then_503_with_retry_after(tmp_path: Path) -> None:
    async with FakeEngine() as engine:
        config = one(tmp_path, engine, router={"health_interval_seconds": 60})
        async with running_gate(config) as client:
            await engine.stop()
            status, body, headers = await client.complete()
            assert (status, body["error"]["code"]) == (503, "model_unavailable")
            assert int(headers["Retry-After"]) >= 1
            # The refused connection also told the watch, which finds the engine gone and back without waiting 60 s.
            await client.complete()
            await client.complete()
            await client.until(State.FAILED)


async def test_connection_refused_for_a_moment_is_bridged(tmp_path: Path) -> None:
    async with FakeEngine() as engine, running_gate(one(tmp_path, engine, router={"health_interval_seconds": 60})) as client:
        await engine.stop()
        asking = asyncio.create_task(client.complete(prompt="once"))
        await asyncio.sleep(0.05)
        await engine.start()
        status, body, _ = await asking
        assert (status, body["echo"]) == (200, "once")
        assert engine.count("/v1/completions") == 1


NO_MODEL = (b"", b"{", b"[1]", b'{"model": 5}', b'{"prompt": "x"}', b"[" * 100_000, b'\xff{"model": "tiny"}', b'{"model": null}')


async def test_an_engine_that_died_a_moment_ago_is_waited_for(tmp_path: Path) -> None:
    """Nothing was sent: who met the dead engine waits for the next one, as do those who come after."""
    async with FakeEngine() as engine, running_gate(one(tmp_path, engine)) as client:
        await engine.stop()
        asking = asyncio.create_task(client.complete())
        await eventually(lambda: client.gate.router.backends["tiny"].lane.running == 1)
        machine = client.machine()
        machine.patient = True  # as who starts engines says it
        machine.lost("the engine was ended by signal 9", hopeless=False)
        await eventually(lambda: client.gate.router.backends["tiny"].lane.waiting == 1)
        await engine.start()
        assert (await asking)[0] == 200
        record = client.gate.traffic.models["tiny"]
        assert (record.requests_total, record.succeeded_total) == (1, 1)


async def test_what_names_no_model_is_400(tmp_path: Path) -> None:
    async with FakeEngine() as engine, running_gate(one(tmp_path, engine)) as client:
        for raw in NO_MODEL:
            async with client.session.post(client.base + "/v1/completions", data=raw) as answer:
                body = await answer.json()
                assert (answer.status, body["error"]["code"]) == (400, "invalid_request"), raw[:20]
        assert engine.count("/v1/completions") == 0


async def test_unknown_model_is_404_and_leaves_no_trace(tmp_path: Path) -> None:
    async with FakeEngine() as engine, running_gate(one(tmp_path, engine)) as client:
        status, body, _ = await client.complete("tinny")
        assert (status, body["error"]["code"], body["error"]["param"]) == (404, "model_not_found", "model")
        assert "did you mean 'tiny'" in body["error"]["message"].lower()
        assert set(client.gate.traffic.models) == {"tiny"}


async def test_body_over_the_limit_is_413_announced_or_not(tmp_path: Path) -> None:
    async with FakeEngine() as engine, running_gate(one(tmp_path, engine, router={"max_body_bytes": "64K"})) as client:
        big = b'{"model": "tiny", "prompt": "' + b"x" * 70_000 + b'"}'

        async def pieces() -> object:
            for i in range(0, len(big), 10_000):
                yield big[i : i + 10_000]

        for data in (big, pieces()):
            async with client.session.post(client.base + "/v1/completions", data=data) as answer:
                assert answer.status == 413
                assert (await answer.json())["error"]["code"] == "request_too_large"
        assert engine.count("/v1/completions") == 0


async def test_large_body_passes_whole(tmp_path: Path) -> None:
    async with FakeEngine() as engine, running_gate(one(tmp_path, engine)) as client:
        prompt = "x" * (3 << 20)
        data = io.BytesIO(json.dumps({"model": "tiny", "prompt": prompt}).encode())
        async with client.session.post(client.base + "/v1/completions", data=data) as answer:
            assert (answer.status, (await answer.json())["echo"]) == (200, prompt)


async def test_client_that_trickles_its_body_is_400(tmp_path: Path) -> None:
    async with FakeEngine() as engine, running_gate(one(tmp_path, engine, router={"body_timeout_seconds": 0.2})) as client:
        host, port = client.base.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        answer = await asyncio.wait_for(reader.read(), 3)  # to its end: what came of the body serves no other request
        assert b" 400 " in answer.splitlines()[0]
        assert b"\r\nconnection: close\r\n" in answer
        writer.close()


async def test_more_connections_than_may_be_are_told_when_to_come_back_and_probes_are_answered(tmp_path: Path) -> None:
    async with FakeEngine() as engine, running_gate(one(tmp_path, engine, router={"max_connections": 3})) as client:
        await client.session.close()
        host, port = client.base.removeprefix("http://").split(":")

        async def ask(path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
            return reader, writer

        await eventually(lambda: not client.gate.connections)
        kept = [await ask("/v1/models") for _ in range(3)]
        assert [b" 200 " in await reader.readline() for reader, _ in kept] == [True] * 3
        reader, refused = await ask("/v1/models")
        head, _, body = (await asyncio.wait_for(reader.read(), 3)).partition(b"\r\n\r\n")
        assert (b" 503 " in head, b"retry-after: 1" in head, b"connection: close" in head) == (True, True, True)
        assert json.loads(body)["error"]["code"] == "too_many_connections"
        reader, writer = await ask("/healthz")
        assert b" 200 " in await reader.readline()
        for other in (writer, refused, *(writer for _, writer in kept)):
            other.close()
        await eventually(lambda: not client.gate.connections)
        reader, writer = await ask("/v1/models")
        assert b" 200 " in await reader.readline()
        writer.close()


async def test_slow_reader_holds_the_engine_back(tmp_path: Path) -> None:
    """Back-pressure: what the client does not read stays in the engine, not in the gate."""
    async with FakeEngine() as engine, running_gate(one(tmp_path, engine)) as client:
        host, port = client.base.removeprefix("http://").split(":")
        body = json.dumps({"model": "tiny", "stream": True, "fake": {"chunks": 4000, "chunk": "y" * 16_384}}).encode()
        reader, writer = await asyncio.open_connection(host, int(port), limit=4096)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        await reader.readline()
        record = client.gate.traffic.models["tiny"]
        await asyncio.sleep(1.0)
        held = engine.running
        assert held == 1  # 64 MiB would have gone through by now, had nobody held it back
        writer.transport.abort()
        await eventually(lambda: record.cancelled_total == 1 and engine.running == 0)
        assert record.response_bytes_total < 16 << 20


async def test_concurrency_limit_queues_in_order_and_the_full_queue_is_429(tmp_path: Path) -> None:
    async with FakeEngine() as engine, running_gate(one(tmp_path, engine, router={"max_concurrency": 1, "max_queue": 3})) as client:
        asking = []
        for i in range(4):
            asking.append(asyncio.create_task(client.complete(prompt=str(i), delay=0 if i else 1.0)))
            await eventually(lambda i=i: client.gate.traffic.models["tiny"].in_flight == i + 1)
            lane = client.gate.router.backends["tiny"].lane
            await eventually(lambda i=i, lane=lane: lane.running + lane.waiting == i + 1)
        status, body, headers = await client.complete(prompt="over")
        assert (status, body["error"]["code"], headers["Retry-After"]) == (429, "queue_full", "1")
        assert [answer[0] for answer in await asyncio.gather(*asking)] == [200] * 4
        assert engine.order == ["0", "1", "2", "3"]
        assert engine.most_running == 1


async def test_waiting_in_the_queue_ends_with_503(tmp_path: Path) -> None:
    limits = {"max_concurrency": 1, "queue_timeout_seconds": 0.2}
    async with FakeEngine() as engine, running_gate(one(tmp_path, engine, router=limits)) as client:
        first = asyncio.create_task(client.complete(delay=0.8))
        await eventually(lambda: engine.running == 1)
        status, _, headers = await client.complete()
        assert status == 503
        assert int(headers["Retry-After"]) >= 1
        assert (await first)[0] == 200


async def test_gate_keys_do_not_reach_the_engine_but_the_engines_own_key_does(tmp_path: Path) -> None:
    import hashlib

    keys = tmp_path / "keys"
    keys.write_text(f"ann client sha256:{hashlib.sha256(b'secret').hexdigest()}\n")
    keys.chmod(0o600)
    async with FakeEngine() as engine:
        models = {
            "tiny": {"host": "127.0.0.1", "port": engine.port},
            "other": {"host": "::1", "port": engine.port, "api_key": "up"},
        }
        models["other"]["host"] = "localhost"
        config = write_config(tmp_path / "m.yaml", {"tiny": models["tiny"]}, router={"api_keys": str(keys)})
        async with running_gate(config) as client:
            status, _, headers = await client.complete()
            assert (status, headers["WWW-Authenticate"]) == (401, "Bearer")
            ask = {"model": "tiny", "prompt": "x"}
            assert (await client.ask("/v1/completions", ask, headers={"authorization": "Bearer nope"}))[0] == 401
            assert (await client.ask("/v1/completions", ask, headers={"authorization": "Bearer secret"}))[0] == 200
        config = write_config(tmp_path / "m2.yaml", {"tiny": models["other"]})
        async with running_gate(config) as client:
            assert (await client.ask("/v1/completions", ask, headers={"authorization": "Bearer mine"}))[0] == 200
        first, second = [dict(call.headers) for call in engine.calls if call.path == "/v1/completions"]
        assert "authorization" not in first
        assert second["authorization"] == "Bearer up"


async def test_head_of_a_request_is_bounded_in_size_and_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BoundedProtocol, "head_timeout_s", 0.2)
    async with FakeEngine() as engine, running_gate(one(tmp_path, engine)) as client:
        host, port = client.base.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\nx-long: " + b"y" * 70_000)
        assert b" 431 " in await asyncio.wait_for(reader.readline(), 3)
        writer.close()
        # Never a byte, half a head, and half a second head after a whole request.
        for sent in (b"", b"GET /healthz HTTP/1.1\r\nhost:", b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\nGET /hea"):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(sent)
            got = await asyncio.wait_for(reader.read(), 3)
            assert (b"200 OK" in got) == (b"\r\n\r\n" in sent)
            writer.close()
        # Slow bodies and slow answers are not heads.
        assert (await client.complete(delay=0.5))[0] == 200
