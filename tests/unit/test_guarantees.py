"""What the engine guarantees, as far as it can be decided without a model: each claim and the test that holds it.

claim                                                              test
same tokens, however batched, chunked, preempted, swapped, shared  test_scheduler_model.py, all of it
a request that can never fit is refused; the others finish         test_what_can_never_fit_is_refused_with_the_numbers
                                                                   parity: test_a_prompt_larger_than_the_pool_is_refused_...
a lone request that outgrows the pool ends and says why            test_scheduler: test_a_lone_sequence_that_outgrows_...
prompt of the model's length, one less, one more                   test_a_prompt_at_the_models_length_is_defined
no leak, after every step                                          World, after every move; test_nothing_is_held_when_...
progress: a step with work computes something                      World.decide; test_the_first_in_order_always_gets_on
waiting and nothing scheduled reports itself                       parity: test_waiting_work_that_nothing_schedules_...
at most one partly filled block for each sequence                  test_at_most_one_block_of_each_sequence_is_partly_filled
nothing starves, whatever flood of a higher priority               test_fairness.py; test_a_flood_of_a_higher_priority_...
bounded preemptions                                                test_between_two_preemptions_a_sequence_gets_on
a swap pool of 0, 1, enough and too few blocks                     test_scheduler_model: test_a_crowd_that_is_preempted_...
host pool full: recompute                                          test_scheduler: test_a_full_host_pool_means_recompute
running ahead near the full pool, N+1's need counted first         test_running_ahead_takes_no_block_that_the_plain_...
one bad request fails alone                                        test_a_choice_that_fails_in_flight_takes_nobody_along
a suspect runs alone, and nothing else is changed by it            test_suspects.py; World._check_alone; parity: the same
a second batch has nothing of the first                            test_a_second_batch_has_nothing_of_the_first
output neither shortened nor doubled after recompute, with forks   test_scheduler_model: World.check_outcomes
grammar state and penalties survive preemption and resumption      World._sample; test_a_grammar_is_told_each_token_once
prefix cache with prompt log probabilities: no row is missing      test_a_scored_prompt_skips_no_position_that_is_cached
contents of users with different salts never mix                   World fingerprints the salt; test_block_pool.py
a stale tail is never found                                        test_block_pool: test_a_stale_tail_is_never_found
cancelling a request frees every branch                            test_cancelling_frees_every_branch
blocks lost by a fault: counted and taken back, a test fails       parity: test_blocks_that_a_fault_has_lost_...
what a broken sequence has computed is shared with nobody          test_scheduler: test_nobody_shares_what_a_broken_...
no memory for the cache: the table, and numbers that work          test_kv_cache: test_no_room_at_all_..., test_more_than_...
memory is set aside for log probabilities                          parity: test_scored_tokens_are_as_many_as_memory_was_...
out of memory in a step: in halves, no request lost                parity: test_a_step_without_memory_is_computed_in_parts_...
bits that depend on nobody else, and do without the mode           parity: test_invariant.py
"""

from itertools import pairwise

import pytest

from engine.admission import check_request
from engine.errors import RequestRefused
from engine.geometry import ModelGeometry
from engine.request import Request, SamplingParams
from engine.reservation import FIRST_SHARE, SHARE_WEIGHT
from tests.support.scheduler_world import GRAMMAR, RecordingMatcher, World, make_request, run_world, undisturbed
from tests.support.scheduling import make_config

GEOMETRY = ModelGeometry(num_layers=1, num_kv_heads=1, head_dim=8, vocab_size=64, eos_token_ids=(2,), max_model_len=200)


def crowd(count: int = 6, **params: object) -> list[Request]:
    return [make_request(name, 1 + name % 4, max_tokens=9 + name, **params) for name in range(count)]


# Isolation


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (make_request(0, 16, max_tokens=1), "prompt: 16 tokens.*at most 15: the whole KV cache holds 16"),
        (make_request(0, 8, max_tokens=1, beam_width=3), "prompt: 8 tokens.*at most 7: the whole KV cache holds 8 for 3 beams"),
        (make_request(0, 1, n=9), "n: 9.*at most 8"),
    ],
    ids=["prompt", "beams", "choices"],
)
def test_what_can_never_fit_is_refused_with_the_numbers(request_: Request, message: str) -> None:
    with pytest.raises(RequestRefused, match=message):
        check_request(request_, make_config(num_blocks=4), GEOMETRY)


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "is_served"), [(19, 5, True), (20, 0, True), (20, 5, False), (21, 0, False)]
)
def test_a_prompt_at_the_models_length_is_defined(num_prompt: int, max_tokens: int, is_served: bool) -> None:
    request, options = make_request(0, num_prompt, max_tokens=max_tokens), {"max_model_len": 20}
    if not is_served:
        with pytest.raises(RequestRefused, match=f"prompt: {num_prompt} tokens"):
            check_request(request, make_config(**options), GEOMETRY)
        return

    check_request(request, make_config(**options), GEOMETRY)
    (outcome,) = run_world([request], **options).outcomes.values()

    assert len(outcome[0]) == 20 - num_prompt
    assert outcome[2] == ("model_length" if max_tokens else "")


