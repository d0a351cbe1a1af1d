"""Is this stream entry a well-formed job? Decoding, and the one table of what a job body may hold.

Relies on `worker/codec.py` for bounded decoding. Leaves frames and results to `worker/frames.py`, and what only a worker can
know to others: the prompt against the vocabulary (`worker/text.py`), the model's length (the engine), the served name
(`worker/consumer.py`). A refusal names field, value and limit; of prompts, messages and metadata it shows the size only.
The fields are described in docs/protocol.md.
"""

import difflib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from engine.request import NOT_WITH_BEAMS, Grammar
from worker import codec, response_format
from worker.codec import MalformedError
from worker.errors import InvalidJob, UnknownVersion
from worker.keys import LANES
from worker.traceparent import well_formed

VERSION = 1
MAX_BODY_BYTES = 8 << 20
"""Of an encoded body, the value of `m` or `j`. A bigger one is not shipped to the worker that refuses it."""
MAX_ID_CHARS = 128
MAX_TOKENS = 1 << 24
"""More than any model's length; the limit that counts is the engine's."""
MAX_TOKEN_ID = 2**31 - 1
MAX_METADATA_BYTES = 16 << 10
MAX_JOB_TOKENS = 1 << 24
"""Tokens that all choices of a job may ask for together: with their text below the 512 MiB of one value."""
MAX_LOGPROBS = 1 << 20
"""Log probabilities that a job may ask for: some 16 MB of result, and 100 MB of memory while it is made and read."""

ENTRY_FIELDS = ("v", "id", "m", "j")
PROMPTS = ("prompt", "prompt_token_ids", "messages")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A checked job body: the table in docs/protocol.md is made of it. Exactly one of `PROMPTS` is set."""

    id: str | None = None
    """Null: the stream entry's id is the job's."""
    prompt: str | None = field(default=None, repr=False)
    """Text, as it is."""
    prompt_token_ids: tuple[int, ...] | None = field(default=None, repr=False)
    """The prompt as the model's tokens."""
    messages: tuple[Mapping[str, str], ...] | None = field(default=None, repr=False)
    """A conversation, rendered by the model's chat template."""
    max_tokens: int = 256
    """At most the model's length; 0 computes the prompt only."""
    min_tokens: int = 0
    """At most `max_tokens`."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    """0: off."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    """Empty: all; else nothing else is generated."""
    banned_token_ids: tuple[int, ...] = ()
    """Never generated."""
    seed: int | None = None
    """Null: drawn at the first claim and kept, so that every attempt samples alike."""
    n: int = 1
    """Choices; at most the worker's slots, and 1 with `max_tokens` 0."""
    beam_width: int = 0
    """At most the worker's slots; not with `n` above 1, and nothing that draws, changes logits or stops early: see below."""
    stop: tuple[str, ...] = ()
    """Ends an answer, and is not part of it without `include_stop`."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    logprobs: int | None = None
    """Likeliest tokens beside each token's own; 1048576 log probabilities in all."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt."""
    response_format: Grammar | None = None
    """Null: free text. Schema or regex of 1 byte to 64 KiB: see [Output of a given form](#output-of-a-given-form)."""
    stream: bool = True
    """False: the channel carries the end frame alone; the log is still kept, a frame every 64 tokens, for resumption."""
    priority: str = "normal"
    """When enqueued raw, the lane decides."""
    tenant: str | None = None
    deadline_ms: int | None = None
    """Unix milliseconds; past it: state `expired`, with the text so far."""
    result_ttl_s: int = 86_400
    max_attempts: int = 5
    metadata: Mapping[str, object] = field(default_factory=dict, repr=False)
    """Echoed in the result."""
    model: str | None = None
    """The worker's served name, when given."""
    batch_id: str | None = None
    custom_id: str | None = None
    traceparent: str | None = None
    """As W3C Trace Context has it, of any version, echoed in the result; what is not well formed is passed over, as if it
    were not given; but lone surrogates are refused, as in any field."""

    @property
    def num_choices(self) -> int:
        """Answers that its result holds."""
        return max(self.n, self.beam_width)


