"""Who runs in which step with how many tokens, and what a step records."""

import random
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest

from engine.decision import Ended, SchedulerOutput
from engine.request import FinishReason
from engine.scheduler import PreemptionCosts, Scheduler
from engine.sequence import Sequence
from engine.stats import KVCounts, SlotCounts
from tests.support.scheduler_world import World, make_request, run_world
from tests.support.scheduling import EOS, TOKEN, make_config, make_scheduler, make_sequence, parts_of, run_step


def add(scheduler: Scheduler, *sequences: Sequence) -> None:
    for sequence in sequences:
        scheduler.add(sequence)


def endings(ended: list[Ended]) -> list[tuple[str, FinishReason, str]]:
    return [(end.sequence.request.request_id, end.reason, end.detail) for end in ended]


def run_to_end(scheduler: Scheduler, max_steps: int = 1000) -> list[Ended]:
    ended: list[Ended] = []
    while scheduler.num_running + scheduler.num_waiting:
        max_steps -= 1
        assert max_steps, "it does not end"
        ended += run_step(scheduler)[1]
    return ended


# The papers' examples


def test_a_7_token_prompt_on_4_token_blocks_takes_a_new_block_for_its_second_token() -> None:
    scheduler = make_scheduler(block_size=4)
    sequence = make_sequence(0, 7)
    scheduler.add(sequence)

    num_blocks = []
    for _ in range(3):
        run_step(scheduler)
        num_blocks.append(len(sequence.block_table))

    assert num_blocks == [2, 2, 3]  # the prompt in logical blocks 0 and 1, the first token beside it, the second in block 2


# Token budget


def test_a_prompt_above_the_budget_is_computed_in_chunks_and_samples_after_the_last() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    sequence = make_sequence(0, 9)
    scheduler.add(sequence)

    steps = [(parts_of(output), output.scheduled[0].num_samples) for output, _ in (run_step(scheduler) for _ in range(4))]

    assert steps == [([("0", 4)], False), ([("0", 4)], False), ([("0", 1)], True), ([("0", 1)], True)]
    assert sequence.token_ids == [5] * 9 + [TOKEN] * 2


def test_a_one_token_last_chunk_of_a_prompt_is_prefill() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4, max_slots=1)
    scheduler.add(make_sequence(0, 5))

    outputs = [run_step(scheduler)[0] for _ in range(3)]

    assert [output.slots for output in outputs] == [SlotCounts(prefill=1), SlotCounts(prefill=1), SlotCounts(decode=1)]
    assert [(output.num_tokens, output.num_prefill_tokens) for output in outputs] == [(4, 4), (1, 1), (1, 0)]


def test_known_output_is_prefill_until_the_gap_is_one() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4, max_slots=1)
    scheduler.add(make_sequence(0, 3, num_outputs=6))

    slots = [run_step(scheduler)[0].slots for _ in range(3)]

    assert slots == [SlotCounts(prefill=1), SlotCounts(prefill=1), SlotCounts(decode=1)]


def test_decodes_and_the_next_chunk_share_the_budget() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=5)
    add(scheduler, make_sequence(0), make_sequence(1))
    run_step(scheduler)
    scheduler.add(make_sequence(2, 20))

    output, _ = run_step(scheduler)

    assert parts_of(output) == [("0", 1), ("1", 1), ("2", 3)]


def test_a_partial_prefill_goes_on_before_a_new_one_starts() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    add(scheduler, make_sequence(0, 6), make_sequence(1, 6))

    assert [parts_of(run_step(scheduler)[0]) for _ in range(3)] == [[("0", 4)], [("0", 2), ("1", 2)], [("0", 1), ("1", 3)]]


def test_without_chunking_a_prompt_waits_for_a_step_with_room() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=5, chunked_prefill=False, max_slots=4)
    add(scheduler, make_sequence(0, 3), make_sequence(1, 3), make_sequence(2, 1))

    first, second = run_step(scheduler)[0], run_step(scheduler)[0]

    assert (parts_of(first), first.slots) == ([("0", 3)], SlotCounts(prefill=1, no_budget=2, no_work=1))
    assert parts_of(second) == [("0", 1), ("1", 3), ("2", 1)]


def test_without_chunking_a_prompt_above_the_budget_runs_whole_and_alone() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=5, chunked_prefill=False)
    add(scheduler, make_sequence(0, 1, max_tokens=2), make_sequence(1, 9), make_sequence(2, 1))

    steps = [parts_of(run_step(scheduler)[0]) for _ in range(4)]

    assert steps == [[("0", 1)], [("0", 1)], [("1", 9)], [("1", 1), ("2", 1)]]


