"""Two real vLLMs behind the gate, started by it: the official client, streams, sleep, one wake-up for many, a killed engine."""

import json
import os
import shlex
import signal
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvgate.launcher import CONNECTOR
from tests.kvgate.process import GateProcess, alive, write
from tests.support.daemon import Daemon
from tests.support.engine import PYTHON, model
from tests.support.processes import run_cli
from tests.support.servers import free_port

pytestmark = [pytest.mark.vllm, pytest.mark.real("vllm", "kvd"), pytest.mark.timeout(240)]
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
NAME, OTHER = "org/tiny", "org/windows"
"""Two models of different kinds; the second one goes to sleep by itself."""


def _instance(folder: Path, name: str, kind: str, device: int) -> dict[str, Any]:
    """An instance of the tiny model of this kind; engines of different devices start at the same time."""
    arguments = "--dtype float32 --enforce-eager --block-size 32 --max-model-len 512 --max-num-seqs 32"
    return {
        "name": kind,
        "model": name,
        "engine": "vllm",
        "command": [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model(kind)), "--host", "127.0.0.1"],
        "engine_args": f"{arguments} --port {free_port()} --served-model-name {name} --chat-template {folder / 'chat.jinja'}",
        "engine_env": ["VLLM_CPU_KVCACHE_SPACE=1", "VLLM_CPU_OMP_THREADS_BIND=nobind", "HF_HUB_OFFLINE=1", "VLLM_NO_USAGE_STATS=1"],
        "devices": [device],
    }


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    made = Daemon("--durability", "fsync", tier="256MiB").start()
    yield made
    made.remove()


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory, daemon: Daemon) -> Iterator[GateProcess]:
    """One gate with two engines, for all tests of this module: starting a vLLM is most of what they take."""
    folder = tmp_path_factory.mktemp("gate")
    (folder / "chat.jinja").write_text(TEMPLATE)
    instances = [_instance(folder, NAME, "llama", device=0), _instance(folder, OTHER, "sliding", device=1)]
    # The first one keeps its cache in kvd, and answers what is asked about it.
    instances[0]["kvd_socket"] = str(daemon.socket)
    instances[0]["engine_args"] += f" --kv-transfer-config {shlex.quote(CONNECTOR)}"
    instances[0]["engine_env"] += ["VLLM_PLUGINS=kvd", "PYTHONHASHSEED=0"]
    instances[1]["sleep"] = {"auto_sleep_enabled": True, "idle_threshold_seconds": 3, "check_interval_seconds": 0.2}
    process = GateProcess(write(folder, instances=instances, sleep_manager={"auto_sleep_enabled": False, "min_sleep_duration": 0}))
    try:
        process.until(lambda: process.state(NAME) == "awake", timeout=200)
        process.until(lambda: process.state(OTHER) in ("awake", "asleep"), timeout=200)
        yield process
    finally:
        pids = [int(line.split("(process ")[1].split(")")[0]) for line in process.log if "serves (process" in line]
        process.stop(timeout=40)
        assert not any(alive(pid) for pid in pids)


@pytest.fixture
def client(gate: GateProcess) -> Iterator[Any]:
    import openai

    with openai.OpenAI(base_url=gate.url + "/v1", api_key="unused", max_retries=0) as found:
        yield found


def test_official_client_completions_chat_and_streams(client: Any) -> None:
    import openai

    assert [card.id for card in client.models.list().data] == [NAME, OTHER]
    whole = client.completions.create(model=NAME, prompt="cache blocks", max_tokens=6, temperature=0)
    assert whole.usage.completion_tokens == 6
    pieces = client.completions.create(model=NAME, prompt="cache blocks", max_tokens=6, temperature=0, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text
    ask = {"model": NAME, "messages": [{"role": "user", "content": "warm prefixes"}], "max_tokens": 6, "temperature": 0}
    chat = client.chat.completions.create(**ask)
    pieces = client.chat.completions.create(**ask, stream=True)
    assert "".join(p.choices[0].delta.content or "" for p in pieces if p.choices) == chat.choices[0].message.content
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="nope", prompt="x")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.completions.create(model=NAME, prompt="x", max_tokens=-1)


