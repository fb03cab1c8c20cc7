"""`kvctl apply`: a plan file put in force once, or kept in force while engines come and go.

Once: read, share out, show, ask where it takes memory in use, write all or nothing. With --watch the same again every interval:
pools that appeared take part, stale ones do not, an idle one (use unchanged and within its floor for `idle_after`) keeps its
floor, so memory goes to those that work. A watch without --yes never takes memory in use, fixed limits or not: such a pool is
granted what it uses until it lets go; nor does it leave an engine no memory at all. What cannot be met now is said once and
tried again; nothing but a signal ends a watch.
"""

import time
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

from kvtools.config import YAML_SLIPS
from kvtools.ctl import tables
from kvtools.ctl.asking import agree
from kvtools.ctl.limits import acting, gpu_total, readable_gpus
from kvtools.ctl.plan import Candidate, Plan, PlanError, Target, apply_targets, parse_plan, share_out
from kvtools.ctl.watching import check_interval, repeat
from kvtools.errors import KvError, NotFound, Unreachable, UsageError
from kvtools.interrupts import interrupts_held
from kvtools.output import emit, emit_json, note, printable, table
from kvtools.segments import pool
from kvtools.segments.owner import PoolState, judge
from kvtools.segments.pool import LimitChange
from kvtools.units import format_size

_MAX_PLAN_BYTES = 1 << 20


def run_apply(
    file: Path, *, root: Path, watch: bool, interval_s: float, count: int | None, dry_run: bool, yes: bool, as_json: bool
) -> None:
    """Put the plan in `file` in force. Raises PlanError, NotFound, Refused, PlanFailed."""
    if count is not None and not watch:
        raise UsageError("--count means nothing without --watch", hint="a plan is applied once: leave it out, or add --watch")
    plan = read_plan(file)
    check_interval(interval_s)
    budget = _budget(plan)
    if watch and not dry_run:
        keeper = Keeper(plan, budget, root=root, gentle=not yes, as_json=as_json)
        repeat(keeper.round, interval_s=interval_s, count=count)
        return
    states = _look(root, plan)
    targets = share_out(plan, [_candidate(state) for state in states], budget_bytes=budget, may_be_missing=watch)
    _say_unplanned(plan, states)
    if dry_run:
        for what in filter(None, map(_unsafe, targets)):
            note(f"note: needs a yes: {what}")
        _report(targets, [], budget or plan.budget_bytes, as_json, applied=False)
        return
    for what in filter(None, map(_unsafe, targets)):
        agree(f"{what}. Go on?", yes=yes, refusal=what)
    with interrupts_held():  # Ctrl-C or `kill` find the plan in force, or not at all
        changes = apply_targets(targets, by=acting("kvctl apply"), root=root)
    _report(targets, changes, budget or plan.budget_bytes, as_json, applied=True)


def _unsafe(target: Target) -> str:
    """What an operator has to agree to before this target is written; empty where nothing speaks against it."""
    name = printable(target.name)
    if target.leaves_nothing:
        return f"{name}: the plan leaves it 0 B: its engine has no memory for requests then"
    if target.below_use:
        used = format_size(target.reading.used_bytes)
        price = "its engine will give up cached prefixes, then preempt requests"
        return f"{name}: {used} are in use: at {format_size(target.limit_bytes)} {price}"
    return ""


def read_plan(file: Path) -> Plan:
    """The plan in `file`, YAML (JSON is YAML). Raises NotFound, Unreachable, PlanError; a key given twice is an error."""
    try:
        with file.open("rb") as stream:
            text = stream.read(_MAX_PLAN_BYTES + 1)
    except FileNotFoundError:
        raise NotFound(f"no plan {printable(str(file))}") from None
    except OSError as error:
        raise Unreachable(f"cannot read plan {printable(str(file))}: {error.strerror}") from None
    if len(text) > _MAX_PLAN_BYTES:
        raise PlanError(f"plan {printable(str(file))} is over {format_size(_MAX_PLAN_BYTES)}")
    if not text.strip():
        raise PlanError(f"plan {printable(str(file))} is empty", hint="man kvctl, PLANS, has one to start from")
    return parse_plan(_yaml(text, file))


