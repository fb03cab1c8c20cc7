"""Stats segments: the bytes on the page, consistency, reshape, and every way a writer can die or be raced."""

import math
import os
import re
import signal
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtools.errors import NotFound, Refused, Unreachable, UsageError
from kvtools.segments import stats
from kvtools.segments.stats import Metric, StatsReader, StatsWriter

from . import format_reader

GETS = Metric("gets_total", "counter", "", "Reads.")
LOAD = Metric("load_seconds", "gauge", "seconds", "Last load.", {"tier": "disk0"}, True)


def write(root: Path, metrics: "list[Metric] | None" = None, instance: str = "abc") -> StatsWriter:
    return StatsWriter("kvd", instance, [GETS, LOAD] if metrics is None else metrics, root=root)


def test_a_second_reader_written_from_the_page_agrees(tmp_path: Path) -> None:
    writer = write(tmp_path)
    with writer.update():
        writer.add(writer.index("gets_total"), 41)
        writer.add(writer.index("gets_total"))
        writer.set(writer.index("load_seconds", tier="disk0"), 1.5)
    writer.heartbeat()
    theirs, ours = format_reader.read(writer.path), stats.read_stats(writer.name, tmp_path)
    assert theirs["values"] == list(ours.values) == [42, 1.5]
    assert theirs["schema"] == [
        {"name": m.name, "type": m.type, "unit": m.unit, "help": m.help, "labels": dict(m.labels), "float": m.float}
        for m in ours.schema
    ]
    assert theirs["pid"] == ours.pid == os.getpid()
    assert theirs["sequence"] == 2
    assert abs(time.time_ns() - theirs["heartbeat"]) < 3e9
    assert stat.S_IMODE(writer.path.stat().st_mode) == 0o644
    assert (ours.kind, ours.instance, ours.alive, ours.stale, ours.superseded) == ("kvd", "abc", True, False, False)
    writer.close()
    assert list(tmp_path.iterdir()) == []


def test_the_example_of_the_format_page_is_true(tmp_path: Path) -> None:
    page = (Path(stats.__file__).parent / "FORMAT.md").read_text()
    block = re.search(r"Example: kind `kvd`.*?```\n(.*?)```", page, re.DOTALL)
    assert block
    data = bytes.fromhex("".join(line[6:53] for line in block[1].splitlines()))
    (tmp_path / "kvtools.kvd.2e56aa36f538").write_bytes(data)
    reading = stats.read_stats("kvtools.kvd.2e56aa36f538", tmp_path)
    assert reading.get("gets_total") == 5
    assert reading.get("load_seconds", tier="disk0") == 1.5
    assert (reading.alive, reading.stale, reading.pid) == (False, False, 9644)
    writer = StatsWriter("kvd", "2e56aa36f538", list(reading.schema), root=tmp_path, clock=lambda: reading.created_ns)
    with writer.update():
        writer.set(0, 5)
        writer.set(1, 1.5)
    ours = bytearray(writer.path.read_bytes())
    ours[24:48] = data[24:48]  # the process is another one
    assert bytes(ours) == data
    writer.close()


def test_values_and_labels_are_found(tmp_path: Path) -> None:
    metrics = [Metric("hits", "counter", "", "h", {"tier": t, "rank": r}) for t in ("ram", "disk") for r in ("0", "1")]
    writer = write(tmp_path, metrics)
    for i in range(4):
        writer.set(i, i)
    reading = stats.read_stats(writer.path)
    assert reading.get("hits", rank="1", tier="disk") == 3
    assert reading.get("hits") is None
    assert reading.get("hits", 7, tier="tape", rank="0") == 7
    assert [(dict(labels)["tier"], value) for labels, value in reading.all("hits")] == [
        ("ram", 0),
        ("ram", 1),
        ("disk", 2),
        ("disk", 3),
    ]
    with pytest.raises(KeyError):
        writer.index("hits", tier="ram")
    writer.close()


@given(value=st.integers(0, 2**64 - 1), number=st.floats())
def test_every_value_survives(tmp_path_factory: pytest.TempPathFactory, value: int, number: float) -> None:
    writer = write(tmp_path_factory.mktemp("shm"))
    writer.set(0, value)
    writer.set(1, number)
    integer, double = stats.read_stats(writer.path).values
    assert integer == value
    assert double == number or (math.isnan(double) and math.isnan(number))
    writer.add(0, 2**64 - 1)
    assert writer.value(0) == (value - 1) % 2**64
    writer.close()


