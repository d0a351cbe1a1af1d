"""Each token once and in order, out of frames that come late, twice, overlapping or across attempts."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.messages import TokenLogprobs
from worker.deltas import Assembler, Delta, Shown
from worker.errors import TextChanged
from worker.frames import Choice, ControlFrame, Result, TokenFrame

IDS, TEXT = tuple(range(100, 120)), "abcdefghijklmnopqrst"


def tokens(start: int, stop: int, attempt: int = 1, choice: int = 0, reason: str | None = None) -> TokenFrame:
    return TokenFrame(attempt, choice, start, IDS[start:stop], TEXT[start:stop], start, reason)


def result(stop: int = 20) -> Result:
    return Result(id="k", state="succeeded", choices=(Choice(0, TEXT[:stop], IDS[:stop], "stop"),))


def applied(deltas: Sequence[Delta]) -> tuple[list[int], str]:
    """What a reader holds after these deltas, checking that each begins where the last ended."""
    ids: list[int] = []
    text = ""
    for delta in deltas:
        if delta.is_restart:
            ids, text = ids[: delta.index], text[: delta.offset]
        assert (delta.index, delta.offset) == (len(ids), len(text))
        ids += delta.token_ids
        text += delta.text
    return ids, text


def test_what_was_heard_before_is_dropped() -> None:
    assembler = Assembler()
    assembler.add(tokens(0, 3))
    assert assembler.add(tokens(0, 3)) == []
    assert assembler.add(tokens(1, 2, attempt=2)) == []


def test_an_overlap_is_cut() -> None:
    assembler = Assembler()
    assembler.add(tokens(0, 3))
    assert assembler.add(tokens(1, 5)) == [Delta(0, 3, IDS[3:5], "de", offset=3)]


def test_a_gap_is_told_and_nothing_is_taken() -> None:
    assembler = Assembler()
    assembler.add(tokens(0, 3))
    assert assembler.add(tokens(4, 6)) is None
    assert assembler.add(tokens(3, 4)) == [Delta(0, 3, IDS[3:4], "d", offset=3)]


def test_text_that_lags_behind_its_tokens_is_given_once() -> None:
    assembler = Assembler()
    frames = [TokenFrame(1, 0, 0, (7,), "", 0), TokenFrame(1, 0, 1, (8,), "é", 0), TokenFrame(1, 0, 2, (), "!", 1, "stop")]
    deltas = [assembler.add(frame) for frame in (*frames, *frames)]
    assert [len(some or ()) for some in deltas] == [1, 1, 1, 0, 0, 0]
    assert applied([delta for some in deltas for delta in some or ()]) == ([7, 8], "é!")


def test_choices_do_not_disturb_each_other() -> None:
    assembler = Assembler()
    assembler.add(tokens(0, 3, choice=0))
    assert assembler.add(tokens(0, 1, choice=1)) == [Delta(1, 0, IDS[:1], "a")]
    assert assembler.num_tokens == 4


def test_a_finish_reason_is_given_once() -> None:
    assembler = Assembler()
    last = tokens(0, 3, reason="length")
    assert [delta.finish_reason for delta in assembler.add(last) or ()] == ["length"]
    assert assembler.add(last) == []
    assert assembler.finish(result(3)) == []


def test_the_result_tops_up_what_was_never_streamed() -> None:
    assembler = Assembler()
    assembler.add(tokens(0, 3))
    assert assembler.finish(result()) == [Delta(0, 3, IDS[3:], TEXT[3:], "stop", 3)]


def test_a_restart_cuts_back_once_and_voids_earlier_attempts() -> None:
    assembler = Assembler()
    restart = ControlFrame(2, "restart", index=2, offset=2)
    log = [tokens(0, 5), restart, tokens(2, 4, attempt=2)]
    first = [delta for frame in log for delta in assembler.add(frame) or ()]
    again = [delta for frame in log for delta in assembler.add(frame) or ()]
    assert Delta(0, 2, offset=2, is_restart=True) in first
    assert applied(first) == (list(IDS[:4]), TEXT[:4])
    assert again == []


def test_a_restart_where_nothing_beyond_was_given_is_no_delta() -> None:
    assembler = Assembler()
    assembler.add(tokens(0, 2))
    assert assembler.add(ControlFrame(2, "restart", index=2, offset=2)) == []


def test_starts_and_ends_are_no_deltas() -> None:
    assembler = Assembler()
    assert [assembler.add(ControlFrame(1, event)) for event in ("start", "end")] == [[], []]


def test_a_gap_in_one_choice_is_none_in_another() -> None:
    assembler = Assembler()
    assembler.add(tokens(0, 3, choice=0))
    assert assembler.add(tokens(3, 5, choice=1)) is None
    assert assembler.add(tokens(3, 5, choice=0)) == [Delta(0, 3, IDS[3:5], "de", offset=3)]


def test_a_restart_of_one_choice_leaves_the_others() -> None:
    assembler = Assembler()
    for choice in (0, 1):
        assembler.add(tokens(0, 3, choice=choice))
    assert assembler.add(ControlFrame(2, "restart", choice=1, index=1, offset=1)) == [
        Delta(1, 1, offset=1, is_restart=True),
    ]
    assert assembler.add(tokens(3, 4, choice=0)) == [Delta(0, 3, IDS[3:4], "d", offset=3)]


def test_log_probabilities_are_cut_like_their_tokens() -> None:
    logprobs = tuple(TokenLogprobs(-float(i)) for i in range(4))
    assembler = Assembler()
    assembler.add(tokens(0, 1))
    [delta] = assembler.add(TokenFrame(1, 0, 0, IDS[:3], TEXT[:3], 0, None, logprobs[:3])) or ()
    assert (delta.token_ids, delta.logprobs) == (IDS[1:3], logprobs[1:3])
    [rest] = assembler.finish(
        Result(id="k", state="succeeded", choices=(Choice(0, TEXT[:4], IDS[:4], "stop", None, logprobs),))
    )
    assert rest.logprobs == logprobs[3:]


@given(
    cuts=st.lists(st.integers(0, 20), max_size=8),
    heard=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=30),
)
def test_any_frames_with_replays_give_the_whole_once(cuts: list[int], heard: list[tuple[int, int]]) -> None:
    bounds = sorted({0, 20, *cuts})
    log = [tokens(start, stop) for start, stop in itertools.pairwise(bounds)]
    assembler, given_out = Assembler(), []
    for start, stop in heard:
        deltas = assembler.add(tokens(min(start, stop), max(start, stop)))
        if deltas is None:
            deltas = [delta for frame in log for delta in assembler.add(frame) or ()]
        given_out += deltas
    given_out += assembler.finish(result())
    assert applied(given_out) == (list(IDS), TEXT)


def test_text_that_was_shown_is_not_shown_again_after_a_restart() -> None:
    shown = Shown()
    told = [
        shown.add(delta)
        for delta in (
            Delta(0, 0, text="abcd"),
            Delta(1, 0, text="another choice's"),
            Delta(0, 1, offset=1, is_restart=True),
            Delta(0, 1, text="bc", offset=1),
            Delta(0, 3, text="def", offset=3, finish_reason="stop"),
        )
    ]
    assert told == ["abcd", "", "", "", "ef"]


@pytest.mark.parametrize(("text", "reason"), [("x", None), ("bcx", None), ("b", "stop")], ids=["at once", "later", "shorter"])
def test_text_that_was_shown_and_comes_otherwise_is_an_error(text: str, reason: str | None) -> None:
    shown = Shown()
    shown.add(Delta(0, 0, text="abcd"))
    shown.add(Delta(0, 1, offset=1, is_restart=True))
    with pytest.raises(TextChanged, match="character 1: another attempt answers otherwise"):
        shown.add(Delta(0, 1, text=text, offset=1, finish_reason=reason))
