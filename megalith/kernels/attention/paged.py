"""Attention over a paged KV cache: keys and values stay in their blocks.

Backends: `numba` (kernels/attention/paged_numba.py) reads every block once where it is, on CPUs in
fp32 and bf16; `triton` (kernels/triton/paged_attention.py) does so on GPUs; `torch` gathers the
visible keys of all rows with equally many queries; `reference` gathers row by row and calls
`reference_attention`. A row with many queries, a prefill, is gathered and passed to
`kernels.attention.dispatch.attention`, whose matmuls are faster then.

The numba backend processes keys in segments of 128 tokens at fixed absolute positions and merges
them in order (triton: of 512), so that the output of a query is bitwise the same for every division
of its sequence into steps, other rows, number of threads and block size. Source: Kwon et al. 2023,
arXiv:2309.06180 (paged KV cache); Dao et al. 2023, "Flash-Decoding" (segments of one sequence).

Under decode context parallelism each rank stores a part of the tokens (`TokenShard`): the queries
of all heads that share them are gathered, each rank attends to its own keys, and the outputs are
merged by log-sum-exp in the order of ranks. A prefill gathers the keys from the ranks instead.

Blocks in int8 or fp8 are dequantized while they are read: the kernels multiply the scores by the
scales of the keys, and the weights by those of the values.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import accumulate
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megalith.config.kernels import BackendName
from megalith.errors import ConfigError
from megalith.kernels import cpu_threads
from megalith.kernels.attention.dispatch import attention, reference_attention, visible_key_lengths
from megalith.kernels.attention.kv_blocks import LARGEST, KVBlocks, as_blocks
from megalith.kernels.attention.scores import PLAIN, Scores
from megalith.kernels.packed import PackedSeqParams, seq_params_from_queries
from megalith.kernels.triton import launch
from megalith.plan.serving.cache_layout import ALL_TOKENS, TokenShard

Lengths = tuple[tuple[int, int], ...]
PagedBackend = Literal["numba", "triton", "torch", "reference"]

NUMBA: tuple[BackendName, ...] = "auto", "numba", "paged"
"""Settings with which the numba loops are used."""

SEGMENT = 128
"""Tokens per segment: sections 5.4 and 20 of the inference spec fix it, and the kernel uses it."""

MAX_KERNEL_QUERIES = 32
"""Queries of a row up to which the numba kernel is faster than gathering its keys and values.

Measured by benchmarks/paged_attention.py, 1000 keys, one core with AVX-512, torch 2.13: with 16
queries 1.8 to 3.5 times as fast as gathering, with 64 queries 1.1 to 1.7 in fp32 and 0.5 to 1.3 in
bf16, with 256 queries 1.0 and 0.3 to 0.6 (heads of 64 features; 32 query heads of 128 on 8).
"""

MAX_TILE_ROWS = 64
"""Queries times query heads per key/value head of a tile: heuristic, bounds scratch memory."""

MAX_TRITON_WIDTH = 512
"""Features of a query, key or value that a Triton program holds."""

MAX_GATHERED_ELEMENTS = 1 << 26
"""Elements that the torch backend gathers at once: heuristic, 256 MiB in fp32."""


class TokenRanks(Protocol):
    """Communication among the ranks over which tokens are sharded: each method is a
    collective."""

    @property
    def shard(self) -> TokenShard:
        """The tokens of this rank."""

    def gather_heads(self, q: Tensor) -> Tensor:
        """Return the query heads of all ranks: q [t, n_local, d] -> [t, n, d]."""

    def gather_rows(self, rows: Tensor) -> Tensor:
        """Return the rows of all ranks, equally many of each: [rows, g, d] -> [ranks * rows, g,
        d]."""

    def exchange_heads(self, x: Tensor) -> Tensor:
        """Return what every rank has of this rank's heads: x [t, n, d] -> [ranks, t, n_local,
        d]."""


@dataclass(frozen=True, slots=True, eq=False)  # tensors do not compare to one truth value
class PagedMetadata:
    """Rows of a step, each one sequence: its queries, and the blocks of its keys and values.

    Query i of a row with `queries` new tokens is token keys - queries + i of its sequence.
    """

    block_tables: Tensor
    """int32 [rows, max_blocks]: block of each `block_size` tokens of a row; -1: freed, or none; no
    query of the row attends to its tokens."""

    cu_seqlens_q: Tensor
    """int32 [rows + 1]: start of each row's queries; from 0 to t."""

    kv_lengths: Tensor
    """int32 [rows]: keys of each row, those of this step included."""

    lengths: Lengths
    """(queries, keys) of each row, on the host; a row may have no queries."""

    block_size: int
    """Tokens per block, of those that this rank stores."""

    ranks: TokenRanks | None = None
    """Ranks that store the other tokens; None: this rank stores all of them."""

    is_static: bool = False
    """Whether a graph replays the kernels with other rows. `lengths` are then upper bounds, and
    kernels read the lengths from the tensors. Tokens after the last row are padding, whose output
    is 0; rows may have no queries."""

    shared: dict[Hashable, "_NumbaStep"] = field(default_factory=dict, init=False)
    """What the layers of a step have in common, by what it depends on."""

    @property
    def shard(self) -> TokenShard:
        """The tokens that this rank stores."""
        return ALL_TOKENS if self.ranks is None else self.ranks.shard

    @property
    def num_tokens(self) -> int:
        """Number of queries t of all rows."""
        return sum(queries for queries, _ in self.lengths)


