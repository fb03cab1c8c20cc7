"""The worker's side against a real daemon: real leases, a real arena, real kill -9; only the engine is numpy here."""

import itertools
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.connector.attach import Links
from kvd.connector.fingerprint import salted
from kvd.connector.groups import Group
from kvd.connector.layout import GroupLayout, Lane
from kvd.connector.link import wait_up
from kvd.connector.metrics import Counters
from kvd.connector.mover import HostMover
from kvd.connector.plan import Load, Move, RankIdentity, Save
from kvd.connector.scheduler import Scheduler, Step
from kvd.connector.settings import read_settings
from kvd.connector.worker import Results, Worker
from kvd.errors import KvdError
from tests.kvd.connector.scheduler_bench import FakeRequest
from tests.support.daemon import Daemon, MakeDaemon
from tests.support.processes import wait_until

pytestmark = pytest.mark.real("kvd")

BLOCKS, PAGE, LAYERS = 64, 4096, 3
SALT = b"s" * 32


class Memory:
    """KV memory of an engine: per layer a region of blocks, one or two cache groups that overlay each other."""

    def __init__(self, groups: int = 1) -> None:
        self.bytes = np.zeros(LAYERS * BLOCKS * PAGE, dtype=np.uint8)
        layout = GroupLayout(tuple(Lane(layer * BLOCKS * PAGE, PAGE, PAGE) for layer in range(LAYERS)), BLOCKS)
        self.mover = HostMover(self.bytes, [layout] * groups)

    def block(self, block: int) -> np.ndarray:
        """A copy of all layers of one block."""
        return self.bytes.reshape(LAYERS, BLOCKS, PAGE)[:, block].copy()

    def fill(self, block: int, seed: int) -> np.ndarray:
        content = np.random.default_rng(seed).integers(0, 255, (LAYERS, PAGE), dtype=np.uint8)
        self.bytes.reshape(LAYERS, BLOCKS, PAGE)[:, block] = content
        return content


class Bench:
    """A worker on a memory, connected to a daemon."""

    def __init__(self, daemon: Daemon, groups: int = 1, **environ: str) -> None:
        self.memory = Memory(groups)
        self.counters = Counters()
        self.settings = read_settings({}, {"KVD_SOCKET": str(daemon.socket), **environ})
        self.links = Links(self.settings, self.counters)
        self.namespaces = [bytes([7, group]) * 16 for group in range(groups)]
        self.worker = Worker(
            self.namespaces,
            self.memory.mover,
            save_link=self.links.save(),
            load_link=self.links.load(),
            load_timeout_s=self.settings.load_timeout_s,
            counters=self.counters,
        )
        assert wait_up(self.links.save(), 5)
        assert wait_up(self.links.load(), 5)

    def outcome(self) -> Results:
        """Results of the next load to end."""
        found = Results()

        def ended() -> bool:
            fresh = self.worker.results(())
            found.received |= fresh.received
            found.failed |= fresh.failed
            found.bad_blocks |= fresh.bad_blocks
            return bool(found.received)

        wait_until(ended, timeout_s=20)
        return found

    def count(self, name: str) -> float:
        return self.counters.values()[name]


@pytest.fixture
def bench(kvd_daemon: MakeDaemon) -> Iterator[Any]:
    made: list[Bench] = []

    def make(daemon: Daemon | None = None, **how: Any) -> Bench:
        made.append(Bench(daemon or kvd_daemon(max_bytes="16MiB"), **how))
        return made[-1]

    yield make
    for one in made:
        one.worker.shutdown()


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def test_saved_blocks_come_back_in_other_places(bench: Any) -> None:
    one = bench()
    contents = {block: one.memory.fill(block, block) for block in (3, 4, 9, 20)}
    one.worker.save([Save("a", SALT, (Move(key(1), ((3, 4),)), Move(key(2), ((9, 20),))))])
    assert one.count("saves") == 2
    assert one.count("save_bytes") == 4 * LAYERS * PAGE
    one.worker.start([Load("b", SALT, (Move(key(1), ((30, 31),)), Move(key(2), ((0, 8),))))])
    assert one.outcome() == Results(received={"b"})
    for place, was in {30: 3, 31: 4, 8: 20}.items():
        assert np.array_equal(one.memory.block(place), contents[was])
    assert not one.memory.block(0).any(), "the null block is nobody's"
    wait_until(lambda: one.links.load().call(lambda client: client.stats())["tokens_active"] == 0, what="the load's pin to end")


