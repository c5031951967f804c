"""Numba loops of a paged KV cache, on CPUs: storing keys and values, and attention.

Keys are processed in segments of `SEGMENT` tokens at fixed absolute positions. Every sum has a
defined order: a dot product adds 16 lanes, each over every 16th feature, and then the lanes
pairwise; weighted values are added key by key; segments are merged in order. So the result of a
query depends neither on the other queries and rows, nor on the number of threads, nor on the block
size. The vector code is in kernels/attention/paged_vectors.py.

Work is divided into tiles: a few queries of one row, for one key/value head; the queries and query
heads of a tile are its `rows`. All functions get the block of arguments of `paged_attention`.
"""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import numpy as np
from numba import carray, njit  # type: ignore[attr-defined]  # carray is public, but not declared

from megalith.kernels.attention.paged_vectors import (
    GROUP,
    LANES,
    PAIR,
    SEGMENT,
    activation_pointer,
    dots_of_group,
    dots_of_one,
    dots_of_pair,
    element_nbytes,
    ints,
    prefetch,
    sum_lanes,
    values_of_group,
    values_of_one,
    values_of_pair,
)
from megalith.kernels.cpu_numba import (
    Array,
    Block,
    _floats,
    _longs,
    _num_threads,
    _thread_num,
    array_at,
    count,
    exp,
    longs,
    narrow,
    number,
    row_max,
    share,
    wide,
    wides,
)

P = ParamSpec("P")
R = TypeVar("R")

ADDRESS_STRIDE = 8 * (SEGMENT + 4)
"""Bytes of the addresses of a segment's keys."""

ROPE_SCORES = 4 * GROUP * SEGMENT
"""Bytes from the scores of a group of rows to those of their rotated parts."""

SCALES = 2 * ROPE_SCORES
"""Bytes from the scores of a group of rows to the scales of the segment's keys and values."""

SCALE_STRIDE = 4 * SEGMENT
"""Bytes of the scales of a segment's keys."""

AHEAD = 16
"""Keys by which prefetching is ahead of their use."""

LOWEST = np.float32(-3.4028234663852886e38)

# Entries of the argument `sizes`.
(
    PARTS,
    HEADS,
    SHARED,
    WIDTH,
    ROPE_WIDTH,
    VALUE_WIDTH,
    BLOCK_SIZE,
    KEY_STRIDES,
    ROPE_STRIDES,
    VALUE_STRIDES,
    WINDOW,
    CHUNKED,
    MAX_BLOCKS,
    MAX_ROWS,
    NUM_SPLITS,
    HAS_SINKS,
    NUM_TOKENS,
    IS_QUANTIZED,
    SHARD_RANK,
    NUM_SHARDS,
    IS_PARTIAL,
) = 0, 1, 2, 3, 4, 5, 6, 7, 10, 13, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26
NUM_SIZES = 27

# Columns of a tile.
ROW, FIRST_TOKEN, NUM_QUERIES, POSITION, FIRST_SEGMENT, NUM_SEGMENTS = range(6)
NUM_COLUMNS = 6


def exact(function: Callable[P, R]) -> Callable[P, R]:
    """Compile a function of which the compiler must not reorder or fuse floating-point
    operations."""
    # explicit: numba would otherwise use the fast math of the loop that calls the function
    result: Callable[P, R] = njit(nogil=True, error_model="numpy", fastmath=False)(function)
    return result


exact_exp: Any = exact(exp.py_func)  # type: ignore[attr-defined]  # of a compiled function


# --- storing


def paged_store(block: Block) -> None:
    """slots int64 [t], t, g, d, T, strides of a token and a head of `rows`, and of a block, a head
    and a token of `cache`, rows [t, g, d], cache [blocks, g, T, d]: copy each row to its slot,
    block * T + offset."""
    tokens, heads = count(block, 1), count(block, 2)
    width, block_size = count(block, 3), count(block, 4)
    slots, nbytes = longs(block, 0, (tokens,)), element_nbytes(block)
    first, last = share(tokens)
    for i in range(first, last):
        source = count(block, 10) + i * count(block, 5) * nbytes
        index, offset = slots[i] // block_size, slots[i] % block_size
        target = count(block, 11) + (index * count(block, 7) + offset * count(block, 9)) * nbytes
        for h in range(heads):
            row = array_at(source + h * count(block, 6) * nbytes, block, (width,))
            copy = array_at(target + h * count(block, 8) * nbytes, block, (width,))
            for c in range(width):
                copy[c] = row[c]


