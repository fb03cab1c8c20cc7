"""The plug-in in a real engine: KVTOOLS_SEGMENT and nothing else. Outputs are those of an engine without it, at every limit."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtools.segments import owner, pool
from kvtools.segments.stats import instance_of_pool, read_stats, stats_name
from tests.kvtools.elastic.vllm.kernel import physical, resident
from tests.support.daemon import MakeDaemon
from tests.support.engine import TRANSFER, Engine, EngineError, model, prompt
from tests.support.processes import PREFIX, SHARED_MEMORY, wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.real("vllm"), pytest.mark.real("segments"), pytest.mark.timeout(240)]

MIB = 1 << 20
PAGES = {"KVTOOLS_PAGE_SIZE": "256K", "KVTOOLS_MIN_RESERVED_PAGES": "1", "KVTOOLS_MAX_RESERVED_PAGES": "2"}
PROMPTS = [prompt(500, seed) for seed in range(6)]
"""15 whole blocks of 32 tokens each: two pages of 8 blocks."""
Start = Callable[..., tuple[Engine, str]]


@pytest.fixture
def elastic(shm_name: Callable[[], str]) -> Iterator[Start]:
    """Starts engines with an elastic pool: the engine, and its segment's name."""
    made: list[tuple[Engine, str]] = []

    def start(folder: Path | None = None, *, env: dict[str, str] | None = None, **arguments: Any) -> tuple[Engine, str]:
        name = shm_name()
        arguments = {"transfer": None, **arguments}
        engine = Engine(folder or model(), env={**PAGES, "KVTOOLS_SEGMENT": name, **(env or {})}, **arguments)
        made.append((engine, name))
        return engine, name

    yield start
    for engine, name in made:
        engine.stop()
        (SHARED_MEMORY / stats_name("pool", instance_of_pool(name))).unlink(missing_ok=True)


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[Engine, str]]:
    """One engine for the tests that leave it as it was: its start costs more than they do."""
    name = f"{PREFIX}elastic"
    engine = Engine(model(), transfer=None, env={**PAGES, "KVTOOLS_SEGMENT": name})
    try:
        yield engine.wait(), name
    finally:
        engine.stop()


def limit(name: str, size: int, *, timeout_s: float = 20.0, root: Path = SHARED_MEMORY) -> owner.LimitEntry:
    """Set a limit as kvctl does, and wait until the engine says that it holds."""
    owner.change_limit(name, size, by="a test", root=root)

    def applied() -> owner.LimitEntry | None:
        said = owner.read_owner(name, root=root)
        last = said.last_limit if said else None
        return last if last and last.limit_bytes == size and last.state == "applied" else None

    found: owner.LimitEntry = wait_until(applied, timeout_s=timeout_s, what=f"the limit {size} to be applied")
    return found


