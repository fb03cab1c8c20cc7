"""kvd's commands about an engine: why is this prompt not found, bring it up, is it working, do two engines agree.

All ask the engine's own server (`kvd.engines`); what they show comes from the routes of `kvd.connector.endpoint` and from
the server's /metrics. An engine without those routes is told from its metrics alone, and what cannot be known so is
`unknown`, never `ok`.
"""

import contextlib
import json as jsonlib
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer

from kvd.engines import EngineServer, NoRoutes
from kvtools.errors import KvError, NotFound, TimedOut, UsageError
from kvtools.exits import Exit
from kvtools.output import emit, emit_json, note, paint, table
from kvtools.units import format_size, parse_duration, parse_size

POLL_S = 0.05
PROBE_WORDS = 600
"""Words of a probe's prompt: some chunks, whatever the tokenizer makes of them."""
STYLES = {"ok": "good", "warn": "warn", "fail": "bad", "unknown": "dim"}


def read_prompt(word: str) -> dict[str, Any]:
    """The body meant by a file or '-': a request, a list of messages or of token ids, or plain text. Raises UsageError."""
    hint = "a file with a prompt, messages or a recorded request, or - for stdin"
    if not word:
        raise UsageError("the file's name is empty", hint=hint)
    name = "stdin" if word == "-" else word
    try:
        # As bytes: line ends are part of a prompt, and the locale is not. A byte order mark is an editor's.
        raw = Path(word).read_bytes() if word != "-" else sys.stdin.buffer.read() if sys.stdin is not None else b""
        text = raw.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{name}: {getattr(error, 'strerror', None) or 'not a text'}", hint=hint) from None
    if not text.strip():
        raise UsageError(f"{name} is empty")
    try:
        found = jsonlib.loads(text)
    except RecursionError:
        raise UsageError(f"{name}: too many brackets inside each other", hint=hint) from None
    except ValueError as error:
        if text.lstrip().startswith(("{", "[")):
            note(f"{name} begins as JSON does and is none ({error}): taken for plain text")
        return {"prompt": text}
    if isinstance(found, dict):
        return found
    if not isinstance(found, list):
        return {"prompt": text}
    if found and all(isinstance(one, int) for one in found):
        return {"token_ids": found}
    if found and all(isinstance(one, dict) for one in found):
        return {"messages": found}
    raise UsageError(f"{name}: neither a list of messages nor one of token ids", hint=hint)


def one_prompt(words: Sequence[str]) -> str:
    """The one file that a command about an engine takes. Raises UsageError."""
    if len(words) != 1:
        raise UsageError("one prompt at a time", hint="with --engine: one file with a prompt or a request, or - for stdin")
    return words[0]


def _with_model(body: dict[str, Any], model: str | None) -> dict[str, Any]:
    return {**body, "model": model} if model else body


def why(url: str, word: str, model: str | None, timeout: str, json: bool) -> None:
    """Chunk by chunk. Exit 3 where some of the prompt would be computed though it could be stored."""
    server = EngineServer(url, timeout_s=parse_duration(timeout))
    found = server.cache("POST", "/v1/cache/why", _with_model(read_prompt(word), model))
    whole = all(chunk["state"] in ("arena", "tier") for chunk in found["chunks"])
    if json:
        emit_json("kvd.why_prompt/1", {"engine": server.url, **{k: v for k, v in found.items() if k != "schema"}})
    else:
        _show_why(server.url, found)
    if not whole:
        raise typer.Exit(Exit.NOT_FOUND)