def build_paged_metadata(
    block_tables: Tensor,
    lengths: Sequence[tuple[int, int]],
    block_size: int,
    ranks: TokenRanks | None = None,
) -> PagedMetadata:
    """Return the metadata of rows with (queries, keys) of `lengths`; block_tables int32 [rows,
    max_blocks]; `ranks`: those over which tokens are sharded."""
    device = block_tables.device
    starts = [0, *accumulate(queries for queries, _ in lengths)]
    return PagedMetadata(
        block_tables=block_tables,
        cu_seqlens_q=torch.tensor(starts, dtype=torch.int32, device=device),
        kv_lengths=torch.tensor([k for _, k in lengths], dtype=torch.int32, device=device),
        lengths=tuple(lengths),
        block_size=block_size,
        ranks=ranks,
    )


class PagedKeys(NamedTuple):
    """Queries and caches of a call; scores are sums over the parts of queries and keys."""

    queries: tuple[Tensor, ...]
    """[t, n, d] each: one part, or two for MLA: latent and rotated."""

    keys: tuple[KVBlocks, ...]
    """[blocks, g, T, d] of each part."""

    values: KVBlocks
    """[blocks, g, T, d_v]."""

    @property
    def shared(self) -> int:
        """Query heads per key/value head."""
        return self.queries[0].shape[1] // self.num_heads

    @property
    def num_heads(self) -> int:
        """Key/value heads."""
        return self.values.data.shape[1]

    @property
    def value_width(self) -> int:
        """Features of a value."""
        return self.values.data.shape[3]

    def new_output(self) -> Tensor:
        """Return an uninitialized output [t, n, d_v]."""
        q = self.queries[0]
        return q.new_empty(*q.shape[:2], self.value_width)

    def new_partial_output(self) -> Tensor:
        """Return an uninitialized output and log-sum-exp, [t, n, d_v + 1], in fp32 or float64."""
        q = self.queries[0]
        dtype = torch.promote_types(q.dtype, torch.float32)
        return q.new_empty(*q.shape[:2], self.value_width + 1, dtype=dtype)


# --- storing


def store(
    cache: Tensor | KVBlocks, rows_new: Tensor, slots: Tensor, *, kernel: BackendName = "auto"
) -> None:
    """Write new keys or values to their slots in the cache, in place; quantize them if it is.

    cache [blocks, g, T, d], rows_new [t, g, d] of the same dtype or of that of the model, slots
    int64 [t] = block * T + offset of each token, all different. Works for every dtype and device.
    kernel="auto": triton or numba where it supports the inputs, else torch; all store the same
    bits.
    """
    stored = as_blocks(cache)
    if kernel in NUMBA and _can_store_by_numba(stored, rows_new):
        slots = slots.contiguous()
        _prepare_store(stored, rows_new, slots)()
        return
    if kernel in ("auto", "triton") and _can_store_by_triton(stored, rows_new):
        from megalith.kernels.triton.paged_attention import store_rows

        store_rows(stored, rows_new, slots)
        return
    block_size = stored.data.shape[2]
    blocks = slots.div(block_size, rounding_mode="floor")
    stored.write(blocks, slots - blocks * block_size, rows_new)


def _can_store_by_triton(cache: KVBlocks, rows_new: Tensor) -> bool:
    data = cache.data
    return (
        launch.can_use(rows_new)
        and (data.dtype == rows_new.dtype if cache.scales is None else data.dtype in LARGEST)
        and data.stride(3) == 1
    )


def _can_store_by_numba(cache: KVBlocks, rows_new: Tensor) -> bool:
    return (
        cache.scales is None
        and cpu_threads.can_use(rows_new, cache.data)
        and rows_new.stride(2) == cache.data.stride(3) == 1
    )


def _prepare_store(cache: KVBlocks, rows_new: Tensor, slots: Tensor) -> cpu_threads.LoopCall:
    """Return the call of the loop that stores rows in slots, its first argument."""
    from megalith.kernels.attention import paged_numba  # importing numba takes half a second

    data = cache.data
    block = (
        slots.data_ptr(),
        *(*rows_new.shape, data.shape[2], *rows_new.stride()[:2], *data.stride()[:3]),
        *(rows_new.data_ptr(), data.data_ptr()),
    )
    return cpu_threads.prepare(
        paged_numba.paged_store, data.dtype, block, elements=rows_new.numel()
    )


# --- supported scores


def unsupported_reason(scores: Scores, *, has_attention_mask: bool = False) -> str | None:
    """Return why paged attention does not support these scores, or None if it does.

    A caller then gathers keys and values and calls `kernels.attention.dispatch.attention`.
    """
    if scores.relative is not None:
        return "a relative position bias needs a bias per pair of query and key"
    if has_attention_mask:
        return "an attention mask needs a value per pair of query and key"
    if not scores.causal:
        return "attention is not causal, so earlier tokens would attend to keys of later steps"
    return "attention dropout is only for training" if scores.dropout is not None else None


# --- attention


def paged_attention(
    q: Tensor,
    key_cache: Tensor | KVBlocks,
    value_cache: Tensor | KVBlocks,
    metadata: PagedMetadata,
    scores: Scores = PLAIN,
    sinks: Tensor | None = None,
    *,
    batch_invariant: bool = False,
    kernel: BackendName = "auto",
) -> Tensor:
    """Causal attention of each row's queries to the keys of its blocks; n/g query heads share one
    key/value head.

    q [t, n, d], key_cache [blocks, g, T, d], value_cache [blocks, g, T, d_v] -> [t, n, d_v]. Keys
    and values of this step are stored already. `sinks` [n]: see `masked_attention`.
    kernel="auto": numba or triton for rows of few queries, gather + `attention` for others, torch
    where they do not support the inputs; `batch_invariant`: the same kernel for all rows. No
    gradients.

    Raises:
        ConfigError: the scores are not supported, see `unsupported_reason`, or `kernel` does not
            support the inputs.
    """
    paged = PagedKeys((q,), (as_blocks(key_cache),), as_blocks(value_cache))
    return _attend(paged, metadata, scores, sinks, batch_invariant, kernel)


