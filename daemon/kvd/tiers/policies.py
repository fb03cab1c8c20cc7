"""Which values go down to which tier and leave the arena then; which come up from where, and stay.

A store policy is asked once for every value that is put (`targets`) and, when all tiers it named have answered, whether the
value leaves the arena (`leaves`). A prefetch policy is asked which of the tiers that hold a value loads it (`source`) and
whether the copy stays in the arena like any other (`stays`) or is the first to go once it was read.

Policies of users are found by name: one that was registered (`register_store_policy`, `register_prefetch_policy`), an entry
point of a package (groups `kvtools.store_policies`, `kvtools.prefetch_policies`), or `module:Class`. They run on the event
loop, so they may only compute. What they raise, or answer that makes no sense, is counted and logged, and the default
policy's answer is taken instead: a defect there costs no value and stops no thread.
"""

import difflib
import logging
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import Any, NamedTuple, TypeVar

from kvd.store.identity import Identity
from kvd.store.retention import Retention
from kvd.tiers.adapters.base import Capabilities
from kvtools.config import load_object
from kvtools.errors import UsageError

log = logging.getLogger("kvd.tiers")


INSTEAD = "the default is done instead (said once, counted always)"


class Value(NamedTuple):
    """What a policy is told of a value. `length` in bytes, `expires_ns` in unix nanoseconds (0: never)."""

    identity: Identity
    length: int
    retention: Retention
    expires_ns: int


class TierState(NamedTuple):
    """What it is told of a tier: its place in the list, and whether it works now."""

    number: int
    name: str
    type: str
    capabilities: Capabilities
    works: bool


class StorePolicy:
    """`default`: every value goes to every tier, and stays in the arena until it is evicted."""

    def targets(self, value: Value, tiers: Sequence[TierState]) -> Sequence[int]:
        """Numbers of the tiers that the value goes to."""
        return [tier.number for tier in tiers]

    def leaves(self, value: Value, holders: Sequence[int]) -> bool:
        """Whether it leaves the arena now that every target has answered. `holders`: those that have taken it, at least one."""
        return False


class SkipL1(StorePolicy):
    """`skip_l1`: the arena is a buffer only; a value leaves it as soon as the tiers have answered and one has taken it."""

    def leaves(self, value: Value, holders: Sequence[int]) -> bool:
        return True


class PrefetchPolicy:
    """`default`: from the first tier that has it; the copy is temporary, which is to say the first to go."""

    def source(self, value: Value, holders: Sequence[int]) -> int:
        """Number of the tier that loads it, one of `holders`, which are in the order of the list and at least two."""
        return holders[0]

    def stays(self, value: Value, source: int) -> bool:
        """Whether the copy stays like a value that was put."""
        return False


class Retain(PrefetchPolicy):
    """`retain`: from the first tier that has it; the copy stays like any other value."""

    def stays(self, value: Value, source: int) -> bool:
        return True


P = TypeVar("P", StorePolicy, PrefetchPolicy)
A = TypeVar("A")

STORE: dict[str, Callable[[], StorePolicy]] = {"default": StorePolicy, "skip_l1": SkipL1}
PREFETCH: dict[str, Callable[[], PrefetchPolicy]] = {"default": PrefetchPolicy, "retain": Retain}


def register_store_policy(name: str, make: Callable[[], StorePolicy]) -> None:
    """Make a store policy known under a name of its own. Raises ValueError where the name is taken."""
    _register(STORE, name, make)


def register_prefetch_policy(name: str, make: Callable[[], PrefetchPolicy]) -> None:
    """Make a prefetch policy known under a name of its own. Raises ValueError where the name is taken."""
    _register(PREFETCH, name, make)


def _register(table: dict[str, Any], name: str, make: Callable[[], Any]) -> None:
    if name in table:
        raise ValueError(f"there is a policy {name!r} already")
    table[name] = make


def store_policy(name: str) -> StorePolicy:
    """The store policy of that name or `module:Class`. Raises UsageError saying which there are."""
    return _find("store policy", name, STORE, StorePolicy, "kvtools.store_policies")


