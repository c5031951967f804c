"""Parallelism: sizes of the parallel groups, context parallelism, pipeline, activation
checkpointing, communication overlap, ZeRO and gradient buckets."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from megalith.config.fields import Example, Ge, Gt, Le

MAX_RANKS = 1 << 20
"""Maximum size of one axis. Heuristic: ten times the largest machines; plans build lists of ranks
and stages."""

MAX_STAGES = 1 << 12
"""Maximum pipeline stages, and model chunks of all stages. Heuristic: fifty times the most that are
used."""

# --- context parallelism: how tokens are split over ranks, and how attention communicates

ContextKind = Literal["ring", "gather", "a2a", "a2a+ring"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextConfig:
    """Context parallelism settings; ignored with parallel.cp=1."""

    kind: ContextKind = "ring"
    """Communication of attention. ring: ring attention, keys and values are sent around the
    ring; gather: keys and values are all-gathered; a2a: all-to-all of heads (Ulysses);
    a2a+ring: a2a among neighboring ranks, ring across them."""

    layers: tuple[ContextKind, ...] = ()
    """Kind of each layer, if layers differ. Empty: `kind` for all."""

    a2a: int | None = None
    """a2a+ring: number of neighboring ranks in the all-to-all; the ring has cp / a2a ranks.
    Unset: a2a+ring is not used."""

    slicing: Literal["row", "document"] = "row"
    """Load-balanced (zig-zag) split: each rank gets an early and a late chunk of each row, or of
    each document."""


# --- pipeline parallelism: stages and schedule

ScheduleName = Literal["auto", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineConfig:
    """Pipeline stages and schedule; ignored with parallel.pp=1 and vpp=1."""

    schedule: ScheduleName = "auto"
    """Pipeline schedule. auto: 1f1b, or interleaved if vpp > 1. zb-h1, zb-v and dualpipe-v (zero
    bubble) split the backward into input and weight gradients; zb-v and dualpipe-v place two
    model chunks per rank in a V shape."""

    vpp: Annotated[int, Ge(1)] = 1
    """Virtual pipeline size: model chunks per rank. A larger value gives a smaller bubble and
    more communication."""

    group: Annotated[int | None, Ge(1), Le(MAX_RANKS)] = None
    """interleaved: number of consecutive microbatches that a rank runs through one chunk before
    it switches to the next. Unset: pp."""

    layout: str | None = None
    """Stage layout as a string: E embedding, t transformer layer, m MTP layer, L loss; `|` ends
    a stage; `t*3` and `(tt|)*2` repeat. Unset: an even split, with all MTP layers in the
    stage of the loss."""

    first_layers: Annotated[int | None, Ge(0)] = None
    """Number of layers of the first pipeline rank, over all its chunks. Unset: an even share."""

    last_layers: Annotated[int | None, Ge(0)] = None
    """Number of layers of the last pipeline rank, over all its chunks. Unset: an even share."""

    count_embedding: bool = False
    """Count the embedding as one layer in the even split, so that the first stage has one layer
    less."""

    count_loss: bool = False
    """Count the loss as one layer in the even split, so that the last stage has one layer less."""


CollectiveMatmulName = Literal["auto", "ring_exchange", "fused"]
DispatcherName = str
"""Token dispatcher: alltoall, allgather, reference, or one registered by an installed package."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Parallelism; tp · cp · pp · dp is the world size."""

    tp: Annotated[int, Ge(1), Le(MAX_RANKS)] = 1
    """Tensor-parallel size: ranks over which weight matrices are sharded. Keep within one node."""

    sp: bool = False
    """Sequence parallelism: outside the tensor-parallel linear layers, activations are sharded
    over tp ranks along the tokens. Needs tp > 1."""

    tp_comm_overlap: bool = False
    """With sp: collective matmul, which splits the all-gather and reduce-scatter of tokens over
    tp ranks into steps that overlap with parts of the matmul. The order of summation changes,
    so results differ in the last digits."""

    collective_matmul: CollectiveMatmulName = "auto"
    """Implementation of tp_comm_overlap. ring_exchange: point-to-point messages between partial
    matmuls, on any device; fused: torch's fused all-gather and reduce-scatter matmuls, on
    GPUs of one machine with peer access; auto: fused if every tp rank supports it."""

    cp: Annotated[int, Ge(1), Le(MAX_RANKS)] = 1
    """Context-parallel size: ranks over which the tokens of each row are split."""

    context: ContextConfig = field(default_factory=ContextConfig)
    """Context parallelism: split of rows and communication of keys and values."""

    pp: Annotated[int, Ge(1), Le(MAX_STAGES)] = 1
    """Pipeline-parallel size: ranks over which the layers are split."""

    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    """Pipeline stages and schedule."""

    ep: Annotated[int, Ge(1), Le(MAX_RANKS)] = 1
    """Expert-parallel size: ranks over which the experts of each layer are split. Not a factor
    of the world size: the ranks of a pipeline stage are also divided as ep · etp · edp."""

    etp: Annotated[int | None, Ge(1), Le(MAX_RANKS)] = None
    """Expert-tensor-parallel size: ranks over which the matrices of each expert are sharded.
    Unset: tp."""

    dispatcher: DispatcherName = "alltoall"
    """Token dispatcher. alltoall: send tokens to the ranks of their experts; allgather: send all
    tokens to all ranks; reference: a simple implementation for tests; or the name of one
    registered by an installed package."""

    overlap_experts: bool = False
    """Overlap the token communication of one microbatch with the computation of another: forward
    and backward of two microbatches run together. Same results; needs ep > 1 and the
    activation memory of one or more additional microbatches."""

    dp: Annotated[int | None, Ge(1), Le(MAX_RANKS)] = None
    """Data-parallel size: ranks with different rows. Unset: world size / (tp · cp · pp)."""

    zero: Literal[0, 1, 2, 3] = 0
    """ZeRO stage: what is sharded over dp · cp ranks. 0: nothing; 1: optimizer state; 2: also
    gradients; 3: also weights."""

    dp_replicate: Annotated[int, Ge(1), Le(MAX_RANKS)] = 1
    """With zero > 0: number of replicas (HSDP). State is sharded over dp / dp_replicate ranks
    and replicated across these groups. Must divide dp."""

    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of communicated gradients. bf16 halves the traffic; each rank still accumulates
    received gradients in fp32."""

    order: str = "tp-cp-ep-dp-pp"
    """Order of the parallel axes over ranks; the first varies fastest."""

    bucket_numel: Annotated[int, Ge(1)] = 4_000_000
    """Minimum number of elements of a gradient bucket; each bucket is reduced over dp as soon as
    its gradients are ready."""

    bucket_alignment: Literal["none", "matrices"] = "none"
    """Where the ZeRO slices of a bucket may end. matrices: not inside weight matrices, so that each
    is whole on one rank (of its tensor-parallel ranks) and an update rule per matrix, such as
    optim.kind=muon, needs no messages along dp; slices are padded, and buckets grow."""

    overlap: bool = True
    """Overlap communication with computation: gradient reduction with backward, parameter
    all-gather with forward, pipeline messages with other microbatches, ring attention
    messages with attention. Same results."""

    check_collectives: bool = False
    """Compare the arguments of every collective across ranks before it runs, so that a mismatch
    raises an error instead of hanging; slow."""

    timeout_seconds: Annotated[float, Gt(0), Le(1e9)] = 600.0
    """Timeout of a collective in seconds, after which the run ends with an error that names the
    ranks that did not join it."""

    heartbeat_timeout_seconds: Annotated[float | None, Gt(0), Le(1e9), Example(300.0)] = None
    """Seconds without progress outside of collectives after which a rank is killed, and reported
    with its stacks. Unset: 5 times the longest time measured in the same section of the run (start,
    step, save, load, evaluate, exit), at least 60 s; `timeout_seconds` for the first 16 passes."""


# --- activation checkpointing (recomputation in backward) and activation offload to host memory

RecomputedModule = Literal[
    "core_attention", "norm", "mlp", "mlp_act", "shared_experts", "mla_up_proj"
]
"""Modules for selective recomputation. In a mixture of experts, `mlp` is the whole block
including communication; `mlp_act` is the activation of the shared experts (routed experts
never save theirs); `shared_experts` is the whole shared MLP, redundant with `mlp`.
`mla_up_proj` is latent attention from the latent vectors to the heads' outputs: up
projections, RoPE and core_attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeConfig:
    """Activation checkpointing: what is recomputed in backward. Source: Korthikanti et al. 2022,
    arXiv:2205.05198, section 5."""

    granularity: Literal["none", "full", "selective", "auto"] = "none"
    """What is recomputed. none: nothing; full: whole layers, of which only the inputs are saved;
    selective: `modules` of every layer; auto: the cheapest of these with which the run fits
    on `device`."""

    device: str | None = None
    """auto: device whose memory must suffice: a100, h100, h200, b200, or a size in GiB. Unset
    with the other granularities."""

    method: Literal["uniform", "block"] = "uniform"
    """full: which layers are recomputed. uniform: all layers, in chunks of num_layers; block:
    only the first num_layers of each stage."""

    num_layers: Annotated[int, Ge(1)] = 1
    """full: layers per chunk (uniform), or number of recomputed layers per stage (block)."""

    modules: tuple[RecomputedModule, ...] = ("core_attention",)
    """selective: modules to recompute."""

    mlp_chunks: Annotated[int, Ge(1)] = 1
    """selective, with mlp among `modules`: number of chunks into which a rank's tokens of a
    microbatch are split for the MLP, forward and backward, so that intermediate activations
    of only one chunk exist at a time. A mixture of experts is not split."""

    shard_inputs: bool = False
    """full: shard each saved input over the tensor-parallel ranks; needs tp > 1 without sp."""

    check: bool = False
    """Compare all recomputed values with the original ones and raise an error if they are not
    bitwise equal; slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadConfig:
    """Activation offload: saved activations are copied to host memory between forward and
    backward."""

    layers: Annotated[int, Ge(0)] = 0
    """Number of layers, from the first of each stage, whose saved activations are offloaded to
    host memory; 0: none."""

    min_numel: Annotated[int, Ge(1)] = 1 << 20
    """Minimum number of elements of an offloaded tensor; smaller ones stay on the device."""
