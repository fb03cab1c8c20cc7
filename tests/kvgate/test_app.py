"""The commands as an operator runs them: real processes, real signals, and what they say."""

import hashlib
import http.server
import json
import os
import resource
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvdoctor import api
from kvgate import preflight
from kvtools.errors import TimedOut
from kvtools.segments.stats import instance_of_path
from tests.kvgate.process import GateProcess, alive, gate, instance, notes, write
from tests.support.processes import run_cli, run_python


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GateProcess]:
    folder = tmp_path_factory.mktemp("gate")
    with gate(folder, instances=[instance("one", folder), instance("org/two", folder, devices=[1])]) as process:
        process.until(lambda: {process.state("one"), process.state("org/two")} == {"awake"})
        yield process


def test_models_sleep_wake_and_traffic(running: GateProcess) -> None:
    url = ("--url", running.url)
    assert running.ask("/v1/completions", {"model": "one"})[0] == 200
    shown = run_cli("kvgate", "models", *url)
    assert (shown.rc, shown.stderr) == (0, "")
    assert [line.split()[:2] for line in shown.stdout.splitlines()] == [["MODEL", "STATE"], ["one", "awake"], ["org/two", "awake"]]

    asleep = run_cli("kvgate", "sleep", "org/two", *url)
    assert (asleep.rc, asleep.stdout) == (0, "org/two: asleep\n")
    body = run_cli("kvgate", "models", "--json", *url).json()
    assert body["schema"] == "kvgate.models/1"
    assert {model["model"]: model["state"] for model in body["models"]} == {"one": "awake", "org/two": "asleep"}
    woken = run_cli("kvgate", "wake", "org/two", "--force", "--json", *url).json()
    assert woken == {"schema": "kvgate.wake/1", "model_name": "org/two", "success": True, "message": "awake", "state": "awake"}

    traffic = run_cli("kvgate", "traffic", *url, "--window", "5m")
    assert traffic.rc == 0
    assert traffic.stdout.splitlines()[1].split()[:4] == ["one", "1", "1", "0"]
    body = run_cli("kvgate", "traffic", "--json", env={"KVGATE_URL": running.url}).json()
    assert (body["schema"], body["window_seconds"], body["models"][0]["total_requests"]) == ("kvgate.traffic/1", 60, 1)


def test_a_start_shows_what_kvdoctor_warns_of_and_refuses_nothing(tmp_path: Path) -> None:
    missing = tmp_path / "not-there"
    with gate(tmp_path, instances=[instance("one", tmp_path)], environ={"KVD_LONG_PATH": str(missing)}) as process:
        process.until(lambda: "the gate serves all the same" in "".join(process.log))
        told = "".join(process.log)
        assert f"WARNING kvgate.preflight: this host: fail: {missing}: Storage: no such directory (storage.exists)" in told
        assert "Traceback" not in told
        process.until(lambda: process.state("one") == "awake")
        assert process.ask("/v1/completions", {"model": "one"})[0] == 200


def test_a_look_that_fails_is_one_line(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_: object, **__: object) -> None:
        raise TimedOut("the look does not come back from /opt/rocm within 20 s")

    monkeypatch.setattr(api, "collect_host", fail)
    preflight.start().join()
    assert [record.getMessage() for record in caplog.records] == [
        "kvdoctor could not look at this host: the look does not come back from /opt/rocm within 20 s"
    ]


