"""Suspects: which steps run one alone, what becomes of the others meanwhile, and when it is over."""

from dataclasses import replace

import pytest

from engine.config import CHOICES
from engine.decision import SchedulerOutput
from engine.request import Request
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.stats import SlotCounts
from tests.support.scheduler_world import World, make_request
from tests.support.scheduling import make_config, make_scheduler, make_sequence, parts_of, run_step


def suspect(name: int, num_prompt: int = 1, steps: int = 2, **params: object) -> Request:
    return replace(make_request(name, num_prompt, **params), isolated_steps=steps)


def running(*sequences: Sequence, **options: object) -> Scheduler:
    """A scheduler that has made one step with these."""
    scheduler = make_scheduler(**options)
    for sequence in sequences:
        scheduler.add(sequence)
    run_step(scheduler)
    assert scheduler.num_running == len(sequences)
    return scheduler


def until_cleared(world: World) -> list[set[str]]:
    """Who was in each step up to the one that cleared somebody."""
    names: list[set[str]] = []
    while not world.cleared:
        names.append({item.sequence.request.request_id for item in world.step().scheduled})
        assert len(names) < 50, "nobody is cleared"
    return names


def finish(world: World) -> World:
    while not world.is_idle:
        world.step()
        assert world.num_steps < 500, "it does not end"
    world.check_outcomes()
    return world


# Alone


def test_a_suspect_runs_alone_through_its_prefill_and_as_many_steps_as_it_asks_for() -> None:
    scheduler = running(make_sequence(0))
    scheduler.add(make_sequence(1, 3, isolated_steps=2))

    steps, cleared = [], []
    for _ in range(4):
        steps.append(parts_of(run_step(scheduler)[0]))
        cleared.append(scheduler.take_cleared())

    assert steps == [[("1", 3)], [("1", 1)], [("1", 1)], [("0", 1), ("1", 1)]]
    assert cleared == [(), (), ("1",), ()]


def test_the_others_keep_what_they_hold_and_their_slots_are_counted_as_held_up() -> None:
    neighbour = make_sequence(0, 6)
    scheduler = running(neighbour, make_sequence(1, 6), max_slots=5)
    blocks = list(neighbour.block_table)
    scheduler.add(make_sequence(2, 3, isolated_steps=1))
    scheduler.add(make_sequence(3, 3))

    first, second = run_step(scheduler)[0], run_step(scheduler)[0]

    assert first.slots == SlotCounts(prefill=1, no_budget=3, no_work=1)
    assert second.slots == SlotCounts(decode=1, no_budget=3, no_work=1)
    assert (neighbour.block_table, neighbour.num_preemptions) == (blocks, 0)


def test_a_prefill_in_chunks_is_alone_and_does_not_count() -> None:
    scheduler = running(make_sequence(0), max_num_batched_tokens=4)
    scheduler.add(make_sequence(1, 9, isolated_steps=1))

    assert [parts_of(run_step(scheduler)[0]) for _ in range(5)] == [
        [("1", 4)],
        [("1", 4)],
        [("1", 1)],
        [("1", 1)],
        [("0", 1), ("1", 1)],
    ]


def test_a_suspect_comes_before_whatever_has_a_higher_priority() -> None:
    scheduler = make_scheduler(max_slots=1)
    scheduler.add(make_sequence(0, priority=0))
    scheduler.add(make_sequence(1, priority=2, isolated_steps=1))

    assert parts_of(run_step(scheduler)[0]) == [("1", 1)]


def test_suspects_run_one_after_another_in_order_of_arrival() -> None:
    world = World(make_config())
    for name in range(3):
        world.add(replace(suspect(name, steps=1, max_tokens=9), priority=-name))

    names = [{item.sequence.request.request_id for item in world.step().scheduled} for _ in range(7)]

    assert names == [{"0"}, {"0"}, {"1"}, {"1"}, {"2"}, {"2"}, {"0", "1", "2"}]
    assert world.cleared == ["0", "1", "2"]


def test_a_suspect_finds_what_others_have_computed() -> None:
    scheduler = running(make_sequence(0, 9), prefix_caching=True)
    scheduler.add(make_sequence(1, 9, isolated_steps=1))

    output, _ = run_step(scheduler)

    assert (parts_of(output), output.num_prefix_hits) == ([("1", 1)], 8)


# Room


