"""Tokens, their text, and where the two may be cut."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from worker.output import MAX_HELD_TOKENS, Output
from worker.text import StopMatcher


class Letters:
    """One token, one piece of text; `halves` are pieces that come out with the next whole one."""

    def __init__(self, pieces: Sequence[str], halves: Sequence[int] = ()) -> None:
        self._pieces = pieces
        self._halves = set(halves)
        self._waiting = ""

    def push(self, token_ids: list[int]) -> str:
        text = ""
        for token_id in token_ids:
            self._waiting += self._pieces[token_id]
            if token_id not in self._halves:
                text, self._waiting = text + self._waiting, ""
        return text

    def flush(self) -> str:
        text, self._waiting = self._waiting, ""
        return text


def output(pieces: Sequence[str], stops: Sequence[str] = (), halves: Sequence[int] = (), min_tokens: int = 0) -> Output:
    return Output(Letters(pieces, halves), StopMatcher(stops), min_tokens)


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
    out = output(["a", "b", "c"], halves=[1])
    out.push([0, 1])
    assert out.num_settled == 1
    out.push([2])
    assert out.num_settled == 3
    assert out.slice(1, 3) == ([1, 2], "bc", 1)


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
    out.close()
    assert (out.text, out.num_settled) == ("xEN", 2)


def test_nothing_is_taken_after_closing() -> None:
    out = output(["x", "y"])
    out.push([0])
    out.close()
    assert out.push([1, 1]) == 2
    assert out.text == "x"


def test_a_stop_string_does_not_count_before_min_tokens() -> None:
    out = output(["END", "a"], stops=["END"], min_tokens=3)
    out.push([0, 1])
    assert not out.is_stopped
    out.push([0])
    assert out.is_stopped
    assert out.text == "ENDa"


def test_tokens_without_text_do_not_keep_a_stream_from_the_log_for_ever() -> None:
    out = output([""])
    out.push([0] * (MAX_HELD_TOKENS + 1))
    assert out.num_settled == MAX_HELD_TOKENS


def test_a_replayed_log_counts_as_shown() -> None:
    out = output(["x", "EN"], stops=["END"])
    out.replay([0, 1])
    assert out.num_settled == 2


@given(
    pieces=st.lists(st.text("ENDx", max_size=3), min_size=1, max_size=30),
    cuts=st.sets(st.integers(1, 30)),
    resume_at=st.integers(0, 30),
)
def test_frames_joined_equal_the_result_however_events_and_attempts_are_cut(
    pieces: list[str], cuts: set[int], resume_at: int
) -> None:
    ids = list(range(len(pieces)))
    whole = output(pieces, stops=["END", "xx"])
    whole.push(ids)
    whole.close()
    cut = output(pieces, stops=["END", "xx"])
    shown, logged = "", 0
    for start, stop in zip([0, *sorted(cuts)], [*sorted(cuts), None], strict=True):
        if start >= resume_at > 0:  # another attempt goes on from the log
            cut, resume_at = output(pieces, stops=["END", "xx"]), 0
            cut.replay(ids[:logged])
            cut.push(ids[logged:start])
        cut.push(ids[start:stop])
        shown += cut.slice(logged, cut.num_settled)[1]
        logged = max(logged, cut.num_settled)
    cut.close()
    shown += cut.slice(logged, cut.num_settled)[1]
    assert shown == cut.text == whole.text
    assert cut.token_ids == whole.token_ids
