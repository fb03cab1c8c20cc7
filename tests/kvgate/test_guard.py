"""Who may ask: keys, roles, and what a web page cannot do."""

import hashlib
import os
from pathlib import Path

import aiohttp
import pytest

from kvgate.config import load
from kvgate.errors import ConfigError, Forbidden, RequestError, Unauthorized
from kvgate.guard import Guard, KeyRing, is_loopback
from kvgate.serve import Gate, listen
from kvtools.errors import Refused
from tests.kvgate.fake_engine import FakeEngine
from tests.kvgate.harness import running_gate, write_config


def hashed(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def key_file(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "keys"
    path.write_text(text)
    path.chmod(mode)
    return path


def ring(folder: Path) -> KeyRing:
    text = f"# who may what\nann admin sha256:{hashed('a-key')}\nbob client sha256:{hashed('b-key')}  # the app\n\n"
    return KeyRing.load(key_file(folder, text))


def bearer(key: str) -> list[tuple[bytes, bytes]]:
    return [(b"host", b"127.0.0.1"), (b"authorization", f"Bearer {key}".encode())]


def test_roles(tmp_path: Path) -> None:
    guard = Guard(ring(tmp_path))
    guard.check("/v1/completions", bearer("b-key"), inference=True)
    guard.check("/v1/completions", bearer("a-key"), inference=True)
    guard.check("/metrics", bearer("b-key"), inference=False)
    guard.check("/action/sleep/m", bearer("a-key"), inference=False)
    with pytest.raises(Forbidden, match="'bob'"):
        guard.check("/action/sleep/m", bearer("b-key"), inference=False)
    for path in ("/health", "/healthz", "/readyz"):
        guard.check(path, [], inference=False)


BAD = (b"", b"Bearer", b"Bearer ", b"Bearer c-key", b"Basic a-key", b"a-key", b"Bearer \xff\xff", b"bearer  b-key x")


@pytest.mark.parametrize("value", BAD)
def test_keys_that_open_nothing(tmp_path: Path, value: bytes) -> None:
    with pytest.raises(Unauthorized):
        Guard(ring(tmp_path)).check("/v1/completions", [(b"authorization", value)], inference=True)


@pytest.mark.parametrize(
    ("text", "mode", "says"),
    [
        ("", 0o600, "holds no key"),
        ("ann root sha256:" + "0" * 64, 0o600, "keys:1: not a key line"),
        ("ann admin secret", 0o600, "not a key line"),
        ("ann admin sha256:" + "A" * 64, 0o600, "not a key line"),
        ("ann admin sha256:" + "0" * 64, 0o644, r"open to others \(mode 0644\)"),
        (f"ann admin sha256:{'0' * 64}\nbob client sha256:{'0' * 64}", 0o600, "keys:2: this key stands there twice"),
    ],
)
def test_key_files_that_are_refused(tmp_path: Path, text: str, mode: int, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        KeyRing.load(key_file(tmp_path, text, mode))
    with pytest.raises(ConfigError, match="No such file"):
        KeyRing.load(tmp_path / "none")


def test_key_files_that_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ConfigError, match="is a pipe"):
        KeyRing.load(tmp_path / "pipe")  # which nobody writes: reading it would wait for ever
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "binary").chmod(0o600)
    with pytest.raises(ConfigError, match="not a text file"):
        KeyRing.load(tmp_path / "binary")


@pytest.mark.parametrize(
    ("headers", "passes"),
    [
        ({"host": "127.0.0.1:8080"}, True),
        ({"host": "localhost:8080"}, True),
        ({"host": "LOCALHOST"}, True),
        ({"host": "[::1]:8080"}, True),
        ({"host": "10.0.0.5:8080"}, True),
        ({"host": "gate.example:8080"}, True),
        ({"host": "evil.example:8080"}, False),
        ({"host": "127.0.0.1.evil.example"}, False),
        ({"host": ""}, False),
        ({}, False),
        ({"host": "localhost", "origin": "http://localhost:3000"}, False),
        ({"host": "localhost", "origin": "null"}, False),
        ({"host": "localhost", "origin": "https://ui.example"}, True),
        ({"host": "localhost", "sec-fetch-site": "cross-site"}, False),
        ({"host": "localhost", "sec-fetch-site": "none"}, True),
    ],
)
def test_web_pages_and_rebound_names(headers: dict[str, str], passes: bool) -> None:
    guard = Guard(None, ["gate.example"], ["https://ui.example"])
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    try:
        guard.check("/action/sleep/m", raw, inference=False)
    except RequestError as error:
        said: RequestError | None = error
    else:
        said = None
    assert isinstance(said, Forbidden) is not passes


def test_beyond_loopback_needs_keys(tmp_path: Path) -> None:
    from dataclasses import replace

    config = replace(load(write_config(tmp_path / "m.yaml", {"m": {"port": 1}})), host="0.0.0.0")
    with pytest.raises(Refused, match="no API keys") as caught:
        listen(config, allow_open=False)
    assert "--allow-open" in caught.value.hint
    listen(config, allow_open=True).close()
    listen(replace(config, api_keys=tmp_path / "keys"), allow_open=False).close()


def test_loopback() -> None:
    assert [is_loopback(host) for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost")] == [True] * 4
    assert [is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "gate")] == [False] * 4


def one(folder: Path, engine: FakeEngine) -> Path:
    return write_config(folder / "m.yaml", {"tiny": {"host": "127.0.0.1", "port": engine.port}})


@pytest.mark.asyncio
async def test_a_page_cannot_put_a_model_to_sleep(tmp_path: Path) -> None:
    async with FakeEngine() as engine, running_gate(one(tmp_path, engine)) as client:
        url = client.base + "/action/sleep/tiny"
        for headers in ({"Origin": "https://evil.example"}, {"Host": "evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
            async with client.session.post(url, headers=headers) as answer:
                assert (answer.status, "error" in await answer.json()) == (403, True)
        # Model paths are for applications in browsers too, and behind any name.
        status, _, _ = await client.ask("/v1/completions", {"model": "tiny"}, headers={"Origin": "https://app.example"})
        assert status == 200
        assert engine.count("/sleep") == 0


@pytest.mark.asyncio
async def test_websocket_is_refused(tmp_path: Path) -> None:
    async with FakeEngine() as engine, running_gate(one(tmp_path, engine)) as client:
        with pytest.raises(aiohttp.WSServerHandshakeError):
            await client.session.ws_connect(client.base + "/v1/realtime")


@pytest.mark.asyncio
async def test_reload_cannot_open_a_gate_that_others_reach(tmp_path: Path) -> None:
    keys = key_file(tmp_path, f"ann admin sha256:{hashed('a-key')}\n")
    async with FakeEngine() as engine:
        models = {"tiny": {"host": "127.0.0.1", "port": engine.port}}
        gate = Gate(load(write_config(tmp_path / "m.yaml", models, router={"api_keys": str(keys)})), may_be_open=False)
        write_config(tmp_path / "m.yaml", models)
        with pytest.raises(ConfigError, match="api_keys is gone"):
            gate.reload()
        assert gate.proxy.hide_credentials
        await gate.stop()


@pytest.mark.asyncio
async def test_what_is_cached_is_an_operators_business(tmp_path: Path) -> None:
    """Whoever may ask what is cached learns what others have asked."""
    ring(tmp_path)
    async with FakeEngine() as engine:
        models = {"tiny": {"host": "127.0.0.1", "port": engine.port}}
        path = write_config(tmp_path / "models.yaml", models, router={"api_keys": str(tmp_path / "keys")})
        async with running_gate(path) as client:
            for key, status in (("b-key", 403), ("a-key", 200)):
                headers = {"authorization": f"Bearer {key}"}
                for cached in ("/v1/cache/why", "/v1/cache/keys", "/v1/cache/prewarm"):
                    answer = await client.ask(cached, {"model": "tiny"}, headers=headers)
                    assert answer[0] == status
                    assert status == 200 or answer[1]["error"]["code"] == "forbidden"
                assert (await client.ask("/v1/cache/engine?model=tiny", headers=headers))[0] == status
                assert (await client.ask("/v1/completions", {"model": "tiny"}, headers=headers))[0] == 200
