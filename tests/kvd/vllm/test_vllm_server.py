"""kvd through the engine's own OpenAI server: what a request may ask for, prewarm, why, the canary, and `kvd status`.

One server serves the whole module; each test has prompts of its own. The slow tests ask a second one besides, as a decode
engine would be: without the connector, and with another hash seed.
"""

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvd.connector.view import View
from tests.support.api_server import ApiServer
from tests.support.daemon import Daemon, MakeDaemon
from tests.support.engine import Engine, model, prompt
from tests.support.processes import Ran, run_cli, wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.real("vllm"), pytest.mark.real("kvd"), pytest.mark.timeout(300)]


class Pair:
    """The daemon and an engine with kvd."""

    def __init__(self, daemon: Daemon, server: ApiServer) -> None:
        self.daemon, self.server = daemon, server

    def why(self, body: Any) -> dict[str, Any]:
        return self.server.ok("POST", "/v1/cache/why", body)

    def kvd(self, *words: str, stdin: str | None = None) -> Ran:
        return run_cli("kvd", *words, env={"KVD_SOCKET": str(self.daemon.socket)}, stdin=stdin, timeout_s=60)

    def namespaces(self, **more: Any) -> list[bytes]:
        """Where this engine stores, for a request with these parameters."""
        found = self.server.ok("POST", "/v1/cache/keys", {"token_ids": prompt(64, 999), **more})
        return [bytes.fromhex(row["namespace"]) for row in found["namespaces"]]

    def entry(self, body: dict[str, Any], number: int = 0) -> dict[str, Any]:
        """What the daemon lists of the prompt's first chunk."""
        keys = self.server.ok("POST", "/v1/cache/keys", body)
        key, namespace = keys["chunks"][number]["key"], keys["namespaces"][0]["namespace"]
        rows = self.kvd("keys", "--namespace", namespace, "--json").json()["keys"]
        return next((row for row in rows if row["key"] == key), {})


@pytest.fixture(scope="module")
def pair(kvd_daemon_module: MakeDaemon) -> Iterator[Pair]:
    daemon = kvd_daemon_module(max_bytes="64MiB", tier="256MiB")
    with ApiServer(model(), daemon.socket, events=True) as server:
        yield Pair(daemon, server)


@pytest.fixture(scope="module")
def other() -> Iterator[ApiServer]:
    """An engine without kvd, and with a hash seed of its own."""
    with ApiServer(model(), env={"PYTHONHASHSEED": "7"}) as server:
        yield server


# ---- what a request may ask for --------------------------------------------------------------------------------------


def test_retention_ttl_and_tenant_come_through_the_openai_api(pair: Pair) -> None:
    kinds = {"none": 1, "ephemeral": 2, "short": 3, "long": 4}
    for word, seed in kinds.items():
        pair.server.complete(prompt(300, seed), kv_transfer_params={"kvd_retention": word})
    pair.server.complete(prompt(300, 5), kv_transfer_params={"infera_retention": "short", "infera_ttl_seconds": 300})
    pair.server.complete(prompt(300, 6), kv_transfer_params={"kvd_ttl_seconds": 300})
    entries = {word: pair.entry({"token_ids": prompt(300, seed)}) for word, seed in kinds.items()}
    assert entries["none"] == {}
    assert {word: entry["retention"] for word, entry in entries.items() if entry} == {w: w for w in kinds if w != "none"}
    for seed, word in ((5, "short"), (6, "long")):
        entry = pair.entry({"token_ids": prompt(300, seed)})
        assert entry["retention"] == word
        assert 200 < entry["expires_at"] - time.time() <= 300
    # Ephemeral lives in the arena only.
    with pair.daemon.client() as client:
        client.flush(timeout_s=20)
    places = {word: pair.why({"token_ids": prompt(300, seed)})["chunks"][0]["places"][0] for word, seed in kinds.items()}
    assert places == {"none": [], "ephemeral": ["arena"], "short": ["arena", "disk"], "long": ["arena", "disk"]}


def test_a_value_expires_and_why_says_so(pair: Pair) -> None:
    one = {"token_ids": prompt(300, 10)}
    pair.server.complete(one["token_ids"], kv_transfer_params={"kvd_ttl_seconds": 1})
    pair.why(one)

    def reason() -> str:
        return next((str(why["text"]) for why in pair.why(one)["chunks"][0]["why"] if why["fate"] == "expired"), "")

    wait_until(lambda: "its time to live ended" in reason(), timeout_s=20, interval_s=0.2, what="the chunk to expire")