def test_decodes_go_on_before_prefills_that_come_first_in_order() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    scheduler.add(make_sequence(1, 1, priority=1))
    run_step(scheduler)
    scheduler.add(make_sequence(2, 9, priority=0))
    run_step(scheduler)

    output, _ = run_step(scheduler)

    assert parts_of(output) == [("1", 1), ("2", 3)]


def test_a_running_sequence_without_budget_is_counted_as_such() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=2, max_slots=3)
    add(scheduler, make_sequence(1, 1), make_sequence(2, 4))
    run_step(scheduler)
    run_step(scheduler)
    add(scheduler, make_sequence(3, 1))

    output, _ = run_step(scheduler)

    assert parts_of(output) == [("1", 1), ("2", 1)]
    assert output.slots == SlotCounts(decode=1, prefill=1, no_budget=1)


# Order


def test_a_later_one_that_fits_does_not_overtake_one_that_does_not() -> None:
    scheduler = make_scheduler(num_blocks=4, max_slots=5)
    add(scheduler, make_sequence(0, 8), make_sequence(1, 12), make_sequence(2, 1))

    output, _ = run_step(scheduler)

    assert parts_of(output) == [("0", 8)]
    assert output.slots == SlotCounts(prefill=1, no_memory=2, no_work=2)


def test_priority_comes_before_arrival() -> None:
    scheduler = make_scheduler(max_slots=1)
    add(scheduler, make_sequence(0, priority=1), make_sequence(1, priority=-1), make_sequence(2, priority=-1))

    ended = [end.sequence.request.request_id for end in run_to_end(scheduler)]

    assert ended == ["1", "2", "0"]


def test_the_head_is_the_one_that_starts_next() -> None:
    scheduler = make_scheduler()
    assert scheduler.head is None
    first, second = make_sequence(0, priority=1), make_sequence(1)

    add(scheduler, first, second)

    assert scheduler.head is second


def test_idle_slots_without_anything_waiting_are_no_work() -> None:
    scheduler = make_scheduler(max_slots=3)

    output = scheduler.schedule()

    assert not output.scheduled
    assert output.slots == scheduler.idle_slots() == SlotCounts(no_work=3)


def test_those_waiting_for_a_slot_leave_no_slot_idle() -> None:
    scheduler = make_scheduler(max_slots=2)
    add(scheduler, *(make_sequence(name) for name in range(5)))

    assert run_step(scheduler)[0].slots == SlotCounts(prefill=2)


# Admission


def test_admission_asks_for_the_whole_prompt_though_a_chunk_would_fit() -> None:
    scheduler = make_scheduler(num_blocks=6, max_num_batched_tokens=8)
    add(scheduler, make_sequence(0, 5), make_sequence(1, 17))

    output, _ = run_step(scheduler)

    assert parts_of(output) == [("0", 5)]
    assert output.slots.no_memory == 1


@pytest.mark.parametrize(("watermark_blocks", "starts"), [(1, True), (2, False)])
def test_admission_leaves_the_watermark_free_while_something_runs(watermark_blocks: int, starts: bool) -> None:
    scheduler = make_scheduler(num_blocks=4, watermark_blocks=watermark_blocks)
    add(scheduler, make_sequence(0, 4), make_sequence(1, 8))

    output, _ = run_step(scheduler)

    assert (("1", 8) in parts_of(output)) is starts


def test_the_watermark_is_ignored_when_nothing_runs() -> None:
    scheduler = make_scheduler(num_blocks=4, watermark_blocks=4)
    scheduler.add(make_sequence(0, 15))

    assert parts_of(run_step(scheduler)[0]) == [("0", 15)]


@pytest.mark.parametrize("num_prompt", [0, 17])
def test_a_sequence_that_never_fits_is_never_added(num_prompt: int) -> None:
    with pytest.raises(AssertionError, match=f"a sequence of {num_prompt} tokens is added"):
        make_scheduler(num_blocks=4).add(make_sequence(0, num_prompt))


def test_two_live_sequences_of_one_request_are_an_error() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence(0))

    with pytest.raises(AssertionError, match="request 0 is added twice"):
        scheduler.add(make_sequence(0))


# Preemption


def fill(scheduler: Scheduler, *sequences: Sequence) -> None:
    """Start sequences whose prompts leave no room in their blocks, so that the next step is short of blocks."""
    add(scheduler, *sequences)
    run_step(scheduler)
    assert scheduler.num_running == len(sequences)


def test_a_dry_pool_preempts_the_latest_arrival_of_the_lowest_priority() -> None:
    scheduler = make_scheduler(num_blocks=4)
    sequences = [make_sequence(0, 4), make_sequence(1, 4, priority=1), make_sequence(2, 4, priority=1), make_sequence(3, 4)]
    fill(scheduler, *sequences)

    output, _ = run_step(scheduler)

    assert output.preempted == (sequences[2], sequences[1])
    assert parts_of(output) == [("0", 1), ("3", 1)]
    assert output.num_preempted_tokens == 8
    assert [sequence.num_preemptions for sequence in sequences] == [0, 1, 1, 0]


