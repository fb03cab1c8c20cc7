"""The messages between an engine and the daemon (byte-exact: daemon/FORMAT.md, "The wire").

A frame is a little-endian u32 length and that many bytes of msgpack: one array, whose first element is the message's tag
and whose second its request id. Ids are the client's; answers carry them and may come in any order, so that requests can
be pipelined. Every operation takes a batch. Offsets and lengths of leases travel as packed little-endian u64, because a
thousand of them are then one copy and not a thousand objects.

The connection starts with Hello and Welcome, sent on the bare socket: Welcome comes with the arena's descriptor
(SCM_RIGHTS), read-only unless Hello asked to write. VERSION is compared there; nothing else is negotiated.
"""

import struct
from typing import Any

import msgspec

VERSION = 1
MAX_FRAME = 16 << 20
"""Bytes of one frame's body at most, both ways."""
INLINE_BYTES = 4096
"""A value up to this size may travel in the frame."""
MAX_BATCH = 65536
"""Keys in one request at most."""
LENGTH = struct.Struct("<I")
MISSING = (1 << 64) - 1
"""The offset of a key that is not there."""


class Message(msgspec.Struct, array_like=True, gc=False):
    """Base of all messages."""


class Request(Message):
    """A request; `id` 0 asks for no answer (Release, Abort)."""

    id: int


# ---- handshake ------------------------------------------------------------------------------------------------------


class Hello(Message, tag=1):
    """First frame of a client. `attach` names a session whose connection asks for the writable descriptor."""

    version: int
    write: bool = False
    attach: bytes = b""
    client: str = ""


class Welcome(Message, tag=2):
    """First frame of the daemon. `lease_s`: how long a lease lasts unless renewed.

    `roots`: folders whose files it lends parts of, for I/O past it: (path as the daemon sees it, device, inode).
    `slow_lookups`: some tier must do I/O to answer a look-up.
    """

    version: int
    server: str
    pid: int
    arena_bytes: int
    session: bytes
    lease_s: float
    instance: str
    roots: list[tuple[str, int, int]] = []
    slow_lookups: bool = False


# ---- requests -------------------------------------------------------------------------------------------------------


class Exists(Request, tag=10):
    """Which keys are there; `timeout_ms` > 0 also asks tiers that must do I/O to tell, that long at most."""

    namespace: bytes
    keys: list[bytes]
    timeout_ms: int = 0


class Lease(Request, tag=11):
    """Pin what is there; `timeout_ms` > 0 waits that long for tiers; small values come inline where `inline` allows.

    `hold_ms` > 0 asks for a brief lease, which a client may leave to run out instead of releasing it.
    """

    namespace: bytes
    keys: list[bytes]
    timeout_ms: int = 0
    inline: int = 0
    hold_ms: int = 0


class Release(Request, tag=12):
    leases: list[int]


class Reserve(Request, tag=13):
    """Lend extents of these sizes: all of them, or as many as there is room for when `partial`."""

    sizes: list[int]
    timeout_ms: int = 0
    partial: bool = True


class Commit(Request, tag=14):
    """Values were written to these extents. `ahead`: sizes to lend right away for the puts to come."""

    namespace: bytes
    serials: list[int]
    lengths: list[int]
    keys: list[bytes]
    retention: int
    expires_ns: int = 0
    wait_ms: int = 0
    ahead: list[int] = []


class PutInline(Request, tag=15):
    namespace: bytes
    keys: list[bytes]
    values: list[bytes]
    retention: int
    expires_ns: int = 0
    wait_ms: int = 0


class Abort(Request, tag=16):
    serials: list[int]


class Prefix(Request, tag=17):
    """Leading run of keys present in all namespaces; `pin_ms` > 0 pins it under a token and starts its promotion.

    `timeout_ms` as in Exists. `where` asks for the sources of PrefixFound.
    """

    namespaces: list[bytes]
    keys: list[bytes]
    pin_ms: int = 0
    timeout_ms: int = 0
    where: bool = False


class Claim(Request, tag=18):
    token: bytes
    namespace: bytes
    timeout_ms: int = 0


class Renew(Request, tag=19):
    """Is this read lease alive? It lasts anew from now."""

    lease: int


class Prefetch(Request, tag=20):
    namespace: bytes
    keys: list[bytes]
    timeout_ms: int = 0


class Delete(Request, tag=21):
    namespace: bytes
    keys: list[bytes]
    arena_only: bool = False


class Clear(Request, tag=22):
    """Drop everything of one namespace, or of all when it is empty."""

    namespace: bytes = b""
    arena_only: bool = False


class Flush(Request, tag=23):
    """Answer when these keys (all when empty) have reached the tiers that take them."""

    namespace: bytes = b""
    keys: list[bytes] = []
    timeout_ms: int = 0


class Stats(Request, tag=24):
    pass


class Keys(Request, tag=25):
    """A page of what is held, in the arena and in tiers that can list; `after` is the last identity of the page before."""

    namespace: bytes = b""
    after: bytes = b""
    limit: int = 1000


class Drain(Request, tag=26):
    timeout_ms: int = 20000


class Ping(Request, tag=27):
    pass


class Where(Request, tag=28):
    """Where each of these keys is: names of 'arena' and tiers."""

    namespace: bytes
    keys: list[bytes]


class Unpin(Request, tag=29):
    """Let go of what a token still pins in one namespace, without counting a read. An ended token is no error."""

    token: bytes
    namespace: bytes