def test_a_fenced_load_touches_no_block_before_the_steps_under_way_are_done(bench: Any) -> None:
    one = bench()
    content = one.memory.fill(1, 1)
    one.worker.save([Save("r", SALT, (Move(key(1), ((1,),)),))])
    entered, gate = threading.Event(), threading.Event()
    one.memory.mover.fence = lambda: lambda: entered.set() or gate.wait(20)
    load = Load("q", SALT, (Move(key(1), ((9,),)),))
    one.worker.start([load], fenced=True)
    assert entered.wait(20)
    # A step under way writes what nobody wants any more; then the load may begin.
    one.memory.fill(9, 2)
    assert not one.worker.results(()).received
    gate.set()
    assert not one.outcome().failed
    np.testing.assert_array_equal(one.memory.block(9), content)
    entered.clear()
    one.worker.start([load])
    assert not one.outcome().failed
    assert not entered.is_set(), "where the engine itself sees to it, nobody waits"


def test_what_is_stored_is_not_copied_again(bench: Any) -> None:
    one = bench()
    one.memory.fill(3, 1)
    save = Save("a", SALT, (Move(key(1), ((3,),)),))
    one.worker.save([save, save])
    assert (one.count("saves"), one.count("save_known")) == (1, 1)
    one.memory.fill(3, 2)
    one.worker.save([save])
    assert (one.count("saves"), one.count("save_known")) == (1, 2)


def test_salts_are_namespaces(bench: Any) -> None:
    one = bench()
    one.worker.save([Save("a", SALT, (Move(key(1), ((3,),)),))])
    one.worker.start([Load("b", b"o" * 32, (Move(key(1), ((30,),)),))])
    assert one.outcome().bad_blocks == {30}


def test_a_missing_chunk_spoils_what_comes_after_it_and_nothing_before(bench: Any) -> None:
    one = bench()
    for block in range(1, 7):
        one.memory.fill(block, block)
    one.worker.save([Save("a", SALT, (Move(key(1), ((1, 2),)), Move(key(3), ((5, 6),))))])
    moves = tuple(Move(key(n), ((10 * n, 10 * n + 1),)) for n in (1, 2, 3))
    one.worker.start([Load("b", SALT, moves)])
    assert one.outcome() == Results(received={"b"}, bad_blocks={20, 21, 30, 31})
    assert one.worker.report().failed == {"b": ("a chunk is gone", (key(2),))}
    assert np.array_equal(one.memory.block(10), one.memory.block(1))


def test_a_chunk_that_was_taken_away_is_named_with_what_became_of_it(kvd_daemon: MakeDaemon, bench: Any) -> None:
    daemon = kvd_daemon(max_bytes="16MiB")
    one = bench(daemon)
    one.memory.fill(1, 1)
    one.worker.save([Save("r", SALT, (Move(key(1), ((1,),)),))])
    with daemon.client(namespace=salted(one.namespaces[0], SALT)) as client:
        assert client.delete([key(1)]) == 1
    one.worker.start([Load("q", SALT, (Move(key(1), ((9,),)),))])
    one.outcome()
    why, keys = one.worker.report().failed["q"]
    assert (why.startswith("a chunk is gone: deleted by a client"), keys) == (True, (key(1),)), why


def test_with_two_groups_the_request_fails_as_a_whole(bench: Any) -> None:
    one = bench(groups=2)
    one.worker.save([Save("a", SALT, (Move(key(1), ((1, 2), (3,))),))])
    with one.links.load().call(lambda client: client.read([key(1)], namespace=salted(one.namespaces[1], SALT))) as lease:
        assert len(lease.views[0]) == LAYERS * PAGE
    one.links.load().call(lambda client: client.delete([key(1)], namespace=salted(one.namespaces[1], SALT)))
    one.worker.start([Load("b", SALT, (Move(key(1), ((10, 11), (13,))),))])
    assert one.outcome() == Results(received={"b"}, failed={"b"})


