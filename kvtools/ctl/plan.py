"""Several limits as one decision: a plan is parsed, shared out over the pools that are there, and applied all or nothing.

    budget: 40G                    # what all of them may hold together; or {gpu: 0, percent: 90}
    idle_after: 60s                # with --watch: a pool idle for so long keeps its floor only
    segments:
      chat:      {weight: 3, floor: 4G, ceiling: 24G, priority: 1}
      batch-*:   {weight: 1, ceiling: 10G}
      embed:     {limit: 2G, optional: true}

The three steps are pure but for the last: `parse_plan` (text of a file to a Plan), `share_out` (a Plan and the pools to one
target each), `apply_targets` (targets to shared memory). Sharing: fixed limits first; then every pool has its floor; what is
left goes to the highest priority in proportion to weight, within floor and ceiling (and the engine's capacity), what its
ceilings leave goes to the next. Shares are exact fractions rounded down to the engine's pages, so their sum never exceeds
the budget.

Applying lowers limits before it raises others, so that the sum never exceeds the budget on the way either; each write is
conditional on the limit the plan was made for, and a failure takes back what was written, unless somebody else wrote since.

Failure: PlanError (exit 2) for a plan that cannot be meant or met, NotFound for a missing segment, PlanFailed after a
roll-back, with the exit status of what stopped it. Concurrency: one apply at a time is the operator's business; two cannot
corrupt each other, the later one fails.
"""

import fnmatch
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from kvtools.errors import KvError, NotFound, UsageError
from kvtools.output import printable
from kvtools.segments.files import SHM, check_name
from kvtools.segments.owner import change_limit
from kvtools.segments.pool import LimitChange, PoolReading
from kvtools.units import format_size, parse_duration, parse_size


class PlanError(UsageError):
    """A plan that cannot be meant, or cannot be met by the pools that are there."""


class PlanFailed(KvError):
    """Writing the limits failed part of the way; what had been written was taken back, or the message says what was not."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one entry of a plan grants each segment that it names. Sizes in bytes."""

    pattern: str
    limit_bytes: int | None = None
    weight: Fraction = Fraction(1)
    floor_bytes: int = 0
    ceiling_bytes: int | None = None
    priority: int = 0
    optional: bool = False

    @property
    def is_pattern(self) -> bool:
        return any(c in self.pattern for c in "*?[")