class DirectReserve(Request, tag=40):
    """Lend room in files for values that the client writes itself. Each is a miss until it is committed."""

    namespace: bytes
    keys: list[bytes]
    lengths: list[int]
    retention: int
    expires_ns: int = 0


class DirectCommit(Request, tag=41):
    """These values are written and synced. `checksums`: XXH3-128 of each, or empty where nobody has computed it."""

    serials: list[int]
    checksums: list[bytes] = []


class DirectAbort(Request, tag=42):
    """Nobody writes to these any more."""

    serials: list[int]


class DirectHold(Request, tag=43):
    """Where values that are not in the arena lie in files, which keep their bytes until DirectRelease, or for `lease_s`."""

    namespace: bytes
    keys: list[bytes]


class DirectRelease(Request, tag=44):
    leases: list[int]


class Why(Request, tag=30):
    """Where each key is in each namespace, and what is remembered of it where it is not; `others` are looked into besides.

    Info: places (a list a namespace of lists a key), notes (the same shape: [fate, at_ns, place, why, pid], newest first),
    others (a list a key: namespaces that hold it), since_ns.
    """

    namespaces: list[bytes]
    keys: list[bytes]
    others: list[bytes] = []


class Note(Request, tag=31):
    """Values that a client did not store, and why, in a word or two: remembered for Why, nothing else."""

    namespace: bytes
    keys: list[bytes]
    why: str


# ---- answers --------------------------------------------------------------------------------------------------------


class Answer(Message):
    id: int


class Failed(Answer, tag=50):
    """The request as a whole failed. `code`: one word, see CODES."""

    code: str
    message: str


class Flags(Answer, tag=51):
    """One byte a key, 0 or 1."""

    flags: bytes


class Leased(Answer, tag=52):
    """Packed u64 offsets (MISSING where not there) and lengths, in key order; `lease` 0 when nothing is pinned.

    The answer covers the first len(offsets) / 8 keys: fewer than asked when the arena had no room for more from a tier.
    """

    lease: int
    offsets: bytes
    lengths: bytes
    inline: dict[int, bytes] | None = None


class Lent(Answer, tag=53):
    serials: list[int]
    offsets: list[int]


class Committed(Answer, tag=54):
    """`reasons` is empty when all were stored, else '' or a reason a key. `durability` is the weakest one reached."""

    reasons: list[str]
    durability: int
    serials: list[int]
    offsets: list[int]


class PrefixFound(Answer, tag=55):
    """`sources`, where asked for: one byte a key of the run, the farthest place of any namespace's value, see SOURCES."""

    length: int
    token: bytes
    sources: bytes = b""


class Count(Answer, tag=56):
    """`left`: of a delete or clear, values that a tier has not got rid of yet, and that a restart may bring back; `why` that is."""

    count: int
    left: int = 0
    why: str = ""


class Done(Answer, tag=57):
    """`left`: of a flush or drain, values that may end with the daemon: refused, or not kept, by some tier, which says `why`."""

    durability: int = 0
    left: int = 0
    why: str = ""


class Info(Answer, tag=58):
    info: dict[str, Any]


class KeyPage(Answer, tag=59):
    """Rows of (identity, length, retention, expires_ns, place); `unlisted`: tiers that only I/O could list."""

    rows: list[tuple[bytes, int, int, int, str]]
    more: bool
    unlisted: list[str] = []


class DirectLent(Answer, tag=65):
    """Rows of (serial, root, file name, offset of the value, generation); serial 0 where a reason says why there is none.

    `root` is a position in Welcome's roots.
    """

    rows: list[tuple[int, int, str, int, int]]
    reasons: list[str]


class DirectHeld(Answer, tag=66):
    """Rows of (root, file name, offset of the value, length, generation, checksum or empty); None: not in a file now."""

    lease: int
    rows: list[tuple[int, str, int, int, int, bytes] | None]


SOURCES = ("arena", "disk", "remote")
"""Where a value comes from: RAM, a tier of this host, a tier of several hosts. The numbers are on the wire."""

CODES = ("bad_frame", "bad_request", "no_room", "busy", "too_large", "lease_lost", "draining", "read_only", "timeout", "internal")

AnyRequest = (
    Exists
    | Lease
    | Release
    | Reserve
    | Commit
    | PutInline
    | Abort
    | Prefix
    | Claim
    | Renew
    | Prefetch
    | Delete
    | Clear
    | Flush
    | Stats
    | Keys
    | Drain
    | Ping
    | Where
    | Unpin
    | DirectReserve
    | DirectCommit
    | DirectAbort
    | DirectHold
    | DirectRelease
    | Why
    | Note
)
AnyAnswer = Failed | Flags | Leased | Lent | Committed | PrefixFound | Count | Done | Info | KeyPage | DirectLent | DirectHeld

_encoder = msgspec.msgpack.Encoder()
request_decoder = msgspec.msgpack.Decoder(AnyRequest)
answer_decoder = msgspec.msgpack.Decoder(AnyAnswer)
hello_decoder = msgspec.msgpack.Decoder(Hello)
welcome_decoder = msgspec.msgpack.Decoder(Welcome | Failed)


def encode(message: Message) -> bytearray:
    """The whole frame of a message. Raises ValueError when it is over MAX_FRAME."""
    buffer = bytearray(4)
    _encoder.encode_into(message, buffer, 4)
    size = len(buffer) - 4
    if size > MAX_FRAME:
        raise ValueError(f"a frame of {size} bytes is over the limit of {MAX_FRAME}")
    LENGTH.pack_into(buffer, 0, size)
    return buffer
