"""models.yaml: what is served, where, and under which rules.

    models:                              # engines that run already, nested or flattened
      meta-llama/Llama-3.2-1B: {endpoint: {host: localhost, port: 12346}}
      tiny: {host: localhost, port: 12347}
    instances:                           # engines that kvgate starts
      - {name: qwen, model: Qwen/Qwen3-0.6B, engine: vllm, engine_args: ["--port 12348", "--enable-sleep-mode"]}
    router: {router_port: 8080, max_concurrency: 256}
    sleep_manager: {idle_threshold_seconds: 300, auto_sleep_enabled: true, min_sleep_duration: 60}

Without `models`, flattened models may stand at the top of the file. A model's own `sleep` and `limits` win over `sleep_manager` and
`router`. Unknown keys are errors; so are two models of one name, and two on one endpoint. Everything here is immutable:
a reload makes a new `GateConfig` and the router compares the two.
"""

import ipaddress
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvgate import sections
from kvgate.errors import ConfigError
from kvgate.sections import Read, Section, did_you_mean, load_yaml, seconds, size, text, texts, whole, yes_no
from kvtools.config import is_literal, read_secret
from kvtools.output import note, printable
from kvtools.units import format_size

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8080
_ENDPOINT_KEYS = frozenset({"host", "port", "endpoint"})
_HOST = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,252}[A-Za-z0-9_.])?")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s*]+")
_count = whole(1, 1_000_000)
_port = whole(1, 65535)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where one engine listens."""

    host: str
    port: int
    scheme: str = "http"

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Limits:
    """How much of one model is asked for at once, and how long each phase of a request may last (seconds)."""

    max_concurrency: int = 256
    max_queue: int = 1024
    queue_timeout_s: float = 120.0
    """From the request's arrival to the moment it is sent: waiting for a place, for a wake-up, for a start."""
    connect_timeout_s: float = 5.0
    first_byte_timeout_s: float = 600.0
    """From sending to the engine's status line; a long answer without streaming is all of this."""
    idle_timeout_s: float = 600.0
    """The longest silence inside an answer. There is no limit on an answer's whole length."""
    connect_tries: int = 3


@dataclass(frozen=True, slots=True)
class SleepPolicy:
    """When a model sleeps and wakes. Names and defaults are the contract's SleepConfig, times in seconds."""

    idle_threshold_s: float = 300.0
    check_interval_s: float = 60.0
    auto_sleep: bool = True
    wake_on_request: bool = True
    min_sleep_s: float = 60.0
    level: int = 1
    """vLLM's: 1 moves weights to host RAM, 2 drops them (wake reloads them)."""
    mode: str = ""
    wake_tries: int = 3
    wake_timeout_s: float = 120.0
    sleep_timeout_s: float = 60.0
    drain_timeout_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Instance:
    """An engine that kvgate starts and stops."""

    name: str
    model: str
    args: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    venv: str = ""
    command: tuple[str, ...] = ()
    """argv that stands before the arguments, instead of the venv's Python running vLLM's server."""
    launcher: str = "subprocess"
    ready_timeout_s: float = 900.0
    restart: bool = True
    segment: str = ""
    kvd_socket: str = ""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One model that clients may name."""

    name: str
    endpoint: Endpoint
    limits: Limits = field(default_factory=Limits)
    sleep: SleepPolicy = field(default_factory=SleepPolicy)
    api_key: str = field(default="", repr=False)
    """Sent to the engine as its bearer token, in place of the client's."""
    devices: tuple[int, ...] = ()
    segment: str = ""
    weights_bytes: int = 0
    """Device memory (on each of `devices`) that the awake engine holds besides its KV pool."""
    kv_bytes: int = 0
    """KV memory that must be free for a wake-up; the pool grows from there."""
    weight: float = 1.0
    """This model's part of the KV memory that the awake models of a device share."""
    kvd_socket: str = ""
    """The daemon that keeps this model's KV cache: prewarm asks it directly, and an engine we start gets its connector."""
    instance: Instance | None = None