def test_a_sequence_that_finds_only_scheduled_ones_before_it_gives_way_itself() -> None:
    scheduler = make_scheduler(num_blocks=3)
    sequences = [make_sequence(0, 5), make_sequence(1, 4)]
    fill(scheduler, *sequences)

    output, _ = run_step(scheduler)

    assert output.preempted == (sequences[1],)
    assert parts_of(output) == [("0", 1)]
    assert output.slots == SlotCounts(decode=1, no_memory=1, no_work=6)


def test_a_preempted_sequence_keeps_its_tokens_and_computes_them_again() -> None:
    scheduler = make_scheduler(num_blocks=4)
    first, second = make_sequence(0, 7, max_tokens=6), make_sequence(1, 7, max_tokens=20)
    fill(scheduler, first, second)
    run_step(scheduler)

    output, _ = run_step(scheduler)
    assert (output.preempted, output.num_preempted_tokens) == ((second,), 8)
    assert (second.num_computed_tokens, second.block_table, second.num_tokens) == (0, [], 9)
    assert scheduler.head is second

    while second.num_computed_tokens == 0:
        output, _ = run_step(scheduler)
    assert parts_of(output)[-1] == ("1", 9)
    assert output.slots.prefill == 1
    assert run_step(scheduler)[0].slots.decode == 1


def test_a_preempted_sequence_comes_back_before_later_arrivals() -> None:
    scheduler = make_scheduler(num_blocks=4)
    fill(scheduler, make_sequence(0, 8, max_tokens=2), make_sequence(1, 8))
    add(scheduler, make_sequence(2, 1), make_sequence(3, 1))

    output, _ = run_step(scheduler)
    assert [sequence.request.request_id for sequence in output.preempted] == ["1"]
    output, _ = run_step(scheduler)

    assert parts_of(output) == [("1", 9), ("2", 1)]


def test_a_resumed_sequence_asks_for_all_it_knows_before_it_starts_again() -> None:
    scheduler = make_scheduler(num_blocks=4, max_num_batched_tokens=4)
    first, second = make_sequence(0, 4, max_tokens=5), make_sequence(1, 8, max_tokens=9)
    add(scheduler, first, second)
    while not second.num_preemptions:
        run_step(scheduler)
    resumed_with = 0

    while not second.num_computed_tokens:
        resumed_with = scheduler.kv_counts().free_blocks
        run_step(scheduler)

    assert resumed_with * 4 >= second.num_tokens


def test_preempted_sequences_yield_the_tokens_they_were_asked_for() -> None:
    scheduler = make_scheduler(num_blocks=6, max_num_batched_tokens=7)
    sequences = [make_sequence(name, 3 + name, max_tokens=12) for name in range(5)]
    add(scheduler, *sequences)

    ended = run_to_end(scheduler)

    assert sum(sequence.num_preemptions for sequence in sequences) > 0
    assert [end.sequence.num_output_tokens for end in ended] == [12] * 5
    assert scheduler.kv_counts().used_blocks == 0


# Ends


@pytest.mark.parametrize(("max_model_len", "detail"), [(200, "kv_capacity"), (16, "model_length"), (10, "model_length")])
def test_a_lone_sequence_that_outgrows_its_limit_ends_and_says_why(max_model_len: int, detail: str) -> None:
    scheduler = make_scheduler(num_blocks=4, max_model_len=max_model_len)
    sequence = make_sequence(0, 3)
    scheduler.add(sequence)

    ended = run_to_end(scheduler)

    assert endings(ended) == [("0", FinishReason.LENGTH, detail)]
    assert sequence.num_tokens == min(max_model_len, 16)


def test_a_sampled_eos_ends_the_sequence_and_frees_its_blocks() -> None:
    scheduler = make_scheduler()
    sequence = make_sequence(0, 3)
    scheduler.add(sequence)

    _, ended = run_step(scheduler, token=lambda _: EOS)

    assert endings(ended) == [("0", FinishReason.STOP, "")]
    assert sequence.token_ids == [5, 5, 5, EOS]
    assert (scheduler.num_running, scheduler.kv_counts().used_blocks) == (0, 0)


def test_outputs_of_an_earlier_attempt_are_computed_and_count() -> None:
    scheduler = make_scheduler()
    sequence = make_sequence(0, 3, num_outputs=4, max_tokens=6)
    scheduler.add(sequence)

    first, ended = run_step(scheduler)
    assert (parts_of(first), first.slots.prefill, ended) == ([("0", 7)], 1, [])
    _, ended = run_step(scheduler)

    assert endings(ended) == [("0", FinishReason.LENGTH, "")]
    assert sequence.num_output_tokens == 6


