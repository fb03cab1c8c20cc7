"""What goes wrong while a real engine serves: it answers right, never hangs, leaks no block, and finds its way back.

`llama` has one cache group (failures are reported block by block), `sliding` has two (whole requests are reported). The
answer to compare with is the engine's own prefix cache, or the cold run where nothing could be reused.
"""

import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from kvtools.segments.stats import StatsReading, read_stats
from tests.support.daemon import Daemon, MakeDaemon
from tests.support.engine import Engine, model, prompt
from tests.support.processes import wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.real("vllm"), pytest.mark.real("kvd"), pytest.mark.timeout(120)]

TOKENS, COVERED = 1000, 992


@dataclass
class Setup:
    """One engine and its daemon for all tests of a kind; each test has prompts of its own."""

    kind: str
    engine: Engine
    daemon: Daemon
    seed: int = 100
    forgiven: float = 0
    """Errors that a test provoked."""

    def stored(self, *, own: bool = True) -> tuple[list[int], dict]:
        """A new prompt whose cache is in the daemon and not in the engine, and the right answer for it."""
        self.seed += 1
        one = prompt(TOKENS, self.seed)
        cold = self.engine.one(one)
        right = self.engine.one(one) if own else cold
        assert right["cached"] == (COVERED if own else 0)
        assert self.engine.ask("reset")
        return one, right

    def grown(self, name: str, before: dict[str, float]) -> float:
        return self.engine.metrics()[f"vllm:kvd_{name}"] - before[f"vllm:kvd_{name}"]

    def settle(self) -> None:
        """Until the engine's links have the daemon (again)."""

        def hits() -> bool:
            one = prompt(300, self.seed)
            self.engine.one(one)
            self.engine.ask("reset")
            return bool(self.engine.one(one)["cached"])

        self.seed += 1
        wait_until(hits, timeout_s=20.0, interval_s=0.2, what="hits after the daemon came back")


@pytest.fixture(scope="module", params=["llama", "sliding"])
def setup(request: pytest.FixtureRequest, kvd_daemon_module: MakeDaemon) -> Iterator[Setup]:
    daemon = kvd_daemon_module(max_bytes="128MiB", tier="256MiB")
    with Engine(model(request.param), daemon.socket) as engine:
        yield Setup(request.param, engine, daemon)


@pytest.fixture(autouse=True)
def _at_rest(setup: Setup) -> Iterator[None]:
    """After each test the engine holds no block and has met no error of ours."""
    yield
    free, total = setup.engine.ask("free_blocks")
    assert free == total - 1, "blocks leaked (one is the engine's null block)"
    assert setup.engine.metrics()["vllm:kvd_errors"] == setup.forgiven, setup.engine.text()[-4000:]


def same(one: dict, other: dict) -> None:
    assert (one["tokens"], one["logprobs"]) == (other["tokens"], other["logprobs"])


def close(one: dict, other: dict) -> None:
    """Where another number of tokens was computed at once, float32 rounds differently: equal tokens, nearly equal values."""
    assert one["tokens"] == other["tokens"]
    assert one["logprobs"] == pytest.approx(other["logprobs"], abs=1e-4)


def test_a_flipped_bit_in_the_disk_tier_is_recomputed(setup: Setup) -> None:
    one, right = setup.stored()
    before = setup.engine.metrics()
    with setup.daemon.client() as client:
        client.flush(timeout_s=20)
        client.clear(arena_only=True, all_namespaces=True)
        _flip_newest(setup.daemon, client)
        damaged = setup.engine.one(one)
        close(damaged, right)
        assert client.stats()["corruptions_total"] >= 1
    assert setup.grown("load_failures", before) == 1
    assert damaged["finish"] == "length"
    # What was recomputed was stored again: the next one hits, from good bytes.
    assert setup.engine.ask("reset")
    wait_until(lambda: setup.grown("saves", before) > 0, what="the recomputed chunk to be stored")