# --- attention of one tile

# arguments in the order of the block: first those that the layers of a step share
(
    SIZES,
    SCALE,
    SOFTCAP,
    TABLES,
    TILES,
    BOUNDS,
    SPLITS,
    WORKSPACE,
    SCRATCH,
    ADDRESSES,
    QUERIES,
    ROPE_QUERIES,
    KEYS,
    ROPE_KEYS,
    VALUES,
    SINKS,
    OUT,
    SCALE_FACTOR,
    KEY_SCALES,
    ROPE_SCALES,
    VALUE_SCALES,
) = range(21)
NUM_SHARED_ARGUMENTS = 10


@exact
def size(block: Block, index: Any) -> Any:
    """Return entry `index` of the sizes."""
    return longs(block, SIZES, (NUM_SIZES,))[index]


@exact
def tile_column(block: Block, tile: Any, column: Any) -> Any:
    """Return one column of a tile."""
    return longs(block, TILES, (tile + 1, NUM_COLUMNS))[tile, column]


@exact
def floats_at(address: Any, length: Any) -> Array:
    """Return the fp32 numbers at an address."""
    return carray(_floats(address), (length,))


@exact
def longs_at(address: Any, length: Any) -> Array:
    """Return the int64 numbers at an address."""
    return carray(_longs(address), (length,))


@exact
def activations(block: Block, index: Any, shape: Any) -> Array:
    """Return argument `index`, queries or outputs."""
    return carray(activation_pointer(count(block, index), block), shape)


@exact
def scratch_addresses(block: Block, part: Any) -> Any:
    """Return the addresses in a part's scratch memory of: fp32 queries [rows, d + d_rope], scores
    [4, 128], states of one segment [4, d_v + 2] and of a tile [rows, d_v + 2]; and int64 addresses
    [3, 132] of keys, rotated keys and values. Scores of rotated parts [4, 128], and scales [3, 128]
    of keys, rotated keys and values, follow the scores."""
    rows, width = size(block, MAX_ROWS), size(block, WIDTH) + size(block, ROPE_WIDTH)
    state = size(block, VALUE_WIDTH) + 2
    num_scores = (2 * GROUP + 3) * SEGMENT
    elements = rows * width + num_scores + (GROUP + rows) * state
    queries = count(block, SCRATCH) + part * elements * 4
    scores = queries + rows * width * 4
    states = scores + num_scores * 4
    addresses = count(block, ADDRESSES) + part * 3 * ADDRESS_STRIDE
    return queries, scores, states, states + GROUP * state * 4, addresses


@exact
def count_stored(block: Block, position: Any) -> Any:
    """Return how many of the keys before `position` are stored on this rank, as
    `TokenShard.count_before`."""
    ranks = size(block, NUM_SHARDS)
    return (position - size(block, SHARD_RANK) + ranks - 1) // ranks