def test_max_tokens_0_computes_the_prompt_and_samples_nothing() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    sequence = make_sequence(0, 6, max_tokens=0)
    scheduler.add(sequence)

    (first, none_yet), (second, ended) = run_step(scheduler), run_step(scheduler)

    assert [item.num_samples for item in (*first.scheduled, *second.scheduled)] == [0, 0]
    assert (none_yet, endings(ended)) == ([], [("0", FinishReason.LENGTH, "")])
    assert (sequence.num_computed_tokens, sequence.num_tokens) == (6, 6)


@pytest.mark.parametrize("max_tokens", [0, 5])
def test_a_prompt_that_fills_the_pool_is_computed_and_ends_without_a_token(max_tokens: int) -> None:
    scheduler = make_scheduler(num_blocks=4)
    sequence = make_sequence(0, 16, max_tokens=max_tokens)
    scheduler.add(sequence)

    _, ended = run_step(scheduler)

    assert endings(ended) == [("0", FinishReason.LENGTH, "kv_capacity" if max_tokens else "")]
    assert (sequence.num_computed_tokens, sequence.num_output_tokens) == (16, 0)


# Abort


def test_aborting_frees_a_running_and_a_waiting_sequence() -> None:
    scheduler = make_scheduler(max_slots=1)
    add(scheduler, make_sequence(0, 9), make_sequence(1, 9))
    run_step(scheduler)

    assert scheduler.abort("1")
    assert scheduler.abort("0")

    scheduler.check()
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.kv_counts().used_blocks) == (0, 0, 0)


@pytest.mark.parametrize("request_id", ["1", "0"], ids=["never added", "ended"])
def test_aborting_an_unknown_request_does_nothing(request_id: str) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence(0, max_tokens=1))
    run_step(scheduler)

    assert not scheduler.abort(request_id)


def test_a_token_sampled_for_a_sequence_that_was_aborted_meanwhile_is_dropped() -> None:
    scheduler = make_scheduler()
    sequences = [make_sequence(0, 3), make_sequence(1, 3)]
    add(scheduler, *sequences)
    output = scheduler.schedule()
    scheduler.abort("0")
    scheduler.check()

    ended = scheduler.update(output, [TOKEN, TOKEN])

    scheduler.check()
    assert ended == []
    assert [sequence.num_output_tokens for sequence in sequences] == [0, 1]


def test_an_aborted_sequence_does_not_end_a_namesake_added_meanwhile() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence(0, 3))
    output = scheduler.schedule()
    scheduler.abort("0")
    namesake = make_sequence(0, 3)
    scheduler.add(namesake)

    ended = scheduler.update(output, [EOS])

    scheduler.check()
    assert (ended, scheduler.head, namesake.num_tokens) == ([], namesake, 3)


# Running ahead, several choices, beams: found by driving worlds at random


@pytest.mark.parametrize("run_ahead", [False, True])
def test_a_scored_prompt_is_computed_once_in_chunks_of_what_may_be_scored(run_ahead: bool) -> None:
    world = World(make_config(max_scored_tokens=3, run_ahead=run_ahead))
    world.add(make_request(0, 8, prompt_logprobs=0, max_tokens=1))

    chunks = [world.step().num_prefill_tokens for _ in range(3)]

    assert chunks == [3, 3, 2]


def test_a_beam_search_that_is_preempted_with_tokens_in_flight_starts_from_its_prompt() -> None:
    world = World(make_config(num_blocks=4, run_ahead=True))
    world.add(make_request(0, 8, max_tokens=8))
    beams = world.add(make_request(1, 8, max_tokens=4, beam_width=2))

    while not beams.num_preemptions:
        assert beams.num_tokens <= 9
        world.step()

    assert (beams.num_tokens, beams.num_in_flight) == (8, 0)


def test_beams_that_share_their_last_block_need_one_copy_less_than_there_are_beams() -> None:
    world = run_world([make_request(0, 2, max_tokens=2, beam_width=2)], num_blocks=2)

    assert world.num_preemptions == 0


def test_what_is_set_aside_for_a_search_serves_each_of_its_beams() -> None:
    request = make_request(0, 5, max_tokens=3, beam_width=5)

    world = run_world([request], num_blocks=8, reservation="max", max_model_len=8)

    assert world.num_preemptions == 0


def test_a_search_keeps_what_was_set_aside_for_it_whichever_beams_live_on() -> None:
    world = World(make_config(reservation="declared", max_slots=3))
    world.add(make_request(0, 6, max_tokens=24, beam_width=3))

    allocated = set()
    while world.scheduler.num_running or not world.num_steps:
        allocated.add(world.scheduler.kv_counts().allocated_tokens)
        world.step()

    assert allocated == {0, 4 * (1 + 3 * 7)}  # one block of the prompt is shared, 7 of each beam are not
    world.check_outcomes()