def test_a_group_that_needs_nothing_of_a_chunk_does_not_read_it(bench: Any) -> None:
    one = bench(groups=2)
    one.worker.save([Save("a", SALT, (Move(key(1), ((1, 2), (3,))),))])
    one.links.load().call(lambda client: client.delete([key(1)], namespace=salted(one.namespaces[1], SALT)))
    one.worker.start([Load("b", SALT, (Move(key(1), ((10, 11), (0,))),))])
    assert one.outcome() == Results(received={"b"})


def test_a_value_of_another_length_is_never_copied(bench: Any) -> None:
    one = bench()
    one.links.save().call(lambda client: client.put(key(1), b"x" * 9000, namespace=salted(one.namespaces[0], SALT)))
    one.worker.start([Load("b", SALT, (Move(key(1), ((10,),)),))])
    assert one.outcome().bad_blocks == {10}
    assert not one.memory.block(10).any()
    one.memory.fill(3, 1)
    one.worker.save([Save("b", SALT, (Move(key(1), ((3,),)),))])
    assert one.count("saves") == 0, "the daemon has it"
    one.worker.save([Save("b", SALT, (Move(key(1), ((3,),)),), anew=frozenset({key(1)}))])
    one.worker.start([Load("c", SALT, (Move(key(1), ((10,),)),))])
    assert one.outcome() == Results(received={"c"})
    assert np.array_equal(one.memory.block(10), one.memory.block(3))


def test_more_than_the_arena_holds_is_loaded_window_by_window(kvd_daemon: MakeDaemon, bench: Any) -> None:
    # 16 chunks of 48 KiB do not matter; 40 of 192 KiB through an arena of 4 MiB do.
    daemon = kvd_daemon(max_bytes="4MiB", tier="64MiB")
    one = bench(daemon)
    contents = {}
    for number in range(40):
        for block in range(1, 17):
            contents[number, block] = one.memory.fill(block, 100 * number + block)
        wait_until(
            lambda n=number: (
                one.worker.save([Save("a", SALT, (Move(key(n), (tuple(range(1, 17)),)),))])
                or one.count("saves") == n + 1
                or time.sleep(1.1)
            ),
            timeout_s=30,
        )
    with daemon.client() as client:
        client.flush(timeout_s=20)
    for number in range(0, 40, 13):
        one.worker.start([Load("b", SALT, tuple(Move(key(n), (tuple(range(33, 49)),)) for n in range(number + 1)))])
        assert one.outcome() == Results(received={"b"})
        for block in range(1, 17):
            assert np.array_equal(one.memory.block(32 + block), contents[number, block])


def test_a_doomed_load_fails_and_tells_why(bench: Any) -> None:
    one = bench()
    one.worker.start([Load("b", SALT, (), None, "planning failed")])
    assert one.outcome() == Results(received={"b"}, failed={"b"})
    assert one.worker.report().failed == {"b": ("planning failed", ())}


def test_a_cancelled_load_is_still_reported_once(bench: Any) -> None:
    one = bench()
    gate = threading.Event()
    fetch = one.worker._fetch
    one.worker._fetch = lambda job: (gate.wait(10), fetch(job))[1]
    one.worker.start([Load("b", SALT, (Move(key(1), ((10,),)),))])
    assert one.worker.results({"b"}) == Results()
    gate.set()
    assert one.outcome() == Results(received={"b"})
    assert one.worker.results({"b"}) == Results()


def test_a_dead_daemon_fails_loads_at_once_and_is_found_again(kvd_daemon: MakeDaemon, bench: Any) -> None:
    daemon = kvd_daemon(max_bytes="16MiB")
    one = bench(daemon)
    one.memory.fill(3, 1)
    save = Save("a", SALT, (Move(key(1), ((3,),)),))
    one.worker.save([save])
    daemon.kill9()
    begun = time.monotonic()
    one.worker.start([Load("b", SALT, (Move(key(1), ((10,),)),))])
    assert one.outcome().bad_blocks == {10}
    one.worker.save([save])
    assert time.monotonic() - begun < 1.0
    daemon.start()
    assert wait_up(one.links.save(), 10)
    assert wait_up(one.links.load(), 10)
    one.worker.save([save])
    one.worker.start([Load("c", SALT, (Move(key(1), ((10,),)),))])
    assert one.outcome() == Results(received={"c"})
    assert np.array_equal(one.memory.block(10), one.memory.block(3))


