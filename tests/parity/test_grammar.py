"""Grammars against what they mean: json, jsonschema and re judge what the matcher allowed."""

import json
import pickle
import random
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLParserLimits
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from engine import grammar as module
from engine import model
from engine.errors import GrammarError
from engine.events import failures
from engine.grammar import CompiledGrammar, GrammarCompiler, Matcher
from engine.request import Grammar, GrammarKind, Request
from engine.sampler import Row
from engine.sequence import Sequence
from tests.support import toy_tokenizers

EOS = 2
OBJECT = Grammar(GrammarKind.JSON_OBJECT)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "score": {"type": "number"},
        "mood": {"enum": ["glad", "sad", None]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 5}, "maxItems": 3},
    },
    "required": ["name", "mood"],
    "additionalProperties": False,
}
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x7f"))
VALUES = st.fixed_dictionaries(
    {"name": TEXT},
    optional={"age": st.integers(0, 150), "score": st.floats(-1e6, 1e6).map(lambda number: round(number, 3))},
).flatmap(
    lambda head: st.fixed_dictionaries(
        {"mood": st.sampled_from(["glad", "sad", None])},
        optional={"tags": st.lists(st.text("abc é\n", max_size=5), max_size=3)},
    ).map(lambda tail: head | tail)
)
REGEXES = (
    r"[a-z]{3,5}",
    r"(yes|no|maybe)( not)?",
    r"\d{4}-[01]\d-\d\d",
    r"é+ñ?",
    r"-?(0|[1-9]\d*)(\.\d+)?",
    r"<[^<>]{0,9}>",
    "a|",
)
KINDS = ("byte_level", "byte_fallback", "metaspace")


def schema(source: object) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, source if isinstance(source, str) else json.dumps(source))


def regex(source: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, source)


class Toy:
    """A toy tokenizer and a compiler over it."""

    def __init__(self, tokenizer: Tokenizer, directory: Path, spare: int = 40, eos: tuple[int, ...] = (EOS,)) -> None:
        toy_tokenizers.save(tokenizer, directory)
        self.tokenizer = tokenizer
        self.vocab_size = tokenizer.get_vocab_size() + spare
        self.compiler = GrammarCompiler(directory, self.vocab_size, eos)

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        return self.compiler.submit(grammar).result(60)

    def matcher(self, grammar: Grammar, *, allow_eos: bool = True) -> Matcher:
        return self.compile(grammar).matcher(allow_eos=allow_eos)

    def allowed(self, matcher: Matcher) -> list[int]:
        return allowed(matcher, self.vocab_size)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def advance(self, matcher: Matcher, text: str) -> Matcher:
        for token_id in self.encode(text):
            matcher.accept(token_id)
            raise_failure(matcher)
        return matcher

    def write(self, matcher: Matcher, text: str) -> Matcher:
        """Advance as a step loop does, which asks what is allowed each time."""
        for token_id in self.encode(text):
            assert token_id in self.allowed(matcher)
            matcher.accept(token_id)
        return matcher

    def walk(self, matcher: Matcher, seed: int, limit: int = 200) -> str | None:
        """The text of random allowed tokens up to the end; None when there is no end within the limit."""
        draw, token_ids = random.Random(seed), list[int]()
        for _ in range(limit):
            choices = self.allowed(matcher)
            token_id = EOS if EOS in choices and draw.random() < 0.3 else draw.choice(choices)
            if token_id == EOS:
                return spell(self.tokenizer, token_ids)
            token_ids.append(token_id)
            matcher.accept(token_id)
        return None


def raise_failure(matcher: Matcher) -> None:
    if matcher.failure:
        raise matcher.failure


