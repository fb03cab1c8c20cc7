"""kvd serve's settings: flag > environment > default, turned into Options; and the process around the daemon."""

import asyncio
import gc
import grp
import json
import logging
import os
import pwd
import re
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvd.service.daemon import Daemon, Options
from kvd.store.arena import NODES
from kvd.tiers import policies
from kvd.tiers.adapters import registry
from kvd.tiers.adapters.base import Adapter, AdapterConfigError, AdapterError, Durability
from kvd.wire.connection import default_socket
from kvtools.config import YAML_SLIPS, Resolved, Setting, resolve
from kvtools.errors import KvError, UsageError
from kvtools.exits import Exit
from kvtools.output import emit, printable, table
from kvtools.units import MAX_BYTES, format_size, parse_duration, parse_size

log = logging.getLogger("kvd")

MIN_ARENA = 1 << 20
LEAST_TIER = 1 << 20
NOBODYS = (1 << 32) - 1
"""No user or group has this number, which says "leave it as it is" to the kernel, nor a higher one."""
TURN_S = 0.0005
"""How long a thread may keep the interpreter when another wants it."""


def _mode(text: str) -> int:
    if not re.fullmatch(r"0?[0-7]{3}", text):
        raise UsageError(f"not a file mode: {text!r}", hint="three octal digits, such as 0660")
    return int(text, 8)


def _digits(text: str) -> bool:
    """Whether it is a whole number as one types it: str.isdigit alone takes characters that int does not."""
    return text.isascii() and text.isdigit()


def _uid(text: str) -> int:
    return _id("user", text, lambda name: pwd.getpwnam(name).pw_uid)


def _gid(text: str) -> int:
    return _id("group", text, lambda name: grp.getgrnam(name).gr_gid)


def _id(what: str, text: str, look_up: Callable[[str], int]) -> int:
    try:
        number = int(text) if _digits(text) else look_up(text)
    except (KeyError, ValueError):  # ValueError: a name that no name can be
        raise UsageError(f"no such {what}: {text!r}", hint="a name that this host knows, or a number") from None
    if number >= NOBODYS:
        raise UsageError(f"no such {what}: {text!r}", hint=f"numbers end below {NOBODYS}")
    return number


def _each(name: str, parse: Callable[[str], int], texts: list[str]) -> frozenset[int]:
    """What each of these means. Raises UsageError, naming the setting."""
    try:
        return frozenset(map(parse, texts))
    except UsageError as error:
        raise UsageError(f"{name}: {error.message}", hint=error.hint) from None


def _several(text: str) -> list[str]:
    """Several words in one variable."""
    return text.replace(",", " ").split()


def _word(what: str, *words: str) -> Any:
    def parse(text: str) -> str:
        found = next((word for word in words if word.lower() == text.strip().lower()), None)
        if found is None:
            raise UsageError(f"not {what}: {text!r}", hint="one of " + ", ".join(words))
        return found

    return parse


def _switch(text: str) -> bool:
    return bool(_word("a switch", "0", "1", "false", "true", "no", "yes")(text) in ("1", "true", "yes"))


def _port(text: str) -> int:
    if not _digits(text) or not 0 < int(text) < 65536:
        raise UsageError(f"not a port: {text!r}", hint="a number from 1 to 65535")
    return int(text)


def _node(text: str) -> int:
    there = sorted(int(path.name[4:]) for path in NODES.glob("node[0-9]*"))
    if not _digits(text) or (there and int(text) not in there):
        raise UsageError(f"no such NUMA node: {text!r}", hint="this host has " + (", ".join(map(str, there)) or "none"))
    return int(text)


