"""From flags to a running gate: settings, the missing-extra message, logging, the event loop."""

import importlib.util
import logging
import sys
from dataclasses import replace
from pathlib import Path

from kvgate import config as configuration
from kvgate.config import GateConfig
from kvgate.errors import MissingExtra
from kvgate.guard import KeyRing
from kvtools.config import Resolved, Setting, resolve
from kvtools.errors import UsageError
from kvtools.output import emit, note

EXTRA = ("starlette", "uvicorn", "httptools", "aiohttp")
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def run_serve(
    path: Path, *, host: str | None, port: int | None, allow_open: bool, check: bool, show_config: bool, log_level: str
) -> None:
    """`kvgate serve`. Raises UsageError, ConfigError, MissingExtra, Refused; returns when told to stop."""
    if log_level not in _LEVELS:
        raise UsageError(f"unknown log level {log_level!r}", hint="known: " + ", ".join(_LEVELS))
    config = configuration.load(path)
    where = _address(config, host, port)
    config = replace(config, host=where["host"].value, port=where["port"].value)
    if show_config:
        _show(config, where)
        return
    if check:
        if config.api_keys:
            KeyRing.load(config.api_keys)
        _say(config)
        return
    for package in EXTRA:
        if importlib.util.find_spec(package) is None:
            raise MissingExtra(package)
    logging.basicConfig(level=_LEVELS[log_level], format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    # Its start and stop are told here, in our words.
    logging.getLogger("uvicorn.error").setLevel(max(logging.WARNING, _LEVELS[log_level]))
    logging.getLogger("uvicorn.error").addFilter(_worth_saying)
    _run(config, allow_open)


NOISE = (
    "without completing response",
    "Cancel ",
    "Unsupported upgrade request",
    "No supported WebSocket library",
    "Invalid HTTP request",
)
"""What uvicorn would say and we do not: what breaks off in mid-answer or is cut when the gate stops is logged by the proxy with its
reason, nothing here speaks WebSocket, and a client that sends garbage gets a 400 and must not fill the log."""


def _worth_saying(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(NOISE) and NOISE[0] not in record.getMessage()


def _run(config: GateConfig, allow_open: bool) -> None:
    import asyncio

    import uvloop

    from kvgate.serve import Claim, listen, serve

    claim = Claim(config.path)
    sock = listen(config, allow_open=allow_open)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(config, sock, allow_open=allow_open, claim=claim))


def _address(config: GateConfig, host: str | None, port: int | None) -> Resolved:
    """Host and port: flag, then environment, then file."""
    settings = [Setting("host", parse=configuration.host_name, default=config.host, environment=("KVGATE_HOST",))]
    settings.append(Setting("port", parse=_port, default=config.port, environment=("KVGATE_PORT",)))
    given = {read.path.removeprefix("router."): read.value for read in config.report if read.given}
    file: dict[str, object] = {name: given[name] for name in ("host", "port") if name in given}
    return resolve(settings, flags={"host": host, "port": port}, file=file, file_name=config.path.name)


def _port(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or int(text) > 65535:
        raise UsageError(f"not a port: {text!r}")
    return int(text)


def _show(config: GateConfig, where: Resolved) -> None:
    """Every setting of the gate, and what models and instances set for themselves, each with its origin."""
    for name, value in where.items():
        emit(f"{name} = {value.shown}  ({value.origin})")
    for read in config.report:
        own = read.path.startswith(("router.", "sleep_manager.")) or "." not in read.path
        if read.path not in {"router.host", "router.port", "router.enable_router", "instances"} and (own or read.given):
            emit(f"{read.path} = {read.value}  ({f'file:{config.path.name}' if read.given else 'default'})")


def _say(config: GateConfig) -> None:
    for name, model in config.models.items():
        started = " (started by kvgate)" if model.instance else ""
        emit(f"{name}: {model.endpoint.url}{started}")
    note(f"{config.path}: {len(config.models)} model{'s' * (len(config.models) != 1)}, no errors")
