"""Every broken rule of experts names the setting, its value, and one that works."""

from dataclasses import replace
from typing import Any

import pytest

from megalith.config.fields import range_problems
from megalith.config.model import ModelConfig
from megalith.config.moe import AuxLossConfig, CapacityConfig, MoEConfig, RouterConfig
from megalith.config.parallel import ParallelConfig
from megalith.rules.model import network_problems
from megalith.rules.moe import balance_notes, expert_layout_problems, moe_problems, router_text

GOOD = MoEConfig(
    num_experts=8, top_k=4, ffn_hidden_size=6, aux_loss=AuxLossConfig(batch_coeff=0.01)
)
MODEL = ModelConfig(
    vocab_size=8, hidden_size=24, num_layers=4, num_heads=2, num_kv_heads=1, ffn_hidden_size=8
)
SIGMOID = RouterConfig(score="sigmoid")


def problems(moe: MoEConfig) -> list[str]:
    return range_problems(moe, "model.moe") or moe_problems(replace(MODEL, moe=moe))


def test_valid_settings_violate_no_rule() -> None:
    assert network_problems(replace(MODEL, moe=GOOD)) == []
    deepseek = RouterConfig(
        score="sigmoid", expert_bias=True, num_groups=4, topk_groups=2, routed_scaling_factor=2.5
    )
    assert network_problems(replace(MODEL, moe=replace(GOOD, router=deepseek))) == []
    assert moe_problems(MODEL) == []


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"num_experts": 0}, "model.moe.num_experts=0 must be at least 1"),
        ({"top_k": 0}, "model.moe.top_k=0 must be at least 1"),
        (
            {"top_k": 9},
            "model.moe.top_k=9 is more than model.moe.num_experts=8. Set model.moe.top_k to 8 or "
            "less",
        ),
        (
            {"latent_size": 0},
            "model.moe.latent_size=0 must be at least 1. Set model.moe.latent_size to 1",
        ),
        ({"shared_ffn_hidden_size": -1}, "model.moe.shared_ffn_hidden_size=-1 must be at least 1"),
        ({"layers": (False,)}, "model.moe.layers=[False]: no layer has experts"),
        ({"top_k": 1}, "Set model.moe.router.norm_topk_prob=false"),
        (
            {"top_k": 1, "aux_loss": AuxLossConfig(sinkhorn=True)},
            "Set model.moe.router.norm_topk_prob=false",
        ),
        (
            {"apply_router_weight_on_input": True},
            "model.moe.apply_router_weight_on_input=true with model.moe.top_k=4",
        ),
        (
            {"router": RouterConfig(expert_bias=True)},
            "Set model.moe.router.score to one of sigmoid, sqrt_softplus",
        ),
        (
            {"router": RouterConfig(num_groups=4)},
            "model.moe.router.num_groups=4 with model.moe.router.topk_groups=null",
        ),
        (
            {"router": RouterConfig(num_groups=3, topk_groups=1)},
            "Set model.moe.router.num_groups to one of [1, 2, 4, 8]",
        ),
        (
            {"router": RouterConfig(num_groups=4, topk_groups=5)},
            "model.moe.router.topk_groups=5 is more than",
        ),
        (
            {"router": RouterConfig(num_groups=4, topk_groups=1)},
            "Set model.moe.router.topk_groups to 2 or more",
        ),
        (
            {"router": RouterConfig(num_groups=4, topk_groups=3)},
            "Set model.moe.router.topk_groups to one of [2, 4]",
        ),
        (
            {"router": RouterConfig(jitter=1.0)},
            "model.moe.router.jitter=1.0 must be below 1",
        ),
        (
            {"router": RouterConfig(routed_scaling_factor=float("nan"))},
            "model.moe.router.routed_scaling_factor=nan must be a finite number above 0",
        ),
        (
            {"aux_loss": AuxLossConfig(z_loss_coeff=-1.0)},
            "model.moe.aux_loss.z_loss_coeff=-1.0 must be a finite number of at least 0",
        ),
        (
            {"aux_loss": AuxLossConfig(sinkhorn=True, batch_coeff=0.1)},
            "model.moe.aux_loss.batch_coeff=0.1 with model.moe.aux_loss.",
        ),
        (
            {"aux_loss": AuxLossConfig(sinkhorn=True, quantile=True)},
            "model.moe.aux_loss.quantile=true with model.moe",
        ),
        (
            {"aux_loss": AuxLossConfig(quantile=True, sequence_coeff=0.1)},
            "moe.aux_loss.sequence_coeff=0.1 with model.moe.aux_loss.q",
        ),
        (
            {
                "aux_loss": AuxLossConfig(quantile=True),
                "router": replace(SIGMOID, expert_bias=True),
            },
            "Remove it, or s",
        ),
        (
            {"aux_loss": AuxLossConfig(quantile=True), "capacity": CapacityConfig(factor=1.0)},
            "aux_loss.quantile=false",
        ),
        (
            {"aux_loss": AuxLossConfig(quantile=True), "top_k": 8},
            "model.moe.top_k=8 of model.moe.num_experts=8",
        ),
        (
            {"aux_loss": AuxLossConfig(quantile=True, quantile_ema=1.0)},
            "model.moe.aux_loss.quantile_ema=1.0 must be below 1",
        ),
        (
            {"router": RouterConfig(force_biased=-1.0)},
            "model.moe.router.force_biased=-1.0 must be a finite number of at",
        ),
        (
            {"router": RouterConfig(force_biased=1.0, force_load_balancing=True)},
            "Set model.moe.router.force_biased=0",
        ),
        (
            {"capacity": CapacityConfig(factor=0.0)},
            "model.moe.capacity.factor=0.0 must be a finite number above 0",
        ),
        (
            {"capacity": CapacityConfig(factor=1.0), "aux_loss": AuxLossConfig(sinkhorn=True)},
            "moe.capacity.factor=1.0",
        ),
    ],
)
def test_violated_moe_rule_is_reported(changed: dict[str, Any], text: str) -> None:
    (problem,) = problems(replace(GOOD, **changed))
    assert text in problem


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (
            {"router": RouterConfig(expert_bias_update_rate=0.1)},
            "model.moe.router.expert_bias_update_rate=0.1 with model.moe.router.exp",
        ),
        (
            {"aux_loss": AuxLossConfig(quantile_ema=0.1)},
            "model.moe.aux_loss.quantile_ema=0.1 with model.moe.aux_loss.q",
        ),
        (
            {"aux_loss": AuxLossConfig(of_choices=True)},
            "model.moe.aux_loss.of_choices=true with model.moe.aux_loss.ba",
        ),
        (
            {"router": RouterConfig(group_score="max")},
            "model.moe.router.group_score=max with model.moe.router.num_groups",
        ),
        (
            {"capacity": CapacityConfig(drop="last")},
            "model.moe.capacity.drop=last with model.moe.capacity.factor=null",
        ),
        (
            {"capacity": CapacityConfig(pad=True)},
            "model.moe.capacity.pad=true with model.moe.capacity.factor=null",
        ),
        (
            {"shared_gate": True},
            "model.moe.shared_gate=true with model.moe.shared_ffn_hidden_size=null",
        ),
        ({"layers": (True,) * 5}, "model.moe.layers has 5 values for model.num_layers=4"),
    ],
)
def test_moe_settings_without_effect_are_reported(changed: dict[str, Any], text: str) -> None:
    (problem,) = network_problems(replace(MODEL, moe=replace(GOOD, **changed)))
    assert text in problem