def test_a_block_that_held_only_what_was_dropped_in_flight_is_not_swapped_out() -> None:
    world = World(make_config(num_blocks=7, num_host_blocks=9, sliding_window=4, run_ahead=True, preemption="swap"))
    world.add(make_request(0, 11, max_tokens=9))
    last = world.add(replace(make_request(1, 12, max_tokens=9), priority=1))
    world.step()
    world.add(make_request(2, 6, max_tokens=9))
    world.step()
    assert (last.num_computed_tokens, len(last.block_table), last.num_released_blocks) == (13, 4, 2)

    output = world.step()

    assert (output.preempted, len(output.moves.swapped_out)) == ((last,), 1)
    assert last.num_computed_tokens == 12


# Policies


def hand_example(**options: object) -> tuple[dict[str, int], list[SlotCounts]]:
    """2 slots; outputs 2, 8, 3, 5. The step each returns in, and the slots of each step."""
    scheduler = make_scheduler(max_slots=2, **options)
    add(scheduler, *(make_sequence(name, max_tokens=num) for name, num in enumerate((2, 8, 3, 5), start=1)))
    returns: dict[str, int] = {}
    slots: list[SlotCounts] = []
    while scheduler.num_running + scheduler.num_waiting:
        output, ended = run_step(scheduler)
        slots.append(output.slots)
        returns |= {end.sequence.request.request_id: len(slots) for end in ended}
    return returns, slots


@pytest.mark.parametrize("run", ["continuous", "iteration_level"])
def test_the_hand_example_step_by_step_takes_10_steps_2_slots_idle(run: str) -> None:
    returns, slots = hand_example(scheduling=run)

    assert returns == {"1": 2, "3": 5, "2": 8, "4": 10}
    assert (len(slots), sum(step.total for step in slots), sum(step.no_work for step in slots)) == (10, 20, 2)
    assert sum(step.prefill + step.decode for step in slots) == 18


def test_the_hand_example_by_requests_takes_13_steps_8_slots_held_by_what_has_ended() -> None:
    returns, slots = hand_example(scheduling="request_level")

    assert returns == {"1": 8, "2": 8, "3": 13, "4": 13}
    assert (len(slots), sum(step.total for step in slots), sum(step.finished for step in slots)) == (13, 26, 8)
    assert sum(step.prefill + step.decode for step in slots) == 18


def test_a_static_batch_holds_slots_and_blocks_until_its_last_ends() -> None:
    scheduler = make_scheduler(scheduling="request_level", max_slots=3)
    add(scheduler, make_sequence(0, 6, max_tokens=1), make_sequence(1, 6, max_tokens=3))
    run_step(scheduler)
    scheduler.add(make_sequence(2, 6, max_tokens=1))

    output, ended = run_step(scheduler)

    assert (ended, scheduler.num_running, scheduler.kv_counts().used_blocks) == ([], 2, 4)
    assert output.slots == SlotCounts(decode=1, finished=1, no_budget=1)
    _, ended = run_step(scheduler)
    assert [end.sequence.request.request_id for end in ended] == ["0", "1"]
    assert scheduler.kv_counts().used_blocks == 0
    assert parts_of(run_step(scheduler)[0]) == [("2", 6)]


def test_aborting_one_that_has_ended_in_a_static_batch_frees_its_slot() -> None:
    scheduler = make_scheduler(scheduling="request_level", max_slots=2)
    add(scheduler, make_sequence(0, 6, max_tokens=1), make_sequence(1, 6, max_tokens=9))
    run_step(scheduler)

    assert scheduler.abort("0")

    scheduler.check()
    assert (scheduler.num_running, scheduler.kv_counts().used_blocks) == (1, 2)
    assert [end.sequence.request.request_id for end in run_to_end(scheduler)] == ["1"]


def test_iteration_level_takes_whole_prompts_whatever_the_budget() -> None:
    scheduler = make_scheduler(scheduling="iteration_level", max_num_batched_tokens=4)
    add(scheduler, make_sequence(0, 9), make_sequence(1, 9))

    assert parts_of(run_step(scheduler)[0]) == [("0", 9), ("1", 9)]


@pytest.mark.parametrize("prefill_first", [False, True])
def test_prefill_first_stalls_running_decodes(prefill_first: bool) -> None:
    scheduler = make_scheduler(prefill_first=prefill_first, chunked_prefill=False)
    scheduler.add(make_sequence(0))
    run_step(scheduler)
    scheduler.add(make_sequence(1, 9))

    output, _ = run_step(scheduler)

    assert parts_of(output) == ([("1", 9)] if prefill_first else [("0", 1), ("1", 9)])
    assert (output.slots.prefill, output.slots.decode, output.slots.no_budget) == ((1, 0, 1) if prefill_first else (1, 1, 0))
    assert ("0", 1) in parts_of(run_step(scheduler)[0])


