"""Recordings give back what was recorded, survive kills and damage, stay small, rotate, and are read by every later version."""

import json
import os
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtools.errors import KvError, NotFound, Refused, TimedOut, UsageError
from kvtop.record import (
    FILE_HEADER,
    KEY,
    KEY_EVERY,
    MAGIC,
    RECORD,
    VERSION,
    Recorder,
    Recording,
    Writer,
    apply,
    difference,
    flatten,
    rebuild,
)
from kvtop.settings import load as load_settings
from kvtop.snapshot import Process, Snapshot
from tests.kvtop import scenes

CASES = Path(__file__).resolve().parents[1] / "cases" / "kvtop"

LEAF = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 53), 1 << 63),
    st.floats(-1e12, 1e12).map(lambda x: round(x, 3)),
    st.text(max_size=5),
)


def _write(path: Path, snapshots: list[Snapshot], **options: int) -> None:
    with Writer(path, **options) as writer:
        for snapshot in snapshots:
            writer.write(snapshot)


def _leaves(snapshot: Snapshot) -> list[object]:
    names: list[str] = []
    leaves: list[object] = []
    flatten(msgspec.to_builtins(snapshot), names, leaves, "")
    return leaves


@given(st.lists(st.tuples(LEAF, LEAF), max_size=30))
def test_a_difference_turns_the_old_into_the_new(pairs: list[tuple[object, object]]) -> None:
    old, new = [before for before, _ in pairs], [after for _, after in pairs]
    changed = msgspec.msgpack.decode(msgspec.msgpack.encode(difference(old, new)))
    state = list(old)
    apply(state, changed)
    assert state == new
    assert [type(one) for one in state] == [type(one) for one in new]


@given(
    st.recursive(
        LEAF, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4), max_leaves=20
    )
)
def test_flatten_and_rebuild_are_inverse(tree: object) -> None:
    leaves: list[object] = []
    flatten(tree, [], leaves, "")
    assert rebuild(tree, iter(leaves)) == tree


def test_the_worked_example_of_the_format_page() -> None:
    state: list[object] = ["gpu-host", 1000, 81.5]
    apply(state, [[2, 1], [24, -1500]])
    assert state == ["gpu-host", 1024, 80.0]


