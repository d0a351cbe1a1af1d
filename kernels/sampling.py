"""Choosing a token id at random: stateless uniform numbers and draws by inverse CDF, in plain torch.

Relies on nothing but torch. Who is greedy, what is banned and what becomes of a broken row is decided in engine/sampler.py.

Every row stands alone: its result depends on its own logits, parameters and uniform number, never on the rows beside it,
their order or how many there are.
"""

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_WIDEN = 16


def philox4x32(counter: Tensor, key: Tensor) -> Tensor:
    """Four random 32-bit words for each counter and key: Philox4x32-10, as `tl.philox` computes it.

    counter [4, n] and key [2, n] hold 32-bit words in int64; so does the result [4, n]. Source: Salmon et al., "Parallel
    random numbers: as easy as 1, 2, 3" (SC 2011).
    """
    multipliers, weyl = (torch.tensor(pair, device=counter.device).unsqueeze(1) for pair in (_MULTIPLIERS, _WEYL))
    even, odd = counter[0::2], counter[1::2]
    for _ in range(_ROUNDS):
        # The product of two words fills 64 bits: int64 wraps, and its halves are still the right bits.
        product = (even * multipliers).flip(0)
        even, odd = ((product >> 32) & _MASK) ^ odd ^ key, product & _MASK
        key = (key + weyl) & _MASK
    return torch.stack((even[0], odd[0], even[1], odd[1]))


def uniform(seed: Tensor, index: Tensor) -> Tensor:
    """One number in [0, 1) for each (seed, index), a multiple of 2^-53.

    seed [n] int64 is a 64-bit pattern and becomes the key, index [n] int64 the counter; result [n] float64. The 53 bits are the
    upper 27 of the first word and the upper 26 of the second.
    """
    zero = torch.zeros_like(index)
    words = philox4x32(
        torch.stack((index & _MASK, (index >> 32) & _MASK, zero, zero)), torch.stack((seed & _MASK, (seed >> 32) & _MASK))
    )
    return ((words[0] >> 5) * 2**26 + (words[1] >> 6)).double() * 2.0**-53


def draw(logits: Tensor, temperature: Tensor, uniform: Tensor) -> Tensor:
    """Ids [n] drawn from softmax(logits / temperature), tokens in the order of their ids.

    logits [n, vocab] float32, temperature [n] float32 above 0, uniform [n] float64 in [0, 1).
    """
    return _invert(_cumulative(logits, temperature), uniform)


def draw_truncated(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor, *, width: int | None = None
) -> Tensor:
    """Ids [n] drawn from the distribution cut to the `top_k` likeliest tokens, then to the nucleus of `top_p`.

    The nucleus is the smallest set of likeliest tokens whose share of what top-k left is at least `top_p`, and never empty. Of
    equally likely tokens the lower id ranks first, so that `top_k` 1 is greedy.

    logits [n, vocab] float32; temperature [n] float32 above 0; top_k [n] int64, 0 is off; top_p [n] float32, 1 is off; uniform
    [n] float64 in [0, 1). `width` is how many of the largest logits to rank first: a guess that costs time when it is wrong and
    never changes the result. Use one more than the largest `top_k`.
    """
    vocab = logits.shape[1]
    width = min(width or vocab, vocab)
    values, ids = _ranked(logits, width)
    cumulative, kept = _kept(logits, values, temperature, top_k, top_p)
    chosen = _invert(cumulative, uniform, kept)
    token_ids = ids.gather(1, chosen.unsqueeze(1)).squeeze(1)
    if width < vocab:
        # Decided when all of top-k is ranked, and the last kept value is above the end of the list: nothing beyond could tie.
        last_kept = values.gather(1, kept.unsqueeze(1) - 1).squeeze(1)
        undecided = ((last_kept <= values[:, -1]) | (top_k > width)).nonzero().squeeze(1)
        if undecided.numel():
            rows = (t[undecided] for t in (logits, temperature, top_k, top_p, uniform))
            token_ids[undecided] = draw_truncated(*rows, width=width * _WIDEN)
    return token_ids


def _kept(logits: Tensor, values: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """Running weights [n, width] of the ranked `values`, and how many of them [n] top-k and top-p keep."""
    width = values.shape[1]
    limit = torch.where(top_k > 0, top_k, logits.shape[1]).unsqueeze(1)
    weights = ((values - values[:, :1]) / temperature.unsqueeze(1)).exp_().double()
    is_ranked = torch.arange(width, device=values.device) < limit
    cumulative = weights.mul_(is_ranked).cumsum_(1)
    total = cumulative[:, -1].clone()
    whole = (top_k == 0).nonzero().squeeze(1)
    if whole.numel():
        total[whole] = _cumulative(logits[whole], temperature[whole])[:, -1]
    bound = torch.where(top_p < 1, top_p.double() * total, torch.inf).unsqueeze(1)
    before = torch.nn.functional.pad(cumulative[:, :-1], (1, 0))
    return cumulative, (is_ranked & (before < bound)).sum(1).clamp_(min=1)


def _ranked(logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The `width` largest logits and their ids, both [n, width]; largest first, equal ones by id."""
    values, ids = logits.topk(width, dim=1)
    ids, order = ids.sort(dim=1)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _cumulative(logits: Tensor, temperature: Tensor) -> Tensor:
    """Running sum [n, vocab] of exp((logits - max) / temperature), in float64 so that the tail can be reached."""
    weights = logits - logits.amax(1, keepdim=True)
    return weights.div_(temperature.unsqueeze(1)).exp_().double().cumsum_(1)


def _invert(cumulative: Tensor, uniform: Tensor, kept: Tensor | None = None) -> Tensor:
    """The first position whose running sum exceeds `uniform` times the sum of the first `kept` (all of them by default).

    It always carries weight: the running sum grows there. It always exists: a float64 times at most 1 - 2^-53 is below itself.
    """
    width = cumulative.shape[1]
    last = torch.full_like(uniform, width - 1, dtype=torch.int64) if kept is None else kept - 1
    total = cumulative.gather(1, last.unsqueeze(1))
    found = torch.searchsorted(cumulative, total * uniform.unsqueeze(1), right=True).squeeze(1)
    return found.clamp_(max=width - 1)  # a row of NaN finds nothing; its id must still be one
