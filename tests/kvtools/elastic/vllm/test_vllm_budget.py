"""Engines with their parts in processes of their own, as an operator runs them: a budget for two engines, two ranks in step."""

import threading
from collections.abc import Callable, Iterator
from typing import Self

import pytest

from kvtools.segments import owner, pool
from kvtools.segments.stats import instance_of_pool, stats_name
from tests.kvtools.elastic.vllm.kernel import physical, resident
from tests.kvtools.elastic.vllm.test_vllm_elastic import PAGES, PROMPTS, limit, same
from tests.support.engine import Engine, model
from tests.support.processes import SHARED_MEMORY, Ran, wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.real("vllm"), pytest.mark.real("segments"), pytest.mark.timeout(400)]

PAGE = 1 << 20


@pytest.fixture
def names(shm_name: Callable[[], str]) -> Iterator[list[str]]:
    both = [shm_name(), shm_name()]
    yield both
    for name in both:
        (SHARED_MEMORY / stats_name("pool", instance_of_pool(name))).unlink(missing_ok=True)


class Most:
    """The most that some engines held together, as the kernel counts, while this is entered."""

    def __init__(self, *engines: Engine) -> None:
        self.bytes = 0
        self._engines = engines
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._done.wait(0.01):
            self.bytes = max(self.bytes, sum(sum(physical(engine.pid)) for engine in self._engines))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


def test_two_engines_share_a_budget_and_kvctl_moves_memory_while_one_serves(names: list[str], cli: Callable[..., Ran]) -> None:
    budget = 24 * PAGE
    # The one that serves while its limit falls is made of processes, the other is in one: half the time to start.
    one, other = (
        Engine(model(), transfer=None, processes=apart, env={**PAGES, "KVTOOLS_SEGMENT": name, "KVTOOLS_LIMIT": f"{pages}M"})
        for name, pages, apart in zip(names, (16, 8), (True, False), strict=True)
    )
    try:
        one.wait()
        other.wait()
        alone = [one.one(prompt, tokens=24)["tokens"] for prompt in PROMPTS]
        assert [other.one(prompt, tokens=24)["tokens"] for prompt in PROMPTS] == alone
        with Most(one, other) as most:
            assert 8 * PAGE < sum(physical(one.pid)) <= 16 * PAGE
            assert sum(physical(other.pid)) <= 8 * PAGE
            one.send("generate", prompts=PROMPTS, tokens=24)
            wait_until(lambda: pool.read_pool(names[0]).used_bytes >= 9 * PAGE, what="the first engine to be full")
            ran = cli("kvctl", "limit", names[0], "6M", "--wait", "--timeout", "60", "--yes", timeout_s=90)
            assert ran.rc == 0, ran.stderr
            assert sum(physical(one.pid)) <= 6 * PAGE
            assert resident(one.pid) <= 6 * PAGE
            ran = cli("kvctl", "limit", names[1], "18M", "--wait", "--yes")
            assert ran.rc == 0, ran.stderr
            answers = other.generate(PROMPTS, tokens=24)
            assert [answer["tokens"] for answer in answers] == alone
            assert 8 * PAGE < sum(physical(other.pid)) <= 18 * PAGE, "it grew"
            answers = one.answer()
            assert [answer["tokens"] for answer in answers] == alone, "served through the change, outputs as before"
        assert most.bytes <= budget
    finally:
        one.stop()
        other.stop()
    assert owner.read_owner(names[0]) is None, "an engine that ends well leaves nothing"


@pytest.mark.slow
def test_two_ranks_map_and_unmap_in_step(names: list[str]) -> None:
    name = names[0]
    engine = Engine(model(), transfer=None, processes=True, tensor_parallel_size=2, env={**PAGES, "KVTOOLS_SEGMENT": name})
    try:
        engine.wait()
        cold = [engine.one(prompt) for prompt in PROMPTS]
        warm = [engine.one(prompt) for prompt in PROMPTS]
        said = owner.read_owner(name)
        assert said is not None
        assert said.info.tp_size == 2
        first, second = physical(engine.pid)
        assert first == second > 4 * said.info.page_bytes
        limit(name, 4 * said.info.page_bytes)
        first, second = physical(engine.pid)
        assert first == second <= 4 * said.info.page_bytes
        assert same(engine.one(PROMPTS[5]), warm[5])
        assert same(engine.one(PROMPTS[0]), cold[0])
        engine.ask("sleep")
        assert physical(engine.pid) == [0, 0]
        engine.ask("wake")
        assert same(engine.one(PROMPTS[5]), cold[5])
        limit(name, said.info.start_capacity_bytes)
        assert [engine.one(prompt)["tokens"] for prompt in PROMPTS] == [one["tokens"] for one in cold]
        first, second = physical(engine.pid)
        assert first == second > 4 * said.info.page_bytes
    finally:
        engine.stop()
