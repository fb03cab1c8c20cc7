"""What kvd's commands do, besides serving. Data to stdout, remarks to stderr, one schema a command."""

import sys
import time
from pathlib import Path
from typing import Any

import typer

from kvd.errors import Unavailable
from kvd.store.identity import namespace_of
from kvd.wire.connection import default_socket
from kvtools.errors import KvError, NotFound, Refused, UsageError
from kvtools.exits import Exit
from kvtools.output import emit, emit_json, note, table
from kvtools.segments.stats import StatsReader, StatsReading, instance_of_path, stats_name
from kvtools.units import format_duration, format_rate, format_size, parse_duration

SETTLE_S = 5.0
"""How long `kvd evict` waits for values on their way to a tier."""


def _client(socket: Path | None, timeout: str, namespace: str | None = None) -> Any:
    from kvd.wire.client import Client

    return Client(socket or default_socket(), timeout_s=parse_duration(timeout), namespace=_namespace(namespace) or "default")


def _namespace(text: str | None) -> bytes | None:
    """The namespace meant: 64 hex digits are its bytes, anything else its name."""
    if text is None:
        return None
    try:
        raw = bytes.fromhex(text)
    except ValueError:
        raw = b""
    return raw if len(raw) == 32 else namespace_of(text)


def _keys(words: list[str]) -> list[bytes]:
    keys = []
    for word in words:
        try:
            key = bytes.fromhex(word)
        except ValueError:
            key = b""
        if len(key) != 32:
            raise UsageError(f"not a key: {word!r}", hint="a key is 64 hex digits; kvd keys lists them")
        keys.append(key)
    return keys


def only_with_engine(**given: object) -> None:
    """Raises UsageError for an option that means nothing without --engine: ignored, it would be taken for obeyed."""
    for name, value in given.items():
        if value:
            raise UsageError(f"--{name.replace('_', '-')} goes with --engine only", hint="name the engine: --engine URL")


def not_with_engine(**given: object) -> None:
    """Raises UsageError for an option about the daemon beside --engine, whose server is asked instead."""
    for name, value in given.items():
        if value:
            hint = "with --engine its own server is asked, which knows its daemon and namespaces: leave one of the two out"
            raise UsageError(f"--{name.replace('_', '-')} does not go with --engine", hint=hint)


def _confirm(question: str, yes: bool) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise Refused("this asks first, and there is no terminal to ask on", hint="pass --yes")
    if not typer.confirm(question, err=True):
        raise typer.Exit(Exit.FAILED)


def _reader(socket: Path | None) -> StatsReader:
    path = (socket or default_socket()).absolute()
    reader = StatsReader(stats_name("kvd", instance_of_path(path)))
    try:
        reader.read()
    except NotFound:
        # The segment is named after the path that the daemon knows its socket by: in a container that may be another one.
        if (instance := _told_instance(path)) is not None:
            reader.close()
            return StatsReader(stats_name("kvd", instance))
    return reader


def _told_instance(path: Path) -> str | None:
    from kvd.wire.client import Client

    try:
        with Client(path, timeout_s=1.0) as client:
            return client.connect().welcome.instance
    except KvError:
        return None


def _read(reader: StatsReader, socket: Path | None) -> StatsReading:
    try:
        reading = reader.read()
    except NotFound:
        path = socket or default_socket()
        raise Unavailable(f"no daemon at {path}", hint="start one: kvd serve; or name its socket: --socket or KVD_SOCKET") from None
    if not reading.alive:
        raise Unavailable(f"the daemon at {socket or default_socket()} is gone ({reading.story})", hint="start it again: kvd serve")
    return reading


