"""How much memory admission sets aside before a sequence may start.

One policy so far, paged: a sequence starts when the blocks of everything it already knows are free, takes them as it computes,
and takes more on demand. Who is asked, and in which order, is decided in `scheduler`.
"""

from enum import Enum

from engine.block_pool import BlockPool


class Fit(Enum):
    """The three answers of admission."""

    NOW = "now"
    LATER = "later"
    NEVER = "never"
    """Not even with the whole pool."""


def fit(num_tokens: int, pool: BlockPool, watermark_blocks: int) -> Fit:
    """Whether a sequence that knows `num_tokens` tokens may start.

    It asks for the whole known length, new or resumed, although a first chunk may need less: a sequence that starts with less
    would soon be preempted again. `watermark_blocks` stay free for those that run, which would otherwise be preempted one step
    later to make up for it; pass 0 when nothing runs.
    """
    num_blocks = pool.blocks_for(num_tokens)
    if num_blocks > pool.num_blocks:
        return Fit.NEVER
    return Fit.NOW if num_blocks + watermark_blocks <= pool.num_free_blocks else Fit.LATER
