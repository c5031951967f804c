"""Tests of megalith/megatron/memory.py."""

import pytest

from megalith.config.parallel import RecomputeConfig
from megalith.rules.run import run_problems
from tests.megatron.conftest import Translate


@pytest.mark.parametrize(
    ("added", "expected"),
    [
        ("", RecomputeConfig()),
        ("--recompute-granularity full", RecomputeConfig(granularity="full")),
        (
            "--recompute-granularity full --recompute-method block --recompute-num-layers 2",
            RecomputeConfig(granularity="full", method="block", num_layers=2),
        ),
        (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
            "--distribute-saved-activations --tensor-model-parallel-size 3",
            RecomputeConfig(granularity="full", shard_inputs=True),
        ),
        ("--recompute-activations", RecomputeConfig(granularity="selective")),
        (
            "--recompute-granularity selective --recompute-modules layernorm core_attn mlp",
            RecomputeConfig(granularity="selective", modules=("norm", "core_attention", "mlp")),
        ),
        (
            "--recompute-activations --recompute-modules mlp --mlp-chunks-for-training 4",
            RecomputeConfig(granularity="selective", modules=("mlp",), mlp_chunks=4),
        ),
        (
            "--recompute-activations --mlp-chunks-for-training 4",
            RecomputeConfig(granularity="selective"),
        ),
        ("--mlp-chunks-for-training 4", RecomputeConfig()),
        (
            "--recompute-activations --recompute-granularity full",
            RecomputeConfig(granularity="full"),
        ),
        (
            "--recompute-granularity selective --recompute-modules core_attn moe_act",
            RecomputeConfig(granularity="selective"),
        ),
        ("--recompute-granularity selective --recompute-modules moe moe_act", RecomputeConfig()),
        (
            "--recompute-method block --recompute-num-layers 2 --distribute-saved-activations",
            RecomputeConfig(),
        ),
    ],
)
def test_recomputation_is_megatrons(tiny: Translate, added: str, expected: RecomputeConfig) -> None:
    done = tiny(added)
    assert done.run is not None and done.refusals(strict=True) == []
    assert done.run.recompute == expected
    assert run_problems(done.run, done.ranks) == []


def test_ignored_arguments_are_reported(tiny: Translate) -> None:
    texts = [entry.text for entry in tiny("--recompute-method block").entries]
    assert "is read with --recompute-granularity only" in texts
    texts = [
        entry.text for entry in tiny("--recompute-activations --recompute-modules moe mlp").entries
    ]
    assert "this model has no moe" in texts
    texts = [entry.text for entry in tiny("--mlp-chunks-for-training 2").entries]
    assert any("changes no result; chunks here are of dense MLPs" in text for text in texts)


def test_parts_of_mixtures_are_ours_where_there_are_some(tiny: Translate) -> None:
    moe, again = (
        "--num-experts 4 --moe-router-topk 2",
        "--recompute-activations --recompute-modules",
    )
    shared = "--moe-shared-expert-intermediate-size 24"
    done = tiny(f"{moe} {shared} {again} moe shared_experts moe_act")
    assert done.run is not None and done.run.recompute.modules == ("mlp", "shared_experts")
    assert "what experts have between their matmuls is computed again in any case" in [
        e.text for e in done.entries
    ]
    done = tiny(f"{moe} {again} moe shared_experts")
    assert done.run is not None and done.run.recompute.modules == ("mlp",)
    assert "this model has no shared_experts" in [entry.text for entry in done.entries]


def test_the_old_word_for_experts_that_run_again_is_understood(tiny: Translate) -> None:
    old = "--num-experts 4 --moe-router-topk 2 --moe-layer-recompute"
    done = tiny(old)
    assert (
        done.run is not None
        and done.refusals(strict=True) == []
        and run_problems(done.run, done.ranks) == []
    )
    assert done.run.recompute == RecomputeConfig(
        granularity="selective", modules=("core_attention", "mlp")
    )
    done = tiny(f"{old} --recompute-granularity selective --recompute-modules moe layernorm")
    assert done.run is not None and done.run.recompute.modules == ("mlp", "norm")
    (problem,) = tiny(f"{old} --recompute-granularity full").problems
    text = (
        "--moe-layer-recompute with --recompute-granularity full, which has all layers. Use "
        "one of the two."
    )
    assert problem == text


def test_projections_of_latent_attention_are_ours_where_there_are_some(tiny: Translate) -> None:
    again = "--recompute-activations --recompute-modules mla_up_proj layernorm"
    latent = (
        "--multi-latent-attention --kv-lora-rank 16 --qk-head-dim 12 --qk-pos-emb-head-dim 8 "
        "--qk-layernorm"
    )
    done = tiny(f"{latent} {again}")
    assert done.run is not None and done.run.recompute.modules == ("mla_up_proj", "norm")
    done = tiny(again)
    assert done.run is not None and done.run.recompute.modules == ("norm",)
    assert "this model has no mla_up_proj" in [entry.text for entry in done.entries]


def test_an_unknown_module_is_refused(tiny: Translate) -> None:
    (problem,) = tiny("--recompute-activations --recompute-modules attention").problems
    assert problem.startswith(
        "--recompute-modules attention: Megatron has no such choice. Use one of core_attn, "
    )


@pytest.mark.parametrize(
    ("added", "rule"),
    [
        (
            "--recompute-granularity selective --recompute-num-layers 2",
            "count whole layers, which recompute.granul",
        ),
        (
            "--recompute-granularity full --distribute-saved-activations",
            "but parallel.tp=1. Set parallel.tp to 2",
        ),
    ],
)
def test_invalid_settings_are_reported_as_by_the_rules(
    tiny: Translate, added: str, rule: str
) -> None:
    run = tiny(added).run
    assert run is not None
    (problem,) = run_problems(run, 1)
    assert rule in problem


def test_layers_wait_in_host_memory(tiny: Translate) -> None:
    run = tiny("--cpu-offloading-num-layers 1").run
    assert run is not None and run.offload.layers == 1


@pytest.mark.parametrize(
    ("added", "text"),
    [
        (
            "--cpu-offloading-num-layers 2",
            "--cpu-offloading-num-layers 2 with --num-layers 2: expected from 0 to 1.",
        ),
        (
            "--cpu-offloading-num-layers -1",
            "--cpu-offloading-num-layers -1 with --num-layers 2: expected from 0 to 1.",
        ),
        (
            "--recompute-granularity full --recompute-method block --recompute-num-layers 3",
            "--recompute-num-layers 3 with --num-layers 2: expected from 1 to 2. Set "
            "--recompute-num-layers to one of",
        ),
        (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 0",
            "--recompute-num-layers 0 with --num-layers 2: expected from 1 to 2.",
        ),
    ],
)
def test_counts_of_layers_that_the_model_does_not_have_are_refused(
    tiny: Translate, added: str, text: str
) -> None:
    (problem,) = tiny(added).problems
    assert problem.startswith(text)
