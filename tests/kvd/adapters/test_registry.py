"""`--l2-adapter`: what is accepted, what ends the start, and the line it ends with."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvd.service.settings import SETTINGS, options_of, read_file
from kvd.tiers.adapters import registry
from kvd.tiers.adapters.base import Adapter, AdapterConfigError
from kvd.tiers.adapters.kind import EVICTION, Eviction, Kind, gib, number, read_eviction, seconds, size, switch, whole
from kvtools.config import resolve
from kvtools.errors import UsageError
from tests.kvd.tiers.ram_tier import RamTier
from tests.support.generated import ADAPTER_BLOCKS, ADAPTERS, block
from tests.support.processes import run_cli, run_python


class Mine(RamTier):
    """What a user's own class looks like to `plugin`."""

    def __init__(self, name: str, colour: str = "red") -> None:
        super().__init__(name)
        self.colour = colour


def disk(tmp_path: Path, **more: Any) -> dict[str, Any]:
    return {"type": "disk", "path": str(tmp_path), "max_bytes": "64MiB", **more}


@pytest.mark.parametrize("name", list(registry.TYPES))
def test_every_type_has_a_kind_of_that_name(name: str) -> None:
    kind = registry.kind(name)
    assert kind.type == name
    assert kind.about
    assert all(field.help for field in kind.fields)
    assert len({field.name for field in kind.fields}) == len(kind.fields)
    assert not {field.name for field in kind.fields} & {"type", "name", "eviction"}
    assert all(registry.SECRET.search(field.name) for field in kind.fields if field.secret), "else it is shown"
    assert bool(kind.library) == bool(kind.extra)


@pytest.mark.parametrize("name", list(ADAPTER_BLOCKS))
def test_the_documentation_is_up_to_date(name: str) -> None:
    assert block(ADAPTERS.read_text(), name) == ADAPTER_BLOCKS[name](), "python -m tests.support.generated --write"


def test_adapters_come_in_the_given_order_with_names_of_their_own(tmp_path: Path) -> None:
    built = registry.build([disk(tmp_path / "a"), disk(tmp_path / "b", name="far"), disk(tmp_path / "c")], taken=["disk"])
    assert [adapter.name for adapter in built] == ["disk2", "far", "disk3"]


