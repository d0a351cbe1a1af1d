"""Tiny random models in Hugging Face layout, one per family or trait, small enough to build in a test."""

from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB_SIZE = 97
WINDOW = 12

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = _BASE | {"num_key_value_heads": 2}
_ALTERNATING = _GROUPED | {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": WINDOW,
    "head_dim": 16,
}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_GPT2 = {
    "vocab_size": VOCAB_SIZE,
    "n_embd": 64,
    "n_head": 4,
    "n_layer": 3,
    "n_positions": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}

SUPPORTED: dict[str, dict[str, Any]] = {
    "llama": _GROUPED,
    "qwen2": _GROUPED,
    "qwen3": _GROUPED | {"head_dim": 20},
    "qwen3_moe": _GROUPED | _EXPERTS,
    "mistral": _GROUPED | {"sliding_window": WINDOW},
    "mixtral": _GROUPED | _EXPERTS | {"sliding_window": None},
    "gemma2": _ALTERNATING | {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16},
    "gemma3_text": _ALTERNATING | {"query_pre_attn_scalar": 16},
    "phi": _BASE,
    "phi3": _GROUPED | {"sliding_window": WINDOW},
    "phi3+longrope": _GROUPED | {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 128},
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "gpt_neox": _BASE,
    "gptj": _GPT2 | {"rotary_dim": 8},
    "opt": _BASE | {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "gpt_oss": _ALTERNATING | _EXPERTS | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "olmo2": _GROUPED,
    "granite": _GROUPED | {"attention_multiplier": 0.3},
    "cohere": _GROUPED,
    "starcoder2": _GROUPED | {"sliding_window": WINDOW},
    "smollm3": _GROUPED,
    "stablelm": _GROUPED,
}

UNSUPPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "falcon": (_BASE | {"new_decoder_architecture": False}, "attention with code of its own"),
    "mamba": ({"vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_hidden_layers": 2}, "recurrent state"),
    "t5": (
        {"vocab_size": VOCAB_SIZE, "d_model": 64, "num_layers": 2, "d_kv": 16, "d_ff": 64, "num_heads": 4},
        "encoder-decoder",
    ),
    "deepseek_v3": (
        _BASE
        | {"q_lora_rank": None, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
        | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 3, "num_key_value_heads": 4},
        "v_head_dim",
    ),
    "phimoe": (
        _GROUPED | _EXPERTS | {"sliding_window": WINDOW},
        "passes a sliding window of None to attention where its configuration says 12",
    ),
    "llama4_text": (_GROUPED | _EXPERTS | {"head_dim": 16, "attention_chunk_size": 16}, "chunked_attention"),
    "lfm2": (_GROUPED | {"layer_types": ["conv", "full_attention", "conv"]}, "layers of type conv"),
    "gemma3n_text": (
        _ALTERNATING
        | {"num_kv_shared_layers": 2, "vocab_size_per_layer_input": VOCAB_SIZE, "hidden_size_per_layer_input": 8}
        | {"laurel_rank": 4, "altup_num_inputs": 2, "intermediate_size": [96] * 4, "activation_sparsity_pattern": None},
        "2 of its layers share the keys and values",
    ),
    "gemma4_text": (
        _BASE
        | {"num_hidden_layers": 6, "head_dim": 16, "global_head_dim": 32, "num_key_value_heads": 2}
        | {"vocab_size_per_layer_input": VOCAB_SIZE, "hidden_size_per_layer_input": 8},
        "its layers differ in shape",
    ),
    "xglm": (
        {"vocab_size": VOCAB_SIZE, "d_model": 64, "num_layers": 2, "attention_heads": 4, "ffn_dim": 96},
        "0 of its 2 layers call",
    ),
    "doge": (_GROUPED, "passes attention_mask"),
}


def save(variant: str, settings: dict[str, Any], directory: Path) -> Path:
    """Write a random model of the type before any `+` of `variant`, in fp32, and a placeholder where its tokenizer would be.

    The weights are larger than at the usual start of training, where every row attends alike and a wrong mask would not show.
    """
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(variant.partition("+")[0], **settings)
    auto = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")
    return directory