class _LimitError(ValueError):
    """A value outside its limit; the message is the limit."""


@dataclass(frozen=True, slots=True)
class Check:
    """Takes a field's value, gives it back as `Job` holds it, or raises `_LimitError`."""

    limit: str
    """In words: what refusals say, and docs/protocol.md."""
    read: Callable[[Any], Any]

    def __call__(self, value: Any) -> Any:
        return self.read(value)


def _limit(text: str) -> Callable[[Callable[[Any], Any]], Check]:
    return partial(Check, text)


def _integer(low: int, high: int) -> Check:
    return _when(lambda value: type(value) is int and low <= value <= high, f"an integer from {low} to {high}")


def _number(low: float, high: float, *, above: bool = False) -> Check:
    limit = f"a number above {low:g} and at most {high:g}" if above else f"a number from {low:g} to {high:g}"
    in_range = _when(
        lambda value: type(value) in (int, float) and (low < value if above else low <= value) and value <= high, limit
    )
    return Check(limit, lambda value: float(in_range.read(value)))


def _text(low: int, high: int) -> Check:
    return _when(lambda value: type(value) is str and low <= len(value) <= high, f"text of {low} to {high} characters")


def _one_of(words: Iterable[str]) -> Check:
    known = tuple(words)
    return _when(lambda value: type(value) is str and value in known, f"one of {', '.join(known)}")


def _when(holds: Callable[[Any], bool], limit: str) -> Check:
    def read(value: Any) -> Any:
        if not holds(value):
            raise _LimitError(limit)
        return value

    return Check(limit, read)


def _or_null(check: Check) -> Check:
    return Check(f"{check.limit}, or null", lambda value: None if value is None else check.read(value))


def _token_ids(low: int, high: int) -> Check:
    def holds(ids: Any) -> bool:
        return (
            isinstance(ids, (list, tuple))
            and low <= len(ids) <= high
            and (not ids or (set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) <= MAX_TOKEN_ID))
        )

    listed = _when(holds, f"a list of {low} to {high} token ids from 0 to {MAX_TOKEN_ID}")
    return Check(listed.limit, lambda value: tuple(listed.read(value)))


@_limit("text, or a list of at most 16 texts, of 1 to 256 characters each")
def _stop(value: Any) -> tuple[str, ...]:
    stops = (value,) if type(value) is str else value
    if not isinstance(stops, (list, tuple)) or len(stops) > 16:
        raise _LimitError(_stop.limit)
    return tuple(map(_text(1, 256), stops))


@_limit("a list of 1 to 4096 maps {role, content}, role of 1 to 64 characters, both text")
def _messages(value: Any) -> tuple[Mapping[str, str], ...]:
    if not isinstance(value, (list, tuple)) or not 1 <= len(value) <= 4096:
        raise _LimitError(_messages.limit)
    for message in value:
        if type(message) is not dict or message.keys() != {"role", "content"} or set(map(type, message.values())) != {str}:
            raise _LimitError(_messages.limit)
        if not 1 <= len(message["role"]) <= 64:
            raise _LimitError(_messages.limit)
    return tuple(dict(message) for message in value)


@_limit("a map of at most 1024 token ids, as decimal text, to numbers from -100 to 100")
def _logit_bias(value: Any) -> Mapping[int, float]:
    if type(value) is not dict or len(value) > 1024 or not all(re.fullmatch("0|[1-9][0-9]{0,9}", key) for key in value):
        raise _LimitError(_logit_bias.limit)
    try:
        return {int(key): _number(-100, 100)(bias) for key, bias in value.items()}
    except _LimitError:
        raise _LimitError(_logit_bias.limit) from None