def test_without_a_free_slot_the_last_in_order_gives_way() -> None:
    first, last = make_sequence(0), make_sequence(1)
    scheduler = running(first, last, max_slots=2)
    scheduler.add(make_sequence(2, isolated_steps=1))

    output, _ = run_step(scheduler)

    assert (output.preempted, parts_of(output)) == ((last,), [("2", 1)])
    assert first.num_preemptions == 0


def test_without_free_blocks_as_many_give_way_as_are_needed() -> None:
    others = [make_sequence(name, 7) for name in range(3)]
    scheduler = running(*others, num_blocks=7)
    scheduler.add(make_sequence(3, 9, isolated_steps=1))

    output, _ = run_step(scheduler)

    assert (output.preempted, parts_of(output)) == ((others[2],), [("3", 9)])


def test_a_suspect_that_waits_for_its_budget_preempts_nobody() -> None:
    scheduler = running(make_sequence(0, 4), num_blocks=3, chunked_prefill=False, max_num_batched_tokens=4)
    scheduler.add(make_sequence(1, 4, isolated_steps=1))
    scheduler.add(make_sequence(1, 4, isolated_steps=1, choice=1))

    output, _ = run_step(scheduler)

    assert (output.preempted, parts_of(output)) == ((), [("1", 4)])


def test_a_suspect_that_grows_takes_the_blocks_of_others_and_gives_none() -> None:
    world = World(make_config(num_blocks=6))
    other = world.add(make_request(0, 8, max_tokens=8))
    world.step()
    alone = world.add(suspect(1, 8, steps=12, max_tokens=14))

    until_cleared(world)

    assert (other.num_preemptions, alone.num_preemptions) == (1, 0)
    finish(world)


def test_what_was_swapped_out_for_a_suspect_comes_back() -> None:
    world = World(make_config(num_blocks=4, num_host_blocks=9, preemption="swap"))
    world.add(make_request(0, 8, max_tokens=5))
    world.step()
    world.add(suspect(1, 9, max_tokens=4))

    output = world.step()

    assert output.num_swap_preemptions == 1
    finish(world)


def test_once_it_is_cleared_it_gives_way_like_any_other() -> None:
    world = World(make_config(num_blocks=4))
    first = world.add(make_request(0, 4, max_tokens=9))
    world.step()
    last = world.add(suspect(1, 4, steps=1, max_tokens=9))
    until_cleared(world)

    finish(world)

    assert (first.num_preemptions, last.num_preemptions) == (0, 1)


def test_a_static_batch_is_not_broken_up_for_a_suspect() -> None:
    scheduler = running(make_sequence(0, max_tokens=3), scheduling="request_level")
    scheduler.add(make_sequence(1, max_tokens=4, isolated_steps=1))
    scheduler.add(make_sequence(2))

    assert [parts_of(run_step(scheduler)[0]) for _ in range(7)] == [[("0", 1)]] * 2 + [[("1", 1)]] * 4 + [[("2", 1)]]


# All of a request


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("params", [{}, {"n": 3}, {"beam_width": 3}], ids=["one", "choices", "beams"])
def test_choices_and_beams_are_alone_with_each_other_as_long(params: dict[str, int], run_ahead: bool) -> None:
    world = World(make_config(run_ahead=run_ahead))
    world.add(make_request(0, 3, max_tokens=20))
    world.step()
    world.add(suspect(1, 6, steps=3, max_tokens=9, **params))

    names = until_cleared(world)

    assert len([step for step in names if step == {"1"}]) in (4, 5)  # running ahead, one more is launched
    assert set().union(*names) == {"1"} or not run_ahead
    finish(world)


def test_choices_that_arrive_one_by_one_have_one_window() -> None:
    scheduler = running(make_sequence(0))
    for choice in (2, 0):
        scheduler.add(make_sequence(1, 3, num_outputs=2, choice=choice, isolated_steps=1))

    outputs = [run_step(scheduler)[0] for _ in range(3)]

    assert [parts_of(output) for output in outputs] == [
        [("1", 5), ("1", 5)],
        [("1", 1), ("1", 1)],
        [("0", 1), ("1", 1), ("1", 1)],
    ]
    assert scheduler.take_cleared() == ("1",)


def test_another_suspect_does_not_come_between_the_choices_of_one() -> None:
    world = World(make_config())
    for name, choice in ((1, 0), (2, 0), (1, 1)):
        world.add(replace(suspect(name, max_tokens=9), output_token_ids=(6,), choice=choice))

    assert [item.sequence.request.request_id for item in world.step().scheduled] == ["1", "1"]


