"""The connector in other arrangements: several processes, two ranks, preemption, beside another connector, one-way roles."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.daemon import MakeDaemon
from tests.support.engine import TRANSFER, Engine, model, prompt
from tests.support.processes import wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.real("vllm"), pytest.mark.real("kvd"), pytest.mark.timeout(240)]


def test_front_end_scheduler_and_worker_in_processes_of_their_own(kvd_daemon: MakeDaemon) -> None:
    daemon = kvd_daemon(max_bytes="64MiB")
    one = prompt(1000)
    with Engine(model(), daemon.socket, processes=True) as engine:
        engine.one(one)
        own = engine.one(one)
        assert engine.ask("reset")
        warm = engine.one(one)
        assert warm["cached"] == own["cached"] == 992
        assert (warm["tokens"], warm["logprobs"]) == (own["tokens"], own["logprobs"])
        metrics = engine.metrics()
        # Counted in the worker and in the scheduler, shown by the front end: what vLLM counts and what we count agree.
        assert metrics["vllm:kvd_hit_tokens"] == 992 == metrics["vllm:external_prefix_cache_hits"]
        assert metrics["vllm:kvd_loads"] == 1
        assert metrics["vllm:kvd_load_bytes"] == metrics["vllm:kvd_save_bytes"] > 0
        assert metrics["vllm:kvd_errors"] == 0
        assert "daemon connected" in engine.text()
        # vLLM's external prefix cache hit rate, its log's word for it, and kvd's: one number.
        asked, hit = metrics["vllm:external_prefix_cache_queries"], metrics["vllm:external_prefix_cache_hits"]
        assert (metrics["vllm:kvd_query_tokens"], metrics["vllm:kvd_query_hit_tokens"]) == (asked, hit)
        assert metrics["vllm:kvd_hit_tokens_arena"] == hit == metrics["vllm:prompt_tokens_cached_by_source{host}"]

        def told() -> list[float | None]:
            return [each["external_hit_rate"] for each in daemon.run("stats", "--json").json()["engines"]]

        wait_until(lambda: told() == [hit / asked], timeout_s=10, interval_s=0.2, what="kvd stats to say the same")
        assert "external_hit_rate" in daemon.run("stats").stdout
    with daemon.client() as client:
        stats = client.stats()
    # The daemon counts the same bytes, and the few that tell the next engine how this one was set up.
    assert 0 <= stats["set_bytes_total"] - metrics["vllm:kvd_save_bytes"] < 4096
    assert stats["get_bytes_total"] == metrics["vllm:kvd_load_bytes"]
    assert stats["leases_active"] == 0


@pytest.mark.slow
def test_two_ranks_hit_together(kvd_daemon: MakeDaemon) -> None:
    daemon = kvd_daemon(max_bytes="64MiB")
    one = prompt(1000)
    with Engine(model(), daemon.socket, processes=True, tensor_parallel_size=2) as engine:
        engine.one(one)
        own = engine.one(one)
        assert engine.metrics()["vllm:kvd_saves"] == 8
    with Engine(model(), daemon.socket, processes=True, tensor_parallel_size=2) as engine:
        warm = engine.one(one)
        assert warm["cached"] == own["cached"] == 992
        assert (warm["tokens"], warm["logprobs"]) == (own["tokens"], own["logprobs"])
        engine.ask("reset")
        with daemon.client() as client:
            entry = client.stats()
            assert entry["entries"] == 8 + 1, "and the engine's facts"
            # One chunk of one rank is gone: neither rank may use its half.
            listed = daemon.run("keys", "--json").json()["keys"]
            gone = max(listed, key=lambda one: one["bytes"])
            client.delete([bytes.fromhex(gone["key"])], namespace=bytes.fromhex(gone["namespace"]))
        again = engine.one(one)
        assert again["cached"] < 992
        assert again["tokens"] == own["tokens"]
        assert engine.metrics()["vllm:kvd_load_failures"] == 0


def test_preempted_requests_come_back_right(kvd_daemon: MakeDaemon) -> None:
    daemon = kvd_daemon(max_bytes="256MiB")
    prompts = [prompt(500, seed) for seed in range(4)]
    # Room for little more than three of four answers: the others are preempted and come back through a look-up that covers
    # what they generated too.
    with Engine(model(), daemon.socket, num_gpu_blocks_override=76, max_model_len=1024, max_num_seqs=4) as engine:
        alone = [engine.one(one, tokens=160, params={"kvd_retention": "none"}) for one in prompts]
        assert engine.ask("preemptions") == 0
        engine.ask("reset")
        together = engine.generate(prompts, tokens=160)
        assert engine.ask("preemptions") > 0
        assert [out["tokens"] for out in together] == [out["tokens"] for out in alone]
        metrics = engine.metrics()
        assert metrics["vllm:kvd_hit_tokens"] > 0, "what was preempted was loaded again, not computed"
        assert metrics["vllm:kvd_errors"] == 0
        free, total = engine.ask("free_blocks")
        assert free == total - 1


def beside(folder: Path, role: str, own: str, *, first: bool = True) -> dict[str, Any]:
    """MultiConnector in this role, with KvdConnector in its own beside vLLM's ExampleConnector as the transport."""
    kvd = {"kv_connector": "KvdConnector", "kv_role": own}
    transport = {
        "kv_connector": "ExampleConnector",
        "kv_role": role,
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }
    return {
        "kv_connector": "MultiConnector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [kvd, transport] if first else [transport, kvd]},
    }