def paged_latent_attention(
    q_latent: Tensor,
    q_rope: Tensor,
    latent_cache: Tensor | KVBlocks,
    rope_cache: Tensor | KVBlocks,
    metadata: PagedMetadata,
    scores: Scores,
    *,
    batch_invariant: bool = False,
    kernel: BackendName = "auto",
) -> Tensor:
    """Attention of the absorbed form of MLA: one key/value head, whose keys are latents and rotated
    keys, and whose values are the latents.

    q_latent [t, n, r], q_rope [t, n, d_rope], latent_cache [blocks, 1, T, r], rope_cache [blocks,
    1, T, d_rope] -> [t, n, r]. `scores.scale` must be set: 1 / sqrt(r + d_rope) is not the scale of
    the expanded form. Otherwise as `paged_attention`. Source: DeepSeek-AI 2024, arXiv:2405.04434.

    Raises:
        ConfigError: as `paged_attention`.
    """
    assert scores.scale is not None, "the absorbed form needs the scale of the expanded form"
    latents = as_blocks(latent_cache)
    paged = PagedKeys((q_latent, q_rope), (latents, as_blocks(rope_cache)), latents)
    return _attend(paged, metadata, scores, None, batch_invariant, kernel)


def _attend(
    paged: PagedKeys,
    metadata: PagedMetadata,
    scores: Scores,
    sinks: Tensor | None,
    batch_invariant: bool,
    kernel: BackendName,
) -> Tensor:
    if (reason := unsupported_reason(scores)) is not None:
        raise ConfigError(
            f"paged attention does not support these scores: {reason}. Gather the keys and values "
            "and use kernels.attention.dispatch.attention."
        )
    if metadata.num_tokens == 0:
        return paged.new_output()
    scores = _with_scale(scores, paged)
    if kernel == "reference":
        return _gathered(paged, metadata, scores, sinks, reference_attention)
    backend = select_paged_backend(paged, kernel)
    kernels: dict[PagedBackend, PagedKernel] = {"numba": _numba, "triton": _triton}
    kernel_of_step = kernels.get(backend, _torch)
    if metadata.is_static:
        static_kernel = _triton if backend == "triton" else _torch_static
        return _attend_sharded(static_kernel, paged, metadata, scores, sinks)
    attend: PagedFunction = partial(_attend_sharded, kernel_of_step)
    is_prefill = [queries > MAX_KERNEL_QUERIES for queries, _ in metadata.lengths]
    if batch_invariant or kernel != "auto" or not any(is_prefill):
        return attend(paged, metadata, scores, sinks)
    out = paged.new_output()
    for rows, run in (
        ([not prefill for prefill in is_prefill], attend),
        (is_prefill, partial(_gathered, attend=attention)),
    ):
        _attend_rows(out, rows, paged, metadata, scores, sinks, run)
    return out


def _with_scale(scores: Scores, paged: PagedKeys) -> Scores:
    return replace(scores, scale=scores.factor(sum(part.shape[2] for part in paged.queries)))


PagedFunction = Callable[[PagedKeys, PagedMetadata, Scores, Tensor | None], Tensor]


class PagedKernel(Protocol):
    """Attention to the keys of this rank: [t, n, d_v], or with `is_partial` the output and its
    log-sum-exp, [t, n, d_v + 1] in fp32 or float64."""

    def __call__(
        self,
        paged: PagedKeys,
        metadata: PagedMetadata,
        scores: Scores,
        sinks: Tensor | None,
        *,
        is_partial: bool = False,
    ) -> Tensor:
        """Return the output."""


def _attend_sharded(
    attend: PagedKernel,
    paged: PagedKeys,
    metadata: PagedMetadata,
    scores: Scores,
    sinks: Tensor | None,
) -> Tensor:
    """Attention to the keys of this rank, and of those with the other tokens if there are any."""
    ranks = metadata.ranks
    if ranks is None:
        return attend(paged, metadata, scores, sinks)
    q = paged.queries[0]
    if scores.off_by_one:
        sinks = q.new_zeros(q.shape[1])
    queries = tuple(ranks.gather_heads(part) for part in paged.queries)
    without_sink = replace(scores, off_by_one=False)
    local = attend(paged._replace(queries=queries), metadata, without_sink, None, is_partial=True)
    return merge_partial_attention(ranks.exchange_heads(local), sinks).to(q.dtype)