def test_decodes_come_before_prefills_that_go_on_and_those_before_new_ones() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=6)
    add(scheduler, make_sequence(0), make_sequence(1, 9))
    run_step(scheduler)
    add(scheduler, make_sequence(2, 9))

    assert [parts_of(run_step(scheduler)[0]) for _ in range(2)] == [
        [("0", 1), ("1", 4), ("2", 1)],
        [("0", 1), ("1", 1), ("2", 4)],
    ]


# Swap or recompute


def preempting(preemption: str, num_host_blocks: int, swap_s: float = 1.0, recompute_s: float = 1.0) -> SchedulerOutput:
    """A step that preempts a sequence of 8 computed tokens in 2 blocks."""
    scheduler = make_scheduler(num_blocks=4, preemption=preemption, num_host_blocks=num_host_blocks)
    scheduler.costs = PreemptionCosts(swap_s, recompute_s)
    fill(scheduler, make_sequence(0, 8), make_sequence(1, 8))
    output, _ = run_step(scheduler)
    assert len(output.preempted) == 1
    assert output.num_preempted_tokens == (0 if output.num_swap_preemptions else 8)
    return output


@pytest.mark.parametrize(("swap_s", "recompute_s", "swaps"), [(3.9, 1.0, True), (4.0, 1.0, False), (4.1, 1.0, False)])
def test_auto_swaps_when_moving_the_blocks_costs_less_than_computing_the_tokens(
    swap_s: float, recompute_s: float, swaps: bool
) -> None:
    assert bool(preempting("auto", 9, swap_s, recompute_s).moves.swapped_out) is swaps


def test_while_costs_are_unknown_auto_computes_again() -> None:
    assert not preempting("auto", 9, float("inf"), float("inf")).num_swap_preemptions


@pytest.mark.parametrize(("preemption", "swaps"), [("swap", True), ("recompute", False)])
def test_a_forced_choice_ignores_the_costs(preemption: str, swaps: bool) -> None:
    assert preempting(preemption, 9, 1e9 if swaps else 0.0).num_swap_preemptions == swaps


@pytest.mark.parametrize(("num_host_blocks", "num_swapped"), [(0, 0), (1, 0), (2, 2)])
def test_a_full_host_pool_means_recompute(num_host_blocks: int, num_swapped: int) -> None:
    assert len(preempting("swap", num_host_blocks).moves.swapped_out) == num_swapped


def test_what_was_swapped_out_comes_back_where_it_was_and_its_host_blocks_are_free() -> None:
    scheduler = make_scheduler(num_blocks=4, preemption="swap", num_host_blocks=2)
    fill(scheduler, make_sequence(0, 8, max_tokens=2), make_sequence(1, 8))
    out, _ = run_step(scheduler)
    last = out.preempted[0]
    assert last.num_computed_tokens == 8

    back, _ = run_step(scheduler)

    assert [host for _, host in out.moves.swapped_out] == [host for host, _ in back.moves.swapped_in]
    assert [block for _, block in back.moves.swapped_in] == last.block_table[:2]
    assert parts_of(back) == [("1", 1)]
    assert len(scheduler._tables._free_host_blocks) == 2


def test_aborting_what_is_swapped_out_frees_its_host_blocks() -> None:
    scheduler = make_scheduler(num_blocks=4, preemption="swap", num_host_blocks=2)
    fill(scheduler, make_sequence(0, 8), make_sequence(1, 8))
    run_step(scheduler)

    scheduler.abort("1")

    scheduler.check()
    assert len(scheduler._tables._free_host_blocks) == 2


# Sharing


def test_a_prompt_that_another_has_computed_is_found_but_for_its_last_token() -> None:
    scheduler = make_scheduler(prefix_caching=True)
    scheduler.add(make_sequence(0, 8, max_tokens=1))
    run_step(scheduler)
    same, longer = make_sequence(1, 8), make_sequence(2, 11)
    add(scheduler, same, longer)

    output, _ = run_step(scheduler)

    assert parts_of(output) == [("1", 4), ("2", 3)]
    assert (output.num_prefix_queries, output.num_prefix_hits) == (19, 12)
    assert (same.num_cached_tokens, longer.num_cached_tokens) == (4, 8)
    assert same.block_table[0] == longer.block_table[0]


def test_a_prefix_is_shared_in_the_step_that_computes_it() -> None:
    scheduler = make_scheduler(prefix_caching=True)
    add(scheduler, make_sequence(0, 9), make_sequence(1, 9))

    assert parts_of(run_step(scheduler)[0]) == [("0", 9), ("1", 1)]


