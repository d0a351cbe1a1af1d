"""What a worker sends back: frames in the log and on the channel, and the one result of a job.

Relies on `worker/codec.py` for bounded msgpack. Leaves when to send to `worker/publisher.py` and where to `worker/broker.py`.
Keys are those of docs/protocol.md. Readers ignore keys they do not know, so that a newer worker may say more.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal, TypeVar, get_args

from engine.messages import TokenLogprobs
from worker import codec
from worker.errors import JobFailed, ProtocolError

VERSION = 1
MAX_RESULT_ITEMS = 1 << 24
"""Items of one list in a result: as many as a job may ask tokens."""
MAX_RESULT_CONTAINERS = 1 << 23
"""Lists and maps in a result or frame: enough for each of the log probabilities that a job may ask for."""

FinalState = Literal["succeeded", "failed", "cancelled", "expired", "dead"]
"""How a job can end; what is not among them has not ended."""
FINAL_STATES: Final = get_args(FinalState)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a job."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    """Of all choices."""
    cached_tokens: int = 0
    """Prompt tokens whose KV was found in the prefix cache."""
    resumed_tokens: int = 0
    """Output tokens taken over from earlier attempts."""


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds from the enqueue."""

    queued_s: float = 0.0
    """To the first claim."""
    ttft_s: float | None = None
    """To the first token; None when there was none, or when an earlier attempt had made it."""
    e2e_s: float = 0.0
    """To the end."""


@dataclass(frozen=True, slots=True)
class TokenFrame:
    """New tokens of one choice."""

    attempt: int
    choice: int
    index: int
    """Output index of the first token."""
    token_ids: tuple[int, ...]
    text: str
    """What has become safe to show. It may lag behind the tokens, and is empty while a stop string may still come."""
    offset: int
    """Where `text` starts in the choice's text, in characters."""
    finish_reason: str | None = None
    """In the last frame of a choice."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each token, when they were asked for."""


@dataclass(frozen=True, slots=True)
class ControlFrame:
    """`start` and `end` of an attempt, or `restart`: `choice` goes on from token `index` and character `offset` anew."""

    attempt: int
    event: str
    state: str | None = None
    """With `end`: how the job ended, and its `code` and `usage`."""
    code: str | None = None
    usage: Usage | None = None
    choice: int = 0
    index: int = 0
    offset: int = 0


Frame = TokenFrame | ControlFrame


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    """stop, length, cancelled, expired or error; None for a choice that had not ended when its job did."""
    detail: str | None = None
    """Why, where the reason alone does not say it: `kv_capacity`, `model_length`."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One for each token, when they were asked for."""
    score: float | None = None
    """Of a beam: the mean of its tokens' log probabilities."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How a job ended. Stored once."""

    id: str
    state: str
    """A `FinalState`, or what a later version may add."""
    code: str | None = None
    """Why, in one word, when it did not succeed: `invalid`, `unknown_version`, ..."""
    error: str | None = None
    """Why, in one line: field, value, limit. Never text of the prompt."""
    choices: tuple[Choice, ...] = ()
    """In order; of a beam search the best one first."""
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """One for each token of the prompt but the first, when they were asked for."""
    usage: Usage = field(default_factory=Usage)
    timings: Timings = field(default_factory=Timings)
    attempts: int = 0
    worker: str | None = None
    model: str | None = None
    metadata: Mapping[str, object] = field(default_factory=dict)
    traceparent: str | None = None
    """The job's own, where it had a well-formed one (W3C Trace Context)."""

    @property
    def text(self) -> str:
        """The text of the first choice; of a beam search that is the best one. Empty when there is none."""
        return self.choices[0].text if self.choices else ""

    def raise_for_state(self) -> "Result":
        """The result itself. Raises `JobFailed` when the job did not succeed."""
        if self.state != "succeeded":
            raise JobFailed(self)
        return self

    def to_dict(self) -> dict[str, object]:
        """The result as maps, lists, text and numbers: what is stored, and what `--json` prints."""
        return {
            "v": VERSION,
            "id": self.id,
            "state": self.state,
            "code": self.code,
            "error": self.error,
            "choices": [_choice_to_dict(choice) for choice in self.choices],
            **({} if self.prompt_logprobs is None else {"prompt_logprobs": _plain(self.prompt_logprobs)}),
            "usage": asdict(self.usage),
            "timings": asdict(self.timings),
            "attempts": self.attempts,
            "worker": self.worker,
            "model": self.model,
            "metadata": dict(self.metadata),
            **({} if self.traceparent is None else {"traceparent": self.traceparent}),
        }


def encode_frame(frame: Frame) -> bytes:
    """Write a frame; what is absent is left out."""
    fields: dict[str, object] = {"v": VERSION, "a": frame.attempt}
    if isinstance(frame, TokenFrame):
        fields |= {"c": frame.choice, "i": frame.index, "ids": frame.token_ids, "s": frame.text, "o": frame.offset}
        if frame.finish_reason is not None:
            fields["fr"] = frame.finish_reason
        if frame.logprobs:
            fields["lp"] = frame.logprobs
        return codec.pack(fields)
    usage = None if frame.usage is None else asdict(frame.usage)
    optional: dict[str, object] = {"e": frame.event, "state": frame.state, "code": frame.code, "usage": usage}
    if frame.event == "restart":
        optional |= {"c": frame.choice, "i": frame.index, "o": frame.offset}
    return codec.pack(fields | {key: value for key, value in optional.items() if value is not None})