def test_tenants_share_nothing_and_why_names_the_other_namespace(pair: Pair) -> None:
    one = prompt(300, 11)
    mine = {"kv_transfer_params": {"kvd_namespace": "tenant a"}}
    pair.server.complete(one, **mine)
    assert pair.namespaces(**mine) != pair.namespaces()
    assert pair.why({"token_ids": one, **mine})["found_tokens"] == 288
    found = pair.why({"token_ids": one})
    assert found["found_tokens"] == 0
    assert [bytes.fromhex(other["namespace"]) for other in found["elsewhere"]] == pair.namespaces(**mine)


# ---- prewarm ---------------------------------------------------------------------------------------------------------


def job(pair: Pair, body: dict[str, Any]) -> dict[str, Any]:
    started = pair.server.ok("POST", "/v1/cache/prewarm", body)
    assert started["status_url"] == f"/v1/cache/prewarm/{started['id']}"
    return dict(
        wait_until(
            lambda: (found := pair.server.ok("GET", started["status_url"]))["state"] in ("done", "failed") and found,
            timeout_s=30,
            what="the job to end",
        )
    )


def test_each_way_to_name_a_prompt_brings_up_the_same_bytes(pair: Pair) -> None:
    words = "tell me about the weather in every town of the world " * 40
    chat = [{"role": "user", "content": words}]
    request = {"model": "tiny", "messages": chat, "max_tokens": 1, "temperature": 0}
    status, answer = pair.server.post("/v1/chat/completions", request)
    assert status == 200, answer
    rendered = pair.server.ok("POST", "/tokenize", {"model": "tiny", "messages": chat})["tokens"]
    keys = pair.server.ok("POST", "/v1/cache/keys", {"messages": chat})
    text = f"user: {words} "
    bodies = [
        {"messages": chat},
        {"prompt": text},
        {"token_ids": rendered},
        {"prompt": rendered},
        {"block_hashes": keys["block_hashes"]},
        {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {**request, "stream": True}},
    ]
    assert keys["prompt_tokens"] == len(rendered) == answer["usage"]["prompt_tokens"]
    with pair.daemon.client() as client:
        client.flush(timeout_s=20)
        for body in bodies:
            client.clear(arena_only=True, namespace=pair.namespaces()[0])
            found = job(pair, body)
            assert (found["state"], found["stopped_by"]) == ("done", ""), (body, found)
            assert found["resident_tokens"] == len(rendered) // 32 * 32
            assert found["promoted_bytes"] == found["resident_bytes"] > 0
    # And the engine uses them: its own cache forgets, and the next request loads.
    assert pair.why({"messages": chat})["engine_tokens"] == len(rendered) // 32 * 32


def test_prewarm_keeps_within_its_bytes(pair: Pair) -> None:
    one = {"token_ids": prompt(1000, 20)}
    pair.server.complete(one["token_ids"])
    with pair.daemon.client() as client:
        client.flush(timeout_s=20)
        client.clear(arena_only=True, namespace=pair.namespaces()[0])
    found = job(pair, {**one, "max_bytes": "3MiB", "deadline_s": 20})
    assert (found["stopped_by"], found["resident_tokens"], found["promoted_bytes"]) == ("max_bytes", 768, 3 << 20)


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b"no json", 400, "not JSON"),
        ({}, 400, "exactly one of"),
        ({"prompt": "a", "model": "nobody"}, 404, "does not exist"),
        ({"token_ids": [10**9]}, 400, "vocabulary"),
        ({"token_ids": [5] * 20000}, 400, "maximum context length"),
        ({"block_hashes": ["00" * 16]}, 400, "block hashes are 32 bytes"),
        ({"messages": [{"role": "user"}, 5]}, 400, "list of objects"),
        ({"prompt": "a", "temperature": "hot"}, 400, "temperature"),
        ({"prompt": "a", "deadline_s": -1}, 400, "deadline_s"),
    ],
)
def test_bad_bodies_get_a_reason(pair: Pair, body: Any, status: int, says: str) -> None:
    for path in ("/v1/cache/prewarm", "/v1/cache/why"):
        got, answer = pair.server.post(path, body)
        assert (got, answer["error"]["code"]) == (status, status)
        assert says in answer["error"]["message"]


def test_an_unknown_job_is_not_found(pair: Pair) -> None:
    status, answer = pair.server.get("/v1/cache/prewarm/0123")
    assert (status, "no prewarm job 0123" in answer["error"]["message"]) == (404, True)


@pytest.mark.slow
def test_an_engine_without_the_connector_says_so(other: ApiServer) -> None:
    status, answer = other.post("/v1/cache/prewarm", {"prompt": "a"})
    assert (status, answer["error"]["message"]) == (409, "this engine runs without KvdConnector")
    assert other.ok("GET", "/v1/cache/engine")["problem"] == "this engine runs without KvdConnector"
    ran = run_cli("kvd", "status", "--engine", other.url)
    assert (ran.rc, "without KvdConnector" in ran.stdout) == (1, True)


