"""The keyboard contract: every key in the table does what its line says, and help, README and man page say the same table."""

import asyncio
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from textual.pilot import Pilot

from kvtools.errors import UsageError
from kvtop.doctor import Diagnosis
from kvtop.keys import GROUPS, KEYS, VIEWS, by_group, man_table, readme_table, remap, shown, usable
from kvtop.palette import PALETTES
from kvtop.record import Writer
from kvtop.replay import Player
from kvtop.screens.changes import DeleteDialog, LimitDialog
from kvtop.screens.dashboard import Dashboard
from kvtop.screens.dialogs import AlertList, Help, Menu, Palette, help_lines
from kvtop.screens.main import MainScreen
from kvtop.text import plain
from kvtop.views import VIEWS as VIEW_TABLE
from tests.kvtop import scenes

MAN = Path(__file__).resolve().parents[2] / "man" / "man1" / "kvtop.1"

Check = Callable[[MainScreen], object]


def _dialog(kind: type) -> Check:
    return lambda main: type(main.app.screen) is kind


PROOFS: dict[str, tuple[Check, Check]] = {
    # id: (what is looked at before and after, and what must then hold); the second gets the screen after the key
    "quit": (lambda m: None, lambda m: m.app._exit),
    "help": (lambda m: None, _dialog(Help)),
    "palette": (lambda m: None, _dialog(Palette)),
    "pause": (lambda m: m.reader.paused, lambda m: m.reader.paused),
    "refresh": (lambda m: None, lambda m: m.reader._kicked),
    "faster": (lambda m: None, lambda m: m.model.interval_s == 0.5),
    "slower": (lambda m: None, lambda m: m.model.interval_s == 2.0),
    "alerts": (lambda m: None, _dialog(AlertList)),
    "write": (lambda m: None, lambda m: len(list(m.options.write_dir.glob("kvtop-*"))) == 3),
    "theme": (lambda m: None, lambda m: m.app.theme == list(PALETTES)[1]),
    "back": (lambda m: m.model.tags.add("qwen-32b"), lambda m: not m.model.tags),
    **{f"view-{name}": (lambda m: None, lambda m, name=name: m.view.id == name) for name, _, _ in VIEWS},  # type: ignore[misc]
    "next-view": (lambda m: None, lambda m: m.view.id == "tiers"),
    "previous-view": (lambda m: None, lambda m: m.view.id == "overview"),
    "up": (lambda m: m.grid.move(2), lambda m: m.grid.cursor == 1),
    "down": (lambda m: None, lambda m: m.grid.cursor == 1),
    "page-up": (lambda m: m.grid.move(11), lambda m: m.grid.cursor < 11),
    "page-down": (lambda m: None, lambda m: m.grid.cursor > 1),
    "first": (lambda m: m.grid.move(5), lambda m: m.grid.cursor == 0),
    "last": (lambda m: None, lambda m: m.grid.cursor == 11),
    "detail": (lambda m: None, lambda m: m.zoomed and not m.grid.display),
    "filter": (lambda m: None, lambda m: m.prompting and m.app.focused is m.prompt),
    "sort": (lambda m: None, _dialog(Menu)),
    "sort-left": (lambda m: None, lambda m: m.order.column == "state"),
    "sort-right": (lambda m: None, lambda m: m.order.column == "prealloc"),
    "invert": (lambda m: None, lambda m: m.order.rising),
    "follow": (lambda m: None, lambda m: not m.grid.follow),
    "tag": (lambda m: None, lambda m: m.model.tags == {"llama-70b"}),
    "limit": (lambda m: None, _dialog(LimitDialog)),
    "delete": (lambda m: None, _dialog(DeleteDialog)),
    "doctor-run": (lambda m: setattr(m.model, "doctor", None), lambda m: m.model.doctor is not None),
    "step-back": (lambda m: None, lambda m: _at(m) == 49),
    "step-forward": (lambda m: None, lambda m: _at(m) == 51),
    "minute-back": (lambda m: None, lambda m: _at(m) == 0),
    "minute-on": (lambda m: None, lambda m: _at(m) == 99),
    "replay-first": (lambda m: None, lambda m: _at(m) == 0),
    "replay-last": (lambda m: None, lambda m: _at(m) == 99),
}


