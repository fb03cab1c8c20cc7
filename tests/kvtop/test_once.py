"""The headless twins: text at any width, JSON that stays JSON, an exit status to alert on, and the settings behind them all."""

import json
import shlex
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtools.errors import KvError, UsageError
from kvtools.exits import Exit
from kvtools.segments import pool
from kvtop import settings as config
from kvtop.once import check_status, document, once_lines, print_check, print_once, write_screen
from kvtop.query import Filter
from kvtop.record import FILE_HEADER, KEY_EVERY, MAGIC, VERSION, Writer
from kvtop.recording import Recording
from kvtop.snapshot import Snapshot
from kvtop.text import ASCII, width_of
from kvtop.views import VIEWS
from tests.kvtop import scenes
from tests.kvtop.scenes import GIB
from tests.support.processes import SCRIPTS, Ran, run_python, wait_until

Cli = Callable[..., Ran]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(VIEWS)), st.integers(1, 300))
def test_text_fits_any_width_and_misses_no_row(view: str, width: int) -> None:
    model = scenes.model(20)
    chosen = VIEWS[view]
    lines = once_lines(model, chosen, width, Filter(), chosen.order)
    assert all(width_of(line) <= width for line in lines)
    rows = chosen.rows(model)
    assert len(lines) >= 2 + len(rows) - (not rows)


