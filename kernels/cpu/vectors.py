"""Vectors of 16 numbers for numba: what its loops lack to keep a tile of a matrix product in registers.

Each function here becomes a few LLVM instructions in the kernel that calls it. LLVM cuts the vectors to the width of the
processor at hand: one register with AVX-512, two with AVX2, four on ARM. Addresses and byte offsets are plain integers; whoever
calls vouches for them.

`product` is the core of every kernel: `C[rows, 16 * panels] = A[rows, k] B[k, 16 * panels]`, its sums held in registers. Each
sum runs over k in ascending order, one fused multiply-add at a time, whatever the number of rows and panels: a row's result has
the same bits in any batch.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

WIDTH = 16
_F32, _I8, _I16, _I32, _I64 = ir.FloatType(), ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_VF, _VI = ir.VectorType(_F32, WIDTH), ir.VectorType(_I32, WIDTH)
_ROUND_BITS = 16  # bfloat16 is the upper half of a float32


class _Vector(types.Type):
    def __init__(self) -> None:
        super().__init__(name="float32x16")


vector = _Vector()
"""The numba type of 16 float32."""


@register_model(_Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, _VF)


def _operation(result: Any, *parameters: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make a numba function of these types from one that takes an LLVM builder and the arguments' values."""

    def decorate(emit: Callable[..., Any]) -> Any:
        def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            value = emit(builder, *args)
            return context.get_dummy_value() if result is types.void else value

        def typer(_context: Any, *_args: Any) -> Any:
            return result(*parameters), codegen

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        names = ["context", *(f"a{index}" for index in range(len(parameters)))]
        typer.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])  # type: ignore[attr-defined]
        typer.__name__ = typer.__qualname__ = emit.__name__
        return intrinsic(typer)

    return decorate


def _pointer(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _constant(kind: Any, value: float) -> Any:
    return ir.Constant(kind, [value] * WIDTH if isinstance(kind, ir.VectorType) else value)


def _call(builder: Any, name: str, kind: Any, *args: Any) -> Any:
    """A function of LLVM's over arguments that are all of one type."""
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kind, [arg.type for arg in args]), name)
    return builder.call(function, args)


def _splat(builder: Any, scalar: Any) -> Any:
    kind = ir.VectorType(scalar.type, WIDTH)
    empty = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(empty, scalar, ir.Constant(_I32, 0))
    return builder.shuffle_vector(first, empty, _constant(_VI, 0))


# Integers and single numbers


@_operation(types.int64, types.int64, types.int64)
def fetch_add(builder: Any, address: Any, amount: Any) -> Any:
    """Add to the int64 at an address that threads share, and return what was there."""
    return builder.atomic_rmw("add", _pointer(builder, address, _I64), amount, "monotonic")


@_operation(types.int64, types.int64, types.int64)
def arrive(builder: Any, address: Any, amount: Any) -> Any:
    """As `fetch_add`; what this thread wrote before is seen by threads that see the sum."""
    return builder.atomic_rmw("add", _pointer(builder, address, _I64), amount, "acq_rel")


@_operation(types.int64, types.int64)
def seen(builder: Any, address: Any) -> Any:
    """The int64 at an address that other threads change."""
    return builder.load_atomic(_pointer(builder, address, _I64), "acquire", 8)


@_operation(types.int64)
def give_way(builder: Any) -> Any:
    """Let another thread have this core, if one waits for it."""
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_I32, []), "sched_yield")
    return builder.sext(builder.call(function, []), _I64)


@_operation(types.int64, types.int64)
def call(builder: Any, address: Any) -> Any:
    """Call the C function `int f(void)` at an address."""
    return builder.sext(builder.call(builder.inttoptr(address, ir.FunctionType(_I32, []).as_pointer()), []), _I64)


@_operation(types.int64, types.int64, types.int64)
def word(builder: Any, address: Any, index: Any) -> Any:
    """The int64 `index` words behind an address."""
    return builder.load(_pointer(builder, builder.add(address, builder.shl(index, ir.Constant(_I64, 3))), _I64))


@_operation(types.int64, types.int64, types.int64)
def word32(builder: Any, address: Any, index: Any) -> Any:
    """The int32 `index` words of 4 bytes behind an address."""
    place = builder.add(address, builder.shl(index, ir.Constant(_I64, 2)))
    return builder.sext(builder.load(_pointer(builder, place, _I32)), _I64)


