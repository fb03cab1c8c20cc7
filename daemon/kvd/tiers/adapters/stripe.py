"""Several adapters of one kind as one tier: values spread over all, and one that fails takes only its share with it.

Each identity has an order of members of its own (rendezvous hashing): a value is stored on the first one that works, so
adding or removing a member moves only the values that must move. Look-ups ask the members in that order too, and so find
what was stored while an earlier one was away. A member that fails is left alone for a while and then probed, also one that
could not be opened; the tier as a whole fails only when no member works.

What a member holds under an identity that has meanwhile been stored on another one is out of date. It is deleted there on
the way; a member that is away at that moment gets the delete when it is back, before it serves anything. What it is owed is
known to this process alone, so the others note that it has missed something (`Adapter.mark`): a start finds whoever has an
older mark than another, and empties it. The same note is made where the members are others than in the run before, for who is
left out. Only a member that could not be opened cannot be compared, until it can.
"""

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

from kvd.store.identity import Identity
from kvd.tiers.adapters.base import (
    Adapter,
    AdapterError,
    AdapterFull,
    Counters,
    DirectExtent,
    Durability,
    Evicted,
    Hit,
    Item,
    Loaded,
    Mark,
    Reservation,
    Stored,
    Usage,
    Want,
)

log = logging.getLogger("kvd.tiers")

PAUSE_S, PAUSE_MAX_S = 1.0, 30.0
OWED_MAX = 1 << 20


class Member:
    """One adapter of the stripe and how it is."""

    def __init__(self, adapter: Adapter, seed: int) -> None:
        self.adapter = adapter
        self.seed = seed
        self.open = False
        self.reason = ""
        self.until = 0.0
        self.pause = PAUSE_S
        self.back = 0.0
        """Since when it works again."""
        self.owed: set[Identity] = set()
        """Deletes it has missed."""
        self.forfeit = False
        """It has missed more than is kept track of: it starts empty when it is back."""
        self.suspect: set[Identity] = set()
        """Those of them that it may hold although it does not know: a store or a delete failed half way."""
        self.missed = False
        """The others have noted that it has missed something."""

    def owe(self, identities: Iterable[Identity], *, suspect: bool = False) -> None:
        """Note deletes that it misses now."""
        if suspect:
            self.suspect.update(identities)
        if not self.forfeit:
            self.owed.update(identities)
            if len(self.owed) > OWED_MAX:
                self.owed.clear()
                self.forfeit = True

    def may_hold(self, identity: Identity) -> bool:
        """Whether a later start may find a value of this identity there, as far as is known while it is away."""
        return not self.open or self.forfeit or identity in self.suspect or self.adapter.lookup([identity])[0] is not None