def allowed(matcher: Matcher, vocab_size: int) -> list[int]:
    row = torch.full((-(-vocab_size // 32),), -1, dtype=torch.int32)
    matcher.fill(row)
    raise_failure(matcher)
    bits = (row.unsqueeze(1) >> torch.arange(32, dtype=torch.int32)) & 1
    return [int(index) for index in bits.flatten().nonzero().flatten()]


def spell(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    """Their text as what follows something, as output follows a prompt."""
    lead = tokenizer.encode("a", add_special_tokens=False).ids
    return tokenizer.decode(lead + token_ids, skip_special_tokens=False)[1:]


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Toy]:
    return {kind: Toy(toy_tokenizers.KINDS[kind](), tmp_path_factory.mktemp(kind)) for kind in KINDS}


@pytest.fixture(scope="module")
def toy(toys: dict[str, Toy]) -> Toy:
    return toys["byte_level"]


@pytest.fixture
def new_toy(tmp_path: Path) -> Toy:
    """One that nothing was compiled with yet."""
    return Toy(toy_tokenizers.byte_level(), tmp_path)


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")], ids=["compact", "spaced"])
@given(value=VALUES)
@settings(deadline=None, max_examples=40)
def test_every_value_of_a_schema_is_allowed_token_by_token_and_reaches_the_end(
    toy: Toy, separators: tuple[str, str], value: object
) -> None:
    order = sorted(value, key=list(SCHEMA["properties"]).index)
    text = json.dumps({key: value[key] for key in order}, separators=separators, ensure_ascii=False)
    matcher = toy.write(toy.matcher(schema(SCHEMA)), text)
    assert matcher.is_complete
    assert matcher.must_end
    assert toy.allowed(matcher) == [EOS]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("source", REGEXES)
def test_what_a_regex_allows_is_matched_by_it(toys: dict[str, Toy], kind: str, source: str) -> None:
    compiled = toys[kind].compile(regex(source))
    texts = [toys[kind].walk(compiled.matcher(), seed) for seed in range(8)]
    ended = [text for text in texts if text is not None]
    assert ended
    assert [text for text in ended if not re.fullmatch(source, text)] == []


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_schema_allows_meets_it(toys: dict[str, Toy], kind: str) -> None:
    compiled = toys[kind].compile(schema(SCHEMA))
    ended = [text for seed in range(8) if (text := toys[kind].walk(compiled.matcher(), seed, 400)) is not None]
    assert ended
    for text in ended:
        jsonschema.validate(json.loads(text), SCHEMA)


def test_json_mode_allows_json_objects_only(toy: Toy) -> None:
    compiled = toy.compile(OBJECT)
    ended = [text for seed in range(12) if (text := toy.walk(compiled.matcher(), seed)) is not None]
    assert ended
    assert all(isinstance(json.loads(text), dict) for text in ended)


@pytest.mark.parametrize("text", [" {", "\n", '{ "', "{\n", '{"a":  ', '{"a":1 ', '{"a":1} ', '{"a":[1,  '])
def test_blanks_cannot_run_on(toy: Toy, text: str) -> None:
    with pytest.raises(GrammarError, match="does not allow"):
        toy.advance(toy.matcher(OBJECT), text)


def test_a_schema_cannot_set_the_options_of_the_library(toy: Toy) -> None:
    source = {"type": "object", "x-guidance": {"whitespace_flexible": True, "lenient": True}}
    with pytest.raises(GrammarError, match="does not allow"):
        toy.advance(toy.matcher(schema(source)), "{  ")


@pytest.mark.parametrize("kind", KINDS)
def test_ids_without_a_token_and_special_tokens_are_never_allowed(toys: dict[str, Toy], kind: str) -> None:
    toy = toys[kind]
    choices = toy.allowed(toy.matcher(regex(r"(.|\n)*")))
    assert EOS in choices
    assert not {0, 1} & set(choices)
    assert max(choices) < toy.tokenizer.get_vocab_size()


@pytest.mark.parametrize("missing", [1, 5, 40])
def test_a_tokenizer_with_more_ids_than_the_model_has_logits_is_cut(tmp_path: Path, missing: int) -> None:
    toy = Toy(toy_tokenizers.byte_level(), tmp_path, spare=-missing)
    choices = toy.allowed(toy.matcher(regex(".*")))
    assert toy.vocab_size - 10 < max(choices) < toy.vocab_size


def test_every_eos_id_of_the_model_ends_the_output(tmp_path: Path) -> None:
    toy = Toy(toy_tokenizers.byte_level(), tmp_path, eos=(1, EOS))
    assert toy.allowed(toy.advance(toy.matcher(regex("yes")), "yes")) == [1, EOS]


def test_without_an_eos_the_end_shows_in_must_end_and_in_no_bit(tmp_path: Path) -> None:
    toy = Toy(toy_tokenizers.byte_level(), tmp_path, eos=())
    matcher = toy.advance(toy.matcher(regex("yes")), "yes")
    assert matcher.must_end
    assert toy.allowed(matcher) == []


def test_where_eos_is_ignored_it_is_never_allowed(toy: Toy) -> None:
    matcher = toy.matcher(regex("y*"), allow_eos=False)
    assert matcher.is_complete
    assert EOS not in toy.allowed(matcher.fork())


def test_the_end_is_optional_where_more_may_follow(toy: Toy) -> None:
    matcher = toy.advance(toy.matcher(regex("yes( sir)?")), "yes")
    assert (matcher.is_complete, matcher.must_end) == (True, False)
    assert EOS in toy.allowed(matcher)


def test_an_output_that_cannot_end_yet_does_not_allow_eos(toy: Toy) -> None:
    matcher = toy.advance(toy.matcher(OBJECT), '{"a"')
    assert (matcher.is_complete, matcher.must_end) == (False, False)
    assert EOS not in toy.allowed(matcher)


def test_forks_do_not_see_each_other(toy: Toy) -> None:
    matcher = toy.advance(toy.matcher(regex("(yes|no) sir")), "y")
    before = toy.allowed(matcher)
    fork = toy.advance(matcher.fork(), "es sir")
    assert fork.must_end
    assert toy.allowed(matcher) == before


def test_replay_gives_the_same_masks_as_going_on(toy: Toy) -> None:
    compiled, token_ids = toy.compile(schema(SCHEMA)), toy.encode('{"name": "Ann", "mood": "glad"}')
    going_on = compiled.matcher()
    for count in range(len(token_ids) + 1):
        replayed = compiled.matcher()
        for token_id in token_ids[:count]:
            replayed.accept(token_id)
        assert toy.allowed(replayed) == toy.allowed(going_on)
        if count < len(token_ids):
            going_on.accept(token_ids[count])


@pytest.mark.parametrize("token_id", [EOS, 0, 10**6], ids=["eos", "special", "no token"])
def test_a_token_that_the_grammar_forbids_fails_its_own_matcher_only(toy: Toy, token_id: int) -> None:
    matcher = toy.advance(toy.matcher(regex("(yes|no) sir")), "yes")
    fork = matcher.fork()
    matcher.accept(token_id)
    assert "response_format: the output so far does not work: the grammar does not allow it" in str(matcher.failure)
    assert matcher.must_end
    assert toy.advance(fork, " sir").must_end


def test_a_full_lexer_of_the_others_does_not_fail_a_matcher(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LIMITS", LLParserLimits(max_lexer_states=300, verbose_errors=False))
    compiled = toy.compile(regex("[a-z ]{1,4000}"))  # a state for each character
    patient = toy.advance(compiled.matcher(), "one two")
    with pytest.raises(GrammarError, match="too many states"):
        toy.write(patient.fork(), "words " * 100)
    assert toy.allowed(patient)


def test_after_a_full_lexer_those_to_come_share_a_new_one(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LIMITS", LLParserLimits(max_lexer_states=300, verbose_errors=False))
    compiled = toy.compile(regex("[a-z ]{1,4001}"))
    with pytest.raises(GrammarError, match="too many states"):
        toy.write(compiled.matcher(), "words " * 100)
    compiles, compile_ = list[int](), compiled.compile
    monkeypatch.setattr(compiled, "compile", lambda: compiles.append(1) or compile_())
    assert all(toy.allowed(compiled.matcher()) for _ in range(3))
    assert len(compiles) == 1


def test_one_grammar_is_compiled_once_however_many_submit_it(new_toy: Toy) -> None:
    with ThreadPoolExecutor(8) as pool:
        compiled = list(pool.map(lambda _: new_toy.compile(schema(SCHEMA)), range(32)))
    assert len({id(one) for one in compiled}) == 1


def test_submit_returns_while_the_compiler_is_busy(new_toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, build = threading.Event(), new_toy.compiler._build_tokenizer
    monkeypatch.setattr(new_toy.compiler, "_build_tokenizer", lambda: gate.wait(60) and build())
    futures = [new_toy.compiler.submit(regex(f"a{{{count}}}")) for count in range(9)]
    assert not any(future.done() for future in futures)
    gate.set()
    assert all(future.result(60) for future in futures)


def test_a_failure_is_not_remembered(new_toy: Toy) -> None:
    files = new_toy.compiler._tokenizer_dir / "tokenizer.json"
    files.rename(files.with_suffix(".away"))
    assert isinstance(new_toy.compiler.submit(OBJECT).exception(60), GrammarError)
    files.with_suffix(".away").rename(files)
    assert new_toy.matcher(OBJECT)


def test_the_least_recently_used_grammar_is_forgotten(new_toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_COMPILED", 2)
    first, second = new_toy.compile(regex("a")), new_toy.compile(regex("b"))
    assert new_toy.compile(regex("a")) is first
    new_toy.compile(regex("c"))
    assert new_toy.compile(regex("a")) is first
    assert new_toy.compile(regex("b")) is not second


def test_the_tokenizer_is_read_for_the_first_grammar_only(tmp_path: Path) -> None:
    compiler = GrammarCompiler(tmp_path / "nowhere", 100, (EOS,))
    error = compiler.submit(OBJECT).exception(60)
    assert re.match("response_format: this model's tokenizer does not work: .*No such file", str(error))


def test_a_tokenizer_whose_bytes_are_unknown_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GrammarError, match="this model's tokenizer does not work: can't determine decoder"):
        Toy(toy_tokenizers.word_piece(), tmp_path).matcher(OBJECT)


def nested(depth: int) -> str:
    return '{"type":"array","items":' * depth + "{}" + "}" * depth


def loop(body: object) -> dict[str, object]:
    return {"$ref": "#/$defs/a", "$defs": {"a": body}}


HERE = {"$ref": "#/$defs/a"}
REFUSED = {
    "no JSON": (schema("{"), "EOF while parsing"),
    "no object": (schema("true"), "Expecting object"),
    "too deep": (schema(nested(3000)), "recursion limit"),
    "unknown type": (schema({"type": "text"}), "Invalid type: text"),
    "not implemented": (schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
    "unknown format": (schema({"type": "string", "format": "colour"}), "Unknown format: colour"),
    "a long reason": (schema({"type": "string", "format": "x" * 1000}), "Unknown format: x"),
    "nothing meets it": (schema({"type": "integer", "minimum": 3, "maximum": 2}), "minimum .3. is greater than maximum .2."),
    "a loop": (schema(loop(HERE)), "NoExtension"),
    "remote": (schema({"$ref": "http://127.0.0.1:9/x.json"}), "does not fetch"),
    "a file": (schema({"$ref": "file:///etc/passwd"}), "does not fetch"),
    "dangling": (schema({"$ref": "#/$defs/no"}), "does not exist"),
    "product": (
        schema({"allOf": [{"oneOf": [{"minimum": 7 * j + i} for i in range(4)]} for j in range(12)]}),
        "schema too large",
    ),
    "wide": (schema({"type": "object", "properties": {f"property_{i}": {} for i in range(2500)}}), "items; max is 2000"),
    "unclosed": (regex("(a"), "unclosed group"),
    "a large multiple": (schema({"type": "integer", "multipleOf": 999_983}), "multipleOf"),
    "a large common multiple": (
        schema({"allOf": [{"multipleOf": prime} for prime in (7, 11.5, 13, 17, 19, 23)]}),
        "multipleOf",
    ),
    "look-around": (regex("(?=a)b"), "look-around"),
    "word boundary": (regex(r"\bfoo"), "lookarounds"),
    "backreference": (regex(r"(a)\1"), "backreferences"),
    "nested groups": (regex("(" * 5000 + "a" + ")" * 5000), "nested parentheses"),
    "matches nothing": (regex(r"[^\s\S]"), "NoExtension"),
    "no Unicode": (regex("\ud800"), "surrogates not allowed"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.timeout(20)
def test_what_cannot_be_compiled_is_refused_with_the_reason_on_one_line(toy: Toy, case: str) -> None:
    grammar, reason = REFUSED[case]
    error = toy.compiler.submit(grammar).exception(20)
    assert isinstance(error, GrammarError)
    assert re.match(rf"response_format: {grammar.kind} does not work: .*{reason}", str(error))
    assert len(str(error).splitlines()) == 1
    assert len(error.limit) <= 300


PATHOLOGICAL = {
    "repeated repeats": regex("a{1,100000}{1,1000}"),
    "nested repeats": regex("((a|b|c){0,500}d){0,500}"),
    "backtracking": regex("(a+)+b"),
    "exponential as an automaton": regex("(a|b)*a(a|b){500}"),
    "a long literal": regex("a" * 60_000),
    "deep": schema(nested(60)),
    "recursion": schema(loop({"type": "object", "properties": {"x": {"type": "array", "items": HERE}}})),
    "endless": schema(loop({"type": "object", "properties": {"x": HERE}, "required": ["x"], "additionalProperties": False})),
    "doubling": schema(
        {"$ref": "#/$defs/0", "$defs": {"40": {"type": "null"}}}
        | {
            "$defs": {str(i): {"type": "array", "prefixItems": [{"$ref": f"#/$defs/{i + 1}"}] * 2} for i in range(40)}
            | {"40": {}}
        }
    ),
    "many choices": schema({"enum": [f"value_{i}" for i in range(4500)]}),
    "many required": schema({"properties": {f"p_{i}": {} for i in range(2000)}, "required": [f"p_{i}" for i in range(2000)]}),
    "long": schema({"type": "string", "minLength": 60_000, "maxLength": 10**9}),
    "multiples": schema({"allOf": [{"type": "number", "multipleOf": step} for step in (86_400, 1e1)]}),
}


@pytest.mark.parametrize("case", PATHOLOGICAL)
@pytest.mark.timeout(20)
def test_a_pathological_grammar_compiles_and_runs_in_bounded_time(toy: Toy, case: str) -> None:
    matcher = toy.matcher(PATHOLOGICAL[case])
    assert toy.walk(matcher, seed=1, limit=20) is None or matcher.is_complete


def test_a_digit_of_a_regex_is_an_ascii_digit(toy: Toy) -> None:
    with pytest.raises(GrammarError):
        toy.advance(toy.matcher(regex(r"\d")), "٣")


def test_a_sequence_whose_grammar_gave_up_fails_for_its_reason() -> None:
    sequence = Sequence(Request(request_id="a", prompt_token_ids=(5,)), (0, 0, 0), frozenset())
    sequence.matcher = SimpleNamespace(failure=GrammarError("regex", "too many states", "simplify it"))
    (end,) = failures([Row(sequence, 0, 3)], {0: "nothing is left"}, frozenset())
    assert end.detail == "response_format: regex does not work: too many states; simplify it"
    assert not end.may_retry


def test_the_error_crosses_a_pipe() -> None:
    error = GrammarError("regex", "unclosed group", "mend it")
    assert repr(pickle.loads(pickle.dumps(error))) == repr(error)


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")  # and what replaces it is not there yet in 5.17
def test_a_small_model_in_json_mode_writes_json() -> None:
    """Greedy, on the demo model, which wraps JSON in prose when it is free to."""
    directory = model.resolve("smollm2-135m-instruct")
    tokenizer = Tokenizer.from_file(str(model.tokenizer_dir(directory) / "tokenizer.json"))
    causal = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True).eval()
    compiler = GrammarCompiler(directory, causal.config.vocab_size, (causal.config.eos_token_id,))
    matcher = compiler.submit(OBJECT).result(60).matcher()
    prompt = "<|im_start|>user\nDescribe Paris as JSON with name and country.<|im_end|>\n<|im_start|>assistant\n"
    token_ids, cache, fed = list[int](), None, tokenizer.encode(prompt).ids
    with torch.inference_mode():
        while not matcher.must_end and len(token_ids) < 100:
            output = causal(torch.tensor([fed]), past_key_values=cache, use_cache=True)
            choices = allowed(matcher, causal.config.vocab_size)
            fed, cache = [choices[int(output.logits[0, -1, choices].argmax())]], output.past_key_values
            token_ids += fed
            matcher.accept(fed[0])
    assert isinstance(json.loads(tokenizer.decode(token_ids)), dict)
