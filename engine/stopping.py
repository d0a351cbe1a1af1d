"""Is this sequence finished, and why?

Looks at token ids and limits only. Stop strings are text and belong to the queue side, which aborts; cancelling and failing
come from outside through `Scheduler.abort`.
"""

from dataclasses import dataclass

from engine.request import FinishReason
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Stop:
    """The end of a sequence. `detail` is empty where the reason says it all."""

    reason: FinishReason
    detail: str = ""


def check_stop(sequence: Sequence, max_sequence_tokens: int, max_model_len: int) -> Stop | None:
    """Why the sequence ends with the tokens it knows, or None when it goes on.

    In this order: a stop or EOS id as its last output token, once it has min_tokens of output; max_tokens of output; as many
    tokens as it may hold, with the detail `model_length` or, when the pool is smaller than that, `kv_capacity`.

    Works on a fresh sequence too: one that continues an earlier attempt may be over before it starts. (With max_tokens 0 every
    sequence is over by this measure; its prompt is still to be computed.)
    """
    params = sequence.request.params
    num_outputs = sequence.num_output_tokens
    if num_outputs and num_outputs >= params.min_tokens and sequence.token_ids[-1] in sequence.stop_token_ids:
        return Stop(FinishReason.STOP)
    if num_outputs >= params.max_tokens:
        return Stop(FinishReason.LENGTH)
    if sequence.num_tokens >= max_sequence_tokens:
        return Stop(FinishReason.LENGTH, "model_length" if sequence.num_tokens >= max_model_len else "kv_capacity")
    return None
