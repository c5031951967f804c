"""Replay of model steps from fixed buffers: CUDA graphs, and their substitute on CPUs.

A CUDA graph starts all kernels of a step at once, with the shapes and addresses that it was
captured with. So a step is padded to a bucket (`plan/serving/graph_buckets.py`), its inputs are
copied into buffers that are never reallocated, and its outputs are read from such buffers. Padding
belongs to no row: its keys and values go to a block of its own, and its outputs are not read.

`StaticReplay` runs the same function eagerly and checks that no address and no shape changes. The
function sees no Python value of the step, only tensors, so it computes what a graph would.
Source: Nguyen et al. 2021, "Accelerating PyTorch with CUDA Graphs" (shared pools, side stream).
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megalith.config.kernels import BackendName, KernelsConfig
from megalith.config.serve import EngineConfig
from megalith.errors import ConfigError
from megalith.infer.cache import CachePlan, PagedKVCache, StepBlocks, TokenRankGroup
from megalith.infer.pipeline import PipelineLink
from megalith.kernels.attention.paged import GatheredKeys, PagedMetadata
from megalith.kernels.grouped_linear import ALIGNED, equal_groups, fused_takes
from megalith.kernels.layer_inputs import LayerCache, LayerInputs
from megalith.kernels.packed import PackedSeqParams, seq_params_from_rows
from megalith.models.decoder import (
    NOTHING_RECEIVED,
    CachedLayersRunner,
    Decoder,
    StageTensors,
)
from megalith.parallel.group import SINGLE_RANK, Group, all_reduce_max_
from megalith.parallel.tensor import ExpertMatrix
from megalith.plan.serving.cache_layout import ALL_TOKENS, TokenShard
from megalith.plan.serving.graph_buckets import (
    BatchDimensions,
    BatchLimits,
    BucketPolicy,
    EagerReason,
    match_bucket,
    plan_graph_buckets,
)
from megalith.plan.serving.scheduler import PlannedRow, SequenceState

logger = logging.getLogger(__name__)

ReplayMode = Literal["static_replay", "cuda_graph"]

AUTO_KERNELS = KernelsConfig()

NUM_WARMUP_RUNS = 2
"""Eager runs before a capture: the first allocates blocks and compiles kernels (heuristic)."""

ALIGNMENT = 64
"""Alignment in bytes of the parts of the input buffer: a cache line."""


class StepInputs(NamedTuple):
    """Inputs of a model step, all of them tensors or objects that hold tensors."""

    ids: Tensor
    """int64 [t]."""

    inputs: LayerInputs
    caches: Sequence[LayerCache]
    received: StageTensors
    """Outputs of the previous pipeline stage."""

    sampled: Tensor
    """int64 [k]: tokens whose logits are computed."""

    run_cached_layers: CachedLayersRunner | None = None
    """Repeats recorded forward passes; None: the layers run."""


class StageOutputs(NamedTuple):
    """Outputs of a model step, or of a pipeline stage of it."""

    tensors: StageTensors
    """Outputs of a pipeline stage, [t, h] each; with sequence parallelism the local tokens."""

    hidden: Tensor | None = None
    """[t, h] of all ranks, on the last stage."""

    logits: Tensor | None = None
    """[k, v_local] of the sampled tokens, on the last stage."""


RunStep = Callable[[StepInputs], StageOutputs]


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """Which steps are replayed, and how."""

    mode: ReplayMode
    buckets: tuple[BatchDimensions, ...]
    """In the order of their capture."""

    limits: BatchLimits
    gates_prefills: bool = False
    """Whether the scheduler plans only prefills that have buckets."""


def plan_graphs(
    config: EngineConfig,
    model: Decoder,
    cache_plan: CachePlan,
    *,
    max_model_len: int,
    num_drafts: int,
    kernels: KernelsConfig = AUTO_KERNELS,
    expert_group: Group = SINGLE_RANK,
) -> GraphPlan | None:
    """Plan which steps of an engine are replayed; None: none. `num_drafts`: largest number of draft
    tokens of a row; `kernels`: backends of the engine; `expert_group`: ranks with other requests
    that share experts.

    Raises:
        ConfigError: the device or the model does not support what the settings name.
    """
    graphs = config.graphs
    mode = graphs.mode
    if mode == "none" or mode == "recorded":
        return None
    reason = graph_limitation(model, cache_plan, kernels, expert_group)
    if mode == "auto":
        is_gpu = next(model.parameters()).is_cuda
        if is_gpu and reason is not None:
            logger.info("no CUDA graphs: %s", reason)
        if not is_gpu or reason is not None or config.batch_invariant:
            return None
        mode = "cuda_graph"
    elif mode == "cuda_graph" and not next(model.parameters()).is_cuda:
        raise ConfigError(
            f"graphs.mode=cuda_graph: the model is on {next(model.parameters()).device.type}, and "
            "only NVIDIA GPUs have CUDA graphs. Set graphs.mode to auto, or to static_replay to "
            "check the padding of steps."
        )
    if reason is not None:
        raise ConfigError(f"graphs.mode={mode}: {reason}. Set graphs.mode to none.")
    if graphs.prefills != "none" and model.config.mla is not None:
        raise ConfigError(
            f"graphs.prefills={graphs.prefills} with model.mla: prompts expand the latent vectors "
            "of their tokens, whose number differs from step to step. Set graphs.prefills to none."
        )
    limits = BatchLimits(
        max_rows=config.max_num_seqs,
        max_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        num_drafts=num_drafts,
        num_shards=1 if model.tp_comm.invariant else model.tp_comm.group.size,
    )
    policy = BucketPolicy(
        num_buckets=graphs.num_buckets,
        max_tokens=graphs.max_tokens,
        distribution=graphs.distribution,
        prefills=graphs.prefills,
    )
    buckets = plan_graph_buckets(limits, policy)
    if not buckets:
        raise ConfigError(
            f"graphs.mode={mode} with max_num_seqs={config.max_num_seqs} and "
            f"max_num_batched_tokens={config.max_num_batched_tokens}: a bucket has a multiple of "
            f"{limits.num_shards} tokens. Set max_num_seqs to at least {limits.num_shards}, or "
            "graphs.mode to none."
        )
    return GraphPlan(mode, buckets, limits, gates_prefills=graphs.prefills == "all")


def graph_limitation(
    model: Decoder,
    cache_plan: CachePlan,
    kernels: KernelsConfig = AUTO_KERNELS,
    expert_group: Group = SINGLE_RANK,
) -> str | None:
    """Return why no step of a model can be replayed, or None."""
    config, attention_kernel = model.config, kernels.backend_name("attention")
    if cache_plan.has_states:
        return "a plugin layer may have a recurrent state, which is an object of each sequence"
    if config.positions == "relative":
        return "relative position biases gather the keys, whose number differs from step to step"
    if attention_kernel not in ("auto", "torch", "triton"):
        return (
            f"kernels.attention={attention_kernel} reads the lengths of the sequences on the host"
        )
    if config.moe is None or not next(model.parameters()).is_cuda:
        return None
    if model.tp_comm.group.size > 1 or expert_group.size > 1:
        return "experts on several ranks exchange messages whose sizes depend on the routing"
    return find_experts_limitation(model, kernels.backend_name("experts"))


def find_experts_limitation(model: Decoder, experts_kernel: BackendName) -> str | None:
    """Return why the grouped matmuls of a model on a GPU read the number of rows of each expert on
    the host, which no graph can, or None. Only torch's kernel reads it on the device."""
    if experts_kernel not in ("auto", "torch", "grouped"):
        return f"kernels.experts={experts_kernel} reads the numbers of rows of experts on the host"
    assert model.config.moe is not None
    groups = equal_groups(model.config.moe.num_experts, 0)
    for matrix in (each for each in model.modules() if isinstance(each, ExpertMatrix)):
        weight, _, _, matmul_ops = matrix()
        if matmul_ops is not None:
            return "quantized experts read their numbers of rows on the host"
        if weight.dtype != torch.bfloat16:
            return "the grouped matmul of experts is one kernel in bf16 only"
        if not fused_takes(weight, weight, groups):
            return (
                "the grouped matmul of experts is one kernel only if rows have a multiple of "
                f"{ALIGNED} bytes"
            )
    return None


