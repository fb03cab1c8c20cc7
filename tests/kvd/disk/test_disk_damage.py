"""Flipped bits over every byte class of the format, truncated and foreign files: a miss and a counter, never wrong bytes."""

import json
import random
import shutil
from pathlib import Path

import pytest

from kvd.tiers.adapters.base import AdapterConfigError, Loaded
from kvd.tiers.adapters.disk import verify
from kvd.tiers.adapters.disk.format import PAGE, ExtentHeader, IndexPage
from tests.kvd.disk.helpers import get, get_as, identity, item, opened, put, value
from tests.kvd.disk.simstorage import SimFile, SimStorage

BUDGET = 4 << 20
REGION = 1 << 20
LENGTHS = [10, 3000, 5000, 12_000]


def build(path: Path, *, clean: bool) -> tuple[dict[bytes, bytes], dict[bytes, set[bytes]]]:
    """A store with overwritten and deleted values, several index pages and, unless `clean`, a tail that no page lists."""
    adapter = opened(path, BUDGET, region_bytes=REGION)
    now: dict[bytes, bytes] = {}
    ever: dict[bytes, set[bytes]] = {}
    for turn in range(100):
        name, data = identity(turn % 80), value(turn, LENGTHS[turn % 4])
        assert put(adapter, name, data, arena=True)
        now[name] = data
        ever.setdefault(name, set()).add(data)
    gone = [identity(number) for number in range(30, 40)]
    adapter.delete(gone)
    for name in gone:
        del now[name]
    if clean:
        adapter.close()
    else:
        copy = path.with_name(path.name + "-killed")
        shutil.copytree(path, copy)
        adapter.close()
        shutil.rmtree(path)
        copy.rename(path)
    return now, ever


def classes(path: Path) -> dict[str, list[tuple[Path, int]]]:
    """Byte class -> places of its bytes."""
    places: dict[str, list[tuple[Path, int]]] = {}
    for file in sorted(path.glob("*.kvcache")):
        raw = file.read_bytes()
        for at in range(0, len(raw), PAGE):
            page = raw[at : at + PAGE]
            if at == 0:
                kind = "region header"
            elif IndexPage.unpack(page):
                kind = "index page"
            elif (header := ExtentHeader.unpack(page)) is not None:
                places.setdefault("extent header", []).extend((file, at + byte) for byte in range(256))
                if header.length <= 3840:
                    places.setdefault("inline value", []).extend((file, at + 256 + byte) for byte in range(header.length))
                continue
            elif any(page):
                kind = "payload"
            else:
                kind = "empty"
            places.setdefault(kind, []).extend((file, at + byte) for byte in range(0, PAGE, 7 if kind == "empty" else 1))
    for name in ("deletes.kvlog", "manifest.json", "recency.kvsnap"):
        if (path / name).exists():
            places[name] = [(path / name, byte) for byte in range((path / name).stat().st_size)]
    return places


@pytest.mark.parametrize("clean", [True, False], ids=["closed", "killed"])
def test_a_flipped_bit_never_gives_wrong_bytes(tmp_path, clean):
    store = tmp_path / "store"
    now, ever = build(store, clean=clean)
    rng = random.Random(7)
    found = classes(store)
    assert {"region header", "index page", "extent header", "inline value", "payload", "deletes.kvlog"} <= set(found)
    seen_corrupt = dict.fromkeys(found, 0)
    for kind, places in found.items():
        for file, byte in rng.sample(places, 16):
            disk = in_memory(store)
            disk.names[SIM / file.name].data[byte] ^= 1 << rng.randrange(8)
            try:
                seen_corrupt[kind] += check(SIM, now, ever, strict=clean, io=disk)
            except AdapterConfigError:
                # The manifest is the one file that is read before anything is trusted: it may name another format now.
                if kind != "manifest.json":
                    raise
    assert seen_corrupt["payload"] >= 3
    assert seen_corrupt["inline value"] >= 3
    assert seen_corrupt["extent header"] >= (3 if clean else 0)


SIM = Path("/sim/store")


def in_memory(store: Path) -> SimStorage:
    """The files of a store, on a simulated disk."""
    disk = SimStorage()
    for file in store.iterdir():
        disk.names[SIM / file.name] = SimFile(bytearray(file.read_bytes()))
    return disk


def check(path: Path, now: dict[bytes, bytes], ever: dict[bytes, set[bytes]], *, strict: bool, io: SimStorage | None = None) -> int:
    """Open a damaged store and read everything; the corruptions it counted."""
    adapter = opened(path, BUDGET, region_bytes=REGION, io=io)
    for name, versions in ever.items():
        result, data = get_as(adapter, name)
        assert result is not Loaded.ERROR
        # After a clean stop every extent is listed, so not even an older version may show up.
        assert data in ({now.get(name), None} if strict else versions | {None})
    corruptions = adapter.counters.corruptions
    assert put(adapter, identity(5000), b"still writable")
    assert get(adapter, identity(5000)) == b"still writable"
    adapter.close()
    return corruptions


