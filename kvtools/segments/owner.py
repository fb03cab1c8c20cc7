"""Owner sidecars: who owns a pool, what it started with, and which limits it was given.

`/dev/shm/<name>.kvtools` is one line of JSON beside a pool segment (FORMAT.md, "Owner sidecar"). Only our engines write one;
a segment without it (kvcached's) is served with "unknown" where it must be. **Liveness is a lock, not a pid**: the owner
holds an open-file-description write lock on the file for life. The recorded pid, start time and pid namespace are shown to
people and decide nothing.

Data flow: the engine makes the file with `OwnerLock.acquire`; an operator's `change_limit` writes word 0 of the pool and
appends a *pending* entry here, under the sidecar's flock, so that the owner, which answers with `OwnerLock.mark`, always
finds the entry it answers. The file is written in place, never renamed over: the life lock belongs to the inode.

Failure cases: a kill cannot tear it, because the whole text is kept within one page and goes down in one write; a text that
does not parse is "unreadable", never an exception from the middle of a listing. Losing the history never loses a limit.
Concurrency: writers are ordered by flock; `OwnerLock` may be used from any thread.
"""

import fcntl
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from kvtools.errors import KvError, NotFound, Refused, TimedOut, Unreachable, UsageError
from kvtools.output import printable
from kvtools.segments import pool
from kvtools.segments.files import (
    LOCK_TIMEOUT_S,
    MAX_NAME_BYTES,
    SHM,
    SIDECAR_SUFFIX,
    check_name,
    encodable,
    explain,
    flock,
    held_for_life,
    lock_for_life,
    open_file,
    open_or_create,
    pid_namespace,
    process_start,
    process_story,
    still_named,
    unflock,
)

PAGE = 4096
"""The text never exceeds one page: a write within a page cannot be cut in two by a kill."""

SCHEMA = "kvtools.owner/1"
_MAX_READ = 64 << 10
_MAX_HISTORY = 16


class LimitEntry(NamedTuple):
    """One limit a pool was given: what was asked, by whom, when, and what became of it.

    `state` is "pending" until the owner answers, then "applied" (`effective_bytes` is what holds now) or "deferred" (the owner
    works on it; `reason` says what is in the way).
    """

    limit_bytes: int
    by: str
    at_ns: int
    state: str = "pending"
    effective_bytes: int | None = None
    reason: str = ""


class OwnerInfo(NamedTuple):
    """What an engine says about itself and its pool. Sizes in bytes; what it does not know stays empty or 0."""

    engine: str
    model: str = ""
    devices: tuple[str, ...] = ()
    """Device UUIDs this pool's memory lies on."""
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    dp_rank: int = 0
    start_capacity_bytes: int = 0
    """The reservation: a limit above it cannot be met, and `restore` goes back to it."""
    page_bytes: int = 0
    """Bytes that appear and vanish together (page size times layers times K/V buffers): limits are multiples of it."""
    version: str = ""


class Owner(NamedTuple):
    """A sidecar as read: what it says, and whether its owner lives (holds the life lock)."""

    name: str
    alive: bool
    pid: int
    pid_start: int
    pid_namespace: int
    since_ns: int
    info: OwnerInfo
    limits: tuple[LimitEntry, ...] = ()
    error: str = ""
    """Why the text could not be used, where it could not; `alive` holds even then."""

    @property
    def last_limit(self) -> LimitEntry | None:
        return self.limits[-1] if self.limits else None

    @property
    def story(self) -> str:
        """The recorded owner, for people: 'pid 812 is gone'."""
        return process_story(self.pid, self.pid_start, self.pid_namespace) if self.pid else "no pid recorded"


State = Literal["live", "stale", "unknown"]


class Holder(NamedTuple):
    """Who owned a pool when somebody decided something about it: what is checked again when it is done."""

    state: State
    pid: int = 0
    """The recorded pid where the owner lives, else 0."""

    def words(self) -> str:
        if self.state == "live":
            return f"a running engine (pid {self.pid})" if self.pid else "a running engine"
        return "an engine that is gone" if self.state == "stale" else "nobody who says so"


