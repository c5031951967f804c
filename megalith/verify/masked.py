"""Rows of the matrix with attention masks, some of which mask all keys of a query."""

from collections.abc import Iterator

from megalith.config.context import ContextConfig
from megalith.config.model import ModelConfig
from megalith.config.parallel import ParallelConfig
from megalith.config.recompute import RecomputeConfig
from megalith.verify.ranks import MaskKind
from megalith.verify.rows import FOUR, Layout, row_of, staged, tiny
from megalith.verify.variants import (
    BIASED_CHOICE,
    CHUNKED,
    CROSS_LAYER,
    LATENT,
    NORMED_AROUND,
    RELATIVE,
    SINKS,
)

Row = tuple[MaskKind, ModelConfig, ParallelConfig]

GATHER, EXCHANGE = ContextConfig(kind="gather"), ContextConfig(kind="a2a")
FEW = tiny(num_kv_heads=2)


def masked_rows() -> Iterator[Layout]:
    """Yield layouts with masks in addition to the causal mask and instead of it, on every axis and
    layer type."""
    rows: dict[str, Row] = {
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
