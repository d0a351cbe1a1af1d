"""The shape of a model, as far as the engine reckons with it. Read off a loaded model in `model.geometry`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelGeometry:
    """The numbers of a model that the engine reckons with."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    """Most positions the model can tell apart, prompt and output together."""
    eos_token_ids: tuple[int, ...]
    """Those of the generation config first, then those of the model's; may be empty."""
