"""Numba loop of small-batch matmuls on CPUs: products of tiles of rows and weight rows, with all
sums of a tile in vector registers.

The code of a tile is built from vector operations of LLVM, because the vectorizer of a plain loop
may reorder its sums differently for each shape of a tile. Here every output is summed alike: lane l
of a vector adds the products of inputs l, l + lanes, l + 2 lanes ... in order, then the lanes are
added in a tree. An output therefore has the same bits whatever rows and outputs are computed beside
it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import carray, types  # type: ignore[attr-defined]  # carray is public, but not declared
from numba.core import cgutils, config
from numba.extending import intrinsic

from megalith.kernels.cpu_numba import (
    Array,
    Block,
    array_at,
    count,
    float_pointer,
    longs,
    part,
    thread_share,
    wide,
)


def _read_features() -> frozenset[str]:
    """Return the CPU features that numba compiles for: NUMBA_CPU_FEATURES, else those of the
    host."""
    settings = vars(config)  # numba's settings are not declared
    flags = settings["CPU_FEATURES"]
    if flags is None and settings["CPU_NAME"] is None:
        flags = llvmlite.binding.get_host_cpu_features().flatten()
    return frozenset(flag[1:] for flag in (flags or "").split(",") if flag.startswith("+"))


_FEATURES = _read_features()


def _has(*features: str) -> bool:
    return _FEATURES.issuperset(features)


LANES = 16 if _has("avx512f", "avx512bw", "avx512vl") else 8 if _has("avx2") else 4
"""fp32 lanes of a vector register."""

HAS_BF16_DOT = LANES == 16 and _has("avx512bf16")
"""Whether the CPU multiplies pairs of bf16 and adds them to fp32 in one instruction; it treats
subnormal numbers as 0."""

TILE_ROWS = 4
"""Rows of x in a tile."""

# Outputs of a tile, so that the sums and one vector of each row fit the registers: 16 of AVX2, 32
# of AVX-512 and arm.
TILE_OUTPUTS = 2 if LANES == 8 else 4
PAIR_OUTPUTS = 4 if LANES == 8 else 8
SINGLE_OUTPUTS = 8

Pointer = Any  # inside a loop: a pointer to elements
Address = Any  # inside a loop: an address and a stride in bytes, as a tuple
Builder = Any  # llvmlite and numba.core are not typed
Vector = Any

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_F32 = ir.FloatType()
_FP32_VECTOR = ir.VectorType(_F32, LANES)


class _BFloat(ir.Type):  # type: ignore[misc]  # llvmlite is not typed
    """LLVM's bfloat, which llvmlite does not declare."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash("bfloat")


class _Operand:
    """How the elements of x or w are read: vectors of `length` elements of `type`, from memory."""

    def __init__(self, element: Any, *, paired: bool) -> None:
        """`element`: numba's type of the elements; `paired`: pairs of bf16 stay as they are."""
        self.element = {types.float32: _F32, types.uint16: _I16, types.int8: _I8}[element]
        self.nbytes = {types.float32: 4, types.uint16: 2, types.int8: 1}[element]
        self.paired = paired
        self.length = 2 * LANES if paired else LANES

    def load(self, builder: Builder, address: Any, rest: Any = None) -> Vector:
        """Return the next vector: fp32, or pairs of bf16; `rest`: elements before the end, fewer
        than a vector, the others are 0."""
        vector = ir.VectorType(self.element, self.length)
        pointer = builder.inttoptr(address, vector.as_pointer())
        if rest is None:
            loaded = builder.load(pointer, align=self.nbytes)
        else:
            loaded = self._load_masked(builder, pointer, rest)
        if self.paired:
            return builder.bitcast(loaded, ir.VectorType(_BFloat(), self.length))
        if self.element is _I16:
            wide_bits = builder.zext(loaded, ir.VectorType(_I32, LANES))
            return builder.bitcast(
                builder.shl(wide_bits, ir.Constant(wide_bits.type, [16] * LANES)), _FP32_VECTOR
            )
        return builder.sitofp(loaded, _FP32_VECTOR) if self.element is _I8 else loaded

    def _load_masked(self, builder: Builder, pointer: Any, rest: Any) -> Vector:
        n, vector = self.length, pointer.type.pointee
        lanes = ir.Constant(ir.VectorType(_I32, n), list(range(n)))
        ends = _splat(builder, builder.trunc(rest, _I32), n)
        mask = builder.icmp_signed("<", lanes, ends)
        kind = "f32" if self.element is _F32 else f"i{8 * self.nbytes}"
        load = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(vector, [pointer.type, _I32, mask.type, vector]),
            f"llvm.masked.load.v{n}{kind}.p0",
        )
        return builder.call(load, [pointer, _I32(self.nbytes), mask, ir.Constant(vector, None)])