@_operation(types.float32, types.int64)
def get(builder: Any, address: Any) -> Any:
    """The float32 at an address."""
    return builder.load(_pointer(builder, address, _F32))


@_operation(types.void, types.int64, types.float32)
def put(builder: Any, address: Any, value: Any) -> Any:
    """Store a float32."""
    builder.store(value, _pointer(builder, address, _F32))


@_operation(types.void, types.int64, types.float32)
def put_bf16(builder: Any, address: Any, value: Any) -> Any:
    """Store a float32 rounded to bfloat16."""
    builder.store(_to_bf16(builder, value), _pointer(builder, address, _I16))


@_operation(types.float32, types.int64)
def as_float(builder: Any, bits: Any) -> Any:
    """The float32 whose bits are the lower half of an int64."""
    return builder.bitcast(builder.trunc(bits, _I32), _F32)


def _prefetch(builder: Any, address: Any) -> Any:
    """Ask for a cache line that will be read."""
    kind = ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    flags = [ir.Constant(_I32, flag) for flag in (0, 3, 1)]  # read, keep close, data
    builder.call(function, [_pointer(builder, address, _I8), *flags])


# Vectors


@_operation(vector, types.int64)
def load(builder: Any, address: Any) -> Any:
    """16 float32."""
    return builder.load(_pointer(builder, address, _VF), align=4)


@_operation(types.void, types.int64, vector)
def store(builder: Any, address: Any, value: Any) -> Any:
    """16 float32."""
    builder.store(value, _pointer(builder, address, _VF), align=4)


@_operation(types.void, types.int64, vector)
def store_bf16(builder: Any, address: Any, value: Any) -> Any:
    """16 float32 rounded to bfloat16."""
    builder.store(_to_bf16(builder, value), _pointer(builder, address, ir.VectorType(_I16, WIDTH)), align=2)


@_operation(types.void, types.int64, vector)
def store_i16(builder: Any, address: Any, value: Any) -> Any:
    """16 float32 rounded to int16, ties to even."""
    whole = _call(builder, "llvm.rint.v16f32", _VF, value)
    short = builder.trunc(builder.fptosi(whole, _VI), ir.VectorType(_I16, WIDTH))
    builder.store(short, _pointer(builder, address, short.type), align=2)


@_operation(vector, types.float32)
def splat(builder: Any, value: Any) -> Any:
    """The same number 16 times."""
    return _splat(builder, value)


@_operation(vector, vector, vector)
def add(builder: Any, a: Any, b: Any) -> Any:
    """`a + b`."""
    return builder.fadd(a, b)


@_operation(vector, vector, vector)
def sub(builder: Any, a: Any, b: Any) -> Any:
    """`a - b`."""
    return builder.fsub(a, b)


@_operation(vector, vector, vector)
def mul(builder: Any, a: Any, b: Any) -> Any:
    """`a * b`."""
    return builder.fmul(a, b)


@_operation(vector, vector, vector)
def div(builder: Any, a: Any, b: Any) -> Any:
    """`a / b`."""
    return builder.fdiv(a, b)


@_operation(vector, vector, vector, vector)
def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """`a * b + c`, rounded once."""
    return _call(builder, "llvm.fma.v16f32", _VF, a, b, c)


