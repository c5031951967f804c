"""Which layers run again and which wait in host memory; and every combination that is refused, with
its text."""

from dataclasses import replace
from typing import Any

import pytest

from megalith.config.fields import range_problems
from megalith.config.model import MLAConfig
from megalith.config.moe import MoEConfig
from megalith.config.parallel import OffloadConfig, RecomputeConfig
from megalith.plan.recompute import (
    Span,
    layer_spans,
    mlp_chunks_problems,
    mlp_in_chunks,
    recompute_notes,
    recompute_problems,
    recomputed_modules,
    shared_experts_problems,
    up_projection_problems,
)
from megalith.testing.tiny import tiny_run

HERE = OffloadConfig()
MODEL = tiny_run().model


def full(num_layers: int, method: str = "uniform") -> RecomputeConfig:
    return RecomputeConfig(granularity="full", method=method, num_layers=num_layers)  # type: ignore[arg-type]


def test_uniform_chunks_cover_every_layer_once_and_the_last_may_be_shorter() -> None:
    for num_layers in range(12):
        for size in (1, 2, 3, 5, 20):
            spans = layer_spans(full(size), HERE, num_layers)
            assert [layer for span in spans for layer in range(span.start, span.stop)] == list(
                range(num_layers)
            )
            assert all(span.recomputed and span.stop - span.start == size for span in spans[:-1])
    assert [span[:2] for span in layer_spans(full(9), HERE, 4)] == [(0, 4)]


def test_block_recomputes_the_first_layers_one_by_one_and_at_most_all() -> None:
    assert [span.recomputed for span in layer_spans(full(2, "block"), HERE, 4)] == [
        True,
        True,
        False,
        False,
    ]
    assert [span.recomputed for span in layer_spans(full(9, "block"), HERE, 3)] == [
        True,
        True,
        True,
    ]


@pytest.mark.parametrize("recompute", [RecomputeConfig(), RecomputeConfig(granularity="selective")])
def test_without_full_recomputation_every_layer_saves_its_activations(
    recompute: RecomputeConfig,
) -> None:
    assert layer_spans(recompute, HERE, 2) == [Span(0, 1, False, False), Span(1, 2, False, False)]


def test_last_layer_is_never_offloaded_and_spans_are_offloaded_whole() -> None:
    away = OffloadConfig(layers=9)
    assert [span.offloaded for span in layer_spans(RecomputeConfig(), away, 4)] == [
        True,
        True,
        True,
        False,
    ]
    assert [span.offloaded for span in layer_spans(full(2), OffloadConfig(layers=3), 6)] == [
        True,
        False,
        False,
    ]
    assert [span.offloaded for span in layer_spans(RecomputeConfig(), away, 1)] == [False]


def test_only_selective_recomputation_has_modules() -> None:
    assert recomputed_modules(
        RecomputeConfig(granularity="selective", modules=("norm", "mlp"))
    ) == (
        "norm",
        "mlp",
    )
    assert recomputed_modules(full(1)) == recomputed_modules(RecomputeConfig()) == ()


