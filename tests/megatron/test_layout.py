"""Parallelism and recompute settings from Megatron's arguments."""

from typing import Any

import pytest

from megalith.config.parallel import ParallelConfig, PipelineConfig, RecomputeConfig
from megalith.megatron.layout import count_stages
from megalith.plan.schedule import schedule_problems
from megalith.plan.stages import parse_layout, stages_problems
from megalith.rules.run import run_problems
from tests.megatron.conftest import Translate


def layout(tiny: Translate, added: str, **options: Any) -> ParallelConfig:
    """The layout of a translation that breaks no rule."""
    done = tiny(added, **options)
    assert done.run is not None, done.problems
    assert done.refusals(strict=True) == [] and run_problems(done.run, done.ranks) == []
    return done.run.parallel


def output(tiny: Translate, added: str, flag: str) -> list[str]:
    """Reports on a flag."""
    return [entry.text for entry in tiny(added).entries if entry.flag.split()[0] == flag]


def test_tensor_parallelism_is_kept(tiny: Translate) -> None:
    added = (
        "--tensor-model-parallel-size 3 --sequence-parallel --use-tp-pp-dp-mapping "
        "--ddp-bucket-size 1000"
    )
    run = tiny(f"{added} --distributed-timeout-minutes 1 --seq-length 33").run
    assert run is not None
    p = run.parallel
    assert (p.tp, p.sp, p.order, p.bucket_numel, p.timeout_seconds) == (
        3,
        True,
        "tp-cp-ep-pp-dp",
        1000,
        60.0,
    )
    assert not layout(tiny, "--sequence-parallel").sp


def test_tp_comm_overlap_is_translated(tiny: Translate) -> None:
    added = "--tp-comm-overlap --sequence-parallel --seq-length 33"
    assert layout(tiny, f"{added} --tensor-model-parallel-size 3").tp_comm_overlap
    assert not layout(tiny, added).tp_comm_overlap
    run = tiny("--tp-comm-overlap --tensor-model-parallel-size 3").run
    assert run is not None
    (problem,) = run_problems(run, 3)
    assert "parallel.tp_comm_overlap=true needs parallel.sp=true" in problem


def test_world_size_is_that_of_megatron(tiny: Translate) -> None:
    added = (
        "--tensor-model-parallel-size 3 --pipeline-model-parallel-size 2 --context-parallel-size 2"
    )
    assert tiny(added, world=36).ranks == 36
    assert tiny(added).ranks == 12
    assert (
        tiny(f"{added} --use-distributed-optimizer --num-distributed-optimizer-instances 2").ranks
        == 24
    )


# --- pipeline


@pytest.mark.parametrize(
    ("added", "pp", "pipeline"),
    [
        ("--pipeline-model-parallel-size 2", 2, PipelineConfig()),
        (
            "--num-layers 8 --pipeline-model-parallel-size 2 "
            "--num-layers-per-virtual-pipeline-stage 2",
            2,
            PipelineConfig(vpp=2),
        ),
        (
            "--num-layers 8 --pipeline-model-parallel-size 2 "
            "--num-virtual-stages-per-pipeline-rank 4 "
            "--microbatch-group-size-per-virtual-pipeline-stage 3",
            2,
            PipelineConfig(vpp=4, group=3),
        ),
        (
            "--num-layers 6 --pipeline-model-parallel-size 2 "
            "--num-layers-per-virtual-pipeline-stage 2 "
            "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
            2,
            PipelineConfig(vpp=2, count_embedding=True, count_loss=True),
        ),
        (
            "--num-layers 7 --pipeline-model-parallel-size 3 --decoder-first-pipeline-num-layers 3 "
            "--decoder-last-pipeline-num-layers 2",
            3,
            PipelineConfig(first_layers=3, last_layers=2),
        ),
        (
            "--num-layers 6 --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout "
            "Et|(tt|)*2tL",
            2,
            PipelineConfig(vpp=2, layout="Et|(tt|)*2tL"),
        ),
        (
            "--num-layers 2 --pipeline-model-parallel-size 3 --pipeline-model-parallel-layout "
            "E|tt|L",
            3,
            PipelineConfig(layout="E|tt|L"),
        ),
        (
            "--pipeline-model-parallel-size 2 --microbatch-group-size-per-virtual-pipeline-stage 3",
            2,
            PipelineConfig(),
        ),
    ],
)
def test_pipeline_layout_is_that_of_megatron(
    tiny: Translate, added: str, pp: int, pipeline: PipelineConfig
) -> None:
    p = layout(tiny, added)
    assert (p.pp, p.pipeline) == (pp, pipeline)
    layers = int(added.split()[1]) if added.startswith("--num-layers") else 2
    assert stages_problems(p.pipeline, pp=pp, num_layers=layers) == []
    assert schedule_problems(p.pipeline, pp=pp, num_microbatches=6) == []


