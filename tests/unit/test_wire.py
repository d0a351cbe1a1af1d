"""Job bodies from strangers, frames and results."""

import itertools
import json
import math
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, replace

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.messages import TokenLogprobs
from engine.request import Grammar, GrammarKind
from worker import codec, frames, wire
from worker.errors import InvalidJob, ProtocolError, UnknownVersion
from worker.frames import (
    Choice,
    ControlFrame,
    Result,
    Timings,
    TokenFrame,
    Usage,
    decode_frame,
    decode_result,
    encode_frame,
    encode_result,
)
from worker.wire import Job, decode_job, encode_body, parse_body

SECRET = "my secret diary"
LONE = "\ud83d"
BIG = 2**64


def entry(body: object = None, **fields: bytes) -> dict[bytes, bytes]:
    named = {name.encode(): value for name, value in fields.items()}
    return named if body is None else named | {b"m": msgpack.packb(body)}


def refusal(fields: Mapping[bytes, bytes]) -> InvalidJob:
    with pytest.raises(InvalidJob) as refused:
        decode_job(fields, lane="normal")
    assert "\n" not in str(refused.value)
    assert SECRET not in str(refused.value)
    return refused.value


def field_refusal(**body: object) -> InvalidJob:
    with pytest.raises(InvalidJob) as refused:
        parse_body({"prompt": SECRET} | body)
    assert "\n" not in str(refused.value)
    assert SECRET not in str(refused.value)
    return refused.value


# Entries


def test_a_bare_json_prompt_is_a_job_with_the_documented_defaults() -> None:
    job = decode_job({b"j": b'{"prompt":"Hello"}'}, lane="normal")
    assert job == Job(prompt="Hello")
    assert (job.id, job.max_tokens, job.temperature, job.top_p, job.seed, job.stream) == (None, 256, 1.0, 1.0, None, True)
    assert (job.result_ttl_s, job.max_attempts, job.metadata, job.stop) == (86_400, 5, {}, ())


def test_msgpack_and_json_bodies_mean_the_same() -> None:
    body = {"prompt": "é的👍", "temperature": 1, "stop": "x", "metadata": {"a": [1, None, {"b": 2.5}]}, "seed": 2**64 - 1}
    packed, written = decode_job(entry(body), lane="low"), decode_job(entry(j=json.dumps(body).encode()), lane="low")
    assert packed == written
    assert packed.priority == "low"


def test_the_lane_decides_the_priority() -> None:
    assert decode_job(entry({"prompt": "", "priority": "high"}), lane="low").priority == "low"


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        (entry(), "exactly one of m"),
        (entry({"prompt": "x"}, j=b"{}"), "exactly one of m"),
        (entry(m=b""), "incomplete"),
        (entry(j=b""), "not one JSON value"),
        (entry(m=msgpack.packb({"prompt": SECRET})[:-1]), "incomplete"),
        (entry(j=b'{"prompt":"my secret diary'), "not one JSON value"),
        (entry(m=msgpack.packb({"prompt": "x"}) + b"\x01"), "bytes follow"),
        (entry(j=b'{"prompt":"x"} {}'), "not one JSON value"),
        (entry([1]), "a map from field names"),
        (entry(j=b'"my secret diary"'), "a map from field names"),
        (entry(m=b"\x81\x01\x02"), "not allowed for map key"),
        (entry(m=b"\x81\xc4\x01a\x01"), "a map from field names"),
        (entry(m=b"\x82\xa6prompt\xa1a\xa6prompt\xa1b"), "a key that stands twice"),
        (entry(j=b'{"prompt":"a","prompt":"b"}'), "a key that stands twice"),
        (entry(j=b'{"prompt":"a","metadata":{"k":1,"k":1}}'), "a key that stands twice"),
        (entry(m=b"\x91" * 4000), "nested deeper than 32"),
        (entry(j=b"[" * 50_000), "nested deeper than 32"),
        (entry(j=b'{"a":' * 50_000), "nested deeper than 32"),
        (entry(j=b"[[],"), "not one JSON value"),
        (entry(j=b"[" + b"[]," * 70_000), "more than 65536 lists and maps"),
        (entry(m=b"\xdd\x00\x02\x00\x00" + b"\x80" * 131_072), "more than 65536 lists and maps"),
        (entry(m=b"\xdd\xff\xff\xff\xff"), "max_array_len"),
        (entry(m=b"\xdf\xff\xff\xff\xff"), "max_map_len"),
        (entry(m=b"\xc1"), "not one msgpack value"),
        (entry({"prompt": msgpack.ExtType(5, b"x")}), "extension type 5"),
        (entry(j=b'{"temperature":NaN}'), "NaN, which is not JSON"),
        (entry(j=b'{"temperature":-Infinity}'), "-Infinity, which is not JSON"),
        (entry(j=b'{"seed":' + b"9" * 5000 + b"}"), "an integer beyond 64 bits"),
        (entry(j=b'{"prompt":"\xed\xa0\xbd"}'), "not UTF-8"),
        (entry(j='{"prompt":"x"}'.encode("utf-16")), "not UTF-8"),
        (entry(m=b"\x81\xa6prompt\xa3\xed\xa0\xbd"), "not UTF-8"),
        (entry(j=b" " * (8 << 20) + b"{}"), "at most 8388608 bytes"),
    ],
    ids=itertools.count(),
)
def test_a_body_that_cannot_be_read_is_refused_with_the_reason(fields: dict[bytes, bytes], limit: str) -> None:
    error = refusal(fields | {b"id": b"job-1"})
    assert error.field == "body"
    assert limit in error.limit
    assert error.job_id == "job-1"


