"""From flags to a running gate: settings, the missing-extra message, logging, the event loop."""

import importlib.util
import logging
import sys
from dataclasses import replace
from pathlib import Path

from kvgate import config as configuration
from kvgate.config import DEFAULT_HOST, DEFAULT_PORT, GateConfig
from kvgate.errors import MissingExtra
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
    config = replace(config, host=host or config.host, port=config.port if port is None else port)
    if show_config:
        for name, value in _origins(config, host, port).items():
            emit(f"{name} = {value.shown}  ({value.origin})")
        return
    if check:
        _say(config)
        return
    for package in EXTRA:
        if importlib.util.find_spec(package) is None:
            raise MissingExtra(package)
    logging.basicConfig(level=_LEVELS[log_level], format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    # What breaks off in the middle of an answer is logged by the proxy with its reason; uvicorn would add an error without one.
    logging.getLogger("uvicorn.error").addFilter(lambda record: "without completing response" not in record.getMessage())
    _run(config, allow_open)


def _run(config: GateConfig, allow_open: bool) -> None:
    import asyncio

    import uvloop

    from kvgate.serve import listen, serve

    sock = listen(config, allow_open=allow_open)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(config, sock))


def _origins(config: GateConfig, host: str | None, port: int | None) -> Resolved:
    """Settings of the server with where each came from; the models are what --check shows."""
    listed = (
        ("host", DEFAULT_HOST),
        ("port", DEFAULT_PORT),
        *((name, getattr(GateConfig(Path(), {}), name)) for name in ("max_body_bytes", "max_connections", "health_interval_s")),
        *((name, getattr(GateConfig(Path(), {}), name)) for name in ("shutdown_timeout_s", "api_keys", "limits", "sleep")),
    )
    settings = [Setting(name, default=default) for name, default in listed]
    written = {name: getattr(config, name) for name, default in listed if getattr(config, name) != default}
    flags = {"host": host, "port": port}
    return resolve(
        settings, flags=flags, file={k: v for k, v in written.items() if flags.get(k) is None}, file_name=str(config.path)
    )


def _say(config: GateConfig) -> None:
    for name, model in config.models.items():
        started = " (started by kvgate)" if model.instance else ""
        emit(f"{name}: {model.endpoint.url}{started}")
    note(f"{config.path}: {len(config.models)} models, no errors")
