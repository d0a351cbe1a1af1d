"""Jobs of several choices, beams, log probabilities and formats through a worker process, a real server and the fake engine."""

import uuid

import pytest

from engine.request import Grammar, GrammarKind
from tests.support import fake_engine
from tests.support.jobs import Producer, answer, answer_of_choice, events, text, token_ids, words
from tests.support.wait import wait_until
from tests.support.worker import WorkerMaker
from worker.client import Client
from worker.frames import Result, TokenFrame

SLOW_S = 0.02
PROMPT = "w5 w6"


def check_choices(result: Result, max_tokens: int, n: int, prompt: str = PROMPT) -> None:
    expected = [answer_of_choice(prompt, max_tokens, choice) for choice in range(n)]
    assert [list(choice.token_ids) for choice in result.choices] == expected
    assert [choice.index for choice in result.choices] == list(range(n))
    assert [choice.finish_reason for choice in result.choices] == ["length", *["stop"] * (n - 1)]
    assert result.usage.completion_tokens == sum(map(len, expected))


def test_choices_of_different_lengths_are_streamed_each_by_itself(shared: Producer) -> None:
    job_id = uuid.uuid4().hex
    with shared.listening([job_id]) as heard:
        result = shared.result(shared.add(job_id, prompt=PROMPT, max_tokens=40, n=3))
        wait_until(lambda: "end" in events(heard[job_id]), message="an end on the channel")
    check_choices(result, 40, 3)
    assert heard[job_id] == shared.log(job_id)
    for choice in range(3):
        assert token_ids(heard[job_id], choice) == list(result.choices[choice].token_ids)
        assert text(heard[job_id], choice) == result.choices[choice].text
    assert shared.num_logged(job_id) == result.usage.completion_tokens


def test_the_last_frame_of_a_choice_says_why_it_ended(shared: Producer) -> None:
    job_id = shared.add(prompt=PROMPT, max_tokens=40, n=3)
    shared.result(job_id)
    last = {frame.choice: frame for frame in shared.log(job_id) if isinstance(frame, TokenFrame)}
    assert {choice: frame.finish_reason for choice, frame in last.items()} == {0: "length", 1: "stop", 2: "stop"}


def test_a_client_holds_each_choice_once(shared: Producer, redis_url: str, shared_queue: str) -> None:
    with Client(redis_url, shared_queue) as client:
        stream = client.stream(client.enqueue(PROMPT, max_tokens=40, temperature=0, n=3), timeout_s=10)
        held = dict.fromkeys(range(3), "")
        for delta in stream:
            assert delta.offset == len(held[delta.choice])
            held[delta.choice] += delta.text
    assert stream.result
    assert [choice.text for choice in stream.result.choices] == list(held.values())


def test_a_stop_string_ends_one_of_three_choices(shared: Producer) -> None:
    ids = answer(PROMPT, 8, choice=1)
    others = answer_of_choice(PROMPT, 40, 0) + answer_of_choice(PROMPT, 40, 2)
    assert ids[7] not in others
    result = shared.result(shared.add(prompt=PROMPT, max_tokens=40, n=3, stop=f"w{ids[6]} w{ids[7]}"))
    assert [list(choice.token_ids) for choice in result.choices] == [
        answer_of_choice(PROMPT, 40, 0),
        ids,
        answer_of_choice(PROMPT, 40, 2),
    ]
    assert [choice.finish_reason for choice in result.choices] == ["length", "stop", "stop"]
    assert result.choices[1].text == words(ids[:6]) + " "


def test_a_beam_search_streams_nothing_and_ends_with_all_its_beams(shared: Producer) -> None:
    job_id = shared.add_json(prompt=PROMPT, max_tokens=10, beam_width=3)
    result = shared.result(job_id)
    assert [len(choice.token_ids) for choice in result.choices] == [10, 10, 10]
    assert [choice.score for choice in result.choices] == [0.0, -0.125, -0.25]
    assert result.usage.completion_tokens == 30
    assert not any(isinstance(frame, TokenFrame) for frame in shared.log(job_id))


def test_log_probabilities_of_prompt_and_tokens_are_in_frames_and_result(shared: Producer) -> None:
    job_id = shared.add(prompt="w5 w6 w7", max_tokens=20, logprobs=2, prompt_logprobs=1)
    result = shared.result(job_id)
    ids = answer("w5 w6 w7", 20)
    assert result.choices[0].logprobs == fake_engine.logprobs_of(ids, 2)
    assert result.prompt_logprobs == fake_engine.logprobs_of([6, 7], 1)
    logged = [told for frame in shared.log(job_id) if isinstance(frame, TokenFrame) for told in frame.logprobs]
    assert tuple(logged) == result.choices[0].logprobs


