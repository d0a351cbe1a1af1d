"""The shape of a model, as far as the engine reckons with it. Read off a loaded model in `model.geometry`."""

from dataclasses import dataclass
from typing import Any


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
    sliding_window: int | None = None
    """A key is seen by a query less than this many positions after it, in every layer; None where a layer sees all keys."""


def layer_windows(config: Any, max_model_len: int) -> tuple[int | None, ...]:
    """The sliding window of each layer of a text model's configuration; None where it cannot hide a key.

    transformers names the kind of each layer in `layer_types`; where it names none, a `sliding_window` holds for all of them.
    """
    size: int | None = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    if size is None or size >= max_model_len:
        return (None,) * len(kinds)
    return tuple(size if kind == "sliding_attention" else None for kind in kinds)
