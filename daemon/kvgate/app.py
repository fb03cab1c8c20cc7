"""kvgate's commands: `serve` runs the gate, the others ask a running one.

Only `serve` needs the `gate` extra (starlette, uvicorn, httptools, aiohttp); the others speak HTTP with the standard
library, so an operator can look at a gate from any host that has kvtools.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from kvtools.cli import JsonOption, new_app

app = new_app("One front for several models that share a GPU and sleep when idle.", no_args_is_help=True)

UrlOption = Annotated[str, typer.Option("--url", envvar="KVGATE_URL", help="Where the gate listens.")]
KeyOption = Annotated[
    str, typer.Option("--key", envvar="KVGATE_KEY", help="API key of role admin: env:NAME or file:PATH.", show_default=False)
]
ModelArgument = Annotated[str, typer.Argument(help="A model's name, as clients say it.")]
DEFAULT_URL = "http://127.0.0.1:8080"


@app.command()
def serve(
    config: Annotated[Path, typer.Option("--config", envvar="KVGATE_CONFIG", help="The models and their rules (YAML).")],
    host: Annotated[str | None, typer.Option("--host", help="Address to listen on [default: 127.0.0.1; KVGATE_HOST].")] = None,
    port: Annotated[
        int | None, typer.Option("--port", min=0, max=65535, help="Port to listen on [default: 8080; KVGATE_PORT].")
    ] = None,
    allow_open: Annotated[bool, typer.Option("--allow-open", help="Listen beyond loopback without API keys.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Read the configuration, say what it means, and stop.")] = False,
    show_config: Annotated[
        bool, typer.Option("--show-config", help="Print each setting and where it came from, and stop.")
    ] = False,
    log_level: Annotated[
        str, typer.Option("--log-level", envvar="KVGATE_LOG_LEVEL", help="debug, info, warning or error.")
    ] = "info",
) -> None:
    """Serve the models of a configuration until told to stop.

    Example: kvgate serve --config models.yaml --port 8080
    """
    from kvgate.launch import run_serve

    run_serve(config, host=host, port=port, allow_open=allow_open, check=check, show_config=show_config, log_level=log_level)


@app.command()
def models(url: UrlOption = DEFAULT_URL, key: KeyOption = "", json: JsonOption = False) -> None:
    """List models, their state, and what runs and waits."""
    from kvgate import ask, show

    body = ask.get(url, "/models", key)
    show.models(body, json=json)


@app.command()
def sleep(
    model: ModelArgument,
    level: Annotated[int | None, typer.Option("--level", min=1, max=2, help="1: weights to host RAM, 2: weights dropped.")] = None,
    mode: Annotated[str, typer.Option("--mode", help="vLLM's pause mode, passed on.", show_default=False)] = "",
    url: UrlOption = DEFAULT_URL,
    key: KeyOption = "",
    json: JsonOption = False,
) -> None:
    """Put a model to sleep once its requests are done.

    Example: kvgate sleep meta-llama/Llama-3.2-1B
    """
    from kvgate import ask, show

    query: dict[str, Any] = {**({"level": str(level)} if level else {}), **({"mode": mode} if mode else {})}
    show.action(ask.post(url, f"/action/sleep/{ask.quote(model)}", key, query=query), "sleep", json=json)


@app.command()
def wake(
    model: ModelArgument,
    tag: Annotated[list[str] | None, typer.Option("--tag", help="Wake only this part: weights or kv_cache (repeatable).")] = None,
    force: Annotated[bool, typer.Option("--force", help="Do not wait for the minimum sleep.")] = False,
    url: UrlOption = DEFAULT_URL,
    key: KeyOption = "",
    json: JsonOption = False,
) -> None:
    """Wake a sleeping model.

    Example: kvgate wake meta-llama/Llama-3.2-1B --force
    """
    from kvgate import ask, show
    from kvtools.errors import UsageError

    for part in tag or []:
        if part not in {"weights", "kv_cache"}:
            raise UsageError(f"no part of a model: {part!r}", hint="--tag takes weights or kv_cache")
    query: dict[str, Any] = {**({"tags": tag} if tag else {}), **({"force": "1"} if force else {})}
    show.action(ask.post(url, f"/action/wakeup/{ask.quote(model)}", key, query=query), "wake", json=json)


@app.command()
def traffic(
    window: Annotated[
        str, typer.Option("--window", help="Time the rates and quantiles are taken over, such as 60s or 5m.")
    ] = "60s",
    url: UrlOption = DEFAULT_URL,
    key: KeyOption = "",
    json: JsonOption = False,
) -> None:
    """Show each model's requests, rates and latencies."""
    from kvgate import ask, show
    from kvtools.units import parse_duration

    body = ask.get(url, "/traffic/stats", key, query={"window": f"{parse_duration(window):g}"})
    show.traffic(body, json=json)
