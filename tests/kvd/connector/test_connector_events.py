"""What the engine's KV events tell of its own cache: known while every event was heard, unknown from the first gap on."""

from dataclasses import dataclass, field

from kvd.connector.events import Watch, short
from kvd.connector.groups import Group
from kvd.connector.keys import Span
from kvd.connector.plan import RankIdentity
from kvd.connector.view import HashSource, View
from tests.kvd.connector.test_connector_keys import hashes

FULL, WINDOW = Group(0, 32), Group(1, 32, window=127)
HASHES = hashes(512)


@dataclass
class BlockStored:
    """As much of vLLM's event as is read."""

    block_hashes: list[int]
    group_idx: int | None = 0
    medium: str | None = "GPU"


@dataclass
class BlockRemoved(BlockStored):
    pass


@dataclass
class AllBlocksCleared:
    nothing: list[int] = field(default_factory=list)


def view(*groups: Group) -> View:
    return View((RankIdentity(),), groups or (FULL,), HashSource("sha256", "00", 32), 256)


def listening() -> Watch:
    watch = Watch()
    watch.heard(0, [AllBlocksCleared()])
    return watch


def stored(count: int, group: int = 0) -> BlockStored:
    return BlockStored([short(one) for one in HASHES[:count]], group)


def test_nothing_is_known_before_anything_was_heard() -> None:
    assert Watch().has(view(), HASHES, Span(0, 256)) is None


def test_a_chunk_is_held_when_all_its_blocks_are() -> None:
    watch = listening()
    watch.heard(1, [stored(8)])
    assert watch.has(view(), HASHES, Span(0, 256)) is True
    assert watch.has(view(), HASHES, Span(256, 512)) is False
    watch.heard(2, [BlockRemoved([short(HASHES[3])])])
    assert watch.has(view(), HASHES, Span(0, 256)) is False
    watch.heard(3, [stored(8), BlockStored([short(HASHES[9])], medium="CPU")])
    assert watch.has(view(), HASHES, Span(0, 256)) is True
    watch.heard(4, [AllBlocksCleared()])
    assert watch.has(view(), HASHES, Span(0, 256)) is False


def test_every_group_counts_and_a_window_only_with_its_end() -> None:
    watch = listening()
    watch.heard(1, [stored(8)])
    both = view(FULL, WINDOW)
    assert watch.has(both, HASHES, Span(0, 256)) is False
    watch.heard(2, [BlockStored([short(one) for one in HASHES[4:8]], 1)])
    assert watch.has(both, HASHES, Span(0, 256)) is True


def test_a_missed_event_makes_everything_unknown_until_all_is_cleared() -> None:
    watch = listening()
    watch.heard(1, [stored(8)])
    watch.heard(3, [stored(16)])
    assert watch.has(view(), HASHES, Span(0, 256)) is None
    watch.heard(4, [AllBlocksCleared(), stored(8)])
    assert watch.has(view(), HASHES, Span(0, 256)) is True


def test_whole_hashes_and_their_last_64_bits_are_one_name() -> None:
    assert short(HASHES[0]) == short(int.from_bytes(HASHES[0], "big")) == int.from_bytes(HASHES[0][-8:], "big")
