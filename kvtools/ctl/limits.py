"""One limit: decide what it means for a pool, write it, wait until it holds.

`decide` is pure: from a pool's state and the asked size it says what will be written, what the operator should know (notes)
and what makes it unsafe (reasons, each of which --yes lifts). Rules, from what engines really do with the word:

* an owner that states its capacity gets no limit above it (it could not be met), and whole pages only;
* 0, or less than one page, stops an engine, so it is unsafe; kvcached ignores 0;
* below what is in use, the engine must give up cached prefixes or preempt requests until it is met, so it is unsafe too;
* a segment without an owner file gets exactly what was asked, with a warning: it may never be taken up.

Data flow: decide -> agree (asking.py) -> write -> wait. Failure: NotFound, Unreachable, TimedOut, Refused. Concurrency: the
write is one lock cycle and changes word 0 alone; two operators are ordered, the last one's limit stands.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from kvtools.errors import KvError, Refused, TimedOut, Unreachable, UsageError
from kvtools.output import printable
from kvtools.segments import owner, pool
from kvtools.segments.files import SHM
from kvtools.segments.owner import LimitEntry, PoolState
from kvtools.units import format_size

if TYPE_CHECKING:
    from kvtools.devices import Device

POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Decision:
    """What `kvctl limit` will write, and what there is to say about it."""

    state: PoolState
    requested_bytes: int
    limit_bytes: int
    notes: list[str] = field(default_factory=list)
    unsafe: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.state.name


def decide(state: PoolState, requested_bytes: int, *, takes_limits: bool = True, first_bytes: int | None = None) -> Decision:
    """What writing `requested_bytes` to this pool comes to.

    `takes_limits`: nothing says that its engine ignores them. `first_bytes`: the start value of a segment without an owner
    file, where kvctl knows it. kvcached's engines compare the limit with that value only, and take the very same for "no
    change": a pool once shrunk never grows back to it. One byte less is another value, and costs one page.
    """
    pool.check_limit(requested_bytes)
    fitted = _fitted(state, requested_bytes)
    same = first_bytes is not None and fitted == first_bytes > 1
    decision = Decision(state, requested_bytes, fitted - 1 if same else fitted)
    if same:
        decision.notes.append("1 B less than the value its engine started with: kvcached's engines take that one for no change")
    info = state.owner.info if state.owner and not state.owner.error else None
    if info and info.start_capacity_bytes and requested_bytes > info.start_capacity_bytes:
        decision.notes.append(f"lowered to the engine's capacity, {format_size(info.start_capacity_bytes)}: more cannot be met")
    elif info and 0 < decision.limit_bytes != requested_bytes:
        decision.notes.append(
            f"rounded down to {format_size(decision.limit_bytes)} ({decision.limit_bytes} B), whole pages of "
            f"{format_size(info.page_bytes)}"
        )
    _note_takers(decision, takes_limits)
    _find_unsafe(decision)
    return decision


def _fitted(state: PoolState, requested: int) -> int:
    if state.owner is None or state.owner.error:
        return requested
    info = state.owner.info
    capped = min(requested, info.start_capacity_bytes) if info.start_capacity_bytes else requested
    return capped - capped % info.page_bytes if info.page_bytes else capped


def _note_takers(decision: Decision, takes_limits: bool) -> None:
    state = decision.state
    if state.state == "stale":
        story = state.owner.story if state.owner else state.evidence
        decision.notes.append(f"no engine owns this segment any more ({story}): nobody will take the limit up")
    elif state.owner is not None and state.owner.error and not state.owner.alive:
        decision.notes.append(f"{state.owner.error}: whether its engine lives, and takes the limit up, is not known")
    elif state.owner is None:
        decision.notes.append("its engine does not say when it takes a limit up: kvcached's does at its next allocation")
        if not takes_limits:
            decision.notes.append(
                "its engine runs with KVCACHED_PAGE_PREALLOC_ENABLED off: kvcached then never looks at new limits"
            )


_PRICE = "the engine will give up cached prefixes, then preempt requests,"
"""What a limit below use costs. The segment counts blocks that only the prefix cache holds among those in use."""


def _find_unsafe(decision: Decision) -> None:
    reading = decision.state.reading
    if decision.limit_bytes == 0:
        less = "" if decision.requested_bytes == 0 else f"{format_size(decision.requested_bytes)} is less than one page: "
        ignored = ", and kvcached's engines ignore it" if decision.state.owner is None else ""
        decision.unsafe.append(f"{less}a limit of 0 leaves the engine no memory for requests{ignored}")
    elif (
        decision.state.state != "stale" and decision.limit_bytes < reading.used_bytes and decision.limit_bytes < reading.limit_bytes
    ):
        over = format_size(reading.used_bytes - decision.limit_bytes)
        decision.unsafe.append(f"{format_size(reading.used_bytes)} are in use, {over} more than that: {_PRICE} until it is met")


def write(decision: Decision, *, by: str, expected: int | None = None, root: Path = SHM) -> pool.LimitChange:
    """Write the decided limit and note it in the pool's history."""
    return owner.change_limit(decision.name, decision.limit_bytes, by=by, expected=expected, root=root)


