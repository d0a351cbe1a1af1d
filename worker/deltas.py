"""Frames, heard late, twice, out of a replay or across attempts, to what is new: each token once, in order.

Pure: no connection and no clock. Relies on the indices and offsets of frames (docs/protocol.md) and on the order of the log.
Leaves to `worker/follower.py` where frames come from and what to do about a gap.
"""

from dataclasses import dataclass

from engine.messages import TokenLogprobs
from worker.errors import TextChanged
from worker.frames import ControlFrame, Frame, Result, TokenFrame


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new of one choice. The texts of a choice, joined, are its text, and the ids its ids.

    With `is_restart` the opposite: what was given from token `index` and character `offset` on is void, and comes anew.
    """

    choice: int
    index: int
    """Output index of the first token."""
    token_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: str | None = None
    """In the last delta of a choice."""
    offset: int = 0
    """Where `text` starts in the choice's text, in characters."""
    is_restart: bool = False
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each token, when they were asked for."""


@dataclass(slots=True)
class _Progress:
    """How far one choice has been given."""

    num_tokens: int = 0
    num_characters: int = 0
    is_finished: bool = False
    restarted_by: int = 0
    """The last attempt that restarted it; frames of earlier ones are void."""


class Assembler:
    """Remembers how far each choice has come, and cuts what it is given down to what is new."""

    def __init__(self) -> None:
        self._choices: dict[int, _Progress] = {}

    @property
    def num_tokens(self) -> int:
        """Tokens given, of all choices."""
        return sum(progress.num_tokens for progress in self._choices.values())

    def add(self, frame: Frame) -> list[Delta] | None:
        """What is new in `frame`; None when something before it is missing, and nothing was taken."""
        if isinstance(frame, ControlFrame) and frame.event != "restart":
            return []
        progress = self._choices.setdefault(frame.choice, _Progress())
        if frame.attempt < progress.restarted_by:
            return []
        if frame.index > progress.num_tokens or frame.offset > progress.num_characters:
            return None
        return _continue(progress, frame) if isinstance(frame, TokenFrame) else _restart(progress, frame)

    def finish(self, result: Result) -> list[Delta]:
        """What the result has beyond the frames: all of it when nothing was streamed."""
        deltas: list[Delta] = []
        for choice in result.choices:
            progress = self._choices.setdefault(choice.index, _Progress())
            whole = TokenFrame(
                0, choice.index, 0, choice.token_ids, choice.text, 0, choice.finish_reason, choice.logprobs or ()
            )
            deltas += _continue(progress, whole)
        return deltas


class Shown:
    """The text of one choice for who cannot take back what was shown: after a restart nothing until there is more than that."""

    def __init__(self, choice: int = 0) -> None:
        self._choice = choice
        self._text = ""

    def add(self, delta: Delta) -> str:
        """What is new. `TextChanged` when the choice goes on, or ends, otherwise than what was shown."""
        if delta.choice != self._choice or delta.is_restart:
            return ""
        again = self._text[delta.offset : delta.offset + len(delta.text)]
        is_short = delta.finish_reason is not None and delta.offset + len(delta.text) < len(self._text)
        if is_short or not delta.text.startswith(again):
            raise TextChanged(
                f"choice {delta.choice}: character {delta.offset}: another attempt answers otherwise than what was given;"
                " iterate over the stream itself, whose deltas tell of restarts"
            )
        self._text += (new := delta.text[len(again) :])
        return new


def _continue(progress: _Progress, frame: TokenFrame) -> list[Delta]:
    token_ids = frame.token_ids[progress.num_tokens - frame.index :]
    logprobs = frame.logprobs[progress.num_tokens - frame.index :]
    text = frame.text[progress.num_characters - frame.offset :]
    reason = None if progress.is_finished else frame.finish_reason
    if not (token_ids or text or reason):
        return []
    delta = Delta(frame.choice, progress.num_tokens, token_ids, text, reason, progress.num_characters, logprobs=logprobs)
    progress.num_tokens += len(token_ids)
    progress.num_characters += len(text)
    progress.is_finished |= bool(reason)
    return [delta]


def _restart(progress: _Progress, frame: ControlFrame) -> list[Delta]:
    if frame.attempt == progress.restarted_by:
        return []  # a replay tells it again
    progress.restarted_by = frame.attempt
    if (frame.index, frame.offset) == (progress.num_tokens, progress.num_characters):
        return []
    progress.num_tokens, progress.num_characters, progress.is_finished = frame.index, frame.offset, False
    return [Delta(frame.choice, frame.index, offset=frame.offset, is_restart=True)]
