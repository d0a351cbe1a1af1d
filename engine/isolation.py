"""Suspects: requests that run alone until they have shown that they do no harm.

A process died while a suspect ran in it, beside others any of which may be the cause. It runs alone now, so that a second death
can be its doing only, and for so many steps that a fault which its prompt or its first tokens bring about has come.

A window is the time of one `request_id`, with all its choices, forks and beams, which arrive as one request or as several.

1. While its window lasts a request comes before everything else in order, suspects among themselves by arrival: it can take
   the blocks of all others, and none can take its. With the window's end it goes to where it would have been.
2. A step counts when it is recorded, computed no prompt, and left none of the request waiting: each choice has had its prefill
   and so many steps more when the window ends.

Relies on `Lineup` for who lives and who comes first. Leaves to `scheduler` what a step of one request alone is made of.
"""

from dataclasses import dataclass

from engine.decision import SchedulerOutput
from engine.lineup import Lineup
from engine.sequence import Sequence

_BEFORE_ALL = float("-inf")


@dataclass(slots=True)
class _Window:
    place: tuple[float, int]
    """The request's place in order once its window is over."""
    num_steps_left: int


def is_alone(sequence: Sequence) -> bool:
    """Whether the window of its request lasts."""
    return sequence.order[0] == _BEFORE_ALL


class Isolation:
    """The windows that are not over."""

    def __init__(self, lineup: Lineup) -> None:
        self._lineup = lineup
        self._windows: dict[str, _Window] = {}
        self._cleared: list[str] = []

    def add(self, sequence: Sequence) -> None:
        """Put a sequence that arrives into the window of its request."""
        request, (stamp, arrival, choice) = sequence.request, sequence.order
        window = self._windows.setdefault(request.request_id, _Window((stamp, arrival), request.isolated_steps))
        sequence.order = _BEFORE_ALL, window.place[1], choice

    def suspect(self, *, is_closed: bool) -> str:
        """The request that the next step runs alone, if any: one that runs or, unless nothing may start, one that waits."""
        if not self._windows:
            return ""
        firsts = self._lineup.running[:1] + ([] if is_closed else self._lineup.waiting[-1:])
        return next((first.request.request_id for first in firsts if is_alone(first)), "")

    def record(self, output: SchedulerOutput) -> None:
        """Count a recorded step, if it was a suspect's; with the last one of a window the request goes on as one of many."""
        window = self._windows.get(output.suspect)
        if window is None or not output.scheduled or output.num_prefill_tokens:
            return
        if all(sequence.block_table for sequence in self._lineup.live(output.suspect) if is_alone(sequence)):
            window.num_steps_left -= 1
        if window.num_steps_left <= 0:
            self._lineup.place(output.suspect, window.place)
            self._cleared.append(output.suspect)
            del self._windows[output.suspect]

    def left(self, request_id: str) -> None:
        """A sequence of this request has ended or was aborted: so has its window, if it was the last."""
        if self._windows and not self._lineup.live(request_id):
            self._windows.pop(request_id, None)

    def take_cleared(self) -> tuple[str, ...]:
        """The requests whose windows have ended since the last call, and that still live."""
        cleared, self._cleared = self._cleared, []
        return tuple(request_id for request_id in cleared if self._lineup.live(request_id))