def acting(command: str) -> str:
    """Who acts, for the history: 'alice via sudo, kvctl limit'."""
    import pwd

    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        user = f"uid {os.getuid()}"
    behind = os.environ.get("SUDO_USER")
    return f"{behind} via sudo, {command}" if behind and behind != user else f"{user}, {command}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How far a written limit has got, and why.

    "applied", "deferred" and "pending" are the owner's word (pending: it has not answered). Without an owner's word it is
    "written" (nothing is in use above it) or "pending" (something is); "unknown" when the owner is gone, "dry-run".
    """

    status: str
    reason: str = ""
    effective_bytes: int | None = None


def outcome(name: str, limit_bytes: int, *, old: Sequence[LimitEntry] = (), root: Path = SHM) -> Outcome:
    """Where limit `limit_bytes` of pool `name` stands now. Raises what reading the pool raises.

    An owner's answer decides, unless it is among the `old` ones: it was given to the same limit at another time. Without an
    owner file that can be read nobody says more than the numbers do.
    """
    reading = pool.read_pool(name, root=root)
    if reading.limit_bytes != limit_bytes:
        raise KvError(
            f"segment {printable(name)}: somebody set another limit meanwhile, {format_size(reading.limit_bytes)}",
            hint=f"see who: kvctl show {printable(name)}",
        )
    try:
        said = owner.read_owner(name, root=root)
    except Unreachable:
        said = None
    if said is None or (said.error and not said.alive):  # a file that says nothing does not say that its engine is gone
        if reading.mapped_bytes <= limit_bytes:
            return Outcome("written", "memory in use is within it")
        return Outcome("pending", f"{format_size(reading.mapped_bytes)} are still mapped")
    if not said.alive:
        return Outcome("unknown", f"its engine is gone: {said.story}")
    last = next((one for one in reversed(said.limits) if one.limit_bytes == limit_bytes and one not in old), None)
    if last is None:
        return Outcome("pending", "its engine has not answered yet")
    return Outcome(last.state, last.reason, last.effective_bytes)


def wait(
    name: str,
    limit_bytes: int,
    *,
    timeout_s: float,
    old: Sequence[LimitEntry] = (),
    root: Path = SHM,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Outcome:
    """The outcome once the limit holds: applied, or written with nothing in use above it.

    Raises TimedOut with the engine's own reason, KvError when nobody is left to apply it.
    """
    deadline = clock() + timeout_s
    while True:
        now = outcome(name, limit_bytes, old=old, root=root)
        if now.status in {"applied", "written"}:
            return now
        if now.status == "unknown":
            raise KvError(
                f"segment {printable(name)}: the limit is written, but {now.reason}", hint="kvctl prune removes what it left"
            )
        if clock() >= deadline:
            why = now.reason or "its engine has not answered yet"
            raise TimedOut(
                f"segment {printable(name)}: the limit is written and not applied after {timeout_s:g} s: {why}",
                hint="it stays in force and is applied as requests end; wait longer with --timeout",
            )
        sleep(min(POLL_S, max(deadline - clock(), 0.001)))


def percent_base(state: PoolState, *, gpu: int | None, total_bytes: int | None) -> tuple[int, str]:
    """The memory a percentage of this pool's GPU means, in bytes, and what it is. Raises UsageError when that is not known.

    In order: --total, --gpu, the device its owner names (the smallest of several: each maps the same), the host's only GPU.
    """
    if total_bytes is not None:
        return total_bytes, "the given total"
    from kvtools.devices import match_uuid

    if gpu is not None:
        return gpu_total(gpu)
    devices = readable_gpus()
    if state.owner and state.owner.info.devices:
        named = [device for uuid in state.owner.info.devices if (device := match_uuid(devices, uuid))]
        if named:
            smallest = min(named, key=lambda device: device.total_bytes)
            return smallest.total_bytes, f"its engine's GPU {smallest.index} ({smallest.name})"
    if len(devices) == 1:
        return devices[0].total_bytes, f"the only GPU ({devices[0].name})"
    raise UsageError(f"which GPU does segment {printable(state.name)} lie on?", hint=_gpus(devices))


def gpu_total(gpu: int) -> tuple[int, str]:
    """Memory of GPU number `gpu` in bytes, and what it is. Raises UsageError."""
    devices = readable_gpus()
    chosen = [device for device in devices if device.index == gpu]
    if len(chosen) != 1:
        raise UsageError(f"no GPU {gpu}" if not chosen else f"two GPUs have number {gpu}", hint=_gpus(devices))
    return chosen[0].total_bytes, f"GPU {gpu} ({chosen[0].name})"


def readable_gpus() -> "list[Device]":
    """This host's GPUs whose memory is known."""
    from kvtools.devices import find_devices

    return [device for device in find_devices() if device.total_bytes]