def test_verify_finds_a_flipped_bit_and_repairs_it(tmp_path):
    now, _ = build(tmp_path, clean=True)
    report = verify(tmp_path)
    assert report.sound
    assert (report.live, report.corrupt, report.damaged_index_pages) == (len(now), [], 0)
    places = classes(tmp_path)
    rng = random.Random(3)
    for kind in ("payload", "index page", "deletes.kvlog"):
        # Of the log's pages that of its lines: a bad copy of the head is what a power cut may leave, and no damage.
        some = places[kind][2 * PAGE : 3 * PAGE] if kind == "deletes.kvlog" else places[kind][: len(places[kind]) // 2]
        file, byte = rng.choice(some)
        raw = bytearray(file.read_bytes())
        raw[byte] ^= 4
        file.write_bytes(raw)
    damaged = verify(tmp_path)
    assert not damaged.sound
    assert len(damaged.corrupt) + damaged.corrupt_dead == 1
    assert damaged.damaged_index_pages == 1
    assert damaged.damaged_delete_pages <= 1
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    assert verify(tmp_path) == damaged
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before
    repaired = verify(tmp_path, repair=True)
    assert repaired.sound
    assert repaired.repaired >= 2
    again = verify(tmp_path)
    assert again.sound
    assert (again.live, again.damaged_index_pages) == (len(now) - len(damaged.corrupt), 0)
    adapter = opened(tmp_path, BUDGET, region_bytes=REGION)
    assert sum(get(adapter, name) == data for name, data in now.items()) == again.live
    assert adapter.counters.corruptions == 0
    adapter.close()


def test_verify_refuses_a_store_in_use_and_what_is_no_store(tmp_path):
    adapter = opened(tmp_path / "store")
    with pytest.raises(AdapterConfigError, match="in use"):
        verify(tmp_path / "store")
    adapter.close()
    with pytest.raises(AdapterConfigError, match="no disk tier"):
        verify(tmp_path)
    with pytest.raises(AdapterConfigError, match="cannot read"):
        verify(tmp_path / "missing")
    assert not (tmp_path / "missing").exists()


@pytest.mark.parametrize("left", [0, 1, 4096, 100_000, 500_000, REGION - 1])
def test_a_truncated_file_is_misses(tmp_path, left):
    now, ever = build(tmp_path, clean=True)
    for file in tmp_path.glob("*.kvcache"):
        with file.open("r+b") as target:
            target.truncate(left)
    check(tmp_path, now, ever, strict=False)
    adapter = opened(tmp_path, BUDGET, region_bytes=REGION)
    for number in range(300):
        assert put(adapter, identity(number), value(number, 20_000))
    assert sum(path.stat().st_size for path in tmp_path.glob("*.kvcache")) <= BUDGET
    adapter.close()


def test_a_missing_file_is_misses(tmp_path):
    now, ever = build(tmp_path, clean=True)
    min(tmp_path.glob("*.kvcache")).unlink()
    check(tmp_path, now, ever, strict=False)


def test_a_copied_region_file_changes_nothing(tmp_path):
    now, ever = build(tmp_path, clean=True)
    file = min(tmp_path.glob("*.kvcache"))
    shutil.copy(file, tmp_path / "00000000000000ff.kvcache")
    check(tmp_path, now, ever, strict=True)


def test_a_region_of_another_version_is_refused_by_name(tmp_path):
    build(tmp_path, clean=True)
    from kvd.tiers.adapters.disk.format import RegionHeader

    file = min(tmp_path.glob("*.kvcache"))
    header = RegionHeader.unpack(file.read_bytes()[:PAGE])
    with file.open("r+b") as target:
        target.write(header._replace(version=9).pack())
    with pytest.raises(AdapterConfigError, match=f"{file.name} has format version 9"):
        opened(tmp_path, BUDGET, region_bytes=REGION)


def test_a_damaged_manifest_is_written_anew(tmp_path):
    now, ever = build(tmp_path, clean=True)
    (tmp_path / "manifest.json").write_bytes(b'{"format": "kvd-dis')
    check(tmp_path, now, ever, strict=True)
    assert json.loads((tmp_path / "manifest.json").read_text())["version"] == 2


def test_a_value_is_never_taken_for_a_structure(tmp_path):
    """Values that are copies of this very store's pages do not come back as records."""
    adapter = opened(tmp_path / "store", BUDGET, region_bytes=REGION)
    for number in range(40):
        put(adapter, identity(number), value(number, 5000))
    pages = b"".join(file.read_bytes() for file in sorted((tmp_path / "store").glob("*.kvcache")))[: 512 << 10]
    put(adapter, identity(100), pages)
    adapter.delete([identity(number) for number in range(40)])
    shutil.copytree(tmp_path / "store", tmp_path / "killed")
    adapter.close()
    adapter = opened(tmp_path / "killed", BUDGET, region_bytes=REGION)
    assert [name for name, _ in adapter.enumerate()] == [identity(100)]
    assert get(adapter, identity(100)) == pages
    adapter.close()


def test_many_items_in_one_call(tmp_path):
    adapter = opened(tmp_path, 64 << 20)
    values = {identity(number): value(number, 100 + number) for number in range(3000)}
    assert all(result.ok for result in adapter.store([item(name, data) for name, data in values.items()]))
    adapter.close()
    adapter = opened(tmp_path, 64 << 20)
    assert all(get(adapter, name) == data for name, data in values.items())
    adapter.close()
