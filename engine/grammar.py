"""Grammars: what the next token may be so that the output is a JSON object, meets a schema or is matched by a regex.

Relies on llguidance, which turns schemas and regexes into a parser over the tokenizer's bytes and computes the tokens allowed
in a step when it comes to it, so that compiling takes about a millisecond. Leaves applying masks to `sampler`, and ending a
sequence to the scheduler.

A compiled grammar is shared by all requests that ask for the same one, and so are the lexer states it has met: they make the
next request's masks cheap, and they are counted against one limit. A matcher that meets the limit goes on with a lexer of its
own, so what others wrote cannot fail it.
"""

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from decimal import Decimal
from functools import partial
from math import lcm
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark

from engine.errors import GrammarError
from engine.request import Grammar, GrammarKind

if TYPE_CHECKING:
    import torch
    from llguidance._lib import JsonCompileOptions

MAX_COMPILED = 64
"""Compiled grammars kept: the least recently asked for goes first. Running requests keep theirs."""

MAX_MULTIPLE = 100_000
"""Least common multiple of what a schema's `multipleOf` name, in units of their last decimal. The library makes a state for
each remainder and heeds no limit there: 99991 takes a second or two, 999983 half a minute, and nothing can end a thread."""

_NUM_THREADS = 2  # one slow grammar does not hold up the next
_MAX_REASON = 300
# The library's defaults but for these. 50,000 lexer states take about 15 MB; 20 outputs of 1,000 random tokens in the regex
# `(\w+ ?){1,60}` need fewer than 20,000. Verbose errors would hold what was generated.
_LIMITS = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
# One space at most after a comma or colon and none elsewhere: what models write on one line. With free whitespace a small model
# may write blanks until max_tokens. Set as overrides, so that a schema cannot change them.
_JSON_OPTIONS: "JsonCompileOptions" = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "coerce_one_of": False,
    "lenient": False,
}


class Matcher:
    """Where one sequence stands in its grammar. Used by the step loop alone.

    A grammar that forbids what came, or turns out too complex after so many tokens, sets `failure` and allows nothing more;
    that fails this sequence alone.
    """

    def __init__(self, compiled: "CompiledGrammar", state: LLMatcher, token_ids: list[int], allow_eos: bool) -> None:
        self._compiled = compiled
        self._state = state
        self._token_ids = token_ids
        self._allow_eos = allow_eos
        self.failure: GrammarError | None = None
        """Why there is no going on."""

    @property
    def is_complete(self) -> bool:
        """Whether the output could end here."""
        return self._state.is_accepting()

    @property
    def must_end(self) -> bool:
        """Whether nothing but the end may follow. Where no token can spell what may follow, only known after `fill`."""
        return self.failure is not None or self._state.is_stopped()

    def accept(self, token_id: int) -> None:
        """Advance by one token of the output; an EOS is one only where the output may end."""
        self._token_ids.append(token_id)
        if not self._state.consume_token(token_id):
            with self._failing():
                self._start_over()

    def fill(self, row: "torch.Tensor") -> None:
        """Write which tokens may come next.

        `row`: int32 `[ceil(vocab_size / 32)]` in CPU memory; bit `i % 32` of word `i // 32` is set when token `i` is allowed.
        EOS ids are allowed where the output may end, and nothing else is where it must. Where it must and EOS is not allowed
        (`allow_eos`, or a model without one), no bit is set: ask `must_end` first.
        """
        row.zero_()
        with self._failing():
            mask = self._mask()
            if self._state.is_error():
                self._start_over()
                mask = self._mask()
            if self._state.is_error():
                raise self._compiled.error(self._state.get_error())
            row.numpy()[:] = self._compiled.fit(mask, self._allow_eos)

    def fork(self) -> "Matcher":
        """An independent copy, for another choice."""
        return Matcher(self._compiled, self._state.deep_copy(), self._token_ids.copy(), self._allow_eos)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except GrammarError as error:
            self.failure = error

    def _mask(self) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
        mask = np.empty(self._compiled.num_words, np.uint32)
        self._state.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        return mask

    def _start_over(self) -> None:
        """Replay with a lexer of its own, after the shared one has met its limit; what fails again is really forbidden."""
        self._compiled.retire()
        self._state = self._compiled.compile()
        if not self._state.consume_tokens(self._token_ids):
            raise self._compiled.error(self._state.get_error())