@_operation(vector, vector, vector)
def maximum(builder: Any, a: Any, b: Any) -> Any:
    """The larger of each pair; `b` where one is no number."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


@_operation(vector, vector, vector)
def maximum_or_nan(builder: Any, a: Any, b: Any) -> Any:
    """The larger of each pair; NaN where one is."""
    return _call(builder, "llvm.maximum.v16f32", _VF, a, b)


@_operation(vector, vector)
def absolute(builder: Any, a: Any) -> Any:
    """`|a|`."""
    return _call(builder, "llvm.fabs.v16f32", _VF, a)


@_operation(vector, vector, types.int64, types.int64, types.float32)
def keep(builder: Any, a: Any, first: Any, end: Any, other: Any) -> Any:
    """The elements of `a` in [first, end), and `other` in place of the rest."""
    places = ir.Constant(_VI, list(range(WIDTH)))
    low, high = (_splat(builder, builder.trunc(_clamp(builder, bound), _I32)) for bound in (first, end))
    inside = builder.and_(builder.icmp_signed(">=", places, low), builder.icmp_signed("<", places, high))
    return builder.select(inside, a, _splat(builder, other))


@_operation(types.float32, vector)
def largest(builder: Any, a: Any) -> Any:
    """The largest element; NaN if there is one."""
    return _halve(builder, a, lambda x, y: _call(builder, f"llvm.maximum.v{x.type.count}f32", x.type, x, y))


@_operation(types.float32, vector)
def total(builder: Any, a: Any) -> Any:
    """The sum of the elements, by halves."""
    return _halve(builder, a, builder.fadd)


@_operation(vector, vector)
def exp(builder: Any, a: Any) -> Any:
    """`e^a` within 2e-7 of itself; arguments beyond +-87 count as +-87."""
    bound = _constant(_VF, 87.0)
    above = builder.select(builder.fcmp_ordered("<", a, builder.fneg(bound)), builder.fneg(bound), a)  # NaN stays
    x = builder.select(builder.fcmp_ordered(">", above, bound), bound, above)
    whole = _call(builder, "llvm.rint.v16f32", _VF, builder.fmul(x, _constant(_VF, 1.4426950408889634)))
    # x - whole * ln 2, with ln 2 in two parts [Cody and Waite 1980], then Taylor to the 6th power on +-0.35
    rest = x
    for part in (-0.693145751953125, -1.428606765330187e-06):
        rest = _call(builder, "llvm.fma.v16f32", _VF, whole, _constant(_VF, part), rest)
    value = _constant(_VF, 1 / 720)
    for coefficient in (1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0):
        value = _call(builder, "llvm.fma.v16f32", _VF, value, rest, _constant(_VF, coefficient))
    exponent = builder.shl(builder.add(builder.fptosi(whole, _VI), _constant(_VI, 127)), _constant(_VI, 23))
    return builder.fmul(value, builder.bitcast(exponent, _VF))


def _clamp(builder: Any, bound: Any) -> Any:
    """Into [0, 16], so that it fits 32 bits."""
    low, high = ir.Constant(_I64, 0), ir.Constant(_I64, WIDTH)
    bound = builder.select(builder.icmp_signed("<", bound, low), low, bound)
    return builder.select(builder.icmp_signed(">", bound, high), high, bound)


def _halve(builder: Any, value: Any, combine: Callable[[Any, Any], Any]) -> Any:
    size = WIDTH
    while size > 1:
        size //= 2
        lower, upper = (
            builder.shuffle_vector(value, value, ir.Constant(ir.VectorType(_I32, size), list(range(start, start + size))))
            for start in (0, size)
        )
        value = combine(lower, upper)
    return builder.extract_element(value, ir.Constant(_I32, 0))


def _widen_bf16(builder: Any, address: Any) -> Any:
    short = builder.load(_pointer(builder, address, ir.VectorType(_I16, WIDTH)), align=2)
    return builder.bitcast(builder.shl(builder.zext(short, _VI), _constant(_VI, _ROUND_BITS)), _VF)


def _to_bf16(builder: Any, value: Any) -> Any:
    """Rounded to nearest, ties to even; what is not finite stays so."""
    is_vector = isinstance(value.type, ir.VectorType)
    wide, short = (_VI, ir.VectorType(_I16, WIDTH)) if is_vector else (_I32, _I16)
    bits = builder.bitcast(value, wide)
    odd = builder.and_(builder.lshr(bits, _constant(wide, _ROUND_BITS)), _constant(wide, 1))
    rounded = builder.add(builder.add(bits, _constant(wide, 0x7FFF)), odd)
    quiet = builder.or_(bits, _constant(wide, 0x400000))  # a NaN must not round to infinity
    kept = builder.select(builder.fcmp_unordered("uno", value, value), quiet, rounded)
    return builder.trunc(builder.lshr(kept, _constant(wide, _ROUND_BITS)), short)


# Products

FLOAT32, BFLOAT16, INT8 = 0, 1, 2
"""Kinds of B in `product`."""
K_STEP = 4
"""Steps of k that a loop of `product` makes at once."""
_MEMORY_BOUND_ROWS = 3


def product(rows: int, panels: int) -> Any:
    """Make the product of so many rows with so many panels of 16 columns: `C = A B (+ ADD)`.

    The function made takes `(kind, c, c_row, add, add_row, a, a_row, b, b_k, b_panel, k, a_scale, b_scale, ahead, ahead_1)`:
    addresses, and distances in bytes between rows, steps of k and panels. C, ADD and A are float32 with columns side by side;
    there is no ADD where its address is 0, and ADD may be C. B holds the 16 columns of each k side by side, in the kind that is
    named. Products of few rows wait for memory: they ask for what lies `ahead` bytes behind each part of B's even panels, and
    `ahead_1` bytes behind that of its odd ones.

    In `INT8` a step is a pair of k: A holds int16, B two int8 for each of the 16 columns, and k is the number of pairs.
    `C = (A B) * a_scale[row] * b_scale[column] (+ ADD)` with float32 scales; sums are exact while they fit 32 bits.
    """

    @_operation(types.void, *[types.int64] * 15)
    def multiply(builder: Any, kind: Any, *args: Any) -> None:
        c, c_row, plus, plus_row, a, a_row, b, b_k, b_panel, k, a_scale, b_scale, *ahead = args
        factors = _Factors(rows, panels, a, a_row, b, b_k, b_panel, ahead)
        after = builder.append_basic_block("product.sums")
        found = []
        blocks = {name: builder.append_basic_block(name) for name in ("float32", "bfloat16", "int8")}
        choice = builder.switch(kind, blocks["float32"])
        choice.add_case(ir.Constant(_I64, BFLOAT16), blocks["bfloat16"])
        choice.add_case(ir.Constant(_I64, INT8), blocks["int8"])
        for name, block in blocks.items():
            builder.position_at_end(block)
            sums = factors.sums(builder, k, name)
            if name == "int8":
                sums = _scaled(builder, sums, a_scale, b_scale, panels)
            found.append((sums, builder.block))
            builder.branch(after)
        builder.position_at_end(after)
        merged = []
        for index in range(rows * panels):
            phi = builder.phi(_VF)
            for sums, block in found:
                phi.add_incoming(sums[index], block)
            merged.append(phi)
        _write(builder, merged, (c, c_row), (plus, plus_row), panels)

    return multiply


@dataclass(frozen=True, slots=True)
class _Factors:
    """Where the factors of a product lie, as LLVM values."""

    rows: int
    panels: int
    a: Any
    a_row: Any
    b: Any
    b_k: Any
    b_panel: Any
    ahead: list[Any]

    def sums(self, builder: Any, k: Any, kind: str) -> list[Any]:
        """All sums over k: most of them `K_STEP` at a time, the rest one by one."""
        zero = ir.Constant(_I64, 0)
        if kind == "int8":  # LLVM adds whole numbers in an order of its own, for which several steps need too many registers
            return _loop(
                builder, zero, k, 1, [_constant(_VI, 0)] * (self.rows * self.panels), partial(self._steps, builder, kind, 1)
            )
        whole = builder.and_(k, ir.Constant(_I64, -K_STEP))
        values = [_constant(_VF, 0.0)] * (self.rows * self.panels)
        for start, end, step in ((zero, whole, K_STEP), (whole, k, 1)):
            values = _loop(builder, start, end, step, values, partial(self._steps, builder, kind, step))
        return values

    def _steps(self, builder: Any, kind: str, count: int, at: Any, sums: list[Any]) -> list[Any]:
        add_product = {"int8": _add_pairs}.get(kind, _add_product)
        for step in range(count):
            place = builder.add(at, ir.Constant(_I64, step))
            columns = builder.add(self.b, builder.mul(place, self.b_k))
            places = [_offset(builder, columns, self.b_panel, panel) for panel in range(self.panels)]
            if self.rows <= _MEMORY_BOUND_ROWS:
                for panel, address in enumerate(places):
                    _prefetch(builder, builder.add(address, self.ahead[panel % 2]))
            weights = [_weights(builder, address, kind) for address in places]
            for row in range(self.rows):
                start = builder.add(_offset(builder, self.a, self.a_row, row), builder.shl(place, ir.Constant(_I64, 2)))
                factor = _splat(builder, builder.load(_pointer(builder, start, _I32 if kind == "int8" else _F32), align=2))
                for panel, weight in enumerate(weights):
                    index = row * self.panels + panel
                    sums[index] = add_product(builder, factor, weight, sums[index])
        return sums


def _offset(builder: Any, address: Any, stride: Any, count: int) -> Any:
    return builder.add(address, builder.mul(stride, ir.Constant(_I64, count))) if count else address


def _weights(builder: Any, address: Any, kind: str) -> Any:
    if kind == "bfloat16":
        return _widen_bf16(builder, address)
    if kind == "int8":
        numbers = builder.load(_pointer(builder, address, ir.VectorType(_I8, 2 * WIDTH)), align=1)
        return builder.sext(numbers, ir.VectorType(_I16, 2 * WIDTH))
    return builder.load(_pointer(builder, address, _VF), align=4)


def _add_product(builder: Any, factor: Any, weights: Any, total: Any) -> Any:
    return _call(builder, "llvm.fma.v16f32", _VF, factor, weights, total)


def _add_pairs(builder: Any, factor: Any, weights: Any, total: Any) -> Any:
    """`[32]` int16 times `[32]` int16, neighbours added in int32: one instruction (pmaddwd), which LLVM recognises."""
    wide = ir.VectorType(_I32, 2 * WIDTH)
    pairs = builder.bitcast(factor, ir.VectorType(_I16, 2 * WIDTH))
    products = builder.mul(builder.sext(pairs, wide), builder.sext(weights, wide))
    even, odd = (
        builder.shuffle_vector(products, products, ir.Constant(_VI, list(range(start, 2 * WIDTH, 2)))) for start in (0, 1)
    )
    return builder.add(total, builder.add(even, odd))


def _scaled(builder: Any, sums: list[Any], a_scale: Any, b_scale: Any, panels: int) -> list[Any]:
    """Whole numbers times the scales of their row and their columns."""
    scaled = []
    for index, value in enumerate(sums):
        row, panel = divmod(index, panels)
        of_row = builder.load(_pointer(builder, builder.add(a_scale, ir.Constant(_I64, 4 * row)), _F32))
        of_columns = builder.load(_pointer(builder, builder.add(b_scale, ir.Constant(_I64, 4 * WIDTH * panel)), _VF), align=4)
        scaled.append(builder.fmul(builder.sitofp(value, _VF), builder.fmul(_splat(builder, of_row), of_columns)))
    return scaled


def _loop(
    builder: Any, start: Any, end: Any, step: int, values: list[Any], body: Callable[[Any, list[Any]], list[Any]]
) -> list[Any]:
    """`for at in range(start, end, step): values = body(at, values)`, with the values in registers."""
    entry, block, after = builder.block, builder.append_basic_block("loop"), builder.append_basic_block("looped")
    builder.cbranch(builder.icmp_signed("<", start, end), block, after)
    builder.position_at_end(block)
    at = builder.phi(_I64)
    current = [builder.phi(value.type) for value in values]
    new = body(at, list(current))
    following = builder.add(at, ir.Constant(_I64, step))
    for phi, first, then in ((at, start, following), *zip(current, values, new, strict=True)):
        phi.add_incoming(first, entry)
        phi.add_incoming(then, builder.block)
    last = builder.block
    builder.cbranch(builder.icmp_signed("<", following, end), block, after)
    builder.position_at_end(after)
    result = [builder.phi(value.type) for value in values]
    for phi, before, then in zip(result, values, new, strict=True):
        phi.add_incoming(before, entry)
        phi.add_incoming(then, last)
    return result


def _write(builder: Any, sums: list[Any], target: tuple[Any, Any], plus: tuple[Any, Any], panels: int) -> None:
    """Store `sums`, or `sums` plus what lies at `plus` where that is an address."""

    def places(start: Any, stride: Any) -> list[Any]:
        rows = [_offset(builder, start, stride, row) for row in range(len(sums) // panels)]
        columns = [ir.Constant(_I64, 4 * WIDTH * panel) for panel in range(panels)]
        return [_pointer(builder, builder.add(row, column), _VF) for row in rows for column in columns]

    with builder.if_else(builder.icmp_signed("==", plus[0], ir.Constant(_I64, 0))) as (alone, added):
        with alone:
            for value, place in zip(sums, places(*target), strict=True):
                builder.store(value, place, align=4)
        with added:
            for value, place, other in zip(sums, places(*target), places(*plus), strict=True):
                builder.store(builder.fadd(value, builder.load(other, align=4)), place, align=4)
