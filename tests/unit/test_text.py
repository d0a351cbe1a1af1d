"""Prompts, chat templates, incremental text and stop strings."""

import itertools
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.toy_tokenizers import KINDS, SPECIAL, TRICKY, byte_fallback, byte_level, questions, save
from worker.errors import InvalidJob
from worker.text import HALF, Detokenizer, StopMatcher, Tokenizer
from worker.wire import Job

SECRET = "my secret diary"
BYTE_FALLBACK_NAMES = ("<0xE2>", "<0x82>", "<0xAC>", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>")
BYTE_LEVEL_NAMES = ("â", "Ĥ", "¬", "ð", "Ł", "ĺ", "Ģ")
"""The bytes of € and 😀 in both spellings, to be put in any order."""
CHATML = (
    "{%- for message in messages %}\n"
    "    {%- if message.role == 'tool' %}\n"
    "        {{- raise_exception('tools are not served') }}\n"
    "    {%- endif %}\n"
    "    {{- bos_token + message['role'] + '\\n' + message['content'] | trim + eos_token + '\\n' }}\n"
    "{%- endfor %}\n"
    "{% if add_generation_prompt %}\n"
    "{{ bos_token }}assistant\n"
    "{% endif %}\n"
)


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    return {kind: Tokenizer(save(make(), tmp_path_factory.mktemp(kind))) for kind, make in KINDS.items()}


@pytest.fixture(params=KINDS)
def tokenizer(request: pytest.FixtureRequest, kinds: dict[str, Tokenizer]) -> Tokenizer:
    return kinds[request.param]


@pytest.fixture
def chat(tmp_path: Path) -> Tokenizer:
    return Tokenizer(save(byte_level(), tmp_path, CHATML))


def chatting(*turns: tuple[str, str]) -> Job:
    return Job(messages=tuple({"role": role, "content": content} for role, content in turns))


def streamed(tokenizer: Tokenizer, ids: Iterable[int], prompt_ids: Sequence[int] = ()) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt_ids)
    return [*(detokenizer.push([token_id]) for token_id in ids), detokenizer.flush()]


def encoded(kind: str, text: str) -> list[int]:
    return KINDS[kind]().encode(text, add_special_tokens=False).ids


# Prompts


def test_a_raw_prompt_gets_the_special_tokens_of_the_post_processor(tmp_path: Path) -> None:
    tokenizer = Tokenizer(save(byte_fallback(), tmp_path))
    assert tokenizer.encode_prompt(Job(prompt="the"))[0] == SPECIAL.index("<s>")


def test_truncation_and_padding_of_the_tokenizer_file_do_not_touch_prompts(tmp_path: Path) -> None:
    raw = tokenizers.Tokenizer.from_str(byte_level().to_str())
    raw.enable_truncation(4)
    raw.enable_padding(length=64)
    assert Tokenizer(save(raw, tmp_path)).encode_prompt(Job(prompt=questions()[0])) == byte_level().encode(questions()[0]).ids


def test_prompt_token_ids_pass_through(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode_prompt(Job(prompt_token_ids=(1, 5, tokenizer.vocab_size - 1))) == [1, 5, tokenizer.vocab_size - 1]


def test_an_id_outside_the_vocabulary_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidJob, match=f"prompt_token_ids: {tokenizer.vocab_size}: .* end at {tokenizer.vocab_size - 1}"):
        tokenizer.encode_prompt(Job(prompt_token_ids=(1, tokenizer.vocab_size)))


def test_an_empty_prompt_is_refused_when_it_has_no_token(chat: Tokenizer) -> None:
    with pytest.raises(InvalidJob, match="prompt: 0 characters: at least one token"):
        chat.encode_prompt(Job(prompt=""))


def test_an_empty_prompt_is_a_prompt_when_the_model_adds_a_beginning(tmp_path: Path) -> None:
    assert Tokenizer(save(byte_fallback(), tmp_path)).encode_prompt(Job(prompt="")) == [SPECIAL.index("<s>")]


@pytest.mark.parametrize("text", ["The quick fox. " * 500_000, "a" * (8 << 20), " " * (8 << 20)], ids=["words", "aaa", "blank"])
def test_a_prompt_of_megabytes_is_refused_in_no_time(chat: Tokenizer, text: str) -> None:
    started = time.process_time()
    with pytest.raises(InvalidJob, match=f"prompt: {len(text)} characters: at most 2048 tokens"):
        chat.encode_prompt(Job(prompt=text), max_tokens=2048)
    assert time.process_time() - started < 1.0


