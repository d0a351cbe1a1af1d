"""What one attempt has generated: token ids, the text that is safe to show, and where the two may be cut into frames.

Relies on the detokeniser and the stop matcher of `worker/text.py`; leaves frames to `publisher`. Pure: no clock, no connection.

1. A token is fed alone, whatever the engine's events hold, so that the outcome does not depend on timing.
2. Tokens settle together with their text. Text that is held back (half a character, what could begin a stop string) holds its
   token back as well, so ids and text are never out of step, and the last frame has a token for the last text to ride on.
3. `pieces[k]` is the text released by token k and `offsets[k]` the characters before it. Both only grow, and `num_settled` is
   written last: the publisher may read settled tokens without a lock.
"""

import threading
from collections.abc import Iterable

from worker.text import Detokenizer, StopMatcher

MAX_HELD_TOKENS = 16
"""Tokens wait this long for their text: a run of broken bytes must not keep a stream from the log for ever."""


class Output:
    """The tokens and the text of one generation. The reader pushes, anyone may close, the publisher slices."""

    def __init__(self, detokenizer: Detokenizer, matcher: StopMatcher, min_tokens: int = 0) -> None:
        self._detokenizer = detokenizer
        self._matcher = matcher
        self._min_tokens = min_tokens
        self._lock = threading.Lock()
        self._num_fed = 0
        self._num_shown = 0
        self._is_closed = False
        self.token_ids: list[int] = []
        self.pieces: list[str] = []
        self.offsets: list[int] = [0]
        self.num_settled = 0
        self.is_stopped = False
        """A stop string is complete; the text is cut there and takes no more tokens."""

    @property
    def text(self) -> str:
        """All text released so far."""
        return "".join(self.pieces)

    def push(self, token_ids: Iterable[int]) -> int:
        """Take new tokens; how many of them came too late, after a stop string or the end."""
        with self._lock:
            ids = iter(token_ids)
            for token_id in ids:
                if self._is_closed:
                    return 1 + sum(1 for _ in ids)
                self._push(token_id)
                self._is_closed = self.is_stopped
        return 0

    def replay(self, token_ids: list[int]) -> None:
        """Take what an earlier attempt has logged: shown already, whatever is still held back here."""
        self.push(token_ids)
        self.num_settled = max(self.num_settled, len(self.token_ids))

    def close(self) -> None:
        """Nothing will come any more: show what was held back. Safe to call twice."""
        with self._lock:
            if not self._is_closed:
                rest, has_stopped = self._matcher.feed(self._detokenizer.flush())
                self._append_to_last(rest if has_stopped else rest + self._matcher.flush())
            self._is_closed = True
            self.num_settled = len(self.token_ids)

    def slice(self, start: int, stop: int) -> tuple[list[int], str, int]:
        """Ids and text of tokens [start, stop), and the character offset of that text."""
        return self.token_ids[start:stop], "".join(self.pieces[start:stop]), self.offsets[start]

    def _push(self, token_id: int) -> None:
        text = self._detokenizer.push([token_id])
        if len(self.token_ids) + 1 < self._min_tokens:
            safe = text  # a stop string counts from min_tokens on
        else:
            safe, self.is_stopped = self._matcher.feed(text)
        self._num_fed += len(text)
        self._num_shown += len(safe)
        self.token_ids.append(token_id)
        self.pieces.append(safe)
        self.offsets.append(self.offsets[-1] + len(safe))
        num_held = len(self.token_ids) - self.num_settled
        holds_text = self._num_fed > self._num_shown or self._detokenizer.is_pending
        if self.is_stopped or not holds_text:
            self.num_settled = len(self.token_ids)
        elif num_held > MAX_HELD_TOKENS:
            self.num_settled = len(self.token_ids) - 1

    def _append_to_last(self, text: str) -> None:
        if self.pieces:
            self.pieces[-1] += text
            self.offsets[-1] += len(text)