def merge_partial_attention(partial_outputs: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Merge attention to disjoint sets of keys: outputs and their log-sum-exps, [sets, t, n, d_v +
    1], -> [t, n, d_v]. The sums are in the order of sets; `sinks` [n]: see `masked_attention`.
    Padding has no keys in any set, and the output 0.

    Source: Milakov and Gimelshein 2018, arXiv:1805.02867.
    """
    outputs, lse = partial_outputs[..., :-1], partial_outputs[..., -1:]
    largest = lse.amax(0)
    if sinks is not None:
        sinks = sinks.to(lse.dtype).view(1, -1, 1)
        largest = torch.maximum(largest, sinks)
    largest = largest.masked_fill(largest == -torch.inf, 0.0)  # of padding
    weights = (lse - largest).exp()
    total = torch.zeros_like(largest) if sinks is None else (sinks - largest).exp()
    merged = torch.zeros_like(outputs[0])
    for weight, output in zip(weights, outputs, strict=True):
        total = total + weight
        merged = merged + weight * output
    return merged / total.masked_fill(total == 0.0, 1.0)


def select_paged_backend(paged: PagedKeys, kernel: BackendName) -> PagedBackend:
    """Return the backend that `kernel` names, or the fastest one that supports the inputs.

    Raises:
        ConfigError: `kernel` names a backend that does not support them.
    """
    q, caches = paged.queries[0], [blocks.data for blocks in (*paged.keys, paged.values)]
    compared = () if paged.values.scales is not None else caches
    has_rows = all(x.stride(-1) == 1 for x in (*paged.queries, *caches))
    by_numba = has_rows and cpu_threads.can_use(*paged.queries, *compared)
    by_triton = has_rows and _triton_supports(paged)
    if (kernel in ("numba", "paged") and not by_numba) or (kernel == "triton" and not by_triton):
        supported = "fp32 or bf16 on CPUs,"
        if kernel == "triton":
            supported = (
                "fp32, bf16 or fp16 on GPUs with Triton, heads of at most "
                f"{MAX_TRITON_WIDTH} features,"
            )
        raise ConfigError(
            f"kernel={kernel} does not support {str(q.dtype).removeprefix('torch.')} queries on "
            f"{q.device.type} with caches in {str(caches[0].dtype).removeprefix('torch.')}: it "
            f"takes {supported} and caches in the same dtype, int8 or fp8. Use kernel=torch or "
            "kernel=auto."
        )
    if by_triton and kernel in ("auto", "triton"):
        return "triton"
    return "numba" if by_numba and kernel in ("auto", "numba", "paged") else "torch"


def _triton_supports(paged: PagedKeys) -> bool:
    """Return whether the Triton kernel supports these tensors."""
    q, caches = paged.queries[0], [blocks.data for blocks in (*paged.keys, paged.values)]
    return (
        launch.can_use(*paged.queries)
        and all(part.dtype == q.dtype for part in paged.queries)
        and all(x.shape[-1] <= MAX_TRITON_WIDTH for x in (*paged.queries, *caches))
        and all(data.dtype in (*LARGEST, q.dtype) for data in caches)
    )


def _attend_rows(
    out: Tensor,
    selected: list[bool],
    paged: PagedKeys,
    metadata: PagedMetadata,
    scores: Scores,
    sinks: Tensor | None,
    attend: PagedFunction,
) -> None:
    """Write the attention output of the selected rows to `out` [t, n, d_v]."""
    rows = [row for row, is_selected in enumerate(selected) if is_selected]
    lengths = [metadata.lengths[row] for row in rows]
    if not any(queries for queries, _ in lengths):
        return
    starts = list(accumulate((queries for queries, _ in metadata.lengths), initial=0))
    tokens = torch.cat([torch.arange(starts[row], starts[row + 1]) for row in rows]).to(out.device)
    tables = metadata.block_tables[torch.tensor(rows, device=out.device)]
    part = build_paged_metadata(tables, lengths, metadata.block_size, metadata.ranks)
    queries = tuple(q[tokens] for q in paged.queries)
    out[tokens] = attend(paged._replace(queries=queries), part, scores, sinks)


# --- gather


class GatheredKeys(NamedTuple):
    """Where the last keys of each row are: those that this rank stores, and their order among the
    rows of all ranks. Layers with the same view share it."""

    blocks: Tensor
    """int64 [stored]."""

    offsets: Tensor
    """int64 [stored]: offsets in their blocks."""

    gather_index: Tensor | None
    """int64 [t_kv]: index of each key among those of all ranks, each padded to the same number;
    None: this rank stores all of them."""

    num_padded: int
    """Number of keys of a rank after padding."""

    ranks: TokenRanks | None

    @staticmethod
    def locate(metadata: PagedMetadata, lengths: Lengths) -> "GatheredKeys":
        """Return the slots of as many last keys of each row as `lengths` says (queries, keys)."""
        shard, block_size = metadata.shard, metadata.block_size
        num_keys = torch.tensor([keys for _, keys in lengths])
        rows = torch.repeat_interleave(torch.arange(len(lengths)), num_keys)
        first = torch.tensor([keys for _, keys in metadata.lengths]) - num_keys
        starts = num_keys.cumsum(0) - num_keys
        positions = torch.arange(len(rows)) + (first - starts)[rows]
        gather_index, num_padded = None, len(rows)
        if metadata.ranks is not None:
            owners = positions % shard.num_ranks
            counts = torch.bincount(owners, minlength=shard.num_ranks)
            num_padded = int(counts.max())
            by_owner = owners.argsort(stable=True)
            shift = torch.arange(shard.num_ranks) * num_padded - (counts.cumsum(0) - counts)
            gather_index = torch.empty_like(positions)
            gather_index[by_owner] = torch.arange(len(rows)) + shift[owners[by_owner]]
            stored = owners == shard.rank
            rows, positions = rows[stored], positions[stored] // shard.num_ranks
            gather_index = gather_index.to(metadata.block_tables.device)
        rows, positions = (x.to(metadata.block_tables.device) for x in (rows, positions))
        blocks = metadata.block_tables[rows, positions // block_size].long()
        return GatheredKeys(
            blocks, positions % block_size, gather_index, num_padded, metadata.ranks
        )

    def read(self, cache: Tensor | KVBlocks, dtype: torch.dtype) -> Tensor:
        """Return the keys or values in `dtype`, of all ranks: cache [blocks, g, T, d] -> [t_kv, g,
        d]."""
        rows = as_blocks(cache).read(self.blocks, self.offsets, dtype)
        if self.ranks is None or self.gather_index is None:
            return rows
        padded = rows.new_zeros(self.num_padded, *rows.shape[1:])
        padded[: len(rows)] = rows
        return self.ranks.gather_rows(padded)[self.gather_index]


def _gathered(
    paged: PagedKeys,
    metadata: PagedMetadata,
    scores: Scores,
    sinks: Tensor | None,
    attend: Callable[[Tensor, Tensor, Tensor, PackedSeqParams, Scores, Tensor | None], Tensor],
) -> Tensor:
    """Gather the visible keys and values of all rows, of all ranks, and call `attend`."""
    lengths = tuple((q, k if q else 0) for q, k in metadata.lengths)
    lengths = visible_key_lengths(lengths, scores)
    dtype = paged.queries[0].dtype
    gathered = GatheredKeys.locate(metadata, lengths)
    keys = [gathered.read(cache, dtype) for cache in paged.keys]
    is_latent = paged.values is paged.keys[0]
    values = keys[0] if is_latent else gathered.read(paged.values, dtype)
    q, k = (x[0] if len(x) == 1 else torch.cat(x, dim=-1) for x in (list(paged.queries), keys))
    seq_params = seq_params_from_queries(list(lengths), device=q.device)
    return attend(q, k, values, seq_params, scores, sinks)


# --- torch


def _torch(
    paged: PagedKeys,
    metadata: PagedMetadata,
    scores: Scores,
    sinks: Tensor | None,
    *,
    is_partial: bool = False,
) -> Tensor:
    """Attention of rows with equally many queries and similarly many keys in one batch."""
    q, out = paged.queries[0], paged.new_partial_output() if is_partial else paged.new_output()
    visible = visible_key_lengths(metadata.lengths, scores)
    starts = list(accumulate((queries for queries, _ in metadata.lengths), initial=0))
    for rows in _batches_of_rows(visible, paged):
        queries = visible[rows[0]][0]
        first_tokens = torch.tensor([starts[row] for row in rows], device=q.device)
        tokens = first_tokens.unsqueeze(1) + torch.arange(queries, device=q.device)
        positions = _KeyPositions.of_rows(rows, visible, metadata, scores)
        out[tokens] = _attend_batch(paged, tokens, positions, scores, sinks, is_partial=is_partial)
    return out


def _batches_of_rows(visible: Lengths, paged: PagedKeys) -> list[list[int]]:
    """Return batches of rows with equally many queries, and numbers of keys up to the same power of
    two."""
    width = sum(cache.data.shape[3] for cache in (*paged.keys, paged.values))
    per_key = paged.num_heads * width
    batches: dict[tuple[int, int, int], list[int]] = {}
    num_rows: dict[tuple[int, int], int] = {}
    for row, (queries, keys) in enumerate(visible):
        if queries == 0:
            continue
        key = queries, (keys - 1).bit_length()
        limit = max(1, MAX_GATHERED_ELEMENTS // (per_key << key[1]))
        number = num_rows[key] = num_rows.get(key, -1) + 1
        batches.setdefault((*key, number // limit), []).append(row)
    return list(batches.values())


class _KeyPositions(NamedTuple):
    """Places of the visible keys of some rows, padded to the longest."""

    blocks: Tensor
    """int64 [rows, keys]; 0 for padding."""

    offsets: Tensor
    """int64 [rows, keys]: offsets in their blocks."""

    is_key: Tensor
    """bool [rows, keys]: False for padding."""

    mask: Tensor
    """bool [rows, queries, keys]: attention mask."""

    @staticmethod
    def of_rows(
        rows: list[int], visible: Lengths, metadata: PagedMetadata, scores: Scores
    ) -> "_KeyPositions":
        """Return the slots of the keys that the queries of these rows see."""
        device, shard = metadata.block_tables.device, metadata.shard
        num_queries, total = visible[rows[0]][0], [metadata.lengths[row][1] for row in rows]
        # among the stored keys of each row
        firsts = [shard.count_before(metadata.lengths[row][1] - visible[row][1]) for row in rows]
        ends = [shard.count_before(keys) for keys in total]
        longest = max(1, *(end - first for first, end in zip(firsts, ends, strict=True)))
        first, end, own = (
            torch.tensor(each, device=device).unsqueeze(1) for each in (firsts, ends, total)
        )
        stored = first + torch.arange(longest, device=device)
        is_key = stored < end
        own = own - num_queries + torch.arange(num_queries, device=device)
        keys, own = (stored * shard.num_ranks + shard.rank).unsqueeze(1), own.unsqueeze(2)
        mask = keys <= own
        if scores.window is not None:
            first = own - scores.window + 1
            first = (
                own.div(scores.window, rounding_mode="floor") * scores.window
                if (scores.chunked)
                else first
            )
            mask &= keys >= first
        stored = stored.where(is_key, 0)
        tables = metadata.block_tables[torch.tensor(rows, device=device)].long()
        blocks = tables.gather(1, stored // metadata.block_size).where(is_key, 0)
        mask &= is_key.unsqueeze(1)
        return _KeyPositions(blocks, stored % metadata.block_size, is_key, mask)

    @staticmethod
    def of_tokens(
        rows: Tensor, own: Tensor, metadata: PagedMetadata, scores: Scores
    ) -> "_KeyPositions":
        """Return the slots of the keys that each token sees, from tensors: `rows` int64 [t], `own`
        int64 [t]: its position, negative for padding. [t, keys], for one query each."""
        shard, tables = metadata.shard, metadata.block_tables
        num_keys = tables.shape[1] * metadata.block_size
        stored = torch.arange(num_keys, device=tables.device).unsqueeze(0)
        keys, own = stored * shard.num_ranks + shard.rank, own.unsqueeze(1)
        is_key = keys <= own
        if scores.window is not None:
            first = own - scores.window + 1
            if scores.chunked:
                first = own.div(scores.window, rounding_mode="floor") * scores.window
            is_key &= keys >= first
        blocks = tables.repeat_interleave(metadata.block_size, dim=1)[rows].long()
        offsets = (stored % metadata.block_size).expand_as(is_key)
        return _KeyPositions(blocks.where(is_key, 0), offsets, is_key, is_key.unsqueeze(1))

    def gather(self, cache: KVBlocks, dtype: torch.dtype) -> Tensor:
        """Return keys or values [rows, g, keys, d]; 0 for padding, whose block may hold NaN."""
        gathered = cache.read(self.blocks, self.offsets, dtype)
        return gathered.masked_fill_(~self.is_key[..., None, None], 0).transpose(1, 2)


def _attend_batch(
    paged: PagedKeys,
    tokens: Tensor,
    positions: _KeyPositions,
    scores: Scores,
    sinks: Tensor | None,
    *,
    is_partial: bool,
) -> Tensor:
    """Return the attention output of tokens int64 [rows, queries]: [rows, queries, n, d_v], or
    with the log-sum-exp [rows, queries, n, d_v + 1] if it is partial."""
    dtype = torch.promote_types(paged.queries[0].dtype, torch.float32)
    s, values = None, None
    for queries, cache in zip(paged.queries, paged.keys, strict=True):
        keys = positions.gather(cache, dtype)
        values = keys if cache is paged.values else values
        q = queries[tokens].unflatten(2, (keys.shape[1], paged.shared))
        # [rows, g, shared * queries, d]: query heads of one key/value head share a matmul
        q = q.permute(0, 2, 3, 1, 4).flatten(2, 3).to(dtype)
        part = q @ keys.transpose(2, 3)
        s = part if s is None else s + part
    assert s is not None
    values = positions.gather(paged.values, dtype) if values is None else values
    s = s.unflatten(2, (paged.shared, -1)) * scores.factor(1)
    if scores.softcap is not None:
        s = scores.softcap * torch.tanh(s / scores.softcap)
    s = s.masked_fill(~positions.mask[:, None, None], float("-inf"))
    if sinks is not None or scores.off_by_one:
        n = paged.queries[0].shape[1]
        added = s.new_zeros(n) if scores.off_by_one or sinks is None else sinks.to(dtype)
        column = added.view(1, s.shape[1], s.shape[2], 1, 1).expand(*s.shape[:-1], 1)
        weights = torch.cat([s, column], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = s.softmax(-1)
    if is_partial:  # NaN for a query that sees no key of this rank
        weights = weights.masked_fill(~positions.mask[:, None, None], 0)
    out = weights.flatten(2, 3) @ values
    out = out.unflatten(2, (paged.shared, -1))
    if is_partial:
        out = torch.cat([out, s.logsumexp(-1, keepdim=True)], dim=-1)
    out = out.permute(0, 3, 1, 2, 4).flatten(2, 3)
    return out if is_partial else out.to(paged.queries[0].dtype)


def _torch_static(
    paged: PagedKeys,
    metadata: PagedMetadata,
    scores: Scores,
    sinks: Tensor | None,
    *,
    is_partial: bool = False,
) -> Tensor:
    """Attention of each token to as many keys as a block table has, by operations whose shapes
    depend on no length, so that a graph can replay them."""
    tokens = torch.arange(len(paged.queries[0]), device=paged.queries[0].device)
    ends = metadata.cu_seqlens_q[1:].long()
    rows = torch.searchsorted(ends, tokens, right=True)
    is_token = rows < len(ends)
    rows = rows.where(is_token, 0)
    own = metadata.kv_lengths.long()[rows] - (ends[rows] - tokens)
    positions = _KeyPositions.of_tokens(rows, own.where(is_token, -1), metadata, scores)
    out = _attend_batch(
        paged, tokens.unsqueeze(1), positions, scores, sinks, is_partial=is_partial
    ).squeeze(1)
    return out.masked_fill(~is_token[:, None, None], 0)


# --- triton


def _triton(
    paged: PagedKeys,
    metadata: PagedMetadata,
    scores: Scores,
    sinks: Tensor | None,
    *,
    is_partial: bool = False,
) -> Tensor:
    """Attention in place, by the Triton kernels."""
    from megalith.kernels.triton.paged_attention import attend

    return attend(paged, metadata, scores, sinks, is_partial=is_partial)


# --- numba


class _TilePlan(NamedTuple):
    """Division of the rows of a step into tiles, and of their segments into parts; int64."""

    tiles: NDArray[np.int64]
    """[tiles, 6]: columns as in kernels/attention/paged_numba.py."""

    bounds: NDArray[np.int64]
    """[parts + 1, 2]: tile and unit at which each part starts; a tile's units are (head, segment)
    pairs."""

    splits: NDArray[np.int64]
    """[splits, 3]: tile, head, and first state in the workspace, of pairs in several parts."""

    num_states: int
    """States in the workspace."""

    max_rows: int
    """Rows of the largest tile: queries times query heads per key/value head."""


@lru_cache(maxsize=32)
def plan_tiles(
    lengths: Lengths,
    *,
    heads: int,
    shared: int,
    window: int | None,
    chunked: bool,
    parts: int,
    shard: TokenShard = ALL_TOKENS,
) -> _TilePlan:
    """Divide the queries of each row into tiles, and the segments of all tiles and key/value heads
    into `parts` of about equal work.

    `heads`: key/value heads; `shared`: query heads of each; segments are of the keys in `shard`.
    All layers of a step with the same view share the plan.
    """
    size = max(1, MAX_TILE_ROWS // shared)
    tiles = []
    token = 0
    for row, (queries, keys) in enumerate(lengths):
        for start in range(0, queries, size):
            count, position = min(size, queries - start), keys - queries + start
            first = 0
            if window is not None:
                first = position // window * window if chunked else max(0, position - window + 1)
            first_segment = shard.count_before(first) // SEGMENT
            end = -(-shard.count_before(position + count) // SEGMENT)
            num_segments = max(1, end - first_segment)  # a tile without keys is written too
            tiles.append((row, token + start, count, position, first_segment, num_segments))
        token += queries
    table = np.array(tiles, dtype=np.int64)
    # reading a segment costs about as much as the scores of one row
    weights = 1 + table[:, 2] * shared
    bounds = _divide_units(weights, table[:, 5] * heads, parts)
    splits, num_states = _find_splits(table, bounds, shared)
    return _TilePlan(table, bounds, splits, num_states, int(table[:, 2].max()) * shared)


def _divide_units(
    weights: NDArray[np.int64], num_units: NDArray[np.int64], parts: int
) -> NDArray[np.int64]:
    """Return the tile and the unit in it at which each of `parts` parts starts, and the end: int64
    [parts + 1, 2]; each tile has `num_units` units of equal weight."""
    ends = np.cumsum(weights * num_units)
    targets = ends[-1] * np.arange(parts + 1) // parts
    tiles = np.searchsorted(ends, targets, side="right")
    tiles[-1] = len(ends)
    starts = np.concatenate([[0], ends])[tiles]
    units = (targets - starts) // np.append(weights, 1)[tiles]
    return np.stack([tiles, units], axis=1).astype(np.int64)


def _find_splits(
    tiles: NDArray[np.int64], bounds: NDArray[np.int64], shared: int
) -> tuple[NDArray[np.int64], int]:
    """Return the (tile, head, first state) of pairs that a bound divides, and the number of
    states."""
    splits: dict[tuple[int, int], int] = {}
    num_states = 0
    for tile, unit in bounds[1:-1].tolist():
        segments = int(tiles[tile, 5])
        pair = tile, unit // segments
        if unit % segments and pair not in splits:
            splits[pair] = num_states
            num_states += segments * int(tiles[tile, 2]) * shared
    rows = [(tile, head, state) for (tile, head), state in splits.items()]
    return np.array(rows, dtype=np.int64).reshape(-1, 3), num_states


class _NumbaStep(NamedTuple):
    """What the numba loops of the layers of a step share."""

    arguments: tuple[int, ...]
    """The first ones of a block."""

    num_splits: int
    work: int
    kept: tuple[Tensor, ...]
    """Tensors at these addresses."""


class _NumbaShapes(NamedTuple):
    """What a `_NumbaStep` depends on besides the rows of the step."""

    scores: Scores
    strides: tuple[int, ...]
    """Of the blocks, heads and tokens of keys, rotated keys and values."""

    widths: tuple[int, ...]
    """Features of the parts of a query."""

    num_kv_heads: int
    value_width: int
    out: tuple[int, ...]
    """[t, n, d_v], or d_v + 1 if the output is partial."""

    has_sinks: bool
    is_quantized: bool

    def plan(self, metadata: PagedMetadata) -> _NumbaStep:
        """Return the arguments of the loops for the rows of a step; temporary memory included."""
        scores, shard = self.scores, metadata.shard
        num_tokens, num_heads, out_width = self.out
        visible = visible_key_lengths(metadata.lengths, scores)
        work = sum(q * k for q, k in visible) * num_heads * self.value_width // shard.num_ranks
        shared = num_heads // self.num_kv_heads
        plan = plan_tiles(
            metadata.lengths,
            heads=self.num_kv_heads,
            shared=shared,
            window=scores.window,
            chunked=scores.chunked,
            parts=cpu_threads.num_threads(work),
            shard=shard,
        )
        parts = len(plan.bounds) - 1
        sizes = torch.tensor(
            [
                parts,
                self.num_kv_heads,
                shared,
                self.widths[0],
                sum(self.widths[1:]),
                self.value_width,
                metadata.block_size,
                *self.strides,
                scores.window or 0,
                int(scores.chunked),
                metadata.block_tables.shape[1],
                plan.max_rows,
                len(plan.splits),
                int(self.has_sinks),
                num_tokens,
                int(self.is_quantized),
                shard.rank,
                shard.num_ranks,
                int(out_width > self.value_width),
            ]
        )
        state = self.value_width + 2
        scratch = plan.max_rows * sum(self.widths) + 11 * SEGMENT + (4 + plan.max_rows) * state
        kept = (
            metadata.block_tables.to(torch.int32).contiguous(),
            *(torch.from_numpy(array) for array in (plan.tiles, plan.bounds, plan.splits)),
            torch.empty(plan.num_states * state),
            torch.empty(parts * scratch),
            torch.empty(parts * 3 * (SEGMENT + 4), dtype=torch.int64),
        )
        numbers = map(cpu_threads.float_bits, (scores.factor(1), scores.softcap or 0))
        arguments = (sizes.data_ptr(), *numbers, *(tensor.data_ptr() for tensor in kept))
        return _NumbaStep(arguments, len(plan.splits), work, (sizes, *kept))


class _NumbaAttention:
    """The numba loops of attention with fixed tensors, for the rows of any step."""

    def __init__(self, paged: PagedKeys, scores: Scores, sinks: Tensor | None, out: Tensor) -> None:
        """`paged`: with contiguous queries; `sinks`: contiguous, fp32; `out`: contiguous, of the
        dtype of the queries, or partial."""
        from megalith.kernels.attention import paged_numba  # importing numba takes half a second

        self._element = paged.values.data.dtype
        self._merge = paged_numba.paged_merge
        self._tensors = paged, sinks, out
        caches = paged.keys[0], paged.keys[-1], paged.values
        self._shapes = _NumbaShapes(
            scores,
            tuple(stride for cache in caches for stride in cache.data.stride()[:3]),
            tuple(q.shape[2] for q in paged.queries),
            paged.num_heads,
            paged.value_width,
            tuple(out.shape),
            has_sinks=sinks is not None,
            is_quantized=paged.values.scales is not None,
        )
        block = (
            *(0,) * paged_numba.NUM_SHARED_ARGUMENTS,
            paged.queries[0].data_ptr(),
            paged.queries[-1].data_ptr(),
            *(cache.data.data_ptr() for cache in caches),
            0 if sinks is None else sinks.data_ptr(),
            out.data_ptr(),
            # the loops read fp8 divided by 256
            cpu_threads.float_bits(256.0 if self._element == torch.float8_e4m3fn else 1.0),
            *(0 if cache.scales is None else cache.scales.data_ptr() for cache in caches),
        )
        self._call = cpu_threads.prepare(
            paged_numba.paged_attention, self._element, block, elements=0
        )

    def __call__(self, metadata: PagedMetadata) -> None:
        """Write the output for the rows of a step."""
        step = metadata.shared.get(self._shapes)
        if step is None:
            step = metadata.shared[self._shapes] = self._shapes.plan(metadata)
        self._call.arguments[: len(step.arguments)] = list(step.arguments)
        self._call.num_threads = cpu_threads.num_threads(step.work)
        self._call()
        if step.num_splits:
            block = list(self._call.arguments)
            cpu_threads.launch(self._merge, self._element, block, elements=step.work)


def _numba(
    paged: PagedKeys,
    metadata: PagedMetadata,
    scores: Scores,
    sinks: Tensor | None,
    *,
    is_partial: bool = False,
) -> Tensor:
    """Attention in place, by the numba loops."""
    queries = tuple(q.contiguous() for q in paged.queries)
    dtype = queries[0].dtype
    if paged.values.scales is not None:  # the loops are compiled for the dtype of the blocks only
        queries = tuple(q.float() for q in queries)
    paged = paged._replace(queries=queries)
    out = paged.new_partial_output() if is_partial else paged.new_output()
    if scores.off_by_one:
        sinks = torch.zeros(out.shape[1])
    if sinks is not None:
        sinks = sinks.float().contiguous()
    _NumbaAttention(paged, scores, sinks, out)(metadata)
    return out if is_partial else out.to(dtype)


class RecordedAttention:
    """Stores the keys and values of a step, and attends to those of its rows, by numba loops with
    fixed tensors: as `store` and `paged_attention`, without their Python code."""

    def __init__(
        self,
        paged: PagedKeys,
        new_rows: tuple[Tensor, Tensor],
        scores: Scores,
        sinks: Tensor | None,
        out: Tensor,
        *,
        max_queries: float,
    ) -> None:
        """Arguments as of `record_attention`; `max_queries`: of a row, for the loops."""
        self._max_queries, self._rows = max_queries, new_rows
        no_slots = torch.empty(0, dtype=torch.int64)
        self._stores = [
            _prepare_store(cache, rows, no_slots)
            for cache, rows in zip((*paged.keys, paged.values), new_rows, strict=True)
        ]
        self._attend = _NumbaAttention(paged, scores, sinks, out)

    def __call__(self, metadata: PagedMetadata, slots: Tensor) -> bool:
        """Store the rows in slots, int64 [t], and attend; or return False and do nothing if
        `paged_attention` would use other kernels for these rows."""
        if any(queries > self._max_queries for queries, _ in metadata.lengths):
            return False
        address = slots.data_ptr()
        for store_rows in self._stores:
            store_rows.arguments[0] = address
            store_rows()
        self._attend(metadata)
        return True


def record_attention(
    paged: PagedKeys,
    new_rows: tuple[Tensor, Tensor],
    scores: Scores,
    sinks: Tensor | None,
    out: Tensor,
    *,
    batch_invariant: bool = False,
    kernel: BackendName = "auto",
) -> RecordedAttention | None:
    """Return the repeated storing of keys and values, new_rows [t, g, d], and attention to the
    unquantized caches, whose output is stored in `out`; None if they are not only numba loops on
    these tensors."""
    are_loops = (
        kernel in NUMBA
        and select_paged_backend(paged, kernel) == "numba"
        and all(
            _can_store_by_numba(cache, rows)
            for cache, rows in zip((*paged.keys, paged.values), new_rows, strict=True)
        )
        and all(each.is_contiguous() for each in (*paged.queries, out))
        and (sinks is None or (sinks.dtype == torch.float32 and sinks.is_contiguous()))
        and not scores.off_by_one
    )
    if not are_loops:
        return None
    takes_all = batch_invariant or kernel != "auto"
    return RecordedAttention(
        paged,
        new_rows,
        _with_scale(scores, paged),
        sinks,
        out,
        max_queries=math.inf if takes_all else MAX_KERNEL_QUERIES,
    )
