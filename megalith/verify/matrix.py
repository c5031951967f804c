"""Matrix of layouts that must equal one process: every axis, its variants, and combinations of
axes.

The layout tests and `megalith verify --all` use the same rows. Sizes are no powers of two where
possible.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Literal

from megalith.config.lora import LoraConfig
from megalith.config.model import CrossConfig, DropoutConfig, ModelConfig
from megalith.config.parallel import (
    ContextConfig,
    ContextKind,
    OffloadConfig,
    ParallelConfig,
    RecomputeConfig,
)
from megalith.verify.feature_rows import chosen_parameters, masked_rows, mtp_stage_rows
from megalith.verify.moe_rows import expert_rows
from megalith.verify.rows import (
    BIASED,
    BLOCK,
    FOUR,
    FOUR_TIED,
    FULL,
    NO,
    PARTS,
    SHARED,
    SIX_LAYERS,
    THREE_TIED,
    TIED,
    UNEVEN,
    Layout,
    LayoutEntry,
    packed_rows,
    row_of,
    staged,
    table,
    tiny,
)
from megalith.verify.tiny_models import (
    BOTH_WAYS,
    CHUNKED,
    CROSS_LAYER,
    HETEROGENEOUS,
    LATENT,
    MTP_MODEL,
    NARROW,
    RELATIVE,
    VARIANTS,
)


def _tensor_and_data() -> Iterator[Layout]:
    sample = {
        "dp3 tied",
        "tp3",
        "tp2 sp",
        "tp3 sp tied, rings",
        "tp4 sp, 2 key/value heads, biases",
        "tp2 dp2 sp tied, dp inside",
        "tp2 sp, fused rings",
    }
    layouts: dict[str, LayoutEntry] = {
        "dp2": (tiny(), ParallelConfig(dp=2)),
        "dp2 without overlap": (tiny(), ParallelConfig(dp=2, overlap=False)),
        "dp3 tied": (TIED, ParallelConfig(dp=3)),
        "dp4": (tiny(), ParallelConfig(dp=4)),
        "tp2": (BIASED, ParallelConfig(tp=2)),
        "tp2 tied": (TIED, ParallelConfig(tp=2)),
        "tp3": (tiny(), ParallelConfig(tp=3)),
        "tp4": (tiny(), ParallelConfig(tp=4)),
        "tp2 sp": (BIASED, ParallelConfig(tp=2, sp=True)),
        "tp3 sp tied": (TIED, ParallelConfig(tp=3, sp=True)),
        "tp4, 2 key/value heads": (SHARED, ParallelConfig(tp=4)),
        "tp4 sp, 2 key/value heads, biases": (
            tiny(num_heads=8, num_kv_heads=2, bias=True),
            ParallelConfig(tp=4, sp=True),
        ),
        "tp2 sp, rings": (BIASED, ParallelConfig(tp=2, sp=True, tp_comm_overlap=True)),
        "tp2 sp, fused rings": (
            BIASED,
            ParallelConfig(tp=2, sp=True, tp_comm_overlap=True, collective_matmul="fused"),
        ),
        "tp3 sp tied, rings": (TIED, ParallelConfig(tp=3, sp=True, tp_comm_overlap=True)),
        "tp4 dp2 sp, rings, 2 key/value heads": (
            SHARED,
            ParallelConfig(tp=4, dp=2, sp=True, tp_comm_overlap=True),
        ),
        "tp2 dp2 sp": (tiny(), ParallelConfig(tp=2, dp=2, sp=True)),
        "tp2 dp2 sp tied, dp inside": (
            TIED,
            ParallelConfig(tp=2, dp=2, sp=True, order="dp-tp-cp-ep-pp"),
        ),
        "tp2 pp2 dp2, pp before dp": (FOUR, replace(staged(2, tp=2, dp=2), order="tp-cp-ep-pp-dp")),
        "cp2 pp2 dp2, pp before all": (
            FOUR,
            replace(staged(2, cp=2, dp=2), order="pp-dp-cp-tp-ep"),
        ),
        "tp3 dp2": (BIASED, ParallelConfig(tp=3, dp=2)),
        "tp4 dp2 sp, 2 key/value heads": (SHARED, ParallelConfig(tp=4, dp=2, sp=True)),
    }
    yield from table("tensor and data", layouts, sample=sample)
    for rows in (1, 2, 3):
        yield Layout(
            area="tensor and data",
            name=f"tp2 dp2 sp, {rows} rows at once",
            model=tiny(),
            rows=rows,
            parallel=ParallelConfig(tp=2, dp=2, sp=True),
            sample=rows == 2,
        )


def _divided_state() -> Iterator[Layout]:
    sample = {
        "zero 2 dp2 tied, without overlap",
        "zero 1 dp3 tied",
        "zero 2 dp4 in two replicas",
        "zero 1 tp2 dp2 sp",
    }
    layouts: dict[str, LayoutEntry] = {
        "zero 1 dp2": (tiny(), ParallelConfig(dp=2, zero=1)),
        "zero 2 dp2 tied, without overlap": (TIED, ParallelConfig(dp=2, zero=2, overlap=False)),
        "zero 1 dp3 tied": (TIED, ParallelConfig(dp=3, zero=1)),
        "zero 2 dp4": (BIASED, ParallelConfig(dp=4, zero=2)),
        "zero 1 dp4 in two replicas": (tiny(), ParallelConfig(dp=4, zero=1, dp_replicate=2)),
        "zero 2 dp4 in two replicas": (TIED, ParallelConfig(dp=4, zero=2, dp_replicate=2)),
        "zero 1 tp2 dp2 sp": (BIASED, ParallelConfig(tp=2, dp=2, sp=True, zero=1)),
        "zero 2 tp2 dp2": (TIED, ParallelConfig(tp=2, dp=2, zero=2)),
        "zero 1 tp3 dp2 sp": (BIASED, ParallelConfig(tp=3, dp=2, sp=True, zero=1)),
        "zero 1 tp4 dp2 sp, 2 key/value heads": (
            SHARED,
            ParallelConfig(tp=4, dp=2, sp=True, zero=1),
        ),
        "zero 2 tp4 dp2, 2 key/value heads, 6 heads": (UNEVEN, ParallelConfig(tp=4, dp=2, zero=2)),
        "zero 1 cp2 dp2": (tiny(), ParallelConfig(cp=2, dp=2, zero=1)),
        "zero 2 cp2 tp2 sp": (tiny(), ParallelConfig(cp=2, tp=2, sp=True, zero=2)),
        "zero 1 pp2 dp2 tied": (TIED, ParallelConfig(pp=2, dp=2, zero=1)),
        "zero 2 pp2 dp2": (tiny(), ParallelConfig(pp=2, dp=2, zero=2)),
        "zero 1 pp2 tp2 dp2 sp tied": (TIED, ParallelConfig(pp=2, tp=2, dp=2, sp=True, zero=1)),
    }
    yield from table("divided state", layouts, sample=sample)


def _sharded_weights() -> Iterator[Layout]:
    sample = {"zero 3 dp2", "zero 3 dp4 in two replicas", "zero 3 tp2 dp2 sp"}
    inside = ParallelConfig(tp=2, dp=2, zero=3, order="dp-tp-cp-ep-pp")
    layouts: dict[str, LayoutEntry] = {
        "zero 3 dp2": (tiny(), ParallelConfig(dp=2, zero=3)),
        "zero 3 dp2 tied": (TIED, ParallelConfig(dp=2, zero=3)),
        "zero 3 dp3": (BIASED, ParallelConfig(dp=3, zero=3)),
        "zero 3 dp4": (TIED, ParallelConfig(dp=4, zero=3)),
        "zero 3 dp4 in two replicas": (BIASED, ParallelConfig(dp=4, zero=3, dp_replicate=2)),
        "zero 3 tp2 dp2 sp": (BIASED, ParallelConfig(tp=2, dp=2, sp=True, zero=3)),
        "zero 3 tp2 dp2, dp inside": (tiny(), inside),
        "zero 3 tp3 dp2 sp": (TIED, ParallelConfig(tp=3, dp=2, sp=True, zero=3)),
        "zero 3 tp4 dp2 sp, 2 key/value heads": (
            SHARED,
            ParallelConfig(tp=4, dp=2, sp=True, zero=3),
        ),
        "zero 3 tp2 dp4 sp in two replicas": (
            tiny(),
            ParallelConfig(tp=2, dp=4, sp=True, zero=3, dp_replicate=2),
        ),
        "zero 3 cp2": (tiny(), ParallelConfig(cp=2, zero=3)),
        "zero 3 cp2 dp2": (BIASED, ParallelConfig(cp=2, dp=2, zero=3)),
        "zero 3 cp2 tp2 sp": (tiny(), ParallelConfig(cp=2, tp=2, sp=True, zero=3)),
        "zero 3 pp2 dp2": (tiny(), staged(2, dp=2, zero=3)),
        "zero 3 pp2 dp2 tied, without overlap": (
            TIED,
            replace(staged(2, dp=2, zero=3), overlap=False),
        ),
        "zero 3 pp2 dp2, two chunks each": (
            replace(tiny(), num_layers=4),
            staged(2, dp=2, zero=3, vpp=2),
        ),
        "zero 3 pp2 tp2 dp2 sp tied": (TIED, staged(2, tp=2, dp=2, sp=True, zero=3)),
    }
    yield from table("sharded weights", layouts, sample=sample)


def _pipeline() -> Iterator[Layout]:
    sample = {
        "pp3 tied, fewer than ranks",
        "pp2 vpp2, groups of 5 and a remainder of 2",
        "pp3 zb-h1, uneven",
        "pp2 zb-v tied",
        "pp2 dualpipe-v tied",
        "pp4 tied, standalone ends and an empty rank",
        "tp2 pp2 sp tied",
        "pp2 dp2 tied, zero 1",
    }
    # 12 rows a step: 1, 2, 3, 4, 6 or 12 rows of a microbatch give 12, 6, 4, 3, 2 or 1
    # microbatches.
    layouts: dict[str, LayoutEntry] = {
        "pp2, many microbatches": (FOUR, staged(2), 1),
        "pp2 tied, as many as ranks": (FOUR_TIED, staged(2), 6),
        "pp2 without overlap": (FOUR, replace(staged(2), overlap=False), 3),
        "pp3 tied, fewer than ranks": (THREE_TIED, staged(3), 6),
        "pp4, one microbatch": (FOUR, staged(4), 12),
        "pp4 tied": (FOUR_TIED, staged(4), 2),
        "pp2 gpipe": (FOUR_TIED, staged(2, schedule="gpipe"), 3),
        "pp2 vpp2": (FOUR_TIED, staged(2, vpp=2), 2),
        "pp2 vpp2 without overlap": (FOUR, replace(staged(2, vpp=2), overlap=False), 2),
        "pp2 vpp2, groups of 5 and a remainder of 2": (FOUR, staged(2, vpp=2, group=5), 1),
        "pp3 vpp2, groups of 4": (
            replace(SIX_LAYERS, tied_embeddings=True),
            staged(3, vpp=2, group=4),
            1,
        ),
        "pp1 vpp2 tied": (FOUR_TIED, staged(1, vpp=2), 3),
        "pp2 zb-h1": (FOUR_TIED, staged(2, schedule="zb-h1"), 3),
        "pp3 zb-h1, uneven": (FOUR_TIED, staged(3, schedule="zb-h1", layout="Et|tt|tL"), 2),
        "pp2 zb-v tied": (FOUR_TIED, staged(2, schedule="zb-v", vpp=2), 3),
        "pp3 zb-v": (SIX_LAYERS, staged(3, schedule="zb-v", vpp=2), 2),
        "pp2 dualpipe-v tied": (FOUR_TIED, staged(2, schedule="dualpipe-v", vpp=2), 2),
        "pp3 dualpipe-v": (SIX_LAYERS, staged(3, schedule="dualpipe-v", vpp=2), 1),
        "pp3, the ends have other counts": (FOUR, staged(3, first_layers=1, last_layers=1), 4),
        "pp3, the embedding and the loss count": (
            FOUR,
            staged(3, count_embedding=True, count_loss=True),
            4,
        ),
        "pp3 tied, standalone ends": (FOUR_TIED, staged(3, layout="E|t*4|L"), 4),
        "pp4 tied, standalone ends and an empty rank": (FOUR_TIED, staged(4, layout="E|t*4||L"), 4),
        "pp5 tied, standalone ends and an empty stage": (
            FOUR_TIED,
            staged(5, layout="E|tt||tt|L"),
            2,
        ),
        "pp2 vpp2 tied, empty and uneven stages": (
            FOUR_TIED,
            staged(2, vpp=2, layout="E|ttt||tL"),
            3,
        ),
        "tp2 pp2 sp tied": (FOUR_TIED, staged(2, tp=2, sp=True), 2),
        "tp4 pp2 sp, 2 key/value heads": (FOUR, staged(2, tp=4, sp=True), 2),
        "pp2 dp2 tied": (FOUR_TIED, staged(2, dp=2), 2),
        "pp2 dp2 tied, zero 1": (FOUR_TIED, staged(2, dp=2, zero=1), 2),
        "pp2 vpp2 dp2 tied, zero 2": (FOUR_TIED, staged(2, dp=2, zero=2, vpp=2), 1),
        "pp2 dp2 zb-h1, zero 2": (FOUR_TIED, staged(2, dp=2, zero=2, schedule="zb-h1"), 1),
        "pp2 dp2 zb-v tied, zero 2": (
            FOUR_TIED,
            staged(2, dp=2, zero=2, schedule="zb-v", vpp=2),
            1,
        ),
        "pp2 dp2 dualpipe-v tied, zero 2": (
            FOUR_TIED,
            staged(2, dp=2, zero=2, schedule="dualpipe-v", vpp=2),
            1,
        ),
        "pp1 vpp2 dp2 tied, zero 2": (FOUR_TIED, staged(1, dp=2, zero=2, vpp=2), 2),
        "pp2 dp4 tied, zero 1 in two replicas": (
            FOUR_TIED,
            replace(staged(2, dp=4, zero=1), dp_replicate=2),
            1,
        ),
        "pp3 dp2 tied": (THREE_TIED, staged(3, dp=2), 2),
        "tp2 pp3 sp": (replace(FOUR, num_layers=3), staged(3, tp=2, sp=True), 2),
        "tp2 pp2 dp2 sp tied": (FOUR_TIED, staged(2, tp=2, dp=2, sp=True), 2),
    }
    yield from table("pipeline", layouts, sample=sample)


def _shared(
    name: str,
    model: ModelConfig,
    parallel: ParallelConfig,
    *,
    seq_len: int = 12,
    documents: bool = False,
    rows: int = 1,
    sample: bool = False,
) -> Layout:
    return Layout(
        area="shared rows",
        name=name,
        model=model,
        parallel=parallel,
        seq_len=seq_len,
        documents=documents,
        rows=rows,
        sample=sample,
    )


def _exchange(
    kind: ContextKind, *, slicing: Literal["row", "document"] = "row", a2a: int | None = None
) -> ContextConfig:
    return ContextConfig(kind=kind, slicing=slicing, a2a=a2a)


def _kinds_of_exchange() -> Iterator[Layout]:
    """Yield every kind of context parallelism at every size, for rows, packed documents, and
    slicing by document."""
    model = tiny(num_heads=12, num_kv_heads=2)
    kinds: Mapping[ContextKind, Sequence[int]] = {
        "ring": (2, 3, 4),
        "gather": (2, 3, 4),
        "a2a": (2, 3, 4),
        "a2a+ring": (4, 6),
    }
    for kind, documents in product(kinds, (False, True)):
        for cp, by in product(kinds[kind], ("row", "document") if documents else ("row",)):
            context = _exchange(kind, slicing="document" if by == "document" else "row")
            context = replace(context, a2a=cp // 2 if kind == "a2a+ring" else None)
            name = f"cp{cp}, {kind}, {'documents' if documents else 'rows'} cut by {by}"
            parallel = ParallelConfig(cp=cp, context=context)
            yield _shared(name, model, parallel, seq_len=24, documents=documents, rows=2)


def _shared_rows() -> Iterator[Layout]:
    yield _shared("cp2, ring", SHARED, ParallelConfig(cp=2), rows=2)
    yield _shared("cp2, ring, without overlap", SHARED, ParallelConfig(cp=2, overlap=False), rows=2)
    gathered = ParallelConfig(cp=3, context=_exchange("gather"))
    yield _shared("cp3, gather, documents", UNEVEN, gathered, documents=True, sample=True)
    heads = ParallelConfig(cp=2, context=_exchange("a2a", slicing="document"))
    yield _shared(
        "cp2, a2a, each document sliced", BIASED, heads, documents=True, rows=2, sample=True
    )
    both = ParallelConfig(cp=4, context=_exchange("a2a+ring", a2a=2))
    yield _shared("cp4, a2a+ring of two each", SHARED, both, seq_len=16, sample=True)
    few = ParallelConfig(cp=4, context=_exchange("a2a"))
    yield _shared("cp4, a2a, 2 key/value heads", SHARED, few, seq_len=24)
    layers = ParallelConfig(cp=2, context=ContextConfig(layers=("ring", "a2a")))
    yield _shared(
        "cp2, a kind for each layer, documents", TIED, layers, documents=True, sample=True
    )
    yield _shared(
        "cp2 tp2 sp, ring", BIASED, ParallelConfig(cp=2, tp=2, sp=True), seq_len=16, sample=True
    )
    yield _shared("cp2 dp2, ring, documents", tiny(), ParallelConfig(cp=2, dp=2), documents=True)
    yield from _kinds_of_exchange()
    yield from _shared_rows_and_others()


def _shared_rows_and_others() -> Iterator[Layout]:
    ring = ParallelConfig(cp=2, tp=2, dp=2, sp=True)
    yield _shared("cp2 tp2 dp2 sp, ring", tiny(), ring, seq_len=16)
    heads = ParallelConfig(cp=2, tp=2, dp=2, context=_exchange("a2a"))
    yield _shared("cp2 tp2 dp2, a2a, 2 key/value heads", SHARED, heads, documents=True)
    gathered = ParallelConfig(cp=2, tp=2, sp=True, context=_exchange("gather", slicing="document"))
    yield _shared(
        "cp2 tp2 sp, gather, each document sliced", TIED, gathered, documents=True, rows=2
    )
    four = ParallelConfig(cp=2, tp=4, sp=True)
    yield _shared("cp2 tp4 sp, ring, 2 key/value heads", SHARED, four, seq_len=16)
    yield _shared("cp2 pp2, ring", SHARED, staged(2, cp=2))
    sliced = replace(staged(2, cp=2), context=_exchange("a2a", slicing="document"))
    yield _shared("cp2 pp2, a2a, each document sliced", TIED, sliced, documents=True)
    mixed = replace(
        staged(2, cp=2, tp=2, sp=True), context=ContextConfig(layers=("ring", "gather"))
    )
    yield _shared(
        "cp2 tp2 pp2 sp, a kind for each layer", tiny(), mixed, seq_len=16, documents=True
    )
    yield _shared("cp2 dp2, zero 1", BIASED, ParallelConfig(cp=2, dp=2, zero=1))
    uneven = ParallelConfig(cp=3, dp=2, zero=2, context=_exchange("a2a"))
    yield _shared("cp3 dp2, zero 2, a2a", UNEVEN, uneven)
    yield _shared("tp2 cp3 sp, ring", tiny(), ParallelConfig(tp=2, cp=3, sp=True))
    yield _shared("cp3 pp2, ring", tiny(), staged(2, cp=3))
    every = ContextConfig(
        kind="a2a+ring", a2a=2, layers=("a2a+ring", "ring", "gather", "a2a"), slicing="document"
    )
    padded = ParallelConfig(cp=4, context=every)
    name = "cp4, three kinds and a2a+ring, rows that need padding"
    yield _shared(name, replace(SHARED, num_layers=4), padded, seq_len=11)


AWAY = OffloadConfig(layers=1, min_numel=1)


def _memory() -> Iterator[Layout]:
    stay, mlp = OffloadConfig(), replace(PARTS, modules=("core_attention", "mlp"))
    sliced = replace(FULL, num_layers=2, shard_inputs=True)
    layouts: dict[str, tuple[ParallelConfig, RecomputeConfig, OffloadConfig]] = {
        "full, tp2 sp": (ParallelConfig(tp=2, sp=True), FULL, stay),
        "selective, tp2 sp, offloaded": (ParallelConfig(tp=2, sp=True), PARTS, AWAY),
        "full, inputs in slices, tp2 dp2 zero 1": (
            ParallelConfig(tp=2, dp=2, zero=1),
            sliced,
            stay,
        ),
        "block, offloaded, cp2 tp2": (ParallelConfig(cp=2, tp=2), BLOCK, AWAY),
        "full, two layers at once, pp2 vpp2": (staged(2, vpp=2), replace(FULL, num_layers=2), stay),
        "selective, offloaded, pp2, weights last": (staged(2, schedule="zb-h1"), PARTS, AWAY),
        "selective, cp2 dp2": (ParallelConfig(cp=2, dp=2), mlp, stay),
        "full, tp2 pp2 dp2 sp, zero 1": (staged(2, tp=2, dp=2, sp=True, zero=1), FULL, stay),
        "block, pp3, standalone ends": (staged(3, layout="E|t*4|L"), BLOCK, stay),
        "full, dp2 zero 2": (ParallelConfig(dp=2, zero=2), FULL, stay),
        "selective, offloaded, dp2 zero 2": (ParallelConfig(dp=2, zero=2), PARTS, AWAY),
        "block, offloaded, pp2 dp2, zero 2": (staged(2, dp=2, zero=2), BLOCK, AWAY),
    }
    chunks = replace(mlp, modules=("norm", "mlp"), mlp_chunks=3)
    layouts |= {
        "mlp in chunks, tp2 sp": (ParallelConfig(tp=2, sp=True), chunks, stay),
        "mlp in chunks, rings, tp2 dp2 sp": (
            ParallelConfig(tp=2, dp=2, sp=True, tp_comm_overlap=True),
            chunks,
            stay,
        ),
        "mlp in chunks, tp2 pp2, weights last": (staged(2, tp=2, schedule="zb-h1"), chunks, stay),
        "mlp in chunks, pp2 dp2, zero 1": (staged(2, dp=2, zero=1), chunks, stay),
        "mlp in chunks, cp2 dp2, zero 2": (
            ParallelConfig(cp=2, dp=2, zero=2),
            replace(chunks, mlp_chunks=5),
            stay,
        ),
        "mlp in chunks, dp2 zero 3": (ParallelConfig(dp=2, zero=3), chunks, stay),
    }
    sample = {
        "full, tp2 sp",
        "selective, tp2 sp, offloaded",
        "selective, offloaded, pp2, weights last",
    }
    sample |= {"mlp in chunks, tp2 sp"}
    for name, (parallel, recompute, offload) in layouts.items():
        model = replace(BIASED, num_layers=4 if parallel.pp > 1 else 2)
        yield Layout(
            area="memory",
            name=name,
            model=model,
            parallel=parallel,
            recompute=recompute,
            offload=offload,
            sample=name in sample,
        )
    up = RecomputeConfig(granularity="selective", modules=("mla_up_proj", "norm"))
    layouts = {
        "projections of latent attention, tp2 cp2 sp": (
            ParallelConfig(tp=2, cp=2, sp=True),
            up,
            stay,
        ),
        "projections of latent attention, cp2 pp2 dp2, a2a, zero 1": (
            replace(staged(2, cp=2, dp=2, zero=1), context=_exchange("a2a")),
            up,
            AWAY,
        ),
    }
    for name, (parallel, recompute, offload) in layouts.items():
        yield Layout(
            area="memory",
            name=name,
            model=LATENT,
            parallel=parallel,
            recompute=recompute,
            offload=offload,
            documents=True,
            seq_len=16,
            sample=parallel.pp == 1,
        )


def _all_axes() -> Iterator[Layout]:
    three = replace(FOUR_TIED, num_heads=6, num_kv_heads=3)
    layouts: dict[str, LayoutEntry] = {
        "tp2 pp2 dp2 sp, zero 1": (FOUR, staged(2, tp=2, dp=2, sp=True, zero=1), 2),
        "tp2 cp2 pp2 sp, zero 1": (FOUR_TIED, staged(2, tp=2, cp=2, sp=True, zero=1), 2),
        "tp2 cp2 dp2 sp, zero 2": (tiny(), ParallelConfig(tp=2, cp=2, dp=2, sp=True, zero=2), 2),
        "tp2 pp2 vpp2 dp2 sp tied, zero 1": (
            FOUR_TIED,
            staged(2, tp=2, dp=2, sp=True, zero=1, vpp=2),
            1,
        ),
        "tp2 pp2 dp2 zb-v tied, zero 1": (
            FOUR_TIED,
            staged(2, tp=2, dp=2, zero=1, schedule="zb-v", vpp=2),
            1,
        ),
        "tp2 cp2 pp2 sp zb-h1, rings": (
            FOUR,
            replace(staged(2, tp=2, cp=2, sp=True, schedule="zb-h1"), tp_comm_overlap=True),
            2,
        ),
        "cp2 pp2 vpp2 dp2, zero 2": (FOUR, staged(2, cp=2, dp=2, zero=2, vpp=2), 1),
        "tp3 pp4 tied": (three, staged(4, tp=3), 3),
        "tp2 pp3 dp2 sp, zero 1": (
            replace(FOUR, num_layers=3),
            staged(3, tp=2, dp=2, sp=True, zero=1),
            2,
        ),
        "tp3 cp2 dp2 sp": (three, ParallelConfig(tp=3, cp=2, dp=2, sp=True), 1),
        "cp3 pp2 dp2": (FOUR, staged(2, cp=3, dp=2), 2),
    }
    yield from table("all axes", layouts)


def _variants() -> Iterator[Layout]:
    """Yield every layer variant under every axis."""
    kinds: tuple[ContextKind, ...] = ("ring", "a2a", "gather")
    staged_and_gathered = replace(staged(2, cp=3), context=_exchange("gather"))
    for number, (variant, model) in enumerate(VARIANTS.items()):
        kind = kinds[number % len(kinds)]
        layouts = (
            {
                "tp4 sp": ParallelConfig(tp=4, sp=True),
                "tp2 pp2": staged(2, tp=2),
                f"cp2 {kind}": ParallelConfig(cp=2, context=ContextConfig(kind=kind)),
                "tp2 cp2 dp2 sp, zero 2": ParallelConfig(tp=2, cp=2, dp=2, sp=True, zero=2),
            }
            if model is not RELATIVE
            else {
                "tp3 sp": ParallelConfig(tp=3, sp=True),
                "tp2 pp2": staged(2, tp=2),
                "pp2 vpp2 dp2, zero 2": staged(2, vpp=2, dp=2, zero=2),
                "tp2 pp2 dp2, zero 3": staged(2, tp=2, dp=2, zero=3),
                "cp2": ParallelConfig(cp=2),
                "tp2 cp2 dp2 sp, zero 2": ParallelConfig(tp=2, cp=2, dp=2, sp=True, zero=2),
                "cp3 pp2 gather": staged_and_gathered,
            }
        )
        entries: dict[str, LayoutEntry] = {
            f"{variant}, {name}": (model, parallel) for name, parallel in layouts.items()
        }
        # The first is not in the sample: messages among more than two ranks take several times as
        # long.
        yield from table("variants", entries, sample=[list(entries)[max(1, number % 3)]])


def _variants_at_the_ends() -> Iterator[Layout]:
    """Yield MTP and latent attention with tied embeddings, and other losses."""
    both = replace(LATENT, mtp=MTP_MODEL.mtp, tied_embeddings=True)
    ends: dict[str, LayoutEntry] = {
        "mtp, pp2 zb-v": (MTP_MODEL, staged(2, schedule="zb-v", vpp=2), 3),
        "mtp, pp2 dp2 zb-h1, zero 2": (MTP_MODEL, staged(2, dp=2, zero=2, schedule="zb-h1"), 1),
        "mtp and latent tied, pp2 dp2, zero 3": (both, staged(2, dp=2, zero=3), 2),
        "mtp and latent tied, dp2, zero 3": (both, ParallelConfig(dp=2, zero=3), 2),
        "heterogeneous, pp2 dp2 zb-h1, zero 2": (
            HETEROGENEOUS,
            staged(2, dp=2, zero=2, schedule="zb-h1"),
            1,
        ),
    }
    yield from table("variants", ends)
    yield from _mtp_positions()
    yield from _other_losses()
    yield from _latents_without_norms()
    yield replace(
        _shared("mtp, cp2, documents", both, ParallelConfig(cp=2), documents=True),
        area="variants",
    )
    again = Layout(
        area="variants",
        name="mtp and latent tied, tp2 sp, full",
        model=both,
        recompute=FULL,
        parallel=ParallelConfig(tp=2, sp=True),
    )
    yield again


def _other_losses() -> Iterator[Layout]:
    """Yield label smoothing and z-loss with every implementation of the head."""
    smoothed = replace(VARIANTS["normed around"], num_kv_heads=3, mtp=MTP_MODEL.mtp)
    divided = {
        "tp2 dp2": ParallelConfig(tp=2, dp=2),
        "tp3 sp": ParallelConfig(tp=3, sp=True),
        "pp2 dp3, zero 1": staged(2, dp=3, zero=1),
    }
    for name, parallel in divided.items():
        yield Layout(
            area="variants",
            name=f"smoothed labels, {name}",
            model=smoothed,
            parallel=parallel,
            smoothing=0.1,
            sample=name == "tp2 dp2",
        )
    scored = {
        "tp2 sp cp2": ParallelConfig(tp=2, cp=2, sp=True),
        "tp3 dp2": ParallelConfig(tp=3, dp=2),
        "pp2 dp2 zb-v, zero 1": staged(2, dp=2, zero=1, schedule="zb-v", vpp=2),
        "dp2, zero 3": ParallelConfig(dp=2, zero=3),
    }
    for name, parallel in scored.items():
        yield Layout(
            area="variants",
            name=f"z loss, {name}",
            model=replace(smoothed, num_layers=4),
            parallel=parallel,
            smoothing=0.1,
            z_loss=0.05,
            recomputed_loss=parallel.zero > 0,
            seq_len=row_of(parallel),
        )


def _latents_without_norms() -> Iterator[Layout]:
    bare, mla = ParallelConfig(tp=2, cp=2, sp=True), LATENT.mla
    assert mla is not None
    yield Layout(
        area="variants",
        name="latent without norms, tp2 cp2 sp, full",
        model=replace(LATENT, mla=replace(mla, norms=False)),
        parallel=bare,
        seq_len=row_of(bare),
        recompute=FULL,
    )


def _mtp_positions() -> Iterator[Layout]:
    """Yield MTP layers with every kind of positions; rows have the maximum learned length."""
    mtp_inputs = MTP_MODEL.mtp
    learned = replace(
        VARIANTS["learned positions"], mtp=mtp_inputs, max_seq_len=12, tied_embeddings=False
    )
    places, biased = (replace(VARIANTS[name], mtp=mtp_inputs) for name in ("gated", "relative"))
    rows: dict[str, tuple[ModelConfig, ParallelConfig, RecomputeConfig]] = {
        "learned positions, tp2 sp, documents, full": (
            learned,
            ParallelConfig(tp=2, sp=True),
            FULL,
        ),
        "learned positions, cp2, documents": (learned, ParallelConfig(cp=2), RecomputeConfig()),
        "learned positions, cp2, each document sliced": (
            learned,
            ParallelConfig(cp=2, context=_exchange("a2a", slicing="document")),
            RecomputeConfig(),
        ),
        "learned positions, pp2 dp2, zero 2": (learned, staged(2, dp=2, zero=2), RecomputeConfig()),
        "learned positions, pp2 zb-v": (
            learned,
            staged(2, schedule="zb-v", vpp=2),
            RecomputeConfig(),
        ),
        "learned positions, pp2 dp2, zero 3": (learned, staged(2, dp=2, zero=3), RecomputeConfig()),
        "learned positions tied, dp2, zero 3": (
            replace(learned, tied_embeddings=True),
            ParallelConfig(dp=2, zero=3),
            RecomputeConfig(),
        ),
        "places, tp2 cp2 sp, documents": (
            places,
            ParallelConfig(tp=2, cp=2, sp=True),
            RecomputeConfig(),
        ),
        "relative, cp2 pp2": (biased, staged(2, cp=2), RecomputeConfig()),
        "no positions, cp2 pp2": (replace(MTP_MODEL, positions="none"), staged(2, cp=2), PARTS),
    }
    for name, (model, parallel, recompute) in rows.items():
        yield Layout(
            area="variants",
            name=f"mtp, {name}",
            model=model,
            parallel=parallel,
            recompute=recompute,
            documents="document" in name,
            rows=2 if parallel.pp > 1 else None,
            seq_len=row_of(parallel),
            sample=name == "learned positions, pp2 zb-v",
        )


def _variants_and_others() -> Iterator[Layout]:
    """Yield layer variants with uneven shards, packing, dropout and recomputation."""
    everywhere = DropoutConfig(embedding=0.1, residual=0.2, attention=0.2)
    dropping, three = (
        replace(MTP_MODEL, dropout=everywhere),
        replace(VARIANTS["one norm"], num_kv_heads=3),
    )
    sliced = ParallelConfig(cp=2, context=_exchange("a2a", slicing="document"))
    four = replace(RELATIVE, num_heads=4, num_kv_heads=4)
    tp2, stay = ParallelConfig(tp=2, sp=True), OffloadConfig()
    rows: dict[str, tuple[ModelConfig, ParallelConfig, RecomputeConfig, OffloadConfig]] = {
        "both ways, cp2 a2a, each document sliced": (BOTH_WAYS, sliced, RecomputeConfig(), stay),
        "relative, cp2 gather, documents, full": (
            RELATIVE,
            ParallelConfig(cp=2, context=_exchange("gather")),
            FULL,
            stay,
        ),
        "relative both ways, cp2 a2a, each document sliced": (
            replace(RELATIVE, attention=replace(RELATIVE.attention, causal=False)),
            sliced,
            RecomputeConfig(),
            stay,
        ),
        "relative, tp2 cp2 a2a": (
            four,
            ParallelConfig(tp=2, cp=2, context=_exchange("a2a")),
            RecomputeConfig(),
            stay,
        ),
        "relative, cp4 a2a+ring, zero 3": (
            four,
            ParallelConfig(cp=4, zero=3, context=_exchange("a2a+ring", a2a=2)),
            RecomputeConfig(),
            stay,
        ),
        "both ways, tp2 sp, documents, full": (BOTH_WAYS, tp2, FULL, stay),
        "relative, tp2 sp, documents, selective": (RELATIVE, tp2, PARTS, stay),
        "latent, tp3 sp, documents, selective, offloaded": (
            LATENT,
            ParallelConfig(tp=3, sp=True),
            PARTS,
            AWAY,
        ),
        "one norm, tp3, documents, block, offloaded": (three, ParallelConfig(tp=3), BLOCK, AWAY),
        "chunked, cp4 a2a+ring, each document sliced, selective": (
            CHUNKED,
            ParallelConfig(cp=4, context=_exchange("a2a+ring", slicing="document", a2a=2)),
            PARTS,
            stay,
        ),
        "chunked, tp2 cp2 sp ring, documents, full": (
            CHUNKED,
            ParallelConfig(tp=2, cp=2, sp=True),
            FULL,
            stay,
        ),
        "sinks, cp2 gather, documents, selective": (
            VARIANTS["sinks"],
            ParallelConfig(cp=2, context=_exchange("gather")),
            PARTS,
            stay,
        ),
        "normed around, cp2 ring, documents, selective, offloaded": (
            VARIANTS["normed around"],
            ParallelConfig(cp=2),
            PARTS,
            AWAY,
        ),
        "heterogeneous, tp2 sp, documents, full": (HETEROGENEOUS, tp2, FULL, stay),
        "heterogeneous, tp2 pp2 cp2 sp, documents, selective, offloaded": (
            HETEROGENEOUS,
            staged(2, tp=2, cp=2, sp=True),
            PARTS,
            AWAY,
        ),
        "gated, cp2 a2a, each document sliced, full": (VARIANTS["gated"], sliced, FULL, stay),
        "gated, tp2 pp2 sp, documents, selective": (
            VARIANTS["gated"],
            staged(2, tp=2, sp=True),
            PARTS,
            stay,
        ),
        "normed after, cp2 dp2, zero 3, documents, full": (
            VARIANTS["normed after"],
            ParallelConfig(cp=2, dp=2, zero=3),
            FULL,
            stay,
        ),
        "normed after, tp2 pp2 sp, documents, block, offloaded": (
            VARIANTS["normed after"],
            staged(2, tp=2, sp=True),
            BLOCK,
            AWAY,
        ),
        "mtp, dropping, pp2, documents, full": (dropping, staged(2), FULL, stay),
        "mtp, dropping, tp3 cp2": (
            replace(dropping, num_kv_heads=3),
            ParallelConfig(tp=3, cp=2),
            PARTS,
            stay,
        ),
    }
    sample = ("both ways, cp2", "relative, tp2 sp", "mtp, dropping, pp2")
    for name, (model, parallel, recompute, offload) in rows.items():
        yield Layout(
            area="variants",
            name=name,
            model=model,
            parallel=parallel,
            recompute=recompute,
            offload=offload,
            documents="document" in name,
            rows=2 if parallel.pp > 1 else None,
            sample=name.startswith(sample),
            seq_len=row_of(parallel),
        )


def _adapters() -> Iterator[Layout]:
    """Yield LoRA adapters with shared KV heads, uneven shards, stages, cp, ZeRO and "
    "recomputation."""
    uneven = replace(FOUR, num_heads=6, num_kv_heads=3)
    every, few = LoraConfig(rank=3), LoraConfig(rank=2, rslora=True, targets=("q", "o", "gate_up"))
    dropping, last = LoraConfig(rank=3, dropout=0.2), LoraConfig(rank=3, layers=(3,))
    again = RecomputeConfig(granularity="full", method="uniform")
    mlp_again = RecomputeConfig(granularity="selective", modules=("mlp",))
    rows: dict[str, tuple[ModelConfig, ParallelConfig, LoraConfig, RecomputeConfig]] = {
        "tp2": (FOUR, ParallelConfig(tp=2), every, RecomputeConfig()),
        "tp2 sp": (FOUR, ParallelConfig(tp=2, sp=True), few, RecomputeConfig()),
        "tp2 sp, rings": (
            FOUR,
            ParallelConfig(tp=2, sp=True, tp_comm_overlap=True),
            every,
            RecomputeConfig(),
        ),
        "tp3": (uneven, ParallelConfig(tp=3), every, RecomputeConfig()),
        "tp3 sp, full recompute": (uneven, ParallelConfig(tp=3, sp=True), every, again),
        "tp4 shared heads": (UNEVEN, ParallelConfig(tp=4, sp=True), every, RecomputeConfig()),
        "pp2": (FOUR_TIED, staged(2), every, RecomputeConfig()),
        "pp2 zb-h1": (FOUR, staged(2, schedule="zb-h1"), every, RecomputeConfig()),
        "cp2": (FOUR, ParallelConfig(cp=2), every, RecomputeConfig()),
        "dp2": (FOUR, ParallelConfig(dp=2), every, again),
        "dp2, zero 1": (FOUR, ParallelConfig(dp=2, zero=1), every, RecomputeConfig()),
        "dp2, zero 2": (FOUR, ParallelConfig(dp=2, zero=2), few, RecomputeConfig()),
        "dp2, zero 3": (FOUR, ParallelConfig(dp=2, zero=3), every, RecomputeConfig()),
        "tp2 pp2": (FOUR, staged(2, tp=2, sp=True), every, RecomputeConfig()),
        "tp2 cp2 dp2 sp, zero 3": (
            FOUR,
            ParallelConfig(tp=2, cp=2, dp=2, sp=True, zero=3),
            every,
            again,
        ),
        "dropping, tp3": (uneven, ParallelConfig(tp=3), dropping, again),
        "dropping, tp2 pp2 sp, mlp again": (FOUR, staged(2, tp=2, sp=True), dropping, mlp_again),
        "dropping, cp2": (FOUR, ParallelConfig(cp=2), dropping, RecomputeConfig()),
        "tp2 pp2 sp, mlp again in chunks": (
            FOUR,
            staged(2, tp=2, sp=True),
            every,
            replace(mlp_again, mlp_chunks=2),
        ),
        "latent, tp2 sp": (LATENT, ParallelConfig(tp=2, sp=True), dropping, RecomputeConfig()),
        "latent, tp2 pp2 dp2": (LATENT, staged(2, tp=2, dp=2), every, again),
        "last layer, pp2": (FOUR, staged(2), last, RecomputeConfig()),
        "last layer, pp2 dp2, zero 3": (
            FOUR_TIED,
            staged(2, dp=2, zero=3),
            last,
            RecomputeConfig(),
        ),
    }
    sample = ("tp2 sp, rings", "dropping, tp2 pp2 sp, mlp again", "dp2, zero 3")
    for name, (model, parallel, lora, recompute) in rows.items():
        microbatch = 3 if parallel.pp > 1 else 1
        yield Layout(
            area="adapters",
            name=f"adapters, {name}",
            model=model,
            parallel=parallel,
            rows=microbatch,
            seq_len=row_of(parallel),
            recompute=recompute,
            lora=lora,
            documents=name in ("tp2 sp", "cp2"),
            sample=name in sample,
        )