def test_a_json_schema_reaches_the_engine(shared: Producer) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
    result = shared.result(shared.add(prompt=PROMPT, max_tokens=8, response_format=wanted))
    grammar = Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object"}')
    assert list(result.choices[0].token_ids) == answer(PROMPT, 8, grammar=grammar) != answer(PROMPT, 8)


@pytest.mark.parametrize("body", [{"n": 9}, {"beam_width": 9}], ids=str)
def test_more_choices_than_slots_are_refused_by_name(shared: Producer, body: dict[str, int]) -> None:
    result = shared.result(shared.add_json(prompt=PROMPT, **body))
    assert result.error == f"{next(iter(body))}: 9: at most 8, the slots of this worker; ask for fewer"


def test_a_cancel_frees_every_choice(make_worker: WorkerMaker, producer: Producer, redis_url: str, queue: str) -> None:
    worker = make_worker(delay_s=SLOW_S)
    job_id = producer.add(prompt=PROMPT, max_tokens=400, n=3)
    wait_until(lambda: producer.num_logged(job_id) > 8, message="tokens")
    assert worker.metric("slots_active") == 3
    with Client(redis_url, queue) as client:
        client.cancel(job_id)
    result = producer.result(job_id)
    assert [choice.finish_reason for choice in result.choices] == ["cancelled"] * 3
    for choice in range(3):
        assert list(result.choices[choice].token_ids) == token_ids(producer.log(job_id), choice)
    wait_until(lambda: worker.metric("slots_active") == 0, message="free slots")


@pytest.mark.parametrize("more", [{}, {"stream": False}, {"logprobs": 1, "prompt_logprobs": 0}], ids=str)
def test_a_killed_worker_s_choices_go_on_elsewhere_without_repeat_or_gap(
    make_worker: WorkerMaker, producer: Producer, more: dict[str, object]
) -> None:
    first = make_worker("--lease-s", "0.5", delay_s=SLOW_S)
    job_id = producer.add(prompt=PROMPT, max_tokens=90, n=3, **more)
    wait_until(lambda: producer.num_logged(job_id) > 20, message="tokens")
    first.process.kill()
    second = make_worker("--lease-s", "0.5")
    result = producer.result(job_id)
    check_choices(result, 90, 3)
    frames = producer.log(job_id)
    for choice in range(3):
        assert token_ids(frames, choice) == list(result.choices[choice].token_ids)
        if "logprobs" in more:
            assert result.choices[choice].logprobs == fake_engine.logprobs_of(result.choices[choice].token_ids, 1)
    if "logprobs" in more:
        assert result.prompt_logprobs == fake_engine.logprobs_of([6], 0)
    assert events(frames) == ["start", "start", "end"]
    assert result.usage.resumed_tokens > 20
    assert second.metric("jobs_claimed_total", "reclaimed") == 1


def test_a_choice_that_had_ended_is_not_computed_again(make_worker: WorkerMaker, producer: Producer) -> None:
    first = make_worker("--lease-s", "0.5", delay_s=SLOW_S)
    job_id = producer.add(prompt=PROMPT, max_tokens=90, n=6)
    wait_until(lambda: any(getattr(frame, "finish_reason", None) for frame in producer.log(job_id)), message="an end")
    first.process.kill()
    num_logged = producer.num_logged(job_id)
    second = make_worker("--lease-s", "0.5")
    check_choices(producer.result(job_id), 90, 6)
    num_all = sum(len(answer_of_choice(PROMPT, 90, choice)) for choice in range(6))
    wait_until(lambda: second.metric("generated_tokens_total") >= num_all - num_logged, message="the last step's report")
    assert second.metric("generated_tokens_total") == num_all - num_logged


def test_a_beam_search_starts_over_after_a_crash(make_worker: WorkerMaker, producer: Producer) -> None:
    first = make_worker("--lease-s", "0.5", delay_s=SLOW_S)
    job_id = producer.add_json(prompt=PROMPT, max_tokens=60, beam_width=2)
    wait_until(lambda: first.metric("slots_active") == 1, message="a running search")
    first.process.kill()
    make_worker("--lease-s", "0.5")
    result = producer.result(job_id)
    assert (result.state, len(result.choices), result.usage.resumed_tokens) == ("succeeded", 2, 0)
