"""Plans: the grammar, the sharing (as properties), and applying all or nothing."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtools.ctl.plan import Candidate, Plan, PlanError, PlanFailed, Share, Target, apply_targets, fill, parse_plan, share_out
from kvtools.errors import NotFound
from kvtools.exits import Exit
from kvtools.segments import owner, pool

GiB, MiB = 1 << 30, 1 << 20


def candidate(name: str, *, limit: int = GiB, used: int = 0, capacity: int = 0, page: int = 0, idle: bool = False) -> Candidate:
    return Candidate(pool.PoolReading(name, limit, used, 0, 0), capacity, page, idle)


def granted(plan: Any, *candidates: Candidate, **more: Any) -> dict[str, int]:
    return {target.name: target.limit_bytes for target in share_out(parse_plan(plan), candidates, **more)}


@pytest.mark.parametrize(
    ("plan", "where"),
    [
        (None, "the plan: not a mapping"),
        ([], "the plan: not a mapping"),
        ({}, "segments: not a mapping"),
        ({"segments": {}}, "names no segments"),
        ({"segments": ["a"]}, "segments: not a mapping"),
        ({"segmnets": {}, "segments": {"a": {"limit": "1G"}}}, "unknown key 'segmnets'"),
        ({"segments": {"a": {}}}, "shares by weight but has no budget"),
        ({"budget": "4X", "segments": {"a": {}}}, "budget: not a size"),
        ({"budget": True, "segments": {"a": {}}}, "budget: not a size"),
        ({"budget": -1, "segments": {"a": {}}}, "budget: not a size"),
        ({"budget": {"gpu": -1}, "segments": {"a": {}}}, r"budget\.gpu"),
        ({"budget": {"gpu": 0, "percent": 0}, "segments": {"a": {}}}, r"budget\.percent"),
        ({"budget": {"gpus": 0}, "segments": {"a": {}}}, "unknown key 'gpus'"),
        ({"budget": "4G", "segments": {"a": {"wieght": 1}}}, r"segments\.a: unknown key 'wieght'"),
        ({"budget": "4G", "segments": {"a": 5}}, r"segments\.a: not a mapping"),
        ({"budget": "4G", "segments": {"a": {"weight": 0}}}, r"segments\.a\.weight"),
        ({"budget": "4G", "segments": {"a": {"weight": "x"}}}, r"segments\.a\.weight"),
        ({"budget": "4G", "segments": {"a": {"weight": float("nan")}}}, r"segments\.a\.weight"),
        ({"budget": "4G", "segments": {"a": {"limit": "1G", "weight": 1}}}, "limit is fixed"),
        ({"budget": "4G", "segments": {"a": {"floor": "2G", "ceiling": "1G"}}}, "ceiling is below the floor"),
        ({"budget": "4G", "segments": {"a": {"priority": 1.5}}}, "priority: not a whole number"),
        ({"budget": "4G", "segments": {"a": {"optional": "yes"}}}, "optional: not true or false"),
        ({"budget": "4G", "segments": {"a": {"floor": "3G"}, "b": {"limit": "2G"}}}, "sum to 5 GiB, the budget is 4 GiB"),
        ({"budget": "4G", "idle_after": "soon", "segments": {"a": {}}}, "idle_after: not a duration"),
        ({"budget": "90%", "segments": {"a": {}}}, "budget: not a size"),
        ({"segments": {True: {"limit": "1G"}}}, "a name has to be text, and YAML reads this one as True"),
        ({"segments": {12: {"limit": "1G"}}}, "YAML reads this one as 12"),
        ({"segments": {None: {"limit": "1G"}}}, "YAML reads this one as None"),
        ({"segments": {"a/b": {"limit": "1G"}}}, "segments: not a segment name: a/b"),
        ({"segments": {".a": {"optional": True, "limit": "1G"}}}, r"segments: not a segment name: \.a"),
        ({"segments": {"a" * 256: {"limit": "1G"}}}, "segments: segment name too long: 256 bytes"),
        ({"budget": "4G", "segments": {"a\x1b[2J": 5}}, r"segments\.a\\x1b\[2J"),
    ],
)
def test_plans_that_cannot_be_meant(plan: Any, where: str) -> None:
    with pytest.raises(PlanError, match=where):
        parse_plan(plan)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["budget", "segments", "idle_after", "limit", "floor", "a*"]), inner, max_size=4)
    ),
)


@given(data=JSON)
def test_any_document_is_a_plan_or_a_plan_error(data: Any) -> None:
    try:
        plan = parse_plan(data)
    except PlanError:
        return
    assert plan.shares


def test_weights_share_what_fixed_limits_leave() -> None:
    plan = {"budget": "40G", "segments": {"a": {"weight": 3}, "b": {"weight": 1}, "c": {"limit": "8G"}}}
    assert granted(plan, candidate("a"), candidate("b"), candidate("c")) == {"a": 24 * GiB, "b": 8 * GiB, "c": 8 * GiB}


def test_floors_and_ceilings_bound_the_shares() -> None:
    plan = {"budget": "40G", "segments": {"a": {"weight": 9, "ceiling": "16G"}, "b": {"floor": "10G"}, "c": {}}}
    assert granted(plan, candidate("a"), candidate("b"), candidate("c")) == {"a": 16 * GiB, "b": 12 * GiB, "c": 12 * GiB}
    plan["segments"]["b"]["floor"] = "20G"  # type: ignore[index]
    assert granted(plan, candidate("a"), candidate("b"), candidate("c")) == {"a": 16 * GiB, "b": 20 * GiB, "c": 4 * GiB}


def test_priorities_are_served_in_order_after_all_floors() -> None:
    plan = {"budget": "40G", "segments": {"a": {"priority": 2, "ceiling": "20G"}, "b": {"priority": 1}, "c": {"floor": "5G"}}}
    assert granted(plan, candidate("a"), candidate("b"), candidate("c")) == {"a": 20 * GiB, "b": 15 * GiB, "c": 5 * GiB}


def test_the_part_of_a_missing_one_goes_to_the_others() -> None:
    plan = {"budget": "40G", "segments": {"a": {"weight": 3}, "b": {}, "c": {"optional": True}}}
    assert granted(plan, candidate("a"), candidate("b")) == {"a": 30 * GiB, "b": 10 * GiB}
    with pytest.raises(NotFound, match="no segment named b"):
        granted(plan, candidate("a"))
    assert granted(plan, candidate("a"), may_be_missing=True) == {"a": 40 * GiB}
    assert granted(plan, may_be_missing=True) == {}


def test_names_win_over_patterns_and_earlier_patterns_over_later() -> None:
    plan = {"segments": {"x*": {"limit": "1G"}, "xy*": {"limit": "2G"}, "xyz": {"limit": "3G"}}}
    pools = [candidate(name) for name in ("xa", "xyz", "xyy", "other")]
    assert granted(plan, *pools) == {"xa": GiB, "xyy": GiB, "xyz": 3 * GiB}


def test_an_idle_one_keeps_its_floor_only() -> None:
    plan = {"budget": "10G", "segments": {"a": {"floor": "1G"}, "b": {}}}
    assert granted(plan, candidate("a", idle=True), candidate("b")) == {"a": GiB, "b": 9 * GiB}


def test_engines_capacity_and_pages_bound_a_share() -> None:
    plan = {"budget": "10G", "segments": {"a": {}, "b": {}, "c": {"limit": "9G"}}}
    a, b, c = candidate("a", capacity=GiB // 4), candidate("b", page=300 * MiB), candidate("c", capacity=8 * GiB)
    assert granted(plan, a, b, c) == {"a": GiB // 4, "b": 5 * 300 * MiB, "c": 8 * GiB}


def test_gentle_takes_nothing_in_use() -> None:
    plan = {"budget": "10G", "segments": {"a": {}, "b": {}}}
    a, b = candidate("a", limit=8 * GiB, used=7 * GiB), candidate("b", limit=2 * GiB)
    assert granted(plan, a, b) == {"a": 5 * GiB, "b": 5 * GiB}
    assert granted(plan, a, b, gentle=True) == {"a": 7 * GiB, "b": 3 * GiB}
    with pytest.raises(PlanError, match="use and floors sum to 14 GiB, the budget leaves 10 GiB"):
        granted(plan, a, candidate("b", limit=8 * GiB, used=7 * GiB), gentle=True)


def test_gentle_takes_nothing_in_use_for_a_fixed_limit_either() -> None:
    plan = {"segments": {"a": {"limit": "1G"}}}
    assert granted(plan, candidate("a", limit=8 * GiB, used=7 * GiB)) == {"a": GiB}
    assert granted(plan, candidate("a", limit=8 * GiB, used=7 * GiB), gentle=True) == {"a": 7 * GiB}
    assert granted(plan, candidate("a", limit=4 * GiB, used=7 * GiB), gentle=True) == {"a": 4 * GiB}, "it is below use already"
    assert granted(plan, candidate("a", limit=8 * GiB, used=GiB // 2), gentle=True) == {"a": GiB}
    with pytest.raises(PlanError, match="what the segments with fixed limits hold exceeds the budget"):
        granted({"budget": "5G", **plan}, candidate("a", limit=8 * GiB, used=7 * GiB), gentle=True)


def test_floors_that_only_patterns_make_too_many_are_found_when_sharing() -> None:
    plan = {"budget": "4G", "segments": {"x*": {"floor": "3G"}}}
    assert granted(plan, candidate("x1")) == {"x1": 4 * GiB}
    with pytest.raises(PlanError, match="cannot be met now: floors sum to 6 GiB"):
        granted(plan, candidate("x1"), candidate("x2"))
    with pytest.raises(PlanError, match="fixed limits exceed the budget"):
        granted({"budget": "4G", "segments": {"x*": {"limit": "3G"}}}, candidate("x1"), candidate("x2"))


members = st.tuples(st.fractions(Fraction(1, 100), 100), st.integers(0, 1000), st.integers(0, 1000)).map(
    lambda m: (m[0], min(m[1], m[2]), max(m[1], m[2]))
)


@given(members=st.lists(members, min_size=1, max_size=6), extra=st.integers(0, 5000))
def test_filling_uses_all_it_may_and_keeps_proportions(members: list[tuple[Fraction, int, int]], extra: int) -> None:
    room = sum(low for _, low, _ in members) + extra
    shares = fill(members, room)
    assert sum(shares) == min(room, sum(high for _, _, high in members))
    free = [share / weight for share, (weight, low, high) in zip(shares, members, strict=True) if low < share < high]
    assert len(set(free)) <= 1, "those at no bound stand at one level"
    for share, (weight, low, high) in zip(shares, members, strict=True):
        assert low <= share <= high
        if free and share == low < high:
            assert share / weight >= free[0]
        if free and low < share == high:
            assert share / weight <= free[0]


@st.composite
def situations(draw: st.DrawFn) -> tuple[Plan, list[Candidate]]:
    shares, candidates = [], []
    for name in "abcde"[: draw(st.integers(1, 5))]:
        page = draw(st.sampled_from([0, 0, 1, 7, 64]))
        capacity = draw(st.sampled_from([0, 0, 50, 500]))
        if draw(st.booleans()):
            floor = draw(st.integers(0, 100))
            ceiling = draw(st.none() | st.integers(floor, 600))
            shares.append(Share(name, None, Fraction(draw(st.integers(1, 9))), floor, ceiling, draw(st.integers(-1, 2))))
        else:
            shares.append(Share(name, draw(st.integers(0, 200))))
        used = draw(st.integers(0, 300))
        limit, idle = draw(st.integers(0, 300)), draw(st.booleans())
        candidates.append(candidate(name, limit=limit, used=used, capacity=capacity, page=page, idle=idle))
    return Plan(tuple(shares), draw(st.integers(0, 2000))), candidates


@given(situation=situations(), gentle=st.booleans())
def test_a_plan_never_exceeds_its_budget_or_anyones_bounds(situation: tuple[Plan, list[Candidate]], gentle: bool) -> None:
    plan, candidates = situation
    try:
        targets = share_out(plan, candidates, gentle=gentle)
    except PlanError:
        return
    assert plan.budget_bytes is not None
    by_name = {c.name: c for c in candidates}
    assert sum(target.limit_bytes for target in targets) <= plan.budget_bytes
    assert [target.name for target in targets] == [share.pattern for share in plan.shares]
    for target in targets:
        share, one = plan.share_of(target.name), by_name[target.name]
        assert share is not None
        kept = gentle and target.limit_bytes == one.reading.limit_bytes
        assert not one.page_bytes or kept or target.limit_bytes % one.page_bytes == 0
        if share.limit_bytes is not None:
            assert target.limit_bytes <= share.limit_bytes or (gentle and target.limit_bytes <= one.reading.limit_bytes)
        elif share.ceiling_bytes is not None and not gentle:
            assert target.limit_bytes <= share.ceiling_bytes
        if share.limit_bytes is None and not (gentle and one.reading.used_bytes):
            assert not one.capacity_bytes or target.limit_bytes <= one.capacity_bytes
        if gentle and not one.idle and not one.page_bytes:
            assert not target.below_use


def targets_for(root: Path, limits: dict[str, int]) -> list[Target]:
    return [Target(pool.read_pool(name, root=root), limit) for name, limit in limits.items()]


def test_lower_first_then_raise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, limit in (("a", 10), ("b", 20), ("c", 5)):
        pool.create_pool(name, limit, root=tmp_path)
    sums = []
    real = owner.change_limit

    def watched(*words: Any, **more: Any) -> pool.LimitChange:
        change = real(*words, **more)
        sums.append(sum(reading.limit_bytes for reading in pool.list_pools(tmp_path).pools))
        return change

    monkeypatch.setattr("kvtools.ctl.plan.change_limit", watched)
    changes = apply_targets(targets_for(tmp_path, {"a": 18, "b": 12, "c": 5}), by="t", root=tmp_path)
    assert [change.after.name for change in changes] == ["b", "a"], "what stays as it is, is not written"
    assert max(sums) <= 35


def test_a_failure_takes_back_what_was_written(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        pool.create_pool(name, 10, root=tmp_path)
    targets = targets_for(tmp_path, {"a": 1, "b": 2, "c": 30})
    pool.write_limit("c", 11, root=tmp_path)
    with pytest.raises(PlanFailed, match="segment c: the limit is 11 B by now, not 10 B; all was taken back"):
        apply_targets(targets, by="t", root=tmp_path)
    assert [reading.limit_bytes for reading in pool.list_pools(tmp_path).pools] == [10, 10, 11]
    (tmp_path / "a").unlink()
    with pytest.raises(PlanFailed, match="no segment named a; no limit was changed") as gone:
        apply_targets(targets, by="t", root=tmp_path)
    assert gone.value.exit_code == Exit.NOT_FOUND, "as where it alone was asked for"


def test_a_roll_back_leaves_what_somebody_else_wrote_since(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        pool.create_pool(name, 10, root=tmp_path)
    targets = targets_for(tmp_path, {"a": 1, "b": 20})
    real = owner.change_limit

    def racing(name: str, limit: int, **more: Any) -> pool.LimitChange:
        if name == "b":
            pool.write_limit("a", 7, root=tmp_path)
            pool.write_limit("b", 7, root=tmp_path)
        return real(name, limit, **more)

    monkeypatch.setattr("kvtools.ctl.plan.change_limit", racing)
    with pytest.raises(PlanFailed, match="not taken back: a") as half:
        apply_targets(targets, by="t", root=tmp_path)
    assert half.value.exit_code == Exit.FAILED
    assert [reading.limit_bytes for reading in pool.list_pools(tmp_path).pools] == [7, 7]


def test_an_interrupt_takes_back_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        pool.create_pool(name, 10, root=tmp_path)
    real = owner.change_limit
    calls = []

    def interrupted(name: str, limit: int, **more: Any) -> pool.LimitChange:
        calls.append(name)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(name, limit, **more)

    monkeypatch.setattr("kvtools.ctl.plan.change_limit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        apply_targets(targets_for(tmp_path, {"a": 1, "b": 2}), by="t", root=tmp_path)
    assert [reading.limit_bytes for reading in pool.list_pools(tmp_path).pools] == [10, 10]