class Stripe(Adapter):
    """`members` as one tier. Raises AdapterError from `open` only when none of them opens; configuration errors always."""

    def __init__(self, name: str, members: Sequence[Adapter], *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._members = [Member(adapter, number) for number, adapter in enumerate(members)]
        super().__init__(name)
        self.type = members[0].type
        self.says_damage = members[0].says_damage
        self.capabilities = members[0].capabilities
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._marking = threading.Lock()
        self._mark = Mark()
        """The newest mark of the members."""
        self._first = 0
        """Its number when they were opened."""
        self._threads = ThreadPoolExecutor(4 * len(members), thread_name_prefix=f"kvd-{name}-stripe")

    @property
    def counters(self) -> Counters:
        """The members' sums, at this moment."""
        total = Counters()
        for member in self._members:
            for field, value in vars(member.adapter.counters).items():
                if field == "extra":
                    for word, count in value.items():
                        total.extra[word] = total.extra.get(word, 0) + count
                else:
                    setattr(total, field, getattr(total, field) + value)
        return total

    @counters.setter
    def counters(self, value: Counters) -> None:
        """The base class sets empty ones; the members have their own."""

    def listen(self, evicted: Evicted) -> None:
        for member in self._members:
            member.adapter.listen(evicted)

    # ---- members -----------------------------------------------------------------------------------------------------

    def attach(self, memory: memoryview) -> None:
        for member in self._members:
            member.adapter.attach(memory)

    def open(self) -> None:
        failures = []
        for member in self._members:
            try:
                self._open_member(member)
            except AdapterError as error:
                log.warning("tier %s: %s cannot be opened: %s; serving without it", self.name, member.adapter.name, error.message)
                self._failed(member, error, say=False)
                failures.append(error)
        if len(failures) == len(self._members):
            raise failures[0]
        self._mark = max(member.adapter.mark() for member in self._members if member.open)
        self._first = self._mark.number
        for member in self._members:
            if member.open:
                self._compare(member)
        if not failures:
            self._count_heads()

    def _count_heads(self) -> None:
        """Where the members are others than last time, a new mark: who is not among them misses what they store from now on."""
        signs = sorted(member.adapter.sign() for member in self._members)
        peers = xxhash.xxh3_64_intdigest(b"".join(sign.to_bytes(8, "little") for sign in signs)) >> 1
        if self._mark.peers != peers:
            self._mark = Mark(max(self._mark.number + 1, time.time_ns()), peers)
            for member in self._members:
                self._write_mark(member)

    def _write_mark(self, member: Member) -> bool:
        """Give a member that has missed nothing the newest mark; False where it cannot take it: a start may empty it then."""
        try:
            if member.adapter.mark() != self._mark:
                member.adapter.set_mark(self._mark)
        except AdapterError as error:
            log.warning("tier %s: %s; a restart before that works may give up what is there", self.name, error.message)
            return False
        return True

    def _open_member(self, member: Member) -> None:
        member.adapter.open()
        member.open = True

    def _compare(self, member: Member) -> None:
        """Have a member that missed something in an earlier run start empty, and the others where it is they who did."""
        mark = member.adapter.mark()
        behind = [member] if mark.number < self._first else []
        if mark.number > self._first:
            behind = [other for other in self._members if other.open and other is not member]
            self._mark, self._first = max(mark, self._mark), mark.number
        for other in behind:
            other.forfeit = True
            try:
                self._pay(other)
            except AdapterError as error:
                self._failed(other, error)

    def _owe(self, member: Member, identities: Sequence[Identity]) -> None:
        """Note deletes that a member misses, and on the others that it has. Raises AdapterError where none of them can."""
        noted = member.missed or not any(member.may_hold(identity) for identity in identities)
        member.owe(identities)
        if noted:
            return
        with self._marking:
            if member.missed:
                return
            mark, failure, kept = self._mark._replace(number=max(self._mark.number + 1, time.time_ns())), None, False
            for other in self._members:
                if self._usable(other) and other is not member:
                    try:
                        other.adapter.set_mark(mark)
                        kept = True
                    except AdapterError as error:
                        failure = error
            if failure is not None and not kept:
                raise failure
            if kept:
                self._mark, member.missed = mark, True

    def close(self, deadline_s: float = 5.0) -> None:
        for member in self._members:
            if member.open:
                member.adapter.close(deadline_s)
                member.open = False
        self._threads.shutdown(wait=False)

    def _failed(self, member: Member, error: AdapterError, *, say: bool = True) -> None:
        with self._lock:
            now = self._monotonic()
            if say and not member.reason:
                log.warning("tier %s: %s does not work: %s; serving without it", self.name, member.adapter.name, error.message)
                if now - member.back > PAUSE_MAX_S:  # else it is the same failure: a probe that went well has proved nothing
                    member.pause = PAUSE_S
            member.reason = error.message
            member.until = now + member.pause
            member.pause = min(PAUSE_MAX_S, 2 * member.pause)

    def _works(self, member: Member) -> bool:
        """Whether to use it now. One whose pause is over is opened, and gets the deletes it has missed, first."""
        if not member.reason:
            return True
        if self._monotonic() < member.until:
            return False
        with self._lock:
            if self._monotonic() < member.until:  # another thread is probing
                return False
            member.until = self._monotonic() + member.pause
        try:
            if not member.open:
                self._open_member(member)
                self._compare(member)
            self._pay(member)
        except AdapterError as error:
            self._failed(member, error)
            return False
        with self._lock:
            member.reason, member.back = "", self._monotonic()
        log.info("tier %s: %s works again", self.name, member.adapter.name)
        return True

    def _pay(self, member: Member) -> None:
        if member.forfeit:
            held = [identity for identity, _ in member.adapter.enumerate()]
            if held:
                log.warning(
                    "tier %s: %s was away while values were replaced or deleted: the %d it holds are given up",
                    self.name,
                    member.adapter.name,
                    len(held),
                )
            member.adapter.delete(held)
            member.forfeit = False
        owed = list(member.owed)
        if owed:
            member.adapter.delete(owed)
            member.owed.difference_update(owed)
        with self._marking:
            if member.owed:
                return
            member.suspect.clear()
            member.missed = not self._write_mark(member)

    def _order(self, identity: Identity) -> list[Member]:
        if len(self._members) == 1:
            return self._members
        return sorted(self._members, key=lambda member: xxhash.xxh3_64_intdigest(identity, seed=member.seed), reverse=True)

    def _usable(self, member: Member) -> bool:
        return member.open and not member.reason

    # ---- values ------------------------------------------------------------------------------------------------------

    def store(self, items: Sequence[Item]) -> list[Stored]:
        results: list[Stored | None] = [None] * len(items)
        orders = [[member for member in self._order(item.identity) if self._works(member)] for item in items]
        left = list(range(len(items)))
        last: AdapterError | None = None
        failed: list[tuple[Member, Identity]] = []
        while left:
            shares: dict[int, list[int]] = {}
            for i in left:
                if orders[i]:
                    shares.setdefault(orders[i][0].seed, []).append(i)
                else:
                    results[i] = Stored(False, "io_error")
            jobs = {
                seed: self._threads.submit(self._members[seed].adapter.store, [items[i] for i in share])
                for seed, share in shares.items()
            }
            left = []
            for seed, share in shares.items():
                member = self._members[seed]
                try:
                    answers = jobs[seed].result()
                except AdapterFull as error:
                    answers, last = [Stored(False, "full")] * len(share), error
                except AdapterError as error:
                    self._failed(member, error)
                    answers, last = [Stored(False, "io_error")] * len(share), error
                for i, answer in zip(share, answers, strict=True):
                    if answer.reason == "io_error":
                        failed.append((member, items[i].identity))
                    if not answer.ok and answer.reason in ("io_error", "full") and len(orders[i]) > 1:
                        orders[i].pop(0)
                        left.append(i)
                        continue
                    try:
                        results[i] = self._settle(items[i].identity, member, answer) if answer.ok else answer
                    except AdapterError as error:
                        results[i], last = Stored(False, "io_error"), error
        for member, identity in failed:  # these bytes, if any of them are there, are today's: only later puts make them old
            member.owe([identity], suspect=True)
        if last is not None and not any(result is not None and result.ok for result in results):
            raise last
        return [result or Stored(False, "io_error") for result in results]

    def _settle(self, identity: Identity, holder: Member, answer: Stored) -> Stored:
        """What to answer for a value that `holder` has taken. Raises AdapterError: then it has been taken from it again."""
        try:
            self._supersede(identity, holder)
        except AdapterError:
            # An older value might come back in its place.
            with contextlib.suppress(AdapterError):
                holder.adapter.delete([identity])
            raise
        return answer

    def _supersede(self, identity: Identity, holder: Member) -> None:
        """`holder` has the newest value: the others forget theirs. Raises AdapterError where that cannot be seen to."""
        for member in self._members:
            if member is holder:
                member.owed.discard(identity)
                continue
            if self._usable(member):
                try:
                    if member.adapter.lookup([identity])[0] is not None:
                        member.adapter.delete([identity])
                    continue
                except AdapterError as error:
                    member.owe([identity], suspect=True)
                    self._failed(member, error)
            self._owe(member, [identity])

    def _holder(self, identity: Identity) -> tuple[Member, Hit] | None:
        for member in self._order(identity):
            if self._usable(member) and identity not in member.owed:
                hit = member.adapter.lookup([identity])[0]
                if hit is not None:
                    return member, hit
        return None

    def lookup(self, identities: Sequence[Identity]) -> list[Hit | None]:
        found: list[Hit | None] = [None] * len(identities)
        for member in self._members:
            if self._usable(member):
                for i, hit in enumerate(member.adapter.lookup(identities)):
                    if hit is not None and found[i] is None and identities[i] not in member.owed:
                        found[i] = hit
        return found

    def load(self, wants: Sequence[Want]) -> list[Loaded]:
        results = [Loaded.MISS] * len(wants)
        shares: dict[int, list[int]] = {}
        for member in self._members:
            self._works(member)  # reads too bring a member back
        for i, want in enumerate(wants):
            held = self._holder(want.identity)
            if held is not None:
                shares.setdefault(held[0].seed, []).append(i)
        jobs = {
            seed: self._threads.submit(self._members[seed].adapter.load, [wants[i] for i in share])
            for seed, share in shares.items()
        }
        for seed, share in shares.items():
            try:
                answers = jobs[seed].result()
            except AdapterError as error:
                self._failed(self._members[seed], error)
                answers = [Loaded.MISS] * len(share)
            for i, answer in zip(share, answers, strict=True):
                results[i] = answer
        return results

    def delete(self, identities: Sequence[Identity]) -> int:
        held = 0
        for member in self._members:
            if self._usable(member):
                try:
                    held += member.adapter.delete(identities)
                except AdapterError as error:
                    member.owe(identities, suspect=True)
                    self._failed(member, error)
        for member in self._members:
            if not self._usable(member):
                self._owe(member, identities)
        return held

    def enumerate(self) -> Iterator[tuple[Identity, Hit]]:
        seen: set[Identity] = set()
        for member in self._members:
            if self._usable(member):
                for identity, hit in member.adapter.enumerate():
                    if identity not in seen and identity not in member.owed:
                        seen.add(identity)
                        yield identity, hit

    def identities(self, namespace: bytes | None) -> Iterator[Identity]:
        usable = [member.adapter for member in self._members if self._usable(member)]
        return iter({identity for adapter in usable for identity in adapter.identities(namespace)})

    # ---- lending -----------------------------------------------------------------------------------------------------

    def direct_roots(self) -> list[Path]:
        return [root for member in self._members for root in member.adapter.direct_roots()]

    def lend(self, wanted: Sequence[Reservation]) -> list[DirectExtent | str]:
        answers: list[DirectExtent | str] = ["io_error"] * len(wanted)
        left = dict.fromkeys(range(len(wanted)), 0)
        last: AdapterError | None = None
        while left:
            shares: dict[int, list[int]] = {}
            for i, tried in list(left.items()):
                order = [member for member in self._order(wanted[i].identity) if self._works(member)]
                if tried >= len(order):
                    del left[i]
                    continue
                left[i] += 1
                shares.setdefault(order[tried].seed, []).append(i)
            for seed, share in shares.items():
                member = self._members[seed]
                try:
                    lent = member.adapter.lend([wanted[i] for i in share])
                except AdapterFull as error:
                    lent, last = ["full"] * len(share), error
                except AdapterError as error:
                    self._failed(member, error)
                    lent, last = ["io_error"] * len(share), error
                for i, one in zip(share, lent, strict=True):
                    answers[i] = one if isinstance(one, str) else dataclasses.replace(one, place=(member, one))
                    if one not in ("full", "io_error"):
                        del left[i]
        if last is not None and not any(isinstance(answer, DirectExtent) for answer in answers):
            raise last
        return answers

    def fill(self, extent: DirectExtent, checksum: bytes = b"") -> Stored:
        member, inner = _lent_by(extent)
        stored = member.adapter.fill(inner, checksum)
        return self._settle(extent.identity, member, stored) if stored.ok else stored

    def give_back(self, extent: DirectExtent) -> None:
        member, inner = _lent_by(extent)
        member.adapter.give_back(inner)

    def hold(self, identities: Sequence[Identity]) -> list[DirectExtent | None]:
        answers: list[DirectExtent | None] = []
        for identity in identities:
            held = self._holder(identity)
            inner = held[0].adapter.hold([identity])[0] if held is not None else None
            answers.append(None if held is None or inner is None else dataclasses.replace(inner, place=(held[0], inner)))
        return answers

    # ---- state -------------------------------------------------------------------------------------------------------

    def usage(self) -> Usage:
        total = Usage()
        for member in self._members:
            if member.open:
                usage = member.adapter.usage()
                total.bytes_used += usage.bytes_used
                total.bytes_limit += usage.bytes_limit
                total.entries += usage.entries
        return total

    def flush(self) -> Durability:
        weakest, failure, lost = Durability.FSYNC, None, 0
        for member in self._members:
            if not member.open:
                continue  # what it holds was there before, and is no worse for this run
            try:
                weakest = min(weakest, member.adapter.flush())
            except AdapterError as error:  # the others are flushed all the same
                held = member.adapter.usage().entries
                if held or self._usable(member):
                    failure, lost = error, lost + held
        if failure is not None:
            failure.values = lost
            raise failure
        return weakest

    @property
    def parts_down(self) -> int:
        return sum(bool(member.reason) or member.adapter.parts_down > 0 for member in self._members)

    def describe(self) -> dict[str, object]:
        return {
            "members": [
                {"name": m.adapter.name, "works": self._usable(m), "reason": m.reason, **(m.adapter.describe() if m.open else {})}
                for m in self._members
            ]
        }


def _lent_by(extent: DirectExtent) -> tuple[Member, DirectExtent]:
    """The member that an extent is of, and the extent as it knows it."""
    assert isinstance(extent.place, tuple)
    member, inner = extent.place
    return member, inner