def decode_frame(data: bytes) -> Frame:
    """Read a frame. `ProtocolError` for anything else, and for another major version."""
    return _decoded("frame", data, _frame)


def encode_result(result: Result) -> bytes:
    """Write a result."""
    return codec.pack(result.to_dict())


def decode_result(data: bytes) -> Result:
    """Read a result. `ProtocolError` for anything else, and for another major version."""
    return _decoded("result", data, _result)


def _decoded(what: str, data: bytes, build: Callable[["_Fields"], T]) -> T:
    try:
        fields = _Fields(codec.unpack(data, max_containers=MAX_RESULT_CONTAINERS, max_items=MAX_RESULT_ITEMS))
        if fields.get("v", int) != VERSION:
            raise ProtocolError(f"{what}: v {fields.get('v', int)}: this version reads {VERSION}; upgrade slotmill")
        return build(fields)
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"{what}: {len(data)} bytes: {error}") from None


class _Fields:
    """A decoded map whose values are asked for by key and type. `TypeError` names the key that is not as it should be."""

    def __init__(self, value: object) -> None:
        if type(value) is not dict:
            raise TypeError("not a map")
        self._map: dict[str, Any] = value

    def get(self, key: str, kind: type[T]) -> T:
        value = self.maybe(key, kind)
        if value is None:
            raise TypeError(f"{key} is missing")
        return value

    def maybe(self, key: str, kind: type[T]) -> T | None:
        value = self._map.get(key)
        if value is not None and type(value) is not kind:
            raise TypeError(f"{key} is of type {type(value).__name__}, not {kind.__name__}")
        return value

    def ints(self, key: str) -> tuple[int, ...]:
        values = self.get(key, list)
        if values and set(map(type, values)) != {int}:
            raise TypeError(f"{key} holds more than integers")
        return tuple(values)

    def number(self, key: str) -> float | None:
        value = self._map.get(key)
        return None if value is None else float(value)

    def logprobs(self, key: str) -> tuple[TokenLogprobs, ...] | None:
        values = self.maybe(key, list)
        if values is None:
            return None
        return tuple([TokenLogprobs(float(own), tuple([(int(i), float(p)) for i, p in top])) for own, top in values])


def _frame(fields: _Fields) -> Frame:
    attempt = fields.get("a", int)
    event = fields.maybe("e", str)
    if event is None:
        return TokenFrame(
            attempt=attempt,
            choice=fields.get("c", int),
            index=fields.get("i", int),
            token_ids=fields.ints("ids"),
            text=fields.get("s", str),
            offset=fields.get("o", int),
            finish_reason=fields.maybe("fr", str),
            logprobs=fields.logprobs("lp") or (),
        )
    usage = fields.maybe("usage", dict)
    return ControlFrame(
        attempt=attempt,
        event=event,
        state=fields.maybe("state", str),
        code=fields.maybe("code", str),
        usage=None if usage is None else _usage(_Fields(usage)),
        choice=fields.maybe("c", int) or 0,
        index=fields.maybe("i", int) or 0,
        offset=fields.maybe("o", int) or 0,
    )


def _result(fields: _Fields) -> Result:
    timings = _Fields(fields.maybe("timings", dict) or {})
    return Result(
        id=fields.get("id", str),
        state=fields.get("state", str),
        code=fields.maybe("code", str),
        error=fields.maybe("error", str),
        choices=tuple(_choice(_Fields(choice)) for choice in fields.maybe("choices", list) or ()),
        prompt_logprobs=fields.logprobs("prompt_logprobs"),
        usage=_usage(_Fields(fields.maybe("usage", dict) or {})),
        timings=Timings(
            queued_s=timings.number("queued_s") or 0.0, ttft_s=timings.number("ttft_s"), e2e_s=timings.number("e2e_s") or 0.0
        ),
        attempts=fields.maybe("attempts", int) or 0,
        worker=fields.maybe("worker", str),
        model=fields.maybe("model", str),
        metadata=fields.maybe("metadata", dict) or {},
        traceparent=fields.maybe("traceparent", str),
    )


def _choice(fields: _Fields) -> Choice:
    return Choice(
        index=fields.get("index", int),
        text=fields.get("text", str),
        token_ids=fields.ints("token_ids"),
        finish_reason=fields.maybe("finish_reason", str),
        detail=fields.maybe("detail", str),
        logprobs=fields.logprobs("logprobs"),
        score=fields.number("score"),
    )


def _choice_to_dict(choice: Choice) -> dict[str, object]:
    logprobs = None if choice.logprobs is None else _plain(choice.logprobs)
    optional = {"detail": choice.detail, "logprobs": logprobs, "score": choice.score}
    return {
        "index": choice.index,
        "text": choice.text,
        "token_ids": list(choice.token_ids),
        "finish_reason": choice.finish_reason,
        **{name: value for name, value in optional.items() if value is not None},
    }


def _plain(logprobs: Iterable[TokenLogprobs]) -> list[object]:
    return [[own, [list(pair) for pair in top]] for own, top in logprobs]


def _usage(fields: _Fields) -> Usage:
    return Usage(**{name: fields.maybe(name, int) or 0 for name in Usage.__dataclass_fields__})
