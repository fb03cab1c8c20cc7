"""What changes something outside kvtop: asked first, done exactly, refused when things moved, and gone under --readonly."""

import asyncio
import re
from pathlib import Path

import pytest
from textual.pilot import Pilot

from kvtools.errors import KvError
from kvtools.segments import owner, pool
from kvtop.keys import KEYS
from kvtop.model import Model
from kvtop.record import Writer
from kvtop.replay import Player
from kvtop.screens.changes import DeleteDialog, LimitDialog, delete_lines, limit_preview, write_limit
from kvtop.screens.dashboard import Dashboard, Options
from kvtop.screens.dialogs import help_lines
from kvtop.screens.main import MainScreen
from kvtop.source import Source
from kvtop.text import ASCII, plain, width_of
from tests.kvtop import scenes
from tests.kvtop.scenes import GIB, MIB, segment


def _preview(text: str, **fields: object) -> tuple[int | None, str]:
    wanted, lines = limit_preview(segment(**fields), text, 60, ASCII)
    return wanted, "\n".join(plain(line) for line in lines)


@pytest.mark.parametrize(
    ("text", "wanted", "words"),
    [
        ("", None, "a size such as 4G"),
        ("40G", 40 * GIB, "now 48 GiB   then 40 GiB"),
        ("64 GiB", 64 * GIB, "(+16 GiB)"),
        ("31g", 31 * GIB, "holds 1 GiB more than that and has to give it back first"),
        ("80G", 80 * GIB, "above what it reserved at start (64 GiB)"),
        ("1.0005G", 1074278694, "the engine uses whole pages"),
        ("0", 0, "holds 32 GiB more"),
        ("-4G", None, "not a size: '-4G'"),
        ("4 gigs", None, "not a size"),
        ("4,5G", None, "not a size"),
        ("9999T", None, "too large"),
    ],
)
def test_preview_says_what_a_limit_would_do(text: str, wanted: int | None, words: str) -> None:
    found, shown = _preview(text)
    assert found == wanted
    assert words in shown


def test_preview_knows_who_would_obey() -> None:
    assert "nothing will act on this limit" in _preview("4G", owner="stale")[1]
    assert "no owner file: written as asked" in _preview("40G", owner="unknown")[1]


def test_delete_says_how_bad_it_would_be() -> None:
    def said(state: str) -> str:
        return "\n".join(plain(line) for line in delete_lines(segment(owner=state)))

    assert "its engine is alive" in said("live")
    assert "its engine is gone" in said("stale")
    assert "nobody says whether its engine lives" in said("unknown")


@pytest.fixture
def shm(tmp_path: Path) -> Path:
    """A folder with one segment of 8 GiB, 3 used."""
    pool.create_pool("engine-a", 8 * GIB, used_bytes=3 * GIB, root=tmp_path)
    return tmp_path


def _limit(shm: Path) -> int:
    return pool.read_pool("engine-a", root=shm).limit_bytes


def _on(shm: Path, **options: object) -> tuple[Dashboard, Model]:
    model = Model()
    model.take(Source(root=shm).read())
    return Dashboard(model, Source(root=shm), Options(root=shm, view="segments", **options), start_reader=False), model  # type: ignore[arg-type]


async def _settle(app: Dashboard, pilot: Pilot[int]) -> None:
    await app.workers.wait_for_complete()
    await pilot.pause()


def _press(shm: Path, *keys: str, **options: object) -> Model:
    async def run() -> Model:
        app, model = _on(shm, **options)
        async with app.run_test(size=(100, 30)) as pilot:
            await pilot.press(keys[0])
            for key in keys[1:]:
                if len(key) > 1:
                    await pilot.press(key)
                else:
                    app.simulate_key(key)
            await _settle(app, pilot)
            assert type(app.screen) is MainScreen, "no dialog was left open"
            return model

    return asyncio.run(run())


@pytest.mark.real("segments")
def test_a_limit_is_written_after_yes_and_logged(shm: Path) -> None:
    model = _press(shm, "l", *"6G", "enter", "y")
    assert _limit(shm) == 6 * GIB
    assert [(event.subject, event.text) for event in model.log] == [("engine-a", "limit 8 GiB -> 6 GiB written")]
    assert pool.read_pool("engine-a", root=shm).used_bytes == 3 * GIB


@pytest.mark.real("segments")
@pytest.mark.parametrize(
    "answers",
    [("escape",), ("6", "G", "escape"), ("6", "G", "enter", "escape"), ("6", "G", "enter", "n"), ("6", "G", "enter", "enter"),
     ("x", "enter", "escape"), ("enter", "escape")],
)  # fmt: skip
def test_nothing_but_yes_writes_a_limit(shm: Path, answers: tuple[str, ...]) -> None:
    model = _press(shm, "l", *answers)
    assert _limit(shm) == 8 * GIB
    assert not model.log


