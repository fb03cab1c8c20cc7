"""What a worker tells the engine's own server, and the engine as a whole made of that.

The server's process has no connector. It asks the workers through the engine's own `collective_rpc`, for a method that is
put on vLLM's worker class in the worker's process, when the connector there has registered its caches. The answer is one
JSON text a worker: nothing but text has to survive the way.
"""

import json
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvd.connector.groups import Unsupported, groups_of
from kvd.connector.plan import Known, RankIdentity
from kvd.connector.settings import Settings
from kvd.connector.view import NotAView, View, rank_json, rank_of
from kvd.wire.connection import default_socket

if TYPE_CHECKING:
    from kvd.connector.attach import Links
    from kvd.connector.connector import KvdConnector

METHOD = "kvd_describe"

_exposed: "weakref.ReferenceType[KvdConnector] | None" = None


def expose(connector: "KvdConnector") -> None:
    """Answer the server's question with what this connector says, in this process from now on."""
    global _exposed
    from vllm.v1.worker.worker_base import WorkerBase

    _exposed = weakref.ref(connector)
    setattr(WorkerBase, METHOD, _answer)


def _answer(worker: Any) -> str:
    connector = _exposed() if _exposed is not None else None
    return json.dumps(connector.describe() if connector is not None else {"problem": "the connector is gone"})


def of_worker(
    vllm_config: Any,
    kv_cache_config: Any,
    identity: RankIdentity,
    *,
    settings: Settings,
    known: Known,
    saves: bool,
    loads: bool,
    links: "Links",
) -> dict[str, Any]:
    """One worker's description. `known`: what the scheduler has told it."""
    try:
        groups = [[g.id, g.block_tokens, g.window, g.local] for g in groups_of(kv_cache_config)]
    except Unsupported:
        groups = []
    cache = vllm_config.cache_config
    return {
        "rank": vllm_config.parallel_config.rank,
        "identity": rank_json(identity),
        "groups": groups,
        "hash_tokens": kv_cache_config.hash_block_size or cache.block_size,
        "algorithm": str(cache.prefix_caching_hash_algo),
        "none_hash": known.none_hash,
        "tenant": known.tenant or settings.tenant,
        "saves": saves,
        "loads": loads,
        "socket": str(settings.socket or default_socket()),
        "daemon_up": links.save().look(),
        "reset": bool(known.tenant) and known.tenant != settings.tenant,
        "prefix_caching": bool(cache.enable_prefix_caching),
    }


def engine_view(answers: Sequence[str], none_hash: str) -> View:
    """The whole engine, from its workers' answers. `none_hash`: the seed as the server works it out ('': it cannot).

    What the scheduler has told a worker wins over that. Raises NotAView with the reason where the engine stores nothing.
    """
    told = [json.loads(answer) for answer in answers]
    told = sorted((one for one in told if isinstance(one, Mapping) and "identity" in one), key=lambda one: int(one["rank"]))
    if not told:
        raise NotAView("no worker of this engine has a KvdConnector")
    problem = next((one["identity"]["problem"] for one in told if one["identity"]["problem"]), "")
    if problem:
        raise NotAView(f"this engine's cache is not stored: {problem}")
    first = told[0]
    ranks: dict[tuple[bytes, ...], RankIdentity] = {}
    for one in told:
        rank = rank_of(one["identity"])
        ranks.setdefault(rank.namespaces, rank)
    seed = next((one["none_hash"] for one in told if one["none_hash"]), "") or none_hash
    more = {
        "saves": any(one["saves"] for one in told),
        "loads": any(one["loads"] for one in told),
        "socket": first["socket"],
        "daemon_up": all(one["daemon_up"] for one in told),
        "prefix_caching": first["prefix_caching"],
        "reset": any(one["reset"] for one in told),
        "workers": len(told),
        # The server works the seed out the same way after a restart, where it is not drawn anew in each process.
        "seed": "fixed" if none_hash else "random",
    }
    body = {
        "format": 1,
        "name": "",
        "at": time.time(),
        "tenant": first["tenant"],
        "chunk_tokens": next(iter(ranks.values())).chunk_tokens,
        "hashes": {"algorithm": first["algorithm"], "none_hash": seed, "tokens": first["hash_tokens"]},
        "groups": first["groups"],
        "ranks": [rank_json(rank) for rank in ranks.values()],
        "more": more,
    }
    return View.of_json(json.dumps(body))
