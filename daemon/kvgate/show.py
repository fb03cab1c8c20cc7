"""What the commands print: tables for people, the gate's own objects for programs."""

from typing import Any

from kvtools.output import emit, emit_json, paint, printable, table
from kvtools.units import format_duration

_STYLE = {"awake": "good", "asleep": "accent", "failed": "bad", "starting": "warn", "waking": "warn", "draining": "warn"}


def models(body: dict[str, Any], *, json: bool) -> None:
    """`kvgate models`"""
    listed = [{"model": name, **model} for name, model in body["models"].items()]
    if json:
        emit_json("kvgate.models/1", {"models": listed})
        return
    rows = []
    for model in listed:
        state = str(model["state"])
        rows.append(
            [
                printable(model["model"]),
                paint(state, _STYLE.get(state, "dim")),
                format_duration(model["state_seconds"]),
                str(model["running"]),
                str(model["queued"]),
                format_duration(model["idle_time_seconds"]),
                printable(model["endpoint"]),
                printable(model["last_error"]),
            ]
        )
    for line in table(["MODEL", "STATE", "FOR", "RUNNING", "QUEUED", "IDLE", "ENDPOINT", "LAST ERROR"], rows, right=(2, 3, 4, 5)):
        emit(line)


def action(body: dict[str, Any], verb: str, *, json: bool) -> None:
    """`kvgate sleep` and `kvgate wake`"""
    if json:
        emit_json(f"kvgate.{verb}/1", {key: body.get(key) for key in ("model_name", "success", "message", "state")})
        return
    emit(f"{printable(str(body['model_name']))}: {printable(str(body['message']))}")


def traffic(body: dict[str, Any], *, json: bool) -> None:
    """`kvgate traffic`"""
    if json:
        listed = [{"model": name, **stats} for name, stats in body["traffic_stats"].items()]
        emit_json("kvgate.traffic/1", {"window_seconds": body["window_seconds"], "models": listed})
        return
    header = ["MODEL", "TOTAL", "OK", "FAILED", "GONE", "RUNNING", "PER MIN", "P50", "P99", "FIRST P50", "TOKENS", "IDLE"]
    rows = []
    for name, stats in body["traffic_stats"].items():
        rows.append(
            [
                printable(name),
                str(stats["total_requests"]),
                str(stats["successful_requests"]),
                str(stats["failed_requests"]),
                str(stats["cancelled_requests"]),
                str(stats["in_flight"]),
                f"{stats['request_rate']:.1f}",
                _time(stats["latency_seconds"]["p50"]),
                _time(stats["latency_seconds"]["p99"]),
                _time(stats["first_byte_seconds"]["p50"]),
                str(stats["completion_tokens"]),
                format_duration(stats["idle_time_seconds"]),
            ]
        )
    for line in table(header, rows, right=range(1, len(header))):
        emit(line)


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else format_duration(seconds)
