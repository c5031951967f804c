"""Each parameter has one update rule, and settings that no parameter uses are rejected."""

from dataclasses import replace

import pytest

from megalith.config.fields import range_problems
from megalith.config.lora import LoraConfig
from megalith.config.model import ModelConfig, MuPConfig
from megalith.config.optim import (
    AdafactorConfig,
    GroupConfig,
    LionConfig,
    MuonConfig,
    OptimConfig,
    PrecisionConfig,
    SoapConfig,
    optim_problems,
)
from megalith.config.tree import from_dict
from megalith.errors import ConfigError
from megalith.plan.param_groups import find_grad_norm_group, named_parameters, parameter_rates
from megalith.plan.parameters import PER_MATRIX_RULES
from megalith.plan.update_rules import (
    describe_rule_change,
    list_per_matrix_rules,
    rule_of,
    update_rule_problems,
)
from megalith.verify.matrix import BIASED_CHOICE, PLAIN

MUON = OptimConfig(kind="muon")


def rules(optim: OptimConfig, model: ModelConfig = PLAIN) -> dict[str, str]:
    return {
        one.name: rule_of(one.name, int(one.matrix), optim) for one in named_parameters(model, None)
    }


def problems(optim: OptimConfig, model: ModelConfig = PLAIN) -> list[str]:
    return range_problems(optim, "optim") + update_rule_problems(optim, model, None)


@pytest.mark.parametrize("kind", PER_MATRIX_RULES)
def test_per_matrix_rules_update_hidden_weight_matrices(kind: str) -> None:
    optim = OptimConfig(kind=kind)  # type: ignore[arg-type]  # one of its values
    of = rules(optim, replace(BIASED_CHOICE, tied_embeddings=False))
    scalars = ("embed.weight", "head.weight", "norm.weight")
    assert {of[name] for name in scalars} == {"adamw"}
    assert {rule for name, rule in of.items() if name.endswith(".router")} == {"adamw"}
    assert {rule for name, rule in of.items() if name.endswith((".q", ".o", ".down"))} == {kind}
    assert problems(optim) == [] and list_per_matrix_rules(optim) == [kind]


def test_elementwise_kind_updates_all_parameters_unless_scalar_optimizer_is_set() -> None:
    assert {*rules(OptimConfig(kind="lion")).values()} == {"lion"}
    of = rules(OptimConfig(kind="sgd", scalar_optimizer="lion"))
    assert (of["layers.0.attention.q"], of["embed.weight"]) == ("sgd", "lion")
    assert list_per_matrix_rules(OptimConfig(kind="sgd")) == []


def test_kind_of_a_group_comes_first() -> None:
    group = GroupConfig(name="down", match=("*.down",), kind="sgd")
    of = rules(replace(MUON, groups=(group,)))
    assert (of["layers.0.mlp.down"], of["layers.0.attention.o"]) == ("sgd", "muon")
    routers = GroupConfig(name="routers", match=("*.router",), kind="muon")
    optim = OptimConfig(groups=(routers,))
    assert problems(optim, BIASED_CHOICE) == [] and list_per_matrix_rules(optim) == ["muon"]