def test_an_entry_field_that_is_not_known_is_refused() -> None:
    assert str(refusal({b"prompt": SECRET.encode()})).startswith("prompt: unknown field: known are v, id, m, j.")


def test_fields_of_the_producers_own_are_ignored() -> None:
    assert decode_job(entry({"prompt": "", "x_y": {"a": []}}, x_trace=b"\xff"), lane="high") == Job(prompt="", priority="high")


@pytest.mark.parametrize(
    "body",
    [
        b'"' + b"\\n" * (4 << 20) + b'"',
        b"[" * (8 << 20),
        b'"' + b"[" * ((8 << 20) - 1),
        b'{"a":' * ((8 << 20) // 5),
        b"[" + b"1," * ((4 << 20) - 1),
        b'{"prompt_token_ids":[' + b"1," * 4_000_000 + b"1]}",
    ],
    ids=itertools.count(),
)
def test_reading_megabytes_of_nonsense_is_done_soon(body: bytes) -> None:
    started = time.process_time()
    with pytest.raises(InvalidJob):
        decode_job({b"j": body[: 8 << 20]}, lane="normal")
    assert time.process_time() - started < 3.0


@given(st.binary(max_size=200))
@settings(max_examples=500)
def test_any_bytes_are_a_job_or_a_refusal(data: bytes) -> None:
    for name in (b"m", b"j", b"id", b"v"):
        with suppress(InvalidJob):
            assert isinstance(decode_job({b"m": b"\x81\xa6prompt\xa1x", name: data}, lane="normal"), Job)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text() | st.just(LONE) | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=4),
    max_leaves=12,
)


# Version and id


@pytest.mark.parametrize("version", [2, 0, "2", "2.1", 10**9 - 1, 10**10, "1" * 5000], ids=itertools.count())
def test_another_major_version_is_told_from_an_invalid_job(version: object) -> None:
    body = {"v": version, "id": "k", "field_of_the_future": 1}
    assert isinstance(refusal(entry(body)), UnknownVersion)
    assert refusal(entry(body)).job_id == "k"


def test_a_version_of_any_number_of_digits_is_a_version() -> None:
    error = refusal(entry({"prompt": ""}, v=b"9" * 5000))
    assert isinstance(error, UnknownVersion)
    assert len(str(error)) < 200
    assert isinstance(field_refusal(v=10**5000), UnknownVersion)  # what a client is told


