"""Tokens, their text, and where the two may be cut."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.messages import TokenLogprobs
from tests.support.toy_tokenizers import KINDS, save
from worker.output import MAX_HELD_TOKENS, Output
from worker.text import Detokenizer, StopMatcher, Tokenizer


class Letters(Detokenizer):
    """One token, one piece of text, of which the last `waiting` characters come out with the next one."""

    def __init__(self, pieces: Sequence[str], waiting: Mapping[int, int]) -> None:
        self._pieces = pieces
        self._num_waiting = waiting
        self._text = ""

    @property
    def is_pending(self) -> bool:
        return bool(self._text)

    def push(self, token_ids: Iterable[int]) -> str:
        text = self.flush()
        for token_id in token_ids:
            text += self._pieces[token_id]
            shown = len(text) - min(len(self._pieces[token_id]), self._num_waiting.get(token_id, 0))
            text, self._text = text[:shown], text[shown:]
        return text

    def flush(self) -> str:
        text, self._text = self._text, ""
        return text


def output(
    pieces: Sequence[str], stops: Sequence[str] = (), waiting: Mapping[int, int] | None = None, min_tokens: int = 0
) -> Output:
    return Output(Letters(pieces, waiting or {}), StopMatcher(stops), min_tokens)


def test_text_and_tokens_settle_together() -> None:
    out = output(["a", "b", "c"])
    out.push([0, 1])
    assert out.num_settled == 2
    assert out.slice(0, 2) == ([0, 1], "ab", 0)


def test_a_slice_knows_where_its_text_begins() -> None:
    out = output(["one ", "two ", "three"])
    out.push([0, 1, 2])
    assert out.slice(1, 3) == ([1, 2], "two three", 4)


def test_half_a_character_holds_its_token_back() -> None:
    out = output(["a", "b", "c"], waiting={1: 1})
    out.push([0, 1])
    assert out.num_settled == 1
    out.push([2])
    assert out.num_settled == 3
    assert out.slice(1, 3) == ([1, 2], "bc", 1)


def test_a_token_with_text_and_half_a_character_is_held_back_too() -> None:
    out = output(["a", "bc", "d"], waiting={1: 1})
    out.push([0, 1])
    assert (out.num_settled, out.text) == (1, "ab")
    out.close("length")
    assert (out.num_settled, out.text) == (2, "abc")


def test_the_beginning_of_a_stop_string_holds_its_token_back() -> None:
    out = output(["x", "EN", "D", "y"], stops=["END"])
    out.push([0, 1])
    assert out.num_settled == 1


def test_a_stop_string_cuts_the_text_and_ends_the_tokens_at_the_one_that_completed_it() -> None:
    out = output(["x", "E", "ND", "y"], stops=["END"])
    late = out.push([0, 1, 2, 3])
    assert out.is_stopped
    assert (out.text, out.token_ids, late) == ("x", [0, 1, 2], 1)


def test_closing_shows_what_was_held_back() -> None:
    out = output(["x", "EN"], stops=["END"])
    out.push([0, 1])
    out.close("length")
    assert (out.text, out.num_settled) == ("xEN", 2)


def test_nothing_is_taken_after_closing() -> None:
    out = output(["x", "y"])
    out.push([0])
    out.close("length")
    assert out.push([1, 1]) == 2
    assert out.text == "x"


def test_a_stop_string_does_not_count_before_min_tokens() -> None:
    out = output(["END", "a"], stops=["END"], min_tokens=3)
    out.push([0, 1])
    assert not out.is_stopped
    out.push([0])
    assert out.is_stopped
    assert out.text == "ENDa"


def test_a_token_without_text_waits_for_none() -> None:
    out = output(["a", ""])
    out.push([0, 1])
    assert out.num_settled == 2


def test_broken_bytes_do_not_keep_a_stream_from_the_log_for_ever() -> None:
    out = output(["?"], waiting={0: 1})
    out.push([0] * (MAX_HELD_TOKENS + 1))
    assert out.num_settled == MAX_HELD_TOKENS


@pytest.mark.parametrize("kind", KINDS)
def test_frames_carry_all_text_whatever_token_is_the_last(kind: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer(save(KINDS[kind](), tmp_path))
    for token_id in range(tokenizer.vocab_size):
        out = Output(Detokenizer(tokenizer), StopMatcher(()))
        out.push([tokenizer.vocab_size - 2, token_id])
        logged = out.num_settled
        shown = out.slice(0, logged)[1]
        out.close("length")
        assert shown + out.slice(logged, out.num_settled)[1] == out.text


def test_a_replayed_log_counts_as_shown() -> None:
    out = output(["x", "EN"], stops=["END"])
    out.replay([0, 1])
    assert out.num_settled == 2


def test_an_end_settles_everything_and_its_reason_comes_with_the_last_token() -> None:
    out = output(["x", "EN"], stops=["END"])
    out.push([0, 1], reason="length")
    assert (out.num_settled, out.text, out.finish_reason) == (2, "xEN", "length")


def test_a_stop_string_is_the_reason_whatever_the_engine_says() -> None:
    out = output(["x", "END"], stops=["END"])
    out.push([0, 1], reason="length")
    assert (out.finish_reason, out.text) == ("stop", "x")


def test_the_first_end_counts() -> None:
    out = output(["x"])
    out.push([0], reason="length")
    out.close("cancelled")
    assert out.finish_reason == "length"


def test_log_probabilities_stay_with_their_tokens() -> None:
    out = output(["x", "END", "y"], stops=["END"])
    out.push([0, 1, 2], [TokenLogprobs(-0.0), TokenLogprobs(-1.0), TokenLogprobs(-2.0)])
    assert out.logprobs == [TokenLogprobs(-0.0), TokenLogprobs(-1.0)]


@given(
    drawn=st.lists(st.tuples(st.text("ENDx", max_size=3), st.integers(0, 3)), min_size=1, max_size=30),
    cuts=st.sets(st.integers(1, 30)),
    resume_at=st.integers(0, 30),
)
def test_frames_joined_equal_the_result_however_events_and_attempts_are_cut(
    drawn: list[tuple[str, int]], cuts: set[int], resume_at: int
) -> None:
    pieces, waiting = [piece for piece, _ in drawn], {k: num for k, (_, num) in enumerate(drawn)}
    ids = list(range(len(pieces)))
    whole = output(pieces, ["END", "xx"], waiting)
    whole.push(ids)
    whole.close("length")
    cut = output(pieces, ["END", "xx"], waiting)
    shown, logged = "", 0
    for start, stop in zip([0, *sorted(cuts)], [*sorted(cuts), None], strict=True):
        if start >= resume_at > 0:  # another attempt goes on from the log
            cut, resume_at = output(pieces, ["END", "xx"], waiting), 0
            cut.replay(ids[:logged])
            cut.push(ids[logged:start])
        cut.push(ids[start:stop])
        shown += cut.slice(logged, cut.num_settled)[1]
        logged = max(logged, cut.num_settled)
    cut.close("length")
    shown += cut.slice(logged, cut.num_settled)[1]
    assert shown == cut.text == whole.text
    assert cut.token_ids == whole.token_ids