def test_mup_does_not_rescale_matrices_of_per_matrix_rules() -> None:
    wide = replace(PLAIN, mup=MuPConfig(base_hidden_size=PLAIN.hidden_size // 2))
    name = "layers.0.mlp.down"
    assert parameter_rates(wide, OptimConfig(), name, 1).lr == 0.5
    assert parameter_rates(wide, MUON, name, 1)[:2] == (1.0, 1.0)
    assert parameter_rates(wide, MUON, "head.weight", 1).rule == "adamw"
    sgd = OptimConfig(scalar_optimizer="sgd")  # vectors have the factor of SGD
    assert parameter_rates(wide, sgd, "norm.weight", 0).lr == 2.0


@pytest.mark.parametrize(
    ("match", "what"),
    [("embed.weight", "an embedding table"), ("norm.weight", "a vector")],
)
def test_group_with_per_matrix_rule_on_other_parameters_is_rejected(match: str, what: str) -> None:
    group = GroupConfig(name="all", match=("*.mlp.down", match), kind="muon")
    (text,) = problems(OptimConfig(groups=(group,)))
    assert text == (
        f"optim.groups[all].kind=muon: {match} is {what}, and muon applies to hidden weight "
        "matrices only. Use patterns in optim.groups[all].match that leave it out, so that "
        "optim.scalar_optimizer (adamw) updates it, or set optim.groups[all].kind to one of adamw, "
        "sgd, lion."
    )


@pytest.mark.parametrize(
    ("optim", "message"),
    [
        (
            OptimConfig(muon=MuonConfig(ns_steps=3)),
            "optim.muon.ns_steps=3: no trained parameter uses muon. Set optim.kind to muon, or "
            "remove optim.muon.",
        ),
        (
            OptimConfig(lion=LionConfig(beta1=0.9)),
            "optim.lion.beta1=0.9: no trained parameter uses lion. Set optim.kind or "
            "optim.scalar_optimizer to lion, or remove optim.lion.",
        ),
        (OptimConfig(soap=SoapConfig(kl=True)), "optim.soap.kl=True: no trained parameter uses"),
        (OptimConfig(adafactor=AdafactorConfig(d=2.0)), "optim.adafactor.d=2.0: no trained"),
        (
            replace(MUON, trained=("embed.weight", "norm.weight")),
            "optim.kind=muon updates no parameter: embed.weight and all other trained parameters",
        ),
        (
            OptimConfig(scalar_optimizer="lion", trained=("*.down",)),
            "optim.scalar_optimizer=lion updates no parameter: all trained parameters are hidden",
        ),
        (
            replace(MUON, muon=MuonConfig(coefficients=())),
            "optim.muon.coefficients=[] has no triple. Use one of quintic, simple, polar_express",
        ),
        (
            replace(MUON, muon=MuonConfig(ns_steps=0)),
            "optim.muon.ns_steps=0 must be at least 1. Use 5.",
        ),
        (
            replace(MUON, muon=MuonConfig(momentum=1.0)),
            "optim.muon.momentum=1.0 must be below 1.",
        ),
        (
            replace(MUON, muon=MuonConfig(beta2=0.5)),
            "optim.muon.beta2=0.5 has no effect without optim.muon.second_moment. Set "
            "optim.muon.second_moment to normuon or adamuon, or remove optim.muon.beta2.",
        ),
        (
            replace(MUON, plugin="my_rule"),
            "optim.plugin=my_rule takes the place of optim.kind, but optim.kind=muon is set",
        ),
        (
            OptimConfig(grad_norm_skip_threshold=0.0),
            "optim.grad_norm_skip_threshold=0.0 must be a finite number above 0. Use 100.0.",
        ),
    ],
)
def test_settings_without_effect_are_rejected(optim: OptimConfig, message: str) -> None:
    (text,) = problems(optim)
    assert text.startswith(message)


def test_matrix_rule_with_adapters_is_rejected() -> None:
    (text,) = update_rule_problems(MUON, PLAIN, LoraConfig(rank=2))
    assert text.startswith("optim.kind=muon updates no parameter: layers.0.attention.q.lora_a")
    assert update_rule_problems(OptimConfig(kind="lion"), PLAIN, LoraConfig(rank=2)) == []
    unused = OptimConfig(kind="lion", scalar_optimizer="adamw")
    (text,) = update_rule_problems(unused, PLAIN, LoraConfig(rank=2))
    assert text.startswith("optim.kind=lion updates no parameter: layers.0.attention.q.lora_a")


def test_unknown_names_are_rejected_with_the_nearest_one() -> None:
    for data, message in (
        ({"kind": "mouon"}, r"kind=mouon: there is no such choice. Did you mean muon\?"),
        ({"scalar_optimizer": "muon"}, "scalar_optimizer=muon: there is no such choice. Use one"),
        ({"muon": {"coefficients": "quintc"}}, r"muon.coefficients=quintc.* Did you mean quintic"),
        ({"muon": {"coefficients": [[1.0, 2.0]]}}, r"muon.coefficients=.*a list of 3: a number"),
        ({"muon": {"split": "head"}}, r"muon.split=head: there is no .* Did you mean heads\?"),
    ):
        with pytest.raises(ConfigError, match=message):
            from_dict(OptimConfig, data)  # type: ignore[arg-type]  # plain data


def test_muon_in_16_bits_is_rejected_with_fp64() -> None:
    optim = replace(MUON, muon=MuonConfig(dtype="bf16"))
    (text,) = optim_problems(optim, PrecisionConfig(params="fp64"))
    assert text.startswith("optim.muon.dtype=bf16 with precision.params=fp64")
    assert optim_problems(optim, PrecisionConfig(params="bf16")) == []


def test_states_of_another_rule_are_named_with_both_rules() -> None:
    name = "layers.0.attention.q"
    assert describe_rule_change(name, 1, ["momentum"], ["exp_avg", "exp_avg_sq"], MUON) == (
        f"the checkpoint holds exp_avg, exp_avg_sq of '{name}'; optim.kind=muon needs momentum. "
        "Set checkpoint.load_mode=progress, with checkpoint.load in another folder, for a new "
        "optimizer at the same step (in the run's own folder checkpoint.missing_keys=warn and "
        "checkpoint.unexpected_keys=warn), or optim.kind=adamw."
    )
    head = describe_rule_change("head.weight", 1, ["exp_avg", "exp_avg_sq"], ["exp_avg"], MUON)
    assert "optim.scalar_optimizer=adamw needs" in head and head.endswith(
        "or optim.scalar_optimizer=lion."
    )
    assert describe_rule_change(name, 1, ["momentum"], ["momentum"], MUON) == ""
    assert describe_rule_change(name, 1, ["momentum"], [], MUON) == ""
    adam = describe_rule_change(name, 1, ["exp_avg"], ["momentum"], OptimConfig(kind="lion"))
    assert adam.endswith(", or optim.kind=sgd, or optim.kind=muon.")
    assert describe_rule_change(name, 1, ["momentum"], ["exp_avg_sq", "momentum"], MUON) == ""


def test_states_of_the_same_role_of_another_rule_are_rejected() -> None:
    name, sgd = "layers.0.attention.q", OptimConfig(kind="sgd")
    assert describe_rule_change(name, 1, ["momentum"], ["momentum"], MUON, sgd) == (
        f"the checkpoint holds momentum, of the rule sgd, of '{name}'; optim.kind=muon needs "
        "momentum. Set checkpoint.load_mode=progress, with checkpoint.load in another folder, for "
        "a new optimizer at the same step, or optim.kind=sgd."
    )
    assert describe_rule_change(name, 1, ["momentum"], ["momentum"], MUON, MUON) == ""
    # a second moment that the checkpoint lacks is a missing key, not another rule
    stored = ["exp_avg_sq", "momentum"]
    assert describe_rule_change(name, 1, ["momentum"], stored, MUON, MUON) == ""


def test_every_parameter_is_in_one_norm_group() -> None:
    groups = {one.name: find_grad_norm_group(one.name) for one in named_parameters(PLAIN, None)}
    assert groups["embed.weight"] == 0 and groups["layers.0.attention.q"] == 1
    assert groups["layers.0.mlp.down"] == 2 and groups["layers.0.mlp_norm.weight"] == 4