def _share(least: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not least <= value <= 1.0:
            raise UsageError(f"not a share: {text!r}", hint=f"a number {'above 0' if least else 'from 0'} and up to 1, such as 0.8")
        return value

    return parse


def _whole(least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.strip().isdecimal() or not least <= int(text) <= most:
            raise UsageError(f"not a whole number from {least} to {most}: {text!r}")
        return int(text)

    return parse


def _path(text: str) -> Path | None:
    """A path; an empty text is none at all, as an unset variable would be, and not the current directory."""
    return Path(text) if text else None


def _folder(text: str) -> Path | None:
    try:
        return Path(text).expanduser().absolute() if text else None
    except RuntimeError as error:  # ~somebody who is not there
        raise UsageError(f"not a folder: {text!r}: {error}") from None


def _address(text: str) -> str:
    if not text.strip():
        raise UsageError("an empty address is every address", hint="such as 127.0.0.1; 0.0.0.0 where all of them are meant")
    return text


def _paths(text: str) -> list[Path]:
    return [Path(part) for part in text.split(os.pathsep) if part]


LOG_LINE = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class JsonLines(logging.Formatter):
    """One JSON object a line: time (unix seconds), level, logger, message, and traceback where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        body = {"time": record.created, "level": record.levelname, "logger": record.name, "message": record.getMessage()}
        if record.exc_info:
            body["traceback"] = self.formatException(record.exc_info)
        return json.dumps(body)


SETTINGS = (
    Setting("socket", _path, None, ("KVD_SOCKET", "INFERA_KVD_SOCKET"), help="The daemon's socket."),
    Setting("max_bytes", parse_size, 8 << 30, ("KVD_MAX_BYTES",), help="Size of the arena."),
    Setting("gds_l1_path", _folder, None, ("KVD_GDS_L1_PATH",), help="Folder on NVMe for the arena, for GPU-direct engines."),
    Setting("long_path", _paths, [], ("KVD_LONG_PATH",), help="Directories of the disk tier."),
    Setting("long_bytes", parse_size, 32 << 30, ("KVD_LONG_BYTES",), help="Size of the disk tier."),
    Setting(
        "durability",
        _word("a durability", "none", "group", "fsync"),
        "none",
        ("KVD_DURABILITY",),
        help="What a stored value survives.",
    ),
    Setting(
        "long_backend", _word("a long backend", "mooncake", "lmcache"), None, ("KVD_LONG_BACKEND",), help="A pool that hosts share."
    ),
    Setting("long_config", _path, None, ("KVD_LONG_CONFIG",), help="Its settings, a file in YAML or JSON."),
    Setting("promote", _switch, False, ("KVD_PROMOTE",), help="Store what a tier gives in those before it that lack it."),
    Setting("l2_adapter", registry.parse_specs, [], ("KVD_L2_ADAPTER",), help="Further tiers, as JSON objects, in this order."),
    Setting("socket_mode", _mode, 0o600, ("KVD_SOCKET_MODE",), help="Mode of the socket file."),
    Setting("socket_group", _gid, None, ("KVD_SOCKET_GROUP",), help="Group of the socket file."),
    Setting("allow_uid", _several, [], ("KVD_ALLOW_UID",), help="Users that may connect."),
    Setting("allow_gid", _several, [], ("KVD_ALLOW_GID",), help="Groups that may connect."),
    Setting("hugepages", _switch, False, ("KVD_HUGEPAGES", "INFERA_KVD_ARENA_HUGETLB"), help="Ask for 2 MiB pages."),
    Setting("mlock", _switch, False, ("KVD_MLOCK",), help="Keep the arena from being swapped out."),
    Setting("numa_node", _node, None, ("KVD_NUMA_NODE",), help="Take the arena's pages from this NUMA node where it has any."),
    Setting(
        "eviction_policy",
        _word("an eviction policy", "LRU", "S3FIFO", "noop"),
        "LRU",
        ("KVD_EVICTION_POLICY",),
        help="Who makes room in a full arena.",
    ),
    Setting(
        "eviction_trigger_watermark", _share(0.0), None, ("KVD_EVICTION_TRIGGER_WATERMARK",), help="Evict above this share already."
    ),
    Setting("eviction_ratio", _share(1e-6), None, ("KVD_EVICTION_RATIO",), help="And then this share of the bytes used."),
    Setting("l2_store_policy", str, "default", ("KVD_L2_STORE_POLICY",), help="Which values go to which tier, and leave RAM then."),
    Setting(
        "l2_prefetch_policy", str, "default", ("KVD_L2_PREFETCH_POLICY",), help="Which tier loads a value, and whether it stays."
    ),
    Setting(
        "l2_prefetch_max_in_flight",
        _whole(1, 4096),
        8,
        ("KVD_L2_PREFETCH_MAX_IN_FLIGHT",),
        help="Requests loading from a tier at once.",
    ),
    Setting("drain_timeout", parse_duration, 20.0, ("KVD_DRAIN_TIMEOUT",), help="For pending writes when stopping."),
    Setting("metrics_port", _port, None, ("KVD_METRICS_PORT",), help="Port of /metrics, /healthz and /readyz."),
    Setting("metrics_host", _address, "127.0.0.1", ("KVD_METRICS_HOST",), help="Address they listen on."),
    Setting("log_format", _word("a log format", "text", "json"), "text", ("KVD_LOG_FORMAT",), help="How log lines look."),
    Setting(
        "log_level", _word("a log level", "DEBUG", "INFO", "WARNING", "ERROR"), "INFO", ("KVD_LOG_LEVEL",), help="What is logged."
    ),
)


LIVE = frozenset(
    {"allow_uid", "allow_gid", "drain_timeout", "eviction_policy", "eviction_trigger_watermark", "eviction_ratio", "log_level"}
)
"""Settings that SIGHUP takes over; the others wait for a restart."""


def gib(value: float, other: str | None) -> str:
    """The text of --max-bytes meant by --l1-size-gb. Raises UsageError when both are given, or it is no sensible number."""
    if other is not None:
        raise UsageError("--l1-size-gb and --max-bytes say the same thing", hint="give one of them")
    if not 0 < value < MAX_BYTES >> 30:
        raise UsageError(f"--l1-size-gb: not a size in GiB: {value:g}", hint="a number above 0, such as 0.5 or 64")
    return f"{int(value * (1 << 30))}"


def read_file(path: Path | None) -> dict[str, Any]:
    """The settings of a TOML file. Raises UsageError, naming the file and the line."""
    if path is None:
        return {}
    try:
        body = tomllib.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is no TOML: {error}") from None
    # Flags and environment are text; so that a file is checked by the same rules, so is what it says.
    lists = {"long_path", "allow_uid", "allow_gid"}
    made: dict[str, Any] = {}
    for name, value in body.items():
        if name == "l2_adapter":
            made[name] = _specs(value, path)
            continue
        if isinstance(value, dict) or (isinstance(value, list) and name not in lists):
            raise UsageError(f"{name} in {path} is not a plain value")
        if isinstance(value, list):
            made[name] = [_one_of_several(name, one, path) for one in value]
        else:
            made[name] = str(value).lower() if isinstance(value, bool) else str(value)
    return made


def _one_of_several(name: str, value: Any, path: Path) -> Any:
    """An element of a list in a file. Raises UsageError."""
    if name == "long_path":
        if not isinstance(value, str) or not value:
            raise UsageError(f"long_path in {path}: not a directory: {value!r}", hint='such as long_path = ["/nvme/kvd"]')
        return Path(value)
    if not isinstance(value, str | int) or isinstance(value, bool) or value == "":
        raise UsageError(f"{name} in {path}: neither a name nor a number: {value!r}", hint=f'such as {name} = ["kvd", 1000]')
    return str(value)


def _specs(value: Any, path: Path) -> list[registry.Spec]:
    """Adapters in a file: [[l2_adapter]] tables, or JSON texts as on the command line."""
    given = value if isinstance(value, list) else [value]
    if not all(isinstance(one, dict | str) for one in given):
        raise UsageError(f"l2_adapter in {path} is no list of adapters", hint="one table [[l2_adapter]] for each")
    return [registry.Spec(one) if isinstance(one, dict) else registry.parse_spec(one) for one in given]


def serve(flags: Mapping[str, Any], *, config: Path | None = None, show_config: bool = False) -> None:
    """Run the daemon with these flags until it is told to stop."""
    settings = resolve(SETTINGS, flags=flags, file=read_file(config), file_name=str(config or ""))
    if show_config:
        rows = [(s.name, _shown(settings[s.name].value, s.name), settings[s.name].origin) for s in SETTINGS]
        for line in table(("SETTING", "VALUE", "FROM"), rows):
            emit(line)
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if settings["log_format"].value == "json" else logging.Formatter(LOG_LINE))
    logging.basicConfig(level=settings["log_level"].value, handlers=[handler])
    options = options_of(settings)
    for line in older_names(settings, os.environ):
        log.warning("%s", line)

    def again() -> Options:
        fresh = resolve(SETTINGS, flags=flags, file=read_file(config), file_name=str(config or ""))
        options = options_of(fresh)
        logging.getLogger().setLevel(fresh["log_level"].value)
        now, then = ({s.name: _shown(one[s.name].value, s.name) for s in SETTINGS} for one in (fresh, settings))
        options.waiting = sorted(name for name in now if now[name] != then[name] and name not in LIVE)
        if "S3FIFO" in (was := {now["eviction_policy"], then["eviction_policy"]}) and len(was) > 1:
            options.waiting.append("eviction_policy")  # the order of what is there cannot be made up afterwards
        return options

    options.reload = again
    options.preflight = lambda: preflight(settings["long_path"].value)
    run(options)


def older_names(settings: Resolved, environ: Mapping[str, str]) -> list[str]:
    """One line for each variable of an older daemon that is set: its name here, or what there is in its place."""
    given = sorted(name for name in environ if name.startswith("INFERA_KVD_"))
    if not given:
        return []
    from kvd.connector.settings import INSTEAD
    from kvd.connector.settings import SETTINGS as CONNECTORS

    mine = {setting.environment[0]: settings[setting.name].origin for setting in SETTINGS}
    lines = [f"{origin[4:]} is accepted; its name here is {name}" for name, origin in mine.items() if origin[4:] in given]
    known = {name for setting in (*SETTINGS, *CONNECTORS) for name in setting.environment}
    return lines + [
        f"{name} has no meaning here{': ' + INSTEAD[name] if name in INSTEAD else ''}" for name in given if name not in known
    ]


def run(options: Options) -> None:
    """Be the daemon with these options until told to stop. Raises what keeps it from starting."""
    import uvloop

    # A tier's threads run Python too, in between their I/O: the event loop gets its turn back within this, not within 5 ms.
    sys.setswitchinterval(TURN_S)
    gc.freeze()  # the modules are here for good: looking for garbage among them would stop everybody for 10 ms each time
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            runner.run(Daemon(options).run())
        except AdapterError as error:
            raise KvError(f"cannot open a tier: {error.message}", hint=error.hint) from None
    _leave()


def _leave() -> None:
    """End the process, also when a thread is inside a tier's call that never returns: it would be waited for, for ever."""
    end = time.monotonic() + 1.0
    threads = [thread for thread in threading.enumerate() if thread is not threading.main_thread() and not thread.daemon]
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    if stuck := [thread.name for thread in threads if thread.is_alive()]:
        logging.getLogger("kvd").warning("leaving threads behind that do not end: %s", ", ".join(stuck))
        logging.shutdown()
        os._exit(Exit.FAILED)


def preflight(paths: list[Path]) -> list[str]:
    """kvdoctor's reasons why these directories make a poor disk tier, one line each."""
    from kvdoctor.api import posix_reason

    reasons = [(path, posix_reason(str(path))) for path in paths]
    return [f"--long-path {path}: {reason}; see kvdoctor --path {path}" for path, reason in reasons if reason]


def _shown(value: Any, name: str) -> str:
    if name in ("max_bytes", "long_bytes"):
        return format_size(value)
    if name == "socket_mode":
        return f"{value:04o}"
    if isinstance(value, list):
        return " ".join(map(str, value)) or "-"
    return "-" if value is None else str(value)


def options_of(settings: Resolved) -> Options:
    """What the daemon needs. Raises UsageError for what cannot be meant."""
    value = {name: setting.value for name, setting in settings.items()}
    if value["max_bytes"] < MIN_ARENA:
        raise UsageError(f"--max-bytes of {value['max_bytes']} bytes is too small", hint="the least is 1MiB")
    if value["gds_l1_path"] is not None:
        _check_slab(value)
    elif value["max_bytes"] > (limit := memory_limit()):
        why = f"--max-bytes {format_size(value['max_bytes'])} is more than the {format_size(limit)} of memory there is"
        raise UsageError(why, hint="give a size that leaves room for everything else on this host")
    if settings["long_bytes"].origin != "default" and not value["long_path"]:
        raise UsageError("--long-bytes without --long-path", hint="say where the disk tier lies: --long-path DIR")
    if settings["metrics_host"].origin != "default" and value["metrics_port"] is None:
        raise UsageError("--metrics-host without --metrics-port", hint="say on which port: --metrics-port PORT")
    if settings["durability"].origin != "default" and not value["long_path"]:
        raise UsageError("--durability without --long-path", hint="say where the disk tier lies: --long-path DIR")
    adapters = _adapters(value)
    asking = policies.Asking(policies.store_policy(value["l2_store_policy"]), policies.prefetch_policy(value["l2_prefetch_policy"]))
    idle = [name for name in ("l2_store_policy", "l2_prefetch_policy", "promote") if value[name] not in ("default", False)]
    if idle and not adapters:
        raise UsageError(f"--{idle[0].replace('_', '-')} without a tier", hint="add --long-path or --l2-adapter")
    watermark, ratio = value["eviction_trigger_watermark"], value["eviction_ratio"]
    ahead = watermark is not None or ratio is not None
    if ahead and value["eviction_policy"] == "noop":
        log.warning("the eviction policy noop evicts nothing: watermark and ratio mean nothing with it")
    return Options(
        socket=Path(value["socket"] or default_socket()).absolute(),
        max_bytes=value["max_bytes"],
        adapters=adapters,
        socket_mode=value["socket_mode"],
        socket_group=value["socket_group"],
        allow_uids=_each("allow_uid", _uid, value["allow_uid"]),
        allow_gids=_each("allow_gid", _gid, value["allow_gid"]),
        huge_pages=value["hugepages"],
        mlock=value["mlock"],
        numa_node=value["numa_node"],
        gds_l1_path=value["gds_l1_path"],
        drain_s=value["drain_timeout"],
        promote=value["promote"],
        evicting=value["eviction_policy"] != "noop",
        scan_resistant=value["eviction_policy"] == "S3FIFO",
        watermark=(0.8 if watermark is None else watermark) if ahead and value["eviction_policy"] != "noop" else None,
        eviction_ratio=0.2 if ratio is None else ratio,
        policies=asking,
        prefetch_in_flight=value["l2_prefetch_max_in_flight"],
        metrics_host=value["metrics_host"],
        metrics_port=value["metrics_port"],
    )


def _check_slab(value: Mapping[str, Any]) -> None:
    """What does not go with an arena on a drive. Raises UsageError."""
    tiers = [f"adapter {spec.get('name') or spec.get('type')}" for spec in value["l2_adapter"]]
    if value["long_path"]:
        tiers.insert(0, "--long-path")
    if value["long_backend"]:
        tiers.append(f"--long-backend {value['long_backend']}")
    if tiers:
        raise UsageError(
            f"--gds-l1-path with {tiers[0]}: tiers take bytes from memory, and an arena on a drive has none to give",
            hint="leave the tiers out, or keep the arena in RAM",
        )
    given = [name for name in ("hugepages", "mlock", "numa_node") if value[name] not in (None, False)]
    if given:
        raise UsageError(f"--{given[0].replace('_', '-')} with --gds-l1-path: that is about memory", hint="leave it out")


def memory_limit() -> int:
    """Bytes of memory this process could have at most: the host's, or its cgroup's where that is less."""
    limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            limit = min(limit, int(text))
    return limit


def _adapters(value: Mapping[str, Any]) -> list[Adapter]:
    """The disk of --long-path first, then --long-backend, then what --l2-adapter names, in that order."""
    disks = _disks(value["long_path"], value["long_bytes"], Durability[value["durability"].upper()])
    backend = _long_backend(value["long_backend"], value["long_config"])
    return disks + registry.build([*backend, *value["l2_adapter"]], taken=[disk.name for disk in disks])


def _long_backend(word: str | None, path: Path | None) -> list[registry.Spec]:
    """The object that --long-backend and --long-config stand for. Raises UsageError."""
    if word is None and path is None:
        return []
    if word is None or path is None:
        have, lacks = ("--long-backend", "--long-config FILE") if word else ("--long-config", "--long-backend mooncake|lmcache")
        raise UsageError(f"{have} without {lacks}", hint="give both: which pool, and where it is")
    import yaml

    try:
        body = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {getattr(error, 'strerror', None) or 'not a text file'}") from None
    except (yaml.YAMLError, *YAML_SLIPS) as error:
        raise UsageError(f"{path} is no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(body, dict) or not all(isinstance(name, str) for name in body):
        raise UsageError(f"{path} holds no settings", hint="one `name: value` a line: the fields of the tier, as in ADAPTERS.md")
    kind = {"mooncake": "mooncake_store", "lmcache": "lmcache"}[word]
    if body.get("type", kind) != kind:
        raise UsageError(f"{path}: type {body['type']!r} is not that of --long-backend {word}", hint="leave it out")
    return [registry.Spec({**body, "type": kind})]


def _note_foreign(path: Path) -> None:
    """A tier's folder is removed as a whole by whoever removes the tier: say it when it holds something else."""
    try:
        names = {entry.name for entry in os.scandir(path)}
    except OSError:
        return  # missing is made; the adapter says what is wrong with anything else
    ours = any(name.endswith(".kvcache") or name in ("manifest.json", "owner.lock") for name in names)
    if names - {"lost+found"} and not ours:
        some = ", ".join(sorted(printable(name) for name in names)[:3])
        log.warning("%s holds other things (%s): they are left alone, but a disk tier wants a folder of its own", path, some)


def _room(path: Path, wanted: int) -> int:
    """Bytes the tier can really have there: what is free now and what it holds already. Says so when that is less."""
    home = next((folder for folder in (path, *path.absolute().parents) if folder.is_dir()), path)
    if not os.access(home, os.W_OK):
        return wanted  # what is wrong there is for the adapter to say
    try:
        state = os.statvfs(home)
        held = sum(entry.stat().st_blocks * 512 for entry in os.scandir(path)) if path.is_dir() else 0
    except OSError:
        return wanted
    # The adapter itself keeps a hundredth of the file system free; a little more is lost to rounding.
    free = max(0, state.f_bavail - state.f_blocks // 100) * state.f_frsize + held
    room = max(LEAST_TIER, free - free // 50)
    if room >= wanted:
        return wanted
    log.warning("%s has room for %s only: the disk tier there is that large, not %s", path, format_size(room), format_size(wanted))
    return room


def _disks(paths: list[Path], size: int, durability: Durability) -> list[Adapter]:
    if not paths:
        return []
    from kvd.tiers.adapters.disk import DiskAdapter

    if len({path.absolute() for path in paths}) < len(paths):
        raise UsageError("one --long-path is given twice", hint="each directory holds its own share")
    from kvd.tiers.adapters.stripe import Stripe

    for path in paths:
        _note_foreign(path)
    share = min(size // len(paths), *(_room(path, size // len(paths)) for path in paths))
    names = ["disk"] if len(paths) == 1 else [f"disk{i}" for i in range(len(paths))]
    try:
        made = [
            DiskAdapter(name, path.absolute(), share, durability=durability, alone=len(paths) == 1)
            for name, path in zip(names, paths, strict=True)
        ]
    except AdapterConfigError as error:
        each = "" if len(paths) == 1 else f" (divided by {len(paths)} directories)"
        raise UsageError(f"--long-bytes {format_size(size)}{each}: {error.message}", hint=error.hint) from None
    return list(made) if len(made) == 1 else [Stripe("disk", made)]
