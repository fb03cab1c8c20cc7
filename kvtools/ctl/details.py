"""`kvctl show`: everything that is known about one segment, and what is not.

Facts come from the two files, from the GPUs (devices.py), from kvctl's journal where the engine keeps no history, and for
segments without an owner file from /proc (peers.py). A pool's own stats segment adds what the 24 bytes cannot say.
"""

import time
from pathlib import Path
from typing import Any

from kvtools.ctl import journal, peers, tables
from kvtools.errors import KvError
from kvtools.output import emit, emit_json, paint, printable
from kvtools.segments.owner import LimitEntry, PoolState
from kvtools.segments.pool import PoolReading
from kvtools.units import format_duration, format_size

_STYLE = {"live": "good", "stale": "bad", "unknown": "dim"}


def emit_details(state: PoolState, root: Path, *, as_json: bool) -> None:
    """Print all about `state`'s segment."""
    body = gather(state, root)
    if as_json:
        emit_json("kvctl.show/1", body)
        return
    for line in render(state, body):
        emit(line)


def gather(state: PoolState, root: Path) -> dict[str, Any]:
    """The JSON body of `kvctl show`."""
    body = tables.details(state, root)
    if state.owner is None or state.owner.error:
        chain = journal.history(state.reading, root=root)
        body["limits"] = [tables.entry(LimitEntry(one.after_bytes, one.by, one.at_ns, "unknown")) for one in chain]
        body["first_limit_bytes"] = chain[0].before_bytes if chain else None
        found = peers.likely_owners(state.name)
        folder = peers.worker_folder(state.name)
        body["worker_sockets"] = None
        if folder is not None:
            there, bound = peers.worker_sockets(folder)
            body["worker_sockets"] = {"path": str(folder), "sockets": there, "bound": bound}
        body["likely_owners"] = [
            {"pid": one.pid, "command": one.command, "found_by": one.found_by, "prealloc_off": one.prealloc_off} for one in found
        ]
    else:
        body["first_limit_bytes"] = None
        body["worker_sockets"] = None
        body["likely_owners"] = []
    body["pool"] = figures(state, root)
    body["gpus"] = _gpus(state)
    body["notes"] = peers.quirks(state.reading) if state.owner is None else []
    return body


POOL_FIGURES = (
    "fragmentation_bytes", "blocks_used", "blocks_cached", "block_bytes", "pages_used", "pages_reserved", "pages_draining",
    "effective_limit_bytes", "over_limit_bytes", "asleep", "map_failures_total", "evicted_blocks_total",
)  # fmt: skip


def figures(state: PoolState, root: Path) -> dict[str, Any] | None:
    """What the pool's stats segment says, if a living engine publishes one: fragmentation above all."""
    from kvtools.segments.stats import instance_of_pool, read_stats, stats_name

    try:
        reading = read_stats(stats_name("pool", instance_of_pool(state.name)), root)
    except KvError:
        return None
    return {name: reading.get(name) for name in POOL_FIGURES} if reading.alive else None


def _gpus(state: PoolState) -> list[dict[str, Any]]:
    """The GPUs of this pool as far as they can be found here; all of the host's where the owner names none."""
    from kvtools.devices import find_devices, match_uuid

    here = find_devices()
    named = list(state.owner.info.devices) if state.owner else []
    chosen = [device for uuid in named if (device := match_uuid(here, uuid))] if named else here
    return [
        {
            "index": one.index, "uuid": one.uuid, "name": one.name, "total_bytes": one.total_bytes or None,
            "used_bytes": one.used_bytes if one.total_bytes else None, "of_this_pool": bool(named),
        }
        for one in chosen
    ]  # fmt: skip