@pytest.mark.parametrize(
    "text", ["EtL", "Et*3|(tt|)*29,m|L", "E|t*4|L", "Et||t L", "(E(t|)*2)|(|*2)*3t|*4L", "E(t|tL"]
)
def test_layout_stages_are_counted(text: str) -> None:
    assert count_stages(text) == (3 if text == "E(t|tL" else len(parse_layout(text))) - (
        text == "E(t|tL"
    )


def test_huge_layouts_are_counted_without_expansion() -> None:
    assert count_stages("E((t|)*99999999)*99999999L") == 99999999**2 + 1


@pytest.mark.parametrize(
    ("added", "problem"),
    [
        (
            "--num-layers-per-virtual-pipeline-stage 1 --num-virtual-stages-per-pipeline-rank 2",
            "--num-layers-per-virtual-pipeline-stage 1, --num-virtual-stages-per-pipeline-rank 2: "
            "each of them determines the model chunks per rank",
        ),
        (
            "--pipeline-model-parallel-layout EttL --num-virtual-stages-per-pipeline-rank 2",
            "Use one of them.",
        ),
        (
            "--num-layers 6 --pipeline-model-parallel-size 2 "
            "--num-layers-per-virtual-pipeline-stage 2",
            "6 layers do not divide into chunks of 2 on 2 ranks. Use a number that divides, or "
            "--pipeline-model",
        ),
        (
            "--num-layers 6 --account-for-loss-in-pipeline-split "
            "--num-layers-per-virtual-pipeline-stage 2",
            "6 layers and 1 that count as one do not divide into chunks of 2 on 1 ranks",
        ),
        (
            "--num-layers-per-virtual-pipeline-stage 1 --decoder-first-pipeline-num-layers 1",
            "ranks have different numbers of layers. Use --num-virtual-stages-per-pipeline-rank "
            "instead",
        ),
    ],
)
def test_contradictions_about_model_chunks_are_reported(
    tiny: Translate, added: str, problem: str
) -> None:
    problems = tiny(added).problems
    assert len(problems) == 1 and problem in problems[0]


def test_pipeline_flags_without_a_setting_are_explained(tiny: Translate) -> None:
    for flag in ("--standalone-embedding-stage", "--pipeline-model-parallel-split-rank 1"):
        assert len(tiny(flag).refusals(strict=False)) == 1
    later = tiny("--delay-wgrad-compute --no-overlap-p2p-communication --overlap-param-gather")
    assert later.refusals(strict=True) == []
    assert output(tiny, "--delay-wgrad-compute", "--delay-wgrad-compute")[0].endswith(
        "defers them into the bubble; results are the same"
    )
    assert (
        "parallel.overlap=false"
        in output(tiny, "--overlap-param-gather", "--overlap-param-gather")[0]
    )


# --- context


