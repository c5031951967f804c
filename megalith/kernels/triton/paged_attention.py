"""Triton kernels of a paged KV cache: storing keys and values, and attention to them.

A program has a tile of queries of one row and query heads that share a key/value head, so that it
reads each key once for all of them. The keys of a row are divided into segments of `SEGMENT` tokens
at fixed positions. A program computes the state (sum of weighted values, largest score, sum of
weights) of every segment anew and merges the states in order; if there are few programs, each
segment has a program of its own, and a second kernel merges their states in the same order. So the
output of a query depends neither on the other rows, nor on the division of its sequence into steps,
nor on the number of programs. Source: Dao et al. 2023, "Flash-Decoding"; Milakov and Gimelshein
2018, arXiv:1805.02867.

Rows, lengths and block tables are read on the device, and grids depend only on shapes: the number
of queries, of rows and of columns of the block table. A captured CUDA graph can therefore be
replayed with other contents of the same tensors. Queries after the last row get zeros.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton  # lint: allow optional-import: callers import this module inside functions
import triton.language as tl  # lint: allow optional-import: as above
from torch import Tensor

from megalith.kernels.attention.kv_blocks import LARGEST, KVBlocks
from megalith.kernels.attention.paged import PagedKeys, PagedMetadata
from megalith.kernels.attention.scores import Scores
from megalith.kernels.triton.launch import TILE, next_power_of_two
from megalith.kernels.triton.ragged import count_tiles, find_tile

SEGMENT = 512
"""Tokens per segment: heuristic, several tiles of keys, so that merging is cheap. Part of the
definition of the result's bits."""

MIN_PROGRAMS = 256
"""Programs below which segments are processed in parallel: about two per streaming multiprocessor
of a large GPU. Heuristic, not measured."""

TILE_ROWS = 32
"""Queries times query heads of a tile, for values of up to `WIDE` features: heuristic."""

WIDE = 256
"""Features of a value above which a tile has half as many rows, so that sums stay in registers."""

KEY_BYTES = 1 << 15
"""Bytes of the keys and values that a program processes at once: heuristic, for shared memory."""

LOWEST = tl.constexpr(-3.4028234663852886e38)
"""Largest score before any key: finite, so that differences are not NaN."""

Pointer = Any  # in a kernel: address of a tensor
Count = Any  # in a kernel: an integer
Tensors = Any  # in a kernel: a block of values

KINDS = {torch.int8: 1, torch.float8_e4m3fn: 2}
"""Format of a quantized cache; 0: it has the dtype of the queries."""