def test_output_is_found_too_by_a_prompt_that_goes_on_from_it() -> None:
    scheduler = make_scheduler(prefix_caching=True)
    scheduler.add(make_sequence(0, 3, max_tokens=6))
    run_to_end(scheduler)
    scheduler.add(make_sequence(1, prompt_token_ids=(5,) * 3 + (TOKEN,) * 6))

    assert run_step(scheduler)[0].num_prefix_hits == 8


def test_a_preempted_sequence_finds_its_own_blocks_again() -> None:
    scheduler = make_scheduler(num_blocks=5, prefix_caching=True, preemption="recompute")
    first, last = make_sequence(0, 8, max_tokens=2), make_sequence(1, prompt_token_ids=(6,) * 12)
    fill(scheduler, first, last)
    run_step(scheduler)

    output, _ = run_step(scheduler)

    assert (last.num_preemptions, output.num_prefix_hits, parts_of(output)) == (1, 8, [("1", 5)])
    assert last.num_cached_tokens == 0


def test_blocks_that_are_computed_again_are_found_again() -> None:
    scheduler = make_scheduler(num_blocks=4, prefix_caching=True, preemption="recompute")
    last = make_sequence(1, prompt_token_ids=(6,) * 8, max_tokens=2)
    fill(scheduler, make_sequence(0, 8, max_tokens=2), last)
    run_to_end(scheduler)
    assert last.num_preemptions == 1

    scheduler.add(make_sequence(2, prompt_token_ids=(6,) * 9))

    assert run_step(scheduler)[0].num_prefix_hits == 8


def test_a_block_whose_last_token_is_in_flight_is_not_kept() -> None:
    scheduler = make_scheduler(prefix_caching=True, run_ahead=True)
    scheduler.add(make_sequence(0, 3))
    scheduler.schedule()
    scheduler.schedule()

    scheduler.abort("0")

    assert scheduler.kv_counts().cached_blocks == 0


def test_choices_share_the_prompt_and_copy_its_last_block_when_they_write() -> None:
    scheduler = make_scheduler()
    root = make_sequence(0, 6, n=3)
    scheduler.add(root)
    output = scheduler.schedule()
    assert [(item.num_tokens, item.num_samples) for item in output.scheduled] == [(6, 3)]
    assert output.slots.prefill == 3
    scheduler.update(output, [[7, 8, 9]])
    assert scheduler.kv_counts().used_blocks == 2

    output = scheduler.schedule()

    sequences = [item.sequence for item in output.scheduled]
    assert [(sequence.choice, sequence.token_ids[-1]) for sequence in sequences] == [(0, 7), (1, 8), (2, 9)]
    assert [source for source, _ in output.moves.copied] == [sequences[2].block_table[1]] * 2
    assert len({sequence.block_table[0] for sequence in sequences}) == 1
    assert len({sequence.block_table[1] for sequence in sequences}) == 3
    assert not any(sequence.shares_tail for sequence in sequences)  # from here on each takes the short way


def test_blocks_that_have_left_the_window_are_given_back() -> None:
    scheduler = make_scheduler(sliding_window=5)
    sequence = make_sequence(0, 9)
    scheduler.add(sequence)

    held = []
    for _ in range(6):
        run_step(scheduler)
        held.append([block > 0 for block in sequence.block_table])

    assert held[3] == [True] * 3
    assert held[4] == [False, False, True, True]  # position 12 looks back to 8; blocks go when one is taken


# Running ahead


def test_running_ahead_decides_a_step_before_the_token_of_the_last_is_read() -> None:
    scheduler = make_scheduler(run_ahead=True)
    sequence = make_sequence(0, 3)
    scheduler.add(sequence)
    first = scheduler.schedule()

    second = scheduler.schedule()

    assert parts_of(second) == [("0", 1)]
    assert (len(sequence.token_ids), sequence.num_tokens, sequence.num_computed_tokens) == (3, 5, 4)
    scheduler.update(first, [TOKEN])
    scheduler.update(second, [TOKEN])
    assert sequence.token_ids[3:] == [TOKEN, TOKEN]


@pytest.mark.parametrize("params", [{"presence_penalty": 1.0}, {"repetition_penalty": 1.1}, {"frequency_penalty": 0.1}])
def test_running_ahead_waits_for_a_token_that_the_next_depends_on(params: dict[str, float]) -> None:
    scheduler = make_scheduler(run_ahead=True)
    scheduler.add(make_sequence(0, 3, **params))
    scheduler.schedule()

    output = scheduler.schedule()

    assert (output.scheduled, output.slots.no_budget) == ([], 1)


def test_running_ahead_never_computes_beyond_the_last_token() -> None:
    scheduler = make_scheduler(run_ahead=True)
    scheduler.add(make_sequence(0, 3, max_tokens=1))
    scheduler.schedule()

    assert not scheduler.schedule().scheduled