@dataclass(frozen=True, slots=True)
class GateConfig:
    """The whole file."""

    path: Path
    models: dict[str, ModelConfig]
    host: str = DEFAULT_HOST
    port: int = DEFAULT_PORT
    limits: Limits = field(default_factory=Limits)
    sleep: SleepPolicy = field(default_factory=SleepPolicy)
    max_body_bytes: int = 32 << 20
    max_connections: int = 10_000
    body_timeout_s: float = 60.0
    health_interval_s: float = 5.0
    health_failures: int = 3
    shutdown_timeout_s: float = 10.0
    api_keys: Path | None = None
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    launch_delay_s: float = 0.0
    log_dir: Path | None = None
    report: tuple[Read, ...] = field(default=(), repr=False, compare=False)
    devices: dict[int, int] = field(default_factory=dict)
    """Device index -> bytes that all awake models together may hold there."""


def load(path: Path) -> GateConfig:
    """The configuration in `path`. Raises ConfigError, naming the place, for anything that cannot be meant."""
    top = Section(load_yaml(path), printable(str(path)))
    router = _router(top.sub("router"))
    sleep = _sleep(top.sub("sleep_manager"), SleepPolicy())
    shared_env = _kvcached(top.sub("kvcached"))
    base = GateConfig(
        path=path,
        models={},
        sleep=sleep,
        launch_delay_s=top.take("launch_delay_seconds", seconds, 0.0),
        log_dir=top.take("log_dir", lambda v: Path(text(v)).expanduser(), None),
        devices=top.take("devices", _devices, {}),
        **router,
    )
    models = [_model(name, section, base) for name, section in _model_sections(top)]
    models += [_instance(section, base, shared_env) for section in _instance_sections(top)]
    top.finish()
    if not models:
        raise ConfigError(f"{top.file}: no models", hint="give `models:` with an endpoint each, or `instances:` to start")
    _check_room(models, base.devices, top.file)
    return replace(base, models=_by_name(models, top.file), report=tuple(top.report))


def _router(section: Section) -> dict[str, Any]:
    if not section.take("enable_router", yes_no, True):
        raise section.error("enable_router", "kvgate is the router: it cannot be switched off", hint="remove the key")
    found: dict[str, Any] = {
        "host": section.take("host", host_name, DEFAULT_HOST, "router_host"),
        "port": section.take("port", whole(0, 65535), DEFAULT_PORT, "router_port"),
        "max_body_bytes": section.take("max_body_bytes", size, 32 << 20, "max_body_size"),
        "max_connections": section.take("max_connections", _count, 10_000),
        "body_timeout_s": section.take("body_timeout_seconds", seconds, 60.0),
        "health_interval_s": section.take("health_interval_seconds", _positive, 5.0),
        "health_failures": section.take("health_failures", whole(1, 100), 3),
        "shutdown_timeout_s": section.take("shutdown_timeout_seconds", seconds, 10.0),
        "api_keys": section.take("api_keys", lambda v: Path(text(v)).expanduser(), None),
        "allowed_hosts": section.take("allowed_hosts", _hosts, ()),
        "allowed_origins": section.take("allowed_origins", _origins, ()),
        "limits": _limits(section, Limits()),
    }
    section.finish()
    return found


def host_name(value: Any) -> str:
    """A host name or an IP address, without brackets. Raises ConfigError."""
    given = text(value)
    bare = given[1:-1] if given.startswith("[") and given.endswith("]") else given
    if _HOST.fullmatch(bare):
        return bare
    try:
        ipaddress.IPv6Address(bare)
    except ValueError:
        hint = "a host and nothing else: no http://, no port, no path"
        raise ConfigError(f"not a host name or an address: {given!r}", hint=hint) from None
    return bare


def _hosts(value: Any) -> tuple[str, ...]:
    return tuple(host_name(item) for item in texts(value))


def _origins(value: Any) -> tuple[str, ...]:
    """Origins as browsers send them: scheme, host and port, in lower case."""
    found = tuple(item.lower() for item in texts(value))
    for origin in found:
        if not _ORIGIN.fullmatch(origin):
            raise ConfigError(f"not an origin: {origin!r}", hint="write scheme and host, such as https://ui.example, and no path")
    return found


def _positive(value: Any) -> float:
    if not (number := seconds(value)) > 0:
        raise ConfigError("expected more than 0 seconds")
    return number