def test_answers_are_the_engines_own_bytes(gate: GateProcess) -> None:
    body = json.dumps({"model": NAME, "prompt": "warm", "max_tokens": 4, "temperature": 0}).encode()
    engine = gate.ask("/models")[1]["models"][NAME]["endpoint"]
    answers = []
    for base in (gate.url, engine):
        request = urllib.request.Request(base + "/v1/completions", data=body, headers={"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            answers.append((answer.status, answer.headers["content-type"], json.loads(answer.read())["choices"]))
    assert answers[0] == answers[1]


def test_two_models_at_once_each_answer_for_themselves(client: Any) -> None:
    def answer(name: str) -> str:
        found = client.completions.create(model=name, prompt="warm prefixes", max_tokens=8, temperature=0)
        assert found.model == name
        return str(found.choices[0].text)

    with ThreadPoolExecutor(12) as pool:
        texts = list(pool.map(answer, [NAME, OTHER] * 6))
    assert len(set(texts[0::2])) == len(set(texts[1::2])) == 1
    assert texts[0] != texts[1]


def test_prewarm_by_prompt_is_the_engines_and_by_keys_the_daemons(gate: GateProcess, client: Any, daemon: Daemon) -> None:
    asked = {"model": NAME, "prompt": "cache blocks are pages of keys and values; " * 16}
    assert client.completions.create(max_tokens=1, **asked).usage.prompt_tokens > 64
    status, told = gate.ask("/v1/cache/keys", asked)
    assert status == 200, told
    keys, places = [chunk["key"] for chunk in told["chunks"]], [place["namespace"] for place in told["namespaces"]]
    assert keys
    with daemon.client() as kvd:

        def present() -> bool:
            raw = [bytes.fromhex(key) for key in keys]
            return all(all(kvd.exists(raw, namespace=bytes.fromhex(place))) for place in places)

        gate.until(present, timeout=20)
        kvd.flush()
        for place in places:
            assert kvd.clear(arena_only=True, namespace=bytes.fromhex(place)) == len(keys)
        status, job = gate.ask("/v1/cache/prewarm", asked)
        assert status == 202, job
        found: dict[str, Any] = {}

        def done() -> bool:
            found.update(gate.ask(f"{job['status_url']}?model={NAME}")[1])
            return found["state"] == "done"

        gate.until(done, timeout=20)
        assert found["resident_tokens"] == found["found_tokens"] > 0
        assert found["promoted_bytes"] > 0
        for place in places:
            kvd.clear(arena_only=True, namespace=bytes.fromhex(place))
        status, told = gate.ask("/v1/cache/prewarm", {"model": NAME, "keys": keys, "namespaces": places, "wait": True})
        assert (status, told["resident"]) == (200, len(keys) * len(places))


def test_the_idle_model_falls_asleep_and_a_request_wakes_it_while_the_other_serves_on(gate: GateProcess, client: Any) -> None:
    gate.until(lambda: gate.state(OTHER) == "asleep", timeout=30)
    assert gate.state(NAME) == "awake"
    assert client.completions.create(model=NAME, prompt="warm", max_tokens=2).usage.completion_tokens == 2
    assert gate.state(OTHER) == "asleep", "nobody asked for it"
    wakes = gate.ask("/models")[1]["models"][OTHER]["wakes"]
    assert client.completions.create(model=OTHER, prompt="warm", max_tokens=2).usage.completion_tokens == 2
    assert gate.ask("/models")[1]["models"][OTHER]["wakes"] == wakes + 1


def test_sleep_lets_a_stream_end_and_twenty_requests_are_one_wake_up(gate: GateProcess, client: Any) -> None:
    ask = {"model": NAME, "prompt": "warm", "max_tokens": 30, "extra_body": {"ignore_eos": True}}
    pieces = client.completions.create(stream=True, stream_options={"include_usage": True}, **ask)
    next(pieces)
    sleeping = threading.Thread(target=lambda: slept.append(run_cli("kvgate", "sleep", NAME, "--url", gate.url, timeout_s=60).rc))
    slept: list[int] = []
    sleeping.start()
    *_, last = pieces
    assert last.usage.completion_tokens == 30, "of which a busy engine sends several in one piece"
    sleeping.join(60)
    assert (slept, gate.state(NAME)) == ([0], "asleep")

    with ThreadPoolExecutor(20) as pool:
        short = {"model": NAME, "prompt": "warm", "max_tokens": 2}
        statuses = [status for status, _ in pool.map(lambda _: gate.ask("/v1/completions", short), range(20))]
    assert statuses == [200] * 20
    assert gate.ask("/models")[1]["models"][NAME]["wakes"] == 1


def test_client_that_leaves_stops_the_engine(gate: GateProcess, client: Any) -> None:
    pieces = client.completions.create(model=NAME, prompt="warm", max_tokens=400, stream=True, extra_body={"ignore_eos": True})
    next(pieces)
    pieces.close()
    gate.until(lambda: gate.ask("/models")[1]["models"][NAME]["running"] == 0)
    engine = gate.ask("/models")[1]["models"][NAME]["endpoint"]

    def running() -> float:
        with urllib.request.urlopen(engine + "/metrics") as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("vllm:num_requests_running{"))

    gate.until(lambda: running() == 0, timeout=5)


def test_killed_engine_ends_the_stream_with_an_error_and_is_started_again(gate: GateProcess, client: Any) -> None:
    import openai

    pieces = client.completions.create(model=NAME, prompt="warm", max_tokens=400, stream=True, extra_body={"ignore_eos": True})
    next(pieces)
    pid = next(int(line.split("(process ")[1].split(")")[0]) for line in gate.log if "llama: serves (process" in line)
    os.killpg(pid, signal.SIGKILL)
    with pytest.raises((openai.APIError, openai.APIConnectionError)):
        list(pieces)
    gate.until(lambda: gate.state(NAME) == "starting")
    assert "signal 9" in gate.ask("/models")[1]["models"][NAME]["last_error"]
    gate.until(lambda: sum("llama: starting: " in line for line in gate.log) == 2)
    assert client.completions.create(model=OTHER, prompt="warm", max_tokens=2).usage.completion_tokens == 2, "the other serves on"