def test_a_stopped_daemon_holds_a_save_up_once(kvd_daemon: MakeDaemon, bench: Any) -> None:
    daemon = kvd_daemon(max_bytes="16MiB")
    one = bench(daemon, KVD_SAVE_TIMEOUT="200ms")
    daemon.signal(signal.SIGSTOP)
    try:
        begun = time.monotonic()
        for number in range(20):
            one.worker.save([Save("a", SALT, (Move(key(number), ((3,),)),))])
        assert time.monotonic() - begun < 1.0
        assert one.count("down") == 1
    finally:
        daemon.signal(signal.SIGCONT)
    assert wait_up(one.links.save(), 15)


def test_a_full_arena_pauses_saving_instead_of_slowing_every_step(kvd_daemon: MakeDaemon, bench: Any) -> None:
    daemon = kvd_daemon("--eviction-policy", "noop", max_bytes="1MiB")
    one = bench(daemon)
    for number in range(30):
        one.worker.save([Save("a", SALT, (Move(key(number), (tuple(range(1, 17)),)),))])
    assert 0 < one.count("saves") < 30
    assert one.count("saves") + one.count("save_failures") == 30, "each chunk counts, those that were not offered too"
    with daemon.client() as client:
        assert client.stats()["rejections_total"]["no_room"] == 1, "one refusal, then a pause"