def _limits(section: Section, base: Limits) -> Limits:
    return Limits(
        max_concurrency=section.take("max_concurrency", _count, base.max_concurrency),
        max_queue=section.take("max_queue", whole(0, 1_000_000), base.max_queue),
        queue_timeout_s=section.take("queue_timeout_seconds", seconds, base.queue_timeout_s),
        connect_timeout_s=section.take("connect_timeout_seconds", _positive, base.connect_timeout_s),
        first_byte_timeout_s=section.take("first_byte_timeout_seconds", _positive, base.first_byte_timeout_s, "request_timeout"),
        idle_timeout_s=section.take("idle_timeout_seconds", _positive, base.idle_timeout_s),
        connect_tries=section.take("connect_tries", whole(1, 10), base.connect_tries),
    )


def _sleep(section: Section, base: SleepPolicy) -> SleepPolicy:
    policy = SleepPolicy(
        idle_threshold_s=section.take("idle_threshold_seconds", seconds, base.idle_threshold_s),
        check_interval_s=section.take("check_interval_seconds", _positive, base.check_interval_s),
        auto_sleep=section.take("auto_sleep_enabled", yes_no, base.auto_sleep),
        wake_on_request=section.take("wakeup_on_request", yes_no, base.wake_on_request),
        min_sleep_s=section.take("min_sleep_duration", seconds, base.min_sleep_s, "min_sleep_duration_seconds"),
        level=section.take("level", whole(1, 2), base.level),
        mode=section.take("mode", text, base.mode),
        wake_tries=section.take("wake_tries", whole(1, 20), base.wake_tries),
        wake_timeout_s=section.take("wake_timeout_seconds", _positive, base.wake_timeout_s),
        sleep_timeout_s=section.take("sleep_timeout_seconds", _positive, base.sleep_timeout_s),
        drain_timeout_s=section.take("drain_timeout_seconds", seconds, base.drain_timeout_s),
    )
    section.finish()
    return policy


def _kvcached(section: Section) -> tuple[tuple[str, str], ...]:
    """Variables of the elastic pool for every instance: the peer writes them lower-case and exports them upper-case."""
    found = []
    for key in section.rest():
        if not key.lower().startswith(("kvcached_", "kvtools_")) and key.lower() != "enable_kvcached":
            raise section.error(key, "unknown key", hint="variables here start with kvcached_ or kvtools_")
        found.append((key.upper(), section.take(key, _scalar, "")))
    return tuple(found)


def _elastic(section: Section) -> tuple[tuple[str, str], ...]:
    """One engine's elastic pool: the settings of kvtools.elastic by their names, as the variables that it reads."""
    from kvtools.elastic.settings import SETTINGS, read_settings
    from kvtools.errors import UsageError

    names = {setting.name.removesuffix("_s"): setting.environment[0] for setting in SETTINGS if setting.name != "segment"}
    found = [(variable, value) for name, variable in names.items() if (value := section.take(name, _scalar, ""))]
    section.finish()
    try:
        read_settings(dict(found))
    except UsageError as error:
        raise section.error("", error.message, hint=error.hint) from None
    return tuple(found)


def _scalar(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value)
    return text(value)


def _devices(value: Any) -> dict[int, int]:
    if not isinstance(value, dict):
        raise ConfigError("expected device indices with a size each", hint="write {0: 80GiB}")
    found = {}
    for key, given in value.items():
        if isinstance(key, bool) or not str(key).isascii() or not str(key).isdecimal():
            raise ConfigError(f"not a device index: {key!r}", hint="write {0: 80GiB}")
        found[int(key)] = size(given)
    return found


def _model_sections(top: Section) -> list[tuple[str, Section]]:
    """Every model: those of `models`, flattened or nested; where there is no `models`, those at the top of the file."""
    if "models" in top.values:
        nested = top.sub("models")
        return [(_name(name, nested), nested.sub(name)) for name in nested.rest()]
    found: list[tuple[str, Section]] = []
    for name in top.rest():
        value = top.values[name]
        if name != "instances" and isinstance(value, dict) and _ENDPOINT_KEYS & value.keys():
            found.append((_name(name, top), top.sub(name)))
    return found


