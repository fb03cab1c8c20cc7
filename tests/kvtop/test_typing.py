"""Keys that come in one burst reach what the keys before them open, exactly as slow ones do."""

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from textual import events

from kvtools.segments import pool
from kvtop.model import Model
from kvtop.screens.dashboard import Dashboard, Options
from kvtop.screens.dialogs import Help, Menu, Palette
from kvtop.screens.main import MainScreen
from kvtop.screens.typing import PATIENCE_S
from kvtop.source import Source
from tests.kvtop import scenes
from tests.kvtop.scenes import GIB

NAMES = {
    " ": "space",
    "-": "minus",
    ":": "colon",
    "/": "slash",
    ">": "greater_than_sign",
    "\n": "enter",
    "\x1b": "escape",
    "?": "question_mark",
}


def burst(app: Dashboard, text: str) -> None:
    """All of `text` in one go, as a terminal's read delivers it: nothing else runs in between."""
    driver = app._driver
    assert driver is not None
    for char in text:
        driver.send_message(events.Key(NAMES.get(char, char), char if char.isprintable() else None))


async def until(pilot: object, condition: Callable[[], object]) -> None:
    for _ in range(500):
        if condition():
            return
        await pilot.pause(0.02)  # type: ignore[attr-defined]
    raise AssertionError("did not happen")


def on(text: str, check: Callable[[Dashboard], object], *, view: str = "segments", app: Dashboard | None = None) -> Dashboard:
    """Type `text` in one burst; `check` must hold soon after."""
    app = app or scenes.dashboard(scenes.model(3), view=view)

    async def run() -> None:
        async with app.run_test(size=(100, 30)) as pilot:
            burst(app, text)
            await until(pilot, lambda: check(app))

    asyncio.run(run())
    return app


def test_a_filter_is_typed_whole() -> None:
    on("/inv>1", lambda a: a.main.prompt.value == "inv>1" and a.main.prompting and not a.main.order.rising)
    on("/qwen\n", lambda a: not a.main.prompting and [row.key for row in a.main.shown] == ["qwen-32b"])
    on("/qwen\x1b", lambda a: not a.main.prompting and len(a.main.shown) == 3)
    on("/qwen\nq", lambda a: a._exit)


def test_a_line_feed_is_enter() -> None:
    """What a terminal makes of Enter while it is not in raw mode yet: typed right behind the command's name."""
    NAMES["\v"] = "ctrl+j"
    on("/qwen\v", lambda a: not a.main.prompting and [row.key for row in a.main.shown] == ["qwen-32b"])
    on(":proc\v", lambda a: a.main.view.id == "processes")


def test_a_command_is_typed_and_run() -> None:
    on(":quit\n", lambda a: a._exit)
    on(":proc\n", lambda a: a.main.view.id == "processes" and len(a.screen_stack) == 1)
    on(":theme safe\n:view\x1b3", lambda a: a.theme == "safe" and a.main.view.id == "tiers")
    on(":sort\x1b?", lambda a: type(a.screen) is Help)
    on(":help\n", lambda a: type(a.screen) is Help, view="overview")
    on(":\x1b:\x1b:", lambda a: type(a.screen) is Palette and len(a.screen_stack) == 2)
    on("sj\n", lambda a: a.main.order.column == "prealloc")
    on("s\x1bs", lambda a: type(a.screen) is Menu)


@pytest.mark.real("segments")
def test_a_limit_and_a_deletion_are_answered_whole(tmp_path: Path) -> None:
    for name in ("engine-a", "engine-b"):
        pool.create_pool(name, 8 * GIB, used_bytes=3 * GIB, root=tmp_path)

    def app() -> Dashboard:
        model = Model()
        model.take(Source(root=tmp_path).read())
        return Dashboard(model, Source(root=tmp_path), Options(root=tmp_path, view="segments"), start_reader=False)

    def limit() -> int:
        return pool.read_pool("engine-a", root=tmp_path).limit_bytes // GIB

    on("gl6G\ny", lambda a: limit() == 6 and a.main.model.log, app=app())
    on("gl5G\nn/x", lambda a: a.main.prompt.value == "x", app=app())
    assert limit() == 6, "n is no"
    on("gl7G\n\n/x", lambda a: a.main.prompt.value == "x", app=app())
    assert limit() == 6, "Enter is no"
    on(":limit\n4G\ny", lambda a: limit() == 4, app=app())
    on("gdengine-b\n\x1b/x", lambda a: a.main.prompt.value == "x", app=app())
    assert (tmp_path / "engine-a").exists(), "another's name deletes nothing"
    on("gdengine-a\n", lambda a: not (tmp_path / "engine-a").exists(), app=app())
    assert (tmp_path / "engine-b").exists()


def test_a_paste_keeps_its_place_among_the_keys() -> None:
    app = scenes.dashboard(scenes.model(3), view="segments")

    async def run() -> None:
        async with app.run_test(size=(100, 30)) as pilot:
            burst(app, "/q")
            driver = app._driver
            assert driver is not None
            driver.send_message(events.Paste("wen"))
            burst(app, "-32b\n")
            await until(pilot, lambda: not app.main.prompting and [row.key for row in app.main.shown] == ["qwen-32b"])

    asyncio.run(run())


def test_any_burst_ends_as_the_same_keys_typed_slowly() -> None:
    """Two keys that open something, in every order, with what is typed into it."""
    words = ("/qwen\n", "s\n", ":tiers\n", "l6G\x1b", "?\x1b", "dx\n\x1b", "j", "2", "\x1b")

    def state(app: Dashboard) -> tuple[object, ...]:
        main = app.main
        return type(app.screen).__name__, main.view.id, main.filter.text, main.order, main.grid.cursor, main.prompting

    async def end(text: str, slow: bool) -> tuple[object, ...]:
        app = scenes.dashboard(scenes.model(3), view="segments")
        async with app.run_test(size=(100, 30)) as pilot:
            for char in text if slow else ():
                burst(app, char)
                await pilot.pause()
            if not slow:
                burst(app, text)
            await until(pilot, lambda: app._typist is not None and app._typist.done() and not app._waiting)
            return state(app)

    async def run() -> None:
        for first, second in list(itertools.permutations(words, 2))[::18]:
            text = first + second
            assert await end(text, slow=False) == await end(text, slow=True), text

    asyncio.run(run())


def test_a_screen_that_hangs_costs_a_bounded_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a widget does, keys go on being handled: each waits for the one before it no longer than it must."""
    monkeypatch.setattr("kvtop.screens.typing.PATIENCE_S", 0.1)
    assert PATIENCE_S >= 1

    async def run() -> None:
        app = scenes.dashboard(scenes.model(3), view="segments")
        async with app.run_test(size=(100, 30)):
            held = asyncio.Event()

            async def hang(self: MainScreen, event: object) -> None:
                await held.wait()

            monkeypatch.setattr(MainScreen, "on_key", hang)
            burst(app, "33q")
            async with asyncio.timeout(20):
                while app._waiting or app._typist is None or not app._typist.done():
                    await asyncio.sleep(0.02)
                held.set()
                while not app._exit:
                    await asyncio.sleep(0.02)

    asyncio.run(run())
