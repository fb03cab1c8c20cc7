"""Chunk by chunk, why a prompt is found or not: what `kvd why --engine` and `POST /v1/cache/why` answer.

For each chunk of the prompt: whether the engine has it itself (where somebody knows), where kvd has it, for every rank
and group; and where it is nowhere, what is known of why: the daemon's tombstones, what stands in the request, and whether
another engine stored the same prompt under another identity, and which field differs. What nobody knows is said to be
unknown; nothing is guessed.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvd.connector import book
from kvd.connector.keys import Span
from kvd.connector.prewarm import shorter_tail
from kvd.connector.view import HashSource, View
from kvd.store.tombstones import Fate, Tombstone
from kvd.wire.client import WhyResult
from kvtools.units import format_duration

Rehash = Callable[[HashSource], Sequence[bytes] | None]
"""The same prompt's block hashes as another engine makes them; None where that cannot be told."""
InEngine = Callable[[Span], bool | None]

MAX_CHUNKS = 4096
OTHERS = 16
"""Other engines' views that are looked into."""


def explain(
    client: Any,
    view: View,
    hashes: Sequence[bytes],
    tokens: int,
    *,
    tenant: str = "",
    retention: str = "",
    in_engine: InEngine = lambda span: None,
    rehash: Rehash = lambda source: None,
) -> dict[str, Any]:
    """The whole answer as JSON (`kvd.why_prompt/1`). Raises Down, KvdError."""
    keys = view.keys(hashes)
    every = view.spans(keys, tokens)
    spans = every[:MAX_CHUNKS]
    places = view.places(tenant)
    others = [other for other in book.views(client) if other.places() and _names(other) != _names(view)][:OTHERS]
    named = sorted({place.namespace for other in others for place in other.places(tenant)})
    found = _ask(client, places, [keys.of(span) for span in spans], named)
    rows: list[dict[str, Any]] = []
    for number, span in enumerate(spans):
        where = [found.places[i][number] for i in range(len(places))]
        rows.append(
            {
                "start": span.start,
                "end": span.end,
                "key": keys.of(span).hex(),
                "engine": in_engine(span),
                "places": where,
                "state": _state(where),
                "why": [] if all(where) else _reasons(view, places, where, found, number),
            }
        )
    missing = next((row for row in rows if row["state"] in ("partial", "missing")), None)
    hit: int = missing["start"] if missing else spans[-1].end if spans else 0
    if missing is not None:
        # What a look-up would do, too: a shorter prompt that began like this one may have left its end there.
        for tail in shorter_tail(client, keys, places, Span(missing["start"], missing["end"])):
            hit = missing["tail_end"] = tail.end
    body: dict[str, Any] = {
        "prompt_tokens": tokens,
        "hashed_tokens": keys.tokens,
        "chunk_tokens": view.chunk,
        "found_tokens": min(hit, (tokens - 1) // view.unit * view.unit) if tokens else 0,
        "engine_tokens": _run(rows, "engine"),
        "ranks": len(view.ranks),
        "groups": len(view.groups),
        "tenant": tenant,
        "chunks": rows,
        "remarks": [*_remarks(view, tokens, retention, bool(missing)), *_cut(spans, every)],
        "elsewhere": [],
        "since": found.since_ns / 1e9,
    }
    if missing is not None:
        first = next(number for number, row in enumerate(rows) if row is missing)
        body["elsewhere"] = _elsewhere(client, view, others, keys.hashes, tokens, tenant, rehash)
        body["elsewhere"] += _unnamed(found.others[first], places, others, tenant)
    return body


def _names(view: View) -> set[bytes]:
    return {place.namespace for place in view.places()}


def _ask(client: Any, places: Sequence[Any], keys: list[bytes], others: list[bytes]) -> WhyResult:
    """One Why for all namespaces, in parts that a request may have."""
    namespaces = [place.namespace for place in places]
    part = max(1, (1 << 14) // max(1, len(namespaces) + len(others)))
    whole = WhyResult([[] for _ in namespaces], [[] for _ in namespaces], [], 0)
    since = 0
    for start in range(0, max(1, len(keys)), part):
        some = client.why(keys[start : start + part], namespaces=namespaces, others=others)
        for index in range(len(namespaces)):
            whole.places[index].extend(some.places[index])
            whole.notes[index].extend(some.notes[index])
        whole.others.extend(some.others)
        since = some.since_ns
    return WhyResult(whole.places, whole.notes, whole.others, since)


def _state(where: Sequence[Sequence[str]]) -> str:
    """arena: all of it is in RAM. tier: all of it is somewhere. partial: some ranks or groups lack theirs. missing."""
    if all("arena" in there for there in where):
        return "arena"
    if all(where):
        return "tier"
    return "partial" if any(where) else "missing"


def _reasons(
    view: View, places: Sequence[Any], where: Sequence[Sequence[str]], found: WhyResult, number: int
) -> list[dict[str, Any]]:
    """What is known of each namespace that lacks this chunk; what is the same for several is said once."""
    told: dict[tuple[str, str], dict[str, Any]] = {}
    for index, place in enumerate(places):
        if where[index]:
            continue
        notes = found.notes[index][number]
        text = "; before that, ".join(sentence(note, time.time_ns()) for note in notes[:2])
        if not notes:
            text = never(found.since_ns)
        row = told.setdefault(
            (notes[0].fate.word if notes else "unknown", text),
            {"fate": notes[0].fate.word if notes else "never_saved", "text": text, "ranks": [], "groups": []},
        )
        if notes:
            row.setdefault("at", notes[0].at_ns / 1e9)
        row["ranks"] = sorted({*row["ranks"], place.rank})
        row["groups"] = sorted({*row["groups"], view.groups[place.group].id})
    return list(told.values())


def never(since_ns: int) -> str:
    """What to say of a value that the daemon remembers nothing of."""
    age = format_duration(max(0.0, (time.time_ns() - since_ns) / 1e9))
    return f"never saved, as far as the daemon remembers ({age} back)"


def sentence(note: Tombstone, now_ns: int) -> str:
    """One note for people."""
    age = format_duration(max(0.0, (now_ns - note.at_ns) / 1e9))
    where = "the arena" if note.place == "arena" else f"tier {note.place}"
    who = f" (pid {note.pid})" if note.pid else ""
    if note.fate is Fate.EVICTED:
        return f"evicted from {where} {age} ago: {note.why}{who}"
    if note.fate is Fate.EXPIRED:
        return f"its time to live ended; dropped from {where} {age} ago"
    if note.fate is Fate.DELETED:
        return f"{note.why} {age} ago{who}"
    if note.fate is Fate.REFUSED:
        return f"{where} refused it {age} ago: {note.why.replace('_', ' ')}"
    if note.fate is Fate.CORRUPT and note.why:
        return f"{where} could not read it {age} ago: {note.why}"
    if note.fate is Fate.CORRUPT:
        return f"found damaged in {where} {age} ago"
    return f"not saved {age} ago: {note.why}{who}"


def _run(rows: Sequence[Mapping[str, Any]], field: str) -> int | None:
    """The end of the leading run that has it; None where nobody knows."""
    if not rows or rows[0][field] is None:
        return None
    end = 0
    for row in rows:
        if not row[field]:
            break
        end = row["end"]
    return end


def _remarks(view: View, tokens: int, retention: str, missing: bool) -> list[str]:
    remarks = []
    if tokens < view.unit:
        remarks.append(f"the prompt is shorter than one block ({view.unit} tokens): there is nothing to store")
    elif tokens % view.unit:
        rest = tokens % view.unit
        last, verb, they = ("token", "fills", "it is") if rest == 1 else (f"{rest} tokens", "fill", "they are")
        remarks.append(f"the last {last} {verb} no block ({view.unit} tokens): {they} always computed")
    if retention == "none":
        remarks.append("this request asks for kvd_retention none: what it computes is not stored")
    if not view.more.get("saves", True):
        remarks.append("this engine stores nothing: kv_role kv_consumer, or KVD_SAVE=0")
    if not view.more.get("loads", True):
        remarks.append("this engine loads nothing: kv_role kv_producer, or KVD_LOAD=0")
    if not view.more.get("daemon_up", True):
        remarks.append("the engine has no connection to its daemon just now: it computes everything and stores nothing")
    if view.more.get("reset"):
        remarks.append("this engine reset its caches: until it restarts it finds nothing stored before (KVD_RESET=private)")
    if missing and view.more.get("seed") == "random":
        remarks.append("the seed of this engine's block hashes is random (PYTHONHASHSEED is not set): nothing outlives it")
    return remarks


def _cut(spans: Sequence[Span], every: Sequence[Span]) -> list[str]:
    if len(spans) == len(every):
        return []
    return [f"only the first {len(spans)} of {len(every)} chunks are looked at, up to token {spans[-1].end}"]


def _elsewhere(
    client: Any,
    view: View,
    others: Sequence[View],
    hashes: Sequence[bytes],
    tokens: int,
    tenant: str,
    rehash: Rehash,
) -> list[dict[str, Any]]:
    """Other engines that hold this prompt's beginning under their own identity, with what differs."""
    rows = []
    for other in others:
        theirs: Sequence[bytes] | None = hashes if other.hashes == view.hashes else rehash(other.hashes)
        if theirs is None:
            continue
        keys = other.keys(theirs)
        spans = other.spans(keys, tokens)
        if not spans:
            continue
        place = other.places(tenant)[0]
        there = client.places([keys.of(span) for span in spans], namespace=place.namespace)
        held = next((number for number, one in enumerate(there) if not one), len(there))
        if held:
            differs = view.differs(other)
            rows.append(
                {
                    "engine": other.name,
                    "tokens": spans[held - 1].end,
                    "differs": differs,
                    "hints": book.hints(differs),
                    "seen": other.at,
                }
            )
    return rows


def _unnamed(names: Sequence[bytes], places: Sequence[Any], others: Sequence[View], tenant: str) -> list[dict[str, Any]]:
    """Namespaces that hold the first missing chunk's key and belong to no engine in the book: another tenant's, mostly."""
    known = {place.namespace for place in places} | {one.namespace for other in others for one in other.places(tenant)}
    return [
        {
            "engine": "",
            "tokens": None,
            "differs": [],
            "hints": [
                "stored for another tenant (kvd_namespace), with other files of the adapter, or by an engine without a record"
            ],
            "namespace": name.hex(),
        }
        for name in names
        if name not in known
    ]