def _splat(builder: Builder, value: Any, lanes: int) -> Vector:
    vector = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
    first = builder.insert_element(vector, value, _I32(0))
    return builder.shuffle_vector(
        first, vector, ir.Constant(ir.VectorType(_I32, lanes), [0] * lanes)
    )


def _shuffle(builder: Builder, a: Vector, b: Vector, lanes: Sequence[int]) -> Vector:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, len(lanes)), list(lanes)))


def _multiply_add(builder: Builder, x: Vector, w: Vector, total: Vector) -> Vector:
    """Return total + x w, rounded once; of pairs of bf16 total + x0 w0 + x1 w1 in each lane."""
    name = f"llvm.fma.v{LANES}f32"
    operands = [x, w, total]
    if x.type.element != _F32:
        name, operands = "llvm.x86.avx512bf16.dpbf16ps.512", [total, x, w]
    signature = ir.FunctionType(_FP32_VECTOR, [operand.type for operand in operands])
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), operands)


def _lane_sums(builder: Builder, sums: Sequence[Vector]) -> tuple[list[Vector], list[int]]:
    """Add the lanes of each vector: lane l + lane l + n / 2 of its n, until one is left.

    Vectors are added in pairs that share a register. Returns registers, and for each vector its
    lane, counted through all registers. The order of additions does not depend on their number.
    """
    registers, held = list(sums), [[number] for number in range(len(sums))]
    length = LANES  # lanes that are still to be added, of each vector
    while length > 1:
        next_registers, next_held = [], []
        for k in range(0, len(registers), 2):
            other = min(k + 1, len(registers) - 1)  # the last of an odd number is its own partner
            halves = [_half_lanes(length, LANES, half=half) for half in (0, 1)]
            low, high = (
                _shuffle(builder, registers[k], registers[other], lanes) for lanes in halves
            )
            next_registers.append(builder.fadd(low, high))
            next_held.append(_merge_groups(held[k], held[other], length))
        registers, held, length = next_registers, next_held, length // 2
    places = {
        number: register * LANES + lane
        for register, numbers in reversed(list(enumerate(held)))
        for lane, number in reversed(list(enumerate(numbers)))
    }
    return registers, [places[number] for number in range(len(sums))]


QUARTET = 4
"""Lanes within which all vector units shuffle in one instruction."""


