"""kvd's commands. Each body imports what it needs when it runs: `kvd stats` never loads the server.

`stats` and `status` read the stats segment and never touch the socket, so they work while a daemon hangs; `ping`, `keys`,
`clear`, `evict`, `prefetch`, `drain` and `why` talk to it.
"""

from pathlib import Path
from typing import Annotated

import typer

from kvd import options as o
from kvd.options import path_of
from kvtools.cli import JsonOption, new_app

app = new_app("The KV offload daemon: serve it, look into it, empty it.", no_args_is_help=True)

SocketOption = Annotated[
    Path | None,
    typer.Option("--socket", parser=path_of, metavar="PATH", help="The daemon's socket [default: $KVD_SOCKET, /run/kvd/kvd.sock]."),
]
NamespaceOption = Annotated[
    str | None, typer.Option("--namespace", metavar="NAME", help="A namespace: its name, or its 64 hex digits.")
]
TimeoutOption = Annotated[str, typer.Option("--timeout", metavar="TIME", help="How long to wait for the daemon.")]
EngineOption = Annotated[
    str | None, typer.Option("--engine", metavar="URL", help="Ask this engine's own server, such as http://127.0.0.1:8000.")
]
ModelOption = Annotated[
    str | None, typer.Option("--model", metavar="NAME", help="With --engine: the model, where it serves several.")
]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


@app.command()
def serve(
    socket: SocketOption = None,
    max_bytes: o.MaxBytes = None,
    l1_size_gb: o.L1SizeGb = None,
    long_path: o.LongPath = None,
    long_bytes: o.LongBytes = None,
    durability: o.Durability = None,
    long_backend: o.LongBackend = None,
    long_config: o.LongConfig = None,
    l2_adapter: o.L2Adapter = None,
    promote: o.Promote = None,
    socket_mode: o.SocketMode = None,
    socket_group: o.SocketGroup = None,
    allow_uid: o.AllowUid = None,
    allow_gid: o.AllowGid = None,
    hugepages: o.Hugepages = None,
    mlock: o.Mlock = None,
    numa_node: o.NumaNode = None,
    gds_l1_path: o.GdsL1Path = None,
    eviction_policy: o.EvictionPolicy = None,
    eviction_trigger_watermark: o.EvictionTriggerWatermark = None,
    eviction_ratio: o.EvictionRatio = None,
    l2_store_policy: o.L2StorePolicy = None,
    l2_prefetch_policy: o.L2PrefetchPolicy = None,
    l2_prefetch_max_in_flight: o.L2PrefetchMaxInFlight = None,
    drain_timeout: o.DrainTimeout = None,
    log_level: o.LogLevel = None,
    log_format: o.LogFormat = None,
    metrics_port: o.MetricsPort = None,
    metrics_host: o.MetricsHost = None,
    config: o.Config = None,
    show_config: o.ShowConfig = False,
) -> None:
    """Run the daemon in the foreground until SIGTERM."""
    given = {name: value for name, value in locals().items() if name not in ("config", "show_config", "l1_size_gb") and value != []}
    from kvd.service import settings
    from kvd.tiers.adapters import registry

    # Every other parameter is the setting of its name.
    given["max_bytes"] = max_bytes if l1_size_gb is None else settings.gib(l1_size_gb, max_bytes)
    given["l2_adapter"] = [registry.parse_spec(one) for one in l2_adapter or ()] or None
    settings.serve(given, config=config, show_config=show_config)


@app.command()
def ping(
    socket: SocketOption = None,
    count: Annotated[int, typer.Option("--count", "-c", metavar="N", min=1, max=10000, help="Round trips.")] = 1,
    timeout: TimeoutOption = "5s",
    json: JsonOption = False,
) -> None:
    """Say whether the daemon answers, and how fast."""
    from kvd import commands

    commands.ping(socket, count, timeout, json)