# --- buffers


class _BufferPart(NamedTuple):
    """A part of the input buffer: on the host, and the device tensor that it is copied to."""

    host: NDArray[np.generic]
    device: Tensor


_NUMPY_DTYPES = {torch.int32: np.int32, torch.int64: np.int64, torch.bool: np.bool_}


class StepBuffers:
    """Fixed buffers of the inputs of a step, of the largest number of tokens and rows.

    All integers are in one buffer, so that a step copies them to the device at once.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        *,
        max_tokens: int,
        max_rows: int,
        max_sampled: int,
        max_model_len: int,
        device: torch.device,
    ) -> None:
        """`max_sampled`: largest number of tokens whose logits are computed."""
        self._cache, self.max_model_len = cache, max_model_len
        num_blocks = -(-max_model_len // cache.block_size)
        rows, tokens = (max_rows,), (max_tokens,)
        shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "ids": (torch.int64, tokens),
            "position_ids": (torch.int64, tokens),
            "sampled": (torch.int64, (max_sampled,)),
            "document_ids": (torch.int32, tokens),
            "cu_seqlens_q": (torch.int32, (max_rows + 1,)),
            "cu_seqlens_kv": (torch.int32, (max_rows + 1,)),
            "kv_lengths": (torch.int32, rows),
            "valid": (torch.bool, tokens),
        }
        for group in range(len(cache.plan.layout.groups)):
            shapes[f"block_table {group}"] = torch.int32, (max_rows, num_blocks)
        self._stored = _list_stored(cache)
        for group, shard in self._stored:
            shapes[_slots_name(group, shard)] = torch.int64, tokens
        self.parts, self._host, self._device = _allocate_parts(shapes, device)
        self.rope: tuple[Tensor, ...] = ()
        self.received: StageTensors = NOTHING_RECEIVED

    def __getitem__(self, name: str) -> Tensor:
        return self.parts[name].device

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All buffers by name."""
        tensors = {name: part.device for name, part in self.parts.items()}
        tensors |= {f"rope {index}": table for index, table in enumerate(self.rope)}
        return tensors | dict(self.received)

    def seq_params(self, num_tokens: int, num_rows: int, *, max_queries: int) -> PackedSeqParams:
        """Return the metadata of a step, whose Python values are upper bounds."""
        return PackedSeqParams(
            cu_seqlens_q=self["cu_seqlens_q"][: num_rows + 1],
            cu_seqlens_kv=self["cu_seqlens_kv"][: num_rows + 1],
            max_seqlen_q=max_queries,
            max_seqlen_kv=self.max_model_len,
            uniform=None,
            position_ids=self["position_ids"][:num_tokens],
            document_ids=self["document_ids"][:num_tokens],
            valid=self["valid"][:num_tokens],
            lengths=((1, self.max_model_len),) * num_rows,
        )

    def write(
        self,
        rows: Sequence[PlannedRow],
        ids: Sequence[int],
        sampled: Sequence[int],
        bucket: BatchDimensions,
    ) -> None:
        """Write the rows of a step, padded to a bucket, and copy them to the device."""
        counts = np.array([row.count for row in rows], dtype=np.int64)
        starts = np.array([row.start for row in rows], dtype=np.int64)
        ends = np.cumsum(counts)
        documents = np.arange(len(rows), dtype=np.int64).repeat(counts)
        positions = np.arange(len(ids)) + (starts - ends + counts)[documents]
        values: dict[str, NDArray[np.int64]] = {
            "ids": np.array(ids, dtype=np.int64),
            "position_ids": positions,
            "sampled": np.array(sampled, dtype=np.int64),
            "document_ids": documents,
            "kv_lengths": starts + counts,
            "valid": np.ones(len(ids), dtype=np.int64),
        }
        for name, value in values.items():
            host = self.parts[name].host
            host[: len(value)] = value
            host[len(value) :] = 0
        for name, value in (("cu_seqlens_q", ends), ("cu_seqlens_kv", np.cumsum(starts + counts))):
            host = self.parts[name].host
            host[1 : len(value) + 1] = value
            host[len(value) + 1 :] = value[-1] if len(value) else 0
        self._write_tables(rows, bucket)
        self._device.copy_(self._host)

    def _write_tables(self, rows: Sequence[PlannedRow], bucket: BatchDimensions) -> None:
        """Write block tables, and the slots of the stored tokens. Padding, and tokens that other
        ranks store, go to the block of padding."""
        groups, block_size = self._cache.plan.layout.groups, self._cache.block_size
        for group in range(len(groups)):
            table = self.parts[f"block_table {group}"].host
            table[: bucket.num_rows] = -1
            for number, row in enumerate(rows):
                blocks = row.block_tables[group][: table.shape[1]]
                table[number, : len(blocks)] = blocks
        step = StepBlocks(rows, groups, block_size, torch.device("cpu"))
        for group, shard in self._stored:
            slots = self.parts[_slots_name(group, shard)].host
            slots[:] = self.padding_slots(len(slots), shard)
            if rows:
                tokens, stored = step.stored_tokens(group, shard)
                slots[slice(len(stored)) if tokens is None else tokens.numpy()] = stored.numpy()

    def padding_slots(self, num_tokens: int, shard: TokenShard) -> NDArray[np.int64]:
        """Return slots of the block of padding, int64 [num_tokens]."""
        block_size = self._cache.block_size // shard.num_ranks
        return self._cache.num_blocks * block_size + np.arange(num_tokens) % block_size

    def check_padding(self, num_tokens: int) -> None:
        """Check that the tokens from `num_tokens` on are stored in the block of padding.

        Raises:
            AssertionError: one would overwrite the keys of a sequence.
        """
        for group, shard in self._stored:
            first = self._cache.num_blocks * (self._cache.block_size // shard.num_ranks)
            slots = self[_slots_name(group, shard)][num_tokens:]
            assert bool((slots >= first).all()), (
                f"padding of KV cache group {group} would be stored in a block of a sequence"
            )


def _list_stored(cache: PagedKVCache) -> list[tuple[int, TokenShard]]:
    """Return the (group, tokens of this rank) of all attentions that store keys."""
    stored: dict[tuple[int, TokenShard], None] = {}
    for index, slot in enumerate(cache.plan.slots):
        if slot is not None:
            ranks = cache.ranks_of(index)
            stored[slot[0], ALL_TOKENS if ranks is None else ranks.shard] = None
    return list(stored)


def _slots_name(group: int, shard: TokenShard) -> str:
    return f"slots {group} of rank {shard.rank} of {shard.num_ranks}"


def _allocate_parts(
    shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], device: torch.device
) -> tuple[dict[str, _BufferPart], Tensor, Tensor]:
    """Return the parts of one buffer by name, and the whole buffer on the host and on the
    device."""
    offsets: dict[str, int] = {}
    num_bytes = 0
    for name, (dtype, shape) in shapes.items():
        offsets[name] = num_bytes
        num_bytes += -(-int(np.prod(shape)) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type != "cpu")
    whole = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    parts: dict[str, _BufferPart] = {}
    for name, (dtype, shape) in shapes.items():
        first, length = offsets[name], int(np.prod(shape)) * dtype.itemsize
        bytes_of_part: NDArray[np.uint8] = host.numpy()[first : first + length]
        array: NDArray[np.generic] = bytes_of_part.view(_NUMPY_DTYPES[dtype]).reshape(shape)
        parts[name] = _BufferPart(array, whole[first : first + length].view(dtype).view(shape))
    return parts, host, whole