@pytest.mark.parametrize("bad", [-1, 2**64])
def test_an_integer_out_of_range_is_an_error_and_not_another_number(tmp_path: Path, bad: int) -> None:
    writer = write(tmp_path)
    with pytest.raises(ValueError):
        writer.set(0, bad)
    assert writer.value(0) == 0
    writer.close()


def test_no_metrics_at_all_and_unusual_text(tmp_path: Path) -> None:
    writer = write(tmp_path, [])
    assert list(stats.read_stats(writer.path).values) == []
    odd = Metric("ü", "gauge", "µs", 'quo"te\n\x1b', {"k\0": "名前"})
    writer.ensure([odd])
    writer.set(writer.index("ü", **{"k\0": "名前"}), 3)
    assert stats.read_stats(writer.path).schema == [odd]
    writer.close()


def test_label_sets_over_the_cap_are_counted_together(tmp_path: Path) -> None:
    metrics = [Metric("n", "counter", "", "h", {"model": f"m{i}"}) for i in range(100)]
    buckets = [Metric("s", "bucket", "seconds", "h", {"op": f"o{i}", "le": le}) for i in range(66) for le in ("1", "+Inf")]
    writer = write(tmp_path, metrics + buckets)
    assert writer.index("n", model="m99") == writer.index("n", model="m64") == writer.index("n", model="other")
    assert writer.index("n", model="m63") != writer.index("n", model="other")
    assert writer.index("s", op="o65", le="1") == writer.index("s", op="other", le="1") != writer.index("s", op="o65", le="+Inf")
    for i in range(100):
        writer.add(writer.index("n", model=f"m{i}"))
    reading = stats.read_stats(writer.path)
    assert len(reading.all("n")) == 65
    assert len(reading.all("s")) == 2 * 65
    assert reading.get("n", model="other") == 36
    writer.ensure([Metric("n", "counter", "", "h", {"model": "m100"})])
    writer.add(writer.index("n", model="m100"))
    assert stats.read_stats(writer.path).get("n", model="other") == 37
    assert len(stats.read_stats(writer.path).all("n")) == 65
    writer.close()


@pytest.mark.parametrize("wrong", [[GETS, GETS], [Metric("x", "histogram", "", "")]])
def test_a_schema_that_cannot_be_is_a_usage_error(tmp_path: Path, wrong: list[Metric]) -> None:
    with pytest.raises(UsageError):
        write(tmp_path, wrong)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("kind", "instance"), [("", "x"), ("kvd", ""), ("a.b", "x"), ("kvd", "a/b"), ("kvd", "../x"), ("KVD", "x")]
)
def test_bad_kinds_and_instances(tmp_path: Path, kind: str, instance: str) -> None:
    with pytest.raises(UsageError):
        StatsWriter(kind, instance, [], root=tmp_path)


def test_instances_follow_the_real_path(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "kvd.sock")
    assert stats.instance_of_path(tmp_path / "link") == stats.instance_of_path(tmp_path / "." / "kvd.sock")
    assert re.fullmatch("[0-9a-f]{12}", stats.instance_of_path("kvd.sock"))


def test_a_reader_sees_updates_whole_or_not_at_all(tmp_path: Path) -> None:
    pair = [Metric("a", "counter", "", ""), Metric("b", "counter", "", "")]
    writer = write(tmp_path, pair)
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            with writer.update():
                writer.add(0)
                writer.add(1)

    thread = threading.Thread(target=run)
    thread.start()
    torn = 0
    try:
        with StatsReader(writer.name, tmp_path) as reader:
            for _ in range(2000):
                reading = reader.read()
                torn += not reading.stale and reading.values[0] != reading.values[1]
    finally:
        stop.set()
        thread.join()
    assert torn == 0
    writer.close()


def test_updates_nest_and_exclude_each_other(tmp_path: Path) -> None:
    writer = write(tmp_path)

    def count() -> None:
        for _ in range(1000):
            with writer.update(), writer.update():
                writer.add(0)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stats.read_stats(writer.path).get("gets_total") == 4000
    assert format_reader.read(writer.path)["sequence"] == 8000
    writer.close()


def test_an_update_that_raises_still_ends(tmp_path: Path) -> None:
    writer = write(tmp_path)
    with pytest.raises(ZeroDivisionError), writer.update():
        _ = 1 / 0
    assert not stats.read_stats(writer.path).stale
    writer.close()