@app.command()
def stats(
    socket: SocketOption = None,
    json: JsonOption = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Print again every interval, with rates, until Ctrl-C.")] = False,
    interval: Annotated[str, typer.Option("--interval", "-i", metavar="TIME", help="With --watch: how often.")] = "1s",
    count: Annotated[
        int, typer.Option("--count", "-n", metavar="N", min=0, help="With --watch: stop after so many (0: never).")
    ] = 0,
) -> None:
    """Counters and gauges, from the stats segment (also while the daemon hangs)."""
    from kvd import commands

    commands.stats(socket, json, watch, interval, count)


@app.command()
def status(
    socket: SocketOption = None,
    engine: Annotated[
        list[str] | None,
        typer.Option("--engine", metavar="URL", help="Is this engine's kvd working? Given again: do the engines hash alike?"),
    ] = None,
    model: ModelOption = None,
    tiers: Annotated[bool, typer.Option("--tiers", help="Each tier: what it holds, what it was asked, and how it did.")] = False,
    probe: Annotated[bool, typer.Option("--probe", help="With --engine: send one new prompt and see that it is stored.")] = False,
    timeout: TimeoutOption = "10s",
    json: JsonOption = False,
) -> None:
    """One health word, and why; or, of engines, whether kvd works in them."""
    if engine:
        from kvd import engine_commands
        from kvd.commands import not_with_engine

        not_with_engine(socket=socket, tiers=tiers)
        engine_commands.status(engine, model, probe, timeout, json)
        return
    from kvd import commands

    commands.only_with_engine(model=model, probe=probe)
    if tiers:
        commands.tiers(socket, json)
    else:
        commands.status(socket, json)


@app.command()
def size(socket: SocketOption = None, json: JsonOption = False) -> None:
    """What more RAM would bring, or less cost: share of tokens found, by size of the arena."""
    from kvd import commands

    commands.size(socket, json)


@app.command()
def keys(
    socket: SocketOption = None,
    namespace: NamespaceOption = None,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, help="Rows at most.")] = 1000,
    timeout: TimeoutOption = "5s",
    json: JsonOption = False,
) -> None:
    """What is stored: namespace, key, size, class, expiry, place."""
    from kvd import commands

    commands.keys(socket, namespace, limit, timeout, json)


@app.command()
def why(
    key: Annotated[
        list[str],
        typer.Argument(
            metavar="KEY...|FILE", help="Keys (64 hex digits); with --engine a file with a prompt or request (- is stdin)."
        ),
    ],
    engine: EngineOption = None,
    model: ModelOption = None,
    socket: SocketOption = None,
    namespace: NamespaceOption = None,
    timeout: TimeoutOption = "10s",
    json: JsonOption = False,
) -> None:
    """Where these keys, or a prompt's, are: in the arena, in a tier, or nowhere, and why not."""
    if engine is not None:
        from kvd import engine_commands
        from kvd.commands import not_with_engine

        not_with_engine(socket=socket, namespace=namespace)
        engine_commands.why(engine, engine_commands.one_prompt(key), model, timeout, json)
        return
    from kvd import commands

    commands.only_with_engine(model=model)
    commands.why(key, socket, namespace, timeout, json)


@app.command()
def prefetch(
    key: Annotated[
        list[str],
        typer.Argument(metavar="KEY...|FILE", help="Keys (64 hex digits); with --engine block hashes, or a file with a prompt."),
    ],
    engine: EngineOption = None,
    model: ModelOption = None,
    max_bytes: Annotated[
        str | None, typer.Option("--max-bytes", metavar="SIZE", help="With --engine: bring up at most so much.")
    ] = None,
    socket: SocketOption = None,
    namespace: NamespaceOption = None,
    timeout: TimeoutOption = "30s",
    json: JsonOption = False,
) -> None:
    """Bring values up from the tiers into the arena."""
    if engine is not None:
        from kvd import engine_commands
        from kvd.commands import not_with_engine

        not_with_engine(socket=socket, namespace=namespace)
        engine_commands.prefetch(engine, key, model, max_bytes, timeout, json)
        return
    from kvd import commands

    commands.only_with_engine(model=model, max_bytes=max_bytes)
    commands.prefetch(key, socket, namespace, timeout, json)


