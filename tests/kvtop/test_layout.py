"""Every view fits every terminal, from 1x1 to 300x100: nothing overruns, overlaps or raises, whatever the host looks like."""

import asyncio
import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtop.chrome import State, foot, frame_rows, head
from kvtop.keys import KEYS, VIEWS
from kvtop.model import Model
from kvtop.snapshot import Problem, Snapshot
from kvtop.text import ASCII, width_of
from kvtop.views import VIEWS as VIEW_TABLE
from kvtop.views.base import pane_lines, share_height
from tests.kvtop import scenes

WILD_NAMES = ("[bold]x[/nope]", "名前-日本語-セグメント", "x" * 255, "a\x1b[31mb\nc", "é", "-", "ﷺ", "👩‍👩‍👧")


def _wild(tick: int) -> Snapshot:
    """A host on which everything is odd at once."""
    segments = tuple(
        scenes.segment(name, limit_bytes=limit, used_bytes=used, owner=owner, model=name, devices=(name,) * 3)
        for name, (limit, used, owner) in zip(
            WILD_NAMES, itertools.cycle([(0, 5, "stale"), (1, 1 << 49, "unknown"), (1 << 49, 0, "live")]), strict=False
        )
    )
    stats = (
        scenes.kvd(tick, state="gone", corruptions_total=1e18, rejections_total=5, quarantine_bytes=1 << 45),
        scenes.kvd(tick, instance="other", tier_breaker_open__nvme0=1),
        scenes.kvd(0, instance="\x07bell"),
    )
    if tick % 2:
        return scenes.host(tick, segments=60, stats=stats, problems=(Problem(source="x" * 300, message="y" * 300),))
    return scenes.change(scenes.host(tick), segments=segments, stats=stats, shm_total_bytes=0)


def _nothing(tick: int) -> Snapshot:
    return Snapshot(time_s=tick, mono_s=tick)


MODELS = {
    "busy": scenes.model(30),
    "wild": scenes.model(31, _wild),
    "wilder": scenes.model(30, _wild, glyphs=ASCII),
    "nothing": scenes.model(2, _nothing),
    "before": Model(),
}


@pytest.mark.parametrize("scene", sorted(MODELS))
@pytest.mark.parametrize("view", sorted(VIEW_TABLE))
@settings(max_examples=12, deadline=None)
@given(st.integers(1, 300), st.integers(1, 100))
def test_the_parts_of_a_view_stay_inside(scene: str, view: str, width: int, height: int) -> None:
    model, chosen = MODELS[scene], VIEW_TABLE[view]
    up, low = frame_rows(height)
    body = height - up - low
    assert body >= 0
    rows = chosen.rows(model)
    above = chosen.above(model, width, max(0, body - 4))
    assert len(above) <= max(0, body - 4)
    assert all(width_of(line) <= width for line in above)
    share = share_height(body, len(above), chosen.pane, len(rows))
    assert min(share.above, share.table, share.pane) >= 0
    assert share.above + share.table + share.pane == body
    assert share.table >= min(body, 2), "the table is never squeezed out"
    for row in [None, *rows[:3]]:
        for size in (share.pane, body):
            lines = pane_lines(chosen, model, row, width, size)
            assert len(lines) <= max(0, size)
            assert all(width_of(line) == width for line in lines)
            whole = pane_lines(chosen, model, row, width, size, whole=True)
            assert len(whole) >= len(lines)
    state = State(view=view, paused=True, readonly=True, filter="x" * 50, banner="something is wrong", shown=3, total=5)
    for line in [*head(model, state, width, up), foot(KEYS, state, width, model)]:
        assert width_of(line) == width


@given(st.integers(-5, 200), st.integers(0, 200), st.integers(0, 60), st.integers(0, 300))
def test_heights_always_add_up(height: int, above: int, pane: int, rows: int) -> None:
    share = share_height(height, above, pane, rows)
    assert share.above + share.table + share.pane == max(0, height)
    assert min(share.above, share.table, share.pane) >= 0
    assert share.above <= above


def _sizes() -> list[tuple[int, int]]:
    """The corners, very small ones, and a reproducible handful between."""
    chance = random.Random(8)
    known = [(1, 1), (300, 100), (1, 100), (300, 1), (40, 10), (80, 24), (200, 50), (99, 24)]
    small = [(2, 2), (5, 1), (9, 3), (17, 6), (30, 9), (3, 9), (15, 5), (16, 6), (8, 8)]
    return known + small + [(chance.randint(1, 300), chance.randint(1, 100)) for _ in range(15)]


def test_the_real_screen_survives_every_size() -> None:
    """Resized at any moment, in every view, zoomed and with a dialog open: it draws, fills the terminal, and goes on."""
    app = scenes.dashboard(scenes.model(5, _wild))
    dialogs = 0

    async def run() -> None:
        nonlocal dialogs
        async with app.run_test(size=(80, 24)) as pilot:
            views = itertools.cycle([name for name, _, _ in VIEWS if name in VIEW_TABLE])
            keys = itertools.cycle([(), ("enter",), ("question_mark",), ("slash", "a"), ("colon",), ("l",), ("s",), ("d",)])
            for number, (width, height) in enumerate(_sizes()):
                app.main.action_view("segments" if number % 8 > 4 else next(views))
                for key in next(keys):
                    app.simulate_key(key)
                app.main.take(_wild(6 + number))
                await pilot.resize_terminal(width, height)
                rows = scenes.grid_text(app)
                assert len(rows) == height
                assert app.screen.size == (width, height)
                dialogs += len(app.screen_stack) > 1
                app.simulate_key("escape")
                app.simulate_key("escape")
            await pilot.pause()
            assert len(app.screen_stack) == 1

    asyncio.run(run())
    assert dialogs >= 10, "dialogs were open at many sizes"


@pytest.mark.parametrize("size", [(1, 1), (40, 10), (80, 24), (300, 100)])
def test_the_first_frame_is_there_before_the_first_reading(size: tuple[int, int]) -> None:
    rows = scenes.drive(scenes.dashboard(Model()), size=size)
    assert len(rows) == size[1]
    if size[0] >= 40:
        assert "reading" in "\n".join(rows)
