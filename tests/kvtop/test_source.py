"""One snapshot of a real folder of shared memory, and what each source that vanishes, hangs or lies costs: itself only."""

import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import psutil
import pytest

from kvtools.segments import owner, pool
from kvtools.segments.stats import Metric, StatsWriter
from kvtop.model import Model
from kvtop.procs import Processes
from kvtop.snapshot import Gpu, Snapshot
from kvtop.source import SILENT_AFTER_S, Source
from kvtop.views import VIEWS
from kvtop.views.base import pane_lines
from tests.kvtop import scenes
from tests.kvtop.scenes import GIB, MIB
from tests.support.processes import wait_until

pytestmark = pytest.mark.real("segments")

METRICS = [
    Metric("hits_total", "counter", "", "values found"),
    Metric("load", "gauge", "", "a fraction", float=True),
    Metric("tier_bytes_used", "gauge", "bytes", "", {"tier": "disk", "type": "disk"}),
]


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[StatsWriter]:
    made = StatsWriter("kvd", "0123456789ab", METRICS, root=tmp_path)
    yield made
    made.close()


def _read(root: Path, **options: object) -> Snapshot:
    source = Source(root=root, **options)  # type: ignore[arg-type]
    try:
        return source.read()
    finally:
        source.close()


def test_an_empty_folder_is_an_empty_snapshot(tmp_path: Path) -> None:
    snapshot = _read(tmp_path)
    assert (snapshot.segments, snapshot.stats, snapshot.problems) == ((), (), ())
    assert snapshot.shm_total_bytes > 0


def test_a_missing_folder_is_one_problem(tmp_path: Path) -> None:
    snapshot = _read(tmp_path / "gone")
    assert [problem.source for problem in snapshot.problems] == [str(tmp_path / "gone")]


def test_segments_with_and_without_an_owner(tmp_path: Path) -> None:
    pool.create_pool("plain", GIB, used_bytes=3 * MIB, prealloc_bytes=MIB, root=tmp_path)
    pool.create_pool("owned", 2 * GIB, root=tmp_path)
    info = owner.OwnerInfo(
        engine="vllm", model="m", devices=("GPU-1",), tp_rank=1, tp_size=2, page_bytes=MIB, start_capacity_bytes=4 * GIB
    )
    with owner.OwnerLock.acquire("owned", info, root=tmp_path) as lock:
        owner.change_limit("owned", GIB, by="kvctl limit, uid 0", root=tmp_path)
        owned, plain = _read(tmp_path).segments
        assert (plain.limit_bytes, plain.used_bytes, plain.prealloc_bytes, plain.owner) == (GIB, 3 * MIB, MIB, "unknown")
        assert (owned.owner, owned.pid, owned.engine, owned.model, owned.ranks) == ("live", os.getpid(), "vllm", "m", "tp1/2")
        assert (owned.capacity_bytes, owned.page_bytes, owned.devices) == (4 * GIB, MIB, ("GPU-1",))
        assert [(note.limit_bytes, note.by, note.state) for note in owned.limits] == [(GIB, "kvctl limit, uid 0", "pending")]
        lock.mark(GIB, "applied", effective_bytes=GIB)
        assert _read(tmp_path).segments[0].limits[-1].state == "applied"
        lock.close(remove=False)
    assert _read(tmp_path).segments[0].owner == "stale"


def test_names_choose_and_a_missing_one_is_a_problem(tmp_path: Path) -> None:
    for name in ("a", "b"):
        pool.create_pool(name, GIB, root=tmp_path)
    snapshot = _read(tmp_path, names=["b", "nosuch"])
    assert [segment.name for segment in snapshot.segments] == ["b"]
    assert [(problem.source, problem.message) for problem in snapshot.problems] == [("nosuch", "no segment of this name")]