@pytest.mark.real("segments")
def test_a_limit_that_somebody_else_changed_is_not_overwritten(shm: Path) -> None:
    async def run() -> Model:
        app, model = _on(shm)
        async with app.run_test(size=(100, 30)) as pilot:
            await pilot.press("l", *"6G", "enter")
            pool.write_limit("engine-a", 5 * GIB, root=shm)
            await pilot.press("y")
            await _settle(app, pilot)
            return model

    model = asyncio.run(run())
    assert _limit(shm) == 5 * GIB
    assert "by now" in model.log[-1].text


@pytest.mark.real("segments")
def test_a_limit_is_noted_in_the_owner_file_with_who_asked(shm: Path) -> None:
    with owner.OwnerLock.acquire("engine-a", owner.OwnerInfo(engine="vllm", page_bytes=2 * MIB), root=shm):
        _press(shm, "l", *"6G", "enter", "y")
        found = owner.read_owner("engine-a", root=shm)
        assert found is not None
        assert found.last_limit is not None
        assert found.last_limit.limit_bytes == 6 * GIB
        assert found.last_limit.by.startswith("kvtop, uid ")
        assert Source(root=shm).read().segments[0].limits[-1].state == "pending"


@pytest.mark.real("segments")
def test_a_segment_that_vanished_meanwhile_is_one_line(shm: Path) -> None:
    async def run() -> Model:
        app, model = _on(shm)
        async with app.run_test(size=(100, 30)) as pilot:
            await pilot.press("l", *"6G", "enter")
            pool.remove("engine-a", root=shm)
            await pilot.press("y")
            await _settle(app, pilot)
            return model

    assert "no segment named engine-a" in asyncio.run(run()).log[-1].text
    with pytest.raises(KvError, match="no segment named"):
        write_limit(segment("engine-a"), 1, shm)


@pytest.mark.real("segments")
def test_delete_needs_the_whole_name(shm: Path) -> None:
    for typed in ("", "engine", "engine-A", "engine-a "):
        keys = ["space" if char == " " else "minus" if char == "-" else char for char in typed]
        _press(shm, "d", *keys, "enter", "escape")
        assert (shm / "engine-a").exists(), typed
    model = _press(shm, "d", *"engine", "minus", "a", "enter")
    assert not (shm / "engine-a").exists()
    assert "deleted, it had 3 GiB of 8 GiB in use" in model.log[-1].text


@pytest.mark.real("segments")
def test_delete_takes_a_dead_owners_file_along_and_leaves_a_live_ones(shm: Path) -> None:
    lock = owner.OwnerLock.acquire("engine-a", owner.OwnerInfo(engine="vllm"), root=shm)
    _press(shm, "d", *"engine", "minus", "a", "enter")
    assert (shm / "engine-a.kvtools").exists(), "the file is its owner's while it lives"
    lock.close(remove=False)
    pool.create_pool("engine-a", GIB, root=shm)
    _press(shm, "d", *"engine", "minus", "a", "enter")
    assert not (shm / "engine-a.kvtools").exists()


@pytest.mark.real("segments")
@pytest.mark.parametrize("seen", [True, False], ids=["after-a-tick", "before-the-tick"])
@pytest.mark.parametrize("key", ["d", "l"])
def test_an_engine_that_takes_the_name_while_the_question_stands_keeps_its_segment(shm: Path, key: str, seen: bool) -> None:
    """Its engine was gone when the question was asked: the dialog follows, and where it could not yet, the change is refused."""
    owner.OwnerLock.acquire("engine-a", owner.OwnerInfo(engine="old"), root=shm).close(remove=False)

    async def run() -> tuple[str, Model]:
        app, model = _on(shm)
        async with app.run_test(size=(100, 30)) as pilot:
            await pilot.press(key, *(["6", "G", "enter"] if key == "l" else [*"engine", "minus", "a"]))
            assert "its engine is gone" in _words(app)
            with owner.OwnerLock.acquire("engine-a", owner.OwnerInfo(engine="vllm"), root=shm):
                if seen:
                    app.main.take(Source(root=shm).read())
                    await pilot.pause()
                said = _words(app)
                await pilot.press("y" if key == "l" else "enter")
                await _settle(app, pilot)
                assert _limit(shm) == 8 * GIB
                assert (shm / "engine-a.kvtools").exists()
            return said, model

    said, model = asyncio.run(run())
    if seen:
        assert "its engine is gone" not in said
        assert "it changed just now" in said
    else:
        assert "belongs to a running engine" in model.log[-1].text


