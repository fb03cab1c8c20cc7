"""Prewarm jobs against a real daemon with a disk tier: what comes up, where a job stops, and what it says."""

import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from kvd.connector import explain
from kvd.connector.asked import BadBody, read
from kvd.connector.groups import Group
from kvd.connector.keys import Span
from kvd.connector.plan import RankIdentity
from kvd.connector.prewarm import MAX_WAITING, Busy, Job, Prewarmer
from kvd.connector.view import HashSource, View
from kvd.errors import Unavailable
from tests.kvd.connector.test_connector_keys import hashes
from tests.support.daemon import Daemon, MakeDaemon
from tests.support.processes import wait_until

BLOCK_BYTES = 1024
TOKENS = 1000
"""Three chunks of 256 tokens and a tail of 224."""


def view(*groups: Group, ranks: int = 1) -> View:
    groups = groups or (Group(0, 32),)
    identities = tuple(
        RankIdentity(tuple(bytes([rank, number]) * 16 for number in range(len(groups))), {}, 256, (BLOCK_BYTES,) * len(groups))
        for rank in range(ranks)
    )
    return View(identities, groups, HashSource("sha256", "00" * 32, 32), 256)


def save(daemon: Daemon, one: View, tokens: int = TOKENS, *, up: bool = False, leave_out: Span | None = None) -> list[Span]:
    """Store a prompt as the connector would: on disk, and in the arena only where `up`."""
    keys = one.keys(hashes(tokens))
    spans = one.spans(keys, tokens)
    with daemon.client() as client:
        for place in one.places():
            for span in spans:
                if span != leave_out:
                    client.put(keys.of(span), b"v" * one.value_bytes(place, span), namespace=place.namespace, wait="tier")
            if not up:
                client.delete([keys.of(span) for span in spans], namespace=place.namespace, arena_only=True)
    return spans


@pytest.fixture
def warm() -> Callable[..., Any]:
    def run(daemon: Daemon, one: View, tokens: int = TOKENS, **how: Any) -> Job:
        with daemon.client() as client:
            prewarmer = Prewarmer(lambda: client)
            job = prewarmer.start(one, hashes(tokens), tokens, **how)
            wait_until(lambda: job.ended, timeout_s=20, what="the job to end")
            prewarmer.close()
        return job

    return run


@pytest.mark.real("kvd")
@pytest.mark.parametrize(
    "one", [view(), view(ranks=2), view(Group(0, 32), Group(1, 32, window=127))], ids=["one", "ranks", "groups"]
)
def test_a_whole_prompt_comes_up_for_all_ranks_and_groups(kvd_daemon: MakeDaemon, warm: Callable[..., Job], one: View) -> None:
    daemon = kvd_daemon(max_bytes="8MiB", tier="64MiB")
    spans = save(daemon, one)
    whole = sum(one.value_bytes(place, span) for place in one.places() for span in spans)
    with daemon.client() as client:
        before = client.stats()
    job = warm(daemon, one)
    assert (job.state, job.stopped_by, job.error) == ("done", "", "")
    assert job.found_tokens == job.resident_tokens == 992
    assert job.promoted_bytes == job.resident_bytes == whole
    again = warm(daemon, one)
    assert (again.promoted_bytes, again.resident_tokens) == (0, 992), "what is up is not brought up twice"
    with daemon.client() as client:
        after = client.stats()
    assert (after["hits_total"], after["misses_total"]) == (before["hits_total"], before["misses_total"])


