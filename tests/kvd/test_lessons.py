"""What went wrong in the system this one replaces, one line each, and the tests that keep it from happening here.

The list is the contract: a line whose test is gone, or has another name, fails. `there` is what was seen there.
"""

import re
from pathlib import Path
from typing import NamedTuple

import pytest

HERE = Path(__file__).resolve().parent


class Lesson(NamedTuple):
    """One mistake: its number in the study of that system (or its heading), what was seen, and which tests are about it."""

    number: str
    there: str
    tests: tuple[str, ...]


KNOWN = "service/test_known_weaknesses.py::"
LESSONS = (
    Lesson(
        "W1",
        "two namespaces with equal keys read each other's values",
        (
            KNOWN + "test_equal_keys_of_two_namespaces_never_meet",
            "tiers/test_tier_orders.py::test_equal_keys_of_two_namespaces_are_two_values_in_the_tier_too",
            "disk/test_disk_adapter.py::test_two_namespaces_with_equal_keys_are_two_values",
        ),
    ),
    Lesson("W2", "the value in slot 0 was a hit without bytes", (KNOWN + "test_the_very_first_value_is_not_empty",)),
    Lesson(
        "W3",
        "what was written through a lease never reached the disk",
        (KNOWN + "test_what_is_written_through_a_lease_reaches_the_tier",),
    ),
    Lesson(
        "W4",
        "an expired value came back from disk for ever",
        (
            KNOWN + "test_an_expired_value_does_not_come_back_from_the_tier",
            "service/test_retention_rules.py::test_an_expiry_ends_a_value_everywhere_and_a_later_put_without_one_lifts_it",
        ),
    ),
    Lesson(
        "W5",
        "retention none was stored",
        (
            KNOWN + "test_retention_none_is_stored_nowhere",
            "tiers/test_tier_orders.py::test_ephemeral_and_none_never_reach_a_tier",
        ),
    ),
    Lesson(
        "W6",
        "the arena evicted first in, first out, whatever the class",
        (
            KNOWN + "test_eviction_honours_class_and_recency",
            "store/test_store_rules.py::test_eviction_takes_ephemeral_then_short_then_long_whatever_was_used_last",
        ),
    ),
    Lesson("W7", "the first tiny value fixed the slot size for life", (KNOWN + "test_a_tiny_first_value_fixes_nothing",)),
    Lesson(
        "W8",
        "a key that its own reserve had evicted was saved, and missing",
        (KNOWN + "test_a_key_whose_own_reserve_evicted_it_can_be_saved_again",),
    ),
    Lesson(
        "W9",
        "a view showed another key's bytes after some churn",
        (
            KNOWN + "test_a_view_does_not_change_under_its_reader",
            "wire/test_client.py::test_bytes_under_a_lease_do_not_change",
        ),
    ),
    Lesson(
        "W10a",
        "after a restart keys had the bytes of others",
        (
            KNOWN + "test_evicted_keys_do_not_come_back_with_the_bytes_of_others",
            "disk/test_disk_crash.py::test_crash_at_any_operation",
        ),
    ),
    Lesson(
        "W10b", "a torn journal line took everything after it along", (KNOWN + "test_a_torn_log_loses_nothing_that_comes_after_it",)
    ),
    Lesson(
        "W10c",
        "another geometry was laid over the old bytes",
        (
            KNOWN + "test_a_tier_of_another_size_reads_the_old_one_right_or_not_at_all",
            "disk/test_disk_adapter.py::test_another_region_size_reads_the_old_regions",
        ),
    ),
    Lesson(
        "W10d",
        "no checksum: zeroed bytes were a hit",
        (
            "disk/test_disk_damage.py::test_a_flipped_bit_never_gives_wrong_bytes",
            "disk/test_disk_damage.py::test_a_truncated_file_is_misses",
        ),
    ),
    Lesson(
        "W11",
        "a remote tier dropped half of the identity: another model's values were hits",
        ("adapters/test_conformance.py::test_keys_of_other_namespaces_are_other_values",),
    ),
    Lesson(
        "W12",
        "a failed load was silence: the engine attended over unfilled blocks",
        (
            "connector/test_connector_worker.py::test_a_doomed_load_fails_and_tells_why",
            "vllm/test_vllm_faults.py::test_chunks_that_vanish_after_the_look_up_are_recomputed",
            "vllm/test_vllm_faults.py::test_a_flipped_bit_in_the_disk_tier_is_recomputed",
        ),
    ),
    Lesson("W13", "56 bits of a key were looked at", (KNOWN + "test_keys_that_differ_in_one_byte_are_different_keys",)),
    Lesson(
        "W14",
        "what was once saved was never saved again, evicted or not",
        (
            "connector/test_connector_scheduler.py::test_what_a_look_up_found_is_not_saved_again",
            "connector/test_connector_scheduler.py::test_nothing_is_kept_of_finished_requests",
        ),
    ),
    Lesson(
        "W15",
        "a hit on the whole prompt stopped the engine",
        ("connector/test_connector_scheduler.py::test_a_hit_is_what_the_engines_own_cache_would_cover",),
    ),
    Lesson(
        "W16",
        "one 8-bit type was saved and could not be read",
        ("connector/test_connector_layout.py::test_every_layout_survives_the_way_through_a_chunk",),
    ),
    Lesson(
        "W17",
        "a Python object a slot: a tiny probe took all memory",
        (
            "store/test_extents.py::test_a_full_arena_of_tiny_values_holds_no_objects",
            KNOWN + "test_memory_follows_what_is_held",
            "store/test_memory_budget.py::test_an_entry_costs_at_most_256_bytes",
        ),
    ),
    Lesson(
        "operations: journal",
        "the journal grew without bound",
        (KNOWN + "test_overwriting_and_deleting_for_ever_takes_no_more_room",),
    ),
    Lesson(
        "operations: owner",
        "two daemons opened one folder",
        (
            "disk/test_disk_adapter.py::test_a_second_owner_is_refused_and_the_first_unharmed",
            "service/test_bad_paths.py::test_a_directory_that_another_daemon_has",
        ),
    ),
    Lesson(
        "operations: socket",
        "a second daemon stole the socket, the first one's end removed it",
        (
            "service/test_socket.py::test_a_live_daemons_socket_is_refused_and_its_daemon_unharmed",
            KNOWN + "test_a_stopped_daemon_leaves_its_successors_socket",
        ),
    ),
    Lesson(
        "operations: stop",
        "a stop neither drained nor flushed",
        (
            "service/test_stopping.py::test_sigterm_writes_down_what_was_on_its_way",
            "service/test_stopping.py::test_stopping_under_load_loses_no_acknowledged_value",
        ),
    ),
    Lesson("operations: start", "14.5 s of probing before anybody was served", (KNOWN + "test_the_start_writes_no_probe",)),
    Lesson(
        "operations: order",
        "the order of use was forgotten",
        (
            "disk/test_disk_adapter.py::test_use_is_remembered_over_a_restart",
            "disk/test_disk_adapter.py::test_a_killed_daemon_remembers_the_uses_of_minutes_ago",
        ),
    ),
    Lesson(
        "operations: reload",
        "no setting could change while it ran",
        ("service/test_supervised.py::test_sighup_takes_over_what_can_change_and_names_what_cannot",),
    ),
    Lesson(
        "speed: one thread",
        "a disk that was slow, or a client, held everybody up",
        (
            "tiers/test_broken_tier.py::test_what_is_in_ram_is_served_and_what_fits_is_taken",
            "tiers/test_asking.py::test_what_is_in_ram_does_not_wait_for_a_tier_that_hangs",
            "wire/test_client_threads.py::test_a_get_that_waits_for_a_tier_holds_nobody_up",
        ),
    ),
    Lesson(
        "speed: victims", "an eviction looked at every entry", (KNOWN + "test_an_eviction_costs_the_same_among_200_and_20_000",)
    ),
    Lesson(
        "speed: stats", "the figures took 10 ms, and everybody waited", (KNOWN + "test_stats_cost_the_same_whatever_is_stored",)
    ),
    Lesson(
        "speed: promotion",
        "what was read from disk was written to it again",
        (KNOWN + "test_a_value_that_comes_up_is_not_written_down_again",),
    ),
    Lesson(
        "memory: frames",
        "frames were outside the budget",
        (
            "service/test_bounded.py::test_a_client_that_reads_no_answers_is_not_read_from",
            "service/test_bounded.py::test_half_a_frame_costs_half_a_frame",
        ),
    ),
    Lesson(
        "security: arena",
        "every client could write all of the arena",
        (
            "store/test_arena.py::test_readers_cannot_write_through_their_descriptor",
            "service/test_socket.py::test_a_reader_cannot_reopen_the_arena_for_writing",
            "store/test_arena.py::test_it_is_sealed_against_resize_and_against_unsealing",
        ),
    ),
    Lesson(
        "security: peers",
        "nobody asked who connects, and no other user could be let in",
        (
            "service/test_socket.py::test_another_user_is_not_let_in",
            "service/test_socket.py::test_an_allowed_user_is_let_in_and_can_read_and_write",
            "service/test_two_containers.py::test_who_is_not_allowed_is_refused_by_the_kernels_word",
        ),
    ),
    Lesson(
        "security: frames",
        "a frame had no limit, a bad one closed the connection without a word",
        (
            "wire/test_fuzz.py::test_a_frame_over_the_cap_is_refused_before_it_is_read",
            "wire/test_fuzz.py::test_valid_frames_with_a_few_bytes_changed",
            "wire/test_fuzz.py::test_raw_bytes_after_the_greeting",
        ),
    ),
    Lesson(
        "security: files", "any local user could read the values on disk", ("disk/test_disk_adapter.py::test_files_are_private",)
    ),
    Lesson(
        "silence: refusal",
        "what the tier refused was called stored",
        (
            KNOWN + "test_a_value_the_tier_refuses_is_not_called_durable",
            "tiers/test_owning_up.py::test_drain_fails_and_counts_what_no_tier_took",
        ),
    ),
    Lesson(
        "silence: pages",
        "huge pages that there were not",
        ("store/test_arena.py::test_huge_pages_that_are_not_to_be_had_are_said_aloud",),
    ),
    Lesson(
        "silence: figures",
        "what was counted was not shown",
        (
            "service/test_figures.py::test_namespaces_and_classes_add_up",
            "service/test_figures.py::test_operations_are_timed_and_refusals_have_their_reason",
        ),
    ),
)


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.number)
def test_every_lesson_has_its_tests(lesson: Lesson) -> None:
    assert lesson.there
    assert lesson.tests
    for test in lesson.tests:
        path, _, name = test.partition("::")
        assert re.search(rf"^\s*(async )?def {name}\(", (HERE / path).read_text(), re.MULTILINE), f"{test} is gone"


def test_no_lesson_is_missing() -> None:
    numbers = {re.match(r"W\d+|", lesson.number)[0] for lesson in LESSONS} - {""}  # type: ignore[index]
    assert numbers == {f"W{n}" for n in range(1, 18)}
    assert len({lesson.number for lesson in LESSONS}) == len(LESSONS)