@pytest.mark.parametrize(
    "fields",
    [
        entry({"prompt": ""}, v=b"2", shard=b"1"),
        entry({"prompt": "", "v": 2}, shard=b"1"),
        entry({"prompt": ""}, v=b"2", id=b"a b"),
        entry({"prompt": "", "v": 2}, id=b"\xff"),
        entry({"prompt": "", "v": 2}, id=b"x" * 600),
        entry({"prompt": "", "v": 2, "id": 5}),
        entry({"prompt": "", "id": "b"}, v=b"2", id=b"a"),
        entry({"prompt": "", "max_tokens": -1}, v=b"2"),
        entry({"prompt": "", "v": 2}, v=b"1"),
        entry(v=b"2"),
        entry({"prompt": ""}, v=b"2", j=b"{}"),
    ],
    ids=itertools.count(),
)
def test_an_unknown_version_wins_over_whatever_it_may_write_otherwise(fields: dict[bytes, bytes]) -> None:
    assert isinstance(refusal(fields), UnknownVersion)


def test_an_unknown_version_of_the_entry_wins_over_a_body_that_cannot_be_read() -> None:
    error = refusal(entry(v=b"2", id=b"k", m=b"\xc1"))
    assert (type(error), error.job_id, error.code) == (UnknownVersion, "k", "unknown_version")


@pytest.mark.parametrize("version", [1, "1", "1.9"])
def test_minor_versions_are_read(version: object) -> None:
    assert decode_job(entry({"prompt": "", "v": version}, v=str(version).encode()), lane="normal").prompt == ""


@pytest.mark.parametrize("version", [True, None, 1.0, "one", "", -1, -(10**5000), [1], "1."], ids=itertools.count())
def test_a_version_that_is_no_number_is_refused(version: object) -> None:
    error = field_refusal(v=version)
    assert (type(error), error.field) == (InvalidJob, "v")


@pytest.mark.parametrize("fields", [entry({"id": "k", "n": 0}), entry({"n": 0}, id=b"k"), entry({"id": "k", "n": 0}, id=b"k")])
def test_a_refusal_carries_the_id_wherever_it_stood(fields: dict[bytes, bytes]) -> None:
    assert refusal(fields).job_id == "k"


def test_an_id_may_stand_in_entry_or_body() -> None:
    assert decode_job(entry({"prompt": ""}, id=b"a"), lane="normal").id == "a"
    assert decode_job(entry({"prompt": "", "id": "b:é"}), lane="normal").id == "b:é"


def test_ids_that_disagree_are_refused_under_the_entrys() -> None:
    error = refusal(entry({"prompt": "", "id": "b"}, id=b"a"))
    assert (error.field, error.value, error.job_id) == ("id", "'b'", "a")


@pytest.mark.parametrize(
    "job_id", ["", "a b", "a\n", "a{b", "}", "\x00", "x" * 129, "\x7f", "\u200b", LONE, 5, b"k", ["k"]], ids=itertools.count()
)
def test_an_id_that_cannot_name_a_key_is_refused(job_id: object) -> None:
    error = field_refusal(id=job_id)
    assert error.field == "id"
    error.args[0].encode()


@pytest.mark.parametrize("job_id", [b"\xff", b"x" * 10_000, b"", b"a b"], ids=itertools.count())
def test_an_entry_id_that_cannot_name_a_key_is_refused_without_one(job_id: bytes) -> None:
    error = refusal(entry({"prompt": ""}, id=job_id))
    assert (error.field, error.job_id) == ("id", None)


# Fields

