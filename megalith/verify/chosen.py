"""Rows of the matrix with frozen parameters or parameter groups."""

from collections.abc import Iterator
from dataclasses import replace

from megalith.config.model import ModelConfig
from megalith.config.moe import AuxLossConfig, MoEConfig
from megalith.config.optim import GroupConfig, OptimConfig
from megalith.config.parallel import ParallelConfig
from megalith.config.recompute import RecomputeConfig
from megalith.verify.rows import FOUR, FOUR_TIED, TIED, Layout, row_of, staged
from megalith.verify.variants import CROSS_LAYER, LEARNED, MTP_MODEL, ONE_NORM, PLAIN, RELATIVE

EXPERTS = replace(
    PLAIN,
    num_kv_heads=6,
    moe=MoEConfig(num_experts=4, ffn_hidden_size=10, shared_ffn_hidden_size=9),
)
"""Experts in all layers, without aux losses."""

BALANCED = replace(EXPERTS, moe=replace(EXPERTS.moe, aux_loss=AuxLossConfig(batch_coeff=0.2)))  # type: ignore[type-var]
"""Experts with an aux loss."""

FIRST_STAGE = OptimConfig(frozen=("embed.weight", "layers.[01].*"))
UPPER = OptimConfig(
    trained=("layers.[23].*", "norm.*"), frozen=("*.mlp.down", "layers.3.attention.q")
)
RATES = OptimConfig(
    groups=(
        GroupConfig(name="table", match=("embed.weight",), lr=3e-2),
        GroupConfig(name="queries", match=("*.q",), lr_scale=0.1, weight_decay=0.7),
        GroupConfig(name="upper", match=("layers.1.mlp.*",), weight_decay_scale=0.0),
    ),
    decayed_vectors=("*.mlp_norm.weight",),
)
"""Learning rates and weight decay that differ strongly between neighboring parameters."""

Row = tuple[ModelConfig, ParallelConfig, OptimConfig]


def chosen_parameters() -> Iterator[Layout]:
    """Yield layouts with frozen stages, experts, routers and tables, with parts of one matmul
    frozen, and with parameter groups."""
    rows: dict[str, Row] = {
        "frozen stage, tp2 pp2": (FOUR, staged(2, tp=2, sp=True), FIRST_STAGE),
        "frozen stage, pp2 dp2, zero 3": (FOUR, staged(2, dp=2, zero=3), FIRST_STAGE),
        "frozen stage, chunks of pp2": (FOUR, staged(2, vpp=2), FIRST_STAGE),
        "frozen stage, pp2 zb-h1": (FOUR, staged(2, schedule="zb-h1"), FIRST_STAGE),
        "frozen last stage, pp2 dp2, zero 1": (
            FOUR,
            staged(2, dp=2, zero=1),
            OptimConfig(frozen=("layers.[23].*", "norm.*", "head.*")),
        ),
        "parts, dp2, zero 1": (FOUR, ParallelConfig(dp=2, zero=1), UPPER),
        "parts, dp2, zero 2": (FOUR, ParallelConfig(dp=2, zero=2), UPPER),
        "parts, dp2, zero 3": (FOUR, ParallelConfig(dp=2, zero=3), UPPER),
        "parts, tp2 cp2 sp": (FOUR, ParallelConfig(tp=2, cp=2, sp=True), UPPER),
        "parts, layers again, tp2 sp": (FOUR, ParallelConfig(tp=2, sp=True), UPPER),
        "head alone, dp2, zero 1": (
            FOUR,
            ParallelConfig(dp=2, zero=1),
            OptimConfig(trained=("head.weight",)),
        ),
        "table alone, layers again, dp2": (
            FOUR,
            ParallelConfig(dp=2),
            OptimConfig(trained=("embed.weight",)),
        ),
        "frozen table, pp2 dp2, zero 2": (
            FOUR_TIED,
            staged(2, dp=2, zero=2),
            OptimConfig(frozen=("embed.weight",)),
        ),
        "frozen experts, dp2, ep2": (
            BALANCED,
            ParallelConfig(dp=2, ep=2, zero=1),
            OptimConfig(frozen=("*.moe.experts.*",)),
        ),
        "frozen experts, dp4, ep2, zero 3": (
            BALANCED,
            ParallelConfig(dp=4, ep=2, zero=3),
            OptimConfig(frozen=("layers.[02].moe.experts.*",)),
        ),
        "frozen routers, tp2 dp2, ep2 etp1": (
            EXPERTS,
            ParallelConfig(tp=2, dp=2, sp=True, ep=2, etp=1),
            OptimConfig(frozen=("*.moe.router",)),
        ),
        "predictions alone, layers again, pp2": (
            MTP_MODEL,
            staged(2),
            OptimConfig(trained=("mtp.*",)),
        ),
        "frozen predictions, tp2 pp2": (MTP_MODEL, staged(2, tp=2), OptimConfig(frozen=("mtp.*",))),
        "positions alone, pp2": (LEARNED, staged(2), OptimConfig(trained=("positions.weight",))),
        "biases by distance, pp2": (
            RELATIVE,
            staged(2),
            OptimConfig(trained=("relative.weight", "layers.3.*")),
        ),
        "memory alone, pp2": (
            CROSS_LAYER,
            staged(2),
            OptimConfig(trained=("memory_norm.*", "layers.*.cross.*")),
        ),
        "rates, dp2, zero 1": (TIED, ParallelConfig(dp=2, zero=1), RATES),
        "rates, tp2 dp2, zero 2": (TIED, ParallelConfig(tp=2, dp=2, zero=2), RATES),
        "rates, dp2, zero 3": (TIED, ParallelConfig(dp=2, zero=3), RATES),
        "sgd, tp2 dp2, zero 1": (
            TIED,
            ParallelConfig(tp=2, dp=2, zero=1),
            OptimConfig(kind="sgd", nesterov=True),
        ),
        "sgd, pp2 dp2, zero 3": (
            FOUR,
            staged(2, dp=2, zero=3),
            replace(RATES, kind="sgd", groups=RATES.groups[:1]),
        ),
        "adam with L2 decay, tp2 pp2": (
            FOUR,
            staged(2, tp=2),
            OptimConfig(decoupled_weight_decay=False),
        ),
        "rates with mup, tp2 pp2": (
            ONE_NORM,
            staged(2, tp=2),
            replace(RATES, decayed_vectors=("*.attention_norm.*",)),
        ),
        "rates, frozen experts, dp2, ep2, zero 2": (
            EXPERTS,
            ParallelConfig(dp=2, ep=2, zero=2),
            replace(
                RATES,
                frozen=("layers.0.moe.*",),
                groups=(
                    GroupConfig(name="routers", match=("*.moe.router",), lr_scale=0.1),
                    GroupConfig(
                        name="experts", match=("*.experts.down",), lr=3e-2, weight_decay=0.0
                    ),
                ),
            ),
        ),
    }
    again = RecomputeConfig(granularity="full", method="uniform")
    for name, (model, parallel, optim) in rows.items():
        yield Layout(
            area="chosen parameters",
            name=name,
            model=model,
            parallel=parallel,
            optim=optim,
            rows=3 if parallel.pp > 1 else None,
            seq_len=row_of(parallel),
            sample=name == "frozen stage, tp2 pp2",
            recompute=again if "again" in name else RecomputeConfig(),
        )