@dataclass(frozen=True, slots=True)
class BufferedTables:
    """Block tables and slots of a bucket in the buffers; `StepTables` of a replayed step."""

    buffers: StepBuffers
    bucket: BatchDimensions
    block_size: int
    max_queries: int
    """Largest number of queries of a row."""

    rows: Sequence[PlannedRow] = ()
    """Empty: a graph depends on no row."""

    def metadata(self, group: int, ranks: TokenRankGroup | None) -> PagedMetadata:
        """Return block tables and lengths of a KV cache group for the paged kernels."""
        buffers, num_rows = self.buffers, self.bucket.num_rows
        return PagedMetadata(
            block_tables=buffers[f"block_table {group}"][:num_rows],
            cu_seqlens_q=buffers["cu_seqlens_q"][: num_rows + 1],
            kv_lengths=buffers["kv_lengths"][:num_rows],
            lengths=((self.max_queries, buffers.max_model_len),) * num_rows,
            block_size=self.block_size // (1 if ranks is None else ranks.group.size),
            ranks=ranks,
            is_static=True,
        )

    def stored_tokens(self, group: int, shard: TokenShard) -> tuple[None, Tensor]:
        """Return the slots of all tokens, int64 [t]."""
        return None, self.buffers[_slots_name(group, shard)][: self.bucket.num_tokens]

    def gathered_keys(self, group: int, ranks: TokenRankGroup | None) -> GatheredKeys:
        """Fail: the number of gathered keys depends on the step."""
        raise AssertionError("a replayed step gathers no keys; see graph_limitation")