def _half_lanes(length: int, lanes: int, *, half: int) -> list[int]:
    """Return the lanes of two registers with the given half of each group of `length` lanes."""
    chosen = [lane for lane in range(2 * lanes) if (lane % length) // (length // 2) == half]
    if length > QUARTET:
        return chosen
    first, second = chosen[: lanes // 2], chosen[lanes // 2 :]
    each = QUARTET // 2  # lanes of each register in a quartet of the result
    return [
        lane
        for start in range(0, lanes // 2, each)
        for lane in (*first[start : start + each], *second[start : start + each])
    ]


def _merge_groups(first: Sequence[int], second: Sequence[int], length: int) -> list[int]:
    """Return the vector number of each group of `length` / 2 lanes after two registers are
    merged."""
    if length > QUARTET:
        return [*first, *second]
    each = QUARTET // length  # groups of a quartet in each register
    return [
        number
        for start in range(0, len(first), each)
        for number in (*first[start : start + each], *second[start : start + each])
    ]


class _Tile:
    """Emits the code of the products of `rows` rows of x and `outputs` weight rows."""

    def __init__(self, rows: int, outputs: int, element: Any) -> None:
        """`element`: numba's type of the weights' elements."""
        self.rows, self.outputs = rows, outputs
        paired = element == types.uint16 and HAS_BF16_DOT
        self.w = _Operand(element, paired=paired)
        self.x = _Operand(element if paired else types.float32, paired=paired)

    def emit(self, builder: Builder, args: Sequence[Any]) -> tuple[list[Vector], list[int]]:
        """Emit the products; args: (address, stride) of x and of w, the number of inputs, (address,
        stride, bytes per vector) of the next weights, number and count of the tiles that use these
        weights. Returns registers and the lanes of the outputs in them, row by row."""
        x, x_stride, w, w_stride, inputs, next_weights, next_stride, next_bytes, *turn = args
        rows = [builder.add(x, builder.mul(x_stride, _I64(r))) for r in range(self.rows)]
        weights = [builder.add(w, builder.mul(w_stride, _I64(o))) for o in range(self.outputs)]
        lines = self._prefetch_addresses(builder, weights, [next_weights, next_stride, *turn])
        zero = ir.Constant(_FP32_VECTOR, None)
        totals = [cgutils.alloca_once_value(builder, zero) for _ in range(self.rows * self.outputs)]

        length = self.w.length
        steps = builder.sdiv(inputs, _I64(length))
        with cgutils.for_range(builder, steps, intp=_I64) as loop:
            for line in lines:
                _emit_prefetch(builder, builder.add(line, builder.mul(loop.index, next_bytes)))
            self._step(builder, rows, weights, totals, loop.index)

        rest = builder.sub(inputs, builder.mul(steps, _I64(length)))
        with builder.if_then(builder.icmp_signed(">", rest, _I64(0))):
            self._step(builder, rows, weights, totals, steps, rest)
        return _lane_sums(builder, [builder.load(total) for total in totals])

    def _step(
        self,
        builder: Builder,
        rows: Sequence[Any],
        weights: Sequence[Any],
        totals: Sequence[Any],
        step: Any,
        rest: Any = None,
    ) -> None:
        """Add the products of one vector of inputs."""
        w_offset = builder.mul(step, _I64(self.w.length * self.w.nbytes))
        x_offset = builder.mul(step, _I64(self.x.length * self.x.nbytes))
        w = [self.w.load(builder, builder.add(address, w_offset), rest) for address in weights]
        for r, address in enumerate(rows):
            x = self.x.load(builder, builder.add(address, x_offset), rest)
            for o in range(self.outputs):
                total = totals[r * self.outputs + o]
                builder.store(_multiply_add(builder, x, w[o], builder.load(total)), total)

    def _prefetch_addresses(
        self, builder: Builder, weights: Sequence[Any], next_weights: Sequence[Any]
    ) -> list[Any]:
        """Return for each weight row the address from which to prefetch: its row of the next tile,
        in one of the `count` tiles of rows that use these weights, so that reading memory overlaps
        with all of them; else the row itself, which is in the cache."""
        start, stride, number, count_ = next_weights
        addresses = []
        for o, address in enumerate(weights):
            due = builder.icmp_signed("==", builder.srem(_I64(o), count_), number)
            row = builder.add(start, builder.mul(stride, _I64(o)))
            addresses.append(builder.select(due, row, address))
        return addresses


def _emit_prefetch(builder: Builder, address: Any) -> None:
    pointer = builder.inttoptr(address, _I8.as_pointer())
    signature = ir.FunctionType(ir.VoidType(), [pointer.type, _I32, _I32, _I32])
    function = cgutils.get_or_insert_function(builder.module, signature, "llvm.prefetch.p0")
    read, keep_in_all_caches, data_cache = _I32(0), _I32(3), _I32(1)
    builder.call(function, [pointer, read, keep_in_all_caches, data_cache])


def _emit_store(
    builder: Builder, sums: tuple[list[Vector], list[int]], tile: _Tile, args: Sequence[Any]
) -> None:
    """Write the outputs of a tile; args: address and row stride in bytes of y, whether y is bf16,
    and the address of the scales of the outputs (int8 weights)."""
    y, y_stride, is_bf16, scales = args
    registers, lanes = sums
    for r in range(tile.rows):
        places = lanes[r * tile.outputs : (r + 1) * tile.outputs]
        values = _gather_lanes(builder, registers, places)
        scaled = cgutils.alloca_once_value(builder, values)
        with builder.if_then(builder.icmp_signed("!=", scales, _I64(0))):
            factors = builder.inttoptr(scales, values.type.as_pointer())
            builder.store(builder.fmul(values, builder.load(factors, align=4)), scaled)
        values = builder.load(scaled)
        address = builder.add(y, builder.mul(y_stride, _I64(r)))
        with builder.if_else(builder.icmp_signed("!=", is_bf16, _I64(0))) as (then, otherwise):
            with then:
                rounded = _round_to_bf16(builder, values)
                pointer = builder.inttoptr(address, rounded.type.as_pointer())
                builder.store(rounded, pointer, align=2)
            with otherwise:
                pointer = builder.inttoptr(address, values.type.as_pointer())
                builder.store(values, pointer, align=4)


def _gather_lanes(builder: Builder, registers: Sequence[Vector], places: Sequence[int]) -> Vector:
    """Return a vector of the given lanes, counted through the registers."""
    result = ir.Constant(ir.VectorType(_F32, len(places)), ir.Undefined)
    for k, place in enumerate(places):
        value = builder.extract_element(registers[place // LANES], _I32(place % LANES))
        result = builder.insert_element(result, value, _I32(k))
    return result


def _round_to_bf16(builder: Builder, values: Vector) -> Vector:
    """Round fp32 to bf16, to nearest, ties to even, as 16-bit integers."""
    lanes = values.type.count
    integers = ir.VectorType(_I32, lanes)

    def constant(value: int) -> Any:
        return ir.Constant(integers, [value] * lanes)

    bits = builder.bitcast(values, integers)
    odd = builder.and_(builder.lshr(bits, constant(16)), constant(1))
    rounded = builder.add(builder.add(bits, constant(0x7FFF)), odd)
    quiet = builder.or_(bits, constant(0x400000))  # a NaN must not be rounded up to infinity
    chosen = builder.select(builder.fcmp_unordered("uno", values, values), quiet, rounded)
    return builder.trunc(builder.lshr(chosen, constant(16)), ir.VectorType(_I16, lanes))


def _define_tile(rows: int, outputs: int) -> Callable[..., None]:
    """Return a function for loops that computes a tile.

    Arguments, all integers but the first, all strides in bytes: a pointer of the type of the
    weights' elements; (address, stride) of x; (address, stride) of w; the number of inputs;
    (address, stride, bytes per vector) of the next weights, to prefetch them; number and count of
    the tiles that use these weights; (address, stride, is bf16) of y; the address of the outputs'
    scales, or 0.
    """

    def tile(  # numba's protocol: a signature, and a code generator
        typing: Any,
        elements: Any,
        x: Any,
        w: Any,
        inputs: Any,
        next_weights: Any,
        turn: Any,
        y: Any,
        scales: Any,
    ) -> Any:
        def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            code = _Tile(rows, outputs, elements.dtype)
            flat = [
                part
                for value in values[1:]
                for part in (
                    cgutils.unpack_tuple(builder, value)
                    if isinstance(value.type, ir.ArrayType)
                    else [value]
                )
            ]
            _emit_store(builder, code.emit(builder, flat[:10]), code, flat[10:])
            return context.get_dummy_value()

        signature = types.void(
            elements,
            *(types.UniTuple(types.int64, 2),) * 2,
            types.int64,
            types.UniTuple(types.int64, 3),
            types.UniTuple(types.int64, 2),
            types.UniTuple(types.int64, 3),
            types.int64,
        )
        return signature, emit

    result: Callable[..., None] = intrinsic(tile)
    return result


_tile_1_wide = _define_tile(1, SINGLE_OUTPUTS)
_tile_2_wide = _define_tile(2, PAIR_OUTPUTS)
_tile_1 = _define_tile(1, TILE_OUTPUTS)
_tile_2 = _define_tile(2, TILE_OUTPUTS)
_tile_3 = _define_tile(3, TILE_OUTPUTS)
_tile_4 = _define_tile(4, TILE_OUTPUTS)
_tile_single = _define_tile(1, 1)


@part
def multiply_rows(
    elements: Pointer,
    x: Address,
    w: Address,
    inputs: int,
    next_weights: Address,
    rows: int,
    y: Address,
    scales: int,
) -> None:
    """Compute TILE_OUTPUTS outputs of all rows, in tiles of up to 4 rows."""
    full, rest, n = rows // 4, rows % 4, (rows + 3) // 4
    for k in range(full):
        x_tile, y_tile = (x[0] + 4 * k * x[1], x[1]), (y[0] + 4 * k * y[1], y[1], y[2])
        _tile_4(elements, x_tile, w, inputs, next_weights, (k, n), y_tile, scales)
    x_tile, y_tile = (x[0] + 4 * full * x[1], x[1]), (y[0] + 4 * full * y[1], y[1], y[2])
    if rest == 1:
        _tile_1(elements, x_tile, w, inputs, next_weights, (full, n), y_tile, scales)
    elif rest == 2:
        _tile_2(elements, x_tile, w, inputs, next_weights, (full, n), y_tile, scales)
    elif rest == 3:
        _tile_3(elements, x_tile, w, inputs, next_weights, (full, n), y_tile, scales)


@part
def widen_rows(block: Block, w: Address, inputs: int, out: Array) -> None:
    """Convert TILE_OUTPUTS weight rows to fp32: out [TILE_OUTPUTS, inputs]."""
    for k in range(TILE_OUTPUTS):
        source, row = array_at(w[0] + k * w[1], block, (inputs,)), out[k]
        for j in range(inputs):
            row[j] = wide(source[j])


def small_batch_matmul(block: Block) -> None:
    """experts, outputs, inputs, bytes per weight, widens, y is bf16, x row stride, w row stride,
    bounds int64 [experts + 1], x [rows, inputs], w [experts outputs, inputs], scales fp32 [experts
    outputs] or 0, scratch fp32 [threads, TILE_OUTPUTS, inputs] if widens -> y [rows, outputs].

    Rows bounds[k] to bounds[k + 1] of y are the same rows of x times w[k].T, times the scales.
    Strides in bytes. x is fp32, or bf16 if the weights are bf16 and the CPU multiplies them.
    `widens`: weights that are used by several tiles of rows are converted to fp32 once.
    """
    experts, o, i, nbytes = count(block, 0), count(block, 1), count(block, 2), count(block, 3)
    widens, is_bf16 = count(block, 4), count(block, 5)
    x_stride, w_stride = count(block, 6), count(block, 7)
    bounds, scales = longs(block, 8, (experts + 1,)), count(block, 11)
    thread, threads = thread_share()
    scratch_rows = count(block, 12) + 4 * thread * TILE_OUTPUTS * i
    floats = float_pointer(scratch_rows)
    scratch = carray(floats, (TILE_OUTPUTS, i))
    vector, y_stride = 64 if nbytes == 2 and HAS_BF16_DOT else LANES * nbytes, o * 4
    if is_bf16:
        y_stride = o * 2
    for expert in range(experts):
        start, rows = bounds[expert], bounds[expert + 1] - bounds[expert]
        x = count(block, 9) + start * x_stride, x_stride
        w = count(block, 10) + expert * o * w_stride
        y = count(block, 13) + start * y_stride
        unit: Any = np.int64(TILE_OUTPUTS)
        if rows == 1:
            unit = np.int64(SINGLE_OUTPUTS)
        elif rows == 2:
            unit = np.int64(PAIR_OUTPUTS)
        num_units = o // unit if rows > 0 else 0
        for number in range(num_units * thread // threads, num_units * (thread + 1) // threads):
            k = number * unit
            weights, out = (w + k * w_stride, w_stride), (y + k * y_stride // o, y_stride, is_bf16)
            next_weights = weights[0] + unit * w_stride, w_stride, vector
            factors = scales + 4 * (expert * o + k) if scales != 0 else 0
            if rows == 1:
                _tile_1_wide(block, x, weights, i, next_weights, (0, 1), out, factors)
            elif rows == 2:
                _tile_2_wide(block, x, weights, i, next_weights, (0, 1), out, factors)
            elif widens and rows > TILE_ROWS:
                widen_rows(block, weights, i, scratch)
                multiply_rows(floats, x, (scratch_rows, 4 * i), i, next_weights, rows, out, factors)
            else:
                multiply_rows(block, x, weights, i, next_weights, rows, out, factors)
        if rows > 0 and thread == threads - 1:
            for k in range(num_units * unit, o):
                weights = w + k * w_stride, w_stride
                factors = scales + 4 * (expert * o + k) if scales != 0 else 0
                for r in range(rows):
                    row = x[0] + r * x_stride, x_stride
                    out = y + r * y_stride + k * y_stride // o, y_stride, is_bf16
                    next_weights = weights[0] + w_stride, w_stride, vector
                    _tile_single(block, row, weights, i, next_weights, (r, rows), out, factors)