class PoolState(NamedTuple):
    """A pool segment, its owner if it says one, whether that lives ("live", "stale", "unknown"), and why we think so."""

    reading: pool.PoolReading
    owner: Owner | None
    state: State
    evidence: str

    @property
    def name(self) -> str:
        return self.reading.name

    @property
    def holder(self) -> Holder:
        return _holder(self.owner)


def judge(reading: pool.PoolReading, *, root: Path = SHM) -> PoolState:
    """Whether the pool's owner lives, from its sidecar's life lock alone. Raises nothing: what cannot be read is "unknown"."""
    try:
        owner = read_owner(reading.name, root=root)
    except Unreachable as error:
        return PoolState(reading, None, "unknown", f"its owner file cannot be read: {error.message}")
    if owner is None:
        return PoolState(reading, None, "unknown", "no owner file: the engine that made it does not say whether it lives")
    if owner.alive:
        return PoolState(reading, owner, "live", "its owner holds the lock on its owner file")
    if owner.error:  # a file that says nothing proves nothing
        return PoolState(reading, owner, "unknown", owner.error)
    return PoolState(reading, owner, "stale", f"nobody holds the lock on its owner file; recorded owner: {owner.story}")


def _holder(owner: Owner | None) -> Holder:
    if owner is None or (owner.error and not owner.alive):
        return Holder("unknown")
    return Holder("live", owner.pid) if owner.alive else Holder("stale")


def _check_holder(name: str, now: Holder, said: Holder | None) -> None:
    """Raises Refused when the pool is not owned any more as it was `said` (None: whoever owns it)."""
    if said is not None and now != said:
        raise Refused(
            f"nothing was done: segment {printable(name)} belongs to {now.words()} by now, it belonged to {said.words()}",
            hint="look at it again, and decide anew",
        )


def sidecar_name(name: str) -> str:
    """The file name of pool `name`'s sidecar. Raises UsageError when it would be too long."""
    if len(os.fsencode(check_name(name))) + len(SIDECAR_SUFFIX) > MAX_NAME_BYTES:
        raise UsageError(
            f"segment name too long for an owner: {printable(name)}",
            hint=f"at most {MAX_NAME_BYTES - len(SIDECAR_SUFFIX)} bytes",
        )
    return name + SIDECAR_SUFFIX


def read_owner(name: str, *, root: Path = SHM, timeout_s: float = 0.2) -> Owner | None:
    """The owner of pool `name`, or None without a sidecar. Raises Unreachable when the sidecar cannot be opened.

    Only read permission is needed. A sidecar whose flock is stuck is read all the same after `timeout_s` seconds: a stuck
    writer must not hide whether the owner lives.
    """
    try:
        side = sidecar_name(name)
        fd = open_file(side, os.O_RDONLY, root=root, what="owner file")
    except (NotFound, UsageError):
        return None
    try:
        alive = held_for_life(fd)
        try:
            flock(fd, fcntl.LOCK_SH, what=f"owner file {printable(side)}", timeout_s=timeout_s)
        except TimedOut:
            pass
        owner = _parse(name, os.pread(fd, _MAX_READ, 0), alive)
        return owner._replace(error=f"owner file {printable(str(root / side))} is damaged: {owner.error}") if owner.error else owner
    finally:
        os.close(fd)