# --- replays


class Replay(Protocol):
    """A step of one bucket that can be repeated on the contents of the buffers."""

    def replay(self) -> None:
        """Compute the step."""


class StaticReplay:
    """Repeats a function eagerly, and checks that the tensors that it may read or write have the
    addresses and shapes of the first time."""

    def __init__(
        self, run: Callable[[], None], list_tensors: Callable[[], Mapping[str, Tensor]]
    ) -> None:
        self._run, self._list_tensors = run, list_tensors
        run()
        self._layouts = {name: _layout(x) for name, x in list_tensors().items()}

    def replay(self) -> None:
        """Check the tensors and call the function.

        Raises:
            AssertionError: a tensor was allocated again, or has another shape.
        """
        layouts = {name: _layout(x) for name, x in self._list_tensors().items()}
        for name, captured in self._layouts.items():
            assert layouts.get(name) == captured, (
                f"{name} was captured at (address, shape, strides) {captured}, now it is at "
                f"{layouts.get(name)}: a graph would use the old memory. Reset the graphs first."
            )
        self._run()


def _layout(x: Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    return x.data_ptr(), tuple(x.shape), x.stride()


class CudaGraphReplay:
    """Replays a function that was captured in a CUDA graph."""

    def __init__(self, run: Callable[[], None], other: "CudaGraphReplay | None") -> None:
        """`other`: a graph with which this one shares memory, because they are replayed one at a
        time."""
        current, stream = torch.cuda.current_stream(), torch.cuda.Stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(NUM_WARMUP_RUNS):
                run()
        current.wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        # other threads, for example one that copies weights, may use the device during the capture
        pool = None if other is None else other._graph.pool()
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            run()

    def replay(self) -> None:
        """Start the kernels of the graph."""
        self._graph.replay()


class StepGraphs:
    """The captured steps of a model runner, one per bucket, which share buffers and memory."""

    def __init__(
        self,
        plan: GraphPlan,
        model: Decoder,
        cache: PagedKVCache,
        run_step: RunStep,
        *,
        link: PipelineLink | None,
        expert_group: Group,
    ) -> None:
        """`run_step`: computes a step; `expert_group`: ranks that share experts."""
        assert cache.has_padding, "the cache has no block for padding"
        self.plan, self._model, self._cache, self._link = plan, model, cache, link
        self._run_step, self._expert_group = run_step, expert_group
        self._replays: dict[BatchDimensions, Replay] = {}
        self._outputs: dict[str, Tensor] = {}
        self.num_replays: Counter[BatchDimensions] = Counter()
        """Replayed steps by bucket."""
        self.num_eager_steps: Counter[str] = Counter()
        """Steps that were not replayed, by reason."""
        self._device = next(model.parameters()).device
        self.buffers = StepBuffers(
            cache,
            max_tokens=max(bucket.num_tokens for bucket in plan.buckets),
            max_rows=max(bucket.num_rows for bucket in plan.buckets),
            max_sampled=max(map(self._count_sampled, plan.buckets)),
            max_model_len=plan.limits.max_model_len,
            device=self._device,
        )
        self._allocate_rope()
        if link is not None:
            max_tokens = max(bucket.num_tokens for bucket in plan.buckets)
            self.buffers.received = link.allocate_received(max_tokens // plan.limits.num_shards)

    def match(
        self, rows: Sequence[PlannedRow], states: Mapping[int, SequenceState]
    ) -> BatchDimensions | None:
        """Return the bucket of a step, or None if it runs eagerly, and count the step. Collective
        over the ranks that share experts."""
        num_decodes = sum(row.samples and row.count == 1 + len(row.draft_ids) for row in rows)
        num_tokens = sum(row.count for row in rows)
        batch = BatchDimensions(num_tokens, len(rows) - num_decodes, num_decodes)
        has_adapters = any(states[row.seq_id].adapter is not None for row in rows)
        shares_experts = self._expert_group.size > 1
        if shares_experts:
            sizes = all_reduce_max_(torch.tensor([*batch, int(has_adapters)]), self._expert_group)
            *dimensions, adapters = sizes.tolist()
            batch, has_adapters = BatchDimensions(*dimensions), bool(adapters)
        bucket: BatchDimensions | EagerReason | Literal["adapters"] = "adapters"
        if not has_adapters:
            bucket = match_bucket(self.plan.buckets, batch, shares_experts=shares_experts)
        if isinstance(bucket, str):
            self.num_eager_steps[bucket] += 1
            return None
        self.num_replays[bucket] += 1
        return bucket

    def run(
        self,
        bucket: BatchDimensions,
        rows: Sequence[PlannedRow],
        ids: Sequence[int],
        sampled: Sequence[int],
        rope_lengths: Sequence[int],
    ) -> StageOutputs:
        """Compute a step by the graph of a bucket: tokens `ids` of the rows, logits of the tokens
        `sampled`, and rotary frequencies of `rope_lengths`, one per row."""
        if not self.is_captured:
            self.capture()
        received = NOTHING_RECEIVED
        if self._link is not None:
            received = self._link.receive(bucket.num_tokens // self.plan.limits.num_shards)
        for name, tensor in received.items():
            self.buffers.received[name][: len(tensor)].copy_(tensor)
        self.buffers.write(rows, ids, sampled, bucket)
        self._write_rope(rows, rope_lengths)
        if self.plan.mode == "static_replay":
            self.buffers.check_padding(len(ids))
        self._model.tp_comm.collectives.reset_buffers()
        self._replays[bucket].replay()
        return self._read_outputs(bucket, len(ids), len(sampled))

    @property
    def is_captured(self) -> bool:
        """Whether there are graphs; without, the next step that has a bucket captures them."""
        return bool(self._replays)

    def capture(self) -> None:
        """Capture the steps of all buckets on padding; none of them if one fails. Collective over
        the ranks of the model."""
        self.reset()
        try:
            with torch.inference_mode():
                self._capture()
        except BaseException:
            self.reset()
            raise

    def reset(self) -> None:
        """Drop all graphs, which hold addresses of weights and of the KV cache, for example before
        these are released. The next step that has a bucket captures them again."""
        self._replays.clear()
        self._outputs.clear()

    def _capture(self) -> None:
        graph: CudaGraphReplay | None = None
        for bucket in self.plan.buckets:
            rows = [self._cache.make_padding_row() for _ in range(bucket.num_rows)]
            self.buffers.write(rows, [0] * len(rows), (), bucket)
            run = _BucketStep(self, bucket)
            if not self._outputs:
                self._allocate_outputs(run)
            self._model.tp_comm.collectives.reset_buffers()
            if self.plan.mode == "static_replay":
                self._replays[bucket] = StaticReplay(run, self._list_tensors)
            else:
                graph = CudaGraphReplay(run, graph)
                self._replays[bucket] = graph

    def _list_tensors(self) -> dict[str, Tensor]:
        """Return all tensors whose addresses a graph holds, by name."""
        weights = chain(self._model.named_parameters(), self._model.named_buffers())
        return dict(weights) | self.buffers.tensors | self._cache.tensors | self._outputs

    def make_inputs(self, bucket: BatchDimensions) -> StepInputs:
        """Return the inputs of a step of a bucket, all of them in the buffers."""
        buffers, num_tokens = self.buffers, bucket.num_tokens
        max_queries = num_tokens
        if bucket.is_decode_only:
            max_queries = min(self.plan.limits.num_drafts + 1, num_tokens)
        seq_params = buffers.seq_params(num_tokens, bucket.num_rows, max_queries=max_queries)
        inputs = LayerInputs(seq_params, rope=tuple(table[:num_tokens] for table in buffers.rope))
        tables = BufferedTables(buffers, bucket, self._cache.block_size, max_queries)
        num_local_tokens = num_tokens // self.plan.limits.num_shards
        return StepInputs(
            buffers["ids"][:num_tokens],
            inputs,
            self._cache.layers(tables),
            {name: tensor[:num_local_tokens] for name, tensor in buffers.received.items()},
            buffers["sampled"][: self._count_sampled(bucket)],
        )

    def _count_sampled(self, bucket: BatchDimensions) -> int:
        """Return the largest number of tokens of a bucket whose logits are computed."""
        tokens_per_row = self.plan.limits.num_drafts + 1
        return min(bucket.num_tokens, bucket.num_rows * tokens_per_row)

    # --- rotary tables, which depend on the full length of a row, and are computed before a replay

    def _allocate_rope(self) -> None:
        seq_params = seq_params_from_rows(1, 1, device=self._device)
        tables = self._model.rotations.add_to(LayerInputs(seq_params)).rope
        num_tokens = len(self.buffers["ids"])
        self.buffers.rope = tuple(table.new_zeros(num_tokens, table.shape[1]) for table in tables)

    def _write_rope(self, rows: Sequence[PlannedRow], lengths: Sequence[int]) -> None:
        if not self.buffers.rope or not rows:
            return
        num_tokens = sum(row.count for row in rows)
        num_keys = [row.start + row.count for row in rows]
        seq_params = PackedSeqParams(
            cu_seqlens_q=self.buffers["cu_seqlens_q"][: len(rows) + 1],
            cu_seqlens_kv=self.buffers["cu_seqlens_kv"][: len(rows) + 1],
            max_seqlen_q=max(row.count for row in rows),
            max_seqlen_kv=max(num_keys),
            uniform=None,
            position_ids=self.buffers["position_ids"][:num_tokens],
            document_ids=self.buffers["document_ids"][:num_tokens],
            valid=self.buffers["valid"][:num_tokens],
            lengths=tuple((row.count, keys) for row, keys in zip(rows, num_keys, strict=True)),
            reach=tuple(lengths),
        )
        tables = self._model.rotations.add_to(LayerInputs(seq_params)).rope
        for buffer, table in zip(self.buffers.rope, tables, strict=True):
            buffer[:num_tokens].copy_(table)

    # --- outputs, in buffers that all graphs share

    def compute(self, inputs: StepInputs) -> None:
        """Compute a step and write its outputs to their buffers."""
        for name, tensor in _name_outputs(self._run_step(inputs)).items():
            self._outputs[name][: len(tensor)].copy_(tensor)
        self._model.tp_comm.collectives.reset_buffers()

    def _allocate_outputs(self, step: "_BucketStep") -> None:
        max_tokens = len(self.buffers["ids"])
        sizes = {"hidden": max_tokens, "logits": len(self.buffers["sampled"])}
        for name, tensor in _name_outputs(self._run_step(step.inputs)).items():
            num_rows = sizes.get(name, max_tokens // self.plan.limits.num_shards)
            self._outputs[name] = tensor.new_zeros(num_rows, *tensor.shape[1:])

    def _read_outputs(
        self, bucket: BatchDimensions, num_tokens: int, num_sampled: int
    ) -> StageOutputs:
        """Return copies, because the next replay overwrites the buffers."""
        num_local_tokens = bucket.num_tokens // self.plan.limits.num_shards
        tensors = {
            name.removeprefix("stage "): tensor[:num_local_tokens].clone()
            for name, tensor in self._outputs.items()
            if name.startswith("stage ")
        }
        if "logits" not in self._outputs:
            return StageOutputs(tensors)
        hidden, logits = self._outputs["hidden"], self._outputs["logits"]
        return StageOutputs(tensors, hidden[:num_tokens].clone(), logits[:num_sampled].clone())


class _BucketStep:
    """Computes the step of a bucket from its inputs in the buffers."""

    def __init__(self, graphs: StepGraphs, bucket: BatchDimensions) -> None:
        self._graphs, self.inputs = graphs, graphs.make_inputs(bucket)

    def __call__(self) -> None:
        self._graphs.compute(self.inputs)


def _name_outputs(outputs: StageOutputs) -> dict[str, Tensor]:
    """Return the outputs that other ranks or the engine read: those of the last stage, or else
    those of a stage before it."""
    if outputs.hidden is None or outputs.logits is None:
        return {f"stage {name}": tensor for name, tensor in outputs.tensors.items()}
    return {"hidden": outputs.hidden, "logits": outputs.logits}
