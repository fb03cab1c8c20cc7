"""What must be known of an engine to find what it stored: from its prompt's block hashes to keys, namespaces and bytes.

A view is made from what the engine's workers and its scheduler tell (`describe`), travels as JSON, and means the same
everywhere: in the engine's own server (prewarm, why), in the daemon (each engine leaves its view there, so that another
can say which field differs), and in tests. It holds no prompt and no secret.

The rules for spans and keys are those of `keys` and `groups`; nothing is computed here in another way.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from kvd.connector.fingerprint import differences, salt_of, salted
from kvd.connector.groups import Group, unit_of
from kvd.connector.keys import Keys, Span
from kvd.connector.plan import RankIdentity

FORMAT = 1


class NotAView(ValueError):
    """A description that cannot be read; the message says what is wrong with it."""


@dataclass(frozen=True)
class HashSource:
    """How an engine makes its block hashes. `none_hash`: the seed as used, in hex; '' where it is not known."""

    algorithm: str = ""
    none_hash: str = ""
    tokens: int = 0
    """Tokens that one hash covers."""


@dataclass(frozen=True)
class Place:
    """One namespace of an engine: which rank's and which group's bytes it holds. `group` is an index into the view's groups."""

    namespace: bytes
    rank: int
    group: int


@dataclass(frozen=True)
class View:
    """One engine. `ranks`: ranks that hold different bytes; `tenant`: the engine's own (KVD_TENANT)."""

    ranks: tuple[RankIdentity, ...]
    groups: tuple[Group, ...]
    hashes: HashSource
    chunk: int
    tenant: str = ""
    at: float = 0.0
    name: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)
    """What else the engine tells: roles, the daemon's socket, whether it is connected."""

    @property
    def unit(self) -> int:
        return unit_of(self.groups)

    @property
    def exact(self) -> bool:
        """Whether a hit must end exactly where a chunk does."""
        return any(group.partial for group in self.groups)

    def salt(self, tenant: str = "") -> bytes:
        """What completes the namespaces, for a request of this tenant (`kvd_namespace`)."""
        hashes = self.hashes
        return salt_of(hash_algorithm=hashes.algorithm, hash_seed=hashes.none_hash, tenant=self.tenant, request_tenant=tenant)

    def places(self, tenant: str = "") -> list[Place]:
        """All namespaces that a hit needs, each once: ranks that hold the same bytes share theirs."""
        salt = self.salt(tenant)
        seen: dict[bytes, Place] = {}
        for number, rank in enumerate(self.ranks):
            for group, namespace in enumerate(rank.namespaces):
                seen.setdefault(namespace, Place(salted(namespace, salt), number, group))
        return list(seen.values())

    def keys(self, hashes: Sequence[bytes]) -> Keys:
        return Keys(hashes, hash_tokens=self.hashes.tokens, chunk=self.chunk, unit=self.unit)

    def spans(self, keys: Keys, tokens: int) -> list[Span]:
        """The chunks that a look-up for a prompt of `tokens` tokens asks for; the last may be a tail."""
        end = min(keys.tokens, (tokens - 1) // self.unit * self.unit if self.exact else tokens)
        return keys.spans(0, end // self.unit * self.unit)

    def value_bytes(self, place: Place, span: Span) -> int:
        """Bytes of a chunk in one namespace."""
        return self.ranks[place.rank].group_bytes[place.group] * len(self.groups[place.group].stored(*span))

    @property
    def facts(self) -> dict[str, str]:
        """Everything a namespace of this engine is made of, the first rank's and group's where they differ."""
        first = self.ranks[0] if self.ranks else RankIdentity()
        of_group = first.group_facts[0] if first.group_facts else {}
        mine = {"hash_algorithm": self.hashes.algorithm, "hash_seed": self.hashes.none_hash[:16], "tenant": self.tenant}
        return {**first.facts, **of_group, **mine}

    def differs(self, other: "View") -> list[str]:
        """The facts that differ, as 'name: mine / theirs' lines."""
        return differences(self.facts, other.facts)

    def as_json(self) -> str:
        body = {
            "format": FORMAT,
            "name": self.name,
            "at": self.at,
            "tenant": self.tenant,
            "chunk_tokens": self.chunk,
            "hashes": {"algorithm": self.hashes.algorithm, "none_hash": self.hashes.none_hash, "tokens": self.hashes.tokens},
            "groups": [[group.id, group.block_tokens, group.window, group.local] for group in self.groups],
            "ranks": [rank_json(rank) for rank in self.ranks],
            "more": dict(self.more),
        }
        return json.dumps(body, sort_keys=True)

    @classmethod
    def of_json(cls, text: str | bytes) -> Self:
        """Raises NotAView."""
        try:
            body = json.loads(text)
            if body["format"] != FORMAT:
                raise NotAView(f"format {body['format']!r} is not {FORMAT}")
            hashes = body["hashes"]
            return cls(
                ranks=tuple(rank_of(rank) for rank in body["ranks"]),
                groups=tuple(Group(*map(_whole, group[:2]), *group[2:]) for group in body["groups"]),
                hashes=HashSource(str(hashes["algorithm"]), str(hashes["none_hash"]), _whole(hashes["tokens"])),
                chunk=_whole(body["chunk_tokens"]),
                tenant=str(body["tenant"]),
                at=float(body["at"]),
                name=str(body["name"]),
                more=dict(body["more"]),
            )
        except NotAView:
            raise
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise NotAView(f"{type(error).__name__}: {error}") from error


def rank_json(rank: RankIdentity) -> dict[str, Any]:
    """A worker's identity as JSON."""
    return {
        "namespaces": [namespace.hex() for namespace in rank.namespaces],
        "facts": dict(rank.facts),
        "group_facts": [dict(facts) for facts in rank.group_facts],
        "group_bytes": list(rank.group_bytes),
        "chunk_tokens": rank.chunk_tokens,
        "problem": rank.problem,
    }


def rank_of(body: Mapping[str, Any]) -> RankIdentity:
    """The identity again. Raises KeyError, ValueError, TypeError."""
    return RankIdentity(
        tuple(bytes.fromhex(namespace) for namespace in body["namespaces"]),
        {str(name): str(value) for name, value in body["facts"].items()},
        _whole(body["chunk_tokens"]),
        tuple(map(_whole, body["group_bytes"])),
        str(body["problem"]),
        tuple({str(name): str(value) for name, value in facts.items()} for facts in body["group_facts"]),
    )


def _whole(value: Any) -> int:
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is not a whole number")
    return value
