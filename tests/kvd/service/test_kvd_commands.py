"""The commands as an operator runs them: exit codes, JSON, sentences, and what they say when there is no daemon."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from kvd.store.identity import namespace_of
from kvd.wire.client import Client
from kvtools.cli import run_words
from tests.support.daemon import Daemon, MakeDaemon
from tests.support.processes import SCRIPTS, Ran, run_cli, wait_until

pytestmark = pytest.mark.real("kvd")

STATS = [
    *("sets_total", "gets_total", "hits_total", "misses_total", "set_bytes_total", "get_bytes_total", "evictions_total"),
    *("corruptions_total", "entries", "arena_bytes_used", "arena_bytes_limit", "leases_active"),
]
TIER = ["name", "type", "bytes_used", "bytes_limit", "entries", "hits_total"]
TALKING = ["ping", "keys", "why", "prefetch", "evict", "clear", "drain"]
"""Commands that talk to the socket; the others read the stats segment."""


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


@pytest.fixture(scope="module")
def daemon(kvd_daemon_module: MakeDaemon) -> Daemon:
    return kvd_daemon_module(max_bytes="8MiB", tier="64MiB")


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    with daemon.client(namespace="tests") as made:
        made.clear(all_namespaces=True)
        yield made


@pytest.fixture
def here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, daemon: Daemon) -> Callable[..., Ran]:
    """Runs a command in this process, by the same edge that every console script has: for the many small refusals."""

    def run(*words: object) -> Ran:
        monkeypatch.setenv("KVD_SOCKET", str(daemon.socket))
        capsys.readouterr()
        rc = run_words("kvd", "kvd.app:app", [str(word) for word in words])
        return no_traceback(Ran(rc, *capsys.readouterr()))

    return run


def words_for(command: str) -> list[str]:
    """The arguments that make this command complete."""
    return {"why": [key(1).hex()], "prefetch": [key(1).hex()], "evict": [key(1).hex()], "clear": ["--yes"]}.get(command, [])


def no_traceback(run: Ran) -> Ran:
    assert "Traceback" not in run.stderr
    return run


class TestShowing:
    def test_ping(self, daemon: Daemon) -> None:
        run = daemon.run("ping")
        assert run.rc == 0
        assert f"answers, pid {daemon.pid}" in run.stdout
        assert run.stderr == ""
        body = daemon.run("ping", "--json", "--count", "5").json()
        assert body["schema"] == "kvd.ping/1"
        assert (body["pid"], body["round_trips"]) == (daemon.pid, 5)
        assert 0 < body["p50_s"] <= body["max_s"] < 1

    def test_stats_has_every_number_and_agrees_with_the_client(
        self, daemon: Daemon, client: Client, here: Callable[..., Ran]
    ) -> None:
        client.put_many([(key(i), b"x" * 10_000) for i in range(5)], wait="tier")
        client.get_many([key(i) for i in range(8)])
        mine = client.stats()

        def agrees() -> bool:
            shown = here("stats", "--json").json()
            return all(shown[name] == mine[name] for name in STATS)

        wait_until(agrees, what="the segment to show what the client is told")
        shown = here("stats", "--json").json()
        assert shown["schema"] == "kvd.stats/1"
        assert shown["pid"] == daemon.pid
        assert set(TIER) <= set(shown["tiers"][0])
        assert shown["tiers"][0]["entries"] == 5
        assert all(isinstance(shown[name], int) for name in STATS)

    def test_stats_for_people(self, daemon: Daemon, client: Client) -> None:
        run = daemon.run("stats")
        assert run.rc == 0
        for name in STATS:
            assert f"  {name} " in run.stdout
        assert "tier disk (disk)" in run.stdout

    def test_watch_shows_rates_and_ends_after_its_count(self, daemon: Daemon) -> None:
        run = daemon.run("stats", "--watch", "--interval", "0.1s", "--count", "3")
        assert run.rc == 0
        lines = run.stdout.splitlines()
        assert len(lines) == 4
        assert lines[0].startswith("TIME")
        run = daemon.run("stats", "--watch", "-i", "0.1s", "-n", "2", "--json")
        assert [json.loads(line)["schema"] for line in run.stdout.splitlines()] == ["kvd.stats/1"] * 2

    def test_watch_ends_on_ctrl_c_with_130_and_on_a_closed_pipe_without_noise(self, daemon: Daemon) -> None:
        words = [str(SCRIPTS / "kvd"), "stats", "--watch", "-i", "0.05s"]
        env = {**os.environ, "KVD_SOCKET": str(daemon.socket)}
        with subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            process.stdout.readline()
            process.send_signal(signal.SIGINT)
            _, stderr = process.communicate(timeout=10)
            assert process.returncode == 130
            assert "Traceback" not in stderr
        with subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.readline()
            process.stdout.close()
            stderr = process.stderr.read()
            process.wait(10)
            assert "Traceback" not in stderr
            assert "Exception" not in stderr

    def test_status(self, daemon: Daemon, client: Client) -> None:
        run = daemon.run("status")
        assert run.rc == 0
        assert run.stdout.startswith("  health: HEALTH_OK")
        body = daemon.run("status", "--json").json()
        assert (body["schema"], body["health"], body["reasons"]) == ("kvd.status/1", "HEALTH_OK", [])

    def test_keys_lists_arena_and_tier_page_by_page(self, daemon: Daemon, client: Client, here: Callable[..., Ran]) -> None:
        client.put_many([(key(i), b"x" * 100) for i in range(30)], wait="tier")
        client.put(key(100), b"short lived", retention="ephemeral", ttl_s=100)
        body = here("keys", "--json").json()
        assert body["schema"] == "kvd.keys/1"
        assert body["more"] is False
        rows = {(row["key"], row["place"]): row for row in body["keys"]}
        assert len(rows) == len(body["keys"]) == 61
        row = rows[key(100).hex(), "arena"]
        assert (row["bytes"], row["retention"], row["namespace"]) == (11, "ephemeral", namespace_of("tests").hex())
        assert 0 < row["expires_at"] - time.time() <= 100
        assert rows[key(1).hex(), "disk"]["expires_at"] is None
        few = here("keys", "--json", "--limit", "7").json()
        assert (len(few["keys"]), few["more"]) == (7, True)
        assert few["keys"] == body["keys"][:7]
        run = here("keys", "--limit", "7")
        assert len(run.stdout.splitlines()) == 8
        assert "more than 7" in run.stderr

    def test_keys_of_one_namespace(self, daemon: Daemon, client: Client, here: Callable[..., Ran]) -> None:
        client.put(key(1), b"a", namespace="one")
        client.put(key(1), b"b", namespace="two")
        for name in ("one", namespace_of("one").hex()):
            body = here("keys", "--json", "--namespace", name).json()
            assert {row["namespace"] for row in body["keys"]} == {namespace_of("one").hex()}
        empty = here("keys", "--namespace", "three")
        assert (empty.rc, empty.stdout) == (0, "")
        assert "nothing is stored" in empty.stderr

    def test_why_says_where_a_key_is(self, daemon: Daemon, client: Client, here: Callable[..., Ran]) -> None:
        client.put(key(1), b"x" * 9000, wait="tier")
        client.put(key(2), b"x" * 9000, retention="ephemeral")
        words = ["why", key(1).hex(), key(2).hex(), "--namespace", "tests"]
        body = here(*words, "--json").json()
        assert [row["places"] for row in body["keys"]] == [["arena", "disk"], ["arena"]]
        assert here(*words).rc == 0
        run = here(*words, key(3).hex())
        assert run.rc == 3
        assert f"{key(3).hex()}  nowhere" in run.stdout


class TestChanging:
    def test_evict_keeps_the_tiers_copy_and_prefetch_brings_it_back(
        self, daemon: Daemon, client: Client, here: Callable[..., Ran]
    ) -> None:
        client.put(key(1), b"x" * 9000, wait="tier")
        run = here("evict", key(1).hex(), "--namespace", "tests", "--json")
        assert (run.rc, run.json()) == (0, {"schema": "kvd.evict/1", "dropped": 1, "all_tiers": False, "left": 0, "why": ""})
        assert here("why", key(1).hex(), "--namespace", "tests", "--json").json()["keys"][0]["places"] == ["disk"]
        run = here("prefetch", key(1).hex(), key(9).hex(), "--namespace", "tests", "--json")
        assert run.json() == {"schema": "kvd.prefetch/1", "asked": 2, "promoted": 1}
        assert client.get(key(1)) == b"x" * 9000
        assert here("evict", key(1).hex(), "--namespace", "tests", "--all-tiers").rc == 0
        assert client.get(key(1)) is None

    def test_evict_waits_for_what_is_on_its_way_to_a_tier(self, kvd_daemon: MakeDaemon) -> None:
        daemon = kvd_daemon(
            "--l2-adapter", '{"type": "mock", "max_size_gb": 0.01, "mock_bandwidth_gb": 1, "latency": 0.3}', max_bytes="8MiB"
        )
        with daemon.client(namespace="tests") as client:
            assert client.put(key(1), b"x" * 10_000)
            run = daemon.run("evict", key(1).hex(), "--namespace", "tests")
            assert (run.rc, run.stdout) == (0, "1 value dropped from the arena\n")
            assert client.get(key(1)) == b"x" * 10_000

    def test_a_whole_namespace_is_asked_about_first(self, daemon: Daemon, client: Client, here: Callable[..., Ran]) -> None:
        client.put(key(1), b"v")
        for words in (["evict", "--namespace", "tests"], ["clear"], ["clear", "--namespace", "tests"]):
            run = here(*words)
            assert run.rc in (2, 5)
            assert "--yes" in run.stderr
            assert client.exists([key(1)]) == [True]
        assert here("evict").rc == 2
        assert here("evict", "--namespace", "tests", "--yes").rc == 0
        assert client.exists([key(1)]) == [True], "the tier keeps it"
        run = here("clear", "--namespace", "tests", "--yes", "--json")
        assert run.json() == {"schema": "kvd.clear/1", "cleared": 1, "left": 0, "why": ""}
        assert client.exists([key(1)]) == [False]

    def test_clear_forgets_all_namespaces_everywhere(self, daemon: Daemon, client: Client, here: Callable[..., Ran]) -> None:
        for name in ("one", "two"):
            client.put(key(1), b"x" * 9000, namespace=name, wait="tier")
        run = here("clear", "--yes")
        assert run.rc == 0
        assert run.stdout == "2 values forgotten\n"
        assert here("keys", "--json").json()["keys"] == []


class TestRefusing:
    @pytest.mark.parametrize("command", [*TALKING, "stats", "status"])
    @pytest.mark.parametrize("json_", [[], ["--json"]], ids=["", "json"])
    def test_no_daemon_is_4_with_one_line_and_a_hint(
        self, daemon: Daemon, here: Callable[..., Ran], command: str, json_: list[str]
    ) -> None:
        run = here(command, *words_for(command), "--socket", daemon.folder / "nobody.sock", *json_)
        assert run.rc == 4
        assert run.stdout == "", "not even half of a JSON"
        lines = run.stderr.splitlines()
        assert lines[0].startswith("kvd: error: no daemon at ")
        assert lines[1].startswith("hint: ")
        assert len(lines) == 2

    @pytest.mark.parametrize(
        "words",
        [
            ["ping", "--count", "0"],
            ["ping", "--count", "many"],
            ["ping", "--timeout", "soon"],
            ["ping", "--timeout", "-1s"],
            ["ping", "extra"],
            ["stats", "--watch", "--interval", "0", "--count", "1"],
            ["stats", "--watch", "--interval", "-1s", "--count", "1"],
            ["stats", "--watch", "--interval", "often", "--count", "1"],
            ["stats", "--count", "-1"],
            ["keys", "--limit", "0"],
            ["keys", "--limit", "x"],
            ["why"],
            ["why", "abc"],
            ["why", "g" * 64],
            ["why", "ab" * 31],
            ["prefetch", "ab" * 33],
            ["evict", "nonsense"],
            ["drain", "--timeout", "x"],
            ["drian"],
            ["statsu"],
            ["stats", "--jsn"],
            ["verify"],
            ["--nonsense"],
        ],
        ids=" ".join,
    )
    def test_bad_input_is_2_and_says_what(self, here: Callable[..., Ran], words: list[str]) -> None:
        run = here(*words)
        assert run.rc == 2, (run.stdout, run.stderr)
        assert run.stdout == ""
        assert run.stderr.strip()
        assert len(run.stderr.splitlines()) <= 4

    @pytest.mark.parametrize(("typed", "meant"), [("drian", "drain"), ("statsu", "stats"), ("serv", "serve")])
    def test_unknown_words_are_answered_with_what_was_meant(self, here: Callable[..., Ran], typed: str, meant: str) -> None:
        run = here(typed)
        assert run.rc == 2
        assert typed in run.stderr
        assert meant in run.stderr

    def test_a_stopped_daemon_is_seen_without_its_help(self, daemon: Daemon, here: Callable[..., Ran]) -> None:
        daemon.signal(signal.SIGSTOP)
        try:
            for words in (["ping", "--timeout", "0.2s"], ["why", key(1).hex(), "--timeout", "0.2s"], ["keys", "--timeout", "0.2s"]):
                assert here(*words).rc in (4, 6)
            assert here("stats", "--json").rc == 0

            def complains() -> bool:
                run = here("status", "--json")
                return run.rc == 1 and run.json()["health"] == "HEALTH_ERR"

            wait_until(complains, timeout_s=8, interval_s=0.1, what="status to notice that the daemon does not move")
            assert any("has not moved" in reason for reason in here("status", "--json").json()["reasons"])
            assert daemon.run("status").stdout.startswith("  health: HEALTH_ERR")
        finally:
            daemon.signal(signal.SIGCONT)
        wait_until(lambda: here("status").rc == 0, what="status to be content again")

    def test_a_killed_daemon_is_gone(self, kvd_daemon: MakeDaemon) -> None:
        daemon = kvd_daemon(max_bytes="4MiB")
        daemon.kill9()
        for command in ("stats", "ping"):
            run = no_traceback(daemon.run(command))
            assert run.rc == 4
            assert "hint: " in run.stderr


def test_python_m_kvd_is_the_same_program(daemon: Daemon) -> None:
    env = {**os.environ, "KVD_SOCKET": str(daemon.socket)}
    run = subprocess.run([sys.executable, "-m", "kvd", "ping", "--json"], env=env, capture_output=True, text=True, timeout=30)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["pid"] == daemon.pid
    help_ = subprocess.run([sys.executable, "-m", "kvd", "--help"], capture_output=True, text=True, timeout=30)
    assert help_.stdout.replace("python -m kvd", "kvd") == run_cli("kvd", "--help").stdout


def test_show_config_names_every_setting_and_where_it_came_from() -> None:
    run = run_cli("kvd", "serve", "--max-bytes", "1.5G", "--show-config", env={"KVD_LOG_LEVEL": "DEBUG", "KVD_LONG_PATH": "/x"})
    assert run.rc == 0
    rows = {line.split()[0]: line for line in run.stdout.splitlines()[1:]}
    assert rows["max_bytes"].split() == ["max_bytes", "1.50", "GiB", "flag"]
    assert "KVD_LOG_LEVEL" in rows["log_level"]
    assert "/x" in rows["long_path"]
    assert "default" in rows["socket_mode"]
