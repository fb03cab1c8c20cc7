"""`kvd bench` as a process: its figures, its sentence, and that nothing is left however it ends."""

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvd.bench import disk
from kvd.bench.reload import Prefix, sentence
from kvd.store.retention import Retention
from kvd.tiers.adapters import registry
from kvd.tiers.adapters.base import Item, Loaded, Want
from kvtools.errors import UsageError
from tests.support.daemon import MakeDaemon
from tests.support.processes import SCRIPTS, SHARED_MEMORY, Ran, run_cli, survivors

pytestmark = [pytest.mark.real("kvd"), pytest.mark.timeout(180)]


class Place:
    """Folders for one bench, and what it may have left behind."""

    def __init__(self, root: Path) -> None:
        self.disk, self.temporary = root / "disk", root / "t"
        for folder in (self.disk, self.temporary):
            folder.mkdir()
        self.segments = self._published()
        self.words = ["bench", "--seconds", "0.1", "--size", "64K", "--clients", "2", "--path", str(self.disk)]
        self.words += ["--adapter", json.dumps({"type": "fs", "base_path": str(self.disk / "new" / "fs")})]
        self.words += ["--bytes-per-token", "4K", "--prefix-tokens", "2048", "--prefill-rate", "1000", "--model", "tiny"]
        self.env = {**os.environ, "TMPDIR": str(self.temporary)}

    @staticmethod
    def _published() -> set[str]:
        return {name for name in os.listdir(SHARED_MEMORY) if name.startswith("kvtools.kvd.")}

    def nothing_left(self) -> None:
        assert list(self.disk.iterdir()) == list(self.temporary.iterdir()) == []
        assert [line for line in survivors() if str(self.disk) in line or str(self.temporary) in line] == []


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def named(body: dict[str, Any]) -> dict[tuple[str, int], dict[str, Any]]:
    return {(figure["name"], figure["clients"]): figure for figure in body["figures"]}


def test_every_figure_has_its_floor_and_the_sentence_its_numbers(place: Place) -> None:
    ran = run_cli("kvd", *place.words, "--json", env=place.env, timeout_s=120)
    assert ran.rc == 0, ran.stderr
    body = ran.json()
    assert body["schema"] == "kvd.bench/1"
    figures = named(body)
    assert set(figures) == {
        *((f"arena {verb}", clients) for verb in ("put", "get") for clients in (1, 2)),
        *((name, 1) for name in ("exists", "lease", "single get", "single put")),
        *((f"{tier} {verb}", 1) for tier in ("disk", "fs") for verb in ("store", "load")),
        ("tiny get beside synced writes", 2),
    }
    for figure in figures.values():
        assert min(figure["rate"], figure["floor"], figure["ratio"]) > 0
        assert figure["floor_is"]
        # The ratio is a median of pairs: near the medians' own, and never upside down.
        plain = figure["rate"] / figure["floor"]
        assert plain / 10 < figure["ratio"] < plain * 10, figure
    assert body["prefix"]["bytes"] == 8 << 20
    assert list(body["prefix"]["reload_s"]) == ["disk", "fs", "RAM"]
    assert body["sentence"].startswith("A 2k-token prefix of tiny (8 MiB) reloads here in ")
    assert "recomputing costs 2.0 s" in body["sentence"]
    assert "..." in ran.stderr
    place.nothing_left()


def test_a_page_for_people_of_a_daemon_that_serves_others(kvd_daemon: MakeDaemon, place: Place) -> None:
    daemon = kvd_daemon(max_bytes="512MiB")
    with daemon.client(namespace="mine") as client:
        client.put(bytes(32), b"mine")
        words = ["bench", "--socket", daemon.socket, "--seconds", "0.1", "--size", "1M", "--clients", "1"]
        ran = run_cli("kvd", *words, env=place.env, timeout_s=120)
        assert ran.rc == 0, ran.stderr
        lines = ran.stdout.splitlines()
        assert lines[0].split()[:3] == ["WHAT", "VALUE", "CLIENTS"]
        assert [line.split("  ")[0] for line in lines[1:]] == [
            "arena put", "arena get", "exists", "lease", "single get", "single put",
        ]  # fmt: skip
        assert client.get(bytes(32)) == b"mine"
        assert client.stats()["entries"] == 1, "what the bench stored is forgotten"
    place.nothing_left()


