"""The connector in a worker: moves bytes between the engine's KV memory and the daemon's arena.

Saves happen inside `save`, in the step that computed the blocks and before the engine can reuse them: whole blocks are
copied straight into an extent of the arena and committed. Nothing is held back, no staging copy is made. (From a GPU they
are gathered on the device within the step, and a thread brings them over.) Loads run on threads: a lease is taken, its
bytes are copied into the blocks, and only when the lease still stands afterwards are the bytes good. A load ends exactly
once, good or failed, within its deadline; the engine waits for it.

With one cache group a failure names the blocks from the first chunk that is missing, so that the engine keeps what came
before; with several groups block ids are ambiguous to the engine and the whole request is reported.

Concurrency: the engine calls from one thread; `_done`, `_report` and `_bad_blocks` are shared with the loading threads under
`_lock`. Blocks being loaded belong to the waiting request alone, so copies need no lock.
"""

import contextlib
import functools
import logging
import operator
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvd.connector.direct import Direct
from kvd.connector.fingerprint import salted
from kvd.connector.link import Down, Link
from kvd.connector.metrics import Counters
from kvd.connector.plan import Load, Move, Report, Save, Unsaved
from kvd.connector.seldom import Seldom
from kvd.errors import Draining, KvdError, LeaseLost, NoRoom

logger = logging.getLogger("vllm.kvd")

WINDOW_BYTES = 64 << 20
"""Bytes leased at a time in a load and reserved at a time in a save: tiers are read ahead while the window is copied."""
DETACHED_MOVES = 8
"""Values that a thread brings to the arena in one go."""
PARALLEL_BYTES = 8 << 20
"""From here on a window is copied by two threads: one core does not fill a memory bus, and during a save the engine waits."""
PINNED_PART = 4
"""A load pins at most this part of the arena ahead of its copying."""
READ_SLICE_S = 5.0
"""How long one call of a load may take, tiers included, before it is asked anew. A daemon that says nothing for so long is
taken for wedged: long enough for a busy machine, since giving up means computing what is stored."""
NO_ROOM_PAUSE_S = 1.0
"""Saving pauses this long after the daemon had no room, so that a full arena does not cost every step a time-out."""


class Mover(Protocol):
    """The copies; see kvd.connector.mover."""

    def value_bytes(self, group: int, blocks: int) -> int: ...

    def gather(self, group: int, ids: Sequence[int], into: Any) -> None: ...

    def scatter(self, group: int, ids: Sequence[int], source: Any) -> None: ...

    # A mover may also have `detach`, `land`, `drop` and `fence` (see DeviceMover), and `parallel` (see HostMover).


@dataclass(slots=True)
class Job:
    """A load on its way."""

    load: Load
    deadline_s: float
    cancelled: bool = False
    fence: Callable[[], None] | None = None
    """What waits for steps that may still write into the blocks."""


@dataclass(slots=True)
class Results:
    """What a step reports to the engine. Every id in `failed` is also in `received`."""

    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    bad_blocks: set[int] = field(default_factory=set)


class LoadFailed(Exception):
    """A load cannot be completed. `index`: the first move that is not loaded."""

    def __init__(self, why: str, index: int, keys: tuple[bytes, ...] = ()) -> None:
        super().__init__(why)
        self.index = index
        self.keys = keys


