"""The smaller sources and outputs: engines' metrics over HTTP, GPUs, the reading thread, replays, pictures."""

import threading
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from kvtools.devices import Device
from kvtools.errors import NotFound, UsageError
from kvtop.engines import Engines, check_url, fetch, parse
from kvtop.gpus import EVERY_S, NONE_EVERY_S, Gpus
from kvtop.reader import Reader
from kvtop.record import Writer
from kvtop.replay import Player
from kvtop.snapshot import Engine, Snapshot
from kvtop.svg import Run, draw
from tests.kvtop import scenes
from tests.kvtop.scenes import GIB

PAGE = """# HELP vllm:num_requests_running Number of requests
vllm:num_requests_running{engine="0",model_name="meta/llama"} 3.0
vllm:num_requests_running{engine="1",model_name="meta/llama"} 2.0
vllm:num_requests_waiting{engine="0",model_name="meta/llama"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="meta/llama"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="meta/llama"} 0.5
vllm:prefix_cache_queries_total{engine="0",model_name="meta/llama"} 1000.0
vllm:prefix_cache_hits_total{engine="0",model_name="meta/llama"} 800.0
vllm:generation_tokens_total{engine="0",model_name="meta/llama"} NaN
vllm:broken{engine="0"}
some_other_metric 7
"""


def test_a_page_of_metrics_is_understood() -> None:
    assert parse(PAGE, "h:1/metrics") == Engine(
        url="h:1/metrics", model="meta/llama", running=5.0, waiting=1.0, cache_used=0.5, prefix_queries=1000.0, prefix_hits=800.0
    )
    assert parse("a 1\n", "u").problem


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("host:8000", "host:8000/metrics"),
        ("http://h:9/x", "h:9/x"),
        ("http://h", "h:80/metrics"),
        ("127.0.0.1:1", "127.0.0.1:1/metrics"),
    ],
)
def test_addresses(text: str, url: str) -> None:
    assert check_url(text) == url