SCHEMA = {"type": "object", "properties": {"é": {"enum": [1, None]}}}
FORMATS: list[object] = [
    {"type": "text"},
    {"type": "json_object"},
    {"type": "json_schema", "schema": SCHEMA},
    {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "description": "d", "schema": SCHEMA}},
    {"type": "regex", "regex": "[ab]+"},
    {"type": "regex", "pattern": "x" * 65_536},
]
IN_JSON = json.dumps(SCHEMA, ensure_ascii=False, separators=(",", ":"))
GRAMMARS = [
    None,
    Grammar(GrammarKind.JSON_OBJECT),
    Grammar(GrammarKind.JSON_SCHEMA, IN_JSON),
    Grammar(GrammarKind.JSON_SCHEMA, IN_JSON),
    Grammar(GrammarKind.REGEX, "[ab]+"),
    Grammar(GrammarKind.REGEX, "x" * 65_536),
]
GOOD: dict[str, list[object]] = {
    "max_tokens": [0, 1, 2**24],
    "min_tokens": [0, 256],
    "temperature": [0, 0.0, 1, 100, 100.0, 1e-300],
    "top_p": [1, 1.0, 1e-9],
    "min_p": [0, 0.0, 1],
    "top_k": [0, 1, 2**31 - 1],
    "presence_penalty": [0, -2],
    "frequency_penalty": [0.0, 2],
    "repetition_penalty": [1, 0.01, 100],
    "logit_bias": [{}, {"5": -100, "0": 0.5}],
    "allowed_token_ids": [[], [0, 2**31 - 1], [1] * 1024],
    "banned_token_ids": [[], [7]],
    "seed": [None, 0, -(2**63), 2**64 - 1],
    "n": [1, 4096],
    "beam_width": [0, 2, 64],
    "stop": ["x", [], ["a", "b" * 256], ["x"] * 16],
    "stop_token_ids": [[], [0, 2**31 - 1], [1] * 64],
    "ignore_eos": [True, False],
    "include_stop": [True, False],
    "logprobs": [None, 0, 20],
    "prompt_logprobs": [None, 0, 20],
    "response_format": [None, *FORMATS],
    "stream": [True, False],
    "priority": ["high", "normal", "low"],
    "tenant": [None, "", "t" * 128],
    "deadline_ms": [None, 0, 1_900_000_000_000],
    "result_ttl_s": [60, 2_592_000],
    "max_attempts": [1, 20],
    "metadata": [{}, {"a": {"b": [1, 2.5, None, True, "é"]}}, {"k": "v" * 16_000}],
    "model": [None, "m"],
    "batch_id": [None, "b"],
    "custom_id": ["c d"],
    "traceparent": ["00-" + "a" * 32 + "-" + "b" * 16 + "-01"],
    "id": [None, "k"],
}
DEEP = {"a": json.loads("[" * 40 + "]" * 40)}
NUMBERS = [None, "1", True, [], {}, math.nan, math.inf, -math.inf, BIG, -BIG, 10**400]
BAD: dict[str, list[object]] = {
    "max_tokens": [-3, -1, 2**24 + 1, 1.0, *NUMBERS],
    "min_tokens": [-1, 257, 0.5, *NUMBERS],
    "temperature": [-0.1, 100.1, *NUMBERS],
    "top_p": [0, -1, 1.01, *NUMBERS],
    "min_p": [-0.1, 1.1, *NUMBERS],
    "top_k": [-1, 2**31, 1.0, *NUMBERS],
    "presence_penalty": [-2.1, 2.1, *NUMBERS],
    "frequency_penalty": [-2.1, 2.1, *NUMBERS],
    "repetition_penalty": [0, -1, 0.009, 100.1, *NUMBERS],
    "logit_bias": [[], None, {"x": 1}, {"-1": 1}, {"01": 1}, {"1": 101}, {"1": "1"}, {str(i): 0 for i in range(1025)}, {1: 1}],
    "allowed_token_ids": [None, [-1], [2**31], ["1"], [1] * 1025],
    "banned_token_ids": [None, 5, [1] * 1025],
    "seed": [-(2**63) - 1, 2**64, 1.0, True, "1"],
    "n": [0, -1, 4097, 1.0, *NUMBERS],
    "beam_width": [1, -1, 65, 2.0, *NUMBERS],
    "stop": [None, "", [""], ["a", 1], "x" * 257, ["x"] * 17, {}, 5, LONE, [LONE]],
    "stop_token_ids": [None, 5, [-1], [2**31], [1.0], [True], ["1"], [1] * 65, {}],
    "ignore_eos": [0, 1, "true", None, []],
    "include_stop": [0, None],
    "logprobs": [-1, 21, True, 1.0, "5"],
    "prompt_logprobs": [-1, 21, True],
    "response_format": [
        "json",
        [],
        {},
        {"type": "xml"},
        {"type": None},
        {"type": ["text"]},
        {"type": "text", "x": 1},
        {"type": "json_object", "schema": {}},
        {"type": "json_schema"},
        {"type": "json_schema", "schema": "{}"},
        {"type": "json_schema", "schema": {"x": "y" * 70_000}},
        {"type": "json_schema", "schema": {}, "json_schema": {"schema": {}}},
        {"type": "json_schema", "json_schema": {"name": "n"}},
        {"type": "json_schema", "json_schema": []},
        {"type": "regex"},
        {"type": "regex", "regex": ""},
        {"type": "regex", "regex": 5},
        {"type": "regex", "regex": "a", "pattern": "a"},
        {"type": "regex", "regex": "y" * 65_537},
        {"type": "regex", "pattern": "é" * 40_000},
    ],
    "stream": [None, 1],
    "priority": ["urgent", None, 1, "High", ["high"]],
    "tenant": ["t" * 129, 5, LONE],
    "deadline_ms": [-1, 1.5, True, 2**60],
    "result_ttl_s": [59, 2_592_001, None, 60.0],
    "max_attempts": [0, 21, None],
    "metadata": [
        None,
        [],
        "x",
        {"k": "v" * 17_000},
        {1: 2},
        {"a": LONE},
        DEEP,
        {LONE: 1},
        {"a": [math.nan]},
        {"a": BIG},
        {"a": b"x"},
    ],
    "model": [5, "m" * 513],
    "batch_id": [5],
    "custom_id": [b"c"],
    "traceparent": [LONE],  # which cannot be written; what is merely wrong is passed over
}


