"""One way in which a Triton kernel is compiled, as plain data.

Each module of this package that holds kernels offers `specialisations() -> list[Specialisation]`: those that its launchers ask
for. `compile.py` builds them for every target without a GPU.
"""

from typing import Any, NamedTuple


class Specialisation(NamedTuple):
    """What the Triton compiler is given."""

    name: str
    """Unique in its module, without spaces: the kernel and what sets this one apart."""
    kernel: Any
    """A function decorated with `triton.jit`."""
    signature: dict[str, str]
    """Type of each argument that is no constexpr, as Triton writes it (`*bf16`, `*i64`, `i32`, `fp32`). Pointers are taken to
    be aligned to 16 bytes; an integer that is a multiple of 16 says so (`i32:16`)."""
    constexprs: dict[str, Any]
    """Value of each constexpr."""
    options: dict[str, Any] = {}  # noqa: RUF012 - never changed
    """`num_warps`, `num_stages`."""
    least_target: int = 0
    """Compute capability that it needs, 89 for 8.9."""
