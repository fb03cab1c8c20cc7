"""Chunks past the daemon: a worker, a real daemon with a disk tier, real files; hipFile and cuFile by the stand-in library."""

import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvd.connector.attach import Links
from kvd.connector.direct import Direct, Staging
from kvd.connector.direct_io import DirectError, PosixIO, host_buffer
from kvd.connector.direct_setup import Roots, StartRefused, set_up
from kvd.connector.fingerprint import salted
from kvd.connector.link import wait_up
from kvd.connector.metrics import Counters
from kvd.connector.plan import Load, Move, Save
from kvd.connector.settings import read_settings
from kvd.connector.worker import Results, Worker
from tests.kvd.connector.gds import StandIn, built, standin
from tests.kvd.connector.test_connector_worker import LAYERS, PAGE, SALT, Memory, key
from tests.support.daemon import Daemon, MakeDaemon
from tests.support.processes import wait_until

__all__ = ["built", "standin"]

pytestmark = pytest.mark.real("kvd")

VALUE = 4 * LAYERS * PAGE


class Bench:
    """A worker that moves chunks of four blocks past the daemon, where that works."""

    def __init__(self, daemon: Daemon, groups: int = 1, **environ: str) -> None:
        self.memory = Memory(groups)
        self.counters = Counters()
        self.settings = read_settings({}, {"KVD_SOCKET": str(daemon.socket), "KVD_AIS": "auto", **environ})
        self.links = Links(self.settings, self.counters)
        self.namespaces = [bytes([7, group]) * 16 for group in range(groups)]
        try:
            self.direct = set_up(
                self.settings, self.memory.mover, None, self.links.direct(), longest=lambda: VALUE, counters=self.counters
            )
        except BaseException:
            self.links.close()
            raise
        self.worker = Worker(
            self.namespaces,
            self.memory.mover,
            save_link=self.links.save(),
            load_link=self.links.load(),
            counters=self.counters,
            direct=self.direct,
            direct_link=self.links.direct(),
        )
        assert wait_up(self.links.save(), 5)
        assert wait_up(self.links.load(), 5)
        self.there = daemon.client(namespace=salted(self.namespaces[0], SALT))

    def close(self) -> None:
        self.worker.shutdown()
        self.links.close()
        self.there.close()

    def count(self, name: str) -> float:
        return self.counters.values()[name]

    def fell_back(self) -> dict[str, int]:
        return {
            name.partition("/")[2]: int(n)
            for name, n in self.counters.values().items()
            if name.startswith("direct_fallback/") and n
        }

    def save(self, *numbers: int, wait: bool = True, **how: Any) -> list[np.ndarray]:
        """Fill four blocks a number and store them as chunk `number`; their content."""
        contents = []
        moves = []
        for number in numbers:
            ids = tuple(range(1 + 4 * (number % 12), 5 + 4 * (number % 12)))
            contents.append(np.stack([self.memory.fill(block, 100 * number + block) for block in ids]))
            moves.append(Move(key(number), (ids,) * len(self.namespaces)))
        self.worker.save([Save("r", SALT, tuple(moves), **how)])
        # Nothing of what is saved is read from the blocks once `save` has returned: the engine may use them again.
        for move in moves:
            for block in move.blocks[0]:
                self.memory.fill(block, 999)
        if wait:
            wait_until(lambda: all(self.there.exists([key(number) for number in numbers])), what="the saves to land")
        return contents

    def load(self, *numbers: int, doomed: str = "") -> tuple[Results, list[np.ndarray]]:
        """Load chunks into other blocks."""
        moves = [
            Move(key(number), (tuple(range(5 + 4 * place, 9 + 4 * place)),) * len(self.namespaces))
            for place, number in enumerate(numbers)
        ]
        self.worker.start([Load("q", SALT, tuple(moves), None, doomed)])
        results = Results()

        def ended() -> bool:
            fresh = self.worker.results(())
            results.received |= fresh.received
            results.failed |= fresh.failed
            results.bad_blocks |= fresh.bad_blocks
            return bool(results.received)

        wait_until(ended, timeout_s=30)
        return results, [np.stack([self.memory.block(block) for block in move.blocks[0]]) for move in moves]


Make = Callable[..., Bench]


@pytest.fixture
def bench(kvd_daemon: MakeDaemon) -> Iterator[Make]:
    made: list[Bench] = []

    def make(daemon: Daemon | None = None, **how: Any) -> Bench:
        made.append(Bench(daemon or kvd_daemon(max_bytes="8MiB", tier="64MiB"), **how))
        return made[-1]

    yield make
    for one in made:
        one.close()


