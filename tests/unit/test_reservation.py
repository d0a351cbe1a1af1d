"""What each policy sets aside for a sequence that starts."""

import pytest

from engine.config import CHOICES
from engine.request import Request, SamplingParams
from engine.reservation import FIRST_SHARE, Fit, Reservation, fit, max_tokens_held
from tests.support.scheduler_world import make_request, run_world
from tests.support.scheduling import make_config, make_sequence


@pytest.mark.parametrize(
    ("policy", "num_blocks"),
    [("paged", 2), ("declared", 5), ("oracle", 5), ("ratio", 4), ("max", 20), ("pow2", 6)],
)
def test_each_policy_sets_aside_its_number(policy: str, num_blocks: int) -> None:
    sequence = make_sequence(0, 7, max_tokens=13)  # blocks of 4: 7 -> 2, 20 -> 5, 7 + 6 -> 4, 80 -> 20, 7 + 16 -> 6

    assert Reservation(make_config(reservation=policy, max_model_len=80)).num_blocks(sequence) == num_blocks


@pytest.mark.parametrize(("max_tokens", "num_tokens"), [(0, 1), (1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (64, 64)])
def test_pow2_rounds_up_to_a_power_of_two(max_tokens: int, num_tokens: int) -> None:
    config = make_config(reservation="pow2", block_size=1)

    assert Reservation(config).num_blocks(make_sequence(0, 3, max_tokens=max_tokens)) == 3 + num_tokens


@pytest.mark.parametrize("policy", CHOICES["reservation"])
def test_nothing_sets_aside_more_than_a_sequence_may_hold_or_less_than_it_knows(policy: str) -> None:
    reservation = Reservation(make_config(reservation=policy, max_model_len=30, num_blocks=6))

    assert reservation.num_blocks(make_sequence(0, 3, max_tokens=1000)) <= 6
    assert reservation.num_blocks(make_sequence(0, 3, num_outputs=15, max_tokens=15)) >= 5


def test_choices_share_the_full_blocks_of_the_prompt_only() -> None:
    config = make_config(reservation="declared")

    assert Reservation(config).num_blocks(make_sequence(0, 10, max_tokens=6, n=3)) == 2 + 3 * 2


@pytest.mark.parametrize("policy", ["declared", "max", "pow2", "oracle"])
@pytest.mark.parametrize("run_ahead", [False, True])
def test_where_all_is_set_aside_nothing_is_preempted(policy: str, run_ahead: bool) -> None:
    requests = [make_request(name, 1 + name, max_tokens=9, n=1 + name % 2) for name in range(8)]

    assert run_world(requests, reservation="paged", num_blocks=9, max_model_len=18).num_preemptions > 0
    world = run_world(requests, reservation=policy, num_blocks=9, max_model_len=18, run_ahead=run_ahead)

    assert world.num_preemptions == 0


def test_ratio_learns_from_outputs_and_preemptions() -> None:
    reservation = Reservation(make_config(reservation="ratio", block_size=1, num_blocks=1000, max_model_len=1000))
    sequence = make_sequence(0, 10, max_tokens=100)
    short, full = make_sequence(1, max_tokens=100, num_outputs=1), make_sequence(2, max_tokens=100, num_outputs=100)

    numbers = [reservation.num_blocks(sequence)]
    for learn in (reservation.ended, reservation.ended, lambda _: reservation.preempted()):
        for _ in range(200):
            learn(full if len(numbers) == 2 else short)
        numbers.append(reservation.num_blocks(sequence))

    assert numbers == [10 + 100 * FIRST_SHARE, 11, 110, 110]


def test_one_preemption_raises_the_share() -> None:
    reservation = Reservation(make_config(reservation="ratio", block_size=1))
    before = reservation._share

    reservation.preempted()

    assert before < reservation._share < 1


def test_a_request_without_output_teaches_nothing() -> None:
    reservation = Reservation(make_config(reservation="ratio"))

    reservation.ended(make_sequence(0, max_tokens=0))

    assert reservation._share == FIRST_SHARE


@pytest.mark.parametrize(
    ("num_blocks", "num_available", "watermark", "answer"),
    [
        (3, 3, 0, Fit.NOW),
        (3, 4, 1, Fit.NOW),
        (3, 3, 1, Fit.LATER),
        (4, 3, 0, Fit.LATER),
        (10, 9, 0, Fit.LATER),
        (11, 10, 0, Fit.NEVER),
    ],
)
def test_admission_has_three_answers(num_blocks: int, num_available: int, watermark: int, answer: Fit) -> None:
    assert fit(num_blocks, num_available, 10, watermark) is answer


@pytest.mark.parametrize(
    ("num_prompt", "width", "num_tokens"), [(1, 2, 20), (3, 3, 12), (4, 3, 16), (9, 4, 16), (40, 5, 40), (44, 2, 40)]
)
def test_beams_share_the_full_blocks_of_the_prompt_only(num_prompt: int, width: int, num_tokens: int) -> None:
    config = make_config(num_blocks=10, max_model_len=40)
    request = Request(request_id="r", prompt_token_ids=(3,) * num_prompt, params=SamplingParams(beam_width=width))

    assert max_tokens_held(request, config) == num_tokens