@app.command()
def evict(
    key: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY...]", help="Keys, 64 hex digits each; none: the whole namespace.")
    ] = None,
    socket: SocketOption = None,
    namespace: NamespaceOption = None,
    all_tiers: Annotated[bool, typer.Option("--all-tiers", help="Drop them everywhere, not only in the arena.")] = False,
    yes: YesOption = False,
    timeout: TimeoutOption = "30s",
    json: JsonOption = False,
) -> None:
    """Drop keys, or a namespace, from the arena (tiers keep them)."""
    from kvd import commands

    commands.evict(key or [], socket, namespace, all_tiers, yes, timeout, json)


@app.command()
def clear(
    socket: SocketOption = None,
    namespace: NamespaceOption = None,
    yes: YesOption = False,
    timeout: TimeoutOption = "60s",
    json: JsonOption = False,
) -> None:
    """Forget everything (of one namespace), in the arena and in every tier."""
    from kvd import commands

    commands.clear(socket, namespace, yes, timeout, json)


@app.command()
def drain(socket: SocketOption = None, timeout: TimeoutOption = "20s", json: JsonOption = False) -> None:
    """Stop new writes and push everything to the tiers."""
    from kvd import commands

    commands.drain(socket, timeout, json)


@app.command()
def verify(
    path: Annotated[
        list[Path], typer.Argument(parser=path_of, metavar="DIR...", help="Directories of a disk tier whose daemon is stopped.")
    ],
    repair: Annotated[bool, typer.Option("--repair", help="Drop what is damaged.")] = False,
    json: JsonOption = False,
) -> None:
    """Check every value of a stopped daemon's disk tier."""
    from kvd import commands

    commands.verify(path, repair, json)


@app.command()
def bench(
    socket: Annotated[
        Path | None, typer.Option("--socket", parser=path_of, metavar="PATH", help="Measure this daemon [default: one of its own].")
    ] = None,
    path: Annotated[
        Path | None,
        typer.Option("--path", parser=path_of, metavar="DIR", help="Where to put the disk tier to measure [default: none]."),
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option("--adapter", metavar="JSON", help="Measure this tier too: as --l2-adapter of kvd serve (repeatable)."),
    ] = None,
    size: Annotated[list[str] | None, typer.Option("--size", metavar="SIZE", help="Value sizes [default: 64K 1M 16M].")] = None,
    clients: Annotated[
        int, typer.Option("--clients", metavar="N", min=1, max=64, help="Measure the arena from so many processes too (1: not).")
    ] = 4,
    seconds: Annotated[float, typer.Option("--seconds", metavar="S", min=0.1, max=60, help="Time for each measurement.")] = 1.0,
    bytes_per_token: Annotated[
        str | None,
        typer.Option("--bytes-per-token", metavar="SIZE", help="KV bytes of one token: say what a prefix's reload costs."),
    ] = None,
    model: Annotated[str, typer.Option("--model", metavar="NAME", help="What to call the model in that sentence.")] = "this model",
    prefix_tokens: Annotated[int, typer.Option("--prefix-tokens", metavar="N", min=1, help="Tokens of that prefix.")] = 32768,
    prefill_rate: Annotated[
        float, typer.Option("--prefill-rate", metavar="N", min=0, help="Tokens a second that the engine computes, to compare with.")
    ] = 0.0,
    json: JsonOption = False,
) -> None:
    """What this host can do: arena, disk and tiers against memcpy and the raw device, in one run."""
    from kvd.bench import run as measurements
    from kvd.bench.reload import Prefix
    from kvtools.errors import UsageError
    from kvtools.units import parse_size

    if bytes_per_token is None and prefill_rate:
        raise UsageError("--prefill-rate without --bytes-per-token", hint="say what a token takes, such as --bytes-per-token 128K")
    prefix = None if bytes_per_token is None else Prefix(model, prefix_tokens, parse_size(bytes_per_token), prefill_rate)
    sizes = size or ["64K", "1M", "16M"]
    measurements.run(measurements.plan(socket, path, adapter or [], sizes, clients, seconds, prefix), json)