def stopped(place: Place, number: signal.Signals, *, after: str = "", seconds: float = 0.0, twice: bool = False) -> Ran:
    """A bench that gets this signal after it said `after`, or after so many seconds."""
    bench = subprocess.Popen(
        [str(SCRIPTS / "kvd"), *place.words], env=place.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert bench.stderr is not None
    said = ""
    if after:
        for line in bench.stderr:
            said += line
            if after in line:
                break
    time.sleep(seconds)
    bench.send_signal(number)
    if twice:
        bench.send_signal(signal.SIGINT)
    stdout, stderr = bench.communicate(timeout=60)
    return Ran(bench.returncode, stdout, said + stderr)


@pytest.mark.parametrize(
    ("number", "after", "twice"),
    [
        (signal.SIGTERM, "arena get, 64 KiB, 2 clients", True),
        (signal.SIGINT, "disk store", True),
    ],
)
def test_stopped_in_the_middle(place: Place, number: signal.Signals, after: str, twice: bool) -> None:
    ran = stopped(place, number, after=after, twice=twice)
    assert (ran.rc, ran.stdout) == (130, ""), ran.stderr
    assert "Traceback" not in ran.stderr
    place.nothing_left()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_stopped_at_any_moment(place: Place) -> None:
    chance = random.SystemRandom()
    for _ in range(40):
        number = chance.choice([signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
        seconds = chance.uniform(0, 9)
        ran = stopped(place, number, seconds=seconds, twice=chance.random() < 0.3)
        # Before its handlers are set the signal itself ends it, or the interpreter's own start, with nothing made yet.
        assert ran.rc in (0, 130, -number) or "init_import_site" in ran.stderr, (seconds, ran)
        place.nothing_left()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--size", "1K"], "cannot measure values of 1 KiB"),
        (["--seconds", "nan"], "'--seconds': 'nan' is no number"),
        (["--path", "/dev/null"], "is not a directory"),
        (["--adapter", '{"type": "nosuch"}'], "unknown type 'nosuch'"),
        (["--adapter", "{"], "--adapter is no JSON"),
        (["--prefill-rate", "9000"], "--prefill-rate without --bytes-per-token"),
        (["--adapter", "{}", "--socket", "/nowhere"], "daemon of the bench's own"),
        (["--bytes-per-token", "17M"], "--bytes-per-token 17825792"),
        (["--bytes-per-token", "1K", "--prefill-rate", "nan"], "'--prefill-rate': 'nan' is no number"),
    ],
)
def test_what_cannot_be_measured_is_said_before_anything_starts(place: Place, words: list[str], says: str) -> None:
    ran = run_cli("kvd", "bench", *words, env=place.env)
    assert (ran.rc, ran.stdout) == (2, "")
    assert says in ran.stderr
    assert "hint: " in ran.stderr or "nan" in words
    place.nothing_left()


def test_a_tier_that_does_not_work_is_said_at_once(place: Place) -> None:
    spec = {"type": "resp", "host": "127.0.0.1", "port": 9, "timeout": "200ms"}
    words = ["--size", "64K", "--clients", "1", "--seconds", "0.1", "--adapter", json.dumps(spec)]
    ran = run_cli("kvd", "bench", *words, env=place.env)
    assert ran.rc == 1
    assert "kvd: error: resp does not work: nothing can be stored there" in ran.stderr
    assert "Connection refused" in ran.stderr
    assert "Traceback" not in ran.stderr
    place.nothing_left()


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 2), ("float16", 2), ("float32", 4)])
def test_a_tier_that_quantizes_is_given_what_it_quantizes(dtype: str, size: int) -> None:
    """Random bytes are no floats: they would pass as they are, and the figures would be those of a tier without fp8."""
    spec = {"type": "mock", "max_size_gb": 1, "mock_bandwidth_gb": 64, "serde": [{"type": "fp8", "dtype": dtype}]}
    assert disk.floats_of(spec) == disk.floats_of(spec | {"serde": spec["serde"][0]}) == dtype  # type: ignore[index]
    assert disk.floats_of({"type": "mock"}) is None
    (adapter,) = registry.build([registry.Spec(spec)])
    adapter.open()
    room = np.zeros(1 << 16, dtype=np.uint8)
    disk.quantizable(room, dtype)
    assert adapter.store([Item(bytes(64), memoryview(room), Retention.LONG)])[0].ok
    assert adapter.describe()["serde_encoded_bytes"] < 1.1 * len(room) / size  # type: ignore[operator]
    into = np.zeros_like(room)
    assert adapter.load([Want(bytes(64), memoryview(into))]) == [Loaded.OK]
    assert np.array_equal(into, room), "and the bench compares what comes back"
    adapter.close(1.0)


