"""What `kvd serve` makes of the flags for policies, eviction and serde, and the messages by which operators follow tiers."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.daemon import Daemon
from tests.support.processes import run_cli, wait_until

pytestmark = pytest.mark.real("kvd")

MIB = 1 << 20


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def test_the_log_has_the_messages_that_operators_look_for(kvd_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    daemon = kvd_daemon("--l2-adapter", f'{{"type": "fs", "base_path": "{tmp_path}"}}', "--log-level", "DEBUG", max_bytes="16MiB")
    with daemon.client() as client:
        for n in range(6):
            client.put(key(n), bytes(100_000), wait="tier")
        daemon.run("evict", key(4).hex(), key(5).hex())
        assert client.get_many([key(n) for n in range(8)])[4:] == [bytes(100_000)] * 2 + [None] * 2
        daemon.run("evict", key(5).hex())
        assert client.prefetch([key(0), key(5), key(9)]) == 1
    log = daemon.text()
    assert "Prefetch request submitted: 3 total keys, 1 L1 prefix hits, 2 remaining for L2" in log
    submitted = re.findall(r"DEBUG kvd.tiers: Submitted store task (\d+) to adapter 0 \(fs\) with (\d+) keys\.", log)
    completed = re.findall(r"DEBUG kvd.tiers: L2 store task (\d+) completed: adapter 0 \(fs\), (\d+) of (\d+) keys\.", log)
    assert sum(int(keys) for _, keys in submitted) == 6
    assert {number for number, _ in submitted} == {number for number, _, _ in completed}
    assert "Prefetch request submitted: 8 total keys, 4 L1 prefix hits, 4 remaining for L2" in log
    assert re.search(r"Submitted load task (\d+) to adapter 0 \(fs\) with 2 keys\.", log)
    assert re.search(r"Load task (\d+) completed: adapter 0 \(fs\), 2 of 2 keys\.", log)
    quiet = kvd_daemon("--l2-adapter", f'{{"type": "fs", "base_path": "{tmp_path}"}}', max_bytes="16MiB")
    with quiet.client() as client:
        client.put(key(1), b"x", wait="tier")
    assert "store task" not in quiet.text()


def test_status_shows_each_tier_by_itself(kvd_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    daemon = kvd_daemon("--l2-adapter", f'{{"type": "fs", "base_path": "{tmp_path}"}}', max_bytes="16MiB", tier="64MiB")
    with daemon.client() as client:
        for n in range(5):
            client.put(key(n), bytes(100_000), wait="tier")
    wait_until(lambda: daemon.run("status", "--tiers").stdout.count("5 values") >= 4, what="the figures")
    shown = daemon.run("status", "--tiers")
    assert shown.rc == 0
    lines = shown.stdout.splitlines()
    assert lines[0] == "tier 0: disk (disk), works"
    assert "tier 1: fs (fs), works" in lines
    assert shown.stdout.count("troubles: none") == 2
    tiers = daemon.run("status", "--tiers", "--json").json()
    assert tiers["schema"] == "kvd.tiers/1"
    assert [(tier["name"], tier["stores_total"]) for tier in tiers["tiers"]] == [("disk", 5), ("fs", 5)]
    assert "there is no tier" in kvd_daemon(max_bytes="16MiB").run("status", "--tiers").stdout


def test_buffer_only_mode(kvd_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    daemon = kvd_daemon(
        *("--eviction-policy", "noop", "--l2-store-policy", "skip_l1", "--l2-prefetch-policy", "default"),
        *("--l2-adapter", f'{{"type": "fs", "base_path": "{tmp_path}"}}'),
        max_bytes="8MiB",
    )
    with daemon.client() as client:
        for n in range(30):
            assert client.put(key(n), bytes([n]) * MIB, wait="tier")
        wait_until(lambda: client.stats()["entries"] == 0, what="the arena to be empty")
        assert all(client.get(key(n)) == bytes([n]) * MIB for n in range(30))


def test_the_watermark_makes_room_before_it_is_needed(kvd_daemon: Callable[..., Daemon]) -> None:
    daemon = kvd_daemon("--eviction-trigger-watermark", "0.5", "--eviction-ratio", "0.4", max_bytes="16MiB")
    with daemon.client() as client:
        for n in range(9):
            client.put(key(n), bytes(MIB))
        wait_until(lambda: client.stats()["evictions_ahead_total"] >= 4, what="the watermark to be acted on")
        stats = client.stats()
        assert stats["arena_bytes_used"] <= 8 * MIB + (1 << 20)
        assert client.get(key(8)) is not None
        assert client.get(key(0)) is None
        with client.read([key(n) for n in range(5, 9)]):  # what is being read is passed over
            for n in range(20, 26):
                client.put(key(n), bytes(MIB))
            wait_until(lambda: client.stats()["evictions_ahead_total"] > stats["evictions_ahead_total"], what="another round")
            assert all(client.exists([key(n) for n in range(5, 9)]))


def test_a_scan_resistant_arena(kvd_daemon: Callable[..., Daemon]) -> None:
    kept = {}
    for policy in ("LRU", "S3FIFO"):
        daemon = kvd_daemon("--eviction-policy", policy, max_bytes="16MiB")
        with daemon.client() as client:
            for n in range(20):
                client.put(key(n), bytes(100_000))
            for _ in range(3):
                client.get_many([key(n) for n in range(20)])
            for n in range(1000, 1400):
                client.put(key(n), bytes(100_000))
            kept[policy] = sum(client.exists([key(n) for n in range(20)]))
    assert kept["LRU"] == 0
    assert kept["S3FIFO"] == 20


def test_values_pass_a_chain_and_a_restart(kvd_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    secret = tmp_path / "key"
    secret.write_text("ab" * 32)
    secret.chmod(0o600)
    chain = f'[{{"type": "zstd", "shuffle": 2}}, {{"type": "aesgcm", "key": "file:{secret}"}}]'
    daemon = kvd_daemon("--l2-adapter", f'{{"type": "disk", "path": "{tmp_path}/tier", "max_bytes": "64MiB", "serde": {chain}}}')
    with daemon.client() as client:
        for n in range(20):
            assert client.put(key(n), b"plain text " * (1000 + n), wait="tier")
        tier = client.stats()["tiers"][0]
        assert tier["serde"] == "zstd > aesgcm"
        assert tier["serde_encoded_bytes"] < tier["serde_plain_bytes"] / 5
    daemon.restart(kill=True)
    with daemon.client() as client:
        assert all(client.get(key(n)) == b"plain text " * (1000 + n) for n in range(20))
        assert client.exists([key(n) for n in range(21)]) == [True] * 20 + [False]
    assert not any(b"plain text" in path.read_bytes() for path in (tmp_path / "tier").glob("*.kvcache"))
    assert "ab" * 32 not in daemon.text()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--eviction-policy", "MRU"], "LRU, S3FIFO, noop"),
        (["--eviction-trigger-watermark", "1.2"], "not a share"),
        (["--eviction-ratio", "0"], "not a share"),
        (["--l2-prefetch-max-in-flight", "0"], "not a whole number from 1"),
        (["--l2-store-policy", "skip_l1"], "--l2-store-policy without a tier"),
        (["--l2-prefetch-policy", "retain"], "--l2-prefetch-policy without a tier"),
        (["--promote"], "--promote without a tier"),
        (["--long-path", "/tmp/x", "--l2-store-policy", "skipl1"], "did you mean 'skip_l1'"),
        (["--l2-prefetch-policy", "retains"], "did you mean 'retain'"),
        (
            ["--l2-adapter", '{"type": "mock", "max_size_gb": 1, "mock_bandwidth_gb": 1, "serde": {"type": "zip"}}'],
            "unknown type 'zip'",
        ),
        (["--l2-adapter", '{"type": "resp", "host": "h", "eviction": {"eviction_policy": "LRU"}}'], "cannot evict"),
    ],
)
def test_mistakes_end_the_start_with_2(words: list[str], says: str, tmp_path: Path) -> None:
    run = run_cli("kvd", "serve", "--socket", tmp_path / "s", "--max-bytes", "16MiB", *words)
    assert run.rc == 2
    assert says in run.stderr
    assert "Traceback" not in run.stderr
