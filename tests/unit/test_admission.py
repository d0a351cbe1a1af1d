"""What a beam search excludes. What never fits is in test_guarantees.py and, by a whole engine, in parity/test_engine.py."""

import pytest

from engine.admission import check_request
from engine.errors import RequestRefused
from engine.geometry import ModelGeometry
from engine.request import Grammar, GrammarKind, Request, SamplingParams
from tests.support.scheduling import make_config

GEOMETRY = ModelGeometry(num_layers=1, num_kv_heads=1, head_dim=4, vocab_size=100, max_model_len=64, eos_token_ids=(2,))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 2),
        ("min_p", 0.1),
        ("top_k", 5),
        ("top_p", 0.9),
        ("presence_penalty", 0.5),
        ("frequency_penalty", 0.5),
        ("repetition_penalty", 1.5),
        ("logit_bias", ((7, 1.0),)),
        ("banned_token_ids", (7,)),
        ("allowed_token_ids", (7,)),
        ("logprobs", 0),
        ("grammar", Grammar(GrammarKind.REGEX, "what a user wrote")),
    ],
)
def test_a_beam_search_is_refused_with_what_changes_its_distribution_by_name_alone(name: str, value: object) -> None:
    params = SamplingParams(beam_width=2, **{name: value})
    request = Request(request_id="r", prompt_token_ids=(3,), params=params)

    with pytest.raises(RequestRefused, match=rf"beam_width: 2 .*not with {name}; ") as refusal:
        check_request(request, make_config(), GEOMETRY)

    assert "a user wrote" not in str(refusal.value)


def test_a_request_that_bans_all_it_allows_is_refused() -> None:
    params = SamplingParams(allowed_token_ids=(7, 8), banned_token_ids=(8, 9, 7))
    request = Request(request_id="r", prompt_token_ids=(3,), params=params)

    with pytest.raises(RequestRefused, match="allowed_token_ids: 2 ids"):
        check_request(request, make_config(), GEOMETRY)
