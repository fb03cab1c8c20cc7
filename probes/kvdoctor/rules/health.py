"""kvd and the segments in shared memory, as their own numbers say."""

from kvdoctor.facts import Facts
from kvdoctor.results import Result, file_evidence
from kvdoctor.rules.base import SHM, check, result, skip

BAD = {
    "stale": "its writer is gone",
    "frozen": "its writer is there and no longer beats: it hangs",
    "broken": "it cannot be read as what its name says",
}


@check("kvd.segments", "i", "Segments")
def segments(facts: Facts) -> Result | list[Result]:
    """Every pool and stats segment: readable, its writer alive, its heart beating."""
    if not facts.segments:
        return skip("no segment of this toolkit in /dev/shm")
    found = []
    for segment in facts.segments:
        scope, evidence = segment.name, [file_evidence(f"{SHM}/{segment.name}", segment.detail)]
        if segment.health in BAD:
            fix = "kvctl prune removes it." if segment.health == "stale" else "Look at that process; kvctl list shows the segment."
            found.append(result("warn", f"{segment.kind}: {BAD[segment.health]}", fix=fix, scope=scope, evidence=evidence))
        else:
            found.append(result("pass", f"{segment.kind}: {segment.detail or segment.health}", scope=scope, evidence=evidence))
    return found


@check("kvd.health", "i", "kvd")
def kvd(facts: Facts) -> Result | list[Result]:
    """Counters of running daemons that should be zero: corrupt values, open breakers, write extents in quarantine."""
    daemons = [segment for segment in facts.segments if segment.kind == "kvd" and segment.health == "ok"]
    if not daemons:
        return skip("no running kvd publishes its numbers here")
    found = []
    for daemon in daemons:
        told = []
        values = daemon.values
        if count := int(values.get("corruptions_total", 0)):
            told.append(f"{count} values failed their checksum and were dropped")
        if count := int(values.get("breakers_open", 0)):
            told.append(f"{count} tiers are cut off after errors")
        if told:
            found.append(
                result("warn", "; ".join(told), fix="kvd stats and kvd why name the tier and the error.", scope=daemon.name)
            )
        else:
            found.append(result("pass", "no corrupt value, no tier cut off", scope=daemon.name))
    return found
