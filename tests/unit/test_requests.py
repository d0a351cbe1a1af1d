"""What the engine is asked for a job, at its start and after a log."""

from dataclasses import replace

import pytest

from engine.messages import TokenLogprobs
from engine.request import Grammar, GrammarKind, Request, SamplingParams
from tests.support import fake_engine
from worker.attempt import Attempt
from worker.claims import Delivery
from worker.errors import InvalidJob
from worker.frames import ControlFrame, Frame, TokenFrame, encode_frame
from worker.requests import check_fit, replay, requests_for
from worker.text import Tokenizer
from worker.wire import Job, parse_body

LOGPROBS = (TokenLogprobs(-0.5, ((5, -0.5),)), TokenLogprobs(-1.5, ((6, -1.0),)))
LOG = [
    TokenFrame(1, 0, 0, (5, 6), "w5 w6", 0, None, LOGPROBS),
    TokenFrame(1, 2, 0, (9,), "w9", 0, "stop", LOGPROBS[:1]),
    TokenFrame(1, 0, 2, (7,), " w7", 5, None, LOGPROBS[:1]),
]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(fake_engine.save_model(tmp_path_factory.mktemp("words")))


def started(tokenizer: Tokenizer, job: Job, frames: list[Frame], num_logged: int) -> Attempt:
    delivery = Delivery("a", "1-1", "normal", {}, 0, 2, 2, "lease:2", 7, num_logged, 0, "reclaimed")
    attempt = Attempt(delivery, job, (5,), num_logged=num_logged)
    replay(attempt, job, tokenizer, map(encode_frame, frames))
    return attempt


def resumed(tokenizer: Tokenizer, **body: object) -> tuple[Attempt, list[Request]]:
    job = parse_body({"prompt": "w5", "n": 3, "logprobs": 1} | body)
    attempt = started(tokenizer, job, LOG, 4)
    return attempt, requests_for(attempt, job)


def test_every_field_of_the_body_reaches_the_engine(tokenizer: Tokenizer) -> None:
    values = {
        "max_tokens": 9, "min_tokens": 1, "temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.25, "seed": 11,
        "presence_penalty": 1.0, "frequency_penalty": -1.0, "repetition_penalty": 1.5, "n": 2, "logprobs": 2,
        "prompt_logprobs": 3, "ignore_eos": True,
    }  # fmt: skip
    lists = {"stop_token_ids": [1], "allowed_token_ids": [5, 6], "banned_token_ids": [7]}
    grammar = {"type": "regex", "regex": "a+"}
    job = parse_body({"prompt": "w5", "logit_bias": {"5": -1}, "response_format": grammar} | values | lists)
    [request] = requests_for(started(tokenizer, job, [], 0), job, tenant=4, weight=2.0, cache_salt=b"s")
    assert request == Request(
        request_id="a:lease:2",
        prompt_token_ids=(5,),
        params=SamplingParams(
            logit_bias=((5, -1.0),),
            grammar=Grammar(GrammarKind.REGEX, "a+"),
            **values,  # type: ignore[arg-type]
            **{name: tuple(ids) for name, ids in lists.items()},  # type: ignore[arg-type]
        ),
        priority=1,
        tenant=4,
        weight=2.0,
        cache_salt=b"s",
    )


def test_a_beam_search_is_one_request(tokenizer: Tokenizer) -> None:
    job = parse_body({"prompt": "w5", "beam_width": 4})
    attempt = started(tokenizer, job, [], 0)
    assert [request.params.beam_width for request in requests_for(attempt, job)] == [4]
    assert len(attempt.outputs) == 4


def test_the_seed_of_the_job_s_first_claim_is_that_of_every_attempt(tokenizer: Tokenizer) -> None:
    job = Job(prompt="w5")
    assert [request.params.seed for request in requests_for(started(tokenizer, job, [], 0), job)] == [7]


