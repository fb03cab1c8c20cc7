"""kvd and the segments in shared memory, as their own numbers say."""

from kvdoctor.facts import Facts, SegmentFact
from kvdoctor.results import Result, file_evidence
from kvdoctor.rules.base import check, result, skip
from kvtools.units import format_size

BAD = {
    "stale": "its writer is gone",
    "frozen": "its writer is there and no longer beats: it hangs",
    "broken": "it cannot be read",
}


@check("kvd.segments", "i", "Segments")
def segments(facts: Facts) -> Result | list[Result]:
    """Every pool and stats segment: readable, its writer alive, its heart beating."""
    if not facts.segments:
        return skip("no segment of this toolkit in shared memory")
    found = []
    for segment in facts.segments:
        evidence = [file_evidence(f"{segment.folder}/{segment.name}", segment.detail)]
        what = segment.kind if segment.kind in ("pool", "segment", "folder") else f"{segment.kind} segment"
        if segment.health not in BAD:
            found.append(result("pass", f"{what}: {segment.detail}", scope=segment.name, evidence=evidence))
            continue
        told = BAD[segment.health] + (
            f" (last beat {segment.age_s:.0f} s ago)" if segment.health == "frozen" and segment.age_s else ""
        )
        fix = {
            "stale": "kvctl prune removes what dead processes left.",
            "frozen": "Look at that process: kvd why, py-spy dump, or its log.",
            "broken": "kvctl show names what is wrong with it.",
        }[segment.health]
        commands = ["kvctl prune"] if segment.health == "stale" else []
        found.append(
            result("warn", f"{segment.name}: {what}, {told}", fix=fix, commands=commands, scope=segment.name, evidence=evidence)
        )
    return found


@check("kvd.health", "i", "kvd")
def kvd(facts: Facts) -> Result | list[Result]:
    """Counters of running daemons that should be zero, and hit rates that say that nothing is reused."""
    daemons = [segment for segment in facts.segments if segment.kind == "kvd" and segment.health == "ok"]
    if not daemons:
        return skip("no running kvd publishes its numbers here")
    return [_daemon(daemon) for daemon in daemons]


def _total(segment: SegmentFact, name: str) -> int:
    """A metric over all its labels."""
    return int(sum(value for key, value in segment.values.items() if key == name or key.startswith(name + "{")))


def _daemon(daemon: SegmentFact) -> Result:
    told = []
    if count := _total(daemon, "corruptions_total"):
        told.append(f"{count} values came back damaged from a tier and were dropped")
    if count := _total(daemon, "tier_breaker_open"):
        told.append(f"{count} tier{'s are' if count > 1 else ' is'} cut off after errors")
    if count := _total(daemon, "tier_io_errors_total"):
        told.append(f"{count} failed reads and writes in tiers")
    if count := _total(daemon, "evictions_unwritten_total"):
        told.append(f"{count} values were dropped before a broken tier had taken them")
    if told:
        return result(
            "warn",
            "; ".join(told),
            fix="kvd stats and kvd why name the tier and the error.",
            commands=["kvd stats", "kvd why"],
            scope=daemon.name,
        )
    gets, hits = _total(daemon, "gets_total"), _total(daemon, "hits_total")
    used, limit = _total(daemon, "arena_bytes_used"), _total(daemon, "arena_bytes_limit")
    rate = f"{100 * hits / gets:.0f} % of {gets} reads hit" if gets else "no reads yet"
    if gets >= 1000 and hits == 0:
        return result(
            "warn",
            f"{rate}: nothing that is asked for was ever stored",
            why="Engines that hash differently, or namespaces that do not match, never meet.",
            fix="See cfg.hashseed; kvd keys shows the namespaces.",
            scope=daemon.name,
        )
    return result("pass", f"{rate}, arena {format_size(used)} of {format_size(limit)}", scope=daemon.name)


@check("kvd.connector", "i", "Engines' connectors")
def connectors(facts: Facts) -> Result | list[Result]:
    """What each engine's connector counts: is its daemon there, do loads and saves succeed, did anything break inside it?"""
    found = _connectors(facts)
    return [_connector(segment) for segment in found] or skip("no engine with the connector publishes its numbers here")


def _connectors(facts: Facts) -> list[SegmentFact]:
    return [segment for segment in facts.segments if segment.kind == "connector" and segment.health == "ok"]


def _connector(segment: SegmentFact) -> Result:
    told = []
    if segment.values.get("daemon_up") == 0:
        told.append("its daemon is not there: the engine serves on, cold")
    if count := _total(segment, "errors_total"):
        told.append(f"{count} error{'s' * (count != 1)} inside the connector, each with a traceback in the engine's log")
    if count := _total(segment, "load_failures_total"):
        told.append(f"{count} of {_total(segment, 'loads_total') + count} loads failed and were recomputed")
    saves, failed = _total(segment, "saves_total"), _total(segment, "save_failures_total")
    if failed > saves // 10:
        told.append(f"{failed} chunks were not stored, against {saves} that were")
    if told:
        fix = "kvd ping says whether the daemon answers; the engine's log names the error."
        return result("warn", "; ".join(told), fix=fix, commands=["kvd ping", "kvd why"], scope=segment.name)
    tokens = _total(segment, "hit_tokens_total")
    return result("pass", f"daemon up, {_total(segment, 'lookups_total')} look-ups, {tokens} tokens loaded", scope=segment.name)


@check("kvd.direct", "i", "GPU-direct in use")
def direct(facts: Facts) -> Result | list[Result]:
    """Connectors count the requests that could not go direct, by reason."""
    here = _connectors(facts)
    if not here:
        return skip("no engine with the connector publishes its numbers here")
    found = []
    for connector in here:
        fallbacks = {
            key: int(value) for key, value in connector.values.items() if key.startswith("direct_fallback_total") and value
        }
        if fallbacks:
            told = ", ".join(f"{count} ({key.partition('{')[2].rstrip('}') or 'no reason'})" for key, count in fallbacks.items())
            found.append(
                result(
                    "warn", f"requests fell back to the CPU: {told}", fix="The failed checks above say why.", scope=connector.name
                )
            )
        else:
            past = _total(connector, "direct_load_bytes_total") + _total(connector, "direct_save_bytes_total")
            told = f"{format_size(past)} went past the daemon's memory" if past else "nothing went direct yet"
            found.append(result("pass", f"no fallback counted; {told}", scope=connector.name))
    return found
