"""Who runs in which step with how many tokens, and what a step records."""

import random
import sys
from collections.abc import Callable

import pytest

from engine.request import FinishReason
from engine.scheduler import Ended, Scheduler
from engine.sequence import Sequence
from engine.stats import KVCounts, SlotCounts
from tests.support.scheduling import EOS, TOKEN, make_scheduler, make_sequence, parts_of, run_step


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


def test_the_hand_example_takes_10_steps_and_20_slot_steps_2_of_them_idle() -> None:
    scheduler = make_scheduler(max_slots=2)
    for name, num_outputs in enumerate((2, 8, 3, 5), start=1):
        scheduler.add(make_sequence(name, max_tokens=num_outputs))
    returns: dict[str, int] = {}
    slots: list[SlotCounts] = []

    while scheduler.num_running + scheduler.num_waiting:
        output, ended = run_step(scheduler)
        slots.append(output.slots)
        returns |= {end.sequence.request.request_id: len(slots) for end in ended}

    assert returns == {"1": 2, "3": 5, "2": 8, "4": 10}
    assert list(returns) == ["1", "3", "2", "4"]
    assert (len(slots), sum(step.total for step in slots)) == (10, 20)
    assert sum(step.no_work for step in slots) == 2
    assert sum(step.prefill + step.decode for step in slots) == 18


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

    steps = [(parts_of(output), output.scheduled[0].samples) for output, _ in (run_step(scheduler) for _ in range(4))]

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


def test_a_running_sequence_without_budget_is_counted_as_such() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4, max_slots=3)
    scheduler.add(make_sequence(1, 1, priority=1))
    run_step(scheduler)
    scheduler.add(make_sequence(2, 9, priority=0))
    run_step(scheduler)

    output, _ = run_step(scheduler)

    assert parts_of(output) == [("2", 4)]
    assert output.slots == SlotCounts(prefill=1, no_budget=1, no_work=1)


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

    assert output.scheduled == ()
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

    assert [item.samples for item in (*first.scheduled, *second.scheduled)] == [False, False]
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
    sequence.block_table += scheduler._pool.allocate(1)


def break_waiting(scheduler: Scheduler, sequence: Sequence) -> None:
    scheduler._waiting.append(scheduler._running.pop())


def break_order(scheduler: Scheduler, sequence: Sequence) -> None:
    scheduler._running.reverse()


def break_membership(scheduler: Scheduler, sequence: Sequence) -> None:
    del scheduler._sequences["1"]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (break_table, "request 0 holds 2 blocks for 3 tokens"),
        (break_waiting, "request 1 waits and holds blocks"),
        (break_order, "running sequences are out of order"),
        (break_membership, "a live sequence is lost"),
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