def test_a_long_context_refuses_by_the_first_part_of_a_prompt(tmp_path: Path) -> None:
    raw = tokenizers.Tokenizer.from_str(byte_level().to_str())
    raw.add_tokens(["#" * 500])  # so that characters alone prove nothing
    with pytest.raises(InvalidJob, match="at most 500 tokens"):
        Tokenizer(save(raw, tmp_path)).encode_prompt(Job(prompt="".join(questions()) * 20), max_tokens=500)


def test_what_may_fit_is_left_to_the_engine(chat: Tokenizer) -> None:
    assert len(chat.encode_prompt(Job(prompt=questions()[0]), max_tokens=50)) > 50


# Chat templates


def test_messages_go_through_the_template(chat: Tokenizer) -> None:
    expected = "<s>user\nHi</s>\n<s>assistant\n"
    assert chat.encode_prompt(chatting(("user", " Hi "))) == byte_level().encode(expected, add_special_tokens=False).ids


def test_a_templated_prompt_gets_no_second_beginning(tmp_path: Path) -> None:
    tokenizer = Tokenizer(save(byte_fallback(), tmp_path, "{{ bos_token }}{{ messages[0].content }}"))
    assert tokenizer.encode_prompt(chatting(("user", "the"))) == tokenizer.encode_prompt(Job(prompt="the"))


def test_a_model_without_a_template_refuses_messages(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidJob, match="messages: 1 messages: this model has no chat template; send prompt"):
        tokenizer.encode_prompt(chatting(("user", SECRET)))


def test_what_the_template_says_is_shown_when_it_stands_in_the_template(chat: Tokenizer) -> None:
    with pytest.raises(InvalidJob, match="the chat template refuses them: tools are not served"):
        chat.encode_prompt(chatting(("tool", SECRET)))


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('bad: ' + messages[0].content) }}",
        "{{ messages[0].content.nothing.at.all }}",
        "{{ messages[9].content.x }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 / 0 }}",
        "{{ messages.append(messages[0].content) }}",
        "{{ messages[0].__class__.__mro__[1].__subclasses__() }}",
        "{{ ''.__class__ }}{{ cycler.__init__.__globals__.os.popen(messages[0].content) }}",
    ],
)
def test_a_failing_or_escaping_template_is_a_refusal_without_text(tmp_path: Path, template: str) -> None:
    tokenizer = Tokenizer(save(byte_level(), tmp_path, template))
    with pytest.raises(InvalidJob, match="messages: 1 messages: the chat template refuses them") as refusal:
        tokenizer.encode_prompt(chatting(("user", SECRET)))
    assert SECRET not in str(refusal.value)
    assert refusal.value.__cause__ is None


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}", "user"),
        ("{% for m in messages %}{% generation %}[{{ m.content }}]{% endgeneration %}{% endfor %}", "[Hi][Ho]"),
        ("{{ strftime_now('%%') }}", "%"),
        ("{{ unknown_token is defined }} {{ tools is none }} {{ add_generation_prompt }}", "False True True"),
        ("  {%- if true %}\n    x\n  {%- endif %}\n", "    x"),
    ],
)
def test_templates_find_what_they_expect(tmp_path: Path, template: str, expected: str) -> None:
    tokenizer = Tokenizer(save(byte_level(), tmp_path, template))
    assert tokenizer.decode(tokenizer.encode_prompt(chatting(("user", "Hi"), ("assistant", "Ho")))) == expected


def test_a_template_in_the_config_is_found_by_its_name(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ messages[0].content }}"}]
    tokenizer = Tokenizer(save(byte_level(), tmp_path, config={"chat_template": named}))
    assert tokenizer.decode(tokenizer.encode_prompt(chatting(("user", "Hi")))) == "Hi"


# Detokenizer


def test_pieces_joined_equal_the_full_decode_of_real_text(tokenizer: Tokenizer, request: pytest.FixtureRequest) -> None:
    kind = request.node.callspec.params["tokenizer"]
    for text in (*questions(), *TRICKY):
        ids = encoded(kind, text)
        assert "".join(streamed(tokenizer, ids)) == KINDS[kind]().decode(ids)