class CompiledGrammar:
    """A grammar that can be started any number of times. Made by `GrammarCompiler`, in a thread; used by the step loop."""

    def __init__(self, kind: GrammarKind, source: str, tokenizer: LLTokenizer, vocab_size: int, has_eos: bool) -> None:
        """`source` is in llguidance's language. Raises `GrammarError` when it cannot be compiled."""
        self._kind = kind
        self._source = source
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._has_eos = has_eos
        self.num_words = -(-tokenizer.vocab_size // 32)
        self._first: LLMatcher | None = self.compile()
        self._try(self._first)

    def matcher(self, *, allow_eos: bool = True) -> Matcher:
        """One at the beginning. With `allow_eos` false, for `ignore_eos`, the output ends where nothing else may follow."""
        if self._first is None:
            self._first = self.compile()
        return Matcher(self, self._first.deep_copy(), [], allow_eos)

    def compile(self) -> LLMatcher:
        """A state at the beginning that shares its lexer with none."""
        state = LLMatcher(self._tokenizer, self._source, log_level=0, limits=_LIMITS)
        if state.is_error():
            raise self.error(state.get_error())
        return state

    def retire(self) -> None:
        """Give requests to come a new lexer."""
        self._first = None

    def fit(
        self, mask: np.ndarray[tuple[int], np.dtype[np.uint32]], allow_eos: bool
    ) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        """`mask` over the tokenizer's ids as a row over the model's, which may be fewer; without EOS unless it is allowed."""
        if not (allow_eos and self._has_eos):
            for token_id in self._tokenizer.eos_tokens:
                mask[token_id // 32] &= ~np.uint32(1 << token_id % 32)
        mask = mask[: -(-self._vocab_size // 32)]
        if self._tokenizer.vocab_size > self._vocab_size and (num_bits := self._vocab_size % 32):
            mask[-1] &= np.uint32((1 << num_bits) - 1)
        return mask.view(np.int32)

    def error(self, text: str) -> GrammarError:
        """What llguidance says, without the output it holds."""
        if "satisfy the grammar" in text or "out of range" in text:
            return GrammarError("the output so far", "the grammar does not allow it", "submit it as a new job")
        return GrammarError(self._kind, _reason(text), f"mend or simplify the {'regex' if self._kind == 'regex' else 'schema'}")

    def _try(self, state: LLMatcher) -> None:
        """Two masks, the first one and one after a token: there, what matches nothing and most that is too complex shows."""
        probe = state.deep_copy()
        mask = np.frombuffer(probe.compute_bitmask(), np.uint8)
        if not probe.is_error() and not probe.is_stopped():
            probe.consume_token(int(np.unpackbits(mask, bitorder="little").argmax()))
            probe.compute_bitmask()
        if probe.is_error():
            raise self.error(probe.get_error())


class GrammarCompiler:
    """Compiles grammars in threads of its own, each one once. Safe to use from several threads."""

    def __init__(self, tokenizer_dir: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """`tokenizer_dir` holds tokenizer.json; `vocab_size` is the model's, the width of its logits. Reads nothing yet."""
        self._tokenizer_dir = tokenizer_dir
        self._vocab_size = vocab_size
        self._eos_token_ids = [token_id for token_id in eos_token_ids if token_id < vocab_size]
        self._tokenizer: LLTokenizer | None = None
        self._tokenizer_lock = threading.Lock()
        self._pool = ThreadPoolExecutor(_NUM_THREADS, "grammar")
        self._futures: OrderedDict[Grammar, Future[CompiledGrammar]] = OrderedDict()
        self._lock = threading.Lock()

    def submit(self, grammar: Grammar) -> "Future[CompiledGrammar]":
        """Have `grammar` compiled; returns at once. A failure is a `GrammarError`; it is forgotten, and can be tried again.

        The future is shared by all who ask for the same grammar: leave it to itself rather than cancel it.
        """
        with self._lock:
            if future := self._futures.get(grammar):
                self._futures.move_to_end(grammar)
                return future
            future = self._futures[grammar] = self._pool.submit(self._compile, grammar)
            while len(self._futures) > MAX_COMPILED:
                self._futures.popitem(last=False)
        future.add_done_callback(partial(self._forget_failure, grammar))  # outside: it may run here, and takes the lock
        return future

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        tokenizer = self._build_tokenizer()
        try:
            source = _translate(grammar)
        except ValueError as error:  # no JSON object, or text that is not Unicode
            raise GrammarError(
                grammar.kind, _reason(str(error)), "send a schema as a JSON object, a regex as a string"
            ) from error
        return CompiledGrammar(grammar.kind, source, tokenizer, self._vocab_size, bool(self._eos_token_ids))

    def _build_tokenizer(self) -> LLTokenizer:
        with self._tokenizer_lock:
            if self._tokenizer is None:
                try:
                    text = (self._tokenizer_dir / "tokenizer.json").read_text("utf-8")
                    self._tokenizer = _tokenizer(text, self._vocab_size, self._eos_token_ids)
                except (OSError, ValueError) as error:
                    raise GrammarError("this model's tokenizer", _reason(str(error)), "leave it out") from error
            return self._tokenizer

    def _forget_failure(self, grammar: Grammar, future: "Future[CompiledGrammar]") -> None:
        if future.cancelled() or future.exception():
            with self._lock:
                if self._futures.get(grammar) is future:
                    del self._futures[grammar]


def _tokenizer(text: str, vocab_size: int, eos_token_ids: list[int]) -> LLTokenizer:
    """Over the model's ids, or over the tokenizer's where those are more. Without EOS ids the library takes one of its own."""
    try:
        return LLTokenizer(text, n_vocab=vocab_size, eos_token=eos_token_ids or None)
    except ValueError:
        return LLTokenizer(text, eos_token=eos_token_ids or None)


def _translate(grammar: Grammar) -> str:
    """In llguidance's language. Raises `ValueError`."""
    if grammar.kind is GrammarKind.REGEX:
        ascii_digits = regex_to_lark(grammar.source, "d")  # as in the patterns of schemas
        return LLMatcher.grammar_from_lark(f"start: /{ascii_digits}/")
    source = '{"type": "object"}' if grammar.kind is GrammarKind.JSON_OBJECT else grammar.source
    _check_multiples(source)
    return LLMatcher.grammar_from_json_schema(source, overrides=_JSON_OPTIONS)


def _check_multiples(schema: str) -> None:
    """`GrammarError` for a schema whose `multipleOf` would take too long to compile."""
    found: list[Decimal] = []

    def keep(members: list[tuple[str, object]]) -> None:
        found.extend(value.normalize() for name, value in members if name == "multipleOf" and isinstance(value, Decimal))

    with suppress(ValueError, RecursionError):  # the library says it better
        json.loads(schema, parse_float=Decimal, parse_int=Decimal, object_pairs_hook=keep)
    if any(abs(value.adjusted()) > 30 for value in found):
        return  # refused by the library
    scale = max((-int(value.as_tuple().exponent) for value in found), default=0)
    if lcm(*(int(value.scaleb(scale)) for value in found)) > MAX_MULTIPLE:
        limit = f"its multipleOf have a least common multiple above {MAX_MULTIPLE}, in units of the last decimal"
        raise GrammarError(GrammarKind.JSON_SCHEMA, limit, "mend or simplify the schema")


def _reason(text: str) -> str:
    """The line of a library's error that says why."""
    if errors := re.findall(r"^error: (.+)$", text, re.MULTILINE):  # of a regex, below a drawing of it
        return str(errors[0])[:_MAX_REASON]
    return text.rpartition("(in regex): ")[2].partition("\n")[0][:_MAX_REASON]