@pytest.mark.real("kvd")
def test_an_answer_that_is_cut_says_so(kvd_daemon: MakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = kvd_daemon(max_bytes="8MiB")
    save(daemon, view(), up=True)
    with daemon.client() as client:
        whole = explain.explain(client, view(), hashes(TOKENS), TOKENS)
        monkeypatch.setattr(explain, "MAX_CHUNKS", 2)
        cut = explain.explain(client, view(), hashes(TOKENS), TOKENS)
    assert (len(whole["chunks"]), len(cut["chunks"]), cut["found_tokens"]) == (4, 2, 512)
    assert not any("looked at" in remark for remark in whole["remarks"])
    assert "only the first 2 of 4 chunks are looked at, up to token 512" in cut["remarks"]


@pytest.mark.real("kvd")
def test_a_gap_in_one_rank_ends_the_run_for_all(kvd_daemon: MakeDaemon, warm: Callable[..., Job]) -> None:
    daemon = kvd_daemon(max_bytes="8MiB", tier="64MiB")
    both = view(ranks=2)
    save(daemon, both)
    keys = both.keys(hashes(TOKENS))
    with daemon.client() as client:
        client.delete([keys.of(Span(512, 768))], namespace=both.places()[1].namespace)
    job = warm(daemon, both)
    assert (job.stopped_by, job.found_tokens, job.resident_tokens) == ("missing", 512, 512)


@pytest.mark.real("kvd")
def test_the_tail_of_a_shorter_prompt_is_found(kvd_daemon: MakeDaemon, warm: Callable[..., Job]) -> None:
    daemon = kvd_daemon(max_bytes="8MiB", tier="64MiB")
    save(daemon, view(), 600)
    job = warm(daemon, view())
    assert (job.stopped_by, job.found_tokens, job.resident_tokens) == ("missing", 576, 576)


@pytest.mark.real("kvd")
def test_the_byte_cap_cuts_between_chunks(kvd_daemon: MakeDaemon, warm: Callable[..., Job]) -> None:
    daemon = kvd_daemon(max_bytes="8MiB", tier="64MiB")
    save(daemon, view(ranks=2))
    chunk = 2 * 8 * BLOCK_BYTES
    job = warm(daemon, view(ranks=2), max_bytes=2 * chunk + 1)
    assert (job.stopped_by, job.found_tokens, job.resident_tokens) == ("max_bytes", 992, 512)
    assert job.promoted_bytes == 2 * chunk


@pytest.mark.real("kvd")
def test_without_a_cap_half_of_the_arena_is_the_most(kvd_daemon: MakeDaemon, warm: Callable[..., Job]) -> None:
    daemon = kvd_daemon(max_bytes="1MiB", tier="64MiB")
    long = 80 * 256
    save(daemon, view(), long)
    job = warm(daemon, view(), long)
    assert job.max_bytes == 512 << 10
    assert (job.stopped_by, job.resident_bytes) == ("max_bytes", 512 << 10)


@pytest.mark.real("kvd")
def test_an_arena_full_of_pinned_values_is_said_to_have_no_room(kvd_daemon: MakeDaemon, warm: Callable[..., Job]) -> None:
    daemon = kvd_daemon(max_bytes="1MiB", tier="64MiB")
    save(daemon, view())
    with daemon.client() as client:
        client.put(b"p" * 32, b"p" * (1020 << 10))
        with client.read([b"p" * 32]):
            job = warm(daemon, view())
    assert (job.state, job.stopped_by) == ("done", "room")
    assert job.resident_tokens < 992


@pytest.mark.real("kvd")
def test_a_deadline_ends_a_job_and_it_says_how_far_it_came(kvd_daemon: MakeDaemon, warm: Callable[..., Job]) -> None:
    slow = '{"type": "mock", "max_size_gb": 1, "mock_bandwidth_gb": 1, "latency": "400ms"}'
    daemon = kvd_daemon("--l2-adapter", slow, max_bytes="8MiB")
    save(daemon, view())
    job = warm(daemon, view(), deadline_s=0.1)
    assert (job.state, job.stopped_by) == ("done", "deadline")
    assert job.resident_tokens < 992


@pytest.mark.real("kvd")
def test_a_job_of_another_process_is_found_by_its_id(kvd_daemon: MakeDaemon, warm: Callable[..., Job]) -> None:
    daemon = kvd_daemon(max_bytes="8MiB", tier="64MiB")
    save(daemon, view())
    job = warm(daemon, view())
    with daemon.client() as client:
        neighbour = Prewarmer(lambda: client)
        assert neighbour.find(job.id) == job.body()
        assert neighbour.find("0123") is None
        neighbour.close()


@pytest.mark.real("kvd")
def test_a_job_that_waits_is_found_by_another_process_too(kvd_daemon: MakeDaemon) -> None:
    daemon = kvd_daemon(max_bytes="8MiB", tier="64MiB")
    gate = threading.Event()
    with daemon.client() as client:

        def connect() -> Any:
            if threading.current_thread() is not threading.main_thread():
                gate.wait(30)
            return client

        prewarmer, neighbour = Prewarmer(connect), Prewarmer(lambda: client)
        job = prewarmer.start(view(), hashes(600), 600)
        prewarmer.leave(job)
        assert (neighbour.find(job.id) or {}).get("state") == "queued"
        gate.set()
        wait_until(lambda: (neighbour.find(job.id) or {}).get("state") == "done", timeout_s=20)
        prewarmer.close()


def test_jobs_do_not_keep_a_server_from_ending() -> None:
    """A tier that does not answer, and jobs that wait behind it: neither is waited for."""
    program = (
        "import threading\n"
        "from kvd.connector.prewarm import Prewarmer\n"
        "from tests.kvd.connector.test_connector_prewarm import hashes, view\n"
        "begun = threading.Event()\n"
        "prewarmer = Prewarmer(lambda: (begun.set(), threading.Event().wait()))\n"
        "for _ in range(5): prewarmer.start(view(), hashes(64), 64)\n"
        "assert begun.wait(30)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0


def test_without_a_daemon_a_job_fails_and_says_so() -> None:
    def connect() -> Any:
        raise Unavailable("no daemon at /nowhere")

    prewarmer = Prewarmer(connect)
    job = prewarmer.start(view(), hashes(600), 600)
    wait_until(lambda: job.ended, timeout_s=10)
    assert (job.state, job.error) == ("failed", "no daemon at /nowhere")
    assert prewarmer.find(job.id) == job.body()
    prewarmer.close()


def test_too_many_waiting_jobs_are_refused() -> None:
    gate = threading.Event()

    def connect() -> Any:
        gate.wait(30)
        raise Unavailable("no daemon")

    prewarmer = Prewarmer(connect)
    jobs = [prewarmer.start(view(), hashes(64), 64) for _ in range(MAX_WAITING)]
    assert len({job.id for job in jobs}) == MAX_WAITING
    with pytest.raises(Busy, match="waiting already"):
        prewarmer.start(view(), hashes(64), 64)
    gate.set()
    prewarmer.close()


@pytest.mark.parametrize(
    ("body", "field", "says"),
    [
        ([], "", "not a JSON object"),
        ({}, "", "exactly one of messages, prompt, token_ids, block_hashes is needed; none is given"),
        ({"prompt": "a", "messages": [{}]}, "prompt", "messages and prompt are given"),
        ({"messages": []}, "messages", "empty"),
        ({"messages": "hello"}, "messages", "not a list"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": ["a", "b"]}, "prompt", "one prompt at a time"),
        ({"prompt": 7}, "prompt", "not one text"),
        ({"token_ids": [1, -1]}, "token_ids", "whole numbers"),
        ({"token_ids": [True]}, "token_ids", "whole numbers"),
        ({"token_ids": []}, "token_ids", "empty"),
        ({"block_hashes": ["zz"]}, "block_hashes", "not hexadecimal"),
        ({"block_hashes": [7]}, "block_hashes", "not hexadecimal"),
        ({"block_hashes": ["00" * 32, "00" * 16]}, "block_hashes", "unequal length"),
        ({"prompt": "a", "deadline_s": 0}, "deadline_s", "seconds up to 600"),
        ({"prompt": "a", "deadline_s": "soon"}, "deadline_s", "seconds up to 600"),
        ({"prompt": "a", "max_bytes": "plenty"}, "max_bytes", "not a size"),
        ({"prompt": "a", "max_bytes": 0}, "max_bytes", "neither a number"),
        ({"prompt": "a", "kv_transfer_params": "x"}, "kv_transfer_params", "not an object"),
    ],
)
def test_bodies_that_cannot_be_meant(body: Any, field: str, says: str) -> None:
    with pytest.raises(BadBody, match=says) as caught:
        read(body)
    assert caught.value.field == field


def test_bodies_that_can() -> None:
    asked = read({"prompt": [5, 6], "max_bytes": "2MiB", "deadline_s": 5, "kv_transfer_params": {"kvd_namespace": "t"}})
    assert (asked.kind, asked.value, asked.max_bytes, asked.deadline_s, asked.tenant) == ("token_ids", [5, 6], 2 << 20, 5.0, "t")
    assert "prompt" not in asked.fields
    assert read({"prompt_token_ids": [1]}).kind == "token_ids"
    assert read({"prompt": ["one"]}).value == "one"
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "hi", "temperature": 0}}
    assert read(line).fields == {"prompt": "hi", "temperature": 0}
    assert read({"block_hashes": ["ab" * 32]}).value == [b"\xab" * 32]