def each(examples: dict[str, list[object]]) -> list[tuple[str, object]]:
    return [(name, value) for name, values in examples.items() for value in values]


@pytest.mark.parametrize(("name", "value"), each(GOOD), ids=itertools.count())
def test_values_up_to_the_limit_are_taken(name: str, value: object) -> None:
    body = {"prompt": "x", name: value}
    assert decode_job({b"m": encode_body(body)}, lane=str(body.get("priority", "normal"))) == parse_body(body)


@pytest.mark.parametrize(("name", "value"), each(BAD), ids=itertools.count())
def test_values_beyond_the_limit_are_refused_by_name(name: str, value: object) -> None:
    error = field_refusal(**{name: value})
    assert error.field == name
    assert len(error.value) <= 64
    str(error).encode()


ANY_BODY = st.fixed_dictionaries({}, optional={name: st.sampled_from(values) | PLAIN for name, values in GOOD.items()})


@given(ANY_BODY, st.text() | PLAIN)
@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
def test_any_values_are_a_job_that_can_be_sent_or_a_refusal(body: dict[str, object], prompt: object) -> None:
    body["prompt"] = prompt
    try:
        job = parse_body(body)
    except InvalidJob as error:
        message = str(error)
    else:
        message = json.dumps(job.metadata, allow_nan=False)
        assert decode_job({b"m": encode_body(body)}, lane="normal") == replace(job, priority="normal")
    assert "\n" not in message
    assert not codec.has_lone_surrogate(message)


def test_every_field_of_a_job_has_a_check_and_a_good_and_a_bad_example() -> None:
    names = {field.name for field in fields(Job)}
    assert names == set(wire.FIELDS)
    assert names - set(wire.PROMPTS) == set(GOOD)
    assert names - set(wire.PROMPTS) - {"id"} == set(BAD)


def test_a_refusal_names_field_value_and_limit() -> None:
    error = field_refusal(max_tokens=-3)
    assert (error.field, error.value, error.limit) == ("max_tokens", "-3", "an integer from 0 to 16777216")
    assert str(error) == "max_tokens: -3: an integer from 0 to 16777216"


@pytest.mark.parametrize(
    ("body", "remedy"),
    [
        ({"temperature": "0.7"}, "; write it without quotes"),
        ({"seed": "-3"}, "; write it without quotes"),
        ({"stream": "false"}, "; write it without quotes"),
        ({"max_tokens": 4, "min_tokens": 5}, "; change one of them"),
        ({"max_tokens": 2**24, "n": 2}, "; lower it or their number"),
        ({"metadata": {"a": "b" * 2**15}}, "; keep a key in it, and the rest elsewhere"),
    ],
)
def test_a_refusal_names_a_remedy_where_the_limit_is_none(body: dict[str, object], remedy: str) -> None:
    assert field_refusal(**body).limit.endswith(remedy)


