"""Patterns choose what is trained and at which rates, and a pattern without sense is refused by
name."""

from dataclasses import replace

import pytest

from megalith.config.fields import range_problems
from megalith.config.lora import LoraConfig
from megalith.config.model import ModelConfig, MuPConfig
from megalith.config.moe import MoEConfig
from megalith.config.optim import GroupConfig, OptimConfig, ScheduleConfig
from megalith.plan.param_groups import (
    named_parameters,
    parameter_rates,
    parameter_rows,
    pattern_problems,
)
from megalith.plan.parameters import ParameterRates
from megalith.testing.tiny import tiny_run
from megalith.verify.matrix import BIASED_CHOICE, MTP_EXPERTS

MODEL = ModelConfig(
    vocab_size=61,
    hidden_size=24,
    num_layers=12,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    ffn_hidden_size=20,
)
TIED = replace(MODEL, tied_embeddings=True)
ADAMW = ParameterRates(rule="adamw")
FALLING = ScheduleConfig(lr=1e-2, min_lr=1e-3)


def problems(
    optim: OptimConfig, model: ModelConfig = MODEL, schedule: ScheduleConfig = FALLING
) -> list[str]:
    return range_problems(optim, "optim") + pattern_problems(optim, schedule, model, None)


def of_group(**settings: object) -> list[str]:
    """Of one group of the embedding."""
    given: dict[str, object] = {"name": "table", "match": ("embed.weight",)} | settings
    return problems(OptimConfig(groups=(GroupConfig(**given),)))  # type: ignore[arg-type]  # by name


def test_defaults_train_all_parameters_with_equal_rates() -> None:
    assert problems(OptimConfig()) == []
    assert all(
        parameter_rates(MODEL, OptimConfig(), one.name, int(one.matrix)) == ADAMW
        for one in named_parameters(MODEL, None)
    )


def test_matching_patterns_have_no_problem() -> None:
    groups = (
        GroupConfig(name="ends", match=("embed.weight", "head.weight"), lr=1e-3, min_lr=0.0),
        GroupConfig(name="slow", match=("layers.[0-3].*",), lr_scale=0.1),
        GroupConfig(name="firm", match=("*.attention.q",), weight_decay=0.5),
    )
    assert (
        problems(
            OptimConfig(frozen=("layers.1?.*",), groups=groups, decayed_vectors=("*norm.weight",))
        )
        == []
    )


@pytest.mark.parametrize(
    ("optim", "parts"),
    [
        (OptimConfig(frozen=("layer.3.*",)), ("optim.frozen=layer.3.*", "Did you mean layers.3.*")),
        (OptimConfig(trained=("*.mlp.dwn",)), ("optim.trained=*.mlp.dwn", "*.mlp.down")),
        (
            OptimConfig(frozen=("*",)),
            ("optim.frozen=['*']", "leave no trained parameter", "Remove"),
        ),
        (OptimConfig(trained=()), ("optim.trained=[]", "leave no trained parameter")),
        (
            OptimConfig(decayed_vectors=("*.q",)),
            ("optim.decayed_vectors=*.q", "no vector", "layers.0.attention_norm"),
        ),
        (
            OptimConfig(
                frozen=("embed.*",),
                groups=(GroupConfig(name="a", match=("embed.weight",), lr=1e-3),),
            ),
            ("optim.groups[a].match=['embed.weight']", "not trained"),
        ),
    ],
)
def test_patterns_without_match_are_rejected_with_suggestions(
    optim: OptimConfig, parts: tuple[str, ...]
) -> None:
    (problem,) = problems(optim)
    assert all(part in problem for part in parts), problem


def test_errors_explain_tied_head_and_expert_bias() -> None:
    (problem,) = problems(OptimConfig(frozen=("head.weight",)), TIED)
    assert "the head is embed.weight" in problem
    (problem,) = problems(OptimConfig(frozen=("*.balancing_bias",)), BIASED_CHOICE)
    assert "is updated as long as its router is trained" in problem