def test_a_window_lasts_until_each_choice_has_had_its_prefill() -> None:
    world = World(make_config(max_slots=2))
    for choice in range(3):
        part = replace(suspect(1, 5, steps=1, max_tokens=4 + choice), output_token_ids=(6,), choice=choice)
        world.add(part)

    names = until_cleared(world)

    assert len(names) == 5  # the third starts in the slot of the first, when that has its 3 tokens
    finish(world)


def test_a_choice_that_comes_after_its_window_has_one_of_its_own_and_takes_room_even_from_its_siblings() -> None:
    scheduler = running(make_sequence(0, 3), num_blocks=3)
    early, late = (make_sequence(1, 3, num_outputs=1, choice=choice, isolated_steps=1) for choice in (0, 1))
    scheduler.add(early)
    run_step(scheduler)
    run_step(scheduler)
    assert scheduler.take_cleared() == ("1",)
    late.order = (0, 2, 1)
    scheduler.add(late)
    scheduler.add(make_sequence(3, 3))

    output, _ = run_step(scheduler)

    assert (output.preempted, [item.sequence for item in output.scheduled]) == ((early,), [late])
    run_step(scheduler)
    assert scheduler.take_cleared() == ("1",)


# Over


def test_a_window_is_over_when_its_last_step_is_recorded() -> None:
    scheduler = make_scheduler(run_ahead=True)
    scheduler.add(make_sequence(0))
    scheduler.add(make_sequence(1, isolated_steps=1))
    outputs: list[SchedulerOutput] = [scheduler.schedule(), scheduler.schedule(), scheduler.schedule()]

    scheduler.update(outputs[0], [7])
    assert scheduler.take_cleared() == ()
    scheduler.update(outputs[1], [7])

    assert [parts_of(output) for output in outputs] == [[("1", 1)]] * 3
    assert scheduler.take_cleared() == ("1",)
    assert parts_of(scheduler.schedule()) == [("1", 1), ("0", 1)]


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
def test_a_suspect_that_ends_in_its_window_is_not_cleared_and_lets_the_others_go_on(max_tokens: int) -> None:
    world = World(make_config())
    world.add(make_request(0, max_tokens=20, num_prompt=1))
    world.add(suspect(1, steps=2, max_tokens=max_tokens))

    finish(world)

    assert world.cleared == []


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_aborting_a_suspect_lets_the_others_go_on_at_once(num_steps: int) -> None:
    scheduler = running(make_sequence(0))
    scheduler.add(make_sequence(1, n=2, isolated_steps=5))
    for _ in range(num_steps):
        output = scheduler.schedule()
        scheduler.update(output, [[7, 7] if item.num_samples == 2 else 7 for item in output.scheduled])

    scheduler.abort("1")

    assert parts_of(run_step(scheduler)[0]) == [("0", 1)]
    assert scheduler.take_cleared() == ()


def test_a_suspect_that_comes_back_has_a_whole_window_again() -> None:
    scheduler = make_scheduler()
    for _ in range(2):
        scheduler.add(make_sequence(1, isolated_steps=2))
        run_step(scheduler)
        run_step(scheduler)
        assert scheduler.take_cleared() == ()
        scheduler.abort("1")


def test_what_has_ended_meanwhile_is_not_told_to_be_cleared() -> None:
    scheduler = running(make_sequence(1, max_tokens=3, isolated_steps=1))

    run_step(scheduler)
    run_step(scheduler)

    assert scheduler.take_cleared() == ()


@pytest.mark.parametrize("reservation", CHOICES["reservation"])
@pytest.mark.parametrize("scheduling", CHOICES["scheduling"])
@pytest.mark.parametrize("run_ahead", [False, True])
def test_under_every_policy_suspects_and_neighbours_yield_what_they_yield_alone(
    scheduling: str, reservation: str, run_ahead: bool
) -> None:
    options = {"scheduling": scheduling, "reservation": reservation, "run_ahead": run_ahead, "prefix_caching": True}
    world = World(make_config(num_blocks=24, max_slots=4, max_num_batched_tokens=6, max_model_len=40, **options))
    for name in range(4):
        world.add(make_request(name, 1 + 3 * name, max_tokens=12))
    world.step()
    for name, params in enumerate(({}, {"n": 2}, {"beam_width": 2}), start=4):
        world.add(suspect(name, 5 + name, max_tokens=8, **params))

    finish(world)

    assert world.cleared == ["4", "5", "6"]
