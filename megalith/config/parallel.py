"""Parallelism: sizes of the parallel groups, communication overlap, ZeRO and gradient buckets."""

from dataclasses import dataclass, field
from typing import Literal

from megalith.config.context import ContextConfig
from megalith.config.pipeline import PipelineConfig

CollectiveMatmulName = Literal["auto", "ring_exchange", "fused"]
DispatcherName = str
"""Token dispatcher: alltoall, allgather, reference, or one registered by an installed package."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Parallelism; tp · cp · pp · dp is the world size."""

    tp: int = 1
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

    cp: int = 1
    """Context-parallel size: ranks over which the tokens of each row are split."""

    context: ContextConfig = field(default_factory=ContextConfig)
    """Context parallelism: split of rows and communication of keys and values."""

    pp: int = 1
    """Pipeline-parallel size: ranks over which the layers are split."""

    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    """Pipeline stages and schedule."""

    ep: int = 1
    """Expert-parallel size: ranks over which the experts of each layer are split. Not a factor
    of the world size: the ranks of a pipeline stage are also divided as ep · etp · edp."""

    etp: int | None = None
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

    dp: int | None = None
    """Data-parallel size: ranks that process different rows of the batch. Unset: world size /
    (tp · cp · pp)."""

    zero: Literal[0, 1, 2, 3] = 0
    """ZeRO stage: what is sharded over dp · cp ranks. 0: nothing; 1: optimizer state; 2: also
    gradients; 3: also weights."""

    dp_replicate: int = 1
    """With zero > 0: number of replicas (HSDP). State is sharded over dp / dp_replicate ranks
    and replicated across these groups. Must divide dp."""

    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of communicated gradients. bf16 halves the traffic; each rank still accumulates
    received gradients in fp32."""

    order: str = "tp-cp-ep-dp-pp"
    """Order of the parallel axes over ranks; the first varies fastest."""

    bucket_numel: int = 4_000_000
    """Minimum number of elements of a gradient bucket; each bucket is reduced over dp as soon as
    its gradients are ready."""

    overlap: bool = True
    """Overlap communication with computation: gradient reduction with backward, parameter
    all-gather with forward, pipeline messages with other microbatches, ring attention
    messages with attention. Same results."""

    check_collectives: bool = False
    """Compare the arguments of every collective across ranks before it runs, so that a mismatch
    raises an error instead of hanging; slow. Collectives of torch's FSDP2 (zero=3) are not
    compared."""

    timeout_seconds: float = 600.0
    """Timeout of a collective in seconds, after which the run ends with an error that names the
    ranks that did not join it."""