@pytest.mark.parametrize(
    ("parallel", "world", "moe", "text"),
    [
        (ParallelConfig(ep=3), 6, GOOD, "parallel.ep=3 does not divide model.moe.num_experts=8"),
        (
            ParallelConfig(ep=2),
            2,
            None,
            "parallel.ep=2 with model.moe=null: the model has no experts",
        ),
        (ParallelConfig(ep=4), 2, GOOD, "set parallel.ep to one of [1, 2]"),
        (ParallelConfig(tp=2), 2, GOOD, "parallel.tp=2 with parallel.sp=false and model.moe"),
        (ParallelConfig(etp=8), 8, GOOD, "parallel.etp=8 is more than model.moe.ffn_hidden_size=6"),
        (
            ParallelConfig(etp=2),
            2,
            replace(GOOD, biases=True),
            "parallel.etp=2 with model.moe.biases=true",
        ),
        (
            ParallelConfig(ep=2, dispatcher="allgather"),
            2,
            replace(GOOD, capacity=CapacityConfig(factor=1.0, pad=True)),
            "parallel.dispatcher=allgather with model.moe.capacity.pad=true",
        ),
        (
            ParallelConfig(ep=2, dispatcher="gathr"),
            2,
            GOOD,
            "parallel.dispatcher=gathr is not a known token",
        ),
        (
            ParallelConfig(ep=2, zero=1, dp_replicate=2),
            6,
            GOOD,
            "parallel.dp_replicate=2 does not divide the 3 ranks",
        ),
        (ParallelConfig(tp=2, sp=True, pp=2, etp=1, order="pp-tp-cp-ep-dp"), 4, GOOD, None),
    ],
)
def test_invalid_expert_layouts_are_reported(
    parallel: ParallelConfig, world: int, moe: MoEConfig | None, text: str | None
) -> None:
    result = expert_layout_problems(replace(MODEL, moe=moe), parallel, world, trains=True)
    assert (result == []) if text is None else (len(result) == 1 and text in result[0]), result


