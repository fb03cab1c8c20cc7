"""A scriptable engine: a real HTTP server on loopback that behaves, or misbehaves, as the request or the test asks.

In a request body, `fake` says how this one request goes:
    {"delay": s}            before the status line          {"status": n}      answer with that status and an error body
    {"chunks": n, "pause": s, "chunk": text}  a stream      {"break_after": n} reset the connection after n chunks
    {"mode": "hang"}        accept and never answer         {"mode": "reset"}  close without an answer
    {"mode": "half"}        headers and half a body, then silence
    {"mode": "malformed"}   bytes that are no event stream, as text/event-stream
    {"size": n}             a body of n bytes               {"headers": {...}} extra response headers
    {"raw": text}           these bytes, then close
On the engine: `sleep_status`, `wake_status`, `wake_delay`, `sleeping`, `busy`, `dev_mode`, `mute`, `healthy`, `ignore_wake`.

As a program: `python fake_engine.py --port N [--start-delay S] [--die-after S] [--model NAME]`, for tests that start engines.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from typing import Self
from urllib.parse import parse_qsl, urlsplit


@dataclass
class Call:
    method: str
    path: str
    query: list[tuple[str, str]]
    headers: list[tuple[str, str]]
    body: bytes
    when: float = field(default_factory=time.monotonic)


@dataclass
class FakeEngine:
    model: str = "tiny"
    port: int = 0
    healthy: bool = True
    sleeping: bool = False
    dev_mode: bool = True
    mute: bool = False
    sleep_status: int = 200
    wake_status: int = 200
    wake_delay: float = 0.0
    sleep_delay: float = 0.0
    ignore_wake: bool = False
    ignore_sleep: bool = False
    busy: int = 0
    running: int = 0
    aborted: int = 0
    slept_while_running: int = 0
    served_while_asleep: int = 0
    most_running: int = 0
    calls: list[Call] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    _server: asyncio.Server | None = None
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)
    _tasks: set["asyncio.Task[None]"] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def count(self, path: str) -> int:
        return sum(call.path == path for call in self.calls)

    async def start(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port, limit=1 << 26)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def stop(self) -> None:
        """As a crash: nothing is finished, every connection is reset."""
        if self._server is None:
            return
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()
        self._server = None

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            self._writers.discard(writer)
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, target, _ = head[0].split(" ")
        headers = [(name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in head[1:] if line)]
        length = int(dict(headers).get("content-length", "0"))
        body = await reader.readexactly(length)
        where = urlsplit(target)
        call = Call(method, where.path, parse_qsl(where.query), headers, body)
        self.calls.append(call)
        return await self._route(call, reader, writer)

    async def _route(self, call: Call, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        match call.path:
            case "/health" | "/metrics" | "/is_sleeping" if self.mute:
                return self._reply(writer, 404, {"detail": "Not Found"})
            case "/health":
                return self._reply(writer, 200 if self.healthy else 503)
            case "/v1/models":
                card = {"id": self.model, "object": "model", "created": 1, "owned_by": "fake", "max_model_len": 4096}
                return self._reply(writer, 200, {"object": "list", "data": [card]})
            case "/metrics":
                text = f'vllm:num_requests_running{{model_name="x"}} {float(self.busy)}\nvllm:num_requests_waiting{{}} 0.0\n'
                return self._reply(writer, 200, text)
            case "/is_sleeping" | "/sleep" | "/wake_up" | "/collective_rpc" | "/reset_prefix_cache" if not self.dev_mode:
                return self._reply(writer, 404, {"detail": "Not Found"})
            case "/is_sleeping":
                return self._reply(writer, 200, {"is_sleeping": self.sleeping})
            case "/sleep":
                self.order.append("sleep")
                self.slept_while_running += self.running
                await asyncio.sleep(self.sleep_delay)
                if self.sleep_status == 200 and not self.ignore_sleep:
                    self.sleeping = True
                return self._reply(writer, self.sleep_status, {"detail": "no"} if self.sleep_status != 200 else None)
            case "/wake_up":
                self.order.append("wake")
                await asyncio.sleep(self.wake_delay)
                if self.wake_status == 200 and not self.ignore_wake:
                    self.sleeping = dict(call.query).get("tags") == "weights"
                return self._reply(writer, self.wake_status, {"detail": "no"} if self.wake_status != 200 else None)
            case "/collective_rpc" | "/reset_prefix_cache":
                return self._reply(writer, 200)
        return await self._generate(call, reader, writer)

    def _reply(self, writer: asyncio.StreamWriter, status: int, body: object = None, extra: dict[str, str] | None = None) -> bool:
        data = b"" if body is None else body.encode() if isinstance(body, str) else json.dumps(body).encode()
        kind = "text/plain" if isinstance(body, str) else "application/json"
        lines = [f"HTTP/1.1 {status} X", f"content-type: {kind}", f"content-length: {len(data)}"]
        lines += [f"{name}: {value}" for name, value in (extra or {}).items()]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + data)
        return True

    async def _generate(self, call: Call, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        try:
            body = json.loads(call.body or b"{}")
        except ValueError:
            return self._reply(writer, 400, {"error": "bad json"})
        how = body.get("fake", {})
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        self.served_while_asleep += self.sleeping
        self.order.append(str(body.get("prompt", "request")))
        # Whoever closes the connection while we answer is noticed here, as vLLM notices it.
        watch = asyncio.ensure_future(reader.read(1))
        answer = asyncio.ensure_future(self._answer(call, body, how, writer))
        try:
            await asyncio.wait([watch, answer], return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                self.aborted += 1
                answer.cancel()
                return False
            return answer.result()
        except ConnectionError:
            self.aborted += 1
            return False
        finally:
            self.running -= 1
            for task in (watch, answer):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError, ConnectionError):
                await watch

    async def _answer(self, call: Call, body: dict, how: dict, writer: asyncio.StreamWriter) -> bool:
        await asyncio.sleep(how.get("delay", 0))
        if how.get("mode") == "hang":
            await asyncio.sleep(3600)
        if how.get("mode") == "reset":
            writer.transport.abort()
            return False
        if "raw" in how:
            writer.write(how["raw"].encode("latin-1"))
            await writer.drain()
            return False
        if "status" in how:
            return self._reply(writer, how["status"], {"error": {"message": "as asked", "code": how["status"]}}, how.get("headers"))
        if how.get("mode") == "half":
            writer.write(b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{"half": ')
            await asyncio.sleep(3600)
        if body.get("stream"):
            return await self._stream(how, writer)
        if "size" in how:
            return self._reply(writer, 200, "x" * how["size"], how.get("headers"))
        usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
        answer = {"id": "x", "object": "text_completion", "echo": body.get("prompt"), "choices": [], "usage": usage}
        return self._reply(writer, 200, answer, how.get("headers"))

    async def _stream(self, how: dict, writer: asyncio.StreamWriter) -> bool:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        if how.get("mode") == "malformed":
            self._chunk(writer, b"\xff\xfe not an event\n: \ndata:{]\r\r")
        for i in range(how.get("chunks", 3)):
            if how.get("break_after") == i:
                await writer.drain()
                await asyncio.sleep(0.02)
                writer.transport.abort()
                return False
            text = how.get("chunk", f"tok{i}")
            self._chunk(writer, b"data: " + json.dumps({"choices": [{"text": text}]}).encode() + b"\n\n")
            await writer.drain()
            if how.get("pause"):
                await asyncio.sleep(how["pause"])
        self._chunk(writer, b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":7}}\n\n')
        self._chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        return True

    def _chunk(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(b"%x\r\n%s\r\n" % (len(data), data))


async def _program(args: argparse.Namespace) -> None:
    if args.stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if args.note:
        noted = {"pid": os.getpid(), "port": args.port, "env": dict(os.environ), "argv": sys.argv, "when": time.monotonic()}
        with open(args.note, "a") as file:
            print(json.dumps(noted), file=file, flush=True)
    await asyncio.sleep(args.start_delay)
    engine = await FakeEngine(model=args.model, port=args.port).start()
    print("engine is up", flush=True)
    try:
        await asyncio.sleep(args.die_after or 3600)
    finally:
        await engine.stop()
    sys.exit(9)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--start-delay", type=float, default=0.0)
    parser.add_argument("--die-after", type=float, default=0.0)
    parser.add_argument("--note", default="")
    parser.add_argument("--stubborn", action="store_true")
    asyncio.run(_program(parser.parse_known_args()[0]))