def test_reshape_carries_values_and_readers_follow(tmp_path: Path) -> None:
    writer = write(tmp_path)
    writer.set(0, 7)
    writer.set(1, 2.5)
    with StatsReader(writer.name, tmp_path) as reader, StatsReader(writer.name, tmp_path) as late:
        assert reader.read().get("gets_total") == late.read().get("gets_total") == 7
        created = reader.read().created_ns
        held = os.open(writer.path, os.O_RDONLY)
        writer.reshape([LOAD, Metric("new", "gauge", "", "")])
        assert struct.unpack("<I", os.pread(held, 4, 20))[0] & 1, "the old file says superseded"
        os.close(held)
        writer.set(writer.index("new"), 9)
        reading = reader.read()
        assert list(reading.values) == [2.5, 9]
        assert reading.created_ns == created
        assert reading.get("gets_total") is None
        writer.close()
        for one in (reader, late):
            with pytest.raises(NotFound):
                one.read()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_somebody_removed_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtools.segments.stats_writer.NAME_S", 0.0)
    writer = write(tmp_path, [GETS])
    writer.set(0, 41)
    writer.path.unlink()
    with writer.update():
        writer.heartbeat()
    assert not writer.path.exists(), "not in the middle of an update"
    writer.heartbeat()
    writer.add(0)
    with StatsReader(writer.name, root=tmp_path) as reader:
        reading = reader.read()
        assert (reading.get(GETS.name), reading.alive) == (42, True)
        before = writer.path.stat().st_ino
        writer.heartbeat()
        assert writer.path.stat().st_ino == before, "a file that is there stays"
        (tmp_path / "aside").mkdir()
        writer.path.rename(tmp_path / "aside" / writer.name)
        monkeypatch.setattr(StatsWriter, "_adopt", _no_room)
        writer.heartbeat()  # no room now: later
        monkeypatch.undo()
        monkeypatch.setattr("kvtools.segments.stats_writer.NAME_S", 0.0)
        writer.heartbeat()
        writer.add(0)
        assert reader.read().get(GETS.name) == 43
    writer.close()
    writer.heartbeat()
    assert not writer.path.exists()


def _no_room(*_: object) -> None:
    raise Unreachable("no room")


def test_threads_may_go_on_counting_through_a_reshape(tmp_path: Path) -> None:
    writer = write(tmp_path, [GETS])
    stop = threading.Event()
    failed: list[BaseException] = []

    def count() -> None:
        try:
            while not stop.is_set():
                with writer.update():
                    writer.add(0)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=count)
    thread.start()
    for i in range(60):
        writer.ensure([Metric("n", "gauge", "", "", {"i": str(i)})])
    stop.set()
    thread.join()
    assert failed == []
    assert stats.read_stats(writer.path).get("gets_total") == writer.value(0) > 0
    writer.close()


def test_a_second_writer_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    writer = write(tmp_path)
    writer.set(0, 3)
    with pytest.raises(Refused, match=f"kvtools.kvd.abc is being written by process {os.getpid()}"):
        StatsWriter("kvd", "abc", [GETS], root=tmp_path, patience_s=0.02)
    assert stats.read_stats(writer.path).get("gets_total") == 3
    writer.close()
    write(tmp_path).close()
    assert list(tmp_path.iterdir()) == []


def test_of_many_writers_at_once_one_wins(tmp_path: Path) -> None:
    code = (
        "import sys,time\nfrom pathlib import Path\nfrom kvtools.segments import stats\nfrom kvtools.errors import Refused\n"
        "try:\n w=stats.StatsWriter('kvd','abc',[stats.Metric('x','gauge','','')],root=Path(sys.argv[1]))\n"
        "except Refused:\n print('refused',flush=True); sys.exit()\n"
        "print('won',flush=True); sys.stdin.read(); w.close()"
    )
    children = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(5)
    ]
    said = [child.stdout.readline().strip() for child in children if child.stdout]
    assert sorted(said) == ["refused"] * 4 + ["won"]
    assert stats.read_stats("kvtools.kvd.abc", tmp_path).alive
    for child in children:
        child.communicate("")
    assert list(tmp_path.iterdir()) == []


WRITER = """
import sys, time
from pathlib import Path
from kvtools.segments import stats
metrics = [stats.Metric("a", "counter", "", ""), stats.Metric("b", "counter", "", "")]
w = stats.StatsWriter("kvd", "abc", metrics, root=Path(sys.argv[1]))
print("up", flush=True)
{then}
"""