class Worker:
    """One rank's mover of bytes. `namespaces`: one a group, unsalted, in the order of the groups."""

    def __init__(
        self,
        namespaces: Sequence[bytes],
        mover: Mover,
        *,
        save_link: Link,
        load_link: Link,
        saves: bool = True,
        load_timeout_s: float = 30.0,
        load_threads: int = 2,
        counters: Counters | None = None,
        clock: Callable[[], float] = time.monotonic,
        direct: Direct | None = None,
        direct_link: Link | None = None,
    ) -> None:
        self.counters = counters or Counters()
        self._direct = direct
        self._direct_link = direct_link
        self._namespaces = tuple(namespaces)
        self._mover = mover
        self._save_link = save_link
        self._load_link = load_link
        self._saves = saves
        self._load_timeout_s = load_timeout_s
        self._clock = clock
        self._pool = ThreadPoolExecutor(load_threads, thread_name_prefix="kvd-load")
        self._helper = ThreadPoolExecutor(1, thread_name_prefix="kvd-copy")
        self._saver = ThreadPoolExecutor(1, thread_name_prefix="kvd-save")
        self._lock = threading.Lock()
        self._jobs: dict[str, Job] = {}
        self._done: list[tuple[Job, LoadFailed | None]] = []
        self._report = Report()
        self._no_room_until = 0.0
        self._no_room = ""
        """Why, in words."""
        self._left = 0
        """Chunks of the step's saves that nothing has become of yet, in all namespaces; the engine's thread alone counts them."""
        self._seldom = Seldom(logger)

    # ---- saves -------------------------------------------------------------------------------------------------------

    def save(self, saves: Sequence[Save]) -> None:
        """Store what this step completed. Never raises for the daemon's sake; what cannot be stored is counted."""
        if not saves or not self._saves or not self._save_link.up:
            return
        self._left = sum(len(save.moves) for save in saves) * len(self._namespaces)
        if self._clock() < self._no_room_until:
            self._fail(saves, self._no_room)
            return
        begun = time.perf_counter()
        try:
            for save in saves:
                for index, namespace in enumerate(self._namespaces):
                    self._save_group(index, salted(namespace, save.salt), save)
        except Down as error:
            self._fail(saves, str(error))
        except (NoRoom, Draining) as error:
            self._pause(error)
            self._fail(saves, self._no_room)
            logger.debug("kvd: not saved: %s", error)
        except KvdError as error:
            self._seldom.warning("saving", f"saving failed: {error}")
            self._fail(saves, str(error))
        finally:
            self.counters.add("save_seconds", time.perf_counter() - begun)

    def _pause(self, error: KvdError) -> None:
        """Nothing is offered for a while: the next offer would be refused as well."""
        self._no_room_until = self._clock() + NO_ROOM_PAUSE_S
        self._no_room = "the daemon is draining" if isinstance(error, Draining) else f"no room: {error.message}"

    def _fail(self, saves: Sequence[Save], why: str) -> None:
        """Count what of these is not stored, and tell the daemon why."""
        self.counters.add("save_failures", self._left)
        self.tell_unsaved([Unsaved(save.salt, tuple(move.key for move in save.moves), why) for save in saves])

    def tell_unsaved(self, unsaved: Iterable[Unsaved]) -> None:
        """Tell the daemon what is not stored, and why, for `kvd why`: one-way words, nobody waits for an answer."""
        if not self._saves or not self._save_link.up:
            return
        with contextlib.suppress(Down, KvdError):
            for one in unsaved:
                for namespace in self._namespaces:
                    space = salted(namespace, one.salt)
                    self._save_link.call(operator.methodcaller("note", one.keys, one.why, namespace=space))

    def _save_group(self, index: int, namespace: bytes, save: Save) -> None:
        moves = list({move.key: move for move in save.moves}.values())
        known = self._save_link.call(lambda client: client.exists([move.key for move in moves], namespace=namespace))
        todo = [move for move, there in zip(moves, known, strict=True) if not there or move.key in save.anew]
        self.counters.add("save_known", len(moves) - len(todo))
        if self._direct is not None and self._direct_link is not None and self._direct_link.up:
            todo = self._direct.save(index, namespace, save, todo, self._direct_link)
        todo = self._detach(index, namespace, save, todo)
        self._left -= len(save.moves) - len(todo)
        for window in self._windows(index, todo):
            self._save_link.call(functools.partial(self._write, index, namespace, save, window))
            self._left -= len(window)

    def _write(self, index: int, namespace: bytes, save: Save, moves: Sequence[Move], client: Any) -> None:
        sizes = [self._mover.value_bytes(index, len(move.blocks[index])) for move in moves]
        # No waiting for a tier to make room: what finds none is not stored, and the step goes on.
        with client.write(sizes, wait_s=0.0) as lease:
            pairs = zip(moves, lease.views, strict=True)
            work = [functools.partial(self._mover.gather, index, move.blocks[index], view) for move, view in pairs]
            self._side_by_side(work, sum(sizes))
            results = lease.commit([move.key for move in moves], namespace=namespace, retention=save.retention, ttl_s=save.ttl_s)
        self._count_saved(sizes, results)

    def _detach(self, index: int, namespace: bytes, save: Save, moves: list[Move]) -> list[Move]:
        """Where the mover can take values off the blocks at once, let a thread bring them over; what is left for this step."""
        detach = getattr(self._mover, "detach", None)
        if detach is None:
            return moves
        taken = [(move, detach(index, move.blocks[index])) for move in moves]
        going = [(move, value) for move, value in taken if value is not None]
        try:
            for start in range(0, len(going), DETACHED_MOVES):
                self._saver.submit(self._bring, namespace, save, going[start : start + DETACHED_MOVES])
        except RuntimeError:  # shutting down
            for _, value in going:
                self._mover.drop(value)  # type: ignore[attr-defined]
        return [move for move, value in taken if value is None]

    def _bring(self, namespace: bytes, save: Save, going: Sequence[tuple[Move, Any]]) -> None:
        """On a thread: values that were taken off their blocks, to the arena."""

        def write(client: Any) -> None:
            with client.write([value.size for _, value in going], wait_s=0.0) as lease:
                for (_, value), view in zip(going, lease.views, strict=True):
                    self._mover.land(value, view)  # type: ignore[attr-defined]
                keys = [move.key for move, _ in going]
                results = lease.commit(keys, namespace=namespace, retention=save.retention, ttl_s=save.ttl_s)
            self._count_saved([value.size for _, value in going], results)

        try:
            self._save_link.call(write)
        except Exception as error:  # noqa: BLE001 - a thread's edge: whatever it was, a save that fails is a miss later
            self.counters.add("save_failures", len(going))
            if isinstance(error, NoRoom | Draining):
                self._pause(error)
            why = self._no_room if isinstance(error, NoRoom | Draining) else str(error)
            with contextlib.suppress(Down, KvdError):
                keys = [move.key for move, _ in going]
                self._save_link.call(operator.methodcaller("note", keys, why, namespace=namespace))
            logger.debug("kvd: not saved: %s", error)
        finally:
            for _, value in going:
                self._mover.drop(value)  # type: ignore[attr-defined]

    def _count_saved(self, sizes: Sequence[int], results: Sequence[Any]) -> None:
        stored = [size for size, result in zip(sizes, results, strict=True) if result]
        self.counters.add("saves", len(stored))
        self.counters.add("save_bytes", sum(stored))
        self.counters.add("save_failures", len(sizes) - len(stored))

    def _side_by_side(self, work: Sequence[Callable[[], None]], size: int) -> None:
        """Do these copies on two threads, where that is worth it. None is under way when this returns or raises."""
        if size < PARALLEL_BYTES or len(work) < 2 or not getattr(self._mover, "parallel", False):
            for copy in work:
                copy()
            return
        half = len(work) // 2
        try:
            helping = self._helper.submit(lambda: [copy() for copy in work[half:]])
        except RuntimeError:  # shutting down
            raise KvdError("the engine is shutting down") from None
        try:
            for copy in work[:half]:
                copy()
        finally:
            helping.exception()
        helping.result()

    def _windows(self, index: int, moves: Iterable[Move]) -> Iterator[list[Move]]:
        window: list[Move] = []
        total = 0
        for move in moves:
            size = self._mover.value_bytes(index, len(move.blocks[index]))
            if window and total + size > WINDOW_BYTES:
                yield window
                window, total = [], 0
            window.append(move)
            total += size
        if window:
            yield window

    # ---- loads -------------------------------------------------------------------------------------------------------

    def start(self, loads: Sequence[Load], *, fenced: bool = False) -> None:
        """Begin these loads. Each is reported by `results`, once.

        `fenced`: the blocks may have been another request's a moment ago, and a step under way on the device may still write
        into them: nothing is copied before all steps are done that were launched before this call.
        """
        fence = getattr(self._mover, "fence", None)
        wait = fence() if fenced and loads and fence is not None else None
        for load in loads:
            job = Job(load, self._clock() + self._load_timeout_s, fence=wait)
            self._jobs[load.request_id] = job
            if load.doomed:
                self._end(job, LoadFailed(load.doomed, 0))
                continue
            try:
                self._pool.submit(self._run, job)
            except RuntimeError:  # shutting down
                self._end(job, LoadFailed("the engine is shutting down", 0))

    def results(self, finished: Iterable[str]) -> Results:
        """Loads that ended since the last call. `finished`: requests that ended; their loads stop early."""
        for request_id in finished:
            job = self._jobs.get(request_id)
            if job is not None:
                job.cancelled = True
        with self._lock:
            done, self._done = self._done, []
        results = Results()
        for job, failure in done:
            request_id = job.load.request_id
            self._jobs.pop(request_id, None)
            results.received.add(request_id)
            if failure is None or job.cancelled:
                continue
            bad = {block for move in job.load.moves[failure.index :] for ids in move.blocks for block in ids if block}
            if len(self._namespaces) == 1 and bad:
                results.bad_blocks |= bad
            else:
                results.failed.add(request_id)
            self._report.failed[request_id] = (str(failure), failure.keys)
        return results

    def report(self) -> Report:
        """What the scheduler should know since the last call."""
        report, self._report = self._report, Report()
        return report

    @property
    def loading(self) -> int:
        """Requests whose load was started and not reported yet."""
        return len(self._jobs)

    def shutdown(self) -> None:
        """Stop loading; what is on its way ends at its next chunk."""
        for job in list(self._jobs.values()):
            job.cancelled = True
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._saver.shutdown(wait=True)
        self._helper.shutdown(wait=True)
        if self._direct is not None:
            self._direct.shutdown()
        self._save_link.close()
        self._load_link.close()

    def _run(self, job: Job) -> None:
        begun = time.perf_counter()
        failure: LoadFailed | None = None
        try:
            if job.fence is not None:
                job.fence()
            self._fetch(job)
        except LoadFailed as error:
            failure = error
        except (Down, KvdError) as error:
            failure = LoadFailed(str(error), 0)
        except Exception as error:  # a thread's edge: whatever it was, the request must not wait for ever
            logger.exception("kvd: loading failed")
            self.counters.add("errors")
            failure = LoadFailed(f"{type(error).__name__}: {error}", 0)
        self.counters.add("loads")
        self.counters.add("load_seconds", time.perf_counter() - begun)
        self._end(job, failure)

    def _end(self, job: Job, failure: LoadFailed | None) -> None:
        with self._lock:
            self._done.append((job, failure))

    def _fetch(self, job: Job) -> None:
        """All groups' chunks into the blocks. Raises LoadFailed for the first move that is missing in any group."""
        failures: list[LoadFailed] = []
        for index, unsalted in enumerate(self._namespaces):
            namespace = salted(unsalted, job.load.salt)
            wanted = [(place, move) for place, move in enumerate(job.load.moves) if any(move.blocks[index])]
            token = job.load.token
            try:
                wanted = self._fetch_past(job, index, namespace, wanted)
                token = token or self._pin(index, namespace, [move for _, move in wanted])
                self._fetch_group(job, index, namespace, wanted)
            except LoadFailed as failure:
                failures.append(failure)
            finally:
                self._unpin(token, namespace)
        if failures:
            raise min(failures, key=lambda failure: failure.index)

    def _fetch_past(self, job: Job, index: int, namespace: bytes, wanted: list[tuple[int, Move]]) -> list[tuple[int, Move]]:
        """Load what lies in files past the daemon; what is left for the arena. Raises LoadFailed."""
        direct, link = self._direct, self._direct_link
        if direct is None or link is None or not wanted:
            return wanted
        moves = [move for _, move in wanted]
        try:
            loaded, lost = direct.load(index, namespace, moves, link, lambda: not job.cancelled and self._clock() <= job.deadline_s)
        except (Down, KvdError) as error:
            logger.debug("kvd: nothing past the daemon: %s", error)
            return wanted
        if lost:
            raise LoadFailed("the lease was lost while reading", wanted[0][0])
        return [one for place, one in enumerate(wanted) if place not in loaded]

    def _fetch_group(self, job: Job, index: int, namespace: bytes, wanted: Sequence[tuple[int, Move]]) -> None:
        places = {id(move): place for place, move in wanted}
        for window in self._windows(index, [move for _, move in wanted]):
            left = window
            while left:
                place = places[id(left[0])]
                if job.cancelled:
                    raise LoadFailed("the request ended", place)
                if self._clock() > job.deadline_s:
                    raise LoadFailed("the deadline passed", place)
                try:
                    copied = self._load_link.call(functools.partial(self._read, index, namespace, left, place))
                except LeaseLost:
                    raise LoadFailed("the lease was lost while copying", place) from None
                except (Down, KvdError) as error:
                    raise LoadFailed(str(error), place) from error
                left = left[copied:]

    def _read(self, index: int, namespace: bytes, moves: Sequence[Move], place: int, client: Any) -> int:
        """Copy the leading moves that are there; how many. Raises LoadFailed when the first one will not come."""
        copied = total = 0
        work: list[Callable[[], None]] = []
        strange: LoadFailed | None = None
        with client.read([move.key for move in moves], namespace=namespace, timeout_s=READ_SLICE_S) as lease:
            for move, view in zip(moves, lease.views, strict=True):
                if view is None:
                    break
                ids = move.blocks[index]
                if len(view) != self._mover.value_bytes(index, len(ids)):
                    # Said when those before it are copied: they count as loaded.
                    strange = LoadFailed(f"a chunk has {len(view)} bytes", place + copied, (move.key,))
                    break
                work.append(functools.partial(self._mover.scatter, index, ids, view))
                copied += 1
                total += len(view)
            self._side_by_side(work, total)
            lease.check()
        self.counters.add("load_bytes", total)
        if strange is not None:
            raise strange
        # Nothing came: it is still on its way from a tier (ask again), or it is gone.
        if not copied and not client.exists([moves[0].key], namespace=namespace)[0]:
            raise LoadFailed(f"a chunk is gone{_fate(client, moves[0].key, namespace)}", place, (moves[0].key,))
        return copied

    def _pin(self, index: int, namespace: bytes, moves: Sequence[Move]) -> bytes | None:
        """Pin what is in the arena and have tiers bring up the rest, while it is copied window by window.

        Not the look-up's business: making room for a long prefix takes the daemon longer than a scheduler may wait. And not
        more than a part of the arena: what is pinned and not yet copied must leave room for what is being copied.
        """

        def pin(client: Any) -> bytes | None:
            room = client.connect().welcome.arena_bytes // PINNED_PART
            keys = []
            for move in moves:
                room -= self._mover.value_bytes(index, len(move.blocks[index]))
                if room < 0:
                    break
                keys.append(move.key)
            if len(keys) < 2:
                return None
            token: bytes | None = client.prefix(keys, namespaces=[namespace], pin_s=self._load_timeout_s).token
            return token

        with contextlib.suppress(Down, KvdError):
            return self._load_link.call(pin)
        return None

    def _unpin(self, token: bytes | None, namespace: bytes) -> None:
        """Let go of what is pinned; its bytes were read by key."""
        if token is not None:
            with contextlib.suppress(Down, KvdError):
                self._load_link.call(lambda client: client.unpin(token, namespace=namespace))


def _fate(client: Any, key: bytes, namespace: bytes) -> str:
    """What the daemon remembers of a value that is gone (evicted, damaged, ...), for the log; '' for nothing."""
    from kvd.connector.explain import sentence

    try:
        notes = client.why([key], namespaces=[namespace]).notes[0][0]
    except KvdError:
        return ""
    return f": {sentence(notes[0], time.time_ns())}" if notes else ""