def _name(name: str, section: Section) -> str:
    """A model's name: what clients write, and what stands in logs and tables. Raises ConfigError."""
    if name.strip() != name or not name or not name.isprintable():
        raise section.error("", f"not a model's name: {printable(name)!r}", hint="one line of text, no blanks around it")
    return name


def _model(name: str, section: Section, base: GateConfig) -> ModelConfig:
    where = section
    if section.has("endpoint"):
        where = section.sub("endpoint")
        for key in ("host", "port"):
            if section.has(key):
                raise section.error(key, "stands beside `endpoint`", hint="write it inside `endpoint`, or leave `endpoint` out")
    endpoint = Endpoint(
        host=where.take("host", host_name, "localhost"),
        port=where.need("port", _port),
        scheme=where.take("scheme", _one_of("http", "https"), "http"),
    )
    if where is not section:
        where.finish()
    config = _settings(section, ModelConfig(name=name, endpoint=endpoint), base)
    section.finish()
    return config


def _settings(section: Section, config: ModelConfig, base: GateConfig) -> ModelConfig:
    """`config` with what a model and an instance may both say."""
    limits = section.sub("limits")
    merged = _limits(limits, base.limits)
    limits.finish()
    return replace(
        config,
        limits=merged,
        sleep=_sleep(section.sub("sleep"), base.sleep),
        api_key=section.take("api_key", lambda v: _secret(section, text(v)), ""),
        devices=section.take("devices", _indices, ()),
        segment=section.take("segment", _segment, config.segment),
        weights_bytes=section.take("weights_bytes", size, 0),
        kv_bytes=section.take("kv_bytes", size, 0),
        weight=section.take("weight", _weight, 1.0),
        kvd_socket=section.take("kvd_socket", text, ""),
    )


def _secret(section: Section, given: str) -> str:
    if is_literal(given):
        note(f"{section.file}: {printable(section.path)}.api_key is written out: env:NAME or file:PATH keeps it out of this file")
    return read_secret(given)