def start_writer(root: Path, then: str) -> "subprocess.Popen[bytes]":
    process = subprocess.Popen([sys.executable, "-c", WRITER.format(then=then), str(root)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    return process


def kill(process: "subprocess.Popen[bytes]") -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def test_killed_inside_an_update_it_is_stale_and_dead_and_replaceable(tmp_path: Path) -> None:
    process = start_writer(tmp_path, "w.set(0, 5)\nw.update().__enter__(); print('in', flush=True); time.sleep(60)")
    assert process.stdout is not None
    assert process.stdout.readline() == b"in\n"
    with StatsReader("kvtools.kvd.abc", tmp_path) as reader:
        alive = reader.read()
        assert (alive.alive, alive.stale) == (True, True)
        kill(process)
        dead = reader.read()
        assert (dead.alive, dead.stale, dead.get("a")) == (False, True, 5)
        assert dead.story == f"pid {process.pid} is gone"
        writer = write(tmp_path)
        fresh = reader.read()
        assert (fresh.alive, fresh.stale, fresh.pid) == (True, False, os.getpid())
        writer.close()


def test_killed_at_any_moment_it_never_breaks_readers_or_the_next_writer(tmp_path: Path) -> None:
    """A writer that updates and reshapes without pause, killed at many moments; leftovers are swept by the next."""
    then = (
        "i = 0\nwhile True:\n    i += 1\n    with w.update():\n        w.add(0); w.add(1)\n"
        "    if i % 3 == 0: w.reshape(metrics + [stats.Metric('n', 'gauge', '', '', {'i': str(i % 90)})])"
    )
    for number in range(12):
        process = start_writer(tmp_path, then)
        time.sleep(0.003 * number)
        kill(process)
        reading = stats.read_stats("kvtools.kvd.abc", tmp_path)
        assert not reading.alive
        assert reading.pid == process.pid
        if not reading.stale:
            assert reading.get("a") == reading.get("b")
    writer = write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [writer.name]
    writer.close()


def test_a_dead_writers_file_is_removed_and_a_live_ones_not(tmp_path: Path) -> None:
    writer = write(tmp_path)
    assert not stats.remove_unlocked(writer.path)
    process = start_writer(tmp_path / "..", "time.sleep(60)")
    kill(process)
    path = tmp_path.parent / "kvtools.kvd.abc"
    with StatsReader(path) as reader:
        assert not reader.read().alive
        assert stats.remove_unlocked(path)
        with pytest.raises(NotFound):
            reader.read()
    assert not stats.remove_unlocked(path)
    writer.close()


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(Unreachable, match=r"there is no .*/none") as caught:
        StatsWriter("kvd", "x", [], root=tmp_path / "none")
    assert "KVTOOLS_SHM" in caught.value.hint


def test_no_room_is_an_error_before_anything_is_seen() -> None:
    """On a real, full tmpfs of its own mount namespace."""
    code = """
import os, subprocess, sys
from pathlib import Path
root = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(root)], check=True)
from kvtools.segments import owner, pool, stats
from kvtools.errors import Unreachable
writer = stats.StatsWriter("kvd", "first", [stats.Metric("a", "gauge", "", "")], root=root)
filler = os.open(root / "filler", os.O_WRONLY | os.O_CREAT)
try:
    while os.write(filler, bytes(4096)): pass
except OSError:
    pass
def refused(act):
    try:
        act()
    except Unreachable as error:
        assert error.message.startswith(f"no room in {root} for"), error.message
        assert "free some shared memory" in error.hint
    else:
        raise SystemExit(f"{act} found room")
refused(lambda: stats.StatsWriter("kvd", "second", [stats.Metric("a", "gauge", "", "")], root=root))
refused(lambda: writer.ensure([stats.Metric("b", "gauge", "", "")]))
refused(lambda: pool.create_pool("p", 5, root=root))
refused(lambda: owner.OwnerLock.acquire("p", owner.OwnerInfo("vllm"), root=root))
writer.add(0, 3)
reading = stats.read_stats(writer.name, root)
assert reading.get("a") == 3 and reading.alive and not reading.superseded, reading
assert sorted(os.listdir(root)) == ["filler", writer.name], os.listdir(root)
"""
    folder = f"/tmp/kvt-full-{os.getpid()}"
    Path(folder).mkdir()
    try:
        ran = subprocess.run(["unshare", "-rm", sys.executable, "-c", code, folder], capture_output=True, text=True)
    finally:
        Path(folder).rmdir()
    assert ran.returncode == 0, ran.stderr


def _spoil(root: Path, change: Callable[[bytearray], bytes]) -> Path:
    writer = write(root)
    data = change(bytearray(writer.path.read_bytes()))
    writer.close()
    path = root / "kvtools.kvd.bad"
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    "change",
    [
        lambda d: b"",
        lambda d: d[:100],
        lambda d: d[:-8],
        lambda d: b"KVTSTAT2" + d[8:],
        lambda d: d[:8] + struct.pack("<I", 64) + d[12:],
        lambda d: d[:16] + struct.pack("<I", 3) + d[20:],
        lambda d: d[:16] + struct.pack("<I", 2**32 - 1) + d[20:],
        lambda d: d[:12] + struct.pack("<I", 2**32 - 1) + d[16:],
        lambda d: d[:128] + b"{" + d[129:],
        lambda d: d[:128] + b"[5," + d[131:],
        lambda d: d[:130] + b"\xff" + d[131:],
        lambda d: b"x" * 24,
    ],
)
def test_an_unsound_file_is_refused_by_name(tmp_path: Path, change: Callable[[bytearray], bytes]) -> None:
    with pytest.raises(Unreachable, match=r"kvtools\.kvd\.bad is not a sound stats segment"):
        stats.read_stats(_spoil(tmp_path, change))


@given(at=st.integers(0, 360), byte=st.integers(0, 255), cut=st.integers(0, 360) | st.none())
def test_a_spoiled_byte_or_a_cut_never_crashes_a_reader(
    tmp_path_factory: pytest.TempPathFactory, at: int, byte: int, cut: int | None
) -> None:
    def change(data: bytearray) -> bytes:
        data[at % len(data)] = byte
        return bytes(data[:cut])

    try:
        reading = stats.read_stats(_spoil(tmp_path_factory.mktemp("shm"), change))
    except Unreachable:
        return
    assert len(reading.values) == len(reading.schema)


def test_a_file_cut_under_an_open_reader_is_an_error_and_not_a_signal(tmp_path: Path) -> None:
    path = _spoil(tmp_path, bytes)
    with StatsReader(path) as reader:
        assert len(reader.read().values) == 2
        os.truncate(path, 140)
        with pytest.raises(Unreachable, match="it was cut"):
            reader.read()


def test_links_are_not_followed_and_missing_is_not_found(tmp_path: Path) -> None:
    writer = write(tmp_path)
    (tmp_path / "kvtools.kvd.link").symlink_to(writer.path)
    with pytest.raises(Unreachable, match="symbolic link"):
        stats.read_stats("kvtools.kvd.link", tmp_path)
    with pytest.raises(NotFound):
        stats.read_stats("kvtools.kvd.none", tmp_path)
    writer.close()


def test_a_link_in_a_writers_way_is_refused_and_left(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"precious")
    (tmp_path / "kvtools.kvd.abc").symlink_to("target")
    with pytest.raises(Unreachable, match="symbolic link"):
        write(tmp_path)
    assert (tmp_path / "target").read_bytes() == b"precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kvtools.kvd.abc", "target"]


