"""A scheduler side without an engine and without a daemon, for the tests of what it offers, plans and remembers."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvd.connector.fingerprint import salted
from kvd.connector.groups import Group
from kvd.connector.link import Link
from kvd.connector.plan import RankIdentity
from kvd.connector.scheduler import Scheduler, Step
from kvd.connector.settings import read_settings
from tests.kvd.connector.test_connector_keys import hashes
from tests.support.memory_client import MemoryClient
from tests.support.processes import wait_until

FULL = Group(0, 32)
WINDOW = Group(1, 32, window=127)


@dataclass
class FakeRequest:
    """What is read of vLLM's Request."""

    request_id: str
    num_tokens: int
    salt: str = ""
    kv_transfer_params: dict[str, Any] | None = None
    skip_reading_prefix_cache: bool = False
    lora_request: Any = None
    num_prompt_tokens: int = 0
    block_hashes: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.num_tokens
        self.block_hashes = hashes(self.num_tokens, salt=self.salt)


class Bench:
    """A scheduler side over a dict instead of a daemon, and a clock that tests move."""

    def __init__(self, *groups: Group, ranks: int = 1, **options: Any) -> None:
        self.client = MemoryClient()
        self.link = Link("lookup", lambda: self.client)
        self.link.start()
        wait_until(lambda: self.link.up)
        self.now = 100.0
        self.scheduler = Scheduler(
            read_settings({}, {}),
            groups or (FULL,),
            self.link,
            hash_tokens=32,
            hash_source=lambda: ("sha256", "00"),
            clock=lambda: self.now,
            **options,
        )
        self.identities = [
            RankIdentity(tuple(bytes([rank, group]) * 16 for group in range(len(self.scheduler.groups))), {}, 256)
            for rank in range(ranks)
        ]
        assert self.scheduler.introduce(self.identities, ranks) == ""

    def run(self, request: FakeRequest, computed: int, scheduled: int, table: Sequence[Sequence[int]] | None = None) -> Any:
        """One step of one request; block i of group g is 1000 * (g + 1) + i unless a table is given."""
        blocks = -(-(computed + scheduled) // 32)
        whole = [[1000 * (group.id + 1) + i for i in range(blocks)] for group in self.scheduler.groups]
        return self.scheduler.plan([Step(request.request_id, computed, scheduled)], lambda _: table or whole)

    def store(self, plan: Any, *, leave_out: int = -1) -> int:
        """Do what the workers would: put every planned chunk of every rank and group; how many chunks."""
        count = 0
        for save in plan.saves:
            for move in save.moves:
                for number, namespace in enumerate(ns for identity in self.identities for ns in identity.namespaces):
                    if number != leave_out:
                        self.client.values[salted(namespace, save.salt), move.key] = b"x"
                count += 1
        return count

    def compute(self, request: FakeRequest, **how: Any) -> int:
        """A whole prompt in one step, stored."""
        self.scheduler.arrived(request)
        return self.store(self.run(request, 0, request.num_tokens), **how)
