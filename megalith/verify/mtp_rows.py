"""Rows of the matrix in which MTP layers are on a different pipeline stage than the loss."""

from collections.abc import Iterator
from dataclasses import replace

from megalith.verify.rows import FULL, NO, PARTS, Layout, row_of, staged
from megalith.verify.variants import LATENT, MTP_EXPERTS, MTP_MODEL, VARIANTS

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