def _map(max_bytes: int) -> Check:
    return _when(
        lambda value: type(value) is dict and len(codec.pack(value)) <= max_bytes,
        f"a map of at most {max_bytes} bytes encoded; keep a key in it, and the rest elsewhere",
    )


@_limit(f"1 to {MAX_ID_CHARS} printable characters without blanks and braces")
def _job_id(value: Any) -> str:
    printable = type(value) is str and 1 <= len(value) <= MAX_ID_CHARS and value.isprintable()
    if not printable or any(character in " {}" for character in value):
        raise _LimitError(_job_id.limit)
    return str(value)


_flag = _when(lambda value: type(value) is bool, "true or false")
_label = _or_null(_text(0, 512))

FIELDS: Mapping[str, Check] = MappingProxyType(
    {
        "id": _or_null(_job_id),
        "prompt": _or_null(_text(0, MAX_BODY_BYTES)),
        "prompt_token_ids": _or_null(_token_ids(1, codec.MAX_ITEMS)),
        "messages": _or_null(_messages),
        "max_tokens": _integer(0, MAX_TOKENS),
        "min_tokens": _integer(0, MAX_TOKENS),
        "temperature": _number(0, 100),
        "top_p": _number(0, 1, above=True),
        "min_p": _number(0, 1),
        "top_k": _integer(0, MAX_TOKEN_ID),
        "presence_penalty": _number(-2, 2),
        "frequency_penalty": _number(-2, 2),
        "repetition_penalty": _number(0.01, 100),
        "logit_bias": _logit_bias,
        "allowed_token_ids": _token_ids(0, 1024),
        "banned_token_ids": _token_ids(0, 1024),
        "seed": _or_null(_integer(-(2**63), 2**64 - 1)),
        "n": _integer(1, 4096),
        "beam_width": _when(
            lambda value: type(value) is int and (value == 0 or 2 <= value <= 64), "0 for off, or an integer from 2 to 64"
        ),
        "stop": _stop,
        "stop_token_ids": _token_ids(0, 64),
        "ignore_eos": _flag,
        "include_stop": _flag,
        "logprobs": _or_null(_integer(0, 20)),
        "prompt_logprobs": _or_null(_integer(0, 20)),
        "response_format": _or_null(_limit("a map with a `type`")(response_format.parse)),
        "stream": _flag,
        "priority": _one_of(LANES),
        "tenant": _or_null(_text(0, 128)),
        "deadline_ms": _or_null(_integer(0, 2**53)),
        "result_ttl_s": _integer(60, 2_592_000),
        "max_attempts": _integer(1, 20),
        "metadata": _map(MAX_METADATA_BYTES),
        "model": _label,
        "batch_id": _label,
        "custom_id": _label,
        "traceparent": Check("text, or null", well_formed),  # never a reason to fail a job
    }
)
"""Every field of a job body and its check. `v` is looked at first, and `x_...` is the producer's own."""

_PRIVATE = (*PROMPTS, "metadata")
_NEUTRAL = Job()
_NOT_WITH_BEAMS = (*("response_format" if name == "grammar" else name for name in NOT_WITH_BEAMS), "stop")
"""And `stop`, which ends an answer before the search does."""


def decode_job(entry: Mapping[bytes, bytes], *, lane: str) -> Job:
    """The job in a stream entry, with `priority` set to its lane.

    Raises `InvalidJob`, or `UnknownVersion` for another major `v`; `job_id` and `traceparent` are set whenever they were
    given and usable.
    """
    known: str | None = None
    traceparent: str | None = None
    try:
        known = _checked("id", _entry_id(entry))
        body = _read_body(entry)
        traceparent = well_formed(body.get("traceparent"))
        known = _agreed_id(known, body)
        _check_version(_entry_version(entry))
        _check_names(entry)
        return replace(parse_body(body), id=known, priority=lane)
    except InvalidJob as fault:
        refusal = fault if isinstance(fault, UnknownVersion) else _other_version(entry) or fault
        refusal.job_id = refusal.job_id or known
        refusal.traceparent = traceparent
        raise refusal from None


