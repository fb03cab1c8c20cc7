"""The format: golden stores of every version stay readable, FORMAT.md says what is there, bad bytes are never a structure."""

import json
import re
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.tiers.adapters.base import Hit, Mark
from kvd.tiers.adapters.disk import format as fmt
from kvd.tiers.adapters.disk import manifest, verify
from kvd.tiers.adapters.disk.index import Entry, Index, at, pack, unpack
from tests.kvd.disk import golden
from tests.kvd.disk.helpers import get, identity, opened

DOCUMENT = Path(__file__).resolve().parents[3] / "daemon" / "FORMAT.md"


@pytest.fixture(params=golden.VERSIONS, ids=lambda version: f"v{version}")
def version(request):
    """A format version there has been."""
    return request.param


@pytest.fixture
def store(tmp_path, version):
    """A copy of the golden store of that version."""
    copy = tmp_path / "store"
    shutil.copytree(golden.CASES / f"disk-v{version}", copy)
    return copy


def test_the_golden_store_is_readable(store):
    for _again in range(2):  # the second time it is of the newest version, whatever it was
        see_the_values(store)
    assert json.loads((store / "manifest.json").read_text())["version"] == fmt.FORMAT_VERSION
    assert fmt.unpack_deletes_head((store / "deletes.kvlog").read_bytes()[: fmt.PAGE]) is not None
    assert verify(store).sound


def see_the_values(store):
    adapter = opened(store, golden.BUDGET, clock_ns=lambda: golden.NOW_NS)
    assert dict(adapter.enumerate()) == {
        name: Hit(len(data), kept, expires) for name, (data, kept, expires) in golden.VALUES.items()
    }
    for name, (data, _, _) in golden.VALUES.items():
        assert get(adapter, name) == data
    assert adapter.lookup(golden.GONE) == [None, None]
    adapter.close()


def test_the_golden_store_is_sound(store, version):
    report = verify(store)
    assert report.sound
    assert (report.regions, report.extents, report.live, report.torn) == (2, 9, 6, 0)
    assert report.format_version == version


def test_the_same_code_makes_the_same_bytes(tmp_path):
    """A change of any byte on disk is a new format version, and a new golden store beside this one."""
    golden.make(tmp_path)
    for file in sorted(golden.FOLDER.iterdir()):
        assert (tmp_path / file.name).read_bytes() == file.read_bytes(), file.name


def test_the_document_shows_the_golden_store():
    blocks = re.findall(r"```hex (\S+)\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert len(blocks) == 5
    for name, text in blocks:
        raw = (golden.FOLDER / name).read_bytes()
        for line in text.splitlines():
            offset, body = int(line[:6], 16), bytes.fromhex(line[8:55])
            assert raw[offset : offset + 16] == body, f"{name} at {offset:#x}"


def test_the_document_has_the_constants():
    text = DOCUMENT.read_text()
    for magic in (
        fmt.REGION_MAGIC,
        fmt.EXTENT_MAGIC,
        fmt.INDEX_MAGIC,
        fmt.DELETES_MAGIC,
        fmt.DELETES_HEAD_MAGIC,
        fmt.RECENCY_MAGIC,
    ):
        assert f"`{magic.decode()}`" in text
    assert f"1 to {fmt.ENTRIES_PER_PAGE};" in text
    assert f"1 to {fmt.DELETES_PER_PAGE} " in text
    assert f"at most {fmt.INLINE_MAX} bytes" in text
    assert f"`{fmt.FORMAT_NAME}`"[1:-1] in text


HEADER = fmt.ExtentHeader(1, 2, 4096, 3, 5000, 0, identity(1), bytes(16), 4, 1, 3, 0)


@settings(deadline=None)  # a busy machine is not a failure
@given(st.binary(max_size=5000))
def test_no_bytes_make_a_structure(raw):
    assert fmt.ExtentHeader.unpack(raw) is None
    assert fmt.IndexPage.unpack(raw) is None
    assert fmt.RegionHeader.unpack(raw) is None
    assert fmt.unpack_deletes(raw) is None
    assert fmt.unpack_deletes_head(raw) is None


@settings(deadline=None)  # a busy machine is not a failure
@given(st.integers(0, 256 * 8 - 1))
def test_every_flipped_bit_of_a_header_is_found(bit):
    raw = bytearray(HEADER.pack())
    assert fmt.ExtentHeader.unpack(raw) == HEADER
    raw[bit // 8] ^= 1 << bit % 8
    assert fmt.ExtentHeader.unpack(raw) is None


@settings(deadline=None)  # a busy machine is not a failure
@given(st.integers(0, 4096 * 8 - 1))
def test_every_flipped_bit_of_an_index_page_is_found_and_of_a_region_header_healed(bit):
    index = fmt.IndexPage(1, 2, 0, 1, 4096, 8192, HEADER.entry(5).pack())
    region = fmt.RegionHeader(3, 65_536, 1, 2, 4)
    for kind, page, expected in ((fmt.IndexPage, index, None), (fmt.RegionHeader, region, region)):
        raw = bytearray(page.pack())
        assert kind.unpack(raw) == page
        raw[bit // 8] ^= 1 << bit % 8
        assert kind.unpack(raw) == expected


entries = st.builds(
    Entry, st.integers(0, (1 << 16) - 1), st.integers(0, (1 << 24) - 1).map(lambda page: page << 12), st.integers(0, (1 << 36) - 1),
    st.integers(0, 3), st.integers(0, (1 << 38) - 1), st.integers(0, (1 << 64) - 1), st.integers(0, (1 << 32) - 1),
)  # fmt: skip


@settings(deadline=None)  # a busy machine is not a failure
@given(entries)
def test_an_index_entry_is_packed_without_loss(entry):
    word = pack(*entry)
    assert unpack(word) == entry
    assert at(word, entry.slot, entry.offset)
    assert word.bit_length() <= (212 if entry.note else 180)
    index = Index()
    index.put(identity(1), word)
    index.touch(identity(1), 77)
    assert unpack(index.get(identity(1))) == entry._replace(tick=77)


@settings(deadline=None)  # a busy machine is not a failure
@given(st.integers(0, (1 << 64) - 1))
def test_region_names(sequence):
    name = fmt.region_name(sequence)
    assert fmt.region_sequence(name) == sequence
    for other in (name.upper(), name[1:], name + ".tmp", name.replace(".", "_"), "x" + name[1:], ".kvcache", ""):
        assert fmt.region_sequence(other) is None


def test_each_start_writes_the_manifest_once_and_keeps_the_mark(tmp_path, monkeypatch):
    written = []

    def noted(*args):
        written.append(args)
        real(*args)

    real = manifest.write
    monkeypatch.setattr(manifest, "write", noted)
    epochs = []
    for start in range(3):
        adapter = opened(tmp_path / "tier")
        assert len(written) == 1, f"start {start}"
        assert adapter.mark() == ((7, 9) if start else (0, 0))
        adapter.set_mark(Mark(7, 9))
        adapter.close()
        said = json.loads((tmp_path / "tier" / manifest.MANIFEST).read_text())
        assert (said["mark"], said["peers"]) == (7, 9)
        epochs.append(said["epoch"])
        written.clear()
    assert epochs == sorted(set(epochs)), "no start has the epochs of another"
