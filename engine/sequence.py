"""One generation's changing state: the tokens it knows, the tokens it has computed, the blocks it holds.

Plain data. The scheduler is the only writer; batch building, sampling and stopping read. What the user asked for stays in the
immutable `Request`.
"""

from engine.request import Request


class Sequence:
    """A request on its way through the engine. Compared and hashed by identity.

        token_ids  [ prompt | earlier attempt's output | output of this attempt )
                   [ computed: KV stored       | gap: known, not yet computed   )
                   0            num_computed_tokens                    num_tokens

    Invariants, kept by `Scheduler`:
    1. 0 <= num_computed_tokens < num_tokens whenever the sequence waits or may be scheduled: there is a gap to close.
    2. A waiting sequence has computed nothing and holds no block; a running one holds just the blocks its computed tokens need.
    """

    __slots__ = (
        "arrival",
        "block_table",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "order",
        "request",
        "stop_token_ids",
        "token_ids",
    )

    def __init__(self, request: Request, arrival: int, eos_token_ids: frozenset[int]) -> None:
        self.request = request
        self.arrival = arrival
        self.order: tuple[int, int] = (request.priority, arrival)
        """Who comes first, smallest first. Arrivals are unique, so the order is total."""
        self.token_ids: list[int] = [*request.prompt_token_ids, *request.output_token_ids]
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.block_table: list[int] = []
        self.num_preemptions = 0
        eos = frozenset[int]() if request.params.ignore_eos else eos_token_ids
        self.stop_token_ids: frozenset[int] = eos.union(request.params.stop_token_ids)

    @property
    def priority(self) -> int:
        """Lower runs first."""
        return self.request.priority

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output, that of earlier attempts included."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Known tokens that are not prompt."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def gap(self) -> int:
        """Known tokens whose KV is not stored yet."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_prefilling(self) -> bool:
        """Whether the next step is a prefill: prompt is left, or more than one token (after a preemption) is to be computed."""
        return self.num_computed_tokens < self.num_prompt_tokens or len(self.token_ids) - self.num_computed_tokens > 1
