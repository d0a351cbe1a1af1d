"""The seam between transformers' models and our kernels: the attention they call, and the proof that they call it well.

A model loaded with `attn_implementation="slotmill"` hands every layer's query, key and value to `_attention`. What the step
looks like reaches it through a context variable, because some models drop extra keywords. `probe` runs a model once on a small
batch and refuses it with a reason when its answers differ from transformers' own. Which implementation computes is decided in
kernels/dispatch.py; loading is left to model.py.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from engine.batch import ModelInput, build
from engine.decision import ScheduledSequence
from engine.errors import ModelUnsupported
from engine.geometry import ModelGeometry, layer_windows
from engine.kv_cache import KVCache
from engine.request import Request
from engine.sequence import Sequence
from engine.staging import staging_for
from kernels.dispatch import AttentionKernels

ATTENTION_NAME = "slotmill"

# The probe: two sequences whose chunks and blocks interleave, the last step a decode.
_PROBE_BLOCK_SIZE = 16
_PROBE_TABLES = ([3, 1], [2])
_PROBE_STEPS = ((9, 5), (8, 4), (1, 1))
_SHORT_STEPS = ((2, 1), (1, 1))
"""For families that are known: what is proven is that their layers are the ones that were replaced."""
# Largest |ours - eager| / |eager| over all logits. SmolLM2-135M: 1e-6, 2e-3, 1e-2; a wrong window costs over 0.1.
_PROBE_TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
# Keywords that change the result and that the kernels know nothing of.
_UNKNOWN_TERMS = ("attention_mask", "position_bias", "block_indices", "indices", "sinks")

_Steps = tuple[tuple[int, int], ...]
"""New tokens of two sequences in each step."""
Observer = Callable[[int, Tensor, Tensor, Mapping[str, Any]], None]
"""Called before a layer is computed: layer, key, value, and what else the model passed."""


@dataclass(frozen=True, slots=True)
class _Step:
    """What attention needs to know of the step that is running."""

    batch: ModelInput
    kv_cache: KVCache
    kernels: AttentionKernels
    plan: Any
    observer: Observer | None


_step: ContextVar[_Step] = ContextVar("slotmill_step")


def current_step() -> _Step:
    """The step that is running, for layers that call the kernels themselves."""
    return _step.get()


def forward(
    model: Any,
    batch: ModelInput,
    kv_cache: KVCache,
    kernels: AttentionKernels,
    observer: Observer | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Run the model over a flattened batch: new keys and values go to their slots, the logits come back.

    Returns:
        `[R, vocab_size]` float32, the rows of `batch.logits_indices`; the head runs on these only. `out`, where given.
    """
    plan = kernels.plan(batch.block_tables, batch.query_start, batch.context_lens, batch.slot_mapping, batch.host)
    token = _step.set(_Step(batch, kv_cache, kernels, plan, observer))
    try:
        output = model(
            input_ids=batch.input_ids.unsqueeze(0),
            position_ids=batch.positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=batch.logits_indices,
        )
    finally:
        _step.reset(token)
    logits: Tensor = output.logits[0]
    return logits.float() if out is None else out.copy_(logits)


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention function of transformers: q, k, v `[1, heads, T, head_dim]` after RoPE -> `[1, T, heads, head_dim]`."""
    step = _step.get()
    layer: int = module.layer_idx
    if step.observer is not None:
        step.observer(layer, key, value, {"attention_mask": attention_mask, "sliding_window": sliding_window, **others})
    kv_cache_layer, kv_scales = step.kv_cache.layers[layer], step.kv_cache.scales[layer]
    new_key, new_value = key[0].transpose(0, 1), value[0].transpose(0, 1)
    step.kernels.write_kv(new_key, new_value, kv_cache_layer, step.batch.slot_mapping, step.plan, kv_scales=kv_scales)
    output = step.kernels.paged_attention(
        query[0].transpose(0, 1),
        kv_cache_layer,
        step.batch.block_tables,
        step.batch.query_start,
        step.batch.context_lens,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
        plan=step.plan,
        kv_scales=kv_scales,
    )
    return output.unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, _attention)


def probe(model: Any, geometry: ModelGeometry, kernels: AttentionKernels) -> None:
    """Prove on a few tokens that this model computes through our attention what it computes on its own.

    Runs a ragged batch in chunks over shuffled blocks of a cache full of NaN, and transformers' eager attention on the same
    weights. Takes a few forward passes of up to 18 tokens.

    Raises:
        ModelUnsupported: with the reason.
    """
    reason = _refusal(model) or _misbehaviour(model, geometry, kernels)
    if reason is not None:
        raise ModelUnsupported(f"{type(model).__name__}: {reason}")


def own_logits(model: Any, geometry: ModelGeometry) -> Tensor:
    """All logits of the same few tokens as transformers computes them alone, for `compare`."""
    with torch.inference_mode():
        return _run_eager(model, _probe_sequences(geometry, _SHORT_STEPS))


def compare(model: Any, geometry: ModelGeometry, kernels: AttentionKernels, expected: Tensor, *, tolerance: float) -> None:
    """Prove that a model whose layers were replaced still computes `own_logits`, in the way of `probe`.

    Raises:
        ModelUnsupported: with the difference.
    """
    with torch.inference_mode():
        sequences = _probe_sequences(geometry, _SHORT_STEPS)
        error = _error(_run_paged(model, geometry, kernels, sequences, _SHORT_STEPS), expected)
    if not error <= tolerance:
        raise ModelUnsupported(
            f"{type(model).__name__}: with fused layers its logits differ by {error:.1e} (at most {tolerance:.0e}); "
            "use kernels: reference"
        )


def tolerance(dtype: torch.dtype) -> float:
    """Largest difference, relative and over all logits, of two ways to compute a model in `dtype`."""
    return _PROBE_TOLERANCE.get(dtype, 1e-1)


def _refusal(model: Any) -> str | None:
    """What configuration and signature say against the model before it is run."""
    config = model.config
    text = config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder; only decoder-only models are served"
    for part in (config, text):
        if part._attn_implementation != ATTENTION_NAME:
            return f"it computes attention with its own code ({part._attn_implementation}) and cannot use a paged cache"
    if getattr(text, "num_kv_shared_layers", 0):
        return f"{text.num_kv_shared_layers} of its layers share the keys and values of others"
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        return "its forward has no logits_to_keep"
    return None


@dataclass(slots=True)
class _Watch:
    """Checks each call of the attention function, and remembers it."""

    geometry: ModelGeometry
    windows: dict[int, list[int | None]] = field(default_factory=dict)
    """Window of each call, by layer."""

    def __call__(self, layer: int, key: Tensor, value: Tensor, others: Mapping[str, Any]) -> None:
        expected = (1, self.geometry.num_kv_heads, key.shape[2], self.geometry.head_dim)
        for what, tensor in (("keys", key), ("values", value)):
            if tuple(tensor.shape) != expected:
                found = "x".join(str(size) for size in tensor.shape[1::2])
                raise ModelUnsupported(
                    f"layer {layer} has {what} of {found} (heads x size) where {expected[1]}x{expected[3]} is cached; "
                    "layers whose keys and values differ in size are not supported"
                )
        terms = [term for term in _UNKNOWN_TERMS if others.get(term) is not None]
        if others.get("is_causal") is False:
            terms.append("is_causal=False")
        if terms:
            raise ModelUnsupported(f"layer {layer} passes {', '.join(terms)} to attention, which is not supported")
        self.windows.setdefault(layer, []).append(others["sliding_window"])

    def refusal(self, config: Any) -> str | None:
        """What the calls of one forward pass say against the model."""
        layers = range(self.geometry.num_layers)
        kinds = getattr(config, "layer_types", None)
        strange = sorted(set(kinds or ()) - {"full_attention", "sliding_attention"})
        if strange:
            return f"it has layers of type {', '.join(strange)}; full and sliding attention are supported"
        called = [layer for layer in layers if len(self.windows.get(layer, ())) == 1]
        if len(called) != len(layers) or len(self.windows) != len(layers):
            return f"{len(called)} of its {len(layers)} layers call the attention function exactly once in a forward pass"
        for layer, window in enumerate(layer_windows(config, self.geometry.max_model_len)):
            (passed,) = self.windows[layer]
            if passed != window and min(passed or math.inf, window or math.inf) < self.geometry.max_model_len:
                return f"layer {layer} passes a sliding window of {passed} to attention where its configuration says {window}"
        return None


def _misbehaviour(model: Any, geometry: ModelGeometry, kernels: AttentionKernels) -> str | None:
    """What running the model says against it: a call it makes, a call it leaves out, an error, or logits that differ."""
    watch = _Watch(geometry)
    try:
        return _difference(model, geometry, kernels, watch)
    except ModelUnsupported as refusal:
        return str(refusal)
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
        return f"a small batch fails in it: {error!r:.300}"


def _difference(model: Any, geometry: ModelGeometry, kernels: AttentionKernels, watch: _Watch) -> str | None:
    """Why the model's logits through our attention are not its own, or None."""
    sequences = _probe_sequences(geometry, _PROBE_STEPS)
    with torch.inference_mode():
        ours = _run_paged(model, geometry, kernels, sequences, _PROBE_STEPS, watch)
        reason = watch.refusal(model.config.get_text_config(decoder=True))
        if reason is not None:
            return reason
        error = _error(ours, _run_eager(model, sequences))
    if not error <= tolerance(model.dtype):
        most = f"{error:.1e} (at most {tolerance(model.dtype):.0e})"
        return f"its logits differ from its eager attention by {most} in a batch of two sequences"
    return None