def backend(name: str, standin: StandIn) -> dict[str, str]:
    return {"KVD_DIRECT_BACKEND": name, **({"KVD_DIRECT_LIBRARY": standin.path} if name != "posix" else {})}


def tier(one: Bench) -> dict[str, Any]:
    found: dict[str, Any] = one.there.stats()["tiers"][0]
    return found


@pytest.mark.parametrize("name", ["posix", "cufile", "hipfile"])
@pytest.mark.parametrize("checksum", ["0", "1"])
def test_chunks_go_to_files_and_come_back_without_the_arena(bench: Make, standin: StandIn, name: str, checksum: str) -> None:
    one = bench(**backend(name, standin), KVD_DIRECT_CHECKSUM=checksum)
    contents = one.save(0, 1, 2)
    results, found = one.load(2, 0, 1)
    assert (results.failed, results.bad_blocks) == (set(), set())
    for there, back in zip([contents[2], contents[0], contents[1]], found, strict=True):
        np.testing.assert_array_equal(back, there)
    assert (one.count("direct_save_bytes"), one.count("direct_load_bytes")) == (3 * VALUE, 3 * VALUE)
    assert one.fell_back() == {}
    stats = one.there.stats()
    assert (stats["entries"], stats["promotions_total"]) == (0, 0), "the arena was not involved"
    assert tier(one)["direct_stores_total"] == tier(one)["direct_loads_total"] == 3
    assert tier(one)["unchecked_total"] == (3 if checksum == "0" else 0)
    assert standin["unregistered"] == 0, "no transfer of memory that is not registered"


def test_a_restart_of_everything_keeps_them(bench: Make, kvd_daemon: MakeDaemon) -> None:
    daemon = kvd_daemon(max_bytes="8MiB", tier="64MiB")
    contents = bench(daemon).save(0, 1)
    daemon.restart(kill=True)
    two = bench(daemon)
    results, found = two.load(0, 1)
    assert not results.failed
    np.testing.assert_array_equal(found, contents)
    assert two.count("direct_load_bytes") == 2 * VALUE


def test_an_engine_without_gpu_direct_reads_what_one_with_it_wrote_and_the_other_way_round(
    bench: Make, kvd_daemon: MakeDaemon
) -> None:
    daemon = kvd_daemon(max_bytes="8MiB", tier="64MiB")
    with_it, without = bench(daemon), bench(daemon, KVD_AIS="off")
    assert without.direct is None
    contents = with_it.save(0) + without.save(1)
    without.there.flush()
    for one in (with_it, without):
        results, found = one.load(0, 1)
        assert not results.failed
        np.testing.assert_array_equal(found, contents)
    assert with_it.count("direct_load_bytes") == VALUE, "the other one is in the arena, where it is quicker to get"
    assert without.count("direct_load_bytes") == 0


def test_what_is_in_the_arena_only_comes_from_there(bench: Make) -> None:
    one = bench()
    contents = one.save(0) + one.save(1, retention="ephemeral")
    results, found = one.load(0, 1)
    assert not results.failed
    np.testing.assert_array_equal(found, contents)
    assert (one.count("direct_load_bytes"), one.count("load_bytes")) == (VALUE, 2 * VALUE)


def test_several_groups(bench: Make) -> None:
    one = bench(groups=2)
    contents = one.save(0)
    results, found = one.load(0)
    assert not results.failed
    np.testing.assert_array_equal(found, contents)
    assert one.count("direct_load_bytes") == 2 * VALUE


