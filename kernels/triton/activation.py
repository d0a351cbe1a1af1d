"""The gated activation in Triton; the twin is in kernels/layers.py. When it is used is decided in kernels/dispatch.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.specialisation import Specialisation

# Eight numbers a thread, one load of 16 bytes in 16 bits. Untuned: chosen without a GPU.
_BLOCK = 1024
_OPTIONS = {"num_warps": 4}


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """As `kernels.layers.silu_and_mul`, in one launch: `gate_up` `[T, 2 * I]` may be a slice of a wider tensor."""
    if gate_up.stride(-1) != 1:
        gate_up = gate_up.contiguous()
    num_rows, size = len(gate_up), gate_up.shape[1] // 2
    output = torch.empty(num_rows, size, dtype=gate_up.dtype, device=gate_up.device)
    grid = (num_rows, triton.cdiv(size, _BLOCK))
    _silu_and_mul[grid](gate_up, output, gate_up.stride(0), size, block=_BLOCK, **_OPTIONS)
    return output


def specialisations() -> list[Specialisation]:
    """In 16 and in 32 bits."""
    return [_specialisation(dtype) for dtype in ("bf16", "fp32")]


@triton.jit
def _silu_and_mul(gate_up_ptr, output_ptr, stride, size, block: tl.constexpr):
    # output = gate / (1 + exp(-gate)) * up in fp32. A program owns `block` columns of one row; the mask guards the row's end.
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    is_inside = column < size
    gate = tl.load(gate_up_ptr + row * stride + column, mask=is_inside, other=0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * stride + size + column, mask=is_inside, other=0).to(tl.float32)
    tl.store(output_ptr + row * size + column, gate / (1 + tl.exp(-gate)) * up, mask=is_inside)


def _specialisation(dtype: str) -> Specialisation:
    signature = {"gate_up_ptr": f"*{dtype}", "output_ptr": f"*{dtype}", "stride": "i32:16", "size": "i32:16"}
    return Specialisation(f"silu_and_mul_{dtype}", _silu_and_mul, signature, {"block": _BLOCK}, _OPTIONS)
