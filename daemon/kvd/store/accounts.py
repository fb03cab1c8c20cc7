"""Who uses what: an account a namespace, for the figures that operators see.

Anybody who may connect can make namespaces without end, so the number of accounts is bounded: LIMIT namespaces have their
own, the rest share `other`. A namespace keeps the account it was opened with for as long as it is remembered; when one is
forgotten, or gives up its account to a newcomer because it holds nothing, what it had counted goes to `other`. So every
figure only ever grows, and the figures of all accounts together are the daemon's.
"""

LIMIT = 63
"""Namespaces with an account of their own: with `other` as many label sets as a stats segment shows of one metric."""


class Account:
    """What happened to one namespace's keys, or to those of all that have no account of their own."""

    __slots__ = ("evictions", "get_bytes", "hits", "misses", "name", "set_bytes", "sets")

    def __init__(self, name: bytes) -> None:
        self.name = name
        self.hits = 0
        self.misses = 0
        self.get_bytes = 0
        self.sets = 0
        self.set_bytes = 0
        self.evictions = 0

    @property
    def changes(self) -> int:
        """Differs whenever a figure of it does."""
        return self.hits + self.misses + self.sets + self.evictions


class Accounts:
    """All accounts. `version` changes whenever another namespace has one."""

    def __init__(self) -> None:
        self.own: dict[bytes, Account] = {}
        self.other = Account(b"")
        self.version = 0

    @property
    def full(self) -> bool:
        """Whether the next namespace shares `other`."""
        return len(self.own) >= LIMIT

    def open(self, name: bytes) -> Account:
        """The account of a new namespace."""
        if self.full:
            return self.other
        account = self.own[name] = Account(name)
        self.version += 1
        return account

    def close(self, account: Account) -> Account:
        """That namespace is forgotten, or gives its account up: it is `other` from now on."""
        if account is not self.other:
            del self.own[account.name]
            self.version += 1
            for figure in ("hits", "misses", "get_bytes", "sets", "set_bytes", "evictions"):
                setattr(self.other, figure, getattr(self.other, figure) + getattr(account, figure))
        return self.other
