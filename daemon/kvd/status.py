"""`kvd status`: one health word with its reasons, then what runs, what is stored and what is asked, in the shape of `ceph -s`.

Pure functions over the object of `kvd stats --json`, which comes from the stats segment: so this works while the daemon hangs,
and says that it does. Each reason has a code, which scripts may rely on; the sentence is for people.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from kvtools.output import paint
from kvtools.units import format_duration, format_size

HEALTH_STALE_S = 3.0
MOST_NAMESPACES = 3

OK, WARN, ERR = "HEALTH_OK", "HEALTH_WARN", "HEALTH_ERR"
_STYLE = {OK: "good", WARN: "warn", ERR: "bad"}


@dataclass(frozen=True)
class Check:
    """One thing that is not as it should be."""

    code: str
    severity: str
    message: str


def checks(body: Mapping[str, Any]) -> list[Check]:
    """What is wrong, the worst first."""
    found = [*_daemon_checks(body)]
    for tier in body["tiers"]:
        found += _tier_checks(tier)
    return sorted(found, key=lambda check: check.severity != ERR)


def _daemon_checks(body: Mapping[str, Any]) -> Iterator[Check]:
    if body["heartbeat_age_s"] > HEALTH_STALE_S:
        age = format_duration(body["heartbeat_age_s"])
        yield Check("DAEMON_STUCK", ERR, f"the daemon has not moved for {age}: stopped or stuck")
    if body["draining"]:
        yield Check("DRAINING", WARN, "draining: no new writes are taken")
    if body["quarantine_bytes"]:
        size = format_size(body["quarantine_bytes"])
        yield Check("QUARANTINE", WARN, f"{size} kept apart: their writers went silent")
    if failed := body.get("tick_errors_total"):
        yield Check("TICK_ERRORS", ERR, f"periodic work (eviction, expiry, deadlines) has failed {failed} times (the log says how)")
    if failed := body.get("policy_errors_total"):
        yield Check("POLICY_ERRORS", WARN, f"a policy failed to answer {failed} times: the default was done (the log says how)")
    if lost := body.get("evictions_unwritten_total"):
        what = "1 value was" if lost == 1 else f"{lost} values were"
        yield Check("EVICTED_UNWRITTEN", WARN, f"{what} evicted before a tier that did not work had taken them")


def _tier_checks(tier: Mapping[str, Any]) -> Iterator[Check]:
    name = tier["name"]
    if tier["breaker_open"]:
        yield Check("TIER_DOWN", ERR, f"tier {name} does not work: left alone, probed now and then (the log says why)")
    elif down := tier.get("parts_down"):
        of_them = "1 of its directories does" if down == 1 else f"{down} of its directories do"
        yield Check("TIER_DEGRADED", WARN, f"tier {name}: {of_them} not work: served without (the log says why)")
    if damaged := tier["corruptions_total"]:
        was = "1 value or record of it was" if damaged == 1 else f"{damaged} values or records of them were"
        yield Check("TIER_CORRUPT", WARN, f"tier {name}: {was} damaged (answered as misses)")
    if unknown := tier.get("keys_unknown_total"):
        why = "encrypted with a key that is not among old_keys (answered as misses)"
        yield Check("TIER_KEY_UNKNOWN", WARN, f"tier {name}: {_count(unknown, 'load')} found a value {why}")
    if given_up := tier.get("given_up_total"):
        why = "what says which are deleted was lost (the log names the file)"
        yield Check("TIER_GIVEN_UP", WARN, f"tier {name} gave up {_count(given_up, 'value')} at the start: {why}")
    if untaken := tier.get("untaken"):
        yield Check("TIER_REFUSED", WARN, f"tier {name} did not take {untaken} values that are in RAM: they end with the daemon")


def health(found: list[Check]) -> str:
    """The one word."""
    severities = {check.severity for check in found}
    return ERR if ERR in severities else WARN if severities else OK


def page(body: Mapping[str, Any], found: list[Check]) -> Iterator[str]:
    """The lines for people."""
    word = health(found)
    yield f"  health: {paint(word, _STYLE[word])}"
    for check in found:
        yield f"          {check.message}"
    for title, rows in (("services", _services(body)), ("data", _data(body)), ("io since the start", _io(body))):
        yield ""
        yield f"  {title}:"
        lines = list(rows)
        width = max(len(name) for name, _ in lines) + 1
        for name, text in lines:
            yield f"    {name + ':':{width}} {text}"


def tiers_page(body: Mapping[str, Any]) -> Iterator[str]:
    """The lines of `kvd status --tiers`: each tier, what it holds, what it was asked and how it did."""
    if not body["tiers"]:
        yield "there is no tier: what is in RAM ends with the daemon"
    for number, tier in enumerate(body["tiers"]):
        if number:
            yield ""
        word = "does not work" if tier["breaker_open"] else "works"
        yield f"tier {number}: {tier['name']} ({tier['type']}), {paint(word, 'bad' if tier['breaker_open'] else 'good')}"
        rows = list(_tier_rows(tier))
        width = max(len(name) for name, _ in rows) + 1
        for name, text in rows:
            yield f"    {name + ':':{width}} {text}"


def _tier_rows(tier: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    holds = f"{_count(tier['entries'], 'value')}, {_filled(tier['bytes_used'], tier['bytes_limit'])}"
    yield "holds", holds if tier.get("usage_known", 1) else "nobody can say"
    stored = f"{_count(tier['stores_total'], 'value')}, {format_size(tier['store_bytes_total'])}"
    yield "stored", stored + _tier_latency(tier, "store") + f"; {_on_their_way(tier)}"
    asked, missed = tier["hits_total"] + tier["misses_total"], tier["misses_total"]
    loaded = f"{_count(tier['hits_total'], 'value')}, {format_size(tier['load_bytes_total'])}" + _tier_latency(tier, "load")
    yield "loaded", loaded + (f"; {missed:,} of {asked:,} were not there" if missed else "")
    yield "evicted", _count(tier["evictions_total"], "value")
    troubles = {
        "failed stores": tier["store_failures_total"],
        "damaged": tier["corruptions_total"],
        "under an unknown key": tier.get("keys_unknown_total", 0),
        "failed reads or writes": tier["io_errors_total"],
        "times left alone": tier["breaker_opened_total"],
    }
    yield "troubles", ", ".join(f"{count:,} {what}" for what, count in troubles.items() if count) or "none"


def _tier_latency(tier: Mapping[str, Any], way: str) -> str:
    buckets = tier.get(f"{way}_seconds_bucket", {})
    middle, high = quantile(buckets, 0.5), quantile(buckets, 0.99)
    return f"; a batch in {format_duration(middle)}, p99 {format_duration(high)}" if middle is not None and high is not None else ""


def _services(body: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    about = f"kvd {next(iter(body.get('build_info', {})), '')}".rstrip()
    clients, leases = _count(body["connections"], "client"), _count(body["leases_active"], "lease")
    yield "daemon", f"{about}, pid {body['pid']}, up {format_duration(body['uptime_s'])}; {clients}, {leases}"
    yield "arena", _filled(body["arena_bytes_used"], body["arena_bytes_limit"])
    for tier in body["tiers"]:
        state = "does not work; " if tier["breaker_open"] else ""
        held = _filled(tier["bytes_used"], tier["bytes_limit"]) if tier.get("usage_known", 1) else "nobody can say how full"
        yield tier["name"], f"{state}{held}; {_on_their_way(tier)}"


def _on_their_way(tier: Mapping[str, Any]) -> str:
    """Values that come to a tier; a daemon of before knew only how many changes wait for it."""
    return f"{tier.get('waiting', tier['queue']):,} on their way"


def _filled(used: int, limit: int) -> str:
    return f"{format_size(used)} of {format_size(limit)}, {100 * used / limit:.0f} %" if limit else format_size(used)


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}" + ("" if number == 1 else "s")


def _data(body: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    known = (tier for tier in body["tiers"] if tier.get("usage_known", 1))
    places = [f"{body['entries']:,} in the arena", *(f"{tier['entries']:,} in {tier['name']}" for tier in known)]
    yield "values", ", ".join(places)
    held, sizes = body.get("entries_by_retention", {}), body.get("bytes_by_retention", {})
    if classes := [f"{word} {count:,} ({format_size(sizes.get(word, 0))})" for word, count in held.items() if count]:
        yield "classes", ", ".join(classes)
    spaces = {name: size for name, size in body.get("namespace_bytes", {}).items() if name != "other" and size}
    largest = sorted(spaces, key=lambda name: -spaces[name])[:MOST_NAMESPACES]
    told = [f"{name} {format_size(spaces[name])}{_found(body, name)}" for name in largest]
    more = len(spaces) - len(largest)
    yield "namespaces", f"{body['namespaces']}" + (": " + ", ".join(told) if told else "") + (", ..." if more > 0 else "")


def _found(body: Mapping[str, Any], name: str) -> str:
    hits, misses = (body.get(f"namespace_{word}_total", {}).get(name, 0) for word in ("hits", "misses"))
    return f" ({100 * hits / (hits + misses):.0f} % found)" if hits + misses else ""


def _io(body: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    gets = body["gets_total"]
    read = f"{_count(gets, 'key')}, {100 * body['hits_total'] / gets:.1f} % found" if gets else "nothing asked for yet"
    yield "read", read + (f", {format_size(body['get_bytes_total'])}" if gets else "") + _latency(body, "lease")
    yield "written", f"{_count(body['sets_total'], 'value')}, {format_size(body['set_bytes_total'])}" + _latency(body, "commit")
    if refused := {reason: count for reason, count in body.get("rejections_total", {}).items() if count}:
        yield "refused", ", ".join(f"{count:,} {reason}" for reason, count in refused.items())


def _latency(body: Mapping[str, Any], op: str) -> str:
    buckets = body.get("operation_seconds_bucket", {}).get(op, {})
    found = [quantile(buckets, share) for share in (0.5, 0.99)]
    if not buckets or found[0] is None:
        return ""
    middle, high = (format_duration(value) if value is not None else "-" for value in found)
    return f"; p50 {middle}, p99 {high}"


def quantile(buckets: Mapping[str, float], share: float) -> float | None:
    """Seconds below which that share of observations lies, interpolated inside its bucket; None when there are none.

    `buckets`: cumulative counts by upper bound. In the last, unbounded one the answer is its lower bound.
    """
    rows = sorted((math.inf if bound == "+Inf" else float(bound), count) for bound, count in buckets.items())
    if not rows or not rows[-1][1]:
        return None
    wanted = share * rows[-1][1]
    for (low, below), (high, upto) in pairwise([(0.0, 0.0), *rows]):
        if upto >= wanted and upto > below:
            return low if math.isinf(high) else low + (high - low) * (wanted - below) / (upto - below)
    return None