# ---- kvd why, kvd prefetch -------------------------------------------------------------------------------------------


def test_kvd_why_tells_a_prompts_whole_life(pair: Pair, tmp_path: Path) -> None:
    text = "once upon a time " * 120
    file = tmp_path / "prompt.txt"
    file.write_text(text)
    words = ("why", "--engine", pair.server.url)
    before = pair.kvd(*words, str(file))
    assert (before.rc, "never saved" in before.stdout) == (3, True)
    pair.server.complete(text)
    stored = pair.kvd(*words, "-", stdin=json.dumps({"model": "tiny", "prompt": text, "temperature": 0.7}))
    assert stored.rc == 0, stored.stderr
    assert "arena" in stored.stdout
    found = pair.kvd(*words, str(file), "--json").json()
    assert found["engine_tokens"] == found["found_tokens"] > 256
    with pair.daemon.client() as client:
        client.flush(timeout_s=20)
        client.clear(arena_only=True, namespace=pair.namespaces()[0])
        up = pair.kvd("prefetch", "--engine", pair.server.url, str(file))
        assert f"{found['found_tokens']} of {found['prompt_tokens']} tokens are in the arena" in up.stdout
        client.clear(namespace=pair.namespaces()[0])
    gone = pair.kvd(*words, str(file))
    assert (gone.rc, "cleared" in gone.stdout) == (3, True)
    none = pair.kvd("prefetch", "--engine", pair.server.url, str(file))
    assert "stopped at a chunk that is stored nowhere" in none.stdout


def test_kvd_why_of_a_request_that_asked_for_nothing_to_be_stored(pair: Pair) -> None:
    body = {"prompt": prompt(300, 30), "kv_transfer_params": {"kvd_retention": "none"}}
    pair.server.complete(body["prompt"], kv_transfer_params=body["kv_transfer_params"])
    found = wait_until(
        lambda: (answer := pair.why(body))["chunks"][0]["why"][0]["fate"] == "unsaved" and answer,
        timeout_s=10,
        what="the connector's word to arrive",
    )
    assert "the request asked for retention none" in found["chunks"][0]["why"][0]["text"]
    assert any("kvd_retention none" in remark for remark in found["remarks"])


def test_what_another_engine_stored_is_found_and_the_field_that_differs_is_named(pair: Pair) -> None:
    # The same engine as it would be with another seed, other chunks and another dtype: it stores what it would store.
    mine = View.of_json(json.dumps(pair.server.ok("GET", "/v1/cache/engine")["view"]))
    one = prompt(600, 40)
    keys = pair.server.ok("POST", "/v1/cache/keys", {"token_ids": one})
    from dataclasses import replace

    from kvd.connector import book

    hashes = [bytes.fromhex(each) for each in keys["block_hashes"]]
    bf16 = replace(mine.ranks[0], facts={**mine.ranks[0].facts, "dtype": "torch.bfloat16"}, namespaces=(b"\x07" * 32,))
    other = replace(mine, ranks=(bf16,), chunk=128, name="the neighbour", at=time.time())
    with pair.daemon.client() as client:
        book.enter(client, other)
        theirs = other.keys(hashes)
        for span in other.spans(theirs, len(one)):
            client.put(theirs.of(span), b"v" * 5000, namespace=other.places()[0].namespace)
    found = pair.why({"token_ids": one})
    (row,) = found["elsewhere"]
    assert (row["engine"], row["tokens"]) == ("the neighbour", 576)
    assert "dtype: torch.float32 / torch.bfloat16" in row["differs"]


@pytest.mark.slow
def test_a_prompt_stored_under_another_hash_seed_is_found_by_hashing_it_anew(pair: Pair) -> None:
    # A real engine with another seed stores; this one has never seen the prompt.
    one = prompt(600, 41)
    with Engine(model(), pair.daemon.socket, env={"PYTHONHASHSEED": "9"}) as engine:
        engine.one(one)
        wait_until(lambda: pair.why({"token_ids": one})["elsewhere"], timeout_s=20, interval_s=0.2, what="the engine's record")
    (row,) = pair.why({"token_ids": one})["elsewhere"]
    assert row["tokens"] == 576
    assert [line.partition(":")[0] for line in row["differs"]] == ["hash_seed"]
    assert "set PYTHONHASHSEED" in row["hints"][0]


def test_the_end_of_a_shorter_prompt_counts(pair: Pair) -> None:
    one = prompt(700, 42)
    pair.server.complete(one[:600])
    found = pair.why({"token_ids": one})
    assert found["found_tokens"] == found["chunks"][2]["tail_end"] == 576
    assert job(pair, {"token_ids": one})["found_tokens"] == 576


