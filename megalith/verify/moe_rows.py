"""Rows of the matrix with experts: every dispatcher, ep and etp with every axis, and sharded
states."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from megalith.config.model import ModelConfig
from megalith.config.parallel import DispatcherName, ParallelConfig, RecomputeConfig
from megalith.verify.rows import FULL, NO, PARTS, Layout, row_of, staged
from megalith.verify.tiny_models import (
    BIASED_CHOICE,
    CLAMPED,
    MTP_EXPERTS,
    NARROW,
    NOISY,
    OFFSET,
    OVER_THE_STEP,
    PADDED,
    PLANNED,
    PLANNED_PAIRS,
    WHOLE_LATENT,
)

GATHER: DispatcherName = "allgather"
MIXTURE = replace(PARTS, modules=("mlp",))

Mixed = Mapping[str, tuple[ModelConfig, ParallelConfig, int, RecomputeConfig]]
"""Rows with experts by name: model, layout, rows per microbatch, recomputation."""


def _experts_under_one_axis() -> Mixed:
    tp2, norms = ParallelConfig(tp=2, sp=True), replace(PARTS, modules=("norm", "mlp_act"))
    return {
        "biased choice, dp2": (BIASED_CHOICE, ParallelConfig(dp=2), 1, NO),
        "over the step, dp2": (OVER_THE_STEP, ParallelConfig(dp=2), 1, NO),
        "over the step, dp2 ep2": (OVER_THE_STEP, ParallelConfig(dp=2, ep=2), 1, NO),
        "biased choice, dp2 ep2": (BIASED_CHOICE, ParallelConfig(dp=2, ep=2), 2, NO),
        "clamped, dp2 ep2 gather, documents": (
            CLAMPED,
            ParallelConfig(dp=2, ep=2, dispatcher=GATHER),
            1,
            NO,
        ),
        "biased choice, dp2 etp2 and ep1": (BIASED_CHOICE, ParallelConfig(dp=2, etp=2), 1, NO),
        "narrow, dp2 etp2, gather": (NARROW, ParallelConfig(dp=2, etp=2, dispatcher=GATHER), 1, NO),
        "narrow, tp2 sp ep2 etp1, the mixture again": (
            NARROW,
            replace(tp2, ep=2, etp=1),
            1,
            MIXTURE,
        ),
        "biased choice, tp2 sp etp2, documents": (BIASED_CHOICE, tp2, 1, NO),
        "noisy, tp2 sp ep2 etp1, full": (NOISY, replace(tp2, ep=2, etp=1), 3, FULL),
        "biased choice, tp2 sp etp1 and ep1": (BIASED_CHOICE, replace(tp2, etp=1), 1, norms),
        "planned, tp2 sp etp1, full": (PLANNED, replace(tp2, etp=1), 1, FULL),
        "offset, dp2, zero 1": (OFFSET, ParallelConfig(dp=2, zero=1), 2, NO),
        "offset, tp2 sp etp1, documents, full": (OFFSET, replace(tp2, etp=1), 1, FULL),
        "narrow, cp2 ep2": (NARROW, ParallelConfig(cp=2, ep=2), 1, NO),
        "clamped, cp2 ep2, documents": (CLAMPED, ParallelConfig(cp=2, ep=2), 2, NO),
        "biased choice, cp2 ep2 gather": (
            BIASED_CHOICE,
            ParallelConfig(cp=2, ep=2, dispatcher=GATHER),
            2,
            FULL,
        ),
        "noisy, pp2": (NOISY, staged(2), 2, NO),
        "planned, cp3 ep3": (PLANNED, ParallelConfig(cp=3, ep=3), 1, NO),
        "biased choice, dp3 ep3, zero 1": (
            BIASED_CHOICE,
            ParallelConfig(dp=3, ep=3, zero=1),
            2,
            NO,
        ),
        "clamped, dp4 ep4": (CLAMPED, ParallelConfig(dp=4, ep=4), 3, NO),
        "biased choice, dp4 ep2, zero 2": (
            BIASED_CHOICE,
            ParallelConfig(dp=4, ep=2, zero=2),
            1,
            NO,
        ),
        "narrow, dp4 ep2 etp2, zero 1": (
            NARROW,
            ParallelConfig(dp=4, ep=2, etp=2, zero=1),
            1,
            PARTS,
        ),
        "narrow, dp4 ep2 etp2, reference": (
            NARROW,
            ParallelConfig(dp=4, ep=2, etp=2, dispatcher="reference"),
            1,
            PARTS,
        ),
        "narrow, dp4 ep2 etp2, gather": (
            NARROW,
            ParallelConfig(dp=4, ep=2, etp=2, dispatcher=GATHER),
            3,
            NO,
        ),
        "clamped, dp4 ep2 in two replicas, zero 1": (
            CLAMPED,
            ParallelConfig(dp=4, ep=2, zero=1, dp_replicate=2),
            1,
            NO,
        ),
    }


def _experts_under_several_axes() -> Mixed:
    staged2, inside = staged(2, dp=2), ParallelConfig(tp=2, dp=2, sp=True, order="dp-tp-cp-ep-pp")
    return {
        "narrow, tp2 dp2 sp ep2 etp2": (NARROW, ParallelConfig(tp=2, dp=2, sp=True, ep=2), 1, NO),
        "biased choice, tp2 dp2 sp ep2 etp1, zero 1": (
            BIASED_CHOICE,
            ParallelConfig(tp=2, dp=2, sp=True, ep=2, etp=1, zero=1),
            2,
            MIXTURE,
        ),
        "clamped, tp2 dp2 sp ep4 etp1, zero 2": (
            CLAMPED,
            ParallelConfig(tp=2, dp=2, sp=True, ep=4, etp=1, zero=2),
            1,
            NO,
        ),
        "biased choice, tp2 dp2 sp ep2, dp inside": (
            BIASED_CHOICE,
            replace(inside, ep=2, etp=1),
            1,
            NO,
        ),
        "narrow, cp2 tp2 sp ep4 etp1": (
            NARROW,
            ParallelConfig(cp=2, tp=2, sp=True, ep=4, etp=1),
            1,
            NO,
        ),
        "biased choice, cp2 tp2 sp ep2, reference": (
            BIASED_CHOICE,
            ParallelConfig(cp=2, tp=2, sp=True, ep=2, dispatcher="reference"),
            1,
            FULL,
        ),
        "noisy, cp2 tp2 sp ep2": (NOISY, ParallelConfig(cp=2, tp=2, sp=True, ep=2), 1, MIXTURE),
        "biased choice, cp2 tp2 sp ep2 etp1 gather": (
            BIASED_CHOICE,
            ParallelConfig(cp=2, tp=2, sp=True, ep=2, etp=1, dispatcher=GATHER),
            1,
            NO,
        ),
        "narrow, cp2 dp2 ep2, zero 2": (NARROW, ParallelConfig(cp=2, dp=2, ep=2, zero=2), 1, NO),
        "offset, cp2 dp2 ep2, zero 2": (OFFSET, ParallelConfig(cp=2, dp=2, ep=2, zero=2), 1, NO),
        "offset, tp2 pp2 dp2 sp ep2 etp1": (
            OFFSET,
            replace(staged(2, tp=2, dp=2, sp=True), ep=2, etp=1),
            1,
            NO,
        ),
        "over the step, tp2 dp2 sp ep2": (
            OVER_THE_STEP,
            ParallelConfig(tp=2, dp=2, sp=True, ep=2),
            2,
            FULL,
        ),
        "over the step, pp2 dp3, zero 2": (OVER_THE_STEP, staged(2, dp=3, zero=2), 1, NO),
        "narrow, pp2 dp2 ep2": (NARROW, replace(staged2, ep=2), 2, NO),
        "biased choice, pp2 dp2 ep2 zb-h1, zero 2": (
            BIASED_CHOICE,
            replace(staged(2, dp=2, zero=2, schedule="zb-h1"), ep=2),
            1,
            FULL,
        ),
        "biased choice, pp2 vpp2 dp2 ep2": (
            BIASED_CHOICE,
            replace(staged(2, dp=2, vpp=2), ep=2),
            1,
            MIXTURE,
        ),
        "narrow, tp2 pp2 sp ep2 etp1": (
            NARROW,
            replace(staged(2, tp=2, sp=True), ep=2, etp=1),
            3,
            NO,
        ),
        "noisy, cp2 pp2 ep2": (NOISY, replace(staged(2, cp=2), ep=2), 1, NO),
        "mtp experts, dp2 ep2, zero 1": (
            MTP_EXPERTS,
            ParallelConfig(dp=2, ep=2, zero=1),
            1,
            NO,
        ),
        "mtp experts, pp2 dp2 ep2": (MTP_EXPERTS, replace(staged2, ep=2), 1, NO),
        "mtp experts, pp2 dp2 ep2 zb-v, zero 2": (
            MTP_EXPERTS,
            replace(staged(2, dp=2, zero=2, schedule="zb-v", vpp=2), ep=2),
            1,
            NO,
        ),
        "biased choice, dp6 ep3, zero 1": (
            BIASED_CHOICE,
            ParallelConfig(dp=6, ep=3, zero=1),
            1,
            NO,
        ),
        "biased choice, tp3 dp2 sp ep2 etp3": (
            replace(BIASED_CHOICE, num_kv_heads=3),
            ParallelConfig(tp=3, dp=2, sp=True, ep=2),
            1,
            NO,
        ),
        "clamped, pp2 dp4 ep2, zero 1": (CLAMPED, replace(staged(2, dp=4, zero=1), ep=2), 1, NO),
        "narrow, tp2 pp2 dp2 sp ep2 etp1": (
            NARROW,
            replace(staged(2, tp=2, dp=2, sp=True), ep=2, etp=1),
            1,
            NO,
        ),
        "clamped, cp2 dp2 tp2 sp ep4 etp1, zero 2": (
            CLAMPED,
            ParallelConfig(cp=2, dp=2, tp=2, sp=True, ep=4, etp=1, zero=2),
            1,
            NO,
        ),
        "narrow, tp2 dp4 sp ep2 in two replicas, zero 1": (
            NARROW,
            ParallelConfig(tp=2, dp=4, sp=True, ep=2, zero=1, dp_replicate=2),
            1,
            NO,
        ),
    }


def _experts_with_few_seats() -> Mixed:
    """Return layouts with token dropping in packed documents, with and without padding."""
    every = replace(staged(2, tp=2, dp=2, sp=True, schedule="zb-h1"), ep=2, etp=1)
    return {
        "narrow, cp2 tp2 sp ep4 etp1, documents": (
            NARROW,
            ParallelConfig(cp=2, tp=2, sp=True, ep=4, etp=1),
            2,
            NO,
        ),
        "padded, cp3, documents": (PADDED, ParallelConfig(cp=3), 2, NO),
        "padded, cp2 dp2 ep2 etp2, zero 1, documents": (
            PADDED,
            ParallelConfig(cp=2, dp=2, ep=2, etp=2, zero=1),
            1,
            MIXTURE,
        ),
        "padded, dp4 ep2, zero 3": (PADDED, ParallelConfig(dp=4, ep=2, zero=3), 1, NO),
        "padded, tp2 pp2 dp2 sp ep2 etp1 zb-h1": (PADDED, every, 1, NO),
    }


def _experts_fully_sharded() -> Mixed:
    """Return layouts with experts sharded over edp and other parameters over dp and cp; either may
    have nothing to shard."""
    tp2, both = (
        ParallelConfig(tp=2, sp=True, zero=3),
        ParallelConfig(tp=2, dp=2, sp=True, ep=2, zero=3),
    )
    return {
        "biased choice, dp2, zero 3": (BIASED_CHOICE, ParallelConfig(dp=2, zero=3), 1, NO),
        "biased choice, dp2 ep2, zero 3": (
            BIASED_CHOICE,
            ParallelConfig(dp=2, ep=2, zero=3),
            1,
            NO,
        ),
        "narrow, dp4 ep2, zero 3": (NARROW, ParallelConfig(dp=4, ep=2, zero=3), 1, NO),
        "narrow, tp2 sp etp1, zero 3": (NARROW, replace(tp2, etp=1), 1, NO),
        "clamped, tp2 dp2 sp ep2 etp1, zero 3": (CLAMPED, replace(both, etp=1), 1, MIXTURE),
        "clamped, dp4 ep2 in two replicas, zero 3": (
            CLAMPED,
            ParallelConfig(dp=4, ep=2, zero=3, dp_replicate=2),
            1,
            FULL,
        ),
        "narrow, cp2 dp2 ep2, zero 3": (NARROW, ParallelConfig(cp=2, dp=2, ep=2, zero=3), 1, FULL),
        "biased choice, pp2 dp2, zero 3": (BIASED_CHOICE, staged(2, dp=2, zero=3), 1, FULL),
        # The first stage has nothing to shard.
        "noisy, tp2 pp2 sp etp1, zero 3": (
            replace(NOISY, num_layers=2),
            replace(staged(2, tp=2, sp=True, zero=3), etp=1),
            1,
            NO,
        ),
        "mtp experts, pp2 dp4 ep2, zero 3": (
            MTP_EXPERTS,
            replace(staged(2, dp=4, zero=3), ep=2),
            1,
            NO,
        ),
    }


def _experts_in_pairs() -> Mixed:
    """Return layouts with dual-batch overlap, under every schedule that supports it."""
    layouts: dict[str, tuple[ModelConfig, ParallelConfig, int, RecomputeConfig]] = {
        "biased choice, dp2 ep2, pairs, zero 1": (
            BIASED_CHOICE,
            ParallelConfig(dp=2, zero=1),
            1,
            NO,
        ),
        "noisy, cp2 ep2, pairs, the mixture again": (NOISY, ParallelConfig(cp=2), 1, MIXTURE),
        "narrow, tp2 dp2 sp ep2 etp2, pairs": (NARROW, ParallelConfig(tp=2, dp=2, sp=True), 1, NO),
        "narrow, pp2 dp2 ep2, pairs": (NARROW, staged(2, dp=2), 1, NO),
        "narrow, tp2 pp2 sp ep2 etp1, pairs": (
            NARROW,
            replace(staged(2, tp=2, sp=True), etp=1),
            2,
            NO,
        ),
        "biased choice, pp2 vpp2 dp2 ep2, pairs, zero 2": (
            BIASED_CHOICE,
            staged(2, dp=2, vpp=2, zero=2),
            1,
            MIXTURE,
        ),
        "mtp experts, pp2 dp2 ep2 dualpipe-v, pairs, zero 1": (
            MTP_EXPERTS,
            staged(2, dp=2, zero=1, schedule="dualpipe-v", vpp=2),
            1,
            FULL,
        ),
        "clamped, pp2 dp4 ep2, pairs, zero 2 in two replicas": (
            CLAMPED,
            replace(staged(2, dp=4, zero=2), dp_replicate=2),
            1,
            NO,
        ),
    }
    return {
        name: (model, replace(parallel, ep=2, overlap_experts=True), rows, again)
        for name, (model, parallel, rows, again) in layouts.items()
    }


def _experts_and_latent_attention() -> Mixed:
    """Return layouts of a model with latent attention, experts and MTP."""
    up_again = replace(PARTS, modules=("mla_up_proj", "shared_experts"))
    paired = replace(staged(2, dp=2, zero=1), ep=2, overlap_experts=True)
    return {
        "whole latent, dp2 ep2, zero 1": (WHOLE_LATENT, ParallelConfig(dp=2, ep=2, zero=1), 1, NO),
        "whole latent, tp2 dp2 sp ep2 etp2, documents": (
            WHOLE_LATENT,
            ParallelConfig(tp=2, dp=2, sp=True, ep=2),
            1,
            NO,
        ),
        "whole latent, pp2 dp2 ep2, zero 2": (
            WHOLE_LATENT,
            replace(staged(2, dp=2, zero=2), ep=2),
            2,
            NO,
        ),
        "whole latent, cp2 dp2 ep2, zero 3, full": (
            WHOLE_LATENT,
            ParallelConfig(cp=2, dp=2, ep=2, zero=3),
            1,
            FULL,
        ),
        "whole latent, pp2 dp2 ep2, pairs, zero 1, up again": (WHOLE_LATENT, paired, 1, up_again),
    }


def _experts_by_plan() -> Mixed:
    """Return layouts with Sinkhorn routing over all ranks, pipeline stages and top-2 experts."""
    sliced = replace(staged(2, tp=2, sp=True), dp=2, ep=2)
    return {
        "planned pairs, tp2 pp2 dp2 sp ep2 etp2": (PLANNED_PAIRS, sliced, 2, NO),
        "planned pairs, tp2 cp2 sp ep2 etp1 gather, full": (
            PLANNED_PAIRS,
            ParallelConfig(tp=2, cp=2, sp=True, ep=2, etp=1, dispatcher=GATHER),
            1,
            FULL,
        ),
    }


def expert_rows() -> Iterator[Layout]:
    """Yield layouts with experts: every dispatcher, ep and etp with every axis, sharded states,
    recomputation.

    Rows of `NOISY` have dp 1, since it has an aux loss over the global batch and drops tokens per
    microbatch. The first tokens of packed documents have equal router weights up to rounding, which
    must not decide which is dropped: weights are compared with fewer bits.
    """
    rows = {
        **_experts_under_one_axis(),
        **_experts_under_several_axes(),
        **_experts_fully_sharded(),
        **_experts_in_pairs(),
        **_experts_with_few_seats(),
        **_experts_and_latent_attention(),
        **_experts_by_plan(),
    }
    sample = {
        "biased choice, dp2 etp2 and ep1",
        "clamped, dp2 ep2 gather, documents",
        "noisy, tp2 sp ep2 etp1, full",
        "narrow, cp2 ep2",
        "planned, cp3 ep3",
        "offset, dp2, zero 1",
        "biased choice, tp2 dp2 sp ep2 etp1, zero 1",
        "over the step, dp2 ep2",
        "biased choice, pp2 dp2 ep2 zb-h1, zero 2",
        "biased choice, pp2 vpp2 dp2 ep2, pairs, zero 2",
        "whole latent, dp2 ep2, zero 1",
    }
    for name, (model, parallel, microbatch, recompute) in rows.items():
        yield Layout(
            area="experts",
            name=name,
            model=model,
            parallel=parallel,
            rows=microbatch,
            seq_len=row_of(parallel),
            recompute=recompute,
            documents="documents" in name,
            sample=name in sample,
        )