@pytest.mark.parametrize("body", [{"max_tokens": "256.5"}, {"temperature": "007"}, {"temperature": "hot"}, {"stop": ""}])
def test_what_is_wrong_without_its_quotes_too_has_no_such_remedy(body: dict[str, object]) -> None:
    assert "quotes" not in field_refusal(**body).limit


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("temprature", "temperature"), ("max_token", "max_tokens"), ("max_completion_tokens", "max_tokens"), ("promt", "prompt"),
     ("Stop", "stop"), ("top-p", "top_p")],
)  # fmt: skip
def test_a_misspelt_field_is_refused_with_the_nearest_name(wrong: str, right: str) -> None:
    error = field_refusal(**{wrong: SECRET})
    assert error.field == wrong
    assert f"did you mean {right}?" in error.limit


def test_a_field_like_no_other_is_refused_with_all_names() -> None:
    error = field_refusal(**{"qqqq\n" * 100: 1})
    assert "known are id, prompt," in error.limit
    assert len(error.field) < 80


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": None},
        {"prompt": SECRET, "prompt_token_ids": [1]},
        {"prompt": SECRET, "messages": [{"role": "user", "content": SECRET}]},
        {"prompt": [SECRET]},
        {"prompt": {SECRET: SECRET}},
        {"prompt": SECRET + LONE},
        {"prompt_token_ids": []},
        {"prompt_token_ids": [SECRET]},
        {"prompt_token_ids": [1, -1]},
        {"prompt_token_ids": SECRET},
        {"messages": SECRET},
        {"messages": []},
        {"messages": [SECRET]},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": SECRET, "name": SECRET}]},
        {"messages": [{"role": "user", "content": [SECRET]}]},
        {"messages": [{"role": "", "content": SECRET}]},
        {"messages": [{"role": SECRET * 9, "content": SECRET}]},
        {"messages": [{"role": "user", "content": SECRET + LONE}]},
        {"metadata": SECRET, "prompt": ""},
    ],
    ids=itertools.count(),
)
def test_a_wrong_prompt_is_refused_without_its_text(body: dict[str, object]) -> None:
    with pytest.raises(InvalidJob) as refused:
        parse_body(body)
    assert refused.value.field in ("prompt", "prompt_token_ids", "messages", "metadata")
    assert SECRET not in str(refused.value)


def test_a_million_token_ids_pass() -> None:
    ids = list(range(1 << 20))
    job = decode_job({b"m": encode_body({"prompt_token_ids": ids})}, lane="normal")
    assert job.prompt_token_ids == tuple(ids)


def test_a_job_shows_no_prompt_when_printed() -> None:
    messages = [{"role": "user", "content": SECRET}]
    jobs = [parse_body({"prompt": SECRET, "metadata": {"a": SECRET}}), parse_body({"messages": messages})]
    assert SECRET not in repr(jobs)


@pytest.mark.parametrize(
    "beside",
    [
        {"n": 2},
        {"temperature": 1.0},
        {"min_p": 0.1},
        {"top_p": 0.9},
        {"top_k": 5},
        {"presence_penalty": 1},
        {"frequency_penalty": 1},
        {"repetition_penalty": 1.1},
        {"logit_bias": {"5": 1}},
        {"allowed_token_ids": [5]},
        {"banned_token_ids": [5]},
        {"logprobs": 0},
        {"response_format": {"type": "json_object"}},
        {"stop": "x"},
    ],
    ids=str,
)
def test_beam_search_excludes_what_samples_or_changes_logits_by_name(beside: dict[str, object]) -> None:
    error = field_refusal(beam_width=4, **beside)
    assert (error.field, error.limit) == ("beam_width", f"excludes {next(iter(beside))}; leave one of them out")


def test_beam_search_goes_with_what_changes_nothing() -> None:
    beside = {"n": 1, "top_p": 1, "stop": [], "stop_token_ids": [5], "prompt_logprobs": 1, "response_format": {"type": "text"}}
    assert parse_body({"prompt": "", "beam_width": 4} | beside).num_choices == 4


@pytest.mark.parametrize(
    ("wanted", "grammar"),
    list(zip(FORMATS, GRAMMARS, strict=True)),
    ids=itertools.count(),
)
def test_a_response_format_becomes_a_grammar(wanted: object, grammar: Grammar | None) -> None:
    assert parse_body({"prompt": "", "response_format": wanted}).response_format == grammar