def ping(socket: Path | None, count: int, timeout: str, json: bool) -> None:
    with _client(socket, timeout) as client:
        times = sorted(client.ping() for _ in range(count))
        server = client.connect().welcome
    middle = times[len(times) // 2]
    if json:
        emit_json(
            "kvd.ping/1",
            {
                "socket": str(client.path),
                "server": server.server,
                "pid": server.pid,
                "round_trips": count,
                "p50_s": middle,
                "max_s": times[-1],
            },
        )
    else:
        emit(f"{client.path}: {server.server} answers, pid {server.pid}, round trip {format_duration(middle)}")


def size(socket: Path | None, json: bool) -> None:
    from kvd import sizing
    from kvd.service.stats import of_reading

    with _reader(socket) as reader:
        body = of_reading(_read(reader, socket))
    if json:
        emit_json("kvd.size/1", sizing.as_json(body))
        return
    for line in sizing.page(body):
        emit(line)


def stats(socket: Path | None, json: bool, watch: bool, interval: str, count: int) -> None:
    from kvd.service.stats import of_reading

    every = parse_duration(interval)
    if not every:
        raise UsageError(f"not an interval: {interval!r}", hint="such as 1s or 200ms")
    with _reader(socket) as reader:
        body = _with_age(of_reading(reading := _read(reader, socket)), reading)
        shown = 0
        before: dict[str, Any] | None = None
        while True:
            if json:
                emit_json("kvd.stats/1", body, indent=None if watch else 1)
            elif watch:
                _watch_line(body, before, every, header=shown % 20 == 0)
            else:
                _show(body)
            shown += 1
            if not watch or shown == count:
                return
            sys.stdout.flush()
            time.sleep(every)
            before, body = body, _with_age(of_reading(reading := _read(reader, socket)), reading)


def _with_age(body: dict[str, Any], reading: StatsReading) -> dict[str, Any]:
    from kvd.connector.segment import engines

    now = time.time_ns()
    return {
        "instance": reading.instance,
        "pid": reading.pid,
        # Times of the wall: a clock that was set back since makes no time negative.
        "uptime_s": round(max(0, now - reading.created_ns) / 1e9, 3),
        "heartbeat_age_s": round(max(0, now - reading.heartbeat_ns) / 1e9, 3),
        **body,
        "engines": engines(reading.instance),
    }


_WATCH = "{:8}  {:>9}  {:>10}  {:>9}  {:>9}  {:>6}  {:>12}  {:>12}  {:>9}"


def _watch_line(body: dict[str, Any], before: dict[str, Any] | None, every: float, *, header: bool) -> None:
    """One line an interval: levels, and rates since the line before."""
    if header:
        emit(_WATCH.format("TIME", "ENTRIES", "ARENA", "SETS/S", "GETS/S", "HIT %", "IN", "OUT", "EVICTED/S"))

    def rate(name: str) -> float:
        return 0.0 if before is None else max(0, body[name] - before[name]) / every

    gets = rate("gets_total")
    emit(
        _WATCH.format(
            time.strftime("%H:%M:%S"),
            body["entries"],
            format_size(body["arena_bytes_used"]),
            f"{rate('sets_total'):.0f}",
            f"{gets:.0f}",
            f"{100 * rate('hits_total') / gets:.1f}" if gets else "-",
            format_rate(rate("set_bytes_total")),
            format_rate(rate("get_bytes_total")),
            f"{rate('evictions_total'):.0f}",
        )
    )


def _show(body: dict[str, Any]) -> None:
    emit(f"kvd {body['instance']}  pid {body['pid']}  up {format_duration(body['uptime_s'])}")
    for name, value in body.items():
        if name in ("instance", "pid", "uptime_s", "tiers", "engines"):
            continue
        if isinstance(value, dict):
            for label, part in value.items():
                if part and not isinstance(part, dict):  # buckets: kvd status sums them up
                    emit(f"  {name + '{' + label + '}':36} {_number(name, part)}")
        else:
            emit(f"  {name:36} {_number(name, value)}")
    for tier in body["tiers"]:
        emit(f"tier {tier['name']} ({tier['type']})")
        for name, value in tier.items():
            if name not in ("name", "type") and not isinstance(value, dict):
                emit(f"  {name:36} {_number(name, value)}")
    for engine in body["engines"]:
        rate = engine["external_hit_rate"]
        emit(f"engine {engine['engine']} ({engine['processes']} processes)")
        emit(f"  {'external_hit_rate':36} {'-' if rate is None else f'{100 * rate:.1f} %'}")
        for name, value in engine.items():
            if name not in ("engine", "processes", "external_hit_rate"):
                emit(f"  {name:36} {_number(name, round(value, 3))}")


def _number(name: str, value: float) -> str:
    if "bytes" in name:
        return f"{value}  ({format_size(value)})" if value >= 1024 else str(value)
    return str(value)


def tiers(socket: Path | None, json: bool) -> None:
    """Each tier with what it holds and how it did; exit status 1 when one does not work."""
    from kvd import status as words
    from kvd.service.stats import of_reading

    with _reader(socket) as reader:
        body = of_reading(_read(reader, socket))
    if json:
        emit_json("kvd.tiers/1", {"tiers": body["tiers"]})
    else:
        for line in words.tiers_page(body):
            emit(line)
    raise typer.Exit(Exit.FAILED if any(tier["breaker_open"] for tier in body["tiers"]) else Exit.OK)


def status(socket: Path | None, json: bool) -> None:
    """HEALTH_OK, HEALTH_WARN or HEALTH_ERR with the reasons, and what is stored; exit status 1 for HEALTH_ERR."""
    from dataclasses import asdict

    from kvd import status as words
    from kvd.service.stats import of_reading

    with _reader(socket) as reader:
        reading = _read(reader, socket)
    body = _with_age(of_reading(reading), reading)
    found = words.checks(body)
    health = words.health(found)
    if json:
        told = {"health": health, "reasons": [check.message for check in found], "checks": [asdict(check) for check in found]}
        emit_json("kvd.status/1", {**told, **body})
    else:
        for line in words.page(body, found):
            emit(line)
    raise typer.Exit(Exit.FAILED if health == words.ERR else Exit.OK)


def keys(socket: Path | None, namespace: str | None, limit: int, timeout: str, json: bool) -> None:
    from kvd.store.retention import NEVER, Retention
    from kvd.wire import protocol as p

    rows: list[tuple[bytes, int, int, int, str]] = []
    with _client(socket, timeout) as client:
        after, more, unlisted = b"", True, list[str]()
        while more and len(rows) < limit:
            page = client.connect().call(p.Keys(0, _namespace(namespace) or b"", after, min(1000, limit - len(rows))), p.KeyPage)
            rows += page.rows
            more, unlisted = page.more, page.unlisted
            if page.rows:
                after = page.rows[-1][0] + page.rows[-1][4].encode()
    found = [
        {
            "namespace": identity[:32].hex(),
            "key": identity[32:].hex(),
            "bytes": length,
            "retention": Retention(retention).name.lower(),
            "expires_at": None if expires == NEVER else expires / 1e9,
            "place": place,
        }
        for identity, length, retention, expires, place in rows
    ]
    if json:
        emit_json("kvd.keys/1", {"keys": found, "more": more, "unlisted": unlisted})
        return
    if unlisted:
        note(f"not listed: what is in {', '.join(unlisted)} alone (no index in memory): kvd why KEY asks there")
    if not found:
        note("nothing is stored" + (" elsewhere" if unlisted else ""))
        return
    now = time.time()
    lines = [
        (
            str(row["namespace"])[:12],
            str(row["key"]),
            format_size(rows[i][1]),
            str(row["retention"]),
            "-" if rows[i][3] == NEVER else format_duration(rows[i][3] / 1e9 - now),
            str(row["place"]),
        )
        for i, row in enumerate(found)
    ]
    for line in table(("NAMESPACE", "KEY", "SIZE", "CLASS", "EXPIRES IN", "PLACE"), lines, right=(2, 4)):
        emit(line)
    if more:
        note(f"more than {limit}: pass --limit, or --namespace")


def why(words: list[str], socket: Path | None, namespace: str | None, timeout: str, json: bool) -> None:
    from kvd.connector.explain import never, sentence

    wanted = _keys(words)
    with _client(socket, timeout, namespace) as client:
        found = client.why(wanted)
    now = time.time_ns()
    rows = [
        {
            "key": key.hex(),
            "places": where,
            "why": [] if where else [sentence(note, now) for note in notes] or [never(found.since_ns)],
            "namespaces": [] if where else [name.hex() for name in others],
        }
        for key, where, notes, others in zip(wanted, found.places[0], found.notes[0], found.others, strict=True)
    ]
    if json:
        emit_json("kvd.why/1", {"namespace": client.namespace.hex(), "keys": rows, "since": found.since_ns / 1e9})
    else:
        for row in rows:
            emit(f"{row['key']}  {', '.join(row['places']) or 'nowhere'}")
            for line in row["why"]:
                emit(f"    {line}")
            for name in row["namespaces"]:
                emit(f"    the same key is stored in namespace {name}")
    if not all(row["places"] for row in rows):
        raise typer.Exit(Exit.NOT_FOUND)


def prefetch(words: list[str], socket: Path | None, namespace: str | None, timeout: str, json: bool) -> None:
    wanted = _keys(words)
    with _client(socket, timeout, namespace) as client:
        came = client.prefetch(wanted, deadline_s=parse_duration(timeout))
    _say(json, "kvd.prefetch/1", {"asked": len(wanted), "promoted": came}, f"{came} of {len(wanted)} values brought up")


def evict(
    words: list[str], socket: Path | None, namespace: str | None, all_tiers: bool, yes: bool, timeout: str, json: bool
) -> None:
    wanted = _keys(words)
    if not wanted and namespace is None:
        raise UsageError("evict what?", hint="name keys, or a --namespace; kvd clear forgets everything")
    from kvd.wire import protocol as p

    where = "everywhere" if all_tiers else "from the arena"
    if not wanted:
        _confirm(f"Drop the whole namespace {namespace} {where}?", yes)
    with _client(socket, timeout, namespace) as client:
        if not all_tiers:
            _settle(client, wanted)
        space = client.namespace
        request = p.Delete(0, space, wanted, not all_tiers) if wanted else p.Clear(0, space, not all_tiers)
        done = client.connect().call(request, p.Count, parse_duration(timeout))
    body = {"dropped": done.count, "all_tiers": all_tiers, "left": done.left, "why": done.why}
    _forgotten(json, "kvd.evict/1", body, f"{_values(done.count)} dropped {where}", done)


def _settle(client: Any, keys: list[bytes]) -> None:
    """What is dropped from the arena on its way to a tier is gone for good: let it arrive first, for a while."""
    from kvd.errors import DeadlinePassed

    try:
        client.flush(keys or None, timeout_s=SETTLE_S)
    except DeadlinePassed:
        note(f"after {SETTLE_S:g} s some values were still on their way to a tier: they may be gone for good")


def clear(socket: Path | None, namespace: str | None, yes: bool, timeout: str, json: bool) -> None:
    _confirm(f"Forget {'everything' if namespace is None else 'namespace ' + namespace}, in the arena and in every tier?", yes)
    from kvd.wire import protocol as p

    with _client(socket, timeout, namespace) as client:
        space = b"" if namespace is None else client.namespace
        done = client.connect().call(p.Clear(0, space, False), p.Count, parse_duration(timeout))
    body = {"cleared": done.count, "left": done.left, "why": done.why}
    _forgotten(json, "kvd.clear/1", body, f"{_values(done.count)} forgotten", done)


def _values(count: int) -> str:
    return "1 value" if count == 1 else f"{count} values"


def _forgotten(json: bool, schema: str, body: dict[str, object], sentence: str, done: Any) -> None:
    """Say what a delete or clear came to. Raises KvError where a tier has not got rid of everything."""
    if json or not done.left:
        _say(json, schema, body, sentence)
    if done.left:
        raise KvError(
            f"{sentence}, but {'1 is' if done.left == 1 else f'{done.left} are'} still to go from a tier: {done.why}",
            hint="nobody reads them any more; a restart before that tier has forgotten them brings them back",
        )


ANSWER_S = "5s"
"""For what a daemon that has done its work answers at once, however little time that was given."""


def drain(socket: Path | None, timeout: str, json: bool) -> None:
    from kvd.wire import protocol as p
    from kvd.wire.client import DURABILITY

    seconds = parse_duration(timeout)
    with _client(socket, ANSWER_S) as client:  # --timeout is for what is to be drained
        done = client.connect().call(p.Drain(0, int(seconds * 1000)), p.Done, seconds + 2)
        tiers = 0 if done.left else len(client.stats()["tiers"])
    word = DURABILITY[done.durability]
    body: dict[str, object] = {"drained": not done.left, "durability": word, "left": done.left, "why": done.why}
    if not done.left:
        where = f"what goes to tiers is there (durability {word})"
        if word == "none":
            of_them = "which promises" if tiers == 1 else "of which some promise"
            where = f"what goes to tiers is there, {of_them} nothing (durability none)"
        if not tiers:
            where = "there is no tier: what is in RAM ends with the daemon"
        _say(json, "kvd.drain/1", body, f"drained: no new writes; {where}")
        return
    if json:
        emit_json("kvd.drain/1", body)
    what = "1 value ends" if done.left == 1 else f"{done.left} values end"
    raise KvError(
        f"{what} with this daemon: {done.why or 'no tier has taken them'} (no new writes are taken until a restart)",
        hint="until the daemon ends all of them can be read: kvd keys lists them, kvd status --tiers shows the tiers",
    )


def verify(paths: list[Path], repair: bool, json: bool) -> None:
    from dataclasses import asdict

    from kvd.tiers.adapters.disk import verify as check

    reports = [(path, check(path, repair=repair)) for path in paths]
    if json:
        emit_json("kvd.verify/1", {"directories": [{"path": str(path), **asdict(report)} for path, report in reports]})
    else:
        for path, report in reports:
            emit(f"{path}")
            for name, value in asdict(report).items():
                emit(f"  {name:24} {len(value) if isinstance(value, list) else value if value != '' else 'nothing'}")
                _list_some(value if isinstance(value, list) else [])
            if report.lost_deletes:
                emit(
                    f"  deletes.kvlog {report.lost_deletes}: which values are deleted is not known, so a start serves none of them"
                )
    if any(not report.sound for _, report in reports):
        raise typer.Exit(Exit.FAILED)


VERIFY_LINES = 20
"""Values that `kvd verify` names of each kind; --json names all."""


def _list_some(names: list[str]) -> None:
    for name in names[:VERIFY_LINES]:
        emit(f"    {name}")
    if len(names) > VERIFY_LINES:
        emit(f"    and {len(names) - VERIFY_LINES} more; --json names all")


def _say(json: bool, schema: str, body: dict[str, object], sentence: str) -> None:
    if json:
        emit_json(schema, body)
    else:
        emit(sentence)