def test_a_chunk_on_its_way_is_not_saved_twice(bench: Make, standin: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    one = bench()
    gate = threading.Event()
    assert one.direct is not None
    write = one.direct.io.write
    monkeypatch.setattr(one.direct.io, "write", lambda *arguments: gate.wait(20) and write(*arguments))
    one.save(0, wait=False)
    one.save(0, wait=False)
    gate.set()
    wait_until(lambda: one.there.exists([key(0)])[0])
    assert tier(one)["direct_stores_total"] == 1


def test_a_slow_disk_holds_up_no_step_the_arena_takes_what_comes_meanwhile(bench: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    one = bench(KVD_DIRECT_STAGING="1MiB")
    gate = threading.Event()
    assert one.direct is not None
    monkeypatch.setattr(one.direct.io, "sync", lambda file: gate.wait(20))
    numbers = range(11)
    contents = [one.save(number, wait=False)[0] for number in numbers] + []
    many = [one.save(number, wait=False)[0] for number in range(11, 24)]
    assert one.fell_back().get("no_buffer", 0) > 0
    gate.set()
    wait_until(lambda: all(one.there.exists([key(number) for number in range(24)])))
    results, found = one.load(*range(12))
    assert not results.failed
    np.testing.assert_array_equal(found, [*contents, many[0]])


@pytest.mark.parametrize("fault", ["io_error", "errno"])
def test_a_failing_device_sends_chunks_through_the_arena_and_says_so_once(
    bench: Make, standin: StandIn, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    one = bench(**backend("hipfile", standin))
    contents = one.save(0)
    standin[fault] = 5034 if fault == "io_error" else 5
    reason = "io_disabled" if fault == "io_error" else "io_error"
    with caplog.at_level(logging.WARNING, "vllm.kvd"):
        contents += one.save(1) + one.save(2)
        results, found = one.load(0, 1, 2)
    assert not results.failed
    np.testing.assert_array_equal(found, contents)
    assert set(one.fell_back()) == {reason}
    assert one.fell_back()[reason] >= 3
    said = [record.message for record in caplog.records if "GPU-direct" in record.message]
    assert len(said) == 1
    assert "kvdoctor: " in said[0], "with what kvdoctor knows of this host"


def test_a_checksum_that_does_not_match_is_never_loaded(bench: Make, kvd_daemon: MakeDaemon) -> None:
    daemon = kvd_daemon(max_bytes="8MiB", tier="64MiB")
    one = bench(daemon, KVD_DIRECT_CHECKSUM="1")
    one.save(0)
    with one.there.direct_read([key(0)]) as held:
        (extent,) = held.extents
    assert extent is not None
    with (daemon.tier / extent.name).open("r+b") as file:
        file.seek(extent.offset + 1000)
        file.write(b"?")
    results, _ = one.load(0)
    assert results.received == {"q"}
    assert results.bad_blocks == {5, 6, 7, 8}
    assert one.fell_back() == {"corrupt": 1}
    assert one.there.exists([key(0)]) == [False], "the daemon found it damaged too, when the arena asked for it"


def test_a_lease_that_ends_while_it_is_read_fails_the_load(
    bench: Make, kvd_daemon: MakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = kvd_daemon(max_bytes="8MiB", tier="64MiB")
    one = bench(daemon)
    one.save(0)
    assert one.direct is not None
    read = one.direct.io.read

    def late(*arguments: Any) -> None:
        read(*arguments)
        daemon.kill9()

    monkeypatch.setattr(one.direct.io, "read", late)
    results, _ = one.load(0)
    assert results.bad_blocks == {5, 6, 7, 8}


def test_no_tier_is_said_and_served_without(bench: Make, kvd_daemon: MakeDaemon, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "vllm.kvd"):
        one = bench(kvd_daemon(max_bytes="8MiB"))
    assert one.direct is None
    assert one.fell_back() == {"no_tier": 1}
    assert "no GPU-direct (posix): the daemon lends no room: no_tier" in caplog.text
    contents = one.save(0)
    np.testing.assert_array_equal(one.load(0)[1], contents)


@pytest.mark.parametrize(
    ("environ", "word"),
    [
        ({"KVD_DIRECT_BACKEND": "cufile", "KVD_DIRECT_LIBRARY": "/nowhere/libcufile.so"}, "no library"),
        ({"KVD_DIRECT_ROOTS": "/tmp"}, "no folder of the daemon's disk tier"),
    ],
)
def test_required_but_impossible_is_an_error_at_the_start(bench: Make, environ: dict[str, str], word: str) -> None:
    with pytest.raises(StartRefused, match="KVD_AIS=require, but GPU-direct") as caught:
        bench(KVD_AIS="require", **environ)
    assert word in str(caught.value)
    assert "KVD_AIS=auto" in str(caught.value.hint)


def test_required_and_no_daemon_is_an_error_at_the_start(kvd_daemon: MakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvd.connector.direct_setup.WAIT_S", 0.2)
    daemon = kvd_daemon(start=False)
    settings = read_settings({}, {"KVD_SOCKET": str(daemon.socket), "KVD_AIS": "require"})
    links = Links(settings, Counters())
    with pytest.raises(StartRefused, match="does not answer"):
        set_up(settings, Memory().mover, None, links.direct(), longest=lambda: VALUE, counters=Counters())
    links.close()


def test_a_device_that_loses_what_it_was_given_is_found_out_at_the_start(
    bench: Make, standin: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PosixIO, "write", lambda *arguments: None)
    one = bench()
    assert one.direct is None
    assert one.fell_back() == {"corrupt": 1}


def test_folders_that_lie_elsewhere_here_are_found_by_device_and_inode(bench: Make, kvd_daemon: MakeDaemon, tmp_path: Path) -> None:
    """As in a container that has the same folders mounted elsewhere."""
    words = [word for name in "ab" for word in ("--long-path", str(tmp_path / name))]
    daemon = kvd_daemon(*words, "--long-bytes", "64MiB", max_bytes="8MiB")
    elsewhere = tmp_path / "mounts"
    elsewhere.mkdir()
    for name in "ab":
        (elsewhere / name).symlink_to(tmp_path / name)
    one = bench(daemon, KVD_DIRECT_ROOTS=f"long={elsewhere / 'b'},{elsewhere / 'a'}")
    assert Roots(one.settings.direct_roots or ())(one.there) == [elsewhere / "a", elsewhere / "b"]
    contents = one.save(*range(12))
    results, found = one.load(*range(12))
    assert not results.failed
    np.testing.assert_array_equal(found, contents)
    assert one.count("direct_load_bytes") == 12 * VALUE
    with one.there.direct_read([key(number) for number in range(12)]) as held:
        assert {extent.root for extent in held.extents if extent is not None} == {0, 1}, "striped over both"


def test_one_folder_that_is_not_named_goes_through_the_arena(bench: Make, kvd_daemon: MakeDaemon, tmp_path: Path) -> None:
    words = [word for name in "ab" for word in ("--long-path", str(tmp_path / name))]
    daemon = kvd_daemon(*words, "--long-bytes", "64MiB", max_bytes="8MiB")
    for name in "ab":  # the trial may meet the folder that is not named: then nothing goes past the daemon
        one = bench(daemon, KVD_DIRECT_ROOTS=str(tmp_path / name))
        contents = one.save(*range(12))
        results, found = one.load(*range(12))
        assert not results.failed
        np.testing.assert_array_equal(found, contents)
        assert set(one.fell_back()) == {"unknown_root"}
        one.there.clear()


def test_buffers_are_a_fixed_number() -> None:
    made = []

    def make(size: int) -> Any:
        made.append(size)
        return host_buffer(size)

    staging = Staging(PosixIO(), make, 5000, 2)
    assert staging.size == 8192
    first, second = staging.take(0), staging.take(0)
    assert first is not None
    assert second is not None
    assert staging.take(0) is None
    threading.Timer(0.05, staging.give, [first]).start()
    assert staging.take(10) is first
    assert made == [8192, 8192]


def test_a_buffer_that_cannot_be_made_may_be_tried_again(standin: StandIn) -> None:
    from kvd.connector.direct_io import LibraryIO

    staging = Staging(LibraryIO("cufile", standin.path), host_buffer, 4096, 1)
    standin["buffer_error"] = 5036
    with pytest.raises(DirectError) as caught:
        staging.take(0)
    assert caught.value.reason == "pinning_failed"
    standin["buffer_error"] = 0
    assert staging.take(0) is not None


def test_the_earlier_names_are_understood(tmp_path: Path) -> None:
    settings = read_settings({}, {"INFERA_KVD_AIS": "1", "INFERA_KVD_HIPFILE_ROOTS": f"long={tmp_path}"})
    assert settings.ais == "auto"
    assert settings.direct_roots == (tmp_path,)
    assert any("INFERA_KVD_AIS" in notice and "means auto" in notice for notice in settings.notices)
    assert any("KVD_DIRECT_ROOTS" in notice for notice in settings.notices)
    for word, meaning in (("off", "off"), ("0", "off"), ("auto", "auto"), ("require", "require"), ("Yes", "auto")):
        assert read_settings({}, {"KVD_AIS": word}).ais == meaning
    assert read_settings({}, {}).ais == "off"


def test_nothing_is_left_open(bench: Make) -> None:
    before = len(os.listdir("/proc/self/fd"))
    one = bench()
    one.save(0, 1)
    one.load(0, 1)
    one.close()
    assert isinstance(one.direct, Direct)
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_chunk_goes_to_its_file_only_when_the_device_has_collected_it(bench: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    one = bench(KVD_DIRECT_BACKEND="posix")
    assert one.direct is not None
    order: list[str] = []
    for part, name in ((one.direct._mover, "settle"), (one.direct.io, "write")):
        called = getattr(part, name)
        monkeypatch.setattr(part, name, lambda *given, n=name, call=called: order.append(n) or call(*given))
    one.save(1)
    assert order == ["settle", "write"]
