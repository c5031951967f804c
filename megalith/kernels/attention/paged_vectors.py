"""Vector code of the numba loops of paged attention: dot products, weighted sums of values, and
loads in fp32, bf16, int8 and fp8.

It is emitted as LLVM vectors, because a compiler that vectorizes a sum chooses its order.
"""

from collections.abc import Callable
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

SEGMENT = 128
"""Tokens per segment, the unit of partial results."""

LANES = 16
"""Partial sums of a dot product; one AVX-512 vector, two AVX2 vectors."""

GROUP = 4
"""Rows of a tile that are multiplied with a key or value while it is in a register."""

PAIR = 2
"""The same, where fewer than `GROUP` remain."""

_HAS_32_REGISTERS = bool(llvmlite.binding.get_host_cpu_features().get("avx512f"))
"""Whether the processor has 32 vector registers, enough for the sums of `GROUP` rows."""

_NBYTES = {types.float32: 4, types.uint16: 2, types.int8: 1, types.uint8: 1}
"""Bytes of the elements of keys and values: fp32, bf16, int8, fp8."""

_FLOAT, _INT64 = ir.FloatType(), ir.IntType(64)
_VECTOR = ir.VectorType(_FLOAT, LANES)
_MASK = ir.VectorType(ir.IntType(1), LANES)


def _constant_lanes(numbers: list[int]) -> ir.Constant:
    return ir.Constant(ir.VectorType(ir.IntType(32), len(numbers)), numbers)


