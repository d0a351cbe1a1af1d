"""Is this sequence finished, and why?

Looks at token ids and limits only. Stop strings are text and belong to the queue side, which aborts; cancelling and failing
come from outside through `Scheduler.abort`; a beam search knows its own end.
"""

from typing import NamedTuple

from engine.request import FinishReason
from engine.sequence import Sequence


class Stop(NamedTuple):
    """The end of a sequence. `detail` is empty where the reason says it all."""

    reason: FinishReason
    detail: str = ""


def check_stop(sequence: Sequence, max_model_len: int) -> Stop | None:
    """Why the sequence ends with the tokens it knows, or None when it goes on.

    In this order: a stop or EOS id as its last output token, once it has min_tokens of output; a grammar that allows nothing
    more; max_tokens of output; as many tokens as it may hold, with the detail `model_length` or, when the pool is smaller than
    that, `kv_capacity`.

    Works on a fresh sequence too: one that continues an earlier attempt may be over before it starts. (With max_tokens 0 every
    sequence is over by this measure; its prompt is still to be computed.)
    """
    if ends_with_stop_id(sequence):
        return Stop(FinishReason.STOP)
    matcher = sequence.matcher
    if matcher is not None and matcher.must_end:
        return Stop(FinishReason.ERROR, str(matcher.failure)) if matcher.failure else Stop(FinishReason.STOP)
    if len(sequence.token_ids) - sequence.num_prompt_tokens >= sequence.request.params.max_tokens:
        return Stop(FinishReason.LENGTH)
    if len(sequence.token_ids) >= sequence.num_tokens_limit:
        return Stop(FinishReason.LENGTH, limit_detail(len(sequence.token_ids), max_model_len))
    return None


def ends_with_stop_id(sequence: Sequence) -> bool:
    """Whether its last token is an output that ends it."""
    num_outputs = len(sequence.token_ids) - sequence.num_prompt_tokens
    is_enough = num_outputs > 0 and num_outputs >= sequence.request.params.min_tokens
    return is_enough and sequence.token_ids[-1] in sequence.stop_token_ids


def limit_detail(num_tokens: int, max_model_len: int) -> str:
    """What keeps a sequence from growing that has not reached its max_tokens."""
    return "model_length" if num_tokens >= max_model_len else "kv_capacity"
