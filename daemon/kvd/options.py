"""The options of `kvd serve`, one alias each: what they are called and what --help says of them."""

from pathlib import Path
from typing import Annotated

import typer


def path_of(text: str) -> Path:
    """A path from the command line. Empty is an unset variable more often than it is the current directory."""
    if not text:
        raise typer.BadParameter("an empty path names nothing")
    return Path(text)


MaxBytes = Annotated[str | None, typer.Option("--max-bytes", metavar="SIZE", help="Size of the arena in RAM [default: 8G].")]
L1SizeGb = Annotated[float | None, typer.Option("--l1-size-gb", metavar="N", help="The same in GiB.")]
LongPath = Annotated[
    list[Path] | None,
    typer.Option("--long-path", parser=path_of, metavar="DIR", help="Directory of the disk tier (repeatable: striped)."),
]
LongBytes = Annotated[str | None, typer.Option("--long-bytes", metavar="SIZE", help="Size of the disk tier [default: 32G].")]
Durability = Annotated[
    str | None, typer.Option("--durability", metavar="WORD", help="none, group or fsync: what a stored value survives.")
]
LongBackend = Annotated[
    str | None, typer.Option("--long-backend", metavar="WORD", help="mooncake or lmcache: a pool that several hosts share.")
]
LongConfig = Annotated[
    Path | None,
    typer.Option("--long-config", parser=path_of, metavar="FILE", help="Its settings, in YAML or JSON."),
]
L2Adapter = Annotated[
    list[str] | None,
    typer.Option("--l2-adapter", metavar="JSON", help="One more tier: JSON or @FILE (repeatable, in order)."),
]
Promote = Annotated[
    bool | None, typer.Option("--promote/--no-promote", help="Store what a tier gives in those before it that lack it.")
]
SocketMode = Annotated[str | None, typer.Option("--socket-mode", metavar="OCTAL", help="Mode of the socket file [default: 0600].")]
SocketGroup = Annotated[str | None, typer.Option("--socket-group", metavar="GROUP", help="Group of the socket file.")]
AllowUid = Annotated[list[str] | None, typer.Option("--allow-uid", metavar="UID", help="Let this user connect (repeatable).")]
AllowGid = Annotated[list[str] | None, typer.Option("--allow-gid", metavar="GID", help="Let this group connect (repeatable).")]
Hugepages = Annotated[bool | None, typer.Option("--hugepages/--no-hugepages", help="Ask for 2 MiB pages.")]
Mlock = Annotated[bool | None, typer.Option("--mlock/--no-mlock", help="Keep the arena from being swapped out.")]
NumaNode = Annotated[
    str | None, typer.Option("--numa-node", metavar="N", help="Take the arena's pages from this NUMA node where it has any.")
]
GdsL1Path = Annotated[
    str | None, typer.Option("--gds-l1-path", metavar="DIR", help="Put the arena on this NVMe drive, for GPU-direct engines.")
]
EvictionPolicy = Annotated[
    str | None, typer.Option("--eviction-policy", metavar="WORD", help="LRU, S3FIFO, or noop: a full arena refuses.")
]
EvictionTriggerWatermark = Annotated[
    str | None,
    typer.Option("--eviction-trigger-watermark", metavar="SHARE", help="Evict above this share of the arena already."),
]
EvictionRatio = Annotated[
    str | None, typer.Option("--eviction-ratio", metavar="SHARE", help="And then this share of the bytes used.")
]
L2StorePolicy = Annotated[
    str | None, typer.Option("--l2-store-policy", metavar="NAME", help="default, skip_l1, or one of yours: what goes down.")
]
L2PrefetchPolicy = Annotated[
    str | None, typer.Option("--l2-prefetch-policy", metavar="NAME", help="default, retain, or one of yours: what comes up.")
]
L2PrefetchMaxInFlight = Annotated[
    str | None,
    typer.Option("--l2-prefetch-max-in-flight", metavar="N", help="Requests loading from a tier at once [8]."),
]
DrainTimeout = Annotated[
    str | None, typer.Option("--drain-timeout", metavar="TIME", help="For pending writes when stopping [default: 20s].")
]
LogLevel = Annotated[str | None, typer.Option("--log-level", metavar="LEVEL", help="DEBUG, INFO, WARNING or ERROR.")]
LogFormat = Annotated[str | None, typer.Option("--log-format", metavar="WORD", help="text, or json: one object a line.")]
MetricsPort = Annotated[
    str | None, typer.Option("--metrics-port", metavar="PORT", help="Serve /metrics, /healthz and /readyz there.")
]
MetricsHost = Annotated[str | None, typer.Option("--metrics-host", metavar="ADDRESS", help="On this address [default: 127.0.0.1].")]
Config = Annotated[
    Path | None, typer.Option("--config", parser=path_of, metavar="FILE", help="Settings in TOML, named as the flags.")
]
ShowConfig = Annotated[bool, typer.Option("--show-config", help="Print each setting and where it came from, and exit.")]