def prefetch_policy(name: str) -> PrefetchPolicy:
    """The prefetch policy of that name or `module:Class`. Raises UsageError saying which there are."""
    return _find("prefetch policy", name, PREFETCH, PrefetchPolicy, "kvtools.prefetch_policies")


def _find(what: str, name: str, table: dict[str, Callable[[], P]], kind: type[P], group: str) -> P:
    make: Any
    if name in table:
        make = table[name]
    elif ":" in name:
        module, _, attribute = name.partition(":")
        try:
            make = load_object(module, attribute)
        except UsageError as error:
            raise UsageError(f"{what} {name}: {error.message}", hint=error.hint) from None
    else:
        points: dict[str, Any] = {point.name: point for point in entry_points(group=group)}
        if name not in points:
            known = sorted([*table, *points])
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"one of {', '.join(known)}, or module:Class"
            raise UsageError(f"unknown {what} {name!r}", hint=hint)
        try:
            make = points[name].load()
        except (Exception, SystemExit) as error:  # an edge: whatever a user's package raises when it is imported
            said = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise UsageError(f"{what} {name}: cannot load {points[name].value}: {said}") from error
    try:
        made = make()
    except (Exception, SystemExit) as error:  # an edge: whatever the user's class raises is a mistake in the configuration
        raise UsageError(f"{what} {name}: {error!r}", hint="it is made without arguments") from error
    if not isinstance(made, kind):
        raise UsageError(f"{what} {name}: {make!r} makes no kvd.tiers.policies.{kind.__name__}")
    return made


class Asking:
    """Asks policies and survives them: what goes wrong is counted, said once a policy, and answered as `default` would."""

    def __init__(self, store: StorePolicy, prefetch: PrefetchPolicy) -> None:
        self.store, self.prefetch = store, prefetch
        self.errors = 0
        self._said: set[str] = set()
        self.plain_store = type(store).targets is StorePolicy.targets
        """All values go to all tiers: nobody need be asked."""
        self.keeps = type(store).leaves is StorePolicy.leaves
        """No value leaves because tiers have it: nobody need be asked."""
        self.plain_source = type(prefetch).source is PrefetchPolicy.source

    def targets(self, value: Value, tiers: Sequence[TierState]) -> set[int]:
        """Numbers of the tiers that this value goes to."""
        numbers = [tier.number for tier in tiers]
        answer = self._ask(self.store, "targets", lambda: set(self.store.targets(value, tiers)), set(numbers))
        return self._sensible(self.store, "targets", answer, answer <= set(numbers), set(numbers))

    def leaves(self, value: Value, holders: Sequence[int]) -> bool:
        """Whether it leaves the arena."""
        return self._ask(self.store, "leaves", lambda: bool(self.store.leaves(value, holders)), False)

    def source(self, value: Value, holders: Sequence[int]) -> int:
        """Who loads it."""
        if self.plain_source:
            return holders[0]
        answer = self._ask(self.prefetch, "source", lambda: self.prefetch.source(value, holders), holders[0])
        return self._sensible(self.prefetch, "source", answer, answer in holders, holders[0])

    def stays(self, value: Value, source: int) -> bool:
        """Whether the copy is one like any other."""
        return self._ask(self.prefetch, "stays", lambda: bool(self.prefetch.stays(value, source)), False)

    def _ask(self, policy: object, method: str, ask: Callable[[], A], default: A) -> A:
        try:
            return ask()
        except (Exception, SystemExit):  # an edge: a user's policy must not cost a value, nor the daemon
            if name := self._note(policy, method):
                log.exception("policy %s failed: %s", name, INSTEAD)
            return default

    def _sensible(self, policy: object, method: str, answer: A, good: bool, default: A) -> A:
        if not good and (name := self._note(policy, method)):
            log.error("policy %s answered %r, which cannot be: %s", name, answer, INSTEAD)
        return answer if good else default

    def _note(self, policy: object, method: str) -> str:
        """Count an error; the method's name when it is to be said, which is once."""
        self.errors += 1
        name = f"{type(policy).__name__}.{method}"
        if name in self._said:
            return ""
        self._said.add(name)
        return name