def test_different_pipeline_groups_of_both_grids_are_reported() -> None:
    parallel = ParallelConfig(tp=2, sp=True, pp=2, ep=2, etp=1, order="tp-pp-cp-ep-dp")
    (problem,) = expert_layout_problems(replace(MODEL, moe=GOOD), parallel, 8, trains=True)
    assert "different pipeline groups" in problem


def test_inference_does_not_require_divisible_tokens() -> None:
    assert (
        expert_layout_problems(replace(MODEL, moe=GOOD), ParallelConfig(tp=2), 2, trains=False)
        == []
    )


def test_missing_load_balancing_is_noted() -> None:
    (note,) = balance_notes(
        replace(MODEL, moe=replace(GOOD, aux_loss=AuxLossConfig(z_loss_coeff=0.1)))
    )
    assert "model.moe.aux_loss.batch_coeff=0.01" in note
    (note,) = balance_notes(replace(MODEL, moe=replace(GOOD, top_k=1)))
    assert (
        "the weight of a single expert is always 1" in note
        and "gives routers no gradient: only aux_loss" in note
    )
    (note,) = balance_notes(
        replace(MODEL, moe=replace(GOOD, router=RouterConfig(force_load_balancing=True)))
    )
    assert "at random" in note
    (note,) = balance_notes(
        replace(MODEL, moe=replace(GOOD, router=RouterConfig(force_biased=2.0)))
    )
    assert "force_biased=2.0: experts are chosen at random" in note
    balancing = replace(SIGMOID, expert_bias=True)
    for moe in (
        None,
        GOOD,
        replace(GOOD, aux_loss=AuxLossConfig(quantile=True)),
        replace(GOOD, aux_loss=AuxLossConfig(), router=balancing),
        replace(GOOD, num_experts=1, top_k=1),
    ):
        assert balance_notes(replace(MODEL, moe=moe)) == []


def test_coarse_router_dtype_is_reported() -> None:
    coarse = replace(GOOD, num_experts=32, router=RouterConfig(dtype="model"))
    (note,) = balance_notes(replace(MODEL, moe=coarse))
    assert "logits of 32 experts" in note and "model.moe.router.dtype=fp32" in note
    assert balance_notes(replace(MODEL, moe=replace(coarse, num_experts=31))) == []
    assert balance_notes(replace(MODEL, moe=replace(coarse, router=RouterConfig()))) == []


def test_router_text_describes_the_router() -> None:
    deepseek = RouterConfig(
        score="sigmoid", expert_bias=True, num_groups=8, topk_groups=4, routed_scaling_factor=2.5
    )
    moe = replace(
        GOOD, router=deepseek, aux_loss=AuxLossConfig(sequence_coeff=1e-4, z_loss_coeff=0.1)
    )
    assert router_text(moe) == (
        "sigmoid scores in fp32, of the best 4 of 8 groups, weights renormalized times 2.5; "
        "balanced by aux_loss.sequence_coeff=0.0001, router.expert_bias; dropless"
    )
    noisy = RouterConfig(
        jitter=0.01, force_load_balancing=True, norm_topk_prob=False, dtype="model"
    )
    moe = replace(
        GOOD,
        router=noisy,
        aux_loss=AuxLossConfig(),
        capacity=CapacityConfig(factor=1.25, drop="last"),
    )
    assert router_text(moe) == (
        "softmax scores in the dtype of the model, weights as scored, jitter=0.01, at "
        "random (force_load_balancing); balanced by nothing; capacity factor 1.25, "
        "drops the last tokens"
    )
    assert "balanced by aux_loss.quantile;" in router_text(
        replace(GOOD, aux_loss=AuxLossConfig(quantile=True))
    )