@pytest.mark.parametrize(
    ("spec", "line"),
    [
        ({}, "--l2-adapter 1: field 'type' is missing"),
        ({"type": "dsk"}, "--l2-adapter 1: unknown type 'dsk'"),
        ({"type": ["disk"]}, "--l2-adapter 1: unknown type ['disk']"),
        ({"type": "disk"}, "adapter disk (disk): field 'path' is missing"),
        ({"type": "disk", "path": ""}, "adapter disk (disk): field 'path': not a path: ''"),
        ({"type": "disk", "path": "/x\ud800"}, "adapter disk (disk): field 'path': not a path: '/x\\ud800'"),
        ({"type": "disk", "path": "~nobody-of-that-name/x"}, "adapter disk (disk): field 'path': not a path: '~nobody"),
        ({"type": "disk", "path": "/x", "name": "arena"}, "--l2-adapter 1: the name 'arena' is that of the RAM"),
        ({"type": "disk", "path": "/x", "max_byte": 1}, "adapter disk (disk): unknown field 'max_byte'"),
        ({"type": "disk", "path": "/x", "max_bytes": 5}, "adapter disk (disk): field 'max_bytes': 5 is too small"),
        ({"type": "disk", "path": "/x", "max_bytes": True}, "adapter disk (disk): field 'max_bytes': not a size: True"),
        ({"type": "disk", "path": "/x", "durability": "much"}, "adapter disk (disk): field 'durability': not one of"),
        ({"type": "disk", "path": "/x", "name": "a b"}, "--l2-adapter 1: not a name: 'a b'"),
        ({"type": "disk", "path": "/x", "eviction": {"eviction_policy": "LRU"}}, "adapter disk (disk): field 'eviction'"),
        ({"type": "plugin", "module_path": "no.such", "class_name": "X"}, "adapter plugin (plugin): cannot import no.such"),
        ({"type": "plugin", "module_path": "../x", "class_name": "X"}, "adapter plugin (plugin): cannot import '../x': TypeError"),
        ({"type": "plugin", "module_path": "json", "class_name": "X"}, "adapter plugin (plugin): json has no X"),
        ({"type": "resp", "host": "kv.example:6379"}, "adapter resp (resp): field 'host': not a host: 'kv.example:6379'"),
        ({"type": "resp", "host": "a\ud800"}, "adapter resp (resp): field 'host': not a text"),
        ({"type": "resp", "host": "a", "tls_ca": "/no/such"}, "adapter resp (resp): field 'tls_ca' without tls"),
        (
            {"type": "resp", "host": "a", "tls": True, "tls_ca": "/no/such"},
            "adapter resp (resp): field 'tls_ca': /no/such: No such",
        ),
        (
            {"type": "resp", "host": "a", "tls": True, "tls_ca": __file__},
            f"adapter resp (resp): field 'tls_ca': {__file__}: no",
        ),
        ({"type": "s3", "bucket": "kv"}, "adapter s3 (s3): field 'bucket': not a bucket's name: 'kv'"),
        ({"type": "s3", "bucket": "abc", "prefix": "p" * 892}, "adapter s3 (s3): field 'prefix': a prefix of 892 bytes"),
        ({"type": "s3", "bucket": "cache/kv"}, "adapter s3 (s3): field 'bucket': not a bucket's name: 'cache/kv'"),
        ({"type": "s3", "bucket": "abc", "s3_endpoint": "ftp://a"}, "adapter s3 (s3): field 's3_endpoint': not a URL of a server"),
        (
            {"type": "s3", "bucket": "abc", "aws_access_key_id": "k"},
            "adapter s3 (s3): field 'aws_secret_access_key' is missing",
        ),
        ({"type": "lmcache", "remote_url": "lm://a:²"}, "adapter lmcache (lmcache): field 'remote_url': not lm://HOST:PORT"),
        (
            {"type": "mooncake_store", "master_server_address": "a:²", "local_hostname": "a"},
            "adapter mooncake_store (mooncake_store): field 'master_server_address': not host:port",
        ),
        (
            {"type": "fault_inject", "inner": {"type": "fault_inject"}},
            "adapter fault_inject (fault_inject): field 'inner': adapter fault_inject (fault_inject): field 'inner' is missing",
        ),
        ({"type": "plugin", "module_path": "json", "class_name": "JSONDecoder"}, "adapter plugin (plugin): JSONDecoder is no"),
    ],
)
def test_what_cannot_be_meant_is_named(spec: dict[str, Any], line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY", raising=False)
    with pytest.raises(AdapterConfigError) as caught:
        registry.build([spec])
    assert caught.value.message.startswith(line)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("name", [name for name in registry.TYPES if registry.kind(name).capabilities.evict and name != "disk"])
def test_the_eviction_policies_of_a_type_are_those_of_the_table(name: str, tmp_path: Path) -> None:
    """The same names as the arena's; what cannot be done without an index is refused, and says what can."""
    kind = registry.kind(name)
    for policy in ("LRU", "S3FIFO", "noop"):
        if policy in kind.policies:
            assert read_eviction(kind, name, {"eviction_policy": policy}).policy == policy
        else:
            with pytest.raises(AdapterConfigError, match=f"{name} keeps no index to do {policy} with") as caught:
                read_eviction(kind, name, {"eviction_policy": policy})
            assert caught.value.hint == "one of LRU, noop"


def test_a_slip_of_the_pen_gets_the_word_that_was_meant() -> None:
    with pytest.raises(AdapterConfigError) as caught:
        registry.build([{"type": "disk", "path": "/x", "max_byte": 1}])
    assert caught.value.hint == "did you mean 'max_bytes'?"


def test_a_name_that_is_taken(tmp_path: Path) -> None:
    with pytest.raises(AdapterConfigError, match="the name 'one' is taken"):
        registry.build([disk(tmp_path / "a", name="one"), disk(tmp_path / "b", name="one")])


def test_the_same_tier_twice_is_a_slip(tmp_path: Path) -> None:
    with pytest.raises(
        AdapterConfigError, match="--l2-adapter 3: adapter far is disk once more: every value would be stored there"
    ):
        registry.build([disk(tmp_path / "a"), disk(tmp_path / "b"), disk(tmp_path / "a", name="far")])
    mock = {"type": "mock", "max_size_gb": 1, "mock_bandwidth_gb": 1}
    assert [adapter.name for adapter in registry.build([mock, mock])] == ["mock", "mock2"]


def test_a_class_of_the_users() -> None:
    spec = {"type": "plugin", "module_path": __name__, "class_name": "Mine", "adapter_params": {"colour": "blue"}}
    import sys

    sys.modules.setdefault(__name__, sys.modules[Mine.__module__])
    (made,) = registry.build([spec])
    assert made.colour == "blue"  # type: ignore[attr-defined]
    with pytest.raises(AdapterConfigError, match="does not take adapter_params"):
        registry.build([{**spec, "adapter_params": {"color": "blue"}}])


class Fails:
    """A module of the user's that fails when it is imported, or whose class fails when it is made."""

    def __init__(self, folder: Path) -> None:
        (folder / "fails_on_import.py").write_text("raise SystemExit('not\\nfor import')\n")
        (folder / "fails_when_made.py").write_text(
            "from kvd.tiers.adapters.mock import MockAdapter\n"
            "class Mine(MockAdapter):\n"
            "    def __init__(self, name):\n"
            "        raise LookupError('no\\nluck')\n"
        )


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("fails_on_import", "adapter plugin (plugin): cannot import 'fails_on_import': SystemExit: not for import"),
        ("fails_when_made", "adapter plugin (plugin): Mine cannot be made: LookupError: no luck"),
    ],
)
def test_whatever_a_users_class_raises_is_a_line(module: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Fails(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UsageError) as caught:
        registry.build([{"type": "plugin", "module_path": module, "class_name": "Mine"}])
    assert caught.value.message == line


def test_a_library_that_is_not_there_names_the_extra() -> None:
    kind = Kind("odd", "nothing", "kvd.tiers.adapters.base:Adapter", _never, library="kvtools_no_such_library", extra="odd")
    with pytest.raises(AdapterConfigError, match="needs the Python package kvtools_no_such_library") as caught:
        registry.make(kind, "odd", {"type": "odd"})
    assert caught.value.hint == "pip install 'kvtools[odd]'"


def _never(name: str, values: dict[str, Any]) -> Adapter:
    raise AssertionError


@pytest.mark.parametrize(
    ("parse", "good", "bad"),
    [
        (size(4096), [("4KiB", 4096), (8192, 8192), ("10GiB", 10 << 30)], ["1", -1, 1.5, None, True, [], "5 Q"]),
        (number(0, 1), [("0.5", 0.5), (1, 1.0)], [2, -0.1, "x", True, None, float("nan"), float("inf"), []]),
        (whole(1, 8), [("4", 4), (8, 8), (2.0, 2)], [0, 9, 1.5, "x", False]),
        (switch, [("true", True), ("False", False), (True, True)], [1, "yes", None]),
        (seconds(0.001, 60), [("500ms", 0.5), (2, 2.0), ("1s", 1.0)], [0, 61, "x", True]),
        (gib(), [("10", 10 << 30), (0.5, 1 << 29), (0, 0)], [-1, "x"]),
    ],
)
def test_values(parse: Any, good: list[tuple[Any, Any]], bad: list[Any]) -> None:
    for given, meant in good:
        assert parse(given) == meant
    for given in bad:
        with pytest.raises(UsageError):
            parse(given)


def test_eviction_drops_what_must_go_and_a_share_when_told() -> None:
    assert Eviction().excess(90, 10, 100) == 0
    assert Eviction().excess(90, 20, 100) == 10
    assert Eviction("LRU", 0.8, 0.2).excess(50, 30, 100) == 0
    assert Eviction("LRU", 0.8, 0.2).excess(80, 1, 100) == 16
    assert Eviction("LRU", 0.8, 0.0).excess(95, 10, 100) == 5
    assert Eviction("noop").excess(99, 50, 100) == 0
    assert Eviction().excess(99, 50, 0) == 0
    assert {field.name for field in EVICTION} == {"eviction_policy", "trigger_watermark", "eviction_ratio"}


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("{", "--l2-adapter is no JSON"),
        ("[]", "--l2-adapter is not a JSON object"),
        ("3", "--l2-adapter is not a JSON object"),
        ('{"type": "disk", "type": "fs"}', "--l2-adapter is no JSON: field 'type' is given twice"),
        ("@/no/such/file", "--l2-adapter @/no/such/file: No such file or directory"),
        ("@/dev/null", "--l2-adapter @/dev/null is no JSON: Expecting value"),
        ('{"type": ' + "[" * 100_000, "--l2-adapter is no JSON: too many brackets"),
        ('{"max_bytes": ' + "1" * 5000 + "}", "--l2-adapter is no JSON: Exceeds the limit"),
    ],
)
def test_what_is_no_specification(given: str, line: str) -> None:
    with pytest.raises(UsageError) as caught:
        registry.parse_spec(given)
    assert caught.value.message.startswith(line)