def test_two_groups_that_disagree_are_both_named_with_the_parameter() -> None:
    one, other = (
        GroupConfig(name="one", match=("*.q",), lr=1e-3),
        GroupConfig(name="two", match=("layers.1.*",), lr=2e-3),
    )
    (problem,) = problems(OptimConfig(groups=(one, other)))
    assert (
        "one (lr=0.001) and two (lr=0.002) disagree on the learning rate of layers.1.attention.q"
        in problem
    )
    assert problems(OptimConfig(groups=(one, replace(other, lr=1e-3)))) == []
    firm = replace(other, lr=None, weight_decay_scale=0.5)
    assert problems(OptimConfig(groups=(one, firm))) == []
    (problem,) = problems(
        OptimConfig(groups=(one, firm, replace(firm, name="three", weight_decay_scale=0.25)))
    )
    assert (
        "two (weight_decay_scale=0.5) and three (weight_decay_scale=0.25) disagree on the weight "
        "decay" in problem
    )


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        (
            {"lr": 1e-3, "lr_scale": 2.0},
            "lr=0.001 and optim.groups[table].lr_scale=2.0 are both set",
        ),
        ({"min_lr": 1e-3}, "min_lr=0.001 has an effect only with optim.groups[table].lr."),
        ({"lr": -1.0}, "lr=-1.0 must be a finite number"),
        ({"lr_scale": float("nan")}, "lr_scale=nan must be a finite number"),
        ({"lr": 1e-4}, "lr=0.0001 is below schedule.min_lr=0.001"),
        ({}, "has no effect. Set optim.groups[table].lr"),
        ({"match": (), "lr": 1e-2}, "match=[] fits no parameter"),
        ({"name": "My group", "lr": 1e-2}, "name='My group' must be small letters"),
        (
            {"weight_decay": 0.1, "end_weight_decay": 0.2},
            "has no effect with schedule.weight_decay_style=constant",
        ),
        (
            {"match": ("*norm.weight",), "weight_decay": 0.1},
            "which do not decay. Set optim.decayed_vectors",
        ),
    ],
)
def test_invalid_group_settings_are_rejected(settings: dict[str, object], part: str) -> None:
    assert any(part in problem for problem in of_group(**settings)), of_group(**settings)


def test_weight_decay_of_tables_with_a_fixed_spread_is_rejected() -> None:
    kept, table = (
        replace(MODEL, embedding_init_std=1.0),
        GroupConfig(name="a", match=("embed.*",), weight_decay=0.5),
    )
    (problem,) = problems(OptimConfig(groups=(table,)), kept)
    assert (
        "optim.groups[a] sets the weight decay of embed.weight" in problem
        and "embedding_init_std=1.0" in problem
    )
    assert (
        problems(OptimConfig(groups=(replace(table, match=("embed.*", "head.weight")),)), kept)
        == []
    )
    assert problems(OptimConfig(groups=(table,))) == []


def test_initial_or_minimum_rates_above_that_of_a_group_are_rejected() -> None:
    group = OptimConfig(groups=(GroupConfig(name="a", match=("embed.*",), lr=1e-3, min_lr=1e-4),))
    warm = ScheduleConfig(lr=1e-2, warmup_steps=3, warmup_init=5e-3)
    assert any(
        "below schedule.warmup_init=0.005" in problem for problem in problems(group, schedule=warm)
    )
    constant = ScheduleConfig(lr=1e-2, style="constant")
    assert any(
        "never reached with schedule.style=constant" in problem
        for problem in problems(group, schedule=constant)
    )


def test_group_names_are_unique() -> None:
    twice = tuple(
        GroupConfig(name="a", match=(name,), lr=1e-2) for name in ("embed.weight", "head.weight")
    )
    assert any(
        "two groups are called a" in problem for problem in problems(OptimConfig(groups=twice))
    )