def test_each_chunk_of_a_save_that_fails_is_counted_and_why_knows_the_reason(
    kvd_daemon: MakeDaemon, bench: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = kvd_daemon(max_bytes="1MiB")
    one = bench(daemon)
    moves = tuple(Move(key(number), ((number,),)) for number in range(1, 6))
    large = Move(key(9), (tuple([1] * 200),))
    one.worker.save([Save("a", SALT, moves), Save("b", SALT, (large,))])
    assert (one.count("saves"), one.count("save_failures")) == (5, 1)

    def refused(*_: Any) -> None:
        raise KvdError("the daemon had a bad day")

    later = Bench(daemon)
    with monkeypatch.context() as patch:
        patch.setattr(later.worker, "_write", refused)
        for start in range(0, 60, 3):
            later.worker.save([Save("a", SALT, tuple(Move(key(100 + start + i), ((1,),)) for i in range(3)))])
    later.worker.shutdown()
    assert (later.count("saves"), later.count("save_failures")) == (0, 60)
    assert caplog.text.count("saving failed: the daemon had a bad day") == 1
    with daemon.client() as client:
        (found,) = client.why([key(9), key(100), key(159)], namespaces=[salted(one.namespaces[0], SALT)]).notes
    assert [note[0].why for note in found[1:]] == ["the daemon had a bad day"] * 2
    assert found[0][0].why.startswith("no room: a value is larger than the arena")


def test_a_draining_daemon_is_left_in_peace(kvd_daemon: MakeDaemon, bench: Any) -> None:
    daemon = kvd_daemon(max_bytes="16MiB", tier="64MiB")
    one = bench(daemon)
    one.worker.save([Save("a", SALT, (Move(key(1), ((3,),)),))])
    ran = daemon.run("drain")
    assert ran.rc == 0, f"{ran.stderr}\n{daemon.text()}"
    one.worker.save([Save("a", SALT, (Move(key(2), ((3,),)),))])
    one.worker.start([Load("b", SALT, (Move(key(1), ((10,),)),))])
    assert one.outcome() == Results(received={"b"}), "what is stored can still be read"


@pytest.fixture(scope="module")
def shared_daemon(kvd_daemon_module: MakeDaemon) -> Daemon:
    return kvd_daemon_module(max_bytes="16MiB")


@settings(max_examples=12, deadline=None)
@given(
    requests=st.lists(
        st.tuples(st.integers(1, 30 * 32), st.lists(st.integers(1, 400), min_size=1, max_size=8)), min_size=2, max_size=4
    ),
    windowed=st.booleans(),
    chunk_blocks=st.integers(1, 5),
)
def test_whatever_is_asked_for_the_blocks_hold_what_was_computed(
    shared_daemon: Daemon, requests: list[tuple[int, list[int]]], windowed: bool, chunk_blocks: int
) -> None:
    """Scheduler and worker together against a daemon: prompts with shared prefixes, steps of any size, windows that slide."""
    groups = (Group(0, 32), Group(1, 32, window=70)) if windowed else (Group(0, 32),)
    one = Bench(shared_daemon, len(groups), KVD_CHUNK_TOKENS=str(32 * chunk_blocks))
    lookup = one.links.lookup()
    assert wait_up(lookup, 5)
    nobody = uuid.uuid4().hex  # a hash seed that no example before had: each starts with nothing stored
    model = Scheduler(one.settings, groups, lookup, hash_tokens=32, hash_source=lambda: ("sha256", nobody))
    assert model.introduce([RankIdentity(tuple(one.namespaces), {}, model.chunk)], 1) == ""
    try:
        longest = 0
        for number, (tokens, steps) in enumerate(requests):
            hit = _one_request(one, model, groups, FakeRequest(f"r{number}", tokens), steps)
            if tokens <= longest and not windowed and chunk_blocks == 1:
                assert hit == (tokens - 1) // 32 * 32, "with one-block chunks everything computed before is found"
            longest = max(longest, tokens // 32 * 32)
    finally:
        lookup.close()
        one.worker.shutdown()


def _one_request(one: Bench, model: Scheduler, groups: tuple[Group, ...], request: FakeRequest, steps: list[int]) -> int:
    """Load what is offered, compute the rest step by step, and check every block that the engine could read. The hit."""
    # Equal hashes for equal places: every prompt here is a prefix of the longest. Groups own disjoint blocks.
    name, tokens = request.request_id, request.num_tokens
    whole = -(-tokens // 32)
    tables = [list(range(1 + 31 * g, 1 + 31 * g + whole)) for g in range(len(groups))]
    one.memory.bytes[:] = 0
    hit = model.match(request, 0)
    assert hit is not None
    assert hit < tokens
    for group, table in zip(groups, tables, strict=True):
        for i in range(group.first_needed(hit) if hit else 0):
            table[i] = 0
    if hit:
        model.allocated(request, tables, hit)
        one.worker.start(model.plan([], lambda _: None).loads)
        assert one.outcome() == Results(received={name})
        model.heard([name], [], one.worker.report())
    computed = hit
    for step in itertools.cycle(steps):
        for group, table in zip(groups, tables, strict=True):
            # What lies below a window is the engine's to use again.
            for i in range(max(0, computed - group.window) // 32 if group.window else 0):
                table[i] = 0
            for i in range(computed // 32):
                assert not table[i] or (one.memory.block(table[i]) == _content(group.id, i)).all(), f"{group} block {i} of {name}"
        if computed >= tokens:
            break
        done = min(computed + step, tokens)
        for group, table in zip(groups, tables, strict=True):
            for i in range(computed // 32, -(-done // 32)):
                one.memory.bytes.reshape(LAYERS, BLOCKS, PAGE)[:, table[i]] = _content(group.id, i)
        plan = model.plan([Step(name, computed, done - computed)], lambda _: tables)
        one.worker.save(plan.saves)
        computed = done
    model.finished(name)
    assert one.count("save_failures") == 0
    return hit


def _content(group: int, index: int) -> int:
    """What the engine computes for block `index` of a prefix: the same for every request here."""
    return 1 + (group * 97 + index * 3) % 250


def test_a_chunk_of_another_length_ends_the_load_and_those_before_it_are_there(bench: Any) -> None:
    one = bench()
    contents = [one.memory.fill(block, block) for block in (1, 2)]
    one.worker.save([Save("r", SALT, (Move(key(1), ((1,),)), Move(key(2), ((2,),))))])
    one.links.load().call(lambda client: client.put(key(3), b"x" * 5000, namespace=salted(one.namespaces[0], SALT)))
    one.worker.start([Load("q", SALT, tuple(Move(key(n), ((10 + n,),)) for n in (1, 2, 3, 4)))])
    results = one.outcome()
    assert results.bad_blocks == {13, 14}
    for number, content in zip((1, 2), contents, strict=True):
        np.testing.assert_array_equal(one.memory.block(10 + number), content)


def test_large_windows_are_copied_by_two_threads_and_come_back_the_same(kvd_daemon: MakeDaemon) -> None:
    daemon = kvd_daemon(max_bytes="64MiB")
    layout = GroupLayout((Lane(0, 1 << 20, 1 << 20), Lane(64 << 20, 1 << 20, 1 << 20)), 64)
    memory = np.random.default_rng(3).integers(0, 255, 128 << 20, dtype=np.uint8)
    before = memory.reshape(2, 64, 1 << 20).copy()
    settings = read_settings({}, {"KVD_SOCKET": str(daemon.socket)})
    links = Links(settings, Counters())
    worker = Worker([b"n" * 32], HostMover(memory, [layout]), save_link=links.save(), load_link=links.load())
    assert wait_up(links.save(), 5)
    assert wait_up(links.load(), 5)
    chunks = [tuple(range(1 + 2 * n, 3 + 2 * n)) for n in range(12)]
    worker.save([Save("r", SALT, tuple(Move(key(n), (ids,)) for n, ids in enumerate(chunks)))])
    moves = tuple(Move(key(n), (tuple(block + 30 for block in ids),)) for n, ids in enumerate(chunks))
    worker.start([Load("q", SALT, moves)])
    wait_until(lambda: "q" in worker.results(()).received)
    after = memory.reshape(2, 64, 1 << 20)
    np.testing.assert_array_equal(after[:, 31:55], before[:, 1:25])
    np.testing.assert_array_equal(after[:, :31], before[:, :31])
    worker.shutdown()


def test_a_load_that_passes_its_deadline_fails_from_where_it_was(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvd.connector.worker.WINDOW_BYTES", LAYERS * PAGE)  # a chunk a window
    one = bench(KVD_LOAD_TIMEOUT="30s")
    for number in range(1, 6):
        one.memory.fill(number, number)
    one.worker.save([Save("r", SALT, tuple(Move(key(n), ((n,),)) for n in range(1, 6)))])
    now = [1000.0]
    monkeypatch.setattr(one.worker, "_clock", lambda: now[0])
    scatter = one.memory.mover.scatter

    def slow(*arguments: Any) -> None:
        scatter(*arguments)
        now[0] += 11

    monkeypatch.setattr(one.memory.mover, "scatter", slow)
    one.worker.start([Load("q", SALT, tuple(Move(key(n), ((10 + n,),)) for n in range(1, 6)))])
    assert one.outcome().bad_blocks == {14, 15}, "three windows fit 30 s"
    np.testing.assert_array_equal(one.memory.block(13), one.memory.block(3))
    assert one.worker.report().failed["q"][0] == "the deadline passed"


def test_a_lease_that_is_lost_while_it_is_copied_fails_all_of_its_blocks(
    bench: Any, kvd_daemon: MakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = kvd_daemon(max_bytes="16MiB")
    one = bench(daemon)
    for number in (1, 2):
        one.memory.fill(number, number)
    one.worker.save([Save("r", SALT, tuple(Move(key(n), ((n,),)) for n in (1, 2)))])
    scatter = one.memory.mover.scatter

    def last(group: int, ids: Any, source: Any) -> None:
        scatter(group, ids, source)
        if 12 in ids:
            daemon.kill9()  # every byte is copied, and nobody can say any more whether they were still those

    monkeypatch.setattr(one.memory.mover, "scatter", last)
    one.worker.start([Load("q", SALT, tuple(Move(key(n), ((10 + n,),)) for n in (1, 2)))])
    assert one.outcome().bad_blocks == {11, 12}
