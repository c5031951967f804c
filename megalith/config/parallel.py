"""How the ranks divide the work."""

from dataclasses import dataclass, field
from typing import Literal

from megalith.config.context import ContextConfig
from megalith.config.pipeline import PipelineConfig

CollectiveMatmulName = Literal["auto", "ring_exchange", "fused"]
DispatcherName = str
"""alltoall, allgather, reference, or what an installed package calls its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """How the ranks divide the work; the degrees multiply to the world size."""

    tp: int = 1
    """Tensor parallel: ranks that split every weight matrix. Keep inside one node."""

    sp: bool = False
    """Sequence parallel: between tensor-parallel regions each rank keeps only its part of the
    tokens. Needs tp > 1."""

    tp_comm_overlap: bool = False
    """With sp: gather and scatter tokens step by step around the tp ranks, each step behind a
    part of a matmul. Adds up in another order, so the last digits differ."""

    collective_matmul: CollectiveMatmulName = "auto"
    """With rings: messages between matmuls, on any device, or torch's products that are fused
    with them, on GPUs of one machine that read each other's memory. auto: fused where every tp
    rank can."""

    cp: int = 1
    """Context parallel: ranks that share the tokens of each row."""

    context: ContextConfig = field(default_factory=ContextConfig)
    """How cp ranks slice rows and exchange keys and values."""

    pp: int = 1
    """Pipeline parallel: ranks that each hold some of the layers."""

    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    """How layers divide into stages, and the schedule."""

    ep: int = 1
    """Expert parallel: ranks that divide the experts of each layer. No factor of the world: with
    etp and edp it divides the ranks of a pipeline stage once more."""

    etp: int | None = None
    """Expert tensor parallel: ranks that split every expert's matrices; unset: as tp."""

    dispatcher: DispatcherName = "alltoall"
    """How tokens reach the ranks with their experts: each its own (exchange, an all-to-all), or
    all tokens every rank (gather); a plain way that proves others (reference); or one that an
    installed package brings, by its name."""

    overlap_experts: bool = False
    """Compute the forward of one microbatch together with the backward of another, each while
    the tokens of the other travel to experts and back. Same numbers; needs ep > 1, and memory
    for one or more microbatches more."""

    dp: int | None = None
    """Data parallel: ranks that read different rows of the batch; unset: world size / (tp · cp ·
    pp)."""

    zero: Literal[0, 1, 2, 3] = 0
    """What dp · cp ranks divide instead of each holding all: 1 optimizer state, 2 gradients too, 3
    weights too."""

    dp_replicate: int = 1
    """With zero > 0: groups of dp ranks that each hold everything once (HSDP). Must divide dp."""

    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """What gradients travel in. bf16 halves the traffic; each rank still adds what it receives in
    fp32."""

    order: str = "tp-cp-ep-dp-pp"
    """Which axis varies fastest over neighboring ranks, fastest first."""

    bucket_numel: int = 4_000_000
    """Gradients are summed over dp in buckets of at least this many elements, each as soon as it is
    full."""

    overlap: bool = True
    """Communicate while computing: gradient sums behind backward, weights behind forward,
    stages' messages behind other microbatches, keys and values around cp ranks behind attention.
    Same numbers either way."""

    check_collectives: bool = False
    """Compare what all ranks are about to do before every collective, so that a mismatch is an
    error and not a hang; slow. The collectives that torch's FSDP2 launches under zero=3 are not
    compared."""

    timeout_seconds: float = 600.0
    """A collective that waits longer than this ends the run and names the ranks that did not
    arrive."""