def _cross_layer_rows() -> Iterator[Layout]:
    """Yield cross-layer attention over stages and cp, with dropout, recomputation and experts."""
    everywhere = DropoutConfig(embedding=0.1, residual=0.2, attention=0.2)
    dropping, early = (
        replace(CROSS_LAYER, dropout=everywhere),
        replace(CROSS_LAYER, cross=CrossConfig(memory=0)),
    )
    wide = replace(CROSS_LAYER, norm_placement="after", fp32_residual=True)
    experts = replace(NARROW, cross=CrossConfig(memory=1))
    unlike = replace(HETEROGENEOUS, cross=CrossConfig(memory=1, layers=(True, True, False)))
    sliced, two = (
        _exchange("a2a", slicing="document"),
        replace(FULL, num_layers=2, shard_inputs=True),
    )
    lora = LoraConfig(rank=3, dropout=0.2, layers=(2, 3))
    rows: dict[str, tuple[ModelConfig, ParallelConfig, RecomputeConfig, LoraConfig | None]] = {
        "tp2 cp2 sp, documents": (CROSS_LAYER, ParallelConfig(tp=2, cp=2, sp=True), NO, None),
        "dropping, cp2 a2a, each document sliced": (
            dropping,
            ParallelConfig(cp=2, context=sliced),
            NO,
            None,
        ),
        "pp2 vpp2 tp2 sp": (CROSS_LAYER, staged(2, tp=2, sp=True, vpp=2), NO, None),
        "pp4, an empty stage": (early, staged(4, layout="Et|t||ttL"), NO, None),
        "dropping, pp2 dualpipe-v, full": (
            dropping,
            staged(2, schedule="dualpipe-v", vpp=2),
            FULL,
            None,
        ),
        "pp2 dp2 zb-v, zero 2": (early, staged(2, dp=2, zero=2, schedule="zb-v", vpp=2), NO, None),
        "pp2 dp2, zero 3, full": (CROSS_LAYER, staged(2, dp=2, zero=3), FULL, None),
        "dp2, zero 3, full": (dropping, ParallelConfig(dp=2, zero=3), FULL, None),
        "tp2, two layers at once, inputs in slices": (
            CROSS_LAYER,
            ParallelConfig(tp=2),
            two,
            None,
        ),
        "wide stream, tp4 sp, selective": (wide, ParallelConfig(tp=4, sp=True), PARTS, None),
        "experts, pp2 dp2 ep2": (experts, replace(staged(2, dp=2), ep=2), NO, None),
        "experts, pp2 dp2 ep2, overlapped": (
            experts,
            replace(staged(2, dp=2), ep=2, overlap_experts=True),
            NO,
            None,
        ),
        "unlike layers, tp2 pp2 sp": (unlike, staged(2, tp=2, sp=True), NO, None),
        "adapters, pp2 tp2 sp": (dropping, staged(2, tp=2, sp=True), NO, lora),
    }
    sample = (
        "tp2 cp2 sp",
        "pp2 vpp2 tp2",
        "dropping, pp2 dualpipe-v",
        "experts, pp2 dp2 ep2, overlapped",
    )
    for name, (model, parallel, recompute, adapters) in rows.items():
        yield Layout(
            area="variants",
            name=f"cross-layer, {name}",
            model=model,
            parallel=parallel,
            recompute=recompute,
            rows=None if parallel.pp == 1 else 3,
            seq_len=row_of(parallel),
            lora=adapters,
            documents="document" in name,
            sample=name.startswith(sample),
        )


MATRIX: tuple[Layout, ...] = (
    *_tensor_and_data(),
    *_divided_state(),
    *_sharded_weights(),
    *_pipeline(),
    *_shared_rows(),
    *_memory(),
    *_all_axes(),
    *_variants(),
    *_variants_at_the_ends(),
    *_variants_and_others(),
    *_cross_layer_rows(),
    *_adapters(),
    *expert_rows(),
    *masked_rows(),
    *packed_rows(),
    *chosen_parameters(),
    *mtp_stage_rows(),
)
"""Every layout of the matrix."""


def matrix_rows(*, sample: bool) -> list[Layout]:
    """Return the rows, those with few processes first, so that workers are started when needed."""
    return sorted((row for row in MATRIX if row.sample or not sample), key=lambda row: row.world)
