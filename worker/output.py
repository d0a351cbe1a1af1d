"""What one choice of a job has generated: token ids, the text that is safe to show, and where the two may be cut into frames.

Relies on the detokeniser and the stop matcher of `worker/text.py`; leaves frames to `publisher`. Pure: no clock, no connection.

1. A token is fed alone, whatever the engine's events hold, so that the outcome does not depend on timing.
2. Tokens settle together with their text. Text that is held back (half a character, what could begin a stop string) holds its
   token back as well, so ids and text are never out of step, and the last frame has a token for the last text to ride on.
3. `pieces[k]` is the text released by token k and `offsets[k]` the characters before it. Both only grow, and `num_settled` is
   written last, after `finish_reason`: the publisher may read settled tokens without a lock.
"""

import threading
from collections.abc import Sequence

from engine.messages import TokenLogprobs
from engine.request import FinishReason
from worker.text import Detokenizer, StopMatcher

MAX_HELD_TOKENS = 16
"""Tokens wait this long for their text: a run of broken bytes must not keep a stream from the log for ever."""


class Output:
    """The tokens and the text of one choice. The reader pushes, anyone may close, the publisher slices."""

    def __init__(self, detokenizer: Detokenizer, matcher: StopMatcher, min_tokens: int = 0) -> None:
        self._detokenizer = detokenizer
        self._matcher = matcher
        self._min_tokens = min_tokens
        self._lock = threading.Lock()
        self._num_fed = 0
        self._num_shown = 0
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        """One for each token, when they were asked for."""
        self.pieces: list[str] = []
        self.offsets: list[int] = [0]
        self.num_settled = 0
        self.is_stopped = False
        """A stop string is complete; the text is cut there."""
        self.finish_reason: str | None = None
        """Set with the last token; nothing is taken after it."""
        self.detail: str | None = None
        """Why, where the reason alone does not say it."""
        self.score: float | None = None

    @property
    def text(self) -> str:
        """All text released so far."""
        return "".join(self.pieces)

    def push(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] = (), reason: str | None = None) -> int:
        """Take new tokens, with a `reason` the last ones; how many of them came too late, after a stop string or the end."""
        with self._lock:
            if self.finish_reason:
                return len(token_ids)
            num_before, settled = len(self.token_ids), self.num_settled
            for token_id in token_ids:
                settled = self._push(token_id, settled)
                if self.is_stopped:
                    reason = FinishReason.STOP.value
                    break
            num_taken = len(self.token_ids) - num_before
            if logprobs:
                self.logprobs += logprobs[:num_taken]
            if reason:
                self._finish(reason)
            self.num_settled = len(self.token_ids) if reason else settled
            return len(token_ids) - num_taken

    def replay(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] = (), reason: str | None = None) -> None:
        """Take what an earlier attempt has logged: shown already, whatever is still held back here."""
        self.push(token_ids, logprobs, reason)
        self.num_settled = len(self.token_ids)

    def close(self, reason: str) -> None:
        """Nothing will come any more: show what was held back. Safe to call twice, and after its own end.

        Without a reason it goes on elsewhere, and what was held back stays so.
        """
        self.push((), (), reason)

    def slice(self, start: int, stop: int) -> tuple[list[int], str, int]:
        """Ids and text of tokens [start, stop), and the character offset of that text."""
        return self.token_ids[start:stop], "".join(self.pieces[start:stop]), self.offsets[start]

    def _push(self, token_id: int, settled: int) -> int:
        """Take a token; how many have settled with it."""
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
        num_known = len(self.token_ids)
        if self._num_fed == self._num_shown and not self._detokenizer.is_pending:
            return num_known
        return num_known - 1 if num_known - settled > MAX_HELD_TOKENS else settled

    def _finish(self, reason: str) -> None:
        rest, has_stopped = self._matcher.feed(self._detokenizer.flush())
        self._append_to_last(rest if has_stopped else rest + self._matcher.flush())
        self.finish_reason = reason

    def _append_to_last(self, text: str) -> None:
        if text and self.pieces:
            self.pieces[-1] += text
            self.offsets[-1] += len(text)
