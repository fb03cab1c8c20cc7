"""vLLM's own block pool over elastic pages, in any order of calls: a prefix that is found has its contents, always.

What is written into a block when it is cached is remembered, and forgotten when its page is unmapped or the block is handed out
again. A hash that finds a block without its contents is an engine that answers with wrong tokens. `run` is called in an engine's
process, which has imported vLLM already.
"""

from collections.abc import Sequence
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from kvtools.elastic.manager import KVCacheManager
from kvtools.elastic.pages import PageAllocator
from kvtools.elastic.vllm_blocks import adopt
from tests.kvtools.elastic.test_elastic_pages import Device

PER_PAGE, BLOCKS, PAGES = 4, 45, 12


class Contents(Device):
    """A device that forgets what lay on a page it unmaps."""

    def __init__(self, room: int) -> None:
        super().__init__(room)
        self.written: dict[int, int] = {}

    def unmap(self, pages: Sequence[int]) -> None:
        super().unmap(pages)
        for page in pages:
            for block in range(page * PER_PAGE, (page + 1) * PER_PAGE):
                self.written.pop(block, None)


class Blocks(RuleBasedStateMachine):
    def __init__(self) -> None:
        from vllm.v1.core.block_pool import BlockPool

        super().__init__()
        self.device = Contents(PAGES)
        self.device.there = {0}
        allocator = PageAllocator(self.device, PAGES, min_reserved=1, max_reserved=2, resident=[0])
        self.manager = KVCacheManager(allocator, BLOCKS, PER_PAGE, PER_PAGE)
        self.pool: Any = BlockPool(num_gpu_blocks=BLOCKS, enable_caching=True, hash_block_size=16)
        self.queue = adopt(self.pool, self.manager, ahead=1)
        self.requests: list[list[Any]] = []
        self.hashes = 0

    def _key(self, number: int) -> Any:
        return number.to_bytes(32, "big")

    @rule(count=st.integers(min_value=1, max_value=9), cached=st.booleans())
    def request(self, count: int, cached: bool) -> None:
        """A request comes, takes blocks, and computes them; full ones are cached."""
        from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

        self.queue.prepare(count)
        if count > self.pool.get_num_free_blocks():
            return
        blocks = self.pool.get_new_blocks(count)
        assert len({block.block_id for block in blocks}) == count
        for block in blocks:
            assert block.block_id // PER_PAGE in self.device.there
            assert block.block_id // PER_PAGE not in self.manager.draining
            self.device.written.pop(block.block_id, None)
            if cached:
                self.hashes += 1
                self.device.written[block.block_id] = self.hashes
                self.pool._insert_block_hash(make_block_hash_with_group_id(self._key(self.hashes), 0), block, num_tokens=16)
        self.requests.append(blocks)

    @rule(data=st.data())
    def hit(self, data: st.DataObject) -> None:
        """Another request finds a prefix, and takes it."""
        number = data.draw(st.integers(min_value=1, max_value=max(1, self.hashes)))
        found = self.pool.get_cached_block(self._key(number), [0])
        if found:
            self.pool.touch(found)
            self.requests.append(list(found))

    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        if self.requests:
            blocks = self.requests.pop(data.draw(st.integers(min_value=0, max_value=len(self.requests) - 1)))
            self.pool.free_blocks(reversed(blocks))

    @rule(pages=st.integers(min_value=0, max_value=PAGES + 1))
    def limit(self, pages: int) -> None:
        self.manager.resize(pages * PER_PAGE)

    @rule(room=st.integers(min_value=0, max_value=PAGES))
    def another_takes_memory(self, room: int) -> None:
        self.device.room = max(room, len(self.device.there))
        self.manager.allocator.rest_until = 0.0  # time goes by

    @rule()
    def reset(self) -> None:
        assert self.pool.reset_prefix_cache() is (not any(self.requests))

    @rule()
    def idle(self) -> None:
        self.queue.release_all()
        self.manager.trim()

    @rule(number=st.integers(min_value=1, max_value=BLOCKS - 1))
    def evict(self, number: int) -> None:
        """A connector reports a block as spoiled."""
        self.pool.evict_blocks({number})

    @invariant()
    def what_is_found_is_there(self) -> None:
        for number in range(1, self.hashes + 1):
            for block in self.pool.get_cached_block(self._key(number), [0]) or ():
                assert self.device.written.get(block.block_id) == number

    @invariant()
    def books_agree(self) -> None:
        in_use = {block.block_id for blocks in self.requests for block in blocks}
        assert self.pool.requested == len(in_use) + 1
        assert {block // PER_PAGE for block in in_use} <= self.device.there
        assert 0 in self.device.there
        assert self.manager.held == len(in_use) + 1 + self.queue.cached
        assert len(self.manager.draining) <= self.manager.over_pages <= len(self.manager.draining) + 1, "page 0 stays"
        assert 0 <= self.pool.get_usage() <= 1

    def teardown(self) -> None:
        """When all requests are gone, any limit holds, and everything can be had again."""
        self.manager.resize(3 * PER_PAGE)
        for blocks in self.requests:
            self.pool.free_blocks(reversed(blocks))
        assert self.manager.over_pages == 0
        assert len(self.device.there) <= 3
        assert self.pool.reset_prefix_cache()
        self.another_takes_memory(PAGES)
        self.manager.resize(PAGES * PER_PAGE)
        self.queue.prepare(BLOCKS - 1)
        assert len(self.pool.get_new_blocks(BLOCKS - 1)) == BLOCKS - 1


def run(examples: int) -> None:
    """Try that many orders of calls. Raises what the machine found."""
    run_state_machine_as_test(Blocks, settings=settings(max_examples=examples, stateful_step_count=50, deadline=None))  # type: ignore[no-untyped-call]
