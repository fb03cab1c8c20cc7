"""vLLM's block pool over a KVCacheManager: which blocks are free, with prefix caching as it was.

vLLM keeps free blocks in one queue, in the order in which they are to be reused: blocks nobody can come back to first, then
cached prefixes, least recently used first. Here that queue holds the cached ones only. Free blocks without contents are the
manager's, which gives them out best-fit, and maps and unmaps pages. So the manager counts a block as held when a request
has it or a prefix is cached on it.

A cached prefix outlives its request until blocks are needed and the limit allows no further page, or until the limit comes down;
then it is evicted, least recently used first. **No page is given back before the hashes of its blocks are gone**: vLLM would go
on handing out prefixes whose contents are zeros, and answer with wrong tokens.

A page that is drained to reach a limit is closed for hits too: the hashes of all its blocks are forgotten, those in use
included, else a popular prefix would hold it for ever.

Concurrency: everything here happens with the session's `turn` held.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from kvtools.elastic.manager import KVCacheManager


def adopt(block_pool: Any, manager: KVCacheManager, *, ahead: int) -> "Any":
    """Turn vLLM's `block_pool` into an elastic one, before any request; its new queue, which is also the manager's reclaimer."""
    first = manager.alloc(1)
    assert first == [block_pool.null_block.block_id] == [0], "the null block is the first one"
    manager.pin(0)
    queue = _queue_class()(block_pool, manager, ahead)
    block_pool.free_block_queue = queue
    block_pool.__class__ = _pool_class(type(block_pool))
    manager.reclaimer = queue
    return queue


class ElasticQueue:
    """The cached free blocks, least recently used first; plain ones come from and go to the manager.

    Mixed into vLLM's FreeKVCacheBlockQueue, whose linked list it goes on using, when that can be imported (`_queue_class`).
    """

    num_free_blocks: int
    fake_free_list_head: Any
    fake_free_list_tail: Any
    remove: Any

    def __init__(self, block_pool: Any, manager: KVCacheManager, ahead: int) -> None:
        super().__init__([])  # type: ignore[call-arg]
        self._pool = block_pool
        self._manager = manager
        self._ahead = ahead
        self._had_room = True
        self.evicted = 0

    @property
    def cached(self) -> int:
        return self.num_free_blocks

    @property
    def certain(self) -> int:
        """Blocks that can be handed out without mapping anything."""
        return self._manager.certain + self.cached

    def prepare(self, count: int) -> None:
        """Make `count` blocks certain, as far as limit and device go: before vLLM asks how many are free."""
        if count > self.certain:
            self._manager.secure(count - self.cached, ahead=self._ahead)
        self._had_room = count <= self.certain

    @property
    def free(self) -> int:
        """What vLLM may count on: the certain blocks, and those of pages that the limit lets come.

        The latter only while the device had room for what was last asked for: vLLM compares this with more than it takes (what
        it keeps for other requests), and what it takes has been made certain by `prepare`.
        """
        room = self._manager.allocator.growth * self._manager.blocks_per_page if self._had_room else 0
        return self.certain + room

    def popleft(self) -> Any:
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[Any]:
        """Plain blocks, from new pages where the limit allows, and only then cached ones. Raises ValueError."""
        manager = self._manager
        if manager.certain < n:
            manager.secure(n, ahead=self._ahead)  # growing comes before evicting
        plain = min(n, manager.certain)
        if n - plain > self.cached:
            raise ValueError(f"cannot get {n} blocks: {self.certain} are free")
        ids = manager.alloc(plain) if plain else []
        if ids is None:
            raise ValueError(f"cannot get {plain} blocks that were certain")
        blocks = [self._pool.blocks[i] for i in ids]
        if n > plain:
            self.evicted += n - plain
            blocks += super().popleft_n(n - plain)  # type: ignore[misc]
        return blocks

    def prepend_n(self, blocks: list[Any]) -> None:
        """Blocks without contents that anybody could come back to."""
        if blocks:
            self._manager.free([block.block_id for block in blocks])

    def append(self, block: Any) -> None:
        self.append_n([block])

    def append_n(self, blocks: list[Any]) -> None:
        """Cached blocks that their last request gave back. On a page that is drained they are not kept."""
        per_page = self._manager.blocks_per_page
        # A copy: giving blocks up opens pages again, and what was given up may not be put into the queue.
        if draining := set(self._manager.draining):
            gone = [block for block in blocks if block.block_id // per_page in draining]
            blocks = [block for block in blocks if block.block_id // per_page not in draining]
            self._give_up(gone)
        super().append_n(blocks)  # type: ignore[misc]

    def _give_up(self, blocks: list[Any]) -> None:
        """Forget the hashes of blocks that nobody holds and that are not in the queue; the manager has them back."""
        for block in blocks:
            self._pool._maybe_evict_cached_block(block)
        self.evicted += len(blocks)
        if blocks:
            self._manager.free([block.block_id for block in blocks])

    def _lru(self) -> Iterable[Any]:
        block = self.fake_free_list_head.next_free_block
        while block is not None and block is not self.fake_free_list_tail:
            following = block.next_free_block
            yield block
            block = following

    def _take_out(self, pages: set[int]) -> None:
        per_page = self._manager.blocks_per_page
        blocks = [block for block in self._lru() if block.block_id // per_page in pages]
        for block in blocks:
            self.remove(block)
        self._give_up(blocks)

    def reclaim(self, pages: int) -> None:
        """Empty up to `pages` pages that hold cached blocks only: those whose youngest block is oldest, first."""
        manager = self._manager
        seen: Counter[int] = Counter()
        victims: set[int] = set()
        for block in self._lru():
            page = block.block_id // manager.blocks_per_page
            seen[page] += 1
            if seen[page] == manager.held_on(page):
                victims.add(page)
                if len(victims) == pages:
                    break
        if victims:
            self._take_out(victims)

    def drained(self, pages: Iterable[int]) -> None:
        """Forget everything cached on these pages, under running requests too."""
        closed = set(pages)
        for page in closed:
            for i in self._manager.blocks_of(page):
                if self._pool.blocks[i].ref_cnt:
                    self._pool._maybe_evict_cached_block(self._pool.blocks[i])
        self._take_out(closed)

    def release_all(self) -> None:
        """Give up all cached blocks."""
        blocks = list(self._lru())
        for block in blocks:
            self.remove(block)
        self._give_up(blocks)

    def take_back(self) -> None:
        """After the pool has forgotten all hashes: cached blocks are plain ones now."""
        blocks = list(self._lru())
        for block in blocks:
            self.remove(block)
        if blocks:
            self._manager.free([block.block_id for block in blocks])


def _queue_class() -> Any:
    from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue

    return type("ElasticQueue", (ElasticQueue, FreeKVCacheBlockQueue), {})


def _pool_class(base: type) -> type:
    class ElasticBlockPool(base):  # type: ignore[misc]
        """vLLM's pool, with another idea of which blocks are free."""

        _resetting = False

        @property
        def _manager(self) -> KVCacheManager:
            manager: KVCacheManager = self.free_block_queue._manager
            return manager

        @property
        def requested(self) -> int:
            """Blocks that requests hold, the null block among them."""
            return self._manager.held - int(self.free_block_queue.cached)

        def get_num_free_blocks(self) -> int:
            if self._resetting:  # asked as "are all others free?", whatever the limit is
                return int(self.num_gpu_blocks) - self.requested
            return int(self.free_block_queue.free)

        def get_usage(self) -> float:
            allowed = min(self._manager.allocator.target * self._manager.blocks_per_page, self.num_gpu_blocks) - 1
            used = self.requested - 1
            return used / max(used, allowed) if used else 0.0

        def reset_prefix_cache(self) -> bool:
            self._resetting = True
            try:
                done = bool(super().reset_prefix_cache())
            finally:
                self._resetting = False
            if done:
                self.free_block_queue.take_back()
            return done

    return ElasticBlockPool
