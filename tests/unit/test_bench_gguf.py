"""The GGUF file that llama.cpp is given has the weights that the others load."""

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import dequantize, quantize

from bench.runners.to_gguf import TYPES, convert


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A file with a quantised matrix, a vector and fields of several kinds."""
    writer = GGUFWriter(tmp_path / "source.gguf", "llama")
    writer.add_block_count(2)
    writer.add_token_list(["a", "b"])
    writer.add_token_scores([0.5, 1.5])
    matrix = np.random.default_rng(0).standard_normal((4, 64), dtype=np.float32)
    writer.add_tensor("m", quantize(matrix, GGMLQuantizationType.Q4_1), raw_dtype=GGMLQuantizationType.Q4_1)
    writer.add_tensor("v", np.array([0.1, 0.2], dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "source.gguf"


def tensors(path: Path) -> dict[str, tuple[GGMLQuantizationType, np.ndarray]]:
    found = GGUFReader(path).tensors
    return {tensor.name: (tensor.tensor_type, dequantize(tensor.data, tensor.tensor_type)) for tensor in found}


@pytest.mark.parametrize("dtype", TYPES)
def test_matrices_are_rounded_to_bfloat16_in_whatever_they_are_stored(source: Path, dtype: str) -> None:
    convert(source, source.with_name("target.gguf"), dtype)

    kind, matrix = tensors(source.with_name("target.gguf"))["m"]

    exact = tensors(source)["m"][1]
    assert kind == TYPES[dtype][0]
    assert matrix.shape == (4, 64)
    rounded = dequantize(quantize(exact, GGMLQuantizationType.BF16), GGMLQuantizationType.BF16)
    np.testing.assert_array_equal(matrix, rounded)


def test_vectors_stay_in_float32(source: Path) -> None:
    convert(source, source.with_name("target.gguf"), "bfloat16")
    kind, vector = tensors(source.with_name("target.gguf"))["v"]
    assert kind == GGMLQuantizationType.F32
    np.testing.assert_array_equal(vector, np.array([0.1, 0.2], dtype=np.float32))


def test_every_field_is_kept(source: Path) -> None:
    convert(source, source.with_name("target.gguf"), "float16")

    ours, theirs = (GGUFReader(path).fields for path in (source.with_name("target.gguf"), source))

    changed = {"GGUF.kv_count", "general.file_type"}
    assert {name: field.contents() for name, field in ours.items() if name not in changed} == {
        name: field.contents() for name, field in theirs.items() if name not in changed
    }
