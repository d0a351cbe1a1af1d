"""Decoder layers of known models, replaced in place by fewer and larger operations.

    h -> norm -> q/k/v as one product -> rotate, write keys -> attend -> product + h
      -> norm -> gate/up as one product -> silu * up -> product + h

Relies on kernels/dispatch.py for the operations and on attention.py for the step that is running. transformers still runs the
model: it embeds, computes the angles, and calls each layer, whose `forward` is ours. Models whose layers compute anything else
are left as they are, as all are with `EngineConfig.kernels` `reference`; `attention.compare` holds both to the same logits.

Weights that are multiplied together lie in one piece of memory, of which the model's own become views. Kernels that pack them,
as those of a CPU, keep their own and the originals are let go; then activations are float32 whatever the weights are.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine import attention
from engine.geometry import layer_windows
from kernels.dispatch import LayerKernels
from kernels.layers import StackedLayer

MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Whose layers are the one above, with biases, windows, and norms of single heads where their modules say so."""
_DTYPES = {"cpu": ("auto", "float32", "bfloat16"), "cuda": ("auto", "float16", "bfloat16", "float32")}


def fits(config: Any, device: torch.device, dtype: str) -> bool:
    """Whether layers of a model of this configuration are replaced, with weights of this dtype (`EngineConfig.dtype`)."""
    text = config.get_text_config(decoder=True)
    is_plain = not getattr(config, "quantization_config", None)
    return is_plain and text.model_type in MODEL_TYPES and text.hidden_act == "silu" and dtype in _DTYPES[device.type]


def fuse(model: Any, kernels: LayerKernels, max_model_len: int) -> None:
    """Replace the layers, norms and head of a model that `fits`. Modules whose weights are packed lose them."""
    decoder = model.get_decoder()
    windows = layer_windows(model.config.get_text_config(decoder=True), max_model_len)
    fused = [_Layer(layer, window, kernels) for layer, window in zip(decoder.layers, windows, strict=True)]
    for module, layer in zip(decoder.layers, fused, strict=True):
        module.forward = layer
    if kernels.stack and not any(layer.has_head_norms for layer in fused):
        decoder.layers[0].forward = _Stack(fused, kernels.stack([layer.parts() for layer in fused]))
        for module in decoder.layers[1:]:
            module.forward = _passed
    norm, head, embedding = decoder.norm, model.get_output_embeddings(), model.get_input_embeddings()
    decoder.norm.forward = _Norm(norm, kernels)
    if kernels.packs_weights:
        embedding.forward = _Embedding(embedding)
        head.forward = _Rows(_product([head], kernels, keeps_weights=head.weight is embedding.weight))