def change_limit(
    name: str,
    limit_bytes: int,
    *,
    by: str,
    expected: int | None = None,
    holder: Holder | None = None,
    root: Path = SHM,
    timeout_s: float = LOCK_TIMEOUT_S,
    clock: Callable[[], int] = time.time_ns,
) -> pool.LimitChange:
    """Set pool `name`'s limit and note it as pending in its sidecar, if it has one that may be written.

    `by` says who asks ("kvctl limit, uid 0"). The note comes after the write and inside the sidecar's flock, so the owner's
    answer cannot overtake it. Without a writable sidecar the limit is written all the same: word 0 is what counts.
    With `holder` it is Refused when the pool is owned by somebody else by now (`expected` says the same of the limit).
    """

    def without_note() -> pool.LimitChange:
        if holder is not None:
            _check_holder(name, judge(pool.read_pool(name, root=root, timeout_s=timeout_s), root=root).holder, holder)
        return pool.write_limit(name, limit_bytes, expected=expected, root=root, timeout_s=timeout_s)

    try:
        fd = open_file(sidecar_name(name), os.O_RDWR, root=root, what="owner file")
    except KvError:
        return without_note()
    try:
        try:
            flock(fd, fcntl.LOCK_EX, what=f"owner file {printable(name)}{SIDECAR_SUFFIX}", timeout_s=timeout_s)
        except TimedOut:
            return without_note()
        # An engine that starts writes itself in under the same flock.
        _check_holder(name, _holder(_parse(name, os.pread(fd, _MAX_READ, 0), held_for_life(fd))), holder)
        change = pool.write_limit(name, limit_bytes, expected=expected, root=root, timeout_s=timeout_s)
        owner = _parse(name, os.pread(fd, _MAX_READ, 0), alive=True)
        if not owner.error:
            _write(fd, owner._replace(limits=(*owner.limits, LimitEntry(limit_bytes, by, clock()))))
        return change
    finally:
        os.close(fd)


def remove_pool(name: str, holder: Holder, *, root: Path = SHM, timeout_s: float = LOCK_TIMEOUT_S) -> pool.PoolReading:
    """Remove pool `name`, and its sidecar unless its owner lives, if it is owned as when it was decided; its last reading.

    Where the owner is not alive, its life lock is held for the removal: an engine that starts at this moment either owns the
    pool first, and then it is Refused, or finds neither file. Raises NotFound, Refused, TimedOut, Unreachable.
    """
    now = judge(pool.read_pool(name, root=root, timeout_s=timeout_s), root=root)
    _check_holder(name, now.holder, holder)
    if now.owner is None or now.owner.alive:
        return pool.remove(name, root=root, timeout_s=timeout_s)
    last: list[pool.PoolReading] = []
    if not remove_stale(name, root=root, before=lambda: last.append(pool.remove(name, root=root, timeout_s=timeout_s))):
        _check_holder(name, judge(now.reading, root=root).holder, holder)
        last.append(pool.remove(name, root=root, timeout_s=timeout_s))  # somebody took the owner file away
    return last[0]


def remove_stale(name: str, *, root: Path = SHM, before: Callable[[], object] | None = None) -> bool:
    """Remove the sidecar of pool `name` if nobody owns it; False when its owner lives, or there is none.

    The life lock is taken for the removal, so an engine starting at this moment either owns the file first or makes a new one.
    `before` runs once the lock is won (to remove the pool itself); an error it raises leaves the sidecar there.
    """
    side = sidecar_name(name)
    try:
        fd = open_file(side, os.O_RDWR, root=root, what="owner file")
    except NotFound:
        return False
    try:
        if not lock_for_life(fd) or not still_named(fd, root / side):
            return False
        if before is not None:
            before()
        (root / side).unlink()
        return True
    except OSError as error:
        raise explain(error, side, what="owner file", root=root) from None
    finally:
        os.close(fd)


