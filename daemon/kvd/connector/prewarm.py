"""Bring a prompt's chunks up from the tiers before the prompt comes: what `POST /v1/cache/prewarm` starts.

A job takes the prompt's chunks in order, for all ranks and groups together, since a chunk is of use only when all of them
and everything before it are there. It stops at the first chunk that some namespace has nowhere, at its byte cap, at its
deadline, or where the arena has no room. What it asks for counts neither as hit nor as miss. At its end it looks what is
in the arena *now*: what is reported as resident was seen there, not merely asked for.

Jobs run on a few threads, wait in a bounded queue, and are remembered for a while. A server of several processes may be
asked for a job that another of them runs: so a job's state is also left in the daemon, under its id.

    queued -> running -> done | failed
"""

import contextlib
import functools
import hashlib
import json
import logging
import queue
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvd.connector.keys import Keys, Span
from kvd.connector.link import Down
from kvd.connector.view import Place, View
from kvd.errors import KvdError

logger = logging.getLogger("vllm.kvd")

NAMESPACE = "kvd.connector.jobs"
REMEMBERED_S = 600.0
MAX_JOBS = 256
MAX_WAITING = 32
THREADS = 2
WINDOW_BYTES = 64 << 20
CALL_S = 5.0
"""One call to the daemon at most; the job's deadline is looked at between calls."""
PART_OF_ARENA = 2
"""Without a cap of the caller's a job brings up at most this part of the arena: the rest belongs to those who run now."""


class Busy(Exception):
    """Too many jobs wait already."""


@dataclass
class Job:
    """One prewarm. Tokens are counted from the prompt's start; bytes are those of all ranks and groups."""

    id: str
    state: str = "queued"
    prompt_tokens: int = 0
    hashed_tokens: int = 0
    """In whole blocks: what could be stored at all."""
    chunks: int = 0
    namespaces: int = 0
    found_tokens: int = 0
    """The leading run that is in the arena or some tier, in every namespace."""
    resident_tokens: int = 0
    """Of these, what is in the arena now."""
    promoted_bytes: int = 0
    resident_bytes: int = 0
    max_bytes: int = 0
    deadline_s: float = 0.0
    stopped_by: str = ""
    """Why not all of the prompt: '' | missing | max_bytes | deadline | room."""
    error: str = ""
    created: float = 0.0
    seconds: float = 0.0

    @property
    def ended(self) -> bool:
        return self.state in ("done", "failed")

    def body(self) -> dict[str, Any]:
        return asdict(self)


Row = tuple[Place, bytes, int]
"""A value to have: where, its key, its bytes."""


