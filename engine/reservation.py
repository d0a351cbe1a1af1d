"""How much KV memory is set aside for a sequence when it starts.

    paged      what it knows; more on demand, and preemption when the pool is dry           vLLM
    declared   prompt and max_tokens: nothing is ever preempted                             TensorRT-LLM
    ratio      prompt and the share of max_tokens that outputs have used of late            SGLang
    max        the model's length                                                           Orca (Max)
    pow2       prompt, and max_tokens rounded up to a power of two                          Orca (Pow2)
    oracle     prompt and the true output: max_tokens, of requests that ignore EOS          Orca (Oracle)

The names of Orca's policies are those of Kwon et al. 2023 (PagedAttention), section 6.1. Blocks set aside stay free in the pool
but are promised; who is asked, and in which order, is decided in `scheduler`.
"""

from enum import Enum

from engine.config import SchedulerConfig
from engine.request import Request
from engine.sequence import Sequence

FIRST_SHARE = 0.5
SHARE_WEIGHT = 1 / 32
"""How much one ended or preempted sequence moves the expected share of max_tokens."""


class Fit(Enum):
    """The three answers of admission."""

    NOW = "now"
    LATER = "later"
    NEVER = "never"
    """Not even with the whole pool."""


def fit(num_wanted: int, num_available: int, num_blocks: int, watermark_blocks: int) -> Fit:
    """Whether a sequence that takes `num_wanted` free blocks may start when `num_available` of `num_blocks` are not promised.

    `watermark_blocks` stay free for those that run, which would otherwise be preempted one step later to make up for it; pass 0
    when nothing runs.
    """
    if num_wanted > num_blocks:
        return Fit.NEVER
    return Fit.NOW if num_wanted + watermark_blocks <= num_available else Fit.LATER


class Reservation:
    """One policy, and for `ratio` what it has learnt."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._policy = config.reservation
        self._block_size = config.block_size
        self._num_blocks = config.num_blocks
        self._max_sequence_tokens = config.max_sequence_tokens
        self._share = FIRST_SHARE

    def num_blocks(self, sequence: Sequence) -> int:
        """Blocks that a starting sequence needs in all, its forks to come included; at most the whole pool.

        At least those of everything it knows, although a first chunk may need less: a sequence that started with less would
        soon be preempted again.
        """
        num_tokens = max(sequence.num_tokens, min(self._num_tokens(sequence), self._max_sequence_tokens))
        whole = -(-num_tokens // self._block_size)
        if sequence.width > 1 and self._policy != "paged":
            shared = sequence.num_prompt_tokens // self._block_size
            whole = shared + sequence.width * (whole - shared)
        return min(whole, self._num_blocks)

    def ended(self, sequence: Sequence) -> None:
        """Learn from a sequence that has ended what share of its max_tokens outputs use."""
        max_tokens = sequence.request.params.max_tokens
        if max_tokens:
            self._share += SHARE_WEIGHT * (sequence.num_output_tokens / max_tokens - self._share)

    def preempted(self) -> None:
        """Learn that too little was set aside."""
        self._share += SHARE_WEIGHT * (1 - self._share)

    def _num_tokens(self, sequence: Sequence) -> int:
        prompt, max_tokens = sequence.num_prompt_tokens, sequence.request.params.max_tokens
        match self._policy:
            case "declared" | "oracle":
                return prompt + max_tokens
            case "ratio":
                return prompt + round(self._share * max_tokens)
            case "max":
                return self._max_sequence_tokens
            case "pow2":
                return prompt + (1 << max(max_tokens - 1, 0).bit_length())
            case _:
                return sequence.num_tokens


def max_tokens_held(request: Request, config: SchedulerConfig) -> int:
    """Most tokens that a sequence of the request can hold when nothing else runs.

    Beams share the full blocks of the prompt only; choices may be preempted one by one, and so have the pool to themselves.
    """
    width = request.params.beam_width
    if not width:
        return config.max_sequence_tokens
    shared = len(request.prompt_token_ids) // config.block_size
    own = (config.num_blocks - shared) // width
    return min(config.max_model_len, (shared + own) * config.block_size)
