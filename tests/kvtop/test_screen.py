"""The dashboard at work: it follows the host, survives its sources, keeps the cursor on the thing, and repaints little."""

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from kvtop.doctor import Check, Diagnosis
from kvtop.model import Model
from kvtop.palette import PALETTES
from kvtop.screens.dashboard import Dashboard, Options
from kvtop.snapshot import Snapshot, Stats
from kvtop.text import ASCII, safe
from kvtop.views import VIEWS
from tests.kvtop import scenes
from tests.kvtop.scenes import GIB, segment


@pytest.fixture(autouse=True)
def _utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def test_the_overview_at_80x24() -> None:
    """A grid as text: what an operator sees in a plain terminal. Change it on purpose only."""
    rows = scenes.drive(scenes.dashboard(scenes.model(30)), size=(80, 24))
    assert rows[0].rstrip() == " kvtop  ● OK  gpu-host-3               3 segments, 1 daemon  every 1 s  00:00:29"
    text = "\n".join(rows)
    for words in ("arena", "now 90.9 %", "llama-70b", "● live", "USED▼", "q quit", "3 rows"):
        assert words in text


@pytest.mark.parametrize("size", [(60, 16), (120, 40)])
@pytest.mark.parametrize("view", ["overview", "segments", "tiers", "models", "processes", "events", "metrics", "doctor"])
def test_every_view_shows_its_rows(view: str, size: tuple[int, int]) -> None:
    model = scenes.model(5)
    model.note("warn", "llama-70b", "something happened")
    check = Check("shm.size", "limits", "fail", "shm", "64 MiB", "1 GiB", "too small", "make it larger", "host", "P")
    model.doctor = Diagnosis("not-ready", "usable", (check,), "make it larger", 0, 1.0)
    rows = scenes.drive(scenes.dashboard(model, view=view), size=size)
    text = "\n".join(rows)
    wanted = {
        "overview": "llama-70b", "segments": "qwen-32b", "tiers": "nvme0", "models": "meta/llama-3.1-70b", "processes": "4711",
        "events": "something", "metrics": "a_name_of_the_future", "doctor": "64 MiB",
    }  # fmt: skip
    if view == "metrics" and size[1] < 24:
        wanted["metrics"] = "arena_bytes"
    assert wanted[view] in text
    assert len(rows) == size[1]


def test_what_turns_critical_is_said_in_every_view() -> None:
    async def run() -> None:
        app = scenes.dashboard(scenes.model(3), view="metrics")
        async with app.run_test(size=(120, 30), notifications=True) as pilot:
            app.main.take(scenes.change(scenes.host(4), stats=(scenes.kvd(4, state="silent"),)))
            await _until(pilot, lambda: "silent for" in "\n".join(scenes.grid_text(app)))
            assert "CRIT" in scenes.grid_text(app)[0]

    asyncio.run(run())


def test_numbers_follow_the_host() -> None:
    async def run() -> None:
        app = scenes.dashboard(Model())
        async with app.run_test(size=(120, 30)) as pilot:
            for used in (1, 2, 3):
                app.main.take(scenes.change(scenes.host(used), segments=(segment(used_bytes=used * GIB),)))
                await pilot.pause()
                assert f"{used} GiB" in next(row for row in scenes.grid_text(app) if row.startswith("llama-70b"))
            app.main.take(scenes.change(scenes.host(4), segments=()))
            await pilot.pause()
            assert "no segments in /dev/shm" in "\n".join(scenes.grid_text(app))

    asyncio.run(run())


def test_a_source_that_fails_is_a_banner_and_then_recovers() -> None:
    class Flaky:
        broken = False
        tick = 0

        def read(self) -> Snapshot:
            self.tick += 1
            if self.broken:
                raise ValueError("shared memory is on fire")
            return scenes.host(self.tick)

    source = Flaky()

    async def run() -> None:
        model = Model(interval_s=0.05)
        app = Dashboard(model, source, Options())
        async with app.run_test(size=(100, 24)) as pilot:
            await _until(pilot, lambda: "llama-70b" in "\n".join(scenes.grid_text(app)))
            source.broken = True
            await _until(pilot, lambda: "ValueError: shared memory is on fire" in scenes.grid_text(app)[0])
            assert "llama-70b" in "\n".join(scenes.grid_text(app)), "the last good numbers stay"
            source.broken = False
            await _until(pilot, lambda: "on fire" not in scenes.grid_text(app)[0])
            assert model.health == "OK"

    asyncio.run(run())


def test_a_source_that_hangs_never_blocks_the_screen() -> None:
    go_on = threading.Event()

    class Stuck:
        def read(self) -> Snapshot:
            go_on.wait(20)
            return scenes.host(1)

    async def run() -> None:
        app = Dashboard(Model(interval_s=0.05), Stuck(), Options())
        async with app.run_test(size=(100, 24)) as pilot:
            await _until(pilot, lambda: "reading for" in scenes.grid_text(app)[0], 8.0)
            begun = time.monotonic()
            await pilot.press("question_mark")
            assert time.monotonic() - begun < 1.0
            await pilot.press("escape")
            go_on.set()
            await _until(pilot, lambda: "llama-70b" in "\n".join(scenes.grid_text(app)))

    asyncio.run(run())


