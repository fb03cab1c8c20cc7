"""The scheduler's side: what is offered, planned and remembered, request by request, without an engine."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kvd.connector import parameters
from kvd.connector.groups import Group
from kvd.connector.plan import RankIdentity, Report
from kvd.connector.scheduler import ANSWER_S, DEFER_S, Scheduler
from kvd.connector.seldom import PAUSE_S
from kvd.connector.settings import read_settings
from tests.kvd.connector.scheduler_bench import FULL, WINDOW, Bench, FakeRequest
from tests.kvd.connector.test_connector_keys import hashes
from tests.support.processes import wait_until


@pytest.mark.parametrize(
    ("stored", "asked", "hit"),
    [
        (1000, 1000, 992),  # the tail chunk
        (1000, 1001, 992),
        (1024, 1024, 992),  # never the last token, though the last chunk covers it
        (1024, 1025, 1024),
        (600, 1000, 576),  # the tail of a shorter prompt that began like this one
        (1000, 600, 512),  # a longer prompt's chunk is no help for half of it
        (31, 31, 0),
        (33, 33, 32),
        (256, 256, 224),
    ],
)
@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW)], ids=["full", "windowed"])
def test_a_hit_is_what_the_engines_own_cache_would_cover(
    bench: Any, groups: tuple[Group, ...], stored: int, asked: int, hit: int
) -> None:
    one = bench(*groups)
    one.compute(FakeRequest("a", stored))
    assert one.scheduler.match(FakeRequest("b", asked), 0) == hit


def test_a_hit_counts_from_what_the_engine_has(bench: Any) -> None:
    one = bench()
    one.compute(FakeRequest("a", 1000))
    assert one.scheduler.match(FakeRequest("b", 1000), 320) == 672
    assert one.scheduler.match(FakeRequest("c", 1000), 992) == 0


@pytest.mark.parametrize("leave_out", [0, 1, 2, 3])
def test_all_groups_of_all_ranks_hit_together_or_not_at_all(bench: Any, leave_out: int) -> None:
    one = bench(FULL, WINDOW, ranks=2)
    one.compute(FakeRequest("a", 1000), leave_out=leave_out)
    assert one.scheduler.match(FakeRequest("b", 1000), 0) == 0


def test_a_gap_ends_the_hit(bench: Any) -> None:
    one = bench()
    one.compute(FakeRequest("a", 1024))
    gone = min(one.client.values)
    tracked = one.scheduler.arrived(FakeRequest("b", 1024))
    order = [tracked.keys.of(span) for span in tracked.keys.spans(0, 1024)]
    del one.client.values[gone]
    assert one.scheduler.match(tracked.request, 0) == 256 * order.index(gone[1])


def test_the_answer_is_kept_for_a_second(bench: Any) -> None:
    one = bench()
    one.compute(FakeRequest("a", 1024))
    request = FakeRequest("b", 1024)
    for _ in range(50):
        assert one.scheduler.match(request, 0) == 992
    assert one.client.calls["prefix"] == 1
    one.now += ANSWER_S + 0.1
    one.client.values.clear()
    assert one.scheduler.match(request, 0) == 0


def test_a_full_hit_is_one_round_trip_and_a_miss_at_most_two(bench: Any) -> None:
    one = bench()
    one.compute(FakeRequest("a", 1024))
    one.scheduler.match(FakeRequest("a", 1024), 0)
    one.client.calls.clear()
    one.scheduler.match(FakeRequest("b", 1024), 0)
    assert sum(one.client.calls.values()) == 1
    one.client.calls.clear()
    one.scheduler.match(FakeRequest("c", 1024, salt="cold"), 0)
    assert sum(one.client.calls.values()) == 2


def test_a_daemon_that_is_gone_is_no_hit_and_asked_no_more(bench: Any) -> None:
    one = bench()
    one.compute(FakeRequest("a", 1024))
    one.client.away = True
    assert one.scheduler.match(FakeRequest("b", 1024), 0) == 0
    asked = sum(one.client.calls.values())
    assert one.scheduler.match(FakeRequest("c", 1024), 0) == 0
    assert sum(one.client.calls.values()) <= asked + 2, "the link's own search, no more"
    assert one.run(FakeRequest("c", 1024), 0, 1024).saves == [], "nothing is saved to a daemon that is not there"
    one.client.away = False
    wait_until(lambda: one.link.up, timeout_s=5)
    assert one.scheduler.match(FakeRequest("d", 1024), 0) == 992


def test_chunks_are_saved_in_the_step_that_completes_them(bench: Any) -> None:
    one = bench()
    request = FakeRequest("a", 1000)
    one.scheduler.arrived(request)
    sizes = []
    for computed, scheduled in [(0, 200), (200, 200), (400, 400), (800, 200)]:
        plan = one.run(request, computed, scheduled)
        sizes.append([len(move.blocks[0]) for save in plan.saves for move in save.moves])
    assert sizes == [[], [8], [8, 8], [7]]
    assert [block for save in plan.saves for move in save.moves for block in move.blocks[0]] == list(range(1024, 1031))


def test_decoding_saves_a_chunk_when_its_last_token_is_computed(bench: Any) -> None:
    one = bench()
    request = FakeRequest("a", 250)
    one.compute(request)
    saved = []
    for tokens in range(251, 260):
        request.num_tokens = tokens
        request.block_hashes = one.scheduler.arrived(request).keys.hashes
        if tokens == 256:
            one.scheduler.arrived(request).keys.hashes += hashes(256)[7:]
        if one.run(request, tokens - 1, 1).saves:
            saved.append(tokens)
    assert saved == [256]


def test_hashes_that_lag_behind_are_waited_for(bench: Any) -> None:
    # With asynchronous scheduling tokens are in flight before their block has a hash.
    one = bench()
    request = FakeRequest("a", 512)
    whole, request.block_hashes[8:] = list(request.block_hashes), []
    one.scheduler.arrived(request)
    assert len(one.run(request, 0, 512).saves[0].moves) == 1
    request.block_hashes += whole[8:]
    assert len(one.run(request, 512, 1).saves[0].moves) == 1


def test_what_a_look_up_found_is_not_saved_again(bench: Any) -> None:
    one = bench()
    one.compute(FakeRequest("a", 1024))
    longer = FakeRequest("b", 1300)
    assert one.scheduler.match(longer, 0) == 1024
    one.scheduler.allocated(longer, [list(range(1, 42))], 1024)
    plan = one.run(longer, 1024, 276)
    assert [len(move.blocks[0]) for save in plan.saves for move in save.moves] == [8]


def test_windows_that_the_engine_gave_up_are_not_saved(bench: Any) -> None:
    one = bench(FULL, WINDOW)
    request = FakeRequest("a", 1024)
    one.scheduler.arrived(request)
    # A local hit of 992 tokens: the window's blocks before its reach are the null block.
    table = [list(range(1, 33)), [0] * 27 + [50, 51, 52, 53, 54]]
    plan = one.run(request, 992, 32, table)
    moves = [move for save in plan.saves for move in save.moves]
    assert [move.blocks for move in moves if len(move.blocks[0]) == 8] == [((25, 26, 27, 28, 29, 30, 31, 32), (51, 52, 53, 54))]


def test_a_load_names_only_blocks_the_engine_lacks(bench: Any) -> None:
    one = bench()
    one.compute(FakeRequest("a", 1000))
    request = FakeRequest("b", 1000)
    assert one.scheduler.match(request, 320) == 672
    one.scheduler.allocated(request, [list(range(1, 33))], 672)
    (load,) = one.run(request, 0, 0).loads
    assert [move.blocks[0] for move in load.moves] == [
        (0, 0, 11, 12, 13, 14, 15, 16),
        tuple(range(17, 25)),
        tuple(range(25, 32)),
    ]
    assert load.token is None, "the load pins for itself"


def test_a_windowed_load_reads_only_the_windows_reach(bench: Any) -> None:
    one = bench(FULL, WINDOW)
    one.compute(FakeRequest("a", 1500))
    request = FakeRequest("b", 1500)
    assert one.scheduler.match(request, 0) == 1472
    one.scheduler.allocated(request, [list(range(1, 47)), [0] * 42 + [61, 62, 63, 64]], 1472)
    (load,) = one.run(request, 0, 0).loads
    assert [any(move.blocks[1]) for move in load.moves] == [False] * 5 + [True]
    assert load.moves[-1].blocks[1] == (61, 62, 63, 64)


@pytest.mark.parametrize(
    ("table", "external", "why"),
    [([list(range(1, 10))], 992, "fewer blocks"), ([list(range(1, 60))], 1024, "were offered")],
)
def test_a_load_that_cannot_be_planned_is_reported_all_the_same(bench: Any, table: Any, external: int, why: str) -> None:
    one = bench()
    one.compute(FakeRequest("a", 1000))
    request = FakeRequest("b", 1000)
    one.scheduler.match(request, 0)
    one.scheduler.allocated(request, table, external)
    (load,) = one.run(request, 0, 0).loads
    assert why in load.doomed


def test_when_planning_fails_accepted_loads_are_still_handed_on(bench: Any) -> None:
    one = bench()
    one.compute(FakeRequest("a", 1000))
    request = FakeRequest("b", 1000)
    one.scheduler.match(request, 0)
    one.scheduler.allocated(request, [list(range(1, 33))], 992)
    (load,) = one.scheduler.doomed().loads
    assert (load.request_id, bool(load.doomed)) == ("b", True)


def test_a_request_whose_load_failed_is_never_offered_a_hit_again(bench: Any) -> None:
    one = bench()
    one.compute(FakeRequest("a", 1024))
    request = FakeRequest("b", 1024)
    assert one.scheduler.match(request, 0) == 992
    one.scheduler.allocated(request, [list(range(1, 33))], 992)
    (load,) = one.run(request, 0, 0).loads
    bad = load.moves[1].key
    one.scheduler.heard(["b"], ["b"], Report({"b": ("a chunk is gone", (bad,))}))
    assert one.scheduler.match(request, 0) == 0
    assert one.scheduler.match(FakeRequest("c", 1024), 0) == 256, "and the bad chunk is not offered to others for a while"
    plan = one.run(request, 0, 1024)
    assert len(plan.saves[0].moves) == 4, "what is recomputed is offered to the daemon again"
    assert plan.saves[0].anew == {bad}
    one.now += 60
    one.scheduler.finished("b")
    assert one.scheduler.match(FakeRequest("b", 1024), 0) == 992, "a later request of the same name starts afresh"


def test_the_second_request_of_a_prefix_waits_for_the_first_ones_load(bench: Any) -> None:
    one = bench()
    one.compute(FakeRequest("a", 1024))
    first, second = FakeRequest("b", 1024), FakeRequest("c", 1024)
    one.scheduler.match(first, 0)
    one.scheduler.allocated(first, [list(range(1, 33))], 992)
    assert one.scheduler.match(second, 0) is None
    one.scheduler.heard(["b"], [], Report())
    assert one.scheduler.match(second, 992) == 0, "by then the engine has the blocks itself"


def test_nobody_waits_for_a_load_for_ever(bench: Any) -> None:
    one = bench()
    one.compute(FakeRequest("a", 1024))
    first, second, third = (FakeRequest(name, 1024) for name in "bcd")
    one.scheduler.match(first, 0)
    one.scheduler.allocated(first, [list(range(1, 33))], 992)
    assert one.scheduler.match(second, 0) is None
    one.now += DEFER_S + 0.1
    assert one.scheduler.match(second, 0) == 992
    assert one.scheduler.match(third, 0) is None
    one.scheduler.finished("b")
    assert one.scheduler.match(third, 0) == 992, "an aborted load holds nobody up"


def test_without_a_prefix_cache_of_its_own_nobody_waits(bench: Any) -> None:
    one = bench(reuse_local=False)
    one.compute(FakeRequest("a", 1024))
    first, second = FakeRequest("b", 1024), FakeRequest("c", 1024)
    one.scheduler.match(first, 0)
    one.scheduler.allocated(first, [list(range(1, 33))], 992)
    assert one.scheduler.match(second, 0) == 992


def test_retention_ttl_and_tenant_come_with_the_request(bench: Any, caplog: pytest.LogCaptureFixture) -> None:
    one = bench()
    plans = {}
    for name, given in {
        "none": {"kvd_retention": "none"},
        "short": {"kvd_retention": "short", "kvd_ttl_seconds": 60},
        "old": {"infera_retention": "ephemeral", "infera_ttl_seconds": "5"},
        "tenant": {"kvd_namespace": "them"},
        "odd": {"kvd_retention": "for ever", "kvd_ttl_seconds": -3},
        "list": ["no", "mapping"],
    }.items():
        request = FakeRequest(name, 512, kv_transfer_params=given)
        one.scheduler.arrived(request)
        plans[name] = one.run(request, 0, 512).saves
    assert plans["none"] == []
    assert [(save.retention, save.ttl_s) for name in ("short", "old", "odd") for save in plans[name]] == [
        ("short", 60.0),
        ("ephemeral", 5.0),
        ("long", None),
    ]
    assert plans["tenant"][0].salt != plans["odd"][0].salt
    assert "kvd_retention 'for ever' is none of" in caplog.text
    assert "kvd_ttl_seconds" in caplog.text


def test_a_tenant_that_is_no_text_is_a_tenant_all_the_same_and_a_misspelled_field_is_named(
    bench: Any, caplog: pytest.LogCaptureFixture
) -> None:
    one = bench()
    salts = {}
    for number, name in enumerate([None, "", 0, False, [], "them"]):
        request = FakeRequest(f"r{number}", 512, kv_transfer_params={"kvd_namespace": name, "kvd_retension": "none"})
        salts[repr(name)] = one.scheduler.arrived(request).salt
    everybody = salts.pop("None")
    assert salts.pop("''") == everybody
    assert len({everybody, *salts.values()}) == 5
    assert "kvd_namespace 0 is not a text; taken as '0'" in caplog.text
    assert "'kvd_retension' in kv_transfer_params means nothing" in caplog.text
    for odd in (False, 0, "x" * 5000):
        assert parameters.retention({"kvd_retention": odd}) == "long"
        assert parameters.ttl({"kvd_ttl_seconds": odd}) is None
    assert parameters.ttl({"kvd_ttl_seconds": True}) is None
    assert "x" * 100 not in caplog.text
    assert "x" * 100 not in str(
        parameters.slips({"kvd_retention": "x" * 5000, "kvd_ttl_seconds": "x" * 5000, "kvd_" + "x" * 5000: 1})
    )


def test_a_client_that_errs_in_every_request_is_one_line_a_minute_and_the_next_says_how_often(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [0.0]
    log = parameters.SlipLog(lambda: now[0])
    for _ in range(1000):
        log.note({"kvd_ttl_seconds": "soon", "kvd_retension": "none"})
    log.note({"kvd_namespace": 5})
    assert len(caplog.messages) == 3
    now[0] += PAUSE_S
    log.note({"kvd_ttl_seconds": "later", "kvd_retention": "short"})
    assert len(caplog.messages) == 4
    assert "'later'" in caplog.messages[-1]
    assert "999 more like it" in caplog.messages[-1]
    now[0] += PAUSE_S
    log.note({"kvd_ttl_seconds": "later"})
    assert "more like it" not in caplog.messages[-1]
    log.note({"kvd_ttl_seconds": 5, "kvd_namespace": "them", "other": 1})
    assert len(caplog.messages) == 5


@pytest.mark.parametrize(
    ("identities", "why"),
    [
        ([RankIdentity(problem="model.layers.0: no")], "model.layers.0: no"),
        ([RankIdentity((b"a" * 32,), {}, 256)], "1 of 2 workers"),
        ([RankIdentity((b"a" * 32,), {}, 256), RankIdentity((b"b" * 32,), {}, 512)], "chunks of"),
    ],
)
def test_workers_that_do_not_fit_together_are_named_and_nothing_is_stored(bench: Any, identities: Any, why: str) -> None:
    one = bench()
    one.compute(FakeRequest("a", 1024))
    assert why in one.scheduler.introduce(identities, 2)
    assert one.scheduler.match(FakeRequest("b", 1024), 0) == 0
    assert one.run(FakeRequest("b", 1024), 0, 1024).saves == []


def test_requests_wait_briefly_for_workers_that_introduce_themselves_late(bench: Any) -> None:
    one = bench()
    late = Scheduler(
        read_settings({}, {}), (FULL,), one.link, hash_tokens=32, hash_source=lambda: ("sha256", "00"), clock=lambda: one.now
    )
    request = FakeRequest("a", 1024)
    assert late.match(request, 0) is None
    late.introduce(one.identities, 1)
    assert late.match(request, 0) == 0
    never = Scheduler(
        read_settings({}, {}), (FULL,), one.link, hash_tokens=32, hash_source=lambda: ("sha256", "00"), clock=lambda: one.now
    )
    assert never.match(request, 0) is None
    one.now += 10
    assert never.match(request, 0) == 0


def test_nothing_is_kept_of_finished_requests(bench: Any) -> None:
    one = bench()
    for number in range(200):
        request = FakeRequest(str(number), 512, salt=str(number))
        one.compute(request)
        one.scheduler.match(request, 0)
        one.scheduler.finished(request.request_id)
    assert not one.scheduler._requests
    assert not one.scheduler._in_flight


class SlowBench(Bench):
    """A daemon with a tier that must do I/O to tell what it holds; it tells when `asked` is set."""

    def below(self, request: FakeRequest, *, computed: int = 0) -> None:
        """Store a prompt, and leave all of it (from there on) to that tier."""
        self.compute(request)
        keys = self.scheduler.arrived(request).keys
        kept = {keys.of(span) for span in keys.spans(0, computed)}
        self.client.below = {name for name in self.client.values if name[1] not in kept}
        self.client.values = {name: value for name, value in self.client.values.items() if name[1] in kept}
        self.client.slow_lookups = True
        self.client.asked = threading.Event()

    def until_answered(self, request: FakeRequest) -> int:
        assert self.client.asked is not None
        self.client.asked.set()
        answers: list[int | None] = []
        wait_until(lambda: answers.append(self.scheduler.match(request, 0)) or answers[-1] is not None)
        assert answers[-1] is not None
        return answers[-1]


@pytest.fixture
def slow() -> Iterator[SlowBench]:
    one = SlowBench()
    yield one
    if one.client.asked is not None:
        one.client.asked.set()
    one.scheduler.close()
    one.link.close()


@pytest.mark.parametrize(("known", "hit"), [(0, 992), (512, 992)])
def test_a_tier_that_must_be_asked_holds_up_no_step(slow: SlowBench, known: int, hit: int) -> None:
    slow.below(FakeRequest("a", 1000), computed=known)
    request = FakeRequest("b", 1000)
    calls = slow.client.calls.get("prefix", 0)
    for _ in range(50):
        assert slow.scheduler.match(request, 0) is None, "ask again in the next step"
    assert slow.client.calls["prefix"] - calls <= 2, "one quick look, and the one on its thread"
    assert slow.until_answered(request) == hit
    assert slow.scheduler.match(request, 0) == hit


def test_a_tier_that_does_not_answer_in_time_counts_for_nothing(slow: SlowBench) -> None:
    slow.below(FakeRequest("a", 1000), computed=512)
    request = FakeRequest("b", 1000)
    assert slow.scheduler.match(request, 0) is None
    slow.now += slow.scheduler.settings.lookup_timeout_s
    assert slow.scheduler.match(request, 0) == 512, "what is known without it"


def test_what_is_known_already_is_answered_without_asking_anybody(slow: SlowBench) -> None:
    slow.compute(FakeRequest("a", 1024))
    slow.client.slow_lookups, slow.client.asked = True, threading.Event()
    assert slow.scheduler.match(FakeRequest("b", 1024), 0) == 992


def test_a_request_that_grew_while_a_tier_was_asked_is_looked_up_anew(slow: SlowBench) -> None:
    """Preempted meanwhile, or with more of its prefix in the engine: the answer would be for another question."""
    slow.below(FakeRequest("a", 1000))
    request = FakeRequest("b", 1000)
    assert slow.scheduler.match(request, 0) is None
    assert slow.scheduler.match(request, 320) is None
    assert slow.client.asked is not None
    slow.client.asked.set()
    answers: list[int | None] = []
    wait_until(lambda: answers.append(slow.scheduler.match(request, 320)) or answers[-1] is not None)
    assert answers[-1] == 672


def test_a_daemon_that_goes_while_a_tier_is_asked_is_no_hit(slow: SlowBench) -> None:
    slow.below(FakeRequest("a", 1000))
    request = FakeRequest("b", 1000)
    assert slow.scheduler.match(request, 0) is None
    slow.client.away = True
    assert slow.until_answered(request) in (0, 992), "whatever it had said before it went"


def test_a_request_that_ends_while_a_tier_is_asked_leaves_nothing(slow: SlowBench) -> None:
    slow.below(FakeRequest("a", 1000))
    request = FakeRequest("b", 1000)
    assert slow.scheduler.match(request, 0) is None
    slow.scheduler.finished("b")
    assert slow.client.asked is not None
    slow.client.asked.set()
    assert slow.scheduler.plan([], lambda _: None).loads == []
    slow.scheduler.finished("a")
    assert not slow.scheduler._requests


def test_a_preempted_request_is_matched_with_what_it_had_generated(bench: Any) -> None:
    """It comes back with its generated tokens as part of its prompt, and a block table of other blocks."""
    one = bench()
    request = FakeRequest("a", 640)
    one.compute(request)
    one.store(one.run(request, 640, 1))
    request.num_tokens, request.block_hashes = 673, hashes(673)
    assert one.scheduler.match(request, 0) == 640
    other = [[5000 + i for i in range(21)]]
    one.scheduler.allocated(request, other, 640)
    (load,) = one.scheduler.plan([], lambda _: None).loads
    assert [block for move in load.moves for block in move.blocks[0]] == other[0][:20]


def test_with_gpu_direct_everywhere_chunks_are_large_and_requests_that_waited_are_cut_anew(bench: Any) -> None:
    one = bench(unit_bytes=1 << 20)
    early = FakeRequest("a", 8192)
    assert one.scheduler.arrived(early).keys.chunk == 256
    assert one.scheduler.introduce([RankIdentity((b"n" * 32,), {}, 128 * 32, direct=True)] * 2, 2) == ""
    assert one.scheduler.chunk == 4096
    assert one.scheduler.arrived(early).keys.chunk == 4096
    ranks = [RankIdentity((b"n" * 32,), {}, 4096, direct=True), RankIdentity((b"m" * 32,), {}, 256)]
    assert "GPU-direct works for some of them only; set KVD_CHUNK_TOKENS" in one.scheduler.introduce(ranks, 2)


def test_a_request_that_may_not_read_a_cache_is_offered_nothing_and_asks_nobody(bench: Any) -> None:
    """With prompt_logprobs the engine asks all the same and throws the answer away."""
    one = bench()
    one.compute(FakeRequest("a", 1000))
    before = dict(one.client.calls)
    assert one.scheduler.match(FakeRequest("b", 1000, skip_reading_prefix_cache=True), 0) == 0
    assert one.client.calls == before