@exact
def visible_keys(block: Block, position: Any, segment: Any) -> Any:
    """Return the stored keys of a segment, first and end, that the query at `position` sees."""
    window, first, end = size(block, WINDOW), segment * SEGMENT, segment * SEGMENT + SEGMENT
    if window > 0:
        if size(block, CHUNKED):
            first = max(first, count_stored(block, position // window * window))
        else:
            first = max(first, count_stored(block, position - window + 1))
    first = min(first, end)
    return first, max(first, min(end, count_stored(block, position + 1)))


@exact
def locate(block: Block, cache: Any, strides: Any, row_and_head: Any, keys: Any, out: Any) -> None:
    """Write the addresses of keys (first, end) of (row, head) in the cache argument `cache` to
    `out`, int64 [132], at the place of each key in its segment, and that of the last key thrice
    more, because scores are computed for four keys at a time."""
    row, head = row_and_head
    first, end = keys
    max_blocks, block_size = size(block, MAX_BLOCKS), size(block, BLOCK_SIZE)
    table = carray(ints(count(block, TABLES) + 4 * row * max_blocks), (max_blocks,))
    nbytes = element_nbytes(block)
    by_block, by_token = size(block, strides) * nbytes, size(block, strides + 2) * nbytes
    base = count(block, cache) + head * size(block, strides + 1) * nbytes
    addresses = longs_at(out + first % SEGMENT * 8, end - first + 3)
    index, offset = first // block_size, first % block_size
    start = base + np.int64(table[index]) * by_block
    for j in range(end - first):
        if offset == block_size:
            offset = 0
            index += 1
            start = base + np.int64(table[index]) * by_block
        addresses[j] = start + offset * by_token
        offset += 1
    for j in range(end - first, end - first + 3):
        addresses[j] = start + (offset - 1) * by_token


@exact
def load_scales(block: Block, scales: Any, row_and_head: Any, keys: Any, out: Any) -> None:
    """Write the scales of keys (first, end) of (row, head) from the argument `scales`, fp32
    [blocks, g, T], to `out`, fp32 [128], at the place of each key in its segment."""
    row, head = row_and_head
    first, end = keys
    max_blocks, block_size = size(block, MAX_BLOCKS), size(block, BLOCK_SIZE)
    table = carray(ints(count(block, TABLES) + 4 * row * max_blocks), (max_blocks,))
    factor, copies = number(block, SCALE_FACTOR), floats_at(out, SEGMENT)
    position = first
    while position < end:
        index, offset = position // block_size, position % block_size
        block_and_head = np.int64(table[index]) * size(block, HEADS) + head
        source = floats_at(count(block, scales) + 4 * block_size * block_and_head, block_size)
        num_keys = min(block_size - offset, end - position)
        for j in range(num_keys):
            copies[position % SEGMENT + j] = source[offset + j] * factor
        position += num_keys


@exact
def load_queries(block: Block, tile: Any, head: Any, queries: Any) -> None:
    """Copy the queries of a tile to the address `queries` as fp32: [rows, d + d_rope]."""
    shared, heads = size(block, SHARED), size(block, HEADS) * size(block, SHARED)
    width, rope_width = size(block, WIDTH), size(block, ROPE_WIDTH)
    tokens, first = size(block, NUM_TOKENS), tile_column(block, tile, FIRST_TOKEN)
    q = activations(block, QUERIES, (tokens, heads, width))
    q_rope = activations(block, ROPE_QUERIES, (tokens, heads, rope_width))
    for i in range(tile_column(block, tile, NUM_QUERIES)):
        for h in range(shared):
            address = queries + (i * shared + h) * (width + rope_width) * 4
            part, source = floats_at(address, width), q[first + i, head * shared + h]
            for c in range(width):
                part[c] = wide(source[c])
            part = floats_at(address + 4 * width, rope_width)
            source = q_rope[first + i, head * shared + h]
            for c in range(rope_width):
                part[c] = wide(source[c])


@exact
def scores_to_weights(block: Block, scores: Any, num_keys: Any, state: Any) -> None:
    """Replace the dot products at the address `scores` by exp(score - largest), followed by zeros
    up to a multiple of 16; write largest and the sum to `state`, fp32 [2]."""
    padded = (num_keys + LANES - 1) // LANES * LANES
    row, cap = floats_at(scores, padded), number(block, SOFTCAP)
    visible, scale = row[:num_keys], number(block, SCALE)
    for j in range(len(visible)):
        visible[j] = visible[j] * scale
    if cap > np.float32(0):
        for j in range(len(visible)):
            visible[j] = cap * exact_tanh(visible[j] / cap)
    top = row_max(visible)
    for j in range(len(visible)):
        visible[j] = exact_exp(visible[j] - top)
    for j in range(num_keys, padded):
        row[j] = np.float32(0)
    state[0], state[1] = top, sum_lanes(scores, padded // LANES)


@exact
def exact_tanh(x: Any) -> Any:
    """tanh of an fp32 number, with an error of about 1e-7 relative to the result."""
    y = x * x
    series = np.float32(62 / 2835)
    series = series * y - np.float32(17 / 315)
    series = series * y + np.float32(2 / 15)
    series = series * y - np.float32(1 / 3)
    series = x + x * (series * y)
    far = np.float32(1) - np.float32(2) / (exact_exp(x + x) + np.float32(1))
    return series if abs(x) < np.float32(0.25) else far


@exact
def prefetch_keys(block: Block, keys: Any, j: Any, num_keys: Any, widths: Any) -> None:
    """Start to load values j to j + 3, and keys `AHEAD` after them, into the cache.

    A block is shorter than what a processor's own prefetching needs to start.
    """
    key_bytes, value_bytes = (
        widths[0] * element_nbytes(block),
        widths[1] * element_nbytes(block),
    )
    addresses = longs_at(keys, 3 * ADDRESS_STRIDE // 8)
    for i in range(j, min(j + 4, num_keys)):
        value = addresses[i + 2 * ADDRESS_STRIDE // 8]
        for c in range(0, value_bytes, 64):
            prefetch(value + c)
        if i + AHEAD < num_keys:
            key = addresses[i + AHEAD]
            for c in range(0, key_bytes, 64):
                prefetch(key + c)


@exact
def add_scores(block: Block, rows: Any, num_keys: Any, memory: Any, widths: Any) -> None:
    """Add the dot products of `rows` queries (1, 2 or 4) and the keys to the scores, [rows, 128].

    `memory`: addresses of the queries, of the addresses of the keys, and of the scores; `widths`:
    features, bytes from one query to the next, and features of values to load into the cache.
    """
    queries, keys, scores = memory
    width, stride, value_width = widths
    for j in range(0, num_keys, 4):
        prefetch_keys(block, keys, j, num_keys, (width, value_width))
        if rows == 1:
            dots_of_one(block, queries, stride, keys + 8 * j, width, scores + 4 * j)
        elif rows == PAIR:
            dots_of_pair(block, queries, stride, keys + 8 * j, width, scores + 4 * j)
        else:
            dots_of_group(block, queries, stride, keys + 8 * j, width, scores + 4 * j)


@exact
def clear_rows(scores: Any, rows: Any) -> None:
    """Set the scores at an address, fp32 [rows, 128], to zero."""
    cleared = floats_at(scores, rows * SEGMENT)
    for j in range(len(cleared)):
        cleared[j] = np.float32(0)


@exact
def multiply_rows(scores: Any, rows: Any, num_keys: Any, scales: Any) -> None:
    """Multiply the scores or weights of each key, fp32 [rows, 128], by its scale."""
    factors = floats_at(scales, num_keys)
    for i in range(rows):
        row = floats_at(scores + 4 * SEGMENT * i, num_keys)
        for j in range(num_keys):
            row[j] = row[j] * factors[j]


@exact
def add_rows(scores: Any, rows: Any, num_keys: Any, added: Any) -> None:
    """Add the scores of each key at the address `added`, fp32 [rows, 128], to `scores`."""
    for i in range(rows):
        row = floats_at(scores + 4 * SEGMENT * i, num_keys)
        other = floats_at(added + 4 * SEGMENT * i, num_keys)
        for j in range(num_keys):
            row[j] = row[j] + other[j]


@exact
def attend_rows(block: Block, rows: Any, keys: Any, memory: Any) -> None:
    """Write the states [rows, d_v + 2] of 1, 2 or 4 rows of a tile for the keys (first, end) of a
    segment: the sum of exp(score - largest) times value, largest, and the sum of exp.

    `memory`: addresses of queries, scores, states, and addresses of keys.
    """
    queries, scores, states, addresses = memory
    num_keys, addresses = keys[1] - keys[0], addresses + keys[0] % SEGMENT * 8
    width, rope_width = size(block, WIDTH), size(block, ROPE_WIDTH)
    value_width, stride = size(block, VALUE_WIDTH), (width + rope_width) * 4
    is_quantized, scales = size(block, IS_QUANTIZED), scores + SCALES + keys[0] % SEGMENT * 4
    clear_rows(scores, rows)
    # with MLA the values are the first part of the keys
    widths = width, stride, np.int64(0) if rope_width > 0 else value_width
    add_scores(block, rows, num_keys, (queries, addresses, scores), widths)
    if is_quantized:
        multiply_rows(scores, rows, num_keys, scales)
    if rope_width > 0:
        into = scores
        if is_quantized:
            into = scores + ROPE_SCORES
            clear_rows(into, rows)
        parts = queries + 4 * width, addresses + ADDRESS_STRIDE, into
        add_scores(block, rows, num_keys, parts, (rope_width, stride, np.int64(0)))
        if is_quantized:
            multiply_rows(into, rows, num_keys, scales + SCALE_STRIDE)
            add_rows(scores, rows, num_keys, into)
    by_row = 4 * (value_width + 2)
    for i in range(rows):
        state = floats_at(states + by_row * i + 4 * value_width, 2)
        scores_to_weights(block, scores + 4 * SEGMENT * i, num_keys, state)
    if is_quantized:
        multiply_rows(scores, rows, num_keys, scales + 2 * SCALE_STRIDE)
    values = addresses + 2 * ADDRESS_STRIDE
    if rows == 1:
        values_of_one(block, scores, values, num_keys, value_width, states, by_row)
    elif rows == PAIR:
        values_of_pair(block, scores, values, num_keys, value_width, states, by_row)
    else:
        values_of_group(block, scores, values, num_keys, value_width, states, by_row)


@exact
def merge(block: Block, into: Any, state: Any) -> None:
    """Merge the state of one segment at address `state` into that at `into`: [d_v + 2] each."""
    width = size(block, VALUE_WIDTH)
    total, added = floats_at(into, width + 2), floats_at(state, width + 2)
    largest = added[width] if added[width] > total[width] else total[width]
    old, new = exact_exp(total[width] - largest), exact_exp(added[width] - largest)
    sums, values = total[:width], added[:width]
    for c in range(len(sums)):
        sums[c] = sums[c] * old + values[c] * new
    total[width + 1] = total[width + 1] * old + added[width + 1] * new
    total[width] = largest


@exact
def start_state(block: Block, into: Any, head: Any) -> None:
    """Write the state before any key of a query of query head `head` (of all): that of its sink."""
    width, heads = size(block, VALUE_WIDTH), size(block, HEADS) * size(block, SHARED)
    state = floats_at(into, width + 2)
    for c in range(width + 1):
        state[c] = np.float32(0)
    state[width], state[width + 1] = LOWEST, np.float32(0)
    if size(block, HAS_SINKS):
        state[width], state[width + 1] = wides(block, SINKS, (heads,))[head], np.float32(1)


@exact
def write_output(block: Block, state: Any, token: Any, head: Any) -> None:
    """Write the attention output of query head `head` of a token from its state; if it is partial,
    in fp32 and followed by the log-sum-exp, which is -inf without keys."""
    width, heads = size(block, VALUE_WIDTH), size(block, HEADS) * size(block, SHARED)
    sums = floats_at(state, width + 2)
    total, values = sums[width + 1], sums[:width]
    if size(block, IS_PARTIAL):
        partial = floats_at(count(block, OUT) + 4 * (token * heads + head) * (width + 1), width + 1)
        divisor = total if total > np.float32(0) else np.float32(1)
        for c in range(len(values)):
            partial[c] = values[c] / divisor
        partial[width] = sums[width] + np.log(total)
        return
    out = activations(block, OUT, (size(block, NUM_TOKENS), heads, width))[token, head]
    for c in range(len(values)):
        out[c] = narrow(values[c] / total, out)


@exact
def split_address(block: Block, tile: Any, head: Any) -> Any:
    """Return the address of the states of a (tile, head) whose segments several parts process:
    [segments, rows, d_v + 2]; 0 if one part processes all of them."""
    splits = longs(block, SPLITS, (size(block, NUM_SPLITS), 3))
    for i in range(len(splits)):
        if splits[i, 0] == tile and splits[i, 1] == head:
            return count(block, WORKSPACE) + splits[i, 2] * 4 * (size(block, VALUE_WIDTH) + 2)
    return np.int64(0)


@exact
def attend_segment(block: Block, tile: Any, head: Any, segment: Any, memory: Any) -> None:
    """Attend to the keys of one segment.

    `memory`: addresses as `scratch_addresses`, and of the states of this segment in the workspace,
    or 0: merge them into those of the tile.
    """
    queries, scores, states, totals, addresses, split = memory
    shared, width = size(block, SHARED), size(block, WIDTH) + size(block, ROPE_WIDTH)
    by_row, position = 4 * (size(block, VALUE_WIDTH) + 2), tile_column(block, tile, POSITION)
    num_queries, row = tile_column(block, tile, NUM_QUERIES), tile_column(block, tile, ROW)
    first = visible_keys(block, position, segment)[0]
    end = visible_keys(block, position + num_queries - 1, segment)[1]
    if first >= end:
        first = end
    else:
        locate(block, KEYS, KEY_STRIDES, (row, head), (first, end), addresses)
        if size(block, ROPE_WIDTH) > 0:
            out = addresses + ADDRESS_STRIDE
            locate(block, ROPE_KEYS, ROPE_STRIDES, (row, head), (first, end), out)
        out = addresses + 2 * ADDRESS_STRIDE
        locate(block, VALUES, VALUE_STRIDES, (row, head), (first, end), out)
        if size(block, IS_QUANTIZED):
            scales = scores + SCALES
            load_scales(block, KEY_SCALES, (row, head), (first, end), scales)
            load_scales(block, ROPE_SCALES, (row, head), (first, end), scales + SCALE_STRIDE)
            load_scales(block, VALUE_SCALES, (row, head), (first, end), scales + 2 * SCALE_STRIDE)
    i, num_rows = np.int64(0), num_queries * shared
    while i < num_rows:
        keys, rows = visible_keys(block, position + i // shared, segment), np.int64(GROUP)
        while rows > 1:
            if i + rows <= num_rows:
                last = visible_keys(block, position + (i + rows - 1) // shared, segment)
                if keys[0] == last[0] and keys[1] == last[1]:
                    break
            rows //= 2
        out = states if split == 0 else split + i * by_row
        if keys[0] < keys[1]:
            attend_rows(block, rows, keys, (queries + 4 * i * width, scores, out, addresses))
            if split == 0:
                for j in range(rows):
                    merge(block, totals + (i + j) * by_row, states + j * by_row)
        i += rows


@exact
def attend_tile(block: Block, part: Any, pair: Any, segments: Any) -> None:
    """Attend to the segments (first, end) of a tile for one key/value head: `pair` is (tile,
    head)."""
    tile, head = pair
    queries, scores, states, totals, addresses = scratch_addresses(block, part)
    shared, by_row = size(block, SHARED), 4 * (size(block, VALUE_WIDTH) + 2)
    split, rows = split_address(block, tile, head), tile_column(block, tile, NUM_QUERIES) * shared
    load_queries(block, tile, head, queries)
    for i in range(rows):
        start_state(block, totals + i * by_row, head * shared + i % shared)
    for segment in range(segments[0], segments[1]):
        out = split if split == 0 else split + segment * rows * by_row
        number_of_segment = tile_column(block, tile, FIRST_SEGMENT) + segment
        memory = queries, scores, states, totals, addresses, out
        attend_segment(block, tile, head, number_of_segment, memory)
    if split == 0:
        token = tile_column(block, tile, FIRST_TOKEN)
        for i in range(rows):
            write_output(
                block, totals + i * by_row, token + i // shared, head * shared + i % shared
            )


def paged_attention(block: Block) -> None:
    """Attend to the segments of each part: units bounds[part] to bounds[part + 1] in the order
    (tile, head, segment)."""
    parts, thread, threads = size(block, PARTS), np.int64(_thread_num()), np.int64(_num_threads())
    bounds = longs(block, BOUNDS, (parts + 1, 2))
    for part in range(thread, parts, threads):
        tile, unit = bounds[part, 0], bounds[part, 1]
        last_tile, last_unit = bounds[part + 1, 0], bounds[part + 1, 1]
        while tile < last_tile or (tile == last_tile and unit < last_unit):
            segments = tile_column(block, tile, NUM_SEGMENTS)
            head = unit // segments
            end = segments * (head + 1)
            if tile == last_tile:
                end = min(end, last_unit)
            attend_tile(block, part, (tile, head), (unit - head * segments, end - head * segments))
            unit = end
            if unit == segments * size(block, HEADS):
                tile += 1
                unit = np.int64(0)


def paged_merge(block: Block) -> None:
    """Merge the states of (tile, head) pairs whose segments several parts processed."""
    parts, thread, threads = size(block, PARTS), np.int64(_thread_num()), np.int64(_num_threads())
    splits = longs(block, SPLITS, (size(block, NUM_SPLITS), 3))
    shared, by_row = size(block, SHARED), 4 * (size(block, VALUE_WIDTH) + 2)
    for part in range(thread, parts, threads):
        total = scratch_addresses(block, part)[2]
        for n in range(len(splits)):
            tile, head = splits[n, 0], splits[n, 1]
            rows = tile_column(block, tile, NUM_QUERIES) * shared
            address = split_address(block, tile, head)
            for i in range(rows * part // parts, rows * (part + 1) // parts):
                start_state(block, total, head * shared + i % shared)
                position = tile_column(block, tile, POSITION) + i // shared
                for segment in range(tile_column(block, tile, NUM_SEGMENTS)):
                    number_of_segment = tile_column(block, tile, FIRST_SEGMENT) + segment
                    keys = visible_keys(block, position, number_of_segment)
                    if keys[0] < keys[1]:
                        merge(block, total, address + (segment * rows + i) * by_row)
                token = tile_column(block, tile, FIRST_TOKEN) + i // shared
                write_output(block, total, token, head * shared + i % shared)