@pytest.mark.parametrize(
    ("words", "rc", "says"),
    [
        (("sleep", "nope"), 3, "kvgate: error: the model 'nope' does not exist"),
        (("sleep", "one", "--level", "7"), 2, "7 is not in the range"),
        (("traffic", "--window", "soon"), 2, "not a duration: 'soon'"),
        (("wake", "one", "--tag", "wieghts"), 2, "no part of a model: 'wieghts'"),
        (("models", "--url", "http://[::1"), 2, "not a gate's URL: 'http://[::1'"),
        (("models", "--url", "http://127.0.0.1:99999"), 2, "not a gate's URL: 'http://127.0.0.1:99999'"),
        (("traffic", "--window", "2h"), 1, "window is a number of seconds above 0 and up to 3600"),
        (("models", "--key", "env:KVGATE_TEST_UNSET"), 2, "environment variable KVGATE_TEST_UNSET is not set"),
    ],
)
def test_errors_are_one_line_and_a_status(running: GateProcess, words: tuple[str, ...], rc: int, says: str) -> None:
    ran = run_cli("kvgate", *words, env={"KVGATE_URL": running.url})
    assert (ran.rc, ran.stdout) == (rc, "")
    assert says in ran.stderr.splitlines()[0]
    assert "Traceback" not in ran.stderr