def same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Token for token and to the log-probability."""
    return bool(first["tokens"] == second["tokens"] and first["logprobs"] == second["logprobs"])


@pytest.mark.parametrize("kind", ["llama", "sliding"])
def test_outputs_are_unchanged_and_cached_prefixes_go_oldest_first(elastic: Start, kind: str) -> None:
    engine, name = elastic(model(kind))
    with Engine(model(kind), transfer=None) as plain:
        engine.wait()
        assert "kvtools: elastic KV cache, segment" in engine.text()
        cold = [plain.one(one) for one in PROMPTS]
        warm = [plain.one(one) for one in PROMPTS]
    assert [one["cached"] for one in warm] == [480] * 6
    for one, expected in zip(PROMPTS, cold, strict=True):
        assert same(engine.one(one), expected)
    for one, expected in zip(PROMPTS, warm, strict=True):
        found = engine.one(one)
        assert found["cached"] == 480
        assert same(found, expected)

    page = pool.read_pool(name)
    said = owner.read_owner(name)
    assert said is not None
    size = said.info.page_bytes
    before = physical(engine.pid)[0]
    assert before >= 6 * 15 * size // 8, "the prompts' blocks are there"
    assert page.mapped_bytes <= 32 * size < page.limit_bytes
    entry = limit(name, 8 * size)
    assert entry.effective_bytes == 8 * size
    assert physical(engine.pid)[0] <= 8 * size
    assert resident(engine.pid) <= 8 * size
    assert pool.read_pool(name).mapped_bytes <= 8 * size

    # Three prompts' worth of pages is left; the last ones used are still cached, the first one is not.
    last, first = engine.one(PROMPTS[5]), engine.one(PROMPTS[0])
    assert last["cached"] == 480
    assert same(last, warm[5])
    assert first["cached"] == 0
    assert same(first, cold[0])
    assert physical(engine.pid)[0] <= 8 * size
    for one, expected in zip(PROMPTS, cold, strict=True):
        assert engine.one(one)["tokens"] == expected["tokens"]
    assert physical(engine.pid)[0] <= 8 * size

    limit(name, said.info.start_capacity_bytes)
    for one in PROMPTS:
        engine.one(one)
    for one, expected in zip(PROMPTS, warm, strict=True):
        found = engine.one(one)
        assert found["cached"] == 480, "it grows again, and keeps them all"
        assert same(found, expected)


@pytest.mark.slow
def test_latents_lie_in_elastic_memory_too(elastic: Start) -> None:
    """This engine caches no prefixes of latents on a CPU, so their pages go with the requests.

    One request at a time: in bfloat16 what runs beside it changes its last bits, and the limit changes what runs beside it.
    """
    engine, name = elastic(model("mla"), dtype="bfloat16")
    with Engine(model("mla"), transfer=None, dtype="bfloat16") as plain:
        engine.wait()
        cold = [plain.one(one) for one in PROMPTS]

    def as_before() -> bool:
        return all(same(engine.one(one), expected) for one, expected in zip(PROMPTS, cold, strict=True))

    assert as_before()
    said = owner.read_owner(name)
    assert said is not None
    size = said.info.page_bytes
    wait_until(lambda: pool.read_pool(name).used_bytes == size, what="all but the null block's page to be free")
    assert limit(name, 6 * size).effective_bytes == 6 * size
    assert as_before()
    answers = engine.generate(PROMPTS)
    assert {one["finish"] for one in answers} == {"length"}, "they wait for each other, and all are answered"
    assert 0 < physical(engine.pid)[0] <= 6 * size
    limit(name, said.info.start_capacity_bytes)
    engine.send("generate", prompts=PROMPTS, tokens=24)
    wait_until(lambda: pool.read_pool(name).used_bytes > 6 * size, timeout_s=30, what="it to grow again")
    assert len(engine.answer()) == len(PROMPTS)
    assert as_before()


def test_a_limit_while_requests_run_is_reached_as_their_blocks_are_freed(shared: tuple[Engine, str]) -> None:
    engine, name = shared
    engine.ask("reset")
    alone = [engine.one(one, tokens=24)["tokens"] for one in PROMPTS]
    engine.ask("reset")
    size = owner.read_owner(name).info.page_bytes  # type: ignore[union-attr]
    engine.send("generate", prompts=PROMPTS, tokens=24)
    wait_until(lambda: pool.read_pool(name).used_bytes >= 8 * size, what="the requests to hold blocks")
    entry = limit(name, 4 * size, timeout_s=60)
    assert entry.effective_bytes == 4 * size
    answers = engine.answer()
    assert [one["tokens"] for one in answers] == alone
    assert physical(engine.pid)[0] <= 4 * size
    assert {one["finish"] for one in answers} == {"length"}
    limit(name, 1 << 30)


@pytest.mark.parametrize("how", ["floor", "ENOMEM", "EPERM"])
def test_a_device_without_room_makes_requests_wait_and_the_engine_lives(shared: tuple[Engine, str], how: str) -> None:
    engine, name = shared
    engine.ask("reset")
    alone = [engine.one(one)["tokens"] for one in PROMPTS]
    engine.ask("reset")
    wait_until(lambda: pool.read_pool(name).mapped_bytes <= 3 * MIB, what="the reset to give pages back")
    # Room for about two requests at once, then none: mapping fails in the worker, with the exception that a GPU's driver causes,
    # and but for the first way only after one plane of the page was mapped, which is taken back.
    engine.one(PROMPTS[0])
    figures = stats_name("pool", instance_of_pool(name))
    wait_until(lambda: read_stats(figures).get("pages_reserved"), what="the reserve")
    begun = read_stats(figures).get("map_failures_total") or 0
    engine.ask("starve", how=how)
    before = pool.read_pool(name).mapped_bytes
    answers = engine.generate(PROMPTS, tokens=8)
    assert [one["tokens"] for one in answers] == alone
    wait_until(lambda: (read_stats(figures).get("map_failures_total") or 0) > begun, what="the failures")
    assert pool.read_pool(name).mapped_bytes <= before
    assert physical(engine.pid)[0] <= before
    assert engine.text().count("kvtools: no page more") < 10, "said once a minute, however often the engine asks"
    engine.ask("starve")
    assert [one["tokens"] for one in engine.generate(PROMPTS, tokens=8)] == alone
    wait_until(lambda: pool.read_pool(name).mapped_bytes > before, what="pages to come again")


def test_running_requests_give_way_where_the_device_has_no_page_more(shared: tuple[Engine, str]) -> None:
    """Four blocks each, and a fifth one while they generate: all that there is room for begin together, and each needs one more."""
    engine, name = shared
    growing = [prompt(120, 100 + seed) for seed in range(10)]
    alone = [engine.one(one, tokens=12)["tokens"] for one in growing]
    engine.ask("reset")
    wait_until(lambda: pool.read_pool(name).mapped_bytes <= 3 * MIB, what="the reset to give pages back")
    preempted = engine.ask("preemptions")
    engine.ask("starve", how="ENOMEM")
    try:
        answers = engine.generate(growing, tokens=12)
    finally:
        engine.ask("starve")
    assert [one["tokens"] for one in answers] == alone
    assert engine.ask("preemptions") > preempted


def test_sleep_gives_all_memory_back_and_wake_brings_none_of_the_contents(shared: tuple[Engine, str]) -> None:
    engine, name = shared
    engine.ask("reset")
    cold = engine.one(PROMPTS[0])
    warm = engine.one(PROMPTS[0])
    assert warm["cached"] == 480
    assert physical(engine.pid)[0] > 0
    assert engine.ask("nap") is False, "a sleep behind the engine's back takes nothing: cached prefixes would be zeros"
    assert same(engine.one(PROMPTS[0]), warm)
    engine.ask("sleep")
    assert physical(engine.pid) == [0]
    assert resident(engine.pid) == 0
    wait_until(lambda: pool.read_pool(name).mapped_bytes == 0, what="the segment to say so")
    engine.ask("wake")
    again = engine.one(PROMPTS[0])
    assert again["cached"] == 0
    assert same(again, cold)
    assert same(engine.one(PROMPTS[0]), warm)
    wait_until(lambda: pool.read_pool(name).mapped_bytes > 0, what="the segment to say so")


def test_a_prefix_that_is_found_has_its_contents_in_any_order_of_calls(shared: tuple[Engine, str]) -> None:
    shared[0].ask("call", target="tests.kvtools.elastic.vllm.block_machine:run", examples=60)


def test_two_engines_cannot_have_one_segment(elastic: Start, shm_name: Callable[[], str]) -> None:
    name = shm_name()
    engine, _ = elastic(env={"KVTOOLS_SEGMENT": name})
    engine.wait()
    other, _ = elastic(env={"KVTOOLS_SEGMENT": name})
    with pytest.raises(EngineError, match=rf"segment {name} is owned by a running engine \(vllm, pid {engine.pid}\)"):
        other.wait()
    assert engine.one(PROMPTS[0])["finish"] == "length"
    assert pool.read_pool(name).limit_bytes


def test_a_tensor_over_memory_that_torch_did_not_make() -> None:
    import torch

    from kvtools.elastic.cpu import CpuMemory

    memory = CpuMemory(4 * MIB)
    memory.map(0, MIB)
    tensor = memory.tensor(2 * MIB)
    assert (tensor.dtype, tensor.shape, tensor.data_ptr()) == (torch.int8, (2 * MIB,), memory.address)
    tensor[:MIB].fill_(3)
    assert int(tensor[: 2 * MIB].sum(dtype=torch.int64)) == 3 * MIB, "what is not mapped reads as zeros"
    assert memory.resident_bytes == MIB
    whole = memory.tensor()
    del tensor
    assert whole[0] == 3
    memory.close()


@pytest.mark.real("kvd")
def test_kvd_refills_what_a_sleep_forgot(elastic: Start, kvd_daemon: MakeDaemon) -> None:
    daemon = kvd_daemon(max_bytes="64MiB")
    engine, _ = elastic(socket=daemon.socket, transfer=TRANSFER)
    engine.wait()
    one = prompt(1000)
    cold = engine.one(one)
    own = engine.one(one)
    assert engine.ask("reset")
    warm = engine.one(one)
    assert warm["cached"] == own["cached"] == 992
    assert same(warm, own), "saved from elastic memory and loaded into it, to the last bit"
    assert engine.metrics()["vllm:kvd_hit_tokens"] == 992
    engine.ask("sleep")
    assert physical(engine.pid) == [0]
    engine.ask("wake")
    again = engine.one(one)
    assert same(again, own if again["cached"] else cold)
