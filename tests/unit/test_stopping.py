"""When a sequence ends, and the reason it gives."""

import pytest

from engine.request import FinishReason
from engine.stopping import Stop, check_stop
from tests.support.scheduling import EOS, TOKEN, make_sequence

STOP = Stop(FinishReason.STOP)
LENGTH = Stop(FinishReason.LENGTH)


def stop_of(
    output_token_ids: tuple[int, ...], *, num_prompt: int = 3, limit: int = 100, model: int = 100, **params: object
) -> Stop | None:
    return check_stop(make_sequence(0, num_prompt, output_token_ids=output_token_ids, limit=limit, **params), model)


def test_a_sequence_with_room_goes_on() -> None:
    assert stop_of((TOKEN, TOKEN), max_tokens=3) is None


def test_eos_ends_it() -> None:
    assert stop_of((TOKEN, EOS)) == STOP


def test_eos_is_a_token_like_others_when_ignored() -> None:
    assert stop_of((TOKEN, EOS), ignore_eos=True) is None


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_stop_id_ends_it_whether_or_not_eos_is_ignored(ignore_eos: bool) -> None:
    assert stop_of((TOKEN, 9), stop_token_ids=(8, 9), ignore_eos=ignore_eos) == STOP


def test_only_the_last_output_token_can_end_it() -> None:
    assert stop_of((EOS, TOKEN)) is None


def test_an_eos_at_the_end_of_the_prompt_does_not_end_it() -> None:
    sequence = make_sequence(0, 3)
    sequence.token_ids[-1] = EOS

    assert check_stop(sequence, 100) is None


@pytest.mark.parametrize(("num_outputs", "stop"), [(2, None), (3, STOP)])
def test_eos_counts_from_min_tokens_on(num_outputs: int, stop: Stop | None) -> None:
    assert stop_of((*(TOKEN,) * (num_outputs - 1), EOS), min_tokens=3) == stop


@pytest.mark.parametrize(("num_outputs", "stop"), [(2, None), (3, LENGTH), (4, LENGTH)])
def test_max_tokens_ends_it(num_outputs: int, stop: Stop | None) -> None:
    assert stop_of((TOKEN,) * num_outputs, max_tokens=3) == stop


def test_max_tokens_ends_it_below_min_tokens_too() -> None:
    assert stop_of((TOKEN,) * 3, max_tokens=3, min_tokens=5) == LENGTH


def test_a_stop_on_the_last_allowed_token_is_a_stop() -> None:
    assert stop_of((TOKEN, TOKEN, EOS), max_tokens=3, limit=6) == STOP


def test_max_tokens_comes_before_the_capacity() -> None:
    assert stop_of((TOKEN,) * 3, max_tokens=3, limit=6, model=6) == LENGTH


@pytest.mark.parametrize(("model", "detail"), [(6, "model_length"), (7, "kv_capacity")])
def test_a_full_sequence_ends_with_what_limits_it(model: int, detail: str) -> None:
    assert stop_of((TOKEN,) * 3, limit=6, model=model) == Stop(FinishReason.LENGTH, detail)


def test_one_token_below_the_capacity_goes_on() -> None:
    assert stop_of((TOKEN,) * 2, limit=6, model=6) is None