@pytest.mark.parametrize(
    ("added", "expected"),
    [
        ("--context-parallel-size 2", ("ring", (), None)),
        ("--context-parallel-size 2 --cp-comm-type all_gather", ("gather", (), None)),
        ("--context-parallel-size 2 --cp-comm-type a2a a2a", ("a2a", (), None)),
        ("--context-parallel-size 2 --cp-comm-type p2p a2a", ("ring", ("ring", "a2a"), None)),
        (
            "--context-parallel-size 4 --cp-comm-type a2a+p2p "
            "--hierarchical-context-parallel-sizes 2 2",
            ("a2a+ring", (), 2),
        ),
        (
            "--context-parallel-size 4 --cp-comm-type p2p a2a+p2p "
            "--hierarchical-context-parallel-sizes 2 2",
            ("a2a+ring", ("ring", "a2a+ring"), 2),
        ),
        ("--cp-comm-type a2a --hierarchical-context-parallel-sizes 2 2", ("ring", (), None)),
        ("--context-parallel-size 4 --hierarchical-context-parallel-sizes 2 2", ("ring", (), None)),
    ],
)
def test_context_parallelism_is_that_of_megatron(
    tiny: Translate, added: str, expected: tuple[object, ...]
) -> None:
    p = layout(tiny, added)
    assert (p.context.kind, p.context.layers, p.context.a2a) == expected
    assert p.cp == (int(added.split()[1]) if added.startswith("--context") else 1)


@pytest.mark.parametrize(
    ("added", "problem"),
    [
        (
            "--cp-comm-type ring",
            "--cp-comm-type ring: Megatron has no such choice. Use one of p2p, all_gather",
        ),
        (
            "--context-parallel-size 6 --cp-comm-type a2a+p2p",
            "--hierarchical-context-parallel-sizes is missing: --cp-comm-type a2a+p2p needs two "
            "numbers",
        ),
        (
            "--context-parallel-size 6 --cp-comm-type a2a+p2p "
            "--hierarchical-context-parallel-sizes 2 2",
            "whose product is --context-parallel-size 6. Use for example "
            "--hierarchical-context-parallel-sizes 2 3.",
        ),
    ],
)
def test_invalid_token_dispatchers_are_reported(tiny: Translate, added: str, problem: str) -> None:
    problems = tiny(added).problems
    assert len(problems) == 1 and problem in problems[0]


def test_rows_that_do_not_divide_violate_a_rule(tiny: Translate) -> None:
    run = tiny("--context-parallel-size 3 --cp-comm-type a2a p2p p2p").run
    assert run is not None
    problems = run_problems(run, 3)
    assert any("train.seq_len=32 does not divide by 2 * 3 = 6" in problem for problem in problems)
    assert any(
        "parallel.context.layers names 3 kinds for model.num_layers=2" in problem
        for problem in problems
    )


# --- data


@pytest.mark.parametrize(
    ("added", "zero"),
    [
        ("", 0),
        ("--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", 1),
        ("--use-megatron-fsdp", 3),
        ("--use-custom-fsdp --data-parallel-sharding-strategy optim_grads_params", 3),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", 2),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim", 1),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy no_shard", 0),
        (
            "--use-megatron-fsdp --data-parallel-sharding-strategy no_shard "
            "--use-distributed-optimizer",
            1,
        ),
        (
            "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads "
            "--use-distributed-optimizer",
            2,
        ),
        ("--data-parallel-sharding-strategy optim_grads", 0),
        ("--use-torch-fsdp2", 3),
        ("--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward", 2),
    ],
)
def test_zero_level_is_that_of_megatron(tiny: Translate, added: str, zero: int) -> None:
    assert layout(tiny, added, world=2).zero == zero


def test_every_sharding_flag_is_reported(tiny: Translate) -> None:
    done = tiny("--use-megatron-fsdp --use-distributed-optimizer", world=2)
    listed = {entry.flag for entry in done.entries if entry.setting == "parallel.zero"}
    assert listed == {
        "--use-megatron-fsdp",
        "--use-distributed-optimizer",
        "--data-parallel-sharding-strategy optim_grads_params (left out)",
    }


