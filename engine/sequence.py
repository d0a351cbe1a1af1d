"""One generation's changing state: the tokens it knows, the tokens it has computed, the blocks it holds.

Plain data. The scheduler and its parts (lineup, forks, draft, tables) write tokens, counts and blocks, the step loop what
belongs to it (matcher, prompt_logprobs); batch building, sampling and stopping read. What the user asked for stays in the
immutable `Request`.
"""

from copy import copy
from typing import TYPE_CHECKING

from engine.request import Request

if TYPE_CHECKING:
    from engine.beam import BeamSearch
    from engine.decision import ScheduledSequence
    from engine.grammar import Matcher
    from engine.messages import TokenLogprobs

Order = tuple[float, int, int]
"""(fair-share tag with the priority's handicap, arrival, choice): smallest first. Unique, so the order is total."""


class Sequence:
    """One choice of a request on its way through the engine. Compared and hashed by identity.

        token_ids  [ prompt | earlier attempt's output | output of this attempt )[ in flight )
                   [ computed: KV stored or being stored       | gap: known, not yet computed )
                   0                         num_computed_tokens                    num_tokens

    Invariants, kept by `Scheduler`:
    1. 0 <= num_computed_tokens < num_tokens whenever the sequence waits or may be scheduled: there is a gap to close.
    2. A waiting sequence holds no block; a running one holds just the blocks its computed tokens need.
    3. A waiting sequence has computed tokens only when they lie in host memory, in `host_blocks`.
    """

    __slots__ = (
        "beam_search",
        "block_hashes",
        "block_table",
        "choice",
        "decode",
        "host_blocks",
        "matcher",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_in_flight",
        "num_indexed_blocks",
        "num_preemptions",
        "num_prompt_tokens",
        "num_released_blocks",
        "num_reserved_blocks",
        "num_tokens_limit",
        "order",
        "owes_prompt_logprobs",
        "prompt_logprobs",
        "reads_tokens",
        "request",
        "shares_tail",
        "stop_token_ids",
        "token_ids",
        "width",
    )

    def __init__(self, request: Request, order: Order, eos_token_ids: frozenset[int], max_sequence_tokens: int = 2**31) -> None:
        params = request.params
        self.request = request
        self.choice = request.choice
        self.order = order
        self.width = max(params.n, params.beam_width)
        """Slots it takes: one for each fork to come, until it has forked."""
        self.token_ids: list[int] = [*request.prompt_token_ids, *request.output_token_ids]
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.num_tokens_limit = min(self.num_prompt_tokens + params.max_tokens, max_sequence_tokens)
        """It ends when it knows so many tokens."""
        self.num_computed_tokens = 0
        self.num_in_flight = 0
        """Tokens sampled in a step whose results have not been read: 1 at most, and only when running ahead."""
        self.num_cached_tokens = 0
        self.block_table: list[int] = []
        self.block_hashes: list[bytes] = []
        """Chain of hashes of its full blocks, as far as it was needed."""
        self.num_indexed_blocks = 0
        """Full blocks of its table that others can find."""
        self.num_released_blocks = 0
        """Blocks at the beginning of the table that have left the sliding window; their places hold the null block."""
        self.num_reserved_blocks = 0
        """Blocks set aside for it beside those in its table."""
        self.shares_tail = False
        """Its last block was shared with a fork: it is copied before it is written, unless nobody else holds it any more."""
        self.host_blocks: list[int] = []
        self.num_preemptions = 0
        self.stop_token_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_token_ids)
        self.matcher: Matcher | None = None
        """Where its grammar stands after the tokens it knows."""
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.owes_prompt_logprobs = params.prompt_logprobs is not None
        """They were asked for and not told yet."""
        self.beam_search: BeamSearch | None = None
        penalties = params.presence_penalty, params.frequency_penalty, params.repetition_penalty
        self.reads_tokens = penalties != (0.0, 0.0, 1.0) or params.grammar is not None or params.beam_width > 0
        """Its next token depends on what the last one was beside the model, so a step cannot be decided before that is read."""
        self.decode: ScheduledSequence | None = None
        """Its part of any decode step, made once."""

    def fork(self, choice: int) -> "Sequence":
        """A copy that has computed and holds the same; both copy the last block before they write to it."""
        child = copy(self)
        child.choice = choice
        child.order = (*self.order[:2], choice)
        child.token_ids = self.token_ids.copy()
        child.block_table = self.block_table.copy()
        child.block_hashes = self.block_hashes.copy()
        child.num_reserved_blocks = 0
        child.matcher = self.matcher and self.matcher.fork()
        child.decode = None
        child.owes_prompt_logprobs = self.owes_prompt_logprobs and self.beam_search is not None  # told by whichever beam ends
        self.shares_tail = child.shares_tail = True
        return child

    def restart(self) -> None:
        """Back to the prompt, for a beam search that lost its blocks."""
        assert self.beam_search is not None
        self.beam_search.restart()
        self.width = self.beam_search.width
        self.choice = self.request.choice
        self.order = (*self.order[:2], self.choice)
        del self.token_ids[self.num_prompt_tokens :]
        self.block_hashes.clear()
        self.num_computed_tokens = 0
        self.num_in_flight = 0
        self.num_released_blocks = 0
        self.num_preemptions += 1

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output, that of earlier attempts and what is in flight included."""
        return len(self.token_ids) + self.num_in_flight

    @property
    def num_output_tokens(self) -> int:
        """Known tokens that are not prompt."""
        return len(self.token_ids) + self.num_in_flight - self.num_prompt_tokens

    @property
    def gap(self) -> int:
        """Known tokens whose KV is not stored yet."""
        return len(self.token_ids) + self.num_in_flight - self.num_computed_tokens
