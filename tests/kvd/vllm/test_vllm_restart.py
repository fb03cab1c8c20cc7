"""A real engine gets its warm prefix back: after its own restart, after the daemon's, from disk, for every kind of cache.

The witness is the engine's own prefix cache: a request answered from kvd must equal, token for token and to the last digit
of the log-probability, the same request answered from blocks the engine still had.
"""

import time
from typing import Any

import pytest

from tests.support.daemon import MakeDaemon
from tests.support.engine import Engine, model, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.real("vllm"), pytest.mark.real("kvd"), pytest.mark.timeout(240)]


def same(one: dict, other: dict) -> None:
    assert one["tokens"] == other["tokens"]
    assert one["logprobs"] == other["logprobs"]


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("llama", {}),
        ("sliding", {}),
        ("llama", {"kv_cache_dtype": "fp8"}),
    ],
    ids=["llama", "sliding", "fp8"],
)
def test_warm_prefix_survives_engine_and_daemon(kvd_daemon: MakeDaemon, kind: str, more: dict) -> None:
    daemon = kvd_daemon(max_bytes="64MiB", tier="256MiB")
    lengths = (1000, 1024, 40)  # a tail chunk; whole chunks, whose last token must stay uncovered; less than one chunk
    prompts = [prompt(tokens, seed) for seed, tokens in enumerate(lengths)]
    covered = [992, 992, 32]
    with Engine(model(kind), daemon.socket, **more) as engine:
        cold = [engine.one(one) for one in prompts]
        own = [engine.one(one) for one in prompts]
        longer = engine.one(prompts[0] + prompt(100, 9), params={"kvd_retention": "none"})
        assert [out["cached"] for out in cold] == [0, 0, 0]
        assert [out["cached"] for out in own] == covered
        assert longer["cached"] == 992
    with daemon.client() as client:
        assert client.flush(timeout_s=20) != ""
    daemon.restart()
    with Engine(model(kind), daemon.socket, **more) as engine:
        longer_again = engine.one(prompts[0] + prompt(100, 9))
        assert longer_again["cached"] == 992
        same(longer_again, longer)
        assert engine.ask("reset")
        for one, wanted, tokens in zip(prompts, own, covered, strict=True):
            warm = engine.one(one)
            assert warm["cached"] == tokens
            same(warm, wanted)
        # Of a full-attention cache the engine has these blocks itself by now; a window's it never had: kvd has the chunks' ends.
        assert engine.one(prompts[0][:600], params={"kvd_retention": "none"})["cached"] == (512 if kind == "sliding" else 576)
        metrics = engine.metrics()
        extra = 512 if kind == "sliding" else 0
        assert metrics["vllm:kvd_hit_tokens"] == 992 + sum(covered) + extra == metrics["vllm:external_prefix_cache_hits"]
        assert metrics["vllm:kvd_load_failures"] == 0
        assert metrics["vllm:kvd_errors"] == 0
        # The first of each prompt's chunks came from the disk; what it brought up stayed, and came from RAM then.
        by_source = [metrics[f"vllm:kvd_hit_tokens_{source}"] for source in ("arena", "disk", "remote")]
        assert sum(by_source) == metrics["vllm:kvd_hit_tokens"]
        assert by_source[1] >= 992
        assert by_source[2] == 0
        assert metrics["vllm:prompt_tokens_cached_by_source{disk}"] == by_source[1]


def test_latent_attention_survives_a_restart(kvd_daemon: MakeDaemon) -> None:
    # This engine has no prefix cache of its own for latents on a CPU: the witness is a hit in the engine that computed them,
    # and, since the bytes are what matters, a third request after the restart.
    daemon = kvd_daemon(max_bytes="64MiB")
    one = prompt(1000)
    with Engine(model("mla"), daemon.socket, dtype="bfloat16") as engine:
        engine.generate([one])
        hit = engine.one(one)
        assert hit["cached"] == 992
    with Engine(model("mla"), daemon.socket, dtype="bfloat16") as engine:
        for _ in range(2):
            again = engine.one(one)
            assert again["cached"] == 992
            same(again, hit)


def test_two_engines_share_one_daemon_and_outlive_it(kvd_daemon: MakeDaemon) -> None:
    daemon = kvd_daemon(max_bytes="64MiB", tier="256MiB")
    one, two, three = prompt(700, 1), prompt(700, 2), prompt(700, 3)
    first, second = Engine(model(), daemon.socket), Engine(model(), daemon.socket)
    with first, second:
        first.generate([one])
        own = first.one(one)
        from_neighbour = second.one(one)
        assert from_neighbour["cached"] == 672
        same(from_neighbour, own)

        daemon.kill9()
        cold = [engine.one(two) for engine in (first, second)]
        assert [out["cached"] for out in cold] == [0, 0]
        assert cold[0]["tokens"] == cold[1]["tokens"]
        assert first.one(one)["cached"] == 672, "its own cache"

        daemon.start()
        _until_stored(first, three)
        stored = first.one(three)
        assert stored["cached"] == 672
        assert _until_found(second, three)["cached"] == 672
        assert "lost the daemon" in first.text()

        # Gone between the look-up and the copy: recomputed, not answered wrong and not waited for.
        second.ask("reset")
        second.ask("hold")
        second.ask("begin", prompt=three, name="in the middle")
        second.ask("step_until_held")
        daemon.kill9()
        second.ask("let_go")
        (answer,) = second.ask("drain").values()
        assert answer["tokens"] == stored["tokens"]
        assert second.metrics()["vllm:kvd_load_failures"] == 1
        assert first.metrics()["vllm:kvd_errors"] == 0 == second.metrics()["vllm:kvd_errors"]


def _until_found(engine: Engine, tokens: list[int], seconds: float = 20.0) -> dict[str, Any]:
    """Ask until the daemon's blocks are used: this engine finds the daemon again in its own time. Its own cache does not count."""
    end = time.monotonic() + seconds
    while True:
        found = engine.one(tokens)
        if found["cached"] or time.monotonic() > end:
            return found
        engine.ask("reset")
        time.sleep(0.2)


def _until_stored(engine: Engine, one: list[int]) -> None:
    """The links find a daemon again by themselves, within their longest back-off."""
    from tests.support.processes import wait_until

    saves = engine.metrics()["vllm:kvd_saves"]

    def stored() -> bool:
        engine.ask("reset")
        engine.generate([one])
        return engine.metrics()["vllm:kvd_saves"] > saves

    wait_until(stored, timeout_s=20.0, interval_s=0.2, what="the engine to find the daemon again")


def test_after_a_reset_an_engine_shares_nothing_until_it_restarts(kvd_daemon: MakeDaemon) -> None:
    """What resets an engine may have changed its weights; those it starts with are the files'."""
    daemon = kvd_daemon(max_bytes="64MiB")
    one = prompt(600, 3)
    with Engine(model(), daemon.socket) as engine:
        cold = engine.one(one)
        assert engine.ask("reset", connector=True)
        again = engine.one(one)
        assert (again["cached"], again["tokens"]) == (0, cold["tokens"])
        assert engine.ask("reset")
        own = engine.one(one)
        assert (own["cached"], own["tokens"]) == (576, cold["tokens"]), "what it has stored since"
    with Engine(model(), daemon.socket) as engine:
        warm = engine.one(one)
        assert (warm["cached"], warm["tokens"]) == (576, cold["tokens"])
        daemon.kill9()
        assert engine.ask("reset", connector=True), "no daemon is no reason to refuse a sleep"
        assert engine.one(one)["tokens"] == cold["tokens"]