def test_stats_are_read_and_their_schema_is_parsed_once(tmp_path: Path, writer: StatsWriter) -> None:
    writer.add(writer.index("hits_total"), 5)
    writer.set(writer.index("load"), 0.25)
    writer.heartbeat()
    source = Source(root=tmp_path)
    first, second = source.read().stats[0], source.read().stats[0]
    assert first.schema is second.schema
    assert dict(zip([one.key for one in first.schema], first.values, strict=True)) == {
        "hits_total": 5, "load": 0.25, "tier_bytes_used{tier=disk,type=disk}": 0,
    }  # fmt: skip
    assert (first.kind, first.instance, first.state, first.pid) == ("kvd", "0123456789ab", "fresh", os.getpid())
    writer.reshape([*METRICS, Metric("new_total", "counter", "", "")])
    third = source.read().stats[0]
    assert third.schema[-1].name == "new_total", "a reshaped file is followed"
    source.close()


def test_a_writer_goes_silent_then_gone_then_comes_back(tmp_path: Path) -> None:
    now = [time.time()]
    source = Source(root=tmp_path, clock=lambda: now[0])
    made = StatsWriter("kvd", "0123456789ab", METRICS, root=tmp_path)
    made.heartbeat()
    assert source.read().stats[0].state == "fresh"
    now[0] += SILENT_AFTER_S + 1
    assert source.read().stats[0].state == "silent"
    made.close()
    assert source.read().stats == ()
    code = f"""
import os, signal
from pathlib import Path
from kvtools.segments.stats import Metric, StatsWriter
StatsWriter("kvd", "0123456789ab", [Metric("hits_total", "counter", "", "")], root=Path({str(tmp_path)!r})).heartbeat()
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", code], check=False)
    assert source.read().stats[0].state == "gone", "killed: the file is there, nobody holds its lock"
    now[0] = time.time()
    again = StatsWriter("kvd", "0123456789ab", METRICS, root=tmp_path)
    again.heartbeat()
    assert source.read().stats[0].state == "fresh"
    again.close()
    source.close()


def test_garbage_beside_good_things_costs_one_line_each(tmp_path: Path, writer: StatsWriter) -> None:
    writer.heartbeat()
    pool.create_pool("good", GIB, root=tmp_path)
    (tmp_path / "kvtools.kvd.broken000000").write_bytes(b"KVTSTAT1" + b"\xff" * 300)
    (tmp_path / "kvtools.kvd.short0000000").write_bytes(b"K")
    (tmp_path / "good.kvtools").write_text("not json")
    (tmp_path / "twentyfourbytes").write_bytes(b"\xff" * 24)
    snapshot = _read(tmp_path)
    assert [segment.name for segment in snapshot.segments] == ["good"]
    assert [one.instance for one in snapshot.stats] == ["0123456789ab"]
    assert sorted(problem.source for problem in snapshot.problems) == [
        "kvtools.kvd.broken000000",
        "kvtools.kvd.short0000000",
        "twentyfourbytes",
    ]
    assert all("\n" not in problem.message for problem in snapshot.problems)


@pytest.mark.parametrize("left", [b"", b"12345", b"\xff" * 24, b"\0" * 4096])
def test_a_segment_that_was_damaged_under_us_is_a_problem_until_it_is_gone(tmp_path: Path, left: bytes) -> None:
    """Without an owner file, too: what was a segment a moment ago and is a file still was damaged, not removed."""
    for name in ("cut", "whole"):
        pool.create_pool(name, GIB, root=tmp_path)
    source = Source(root=tmp_path)
    assert len(source.read().segments) == 2
    (tmp_path / "cut").write_bytes(left)
    for _ in range(3):
        snapshot = source.read()
        assert [segment.name for segment in snapshot.segments] == ["whole"]
        ((name, message),) = [(problem.source, problem.message) for problem in snapshot.problems]
        assert (name, message.startswith("is not a pool segment: ")) == ("cut", True)
    (tmp_path / "cut").unlink()
    assert source.read().problems == ()
    source.close()


def test_a_stuck_lock_costs_its_segment_and_a_bounded_moment(tmp_path: Path) -> None:
    for name in ("a", "stuck", "z"):
        pool.create_pool(name, GIB, root=tmp_path)
    holder = os.open(tmp_path / "stuck", os.O_RDWR)
    fcntl.flock(holder, fcntl.LOCK_EX)
    begun = time.monotonic()
    snapshot = _read(tmp_path, lock_timeout_s=0.1)
    assert time.monotonic() - begun < 2.0
    assert [segment.name for segment in snapshot.segments] == ["a", "z"]
    assert [problem.source for problem in snapshot.problems] == ["stuck"]
    os.close(holder)
    assert len(_read(tmp_path).segments) == 3


def test_a_library_that_raises_is_one_problem(tmp_path: Path) -> None:
    def broken() -> Sequence[Gpu]:
        raise RuntimeError("driver mismatch")

    snapshot = _read(tmp_path, gpus=broken)
    assert [(problem.source, problem.message) for problem in snapshot.problems] == [("gpu", "RuntimeError: driver mismatch")]


def test_read_only_permission_is_enough(tmp_path: Path, writer: StatsWriter) -> None:
    """kvcached's viewer opens segments for writing; ours must work on 0444 files."""
    writer.heartbeat()
    pool.create_pool("a", GIB, root=tmp_path)
    (tmp_path / "a").chmod(0o444)
    opened: list[int] = []
    real = os.open

    def watch(path: object, flags: int, *more: int, **named: int) -> int:
        opened.append(flags)
        return real(path, flags, *more, **named)  # type: ignore[call-overload]

    os.open = watch  # type: ignore[assignment]
    try:
        snapshot = _read(tmp_path)
    finally:
        os.open = real
    assert len(snapshot.segments) == len(snapshot.stats) == 1
    assert opened
    assert not any(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) for flags in opened)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_no_number_is_shown_as_none(tmp_path: Path, writer: StatsWriter, value: float) -> None:
    """A writer's 0/0 is not this screen's crash: every view draws, and the JSON stays JSON."""
    writer.set(writer.index("load"), value)
    writer.heartbeat()
    snapshots = [scenes.change(_read(tmp_path), mono_s=float(tick)) for tick in range(3)]
    assert snapshots[0].stats[0].values[1] == 0.0
    model = Model()
    for snapshot in snapshots:
        model.take(snapshot)
    for view in VIEWS.values():
        view.above(model, 100, 20)
        for row in view.rows(model):
            pane_lines(view, model, row, 100, 20)
    json.dumps(msgspec.to_builtins(snapshots[0]), allow_nan=False)