@dataclass(frozen=True, slots=True)
class TileShape:
    """What an attention kernel is compiled for."""

    rows: int
    """Rows of a tile: queries times query heads."""

    heads: int
    """Query heads of a tile."""

    keys: int
    """Keys that are processed at once."""

    segment: int
    """Tokens per segment."""

    shared: int
    """Query heads per key/value head."""

    widths: tuple[int, int, int]
    """Features of the first and the second part of a key, and of a value; 0: no second part."""

    is_latent: bool
    """Whether the first part of the keys are the values."""

    kind: int
    """Format of the cache: see `KINDS`."""

    block_size: int
    """Tokens per block."""

    num_ranks: int
    """Ranks that divide the tokens."""

    window: int
    """Window or size of chunks; 0: none."""

    chunked: bool
    """Whether it is the size of chunks."""

    is_capped: bool
    """Whether scores have a soft cap."""

    sinks: int
    """0: no sinks; 1: given; 2: zeros."""

    is_partial: bool
    """Whether the output has the log-sum-exp."""

    operand: tl.dtype
    """Dtype of the operands of matmuls."""

    @property
    def queries(self) -> int:
        """Queries of a tile."""
        return self.rows // self.heads

    @property
    def head_tiles(self) -> int:
        """Tiles that cover the query heads of a key/value head."""
        return -(-self.shared // self.heads)

    @property
    def padded(self) -> tuple[int, int, int]:
        """Widths as powers of two of at least 16."""
        first, second, value = (max(16, next_power_of_two(max(1, width))) for width in self.widths)
        return first, second, value


class AttentionTensors(NamedTuple):
    """Tensors of an attention kernel. Parts that a call has not are any other tensor."""

    q: Any  # in a kernel: address of a tensor; here and below
    q_rope: Any
    key_cache: Any
    rope_cache: Any
    value_cache: Any
    key_scales: Any
    rope_scales: Any
    value_scales: Any
    sinks: Any
    tables: Any
    starts: Any
    lengths: Any


class AttentionSizes(NamedTuple):
    """Sizes and strides of an attention kernel."""

    rows: int
    tokens: int
    query_heads: int
    kv_heads: int
    rank: int
    q_token: int
    q_head: int
    q_rope_token: int
    q_rope_head: int
    key_block: int
    key_head: int
    key_token: int
    rope_block: int
    rope_head: int
    rope_token: int
    value_block: int
    value_head: int
    value_token: int
    table_row: int


def attend(
    paged: PagedKeys,
    metadata: PagedMetadata,
    scores: Scores,
    sinks: Tensor | None,
    *,
    is_partial: bool = False,
) -> Tensor:
    """Attention to the keys of this rank: see `PagedKernel` in kernels/attention/paged.py."""
    out = paged.new_partial_output() if is_partial else paged.new_output()
    shape = choose_shape(paged, metadata, scores, sinks, is_partial=is_partial)
    tensors, sizes = _list_tensors(paged, metadata, sinks), _list_sizes(paged, metadata)
    rows, max_blocks = metadata.block_tables.shape
    tiles = count_tiles(sizes.tokens, rows, shape.queries)
    head_tiles = sizes.kv_heads * shape.head_tiles
    segments = count_segments(max_blocks * metadata.block_size, shape)
    is_split = segments > 1 and tiles * head_tiles < MIN_PROGRAMS
    state_shape = (segments, *out.shape[:2], paged.value_width + 2) if is_split else (0,)
    states = out.new_empty(state_shape, dtype=torch.float32)
    factors = float(scores.factor(1)), float(scores.softcap or 1.0)
    options = {"num_warps": 8 if shape.is_latent else 4, "num_stages": 2}
    grid = tiles, head_tiles
    _attend[(*grid, segments if is_split else 1)](
        tensors, sizes, *factors, out, states, SHAPE=shape, IS_SPLIT=is_split, **options
    )
    if is_split:
        _merge_segments[grid](tensors, sizes, out, states, SHAPE=shape, **options)
    return out


def choose_shape(
    paged: PagedKeys,
    metadata: PagedMetadata,
    scores: Scores,
    sinks: Tensor | None,
    *,
    is_partial: bool,
) -> TileShape:
    """Return the shape of tiles, which depends on the model only, not on the step."""
    q, widths = paged.queries[0], [part.shape[2] for part in paged.queries]
    is_latent = paged.values is paged.keys[0]
    padded = [max(16, next_power_of_two(width)) for width in (*widths, paged.value_width)]
    row_bytes = q.element_size() * sum(padded[: len(widths)] if is_latent else padded)
    rows = TILE_ROWS // (2 if max(padded) > WIDE else 1)
    return TileShape(
        rows=rows,
        heads=min(rows, next_power_of_two(paged.shared)),
        keys=min(64, max(16, next_power_of_two(KEY_BYTES // row_bytes + 1) // 2)),
        segment=SEGMENT,
        shared=paged.shared,
        widths=(widths[0], sum(widths[1:]), paged.value_width),
        is_latent=is_latent,
        kind=KINDS.get(paged.values.data.dtype, 0),
        block_size=metadata.block_size,
        num_ranks=metadata.shard.num_ranks,
        window=scores.window or 0,
        chunked=scores.chunked,
        is_capped=scores.softcap is not None,
        sinks=2 if scores.off_by_one else int(sinks is not None),
        is_partial=is_partial,
        operand=operand_type(q),
    )


def operand_type(x: Tensor) -> tl.dtype:
    """Return the dtype of the operands of matmuls: that of x; Triton's interpreter, which runs on
    CPUs, multiplies fp32 only."""
    types = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
    return tl.float32 if x.device.type == "cpu" else types.get(x.dtype, tl.float32)


def count_segments(num_keys: int, shape: TileShape) -> int:
    """Return the largest number of segments that the queries of a tile see, of `num_keys` keys."""
    total = -(-num_keys // shape.segment)
    if shape.window == 0:
        return max(1, total)
    visible = -(-(shape.window + shape.queries - 1) // shape.num_ranks)
    return max(1, min(total, 1 + -(-visible // shape.segment)))


def _list_tensors(
    paged: PagedKeys, metadata: PagedMetadata, sinks: Tensor | None
) -> AttentionTensors:
    q, caches = paged.queries[0], (paged.keys[0], paged.keys[-1], paged.values)
    scales = [q if cache.scales is None else cache.scales for cache in caches]
    parts = [
        q,
        paged.queries[-1],
        *(_as_integers(cache) for cache in caches),
        *scales,
        q if sinks is None else sinks.contiguous(),
        metadata.block_tables,
        metadata.cu_seqlens_q,
        metadata.kv_lengths,
    ]
    return AttentionTensors._make(parts)


def _as_integers(cache: KVBlocks) -> Tensor:
    """Return the data of a cache; fp8, which old GPUs have not, as int8 of the same bits."""
    return cache.data if cache.scales is None else cache.data.view(torch.int8)


def _list_sizes(paged: PagedKeys, metadata: PagedMetadata) -> AttentionSizes:
    q, caches = paged.queries[0], (paged.keys[0], paged.keys[-1], paged.values)
    tables = metadata.block_tables
    assert tables.stride(1) == 1 and tables.dtype == torch.int32
    parts = [
        tables.shape[0],
        *q.shape[:2],
        paged.num_heads,
        metadata.shard.rank,
        *q.stride()[:2],
        *paged.queries[-1].stride()[:2],
        *(stride for cache in caches for stride in cache.data.stride()[:3]),
        tables.stride(0),
    ]
    return AttentionSizes._make(parts)


class _QueryTile(NamedTuple):
    """Rows of a tile, and the stored keys that they see."""

    row: Any  # in a kernel: an integer; here and below
    kv_head: Any
    token: Any  # a block: token of each row of the tile
    head: Any  # a block: query head of each row of the tile
    inside: Any  # a block: whether it exists
    position: Any  # a block: of each query in its sequence
    first_key: Any
    end_key: Any


@triton.jit
def _first_visible(position: "Tensors", SHAPE: tl.constexpr) -> "Tensors":
    """Return the position of the first key that the query at `position` sees."""
    if SHAPE.window > 0:
        if SHAPE.chunked:
            first = position // SHAPE.window * SHAPE.window
        else:
            first = tl.maximum(position - SHAPE.window + 1, 0)
    else:
        first = position * 0
    return first


@triton.jit
def _count_before(position: "Count", rank: "Count", SHAPE: tl.constexpr) -> "Count":
    """Return how many tokens before `position` this rank stores: see `TokenShard`."""
    return (position - rank + SHAPE.num_ranks - 1) // SHAPE.num_ranks


@triton.jit
def _locate_tile(
    tensors: "AttentionTensors", sizes: "AttentionSizes", SHAPE: tl.constexpr
) -> "_QueryTile":
    """Return the tile of this program."""
    chunk: tl.constexpr = 256
    row, begin, first = find_tile(
        tl.program_id(0), tensors.starts, sizes.rows, SHAPE.queries, chunk
    )
    is_row = row < sizes.rows
    end = tl.load(tensors.starts + row + 1, is_row, 0)
    queries = tl.where(is_row, end, sizes.tokens) - begin
    keys = tl.load(tensors.lengths + row, is_row, 0)
    last = tl.minimum(first + SHAPE.queries, queries) - 1
    lines = tl.arange(0, SHAPE.rows)
    query = first + lines // SHAPE.heads
    kv_head = tl.program_id(1) // SHAPE.head_tiles
    number = tl.program_id(1) % SHAPE.head_tiles * SHAPE.heads + lines % SHAPE.heads
    before = tl.where(is_row, keys - queries, 0)
    first_key = _count_before(_first_visible(before + first, SHAPE), sizes.rank, SHAPE)
    end_key = _count_before(before + last + 1, sizes.rank, SHAPE)
    return _QueryTile(
        row,
        kv_head,
        (begin + query).to(tl.int64),
        kv_head * SHAPE.shared + number,
        (query < queries) & (number < SHAPE.shared),
        before + query,
        first_key,
        tl.where(is_row & (first < queries), end_key, first_key),
    )


@triton.jit
def _widen(x: "Tensors", SHAPE: tl.constexpr) -> "Tensors":
    """Convert stored elements to operands of a matmul; those of fp8 are divided by 256."""
    if SHAPE.kind == 1:
        x = x.to(tl.float32)
    if SHAPE.kind == 2:
        # e4m3 as fp16: the exponent bias is 7 instead of 15
        bits = (x.to(tl.int16) << 7) & -16385
        x = bits.to(tl.float16, bitcast=True).to(tl.float32)
    return x.to(SHAPE.operand)


@triton.jit
def _load_part(
    cache_at: "Pointer",
    places: "Tensors",
    is_key: "Tensors",
    SHAPE: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
) -> "Tensors":
    """Return a part of keys or values, [keys, padded width]; 0 for keys that are not visible."""
    columns = tl.arange(0, PADDED)
    mask = is_key[:, None] & (columns < WIDTH)[None, :]
    return _widen(tl.load(cache_at + places[:, None] + columns[None, :], mask, 0.0), SHAPE)


@triton.jit
def _load_queries(
    q_at: "Pointer",
    tile: "_QueryTile",
    token_stride: "Count",
    head_stride: "Count",
    SHAPE: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
) -> "Tensors":
    columns = tl.arange(0, PADDED)
    place = tile.token * token_stride + tile.head * head_stride
    mask = tile.inside[:, None] & (columns < WIDTH)[None, :]
    return tl.load(q_at + place[:, None] + columns[None, :], mask, 0.0).to(SHAPE.operand)


@triton.jit
def _load_scales(
    scales_at: "Pointer", places: "Tensors", is_key: "Tensors", SHAPE: tl.constexpr
) -> "Tensors":
    scales = tl.load(scales_at + places, is_key, 0.0)
    if SHAPE.kind == 2:
        scales *= 256.0
    return scales


@triton.jit
def _tanh(x: "Tensors") -> "Tensors":
    """tanh with an error of about 1e-7 relative to the result."""
    y = x * x
    series = x + x * y * (-1 / 3 + y * (2 / 15 + y * (-17 / 315 + y * (62 / 2835))))
    decay = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - decay) / (1.0 + decay)
    return tl.where(tl.abs(x) < 0.25, series, tl.where(x < 0.0, -far, far))


@triton.jit
def _visible_scores(
    s: "Tensors",
    stored: "Tensors",
    is_key: "Tensors",
    tile: "_QueryTile",
    sizes: "AttentionSizes",
    SHAPE: tl.constexpr,
) -> "Tensors":
    """Return the scores with -inf for keys that a query does not see."""
    keys = stored * SHAPE.num_ranks + sizes.rank
    visible = is_key[None, :] & (keys[None, :] <= tile.position[:, None])
    if SHAPE.window > 0:
        visible = visible & (keys[None, :] >= _first_visible(tile.position, SHAPE)[:, None])
    return tl.where(visible, s, float("-inf"))


@triton.jit
def _attend_segment(
    segment: "Count",
    q: "Tensors",
    q_rope: "Tensors",
    tensors: "AttentionTensors",
    sizes: "AttentionSizes",
    tile: "_QueryTile",
    scale: "Any",
    cap: "Any",
    SHAPE: tl.constexpr,
) -> "tuple[Tensors, Tensors, Tensors]":
    """Return the state of a segment: sums of weighted values, largest scores, sums of weights."""
    total = tl.full((SHAPE.rows, SHAPE.padded[2]), 0.0, tl.float32)
    top, weight = (
        tl.full((SHAPE.rows,), LOWEST, tl.float32),
        tl.full((SHAPE.rows,), 0.0, tl.float32),
    )
    table_at = tensors.tables + tile.row.to(tl.int64) * sizes.table_row
    begin = tl.maximum(tile.first_key, segment * SHAPE.segment)
    end = tl.minimum(tile.end_key, (segment + 1) * SHAPE.segment)
    for first in range(begin // SHAPE.keys * SHAPE.keys, end, SHAPE.keys):
        stored = first + tl.arange(0, SHAPE.keys)
        is_key = (stored >= begin) & (stored < end)
        block = tl.load(table_at + stored // SHAPE.block_size, is_key, 0).to(tl.int64)
        offset = stored % SHAPE.block_size
        scale_place = (block * sizes.kv_heads + tile.kv_head) * SHAPE.block_size + offset
        place = block * sizes.key_block + tile.kv_head * sizes.key_head
        place += offset * sizes.key_token
        k = _load_part(tensors.key_cache, place, is_key, SHAPE, SHAPE.widths[0], SHAPE.padded[0])
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        if SHAPE.kind > 0:
            s *= _load_scales(tensors.key_scales, scale_place, is_key, SHAPE)[None, :]
        if SHAPE.widths[1] > 0:
            place = block * sizes.rope_block + tile.kv_head * sizes.rope_head
            place += offset * sizes.rope_token
            rope = _load_part(
                tensors.rope_cache, place, is_key, SHAPE, SHAPE.widths[1], SHAPE.padded[1]
            )
            rotated = tl.dot(q_rope, tl.trans(rope), input_precision="ieee")
            if SHAPE.kind > 0:
                rotated *= _load_scales(tensors.rope_scales, scale_place, is_key, SHAPE)[None, :]
            s += rotated
        s *= scale
        if SHAPE.is_capped:
            s = cap * _tanh(s / cap)
        s = _visible_scores(s, stored, is_key, tile, sizes, SHAPE)
        largest = tl.maximum(top, tl.max(s, 1))
        p = tl.exp(s - largest[:, None])
        decay = tl.exp(top - largest)
        top, weight = largest, weight * decay + tl.sum(p, 1)
        if SHAPE.is_latent:
            v = k
        else:
            place = block * sizes.value_block + tile.kv_head * sizes.value_head
            place += offset * sizes.value_token
            v = _load_part(
                tensors.value_cache, place, is_key, SHAPE, SHAPE.widths[2], SHAPE.padded[2]
            )
        if SHAPE.kind > 0:
            p *= _load_scales(tensors.value_scales, scale_place, is_key, SHAPE)[None, :]
        p = p.to(SHAPE.operand)
        total = tl.dot(p, v, total * decay[:, None], input_precision="ieee")
    return total, top, weight


@triton.jit
def _merge(
    total: "Tensors",
    top: "Tensors",
    weight: "Tensors",
    new_total: "Tensors",
    new_top: "Tensors",
    new_weight: "Tensors",
) -> "tuple[Tensors, Tensors, Tensors]":
    """Merge the state of a segment into that of those before it. The rounding of every operation is
    explicit, so that both kernels give the same bits."""
    largest = tl.maximum(top, new_top)
    old, new = tl.exp(top - largest), tl.exp(new_top - largest)
    total = tl.fma(total, tl.broadcast_to(old[:, None], total.shape), new_total * new[:, None])
    return total, largest, tl.fma(weight, old, new_weight * new)


@triton.jit
def _start_state(
    tensors: "AttentionTensors", tile: "_QueryTile", SHAPE: tl.constexpr
) -> "tuple[Tensors, Tensors, Tensors]":
    """Return the state before any key: that of the sink."""
    total = tl.full((SHAPE.rows, SHAPE.padded[2]), 0.0, tl.float32)
    top = tl.full((SHAPE.rows,), LOWEST, tl.float32)
    weight = tl.full((SHAPE.rows,), 0.0, tl.float32)
    if SHAPE.sinks > 0:
        top, weight = weight, weight + 1.0
    if SHAPE.sinks == 1:
        top = tl.load(tensors.sinks + tile.head, tile.inside, 0.0).to(tl.float32)
    return total, top, weight


@triton.jit
def _write_output(
    out_at: "Pointer",
    total: "Tensors",
    top: "Tensors",
    weight: "Tensors",
    tile: "_QueryTile",
    sizes: "AttentionSizes",
    SHAPE: tl.constexpr,
) -> None:
    """Write the output, and if it is partial, the log-sum-exp, which is -inf without keys."""
    width: tl.constexpr = SHAPE.widths[2]
    columns = tl.arange(0, SHAPE.padded[2])
    place = tile.token * sizes.query_heads + tile.head
    inside = tile.inside[:, None] & (columns < width)[None, :]
    divisor = tl.where(weight == 0.0, 1.0, weight)
    out = total / divisor[:, None]
    if SHAPE.is_partial:
        place *= width + 1
        lse = tl.where(weight == 0.0, float("-inf"), top + tl.log(divisor))
        tl.store(out_at + place + width, lse, tile.inside)
    else:
        place *= width
    out = out.to(out_at.dtype.element_ty)
    tl.store(out_at + place[:, None] + columns[None, :], out, inside)


@triton.jit
def _state_places(
    segment: "Count", tile: "_QueryTile", sizes: "AttentionSizes", SHAPE: tl.constexpr
) -> "Tensors":
    """Return where the states of a segment start in the workspace [segments, t, n, d_v + 2]."""
    place = segment * sizes.tokens + tile.token
    return (place * sizes.query_heads + tile.head) * (SHAPE.widths[2] + 2)


@triton.jit
def _attend(
    tensors: "AttentionTensors",
    sizes: "AttentionSizes",
    scale: "Any",
    cap: "Any",
    out_at: "Pointer",
    states_at: "Pointer",
    SHAPE: tl.constexpr,
    IS_SPLIT: tl.constexpr,
) -> None:
    """Write the output of a tile, or the states of one of its segments."""
    tile = _locate_tile(tensors, sizes, SHAPE)
    q = _load_queries(
        tensors.q,
        tile,
        sizes.q_token,
        sizes.q_head,
        SHAPE,
        SHAPE.widths[0],
        SHAPE.padded[0],
    )
    q_rope = q
    if SHAPE.widths[1] > 0:
        q_rope = _load_queries(
            tensors.q_rope,
            tile,
            sizes.q_rope_token,
            sizes.q_rope_head,
            SHAPE,
            SHAPE.widths[1],
            SHAPE.padded[1],
        )
    first = tile.first_key // SHAPE.segment
    end = (tile.end_key + SHAPE.segment - 1) // SHAPE.segment
    if IS_SPLIT:
        segment = first + tl.program_id(2)
        if (segment < end) & (tile.first_key < tile.end_key):
            total, top, weight = _attend_segment(
                segment, q, q_rope, tensors, sizes, tile, scale, cap, SHAPE
            )
            width: tl.constexpr = SHAPE.widths[2]
            columns = tl.arange(0, SHAPE.padded[2])
            place = states_at + _state_places(tl.program_id(2), tile, sizes, SHAPE)
            inside = tile.inside[:, None] & (columns < width)[None, :]
            tl.store(place[:, None] + columns[None, :], total, inside)
            tl.store(place + width, top, tile.inside)
            tl.store(place + width + 1, weight, tile.inside)
    else:
        total, top, weight = _start_state(tensors, tile, SHAPE)
        for segment in range(first, end):
            new_total, new_top, new_weight = _attend_segment(
                segment, q, q_rope, tensors, sizes, tile, scale, cap, SHAPE
            )
            total, top, weight = _merge(total, top, weight, new_total, new_top, new_weight)
        _write_output(out_at, total, top, weight, tile, sizes, SHAPE)


@triton.jit
def _merge_segments(
    tensors: "AttentionTensors",
    sizes: "AttentionSizes",
    out_at: "Pointer",
    states_at: "Pointer",
    SHAPE: tl.constexpr,
) -> None:
    """Write the output of a tile from the states of its segments."""
    tile = _locate_tile(tensors, sizes, SHAPE)
    width: tl.constexpr = SHAPE.widths[2]
    columns = tl.arange(0, SHAPE.padded[2])
    inside = tile.inside[:, None] & (columns < width)[None, :]
    total, top, weight = _start_state(tensors, tile, SHAPE)
    first = tile.first_key // SHAPE.segment
    end = (tile.end_key + SHAPE.segment - 1) // SHAPE.segment
    end = tl.where(tile.first_key < tile.end_key, end, first)
    for segment in range(0, end - first):
        place = states_at + _state_places(segment, tile, sizes, SHAPE)
        new_total = tl.load(place[:, None] + columns[None, :], inside, 0.0)
        new_top = tl.load(place + width, tile.inside, 0.0)
        new_weight = tl.load(place + width + 1, tile.inside, 0.0)
        total, top, weight = _merge(total, top, weight, new_total, new_top, new_weight)
    _write_output(out_at, total, top, weight, tile, sizes, SHAPE)


# --- storing


class _StoreSizes(NamedTuple):
    """Sizes and strides of the storing kernel."""

    heads: int
    row_token: int
    row_head: int
    block: int
    head: int
    token: int


def store_rows(cache: KVBlocks, rows: Tensor, slots: Tensor) -> None:
    """Write new keys or values to their slots: see `store` in kernels/attention/paged.py. The bits
    are those of `quantize_rows`."""
    if len(slots) == 0:
        return
    rows = rows if rows.stride(2) == 1 else rows.contiguous()
    _, g, block_size, width = cache.data.shape
    padded = next_power_of_two(width)
    heads = min(next_power_of_two(g), max(1, TILE // padded))
    sizes = _StoreSizes(g, *rows.stride()[:2], *cache.data.stride()[:3])
    _store_rows[(len(slots), -(-g // heads))](
        rows,
        slots,
        _as_integers(cache),
        rows if cache.scales is None else cache.scales,
        sizes,
        BLOCK_SIZE=block_size,
        WIDTH=width,
        PADDED=padded,
        HEADS=heads,
        KIND=KINDS.get(cache.data.dtype, 0),
        LARGEST=LARGEST.get(cache.data.dtype, 0.0),
    )


@triton.jit
def _quantize(x: "Tensors", KIND: tl.constexpr) -> "Tensors":
    """Round to int8, or to the bits of fp8 (e4m3), to the nearest and ties to even; NaN gives 0 or
    NaN."""
    if KIND == 1:
        x = tl.where(x == x, x, 0.0)
        y = ((x + 12582912.0) - 12582912.0).to(tl.int8)  # 1.5 * 2^23: has no bits for fractions
    else:
        size = tl.abs(x)
        bits = size.to(tl.int32, bitcast=True)
        # the exponent bias is 7 instead of 127, and the significand has 20 bits less
        normal = (bits - (120 << 23) + 0x7FFFF + ((bits >> 20) & 1)) >> 20
        # numbers below 2^-6 are multiples of 2^-9, the last bit of 2^14 in fp32
        subnormal = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        y = tl.where(size < 0.015625, subnormal, normal)
        y = tl.where(x == x, y, 0x7F)
        y = tl.where(x.to(tl.int32, bitcast=True) < 0, y - 128, y).to(tl.int8)
    return y


@triton.jit
def _store_rows(
    rows_at: "Pointer",
    slots_at: "Pointer",
    data_at: "Pointer",
    scales_at: "Pointer",
    sizes: "_StoreSizes",
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    HEADS: tl.constexpr,
    KIND: tl.constexpr,
    LARGEST: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    columns = tl.arange(0, PADDED)
    inside = (head < sizes.heads)[:, None] & (columns < WIDTH)[None, :]
    slot = tl.load(slots_at + token)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    place = token * sizes.row_token + head[:, None] * sizes.row_head + columns[None, :]
    x = tl.load(rows_at + place, inside, 0.0)
    if KIND > 0:
        x = x.to(tl.float32)
        size = tl.max(tl.abs(x), 1)
        # the maximum of a row with a NaN may be that of its numbers
        size = tl.where(tl.sum((x != x).to(tl.int32), 1) > 0, float("nan"), size)
        scale = tl.math.div_rn(size, tl.full((HEADS,), LARGEST, tl.float32))
        smallest = 1.1754943508222875e-38  # a row of zeros has a divisor
        scale = tl.where(scale < smallest, smallest, scale)
        x = _quantize(tl.math.div_rn(x, tl.broadcast_to(scale[:, None], x.shape)), KIND)
        scale_place = (block * sizes.heads + head) * BLOCK_SIZE + offset
        tl.store(scales_at + scale_place, scale, head < sizes.heads)
    place = block * sizes.block + head[:, None] * sizes.head + offset * sizes.token
    tl.store(data_at + place + columns[None, :], x.to(data_at.dtype.element_ty), inside)