def test_optimizer_instances_are_replicas(tiny: Translate) -> None:
    added = "--use-distributed-optimizer --num-distributed-optimizer-instances 3"
    assert (layout(tiny, added, world=6).dp_replicate, layout(tiny, added).dp_replicate) == (3, 3)
    assert layout(tiny, "--num-distributed-optimizer-instances 3", world=6).dp_replicate == 1
    run = tiny(added, world=4).run
    assert run is not None
    assert any(
        "parallel.dp_replicate=3 does not divide dp=4" in problem
        for problem in run_problems(run, 4)
    )


def test_gradients_are_reduced_in_bf16_with_zero_1_and_2(tiny: Translate) -> None:
    assert (
        layout(tiny, "--use-distributed-optimizer --grad-reduce-in-bf16", world=2).reduce_dtype
        == "bf16"
    )
    assert layout(tiny, "--grad-reduce-in-bf16", world=2).reduce_dtype == "fp32"
    assert layout(tiny, "--use-torch-fsdp2 --grad-reduce-in-bf16", world=2).reduce_dtype == "fp32"
    assert (
        "which is more precise" in output(tiny, "--grad-reduce-in-bf16", "--grad-reduce-in-bf16")[0]
    )


def test_optimizer_states_sharded_over_replicas_are_not_mapped(tiny: Translate) -> None:
    for added, expected in (
        ("no_shard", "Megalith does the same"),
        ("optim", "not implemented: sharding optimizer"),
    ):
        texts = output(
            tiny,
            f"--use-megatron-fsdp --outer-dp-sharding-strategy {added}",
            "--outer-dp-sharding-strategy",
        )
        assert texts[0].startswith(expected)


# --- memory


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
def test_recompute_settings_are_those_of_megatron(
    tiny: Translate, added: str, expected: RecomputeConfig
) -> None:
    done = tiny(added)
    assert done.run is not None and done.refusals(strict=True) == []
    assert done.run.recompute == expected
    assert run_problems(done.run, done.ranks) == []


def test_ignored_arguments_are_reported(tiny: Translate) -> None:
    texts = [entry.text for entry in tiny("--recompute-method block").entries]
    assert "takes effect only with --recompute-granularity" in texts
    texts = [
        entry.text for entry in tiny("--recompute-activations --recompute-modules moe mlp").entries
    ]
    assert "this model has no moe" in texts
    texts = [entry.text for entry in tiny("--mlp-chunks-for-training 2").entries]
    assert any("only recomputed dense MLPs are computed in chunks" in text for text in texts)


def test_recomputed_moe_modules_are_translated(tiny: Translate) -> None:
    moe, again = (
        "--num-experts 4 --moe-router-topk 2",
        "--recompute-activations --recompute-modules",
    )
    shared = "--moe-shared-expert-intermediate-size 24"
    done = tiny(f"{moe} {shared} {again} moe shared_experts moe_act")
    assert done.run is not None and done.run.recompute.modules == ("mlp", "shared_experts")
    assert "activations between the matmuls of experts are always recomputed" in [
        e.text for e in done.entries
    ]
    done = tiny(f"{moe} {again} moe shared_experts")
    assert done.run is not None and done.run.recompute.modules == ("mlp",)
    assert "this model has no shared_experts" in [entry.text for entry in done.entries]


def test_moe_layer_recompute_is_translated(tiny: Translate) -> None:
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
        "--moe-layer-recompute with --recompute-granularity full, which recomputes all layers. Use "
        "one of the two."
    )
    assert problem == text


def test_recomputed_mla_projections_are_translated(tiny: Translate) -> None:
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


def test_unknown_recompute_module_is_rejected(tiny: Translate) -> None:
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


def test_offloaded_layers_are_translated(tiny: Translate) -> None:
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
def test_layer_counts_outside_the_model_are_rejected(
    tiny: Translate, added: str, text: str
) -> None:
    (problem,) = tiny(added).problems
    assert problem.startswith(text)