class OwnerLock:
    """The engine's hold on its pool's sidecar, from `acquire` to `close` (or to the process's death)."""

    def __init__(self, name: str, fd: int, owner: Owner, *, root: Path, timeout_s: float, clock: Callable[[], int]) -> None:
        self.name = name
        self._fd = fd
        self._owner = owner
        self._path = root / sidecar_name(name)
        self._timeout_s = timeout_s
        self._clock = clock
        self._seen_ns = 0

    @classmethod
    def acquire(
        cls,
        name: str,
        info: OwnerInfo,
        *,
        root: Path = SHM,
        patience_s: float = 0.5,
        timeout_s: float = LOCK_TIMEOUT_S,
        clock: Callable[[], int] = time.time_ns,
    ) -> "OwnerLock":
        """Become the owner of pool `name`. Raises Refused, naming the owner, when somebody else is.

        A prune in progress holds the lock for an instant, hence `patience_s`. A dead owner's history of limits is kept.
        """
        side = sidecar_name(name)
        deadline = time.monotonic() + patience_s
        while True:
            fd = open_or_create(side, root=root, what="owner file")
            try:
                if lock_for_life(fd) and still_named(fd, root / side):
                    break
            except BaseException:
                os.close(fd)
                raise
            held = held_for_life(fd)
            os.close(fd)
            if held and time.monotonic() > deadline:
                raise _owned(name, root)
            time.sleep(0.005)
        lock = cls(name, fd, _blank(name), root=root, timeout_s=timeout_s, clock=clock)
        try:
            lock._begin(info)
        except BaseException:
            lock.close()
            raise
        return lock

    def _begin(self, info: OwnerInfo) -> None:
        flock(self._fd, fcntl.LOCK_EX, what=f"owner file {printable(self._path.name)}", timeout_s=self._timeout_s)
        try:
            before = _parse(self.name, os.pread(self._fd, _MAX_READ, 0), alive=True)
            pid = os.getpid()
            self._owner = Owner(
                self.name,
                True,
                pid,
                process_start(pid),
                pid_namespace(),
                self._clock(),
                info,
                () if before.error else before.limits,
            )
            _write(self._fd, self._owner)
        except OSError as error:
            raise explain(error, self._path.name, what="owner file", root=self._path.parent) from None
        finally:
            unflock(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self, info: OwnerInfo) -> None:
        """Replace what the engine says about itself, keeping the limits."""
        self._rewrite(lambda owner: owner._replace(info=info))

    def started(self, limit_bytes: int) -> None:
        """Note the limit that this engine starts with, where a dead one's history was kept: what that one was asked is over."""

        def begin(owner: Owner) -> Owner:
            first = LimitEntry(limit_bytes, "its engine, at its start", self._clock(), "applied")
            return owner._replace(limits=(*owner.limits, first)) if owner.limits else owner

        self._rewrite(begin)

    def mark(self, limit_bytes: int, state: str, *, effective_bytes: int | None = None, reason: str = "") -> None:
        """Answer the newest entry for `limit_bytes`: "applied" or "deferred". A limit nobody noted gets an entry of its own."""

        def answer(owner: Owner) -> Owner:
            limits = list(owner.limits)
            for i in range(len(limits) - 1, -1, -1):
                if limits[i].limit_bytes == limit_bytes and (limits[i].state != "applied" or i == len(limits) - 1):
                    limits[i] = limits[i]._replace(state=state, effective_bytes=effective_bytes, reason=reason)
                    break
            else:
                limits.append(LimitEntry(limit_bytes, "unknown", self._clock(), state, effective_bytes, reason))
            return owner._replace(limits=tuple(limits))

        self._rewrite(answer)

    def _rewrite(self, change: Callable[[Owner], Owner]) -> None:
        flock(self._fd, fcntl.LOCK_EX, what=f"owner file {printable(self._path.name)}", timeout_s=self._timeout_s)
        try:
            now = _parse(self.name, os.pread(self._fd, _MAX_READ, 0), alive=True)
            # The owner is the authority on itself: a text somebody spoiled is replaced by what this process knows.
            self._owner = change(self._owner if now.error else self._owner._replace(limits=now.limits))
            _write(self._fd, self._owner)
        finally:
            unflock(self._fd)

    def asked(self) -> LimitEntry | None:
        """The newest limit where an operator noted one since the last call and it is unanswered: it may be the one in force.

        Looks at the file's time only, unless that has changed. Raises TimedOut.
        """
        now = os.fstat(self._fd).st_mtime_ns
        if now == self._seen_ns:
            return None
        flock(self._fd, fcntl.LOCK_SH, what=f"owner file {printable(self._path.name)}", timeout_s=self._timeout_s)
        try:
            owner = _parse(self.name, os.pread(self._fd, _MAX_READ, 0), alive=True)
            self._seen_ns = os.fstat(self._fd).st_mtime_ns
        finally:
            unflock(self._fd)
        last = owner.last_limit
        return last if last is not None and last.state == "pending" else None

    @property
    def lost(self) -> bool:
        """The file was removed under its owner: the lock protects nothing any more."""
        return not still_named(self._fd, self._path)

    def close(self, *, remove: bool = True) -> None:
        """Give the pool up: unlink the sidecar (unless `remove` is false) and drop the lock. A second call does nothing."""
        if self._fd < 0:
            return
        if remove and still_named(self._fd, self._path):
            self._path.unlink(missing_ok=True)
        os.close(self._fd)
        self._fd = -1