def _at(main: MainScreen) -> float:
    assert main.model.snapshot is not None
    return main.model.snapshot.time_s - scenes.START_S


def test_every_action_has_a_proof() -> None:
    assert set(PROOFS) == {key.id for key in KEYS}


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "host.kvrec"
    with Writer(path) as writer:
        for tick in range(100):
            writer.write(scenes.host(tick, segments=12))
    return path


async def _prove(app: Dashboard, pilot: Pilot[int], name: str, key: str) -> None:
    before, after = PROOFS[name]
    before(app.main)
    await pilot.press(key)
    for _ in range(100):  # what runs on a thread takes a moment
        if after(app.main):
            return
        await pilot.pause(0.02)
    raise AssertionError(f"{key} ({name}) did not do what its line says")


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.id)
def test_each_key_does_what_it_says(key: object, tmp_path: Path, recording: Path) -> None:
    """Every spelling of every key, on a fresh dashboard, in a view where the table says it applies."""
    found = next(one for one in KEYS if one is key)
    view = max(found.where) if found.where else "segments"

    async def run(spelling: str) -> None:
        player = Player(recording) if found.replay else None
        model = scenes.model(0)
        for snapshot in player.seek(50) if player else [scenes.host(50, segments=12)]:
            model.take(snapshot)
        options = {
            "view": view,
            "player": player,
            "write_dir": tmp_path,
            "examine": lambda: Diagnosis("ready", "usable", (), "", 0, 0),
        }
        app = scenes.dashboard(model, **options)
        async with app.run_test(size=(140, 20)) as pilot:
            await _prove(app, pilot, found.id, spelling)
        if player:
            player.close()

    for spelling in found.keys:
        asyncio.run(run(spelling))
        for path in tmp_path.glob("kvtop-*"):
            path.unlink()


def test_no_key_is_bound_twice() -> None:
    spelled = [name for key in KEYS for name in key.keys]
    assert len(spelled) == len(set(spelled))
    assert len({key.id for key in KEYS}) == len(KEYS)


def test_groups_and_views_are_complete() -> None:
    assert {key.group for key in KEYS} == {name for name, _ in GROUPS}
    assert list(VIEW_TABLE) == [name for name, _, _ in VIEWS]
    assert all(view.title == title for view, (_, title, _) in zip(VIEW_TABLE.values(), VIEWS, strict=True))


def test_help_lists_exactly_what_works_here() -> None:
    for view, readonly, replay in (("segments", False, False), ("tiers", True, False), ("segments", False, True)):
        here = [key for key in KEYS if usable(key, view=view, readonly=readonly, replay=replay)]
        text = "\n".join(plain(line) for line in help_lines(here, 78))
        for key in KEYS:
            assert (key.help[:40] in text) == (key in here), (view, key.id)


def test_remapped_keys_work_and_are_what_help_and_hints_show() -> None:
    keys = remap({"limit": "L", "help": "H,ctrl+h"})

    async def run() -> None:
        app = scenes.dashboard(keys=keys, view="segments")
        async with app.run_test(size=(120, 20)) as pilot:
            await pilot.press("l")
            assert type(app.screen) is MainScreen, "the old key is free"
            await pilot.press("L")
            assert type(app.screen) is LimitDialog
            await pilot.press("escape", "H")
            assert type(app.screen) is Help
            assert "H C-h" in "\n".join(plain(line) for line in app.screen.body.lines)
            await pilot.press("escape")
            assert "L limit" in scenes.grid_text(app)[-1]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("wanted", "words"),
    [({"nosuch": "x"}, "no action named 'nosuch'"), ({"limit": "q"}, "'q' is both"), ({"limit": " , "}, "at least one key")],
)
def test_remapping_that_cannot_be_meant(wanted: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        remap(wanted)


def test_the_man_page_holds_the_key_table() -> None:
    text = MAN.read_text()
    begin, end = '.\\" begin keys: written by python -m kvtop.keys man\n', '.\\" end keys\n'
    assert text.partition(begin)[2].partition(end)[0] == man_table(), "run: python -m kvtop.keys man"


def test_the_readme_table_names_every_key() -> None:
    table = readme_table()
    assert all(f"`{shown(name)}`" in table for key in KEYS for name in key.keys)
    assert len(table.splitlines()) == 2 + sum(len(rows) for _, rows in by_group(KEYS))
