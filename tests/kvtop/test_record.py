"""Recordings give back what was recorded, survive kills and damage, stay small, rotate, and are read by every later version."""

import json
import os
import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtools.errors import KvError, NotFound, Refused, TimedOut, UsageError
from kvtop.model import Model
from kvtop.record import (
    FILE_HEADER,
    KEY,
    KEY_EVERY,
    MAGIC,
    RECORD,
    RETRY_S,
    VERSION,
    Recorder,
    Writer,
    apply,
    difference,
    flatten,
    rebuild,
)
from kvtop.recording import Recording
from kvtop.settings import load as load_settings
from kvtop.snapshot import Process, Snapshot
from tests.kvtop import scenes
from tests.support.processes import run_python

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
    assert recording.damage == []
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


def _offsets(data: bytes) -> list[int]:
    """Where each record begins."""
    offsets, offset = [], FILE_HEADER.size
    while offset < len(data):
        offsets.append(offset)
        offset += RECORD.size + RECORD.unpack_from(data, offset)[0]
    return offsets


_LENGTH, _CHECK, _KIND, _TIME, _PAYLOAD = 0, 4, 8, 9, RECORD.size


@pytest.mark.parametrize("field", [_LENGTH, _LENGTH + 1, _LENGTH + 3, _CHECK, _KIND, _TIME + 7, _PAYLOAD, _PAYLOAD + 9])
@pytest.mark.parametrize("flip", [0xFF, 0x01])
def test_a_flipped_byte_costs_its_stream_and_no_more_and_says_where(tmp_path: Path, field: int, flip: int) -> None:
    """In whatever field of a record: a wrong length too is found out, and what follows is found again."""
    path = tmp_path / "a.kvrec"
    _write(path, [scenes.host(tick) for tick in range(KEY_EVERY + 30)])
    data = bytearray(path.read_bytes())
    offset = _offsets(data)[10]
    data[offset + field] ^= flip
    path.write_bytes(data)
    recording = Recording(path)
    times = [round(t - scenes.START_S) for t in recording.times]
    assert times == [*range(10), *range(KEY_EVERY + 1, KEY_EVERY + 30)], "on from the next key record"
    assert _leaves(recording.at(12)) == _leaves(scenes.host(times[12]))
    (damage,) = recording.damage
    assert (damage.offset, damage.place, damage.path) == (offset, 10, path)
    assert damage.lost == KEY_EVERY - 9
    assert (damage.after_s, damage.until_s) == (scenes.START_S + 9, scenes.START_S + KEY_EVERY + 1)
    recording.close()


@pytest.mark.parametrize("which", ["first", "last"])
def test_damage_at_either_end(tmp_path: Path, which: str) -> None:
    path = tmp_path / "a.kvrec"
    _write(path, [scenes.host(tick) for tick in range(9)])
    data = bytearray(path.read_bytes())
    offset = _offsets(data)[0 if which == "first" else -1]
    data[offset + _PAYLOAD + 3] ^= 0x10
    path.write_bytes(data)
    if which == "first":
        with pytest.raises(KvError, match=f"damaged at byte {offset}: none of its readings can be shown") as caught:
            Recording(path)
        assert caught.value.exit_code == 1
        return
    recording = Recording(path)
    (damage,) = recording.damage
    assert (len(recording), damage.lost, damage.place, damage.until_s) == (8, 1, 8, 0.0)
    assert "at least 1 reading after " in str(damage)
    recording.close()


def test_a_damaged_name_hides_nothing_and_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a.kvrec"
    _write(path, [scenes.host(tick) for tick in range(3)])
    data = bytearray(path.read_bytes())
    data[2] ^= 0x20
    path.write_bytes(data)
    recording = Recording(path)
    assert len(recording) == 3
    assert str(recording.damage[0]) == f"{path} is damaged at byte 0: nothing is lost"
    recording.close()


def test_a_torn_record_that_was_written_on_behind_costs_itself(tmp_path: Path) -> None:
    path = tmp_path / "a.kvrec"
    _write(path, [scenes.host(tick) for tick in range(5)])
    path.write_bytes(path.read_bytes()[:-20])
    assert Recording(path).damage == [], "a writer that was killed"
    _write(path, [scenes.host(9)])
    recording = Recording(path)
    assert [round(t - scenes.START_S) for t in recording.times] == [0, 1, 2, 3, 9]
    assert [one.lost for one in recording.damage] == [1]
    recording.close()