def test_newer_writers_and_unknown_keys_are_readable(tmp_path: Path) -> None:
    schema = b'[{"name":"a","type":"summary","novel":[1],"labels":{"x":"1"}},{"name":"b"}]'
    padded = schema + bytes(-len(schema) % 8)
    head = struct.pack("<8sIIIIQQQQQQ", b"KVTSTAT1", 136, len(schema), 2, 2, 1, 2, 3, 4, 5, 0).ljust(136, b"\0")
    (tmp_path / "kvtools.kvd.new").write_bytes(head + padded + struct.pack("<QQ", 8, 9) + b"more to come")
    reading = stats.read_stats("kvtools.kvd.new", tmp_path)
    assert (reading.get("a", x="1"), reading.get("b")) == (8, 9)


def test_finding(tmp_path: Path) -> None:
    writers = [StatsWriter(kind, "x", [], root=tmp_path) for kind in ("kvd", "gate", "connector")]
    (tmp_path / ".kvtools.kvd.x.1.0").write_bytes(b"")
    (tmp_path / "kvtools.lonely").write_bytes(b"")
    assert [path.name for path in stats.find_stats(tmp_path)] == ["kvtools.connector.x", "kvtools.gate.x", "kvtools.kvd.x"]
    assert [path.name for path in stats.find_stats(tmp_path, "gate")] == ["kvtools.gate.x"]
    with pytest.raises(Unreachable):
        stats.find_stats(tmp_path / "none")
    for writer in writers:
        writer.close()


def test_a_pools_instance_is_its_name_where_that_can_be() -> None:
    assert stats.stats_name("pool", stats.instance_of_pool("VLLM_MODEL_1")) == "kvtools.pool.VLLM_MODEL_1"
    for odd in ("modell-ä", "a b", "x" * 200, "_x"):
        assert re.fullmatch(r"[0-9a-f]{12}", stats.instance_of_pool(odd))