def parse_body(body: Mapping[str, object]) -> Job:
    """Check a decoded body. `InvalidJob` or `UnknownVersion` for the first field that is wrong."""
    _check_version(body.get("v", VERSION))
    values = {}
    for name, value in body.items():
        if name in FIELDS:
            values[name] = _checked(name, value)
        elif name != "v" and not name.startswith("x_"):
            raise _unknown(name, FIELDS)
    job = Job(**values)
    _check_together(job, given=values.keys())
    return job


def encode_body(body: Mapping[str, object]) -> bytes:
    """A body that `parse_body` accepts, as msgpack.

    `InvalidJob` when it is over `MAX_BODY_BYTES`, or when a field of the producer's own could not be read again.
    """
    for name, value in body.items():
        try:
            codec.check(name)
            codec.check(value)
        except MalformedError as error:
            raise InvalidJob(repr(name[:64])[1:-1], _shown(name, value), str(error)) from None
    packed = codec.pack(dict(body))
    check_size(len(packed))
    return packed


def check_size(num_bytes: int) -> None:
    """`InvalidJob` when an encoded body is over `MAX_BODY_BYTES`."""
    if num_bytes > MAX_BODY_BYTES:
        raise InvalidJob("body", f"{num_bytes} bytes", f"at most {MAX_BODY_BYTES} bytes; shorten the prompt")


def _check_names(entry: Mapping[bytes, bytes]) -> None:
    for name in entry:
        key = name.decode(errors="replace")
        if key not in ENTRY_FIELDS and not key.startswith("x_"):
            raise _unknown(key, ENTRY_FIELDS)


def _entry_id(entry: Mapping[bytes, bytes]) -> str | None:
    if (value := entry.get(b"id")) is None:
        return None
    if len(value) > 4 * MAX_ID_CHARS:
        raise InvalidJob("id", f"{len(value)} bytes", f"at most {MAX_ID_CHARS} characters")
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise InvalidJob("id", f"{len(value)} bytes", "text in UTF-8") from None


def _entry_version(entry: Mapping[bytes, bytes]) -> str:
    return entry.get(b"v", str(VERSION).encode()).decode(errors="replace")


def _other_version(entry: Mapping[bytes, bytes]) -> UnknownVersion | None:
    """Entry or body is of another version, which may write differently whatever else was found wrong."""
    try:
        _check_version(_entry_version(entry))
        _check_version(_read_body(entry).get("v", VERSION))
    except UnknownVersion as error:
        return error
    except InvalidJob:  # a body that cannot be read says nothing of its version
        return None
    return None


def _read_body(entry: Mapping[bytes, bytes]) -> dict[str, object]:
    bodies = [name for name in (b"m", b"j") if name in entry]
    if len(bodies) != 1:
        _check_names(entry)  # a misspelt one says more
        raise InvalidJob("body", f"{len(bodies)} bodies", "exactly one of m (msgpack) and j (JSON)")
    data = entry[bodies[0]]
    check_size(len(data))
    try:
        body = (codec.unpack if bodies[0] == b"m" else codec.parse_json)(data)
    except MalformedError as error:
        raise InvalidJob("body", f"{len(data)} bytes", str(error)) from None
    if type(body) is not dict or not all(type(name) is str for name in body):
        raise InvalidJob("body", f"{len(data)} bytes", "a map from field names to values")
    return body


def _agreed_id(entry_id: str | None, body: Mapping[str, object]) -> str | None:
    body_id: str | None = _checked("id", body.get("id"))
    if entry_id is not None and body_id is not None and entry_id != body_id:
        raise InvalidJob("id", _shown("id", body_id), "must equal the id of the stream entry, or be left out of one of them")
    return entry_id or body_id


