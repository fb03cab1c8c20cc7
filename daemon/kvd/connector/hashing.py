"""Block hashes as the engine makes them, in its server's process.

The engine's own functions do the work. What they start from (NONE_HASH) is a global of vLLM's, set in the engine's process
and not in the server's: it is lent to them for the length of one call, and the call has no await in it. The seed is the one
the scheduler told where it has, else worked out as the scheduler does: PYTHONHASHSEED where it is set, else a fixed text
for cryptographic hashes. For others it is random in each process, and nobody but the scheduler can know it.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.version import __version__

from kvd.connector.view import HashSource

CANARY_TOKENS = 16
_lock = threading.Lock()


def engine_version() -> str:
    return str(__version__)


def server_source(vllm_config: Any) -> HashSource:
    """How this engine hashes, as far as its server can work out."""
    cache = vllm_config.cache_config
    algorithm = str(cache.prefix_caching_hash_algo)
    return HashSource(algorithm, _seed(algorithm), int(cache.block_size or 0))


def _seed(algorithm: str) -> str:
    """NONE_HASH in hex; '' where it is random."""
    function = get_hash_fn_by_name(algorithm)
    # Asked twice: a random seed differs, and needs no name of vLLM's that another release may not have.
    seeds = {kv_cache_utils.resolve_none_hash_seed(function) for _ in range(2)}
    return bytes(function(seeds.pop())).hex() if len(seeds) == 1 else ""


@contextlib.contextmanager
def _lent(none_hash: bytes) -> Iterator[None]:
    missing = object()
    with _lock:
        before = getattr(kv_cache_utils, "NONE_HASH", missing)
        kv_cache_utils.NONE_HASH = none_hash
        try:
            yield
        finally:
            if before is missing:
                del kv_cache_utils.NONE_HASH
            else:
                kv_cache_utils.NONE_HASH = before


def hashes_of(core_request: Any, source: HashSource) -> list[bytes]:
    """The block hashes of a request as the engine's core gets it, salts, adapters and images included."""
    from vllm.v1.request import Request

    function = get_hash_fn_by_name(source.algorithm)
    hasher = kv_cache_utils.get_request_block_hasher(source.tokens, function)
    with _lent(bytes.fromhex(source.none_hash)):
        request = Request.from_engine_core_request(core_request, hasher)
    return [bytes(one) for one in request.block_hashes]


def canary(source: HashSource) -> str:
    """The hash of one block of known tokens: equal on two engines if, and only if, they hash alike, whatever their block size."""
    function = get_hash_fn_by_name(source.algorithm)
    with _lent(bytes.fromhex(source.none_hash)):
        return bytes(kv_cache_utils.hash_block_tokens(function, None, list(range(CANARY_TOKENS)))).hex()