def test_a_date_of_toml_is_shown_and_then_refused(tmp_path: Path) -> None:
    config = tmp_path / "kvd.toml"
    config.write_text('[[l2_adapter]]\ntype = "fs"\nbase_path = 2026-01-02\n')
    shown = run_cli("kvd", "serve", "--config", config, "--show-config")
    assert (shown.rc, shown.stderr) == (0, "")
    assert '{"type": "fs", "base_path": "2026-01-02"}' in shown.stdout
    ran = run_cli("kvd", "serve", "--config", config)
    assert ran.rc == 2
    assert ran.stderr.startswith("kvd: error: adapter fs (fs): field 'base_path': not a path: datetime.date(2026, 1, 2)")


def test_environment_file_and_flag_say_the_same(tmp_path: Path) -> None:
    one, two = disk(tmp_path / "a"), disk(tmp_path / "b")
    listing = tmp_path / "kvd.toml"
    listing.write_text(f"[[l2_adapter]]\ntype = 'disk'\npath = '{tmp_path}/a'\nmax_bytes = '64MiB'\n")
    nested = tmp_path / "texts.toml"
    nested.write_text(f"l2_adapter = ['{json.dumps(one)}']\n")
    spec_file = tmp_path / "one.json"
    spec_file.write_text(json.dumps(one))
    assert registry.parse_spec(f"@{spec_file}") == one
    assert registry.parse_specs(json.dumps([one, two])) == [one, two]
    for file in (listing, nested):
        settings = resolve(SETTINGS, flags={}, file=read_file(file), environ={})
        assert [adapter.name for adapter in options_of(settings).adapters] == ["disk"]
    settings = resolve(SETTINGS, flags={"long_path": [tmp_path / "c"]}, environ={"KVD_L2_ADAPTER": json.dumps([one, two])})
    assert [adapter.name for adapter in options_of(settings).adapters] == ["disk", "disk2", "disk3"]
    listing.write_text("l2_adapter = 3\n")
    with pytest.raises(UsageError, match="is no list of adapters"):
        read_file(listing)