def _multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Emit a * b + c, fused where the processor has such an instruction."""
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(_VECTOR, [_VECTOR] * 3), f"llvm.fmuladd.v{LANES}f32"
    )
    return builder.call(function, [a, b, c])


def _tail_mask(builder: Any, width: Any) -> Any:
    """Emit the mask of the first `width` lanes."""
    lanes = ir.Constant(ir.VectorType(_INT64, LANES), list(range(LANES)))
    return builder.icmp_signed("<", lanes, _splat(builder, width, LANES))


def _splat(builder: Any, value: Any, lanes: int) -> Any:
    vector = ir.VectorType(value.type, lanes)
    one = builder.insert_element(
        ir.Constant(vector, ir.Undefined), value, ir.Constant(ir.IntType(32), 0)
    )
    return builder.shuffle_vector(
        one, ir.Constant(vector, ir.Undefined), _constant_lanes([0] * lanes)
    )


def _load(builder: Any, address: Any, element: Any, mask: Any = None) -> Any:
    """Emit the load of 16 elements as fp32, those of fp8 divided by 256; 0 where the mask is
    false."""
    nbytes = _NBYTES[element]
    vector = _VECTOR if nbytes == 4 else ir.VectorType(ir.IntType(8 * nbytes), LANES)
    pointer = builder.inttoptr(address, vector.as_pointer())
    if mask is None:
        lanes = builder.load(pointer)
        lanes.align = nbytes
    else:
        name = f"llvm.masked.load.v{LANES}{'f32' if nbytes == 4 else f'i{8 * nbytes}'}.p0"
        function = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(vector, [vector.as_pointer(), ir.IntType(32), _MASK, vector]),
            name,
        )
        zero = ir.Constant(vector, [0] * LANES)
        lanes = builder.call(function, [pointer, ir.Constant(ir.IntType(32), nbytes), mask, zero])
    return _widen(builder, lanes, element)


def _widen(builder: Any, lanes: Any, element: Any) -> Any:
    """Emit the conversion of 16 elements to fp32; those of fp8 are divided by 256."""
    if element == types.float32:
        return lanes
    if element == types.uint8:
        # e4m3 as fp16: the exponent bias is 7 instead of 15, so the result is divided by 2^8
        integers = ir.VectorType(ir.IntType(16), LANES)
        bits = builder.shl(builder.sext(lanes, integers), ir.Constant(integers, [7] * LANES))
        bits = builder.and_(bits, ir.Constant(integers, [0xBFFF] * LANES))
        return builder.fpext(builder.bitcast(bits, ir.VectorType(ir.HalfType(), LANES)), _VECTOR)
    integers = ir.VectorType(ir.IntType(32), LANES)
    if element == types.int8:
        return builder.sitofp(builder.sext(lanes, integers), _VECTOR)
    high = builder.shl(builder.zext(lanes, integers), ir.Constant(integers, [16] * LANES))
    return builder.bitcast(high, _VECTOR)


def _store(builder: Any, value: Any, address: Any, mask: Any = None) -> None:
    pointer = builder.inttoptr(address, value.type.as_pointer())
    if mask is None:
        builder.store(value, pointer).align = 4
        return
    function = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(ir.VoidType(), [_VECTOR, _VECTOR.as_pointer(), ir.IntType(32), _MASK]),
        f"llvm.masked.store.v{LANES}f32.p0",
    )
    builder.call(function, [value, pointer, ir.Constant(ir.IntType(32), 4), mask])


def _halve(builder: Any, vector: Any) -> Any:
    """Emit the sum of both halves of a vector."""
    half = vector.type.count // 2
    low = builder.shuffle_vector(vector, vector, _constant_lanes(list(range(half))))
    high = builder.shuffle_vector(vector, vector, _constant_lanes(list(range(half, 2 * half))))
    return builder.fadd(low, high)


def _add_lanes(builder: Any, sums: list[Any]) -> Any:
    """Emit the sums of the lanes of four vectors, as a vector of four."""
    a, b, c, d = (_halve(builder, _halve(builder, vector)) for vector in sums)

    def pair(x: Any, y: Any, first: list[int], second: list[int]) -> Any:
        return builder.fadd(
            builder.shuffle_vector(x, y, _constant_lanes(first)),
            builder.shuffle_vector(x, y, _constant_lanes(second)),
        )

    ab, cd = (pair(x, y, [0, 1, 4, 5], [2, 3, 6, 7]) for x, y in ((a, b), (c, d)))
    return pair(ab, cd, [0, 2, 4, 6], [1, 3, 5, 7])


def _integer(value: int) -> ir.Constant:
    return ir.Constant(_INT64, value)


def _emit_dots(rows: int, element: Any, builder: Any, args: list[Any]) -> None:
    """Emit `dots` for `rows` queries and four keys."""
    nbytes = _NBYTES[element]
    query, query_stride, key_addresses, width, out = args
    keys = []
    for j in range(4):
        pointer = builder.inttoptr(builder.add(key_addresses, _integer(8 * j)), _INT64.as_pointer())
        keys.append(builder.load(pointer))
    zero = ir.Constant(_VECTOR, [0.0] * LANES)
    sums = [[cgutils.alloca_once_value(builder, zero) for _ in keys] for _ in range(rows)]
    for row in sums:
        for lanes in row:
            builder.store(zero, lanes)

    def add_features(first: Any, mask: Any = None) -> None:
        offset = builder.mul(first, _integer(nbytes))
        loaded = [_load(builder, builder.add(key, offset), element, mask) for key in keys]
        for i in range(rows):
            address = builder.add(query, builder.mul(query_stride, _integer(i)))
            address = builder.add(address, builder.mul(first, _integer(4)))
            q = _load(builder, address, types.float32, mask)
            for key, lanes in zip(loaded, sums[i], strict=True):
                builder.store(_multiply_add(builder, q, key, builder.load(lanes)), lanes)

    with cgutils.for_range(builder, builder.sdiv(width, _integer(LANES))) as loop:
        add_features(builder.mul(loop.index, _integer(LANES)))
    remainder = builder.srem(width, _integer(LANES))
    with builder.if_then(builder.icmp_signed(">", remainder, _integer(0)), likely=False):
        add_features(builder.sub(width, remainder), _tail_mask(builder, remainder))
    for i in range(rows):
        totals = _add_lanes(builder, [builder.load(lanes) for lanes in sums[i]])
        address = builder.add(out, _integer(4 * SEGMENT * i))
        pointer = builder.inttoptr(address, totals.type.as_pointer())
        previous = builder.load(pointer)
        previous.align = 4
        _store(builder, builder.fadd(previous, totals), address)


def _emit_values(rows: int, element: Any, builder: Any, args: list[Any]) -> None:
    """Emit `values` for `rows` rows."""
    nbytes = _NBYTES[element]
    weights, value_addresses, num_keys, width, out, out_stride = args
    vectors = 4 if rows <= PAIR else 2
    if not _HAS_32_REGISTERS:
        vectors //= 2

    def add_keys(first: Any, vectors: int, mask: Any = None) -> None:
        zero = ir.Constant(_VECTOR, [0.0] * LANES)
        sums = [
            [cgutils.alloca_once_value(builder, zero) for _ in range(vectors)] for _ in range(rows)
        ]
        for row in sums:
            for lanes in row:
                builder.store(zero, lanes)
        with cgutils.for_range(builder, num_keys) as loop:
            pointer = builder.inttoptr(
                builder.add(value_addresses, builder.mul(loop.index, _integer(8))),
                _INT64.as_pointer(),
            )
            address = builder.add(builder.load(pointer), builder.mul(first, _integer(nbytes)))
            loaded = [
                _load(builder, builder.add(address, _integer(nbytes * LANES * n)), element, mask)
                for n in range(vectors)
            ]
            for i in range(rows):
                weight = builder.add(weights, builder.mul(loop.index, _integer(4)))
                weight = builder.add(weight, _integer(4 * SEGMENT * i))
                p = _splat(
                    builder, builder.load(builder.inttoptr(weight, _FLOAT.as_pointer())), LANES
                )
                for value, lanes in zip(loaded, sums[i], strict=True):
                    builder.store(_multiply_add(builder, p, value, builder.load(lanes)), lanes)
        for i in range(rows):
            for n, lanes in enumerate(sums[i]):
                address = builder.add(out, builder.mul(out_stride, _integer(i)))
                address = builder.add(address, builder.mul(first, _integer(4)))
                address = builder.add(address, _integer(4 * LANES * n))
                _store(builder, builder.load(lanes), address, mask)

    size = LANES * vectors
    with cgutils.for_range(builder, builder.sdiv(width, _integer(size))) as loop:
        add_keys(builder.mul(loop.index, _integer(size)), vectors)
    first = builder.sub(width, builder.srem(width, _integer(size)))
    if vectors > 1:
        rest = builder.sdiv(builder.sub(width, first), _integer(LANES))
        with cgutils.for_range(builder, rest) as loop:
            add_keys(builder.add(first, builder.mul(loop.index, _integer(LANES))), 1)
    remainder = builder.srem(width, _integer(LANES))
    with builder.if_then(builder.icmp_signed(">", remainder, _integer(0)), likely=False):
        add_keys(builder.sub(width, remainder), 1, _tail_mask(builder, remainder))


def _vector_code(emit: Callable[..., None], rows: int, num_arguments: int) -> Any:
    """Return a function (block, int64...) whose code `emit` writes, for elements of the block's
    type."""
    integers = [types.int64] * num_arguments

    def type_and_emit(block: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            emit(rows, block.dtype, builder, list(args[1:]))
            return context.get_dummy_value()

        return types.void(block, *integers), generate

    # numba requires functions of as many arguments as are passed
    if num_arguments == 5:

        def five(typing: Any, block: Any, a: Any, b: Any, c: Any, d: Any, e: Any) -> Any:
            return type_and_emit(block)

        return intrinsic(five)

    def six(typing: Any, block: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any) -> Any:
        return type_and_emit(block)

    return intrinsic(six)


dots_of_one, dots_of_pair, dots_of_group = (
    _vector_code(_emit_dots, rows, 5) for rows in (1, PAIR, GROUP)
)
values_of_one, values_of_pair, values_of_group = (
    _vector_code(_emit_values, rows, 6) for rows in (1, PAIR, GROUP)
)


def _sum_of_weights(typing: Any, address: Any, num_vectors: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        zero = ir.Constant(_VECTOR, [0.0] * LANES)
        lanes = cgutils.alloca_once_value(builder, zero)
        builder.store(zero, lanes)
        with cgutils.for_range(builder, args[1]) as loop:
            offset = builder.mul(loop.index, _integer(4 * LANES))
            vector = _load(builder, builder.add(args[0], offset), types.float32)
            builder.store(builder.fadd(builder.load(lanes), vector), lanes)
        total = builder.load(lanes)
        while total.type.count > 1:
            total = _halve(builder, total)
        return builder.extract_element(total, ir.Constant(ir.IntType(32), 0))

    return types.float32(types.int64, types.int64), generate


sum_lanes: Any = intrinsic(_sum_of_weights)
"""The sum of fp32 numbers at an address, from so many vectors."""


def _prefetch_line(typing: Any, address: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        int32 = ir.IntType(32)
        function = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(ir.VoidType(), [byte, int32, int32, int32]),
            "llvm.prefetch.p0",
        )
        read_near_data = [ir.Constant(int32, number) for number in (0, 3, 1)]
        builder.call(function, [builder.inttoptr(args[0], byte), *read_near_data])
        return context.get_dummy_value()

    return types.void(types.int64), emit


prefetch: Any = intrinsic(_prefetch_line)
"""Start to load the cache line at an address."""


def _point_to_int32(typing: Any, integer: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.int32)(types.int64), emit


ints: Any = intrinsic(_point_to_int32)


def _size_of_element(typing: Any, block: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _integer(_NBYTES[block.dtype])

    return types.int64(block), emit


element_nbytes: Any = intrinsic(_size_of_element)


def _point_to_activations(typing: Any, integer: Any, block: Any) -> Any:
    is_quantized = _NBYTES[block.dtype] == 1
    pointer = types.CPointer(types.float32) if is_quantized else block

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return pointer(types.int64, block), emit


activation_pointer: Any = intrinsic(_point_to_activations)
"""An address as a pointer to elements of queries and outputs: those of keys and values, or fp32 if
these are quantized."""
