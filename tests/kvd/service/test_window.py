"""What a daemon shows over HTTP, and how it is told its settings and where its log goes."""

import http.client
import itertools
import json
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.daemon import Daemon
from tests.support.processes import run_cli

KEY = bytes(range(32))
MakeDaemon = Callable[..., Daemon]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ask(port: int, path: str, method: str = "GET") -> tuple[int, str]:
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        link.request(method, path)
        answer = link.getresponse()
        return answer.status, answer.read().decode()
    finally:
        link.close()


@pytest.mark.real("kvd")
def test_metrics_agree_with_stats_and_readiness_ends_with_draining(kvd_daemon: MakeDaemon) -> None:
    port = free_port()
    daemon = kvd_daemon("--metrics-port", str(port), tier="64MiB")
    with daemon.client() as client:
        assert client.put(KEY, os.urandom(100_000), wait="tier")
        assert client.get(KEY) is not None
        assert client.get(bytes(32)) is None
        status, text = ask(port, "/metrics")
        stats = client.stats()
    assert status == 200
    values = dict(re.findall(r"^kvd_([a-z_]+) (\S+)$", text, re.MULTILINE))
    for name in ("sets_total", "gets_total", "hits_total", "misses_total", "set_bytes_total", "entries"):
        assert float(values[name]) == stats[name] > 0, name
    assert 'kvd_tier_stores_total{tier="disk",type="disk"} 1' in text
    buckets = [int(n) for n in re.findall(r"kvd_tier_store_seconds_bucket\{[^}]*\} (\d+)", text)]
    assert buckets == sorted(buckets), "buckets are cumulative"
    assert buckets[-1] == 1, "+Inf counts all"
    families = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
    assert len(families) == len(set(families)), "a family is declared once"
    names = [re.sub(r"(_bucket|_sum|_count)?[ {].*", "", line) for line in text.splitlines() if not line.startswith("#")]
    assert [name for name, _ in itertools.groupby(names)] == families, "and its lines stand together, under it"
    assert ask(port, "/healthz") == (200, "ok\n")
    assert ask(port, "/readyz") == (200, "ready\n")
    assert daemon.run("drain").rc == 0
    assert ask(port, "/readyz") == (503, "draining\n")
    assert ask(port, "/metrics", "POST")[0] == 405
    assert ask(port, "/../etc/passwd")[0] == 404


@pytest.mark.real("kvd")
def test_what_is_no_http_is_let_go_and_the_daemon_serves_on(kvd_daemon: MakeDaemon) -> None:
    port = free_port()
    daemon = kvd_daemon("--metrics-port", str(port))
    for nonsense in (b"\0" * 20_000, b"GET\r\n\r\n", b"\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", port), timeout=5) as link:
            link.sendall(nonsense)
            try:
                while link.recv(4096):
                    pass
            except ConnectionResetError:
                pass
    assert ask(port, "/healthz")[0] == 200
    taken = run_cli("kvd", "serve", "--socket", daemon.folder / "other.sock", "--max-bytes", "1MiB", "--metrics-port", str(port))
    assert taken.rc == 2
    assert f"port {port}" in taken.stderr


@pytest.mark.real("kvd")
def test_log_lines_are_json_when_asked(kvd_daemon: MakeDaemon) -> None:
    daemon = kvd_daemon("--log-format", "json")
    daemon.stop()
    lines = [json.loads(line) for line in daemon.text().splitlines()]
    assert any("serves" in line["message"] for line in lines)
    assert all({"time", "level", "logger", "message"} <= set(line) for line in lines)


def test_settings_file_environment_and_flags_win_in_that_order(tmp_path: Path) -> None:
    config = tmp_path / "kvd.toml"
    config.write_text('max_bytes = "64M"\nlong_path = ["/x"]\nlong_bytes = "1G"\nhugepages = true\nallow_uid = [12]\n')
    shown = run_cli(
        "kvd",
        "serve",
        "--config",
        config,
        "--long-bytes",
        "2G",
        "--show-config",
        env={"KVD_MAX_BYTES": "32M", "KVD_LONG_BYTES": "3G"},
    )
    assert shown.rc == 0
    rows = {line.split()[0]: line.split()[1:] for line in shown.stdout.splitlines()}
    assert rows["max_bytes"] == ["32", "MiB", "env:KVD_MAX_BYTES"]
    assert rows["long_bytes"] == ["2", "GiB", "flag"]
    assert rows["hugepages"] == ["True", f"file:{config}"]
    assert rows["drain_timeout"][-1] == "default"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max_byte = 1\n", "max_byte"),
        ('max_bytes = "4Q"\n', "not a size"),
        ("max_bytes = [1]\n", "not a plain value"),
        ("max_bytes = \n", "is no TOML"),
        ('log_format = "xml"\n', "not a log format"),
        ("metrics_port = 99999\n", "not a port"),
        ('metrics_port = "²"\n', "not a port"),
        ('metrics_host = ""\n', "metrics_host"),
        ('gds_l1_path = "~nobody-of-that-name"\n', "gds_l1_path"),
        ('numa_node = "²"\n', "no such NUMA node"),
    ],
)
def test_a_wrong_settings_file_is_a_usage_error_that_names_it(tmp_path: Path, text: str, says: str) -> None:
    config = tmp_path / "kvd.toml"
    config.write_text(text)
    ran = run_cli("kvd", "serve", "--config", config, "--show-config")
    assert ran.rc == 2
    assert says in ran.stderr
    assert str(config) in ran.stderr
    assert "Traceback" not in ran.stderr