def render(state: PoolState, body: dict[str, Any]) -> list[str]:
    """`body` for people: a heading, then one fact a line."""
    reading = state.reading
    facts: list[tuple[str, str]] = [
        ("limit", _both(reading.limit_bytes)),
        ("used", f"{_both(reading.used_bytes)}, {tables.percent(reading)} of the limit"),
        ("prealloc", _both(reading.prealloc_bytes)),
        ("mapped", _both(reading.mapped_bytes)),
        ("free", _both(reading.free_bytes)),
    ]
    if reading.overage_bytes:
        facts.append(("over", paint(f"{_both(reading.overage_bytes)} above the limit", "bad")))
    facts += _pool_facts(reading, body["pool"])
    facts.append(("state", f"{paint(state.state, _STYLE[state.state])}: {state.evidence}"))
    facts += _owner_facts(state)
    for gpu in body["gpus"]:
        room = f", {format_size(gpu['used_bytes'])} of {format_size(gpu['total_bytes'])} used" if gpu["total_bytes"] else ""
        facts.append(("GPU" if gpu["of_this_pool"] else "GPU here", f"{gpu['index']} {gpu['name']} {gpu['uuid']}{room}"))
    for peer in body["likely_owners"][:3]:
        facts.append(("likely", f"pid {peer['pid']} ({peer['found_by']}): {printable(peer['command'])[:80]}"))
    if sockets := body["worker_sockets"]:
        bound = f"{sockets['bound']} of {sockets['sockets']} sockets bound here"
        facts.append(("workers", f"{printable(sockets['path'])}: {bound}"))
    file = body["file"]
    age = format_duration(max(time.time() - reading.mtime_ns / 1e9, 0.0))
    facts.append(("file", f"{printable(file['path'])}, mode {file['mode']}, uid {file['uid']}, last written {age} ago"))
    facts += [("history", _history_line(one)) for one in body["limits"]]
    if body["first_limit_bytes"] is not None:
        facts.append(("history", f"before that {format_size(body['first_limit_bytes'])}, as far as kvctl knows"))
    facts += [("note", text) for text in body["notes"]]
    width = max(len(key) for key, _ in facts)
    return [paint(printable(state.name), "bold"), *[f"  {key:<{width}}  {text}" for key, text in facts]]


def _pool_facts(reading: PoolReading, pool: dict[str, Any] | None) -> list[tuple[str, str]]:
    if pool is None:
        return []
    lost, block = pool["fragmentation_bytes"], pool["block_bytes"]
    share = f", {lost / reading.mapped_bytes:.1%} of what is mapped" if reading.mapped_bytes else ""
    facts = [("fragments", f"{_both(lost)} mapped in pages in use, and unused{share}")]
    cached = pool["blocks_cached"]
    facts.append(
        ("blocks", f"{pool['blocks_used']} in use, {cached} cached ({format_size(cached * block)}), {format_size(block)} each")
    )
    if pool["pages_draining"]:
        facts.append(("draining", f"{pool['pages_draining']} pages, {_both(pool['over_limit_bytes'])} above the limit"))
    if failures := pool["map_failures_total"]:
        facts.append(("no room", f"pages failed to be mapped, so far {failures}: its engine's log (kvtools: no page more) has why"))
    if pool["asleep"]:
        facts.append(("asleep", "the engine sleeps: no page is mapped"))
    return facts


def _owner_facts(state: PoolState) -> list[tuple[str, str]]:
    owner = state.owner
    if owner is None:
        return []
    if owner.error:
        return [("owner", paint(owner.error, "bad"))]
    info = owner.info
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(owner.since_ns / 1e9))
    facts = [("engine", printable(f"{info.engine} {info.version}".strip()) + f", {owner.story}, owner since {since}")]
    if info.model:
        facts.append(("model", printable(info.model)))
    ranks = [
        f"{kind} {rank} of {size}"
        for kind, rank, size in (("TP", info.tp_rank, info.tp_size), ("PP", info.pp_rank, info.pp_size))
        if size > 1
    ]
    if ranks or info.dp_rank:
        facts.append(("rank", ", ".join([*ranks, *([f"DP {info.dp_rank}"] if info.dp_rank else [])])))
    if info.devices:
        facts.append(("devices", printable(", ".join(info.devices))))
    if info.start_capacity_bytes:
        facts.append(("capacity", f"{_both(info.start_capacity_bytes)} at start"))
    if info.page_bytes:
        facts.append(("page", f"{_both(info.page_bytes)}: limits are multiples of it"))
    return facts


def _both(size: int) -> str:
    return f"{format_size(size)} ({size} B)" if size >= 1024 else f"{size} B"


def _history_line(one: dict[str, Any]) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one["at_ns"] / 1e9))
    effective = one["effective_bytes"]
    other = f", {format_size(effective)} holds" if effective not in (None, one["limit_bytes"]) else ""
    why = f": {one['reason']}" if one["reason"] else ""
    state = "" if one["state"] == "unknown" else f", {one['state']}"
    return printable(f"{when}  {format_size(one['limit_bytes'])} by {one['by']}{state}{other}{why}")