def problems(
    recompute: RecomputeConfig,
    offload: OffloadConfig = HERE,
    *,
    tp: int = 1,
    sp: bool = False,
    compiled: bool = False,
) -> str:
    ranges = range_problems(recompute, "recompute") + range_problems(offload, "offload")
    return "\n".join(
        ranges
        + recompute_problems(recompute, offload, tp=tp, sp=sp, compiled=compiled, stage_layers=4)
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            problems(full(0)),
            "recompute.num_layers=0 must be at least 1. Set recompute.num_layers to 1 or more.",
        ),
        (
            problems(RecomputeConfig(method="block")),
            "recompute.method=block and recompute.num_layers=1 count whole "
            "layers, which recompute.granularity=none does not recompute. Set "
            "recompute.granularity to "
            "full",
        ),
        (
            problems(RecomputeConfig(granularity="selective", num_layers=2)),
            "recompute.num_layers=2 count whole layers, "
            "which recompute.granularity=selective does not recompute",
        ),
        (
            problems(RecomputeConfig(granularity="selective", modules=())),
            "recompute.modules=[] has nothing to recompute. Set recompute.modules to "
            "[core_attention], or recompute.granularity to none",
        ),
        (
            problems(RecomputeConfig(modules=("mlp",))),
            "recompute.modules=['mlp'] belongs to recompute.granularity="
            "selective, but that is none. Set recompute.granularity to selective",
        ),
        (
            problems(RecomputeConfig(granularity="selective"), compiled=True),
            "recompute.granularity=selective with train.compile=true",
        ),
        (
            problems(RecomputeConfig(check=True)),
            "recompute.check=true compares recomputed values, but nothing is "
            "recomputed with recompute.granularity=none. Set recompute.granularity to "
            "full or selective",
        ),
        (
            problems(RecomputeConfig(shard_inputs=True), tp=2),
            "recompute.shard_inputs=true shards the inputs of recomputed layers, but "
            "recompute.granularity=none. Set recompute.granularity to full",
        ),
        (
            problems(RecomputeConfig(granularity="full", shard_inputs=True)),
            "but parallel.tp=1. Set parallel.tp to 2",
        ),
        (
            problems(RecomputeConfig(granularity="full", shard_inputs=True), tp=2, sp=True),
            "recompute.shard_inputs=true is redundant: with parallel.sp=true each of "
            "the parallel.tp=2 ranks saves only its tokens already",
        ),
        (
            problems(RecomputeConfig(granularity="auto")),
            "recompute.granularity=auto chooses by a device's memory, but "
            "recompute.device=None. Set recompute.device to one of a100, h100, h200, b200, or to "
            "the GiB of one device.",
        ),
        (
            problems(RecomputeConfig(granularity="auto", device="h10")),
            "recompute.device=h10 is not a known device. "
            "Did you mean h100? Set recompute.device to one of a100, ",
        ),
        (
            problems(RecomputeConfig(granularity="full", device="h100")),
            "recompute.device=h100 is for "
            "recompute.granularity=auto, but that is full. Set recompute.granularity to auto, or "
            "remove",
        ),
        (
            problems(RecomputeConfig(granularity="auto", device="80", modules=("mlp",))),
            "belongs to recompute.granularity=selective, but that is auto",
        ),
        (
            problems(RecomputeConfig(), OffloadConfig(layers=4)),
            "offload.layers=4 must be less than the "
            "4 layers of a stage, whose last layer backward needs first. Set offload.layers to 3 "
            "or less",
        ),
        (
            problems(RecomputeConfig(), OffloadConfig(layers=-1)),
            "offload.layers=-1 must be at least 0",
        ),
        (
            problems(RecomputeConfig(), OffloadConfig(layers=1), compiled=True),
            "offload.layers=1 with train.compile=true",
        ),
        (
            problems(RecomputeConfig(), OffloadConfig(min_numel=0)),
            "offload.min_numel=0 must be at least 1",
        ),
    ],
)
def test_invalid_recompute_settings_are_rejected_with_a_valid_value(
    text: str, expected: str
) -> None:
    assert expected in text


def test_shared_experts_recomputation_requires_shared_experts() -> None:
    again = RecomputeConfig(granularity="selective", modules=("shared_experts",))
    model = tiny_run({}).model
    (text,) = shared_experts_problems(again, model)
    assert text == (
        "recompute.modules=['shared_experts'] has shared_experts, but the model has none. "
        "Remove shared_experts, or set model.moe.shared_ffn_hidden_size."
    )
    assert shared_experts_problems(
        again, replace(model, moe=MoEConfig(num_experts=2, ffn_hidden_size=3))
    ) == [text]
    some = MoEConfig(num_experts=2, ffn_hidden_size=3, shared_ffn_hidden_size=4)
    assert shared_experts_problems(again, replace(model, moe=some)) == []
    assert shared_experts_problems(RecomputeConfig(), model) == []


