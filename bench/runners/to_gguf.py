"""A GGUF file with the weights of another one in 16 or 32 bits, for llama.cpp, rounded as our own converter rounds them.

    python bench/runners/to_gguf.py SOURCE TARGET bfloat16|float16|float32

Every field and tensor name is the source's; matrices are dequantised and rounded, vectors stay in float32.
"""

import sys

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, LlamaFileType
from gguf.quants import dequantize, quantize

TYPES = {
    "bfloat16": (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
    "float16": (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
    "float32": (GGMLQuantizationType.F32, LlamaFileType.ALL_F32),
}
MADE_HERE = ("GGUF.version", "GGUF.tensor_count", "GGUF.kv_count", "general.architecture", "general.file_type")


def convert(source, target, dtype):
    """Write `target`; `dtype` is a key of `TYPES`."""
    kind, file_type = TYPES[dtype]
    reader = GGUFReader(source)
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name not in MADE_HERE:
            writer.add_key_value(name, field.contents(), field.types[0])
    writer.add_file_type(file_type)
    for tensor in reader.tensors:
        numbers = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if numbers.ndim == 1:
            writer.add_tensor(tensor.name, numbers)
            continue
        rounded = quantize(numbers, GGMLQuantizationType.BF16)  # as the model that the others load
        if kind != GGMLQuantizationType.BF16:
            rounded = quantize(dequantize(rounded, GGMLQuantizationType.BF16), kind)
        writer.add_tensor(tensor.name, rounded, raw_shape=None, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    convert(*sys.argv[1:])
