"""From logits to token ids and log probabilities: changes of single logits, stateless uniform numbers, draws by inverse CDF.

Relies on nothing but torch. Who is greedy, what is changed and what becomes of a broken row is decided in engine/sampler.py.

Every row stands alone: its result depends on its own logits, parameters and uniform number, never on the rows beside it,
their order or how many there are.
"""

from functools import partial

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_WIDEN = 16
_BLOCK = 256


def philox4x32(counter: Tensor, key: Tensor) -> Tensor:
    """Four random 32-bit words for each counter and key: Philox4x32-10, as `tl.philox` computes it.

    counter [4, n] and key [2, n] hold 32-bit words in int64; so does the result [4, n]. Source: Salmon et al., "Parallel
    random numbers: as easy as 1, 2, 3" (SC 2011).
    """
    # Filled on the device: a copy of two numbers would wait for all that runs there.
    filled = partial(torch.full, (1, 1), dtype=torch.int64, device=counter.device)
    multipliers, weyl = (torch.cat([filled(fill_value=number) for number in pair]) for pair in (_MULTIPLIERS, _WEYL))
    even, odd = counter[0::2], counter[1::2]
    for _ in range(_ROUNDS):
        # The product of two words fills 64 bits: int64 wraps, and its halves are still the right bits.
        product = (even * multipliers).flip(0)
        even, odd = ((product >> 32) & _MASK) ^ odd ^ key, product & _MASK
        key = (key + weyl) & _MASK
    return torch.stack((even[0], odd[0], even[1], odd[1]))


def uniform(seed: Tensor, choice: Tensor, index: Tensor) -> Tensor:
    """One number in [0, 1) for each (seed, choice, index), a multiple of 2^-53.

    seed [n] int64 is a 64-bit pattern and becomes the key; index [n] int64 fills the first two words of the counter and the
    lower half of choice [n] int64 the third; result [n] float64. The 53 bits are the upper 27 of the first word and the upper
    26 of the second.
    """
    counter = torch.stack((index & _MASK, (index >> 32) & _MASK, choice & _MASK, torch.zeros_like(index)))
    words = philox4x32(counter, torch.stack((seed & _MASK, (seed >> 32) & _MASK)))
    return ((words[0] >> 5) * 2**26 + (words[1] >> 6)).double() * 2.0**-53


def largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest value of each row of `logits` [n, vocab] and its id, both [n]; the first of equal ones, NaN if there is one.

    On a CPU the maximum of blocks comes first, since the search for a position costs ten times that for a value: 64 rows of
    50,257 took 0.9 ms instead of 3.2 (one core of an AMD EPYC, torch 2.13, November 2026).
    """
    if logits.device.type != "cpu":
        return logits.max(dim=1)
    vocab = logits.shape[1]
    whole = vocab - vocab % _BLOCK
    blocks = torch.unflatten(logits[:, :whole], 1, (whole // _BLOCK, _BLOCK)).amax(2)
    if whole < vocab:
        blocks = torch.cat((blocks, logits[:, whole:].amax(1, keepdim=True)), dim=1)
    values, block = blocks.max(dim=1)
    ids = (block.unsqueeze(1) * _BLOCK + torch.arange(_BLOCK)).clamp_(max=vocab - 1)
    return values, ids.gather(1, logits.gather(1, ids).max(dim=1).indices.unsqueeze(1)).squeeze(1)


def allow_only(logits: Tensor, rows: Tensor, ids: Tensor) -> None:
    """Put -inf, in place, wherever a row that `rows` names has no entry.

    logits [n, vocab] float32, contiguous; rows and ids [m] int64; an id beyond the vocabulary allows nothing.
    """
    flat, is_known = _flat(logits, rows, ids)
    values = logits.view(-1).gather(0, flat).masked_fill_(~is_known, -torch.inf)
    logits += logits.new_zeros(len(logits), 1).index_fill_(0, rows, -torch.inf)
    logits.view(-1).scatter_reduce_(0, flat, values, "amax")


def allow_set_bits(logits: Tensor, rows: Tensor, mask: Tensor) -> None:
    """Put -inf, in place, where a row's bit is not set: id i is bit i % 32 of word i // 32.

    logits [n, vocab] float32; rows [m] int64, each once; mask [m, ceil(vocab / 32)] int32, little-endian.
    """
    bits = torch.arange(256, device=mask.device).unsqueeze(1) >> torch.arange(8, device=mask.device)
    floors = torch.where(bits.bitwise_and_(1) == 0, -torch.inf, 0.0)
    floor = floors.index_select(0, mask.view(torch.uint8).flatten().int()).view(len(mask), -1)
    logits.index_add_(0, rows, floor[:, : logits.shape[1]])


def add(logits: Tensor, rows: Tensor, ids: Tensor, values: Tensor) -> None:
    """Add `values` [m] float32 at (rows, ids) [m] int64, in place, where the id is in the vocabulary.

    logits [n, vocab] float32, contiguous.
    """
    flat, is_known = _flat(logits, rows, ids)
    logits.view(-1).scatter_add_(0, flat, values.masked_fill(~is_known, 0))


def penalize(logits: Tensor, rows: Tensor, ids: Tensor, factor: Tensor, minus: Tensor) -> None:
    """Divide positive and multiply other logits by `factor`, then take `minus` from them, in place.

    logits [n, vocab] float32, contiguous; rows and ids [m] int64, each pair once and in the vocabulary; factor [m] float32
    above 0, minus [m] float32. The factor as in Keskar et al., "CTRL" (2019).
    """
    flat, _ = _flat(logits, rows, ids)
    values = logits.view(-1).gather(0, flat)
    logits.view(-1).scatter_(0, flat, torch.where(values > 0, values / factor, values * factor) - minus)


def top(log_probs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of `log_probs` [n, vocab] float32, none above 0, and their ids int64; both [n, count or vocab].

    Largest first, equal ones by id, NaN last. The order is that of one integer, magnitude before id, so that equal values at
    the end of the list need no second look.
    """
    if not count:
        return log_probs[:, :0], torch.empty(len(log_probs), 0, dtype=torch.int64, device=log_probs.device)
    key = log_probs.abs().view(torch.int32).long()
    key <<= 32
    key += torch.arange(log_probs.shape[1], device=log_probs.device)
    ids = key.topk(min(count, log_probs.shape[1]), dim=1, largest=False).values & _MASK
    return log_probs.gather(1, ids), ids


