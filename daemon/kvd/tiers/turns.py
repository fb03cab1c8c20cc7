"""Whose loads come next at one tier: a few requests at a time, their clients in turn, and no more bytes than its budget.

A request to read (a fetch) that needs this tier brings shares, each a thread's work. At most `requests` of them are under
way at once, as `--l2-prefetch-max-in-flight` says; the others wait, one queue a client, and clients take turns, so that one
that asks for much cannot keep the others out. Shares of requests under way begin in turn as well, while the bytes being
loaded keep to the budget (one share may always run). Every tier has turns of its own: one that hangs holds up nobody else.

Not thread-safe: the event loop owns it. `submit` and `done` begin what may begin, by calling the share's `begin`.
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Share:
    """A thread's work: so many bytes, how it is begun, and what is done with it when the tier does not work."""

    size: int
    begin: Callable[[], None]
    divert: Callable[[], None]


@dataclass(slots=True, eq=False)
class Request:
    """What one request still wants of the tier."""

    client: object
    shares: deque[Share] = field(default_factory=deque)
    running: int = 0


class Turns:
    """The order of the loads of one tier."""

    def __init__(self, requests: int, budget: int) -> None:
        self.requests = requests
        self.budget = budget
        self.bytes = 0
        """Being loaded now."""
        self.active: deque[Request] = deque()
        self._waiting: OrderedDict[object, deque[Request]] = OrderedDict()
        self._by_owner: dict[object, Request] = {}

    @property
    def waiting(self) -> int:
        """Requests whose turn has not come."""
        return sum(map(len, self._waiting.values()))

    def submit(self, owner: object, client: object, size: int, begin: Callable[[], None], divert: Callable[[], None]) -> None:
        """One share of the request `owner` (of `client`); `begin` is called when its turn has come, perhaps at once."""
        request = self._by_owner.get(owner)
        if request is None:
            request = self._by_owner[owner] = Request(client)
            self._waiting.setdefault(client, deque()).append(request)
        request.shares.append(Share(size, begin, divert))

    def go(self) -> None:
        """Begin what may begin now."""
        self._admit()
        idle = 0
        while self.active and idle < len(self.active):
            request = self.active[0]
            self.active.rotate(-1)
            if not request.shares or (self.bytes and self.bytes + request.shares[0].size > self.budget):
                idle += 1
                continue
            idle = 0
            share = request.shares.popleft()
            request.running += 1
            self.bytes += share.size
            share.begin()

    def done(self, owner: object, size: int) -> None:
        """A share of that request has ended."""
        self.bytes -= size
        request = self._by_owner[owner]
        request.running -= 1
        if not request.running and not request.shares:
            del self._by_owner[owner]
            self.active.remove(request)
        self.go()

    def divert(self) -> None:
        """The tier does not work now: nobody should wait for it. Everything that has not begun goes elsewhere."""
        left = [share for request in self._by_owner.values() for share in request.shares]
        for owner, request in list(self._by_owner.items()):
            request.shares.clear()
            if not request.running:
                del self._by_owner[owner]
        self._waiting.clear()
        self.active = deque(request for request in self.active if request.running)
        for share in left:
            share.divert()

    def _admit(self) -> None:
        """Let waiting requests in, clients in turn."""
        while self._waiting and len(self.active) < self.requests:
            client, queue = self._waiting.popitem(last=False)
            self.active.append(queue.popleft())
            if queue:
                self._waiting[client] = queue