@pytest.mark.parametrize("text", [text for text in (*questions(), *TRICKY) if HALF not in text])
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_no_half_character_is_ever_shown(kinds: dict[str, Tokenizer], kind: str, text: str) -> None:
    pieces = streamed(kinds[kind], encoded(kind, text))
    assert HALF not in "".join(pieces)
    assert "".join(pieces) == KINDS[kind]().decode(encoded(kind, text))


@given(data=st.data())
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_any_ids_in_any_split_decode_to_the_same_text(kinds: dict[str, Tokenizer], data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(sorted(KINDS)))
    tokenizer, raw = kinds[kind], KINDS[kind]()
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=60))
    sizes = data.draw(st.lists(st.integers(0, 5), max_size=60))
    detokenizer, rest, pieces = Detokenizer(tokenizer), iter(ids), []
    for size in sizes:
        pieces.append(detokenizer.push(list(itertools.islice(rest, size))))
    pieces += [detokenizer.push(list(rest)), detokenizer.flush()]
    assert "".join(pieces) == raw.decode(ids, skip_special_tokens=True)


@given(data=st.data())
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_broken_bytes_decode_as_in_the_full_text(kinds: dict[str, Tokenizer], data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(["byte_level", "byte_fallback", "metaspace"]))
    raw = KINDS[kind]()
    lone = [raw.token_to_id(name) for name in (BYTE_LEVEL_NAMES if kind == "byte_level" else BYTE_FALLBACK_NAMES)]
    ids = data.draw(st.lists(st.sampled_from([*lone, SPECIAL.index("</s>"), encoded(kind, "a")[-1]]), max_size=80))
    assert "".join(streamed(kinds[kind], ids)) == raw.decode(ids)


@given(data=st.data())
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_a_flush_shows_nothing_unless_something_is_pending(kinds: dict[str, Tokenizer], data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(sorted(KINDS)))
    detokenizer = Detokenizer(kinds[kind])
    detokenizer.push(data.draw(st.lists(st.integers(0, kinds[kind].vocab_size - 1), max_size=20)))
    was_pending = detokenizer.is_pending
    shown = detokenizer.flush()  # nothing, too, where all that is pending is a blank that decoding strips
    assert was_pending or not shown
    assert not detokenizer.is_pending


@given(data=st.data())
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_the_output_continues_the_prompt(kinds: dict[str, Tokenizer], data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(sorted(KINDS)))
    prompt, output = data.draw(st.sampled_from(questions() + TRICKY)), data.draw(st.sampled_from(questions() + TRICKY))
    ids = encoded(kind, prompt)
    whole = [*ids, *encoded(kind, output)]
    num_prompt = len(KINDS[kind]().decode(ids))
    assert "".join(streamed(kinds[kind], whole[len(ids) :], ids)) == KINDS[kind]().decode(whole)[num_prompt:]


def test_the_space_between_prompt_and_output_is_kept(kinds: dict[str, Tokenizer]) -> None:
    prompt, output = encoded("byte_fallback", "is"), encoded("byte_fallback", "the")
    assert "".join(streamed(kinds["byte_fallback"], output, prompt)) == " the"


def test_bytes_that_go_on_where_the_prompt_ended_are_text(kinds: dict[str, Tokenizer]) -> None:
    emoji = [byte_fallback().token_to_id(f"<0x{byte:02X}>") for byte in "👩\u200d🚀".encode()]
    assert "".join(streamed(kinds["byte_fallback"], emoji, emoji)) == "👩\u200d🚀"


def test_special_tokens_and_unknown_ids_have_no_text(tokenizer: Tokenizer, request: pytest.FixtureRequest) -> None:
    ids = encoded(request.node.callspec.params["tokenizer"], "the cat")
    noise = [SPECIAL.index("</s>"), tokenizer.vocab_size, 10**9, -1, 2**70]
    noisy = [*itertools.chain.from_iterable((token_id, *noise) for token_id in ids)]
    assert "".join(streamed(tokenizer, noisy)) == tokenizer.decode(ids)


def test_an_added_token_that_is_not_special_is_text(kinds: dict[str, Tokenizer]) -> None:
    ids = encoded("byte_level", "ok <tool_call>")
    assert "".join(streamed(kinds["byte_level"], ids)) == "ok <tool_call>"


