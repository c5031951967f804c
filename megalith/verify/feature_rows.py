"""Rows of the matrix with MTP layers on another stage, attention masks, frozen parameters or
parameter groups."""

from collections.abc import Iterator
from dataclasses import replace

from megalith.config.model import ModelConfig
from megalith.config.moe import AuxLossConfig, MoEConfig
from megalith.config.optim import GroupConfig, OptimConfig
from megalith.config.parallel import ContextConfig, ParallelConfig, RecomputeConfig
from megalith.verify.ranks import MaskKind
from megalith.verify.rows import (
    FOUR,
    FOUR_TIED,
    FULL,
    NO,
    PARTS,
    TIED,
    Layout,
    row_of,
    staged,
    tiny,
)
from megalith.verify.tiny_models import (
    BIASED_CHOICE,
    CHUNKED,
    CROSS_LAYER,
    LATENT,
    LEARNED,
    MTP_EXPERTS,
    MTP_MODEL,
    NORMED_AROUND,
    ONE_NORM,
    PLAIN,
    RELATIVE,
    SINKS,
    VARIANTS,
)

MTP_TIED = replace(MTP_MODEL, tied_embeddings=True)
ONE_MTP_LAYER = replace(MTP_MODEL, mtp=replace(MTP_MODEL.mtp, num_layers=1))
ONE_MTP_LAYER_TIED = replace(ONE_MTP_LAYER, tied_embeddings=True)

SAMPLE = "tied, pp3, behind the last layers"


def mtp_stage_rows() -> Iterator[Layout]:
    """Yield layouts with MTP layers on a separate stage, with the last layers, with the loss, and
    next to empty stages."""
    latent = replace(LATENT, mtp=MTP_MODEL.mtp, tied_embeddings=True)
    learned = replace(VARIANTS["learned positions"], mtp=MTP_MODEL.mtp, max_seq_len=12)
    places, relative, wide = (
        replace(VARIANTS[name], mtp=MTP_MODEL.mtp) for name in ("gated", "relative", "normed after")
    )
    own, behind, beside = "E|t*4|mm|L", "Ett|ttmm|L", "Et|ttt|mmL"
    rows = {
        "pp4, a stage of their own": (MTP_MODEL, staged(4, layout=own)),
        "tied, pp4 zb-h1, a stage of their own": (
            MTP_TIED,
            staged(4, layout=own, schedule="zb-h1"),
        ),
        "one tied, pp4 gpipe": (
            ONE_MTP_LAYER_TIED,
            staged(4, layout="E|tt|ttm|L", schedule="gpipe"),
        ),
        "pp3, behind the last layers": (ONE_MTP_LAYER, staged(3, layout="Ett|ttm|L")),
        SAMPLE: (MTP_TIED, staged(3, layout=behind)),
        "tied, pp3, beside the loss alone": (MTP_TIED, staged(3, layout=beside)),
        "tied, pp6, between empty stages": (MTP_TIED, staged(6, layout="E|t*4||mm||L")),
        "tied, pp2 vpp2, a chunk of their own": (
            MTP_TIED,
            staged(2, vpp=2, layout="Ett|tt|mm|L"),
        ),
        "pp2 vpp3 dp2, zero 2, a chunk of their own": (
            MTP_MODEL,
            staged(2, vpp=3, dp=2, zero=2, group=3, layout="Et|t|t|t|mm|L"),
        ),
        "tied, pp2 zb-v, a chunk of their own": (
            MTP_TIED,
            staged(2, vpp=2, schedule="zb-v", layout="Ett|tt|mm|L"),
        ),
        "pp2 dualpipe-v, a chunk of their own": (
            MTP_MODEL,
            staged(2, vpp=2, schedule="dualpipe-v", layout="Ett|tt|mm|L"),
        ),
        "tied, pp1 vpp4": (MTP_TIED, staged(1, vpp=4, layout="Ett|tt|mm|L")),
        "tied, pp3 tp2 sp, behind the last layers": (
            MTP_TIED,
            staged(3, tp=2, sp=True, layout=behind),
        ),
        "pp4 tp2, a stage of their own": (MTP_MODEL, staged(4, tp=2, layout=own)),
        "latent tied, pp3 tp2 sp, documents, beside the loss alone": (
            latent,
            staged(3, tp=2, sp=True, layout=beside),
        ),
        "pp3 cp2, documents, behind the last layers": (MTP_MODEL, staged(3, cp=2, layout=behind)),
        "tied, pp4 cp2, a stage of their own": (MTP_TIED, staged(4, cp=2, layout=own)),
        "tied, pp4 dp2, zero 3, a stage of their own": (
            MTP_TIED,
            staged(4, dp=2, zero=3, layout=own),
        ),
        "pp3 dp2, zero 3, beside the loss alone": (
            MTP_MODEL,
            staged(3, dp=2, zero=3, layout=beside),
        ),
        "tied, pp3 dp2 zb-h1, zero 1, behind the last layers": (
            MTP_TIED,
            staged(3, dp=2, zero=1, schedule="zb-h1", layout=behind),
        ),
        "learned positions tied, pp3, documents, full, behind the last layers": (
            learned,
            staged(3, layout=behind),
        ),
        "learned positions tied, pp4 dp2, zero 2, a stage of their own": (
            learned,
            staged(4, dp=2, zero=2, layout=own),
        ),
        "relative, pp4, a stage of their own": (relative, staged(4, layout=own)),
        "places, pp3 tp2 sp, parts, beside the loss alone": (
            places,
            staged(3, tp=2, sp=True, layout=beside),
        ),
        "wide stream, pp3, behind the last layers": (
            replace(wide, num_layers=4),
            staged(3, layout=behind),
        ),
        "experts, pp3 dp2 ep2, zero 1, behind the last layers": (
            MTP_EXPERTS,
            replace(staged(3, dp=2, zero=1, layout=behind), ep=2),
        ),
        "experts, pp4 dp2 ep2, zero 3, a stage of their own": (
            MTP_EXPERTS,
            replace(staged(4, dp=2, zero=3, layout=own), ep=2),
        ),
        "experts, pp4 tp2 sp, a stage of their own": (
            replace(MTP_EXPERTS, num_kv_heads=2),
            staged(4, tp=2, sp=True, layout=own),
        ),
    }
    for name, (model, parallel) in rows.items():
        recompute = FULL if ", full" in name else PARTS if ", parts" in name else NO
        yield Layout(
            area="variants",
            name=f"mtp, {name}",
            model=model,
            parallel=parallel,
            recompute=recompute,
            rows=2,
            documents="documents" in name,
            seq_len=row_of(parallel),
            sample=name == SAMPLE,
        )