def _check_version(version: object) -> None:
    """An integer, or `major` or `major.minor` as text in a stream entry; the major decides."""
    if type(version) is str and re.fullmatch("[0-9]+([.][0-9]+)?", version):
        is_ours = version.partition(".")[0].lstrip("0") == str(VERSION)  # digits of any number, which int() would refuse
    elif type(version) is int and version >= 0:
        is_ours = version == VERSION
    else:
        raise InvalidJob("v", _shown("v", version), f"an integer; this worker speaks {VERSION}")
    if not is_ours:
        raise UnknownVersion("v", _shown("v", version), f"this worker speaks {VERSION}; upgrade it, or send version {VERSION}")


def _checked(name: str, value: object) -> Any:
    try:
        codec.check(value)
        return FIELDS[name](value)
    except (MalformedError, _LimitError) as error:
        raise InvalidJob(name, _shown(name, value), f"{error}{_unquoted(name, value)}") from None


def _unquoted(name: str, value: object) -> str:
    """Advice where a number, true or false came as text."""
    if type(value) is not str or not re.fullmatch("-?[0-9]{1,18}([.][0-9]{1,18})?|true|false", value):
        return ""
    with suppress(MalformedError, ValueError):
        FIELDS[name](json.loads(value))
        return "; write it without quotes"
    return ""


def _check_together(job: Job, given: Iterable[str]) -> None:
    prompts = [name for name in PROMPTS if getattr(job, name) is not None]
    if len(prompts) != 1:
        raise InvalidJob("prompt", " and ".join(prompts) or "missing", f"exactly one of {', '.join(PROMPTS)}")
    if job.min_tokens > job.max_tokens:
        raise InvalidJob("min_tokens", job.min_tokens, f"at most max_tokens, which is {job.max_tokens}; change one of them")
    if job.num_choices > 1 and not job.max_tokens:
        raise InvalidJob("max_tokens", 0, "at least 1 with n or beam_width: 0 computes the prompt only")
    if job.num_choices * job.max_tokens > MAX_JOB_TOKENS:
        raise InvalidJob(
            "max_tokens",
            job.max_tokens,
            f"at most {MAX_JOB_TOKENS} in all of the {job.num_choices} choices; lower it or their number",
        )
    check_logprobs("logprobs", job.logprobs, job.n * job.max_tokens)
    if job.beam_width:
        changed = (name for name in _NOT_WITH_BEAMS if getattr(job, name) != getattr(_NEUTRAL, name))
        if excluded := "temperature" if "temperature" in given else next(changed, None):
            raise InvalidJob("beam_width", job.beam_width, f"excludes {excluded}; leave one of them out")


def check_logprobs(name: str, num_top: int | None, num_tokens: int) -> None:
    """`InvalidJob` when so many tokens, each with so many likeliest ones, are more than a result should hold."""
    if num_top is not None and num_tokens * (1 + num_top) > MAX_LOGPROBS:
        raise InvalidJob(
            name, num_top, f"at most {MAX_LOGPROBS} log probabilities; {num_tokens} tokens have {1 + num_top} each: lower one"
        )


def _unknown(name: str, known: Iterable[str]) -> InvalidJob:
    close = difflib.get_close_matches(name, known, n=3)
    nearest = max(close, key=lambda word: word[:3] == name[:3], default=None)
    advice = f"did you mean {nearest}?" if nearest else f"known are {', '.join(known)}."
    return InvalidJob(repr(name[:64])[1:-1], "unknown field", f"{advice} A name of your own starts with x_")


def _shown(name: str, value: object) -> str:
    """`value` for a message: one line, and sizes in place of content where a prompt could be."""
    is_private = name in _PRIVATE or name.startswith("x_")
    if isinstance(value, (str, bytes, dict, list, tuple)) and (is_private or not isinstance(value, str)):
        return f"{type(value).__name__} of {len(value)}"
    if isinstance(value, str):
        return repr(value[:64])
    plain = value is None or type(value) in (bool, float) or (type(value) is int and abs(value) < 2**128)
    return repr(value) if plain else type(value).__name__
