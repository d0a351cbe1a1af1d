"""Text to token ids and back: prompts and chat templates in, text that is safe to show and stop strings out.

Relies on `tokenizers` and a sandboxed jinja2, on the files that the engine side leaves in the model's directory; torch and
transformers stay out, they cost seconds and hundreds of megabytes. Leaves the length limit to the engine, but for refusing
early what would take seconds to tokenise only to be refused.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import tokenizers
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from worker.errors import InvalidJob
from worker.wire import Job

HALF = "\N{REPLACEMENT CHARACTER}"
"""What a decoder writes for bytes that are not a character, or not one yet."""
MAX_WINDOW = 8
MIN_WINDOW = 4
"""Tokens of one byte at least, so four of them always hold the three bytes of an unfinished character."""
CHARACTERS_PER_TOKEN = 16


class Tokenizer:
    """One model's tokeniser and chat template, from a directory with tokenizer.json. Safe to share between threads."""

    def __init__(self, model_dir: str | Path) -> None:
        directory = Path(model_dir)
        self._tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        """One more than the largest id."""
        self._longest = max(map(len, vocabulary))
        self._has_text = bytearray(self.vocab_size)
        for token_id in vocabulary.values():
            self._has_text[token_id] = True
        for token_id, token in self._tokenizer.get_added_tokens_decoder().items():
            self._has_text[token_id] = not token.special
        self._byte_ids = self._find_byte_ids()
        self._template = _ChatTemplate.read(directory)

    def encode_prompt(self, job: Job, max_tokens: int | None = None) -> list[int]:
        """The prompt of `job` in token ids, special tokens included as this model wants them.

        With `max_tokens`, text that cannot have so few tokens is refused before it costs seconds (8 MiB: 9 s, 860 MB); what is
        only somewhat too long is left to the engine. Raises `InvalidJob`, which never shows text.
        """
        if job.prompt_token_ids is not None:
            return self._checked_ids(job.prompt_token_ids)
        if job.messages is not None:
            if self._template is None:
                raise InvalidJob("messages", f"{len(job.messages)} messages", "this model has no chat template; send prompt")
            return self._encode("messages", self._template.render(job.messages), max_tokens, add_special_tokens=False)
        assert job.prompt is not None
        return self._encode("prompt", job.prompt, max_tokens, add_special_tokens=True)

    def decode(self, token_ids: Iterable[int]) -> str:
        """All the text of `token_ids`. Special tokens, and ids outside the vocabulary, have none."""
        return self.decode_text([token_id for token_id in token_ids if self.has_text(token_id)])

    def decode_text(self, token_ids: list[int]) -> str:
        """The same of ids that are known to have text."""
        return self._tokenizer.decode(token_ids)

    def has_text(self, token_id: int) -> bool:
        """Whether a token adds to the text."""
        return 0 <= token_id < self.vocab_size and bool(self._has_text[token_id])

    def is_byte(self, token_id: int) -> bool:
        """Whether a token is a lone byte that the decoder joins with its neighbours (byte fallback)."""
        return token_id in self._byte_ids

    def _find_byte_ids(self) -> frozenset[int]:
        found = {self._tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256)} - {None}
        return frozenset(i for i in found if i is not None and not self._tokenizer.decode([i]).startswith("<0x"))

    def _checked_ids(self, token_ids: Sequence[int]) -> list[int]:
        largest = max(token_ids)
        if largest >= self.vocab_size:
            raise InvalidJob("prompt_token_ids", largest, f"this model's ids end at {self.vocab_size - 1}")
        return list(token_ids)

    def _encode(self, field: str, text: str, max_tokens: int | None, *, add_special_tokens: bool) -> list[int]:
        if max_tokens is not None:
            self._refuse_far_too_long(field, text, max_tokens)
        token_ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        if not token_ids:
            raise InvalidJob(field, f"{len(text)} characters", "at least one token; this text has none for this model")
        return token_ids

    def _refuse_far_too_long(self, field: str, text: str, max_tokens: int) -> None:
        """Refuse by characters, or by a first part that alone has twice the tokens."""
        first = max_tokens * CHARACTERS_PER_TOKEN
        if len(text) > max_tokens * self._longest or (
            len(text) > first and len(self._tokenizer.encode(text[:first]).ids) > 2 * max_tokens
        ):
            raise InvalidJob(field, f"{len(text)} characters", f"at most {max_tokens} tokens; shorten it")