class Prewarmer:
    """Runs jobs. `connect` gives a connected client or raises Down or KvdError; it is called on the jobs' threads."""

    def __init__(self, connect: Callable[[], Any], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._connect = connect
        self._clock = clock
        self._lock = threading.Lock()
        self._leaving = threading.Lock()
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._waiting: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def start(
        self,
        view: View,
        hashes: Sequence[bytes],
        tokens: int,
        *,
        tenant: str = "",
        max_bytes: int | None = None,
        deadline_s: float = 30.0,
    ) -> Job:
        """Begin a job for a prompt of `tokens` tokens with these block hashes. Raises Busy."""
        job = Job(secrets.token_hex(8), prompt_tokens=tokens, max_bytes=max_bytes or 0, deadline_s=deadline_s, created=time.time())
        with self._lock:
            if sum(one.state == "queued" for one in self._jobs.values()) >= MAX_WAITING:
                raise Busy(f"{MAX_WAITING} prewarm jobs are waiting already")
            self._jobs[job.id] = job
            while len(self._jobs) > MAX_JOBS:
                self._jobs.popitem(last=False)
            if len(self._threads) < THREADS:
                # Not a pool's threads: those are waited for when the interpreter ends, and the server would stop only when
                # every job that waits here has had its turn.
                self._threads.append(threading.Thread(target=self._work, name="kvd-prewarm", daemon=True))
                self._threads[-1].start()
        until = self._clock() + deadline_s
        self._waiting.put(functools.partial(self._run, job, view, list(hashes), tenant, until))
        return job

    def find(self, job_id: str) -> dict[str, Any] | None:
        """A job's state, this process's or one that another left in the daemon; None where nobody knows it."""
        with self._lock:
            job = self._jobs.get(job_id)
        if job is not None:
            return job.body()
        try:
            text = self._connect().get(_key(job_id), namespace=NAMESPACE)
            found = json.loads(text) if text else None
        except (Down, KvdError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def close(self) -> None:
        """Drop what waits, and wait for what runs."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._waiting.get_nowait()
        with self._lock:
            threads, self._threads = self._threads, []
        for _ in threads:
            self._waiting.put(None)
        for thread in threads:
            thread.join()

    def _work(self) -> None:
        while (run := self._waiting.get()) is not None:
            run()

    def _run(self, job: Job, view: View, hashes: list[bytes], tenant: str, until: float) -> None:
        begun = self._clock()
        try:
            client = self._connect()
            job.state = "running"
            self.leave(job)
            Run(client, job, view, hashes, tenant, until, self._clock).run()
            job.state = "done"
        except (Down, KvdError) as error:
            job.state, job.error = "failed", str(error)
        except Exception as error:  # a thread's edge: a job that nobody ends would be waited for
            logger.exception("kvd: a prewarm failed")
            job.state, job.error = "failed", f"{type(error).__name__}: {error}"
        job.seconds = round(self._clock() - begun, 6)
        self.leave(job)

    def leave(self, job: Job) -> None:
        """Leave a job's state in the daemon, where the server's other processes find it; without one, nothing."""
        try:
            client = self._connect()
            with self._leaving:  # so that no older state comes after a newer one
                text = json.dumps(job.body()).encode()
                client.put(_key(job.id), text, namespace=NAMESPACE, retention="ephemeral", ttl_s=REMEMBERED_S)
        except (Down, KvdError) as error:
            logger.debug("kvd: a job's state was not left in the daemon: %s", error)


def _key(job_id: str) -> bytes:
    return hashlib.sha256(f"kvd job {job_id}".encode()).digest()


class Run:
    """The work of one job, on one thread."""

    def __init__(
        self, client: Any, job: Job, view: View, hashes: Sequence[bytes], tenant: str, until: float, clock: Callable[[], float]
    ) -> None:
        self._client = client
        self._job = job
        self._view = view
        self._keys = view.keys(hashes)
        self._places = view.places(tenant)
        self._until = until
        self._clock = clock
        if not job.max_bytes:
            job.max_bytes = client.connect().welcome.arena_bytes // PART_OF_ARENA

    def run(self) -> None:
        """Raises Down, KvdError."""
        job = self._job
        job.namespaces = len(self._places)
        job.hashed_tokens = self._keys.tokens
        spans = self._view.spans(self._keys, job.prompt_tokens)
        job.chunks = len(spans)
        where = self._where(spans)
        found = leading(spans, where)
        if len(found) < len(spans):
            job.stopped_by = "missing"
            found += shorter_tail(self._client, self._keys, self._places, spans[len(found)])
            where = self._where(found)
        job.found_tokens = found[-1].end if found else 0
        self._promote(self._affordable(found, where))
        self._look(found)

    def _where(self, spans: Sequence[Span]) -> list[list[list[str]]]:
        return where_of(self._client, self._keys, self._places, spans)

    def _affordable(self, spans: Sequence[Span], where: Sequence[Sequence[Sequence[str]]]) -> list[Row]:
        """What has to come up, chunk by chunk, as far as the byte cap goes."""
        rows: list[Row] = []
        total = 0
        for number, span in enumerate(spans):
            key = self._keys.of(span)
            chunk = [
                (place, key, self._view.value_bytes(place, span))
                for place, there in zip(self._places, where, strict=True)
                if "arena" not in there[number]
            ]
            total += sum(size for _, _, size in chunk)
            if total > self._job.max_bytes:
                self._job.stopped_by = "max_bytes"
                break
            rows += chunk
        return rows

    def _promote(self, rows: Sequence[Row]) -> None:
        for window in windows(rows):
            by_place: dict[bytes, list[Row]] = {}
            for row in window:
                by_place.setdefault(row[0].namespace, []).append(row)
            for namespace, some in by_place.items():
                if not self._bring(namespace, some):
                    return

    def _bring(self, namespace: bytes, rows: list[Row]) -> bool:
        """One namespace's part of a window; whether to go on."""
        left = [key for _, key, _ in rows]
        sizes = {key: size for _, key, size in rows}
        while left:
            wait = min(CALL_S, self._until - self._clock())
            if wait <= 0:
                self._job.stopped_by = "deadline"
                return False
            came = self._client.prefetch(left, deadline_s=wait, namespace=namespace)
            still = self._client.places(left, namespace=namespace)
            arrived = [key for key, there in zip(left, still, strict=True) if "arena" in there]
            self._job.promoted_bytes += sum(sizes[key] for key in arrived)
            left = [key for key in left if key not in set(arrived)]
            if left and not came and not arrived and self._clock() < self._until:
                # Nothing came though there was time: no room, or the tier lost it.
                self._job.stopped_by = "room"
                return False
        return True

    def _look(self, spans: Sequence[Span]) -> None:
        where = self._where(spans)
        for number, span in enumerate(spans):
            if not all("arena" in there[number] for there in where):
                break
            self._job.resident_tokens = span.end
            self._job.resident_bytes += sum(self._view.value_bytes(place, span) for place in self._places)


def where_of(client: Any, keys: Keys, places: Sequence[Place], spans: Sequence[Span]) -> list[list[list[str]]]:
    """For each namespace and each chunk: the names of what holds it."""
    names = [keys.of(span) for span in spans]
    return [client.places(names, namespace=place.namespace) for place in places] if names else []


def shorter_tail(client: Any, keys: Keys, places: Sequence[Place], missing: Span) -> list[Span]:
    """Where a chunk is missing, the end of a shorter prompt may be stored that began like this one: the longest such end."""
    tails = [tail for tail in keys.tails(missing.start, missing.end, missing.start) if tail != missing]
    for tail, *there in zip(tails, *where_of(client, keys, places, tails), strict=True) if tails else ():
        if all(there):
            return [tail]
    return []


def leading(spans: Sequence[Span], where: Sequence[Sequence[Sequence[str]]]) -> list[Span]:
    """The leading spans that every namespace has somewhere."""
    return list(spans[: next((i for i in range(len(spans)) if not all(there[i] for there in where)), len(spans))])


def windows(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows in order, in lists of at most WINDOW_BYTES (or one row)."""
    found: list[list[Row]] = []
    size = WINDOW_BYTES + 1
    for row in rows:
        size += row[2]
        if size > WINDOW_BYTES:
            found.append([])
            size = row[2]
        found[-1].append(row)
    return found


__all__ = ["Busy", "Job", "Prewarmer", "shorter_tail"]