def test_a_file_made_to_cost_hours_costs_a_moment(tmp_path: Path) -> None:
    """Hundreds of thousands of headers that each claim megabytes, none of them sound."""
    path = tmp_path / "a.kvrec"
    _write(path, [scenes.host(0)])
    trap = RECORD.pack(4 << 20, 0, KEY, scenes.START_S)
    path.write_bytes(path.read_bytes() + b"\xff" * 64 + trap * ((8 << 20) // len(trap)))
    begun = time.process_time()
    recording = Recording(path)
    assert time.process_time() - begun < 20, "seconds of CPU; without a bound an hour"
    assert (len(recording), len(recording.damage)) == (1, 1)
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
    with Writer(path), pytest.raises(TimedOut) as caught:
        Writer(path)
    assert caught.value.message == f"process {os.getpid()} records to {path} already"
    assert caught.value.hint == "name another file"
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


def test_a_full_disk_is_counted_told_and_tried_again(tmp_path: Path) -> None:
    path, now = tmp_path / "a.kvrec", [0.0]
    recorder = Recorder(Writer(path), mono=lambda: now[0])
    model = Model(own=recorder.alerts)

    def tick(number: int) -> None:
        now[0] += 1.0
        recorder(scenes.host(number))
        model.take(scenes.host(number))

    for number in (0, 1):
        tick(number)
    assert recorder.words().startswith("REC ")
    assert (recorder.problem, recorder.alerts(), recorder.verdict(), model.health) == ("", [], None, "OK")

    whole = recorder._writer._fd
    recorder._writer._fd = os.open("/dev/full", os.O_WRONLY)
    for number in range(2, 6):
        tick(number)
    assert recorder.problem == "No space left on device"
    assert recorder.lost == 4
    assert model.health == "WARN"
    (alert,) = model.alerts
    assert (alert.subject, "(4 readings): No space left" in alert.text) == ("recording", True)
    told = [event.text for event in model.log if event.subject == "recording"]
    assert len(told) == 1, "once, not at every reading"
    assert "(1 reading): No space left on device" in told[0]

    os.close(recorder._writer._fd)
    recorder._writer._fd = whole
    tick(6)
    assert recorder.problem, "the disk is left alone for a while"
    now[0] += RETRY_S
    for number in (7, 8):
        tick(number)
    assert (recorder.problem, recorder.lost, model.health) == ("", 5, "OK")
    assert [event.text for event in model.log if event.subject == "recording"][1:] == ["works again"]
    recorder.close()
    recorder(scenes.host(9))
    lacking = recorder.verdict()
    assert lacking is not None
    assert lacking.message.startswith(f"5 of 9 readings were not recorded to {path}, the first at ")
    assert lacking.message.endswith(": No space left on device")

    recording = Recording(path)
    assert ([round(t - scenes.START_S) for t in recording.times], recording.damage) == ([0, 1, 7, 8], [])
    assert [_leaves(recording.at(i)) for i in range(4)] == [_leaves(scenes.host(tick)) for tick in (0, 1, 7, 8)]
    recording.close()


def test_a_disk_that_fills_up_inside_a_record_leaves_whole_records(tmp_path: Path) -> None:
    """A real limit of the kernel (RLIMIT_FSIZE), hit in the middle of a write, in a process of its own; then it is lifted."""
    path = tmp_path / "a.kvrec"
    code = (
        "import resource; from pathlib import Path; from kvtop.record import Recorder, Writer; from tests.kvtop import scenes\n"
        "soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)\n"
        f"recorder = Recorder(Writer(Path({str(path)!r})), mono=lambda: 0.0)\n"
        "recorder(scenes.host(0))\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (recorder._writer.size + 40, hard))\n"
        "recorder(scenes.host(1, segments=9)); print(recorder.problem)\n"
        "recorder._again = 0.0; resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))\n"
        "recorder(scenes.host(2)); recorder.close(); print(recorder.verdict().message)"
    )
    ran = run_python(code)
    assert (ran.rc, ran.stdout.splitlines()[0]) == (0, "File too large"), ran.stderr
    assert ran.stdout.splitlines()[1].startswith("1 of 3 readings were not recorded to ")
    recording = Recording(path)
    assert ([round(t - scenes.START_S) for t in recording.times], recording.damage) == ([0, 2], [])
    recording.close()


def test_a_file_that_rotation_could_not_begin_hides_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.kvrec"
    _write(path, [scenes.host(0), scenes.host(1)])
    path.rename(tmp_path / "a.kvrec.1")
    for left in (b"", MAGIC[:3], FILE_HEADER.pack(MAGIC, VERSION, 0, 0)):
        path.write_bytes(left)
        recording = Recording(path)
        assert (len(recording), recording.damage) == (2, [])
        recording.close()


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
