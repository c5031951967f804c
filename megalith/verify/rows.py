"""Row of the matrix of layouts, and the models and layouts that many rows share."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from megalith.config.checkpoint import CheckpointConfig
from megalith.config.lora import LoraConfig
from megalith.config.model import DropoutConfig, ModelConfig, MTPConfig
from megalith.config.moe import AuxLossConfig, MoEConfig
from megalith.config.optim import TRAIN_ALL, OptimConfig
from megalith.config.parallel import (
    ContextConfig,
    OffloadConfig,
    ParallelConfig,
    PipelineConfig,
    RecomputeConfig,
)
from megalith.verify.ranks import LayoutCase, MaskKind, choose_micro_batch_size, layout_case

Area = Literal[
    "tensor and data",
    "divided state",
    "sharded weights",
    "pipeline",
    "shared rows",
    "memory",
    "all axes",
    "variants",
    "adapters",
    "experts",
    "chosen parameters",
    "masks",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One row of the matrix: a tiny model and its parallel layout."""

    area: Area
    name: str
    model: ModelConfig
    parallel: ParallelConfig
    rows: int | None = None
    """Rows per microbatch, of 12 per step; None: `choose_micro_batch_size`."""

    seq_len: int = 12
    budget: int | None = None
    """Tokens per cp rank of a pack of whole documents; None: rows."""

    documents: bool = False
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)

    smoothing: float = 0.0
    """Label smoothing."""

    z_loss: float = 0.0
    recomputed_loss: bool = False
    """Recompute logits in backward."""

    lora: LoraConfig | None = None
    optim: OptimConfig = TRAIN_ALL
    """Frozen parameters and parameter groups."""

    masks: MaskKind | None = None
    """Attention masks of the tokens."""

    sample: bool = False
    """Part of the small sample that covers every feature on at most four processes, for `make test`
    and `megalith verify --all --sample`."""

    @property
    def world(self) -> int:
        """Number of processes."""
        p = self.parallel
        return p.tp * p.cp * p.pp * (p.dp or 1)

    def case(self) -> LayoutCase:
        """Return the float64 case of this row."""
        case = layout_case(
            self.model,
            self.parallel,
            self.world,
            seq_len=self.seq_len,
            documents=self.documents,
            micro_batch_size=self.rows or choose_micro_batch_size(self.parallel),
        )
        # A rule requires the base checkpoint of adapters; here it is initialized randomly.
        base = CheckpointConfig(load=None if self.lora is None else "base")
        run = replace(
            case.run,
            recompute=self.recompute,
            offload=self.offload,
            lora=self.lora,
            checkpoint=base,
            optim=replace(self.optim, eps=case.run.optim.eps),
            train=replace(
                case.run.train,
                label_smoothing=self.smoothing,
                z_loss=self.z_loss,
                loss_backward="recomputed" if self.recomputed_loss else "kept",
                loss_chunk=7 if self.recomputed_loss else None,
                tokens_per_microbatch=self.budget,
            ),
        )
        return replace(case, run=run, masks=self.masks)


def tiny(
    *,
    num_heads: int = 4,
    num_kv_heads: int = 4,
    num_layers: int = 2,
    tied: bool = False,
    bias: bool = False,
) -> ModelConfig:
    """Return a model with sizes that are no powers of two, a padded vocabulary, and dimensions that
    tp 3 does not divide."""
    return ModelConfig(
        vocab_size=61,
        pad_vocab_to_multiple_of=4,
        hidden_size=24,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=6,
        ffn_hidden_size=20,
        tied_embeddings=tied,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
    )


TIED, BIASED = tiny(tied=True), tiny(bias=True)
SHARED = tiny(num_heads=8, num_kv_heads=2)  # tp 4 has two ranks per KV head
UNEVEN = tiny(num_heads=6, num_kv_heads=2)  # and with 6 heads these have two query heads and one
FOUR = tiny(num_kv_heads=2, num_layers=4)
FOUR_TIED = replace(FOUR, tied_embeddings=True)
THREE_TIED, SIX_LAYERS = replace(FOUR_TIED, num_layers=3), replace(FOUR, num_layers=6)