def test_a_long_backend_is_the_tier_of_that_name(tmp_path: Path) -> None:
    pool, cache = tmp_path / "pool.json", tmp_path / "cache.yaml"
    pool.write_text(
        '{"local_hostname": "a", "metadata_server": "P2PHANDSHAKE", "master_server_address": "m:50051", "protocol": "TCP"}'
    )
    cache.write_text("# the cache\nremote_url: lm://kv.example:65432\n")

    def adapters(**flags: Any) -> list[str]:
        flags = {"long_path": [tmp_path / "disk"], "l2_adapter": [disk(tmp_path / "b")], **flags}
        return [adapter.type for adapter in options_of(resolve(SETTINGS, flags=flags, environ={})).adapters]

    assert adapters(long_backend="mooncake", long_config=pool) == ["disk", "mooncake_store", "disk"]
    assert adapters(long_backend="lmcache", long_config=cache) == ["disk", "lmcache", "disk"]
    for flags, line in (
        ({"long_backend": "mooncake"}, "--long-backend without --long-config FILE"),
        ({"long_config": pool}, "--long-config without --long-backend mooncake|lmcache"),
        ({"long_backend": "lmcache", "long_config": pool}, "adapter lmcache (lmcache): unknown field 'local_hostname'"),
        ({"long_backend": "lmcache", "long_config": tmp_path / "no"}, f"cannot read {tmp_path / 'no'}: No such file"),
    ):
        with pytest.raises(UsageError, match=re.escape(line)):
            adapters(**flags)
    for text, line in (
        ("- a\n", "holds no settings"),
        ("a: [", "is no YAML"),
        ("a: !!timestamp x", "is no YAML"),
        ("type: fs\n", "type 'fs' is not that of"),
    ):
        cache.write_text(text)
        with pytest.raises(UsageError, match=line):
            adapters(long_backend="lmcache", long_config=cache)