@dataclass(frozen=True, slots=True)
class Plan:
    """A parsed plan. The budget is bytes, or a percentage of a GPU that the caller looks up."""

    shares: tuple[Share, ...]
    budget_bytes: int | None = None
    budget_gpu: int | None = None
    budget_percent: float | None = None
    idle_after_s: float | None = None

    def share_of(self, name: str) -> Share | None:
        """The entry that speaks for segment `name`: the one that is its name, else the first pattern that matches."""
        exact = next((share for share in self.shares if share.pattern == name), None)
        return exact or next((s for s in self.shares if s.is_pattern and fnmatch.fnmatchcase(name, s.pattern)), None)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A pool that a plan may speak for: its reading, and what its engine says about itself (0: nothing)."""

    reading: PoolReading
    capacity_bytes: int = 0
    page_bytes: int = 0
    idle: bool = False

    @property
    def name(self) -> str:
        return self.reading.name


@dataclass(frozen=True, slots=True)
class Target:
    """The limit that a plan gives one pool, beside the reading it was made for."""

    reading: PoolReading
    limit_bytes: int
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.reading.name

    @property
    def below_use(self) -> bool:
        """Whether it takes memory that is in use: the engine would drop cached prefixes, or preempt requests."""
        return self.limit_bytes < min(self.reading.used_bytes, self.reading.limit_bytes)

    @property
    def leaves_nothing(self) -> bool:
        """Whether it takes all memory from an engine that had some: it would serve no more."""
        return self.limit_bytes == 0 < self.reading.limit_bytes


def _shown(value: Any) -> str:
    """`value` for a message, short: a plan may hold lists of lists of lists, each by an alias."""
    limits = reprlib.Repr()
    limits.maxstring = limits.maxother = 60
    limits.maxlevel, limits.maxlist, limits.maxdict, limits.maxset = 2, 3, 3, 3
    return limits.repr(value)


# --- parsing ---------------------------------------------------------------------------------------------------------

_TOP = {"budget", "segments", "idle_after"}
_SHARE = {"limit", "weight", "floor", "ceiling", "priority", "optional"}


def parse_plan(data: Any) -> Plan:
    """The plan in `data`, as YAML or JSON gives it. Raises PlanError, naming the place."""
    top = _mapping(data, "the plan", _TOP)
    segments = _mapping(top.get("segments"), "segments", None)
    if not segments:
        raise PlanError("the plan names no segments", hint="list them under segments:, each with limit, or weight, floor, ceiling")
    shares = tuple(_share(_name(name), value) for name, value in segments.items())
    budget, gpu, percent = _budget(top.get("budget"))
    if budget is None and gpu is None and any(share.limit_bytes is None for share in shares):
        raise PlanError("the plan shares by weight but has no budget", hint="add budget: SIZE, or give every segment a limit")
    idle = top.get("idle_after")
    plan = Plan(shares, budget, gpu, percent, None if idle is None else _duration(idle, "idle_after"))
    if budget is not None:
        _check_sum(plan, budget, [share for share in shares if not share.is_pattern and not share.optional])
    return plan


def _name(key: Any) -> str:
    """The name or pattern `key`. What YAML takes for a number, a date or a truth value (`on`, `012`) is not guessed back."""
    if not isinstance(key, str):
        raise PlanError(f"segments: a name has to be text, and YAML reads this one as {_shown(key)}", hint="put the name in quotes")
    if any(c in key for c in "*?["):
        return key
    try:
        return check_name(key)
    except UsageError as error:
        raise PlanError(f"segments: {error.message}", hint=error.hint) from None


def _share(name: str, value: Any) -> Share:
    where = f"segments.{printable(name)}"
    body = _mapping({} if value is None else value, where, _SHARE)
    if "limit" in body and {"weight", "floor", "ceiling", "priority"} & set(body):
        raise PlanError(f"{where}: limit is fixed, so weight, floor, ceiling and priority mean nothing")
    floor = _size(body.get("floor", 0), f"{where}.floor")
    ceiling = None if body.get("ceiling") is None else _size(body["ceiling"], f"{where}.ceiling")
    if ceiling is not None and ceiling < floor:
        raise PlanError(f"{where}: the ceiling is below the floor")
    priority, optional = body.get("priority", 0), body.get("optional", False)
    if not isinstance(priority, int) or isinstance(priority, bool):
        raise PlanError(f"{where}.priority: not a whole number: {_shown(priority)}")
    if not isinstance(optional, bool):
        raise PlanError(f"{where}.optional: not true or false: {_shown(optional)}")
    limit = None if body.get("limit") is None else _size(body["limit"], f"{where}.limit")
    return Share(name, limit, _weight(body.get("weight", 1), where), floor, ceiling, priority, optional)


def _weight(value: Any, where: str) -> Fraction:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e9:
        return Fraction(str(value))
    raise PlanError(f"{where}.weight: not a number above 0 and below 1e9: {_shown(value)}")


def _budget(value: Any) -> tuple[int | None, int | None, float | None]:
    if not isinstance(value, Mapping):
        return (None if value is None else _size(value, "budget")), None, None
    body = _mapping(value, "budget", {"gpu", "percent"})
    gpu, percent = body.get("gpu"), body.get("percent", 100)
    if not isinstance(gpu, int) or isinstance(gpu, bool) or gpu < 0:
        raise PlanError(f"budget.gpu: not the number of a GPU: {_shown(gpu)}")
    if not isinstance(percent, int | float) or isinstance(percent, bool) or not 0 < percent <= 100:
        raise PlanError(f"budget.percent: not above 0 and up to 100: {_shown(percent)}")
    return None, gpu, float(percent)


def _mapping(value: Any, where: str, known: set[str] | None) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise PlanError(f"{where}: not a mapping of names to values")
    if known is not None and (unknown := sorted(str(key) for key in value if key not in known)):
        raise PlanError(f"{where}: unknown key {_shown(unknown[0])}", hint="known keys: " + ", ".join(sorted(known)))
    return value


def _size(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise PlanError(f"{where}: not a size: {_shown(value)}", hint="write a number and one of B, K, M, G, T, such as 4G")
    try:
        return parse_size(str(value))
    except UsageError as error:
        share = where == "budget" and str(value).rstrip().endswith("%")
        hint = "a share of a GPU is written {gpu: 0, percent: 90}" if share else error.hint
        raise PlanError(f"{where}: {error.message}", hint=hint) from None


def _duration(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise PlanError(f"{where}: not a duration: {_shown(value)}", hint="write a number and one of ms, s, m, h, d, such as 60s")
    try:
        return parse_duration(str(value))
    except UsageError as error:
        raise PlanError(f"{where}: {error.message}", hint=error.hint) from None


def _check_sum(plan: Plan, budget: int, shares: Sequence[Share]) -> None:
    least = sum(share.floor_bytes if share.limit_bytes is None else share.limit_bytes for share in shares)
    if least > budget:
        raise PlanError(
            f"the plan cannot be met: limits and floors sum to {format_size(least)}, the budget is {format_size(budget)}",
            hint="lower some, or raise the budget",
        )


# --- sharing out -----------------------------------------------------------------------------------------------------


def share_out(
    plan: Plan,
    candidates: Sequence[Candidate],
    *,
    budget_bytes: int | None = None,
    may_be_missing: bool = False,
    gentle: bool = False,
) -> list[Target]:
    """One target for each candidate that the plan speaks for, in the plan's order.

    `budget_bytes` stands for a budget given as a GPU. A named segment that is not among the candidates is NotFound unless it
    is optional or `may_be_missing`: its part then goes to the others. `gentle` grants every pool at least what it uses.
    """
    budget = plan.budget_bytes if budget_bytes is None else budget_bytes
    present = {candidate.name for candidate in candidates}
    for share in plan.shares:
        if not (share.is_pattern or share.optional or may_be_missing or share.pattern in present):
            raise NotFound(f"no segment named {printable(share.pattern)}", hint="mark it optional: true if it may be missing")
    spoken = [(found, candidate) for candidate in candidates if (found := plan.share_of(candidate.name))]
    spoken.sort(key=lambda pair: (plan.shares.index(pair[0]), pair[1].name))
    fixed = {c.name: _fixed(c, s.limit_bytes, gentle) for s, c in spoken if s.limit_bytes is not None}
    shared = [(s, c) for s, c in spoken if s.limit_bytes is None]
    granted = _grant(shared, None if budget is None else budget - sum(fixed.values()), gentle)
    return [_target(candidate, share, {**fixed, **granted}[candidate.name]) for share, candidate in spoken]


def _capped(candidate: Candidate, size: int) -> int:
    capped = min(size, candidate.capacity_bytes) if candidate.capacity_bytes else size
    return capped - capped % candidate.page_bytes if candidate.page_bytes else capped


def _fixed(candidate: Candidate, size: int, gentle: bool) -> int:
    """A fixed limit as far as the engine can use it; gently, not below what is in use now."""
    kept = min(_rounded_up(candidate.reading.used_bytes, candidate.page_bytes), candidate.reading.limit_bytes) if gentle else 0
    return max(_capped(candidate, size), kept)


def _grant(shared: Sequence[tuple[Share, Candidate]], room: int | None, gentle: bool) -> dict[str, int]:
    """What each pool gets of `room`, priority by priority, from the highest; within one by weight."""
    if not shared:
        if room is not None and room < 0:
            what = "what the segments with fixed limits hold exceeds" if gentle else "its fixed limits exceed"
            raise PlanError(f"the plan cannot be met: {what} the budget", hint="lower some, or raise the budget")
        return {}
    assert room is not None  # parse_plan: weights need a budget
    bounds = {candidate.name: _bounds(share, candidate, gentle) for share, candidate in shared}
    floors = sum(low for low, _ in bounds.values())
    if floors > room:
        what = "use and floors" if gentle else "floors"
        raise PlanError(
            f"the plan cannot be met now: {what} sum to {format_size(floors)}, the budget leaves {format_size(max(room, 0))}",
            hint="lower floors or fixed limits, or raise the budget",
        )
    granted: dict[str, int] = {}
    for level in sorted({share.priority for share, _ in shared}, reverse=True):
        members = [(share.weight, *bounds[c.name], c) for share, c in shared if share.priority == level]
        below = sum(bounds[c.name][0] for share, c in shared if share.priority < level)
        shares = fill([(weight, low, high) for weight, low, high, _ in members], room - below)
        for (_, low, _, candidate), share_ in zip(members, shares, strict=True):
            granted[candidate.name] = max(_capped(candidate, int(share_)), low)
            room -= granted[candidate.name]
    return granted


def _bounds(share: Share, candidate: Candidate, gentle: bool) -> tuple[int, int]:
    """The least and the most this pool may get. An idle one gets its floor; never more than its engine can use."""
    most = (1 << 50) - 1 if share.ceiling_bytes is None else share.ceiling_bytes
    high = _capped(candidate, most)
    low = min(_rounded_up(share.floor_bytes, candidate.page_bytes), high)
    if candidate.idle:
        return low, low
    if gentle:
        low = max(
            low, min(_rounded_up(candidate.reading.used_bytes, candidate.page_bytes), max(high, candidate.reading.limit_bytes))
        )
    return low, max(low, high)


def _rounded_up(size: int, step: int) -> int:
    return -(-size // step) * step if step else size


def fill(members: Sequence[tuple[Fraction, int, int]], room: int) -> list[Fraction]:
    """Shares of `room` in proportion to weight, each held within its (low, high): x = clamp(t * weight, low, high).

    `t` is the level at which the shares sum to `room`, exactly; where all are at their highs before, that is what they get.
    Precondition: the lows fit.
    """

    def at(level: Fraction) -> list[Fraction]:
        return [min(max(level * weight, Fraction(low)), Fraction(high)) for weight, low, high in members]

    points = sorted({Fraction(bound) / weight for weight, low, high in members for bound in (low, high)})
    below = Fraction(0)
    for point in points:
        if sum(at(point)) >= room:
            short, over = sum(at(below)), sum(at(point))
            if over == short:
                return at(below)
            return at(below + (point - below) * (room - short) / (over - short))
        below = point
    return at(below)


def _target(candidate: Candidate, share: Share, limit: int) -> Target:
    notes = []
    if candidate.idle:
        notes.append("idle: its floor only")
    wanted = share.limit_bytes if share.limit_bytes is not None else share.floor_bytes
    if candidate.capacity_bytes and wanted > candidate.capacity_bytes:
        notes.append(f"its engine cannot use more than {format_size(candidate.capacity_bytes)}")
    return Target(candidate.reading, limit, notes)


# --- applying --------------------------------------------------------------------------------------------------------


def apply_targets(targets: Sequence[Target], *, by: str, root: Path = SHM) -> list[LimitChange]:
    """Write all targets that differ from what their pools have, or none. Raises PlanFailed."""
    changing = [target for target in targets if target.limit_bytes != target.reading.limit_bytes]
    changing.sort(key=lambda target: target.limit_bytes - target.reading.limit_bytes)  # lower first: the sum never overshoots
    done: list[LimitChange] = []
    try:
        for target in changing:
            change = change_limit(target.name, target.limit_bytes, by=by, expected=target.reading.limit_bytes, root=root)
            done.append(change)
    except KvError as error:
        kept = _take_back(done, by=by, root=root)
        said = f"; not taken back: {', '.join(kept)}" if kept else "; no limit was changed" if not done else "; all was taken back"
        failed = PlanFailed(f"{error.message}{said}", hint=error.hint)
        if not kept:
            failed.exit_code = error.exit_code  # as if only that segment had been asked for
        raise failed from None
    except KeyboardInterrupt:
        # Ctrl-C in the middle: half a plan is the one state nobody asked for.
        _take_back(done, by=by, root=root)
        raise
    return done


def _take_back(done: Sequence[LimitChange], *, by: str, root: Path) -> list[str]:
    """Undo `done`, newest first; names of those that could not be undone (somebody else wrote since, or they are gone)."""
    kept = []
    for change in reversed(done):
        name, now = change.after.name, change.after.limit_bytes
        try:
            change_limit(name, change.before.limit_bytes, by=f"{by}, taken back", expected=now, root=root)
        except KvError:
            kept.append(printable(name))
    return kept