def _show_why(url: str, found: Mapping[str, Any]) -> None:
    tokens, hit, mine = found["prompt_tokens"], found["found_tokens"], found["engine_tokens"]
    own = "unknown (the engine publishes no KV events)" if mine is None else _count(mine, "token")
    emit(f"a prompt of {_count(tokens, 'token')} at {url}")
    if found["chunks"]:
        parts = f"{_count(found['ranks'], 'rank')} and {_count(found['groups'], 'cache group')}"
        emit(f"  in the engine itself: {own}")
        emit(f"  in kvd, from the start without a gap: {_count(hit, 'token')}, for {parts}")
    for remark in found["remarks"]:
        emit(f"  {remark}")
    rows = []
    for chunk in found["chunks"]:
        places = list(dict.fromkeys(place for there in chunk["places"] for place in there))
        state = {"partial": "only in part: " + ", ".join(places), "missing": "nowhere"}.get(chunk["state"], ", ".join(places))
        if chunk.get("tail_end"):
            state = f"up to {chunk['tail_end']}, the end of a shorter prompt"
        reasons = "; ".join(_reason(reason, found) for reason in chunk["why"])
        own = {True: "yes", False: "no", None: "?"}[chunk["engine"]]
        rows.append((f"{chunk['start']}-{chunk['end']}", own, state, reasons))
    for line in ["", *table(("TOKENS", "ENGINE", "KVD", "WHY NOT"), rows, indent="  ")] if rows else ():
        emit(line)
    for other in found["elsewhere"]:
        emit()
        emit("  " + _other(other))
        for hint in other["hints"]:
            emit(f"    {hint}")


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def _reason(reason: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    who = []
    if found["ranks"] > 1:
        who.append("rank " + ", ".join(map(str, reason["ranks"])))
    if found["groups"] > 1:
        who.append("group " + ", ".join(map(str, reason["groups"])))
    return (f"{' '.join(who)}: " if who else "") + str(reason["text"])


def _other(other: Mapping[str, Any]) -> str:
    if not other["engine"]:
        return f"the first missing chunk is stored under namespace {other['namespace'][:12]}, which is nobody's we know"
    differs = "; ".join(other["differs"]) or "nothing that is known"
    return f"{other['tokens']} tokens of it are stored by {other['engine']}, under another identity; here / there: {differs}"


def prefetch(url: str, words: Sequence[str], model: str | None, max_bytes: str | None, timeout: str, json: bool) -> None:
    """Prewarm by block hashes, or by a file with a prompt, and wait for the end."""
    seconds = parse_duration(timeout)
    if all(_is_hash(word) for word in words):
        body: dict[str, Any] = {"block_hashes": list(words)}
    elif len(words) == 1:
        body = read_prompt(words[0])
    else:
        odd = next(word for word in words if not _is_hash(word))
        raise UsageError(
            f"not a block hash: {odd!r}", hint="with --engine: block hashes in hexadecimal, or one file with a prompt (- is stdin)"
        )
    body = _with_model(body, model)
    if max_bytes is not None:
        body["max_bytes"] = parse_size(max_bytes)
    server = EngineServer(url, timeout_s=max(10.0, seconds))
    job = server.cache("POST", "/v1/cache/prewarm", {**body, "deadline_s": min(seconds, 600.0)})
    end = time.monotonic() + seconds + 5
    while job["state"] not in ("done", "failed"):
        if time.monotonic() > end:
            raise TimedOut(f"prewarm job {job['id']} has not ended", hint=f"ask again: {server.url}/v1/cache/prewarm/{job['id']}")
        time.sleep(POLL_S)
        job = server.cache("GET", f"/v1/cache/prewarm/{job['id']}")
    if json:
        emit_json("kvd.prewarm/1", {"engine": server.url, **{k: v for k, v in job.items() if k != "schema"}})
    else:
        # Hashes stand for whole blocks; a prompt has an end besides.
        whole = job["hashed_tokens" if "block_hashes" in body else "prompt_tokens"]
        emit(
            f"{job['resident_tokens']} of {whole} tokens are in the arena"
            f" ({format_size(job['resident_bytes'])}, {format_size(job['promoted_bytes'])} of it brought up now)"
        )
        if job["stopped_by"]:
            emit(f"stopped at {STOPS[job['stopped_by']]}")
    if job["state"] == "failed":
        raise KvError(f"the prewarm failed: {job['error']}")


STOPS = {
    "missing": "a chunk that is stored nowhere: kvd why says why",
    "max_bytes": "the byte cap: --max-bytes raises it",
    "deadline": "the deadline: --timeout moves it",
    "room": "an arena with no room left: all of it is pinned or not yet written to a tier",
}


def _is_hash(word: str) -> bool:
    try:
        return len(bytes.fromhex(word)) in (8, 16, 32, 64)
    except ValueError:
        return False


# ---- is it working? --------------------------------------------------------------------------------------------------


@dataclass
class Check:
    """One line of the answer. `word`: ok, warn, fail or unknown."""

    name: str
    word: str
    text: str
    hint: str = ""


@dataclass
class Report:
    """What is known of one engine."""

    url: str
    checks: list[Check] = field(default_factory=list)
    engine: dict[str, Any] | None = None
    """The answer of /v1/cache/engine."""
    silent: Exit | None = None
    """The exit status that its server not being asked means; None where it was."""

    def add(self, name: str, word: str, text: str, hint: str = "") -> None:
        self.checks.append(Check(name, word, text, hint))


def status(urls: Sequence[str], model: str | None, probe: bool, timeout: str, json: bool) -> None:
    """Is it working, for each engine; and whether they all hash alike. Exit 1 where a check fails, 4 where no server is."""
    seconds = parse_duration(timeout)
    if model and not probe:
        raise UsageError("--model goes with --probe here", hint="status without --probe asks nothing of a model")
    servers = [EngineServer(url, timeout_s=seconds) for url in urls]
    reports = [look(servers[0], model, probe)] if len(urls) == 1 else [_looked(server, model, probe) for server in servers]
    together = compare(reports) if len(reports) > 1 else []
    every = [check for report in reports for check in report.checks] + together
    if json:
        emit_json(
            "kvd.engine_status/1",
            {
                "working": not any(check.word == "fail" for check in every),
                "engines": [
                    {"url": report.url, "checks": [vars(check) for check in report.checks], "engine": report.engine}
                    for report in reports
                ],
                "together": [vars(check) for check in together],
            },
        )
    else:
        for report in reports:
            _show_checks(report.url, report.checks)
        if together:
            _show_checks("all of them", together)
    if any(check.word == "fail" for check in every):
        raise typer.Exit(next((report.silent for report in reports if report.silent is not None), Exit.FAILED))


def _looked(server: EngineServer, model: str | None, probe: bool) -> Report:
    """One of several engines: one that cannot be asked is a check that failed, and the others are asked all the same."""
    try:
        return look(server, model, probe)
    except KvError as error:
        report = Report(server.url, silent=error.exit_code)
        report.add("server", "fail", error.message, error.hint)
        return report


def _show_checks(title: str, checks: Sequence[Check]) -> None:
    emit(title)
    width = max(len(check.name) for check in checks)
    for check in checks:
        emit(f"  {paint(f'{check.word:7}', STYLES[check.word])}  {check.name:{width}}  {check.text}")
        if check.hint:
            emit(f"  {'':7}  {'':{width}}  -> {check.hint}")


def look(server: EngineServer, model: str | None, probe: bool) -> Report:
    """Every check of one engine, as far as each can be made. A server that is no vLLM is an error, not a check."""
    report = Report(server.url)
    version = server.identify()
    report.add("server", "ok", f"vLLM {version}")
    try:
        report.engine = server.cache("GET", "/v1/cache/engine")
    except NoRoutes as error:
        report.add("routes", "warn", "kvd's routes are not there: what follows is from /metrics alone", error.hint)
    except KvError as error:
        report.add("routes", "fail", error.message, error.hint)
    else:
        report.add("routes", "ok", "kvd's routes are there: prewarm, why and the canary work")
    metrics = server.metrics()
    _connector(report, metrics)
    if any(name.startswith("vllm:kvd_") for name in metrics):
        _hashes(report)
        if probe:
            _probe(server, report, model)
        _traffic(report, server.metrics() if probe else metrics)
    return report


def _connector(report: Report, metrics: Mapping[str, float]) -> None:
    engine = report.engine or {}
    view = engine.get("view")
    if not any(name.startswith("vllm:kvd_") for name in metrics):
        hint = (
            "start it with --kv-transfer-config "
            '\'{"kv_connector":"KvdConnector","kv_role":"kv_both","kv_connector_module_path":"kvd.connector"}\''
        )
        report.add("connector", "fail", "this engine runs without KvdConnector", hint)
        return
    if engine.get("problem"):
        report.add("connector", "fail", str(engine["problem"]), "the engine's log has the line (SKIPS kvd)")
    elif view is None:
        report.add("connector", "ok", "KvdConnector")
    else:
        more = view["more"]
        does = " and ".join(word for word, on in (("stores", more["saves"]), ("loads", more["loads"])) if on) or "does nothing"
        ranks, groups = len(view["ranks"]), len(view["groups"])
        size = f"chunks of {view['chunk_tokens']} tokens, {_count(ranks, 'rank')}, {_count(groups, 'cache group')}"
        text = f"{engine['kv_connector']}, {engine['kv_role']}: {does}; {size}"
        report.add("connector", "ok" if more["saves"] or more["loads"] else "fail", text)
        _daemon(report, more, engine.get("daemon_problem"))


def _daemon(report: Report, more: Mapping[str, Any], problem: str | None) -> None:
    """The daemon as the engine sees it. `problem`: why it did not answer just now; None where the engine's kvd does not say."""
    socket = more["socket"]
    if problem:
        report.add("daemon", "fail", f"no daemon answers the engine at {socket}", problem)
    elif not more["daemon_up"]:
        text = f"the engine is not connected to the daemon at {socket}"
        report.add("daemon", "fail", text, "it looks for it every 5 s at least; its log says what was wrong")
    else:
        report.add("daemon", "ok", f"the engine is connected to {socket}")
    if more.get("reset"):
        text = (
            "the engine reset its caches: until it restarts it finds nothing stored before, and shares nothing (KVD_RESET=private)"
        )
        report.add("reset", "warn", text, "restart it; KVD_RESET=keep is for engines whose weights never change, and only sleep")


def _hashes(report: Report) -> None:
    view = (report.engine or {}).get("view")
    if view is None:
        report.add("hash seed", "unknown", "only kvd's routes can tell")
    elif view["more"]["seed"] == "fixed":
        report.add("hash seed", "ok", f"{view['hashes']['algorithm']}, the same after a restart")
    else:
        text = f"{view['hashes']['algorithm']} with a seed that is random in each process: a restart finds nothing"
        report.add("hash seed", "fail", text, "set PYTHONHASHSEED=0 for every engine, or use --prefix-caching-hash-algo sha256")


def _probe(server: EngineServer, report: Report, model: str | None) -> None:
    """Send one prompt that nobody has sent before, and see its chunks arrive in kvd."""
    name = model or next(iter((report.engine or {}).get("served") or []), None) or _served(server)
    prompt = " ".join(secrets.token_hex(2) for _ in range(PROBE_WORDS))
    status, body, _ = server.post("/v1/completions", {"model": name, "prompt": prompt, "max_tokens": 1, "temperature": 0})
    if status != 200:
        report.add("probe", "fail", f"a request to /v1/completions failed: HTTP {status}: {str(body)[:200]}")
        return
    try:
        found = server.cache("POST", "/v1/cache/why", {"model": name, "prompt": prompt})
    except KvError as error:
        report.add("probe", "unknown", f"sent; whether it is stored cannot be asked: {error.message}", error.hint)
        return
    if found["chunks"] and found["chunks"][0]["state"] in ("arena", "tier"):
        report.add("probe", "ok", f"a new prompt of {found['prompt_tokens']} tokens: {found['found_tokens']} are stored now")
    else:
        reasons = "; ".join(reason["text"] for chunk in found["chunks"][:1] for reason in chunk["why"]) or "the prompt is too short"
        report.add("probe", "fail", f"a new prompt of {found['prompt_tokens']} tokens is not stored: {reasons}")


def _served(server: EngineServer) -> str:
    body = server.get("/v1/models")[1]
    with contextlib.suppress(KeyError, IndexError, TypeError):
        return str(body["data"][0]["id"])
    raise NotFound(f"{server.url} serves no model", hint="name it: --model")


def _traffic(report: Report, metrics: Mapping[str, float]) -> None:
    def count(name: str) -> float:
        return metrics.get(f"vllm:{name}_total", metrics.get(f"vllm:{name}", 0.0))

    saves, failed = count("kvd_saves"), count("kvd_save_failures")
    if saves:
        text = f"{saves:.0f} chunks stored, {format_size(int(count('kvd_save_bytes')))}"
        report.add(
            "saving", "warn" if failed else "ok", text + (f"; {failed:.0f} were not: no room, or no daemon" if failed else "")
        )
    else:
        report.add(
            "saving",
            "fail" if failed else "unknown",
            f"nothing stored yet, {failed:.0f} failures",
            "" if failed else "send a prompt, or --probe",
        )
    hits, queries = count("external_prefix_cache_hits"), count("external_prefix_cache_queries")
    rate = (
        f"{100 * hits / queries:.1f} % of {queries:.0f} tokens the engine did not have itself"
        if queries
        else "nothing was asked for yet"
    )
    if count("kvd_hit_tokens"):
        report.add("loading", "ok", f"External prefix cache hit rate {rate}; {format_size(int(count('kvd_load_bytes')))} loaded")
    else:
        report.add(
            "loading", "unknown", f"no request has needed a load yet ({rate})", "a prompt of before the engine's restart is one"
        )
    _direct(report, metrics, count("kvd_direct_load_bytes") + count("kvd_direct_save_bytes"))
    lost, errors = count("kvd_load_failures"), count("kvd_errors")
    if errors:
        report.add("faults", "fail", f"{errors:.0f} errors inside the connector", "their tracebacks are in the engine's log")
    elif lost or count("kvd_down"):
        gone = int(count("kvd_down"))
        parts = [f"{_count(int(lost), 'load')} failed and {'was' if lost == 1 else 'were'} recomputed"] if lost else []
        parts += [f"{_count(gone, 'connection')} to the daemon {'was' if gone == 1 else 'were'} lost"] if gone else []
        report.add("faults", "warn", "; ".join(parts))
    else:
        report.add("faults", "ok", "no load failed, no error, the daemon was never lost")


def _direct(report: Report, metrics: Mapping[str, float], moved: float) -> None:
    """GPU-direct, where anything of it was asked for."""
    name = "vllm:kvd_direct_fallback_total/"
    reasons = {key.removeprefix(name): value for key, value in metrics.items() if key.startswith(name) and value}
    if reasons:
        told = ", ".join(f"{reason} {value:.0f}" for reason, value in sorted(reasons.items(), key=lambda pair: -pair[1]))
        hint = "kvdoctor says what this host lacks; the engine's log has the first one at WARNING"
        report.add("direct", "warn", f"{format_size(int(moved))} moved GPU-direct; chunks that were not, by reason: {told}", hint)
    elif moved:
        report.add("direct", "ok", f"{format_size(int(moved))} moved GPU-direct, nothing fell back")


# ---- do they agree? --------------------------------------------------------------------------------------------------


def compare(reports: Sequence[Report]) -> list[Check]:
    """Whether all engines make the same block hashes: a prefill and a decode engine that do not, silently reuse nothing."""
    checks = []
    known = [report for report in reports if report.engine and report.engine.get("canary")]
    silent = [report.url for report in reports if report not in known]
    canaries = {str(report.engine["canary"]) for report in known if report.engine}
    if len(canaries) > 1:
        algorithms = {report.url: report.engine["hash_algorithm"] for report in known if report.engine}
        text = "the engines hash one block of known tokens differently: they share nothing, silently"
        if len(set(algorithms.values())) > 1:
            hint = "give all one --prefix-caching-hash-algo: " + ", ".join(f"{url} has {one}" for url, one in algorithms.items())
        else:
            hint = "one algorithm, so the seeds differ: set PYTHONHASHSEED to one value for all of them, or for none"
        checks.append(Check("canary", "fail", text, hint))
    elif len(known) > 1:
        checks.append(Check("canary", "ok", f"{len(known)} engines hash a block of known tokens alike"))
    if silent:
        text = f"unknown for {', '.join(silent)}: no server, no routes of kvd's, or a seed that is random"
        checks.append(
            Check("canary", "unknown", text, "VLLM_PLUGINS=kvd lets the routes in; an engine needs no KvdConnector for that")
        )
    sizes = {report.url: report.engine["hash_tokens"] for report in known if report.engine}
    if len(set(sizes.values())) > 1:
        text = "block sizes differ, so block hashes do too: " + ", ".join(f"{url} {size}" for url, size in sizes.items())
        checks.append(Check("blocks", "fail", text, "give all one --block-size"))
    checks += _share([report for report in known if report.engine and report.engine.get("facts")])
    return checks


def _share(known: Sequence[Report]) -> list[Check]:
    """Whether they use the same bytes in kvd: not needed for a transport, but good to know."""
    from kvd.connector.fingerprint import differences

    checks = []
    for report in known[1:]:
        first, other = (known[0].engine or {})["facts"], (report.engine or {})["facts"]
        differs = differences(first, other)
        if differs:
            text = f"{known[0].url} and {report.url} share nothing in kvd; what differs: {'; '.join(differs)}"
            checks.append(Check("sharing", "warn", text))
        else:
            checks.append(Check("sharing", "ok", f"{known[0].url} and {report.url} use the same bytes in kvd"))
    return checks