def test_adapters_are_chosen_by_lora_and_may_have_rates() -> None:
    lora = LoraConfig(rank=2)
    (problem,) = pattern_problems(OptimConfig(frozen=("layers.0.*",)), FALLING, MODEL, lora)
    assert "lora.rank=2" in problem and "lora.layers" in problem
    faster = OptimConfig(groups=(GroupConfig(name="b", match=("*.lora_b",), lr_scale=16.0),))
    assert pattern_problems(faster, FALLING, MODEL, lora) == []
    assert parameter_rates(MODEL, faster, "layers.0.mlp.down.lora_b", 1).lr_of == "b"


@pytest.mark.parametrize("model", [BIASED_CHOICE, MTP_EXPERTS])
def test_aux_loss_of_a_frozen_router_is_rejected_if_it_affects_others(
    model: ModelConfig,
) -> None:
    errors = problems(OptimConfig(frozen=("*.moe.router",)), model)
    assert len(errors) == 3 and all(
        "the router" in text and "model.moe.aux_loss." in text for text in errors
    )
    behind = (
        ("mtp.1.norm.weight", "mtp.1.layer.moe.experts.down")
        if model.mtp.num_layers
        else ("norm.weight",)
    )
    assert problems(OptimConfig(trained=behind), model) == []


@pytest.mark.parametrize(
    "trained", ["norm.weight", "mtp.0.project", "mtp.0.layer.attention.q", "mtp.*"]
)
def test_mtp_router_may_be_frozen_only_if_nothing_before_it_is_trained(
    trained: str,
) -> None:
    optim = OptimConfig(trained=(trained,), frozen=("mtp.0.layer.moe.router",))
    errors = problems(optim, MTP_EXPERTS)
    assert len(errors) == 3 and all(
        "mtp.0.layer.moe.router is not trained" in text for text in errors
    )


def test_rates_name_their_groups_and_keep_mup_factors() -> None:
    wide = replace(MODEL, mup=MuPConfig(base_hidden_size=6))
    optim = OptimConfig(
        groups=(
            GroupConfig(name="a", match=("*.mlp.*",), lr=1e-3),
            GroupConfig(name="b", match=("*.down",), weight_decay_scale=0.5),
        ),
        decayed_vectors=("norm.weight",),
    )
    assert parameter_rates(wide, optim, "layers.0.mlp.down", 1) == ParameterRates(
        lr=0.25, eps=0.25, lr_of="a", decay_of="b", rule="adamw"
    )
    assert parameter_rates(wide, optim, "norm.weight", 0) == ADAMW._replace(vector_decays=True)
    assert parameter_rates(wide, optim, "layers.0.mlp_norm.weight", 0) == ADAMW


def test_parameter_map_lists_every_parameter_once() -> None:
    run = tiny_run(
        {
            "optim.frozen": "[embed.weight]",
            "optim.groups": "[{name: a, match: ['*.q'], lr_scale: 0.5}]",
        }
    )
    rows = {str(row["name"]): row for row in parameter_rows(run)}
    assert list(rows) == [one.name for one in named_parameters(run.model, None)]
    assert rows["embed.weight"]["trained"] is False and "lr" not in rows["embed.weight"]
    assert (rows["layers.0.attention.q"]["lr"], rows["layers.0.attention.q"]["weight_decay"]) == (
        "a",
        "schedule",
    )
    assert (
        rows["norm.weight"]["weight_decay_factor"] == 0.0
        and rows["layers.0.mlp.down"]["weight_decay_factor"] == 1.0
    )


def test_parameter_map_excludes_expert_biases() -> None:
    moe = MoEConfig(num_experts=4, ffn_hidden_size=8)
    names = [one.name for one in named_parameters(replace(BIASED_CHOICE, moe=moe), None)]
    assert not any("balancing" in name for name in names)
    assert not any("balancing" in one.name for one in named_parameters(BIASED_CHOICE, None))
