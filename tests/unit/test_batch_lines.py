"""Lines of batch files as jobs, results as lines."""

import json
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from engine.messages import TokenLogprobs
from tests.support.batch_files import request, result_of
from worker.batch.fields import CHAT, COMPLETIONS
from worker.batch.lines import BadLine, BatchLine, Rules, outcome_of, parse_line, refusal_of
from worker.errors import ProtocolError
from worker.frames import Choice, Result, Usage
from worker.wire import MAX_BODY_BYTES, parse_body


def completion(**body: Any) -> dict[str, Any]:
    return {"custom_id": "a", "method": "POST", "url": COMPLETIONS, "body": {"prompt": "Hello"} | body}


def parsed(line: object, rules: Rules = Rules(), number: int = 1) -> BatchLine | BadLine:  # noqa: B008
    return parse_line(
        number, line if isinstance(line, bytes) else json.dumps(line).replace("Infinity", "1e999").encode(), rules
    )


def good(line: object, rules: Rules = Rules()) -> dict[str, Any]:  # noqa: B008
    found = parsed(line, rules)
    assert isinstance(found, BatchLine), found
    return dict(found.body)


def bad(line: object, rules: Rules = Rules()) -> BadLine:  # noqa: B008
    found = parsed(line, rules)
    assert isinstance(found, BadLine), found
    return found


def test_a_chat_line_is_a_job_that_names_its_line() -> None:
    found = parsed(request("id-1", temperature=0, max_tokens=7), number=12)
    assert isinstance(found, BatchLine)
    assert (found.number, found.custom_id, found.endpoint) == (12, "id-1", CHAT)
    assert found.body == {
        "model": "m",
        "messages": [{"role": "user", "content": "Hello"}],
        "temperature": 0,
        "max_tokens": 7,
        "custom_id": "id-1",
        "metadata": {"custom_id": "id-1", "endpoint": CHAT, "line": 12},
        "stream": False,
    }
    parse_body(found.body)


@pytest.mark.parametrize(
    ("line", "fields"),
    [
        (request(), {"max_tokens": 1024}),
        (request(max_tokens=None, temperature=None), {"max_tokens": 1024}),
        (request(max_completion_tokens=5), {"max_tokens": 5}),
        (request(logprobs=True), {"logprobs": 0}),
        (request(logprobs=True, top_logprobs=3), {"logprobs": 3}),
        (request(logprobs=False, top_logprobs=0), {}),
        (request(top_k=-1, min_p=0.1, repetition_penalty=1.1), {"top_k": 0, "min_p": 0.1, "repetition_penalty": 1.1}),
        (request(min_tokens=2, ignore_eos=True, stop_token_ids=[2]), {"min_tokens": 2, "ignore_eos": True}),
        (request(include_stop_str_in_output=True, stop="x"), {"include_stop": True, "stop": "x"}),
        (request(logit_bias={"5": -100}, seed=3, n=2), {"logit_bias": {"5": -100}, "seed": 3, "n": 2}),
        (request(response_format={"type": "json_object"}), {"response_format": {"type": "json_object"}}),
        (request(messages=[{"role": "developer", "content": "Be"}]), {"messages": [{"role": "system", "content": "Be"}]}),
        (
            request(messages=[{"role": "user", "name": "Al", "content": [{"type": "text", "text": t} for t in "ab"]}]),
            {"messages": [{"role": "user", "content": "ab"}]},
        ),
        (
            request(messages=[{"role": "assistant", "content": "x", "refusal": None, "tool_calls": []}]),
            {"messages": [{"role": "assistant", "content": "x"}]},
        ),
        (completion(), {"prompt": "Hello", "max_tokens": 1024}),
        (completion(prompt=["Hello"]), {"prompt": "Hello"}),
        (completion(prompt=[1, 2]), {"prompt_token_ids": [1, 2]}),
        (completion(prompt=[[1, 2]]), {"prompt_token_ids": [1, 2]}),
        (completion(logprobs=2, best_of=2, n=2, echo=False, suffix=None), {"logprobs": 2, "n": 2}),
    ],
    ids=str,
)
def test_fields_are_those_of_a_job(line: dict[str, Any], fields: dict[str, Any]) -> None:
    body = good(line)
    assert {name: body.get(name) for name in fields} == fields