def test_a_choice_that_fails_in_flight_takes_nobody_along() -> None:
    world = World(make_config(num_blocks=12, run_ahead=True))
    for request in crowd(n=1):
        world.add(request)
    world.add(make_request(9, 3, n=2, max_tokens=9))
    for _ in range(3):
        world.step()

    world.decide()
    world.abort("9", 1)
    world.abort("2")
    world.record_due()

    while not world.is_idle:
        world.step()
    world.check_outcomes()
    assert world.aborted == {("9", 1), ("2", 0)}


def test_a_second_batch_has_nothing_of_the_first() -> None:
    world = World(make_config(num_blocks=10, prefix_caching=True))
    for batch in range(2):
        world.outcomes.clear()
        world.requests.clear()
        for request in crowd(ignore_eos=batch == 0):
            world.add(request)
        while not world.is_idle:
            world.step()
        world.check_outcomes()


def test_a_flood_of_a_higher_priority_delays_by_aging_only() -> None:
    world = World(make_config(max_slots=1, aging=3))
    low = world.add(
        Request(request_id="low", prompt_token_ids=(5,), params=make_request(0, 1, max_tokens=1).params, priority=2)
    )
    for name in range(50):
        world.add(make_request(name, 1, max_tokens=1))

    while low.num_computed_tokens == 0:
        world.step()

    assert world.num_steps <= 2 * 3 + 1  # two priorities above its own, three overtake for each


# No leak, progress, memory


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("scheduling", ["continuous", "iteration_level", "request_level"])
def test_nothing_is_held_when_nothing_runs(scheduling: str, run_ahead: bool) -> None:
    options = {"scheduling": scheduling, "run_ahead": run_ahead, "num_blocks": 12, "prefix_caching": True}

    world = run_world(
        [*crowd(), make_request(8, 5, n=3, max_tokens=6), make_request(9, 5, beam_width=3, max_tokens=4)], **options
    )

    kv = world.scheduler.kv_counts()
    assert (kv.used_blocks, kv.free_blocks + kv.cached_blocks, kv.allocated_tokens) == (0, 12, 0)
    assert world.scheduler._lineup.is_empty


@pytest.mark.parametrize("num_host_blocks", [0, 3])
def test_the_first_in_order_always_gets_on(num_host_blocks: int) -> None:
    world = World(make_config(num_blocks=6, num_host_blocks=num_host_blocks, preemption="swap"))
    sequences = [world.add(request) for request in crowd()]

    while not world.is_idle:
        first = next(sequence for sequence in sequences if world.scheduler.holds(sequence.request.request_id, 0))
        before = len(first.token_ids)
        world.step()
        assert len(first.token_ids) == before + 1
    world.check_outcomes()


def test_between_two_preemptions_a_sequence_gets_on() -> None:
    world = World(make_config(num_blocks=6, max_num_batched_tokens=64))
    sequences = [world.add(request) for request in crowd()]
    lengths: dict[str, list[int]] = {sequence.request.request_id: [] for sequence in sequences}

    while not world.is_idle:
        for sequence in world.step().preempted:
            lengths[sequence.request.request_id].append(len(sequence.token_ids))

    assert world.num_preemptions > 3
    assert all(before < after for each in lengths.values() for before, after in pairwise(each))


@pytest.mark.parametrize("block_size", [2, 4, 16])
def test_at_most_one_block_of_each_sequence_is_partly_filled(block_size: int) -> None:
    world = World(make_config(num_blocks=12, block_size=block_size))
    for request in crowd():
        world.add(request)

    while not world.is_idle:
        world.step()
        kv = world.scheduler.kv_counts()
        assert kv.allocated_tokens - kv.filled_tokens <= (block_size - 1) * world.scheduler.num_running