NO = RecomputeConfig()
FULL, BLOCK = (
    RecomputeConfig(granularity="full"),
    RecomputeConfig(granularity="full", method="block"),
)
PARTS = RecomputeConfig(granularity="selective", modules=("core_attention", "norm", "mlp_act"))


def staged(
    pp: int,
    *,
    tp: int = 1,
    cp: int = 1,
    dp: int = 1,
    sp: bool = False,
    zero: Literal[0, 1, 2, 3] = 0,
    **pipeline: object,
) -> ParallelConfig:
    """Return a layout with a pipeline; other keyword arguments are pipeline settings."""
    settings = PipelineConfig(**pipeline)  # type: ignore[arg-type]  # by name
    return ParallelConfig(tp=tp, cp=cp, pp=pp, dp=dp, sp=sp, zero=zero, pipeline=settings)


def row_of(parallel: ParallelConfig) -> int:
    """Return the tokens per row that the ranks can shard."""
    parts = 2 * parallel.cp * (parallel.tp if parallel.sp else 1)
    return -(-12 // parts) * parts if parallel.cp > 1 else 12


LayoutEntry = tuple[ModelConfig, ParallelConfig] | tuple[ModelConfig, ParallelConfig, int]
"""Model and layout of a row, and the rows per microbatch if not the default."""


def table(
    area: Area, layouts: Mapping[str, LayoutEntry], *, sample: Collection[str] = ()
) -> Iterator[Layout]:
    """Yield the rows of a table by name; `sample`: names of those in the sample."""
    for name, entry in layouts.items():
        model, parallel = entry[:2]
        yield Layout(
            area=area,
            name=name,
            model=model,
            parallel=parallel,
            rows=entry[2] if len(entry) == 3 else None,
            seq_len=row_of(parallel),
            sample=name in sample,
        )


def packed_rows() -> Iterator[Layout]:
    """Yield layouts with sequence packing by a token budget, in which the number of microbatches
    varies."""
    by_document, dropout = (
        ContextConfig(slicing="document"),
        DropoutConfig(residual=0.2, attention=0.2),
    )
    experts = MoEConfig(
        num_experts=4, ffn_hidden_size=10, aux_loss=AuxLossConfig(z_loss_coeff=0.3)
    )  # z-loss is a mean over tokens, not packs
    layouts = {
        "tp2 dp2 sp": (BIASED, ParallelConfig(tp=2, dp=2, sp=True), 24),
        "dp3, zero 3": (TIED, ParallelConfig(dp=3, zero=3), 16),
        "cp2 dp2 by document": (tiny(), ParallelConfig(cp=2, dp=2, context=by_document), 20),
        "tp2 cp2 sp": (tiny(), ParallelConfig(tp=2, cp=2, sp=True), 12),
        "pp2 vpp2 dp2": (FOUR, staged(2, dp=2, vpp=2), 24),
        "pp3 zb-h1 dp2, zero 1": (THREE_TIED, staged(3, dp=2, zero=1, schedule="zb-h1"), 12),
        "dropout, cp2 dp2": (replace(tiny(), dropout=dropout), ParallelConfig(cp=2, dp=2), 24),
        "mtp, pp2 dp2": (replace(tiny(), mtp=MTPConfig(num_layers=2)), staged(2, dp=2), 24),
        "experts, dp2 ep2": (replace(tiny(), moe=experts), ParallelConfig(dp=2, ep=2), 24),
    }
    for name, (model, parallel, budget) in layouts.items():
        yield Layout(
            area="variants",
            name=f"packs, {name}",
            model=model,
            parallel=parallel,
            rows=1,
            budget=budget,
        )