@pytest.mark.slow
def test_a_daemon_that_does_not_start_leaves_nothing(place: Place) -> None:
    (place.disk / "file").write_text("in the way")
    spec = {"type": "fs", "base_path": str(place.disk / "file")}
    ran = run_cli(
        "kvd", "bench", "--size", "64K", "--clients", "1", "--seconds", "0.1", "--adapter", json.dumps(spec), env=place.env
    )
    assert ran.rc in (1, 2)
    assert "did not start" in ran.stderr
    (place.disk / "file").unlink()
    place.nothing_left()


@pytest.mark.parametrize(
    ("rate", "places", "ends"),
    [
        (9000.0, {"disk": 0.21, "RAM": 0.09}, "recomputing costs 3.6 s, 17.3 times as long as from disk."),
        (9000.0, {"disk": 5.0, "RAM": 0.09}, "recomputing costs 3.6 s: from disk it is not worth it."),
        (0.0, {"RAM": 0.09}, "what recomputing costs is the engine's to say (--prefill-rate)."),
    ],
)
def test_the_sentence(rate: float, places: dict[str, float], ends: str) -> None:
    said = sentence(Prefix("Llama-3-8B", 32768, 128 << 10, rate), places)
    assert said.startswith("A 32k-token prefix of Llama-3-8B (4 GiB) reloads here in ")
    assert said.endswith(ends)
    assert "0.09 s from RAM" in said


@pytest.mark.parametrize("tokens", [1, 255, 256, 257, 100_000])
@pytest.mark.parametrize("each", [1, 4096, 1 << 20])
def test_a_sample_is_whole_chunks_and_bounded(tokens: int, each: int) -> None:
    prefix = Prefix("m", tokens, each, 0.0)
    assert prefix.chunks >= 1
    assert prefix.sample_bytes <= max(256 << 20, prefix.chunk_bytes)
    assert prefix.sample_bytes <= prefix.bytes + prefix.chunk_bytes


def test_no_tokens_is_no_prefix() -> None:
    with pytest.raises(UsageError):
        Prefix("m", 0, 1, 0.0)


@pytest.mark.slow
@pytest.mark.real("kvd")
def test_a_tier_too_small_to_be_measured_is_told_so(place: Place) -> None:
    spec = {"type": "mock", "max_size_gb": 2 / 1024, "mock_bandwidth_gb": 10}
    words = ["--size", "64K", "--clients", "1", "--seconds", "0.1", "--adapter", json.dumps(spec)]
    ran = run_cli("kvd", "bench", *words, env=place.env)
    assert ran.rc == 1
    assert "mock holds 2 MiB at most, and is measured with 16 MiB at once" in ran.stderr