def _owned(name: str, root: Path) -> Refused:
    try:
        owner = read_owner(name, root=root)
    except Unreachable:
        owner = None
    who = f" ({owner.info.engine}, pid {owner.pid})" if owner and owner.pid else ""
    return Refused(f"segment {printable(name)} is owned by a running engine{who}", hint="give this engine another segment name")


def _blank(name: str, alive: bool = False, error: str = "") -> Owner:
    return Owner(name, alive, 0, 0, 0, 0, OwnerInfo(engine=""), (), error)


def _write(fd: int, owner: Owner) -> None:
    """The text in one write of at most a page, oldest limits dropped until it fits, then the length cut to it."""
    limits: Sequence[LimitEntry] = owner.limits[-_MAX_HISTORY:]
    while True:
        text = _text(owner, limits)
        if len(text) <= PAGE or not limits:
            break
        limits = limits[1:]
    if len(text) > PAGE:
        raise UsageError(
            "what the owner says about itself is too long", hint=f"names and device ids together must fit {PAGE} bytes"
        )
    os.pwrite(fd, text, 0)
    os.ftruncate(fd, len(text))


def _text(owner: Owner, limits: Sequence[LimitEntry]) -> bytes:
    body = {
        "schema": SCHEMA,
        "pid": owner.pid,
        "pid_start": owner.pid_start,
        "pid_namespace": owner.pid_namespace,
        "since_ns": owner.since_ns,
        **owner.info._asdict(),
        "limits": [entry._asdict() for entry in limits],
    }
    return json.dumps(body, separators=(",", ":")).encode() + b"\n"


def _parse(name: str, data: bytes, alive: bool) -> Owner:
    """What the first line says; later bytes are the tail of a longer text whose cutting a kill prevented."""
    line = data.partition(b"\n")[0]
    if not line.strip():
        return _blank(name, alive, "it is empty" if not data else "its first line is empty")
    try:
        body = encodable(json.loads(line))
        info = OwnerInfo(**{key: _typed(key, body[key]) for key in OwnerInfo._fields if key in body})
        limits = tuple(
            LimitEntry(
                int(entry["limit_bytes"]),
                str(entry["by"]),
                int(entry["at_ns"]),
                str(entry["state"]),
                None if entry.get("effective_bytes") is None else int(entry["effective_bytes"]),
                str(entry.get("reason", "")),
            )
            for entry in body.get("limits", [])
        )
        return Owner(
            name, alive, int(body["pid"]), int(body["pid_start"]), int(body["pid_namespace"]), int(body["since_ns"]), info, limits
        )
    except KeyError as error:
        return _blank(name, alive, f"it lacks the field {error}")
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
        return _blank(name, alive, "it is not JSON")
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        return _blank(name, alive, f"it does not say what an owner says ({type(error).__name__})")


def _typed(name: str, value: Any) -> Any:
    if name == "devices":
        return tuple(str(item) for item in value)
    return int(value) if _KINDS[name] is int else str(value)


_KINDS = OwnerInfo.__annotations__
