"""The connector in the engine's scheduler: look up prefixes, plan loads and saves. Moves no bytes and knows no vLLM class.

A request's way: `arrived` -> `match` (how many tokens are stored; asked again and again while the request does not fit) ->
`allocated` (blocks for them) -> `plan` (told to the workers) -> ... `heard` (what became of it) -> `finished`.

Rules that keep the engine alive and right (each was met on a real engine):
- A hit never covers the last token, and counts only chunks that every group of every rank holds.
- A request whose load failed is never offered a hit again: the engine would ask, fail and ask for ever.
- A load that was accepted is always handed to the workers, be it as doomed: a request nobody reports on waits for ever.
- Tables of blocks are read from the engine in the step that needs them; appended ones are wrong after a preemption.
- The answer to `match` is kept for a second, since a request that does not fit is asked for in every step.

Single-threaded: the engine's scheduler loop. `match` is the only call that talks to the daemon, in one or two short round trips.
Tiers that must do I/O to tell what they hold are asked on a thread, while `match` answers None: ask again.
"""

import contextlib
import logging
import operator
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from kvd.connector import lora, parameters
from kvd.connector.fingerprint import salt_of, salted
from kvd.connector.groups import Group, unit_of
from kvd.connector.keys import Keys, Span, chunk_tokens
from kvd.connector.link import Down, Link
from kvd.connector.lookup import look_up
from kvd.connector.metrics import Counters
from kvd.connector.plan import Load, Move, Plan, RankIdentity, Report, Save, Unsaved
from kvd.connector.seldom import Seldom
from kvd.connector.settings import Settings
from kvd.connector.view import HashSource, View
from kvd.errors import KvdError
from kvd.wire.protocol import SOURCES

logger = logging.getLogger("vllm.kvd")

ANSWER_S = 1.0
"""How long an answer to `match` is repeated without asking the daemon."""
DEFER_S = 5.0
"""How long a request waits for another one that is loading the same chunks; then it loads for itself."""
BAD_KEY_S = 30.0
"""How long a chunk that could not be loaded is not offered again."""
INTRODUCTION_S = 2.0
"""How long the first request waits for the workers to introduce themselves."""
MAX_BAD_KEYS = 4096
ASKERS = 2
"""Threads that ask slow tiers, each for one request."""


class Request(Protocol):
    """What is read of vLLM's Request."""

    request_id: str
    num_tokens: int
    num_prompt_tokens: int
    block_hashes: Sequence[bytes]
    kv_transfer_params: Mapping[str, Any] | None
    lora_request: Any
    skip_reading_prefix_cache: bool


@dataclass(slots=True)
class Answer:
    """What a look-up found: stored tokens [computed, end) for a request of `tokens` tokens, asked at `at`."""

    computed: int
    tokens: int
    end: int
    at: float
    spans: tuple[Span, ...] = ()
    token: bytes | None = None
    sources: bytes = b""
    """Where each span comes from: numbers of the protocol's SOURCES."""


@dataclass(slots=True)
class Asking:
    """A look-up under way in tiers that must do I/O to tell. `quick`: what is known without them."""

    place: tuple[int, int]
    quick: Answer
    future: "Future[Answer]"
    until: float


@dataclass(slots=True)
class Tracked:
    """One live request."""

    request: Request
    keys: Keys
    retention: str
    ttl_s: float | None
    whose: str
    """The tenant, and the adapter's weights."""
    salt: bytes
    unsaved: str = ""
    """Why nothing is stored, where its retention is none."""
    answer: Answer | None = None
    asked: int | None = None
    """Tokens the engine had itself when it asked for the first time; None once that is counted."""
    counted: bool = False
    sources: dict[str, int] = field(default_factory=dict)
    """Of the last load: tokens by source."""
    asking: "Asking | None" = None
    deferred_since: float | None = None
    failed: bool = False
    """Nothing is loaded for it (any more)."""
    saved: int = 0
    """Tokens up to which chunks were planned for saving."""
    stored: range = range(0)
    """Tokens that the last look-up found stored: not saved again."""
    tail_done: bool = False
    loading: tuple[bytes, ...] = ()
    blamed: frozenset[bytes] = frozenset()
    """Keys whose values could not be loaded: stored anew, whatever the daemon says it has."""