def _flip_newest(daemon: Daemon, client) -> None:
    """Flip one bit in the middle of a value of the newest region file; whichever chunk that is, it is one of ours."""
    data = max(daemon.tier.rglob("*.kvcache"), key=lambda path: path.name)
    listed = daemon.run("keys", "--json", "--limit", "100000").json()["keys"]
    for entry in sorted(listed, key=lambda entry: -entry["bytes"]):
        value = client.get(bytes.fromhex(entry["key"]), namespace=bytes.fromhex(entry["namespace"]))
        content = data.read_bytes()
        at = content.find(value[:4096]) if value else -1
        if at >= 0:
            with data.open("r+b") as file:
                file.seek(at + len(value) // 2)
                byte = file.read(1)[0]
                file.seek(at + len(value) // 2)
                file.write(bytes([byte ^ 1]))
            client.clear(arena_only=True, all_namespaces=True)
            return
    raise AssertionError("no stored value was found in the tier's file")


def test_chunks_that_vanish_after_the_look_up_are_recomputed(setup: Setup) -> None:
    one, right = setup.stored(own=False)
    before = setup.engine.metrics()
    setup.engine.ask("hold")
    setup.engine.ask("begin", prompt=one, name="vanished")
    setup.engine.ask("step_until_held")
    with setup.daemon.client() as client:
        assert client.clear(all_namespaces=True) > 0
    setup.engine.ask("let_go")
    same(_only(setup.engine.ask("drain")), right)
    assert setup.grown("load_failures", before) == 1
    assert setup.grown("saves", before) > 0, "stored again"
    setup.engine.ask("reset")


def test_a_wedged_daemon_costs_a_time_out_once_and_no_answer(setup: Setup) -> None:
    one, right = setup.stored(own=False)
    before = setup.engine.metrics()
    setup.engine.ask("hold")
    setup.engine.ask("begin", prompt=one, name="wedged")
    setup.engine.ask("step_until_held")
    setup.daemon.signal(signal.SIGSTOP)
    try:
        setup.engine.ask("let_go")
        same(_only(setup.engine.ask("drain")), right)
        others = [setup.engine.one(prompt(300, seed)) for seed in range(1000, 1004)]
        assert all(out["finish"] == "length" for out in others)
        # Five seconds for the load's call, a second each for a look-up and a save; then the links are down and cost nothing.
        waited = {name: setup.grown(f"{name}_seconds", before) for name in ("lookup", "load", "save")}
        assert waited["load"] < 7.0
        assert waited["lookup"] < 1.5
        assert waited["save"] < 1.5
        assert setup.grown("down", before) == 3
    finally:
        setup.daemon.signal(signal.SIGCONT)
        setup.settle()
    setup.engine.ask("reset")


def test_an_aborted_load_gives_its_blocks_back(setup: Setup) -> None:
    one, right = setup.stored()
    setup.engine.ask("hold")
    name = setup.engine.ask("begin", prompt=one, name="aborted")
    setup.engine.ask("step_until_held")
    free, total = setup.engine.ask("free_blocks")
    assert free < total - 1
    setup.engine.ask("abort", name=name)
    setup.engine.ask("let_go")
    setup.engine.ask("drain")
    again = setup.engine.one(one)
    same(again, right)
    setup.engine.ask("reset")


def test_two_requests_with_one_prefix_load_it_once(setup: Setup) -> None:
    one, right = setup.stored()
    before = setup.engine.metrics()
    setup.engine.ask("hold")
    for name in ("first", "second"):
        setup.engine.ask("begin", prompt=one, name=name)
    setup.engine.ask("step_until_held")
    setup.engine.ask("let_go")
    answers = setup.engine.ask("drain")
    assert len(answers) == 2
    for answer in answers.values():
        close(answer, right)
    assert setup.grown("loads", before) == 1
    assert setup.grown("deferred", before) == 1
    setup.engine.ask("reset")


def test_what_the_engine_has_itself_is_not_loaded_over(setup: Setup) -> None:
    one, right = setup.stored()
    setup.engine.one(one[:330], params={"kvd_retention": "none"})
    before = setup.engine.metrics()
    again = setup.engine.one(one)
    assert again["cached"] == COVERED
    same(again, right)
    assert setup.grown("hit_tokens", before) < COVERED
    setup.engine.ask("reset")


def test_tenants_and_salts_share_nothing(setup: Setup) -> None:
    one, right = setup.stored()
    # Between these the engine's own cache is emptied: it knows no tenants.
    assert setup.engine.one(one, params={"kvd_namespace": "someone else"})["cached"] == 0
    setup.engine.ask("reset")
    assert setup.engine.one(one, cache_salt="pepper", params={"kvd_retention": "none"})["cached"] == 0
    setup.engine.ask("reset")
    same(setup.engine.one(one), right)
    setup.engine.ask("reset")
    assert setup.engine.one(one, params={"kvd_namespace": "someone else"})["cached"] == COVERED
    setup.engine.ask("reset")


def test_retention_and_expiry_are_the_requests_own(setup: Setup) -> None:
    def listed() -> dict[str, dict]:
        entries = setup.daemon.run("keys", "--json", "--limit", "100000").json()["keys"]
        return {entry["namespace"] + entry["key"]: entry for entry in entries}

    before = set(listed())
    one, two = prompt(600, 7001), prompt(600, 7002)
    setup.engine.one(one, params={"kvd_retention": "none"})
    assert set(listed()) == before
    setup.engine.one(two, params={"kvd_retention": "short", "kvd_ttl_seconds": 3600})
    fresh = [entry for key, entry in listed().items() if key not in before]
    assert {entry["retention"] for entry in fresh} == {"short"}
    assert all(3500 < entry["expires_at"] - time.time() <= 3600 for entry in fresh)
    assert len(fresh) == 3 * (2 if setup.kind == "sliding" else 1)
    setup.engine.ask("reset")


def test_resetting_the_connector_forgets_what_is_stored(setup: Setup) -> None:
    one, _ = setup.stored()
    assert setup.engine.ask("reset", connector=True)
    assert setup.engine.one(one, params={"kvd_retention": "none"})["cached"] == 0
    setup.engine.ask("reset")


def test_its_numbers_are_in_shared_memory(setup: Setup) -> None:
    def read(who: str) -> StatsReading:
        return read_stats(f"kvtools.connector.{setup.engine.pid}-{who}")

    one, _ = setup.stored()
    setup.engine.one(one)
    counted = setup.engine.metrics()
    # In-process, scheduler and worker have counters of their own; vLLM's metrics are their sum.
    wait_until(lambda: read("scheduler").get("hit_tokens_total") == counted["vllm:kvd_hit_tokens"], what="the scheduler's numbers")
    wait_until(lambda: read("0").get("load_bytes_total") == counted["vllm:kvd_load_bytes"], what="the worker's numbers")
    assert read("0").alive
    assert read("0").get("daemon_up") == 1
    setup.engine.ask("reset")


def test_a_broken_connector_is_logged_and_serves_on(setup: Setup) -> None:
    one, right = setup.stored(own=False)
    before = setup.engine.metrics()
    setup.engine.ask("sabotage", broken=True)
    try:
        same(setup.engine.one(one), right)
    finally:
        setup.engine.ask("sabotage", broken=False)
    setup.forgiven += setup.grown("errors", before)
    assert setup.forgiven > 0
    assert "the engine serves on" in setup.engine.text()
    setup.engine.ask("reset")


def _only(answers: dict[str, dict]) -> dict:
    (answer,) = answers.values()
    return answer
