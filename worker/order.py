"""In which order the log has the tokens of a job's choices.

Pure. The log counts tokens over all choices, and the server tells where it ends as one number n: this is what n means. Once a
token has its place it keeps it, so that after a lost reply, or a lost tail, what follows n can be cut into frames in any way.

    log   | choice 0 [0, 5) | choice 1 [0, 5) | choice 0 [5, 9) | choice 1 [5, 7)
    n     0                 5                10                14                16
"""

from bisect import bisect_right
from collections.abc import Iterator


class LogOrder:
    """The runs of tokens of one choice that follow each other in the log."""

    def __init__(self, num_choices: int = 1) -> None:
        self._runs: list[tuple[int, int]] = []
        self._ends: list[int] = []
        self.planned = [0] * num_choices
        """How many tokens of each choice have their place."""
        self.n = 0
        """How many of all choices."""

    def add(self, choice: int, stop: int) -> None:
        """Tokens up to `stop` of a choice come next, those that have no place yet."""
        planned, runs = self.planned[choice], self._runs
        if stop == planned:
            return
        self.n += stop - planned
        self.planned[choice] = stop
        if runs and runs[-1][0] == choice:
            runs[-1], self._ends[-1] = (choice, stop), self.n
        else:
            runs.append((choice, stop))
            self._ends.append(self.n)

    def cut(self, choice: int, index: int) -> None:
        """The log begins a choice anew from token `index`: what it had from there on has no place."""
        kept = LogOrder(len(self.planned))
        for of, _, stop in self.after(0):
            kept.add(of, max(kept.planned[of], min(stop, index) if of == choice else stop))
        self._runs, self._ends, self.planned, self.n = kept._runs, kept._ends, kept.planned, kept.n

    def after(self, n: int) -> Iterator[tuple[int, int, int]]:
        """(choice, start, stop) of each run that follows the first `n` tokens."""
        for k in range(bisect_right(self._ends, n), len(self._ends)):
            choice, stop = self._runs[k]
            yield choice, stop - (self._ends[k] - n), stop
            n = self._ends[k]