def draw(logits: Tensor, temperature: Tensor, uniform: Tensor, *, min_p: Tensor | None = None) -> Tensor:
    """Ids [n] drawn from softmax(logits / temperature), tokens in the order of their ids.

    logits [n, vocab] float32, temperature [n] float32 above 0, uniform [n] float64 in [0, 1). With min_p [n] float32, only
    tokens whose probability is at least `min_p` times the largest can be drawn.
    """
    return _invert(_cumulative(logits, temperature, min_p), uniform)


def draw_truncated(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    uniform: Tensor,
    *,
    min_p: Tensor | None = None,
    width: int | None = None,
) -> Tensor:
    """Ids [n] drawn from the distribution cut as in `draw`, then to the `top_k` likeliest, then to the nucleus of `top_p`.

    The nucleus is the smallest set of likeliest tokens whose share of what min-p and top-k left is at least `top_p`, and never
    empty. Of equally likely tokens the lower id ranks first, so that `top_k` 1 is greedy.

    logits [n, vocab] float32; temperature [n] float32 above 0; top_k [n] int64, 0 is off; top_p [n] float32, 1 is off; uniform
    [n] float64 in [0, 1). `width` is how many of the largest logits to rank first: a guess that costs time when it is wrong and
    never changes the result. Use one more than the largest `top_k`.
    """
    vocab = logits.shape[1]
    width = min(width or vocab, vocab)
    values, ids = _ranked(logits, width)
    cumulative, kept = _kept(logits, values, temperature, top_k, top_p, min_p)
    chosen = _invert(cumulative, uniform, kept)
    token_ids = ids.gather(1, chosen.unsqueeze(1)).squeeze(1)
    if width < vocab:
        # Decided when all of top-k is ranked, and the last kept value is above the end of the list: nothing beyond could tie.
        last_kept = values.gather(1, kept.unsqueeze(1) - 1).squeeze(1)
        undecided = ((last_kept <= values[:, -1]) | (top_k > width)).nonzero().squeeze(1)
        if undecided.numel():
            rows = (t[undecided] for t in (logits, temperature, top_k, top_p, uniform))
            least = None if min_p is None else min_p[undecided]
            token_ids[undecided] = draw_truncated(*rows, min_p=least, width=width * _WIDEN)
    return token_ids


def _kept(
    logits: Tensor, values: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Running weights [n, width] of the ranked `values`, and how many of them [n] min-p, top-k and top-p keep."""
    width = values.shape[1]
    limit = torch.where(top_k > 0, top_k, logits.shape[1]).unsqueeze(1)
    weights = ((values - values[:, :1]) / temperature.unsqueeze(1)).exp_()
    is_ranked = torch.arange(width, device=values.device) < limit
    if min_p is not None:
        is_ranked &= weights >= min_p.unsqueeze(1)
    cumulative = weights.double().mul_(is_ranked).cumsum_(1)
    total = cumulative[:, -1].clone()
    whole = (top_k == 0).nonzero().squeeze(1)
    if whole.numel():
        total[whole] = _cumulative(logits[whole], temperature[whole], None if min_p is None else min_p[whole])[:, -1]
    bound = torch.where(top_p < 1, top_p.double() * total, torch.inf).unsqueeze(1)
    before = torch.nn.functional.pad(cumulative[:, :-1], (1, 0))
    return cumulative, (is_ranked & (before < bound)).sum(1).clamp_(min=1)


def _ranked(logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The `width` largest logits and their ids, both [n, width]; largest first, equal ones by id."""
    values, ids = logits.topk(width, dim=1)
    ids, order = ids.sort(dim=1)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _cumulative(logits: Tensor, temperature: Tensor, min_p: Tensor | None) -> Tensor:
    """Running sum [n, vocab] of exp((logits - max) / temperature), in float64 so that the tail can be reached."""
    weights = logits - logits.amax(1, keepdim=True)
    weights.div_(temperature.unsqueeze(1)).exp_()
    if min_p is not None:
        weights.mul_(torch.ge(weights, min_p.unsqueeze(1), out=torch.empty_like(weights)))
    return weights.double().cumsum_(1)


def _flat(logits: Tensor, rows: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of (rows, ids) in the flattened logits, and which ids are in the vocabulary; the others stand for the last."""
    vocab = logits.shape[1]
    return rows * vocab + ids.clamp(max=vocab - 1), ids < vocab


def _invert(cumulative: Tensor, uniform: Tensor, kept: Tensor | None = None) -> Tensor:
    """The first position whose running sum exceeds `uniform` times the sum of the first `kept` (all of them by default).

    It always carries weight: the running sum grows there. It always exists: a float64 times at most 1 - 2^-53 is below itself.
    """
    width = cumulative.shape[1]
    last = torch.full_like(uniform, width - 1, dtype=torch.int64) if kept is None else kept - 1
    total = cumulative.gather(1, last.unsqueeze(1))
    found = torch.searchsorted(cumulative, total * uniform.unsqueeze(1), right=True).squeeze(1)
    return found.clamp_(max=width - 1)  # a row of NaN finds nothing; its id must still be one