def test_a_prefill_engine_keeps_its_prefixes_beside_the_transport(kvd_daemon: MakeDaemon, tmp_path: Path) -> None:
    # The arrangement of P/D disaggregation: the whole is a producer, kvd in it a cache that stores and loads.
    daemon = kvd_daemon(max_bytes="64MiB")
    one = prompt(1000)
    with Engine(model(), daemon.socket, transfer=beside(tmp_path, "kv_producer", "kv_both")) as engine:
        engine.one(one)
        own = engine.one(one)
        assert engine.metrics()["vllm:kvd_saves"] == 4
    with Engine(model(), daemon.socket, transfer=beside(tmp_path, "kv_producer", "kv_both")) as engine:
        warm = engine.one(one)
        assert (warm["cached"], warm["tokens"], warm["logprobs"]) == (own["cached"], own["tokens"], own["logprobs"])
        assert engine.metrics()["vllm:kvd_hit_tokens"] == 992
        assert engine.metrics()["vllm:kvd_errors"] == 0


@pytest.mark.parametrize("first", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_consumer_beside_the_transport_stores_nothing(kvd_daemon: MakeDaemon, tmp_path: Path, first: bool) -> None:
    daemon = kvd_daemon(max_bytes="64MiB")
    with Engine(model(), daemon.socket, transfer=beside(tmp_path, "kv_both", "kv_consumer", first=first)) as engine:
        cold = engine.one(prompt(1000))
        assert engine.metrics()["vllm:kvd_saves"] == 0
        assert list(tmp_path.iterdir()), "the other one saves"
        assert engine.ask("reset")
        warm = engine.one(prompt(1000))
        assert (warm["cached"] > 0, warm["tokens"]) == (True, cold["tokens"]), "and loads what it saved"
        metrics = engine.metrics()
        assert (metrics["vllm:kvd_hit_tokens"], metrics["vllm:kvd_errors"]) == (0, 0)
    listed = daemon.run("keys", "--json").json()["keys"]
    assert len(listed) == 1, "nothing but the engine's record"


def test_beside_another_connector(kvd_daemon: MakeDaemon, tmp_path: Path) -> None:
    daemon = kvd_daemon(max_bytes="64MiB")
    one = prompt(1000)
    with Engine(model(), daemon.socket, transfer=beside(tmp_path, "kv_both", "kv_both")) as engine:
        engine.one(one)
        own = engine.one(one)
        engine.ask("reset")
        warm = engine.one(one)
        assert warm["cached"] == own["cached"]
        assert (warm["tokens"], warm["logprobs"]) == (own["tokens"], own["logprobs"])
        metrics = engine.metrics()
        assert metrics["vllm:external_prefix_cache_hits"] == 992 == metrics["vllm:kvd_hit_tokens"]
        assert metrics["vllm:prompt_tokens_cached_by_source{host}"] == 992
        # vLLM logs the children's stats by class name: a connector it cannot look up would end the engine here.
        engine.ask("log_stats")
        assert "KvdConnector" in engine.text()
        assert list(tmp_path.iterdir()), "the other one saved too"


@pytest.mark.parametrize(("role", "saves", "loads"), [("kv_consumer", False, True), ("kv_producer", True, False)])
def test_roles_are_one_way(kvd_daemon: MakeDaemon, role: str, saves: bool, loads: bool) -> None:
    daemon = kvd_daemon(max_bytes="64MiB")
    one = prompt(1000)
    if loads:
        with Engine(model(), daemon.socket) as engine:
            engine.one(one)
    with Engine(model(), daemon.socket, transfer={**TRANSFER, "kv_role": role}) as engine:
        assert engine.one(one)["cached"] == (992 if loads else 0)
        engine.one(prompt(1000, 2))
        assert bool(engine.metrics()["vllm:kvd_saves"]) is saves


def test_another_hash_seed_shares_nothing_and_is_told_apart(kvd_daemon: MakeDaemon) -> None:
    daemon = kvd_daemon(max_bytes="64MiB")
    one = prompt(1000)
    with Engine(model(), daemon.socket, env={"PYTHONHASHSEED": "0"}) as engine:
        engine.one(one)
    with Engine(model(), daemon.socket, env={"PYTHONHASHSEED": "1"}) as engine:
        assert engine.one(one)["cached"] == 0
        wait_until(lambda: "stored under other settings" in engine.text(), timeout_s=20, what="the difference to be named")
        assert "PYTHONHASHSEED" in engine.text()
    with Engine(model(), daemon.socket, env={"PYTHONHASHSEED": "0"}) as engine:
        assert engine.one(one)["cached"] == 992


def test_without_a_daemon_an_engine_starts_and_serves(tmp_path: Path) -> None:
    with Engine(model(), tmp_path / "nobody.sock") as engine:
        assert engine.one(prompt(300))["finish"] == "length"
        assert "no daemon yet" in engine.text()
        assert engine.metrics()["vllm:kvd_errors"] == 0


def test_a_setting_that_cannot_be_meant_ends_the_start_by_name(tmp_path: Path) -> None:
    engine = Engine(model(), tmp_path / "nobody.sock", env={"KVD_CHUNK_TOKENS": "plenty"})
    with pytest.raises(
        AssertionError, match=r"chunk_tokens \(env:KVD_CHUNK_TOKENS\): not a whole number from 1 to 16777216: 'plenty'"
    ):
        engine.wait()
    engine.stop()