def test_steps_are_recorded_in_the_order_they_were_decided() -> None:
    scheduler = make_scheduler(run_ahead=True)
    scheduler.add(make_sequence(0))
    scheduler.schedule()

    with pytest.raises(AssertionError, match="does not follow its schedule"):
        scheduler.update(scheduler.schedule(), [TOKEN])


def test_the_token_in_flight_of_what_ended_a_step_before_is_dropped() -> None:
    scheduler = make_scheduler(run_ahead=True)
    sequence = make_sequence(0, 3)
    scheduler.add(sequence)
    first, second = scheduler.schedule(), scheduler.schedule()

    assert len(scheduler.update(first, [EOS])) == 1
    assert scheduler.dropped() == {sequence}
    assert scheduler.update(second, [TOKEN]) == []
    assert sequence.token_ids[3:] == [EOS]
    scheduler.check()


# Contract


@pytest.mark.parametrize("token_ids", [[None], [TOKEN, TOKEN], []], ids=["missing", "one more", "none"])
def test_tokens_that_do_not_match_the_schedule_are_an_error(token_ids: list[int | None]) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence(0))
    output = scheduler.schedule()

    with pytest.raises((AssertionError, ValueError)):
        scheduler.update(output, token_ids)


def test_recording_a_step_twice_is_an_error() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence(0))
    output, _ = run_step(scheduler)

    with pytest.raises(AssertionError, match="does not follow its schedule"):
        scheduler.update(output, [TOKEN])


def test_kv_counts_show_blocks_and_the_positions_filled_in_them() -> None:
    scheduler = make_scheduler(num_blocks=10)
    add(scheduler, make_sequence(0, 5), make_sequence(1, 3))

    run_step(scheduler)

    assert scheduler.kv_counts() == KVCounts(
        capacity_blocks=10, used_blocks=3, cached_blocks=0, free_blocks=7, allocated_tokens=12, filled_tokens=8
    )


def break_table(scheduler: Scheduler, sequence: Sequence) -> None:
    sequence.block_table += scheduler._tables._pool.allocate(1)


def break_waiting(scheduler: Scheduler, sequence: Sequence) -> None:
    scheduler._lineup.waiting.append(scheduler._lineup.running.pop())


def break_order(scheduler: Scheduler, sequence: Sequence) -> None:
    scheduler._lineup.running.reverse()


def break_membership(scheduler: Scheduler, sequence: Sequence) -> None:
    del scheduler._lineup._live["1"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (break_table, "request 0 holds 2 blocks for 3 tokens"),
        (break_waiting, "request 1 waits and holds blocks"),
        (break_order, "running sequences are out of order"),
        (break_membership, "a sequence is in two places or in none"),
    ],
)
def test_the_audit_finds_damage(damage: Callable[[Scheduler, Sequence], None], message: str) -> None:
    scheduler = make_scheduler()
    sequences = [make_sequence(0, 3), make_sequence(1, 3)]
    add(scheduler, *sequences)
    run_step(scheduler)

    damage(scheduler, sequences[0])

    with pytest.raises(AssertionError, match=message):
        scheduler.check()


# Cost


def num_calls(act: Callable[[], object]) -> int:
    """Function calls made by `act`, built-in ones included: a cost that does not depend on the machine."""
    calls = 0

    def count(frame: object, event: str, arg: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        act()
    finally:
        sys.setprofile(before)
    return calls


def crowded(num_waiting: int) -> Scheduler:
    scheduler = make_scheduler(max_slots=2)
    add(scheduler, *(make_sequence(name) for name in range(2 + num_waiting)))
    run_step(scheduler)
    return scheduler


def test_a_step_costs_the_same_whatever_waits_behind_the_head() -> None:
    few, many = crowded(10), crowded(10_000)

    assert num_calls(many.schedule) == num_calls(few.schedule)


def test_aborting_10_000_waiting_sequences_costs_a_logarithm_each() -> None:
    scheduler = crowded(10_000)
    names = list(range(2, 10_002))
    random.Random(0).shuffle(names)

    calls = num_calls(lambda: [scheduler.abort(str(name)) for name in names])

    assert scheduler.num_waiting == 0
    assert calls < 10_000 * 60


def test_nobody_shares_what_a_broken_sequence_has_computed() -> None:
    scheduler = make_scheduler(prefix_caching=True)
    add(scheduler, make_sequence(0, 9))
    run_step(scheduler)

    scheduler.abort("0", is_broken=True)
    add(scheduler, make_sequence(1, 9))
    output, _ = run_step(scheduler)

    assert output.num_prefix_hits == 0
    assert scheduler.kv_counts().cached_blocks == 0