@pytest.mark.slow
def test_prewarm_for_two_ranks(kvd_daemon: MakeDaemon) -> None:
    daemon = kvd_daemon(max_bytes="64MiB", tier="256MiB")
    with ApiServer(model(), daemon.socket, words=("--tensor-parallel-size", "2")) as server:
        two = Pair(daemon, server)
        server.complete(prompt(1000, 60))
        assert len(two.namespaces()) == 2
        with daemon.client() as client:
            client.flush(timeout_s=20)
            for namespace in two.namespaces():
                client.clear(arena_only=True, namespace=namespace)
        found = job(two, {"token_ids": prompt(1000, 60)})
        assert (found["namespaces"], found["resident_tokens"], found["stopped_by"]) == (2, 992, "")
        assert found["promoted_bytes"] == found["resident_bytes"] == 31 * 128 << 10
        # One rank's chunk is gone: of no use to either, and why says whose.
        keys = server.ok("POST", "/v1/cache/keys", {"token_ids": prompt(1000, 60)})
        with daemon.client() as client:
            client.delete([bytes.fromhex(keys["chunks"][1]["key"])], namespace=two.namespaces()[1])
        chunk = two.why({"token_ids": prompt(1000, 60)})["chunks"][1]
        assert (chunk["state"], chunk["why"][0]["ranks"]) == ("partial", [1])
        assert "deleted by a client" in chunk["why"][0]["text"]


# ---- is it working, do they agree ------------------------------------------------------------------------------------


def test_status_of_an_engine_is_the_check_that_it_works(pair: Pair) -> None:
    ran = pair.kvd("status", "--engine", pair.server.url, "--probe", "--json")
    body = ran.json()
    words = {check["name"]: check["word"] for check in body["engines"][0]["checks"]}
    assert ran.rc == 0, body
    expected = dict.fromkeys(("server", "routes", "connector", "daemon", "hash seed", "probe", "saving", "faults"), "ok")
    assert {name: words[name] for name in expected} == expected


def test_engines_that_hash_alike_are_said_to(pair: Pair) -> None:
    same = pair.kvd("status", "--engine", pair.server.url, "--engine", pair.server.url.replace("127.0.0.1", "localhost"), "--json")
    assert {check["name"]: check["word"] for check in same.json()["together"]} == {"canary": "ok", "sharing": "ok"}


@pytest.mark.slow
def test_engines_with_different_hash_seeds_are_found_out(pair: Pair, other: ApiServer) -> None:
    ran = pair.kvd("status", "--engine", pair.server.url, "--engine", other.url)
    assert ran.rc == 1
    assert "hash one block of known tokens differently" in ran.stdout
    assert "set PYTHONHASHSEED to one value" in ran.stdout


def test_a_daemon_that_hangs_is_named_and_not_the_engine(pair: Pair) -> None:
    def daemon() -> tuple[int, str]:
        ran = pair.kvd("status", "--engine", pair.server.url, "--json")
        check = next(check for check in ran.json()["engines"][0]["checks"] if check["name"] == "daemon")
        return ran.rc, check["text"]

    pair.why({"token_ids": prompt(300, 70)})
    pair.daemon.signal(signal.SIGSTOP)
    try:
        assert daemon() == (1, f"no daemon answers the engine at {pair.daemon.socket}")
        ran = pair.kvd("why", "--engine", pair.server.url, "-", stdin="a prompt of some words, and more than one block of it " * 20)
        assert (ran.rc, "no kvd daemon answers: the daemon at" in ran.stderr) == (4, True), ran.stderr
    finally:
        pair.daemon.signal(signal.SIGCONT)
    wait_until(lambda: daemon()[0] == 0, timeout_s=30, interval_s=0.2, what="the daemon to answer again")


# ---- numbers ---------------------------------------------------------------------------------------------------------


def test_the_engines_metrics_carry_ours_and_agree_with_its_own(pair: Pair) -> None:
    one = prompt(1000, 50)
    before = pair.server.metrics()
    pair.server.complete(one)
    status, _ = pair.server.post("/reset_prefix_cache", {})
    assert status in (200, 404)
    after = wait_until(
        lambda: (found := pair.server.metrics())["vllm:kvd_saves"] >= before["vllm:kvd_saves"] + 4 and found,
        timeout_s=20,
        interval_s=0.2,
        what="the counters to arrive",
    )
    assert after["vllm:kvd_hit_tokens"] == after["vllm:external_prefix_cache_hits"]
    assert after["vllm:kvd_errors"] == 0
