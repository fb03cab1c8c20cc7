"""Engines as processes: started in order, watched, started again, ended with everything they left behind."""

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvgate.config import load
from kvgate.engines import EngineLog, remove_stats
from kvgate.launcher import argv, environment
from kvtools.segments import pool
from tests.kvgate.process import FAKE, GateProcess, alive, gate, instance, notes, write
from tests.support.processes import wait_until


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_engine_is_started_served_and_ended_with_the_gate_and_requests_wait_for_it(tmp_path: Path) -> None:
    with gate(tmp_path, instances=[instance("one", tmp_path, args="--start-delay 0.5")]) as running:
        assert running.state("one") == "starting"
        assert running.ask("/v1/completions", {"model": "one", "prompt": "x"})[1]["echo"] == "x"
        pid = notes(tmp_path, "one")[0]["pid"]
        assert alive(pid)
        assert running.stop() == 0
        assert not alive(pid)
    log = tmp_path / "logs" / "one.log"
    assert log.read_text() == "engine is up\n"
    assert stat.S_IMODE(log.stat().st_mode) == 0o600


def test_engines_on_one_device_start_one_after_the_other_and_others_at_once(tmp_path: Path) -> None:
    slow = "--start-delay 0.8"
    first = instance("first", tmp_path, args=slow, devices=[0])
    second = instance("second", tmp_path, devices=[0, 1])
    apart = instance("apart", tmp_path, devices=[2])
    with gate(tmp_path, instances=[first, second, apart]) as running:
        running.until(lambda: {running.state(name) for name in ("first", "second", "apart")} == {"awake"})
        started = {name: notes(tmp_path, name)[0]["when"] for name in ("first", "second", "apart")}
        assert started["second"] - started["first"] >= 0.8  # when the first one served
        assert started["apart"] < started["second"]
        assert notes(tmp_path, "second")[0]["env"]["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_engine_that_dies_is_started_again_and_requests_wait_for_it(tmp_path: Path) -> None:
    with gate(tmp_path, instances=[instance("one", tmp_path)]) as running:
        running.until(lambda: running.state("one") == "awake")
        os.kill(notes(tmp_path, "one")[0]["pid"], signal.SIGKILL)
        running.until(lambda: running.state("one") == "starting")
        assert "ended by signal 9" in running.ask("/models")[1]["models"]["one"]["last_error"]
        assert running.ask("/v1/completions", {"model": "one", "prompt": "x"})[0] == 200
        assert len(notes(tmp_path, "one")) == 2


def test_engine_that_never_serves_is_failed_with_its_last_words(tmp_path: Path) -> None:
    bad, missing = instance("bad", tmp_path, restart=False), instance("missing", tmp_path, restart=False, devices=[1])
    bad["command"] = ["sh", "-c", "echo out of memory; exit 3", "x"]
    missing["command"] = ["no-such-program-here"]
    with gate(tmp_path, instances=[bad, missing]) as running:
        running.until(lambda: {running.state("bad"), running.state("missing")} == {"failed"})
        status, body = running.ask("/v1/completions", {"model": "bad"})
        assert status == 503
        assert "ended with status 3: out of memory" in body["error"]["message"]
        assert "no-such-program-here" in running.ask("/models")[1]["models"]["missing"]["last_error"]


def test_engine_that_is_not_ready_in_time_is_ended_and_tried_again(tmp_path: Path) -> None:
    slow = instance("slow", tmp_path, args="--start-delay 60", ready_timeout_seconds=0.8)
    with gate(tmp_path, instances=[slow]) as running:
        running.until(lambda: len(notes(tmp_path, "slow")) == 2)
        assert not alive(notes(tmp_path, "slow")[0]["pid"])
        assert "did not serve within 0.8 s" in running.ask("/models")[1]["models"]["slow"]["last_error"]


STUBBORN = """
import os, pathlib, runpy, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = os.fork()
if not child:
    while True:
        signal.pause()
pathlib.Path({child!r}).write_text(str(child))
sys.argv[0] = {fake!r}
runpy.run_path({fake!r}, run_name="__main__")
"""


def test_children_of_the_engine_and_its_segment_go_with_it(tmp_path: Path, shm_name: Callable[[], str]) -> None:
    """An engine that ignores SIGTERM, with a child of its own, and a segment nobody else would ever remove."""
    name = shm_name()
    pool.create_pool(name, 1 << 30)
    stubborn = instance("one", tmp_path, segment=name)
    program = tmp_path / "stubborn.py"
    program.write_text(STUBBORN.format(fake=stubborn["command"][1], child=str(tmp_path / "child")))
    stubborn["command"] = [stubborn["command"][0], str(program)]
    with gate(tmp_path, instances=[stubborn], router={"shutdown_timeout_seconds": 0.5}) as running:
        running.until(lambda: running.state("one") == "awake")
        noted = notes(tmp_path, "one")[0]
        assert noted["env"]["KVCACHED_IPC_NAME"] == noted["env"]["KVTOOLS_SEGMENT"] == name
        child = int((tmp_path / "child").read_text())
        assert (alive(noted["pid"]), alive(child)) == (True, True)
        assert running.stop() == 0
        assert (alive(noted["pid"]), alive(child)) == (False, False)
    assert not (Path("/dev/shm") / name).exists()


SCRIPTS = {
    "itself": [],
    "a script that waits for it": ["sh", "-c", '"$0" "$@"; exit'],
    "a script that lets it go": ["sh", "-c", '"$0" "$@" & wait'],
    "deaf to SIGTERM": ["sh", "-c", 'trap "" TERM; exec "$0" "$@"'],
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_no_engine_outlives_a_gate_that_is_killed(tmp_path: Path, script: str) -> None:
    """Also where the command is a script, which dies of its SIGTERM and leaves its engine, or an engine that does not listen."""
    one = instance("one", tmp_path)
    one["command"] = [*SCRIPTS[script], *one["command"]]
    running = GateProcess(write(tmp_path, instances=[one], router={"shutdown_timeout_seconds": 1}))
    try:
        running.until(lambda: running.state("one") == "awake")
        pid = notes(tmp_path, "one")[0]["pid"]
    finally:
        running.stop(signal.SIGKILL)
    deadline = time.monotonic() + 15
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(pid)
    for path in Path("/dev/shm").glob("kvtools.gate.*"):
        if str(running.process.pid) in _writer(path):
            path.unlink()


def _writer(path: Path) -> str:
    return str(int.from_bytes(path.read_bytes()[24:32], "little"))


def test_reload_starts_replaces_and_ends_engines(tmp_path: Path) -> None:
    keep, gone = instance("keep", tmp_path), instance("gone", tmp_path)
    with gate(tmp_path, instances=[keep, gone]) as running:
        running.until(lambda: {running.state("keep"), running.state("gone")} == {"awake"})
        write(tmp_path, instances=[keep, instance("new", tmp_path)])
        status, body = running.ask("/admin/reload", method="POST")
        assert (status, body["added"], body["removed"], body["unchanged"]) == (200, ["new"], ["gone"], ["keep"])
        running.until(lambda: running.state("new") == "awake")
        running.until(lambda: not alive(notes(tmp_path, "gone")[0]["pid"]))
        assert len(notes(tmp_path, "keep")) == 1
        assert running.ask("/v1/completions", {"model": "gone"})[0] == 404


def test_a_removed_models_stream_ends_by_itself_unless_its_port_is_needed(tmp_path: Path) -> None:
    keep = instance("keep", tmp_path, devices=[1])
    gone = instance("gone", tmp_path, devices=[0], sleep={"drain_timeout_seconds": 0.2})
    ask = {"model": "gone", "stream": True, "fake": {"chunks": 15, "pause": 0.1}}

    def stream(url: str, body: dict[str, object]) -> bytes:
        request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=20) as answer:
            try:
                return bytes(answer.read())
            except http.client.IncompleteRead as error:
                return error.partial

    with gate(tmp_path, instances=[keep, gone]) as running, ThreadPoolExecutor() as pool:
        running.until(lambda: {running.state("keep"), running.state("gone")} == {"awake"})
        got = pool.submit(stream, running.url, ask)
        running.until(lambda: running.ask("/models")[1]["models"]["gone"]["running"] == 1)
        write(tmp_path, instances=[keep])
        assert running.ask("/admin/reload", method="POST")[1]["removed"] == ["gone"]
        assert got.result().endswith(b"data: [DONE]\n\n"), "its drain time was over long before"
        running.until(lambda: not alive(notes(tmp_path, "gone")[0]["pid"]))

        write(tmp_path, instances=[keep, gone])
        running.ask("/admin/reload", method="POST")
        running.until(lambda: running.state("gone") == "awake")
        got = pool.submit(stream, running.url, {**ask, "fake": {"chunks": 10_000, "pause": 0.1}})
        running.until(lambda: running.ask("/models")[1]["models"]["gone"]["running"] == 1)
        write(tmp_path, instances=[keep])
        running.ask("/admin/reload", method="POST")
        write(tmp_path, instances=[keep, {**gone, "model": "new", "name": "new"}])
        running.ask("/admin/reload", method="POST")
        running.until(lambda: running.state("new") == "awake")
        assert b"the engine broke off inside its answer" in got.result()
        assert len(notes(tmp_path, "keep")) == 1


LEAVES_ONE = """
import os, sys, time
from pathlib import Path
from kvtools.segments.stats import Metric, StatsWriter
writer = StatsWriter("connector", sys.argv[2], [Metric("n", "counter", "", "")], root=Path(sys.argv[1]))
print("made", flush=True)
sys.stdin.read(1)
os._exit(9)
"""


def test_a_killed_engines_stats_segments_do_not_stay(tmp_path: Path) -> None:
    def leave(instance_: str) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-c", LEAVES_ONE, str(tmp_path), instance_]
        made = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert made.stdout is not None
        assert made.stdout.readline() == b"made\n"
        return made

    older = leave("11-0")
    older.communicate(b"x")
    since_ns = time.time_ns()
    ours, living = leave("12-0"), leave("13-0")
    ours.communicate(b"x")
    assert len(list(tmp_path.iterdir())) == 3
    remove_stats(since_ns, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kvtools.connector.11-0", "kvtools.connector.13-0"]
    living.communicate(b"x")
    remove_stats(since_ns, tmp_path / "none")  # no folder, no trouble


@pytest.fixture
def tmux_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A tmux server of the test's own."""
    folder = tmp_path / "t"
    folder.mkdir()
    monkeypatch.setenv("TMUX_TMPDIR", str(folder))
    monkeypatch.delenv("TMUX", raising=False)
    yield
    subprocess.run(["tmux", "kill-server"], stderr=subprocess.DEVNULL)


@pytest.mark.real("tmux")
@pytest.mark.skipif(not shutil.which("tmux"), reason="needs tmux: apt-get install tmux")
def test_engine_in_a_tmux_session(tmp_path: Path, tmux_server: None) -> None:
    one = instance("o.ne", tmp_path, launcher="tmux", engine_env=["MARK=a b;c"])
    with gate(tmp_path, instances=[one]) as running:
        running.until(lambda: running.state("o.ne") == "awake")
        listed = subprocess.run(["tmux", "list-sessions", "-F", "#{session_name}"], capture_output=True, text=True)
        assert listed.stdout == "kvgate-o-ne\n"
        noted = notes(tmp_path, "o.ne")[0]
        assert noted["env"]["MARK"] == "a b;c"
        os.kill(noted["pid"], signal.SIGKILL)
        running.until(lambda: len(notes(tmp_path, "o.ne")) == 2 and running.state("o.ne") == "awake")
        assert running.stop() == 0
    assert not alive(notes(tmp_path, "o.ne")[1]["pid"])


@pytest.mark.real("tmux")
@pytest.mark.skipif(not shutil.which("tmux"), reason="needs tmux: apt-get install tmux")
def test_an_engine_in_tmux_has_the_gates_environment_and_shows_it_to_nobody(tmp_path: Path, tmux_server: None) -> None:
    """Also where a tmux server runs already, which has another one."""
    subprocess.run(
        ["tmux", "new-session", "-d", "-s", "mine", "sleep", "600"], env={**os.environ, "HF_HOME": "/of/the/server"}, check=True
    )
    one = instance("one", tmp_path, launcher="tmux", engine_env=["HF_TOKEN=hush-hush-hush"])
    environ = {"HF_HOME": "/of/the/gate", "KVTOOLS_SHM": str(tmp_path), "KVGATE_KEY": "secret", "TMPDIR": str(tmp_path)}
    with gate(tmp_path, instances=[one], environ=environ) as running:
        running.until(lambda: running.state("one") == "awake")
        has = notes(tmp_path, "one")[0]["env"]
        assert (has["HF_HOME"], has["KVTOOLS_SHM"], has["HF_TOKEN"]) == ("/of/the/gate", str(tmp_path), "hush-hush-hush")
        assert "TMUX_PANE" in has
        assert "KVGATE_KEY" not in has
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                assert b"hush-hush" + b"-hush" not in path.read_bytes()
        assert not list(tmp_path.glob("kvgate-*")), "the file is gone with its reading"


@pytest.mark.real("tmux")
@pytest.mark.skipif(not shutil.which("tmux"), reason="needs tmux: apt-get install tmux")
def test_a_gate_that_is_killed_leaves_its_tmux_engine_to_the_next_one(tmp_path: Path, tmux_server: None) -> None:
    one = instance("one", tmp_path, launcher="tmux")
    config = write(tmp_path, instances=[one])
    first = GateProcess(config)
    first.until(lambda: first.state("one") == "awake")
    (pid,) = [note["pid"] for note in notes(tmp_path, "one")]

    # While it lives, a second gate on the same engines takes nothing from it.
    copy = tmp_path / "copy.yaml"
    copy.write_text(config.read_text())
    second = GateProcess(copy)
    second.until(lambda: "belongs to another kvgate" in "".join(second.log))
    second.stop()
    assert alive(pid)

    first.stop(signal.SIGKILL)
    assert alive(pid), "the session is the user's"
    third = GateProcess(config)
    third.until(lambda: "taking over" in "".join(third.log))
    third.until(lambda: third.state("one") == "awake")
    assert third.ask("/v1/completions", {"model": "one"})[0] == 200
    assert len(notes(tmp_path, "one")) == 1, "nothing was loaded again"

    third.stop(signal.SIGKILL)
    write(tmp_path, instances=[{**one, "engine_env": ["OTHER=1"]}])
    with_other = GateProcess(config)
    with_other.until(lambda: with_other.state("one") == "awake" and len(notes(tmp_path, "one")) == 2)
    assert not alive(pid), "what is not what is configured is ended"
    assert with_other.stop() == 0
    assert not alive(notes(tmp_path, "one")[1]["pid"])


def test_command_line_and_environment_of_a_vllm_instance(tmp_path: Path) -> None:
    config = write(
        tmp_path,
        kvcached={"kvcached_page_size_mb": 2, "enable_kvcached": True},
        instances=[
            {
                "model": "Qwen/Qwen3-0.6B",
                "engine": "vllm",
                "venv_path": "/opt/v",
                "engine_args": ["--port 12348", "--max-model-len 64"],
                "engine_env": ["A=b=c"],
                "kvd_socket": "/run/kvd/kvd.sock",
                "devices": 1,
            }
        ],
    )
    model = load(config).models["Qwen/Qwen3-0.6B"]
    words = argv(model)
    assert words[:5] == ["/opt/v/bin/python", "-m", "vllm.entrypoints.openai.api_server", "--model", "Qwen/Qwen3-0.6B"]
    assert words[5:9] == ["--port", "12348", "--max-model-len", "64"]
    assert words[words.index("--host") + 1] == "127.0.0.1"
    assert words[words.index("--served-model-name") + 1 :][:2] == ["Qwen/Qwen3-0.6B", "Qwen3-0.6B"]
    assert '"KvdConnector"' in words[words.index("--kv-transfer-config") + 1]
    env = environment(model, {"PATH": "/bin", "KVGATE_KEY": "secret"})
    assert env["KVCACHED_IPC_NAME"] == "kvgate_Qwen3-0-6B"
    assert "KVTOOLS_SEGMENT" not in env  # the elastic pool is opt-in: `segment`
    assert (env["KVCACHED_PAGE_SIZE_MB"], env["ENABLE_KVCACHED"], env["A"]) == ("2", "true", "b=c")
    assert (env["KVD_SOCKET"], env["CUDA_VISIBLE_DEVICES"]) == ("/run/kvd/kvd.sock", "1")
    assert env["KVD_RESET"] == "keep"  # it sleeps, and its prefixes stay
    assert "KVGATE_KEY" not in env


def test_the_elastic_pool_of_one_engine(tmp_path: Path) -> None:
    config = tmp_path / "models.yaml"
    config.write_text(
        "instances: [{model: m, engine: vllm, port: 1, segment: VLLM_1, elastic: {limit: 4GiB,"
        " min_reserved_pages: 2, prealloc: false, idle_release: 5m}},"
        " {model: n, engine: vllm, port: 2, segment: VLLM_2, engine_env: ['ENABLE_KVCACHED=true']}]"
    )
    first, second = load(config).models.values()
    env = environment(first, {})
    assert {name: value for name, value in env.items() if name.startswith("KVTOOLS_")} == {
        "KVTOOLS_SEGMENT": "VLLM_1",
        "KVTOOLS_LIMIT": "4GiB",
        "KVTOOLS_MIN_RESERVED_PAGES": "2",
        "KVTOOLS_PREALLOC": "false",
        "KVTOOLS_IDLE_RELEASE": "5m",
    }
    env = environment(second, {})
    assert "KVTOOLS_SEGMENT" not in env, "kvcached, or what understands its variables, makes the pool"
    assert env["KVCACHED_IPC_NAME"] == "VLLM_2"


def test_nothing_is_started_where_something_listens_and_that_is_not_taken_for_the_engine(tmp_path: Path) -> None:
    """Another gate's engine, or one left over: clients must not be sent there, and ours could not listen."""
    taken = instance("taken", tmp_path)
    port = int(taken["engine_args"].split()[1])
    stranger = subprocess.Popen([sys.executable, str(FAKE), "--port", str(port), "--model", "taken"])
    try:
        wait_until(lambda: listens(port), what="the stranger to listen")
        with gate(tmp_path, instances=[taken]) as running:
            running.until(lambda: f"something listens on 127.0.0.1:{port} already" in "".join(running.log))
            running.until(lambda: running.state("taken") == "failed")
            status, body = running.ask("/v1/completions", {"model": "taken", "prompt": "x"})
            assert (status, body["error"]["code"]) == (503, "model_unavailable")
            assert f"something listens on 127.0.0.1:{port}" in body["error"]["message"]
            assert notes(tmp_path, "taken") == []
            stranger.kill()
            stranger.wait()
            running.until(lambda: running.state("taken") == "awake", timeout=30)
            assert len(notes(tmp_path, "taken")) == 1
    finally:
        stranger.kill()
        stranger.wait()


def test_a_log_that_cannot_be_written_costs_the_log_and_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "logs" / "one.log").mkdir(parents=True)
    one = instance("one", tmp_path)
    one["command"] = ["sh", "-c", 'for i in 1 2 3 4 5 6; do echo line $i; done; exec "$0" "$@"', *one["command"]]
    with gate(tmp_path, instances=[one]) as running:
        running.until(lambda: running.state("one") == "awake")
        assert running.stop() == 0
        told = [line for line in running.log if "no log of the engine" in line]
        assert len(told) == 1
        assert f"{tmp_path}/logs/one.log: Is a directory" in told[0]


def test_a_log_that_filled_up_goes_on_where_there_is_room_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also in the middle of turning over: no write may go to a descriptor that is something else's by then."""
    log = EngineLog(tmp_path / "a.log", limit=10)
    log.write(b"12345678\n")
    (tmp_path / "a.log.1").mkdir()  # what it would be renamed to
    (tmp_path / "a.log.1" / "x").touch()
    for _ in range(3):
        log.write(b"another\n")
    (tmp_path / "a.log.1" / "x").unlink()
    (tmp_path / "a.log.1").rmdir()
    log.write(b"last\n")
    log.close()
    assert (tmp_path / "a.log.1").read_bytes() == b"12345678\n"
    assert (tmp_path / "a.log").read_bytes() == b"last\n"
    assert list(log.last) == ["another", "another", "last"]
    assert len([record for record in caplog.records if "no log of the engine" in record.getMessage()]) == 1