# --- processes ---------------------------------------------------------------------------------------------------------


def test_processes_are_told_with_what_they_hold() -> None:
    clock = [100.0]
    processes = Processes(mono=lambda: clock[0])
    child = subprocess.Popen([sys.executable, "-c", "import sys\nprint(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        before = psutil.Process(child.pid)
        begun = before.cpu_times().user
        processes.read([(child.pid, "seg", 0)])
        wait_until(lambda: before.cpu_times().user >= begun + 0.2, what="a fifth of a second of CPU, however busy this machine is")
        clock[0] += 0.3
        (found,) = processes.read([(child.pid, "seg", 0), (child.pid, "kvd abc", 0)])
        assert found.holds == ("seg", "kvd abc")
        assert found.role == "kvd"
        assert found.cpu_percent > 20
        assert found.rss_bytes > MIB
        assert "while True" in found.command
        assert found.user
        assert abs(found.started_s - time.time()) < 60
    finally:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()
    assert processes.read([(child.pid, "seg", 0)]) == []


def test_a_pid_of_another_namespace_or_none_is_left_out() -> None:
    processes = Processes()
    assert processes.read([(os.getpid(), "x", 12345), (0, "x", 0), (1 << 22, "x", 0)]) == []
    assert [p.pid for p in processes.read([(os.getpid(), "x", 0)])] == [os.getpid()]


def test_names_with_parentheses_and_a_process_that_vanishes(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    rest = [
        "S",
        "1",
        "1",
        "1",
        "0",
        "-1",
        "0",
        "0",
        "0",
        "0",
        "0",
        "50",
        "25",
        "0",
        "0",
        "20",
        "0",
        "3",
        "0",
        "1000",
        "0",
        "256",
        "0",
    ]
    (tmp_path / "7" / "stat").write_text("7 (a) b (c)) " + " ".join(rest))
    (tmp_path / "8").mkdir()
    (tmp_path / "8" / "stat").write_text("garbage")
    (found,) = Processes(proc=tmp_path).read([(7, "x", 0), (8, "x", 0), (9, "x", 0)])
    assert (found.pid, found.state, found.threads, found.rss_bytes) == (7, "sleeping", 3, 256 * os.sysconf("SC_PAGE_SIZE"))