def _gpus(devices: Sequence[object]) -> str:
    if not devices:
        return "no GPU's memory can be read here: give the whole with --total SIZE"
    return "give --gpu I (kvctl show NAME lists the GPUs), or the whole with --total SIZE"


def start_capacity(state: PoolState, *, root: Path = SHM) -> int:
    """What `restore` goes back to. Raises Refused when nothing says it, Unreachable where the owner file could have.

    That is the capacity in the owner file, else the limit that the segment had before kvctl first changed it.
    """
    name = printable(state.name)
    if state.owner and state.owner.info.start_capacity_bytes:
        return state.owner.info.start_capacity_bytes
    if first := first_limit(state, root=root):
        return first
    said = owner.read_owner(state.name, root=root)  # raises where it is there and cannot be opened
    if said is not None and said.error:
        raise Unreachable(
            f"segment {name}: {said.error}, so what it started with is not known (kvctl has not changed its limit either)",
            hint=f"set it yourself: kvctl limit {name} SIZE; the engine writes the file anew when it starts again",
        )
    why = "has no owner file to say" if said is None else "does not say in its owner file"
    raise Refused(
        f"segment {name} {why} what capacity it started with, and kvctl has not changed its limit",
        hint=f"set it yourself: kvctl limit {name} SIZE",
    )


def first_limit(state: PoolState, *, root: Path = SHM) -> int | None:
    """For a segment without a sound owner file: its limit before kvctl's first change, which is its engine's start value."""
    from kvtools.ctl import journal

    if state.owner is not None and not state.owner.error:
        return None
    chain = journal.history(state.reading, root=root)
    return chain[0].before_bytes if chain else None