@pytest.mark.parametrize(
    ("wanted", "named"),
    [
        ({"type": "json_schema"}, "schema is missing"),
        ({"type": "json_schema", "json_schema": {"name": "n"}}, "schema is missing"),
        ({"type": "json_schema", "json_schema": {"schema": {}, "shcema": 1}}, "unknown key 'shcema'"),
        ({"type": "json_schema", "schema": []}, "schema must be a map"),
        ({"type": "regex", "regexp": "x"}, "regex is missing"),
        ({"type": "json_object", "schema": {}}, "unknown key 'schema'"),
        ({"type": "regex", "pattern": ""}, "pattern must be text of 1 to 65536 bytes"),
    ],
    ids=itertools.count(),
)
def test_a_wrong_response_format_is_refused_with_the_key(wanted: object, named: str) -> None:
    error = field_refusal(response_format=wanted)
    assert (error.field, error.code) == ("response_format", "invalid")
    assert named in error.limit


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"n": 2, "max_tokens": 2**24}, "max_tokens"),
        ({"n": 2, "max_tokens": 0}, "max_tokens"),
        ({"beam_width": 2, "max_tokens": 2**24}, "max_tokens"),
        ({"logprobs": 20, "max_tokens": 2**20 // 21 + 1}, "logprobs"),
        ({"logprobs": 0, "max_tokens": 2**19, "n": 3}, "logprobs"),
    ],
    ids=str,
)
def test_more_than_a_result_can_hold_or_several_answers_of_nothing_are_refused(body: dict[str, object], field: str) -> None:
    assert field_refusal(**body).field == field


def test_a_body_over_the_limit_is_not_sent() -> None:
    with pytest.raises(InvalidJob, match=r"body: .* at most 8388608 bytes"):
        encode_body({"prompt": "x" * (8 << 20)})


# Frames and results

USAGE = Usage(prompt_tokens=7, completion_tokens=3, cached_tokens=2, resumed_tokens=1)
FRAMES = [
    TokenFrame(attempt=2, choice=1, index=5, token_ids=(1, 2**31 - 1), text="é的👍", offset=9),
    TokenFrame(1, 0, 0, (), "", 0, "stop"),
    TokenFrame(1, 0, 0, (7, 8), "x", 0, None, (TokenLogprobs(-0.5, ((7, -0.5), (9, -1.25))), TokenLogprobs(-2.0))),
    ControlFrame(attempt=1, event="start"),
    ControlFrame(attempt=3, event="end", state="failed", code="invalid", usage=USAGE),
    ControlFrame(attempt=2, event="restart", choice=1, index=4, offset=17),
]
TRACEPARENT = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
LOGPROBS = (TokenLogprobs(-1.0, ((5, -1.0),)),)
RESULT = Result(
    id="k",
    state="succeeded",
    choices=(Choice(0, "é的", (1, 2), "length", "kv_capacity"), Choice(1, "", (5,), None, None, LOGPROBS, -0.25)),
    prompt_logprobs=LOGPROBS,
    usage=USAGE,
    timings=Timings(queued_s=0.5, ttft_s=None, e2e_s=2.0),
    attempts=2,
    worker="host-1",
    model="m",
    metadata={"a": [1, {"b": None}]},
    traceparent=TRACEPARENT,
)


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: type(frame).__name__)
def test_frames_survive_the_wire(frame: frames.Frame) -> None:
    assert decode_frame(encode_frame(frame)) == frame


def test_frames_have_the_documented_keys() -> None:
    assert msgpack.unpackb(encode_frame(FRAMES[0])) == {
        "v": 1, "a": 2, "c": 1, "i": 5, "ids": [1, 2**31 - 1], "s": "é的👍", "o": 9,
    }  # fmt: skip
    assert msgpack.unpackb(encode_frame(FRAMES[1]))["fr"] == "stop"
    assert msgpack.unpackb(encode_frame(FRAMES[2]))["lp"] == [[-0.5, [[7, -0.5], [9, -1.25]]], [-2.0, []]]
    assert msgpack.unpackb(encode_frame(FRAMES[3])) == {"v": 1, "a": 1, "e": "start"}
    assert set(msgpack.unpackb(encode_frame(FRAMES[4]))) == {"v", "a", "e", "state", "code", "usage"}