@pytest.mark.parametrize("text", ["", "https://h:1", "h:99999", "file:///etc/passwd", ":8000", "h:x"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(UsageError, match="not an engine's address"):
        check_url(text)


@pytest.fixture
def server() -> Iterator[str]:
    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(PAGE.encode())

        def log_message(self, *words: object) -> None:
            pass

    made = HTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    yield f"127.0.0.1:{made.server_port}"
    made.shutdown()
    thread.join()
    made.server_close()


def test_an_engine_is_asked_over_http_on_a_thread(server: str) -> None:
    engines = Engines([server, "127.0.0.1:9"])
    engines.wait(5.0)
    up, down = engines()
    assert (up.model, up.running, up.problem) == ("meta/llama", 5.0, "")
    assert "no answer" in down.problem
    assert fetch(f"{server}/nowhere").problem == "answers HTTP 404"
    engines.close()


def test_an_engine_that_stops_answering_is_said_to_be_old() -> None:
    now = [0.0]
    go_on = threading.Event()

    def ask(url: str) -> Engine:
        if now[0] > 0:
            go_on.wait(10)
        return Engine(url=url, model="m", running=1.0)

    engines = Engines(["h:1"], ask=ask, mono=lambda: now[0])
    while not engines():
        time.sleep(0.01)
    assert engines()[0].running == 1.0
    now[0] = 60.0
    assert engines()[0].problem == "no answer for 60 s"
    go_on.set()
    engines.close()


def test_gpus_are_asked_now_and_then_and_none_rarely(tmp_path: Path) -> None:
    asked, now = [], [0.0]
    found = [
        Device(0, "amd", "MI300X", "GPU-1", "0000:05:00.0", 192 * GIB, 7 * GIB),
        Device(1, "nvidia", "H200", "GPU-2", "x", 0, 0),
    ]
    folder = tmp_path / "bus/pci/devices/0000:05:00.0"
    (folder / "hwmon/hwmon3").mkdir(parents=True)
    (folder / "gpu_busy_percent").write_text("87\n")
    (folder / "hwmon/hwmon3/temp1_input").write_text("61000\n")

    def find() -> list[Device]:
        asked.append(now[0])
        return found

    gpus = Gpus(find, sys=tmp_path, mono=lambda: now[0])
    one, other = gpus()
    assert (one.name, one.total_bytes, one.used_bytes, one.busy_percent, one.temperature_c) == (
        "MI300X",
        192 * GIB,
        7 * GIB,
        87.0,
        61.0,
    )
    assert (other.total_bytes, other.busy_percent, other.power_w) == (-1, -1.0, -1.0)
    now[0] = EVERY_S / 2
    gpus()
    assert len(asked) == 1
    found.clear()
    now[0] = EVERY_S
    assert gpus() == ()
    now[0] += NONE_EVERY_S - 1
    gpus()
    assert len(asked) == 2


# --- the reading thread ------------------------------------------------------------------------------------------------


class Counting:
    """A source that counts, and fails when told to."""

    def __init__(self) -> None:
        self.count = 0

    def read(self) -> Snapshot:
        self.count += 1
        if self.count == 2:
            raise OSError("no")
        return scenes.host(self.count)


def _wait(condition: object) -> None:
    deadline = time.monotonic() + 5
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_the_reader_reads_goes_on_after_errors_pauses_and_ends() -> None:
    got: list[tuple[Snapshot | None, str]] = []
    source = Counting()
    reader = Reader(source, lambda snapshot, problem: got.append((snapshot, problem)), interval_s=0.01)
    reader.start()
    _wait(lambda: len(got) >= 4)
    assert got[1] == (None, "OSError: no")
    assert got[2][0] is not None
    reader.paused = True
    time.sleep(0.05)
    before = source.count
    time.sleep(0.1)
    assert source.count == before
    reader.kick()
    _wait(lambda: source.count == before + 1)
    reader.paused = False
    _wait(lambda: source.count > before + 2)
    reader.stop()
    assert not reader._thread.is_alive()  # type: ignore[union-attr]


def test_a_kick_reads_at_once_whatever_the_interval() -> None:
    source = Counting()
    reader = Reader(source, lambda snapshot, problem: None, interval_s=3600)
    reader.start()
    _wait(lambda: source.count == 1)
    reader.kick()
    _wait(lambda: source.count == 2)
    reader.stop()


def test_another_interval_is_no_reading_of_its_own() -> None:
    source = Counting()
    reader = Reader(source, lambda snapshot, problem: None, interval_s=3600)
    reader.start()
    _wait(lambda: source.count == 1)
    reader.paused = True
    for interval_s in (1800, 0.001, 3600):
        reader.interval_s = interval_s
        time.sleep(0.02)
    assert source.count == 1
    reader.paused = False
    _wait(lambda: source.count == 2)
    reader.interval_s = 1800
    time.sleep(0.02)
    assert source.count == 2
    reader.interval_s = 0.001
    _wait(lambda: source.count > 3)
    reader.stop()


# --- replay ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def player(tmp_path: Path) -> Iterator[Player]:
    with Writer(tmp_path / "a.kvrec") as writer:
        for tick in [*range(100), *range(1000, 1100)]:
            writer.write(scenes.host(tick))
    made = Player(tmp_path / "a.kvrec")
    yield made
    made.close()


def _tick(snapshot: Snapshot) -> int:
    return round(snapshot.time_s - scenes.START_S)


def test_a_player_plays_to_the_end_and_stays_there(player: Player) -> None:
    assert [_tick(player.read()) for _ in range(3)] == [0, 1, 2]
    player.seek(198)
    assert [_tick(player.read()) for _ in range(3)] == [1099, 1099, 1099]
    assert player.ended


def test_seeking_gives_what_led_up_to_it(player: Player) -> None:
    past = player.seek(150)
    assert [_tick(one) for one in past[-2:]] == [1049, 1050]
    assert len(past) == 151
    assert _tick(player.read()) == 1051


def test_steps_are_clamped_and_jumps_cross_gaps(player: Player) -> None:
    player.seek(0)
    assert player.step(-5) == 0
    assert player.step(5) == 5
    assert player.step(10_000) == 199
    player.seek(99)
    assert player.after_s(60) == 100, "there is nothing for 900 s: the next reading"
    assert player.after_s(-60) == 39


def test_times_are_found(player: Player, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    try:
        assert player.find("2026-01-01 00:01") == 60
        assert player.find("00:01:05") == 65
        assert player.find("00:17") == 120
        for outside in ("23:59", "2026-01-02 00:01", "2025-12-31 23:59:59", "2030-01-01T12:00"):
            with pytest.raises(NotFound, match=f"{outside} is not in ") as caught:
                player.find(outside)
            assert caught.value.hint.startswith("it holds 2026-01-01 00:00:00 to 00:"), "with what there is"
        assert player.find("2026-01-01 00:00") == 0, "the minute it begins in"
        assert "00:00:00" in player.where()
        with pytest.raises(UsageError, match="not a time"):
            player.find("yesterday")
    finally:
        monkeypatch.undo()
        time.tzset()


# --- pictures ----------------------------------------------------------------------------------------------------------


def test_a_picture_is_sound_xml_and_fetches_nothing() -> None:
    rows = [[Run("a <b> & c", "#ffffff", "#202020", True), Run("▇▇▃▃··│─╭╮╰╯█", "#336699")], [Run("日本 x", "#ffffff")]]
    text = draw(rows, 30, background="#000000", foreground="#ffffff", title="kv<top>")
    root = ET.fromstring(text)
    words = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert words[:1] == ["kv<top>"]
    assert words[1:] == ["a", "<b>", "&", "c", "日本", "x"]
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "href" not in text
    assert "@import" not in text


def test_a_long_bar_is_one_rectangle() -> None:
    text = draw([[Run("▇" * 20, "#336699")]], 20, background="#000", foreground="#fff", title="")
    assert text.count('fill="#336699"') == 1


@pytest.mark.parametrize("theme", ["dusk", "paper", "mono"])
def test_the_real_screen_becomes_a_picture(theme: str) -> None:
    text = scenes.dashboard(scenes.model(5), theme=theme).picture((100, 30))
    words = " ".join(node.text or "" for node in ET.fromstring(text).iter("{http://www.w3.org/2000/svg}text"))
    assert "llama-70b" in words
    assert "overview" in words.lower()