@pytest.mark.real("segments")
def test_what_was_recorded_is_read_back_in_any_order(tmp_path: Path) -> None:
    path = tmp_path / "a.kvrec"
    # Things come and go, so that there are key records in the middle, and more than one whole stream.
    snapshots = [scenes.host(tick, segments=3 + (tick // 50) % 2) for tick in range(2 * KEY_EVERY + 20)]
    _write(path, snapshots)
    recording = Recording(path)
    assert len(recording) == len(snapshots)
    assert recording.damaged == 0
    for index in [0, 1, 299, 300, 301, 10, 619, 618, 49, 50, 51, 5]:
        assert _leaves(recording.at(index)) == _leaves(snapshots[index]), index
    assert [round(t - scenes.START_S) for t in recording.times[:3]] == [0, 1, 2]
    assert recording.nearest(scenes.START_S + 7.5) == 7
    assert recording.nearest(0) == 0
    recording.close()


def test_names_that_are_no_utf8_are_recorded_as_they_are_shown(tmp_path: Path) -> None:
    """Anybody may put such a file into shared memory: it must not end a recording."""
    path = tmp_path / "a.kvrec"
    plain = scenes.host(0, segments=2)
    strange = scenes.change(plain.segments[0], name="\udcff\udcfebad")
    with Writer(path) as writer:
        for segments in (plain.segments, (strange, *plain.segments[1:]), plain.segments):
            writer.write(scenes.change(plain, segments=segments))
    recording = Recording(path)
    names = [recording.at(index).segments[0].name for index in range(len(recording))]
    assert names == [plain.segments[0].name, r"\xff\xfebad", plain.segments[0].name]
    recording.close()


def test_a_day_of_twenty_segments_stays_within_thirty_mib(tmp_path: Path) -> None:
    """Every segment and every process changes at every tick: worse than any real host."""
    path = tmp_path / "day.kvrec"
    ticks = 240
    with Writer(path) as writer:
        for tick in range(ticks):
            snapshot = scenes.host(tick, segments=20)
            segments = tuple(
                scenes.change(one, used_bytes=(hash((tick, n)) % 2000) * (2 << 20)) for n, one in enumerate(snapshot.segments)
            )
            processes = tuple(
                Process(
                    pid=one.pid, role="engine", command=f"vllm serve {one.model}", user="vllm", state="running",
                    cpu_percent=round((hash((tick, n, 1)) % 1500) / 10, 1), rss_bytes=(hash((tick, n, 2)) % 99999) * 4096,
                    threads=91, started_s=scenes.START_S, holds=(one.name,),
                )
                for n, one in enumerate(segments)
            )  # fmt: skip
            writer.write(scenes.change(snapshot, segments=segments, processes=processes, took_s=(tick % 7) / 1000))
    assert path.stat().st_size / ticks * 86400 < 30 << 20


def test_a_torn_tail_is_left_out_at_every_length(tmp_path: Path) -> None:
    path = tmp_path / "a.kvrec"
    _write(path, [scenes.host(tick) for tick in range(4)])
    whole = path.read_bytes()
    ends = [FILE_HEADER.size]
    while ends[-1] < len(whole):
        ends.append(ends[-1] + RECORD.size + RECORD.unpack_from(whole, ends[-1])[0])
    for cut in range(ends[1], len(whole), 37):
        path.write_bytes(whole[:cut])
        recording = Recording(path)
        assert len(recording) == sum(end <= cut for end in ends[1:])
        assert _leaves(recording.at(len(recording) - 1)) == _leaves(scenes.host(len(recording) - 1))
        recording.close()


def test_a_damaged_record_costs_its_stream_and_no_more(tmp_path: Path) -> None:
    path = tmp_path / "a.kvrec"
    _write(path, [scenes.host(tick) for tick in range(KEY_EVERY + 30)])
    data = bytearray(path.read_bytes())
    offset = FILE_HEADER.size
    for _ in range(10):
        offset += RECORD.size + RECORD.unpack_from(data, offset)[0]
    data[offset + RECORD.size + 2] ^= 0xFF
    path.write_bytes(data)
    recording = Recording(path)
    assert recording.damaged == 1
    times = [round(t - scenes.START_S) for t in recording.times]
    assert times[:10] == list(range(10))
    assert times[10:] == list(range(KEY_EVERY + 1, KEY_EVERY + 30)), "on from the next key record"
    assert _leaves(recording.at(12)) == _leaves(scenes.host(times[12]))
    recording.close()


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_garbage_is_an_error_of_ours_or_a_shorter_recording(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "garbage.kvrec"
    path.unlink(missing_ok=True)
    _write(path, [scenes.host(tick) for tick in range(3)])
    body = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(body) - 1))
        body[place] = data.draw(st.integers(0, 255))
    path.write_bytes(body)
    try:
        recording = Recording(path)
    except KvError:
        return
    for index in range(len(recording)):
        try:
            recording.at(index)
        except KvError:
            pass
    recording.close()


def test_a_file_that_lies_behind_right_checksums_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "lies.kvrec"
    for content in (b"", b"\x93\x01\x02\x03", msgspec.msgpack.encode({"time_s": "x"}), b"\xff" * 100, b"\x81" * 5000):
        payload = zlib.compress(content)
        check = zlib.crc32(payload, zlib.crc32(struct.pack("<Bd", KEY, 1.0)))
        path.write_bytes(FILE_HEADER.pack(MAGIC, VERSION, 0, 0) + RECORD.pack(len(payload), check, KEY, 1.0) + payload)
        recording = Recording(path)
        with pytest.raises(UsageError, match="cannot be read at reading 0"):
            recording.at(0)
        recording.close()


def test_what_is_no_recording_is_said(tmp_path: Path) -> None:
    path = tmp_path / "a.kvrec"
    with pytest.raises(NotFound, match="no recording"):
        Recording(path)
    path.write_bytes(b"hello")
    with pytest.raises(UsageError, match="is not a recording"):
        Recording(path)
    with pytest.raises(Refused, match="is not a recording"):
        Writer(path)
    assert path.read_bytes() == b"hello", "somebody else's file is left alone"
    path.write_bytes(FILE_HEADER.pack(MAGIC, VERSION, 0, 0))
    with pytest.raises(UsageError, match="holds no reading"):
        Recording(path)
    path.write_bytes(FILE_HEADER.pack(MAGIC, VERSION + 1, 0, 0))
    with pytest.raises(UsageError, match=f"of version {VERSION + 1}"):
        Recording(path)


def test_two_recorders_of_one_file_and_a_link_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.kvrec"
    with Writer(path), pytest.raises(TimedOut):
        Writer(path)
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(OSError, match="symbolic"):
        Writer(link)


def test_files_are_private_and_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "a.kvrec"
    _write(path, [scenes.host(0), scenes.host(1)])
    _write(path, [scenes.host(2)])
    assert path.stat().st_mode & 0o777 == 0o600
    recording = Recording(path)
    assert [_leaves(recording.at(i)) for i in range(3)] == [_leaves(scenes.host(i)) for i in range(3)]
    recording.close()


def test_rotation_keeps_within_the_limit_and_reads_both_files(tmp_path: Path) -> None:
    path = tmp_path / "a.kvrec"
    limit = 64 << 10
    _write(path, [scenes.host(tick, segments=5 + tick % 2) for tick in range(120)], max_bytes=limit)
    older = tmp_path / "a.kvrec.1"
    assert older.exists()
    assert path.stat().st_size + older.stat().st_size <= limit + (16 << 10)
    recording = Recording(path)
    assert round(recording.times[-1] - scenes.START_S) == 119
    assert recording.times == sorted(recording.times)
    assert _leaves(recording.at(0))
    assert _leaves(recording.at(len(recording) - 1)) == _leaves(scenes.host(119, segments=6))
    recording.close()


def test_a_full_disk_stops_the_recording_and_says_so(tmp_path: Path) -> None:
    recorder = Recorder(Writer(tmp_path / "a.kvrec"))
    recorder(scenes.host(0))
    assert recorder.words().startswith("REC ")
    os.close(recorder._writer._fd)
    recorder._writer._fd = os.open("/dev/full", os.O_WRONLY)
    recorder(scenes.host(1))
    assert "recording stopped" in recorder.words()
    recorder(scenes.host(2))
    recorder.close()


@pytest.mark.real("segments")
def test_a_killed_recorder_leaves_every_finished_reading(tmp_path: Path) -> None:
    path = tmp_path / "a.kvrec"
    code = (
        "import sys, os, signal; from pathlib import Path; from kvtop.record import Writer; from kvtop.source import Source\n"
        f"writer, source = Writer(Path({str(path)!r})), Source()\n"
        "for i in range(7): writer.write(source.read())\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == -9
    recording = Recording(path)
    assert len(recording) == 7
    recording.close()


# --- other versions ----------------------------------------------------------------------------------------------------


def test_the_recording_kept_from_version_1_reads_as_it_did() -> None:
    """`tests/cases/kvtop/version-1.kvrec` was written when the format was new; what it held is beside it. Never regenerate it."""
    recording = Recording(CASES / "version-1.kvrec")
    told = json.loads((CASES / "version-1.json").read_text())
    assert len(recording) == told["readings"]
    last = recording.at(len(recording) - 1)
    assert last.host == told["host"]
    assert {one.name: [one.limit_bytes, one.used_bytes, one.prealloc_bytes] for one in last.segments} == told["segments"]
    assert {s.key: v for s, v in zip(last.stats[0].schema, last.stats[0].values, strict=True)} == told["values"]
    recording.close()


def test_fields_of_the_future_are_passed_over_and_missing_ones_have_defaults(tmp_path: Path) -> None:
    path = tmp_path / "future.kvrec"
    tree = {
        "time_s": 1.0,
        "mono_s": 2.0,
        "quantum": {"a": [1, 2]},
        "segments": [{"name": "a", "limit_bytes": 3, "used_bytes": 2, "prealloc_bytes": 1, "mood": "good"}],
    }
    payload = zlib.compress(msgspec.msgpack.encode(tree))
    check = zlib.crc32(payload, zlib.crc32(struct.pack("<Bd", KEY, 1.0)))
    path.write_bytes(FILE_HEADER.pack(MAGIC, VERSION, 0, 0) + RECORD.pack(len(payload), check, KEY, 1.0) + payload)
    recording = Recording(path)
    snapshot = recording.at(0)
    assert (snapshot.segments[0].used_bytes, snapshot.segments[0].owner, snapshot.gpus) == (2, "unknown", ())
    recording.close()


def test_what_is_no_file_is_neither_read_nor_written_and_nobody_waits_for_it(tmp_path: Path) -> None:
    fifo, folder, circle = tmp_path / "fifo", tmp_path / "folder", tmp_path / "circle"
    os.mkfifo(fifo)
    folder.mkdir()
    circle.symlink_to(circle.name)
    for path in (fifo, folder, Path("/dev/null")):
        with pytest.raises(UsageError, match="is no file, and so no recording"):
            Recording(path)
    with pytest.raises(KvError, match="Too many levels of symbolic links"):
        Recording(circle)
    for path in (fifo, Path("/dev/null")):
        with pytest.raises(UsageError, match="is no file"):
            Writer(path)


def test_a_configuration_that_is_none_is_one_line(tmp_path: Path) -> None:
    for name, text, words in (
        ("deep", b"a: " + b"[" * 20_000, "recursion"),
        ("binary", bytes(range(128, 256)), "codec can't decode"),
        ("long", b"#" * (2 << 20), "larger than 1 MiB"),
    ):
        path = tmp_path / name
        path.write_bytes(text)
        with pytest.raises(UsageError, match=words) as caught:
            load_settings({}, {"KVTOP_CONFIG": str(path)})
        assert str(path) in caught.value.message
        assert "\n" not in caught.value.message
