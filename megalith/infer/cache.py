"""Paged KV cache: the tensors of the block pool, and the `LayerCache` of each attention in a step.

Every attention stores its keys and values in blocks of `block_size` tokens, [blocks, g, T, d], so
that the keys of one head and block are contiguous. Attentions with the same view (all tokens, a
sliding window, a chunk) share the block tables that the scheduler plans: see `plan/serving`.

Decode context parallelism: tensor-parallel ranks with the same KV head, or the same latent vectors,
divide the tokens of every block among them (`TokenShard`) instead of storing all of them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import MappingProxyType
from typing import Literal, NamedTuple, Protocol, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megalith.config.kernels import BackendName
from megalith.config.model import ModelConfig
from megalith.config.serve import EngineConfig, KVCacheDtype
from megalith.errors import ConfigError
from megalith.kernels.attention.kv_blocks import SCALE_NBYTES, KVBlocks, allocate_blocks
from megalith.kernels.attention.paged import (
    GatheredKeys,
    PagedKeys,
    PagedMetadata,
    RecordedAttention,
    build_paged_metadata,
    paged_attention,
    paged_latent_attention,
    record_attention,
    store,
    unsupported_reason,
)
from megalith.kernels.layer_inputs import Attend, AttendOptions, LayerCache, StateStep
from megalith.kernels.packed import PackedSeqParams
from megalith.models.decoder import Decoder
from megalith.parallel.collectives import all_gather, all_gather_no_grad, all_to_all
from megalith.parallel.group import Group
from megalith.plan.serving.cache_layout import (
    ALL_TOKENS,
    AttentionView,
    CacheLayout,
    TokenShard,
    count_required_blocks,
    find_longest_sequence,
    plan_cache_layout,
)
from megalith.plan.serving.graph_buckets import BatchDimensions
from megalith.plan.serving.scheduler import PlannedRow, SchedulerConfig
from megalith.plan.shards import key_value_ranks, split_evenly

TORCH_DTYPES: dict[KVCacheDtype, torch.dtype] = {
    "int8": torch.int8,
    "fp8_e4m3": torch.float8_e4m3fn,
}
"""Dtypes of quantized keys and values."""


def check_cache_dtype(dtype: KVCacheDtype, device: torch.device) -> None:
    """Check that the device supports the format of keys and values.

    Raises:
        ConfigError: it does not.
    """
    if dtype == "fp8_e4m3" and device.type == "mps":
        raise ConfigError(
            "cache.dtype=fp8_e4m3 is not supported on mps, where torch has no fp8. Set cache.dtype "
            "to int8 or auto."
        )


def attention_views(model: ModelConfig) -> list[AttentionView | None]:
    """Return the view of every attention in order: of each layer, and of its cross-layer attention;
    None for a layer without attention."""
    windowed = AttentionView(model.attention.window, model.attention.chunked)
    views: list[AttentionView | None] = []
    for layer in range(model.num_layers):
        attends = model.attention_part(layer) == "full"
        layer_view = windowed if model.has_window(layer) else AttentionView()
        views.append(layer_view if attends else None)
        if model.uses_cross_layer_source(layer):
            views.append(AttentionView())
    return views


def count_attentions(model: ModelConfig, layers: range) -> tuple[int, int]:
    """Return the number of attentions (or None) in `attention_views` before some layers, and up to
    the last of them."""
    counts = [1 + model.uses_cross_layer_source(layer) for layer in range(layers.stop)]
    return sum(counts[: layers.start]), sum(counts)


class TokenSharding(NamedTuple):
    """Ranks over which the KV cache of an attention is sharded by token."""

    axis: Literal["tp", "tp_copy"] = "tp_copy"
    """Ranks with the same latent vectors, or with the same KV head."""

    num_ranks: int = 1
    num_heads: int = 0
    """Query heads of all of them."""


def plan_token_shardings(
    model: ModelConfig, *, tp: int, replicate_kv_heads: bool = False
) -> list[TokenSharding]:
    """Return the ranks over which the KV cache of each of `attention_views` is sharded; with
    `replicate_kv_heads` none do."""
    num_copies = 1 if replicate_kv_heads else tp // key_value_ranks(model.num_kv_heads, tp)
    shardings = []
    for layer in range(model.num_layers):
        own = model.at(layer)
        of_keys = TokenSharding("tp_copy", num_copies, own.num_heads // own.num_kv_heads)
        of_latents = TokenSharding("tp", 1 if replicate_kv_heads else tp, own.num_heads)
        shardings.append(of_keys if own.mla is None else of_latents)
        if model.uses_cross_layer_source(layer):
            shardings.append(of_keys)
    return shardings


def kv_bytes_per_token(
    model: ModelConfig,
    *,
    tp: int,
    element_size: int,
    dtype: KVCacheDtype = "auto",
    replicate_kv_heads: bool = False,
) -> list[int]:
    """Return the bytes that each attention of `attention_views` stores per token on one of `tp`
    ranks: keys and values of the local heads, or the latent vector and the shared rotated key,
    divided by the ranks over which tokens are sharded (rounded up); in `dtype`, or for auto with
    `element_size` bytes per element."""
    sizes = []
    scale_size = 0
    if dtype != "auto":
        element_size, scale_size = TORCH_DTYPES[dtype].itemsize, SCALE_NBYTES
    for layer in range(model.num_layers):
        own = model.at(layer)
        heads = max(1, -(-own.num_kv_heads // tp))
        keys_and_values = heads * 2 * (own.head_size() * element_size + scale_size)
        size = keys_and_values
        if own.mla is not None:
            size = (own.mla.kv_rank + own.mla.rope_dim) * element_size + 2 * scale_size
        sizes.append(size if model.attention_part(layer) == "full" else 0)
        if model.uses_cross_layer_source(layer):
            sizes.append(keys_and_values)
    shardings = plan_token_shardings(model, tp=tp, replicate_kv_heads=replicate_kv_heads)
    return [-(-size // each.num_ranks) for size, each in zip(sizes, shardings, strict=True)]


PADDING = -1
"""Sequence number of padding."""


@dataclass(frozen=True, slots=True)
class CachePlan:
    """Which block tables and which storage each attention of a model uses."""

    layout: CacheLayout
    slots: tuple[tuple[int, int] | None, ...]
    """(group, slot) of each attention; None: it stores nothing."""

    bytes_per_token: int
    """Bytes of one token in a block, over all slots of a group."""

    has_states: bool
    """Whether layers may have recurrent states, which cannot be reused from a prefix."""

    dtype: KVCacheDtype = "auto"
    """Format of keys and values."""

    shardings: tuple[TokenSharding, ...] = ()
    """Of each attention; empty: every rank stores all tokens."""

    block_multiple: int = 1
    """Number of which the tokens of a block are a multiple, because ranks divide them."""

    def round_block_size(self, block_size: int) -> int:
        """Return the tokens of a block, at least `block_size`."""
        return -(-block_size // self.block_multiple) * self.block_multiple


def plan_cache(
    model: ModelConfig,
    *,
    tp: int,
    element_size: int,
    dtype: KVCacheDtype = "auto",
    replicate_kv_heads: bool = False,
    layers: range | None = None,
) -> CachePlan:
    """Plan the KV cache of a model on one of `tp` ranks; arguments as of `kv_bytes_per_token`.
    `layers`: those of its pipeline stage, which stores their keys and values only, in the blocks
    that all stages plan."""
    views = attention_views(model)
    sizes = kv_bytes_per_token(
        model,
        tp=tp,
        element_size=element_size,
        dtype=dtype,
        replicate_kv_heads=replicate_kv_heads,
    )
    shardings = plan_token_shardings(model, tp=tp, replicate_kv_heads=replicate_kv_heads)
    layout = plan_cache_layout([view for view in views if view is not None])
    plugins = model.plugins.attention is not None or model.plugins.block is not None
    remaining = iter(layout.slots)
    slots = tuple(None if view is None else next(remaining) for view in views)
    first, last = count_attentions(model, layers) if layers else (0, len(slots))
    slots, sizes = slots[first:last], sizes[first:last]
    # Attentions of one slot share its tensors if their keys and values have equal sizes.
    slot_sizes: list[set[int]] = [set() for _ in range(layout.num_slots)]
    for slot, size in zip(slots, sizes, strict=True):
        if slot is not None:
            slot_sizes[slot[1]].add(size)
    bytes_per_token = sum(sum(sizes_of_slot) for sizes_of_slot in slot_sizes)
    return CachePlan(
        layout,
        slots,
        bytes_per_token,
        has_states=plugins,
        dtype=dtype,
        shardings=tuple(shardings[first:last]),
        block_multiple=math.lcm(*(each.num_ranks for each in shardings)),
    )


class PoolSize(NamedTuple):
    """Number of blocks of a KV cache, and the longest sequence that it can hold."""

    num_blocks: int
    max_model_len: int


def plan_pool(
    model: ModelConfig, config: EngineConfig, plan: CachePlan, *, free_bytes: int
) -> PoolSize:
    """Return the size of the block pool that fits into the memory, and the maximum length of a
    sequence: that of the settings, else the model's context length if the pool can hold it.

    Raises:
        ConfigError: the pool cannot hold a sequence of `max_model_len` tokens.
    """
    cache = config.cache
    block_size = plan.round_block_size(cache.block_size)
    count_blocks = partial(
        count_required_blocks,
        plan.layout.groups,
        block_size,
        chunk=config.max_num_batched_tokens,
    )
    longest = model.max_seq_len if config.max_model_len is None else config.max_model_len
    if longest > model.max_seq_len:
        raise ConfigError(
            f"max_model_len={longest} is more than model.max_seq_len={model.max_seq_len}, the "
            f"context length of the model. Set max_model_len to at most {model.max_seq_len}."
        )
    block_bytes = plan.bytes_per_token * block_size
    useful = config.max_num_seqs * count_blocks(longest)
    fits = int(free_bytes * cache.memory_fraction) // max(1, block_bytes)
    num_blocks = min(useful, fits) if cache.num_blocks is None else cache.num_blocks
    needed = count_blocks(longest)
    if needed > num_blocks and config.max_model_len is None:
        longest = find_longest_sequence(
            plan.layout.groups,
            block_size,
            num_blocks=num_blocks,
            chunk=config.max_num_batched_tokens,
            longest=longest,
        )
        needed = count_blocks(max(1, longest))
    if needed > num_blocks or longest < 1:
        required = f"{needed} blocks ({needed * block_bytes / 2**20:.1f} MiB)"
        if cache.num_blocks is not None:
            raise ConfigError(
                f"cache.num_blocks={num_blocks} of {block_size} tokens cannot hold a "
                f"sequence of max_model_len={max(1, longest)} tokens, which needs {required}. Set "
                f"cache.num_blocks to {needed} or more, or max_model_len lower."
            )
        raise ConfigError(
            f"max_model_len={max(1, longest)}: a sequence of this length needs {required} of KV "
            f"cache, but cache.memory_fraction={cache.memory_fraction} of {free_bytes / 2**20:.1f} "
            f"MiB of free memory holds {num_blocks}. Set max_model_len lower, or "
            "cache.memory_fraction higher."
        )
    return PoolSize(max(1, num_blocks), longest)


def scheduler_config(
    config: EngineConfig,
    cache: "PagedKVCache",
    *,
    num_host_blocks: int = 0,
    buckets: tuple[BatchDimensions, ...] = (),
) -> SchedulerConfig:
    """Return the settings of the scheduler for an engine with this cache, and with blocks in host
    memory; `buckets`: of graphs that steps with prompts are planned for."""
    return SchedulerConfig(
        num_blocks=cache.num_blocks,
        block_size=cache.block_size,
        groups=cache.plan.layout.groups,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        min_prefill_chunk_tokens=config.min_prefill_chunk_tokens,
        prefix_caching=config.cache.prefix_caching and not cache.plan.has_states,
        num_host_blocks=num_host_blocks,
        batching=config.batching,
        buckets=buckets,
    )


@dataclass(frozen=True, slots=True, eq=False)  # layers share one object per group
class TokenRankGroup:
    """The ranks over which the KV cache of an attention is sharded by token; a `TokenRanks`."""

    group: Group
    heads: list[int]
    """Query heads of each rank."""

    @property
    def shard(self) -> TokenShard:
        """The tokens of this rank."""
        return TokenShard(self.group.rank, self.group.size)

    def gather_heads(self, q: Tensor) -> Tensor:
        """Return the query heads of all ranks: q [t, n_local, d] -> [t, n, d]."""
        return all_gather(q, self.group, dim=1, sizes=self.heads)

    def gather_rows(self, rows: Tensor) -> Tensor:
        """Return the rows of all ranks: [rows, g, d] -> [ranks * rows, g, d]."""
        return all_gather_no_grad(rows, self.group)

    def exchange_heads(self, x: Tensor) -> Tensor:
        """Return what every rank has of this rank's heads: x [t, n, d] -> [ranks, t, n_local,
        d]."""
        num_local = self.heads[self.group.rank]
        received = all_to_all(
            x.transpose(0, 1), self.group, send=self.heads, receive=[num_local] * self.group.size
        )
        by_rank: Tensor = received.view(self.group.size, num_local, *received.shape[1:])
        return by_rank.transpose(1, 2)


def token_groups(model: Decoder) -> Mapping[str, Group]:
    """Return the groups of a model whose ranks may divide the tokens, by `TokenSharding.axis`."""
    return {"tp": model.tp_comm.group, "tp_copy": model.kv_replicas}


NO_GROUPS: Mapping[str, Group] = MappingProxyType({})


class PagedKVCache:
    """Block pool of a model on this rank, and the recurrent states of its sequences.

    The tensors of a slot are allocated when its first attention stores into it. Attentions of
    several groups share the tensors of their slot, each in blocks of its own.
    """

    def __init__(
        self,
        plan: CachePlan,
        *,
        num_blocks: int,
        block_size: int,
        batch_invariant: bool = False,
        kernel: BackendName = "auto",
        has_padding: bool = False,
        groups: Mapping[str, Group] = NO_GROUPS,
    ) -> None:
        """`kernel`: backend of paged attention; `has_padding`: whether steps may have padding,
        which is stored in a block of its own; `groups`: `token_groups` of the model, if the plan
        divides tokens. Blocks have at least `block_size` tokens."""
        self.plan, self.num_blocks, self.has_padding = plan, num_blocks, has_padding
        self.block_size = plan.round_block_size(block_size)
        self.batch_invariant, self.kernel = batch_invariant, kernel
        shared = {one for one in plan.shardings if one.num_ranks > 1}
        self._ranks = {
            one: TokenRankGroup(groups[one.axis], split_evenly(one.num_heads, one.num_ranks))
            for one in shared
        }
        self._pool: dict[tuple[int, str, tuple[int, int, int]], KVBlocks] = {}
        self._states: dict[tuple[int, int], Tensor] = {}
        """State of (attention, request)."""
        self._new_states: dict[tuple[int, int], Tensor] = {}
        """States of the current step, which replace the others when the step succeeds."""

    def ranks_of(self, index: int) -> TokenRankGroup | None:
        """Return the ranks that divide the tokens of attention `index`; None: this rank stores all
        of them."""
        return self._ranks.get(self.plan.shardings[index]) if self._ranks else None

    def pool_of(self, slot: int, role: str, rows: Tensor, shard: TokenShard) -> KVBlocks:
        """Return the blocks [blocks, g, T, d] of a slot for rows like `rows` [t, g, d] and the
        tokens of a shard."""
        heads, width = rows.shape[1], rows.shape[2]
        block_size = self.block_size // shard.num_ranks
        pool_key = slot, role, (heads, block_size, width)
        pool = self._pool.get(pool_key)
        if pool is None:
            shape = self.num_blocks + self.has_padding, heads, block_size, width
            pool = allocate_blocks(shape, rows, TORCH_DTYPES.get(self.plan.dtype, rows.dtype))
            self._pool[pool_key] = pool
        return pool

    def make_padding_row(self) -> PlannedRow:
        """Return a row of one token that no request has."""
        assert self.has_padding, "the cache has no block for padding"
        tables = [[self.num_blocks]] * len(self.plan.layout.groups)
        return PlannedRow(PADDING, 0, 1, samples=False, block_tables=tables)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The allocated blocks by name: data and scales [blocks, ...] of all slots."""
        return {
            f"KV cache slot {slot} {role} {part} {shape}": tensor
            for (slot, role, shape), pool in self._pool.items()
            for part, tensor in pool._asdict().items()
            if tensor is not None
        }

    @property
    def num_bytes(self) -> int:
        """Bytes of the allocated blocks."""
        return sum(pool.num_bytes for pool in self._pool.values())

    def list_tensors(self) -> list[Tensor]:
        """Return the allocated blocks: data and scales [blocks, ...] of all slots."""
        return list(self.tensors.values())

    def list_states(self) -> list[Tensor]:
        """Return the recurrent states of all sequences."""
        return list(self._states.values())

    def layers(self, step: "StepTables") -> list[LayerCache]:
        """Return the layer caches of a forward pass, one per attention of the model."""
        return [
            PagedLayerCache(self, step, index, slot) for index, slot in enumerate(self.plan.slots)
        ]

    def block_words(self) -> list[Tensor]:
        """Return views [blocks, words] of all blocks: their bytes as int64, or as uint8 where these
        are not a multiple of 8. Kernels copy wide words faster."""
        blocks = [tensor.flatten(1).view(torch.uint8) for tensor in self.list_tensors()]
        is_wide = all(block.shape[1] % 8 == 0 for block in blocks)
        return [block.view(torch.int64) if is_wide else block for block in blocks]

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (source, destination) in all slots, for copy-on-write."""
        if not pairs:
            return
        for pool in self._pool.values():
            pool.copy(pairs)

    def copy_states(self, parent: int, child: int) -> None:
        """Give `child` the recurrent states of `parent`."""
        for (index, request), state in list(self._states.items()):
            if request == parent:
                self._states[index, child] = state

    def drop_states(self, request: int) -> None:
        """Drop the recurrent states of a request."""
        for state_key in [one for one in self._states if one[1] == request]:
            del self._states[state_key]

    def state_of(self, index: int, request: int) -> Tensor | None:
        """Return the state of attention `index` after the tokens of a request so far."""
        return self._states.get((index, request))

    def set_state(self, index: int, request: int, state: Tensor) -> None:
        """Store the state of attention `index` after the step's tokens of a request; valid after
        `commit_states`."""
        self._new_states[index, request] = state

    def commit_states(self, *, succeeded: bool) -> None:
        """End a step: its states become current, or are dropped if it failed."""
        if succeeded:
            self._states |= self._new_states
        self._new_states = {}


class StepTables(Protocol):
    """The block tables of a step and where its tokens are stored."""

    @property
    def rows(self) -> Sequence[PlannedRow]:
        """The rows of the step."""

    def metadata(self, group: int, ranks: TokenRankGroup | None) -> PagedMetadata:
        """Return block tables and lengths of a KV cache group for the paged kernels."""

    def stored_tokens(self, group: int, shard: TokenShard) -> tuple[Tensor | None, Tensor]:
        """Return which tokens are stored, int64 [t_stored] or None for all, and their slots."""

    def gathered_keys(self, group: int, ranks: TokenRankGroup | None) -> GatheredKeys:
        """Return the slots of the keys that the queries attend to."""


@dataclass(frozen=True)
class StepBlocks:
    """The rows of a step and their block tables, as tensors that all layers share."""

    rows: Sequence[PlannedRow]
    views: Sequence[AttentionView]
    block_size: int
    device: torch.device
    _metadata: dict[tuple[int, TokenRankGroup | None], PagedMetadata] = field(default_factory=dict)
    _stored: dict[tuple[int, TokenShard], tuple[Tensor | None, Tensor]] = field(
        default_factory=dict
    )
    _gathered: dict[tuple[int, TokenRankGroup | None], GatheredKeys] = field(default_factory=dict)

    @cached_property
    def _lengths(self) -> tuple[tuple[int, int], ...]:
        return tuple((row.count, row.start + row.count) for row in self.rows)

    def metadata(self, group: int, ranks: TokenRankGroup | None) -> PagedMetadata:
        """Return block tables and lengths of a KV cache group for the paged kernels; `ranks`: those
        that divide the tokens."""
        key = group, ranks
        if key not in self._metadata:
            tables = [row.block_tables[group] for row in self.rows]
            table = np.full((len(tables), max(map(len, tables))), -1, dtype=np.int32)
            for number, blocks in enumerate(tables):
                table[number, : len(blocks)] = blocks
            block_size = self.block_size // (1 if ranks is None else ranks.group.size)
            self._metadata[key] = build_paged_metadata(
                torch.from_numpy(table).to(self.device), self._lengths, block_size, ranks
            )
        return self._metadata[key]

    def stored_tokens(self, group: int, shard: TokenShard) -> tuple[Tensor | None, Tensor]:
        """Return which of the step's tokens are stored, int64 [t_stored] or None for all, and
        where: int64 [t_stored], block * tokens of a block + offset."""
        key = group, shard
        if key not in self._stored:
            counts = [row.count for row in self.rows]
            shifts = [row.start for row in self.rows] - (np.cumsum(counts) - counts)
            parts = [self._stored_positions(row, shard) for row in self.rows]
            slots = [
                self._slots(row.block_tables[group], positions, shard)
                for row, positions in zip(self.rows, parts, strict=True)
            ]
            tokens = None
            if shard.num_ranks > 1:
                indices = [part - shift for part, shift in zip(parts, shifts, strict=True)]
                tokens = torch.from_numpy(np.concatenate(indices)).to(self.device)
            self._stored[key] = tokens, torch.from_numpy(np.concatenate(slots)).to(self.device)
        return self._stored[key]

    def gathered_keys(self, group: int, ranks: TokenRankGroup | None) -> GatheredKeys:
        """Return the slots of the keys that the queries attend to: of each row the last ones, as
        many as `kernels/attention/dispatch` expects."""
        key = group, ranks
        if key not in self._gathered:
            view = self.views[group]
            lengths = tuple((row.count, view.before(row.start) + row.count) for row in self.rows)
            self._gathered[key] = GatheredKeys.locate(self.metadata(group, ranks), lengths)
        return self._gathered[key]

    def _stored_positions(self, row: PlannedRow, shard: TokenShard) -> NDArray[np.int64]:
        """Return the positions of the step's tokens of a row that are in a shard."""
        first = row.start + (shard.rank - row.start) % shard.num_ranks
        return np.arange(first, row.start + row.count, shard.num_ranks)

    def _slots(
        self, block_table: list[int], positions: NDArray[np.int64], shard: TokenShard
    ) -> NDArray[np.int64]:
        """Return the slots of the tokens at ascending positions, all of them in a shard."""
        if not len(positions):
            return positions
        first, last = int(positions[0]) // self.block_size, int(positions[-1]) // self.block_size
        blocks = np.asarray(block_table[first : last + 1], dtype=np.int64)
        block_size = self.block_size // shard.num_ranks
        offsets = positions // shard.num_ranks % block_size
        return blocks[positions // self.block_size - first] * block_size + offsets


class PagedLayerCache:
    """Cache of one attention, or state of one recurrent mixer, in one step; a `LayerCache`."""

    def __init__(
        self, cache: PagedKVCache, step: StepTables, index: int, slot: tuple[int, int] | None
    ) -> None:
        self._cache, self._step, self._index, self._slot = cache, step, index, slot
        self._ranks = cache.ranks_of(index)

    def attend(
        self,
        core: Attend,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        seq_params: PackedSeqParams,
        **options: Unpack[AttendOptions],
    ) -> Tensor:
        """Store k, v [t, g, d]; return the attention of q to all tokens of each row, by the paged
        kernel, or by `core` on gathered keys and values if it does not support the scores."""
        keys, values = self._store("k", k), self._store("v", v)
        if self._supports(options, seq_params):
            return paged_attention(
                q,
                keys,
                values,
                self._metadata(),
                options["scores"],
                options.get("sinks"),
                batch_invariant=self._cache.batch_invariant,
                kernel=self._cache.kernel,
            )
        keys_and_values = self._gather(keys, q.dtype), self._gather(values, q.dtype)
        return core(q, *keys_and_values, seq_params, **options)

    def record_attend(
        self, q: Tensor, k: Tensor, v: Tensor, output: Tensor, options: AttendOptions
    ) -> RecordedAttention | None:
        """Return the loops that repeat an `attend` with this output in other steps; None if it is
        not only loops."""
        if self._ranks is not None or unsupported_reason(options["scores"]) is not None:
            return None
        keys, values = self._blocks("k", k), self._blocks("v", v)
        return record_attention(
            PagedKeys((q,), (keys,), values),
            (k, v),
            options["scores"],
            options.get("sinks"),
            output,
            batch_invariant=self._cache.batch_invariant,
            kernel=self._cache.kernel,
        )

    def repeat_attend(self, recorded: RecordedAttention, seq_params: PackedSeqParams) -> bool:
        """Repeat an `attend` for the rows of this step, or return False and do nothing if it uses
        other kernels for them."""
        assert self._slot is not None
        if seq_params.visible is not None:
            return False
        _, slots = self._step.stored_tokens(self._slot[0], ALL_TOKENS)
        return recorded(self._metadata(), slots)

    def attend_latent(
        self,
        core: Attend,
        q: Tensor,
        latent: Tensor,
        seq_params: PackedSeqParams,
        *,
        value_size: int,
        **options: Unpack[AttendOptions],
    ) -> Tensor:
        """Store latent [t, 1, r + rope_dim]; return the attention of q [t, n, r + rope_dim] to the
        latent vectors of all tokens, whose first `value_size` features are the values."""
        parts = self._store_parts(latent, value_size)
        if self._supports(options, seq_params):
            return paged_latent_attention(
                q[..., :value_size],
                q[..., value_size:],
                *parts,
                self._metadata(),
                options["scores"],
                batch_invariant=self._cache.batch_invariant,
                kernel=self._cache.kernel,
            )
        rows = self._gather_parts(parts, q.dtype)
        return core(q, rows, rows[..., :value_size], seq_params, **options)

    def read(self, rows: Tensor, *, value_size: int) -> Tensor:
        """Store rows [t, 1, r + rope_dim] as `attend_latent` does, and return those of all tokens
        that the queries attend to."""
        return self._gather_parts(self._store_parts(rows, value_size), rows.dtype)

    def state(
        self, step: StateStep, x: Tensor, seq_params: PackedSeqParams, *, shape: tuple[int, ...]
    ) -> Tensor:
        """Return y of `step(x, state)` and store the new state of each row."""
        requests = [row.seq_id for row in self._step.rows]
        states = [
            x.new_zeros(shape) if row.start == 0 or state is None else state
            for row in self._step.rows
            for state in [self._cache.state_of(self._index, row.seq_id)]
        ]
        y, new_states = step(x, torch.stack(states))
        for request, state in zip(requests, new_states, strict=True):
            if request != PADDING:
                self._cache.set_state(self._index, request, state)
        return y

    def _store(self, role: str, rows: Tensor) -> KVBlocks:
        """Store the rows [t, g, d] of this rank's tokens in their blocks and return the blocks."""
        blocks = self._blocks(role, rows)
        assert self._slot is not None
        tokens, slots = self._step.stored_tokens(self._slot[0], self._shard)
        new_rows = rows if tokens is None else rows[tokens]
        store(blocks, new_rows, slots, kernel=self._cache.kernel)
        return blocks

    def _blocks(self, role: str, rows: Tensor) -> KVBlocks:
        """Return the blocks for rows [t, g, d]."""
        assert self._slot is not None, f"attention {self._index} stores keys without a slot"
        return self._cache.pool_of(self._slot[1], role, rows, self._shard)

    @property
    def _shard(self) -> TokenShard:
        return ALL_TOKENS if self._ranks is None else self._ranks.shard

    def _store_parts(self, rows: Tensor, value_size: int) -> tuple[KVBlocks, KVBlocks]:
        """Store the latent vectors and the rotated keys of rows [t, 1, r + rope_dim], whose sizes
        differ so much that they need scales of their own, and return the blocks of both."""
        latents = self._store("latent", rows[..., :value_size])
        return latents, self._store("rope", rows[..., value_size:])

    def _gather(self, blocks: KVBlocks, dtype: torch.dtype) -> Tensor:
        """Return the rows [t_kv, g, d] that the queries attend to."""
        assert self._slot is not None
        return self._step.gathered_keys(self._slot[0], self._ranks).read(blocks, dtype)

    def _gather_parts(self, parts: tuple[KVBlocks, KVBlocks], dtype: torch.dtype) -> Tensor:
        return torch.cat([self._gather(part, dtype) for part in parts], dim=-1)

    def _metadata(self) -> PagedMetadata:
        assert self._slot is not None
        return self._step.metadata(self._slot[0], self._ranks)

    def _supports(self, options: AttendOptions, seq_params: PackedSeqParams) -> bool:
        """Whether the paged kernel supports the scores and the attention mask."""
        return unsupported_reason(options["scores"]) is None and seq_params.visible is None