@dataclass(slots=True)
class Step:
    """One request's share of a step, as the adapter reads it from SchedulerOutput."""

    request_id: str
    computed: int
    scheduled: int


@dataclass(slots=True)
class _State:
    """What is known of the workers. `met`: they have reported, for good or ill."""

    namespaces: tuple[tuple[bytes, ...], ...] = ()
    problem: str = "the workers have not reported yet"
    met: bool = False
    waiting_since: float | None = None
    ranks: tuple[RankIdentity, ...] = ()
    compared: int = -1
    asked: dict[bytes, tuple[bytes, ...]] = field(default_factory=dict)


class Scheduler:
    """The scheduler side. `hash_source` gives (algorithm, seed) of the engine's block hashes; read when first needed.

    `say_view` is told once, with the first request, what this engine is.
    """

    def __init__(
        self,
        settings: Settings,
        groups: Sequence[Group],
        link: Link,
        *,
        hash_tokens: int,
        hash_source: Callable[[], tuple[str, str]],
        save: bool = True,
        load: bool = True,
        reuse_local: bool = True,
        drop_units: int = 0,
        unit_bytes: int = 0,
        say_view: Callable[[View], object] = lambda view: None,
        counters: Counters | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.groups = tuple(groups)
        self.unit = unit_of(self.groups)
        self.chunk = chunk_tokens(settings.chunk_tokens, self.unit)
        self.hash_tokens = hash_tokens
        self.counters = counters or Counters()
        self._exact = any(group.partial for group in self.groups)
        self._link = link
        self._hash_source = hash_source
        self._say_view = say_view
        self._save = save
        self._load = load
        self._reuse_local = reuse_local
        self._drop = drop_units * self.unit
        self._unit_bytes = unit_bytes
        self._clock = clock
        self._tenant = settings.tenant
        self._slips, self._seldom = parameters.SlipLog(), Seldom(logger)
        self._adapters = lora.Adapters()
        self._state = _State()
        self._requests: dict[str, Tracked] = {}
        self._pending: list[Load] = []
        self._askers: ThreadPoolExecutor | None = None
        self._in_flight: dict[bytes, str] = {}
        self._bad: OrderedDict[bytes, float] = OrderedDict()

    # ---- the handshake -----------------------------------------------------------------------------------------------

    def introduce(self, ranks: Sequence[RankIdentity], expected: int) -> str:
        """Learn the workers' namespaces. Returns why nothing will be stored ('' when all is well)."""
        problem = next((rank.problem for rank in ranks if rank.problem), "")
        if not problem and len(ranks) != expected:
            problem = f"{len(ranks)} of {expected} workers reported their cache"
        if not problem:
            self._choose_chunk(all(rank.direct for rank in ranks))
        if not problem and {rank.chunk_tokens for rank in ranks} != {self.chunk}:
            problem = f"workers use chunks of {sorted({r.chunk_tokens for r in ranks})} tokens, the scheduler of {self.chunk}"
            if len({rank.direct for rank in ranks}) > 1:
                problem += ": GPU-direct works for some of them only; set KVD_CHUNK_TOKENS"
        # Ranks that hold the same bytes have the same namespaces: asked for once.
        namespaces = tuple(dict.fromkeys(rank.namespaces for rank in ranks))
        self._state = _State(() if problem else namespaces, problem, met=True, ranks=tuple(ranks))
        return problem

    def view(self) -> View:
        """This engine as others must know it to find what it stores. The hash's seed is known with the first request only."""
        algorithm, seed = self._hash_source()
        ranks = dict.fromkeys(rank.namespaces for rank in self._state.ranks)
        firsts = tuple(next(rank for rank in self._state.ranks if rank.namespaces == names) for names in ranks)
        return View(firsts, self.groups, HashSource(algorithm, seed, self.hash_tokens), self.chunk, self._tenant)

    def _choose_chunk(self, direct: bool) -> None:
        """The size of chunks: large where every worker moves them past the daemon. What was cut before is cut anew."""
        self.chunk = chunk_tokens(self.settings.chunk_tokens, self.unit, self._unit_bytes if direct else 0)
        for tracked in self._requests.values():
            tracked.keys = self._keys_of(tracked.request)

    def _keys_of(self, request: Request) -> Keys:
        return Keys(request.block_hashes, hash_tokens=self.hash_tokens, chunk=self.chunk, unit=self.unit)

    @property
    def active(self) -> bool:
        return not self._state.problem

    def namespaces(self, salt: bytes) -> tuple[bytes, ...]:
        """The final namespaces of all groups of all ranks."""
        found = self._state.asked.get(salt)
        if found is None:
            if len(self._state.asked) > 1024:
                self._state.asked.clear()
            found = tuple(salted(namespace, salt) for rank in self._state.namespaces for namespace in rank)
            self._state.asked[salt] = found
        return found

    # ---- requests ----------------------------------------------------------------------------------------------------

    def arrived(self, request: Request) -> Tracked:
        """A request this side has not seen; calling again is harmless."""
        found = self._requests.get(request.request_id)
        if found is None:
            given = request.kv_transfer_params if isinstance(request.kv_transfer_params, Mapping) else {}
            mark = self._adapters.mark(request.lora_request)
            found = self._requests[request.request_id] = Tracked(
                request=request,
                keys=self._keys_of(request),
                retention="none" if mark is None else parameters.retention(given),
                ttl_s=parameters.ttl(given),
                whose=(whose := lora.whose(parameters.tenant(given), mark or "")),
                salt=self._salt(whose),
                unsaved=lora.IN_DOUBT if mark is None else "the request asked for retention none",
                failed=mark is None,
            )
            self._slips.note(given)
        return found

    def match(self, request: Request, computed: int) -> int | None:
        """Tokens stored beyond the `computed` ones the engine has itself; None: ask again in the next step."""
        self.arrived(request).asked = computed
        if self.active and self._state.compared != self._link.connections:
            self._compare()
        if not self._load or request.skip_reading_prefix_cache:
            return 0
        if not self.active:
            return None if self._wait_for_workers() else 0
        tracked = self.arrived(request)
        most = (request.num_tokens - 1) // self.unit * self.unit - self._drop
        if tracked.failed or most <= computed:
            return 0
        now = self._clock()
        answer = tracked.answer
        known = answer is not None and (answer.computed, answer.tokens) == (computed, request.num_tokens)
        if not known or answer is None or now - answer.at > ANSWER_S:
            if self._wait_for_other(tracked, computed, now):
                return None
            answer = self._ask_all(tracked, computed, most, now)
            if answer is None:
                return None
            tracked.answer = answer
            tracked.stored = range(answer.spans[0].start, answer.spans[-1].end) if answer.spans else range(0)
        return answer.end - computed

    def _compare(self) -> None:
        """For each daemon, since one that starts anew may have forgotten; the hashes' seed is known with the first request."""
        self._state.compared = self._link.connections
        self._say_view(self.view())

    def _wait_for_workers(self) -> bool:
        """Under MultiConnector the workers introduce themselves in the first step: the first request waits for that."""
        if self._state.met:
            return False
        now = self._clock()
        if self._state.waiting_since is None:
            self._state.waiting_since = now
        return now - self._state.waiting_since < INTRODUCTION_S

    def _wait_for_other(self, tracked: Tracked, computed: int, now: float) -> bool:
        """Whether another request is loading the chunk this one needs first. Its blocks will be the engine's own then."""
        if not self._reuse_local or not self._in_flight:
            return False
        start = computed // self.chunk * self.chunk
        if start + self.chunk > tracked.keys.tokens:
            return False
        other = self._in_flight.get(tracked.salt + tracked.keys.of(Span(start, start + self.chunk)))
        if other in (None, tracked.request.request_id):
            return False
        if tracked.deferred_since is None:
            tracked.deferred_since = now
            self.counters.add("deferred")
        return now - tracked.deferred_since < DEFER_S

    def _ask_all(self, tracked: Tracked, computed: int, most: int, now: float) -> Answer | None:
        """The arena and tiers that know by heart at once; None while others, which must do I/O to tell, are being asked."""
        place = (computed, tracked.request.num_tokens)
        asking = tracked.asking
        if asking is None or asking.place != place:
            quick = self._ask(tracked, tracked.keys, computed, most, now, 0.0)
            if quick.end >= most or not self._slow_tiers():
                return quick
            # Keys of its own: they grow as they are asked for, and this thread goes on using the request's.
            keys, patience_s = self._keys_of(tracked.request), self.settings.lookup_timeout_s / 2
            if self._askers is None:
                self._askers = ThreadPoolExecutor(ASKERS, thread_name_prefix="kvd-ask")
            future = self._askers.submit(self._ask, tracked, keys, computed, most, now, patience_s)
            tracked.asking = Asking(place, quick, future, now + 2 * patience_s)
            self.counters.add("lookups_slow")
            return None
        if not asking.future.done() and now < asking.until:
            return None
        tracked.asking = None
        found = asking.future.result() if asking.future.done() else asking.quick
        return replace(max(found, asking.quick, key=lambda answer: answer.end), at=now)

    def _slow_tiers(self) -> bool:
        with contextlib.suppress(Down, KvdError):
            return bool(self._link.call(operator.attrgetter("slow_lookups")))
        return False

    def _ask(self, tracked: Tracked, keys: Keys, computed: int, most: int, now: float, patience_s: float) -> Answer:
        """On the engine's thread with no patience; on a thread of ours with some. Raises nothing."""
        nothing = Answer(computed, tracked.request.num_tokens, computed, now)
        # Without windows a hit may end inside a chunk, so the prompt's last whole block is asked for as it was stored.
        end = min(keys.tokens, most if self._exact else tracked.request.num_tokens)
        spans = keys.spans(computed // self.chunk, end)
        spans = spans[: next((i for i, span in enumerate(spans) if self._is_bad(tracked.salt + keys.of(span), now)), len(spans))]
        if not spans:
            return nothing
        begun = time.perf_counter()
        try:
            found, token, sources = look_up(
                self._link,
                keys,
                spans,
                (computed, end),
                namespaces=self.namespaces(tracked.salt),
                pin_s=self.settings.pin_s,
                ask_s=patience_s,
                skip=lambda span: self._is_bad(tracked.salt + keys.of(span), now),
            )
        except Down:
            return nothing
        except KvdError as error:
            self.counters.add("lookup_failures")
            self._seldom.warning("look-up", f"a look-up failed: {error}")
            return nothing
        finally:
            self.counters.add("lookups")
            self.counters.add("lookup_seconds", time.perf_counter() - begun)
        hit = min(found[-1].end, most) if found else 0
        if hit <= computed:
            return nothing
        kept = tuple(span for span in found if span.start < hit)
        return Answer(computed, tracked.request.num_tokens, hit, now, kept, token, sources[: len(kept)].ljust(len(kept), b"\0"))

    def _is_bad(self, name: bytes, now: float) -> bool:
        """Whether a chunk (its salt and key) is one of those that could not be loaded lately."""
        return bool(self._bad) and self._bad.get(name, 0.0) > now

    # ---- loads -------------------------------------------------------------------------------------------------------

    def allocated(self, request: Request, tables: Sequence[Sequence[int]], external: int) -> None:
        """The engine allocated blocks for `external` tokens of a hit. `tables`: all block tables, by the engine's group id."""
        tracked = self.arrived(request)
        self._count_query(tracked, external)
        if external <= 0:
            return
        answer = tracked.answer
        why = ""
        moves: tuple[Move, ...] = ()
        if answer is None or not answer.spans:
            why = "the engine loads what was not offered"
        elif answer.computed + external > answer.end or (self._exact and answer.computed + external != answer.end):
            why = f"the engine wants {external} tokens, {answer.end - answer.computed} were offered"
        else:
            try:
                moves = tuple(self._load_moves(tracked, answer, tables, answer.computed + external))
            except IndexError:
                why = "the engine allocated fewer blocks than it accepted"
        token = answer.token if answer else None
        self._pending.append(Load(request.request_id, tracked.salt, moves, token, why))
        if why:
            logger.error("kvd: request %s cannot be loaded: %s; it will be recomputed", request.request_id, why)
        tracked.loading = tuple(tracked.salt + move.key for move in moves)
        for key in tracked.loading:
            self._in_flight.setdefault(key, request.request_id)
        self.counters.add("hit_tokens", external)
        tracked.sources = self._sources(answer, external) if answer else {}
        for name, tokens in tracked.sources.items():
            self.counters.add(f"hit_tokens_{name}", tokens)

    def _count_query(self, tracked: Tracked, external: int) -> None:
        """As vLLM counts for its external hit rate: each request once, with what it was asked for and what it got."""
        if tracked.asked is not None and not tracked.counted:
            tracked.counted = True
            if not getattr(tracked.request, "num_preemptions", 0):
                self.counters.add("query_tokens", tracked.request.num_tokens - tracked.asked)
                self.counters.add("query_hit_tokens", external)

    def _sources(self, answer: Answer, external: int) -> dict[str, int]:
        """The tokens of a hit by where they come from; they add up to `external`."""
        told: dict[str, int] = {}
        end = answer.computed + external
        for span, source in zip(answer.spans, answer.sources, strict=True):
            tokens = min(span.end, end) - max(span.start, answer.computed)
            if tokens > 0:
                told[SOURCES[source]] = told.get(SOURCES[source], 0) + tokens
        return told

    def sources_of(self, request_id: str) -> dict[str, int]:
        """Where the tokens of a request's last load come from: by 'arena', 'disk', 'remote'."""
        tracked = self._requests.get(request_id)
        return dict(tracked.sources) if tracked is not None else {}

    def _load_moves(self, tracked: Tracked, answer: Answer, tables: Sequence[Sequence[int]], end: int) -> list[Move]:
        moves = []
        for span in answer.spans:
            blocks = []
            for group in self.groups:
                first = max(answer.computed // group.block_tokens, group.first_needed(end))
                last = end // group.block_tokens
                table = tables[group.id]
                blocks.append(tuple(table[b] if first <= b < last else 0 for b in group.stored(*span)))
            moves.append(Move(tracked.keys.of(span), tuple(blocks)))
        return moves

    # ---- saves -------------------------------------------------------------------------------------------------------

    def plan(self, steps: Sequence[Step], table_of: Callable[[str], Sequence[Sequence[int]] | None]) -> Plan:
        """This step's loads and saves. `table_of`: the current block tables of a request scheduled in this step."""
        plan = Plan(loads=self._pending)
        self._pending = []
        if self.active and self._save and self._link.up:
            for step in steps:
                tracked = self._requests.get(step.request_id)
                if tracked is not None and tracked.retention == "none":
                    self._plan_unsaved(plan, tracked, step)
                elif tracked is not None:
                    self._plan_save(plan, tracked, step, table_of)
        return plan

    def doomed(self) -> Plan:
        """The plan when planning itself went wrong: every accepted load fails, so that its request is recomputed."""
        loads, self._pending = self._pending, []
        return Plan(loads=[Load(load.request_id, load.salt, (), None, "planning failed") for load in loads])

    def _plan_save(
        self, plan: Plan, tracked: Tracked, step: Step, table_of: Callable[[str], Sequence[Sequence[int]] | None]
    ) -> None:
        spans = self._completed(tracked, step)
        if not spans:
            return
        tables = table_of(step.request_id)
        if tables is None:
            return
        moves = []
        for span in spans:
            blocks = tuple(tuple(tables[group.id][b] for b in group.stored(*span)) for group in self.groups)
            # A zero is a block the engine gave up before this side saw it computed (a window's, after a local hit).
            if all(all(ids) for ids in blocks):
                moves.append(Move(tracked.keys.of(span), blocks))
        if moves:
            plan.saves.append(Save(step.request_id, tracked.salt, tuple(moves), tracked.retention, tracked.ttl_s, tracked.blamed))

    def _plan_unsaved(self, plan: Plan, tracked: Tracked, step: Step) -> None:
        """A request of which nothing is stored: the daemon is told, since somebody may ask it why."""
        if spans := self._completed(tracked, step):
            plan.unsaved.append(Unsaved(tracked.salt, tuple(map(tracked.keys.of, spans)), tracked.unsaved))

    def _completed(self, tracked: Tracked, step: Step) -> list[Span]:
        """The chunks whose last token this step computes, and the prompt's tail with its last one; each once."""
        # During asynchronous scheduling the hashes lag behind the tokens in flight: never save what has no hash yet.
        done = min(step.computed + step.scheduled, tracked.keys.tokens)
        spans = [Span(start, start + self.chunk) for start in range(tracked.saved, done - self.chunk + 1, self.chunk)]
        tracked.saved += len(spans) * self.chunk
        spans = [span for span in spans if not (span.start in tracked.stored and span.end <= tracked.stored.stop)]
        if not tracked.tail_done and step.computed + step.scheduled >= tracked.request.num_prompt_tokens:
            tracked.tail_done = True
            spans += self._tails(tracked)
        return spans

    def _tails(self, tracked: Tracked) -> list[Span]:
        """What a prompt ends with, so that the same prompt hits all that the engine's own cache would."""
        prompt = tracked.request.num_prompt_tokens
        ends = {min(prompt, tracked.keys.tokens) // self.unit * self.unit}
        if self._exact:
            # The last token is never part of a hit, and where windows slide a hit ends exactly where a chunk does.
            ends.add(min(prompt - 1, tracked.keys.tokens) // self.unit * self.unit)
        return [Span(end // self.chunk * self.chunk, end) for end in sorted(ends) if end % self.chunk and end > tracked.stored.stop]

    # ---- what became of it -------------------------------------------------------------------------------------------

    def heard(self, received: Sequence[str], failed: Sequence[str], report: Report) -> None:
        """The workers' results of a step: loads that ended, and those among them that failed."""
        now = self._clock()
        blamed = report.failed
        for request_id in {*failed, *blamed}:
            tracked = self._requests.get(request_id)
            why, keys = blamed.get(request_id, ("not said", ()))
            self.counters.add("load_failures")
            logger.warning("kvd: loading for request %s failed (%s); it is recomputed", request_id, why)
            if tracked is not None:
                tracked.failed = True
                tracked.answer = None
                # What was thought to be stored is not: offer the recomputed chunks to the daemon again.
                tracked.saved, tracked.stored, tracked.tail_done = 0, range(0), False
                tracked.blamed |= frozenset(keys)
                for key in keys:
                    self._bad[tracked.salt + key] = now + BAD_KEY_S
        while len(self._bad) > MAX_BAD_KEYS:
            self._bad.popitem(last=False)
        for request_id in received:
            self._landed(request_id)

    def _landed(self, request_id: str) -> None:
        tracked = self._requests.get(request_id)
        if tracked is not None:
            self._forget_loading(tracked)

    def _forget_loading(self, tracked: Tracked) -> None:
        for key in tracked.loading:
            if self._in_flight.get(key) == tracked.request.request_id:
                del self._in_flight[key]
        tracked.loading = ()

    def finished(self, request_id: str) -> None:
        """The request ended, in whatever way. Its blocks are never held back: saves were copied in their own step."""
        tracked = self._requests.pop(request_id, None)
        if tracked is not None:
            self._forget_loading(tracked)

    def reset(self) -> bool:
        """What KVD_RESET says: nothing stored before is loaded by this engine from now on, or by any, or it is kept.

        vLLM resets when weights may change, and whenever it goes to sleep: it does not say which. Other engines may have other
        weights then, so what this one computes with its own is nobody else's until it starts again from the weights' files.
        """
        self._bad.clear()
        self._pending = self.doomed().loads
        if self.settings.reset == "private":
            self._tenant = f"{self.settings.tenant} reset {secrets.token_hex(16)}".strip()
            self._state.compared = -1
            logger.info("kvd: the engine reset its caches: it shares nothing any more until it restarts (KVD_RESET=private)")
        for tracked in self._requests.values():
            tracked.answer = tracked.asking = None
            tracked.saved, tracked.stored, tracked.tail_done = 0, range(0), False
            tracked.salt = self._salt(tracked.whose)
        if self.settings.reset == "keep":
            logger.info("kvd: the engine reset its caches; what is stored is kept (KVD_RESET=keep)")
        return self.settings.reset != "clear" or self._clear()

    def _clear(self) -> bool:
        namespaces = {*self.namespaces(self._salt("")), *(one for known in self._state.asked.values() for one in known)}
        try:
            for namespace in sorted(namespaces):
                self._link.call(operator.methodcaller("clear", namespace=namespace))
        except (Down, KvdError) as error:
            logger.warning("kvd: could not clear the stored cache: %s", error)
            return False
        return True

    def close(self) -> None:
        """End the threads that ask slow tiers."""
        if self._askers is not None:
            self._askers.shutdown(wait=False, cancel_futures=True)

    def _salt(self, whose: str) -> bytes:
        """What completes the namespaces, for requests of this tenant (`kvd_namespace`) and adapter."""
        algorithm, seed = self._hash_source()
        return salt_of(hash_algorithm=algorithm, hash_seed=seed, tenant=self._tenant, request_tenant=whose)