class _Other(http.server.BaseHTTPRequestHandler):
    """A server that speaks JSON, and is no gate."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"object": "list", "models": []}')

    do_POST = do_GET


def test_no_gate_and_something_else_there(tmp_path: Path) -> None:
    ran = run_cli("kvgate", "models", "--url", "http://127.0.0.1:1")
    assert ran.rc == 4
    assert ran.stderr.splitlines()[0] == "kvgate: error: cannot reach the gate at http://127.0.0.1:1: Connection refused"
    for wrong in ("http://[::1", "http://127.0.0.1:x", "http://127.0.0.1:0", "http://127.0.0.1/a b"):
        ran = run_cli("kvgate", "models", "--url", wrong)
        assert (ran.rc, ran.stderr.splitlines()[0]) == (2, f"kvgate: error: not a gate's URL: {wrong!r}")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        ran = run_cli("kvgate", "models", "--url", f"http://127.0.0.1:{server.server_port}")
        assert (ran.rc, "is not kvgate (HTTP 501)" in ran.stderr) == (4, True)
        server.RequestHandlerClass = _Other
        for words in (["models"], ["traffic"], ["sleep", "m"]):
            ran = run_cli("kvgate", *words, "--url", f"http://127.0.0.1:{server.server_port}")
            assert (ran.rc, "is not kvgate (HTTP 200)" in ran.stderr) == (4, True), words
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_key_of_the_wrong_role_and_none(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    roles = {"ann": "admin", "bob": "client"}
    keys.write_text("".join(f"{name} {role} sha256:{hashlib.sha256(name.encode()).hexdigest()}\n" for name, role in roles.items()))
    keys.chmod(0o600)
    with gate(tmp_path, instances=[instance("one", tmp_path)], router={"api_keys": str(keys)}) as process:
        url = ("--url", process.url)
        assert "no API key given" in (ran := run_cli("kvgate", "models", *url)).stderr
        assert ran.rc == 2
        assert run_cli("kvgate", "models", *url, "--key", "env:K", env={"K": "ann"}).rc == 0
        assert "'bob' may not" in run_cli("kvgate", "models", *url, env={"KVGATE_KEY": "env:K", "K": "bob"}).stderr
        # The file is read again on reload.
        keys.write_text("\n".join(keys.read_text().splitlines()[:1]) + "\n")
        process.process.send_signal(signal.SIGHUP)
        process.until(lambda: any("reloaded" in line for line in process.log))
        assert "not known" in run_cli("kvgate", "models", *url, "--key", "env:K", env={"K": "bob"}).stderr


def test_term_lets_a_stream_end_and_takes_no_new_connection(tmp_path: Path) -> None:
    with gate(tmp_path, instances=[instance("one", tmp_path)], router={"shutdown_timeout_seconds": 8}) as process:
        process.until(lambda: process.state("one") == "awake")
        got: list[bytes] = []
        body = json.dumps({"model": "one", "stream": True, "fake": {"chunks": 10, "pause": 0.1}}).encode()

        def read() -> None:
            with urllib.request.urlopen(process.url + "/v1/completions", data=body) as answer:
                got.append(answer.read())

        reader = threading.Thread(target=read)
        reader.start()
        process.until(lambda: process.ask("/models")[1]["models"]["one"]["running"] == 1)
        process.process.send_signal(signal.SIGTERM)
        process.until(lambda: any("stopping: 1 requests" in line for line in process.log))
        process.until(lambda: not accepts(process.url), timeout=3)
        reader.join(10)
        assert got[0].endswith(b"data: [DONE]\n\n")
        assert process.stop() == 0


def accepts(url: str) -> bool:
    try:
        urllib.request.urlopen(url + "/healthz").close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


def test_second_signal_does_not_wait(tmp_path: Path) -> None:
    with gate(tmp_path, instances=[instance("one", tmp_path)], router={"shutdown_timeout_seconds": 60}) as process:
        process.until(lambda: process.state("one") == "awake")
        body = json.dumps({"model": "one", "fake": {"mode": "hang"}}).encode()
        hanging = threading.Thread(target=_ignore, args=(process.url, body))
        hanging.start()
        process.until(lambda: process.ask("/models")[1]["models"]["one"]["running"] == 1)
        process.process.send_signal(signal.SIGINT)
        process.until(lambda: any("stopping: 1 requests" in line for line in process.log))
        assert process.stop(signal.SIGINT, timeout=10) == 0
        hanging.join(10)


def test_the_order_of_a_stop_and_what_never_ends_is_ended_all_the_same(tmp_path: Path) -> None:
    """A request that hangs, an engine that ignores SIGTERM, a model that sleeps: each has its time and no more."""
    instances = [instance("one", tmp_path), instance("two", tmp_path, args="--stubborn")]
    with gate(tmp_path, instances=instances, router={"shutdown_timeout_seconds": 1}) as process:
        process.until(lambda: {process.state("one"), process.state("two")} == {"awake"})
        pids = [notes(tmp_path, name)[0]["pid"] for name in ("one", "two")]
        hanging = threading.Thread(
            target=_ignore, args=(process.url, json.dumps({"model": "one", "fake": {"mode": "hang"}}).encode())
        )
        hanging.start()
        process.until(lambda: process.ask("/models")[1]["models"]["one"]["running"] == 1)
        begun = time.monotonic()
        assert process.stop(timeout=30) == 0
        assert time.monotonic() - begun < 25, "twice the second it has, and much patience with a busy machine"
        hanging.join(10)
        told = [line for line in process.log if "kvgate.serve" in line]
        steps = [
            "stopping: 1 requests have 1 s to end",
            "requests have ended: ending 2 engines, which have 1 s",
            "INFO kvgate.serve: stopped",
        ]
        places = [next(i for i, line in enumerate(told) if step in line) for step in steps]
        assert places == sorted(places)
        assert not any(alive(pid) for pid in pids)
        assert not list(Path("/dev/shm").glob("kvtools.gate." + instance_of_path(process.config)))


def _ignore(url: str, body: bytes) -> None:
    try:
        urllib.request.urlopen(url + "/v1/completions", data=body).close()
    except OSError:
        pass


def test_a_pipe_as_configuration_is_read_once_and_a_reload_does_not_wait_for_it(tmp_path: Path) -> None:
    text = write(tmp_path, instances=[instance("one", tmp_path)]).read_text()
    pipe = tmp_path / "pipe.yaml"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=(text,))
    writer.start()
    process = GateProcess(pipe)
    try:
        writer.join(10)
        process.process.send_signal(signal.SIGHUP)
        process.until(lambda: "not reloaded" in "".join(process.log))
        assert "is no regular file and cannot be read again (restart the gate)" in "".join(process.log)
        assert process.ask("/healthz")[0] == 200
    finally:
        process.stop()


def test_garbage_is_answered_and_does_not_fill_the_log(running: GateProcess) -> None:
    host, port = running.url.removeprefix("http://").split(":")
    upgrade = b"GET /models HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"
    for data in (b"\x16\x03\x01\x02\x00" * 20, b"POST / HTTP/1.1\r\ncontent-length: -1\r\n\r\n", upgrade):
        with socket.create_connection((host, int(port)), timeout=10) as sock:
            sock.sendall(data)
            assert sock.recv(100).startswith(b"HTTP/1.1 ")
    assert running.ask("/healthz")[0] == 200
    assert "uvicorn" not in "".join(running.log)


def test_port_taken_and_bad_file_are_one_line(tmp_path: Path, running: GateProcess) -> None:
    port = running.url.rpartition(":")[2]
    config = write(tmp_path, models={"m": {"port": 1}})
    ran = run_cli("kvgate", "serve", "--config", config, "--port", port)
    hint = "stop what listens there, or choose another --port"
    said = f"kvgate: error: cannot listen on 127.0.0.1:{port}: Address already in use\nhint: {hint}\n"
    assert (ran.rc, ran.stderr) == (2, said)
    config.write_text("models: {m: {prt: 1}}")
    assert run_cli("kvgate", "serve", "--config", config).rc == 2


WITHOUT_AIOHTTP = """
import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "aiohttp" else real(name, *rest)
from kvtools.cli import run
run("kvgate", "kvgate.app:app", ["serve", "--config", {config!r}])
"""


def test_one_configuration_is_one_gates(tmp_path: Path) -> None:
    """Whatever path leads to it, also after it was replaced and read again; a gate that is gone leaves nothing to clear away."""
    with gate(tmp_path, instances=[instance("one", tmp_path)]) as first:
        first.until(lambda: first.state("one") == "awake")
        link = tmp_path / "link.yaml"
        link.symlink_to(first.config)

        def refused(path: Path) -> None:
            ran = run_cli("kvgate", "serve", "--config", path, "--port", "0")
            assert (ran.rc, ran.stdout) == (1, "")
            assert ran.stderr.startswith(f"kvgate: error: another kvgate serves {path}\nhint: ")

        refused(first.config)
        refused(link)
        assert run_cli("kvgate", "serve", "--config", first.config, "--check").rc == 0, "looking is no serving"
        other = tmp_path / "other.yaml"
        other.write_text(first.config.read_text())
        other.replace(first.config)
        refused(first.config)  # an editor has put another file there, and nobody has said reload yet
        refused(link)
        fresh = tmp_path / "fresh.yaml"
        fresh.write_text(first.config.read_text())
        fresh.replace(first.config)
        assert first.ask("/admin/reload", {})[0] == 200
        refused(first.config)
        assert first.state("one") == "awake"
        assert len(notes(tmp_path, "one")) == 1, "the first gate's engine was left alone"
        first.process.kill()
        first.process.wait()
        again = GateProcess(first.config)
        again.until(lambda: again.state("one") == "awake")
        assert again.stop() == 0


def test_a_reload_that_cannot_be_meant_keeps_what_was_read_before_and_says_so(tmp_path: Path) -> None:
    with gate(tmp_path, instances=[instance("one", tmp_path)]) as running:
        running.until(lambda: running.state("one") == "awake")
        good = running.config.read_text()
        for bad in ("models: [", "nonsense: 1\n" + good, ""):
            running.config.write_text(bad)
            running.log.clear()
            running.process.send_signal(signal.SIGHUP)
            running.until(lambda: "not reloaded, what was read before stays: " in "".join(running.log))
            assert running.ask("/v1/completions", {"model": "one", "prompt": "x"})[0] == 200
        running.config.write_text(good)
        running.process.send_signal(signal.SIGHUP)
        running.until(lambda: "reloaded: no model changed" in "".join(running.log))
        assert len(notes(tmp_path, "one")) == 1


def test_a_reload_names_what_takes_a_restart(tmp_path: Path) -> None:
    with gate(tmp_path, instances=[instance("one", tmp_path)]) as running:
        text = running.config.read_text()
        running.config.write_text(text.replace("router_port: 0", "router_port: 1\n  max_connections: 77"))
        status, told = running.ask("/admin/reload", method="POST")
        assert (status, told["unchanged"], told["needs_restart"]) == (200, ["one"], ["router.router_port"])
        running.until(lambda: "a restart is what it takes to change router.router_port" in "".join(running.log))
        running.config.write_text(text)
        assert running.ask("/admin/reload", method="POST")[1]["needs_restart"] == []


def test_a_stream_that_outlives_the_stop_is_told_why_and_so_is_the_log(tmp_path: Path) -> None:
    with gate(tmp_path, instances=[instance("one", tmp_path)], router={"shutdown_timeout_seconds": 1}) as process:
        process.until(lambda: process.state("one") == "awake")
        body = json.dumps({"model": "one", "stream": True, "fake": {"chunks": 1000, "pause": 0.1}}).encode()
        host, port = process.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=20) as client:
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            got = client.recv(1 << 16)
            process.process.send_signal(signal.SIGTERM)
            while piece := client.recv(1 << 16):
                got += piece
        assert b'"one: the gate is shutting down"' in got
        assert not got.endswith(b"0\r\n\r\n"), "half an answer never looks whole"
        assert process.stop() == 0
        log = "".join(process.log)
        assert "one: the gate is shutting down" in log
        assert "Traceback" not in log
        assert "ERROR" not in log


def test_as_many_files_may_be_open_as_connections_need(tmp_path: Path) -> None:
    """A client takes one and its engine another: the usual soft limit of 1024 would do for 500 requests."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
    try:
        with gate(tmp_path, instances=[instance("one", tmp_path)], router={"max_connections": 1000}) as process:
            allowed, _ = resource.prlimit(process.process.pid, resource.RLIMIT_NOFILE)
            assert allowed == min(2256, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_missing_extra_is_one_line_that_names_it(tmp_path: Path) -> None:
    config = write(tmp_path, models={"m": {"port": 1}})
    ran = run_python(WITHOUT_AIOHTTP.format(config=str(config)))
    assert (ran.rc, ran.stdout) == (2, "")
    assert ran.stderr == "kvgate: error: kvgate serve needs the package 'aiohttp'\nhint: pip install 'kvtools[gate]'\n"


def test_commands_that_ask_load_none_of_the_extra() -> None:
    heavy = "{'aiohttp', 'starlette', 'uvicorn', 'asyncio', 'yaml'}"
    code = f"import sys, kvgate.app, kvgate.ask, kvgate.show; print(sorted({heavy} & set(sys.modules)))"
    assert run_python(code).stdout == "[]\n"


def test_check_and_show_config(tmp_path: Path) -> None:
    config = write(tmp_path, models={"m": {"port": 1}}, router={"max_queue": 5})
    ran = run_cli("kvgate", "serve", "--config", config, "--check")
    assert (ran.rc, ran.stdout) == (0, "m: http://localhost:1\n")
    keyed = write(tmp_path, models={"m": {"port": 1}}, router={"max_queue": 5, "api_keys": str(tmp_path / "keys")})
    ran = run_cli("kvgate", "serve", "--config", keyed, "--check")
    assert (ran.rc, ran.stdout) == (2, "")
    assert ran.stderr.startswith(f"kvgate: error: API keys: {tmp_path / 'keys'}: No such file or directory\nhint: ")
    assert run_cli("kvgate", "serve", "--config", keyed).stderr == ran.stderr
    assert run_cli("kvgate", "serve", "--config", keyed, "--host", "").stderr.startswith(
        "kvgate: error: host (flag): expected text"
    )
    write(tmp_path, models={"m": {"port": 1}}, router={"max_queue": 5})
    ran = run_cli("kvgate", "serve", "--config", config, "--show-config", "--port", "7", env={"KVGATE_HOST": "::1"})
    lines = ran.stdout.splitlines()
    assert lines[:2] == ["host = ::1  (env:KVGATE_HOST)", "port = 7  (flag)"]
    assert "router.max_queue = 5  (file:models.yaml)" in lines
    assert "router.max_concurrency = 256  (default)" in lines