def _error(ours: Tensor, theirs: Tensor) -> float:
    return float(((ours - theirs).norm() / theirs.norm()).item())


def _probe_sequences(geometry: ModelGeometry, steps: _Steps) -> list[Sequence]:
    prompts = [probe_ids(row, sum(counts), geometry.vocab_size) for row, counts in enumerate(zip(*steps, strict=True))]
    return [
        Sequence(Request(request_id="probe", prompt_token_ids=prompt), (0, row, 0), frozenset())
        for row, prompt in enumerate(prompts)
    ]


def probe_ids(row: int, length: int, vocab_size: int) -> tuple[int, ...]:
    """A prompt to try a model on; another one for each `row`."""
    return tuple((7919 * (position + 31 * row + 1)) % vocab_size for position in range(length))


def _run_paged(
    model: Any,
    geometry: ModelGeometry,
    kernels: AttentionKernels,
    sequences: list[Sequence],
    steps: _Steps,
    watch: _Watch | None = None,
) -> Tensor:
    """All logits, sequence after sequence, computed in chunks; `watch` sees the first step."""
    num_blocks = sum(len(table) for table in _PROBE_TABLES)
    kv_cache = KVCache(geometry, num_blocks, _PROBE_BLOCK_SIZE, model.dtype, model.device)
    kv_cache.blocks.fill_(-1)  # NaN
    rows: list[list[Tensor]] = [[] for _ in sequences]
    for sequence, table in zip(sequences, _PROBE_TABLES, strict=True):
        sequence.block_table = table
    for counts in steps:
        items = [ScheduledSequence(sequence, count) for sequence, count in zip(sequences, counts, strict=True)]
        for sequence, count in zip(sequences, counts, strict=True):
            sequence.num_computed_tokens += count
        batch = build(items, _PROBE_BLOCK_SIZE, staging_for(model.device))
        batch = replace(batch, logits_indices=torch.arange(sum(counts), device=model.device))
        logits = forward(model, batch, kv_cache, kernels, watch if watch and not watch.windows else None)
        for own, part in zip(rows, torch.split(logits, list(counts)), strict=True):
            own.append(part)
    return torch.cat([part for own in rows for part in own])


def _run_eager(model: Any, sequences: list[Sequence]) -> Tensor:
    """The same logits by transformers alone, each sequence whole."""
    model.set_attn_implementation("eager")
    try:
        batches = [torch.tensor([sequence.token_ids], device=model.device) for sequence in sequences]
        return torch.cat([model(input_ids=ids, use_cache=False).logits[0].float() for ids in batches])
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