def test_a_log_gives_each_choice_what_it_had(tokenizer: Tokenizer) -> None:
    outputs = resumed(tokenizer)[0].outputs
    assert [output.token_ids for output in outputs] == [[5, 6, 7], [], [9]]
    assert [output.text for output in outputs] == [" w5 w6 w7", "", " w9"]
    assert outputs[0].logprobs == [*LOGPROBS, LOGPROBS[0]]
    assert [output.finish_reason for output in outputs] == [None, None, "stop"]


def test_choices_that_have_not_ended_go_on_each_by_itself(tokenizer: Tokenizer) -> None:
    attempt, requests = resumed(tokenizer)
    assert [(request.choice, request.output_token_ids, request.params.n) for request in requests] == [
        (0, (5, 6, 7), 1),
        (1, (), 1),
    ]
    assert {request.request_id for request in requests} == {attempt.request_id}


def test_a_log_is_continued_in_its_order(tokenizer: Tokenizer) -> None:
    attempt, _ = resumed(tokenizer)
    assert list(attempt.order.after(0)) == [(0, 0, 2), (2, 0, 1), (0, 2, 3)]
    attempt.outputs[1].push([8])
    assert attempt.unlogged() == [(1, 0, 1)]


def test_a_choice_whose_log_holds_a_stop_string_has_ended(tokenizer: Tokenizer) -> None:
    assert [request.choice for request in resumed(tokenizer, stop="w6 w7")[1]] == [1]


@pytest.mark.parametrize("reason", ["cancelled", "error"])
def test_an_end_that_came_from_outside_is_not_the_choice_s(tokenizer: Tokenizer, reason: str) -> None:
    job = Job(prompt="w5")
    attempt = started(tokenizer, job, [TokenFrame(1, 0, 0, (5,), " w5", 0, reason)], 1)
    assert [request.output_token_ids for request in requests_for(attempt, job)] == [(5,)]


def test_nothing_is_asked_when_all_choices_have_ended(tokenizer: Tokenizer) -> None:
    job = Job(prompt="w5")
    attempt = started(tokenizer, job, [TokenFrame(1, 0, 0, (5,), " w5", 0, "length")], 1)
    assert requests_for(attempt, job) == []
    assert attempt.is_complete


def test_the_prompt_s_log_probabilities_are_computed_again_after_a_log(tokenizer: Tokenizer) -> None:
    attempt, requests = resumed(tokenizer, prompt_logprobs=2)
    assert [(request.choice, request.params.max_tokens, request.params.prompt_logprobs) for request in requests] == [
        (0, 256, None),
        (1, 256, None),
        (3, 0, 2),
    ]
    assert attempt.is_prompt_pending


def test_what_a_restart_voids_is_not_taken_over(tokenizer: Tokenizer) -> None:
    log: list[Frame] = [*LOG, ControlFrame(2, "restart", choice=0, index=1, offset=2)]
    job = parse_body({"prompt": "w5", "n": 3})
    attempt = started(tokenizer, job, log, 2)
    assert [output.token_ids for output in attempt.outputs] == [[5], [], [9]]
    assert list(attempt.order.after(0)) == [(0, 0, 1), (2, 0, 1)]


@pytest.mark.parametrize("gap", [replace(LOG[2], index=3), replace(LOG[2], choice=1)], ids=["token", "choice"])
def test_a_log_with_a_gap_is_not_continued(tokenizer: Tokenizer, gap: Frame) -> None:
    with pytest.raises(AssertionError, match="gap"):
        started(tokenizer, parse_body({"prompt": "w5", "n": 3}), [*LOG[:2], gap], 4)


@pytest.mark.parametrize(
    ("body", "field"),
    [({"n": 9}, "n"), ({"beam_width": 9}, "beam_width"), ({"prompt_logprobs": 20}, "prompt_logprobs")],
    ids=str,
)
def test_more_than_the_worker_has_or_a_result_holds_is_refused_by_name(body: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidJob) as refused:
        check_fit(parse_body({"prompt": "w5"} | body), num_prompt_tokens=50_000, max_slots=8)
    assert refused.value.field == field
