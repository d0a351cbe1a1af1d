"""A GGUF file becomes a directory in Hugging Face layout.

Relies on transformers for reading weights, configuration and vocabulary. Leaves to engine/model_cache.py where the directory
lies, that it is made once, and that a half-made one is never used.
"""

import contextlib
import io
import json
import mmap
import struct
from pathlib import Path
from typing import Any

from engine.errors import ModelUnsupported, one_line

MAGIC = b"GGUF"
CONVERSION = b"1"
"""Part of the name of every converted directory: raise it when `convert` writes something else."""
# Vocabularies whose numbers llama.cpp (llama-vocab.cpp) splits into single digits before GPT-2's own pattern. transformers 5.24
# leaves that step out, so numbers would reach the model in pieces it was never trained on.
_SINGLE_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})


def convert(source: Path, directory: Path) -> None:
    """Write config.json, safetensors, tokenizer.json and the chat template of the GGUF file `source` into `directory`.

    Weights are dequantised in float32 and rounded to bfloat16 once, here. Raises `ModelUnsupported` with the reason when
    transformers cannot read the file.
    """
    model, tokenizer = _read(source)
    if model.config.eos_token_id is None:
        model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    if metadata_string(source, "tokenizer.ggml.pre") in _SINGLE_DIGITS:
        _split_digits(tokenizer)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    _drop_keys(directory / "config.json", "quantization_config", "_name_or_path", "_model_name_or_path")
    _drop_keys(directory / "generation_config.json", "_from_model_config")
    _drop_keys(directory / "tokenizer_config.json", "is_local", "local_files_only", "name_or_path")


def metadata_string(source: Path, key: str) -> str | None:
    """A string of the file's metadata. The `gguf` library would parse the whole vocabulary in Python first: seconds."""
    name = key.encode()
    needle = struct.pack("<Q", len(name)) + name + struct.pack("<I", 8)  # 8 marks a string
    with source.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        start = data.find(needle)
        if start < 0:
            return None
        start += len(needle)
        (length,) = struct.unpack_from("<Q", data, start)
        return data[start + 8 : start + 8 + length].decode()


def _read(source: Path) -> tuple[Any, Any]:
    """The model, dense in bfloat16, and its tokenizer, as transformers reads them."""
    import torch
    import transformers

    options: dict[str, Any] = {"gguf_file": source.name, "local_files_only": True}
    dense = {}
    if hasattr(transformers, "GgufConfig"):  # newer versions keep weights packed, and cannot save them, unless told otherwise
        dense["quantization_config"] = transformers.GgufConfig(dequantize=True)
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # the reader's progress bar has no switch
            model = transformers.AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.bfloat16, **options, **dense)
            tokenizer = transformers.AutoTokenizer.from_pretrained(source.parent, **options)
    except Exception as error:  # of every kind, where the file is malformed
        raise ModelUnsupported(f"model: transformers cannot read {source}: {one_line(error)}") from error
    return model, tokenizer


def _split_digits(tokenizer: Any) -> None:
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )


def _drop_keys(path: Path, *keys: str) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in content.items() if key not in keys}, indent=2) + "\n")