@pytest.mark.parametrize("result", [RESULT, Result(id="k", state="failed", code="invalid", error="n: 0: an integer")])
def test_results_survive_the_wire(result: Result) -> None:
    assert decode_result(encode_result(result)) == result
    assert json.loads(json.dumps(result.to_dict())) == msgpack.unpackb(encode_result(result))


def test_results_have_the_documented_keys() -> None:
    documented = {"v", "id", "state", "code", "choices", "usage", "timings", "attempts", "worker", "model", "metadata"}
    written = RESULT.to_dict()
    assert documented | {"traceparent"} <= set(written)
    assert written["timings"] == {"queued_s": 0.5, "ttft_s": None, "e2e_s": 2.0}
    assert written["usage"] == {"prompt_tokens": 7, "completion_tokens": 3, "cached_tokens": 2, "resumed_tokens": 1}


@pytest.mark.parametrize("whole", [encode_frame(FRAMES[0]), encode_result(RESULT)], ids=["frame", "result"])
def test_keys_of_a_newer_worker_are_ignored(whole: bytes) -> None:
    decode = decode_frame if len(whole) < 60 else decode_result
    newer = msgpack.packb(msgpack.unpackb(whole) | {"later": [[1, -0.5]], "new": {"x": 1}})
    assert decode(newer) == decode(whole)


@pytest.mark.parametrize("decode", [decode_frame, decode_result])
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x90",
        b"\x80",
        b"\x81\xa1v\x02",
        b"\x91" * 5000,
        encode_frame(FRAMES[0]).replace(b"\xa1v\x01", b"\xa1v\x02"),
        encode_result(RESULT).replace(b"\xa1v\x01", b"\xa1v\x02"),
        encode_frame(FRAMES[0])[:-1],
        encode_result(RESULT)[:-1],
        msgpack.packb({"v": 1, "a": "x"}),
        msgpack.packb({"v": 1, "id": 1, "state": 1}),
        msgpack.packb({"v": 1, "a": 1, "c": 0, "i": 0, "ids": ["x"], "s": "", "o": 0}),
        msgpack.packb({"v": 1, "id": "k", "state": "x", "timings": {"queued_s": "soon"}}),
        msgpack.packb({"v": 1, "a": 1, "c": 0, "i": 0, "ids": [1], "s": "", "o": 0, "lp": [[-0.5, [[1]]]]}),
        msgpack.packb({"v": 1, "id": "k", "state": "x", "prompt_logprobs": [-0.5]}),
    ],
    ids=itertools.count(),
)
def test_what_is_neither_frame_nor_result_is_a_protocol_error(decode: object, data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(data)  # type: ignore[operator]


@given(st.binary(max_size=100))
def test_any_bytes_are_a_frame_or_a_protocol_error(data: bytes) -> None:
    for decode in (decode_frame, decode_result):
        with suppress(ProtocolError):
            decode(data)


def test_no_lone_surrogate_leaves() -> None:
    frame = decode_frame(encode_frame(TokenFrame(1, 0, 0, (), f"a{LONE}b", 0)))
    assert isinstance(frame, TokenFrame)
    assert frame.text == "a?b"


def test_a_long_result_is_read() -> None:
    ids = tuple(range(2_000_000))
    assert (
        decode_result(encode_result(Result(id="k", state="succeeded", choices=(Choice(0, "", ids, "stop"),))))
        .choices[0]
        .token_ids
        == ids
    )


def test_extension_types_nested_in_a_body_are_refused() -> None:
    with pytest.raises(codec.MalformedError, match="type Timestamp"):
        codec.check({"a": [msgpack.Timestamp(1, 2)]})


def test_a_result_with_more_log_probabilities_than_a_body_may_hold_lists_is_read() -> None:
    logprobs = (TokenLogprobs(-1.5),) * codec.MAX_CONTAINERS
    result = Result(id="k", state="succeeded", choices=(Choice(0, "", (7,) * len(logprobs), "length", None, logprobs),))
    assert decode_result(encode_result(result)) == result
    assert 4 * wire.MAX_LOGPROBS < frames.MAX_RESULT_CONTAINERS  # two lists for each at most, of prompt and output