class _Layer:
    """One decoder layer."""

    def __init__(self, layer: Any, window: int | None, kernels: LayerKernels) -> None:
        attend, mlp = layer.self_attn, layer.mlp
        self._kernels, self._window = kernels, window
        self._index, self._scale, self._head_dim = attend.layer_idx, attend.scaling, attend.head_dim
        self._before, self._between = _Norm(layer.input_layernorm, kernels), _Norm(layer.post_attention_layernorm, kernels)
        self._head_norms = [
            _Norm(norm, kernels) for norm in (getattr(attend, "q_norm", None), getattr(attend, "k_norm", None)) if norm
        ]
        self._num_kv_heads = len(attend.k_proj.weight) // self._head_dim
        self._qkv = _product([attend.q_proj, attend.k_proj, attend.v_proj], kernels)
        self._out = _product([attend.o_proj], kernels)
        self._gate_up = _product([mlp.gate_proj, mlp.up_proj], kernels)
        self._down = _product([mlp.down_proj], kernels)

    @property
    def has_head_norms(self) -> bool:
        return bool(self._head_norms)

    def parts(self) -> StackedLayer:
        """What the layer is made of."""
        return StackedLayer(
            before=self._before.weight,
            between=self._between.weight,
            eps=self._before.eps,
            qkv=self._qkv,
            out=self._out,
            gate_up=self._gate_up,
            down=self._down,
            scale=self._scale,
            window=self._window,
        )

    def __call__(self, hidden_states: Tensor, *, position_embeddings: tuple[Tensor, Tensor], **_: Any) -> Tensor:
        """`[1, T, H]` -> `[1, T, H]`."""
        hidden = hidden_states[0]
        qkv = self._qkv(self._before.rows(hidden))
        if self._head_norms:
            query, key = self._head_norms
            qkv = self._kernels.norm_heads(qkv, query.weight, key.weight, query.eps, self._num_kv_heads)
        hidden = self._out(self._attend(qkv, position_embeddings), residual=hidden)
        opened = self._kernels.silu_and_mul(self._gate_up(self._between.rows(hidden)))
        output: Tensor = self._down(opened, residual=hidden)
        return output.unsqueeze(0)

    def _attend(self, qkv: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        step = attention.current_step()
        layer, scales = step.kv_cache.layers[self._index], step.kv_cache.scales[self._index]
        query = self._kernels.rotate_and_write_kv(
            qkv, angles[0][0], angles[1][0], layer, step.batch.slot_mapping, step.plan, kv_scales=scales
        )
        attended = step.kernels.paged_attention(
            query,
            layer,
            step.batch.block_tables,
            step.batch.query_start,
            step.batch.context_lens,
            scale=self._scale,
            sliding_window=self._window,
            plan=step.plan,
            kv_scales=scales,
        )
        return attended.flatten(1)


class _Stack:
    """All decoder layers, run where the first of them was."""

    def __init__(self, fused: list[_Layer], stack: Any) -> None:
        self._layers, self._stack = fused, stack

    def __call__(self, hidden_states: Tensor, *, position_embeddings: tuple[Tensor, Tensor], **_: Any) -> Tensor:
        """`[1, T, H]` -> `[1, T, H]`."""
        step, (cos, sin) = attention.current_step(), position_embeddings
        if not self._stack.fits(step.kv_cache.layers[0], cos.shape[-1]):
            for layer in self._layers:
                hidden_states = layer(hidden_states, position_embeddings=position_embeddings)
            return hidden_states
        angles = cos[0].float().contiguous(), sin[0].float().contiguous()
        output: Tensor = self._stack(hidden_states[0], angles, step.kv_cache.layers, step.batch.slot_mapping, step.plan)
        return output.unsqueeze(0)


def _passed(hidden_states: Tensor, **_: Any) -> Tensor:
    """A layer that `_Stack` has computed."""
    return hidden_states


class _Norm:
    """A norm of rows."""

    def __init__(self, norm: Any, kernels: LayerKernels) -> None:
        self._kernel, self.eps = kernels.rms_norm, norm.variance_epsilon
        self.weight = norm.weight.float() if kernels.packs_weights else norm.weight

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """`[1, T, H]` -> `[1, T, H]`."""
        return self.rows(hidden_states[0]).unsqueeze(0)

    def rows(self, hidden: Tensor) -> Tensor:
        return self._kernel(hidden, self.weight, self.eps)[0]


class _Embedding:
    """Rows of the embedding in float32."""

    def __init__(self, embedding: nn.Embedding) -> None:
        self._weight = embedding.weight

    def __call__(self, input_ids: Tensor) -> Tensor:
        return F.embedding(input_ids, self._weight).float()


class _Rows:
    """A linear layer over `[1, T, K]`."""

    def __init__(self, product: Any) -> None:
        self._product = product

    def __call__(self, hidden_states: Tensor) -> Tensor:
        output: Tensor = self._product(hidden_states[0])
        return output.unsqueeze(0)


def _product(linears: list[nn.Linear], kernels: LayerKernels, *, keeps_weights: bool = False) -> Any:
    """One product for several linear layers of the same input, whose outputs lie side by side."""
    weight = _joined([linear.weight for linear in linears])
    biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
    assert len(biases) in (0, len(linears))
    product = kernels.linear(weight, _joined(biases) if biases else None)
    if kernels.packs_weights and not keeps_weights:
        for linear in linears:
            linear.weight = None  # type: ignore[assignment]
    return product


def _joined(parts: list[Tensor]) -> Tensor:
    """One tensor of all rows. The parts become views of it, so that the unfused layer reads the same memory."""
    if len(parts) == 1:
        return parts[0]
    whole = torch.cat([part.detach() for part in parts])
    for part, view in zip(parts, torch.split(whole, [len(part) for part in parts]), strict=True):
        part.data = view
    return whole