@pytest.mark.parametrize("run_ahead", [False, True])
def test_running_ahead_takes_no_block_that_the_plain_loop_does_not_take(run_ahead: bool) -> None:
    most = sum(-(-(len(request.prompt_token_ids) + request.params.max_tokens - 1) // 4) for request in crowd())

    assert run_world(crowd(), num_blocks=most, run_ahead=run_ahead).num_preemptions == 0
    assert run_world(crowd(), num_blocks=most // 2, run_ahead=run_ahead).num_preemptions > 0


# Preemption and sharing


def test_a_grammar_is_told_each_token_once() -> None:
    world = World(make_config(num_blocks=6))
    sequences = [world.add(request) for request in crowd(grammar=GRAMMAR)]

    while not world.is_idle:
        world.step()

    assert world.num_preemptions > 0
    for sequence in sequences:
        assert isinstance(sequence.matcher, RecordingMatcher)
        (outcome,) = undisturbed(sequence.request, world.config).values()
        assert tuple(sequence.matcher.accepted) == outcome[0]


def test_a_scored_prompt_skips_no_position_that_is_cached() -> None:
    world = World(make_config(prefix_caching=True, max_scored_tokens=5))
    world.add(make_request(0, 12, max_tokens=1))
    world.step()

    scored = world.add(make_request(3, 12, max_tokens=1, prompt_logprobs=0))
    outputs = [world.step() for _ in range(3)]

    assert scored.prompt_logprobs == list(range(11))
    assert sum(output.num_prefix_hits for output in outputs) == 0
    assert [output.scheduled[0].num_scored for output in outputs] == [5, 5, 1]


def test_what_was_scored_before_a_preemption_is_found_in_the_cache_again() -> None:
    world = World(make_config(prefix_caching=True, num_blocks=5, preemption="recompute"))
    world.add(make_request(0, 8, max_tokens=6))
    last = world.add(make_request(1, 10, max_tokens=6, prompt_logprobs=0))

    hits = 0
    while not world.is_idle:
        hits += world.step().num_prefix_hits

    assert last.num_preemptions == 1
    assert hits > 0
    world.check_outcomes()


@pytest.mark.parametrize("num_steps", [0, 1, 3])
@pytest.mark.parametrize("params", [{"n": 3}, {"beam_width": 3}], ids=["choices", "beams"])
def test_cancelling_frees_every_branch(params: dict[str, int], num_steps: int) -> None:
    world = World(make_config())
    world.add(make_request(0, 6, max_tokens=9, **params))
    for _ in range(num_steps):
        world.step()

    world.abort("0")

    assert world.is_idle
    assert world.scheduler.kv_counts().allocated_tokens == 0


# What the scheduler tells its parts


def test_a_tenant_that_comes_late_takes_turns_with_one_that_waits() -> None:
    world = World(make_config(max_slots=1))

    def send(name: int, tenant: int) -> None:
        world.add(
            Request(request_id=f"{tenant}-{name}", prompt_token_ids=(5,), params=SamplingParams(max_tokens=1), tenant=tenant)
        )

    for name in range(10):
        send(name, 0)
    for _ in range(5):
        world.step()
    for name in range(5):
        send(name, 1)

    tenants = [world.step().scheduled[0].sequence.request.tenant for _ in range(6)]

    assert tenants.count(1) == 3


def test_the_expected_share_is_learnt_from_what_ends_and_what_is_preempted() -> None:
    world = run_world([make_request(0, 1, max_tokens=3)], reservation="ratio")
    after_end = world.scheduler._reservation._share
    assert after_end > FIRST_SHARE

    ended = 1 - (1 - FIRST_SHARE) * (1 - SHARE_WEIGHT) ** 6
    world = run_world(crowd(), num_blocks=6)

    assert world.num_preemptions > 0
    assert world.scheduler._reservation._share > ended


def test_a_prompt_alone_ends_when_its_last_chunk_is_recorded() -> None:
    world = World(make_config(max_num_batched_tokens=4, run_ahead=True))
    world.add(make_request(0, 6, max_tokens=0))
    world.decide()
    world.decide()

    assert world.record() == []
    assert len(world.record()) == 1


def test_all_prompts_of_a_step_share_what_may_be_scored_and_none_is_scored_again() -> None:
    world = World(make_config(num_blocks=5, max_scored_tokens=5, preemption="recompute"))
    requests = [make_request(0, 7, max_tokens=8, prompt_logprobs=0), make_request(1, 9, max_tokens=6, prompt_logprobs=0)]
    for request in requests:
        world.add(request)

    num_scored = 0
    while not world.is_idle:
        num_scored += sum(item.num_scored for item in world.step().scheduled)

    assert world.num_preemptions > 0
    assert num_scored == 6 + 8
    world.check_outcomes()


def test_the_beams_of_a_search_go_on_together_or_not_at_all() -> None:
    world = World(make_config(max_num_batched_tokens=4))
    world.add(make_request(0, 1, max_tokens=6))
    world.add(make_request(1, 1, max_tokens=6))
    world.add(make_request(2, 1, max_tokens=3, beam_width=3))
    world.step()

    assert [world.step().slots.decode for _ in range(5)] == [2] * 5
    assert world.step().slots.decode == 3


def test_a_static_batch_whose_last_is_aborted_returns_before_the_next_starts() -> None:
    world = World(make_config(scheduling="request_level"))
    world.add(make_request(0, 1, max_tokens=1))
    world.add(make_request(1, 1, max_tokens=9))
    world.step()
    world.add(make_request(2, 1, max_tokens=1))
    world.abort("1")

    assert not world.step().scheduled
    assert set(world.outcomes) == {("0", 0)}
    assert world.step().num_tokens == 1
