"""A batch file on an engine of this machine: every line is answered once, whatever becomes of its neighbours."""

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from bench.batch_files import Road, growth, sampled, write_lines
from engine.request import Request, SamplingParams
from tests.support.batch_run import BatchRun, request
from tests.support.fake_engine import POISON_ID, next_token
from tests.support.wait import wait_until

MakeBatch = Callable[..., BatchRun]


@pytest.fixture
def batch_of(tmp_path: Path, fake_model: Path) -> MakeBatch:
    return lambda lines: BatchRun(tmp_path, fake_model, lines)


def text_for(line: dict[str, Any]) -> str:
    """What the fake engine says to a line without sampling."""
    ids = tuple(int(word[1:]) for word in line["body"]["prompt"].split())
    asked = Request(request_id="r", prompt_token_ids=ids, params=SamplingParams(temperature=0.0))
    return "".join(f" w{next_token(asked, index)}" for index in range(line["body"]["max_tokens"]))


@pytest.mark.parametrize("order", ["done", "input"])
def test_every_line_has_its_own_answer_as_openai_writes_it(batch_of: MakeBatch, order: str) -> None:
    lines = [request(number, max_tokens=2 + number * 7 % 11, temperature=0) for number in range(300)]
    batch = batch_of(lines)
    said, told_last = batch.run("--order", order, "--json")
    answers = batch.answers()
    told = {answer["custom_id"]: Completion.model_validate(answer["response"]["body"]) for answer in answers}
    assert {id_: body.choices[0].text for id_, body in told.items()} == {line["custom_id"]: text_for(line) for line in lines}
    assert len(answers) == len(lines)
    assert (order == "done") or list(told) == [line["custom_id"] for line in lines]
    summary = json.loads(said)
    assert (summary["lines"], summary["answers"], summary["errors"]) == (300, 300, 0)
    assert summary["generated_tokens"] == sum(body.usage.completion_tokens for body in told.values() if body.usage)
    assert summary["slot_steps"]["decode"] > 0
    assert re.search(r"^worker: batch: 300 lines, 0 of them errors, .* tokens/s; slots: decode \d+%", told_last, re.MULTILINE)


def test_a_real_model_answers_a_chat_as_openai_writes_it(tmp_path: Path) -> None:
    body = {"messages": [{"role": "user", "content": "What is 2 + 2?"}], "max_tokens": 3, "temperature": 0, "logprobs": True}
    chat = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    batch = BatchRun(tmp_path, None, [chat, chat | {"custom_id": "b"}])
    batch.run("--order", "input")
    first, second = [ChatCompletion.model_validate(answer["response"]["body"]).choices[0] for answer in batch.answers()]
    assert first.message.content
    assert first.message.content == second.message.content
    assert first.logprobs is not None
    assert len(first.logprobs.content or ()) == 3


def test_bad_lines_are_told_and_the_others_run(batch_of: MakeBatch) -> None:
    batch = batch_of([request(1), request(2, suffix="w5"), request(3, model="gpt-4o"), request(4, model="fake")])
    batch.run(code=1)
    assert {answer["custom_id"] for answer in batch.answers()} == {"c1", "c4"}
    told = {record["custom_id"]: record["response"] for record in batch.refusals()}
    assert {id_: response["status_code"] for id_, response in told.items()} == {"c2": 400, "c3": 404}
    assert told["c3"]["body"]["error"]["code"] == "model_not_found"


def test_a_line_that_kills_the_engine_is_an_error_and_its_neighbours_are_answered(batch_of: MakeBatch) -> None:
    batch = batch_of([request(number, prompt=f"w{POISON_ID}" if number == 5 else "") for number in range(24)])
    _, told = batch.run("--max-slots", "4", code=1)
    [refusal] = batch.refusals()
    assert (refusal["custom_id"], refusal["response"]["status_code"]) == ("c5", 500)
    assert refusal["response"]["body"]["error"]["code"] == "dead_letter"
    assert len(batch.answers()) == 23
    assert all(line.startswith("worker: ") for line in told.splitlines())


def test_a_batch_that_names_another_model_throughout_ends_before_an_engine_starts(batch_of: MakeBatch) -> None:
    batch = batch_of([request(number, model="gpt-4o") for number in range(50)])
    _, told = batch.run(code=2, engine=["/nowhere/engine"])
    assert len(told.splitlines()) == 1
    assert "gpt-4o" in told
    assert "--ignore-model" in told
    assert "--served-name" in told


def test_without_an_engine_it_ends_in_one_line_and_nothing_is_lost(batch_of: MakeBatch) -> None:
    batch = batch_of([request(1)])
    batch.run(code=6, engine=["/nowhere/engine"])
    batch.run("--resume")
    assert batch.times_told() == {"c1": 1}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_who_interrupts_it_keeps_what_is_done_and_is_told_how_to_go_on(batch_of: MakeBatch, number: int) -> None:
    batch = batch_of([request(number, max_tokens=20) for number in range(200)])
    with batch.start("--max-slots", "4", delay_s=0.002) as process:
        wait_until(batch.answers, message="a first answer")
        process.send_signal(number)
        _, told = process.communicate(timeout=30)
    assert process.returncode == 3
    [line] = told.splitlines()
    assert "--resume" in line
    assert line.startswith(f"worker: cancelled: {len(batch.answers())} of 200 lines are done")
    assert len(batch.answers()) < 200
    batch.run("--resume")
    assert batch.times_told() == {f"c{number}": 1 for number in range(200)}


@pytest.mark.parametrize("order", ["done", "input"])
def test_memory_does_not_grow_with_the_file(batch_of: MakeBatch, order: str) -> None:
    batch = batch_of([])
    write_lines(batch.source, 20_000, tokens=1)
    _, samples = sampled(Road(batch.command("--order", order, "--max-slots", "64", "--ignore-model")))
    assert growth(samples["command"]) < 4, "MiB; 10 000 lines of 200 bytes would be 2 as text and 20 as objects"