def test_a_replayed_output_goes_on_as_if_it_had_never_stopped(tokenizer: Tokenizer, request: pytest.FixtureRequest) -> None:
    ids = list(itertools.chain.from_iterable(encoded(request.node.callspec.params["tokenizer"], text) for text in TRICKY))
    one_by_one = streamed(tokenizer, ids)
    for cut in range(0, len(ids), 7):
        resumed = Detokenizer(tokenizer)
        assert resumed.push(ids[:cut]) == "".join(one_by_one[:cut])
        assert [*(resumed.push([token_id]) for token_id in ids[cut:]), resumed.flush()] == one_by_one[cut:]


@pytest.mark.parametrize("text", ["the ", "é的", "\U0001f600", HALF], ids=["words", "wide", "emoji", "broken"])
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_a_token_costs_the_same_late_as_early(kinds: dict[str, Tokenizer], kind: str, text: str) -> None:
    decoded: list[int] = []

    class Counting(Tokenizer):
        def __init__(self, inner: Tokenizer) -> None:
            self.__dict__ = inner.__dict__

        def decode_text(self, token_ids: list[int]) -> str:
            decoded.append(len(token_ids))
            return super().decode_text(token_ids)

    ids = (encoded(kind, text * 2000) + encoded(kind, "a"))[:4000]
    assert "".join(streamed(Counting(kinds[kind]), ids)) == KINDS[kind]().decode(ids)
    assert sum(decoded) < 20 * len(ids)


# Stop strings


class NaiveMatcher:
    """Looks at the whole text a character at a time, as the claim is worded."""

    def __init__(self, stops: Sequence[str], include_stop: bool) -> None:
        self.stops, self.include_stop = stops, include_stop

    def cut(self, text: str) -> tuple[str, bool]:
        for end in range(1, len(text) + 1):
            done = [stop for stop in self.stops if text[:end].endswith(stop)]
            if done:
                return text[: end if self.include_stop else end - max(map(len, done))], True
        return text, False


@given(
    stops=st.lists(st.text(alphabet="ab\u0301👍", min_size=1, max_size=5), max_size=4),
    pieces=st.lists(st.text(alphabet="ab\u0301👍", max_size=4), max_size=20),
    include_stop=st.booleans(),
)
@settings(max_examples=500)
def test_the_stop_that_completes_first_wins_in_any_split(stops: list[str], pieces: list[str], include_stop: bool) -> None:
    matcher, shown, hit = StopMatcher(stops, include_stop), "", False
    for piece in pieces:
        safe, hit = matcher.feed(piece)
        shown += safe
    expected = NaiveMatcher(stops, include_stop).cut("".join(pieces))
    assert (shown + matcher.flush(), hit) == expected


@given(
    stops=st.lists(st.text(alphabet="ab👍", min_size=1, max_size=5), max_size=4), text=st.text(alphabet="abc👍", max_size=30)
)
@settings(max_examples=300)
def test_only_what_may_become_a_stop_is_held_back(stops: list[str], text: str) -> None:
    matcher = StopMatcher(stops)
    shown, hit = matcher.feed(text)
    held = text[len(shown) :] if not hit else ""
    beginnings = [length for length in range(1, len(text) + 1) if any(stop.startswith(text[-length:]) for stop in stops)]
    assert len(held) == (0 if hit else max(beginnings, default=0))


@pytest.mark.parametrize(
    ("stops", "pieces", "expected"),
    [
        (("\n\n",), ["a\n", "\nb"], "a"),
        (("</s>", "<"), ["a<", "/s>"], "a"),
        (("bcd", "cd"), ["ab", "cd"], "a"),
        (("abab",), ["ab", "ac", "abab"], "abac"),
        (("👍🏽",), ["ok 👍", "🏽!"], "ok "),
        (("e\u0301",), ["caf", "e", "\u0301s"], "caf"),
        ((), ["a", "b"], "ab"),
    ],
)
def test_stops_split_over_pieces_are_not_shown(stops: tuple[str, ...], pieces: list[str], expected: str) -> None:
    matcher = StopMatcher(stops)
    assert "".join(matcher.feed(piece)[0] for piece in pieces) + matcher.flush() == expected


def test_nothing_is_shown_after_a_hit() -> None:
    matcher = StopMatcher(["stop"])
    matcher.feed("go stop")
    assert (matcher.feed(" on stop"), matcher.flush()) == (("", True), "")