async def _until(pilot: object, condition: object, timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "did not happen in time"
        await pilot.pause(0.02)  # type: ignore[attr-defined]


def test_a_tick_repaints_only_what_changed() -> None:
    """The bound is on repainted rows, not on time: one changed segment of a hundred costs a few rows, a quiet tick almost none."""

    async def run() -> None:
        app = scenes.dashboard(Model(), view="segments")
        async with app.run_test(size=(120, 60)) as pilot:
            quiet = scenes.host(0, segments=100, stats=())
            app.main.take(quiet)
            # Trends are drawn from history: let their first rows fill, so that only changes remain.
            for tick in range(1, 60):
                app.main.take(scenes.change(quiet, time_s=quiet.time_s + tick, mono_s=float(tick)))
            await pilot.pause()
            grid = app.main.grid
            before = grid.painted
            app.main.take(scenes.change(quiet, time_s=quiet.time_s + 60, mono_s=60.0))
            assert grid.painted - before == 0
            changed = list(quiet.segments)
            name = grid.rows[3].key
            at = next(i for i, one in enumerate(changed) if one.name == name)
            changed[at] = scenes.change(changed[at], used_bytes=changed[at].used_bytes + (2 << 20))
            app.main.take(scenes.change(quiet, segments=tuple(changed), time_s=quiet.time_s + 61, mono_s=61.0))
            assert 1 <= grid.painted - before <= 3

    asyncio.run(run())


def test_rows_out_of_view_are_never_painted() -> None:
    async def run() -> None:
        app = scenes.dashboard(Model(), view="segments")
        async with app.run_test(size=(120, 24)) as pilot:
            app.main.take(scenes.host(0, segments=500))
            await pilot.pause()
            before = app.main.grid.painted
            app.main.take(scenes.host(7, segments=500))
            assert app.main.grid.painted - before <= 24

    asyncio.run(run())


def test_the_cursor_stays_on_the_thing_and_without_follow_on_the_line() -> None:
    def tick(number: int, first: int, second: int) -> Snapshot:
        return scenes.change(scenes.host(number), segments=(segment("a", used_bytes=first), segment("b", used_bytes=second)))

    async def run() -> None:
        app = scenes.dashboard(Model(), view="segments")
        async with app.run_test(size=(100, 20)) as pilot:
            app.main.take(tick(0, 2, 1))
            assert app.main.grid.key == "a"
            app.main.take(tick(1, 1, 2))
            assert (app.main.grid.key, app.main.grid.cursor) == ("a", 1)
            await pilot.press("F")
            app.main.take(tick(2, 2, 1))
            assert (app.main.grid.key, app.main.grid.cursor) == ("b", 1)

    asyncio.run(run())


def test_filter_narrows_while_typing_and_escape_clears_it() -> None:
    async def run() -> None:
        app = scenes.dashboard(scenes.model(3), view="segments")
        async with app.run_test(size=(100, 24)) as pilot:
            await pilot.press("slash", *"qwen")
            await pilot.pause()
            assert [row.key for row in app.main.shown] == ["qwen-32b"]
            await pilot.press("enter")
            assert not app.main.prompting
            assert "1 of 3" in scenes.grid_text(app)[-1]
            await pilot.press("q")
            assert app._exit, "after Enter, keys are keys again"

        app = scenes.dashboard(scenes.model(3), view="segments", filter="nothing-like-it")
        async with app.run_test(size=(100, 24)) as pilot:
            assert "nothing matches" in "\n".join(scenes.grid_text(app))
            await pilot.press("escape")
            assert len(app.main.shown) == 3

    asyncio.run(run())


def test_tagged_rows_stay_on_top() -> None:
    async def run() -> None:
        app = scenes.dashboard(scenes.model(3), view="segments")
        async with app.run_test(size=(100, 24)) as pilot:
            await pilot.press("end", "space")
            assert app.main.shown[0].key == "mistral-7b"
            assert app.main.grid.key == "mistral-7b", "the cursor went along"

    asyncio.run(run())


def test_mouse_opens_tabs_sorts_by_titles_and_picks_rows() -> None:
    async def run() -> None:
        app = scenes.dashboard(scenes.model(3), view="segments")
        async with app.run_test(size=(120, 24)) as pilot:
            row = scenes.grid_text(app)[1]
            await pilot.click("#head", offset=(row.index("3 Tiers"), 1))
            assert app.main.view.id == "tiers"
            await pilot.click("#head", offset=(row.index("2 Segments"), 1))
            titles = scenes.grid_text(app)[2]
            await pilot.click("#grid", offset=(titles.index("LIMIT"), 0))
            assert app.main.order.column == "limit"
            await pilot.click("#grid", offset=(3, 3))
            assert app.main.grid.cursor == 2
            await pilot.click("#grid", offset=(3, 2), times=2)
            assert app.main.zoomed

    asyncio.run(run())


def test_the_palette_finds_views_and_commands_by_name() -> None:
    async def run() -> None:
        app = scenes.dashboard(scenes.model(3))
        async with app.run_test(size=(100, 30)) as pilot:
            await pilot.press("colon", *"proc", "enter")
            await pilot.pause()
            assert app.main.view.id == "processes"
            await pilot.press("colon", *"theme safe", "enter")
            await pilot.pause()
            assert app.theme == "safe"

    asyncio.run(run())


@pytest.mark.parametrize("size", [(40, 10), (100, 24), (17, 6)])
def test_ascii_reaches_every_corner_of_the_screen(size: tuple[int, int]) -> None:
    """Frames, scrollbars, dialogs, toasts, names from anywhere: nothing but ASCII, in every view, whatever is open."""

    def odd(app: Dashboard) -> set[str]:
        return {char for row in scenes.grid_text(app) for char in row if not char.isascii()}

    async def run() -> None:
        model = scenes.model(40, scenes.foreign, glyphs=ASCII)
        model.note("warn", "名前", "größe")
        check = Check("shm.größe", "limits", "fail", "名前", "é" * 200, "1 GiB", "ü", "大", "日本", "P")
        model.doctor = Diagnosis("not-ready", "usable", (check,), "größer", 0, 1.0)
        app = scenes.dashboard(model)
        async with app.run_test(size=size, notifications=True) as pilot:
            for view in VIEWS:
                app.main.action_view(view)
                await pilot.pause()
                assert not odd(app), view
                await pilot.press("enter")
                await pilot.pause()
                assert not odd(app), f"{view}, zoomed"
            app.main.take(None, "größer als 名前" * 9)
            await pilot.pause()
            assert not odd(app), "the head line"
            app.main._changed("名前" * 30, "warn", "größe " * 30)
            app.main.action_view("segments")
            for keys in (
                (),
                ("F",),
                ("enter",),
                ("question_mark",),
                ("escape", "colon"),
                ("escape", "l"),
                ("escape", "d"),
                ("escape", "s"),
                ("escape", "slash"),
            ):
                await pilot.press(*keys)
                if keys == ("F",) and size[1] > 20:
                    await _until(pilot, lambda: "the cursor follows" in "\n".join(scenes.grid_text(app)))
                await pilot.pause()
                assert not odd(app), (keys, [row for row in scenes.grid_text(app) if not row.isascii()])

    asyncio.run(run())


@pytest.mark.parametrize("name", ["[bold]x[/nope]", "[/]", "a\x1b[31mred\n", "日本語", "[@click=quit]x[/]"])
def test_names_that_look_like_markup_or_escapes_are_only_names(name: str) -> None:
    async def run() -> None:
        model = scenes.model(2, lambda tick: scenes.change(scenes.host(tick), segments=(segment(name),)))
        app = scenes.dashboard(model, view="segments")
        async with app.run_test(size=(100, 30), notifications=True) as pilot:
            for key in ("l", "escape", "d", "escape", "enter", "escape"):
                await pilot.press(key)
                text = "\n".join(scenes.grid_text(app))
                assert "\x1b" not in text
            app.main._changed(name, "warn", "text " + name)
            await pilot.pause()
            await _until(pilot, lambda: "text " in "\n".join(scenes.grid_text(app)))
            assert safe(name) in "\n".join(scenes.grid_text(app))

    asyncio.run(run())


def test_direct_and_its_fallbacks_are_told_with_reasons() -> None:
    schema = (
        scenes.series("direct_load_bytes_total", "counter", "bytes"),
        scenes.series("direct_fallback_total", "counter", reason="no_p2pdma"),
        scenes.series("direct_fallback_total", "counter", reason="nfs"),
    )
    made = Stats(kind="connector", instance="77-0", schema=schema, values=(5 * GIB, 4.0, 9.0))
    model = scenes.model(1, lambda tick: scenes.change(scenes.host(tick), stats=(scenes.kvd(tick), made)))
    text = "\n".join(scenes.drive(scenes.dashboard(model, view="tiers"), size=(120, 30)))
    assert "load bytes 5 GiB" in text
    assert "13 (nfs 9, no_p2pdma 4)" in text


@pytest.mark.parametrize("theme", sorted(PALETTES))
def test_every_theme_draws_the_same_text(theme: str) -> None:
    plain = scenes.drive(scenes.dashboard(scenes.model(3)), size=(100, 30))
    assert scenes.drive(scenes.dashboard(scenes.model(3), theme=theme), size=(100, 30)) == plain, "no meaning hangs on colour"


def test_zoomed_detail_stays_live_and_escape_goes_back() -> None:
    async def run() -> None:
        app = scenes.dashboard(scenes.model(3), view="segments")
        async with app.run_test(size=(100, 24)) as pilot:
            await pilot.press("enter")
            assert "╭─ llama-70b" in scenes.grid_text(app)[2]
            app.main.take(scenes.change(scenes.host(9), segments=(segment(used_bytes=7 * GIB),)))
            await pilot.pause()
            assert "used 7 GiB" in "\n".join(scenes.grid_text(app))
            await pilot.press("escape")
            assert app.main.grid.display

    asyncio.run(run())