@pytest.mark.parametrize(
    ("module", "spec", "extra"),
    [
        ("nixl", {"type": "nixl_store", "backend": "POSIX", "backend_params": {"file_path": "/x"}, "pool_size": 4}, "nixl"),
        ("mooncake", {"type": "mooncake_store", "master_server_address": "h:1", "local_hostname": "h"}, "mooncake"),
        ("huggingface_hub", {"type": "hfbucket", "bucket_handle": "hf://buckets/a/b"}, "hf"),
        ("redis", {"type": "resp", "host": "h"}, "redis"),
        ("obstore", {"type": "s3", "bucket": "kv-cache"}, "s3"),
    ],
)
@pytest.mark.real("kvd")
def test_a_package_that_is_not_installed_ends_the_start(tmp_path: Path, module: str, spec: dict[str, Any], extra: str) -> None:
    """In a process that cannot see it: a meta path without it, before anything of ours is imported."""
    code = (
        "import importlib.util, sys\n"
        "find = importlib.util.find_spec\n"
        f"importlib.util.find_spec = lambda name, package=None: None if name == {module!r} else find(name, package)\n"
        f"sys.argv = ['kvd', 'serve', '--max-bytes', '1M', '--socket', {str(tmp_path / 's')!r}]\n"
        f"sys.argv += ['--l2-adapter', {json.dumps(spec)!r}]\n"
        "from kvtools.cli import kvd\n"
        "kvd()\n"
    )
    ran = run_python(code)
    assert ran.rc == 2
    assert ran.stderr.splitlines() == [
        f"kvd: error: adapter {spec['type']} ({spec['type']}) needs the Python package {module}, which is not installed",
        f"hint: pip install 'kvtools[{extra}]'",
    ]


def test_secrets_are_not_shown() -> None:
    spec = registry.Spec({"type": "x", "password": "open sesame", "inner": {"aws_secret_access_key": "abc", "token": "env:T"}})
    assert "sesame" not in str([spec])
    assert "abc" not in str([spec])
    assert "env:T" in str([spec])


@pytest.mark.real("kvd")
def test_kvd_serve_ends_with_one_line_and_a_hint() -> None:
    ran = run_cli("kvd", "serve", "--l2-adapter", '{"type": "disk", "pth": "/x"}')
    assert ran.rc == 2
    assert ran.stderr.splitlines() == [
        "kvd: error: adapter disk (disk): unknown field 'pth'",
        "hint: did you mean 'path'?",
    ]


@pytest.mark.real("kvd")
def test_show_config_shows_adapters_without_their_secrets() -> None:
    ran = run_cli("kvd", "serve", "--show-config", "--l2-adapter", '{"type": "disk", "path": "/x", "password": "sesame"}')
    assert ran.rc == 0
    assert '"type": "disk"' in ran.stdout
    assert "sesame" not in ran.stdout