def _weight(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1000:
        raise ConfigError(f"expected a number above 0 and up to 1000, found {value!r}")
    return float(value)


def _indices(value: Any) -> tuple[int, ...]:
    values = [value] if isinstance(value, int) else value
    if not isinstance(values, list):
        raise ConfigError("expected a device index or a list of them")
    return tuple(sorted({whole(0, 4095)(item) for item in values}))


def _segment(value: Any) -> str:
    name = text(value)
    if "/" in name or name in {".", ".."} or len(name) > 64:
        raise ConfigError(f"not a segment name: {name!r}", hint="at most 64 characters, none of them a slash")
    return name


def _one_of(*words: str) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        word = text(value)
        if word not in words:
            raise ConfigError(f"unknown word {word!r}", hint=did_you_mean(word, words))
        return word

    return parse


def _instance_sections(top: Section) -> list[Section]:
    listed = top.take("instances", _list, [])
    return [Section(value, top.file, f"instances[{i}]", top.report) for i, value in enumerate(listed)]


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ConfigError("expected a list", hint="start each item with a dash")
    return value


def _instance(section: Section, base: GateConfig, shared: tuple[tuple[str, str], ...]) -> ModelConfig:
    model = section.need("model", text)
    name = section.take("name", text, model.rstrip("/").rpartition("/")[2])
    engine = section.need("engine", text)
    if engine != "vllm":
        raise section.error("engine", f"{engine!r} is not supported", hint="kvgate starts vllm; name other engines under `models:`")
    args = section.take("engine_args", _arguments, (), "args")
    using_venv = section.take("using_venv", yes_no, section.has("venv_path"))
    venv = section.take("venv_path", text, "")
    if using_venv and not venv:
        raise section.error("", "using_venv needs venv_path")
    environment = (*shared, *section.take("kvcached_env", _assignments, ()), *section.take("engine_env", _assignments, ()))
    port = section.take("port", _port, None)
    instance = Instance(
        name=name,
        model=model,
        args=args,
        environment=environment,
        venv=venv if using_venv else "",
        command=section.take("command", texts, ()),
        launcher=section.take("launcher", _one_of("subprocess", "tmux"), "subprocess"),
        ready_timeout_s=section.take("ready_timeout_seconds", _positive, 900.0),
        restart=section.take("restart", yes_no, True),
    )
    named = _port_argument(args, section)
    if named is None and port is None:
        raise section.error("", "no port", hint="give `port: N`, or `--port N` in engine_args")
    if named is not None and port is not None and named != port:
        raise section.error("port", f"differs from --port {named} in engine_args")
    if named is None:
        instance = replace(instance, args=(*args, "--port", str(port)))
    config = ModelConfig(
        name=model, endpoint=Endpoint("127.0.0.1", named or port or 0), segment=dict(environment).get("KVCACHED_IPC_NAME", "")
    )
    config = _settings(section, config, base)
    variables = _elastic(section.sub("elastic"))
    if variables and not config.segment:
        raise section.error("elastic", "needs a `segment`", hint="name the pool: segment: VLLM_MODEL_1")
    instance = replace(instance, environment=(*variables, *environment))
    section.finish()
    return replace(config, instance=replace(instance, segment=config.segment, kvd_socket=config.kvd_socket))


def _arguments(value: Any) -> tuple[str, ...]:
    """Engine arguments: one string, or a list of strings, each split as a shell would."""
    try:
        return tuple(word for line in sections.texts(value) for word in shlex.split(line))
    except ValueError as error:
        raise ConfigError(f"cannot split the arguments: {error}") from None


def _assignments(value: Any) -> tuple[tuple[str, str], ...]:
    found = []
    for item in texts(value):
        name, sign, worth = item.partition("=")
        if not sign or not name.isidentifier():
            raise ConfigError(f"not an assignment: {item!r}", hint="write NAME=VALUE")
        found.append((name, worth))
    return tuple(found)


def _port_argument(args: tuple[str, ...], section: Section) -> int | None:
    for i, word in enumerate(args):
        flag, sign, value = word.partition("=")
        if flag == "--port":
            value = value if sign else (args[i + 1] if i + 1 < len(args) else "")
            if not value.isascii() or not value.isdecimal():
                raise section.error("engine_args", f"--port {value!r} is not a port")
            return _port(int(value))
    return None


def _by_name(models: list[ModelConfig], file: str) -> dict[str, ModelConfig]:
    named: dict[str, ModelConfig] = {}
    places: dict[str, str] = {}
    segments: dict[str, str] = {}
    short: dict[str, str] = {}
    for config in models:
        if config.instance is not None:
            # Log files and tmux sessions are named so, and clients may be: one engine each.
            other = short.setdefault(plain(config.instance.name), config.name)
            if other != config.name:
                raise ConfigError(
                    f"{file}: {other!r} and {config.name!r} both have the name {config.instance.name!r}", hint=_OWN_NAME
                )
        if config.instance is not None and config.segment and segments.setdefault(config.segment, config.name) != config.name:
            other = segments[config.segment]
            raise ConfigError(f"{file}: {other!r} and {config.name!r} share the segment {config.segment}", hint="give each its own")
        if config.name in named:
            raise ConfigError(
                f"{file}: two models are named {config.name!r}", hint="one endpoint a model; replicas belong to a proxy"
            )
        where = config.endpoint.url.replace("//localhost:", "//127.0.0.1:")
        if where in places:
            raise ConfigError(f"{file}: {places[where]!r} and {config.name!r} share the endpoint {config.endpoint.url}")
        named[config.name], places[where] = config, config.name
    for config in models:
        if config.instance is not None and named.get(config.instance.name, config) is not config:
            other = config.instance.name
            raise ConfigError(f"{file}: the name of {config.name!r} is that of the model {other!r}", hint=_OWN_NAME)
    return named


_OWN_NAME = "give the instance a `name` of its own"


def plain(name: str) -> str:
    """What is left of an instance's name where only some characters may stand."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", name)


def _check_room(models: list[ModelConfig], devices: dict[int, int], file: str) -> None:
    """Raises ConfigError for a model that no sleep of others can make room for."""
    for config in models:
        for device in config.devices:
            need = config.weights_bytes + config.kv_bytes
            if need > devices.get(device, need):
                room = format_size(devices[device])
                raise ConfigError(
                    f"{file}: {config.name!r} needs {format_size(need)} of device {device}, which has {room}",
                    hint="lower its weights_bytes or kv_bytes, or raise the device's size",
                )