@pytest.mark.parametrize("width", [1, 7, 20, 40, 80, 120, 300])
def test_ascii_text_is_ascii_whatever_it_is_about(width: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Cut cells, names from anywhere, alerts about them: as wide as ever, and not one other character."""
    model = scenes.model(20, scenes.foreign, glyphs=ASCII)
    for view in VIEWS.values():
        print_once(model, view, Filter(), view.order, width)
    print_check(model)
    text = capsys.readouterr().out
    assert text.isascii()
    assert all(len(line) <= width for line in text.partition("health ")[0].splitlines())


def test_the_document_says_what_kvctl_list_says_and_more() -> None:
    body = json.loads(json.dumps(document(scenes.model(10))))
    assert body["health"] == "OK"
    assert body["segments"][0] | {"used_bytes": 0, "free_bytes": 0, "held_percent": 0} == {
        "ipc": "llama-70b", "limit_bytes": 48 * GIB, "used_bytes": 0, "prealloc_bytes": 256 << 20, "free_bytes": 0,
        "held_percent": 0,
        "state": "live", "pid": 4711, "engine": "vllm", "model": "meta/llama-3.1-70b", "devices": ["GPU-8f1c"], "ranks": None,
        "start_capacity_bytes": 64 * GIB, "page_bytes": 2 << 20, "limits": [],
    }  # fmt: skip
    daemon = body["daemons"][0]
    assert daemon["hit_rate"] == pytest.approx(0.9091)
    assert [tier["name"] for tier in daemon["tiers"]] == ["nvme0", "s3"]
    assert isinstance(daemon["tiers"][0]["bytes_used"], int)
    assert body["stats"][0]["values"]["a_name_of_the_future"] == 7
    assert body["stats"][0]["rates"]["hits_total"] == pytest.approx(200.0)
    assert set(body["stats"][0]["quantiles"]["get_seconds"]) == {"p50", "p90", "p99"}
    assert body["gpus"][0]["busy_percent"] is None, "unknown is null, not -1"


def test_health_becomes_the_exit_status() -> None:
    assert check_status(scenes.model(3)) == Exit.OK
    bad = scenes.model(3, lambda tick: scenes.change(scenes.host(tick), stats=(scenes.kvd(tick, state="silent"),)))
    assert check_status(bad) == Exit.FAILED
    assert check_status(scenes.model(1, lambda tick: Snapshot(time_s=0, mono_s=0))) == Exit.OK


def test_files_written_from_the_screen_never_overwrite(tmp_path: Path) -> None:
    first = write_screen(tmp_path, scenes.model(3), "<svg/>", "text\n", scenes.START_S)
    second = write_screen(tmp_path, scenes.model(3), "<svg/>", "text\n", scenes.START_S)
    assert [path.suffix for path in first] == [".svg", ".txt", ".json"]
    assert not set(first) & set(second)
    assert json.loads(first[2].read_text())["schema"] == "kvtop/1"


# --- the command itself --------------------------------------------------------------------------------------------------


@pytest.fixture
def shm(tmp_path: Path) -> Path:
    root = tmp_path / "shm"
    root.mkdir()
    pool.create_pool("engine-a", 8 * GIB, used_bytes=3 * GIB, prealloc_bytes=GIB, root=root)
    pool.create_pool("engine-b", 4 * GIB, used_bytes=3 * GIB, prealloc_bytes=GIB, root=root)
    return root


@pytest.mark.real("segments")
def test_once_prints_every_segment(cli: Cli, shm: Path) -> None:
    ran = cli("kvtop", "--once", "--shm", shm, env={"COLUMNS": "120"})
    assert ran.rc == 0
    assert ran.stderr == ""
    assert "engine-a" in ran.stdout
    assert "3 GiB" in ran.stdout
    assert "WARN" in ran.stdout
    assert all(len(line) <= 120 for line in ran.stdout.splitlines())
    narrow = cli("kvtop", "--once", "--shm", shm, env={"COLUMNS": "20"})
    assert all(len(line) <= 20 for line in narrow.stdout.splitlines())


@pytest.mark.real("segments")
def test_json_check_and_names(cli: Cli, shm: Path) -> None:
    body = cli("kvtop", "--json", "--shm", shm).json()
    assert body["schema"] == "kvtop/1"
    assert [segment["ipc"] for segment in body["segments"]] == ["engine-a", "engine-b"]
    ran = cli("kvtop", "--check", "--shm", shm)
    assert (ran.rc, ran.stdout.splitlines()) == (1, ["health ▲ WARN", "▲ WARN  engine-b  holds 100 % of its limit"])
    assert cli("kvtop", "--check", "--shm", shm, "--alert", "segment.share=off").rc == 0
    assert cli("kvtop", "--check", "--json", "--shm", shm).rc == 1
    ran = cli("kvtop", "--once", "--shm", shm, "engine-a", "nosuch")
    assert ran.rc == Exit.NOT_FOUND
    assert "no segment of this name" in ran.stdout


@pytest.mark.real("segments")
def test_filter_sort_view_and_ascii(cli: Cli, shm: Path) -> None:
    wide = {"COLUMNS": "120"}
    ran = cli("kvtop", "--once", "--shm", shm, "--view", "segments", "--filter", "limit<5G", "--ascii", env=wide)
    assert ran.stdout.isascii()
    assert "engine-a" not in ran.stdout
    rising = cli("kvtop", "--once", "--shm", shm, "--view", "segments", "--sort", "limit", env=wide).stdout
    falling = cli("kvtop", "--once", "--shm", shm, "--view", "segments", "--sort", "-limit", env=wide).stdout
    assert rising.index("engine-a") < rising.index("engine-b")
    assert falling.index("engine-b") < falling.index("engine-a")
    assert cli("kvtop", "--once", "--shm", shm, env={"PYTHONIOENCODING": "ascii", "COLUMNS": "80"}).stdout.isascii()


@pytest.mark.real("segments")
def test_with_r_two_readings_give_rates(cli: Cli, shm: Path) -> None:
    body = cli("kvtop", "--json", "--shm", shm, "-r", "0.2").json()
    assert body["segments"]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ([], 2, "kvtop needs a terminal"),
        (["-r", "0"], 2, "refresh interval out of range"),
        (["-r", "soon"], 2, "not a duration"),
        (["--once", "--view", "segmets"], 2, "no view named 'segmets'"),
        (["--once", "--theme", "pink"], 2, "no theme named 'pink'"),
        (["--once", "--sort", "colour"], 2, "no column 'colour'"),
        (["--once", "--filter", "used>"], 2, "filter 'used>': no number stands behind used>"),
        (["--json", "--filter", "nosuch>1"], 2, "no column 'nosuch' here"),
        (["--export-svg", "/tmp/x", "--filter", "!"], 2, "nothing stands behind the exclamation mark"),
        (["--once", "--alert", "x>y"], 2, "not a number"),
        (["--once", "--replay", "/nonexistent"], 3, "no recording /nonexistent"),
        (["--once", "--at", "03:10"], 2, "--at needs --replay"),
        (["--once", "--record", "x", "--replay", "y"], 2, "--record and --replay do not go together"),
        (["--once", "--metrics", "ftp://x"], 2, "not an engine's address"),
        (["--record", "/proc/x"], 1, "cannot record to /proc/x"),
        (["--record", "x", "--record-max", "1K"], 2, "--record-max is too small"),
        (["--export-svg", "/tmp/x", "--size", "0x5"], 2, "not a size of a screen"),
    ],
)
def test_what_cannot_be_meant_is_one_line_and_a_hint(cli: Cli, words: list[str], code: int, message: str, tmp_path: Path) -> None:
    ran = cli("kvtop", *words, "--shm", tmp_path)
    assert ran.rc == code
    assert ran.stdout == ""
    first, *rest = ran.stderr.splitlines()
    assert first.startswith("kvtop: error: ")
    assert message in first
    assert len(rest) <= 1


@pytest.mark.real("segments")
def test_a_recording_is_printed_and_drawn(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "a.kvrec"
    with Writer(path) as writer:
        for tick in range(90):
            writer.write(scenes.host(tick))
    wide = {"COLUMNS": "120", "TZ": "UTC"}
    late = cli("kvtop", "--once", "--replay", path, env=wide).stdout
    early = cli("kvtop", "--once", "--replay", path, "--at", "00:00:30", env=wide).stdout
    assert "llama-70b" in late
    assert late != early
    picture = tmp_path / "a.svg"
    ran = cli("kvtop", "--export-svg", picture, "--size", "100x30", "--replay", path, env=wide)
    assert (ran.rc, ran.stdout, ran.stderr) == (0, "", "")
    assert picture.read_text().startswith("<svg ")
    before = picture.read_text()
    cli("kvtop", "--export-svg", picture, "--size", "100x30", "--replay", path, env=wide)
    assert picture.read_text() == before, "the same recording, the same picture"


def _readings(path: Path) -> int:
    try:
        recording = Recording(path)
    except KvError:
        return 0
    try:
        return len(recording)
    finally:
        recording.close()


@pytest.mark.real("segments")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_recording_without_a_screen_until_told_to_stop(shm: Path, tmp_path: Path, number: signal.Signals) -> None:
    path = tmp_path / "a.kvrec"
    words = [SCRIPTS / "kvtop", "--record", path, "-r", "0.1", "--shm", shm]
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: _readings(path) >= 3, timeout_s=30, what="three readings")
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (Exit.INTERRUPTED if number == signal.SIGINT else Exit.OK, "", "")
    recording = Recording(path)
    assert len(recording) >= 3
    assert recording.damage == []
    assert recording._where[-1][1] < path.stat().st_size, "the last reading is whole"
    assert {segment.name for segment in recording.at(len(recording) - 1).segments} == {"engine-a", "engine-b"}
    recording.close()


@pytest.mark.real("segments")
@pytest.mark.parametrize("words", [[], ["--once"], ["--json"], ["--check", "--alert", "segment.share=off"]])
def test_a_reading_that_could_not_be_recorded_is_a_failure(shm: Path, tmp_path: Path, words: list[str]) -> None:
    """The kernel's own limit for files, as `ulimit -f 1` sets it: the file takes its header and no more."""
    path = tmp_path / "a.kvrec"
    command = shlex.join(map(str, [SCRIPTS / "kvtop", "--record", path, "--shm", shm, *words]))
    # The limit is in units of 1 KiB: fill the file to it first.
    path.write_bytes(FILE_HEADER.pack(MAGIC, VERSION, 0, 0) + b"\0" * 1000)
    ran = subprocess.run(["bash", "-c", f"ulimit -f 1; {command} </dev/null"], capture_output=True, text=True, timeout=30)
    assert ran.returncode == Exit.FAILED
    error, hint = ran.stderr.splitlines()
    assert error.startswith("kvtop: error: the reading was not recorded to ")
    assert error.endswith("a.kvrec: File too large")
    assert hint.startswith("hint: free some room")
    assert bool(ran.stdout) == bool(words), "what was asked for is printed all the same"


@pytest.mark.real("segments")
def test_a_damaged_recording_is_shown_and_is_a_failure(cli: Cli, tmp_path: Path) -> None:
    path, picture = tmp_path / "a.kvrec", tmp_path / "a.svg"
    with Writer(path) as writer:
        for tick in range(KEY_EVERY + 9):
            writer.write(scenes.host(tick))
    data = bytearray(path.read_bytes())
    data[3000] ^= 0x40
    path.write_bytes(data)
    env = {"TZ": "UTC", "COLUMNS": "150"}
    for words in (["--once"], ["--json"], ["--export-svg", picture]):
        ran = cli("kvtop", *words, "--replay", path, env=env)
        assert ran.rc == Exit.FAILED
        assert ran.stderr.startswith(f"kvtop: error: recording {path} is damaged at byte ")
        assert "readings between 2026-01-01 00:00:" in ran.stderr
        assert "and 00:05:01 cannot be shown" in ran.stderr
        assert len(ran.stderr.splitlines()) == 1
    assert picture.read_text().startswith("<svg ")
    damage = cli("kvtop", "--json", "--replay", path, env=env)
    (told,) = json.loads(damage.stdout)["recording"]["damage"]
    assert (told["until_s"] - scenes.START_S, told["file"]) == (KEY_EVERY + 1, str(path))
    there = cli("kvtop", "--once", "--replay", path, "--at", "00:05:01", env=env).stdout
    assert "WARN  recording  " in there, "the first reading after it says so too"
    assert "recording  at least 2" in there
    outside = cli("kvtop", "--once", "--replay", path, "--at", "12:00", env=env)
    assert (outside.rc, outside.stdout) == (Exit.NOT_FOUND, "")
    assert "12:00 is not in " in outside.stderr
    assert "hint: it holds 2026-01-01 00:00:00 to 00:05:08" in outside.stderr


def test_text_and_json_never_import_textual(shm: Path) -> None:
    for words in (["--once"], ["--json"], ["--check"], ["--show-config"], ["--once", "--view", "tiers"], ["--version"]):
        ran = run_python(
            "import sys; from kvtools.cli import run\n"
            f"sys.argv = ['kvtop', *{words!r}, '--shm', {str(shm)!r}]\n"
            "try: run('kvtop', 'kvtop.app:app')\n"
            "except SystemExit: pass\n"
            "heavy = ('textual', 'rich', 'psutil', 'torch', 'asyncio')\n"
            "print(sorted(m for m in sys.modules if m.partition('.')[0] in heavy), file=sys.stderr)"
        )
        assert ran.stderr.strip() == "[]", words
    assert run_python("import sys, kvtop.app; assert 'textual' not in sys.modules and 'msgspec' not in sys.modules").rc == 0


@pytest.mark.real("segments")
def test_names_views_and_themes_complete(shm_name: Callable[[], str]) -> None:
    from kvtop.app import _segments, _themes, _views

    name = shm_name()
    pool.create_pool(name, GIB)
    assert name in _segments(name[:-1])
    assert _segments("nothing-begins-like-this") == []
    assert _views("seg") == ["segments"]
    assert _themes("sa") == ["safe"]


# --- settings --------------------------------------------------------------------------------------------------------------


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    path = tmp_path / "kvtop.yaml"
    path.write_text("refresh: 5s\ntheme: safe\nascii: true\nalerts: ['segment.share>=90']\nkeys: {limit: L}\n")
    environ = {"KVTOP_CONFIG": str(path), "KVTOP_REFRESH": "3", "KVTOP_READONLY": "1"}
    found = config.load({"refresh": "2", "theme": None}, environ)
    assert {name: found[name].value for name in ("refresh", "theme", "ascii", "readonly", "alerts", "keys", "view")} == {
        "refresh": 2.0, "theme": "safe", "ascii": True, "readonly": True, "alerts": ["segment.share>=90"], "keys": {"limit": "L"},
        "view": "overview",
    }  # fmt: skip
    assert found["refresh"].origin == "flag"
    assert found["readonly"].origin == "env:KVTOP_READONLY"
    assert found["theme"].origin == f"file:{path}"
    assert found["view"].origin == "default"
    assert config.load({}, {"KVTOP_CONFIG": str(path), "KVTOP_ALERTS": "a>1; b>2"})["alerts"].value == ["a>1", "b>2"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("refresh: soon", "not a duration"),
        ("nosuch: 1", "unknown key 'nosuch'"),
        ("[1, 2]", "not a list of settings"),
        ("a: [", "configuration"),
        ("theme: !!timestamp x", "configuration"),
        ("theme: !!int ''", "configuration"),
        ("alerts: x", "alerts"),
        ("keys: [a]", "keys"),
        ("theme: pink", "no theme named 'pink'"),
        ("readonly: maybe", "not yes or no"),
    ],
)
def test_a_wrong_file_names_itself(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "kvtop.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=words) as caught:
        config.load({}, {"KVTOP_CONFIG": str(path)})
    assert str(path) in caught.value.message


def test_no_file_is_fine_unless_it_was_named(tmp_path: Path) -> None:
    assert config.load({}, {"XDG_CONFIG_HOME": str(tmp_path)})["refresh"].value == 1.0
    with pytest.raises(UsageError, match="does not exist"):
        config.load({}, {"KVTOP_CONFIG": str(tmp_path / "gone.yaml")})


def test_show_config_says_where_each_value_came_from(cli: Cli, tmp_path: Path) -> None:
    ran = cli("kvtop", "--show-config", "-r", "2", env={"KVTOP_THEME": "safe", "XDG_CONFIG_HOME": str(tmp_path)})
    lines = [line.split() for line in ran.stdout.splitlines()]
    assert ["refresh", "2.0", "flag"] in lines
    assert ["theme", "safe", "env:KVTOP_THEME"] in lines