class Detokenizer:
    """Token ids of one output to text, a token at a time. The text continues the prompt: pieces and `flush` joined equal the
    decoded prompt and output less the decoded prompt, so that a space between the two is kept.

    1. All of a decoded text is final but a trailing half character, which waits for its other half.
    2. A run of byte-fallback tokens is decoded as one (one wrong byte spoils all of it), so it waits for its end.
    3. Only the last tokens are decoded again, never the whole; what is shown depends on the ids alone, not on how they came.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._window = self._tail(prompt_ids)
        self._run: list[int] = []
        self._num_shown = len(tokenizer.decode_text(self._window))
        self._has_half = False

    @property
    def is_pending(self) -> bool:
        """Whether something is held back that more ids, or `flush`, will show."""
        return self._has_half or bool(self._run)

    def push(self, token_ids: Iterable[int]) -> str:
        """Take more ids; the text that has become safe to show. Ids outside the vocabulary are passed over."""
        return "".join([self._push(token_id) for token_id in token_ids if self._tokenizer.has_text(token_id)])

    def flush(self) -> str:
        """The rest, when nothing comes any more: half characters as U+FFFD."""
        self._window += self._run
        self._run, self._has_half = [], False
        return self._show(self._tokenizer.decode_text(self._window))

    def _push(self, token_id: int) -> str:
        self._run.append(token_id)
        if self._tokenizer.is_byte(token_id):
            return ""
        self._window += self._run
        self._run = []
        text = self._tokenizer.decode_text(self._window)
        piece = self._show(text.removesuffix(HALF))
        self._has_half = len(text) > self._num_shown
        if len(self._window) > MAX_WINDOW:
            # The shorter window may begin within a character or lose a leading space, but it ends in the same text.
            num_waiting = len(text) - self._num_shown
            self._window = self._window[-MIN_WINDOW:]
            self._num_shown = len(self._tokenizer.decode_text(self._window)) - num_waiting
        return piece

    def _show(self, text: str) -> str:
        piece = text[self._num_shown :]
        self._num_shown += len(piece)
        return piece

    def _tail(self, prompt_ids: Sequence[int]) -> list[int]:
        """The last tokens of the prompt that have text, with the whole of a run of bytes."""
        tail: list[int] = []
        for token_id in filter(self._tokenizer.has_text, reversed(prompt_ids)):
            if len(tail) >= MIN_WINDOW and not self._tokenizer.is_byte(tail[-1]):
                break
            tail.append(token_id)
        return tail[::-1]


class StopMatcher:
    """Finds the stop string that is complete first, and holds back only what may still become one.

    Of several that end at the same character the longest counts, so that nothing of any is shown. After a hit nothing more is
    shown.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self._has_hit = False

    def feed(self, text: str) -> tuple[str, bool]:
        """Take more text; what is safe to show of it and of what was held, and whether a stop string is complete."""
        if self._has_hit:
            return "", True
        text = self._held + text
        hits = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if hits:
            end, start = min(hits)
            self._held, self._has_hit = "", True
            return text[: end if self._include_stop else start], True
        safe = len(text) - self._num_to_hold(text)
        self._held = text[safe:]
        return text[:safe], False

    def flush(self) -> str:
        """What was held back, when nothing comes any more."""
        held, self._held = self._held, ""
        return held

    def _num_to_hold(self, text: str) -> int:
        """Length of the longest suffix that is the beginning of a stop string."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if any(stop.startswith(text[start:]) for stop in self._stops):
                return len(text) - start
        return 0


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; here it is just its content."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _ChatTemplate:
    """A chat template with the names that templates for transformers expect. Templates are code from strangers: sandboxed."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._source = source
        self._special_tokens = special_tokens
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
        self._template = environment.from_string(source)

    @classmethod
    def read(cls, directory: Path) -> "_ChatTemplate | None":
        """The default template of a model directory: chat_template.jinja, else the one in tokenizer_config.json."""
        config = directory / "tokenizer_config.json"
        settings: dict[str, Any] = json.loads(config.read_text("utf-8")) if config.exists() else {}
        file = directory / "chat_template.jinja"
        source = file.read_text("utf-8") if file.exists() else settings.get("chat_template")
        if isinstance(source, list):
            source = {item["name"]: item["template"] for item in source}.get("default")
        if source is None:
            return None
        tokens = {name: value["content"] if isinstance(value, dict) else value for name, value in settings.items()}
        return cls(source, {k: v for k, v in tokens.items() if k.endswith("_token") and isinstance(v, str)})

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The conversation as text, ready for the assistant's answer. `InvalidJob` when the template refuses it."""
        copies = [dict(message) for message in messages]
        try:
            return self._template.render(
                messages=copies, tools=None, documents=None, add_generation_prompt=True, **self._special_tokens
            )
        except jinja2.TemplateError as error:
            said = error.message or ""
            reason = said if said and said in self._source else type(error).__name__
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            reason = type(error).__name__
        raise InvalidJob("messages", f"{len(messages)} messages", f"the chat template refuses them: {reason}") from None


def _to_json(value: object, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