@pytest.mark.parametrize(
    "unused",
    [
        *({name: "x"} for name in ("user", "service_tier", "safety_identifier", "prompt_cache_key")),
        {"store": True},
        {"metadata": {"own": "x"}},
        {"stream": False, "tools": [], "functions": [], "tool_choice": "none", "modalities": ["text"]},
        dict.fromkeys(("audio", "stream", "tools", "nonsense", "reasoning_effort", "n", "stop")),
    ],
    ids=str,
)
def test_what_changes_no_answer_is_accepted_and_left_out(unused: dict[str, Any]) -> None:
    assert good(request(**unused)) == good(request())


@pytest.mark.parametrize(
    ("line", "code", "param", "words"),
    [
        (request(temprature=1), "unknown_parameter", "temprature", "did you mean temperature?"),
        (request(stream=True), "unsupported_parameter", "stream", "not served"),
        (request(tools=[{"type": "function"}]), "unsupported_parameter", "tools", "not served"),
        (request(functions=[{}]), "unsupported_parameter", "functions", "not served"),
        (request(audio={"voice": "x"}), "unsupported_parameter", "audio", "not served"),
        (request(reasoning_effort="low"), "unsupported_parameter", "reasoning_effort", "not served"),
        (request(max_tokens=1, max_completion_tokens=1), "invalid_value", "max_tokens", "excludes max_completion_tokens"),
        (request(max_completion_tokens=-1), "invalid_value", "max_completion_tokens", "-1: an integer from 0"),
        (request(temperature=101), "invalid_value", "temperature", "101: a number from 0 to 100"),
        (request(temperature="hot"), "invalid_value", "temperature", "a number from 0"),
        (request(top_logprobs=2), "invalid_value", "top_logprobs", "needs logprobs: true"),
        (request(logprobs=True, top_logprobs=21), "invalid_value", "top_logprobs", "21: an integer from 0 to 20"),
        (request(logprobs=2), "invalid_type", "logprobs", "must be true or false"),
        (request(min_tokens=2000), "invalid_value", "min_tokens", "at most max_tokens, which is 1024"),
        (request(response_format={"type": "yaml"}), "invalid_value", "response_format", "json_object"),
        (request(messages=None), "missing_required_parameter", "messages", "missing"),
        (request(messages=[]), "invalid_type", "messages", "at least one"),
        (request(messages=["x"]), "invalid_type", "messages[0]", "a map"),
        (request(messages=[{"role": "tool", "content": "x"}]), "invalid_value", "messages[0].role", "tool: must be one of"),
        (request(messages=[{"role": "user"}]), "invalid_type", "messages[0].content", "must be text"),
        (
            request(messages=[{"role": "user", "content": "x", "nmae": "y"}]),
            "unknown_parameter",
            "messages[0].nmae",
            "known are",
        ),
        (
            request(messages=[{"role": "assistant", "content": "x", "tool_calls": [{}]}]),
            *("unsupported_parameter", "messages[0].tool_calls", "not served"),
        ),
        (
            request(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
            *("unsupported_value", "messages[0].content[0]", "other parts are not served"),
        ),
        (
            request(messages=[{"role": "user", "content": [{"type": "text", "text": 5}]}]),
            *("invalid_value", "messages[0].content[0]", "must have a text"),
        ),
        (request(messages=[{"role": "user", "content": "\ud800"}]), "invalid_value", "messages", "lone surrogate"),
        (request(seed=2**64), "invalid_value", "seed", "64 bits"),
        (request(temperature=float("1e999")), "invalid_value", "temperature", "not finite"),
        (completion(prompt=None), "missing_required_parameter", "prompt", "missing"),
        (completion(prompt=["a", "b"]), "invalid_value", "prompt", "2 prompts in one line"),
        (completion(prompt=[]), "invalid_value", "prompt", "token ids"),
        (completion(prompt=["a", 1]), "invalid_value", "prompt", "2 prompts"),
        (completion(prompt=[1, "a"]), "invalid_value", "prompt", "token ids"),
        (completion(best_of=3, n=2), "unsupported_parameter", "best_of", "not served"),
        (completion(echo=True), "unsupported_parameter", "echo", "not served"),
        (completion(suffix="x"), "unsupported_parameter", "suffix", "not served"),
        (completion(messages=[]), "unknown_parameter", "messages", "unknown"),
        ({**request(), "method": "GET"}, "invalid_method", "method", "must be POST"),
        ({**request(), "url": "/v1/embeddings"}, "invalid_url", "url", "/v1/embeddings: must be one of"),
        ({**request(), "url": ["x"]}, "invalid_url", "url", "must be one of"),
        ({**request(), "body": None}, "missing_required_parameter", "body", "must be a map"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_line_that_cannot_be_served_says_why(line: dict[str, Any], code: str, param: str, words: str) -> None:
    found = bad(line)
    assert (found.code, found.param, found.custom_id) == (code, param, "a")
    assert words in found.message
    assert found.message.startswith(f"{param}: ")
    assert "\n" not in found.message


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"x", "not one JSON value: wrong at character 0"),
        (b'{"custom_id": "a"', "not one JSON value"),
        (b"[1]", "must be a map"),
        (b'{"custom_id": "a", "custom_id": "b"}', "a key that stands twice"),
        (b'{"custom_id": NaN}', "NaN, which is not JSON"),
        (b'{"custom_id": "\xff"}', "not UTF-8"),
        (b'{"custom_id": "a\x00"}', "not one JSON value"),
        (b"[" * 100_000, "more than"),
        (b'{"a":' * 30_000, "nested deeper than 32"),
        (b'{"a": ' + b"9" * 5000 + b"}", "an integer beyond 64 bits"),
        (b'"' + b"x" * MAX_BODY_BYTES, f"more than {MAX_BODY_BYTES} bytes"),
    ],
    ids=lambda value: repr(value[:24]) if isinstance(value, bytes) else "",
)
def test_what_is_no_json_map_is_told_without_its_content(line: bytes, words: str) -> None:
    found = bad(line)
    assert (found.code, found.param) == ("invalid_json_line", None)
    assert words in found.message
    assert len(found.message) < 200


@pytest.mark.parametrize(
    ("custom_id", "words"),
    [
        (None, "missing"),
        (7, "int: must be text of 1 to 512 characters, in quotes"),
        ("", "0 characters"),
        ("x" * 513, "513 characters"),
        (["a"], "list: must be"),
        ("\ud800", "must be text"),
    ],
)
def test_a_custom_id_is_text_of_1_to_512_characters(custom_id: object, words: str) -> None:
    found = bad(request(custom_id))
    assert (found.param, found.custom_id) == ("custom_id", None)
    assert words in found.message


def test_a_custom_id_may_be_as_long_as_openai_s() -> None:
    assert good(request("x" * 512))["custom_id"] == "x" * 512


@pytest.mark.parametrize(
    ("rules", "model"),
    [(Rules(), "m"), (Rules(ignore_model=True, served_name="other"), None), (Rules(served_name="m"), "m")],
)
def test_the_model_is_asked_for_unless_told_not_to(rules: Rules, model: str | None) -> None:
    assert good(request(), rules).get("model") == model


def test_a_model_that_is_not_served_is_told_with_both_remedies() -> None:
    found = bad(request(), Rules(served_name="other"))
    assert (found.code, found.param) == ("model_not_found", "model")
    assert "m: served is other" in found.message
    assert "--ignore-model" in found.message
    assert "--served-name" in found.message


def test_a_row_is_a_chat_line() -> None:
    rules = Rules(prompt_column="p", id_column="i", system="Be", fields={"temperature": 0})
    found = parse_line(3, {"p": "Hello", "i": 7}, rules)
    assert isinstance(found, BatchLine)
    assert (found.custom_id, found.body["temperature"]) == ("7", 0)
    assert [message["content"] for message in found.body["messages"]] == ["Be", "Hello"]
    assert parse_line(3, {"p": "Hello"}, Rules(prompt_column="p")).custom_id == "row-3"


@pytest.mark.parametrize(
    ("row", "param", "words"),
    [
        ({}, "p", "more cells than the header; put those that hold a separator in quotes"),
        ({"p": ""}, "p", "empty; each row needs a text"),
        ({"p": None}, "p", "empty; each row needs a text"),
        ({"p": 5, "i": "a"}, "p", "int; each row needs a text"),
        ({"p": "x"}, "custom_id", "missing"),
        ({"p": "x", "i": True}, "custom_id", "bool"),
    ],
    ids=str,
)
def test_a_row_needs_a_text_and_an_id(row: dict[str, Any], param: str, words: str) -> None:
    found = parse_line(3, row, Rules(prompt_column="p", id_column="i"))
    assert isinstance(found, BadLine)
    assert found.param == param
    assert words in found.message


def test_a_body_that_grows_over_the_limit_is_refused() -> None:
    start, end = json.dumps(completion(prompt="@")).split("@")
    line = start + "x" * (MAX_BODY_BYTES - len(start + end)) + end
    assert "8388" in bad(line.encode()).message
    assert isinstance(parse_line(1, {"p": "x" * MAX_BODY_BYTES}, Rules(prompt_column="p")), BadLine)


def test_a_cell_that_was_not_utf_8_is_refused() -> None:
    found = parse_line(1, {"p": "a\udcff"}, Rules(prompt_column="p"))
    assert isinstance(found, BadLine)
    assert "surrogate" in found.message
    assert "save it as UTF-8" in found.message


LOGPROBS = (TokenLogprobs(-0.5, ((7, -0.5), (8, float("-inf")))),)


def answered(line: object, **changes: Any) -> Any:
    found = parsed(line)
    assert isinstance(found, BatchLine)
    return outcome_of(result_of(found, **changes))


def test_a_chat_result_is_a_chat_completion() -> None:
    choices = tuple(Choice(index, f"Hi {index}", (7,), "length", logprobs=LOGPROBS) for index in range(2))
    outcome = answered(request(), choices=choices, usage=Usage(3, 2, 1))
    assert (outcome.number, outcome.custom_id, outcome.is_error) == (1, "a", False)
    assert outcome.record["error"] is None
    assert outcome.record["response"]["status_code"] == 200
    body = ChatCompletion.model_validate(outcome.record["response"]["body"], strict=True)
    assert [choice.message.content for choice in body.choices] == ["Hi 0", "Hi 1"]
    assert body.usage
    assert (body.usage.prompt_tokens, body.usage.completion_tokens, body.usage.total_tokens) == (3, 2, 5)
    assert body.choices[0].logprobs
    assert body.choices[0].logprobs.content
    token = body.choices[0].logprobs.content[0]
    assert (token.token, token.bytes, [top.logprob for top in token.top_logprobs]) == ("token_id:7", None, [-0.5, -9999.0])


def test_a_completion_s_result_is_a_completion() -> None:
    outcome = answered(completion(), choices=(Choice(0, "Hi", (7,), "stop", logprobs=LOGPROBS),))
    body = Completion.model_validate(outcome.record["response"]["body"], strict=True)
    assert body.choices[0].text == "Hi"
    assert body.choices[0].logprobs
    assert body.choices[0].logprobs.tokens == ["token_id:7"]
    assert body.choices[0].logprobs.top_logprobs == [{"token_id:7": -0.5, "token_id:8": -9999.0}]


@pytest.mark.parametrize(
    ("state", "code", "status"),
    [
        ("failed", "invalid", 400),
        ("failed", "unknown_version", 400),
        ("failed", "engine", 500),
        ("dead", "dead_letter", 500),
        ("frozen", None, 500),
    ],
)
def test_a_failed_job_is_an_error_line_with_a_status(state: str, code: str | None, status: int) -> None:
    outcome = answered(request(), state=state, code=code, error="n: 9: at most 4")
    assert outcome.is_error
    response = outcome.record["response"]
    assert (response["status_code"], outcome.record["error"]) == (status, None)
    assert response["body"]["error"]["code"] == (code or state)
    assert response["body"]["error"]["message"] == "n: 9: at most 4"


@pytest.mark.parametrize(("state", "code"), [("expired", "batch_expired"), ("cancelled", "batch_cancelled")])
def test_a_job_that_did_not_run_to_its_end_has_no_response(state: str, code: str) -> None:
    outcome = answered(request(), state=state)
    assert outcome.is_error
    assert outcome.record["response"] is None
    assert outcome.record["error"]["code"] == code


def test_a_refusal_is_a_400_with_openai_s_error() -> None:
    outcome = refusal_of(bad(request(temperature=-1)))
    assert (outcome.number, outcome.custom_id, outcome.is_error) == (1, "a", True)
    error = outcome.record["response"]["body"]["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", "temperature", "invalid_value")
    assert outcome.record["response"]["status_code"] == 400


def test_a_result_that_is_no_line_s_is_no_outcome() -> None:
    with pytest.raises(ProtocolError, match="job x: its metadata names no line of a batch"):
        outcome_of(Result(id="x", state="succeeded", metadata={"line": "1", "custom_id": "a"}))
