"""What the scheduler tells the workers in a step, and what they report back.

Plain dataclasses of ints, bytes and tuples: they cross to the workers by pickle, and every class must be importable there.
Block ids are per group, in the order of the connector's groups. Id 0 is the engine's null block: "not this one".
"""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Move:
    """One chunk and, for each group, the engine's block ids in the order in which the chunk holds them.

    In a load, 0 means that the block at this place is not wanted; a group whose ids are all 0 is not read at all.
    """

    key: bytes
    blocks: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Load:
    """Fill these blocks for a request that waits. `token`: the pin taken by the look-up, if any; `doomed`: why not to try."""

    request_id: str
    salt: bytes
    moves: tuple[Move, ...]
    token: bytes | None = None
    doomed: str = ""


@dataclass(frozen=True, slots=True)
class Save:
    """Store these chunks, whose last tokens are computed in this step.

    `anew`: keys to store though the daemon has them, because what it had could not be loaded.
    """

    request_id: str
    salt: bytes
    moves: tuple[Move, ...]
    retention: str = "long"
    ttl_s: float | None = None
    anew: frozenset[bytes] = frozenset()


@dataclass(frozen=True, slots=True)
class Unsaved:
    """Chunks that this step completes and nobody stores, and why: told to the daemon for `kvd why`."""

    salt: bytes
    keys: tuple[bytes, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Known:
    """What only the scheduler knows of the names that chunks are stored under: the seed of block hashes, and the tenant.

    `none_hash`: as used, in hex, '' until the first request. `tenant`: KVD_TENANT, and after a reset what sets this engine apart.
    """

    none_hash: str = ""
    tenant: str = ""


@dataclass(slots=True)
class Plan:
    """One step's work for every worker."""

    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    unsaved: list[Unsaved] = field(default_factory=list)


@dataclass(slots=True)
class Report:
    """What one worker (joined: all of them) tells the scheduler: loads that failed, with the keys to blame.

    `identities`: who the workers are, by rank, where the handshake could not say it (see `RankIdentity`).
    """

    failed: dict[str, tuple[str, tuple[bytes, ...]]] = field(default_factory=dict)
    identities: dict[int, "RankIdentity"] = field(default_factory=dict)

    def join(self, other: "Report") -> "Report":
        self.identities.update(other.identities)
        for request_id, (why, keys) in other.failed.items():
            mine_why, mine = self.failed.get(request_id, (why, ()))
            self.failed[request_id] = (mine_why, tuple(dict.fromkeys(mine + keys)))
        return self


@dataclass(frozen=True, slots=True)
class RankIdentity:
    """One worker's half of the handshake: a namespace a group, and the facts it was made of (for naming a mismatch).

    `problem`: why this worker cannot store its cache; then nobody does, since all ranks hit together or not at all.
    `group_bytes`: bytes of one block, by group; `group_facts`: what each group's namespace is made of besides `facts`.
    `direct`: it moves chunks past the daemon, so they are large.
    """

    namespaces: tuple[bytes, ...] = ()
    facts: dict[str, str] = field(default_factory=dict)
    chunk_tokens: int = 0
    group_bytes: tuple[int, ...] = ()
    problem: str = ""
    group_facts: tuple[dict[str, str], ...] = ()
    direct: bool = False
