"""What has gone wrong with queues elsewhere, and the tests that show that it does not here."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

HELD_BY: Mapping[str, tuple[str, ...]] = {
    "a job longer than the lease runs twice": ("test_a_job_longer_than_the_lease_runs_once",),
    "prefetched entries age and are stolen": ("test_jobs_that_are_taken_ahead_are_not_taken_for_abandoned",),
    "heartbeats inflate the delivery count": ("test_heartbeats_and_renewals_do_not_count_as_deliveries",),
    "a late finisher overwrites the result": ("test_a_worker_that_lost_its_job_cannot_end_it_before_or_after_the_new_holder",),
    "NOGROUP after FLUSHALL, restart or failover spins hot": (
        "test_after_a_flush_of_everything_the_group_is_made_anew_and_work_goes_on",
        "test_a_group_that_was_destroyed_costs_neither_the_running_job_nor_the_next",
        "test_after_flushall_the_reader_is_told_and_the_next_job_is_served",
        "test_a_server_that_is_down_costs_few_lines_and_little_time",
    ),
    "a group at the end skips the backlog, one at the start runs again what has ended": (
        "test_the_first_worker_of_a_queue_gets_what_was_added_before_it_came",
        "test_a_group_that_is_made_anew_brings_nothing_back_that_has_ended",
    ),
    "acknowledged entries are never freed": (
        "test_a_thousand_jobs_leave_empty_lanes_and_nothing_that_lives_for_ever",
        "test_after_1000_jobs_streams_are_empty_and_keys_connections_series_and_memory_are_what_they_were",
    ),
    "an interrupted call shifts all later replies": ("test_an_interrupted_call_does_not_shift_later_replies",),
    "a wait longer than the socket's timeout fails": (
        "test_a_wait_longer_than_the_socket_timeout_ends_without_an_error",
        "test_an_idle_worker_waits_longer_than_the_socket_timeout_without_an_error",
    ),
    "a blind retry writes twice": (
        "test_an_enqueue_whose_reply_is_lost_is_one_entry",
        "test_frames_whose_reply_is_lost_are_in_the_log_once",
        "test_an_end_whose_reply_is_lost_is_one_end",
        "test_a_retry_whose_reply_was_lost_may_be_said_again",
    ),
    "a worker is deaf after a restart of the server while its health is green": (
        "test_ten_restarts_under_load_cost_no_token",
        "test_cancels_are_heard_again_after_the_server_came_back",
        "test_a_worker_is_not_ready_while_the_server_is_silent_and_goes_on_when_it_speaks",
    ),
    "NOSCRIPT in a pipeline after SCRIPT FLUSH": (
        "test_scripts_that_the_server_forgot_are_sent_again_within_a_pipeline",
        "test_scripts_may_be_forgotten_at_any_moment",
    ),
    "all come back at the same moment": ("test_callers_come_back_one_after_the_other",),
    "reconnects leak connections": (
        "test_a_hundred_reconnects_leave_no_connection_behind",
        "test_100_cut_connections_are_100_new_ones_and_no_more",
    ),
    "a full server": (
        "test_a_server_that_is_full_refuses_an_end_whole_and_takes_it_later",
        "test_a_worker_waits_out_a_server_that_refuses_writes",
    ),
    "names of consumers pile up": (
        "test_50_restarts_leave_no_more_consumers_than_live_workers_and_one",
        "test_a_consumer_that_holds_nothing_and_says_nothing_is_forgotten",
    ),
    "a poisonous job loops for ever and takes its neighbours along": (
        "test_who_ends_the_engine_twice_while_alone_is_set_aside_and_the_others_succeed",
        "test_a_prompt_that_kills_the_engine_is_dead_after_two_crashes_alone_and_seven_others_live",
        "test_a_prompt_that_kills_the_whole_worker_is_dead_after_two_crashes_alone_and_seven_others_live",
    ),
    "SIGTERM loses jobs or an attempt, or comes too late": (
        "test_tokens_flow_while_a_worker_drains_and_it_leaves_within_its_grace",
        "test_a_rolling_restart_of_every_worker_under_load_costs_no_attempt",
    ),
    "an end that nobody tells leaves the client waiting": (
        "test_an_end_by_itself_is_told_once",
        "test_a_cancel_and_an_end_that_cross_are_one_end",
    ),
    "the engine waits for each publish": (
        "test_the_engine_does_not_wait_for_a_slow_server",
        "test_the_engine_is_as_fast_with_a_server_that_is_50_ms_away",
    ),
    "giant payloads and results": (
        "test_a_body_over_the_limit_is_announced_but_not_shipped",
        "test_a_fetch_of_big_bodies_ends_early_and_the_rest_rings_at_once",
        "test_a_long_result_is_read",
    ),
}


@pytest.mark.parametrize("pitfall", HELD_BY)
def test_the_tests_that_hold_a_pitfall_are_there(pitfall: str) -> None:
    there = {name for path in TESTS.rglob("test_*.py") for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)}
    assert set(HELD_BY[pitfall]) <= there