# Rows of the matrix with attention masks, some of which mask all keys of a query.

MaskRow = tuple[MaskKind, ModelConfig, ParallelConfig]

GATHER, EXCHANGE = ContextConfig(kind="gather"), ContextConfig(kind="a2a")
FEW = tiny(num_kv_heads=2)


def masked_rows() -> Iterator[Layout]:
    """Yield layouts with masks in addition to the causal mask and instead of it, on every axis and
    layer type."""
    rows: dict[str, MaskRow] = {
        "masks, tp2": ("beside", FEW, ParallelConfig(tp=2)),
        "masks alone, tp2 sp": ("alone", FEW, ParallelConfig(tp=2, sp=True)),
        "masks alone, tp2 dp2 sp, zero 3": (
            "alone",
            FEW,
            ParallelConfig(tp=2, dp=2, sp=True, zero=3),
        ),
        "masks alone, cp2": ("alone", FEW, ParallelConfig(cp=2)),
        "masks alone, cp2, gather": ("alone", FEW, ParallelConfig(cp=2, context=GATHER)),
        "masks, cp2, gather, each document sliced": (
            "beside",
            NORMED_AROUND,
            ParallelConfig(cp=2, context=ContextConfig(kind="gather", slicing="document")),
        ),
        "masks, cp2 tp2 sp, a2a": (
            "beside",
            tiny(),
            ParallelConfig(cp=2, tp=2, sp=True, context=EXCHANGE),
        ),
        "masks alone, cp4, a2a+ring": (
            "alone",
            FEW,
            ParallelConfig(cp=4, context=ContextConfig(kind="a2a+ring", a2a=2)),
        ),
        "masks, pp2 dp2": ("beside", FOUR, staged(2, dp=2)),
        "masks alone, pp2 cp2 tp2 sp": ("alone", FOUR, staged(2, cp=2, tp=2, sp=True)),
        "masks, latent, tp2 cp2": ("beside", LATENT, ParallelConfig(tp=2, cp=2)),
        "masks, sinks, tp2": ("beside", SINKS, ParallelConfig(tp=2)),
        "masks, relative, cp2 tp2": ("beside", RELATIVE, ParallelConfig(cp=2, tp=2)),
        "masks alone, chunked, cp2": ("alone", CHUNKED, ParallelConfig(cp=2)),
        "masks, cross-layer, pp2 cp2": ("beside", CROSS_LAYER, staged(2, cp=2)),
        "masks, experts, cp2 dp2, ep2": ("beside", BIASED_CHOICE, ParallelConfig(cp=2, dp=2, ep=2)),
    }
    for name, (masks, model, parallel) in rows.items():
        yield Layout(
            area="masks",
            name=name,
            model=model,
            parallel=parallel,
            rows=2,
            seq_len=row_of(parallel),
            masks=masks,
            documents="each document" in name,
            sample=name == "masks alone, tp2 sp",
        )
    again, parts = RecomputeConfig(granularity="full"), RecomputeConfig(granularity="selective")
    for name, recompute in (("layers again", again), ("parts again", parts)):
        yield Layout(
            area="masks",
            name=f"masks alone, {name}, tp2 cp2",
            model=FOUR,
            parallel=ParallelConfig(tp=2, cp=2),
            seq_len=12,
            masks="alone",
            recompute=recompute,
        )
    yield Layout(
        area="masks",
        name="masks alone, documents, tp2 pp2 sp",
        model=FOUR,
        parallel=staged(2, tp=2, sp=True),
        documents=True,
        masks="alone",
    )


# Rows of the matrix with frozen parameters or parameter groups.

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

ParamRow = tuple[ModelConfig, ParallelConfig, OptimConfig]


def chosen_parameters() -> Iterator[Layout]:
    """Yield layouts with frozen stages, experts, routers and tables, with parts of one matmul
    frozen, and with parameter groups."""
    rows: dict[str, ParamRow] = {
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