@pytest.mark.real("segments")
def test_a_question_about_a_segment_that_is_gone_says_so_and_answers_nothing(shm: Path) -> None:
    async def run() -> str:
        app, _ = _on(shm)
        async with app.run_test(size=(100, 30)) as pilot:
            await pilot.press("d")
            pool.remove("engine-a", root=shm)
            app.main.take(Source(root=shm).read())
            await pilot.press(*"engine", "minus", "a", "enter")
            assert isinstance(app.screen, DeleteDialog)
            return _words(app)

    assert "it is gone by now" in asyncio.run(run())


# --- read-only ---------------------------------------------------------------------------------------------------------


def _everything(app: Dashboard) -> set[str]:
    """What the screen, its hints, its palette and its bindings offer."""
    offered = {choice.name for choice in app.main._commands()}
    offered |= {key.id for key in KEYS if app.main.allows(key)}
    offered |= {binding.binding.id or "" for binding in app.screen.active_bindings.values() if binding.enabled}
    return offered


@pytest.mark.real("segments")
@pytest.mark.parametrize("how", ["readonly", "replay"])
def test_readonly_and_replay_offer_no_mutation_by_any_way(shm: Path, how: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    mutating = {key.id for key in KEYS if key.mutates}
    assert mutating == {"limit", "delete"}
    options: dict[str, object] = {"readonly": True}
    if how == "replay":
        path = tmp_path_factory.mktemp("replay") / "a.kvrec"
        with Writer(path) as writer:
            writer.write(scenes.host(0))
        options = {"player": Player(path)}

    async def run() -> None:
        app, _ = _on(shm, **options)
        async with app.run_test(size=(160, 30)) as pilot:
            for view in ("overview", "segments"):
                app.main.action_view(view)
                await pilot.pause()
                assert not _everything(app) & mutating
                for key in KEYS:
                    if key.mutates:
                        for spelling in key.keys:
                            await pilot.press(spelling)
                        await app.run_action(f"screen.{key.action}")
                        await pilot.pause()
                        assert not isinstance(app.screen, LimitDialog | DeleteDialog)
                screen = "\n".join(scenes.grid_text(app))
                assert "l limit" not in screen
                assert "d delete" not in screen
                await pilot.press("question_mark")
                assert "set the segment's limit" not in "\n".join(scenes.grid_text(app))
                await pilot.press("escape")

    asyncio.run(run())
    assert _limit(shm) == 8 * GIB


def test_without_readonly_they_are_offered() -> None:
    async def run() -> None:
        app = scenes.dashboard(scenes.model(3), view="segments")
        async with app.run_test(size=(160, 30)) as pilot:
            await pilot.pause()
            assert {"limit", "delete"} <= _everything(app)
            app.main.action_view("tiers")
            await pilot.pause()
            assert not {"limit", "delete"} & _everything(app), "only where there are segments"

    asyncio.run(run())


@pytest.mark.real("segments")
def test_every_binding_under_readonly_leaves_shared_memory_as_it_was(shm: Path) -> None:
    """All keys of the table, pressed one after another over a real segment."""
    before = {path.name: path.read_bytes() for path in shm.iterdir()}

    async def run() -> None:
        app, _ = _on(shm, readonly=True, write_dir=shm / "nowhere")
        async with app.run_test(size=(120, 30)) as pilot:
            for key in KEYS:
                if key.id in ("quit", "view-doctor"):
                    continue
                for spelling in key.keys:
                    for one in (spelling, "y", "enter", "escape", "escape"):
                        app.simulate_key(one)
                    await pilot.pause()
            await _settle(app, pilot)

    asyncio.run(run())
    assert {path.name: path.read_bytes() for path in shm.iterdir()} == before


# --- small screens -----------------------------------------------------------------------------------------------------


def _words(app: Dashboard) -> str:
    """The text on the screen as one line, without the frames that break it."""
    rows = [row.strip().strip("│╭╮╰╯─").strip() for row in scenes.grid_text(app)]
    return " ".join(" ".join(rows).split())


@pytest.mark.parametrize("size", [(40, 10), (30, 10), (80, 24)])
def test_warnings_of_a_limit_are_read_whole_on_small_screens(size: tuple[int, int]) -> None:
    async def run() -> None:
        made = scenes.model(1, lambda tick: scenes.change(scenes.host(tick), segments=(segment(),)))
        app = scenes.dashboard(made, view="segments")
        async with app.run_test(size=size) as pilot:
            await pilot.press("l", *"20G")
            await pilot.pause()
            assert "the engine holds 12 GiB more than that and has to give it back first" in _words(app)
            await pilot.press("enter")
            await pilot.pause()
            assert "the engine holds 12 GiB more than that and has to give it back first" in _words(app)
            assert "write it? y yes N no" in _words(app), "the question is never below the edge"
            await pilot.press("n", "l", *"70G")
            await pilot.pause()
            assert "above what it reserved at start (64 GiB): it cannot use the rest" in _words(app)

    asyncio.run(run())


@pytest.mark.parametrize("size", [(40, 10), (80, 24)])
def test_what_deleting_would_do_is_read_whole_on_small_screens(size: tuple[int, int]) -> None:
    async def run() -> None:
        made = scenes.model(1, lambda tick: scenes.change(scenes.host(tick), segments=(segment(),)))
        app = scenes.dashboard(made, view="segments")
        async with app.run_test(size=size) as pilot:
            await pilot.press("d")
            await pilot.pause()
            told = _words(app)
            assert "type its name to delete it: llama-70b" in told
            assert "its engine is alive (pid 4711 runs)" in told
            assert "without its segment it cannot be limited or seen, and engines of kvcached up to 0.1.5 crash" in told
            await pilot.press("x", "enter")
            await pilot.pause()
            assert "that is not its name: nothing was deleted" in _words(app)

    asyncio.run(run())


def test_what_does_not_fit_even_so_is_counted_and_scrolls() -> None:
    async def run() -> None:
        made = scenes.model(1, lambda tick: scenes.change(scenes.host(tick), segments=(segment(),)))
        app = scenes.dashboard(made, view="segments")
        async with app.run_test(size=(34, 8)) as pilot:
            await pilot.press("d")
            await pilot.pause()
            assert "type its name to delete it:" in _words(app)
            assert re.search(r"[0-9] more: PgDn", _words(app))
            assert "limit 48 GiB" not in _words(app)
            await pilot.press("pagedown")
            await pilot.pause()
            assert "limit 48 GiB" in _words(app)
            assert app.screen.field.has_focus, "and typing goes on"

    asyncio.run(run())


def test_every_word_of_the_help_can_be_read() -> None:
    """At any width; the scrollbar covers none of it, and the end can be reached."""
    for width in (30, 36, 76, 118, 126):
        lines = help_lines(KEYS, width)
        assert max(width_of(line) for line in lines) <= width
        text = "\n".join(plain(line) for line in lines)
        assert all(word in text for key in KEYS for word in key.help.split()), width
        assert "…" not in text

    async def run() -> None:
        app = scenes.dashboard(scenes.model(3), view="segments")
        async with app.run_test(size=(40, 10)) as pilot:
            await pilot.press("question_mark")
            await pilot.pause()
            assert "this list, for the view you are in" in _words(app).replace("▁", " ").replace("  ", " ")
            await pilot.press(*["pagedown"] * 12)
            await pilot.pause()
            assert "Esc closes." in _words(app)

    asyncio.run(run())


# --- the log -----------------------------------------------------------------------------------------------------------


@pytest.mark.real("segments")
@pytest.mark.parametrize("keys", [("l", *"6G", "enter", "y"), ("d", *"engine", "minus", "a", "enter")])
def test_what_was_done_here_is_in_the_log_once(shm: Path, keys: tuple[str, ...]) -> None:
    async def run() -> list[str]:
        app, model = _on(shm)
        source = Source(root=shm)
        async with app.run_test(size=(100, 30)) as pilot:
            await pilot.press(*keys)
            await _settle(app, pilot)
            for _ in range(3):
                app.main.take(source.read())
            return [f"{event.level} {event.text}" for event in model.log if event.subject == "engine-a"]

    told = asyncio.run(run())
    assert told == ["info limit 8 GiB -> 6 GiB written" if keys[0] == "l" else "info deleted, it had 3 GiB of 8 GiB in use"]


@pytest.mark.real("segments")
def test_what_somebody_else_did_is_in_the_log_also_after_ours(shm: Path) -> None:
    async def run() -> list[str]:
        app, model = _on(shm)
        source = Source(root=shm)
        async with app.run_test(size=(100, 30)) as pilot:
            await pilot.press("l", *"6G", "enter", "y")
            await _settle(app, pilot)
            app.main.take(source.read())
            for limit in (8, 6):
                pool.write_limit("engine-a", limit * GIB, root=shm)
                app.main.take(source.read())
            # Ours that fails promises nothing: what is then seen is told.
            await pilot.press("l", *"7G", "enter")
            pool.write_limit("engine-a", 5 * GIB, root=shm)
            await pilot.press("y")
            await _settle(app, pilot)
            pool.write_limit("engine-a", 7 * GIB, root=shm)
            app.main.take(source.read())
            return [event.text for event in model.log if event.subject == "engine-a"]

    told = asyncio.run(run())
    assert told[:3] == ["limit 8 GiB -> 6 GiB written", "limit 6 GiB -> 8 GiB", "limit 8 GiB -> 6 GiB"]
    assert "by now" in told[3]
    assert told[4:] == ["limit 6 GiB -> 7 GiB"]
