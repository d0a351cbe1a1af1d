"""What a number of the log means when several choices share it."""

from hypothesis import given
from hypothesis import strategies as st

from worker.order import LogOrder


def order(*runs: tuple[int, int], num_choices: int = 3) -> LogOrder:
    made = LogOrder(num_choices)
    for choice, stop in runs:
        made.add(choice, stop)
    return made


def test_tokens_keep_the_order_in_which_they_got_their_place() -> None:
    made = order((0, 5), (1, 3), (0, 6))
    assert list(made.after(0)) == [(0, 0, 5), (1, 0, 3), (0, 5, 6)]
    assert (made.n, made.planned) == (9, [6, 3, 0])


def test_a_number_within_a_run_cuts_it() -> None:
    assert list(order((0, 5), (1, 3)).after(2)) == [(0, 2, 5), (1, 0, 3)]


def test_nothing_follows_the_end() -> None:
    assert list(order((0, 5), (1, 3)).after(8)) == []


def test_one_choice_is_one_run_however_it_grew() -> None:
    assert list(order((0, 1), (0, 2), (0, 9), num_choices=1).after(4)) == [(0, 4, 9)]


def test_a_choice_that_begins_anew_leaves_the_others_their_order() -> None:
    made = order((0, 5), (1, 3), (0, 8), (2, 1))
    made.cut(0, 2)
    assert list(made.after(0)) == [(0, 0, 2), (1, 0, 3), (2, 0, 1)]
    assert made.n == 6


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4)), max_size=30), st.integers(0, 120))
def test_every_number_is_followed_by_what_came_after_it(steps: list[tuple[int, int]], cut: int) -> None:
    made, written = LogOrder(3), list[tuple[int, int]]()
    for choice, count in steps:
        written += [(choice, made.planned[choice] + i) for i in range(count)]
        made.add(choice, made.planned[choice] + count)
    n = min(cut, len(written))
    assert [(choice, i) for choice, start, stop in made.after(n) for i in range(start, stop)] == written[n:]