def test_mla_up_proj_recomputation_requires_mla() -> None:
    again, model = (
        RecomputeConfig(granularity="selective", modules=("norm", "mla_up_proj")),
        tiny_run({}).model,
    )
    assert up_projection_problems(again, model) == [
        "recompute.modules=['norm', 'mla_up_proj'] has mla_up_proj, but "
        "model.mla=None: only latent attention has up-projections. Replace mla_up_proj "
        "by core_attention, or set model.mla."
    ]
    assert up_projection_problems(again, replace(model, mla=MLAConfig(kv_rank=7))) == []
    assert up_projection_problems(RecomputeConfig(), model) == []


def chunked(
    chunks: int = 3, offload: OffloadConfig = HERE, *, drop: bool = False, **changes: Any
) -> list[str]:
    one = replace(
        RecomputeConfig(granularity="selective", modules=("mlp",), mlp_chunks=chunks), **changes
    )
    return mlp_chunks_problems(one, offload, MODEL, tokens=7, adapters_drop=drop)


def test_mlp_chunks_require_selective_recomputation_of_mlps() -> None:
    assert chunked() == chunked(7) == chunked(1, granularity="none", drop=True) == []
    refused = {
        "but recompute.granularity=full and recompute.modules=['mlp']. Set recompute.granularity "
        "to selective": chunked(granularity="full"),
        "recompute.modules=['norm']. Set recompute.granularity to selective and recompute.modules "
        "to [mlp]": chunked(modules=("norm",)),
        "recompute.mlp_chunks=8 is more than the 7 tokens": chunked(8),
        "Set recompute.mlp_chunks to 7 or less": chunked(8),
        "recompute.mlp_chunks=3 with offload.layers=1: the chunks": chunked(
            offload=OffloadConfig(layers=1)
        ),
        "recompute.mlp_chunks=3 with lora.dropout above 0": chunked(drop=True),
    }
    for text, (problem,) in refused.items():
        assert text in problem, problem
    mixed = replace(MODEL, moe=MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=8))
    one = RecomputeConfig(granularity="selective", modules=("mlp",), mlp_chunks=2)
    (text,) = mlp_chunks_problems(one, HERE, mixed, tokens=7, adapters_drop=False)
    assert "no layer has a dense MLP" in text and "Set recompute.mlp_chunks to 1." in text
    assert mlp_in_chunks(one, MODEL, 0) and not mlp_in_chunks(one, mixed, 0)
    assert not mlp_in_chunks(replace(one, modules=("norm",)), MODEL, 0)


def test_all_conflicts_are_reported_together() -> None:
    bad = RecomputeConfig(modules=(), method="block", shard_inputs=True)
    result = recompute_problems(
        bad, OffloadConfig(layers=7), tp=1, sp=False, compiled=False, stage_layers=2
    )
    assert len(result) == 4
    assert all(any(word in text for word in ("Set ", "Use ")) for text in result)


@pytest.mark.parametrize(
    "recompute",
    [
        RecomputeConfig(),
        RecomputeConfig(granularity="auto", device="80 GiB"),
        full(1),
        full(99),
        full(99, "block"),
        RecomputeConfig(granularity="selective"),
        RecomputeConfig(
            granularity="selective", modules=("core_attention", "norm", "mlp", "mlp_act")
        ),
    ],
)
def test_valid_settings_are_accepted(recompute: RecomputeConfig) -> None:
    assert problems(recompute) == problems(recompute, OffloadConfig(layers=3), tp=2, sp=True) == ""
    assert problems(RecomputeConfig(granularity="full", shard_inputs=True), tp=2) == ""


def test_layer_count_above_the_number_of_layers_means_all_with_a_note() -> None:
    (note,) = recompute_notes(full(9), stage_layers=4)
    assert (
        "recompute.num_layers=9 is more than the 4 layers of a stage: all of them are recomputed "
        "together" in note
    )
    (note,) = recompute_notes(full(9, "block"), stage_layers=4)
    assert "all of them are recomputed, as with 4" in note
    assert (
        recompute_notes(full(4), stage_layers=4)
        == recompute_notes(RecomputeConfig(), stage_layers=1)
        == []
    )