def _yaml(text: bytes, file: Path) -> Any:
    import yaml

    class Strict(yaml.SafeLoader):
        """SafeLoader lets a later key win in silence: two entries for one segment are a slip, so it is an error here."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen = set()
            for key, _ in node.value:
                if key.tag == "tag:yaml.org,2002:merge":  # `<<: *other`: keys that come by it may be given anew
                    continue
                word = self.construct_object(key, deep=True)
                if not isinstance(word, Hashable):
                    continue  # an error of its own
                if word in seen:
                    raise PlanError(f"plan {printable(str(file))}, line {node.start_mark.line + 1}: {word!r} is given twice")
                seen.add(word)
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader=Strict)  # noqa: S506 - a SafeLoader
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise PlanError(f"plan {printable(str(file))}{where}: {getattr(error, 'problem', None) or 'not YAML'}") from None
    except YAML_SLIPS:
        raise PlanError(f"plan {printable(str(file))}: not YAML") from None


class Keeper:
    """Keeps a plan in force: one `round` per interval. Remembers what it said and since when each pool is idle."""

    def __init__(
        self, plan: Plan, budget: int | None, *, root: Path, gentle: bool, as_json: bool, clock: Any = time.monotonic
    ) -> None:
        self._plan = plan
        self._budget = budget
        self._root = root
        self._gentle = gentle
        self._json = as_json
        self._clock = clock
        self._said = ""
        self._quiet_since: dict[str, tuple[int, float]] = {}

    def round(self) -> None:
        """Look, share out, write what differs, say what changed. Errors of one round are said and end nothing."""
        try:
            states = _look(self._root, self._plan, may_be_missing=True)
            candidates = [_candidate(state, idle=self._idle(state)) for state in states]
            targets = share_out(self._plan, candidates, budget_bytes=self._budget, may_be_missing=True, gentle=self._gentle)
            if self._gentle and (nothing := [target for target in targets if target.leaves_nothing]):
                raise PlanError(_unsafe(nothing[0]), hint="raise the budget or its floor, or add --yes")
            with interrupts_held():
                changes = apply_targets(targets, by=acting("kvctl apply --watch"), root=self._root)
        except KvError as error:
            if error.message != self._said:
                self._said = error.message
                note(f"{time.strftime('%H:%M:%S')} kvctl: {error.message}; trying again")
            return
        self._said = ""
        if self._json and changes:
            emit_json("kvctl.apply/1", _body(targets, changes, self._budget or self._plan.budget_bytes, applied=True), indent=None)
        elif not self._json:
            for change in changes:
                before, after = format_size(change.before.limit_bytes), format_size(change.after.limit_bytes)
                emit(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {printable(change.after.name)}: {before} -> {after}")

    def _idle(self, state: PoolState) -> bool:
        """Whether its use has not changed for `idle_after` and fits its floor, so that taking the rest costs it nothing."""
        share = self._plan.share_of(state.name)
        if self._plan.idle_after_s is None or share is None or share.limit_bytes is not None:
            return False
        used, now = state.reading.used_bytes, self._clock()
        last, since = self._quiet_since.get(state.name, (used, now))
        if used != last:
            since = now
        self._quiet_since[state.name] = (used, since)
        return used <= share.floor_bytes and now - since >= self._plan.idle_after_s


def _look(root: Path, plan: Plan, *, may_be_missing: bool = False) -> list[PoolState]:
    """Pools whose engine lives or may live: a stale one holds nothing worth sharing with.

    One that the plan speaks for and that cannot be read (locked, another user's) is that error: what it holds is unknown, so
    giving its part to others could exceed the budget. A stale one that the plan names is NotFound unless it may be missing.
    """
    listing = pool.list_pools(root)
    for problem in listing.unreadable:
        if plan.share_of(problem.name):
            raise problem.error
    states = [judge(reading, root=root) for reading in listing.pools]
    for state in states:
        share = plan.share_of(state.name)
        if state.state == "stale" and share and not (share.is_pattern or share.optional or may_be_missing):
            raise NotFound(
                f"segment {printable(state.name)} is stale: its engine is gone",
                hint="mark it optional: true if it may be missing; kvctl prune removes what it left",
            )
    return [state for state in states if state.state != "stale"]


def _candidate(state: PoolState, *, idle: bool = False) -> Candidate:
    info = state.owner.info if state.owner and not state.owner.error else None
    return Candidate(state.reading, info.start_capacity_bytes if info else 0, info.page_bytes if info else 0, idle)


def _budget(plan: Plan) -> int | None:
    if plan.budget_gpu is None or plan.budget_percent is None:
        return None
    try:
        whole, _ = gpu_total(plan.budget_gpu)
    except UsageError as error:
        known = "kvctl show NAME lists the GPUs" if readable_gpus() else "no GPU's memory can be read here"
        raise PlanError(f"budget.gpu: {error.message}", hint=f"{known}; or write the budget as a size") from None
    return int(whole * plan.budget_percent / 100)


def _say_unplanned(plan: Plan, states: Sequence[PoolState]) -> None:
    for state in states:
        if plan.share_of(state.name) is None:
            limit = format_size(state.reading.limit_bytes)
            note(f"note: {printable(state.name)} (limit {limit}) is not in the plan and is left as it is")


def _body(targets: Sequence[Target], changes: Sequence[LimitChange], budget: int | None, *, applied: bool) -> dict[str, Any]:
    changed = {change.after.name for change in changes}
    return {
        "applied": applied,
        "budget_bytes": budget,
        "sum_bytes": sum(target.limit_bytes for target in targets),
        "segments": [
            {
                **tables.words(target.reading),
                "new_limit_bytes": target.limit_bytes,
                "changed": target.name in changed,
                "below_use": target.below_use,
                "notes": target.notes,
            }
            for target in targets
        ],
    }


def _report(targets: Sequence[Target], changes: Sequence[LimitChange], budget: int | None, as_json: bool, *, applied: bool) -> None:
    if as_json:
        emit_json("kvctl.apply/1", _body(targets, changes, budget, applied=applied))
        return
    if not targets:
        note("no segment of the plan is here")
        return
    rows = []
    for target in targets:
        same = target.limit_bytes == target.reading.limit_bytes
        notes = [*(["unchanged"] if same else []), *(["below use"] if target.below_use else []), *target.notes]
        sizes = (target.reading.limit_bytes, target.reading.used_bytes, target.limit_bytes)
        rows.append((printable(target.name), *map(format_size, sizes), ", ".join(notes)))
    for line in table(("IPC", "Limit", "Used", "New limit", "Notes"), rows, right=(1, 2, 3)):
        emit(line)
    total = sum(target.limit_bytes for target in targets)
    of = f" of a budget of {format_size(budget)}" if budget is not None else ""
    if applied:
        emit(f"applied: {format_size(total)}{of}, {len(changes)} changed")
    else:
        would = sum(target.limit_bytes != target.reading.limit_bytes for target in targets)
        emit(f"not applied (dry run): {format_size(total)}{of}, {would} would change")
