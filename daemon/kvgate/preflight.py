"""kvdoctor's look at the host when the gate starts: its warnings go to the log, and nothing is refused.

It runs on a thread of its own that nobody waits for: the gate serves at once, and a look that hangs (it has its own deadline)
holds up neither the start nor the stop. The KV directories are those of a running kvd or of the environment; where there are
none, storage is not judged, because the directory the gate was started in holds no KV cache.
"""

import logging
import threading

log = logging.getLogger("kvgate.preflight")
DEADLINE_S = 20.0


def host_warnings() -> list[str]:
    """What kvdoctor would warn of here, a line each, worst first. Raises KvError where the look itself fails."""
    from kvdoctor import api

    facts = api.collect_host(deadline_s=DEADLINE_S)
    known = any(path.origin != "the current directory" for path in facts.paths)
    return api.warnings(api.judge(facts, skip=() if known else ("storage",)))


def start() -> threading.Thread:
    """Begin the look; its answer is logged when it is known."""
    thread = threading.Thread(target=_look, name="host preflight", daemon=True)
    thread.start()
    return thread


def _look() -> None:
    try:
        found = host_warnings()
    except Exception as error:  # noqa: BLE001 - the edge of a thread: a look that fails is one line and stops nothing
        log.warning("kvdoctor could not look at this host: %s", error)
        return
    for line in found:
        log.warning("this host: %s", line)
    if found:
        log.warning("this host: kvdoctor says what to do; the gate serves all the same")
    else:
        log.info("this host: kvdoctor finds nothing to warn of")
