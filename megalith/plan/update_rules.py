"""Update rule of each parameter, and the rules of `optim.kind`, `optim.scalar_optimizer` and
`optim.groups[].kind`; no torch."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import get_args

from megalith.config.lora import LoraConfig
from megalith.config.model import ModelConfig
from megalith.config.optim import (
    ElementwiseRuleName,
    GroupConfig,
    OptimConfig,
    matches_any_pattern,
)
from megalith.plan.frozen import with_adapters
from megalith.plan.layers.base import HeldParameter
from megalith.plan.parameters import PER_MATRIX_RULES, TABLES, held_parameters

PLUGIN_RULE = "plugin"
"""Name of the update rule that optim.plugin provides."""

ELEMENTWISE_RULES: tuple[str, ...] = get_args(ElementwiseRuleName)
"""Built-in rules that work on any slice of a parameter."""

CLASSIFIERS = (".router", ".shared_gate")
"""Ends of the names of matrices whose outputs are scores."""

ADAPTERS = (".lora_a", ".lora_b")
"""Ends of the names of LoRA adapters."""


def rule_of(name: str, inputs: int, optim: OptimConfig) -> str:
    """Return the update rule of a parameter with `inputs` input dims.

    The `kind` of a group comes first. optim.kind applies to hidden weight matrices, and
    optim.scalar_optimizer to all other parameters.

    >>> muon = OptimConfig(kind="muon")
    >>> [rule_of(name, 1, muon) for name in ("layers.0.mlp.down", "embed.weight", "head.weight")]
    ['muon', 'adamw', 'adamw']
    """
    for group in optim.groups:
        if group.kind is not None and matches_any_pattern(name, group.match):
            return group.kind
    main = optim.kind if optim.plugin is None else PLUGIN_RULE
    if is_hidden_matrix(name, inputs):
        return main
    return optim.scalar_optimizer or ("adamw" if main in PER_MATRIX_RULES else main)


def is_hidden_matrix(name: str, inputs: int) -> bool:
    """Return whether a parameter is a hidden weight matrix: no vector, embedding table, output
    head, router or adapter."""
    return inputs > 0 and not describe_scalar_parameter(name, inputs)


def describe_scalar_parameter(name: str, inputs: int) -> str:
    """Describe a parameter to which optim.scalar_optimizer applies; empty for a hidden
    weight matrix.

    >>> [describe_scalar_parameter(name, 1) for name in ("embed.weight", "layers.0.attention.o")]
    ['an embedding table', '']
    """
    if inputs == 0:
        return "a vector"
    if name in TABLES:
        return "an embedding table"
    if name == "head.weight":
        return "the output head"
    if name.endswith(CLASSIFIERS):
        return "a router"
    return "an adapter" if name.endswith(ADAPTERS) else ""


def list_per_matrix_rules(optim: OptimConfig) -> list[str]:
    """Return the per-matrix rules that the settings name, in a fixed order: the same on every
    rank, also on ranks without a matrix."""
    named = {optim.kind} if optim.plugin is None else {PLUGIN_RULE}
    named |= {group.kind for group in optim.groups if group.kind is not None}
    return [name for name in (*PER_MATRIX_RULES, PLUGIN_RULE) if name in named]


def uses_adamw(optim: OptimConfig) -> bool:
    """Return whether AdamW is the rule of some parameters.

    >>> uses_adamw(OptimConfig(kind="muon")), uses_adamw(OptimConfig(kind="sgd"))
    (True, False)
    """
    without_groups = replace(optim, groups=())
    rules = {rule_of("", inputs, without_groups) for inputs in (0, 1)}
    return "adamw" in rules | {group.kind for group in optim.groups}


def list_slice_roles(optim: OptimConfig, rule: str) -> tuple[str, ...]:
    """Return the roles of the states that a rule stores for each element of a slice, without the
    states of whole matrices; a plug-in counts as AdamW."""
    if rule == "sgd":
        return ("momentum",) if optim.momentum > 0 else ()
    roles = {"lion": ("exp_avg",), "muon": ("momentum",), "soap": (), "adafactor": ()}
    return roles.get(rule, ("exp_avg", "exp_avg_sq"))


def find_rule_setting(name: str, inputs: int, optim: OptimConfig) -> str:
    """Return the setting that decides the update rule of a parameter."""
    for group in optim.groups:
        if group.kind is not None and matches_any_pattern(name, group.match):
            return f"optim.groups[{group.name}].kind"
    is_scalar = not is_hidden_matrix(name, inputs)
    if is_scalar and (optim.scalar_optimizer is not None or optim.kind in PER_MATRIX_RULES):
        return "optim.scalar_optimizer"
    return "optim.kind" if optim.plugin is None else "optim.plugin"


# --- rules


def update_rule_problems(
    optim: OptimConfig, model: ModelConfig, lora: LoraConfig | None
) -> list[str]:
    """Return an error text for each broken rule of the update rules."""
    held = [one for one in with_adapters(held_parameters(model), model, lora) if one.counts]
    trained = [one for one in held if (optim.trains(one.name) if lora is None else not one.frozen)]
    problems = [
        text for group in optim.groups for text in _per_matrix_group_problems(group, optim, trained)
    ]
    problems += _plugin_problems(optim)
    problems += _muon_problems(optim)
    used = Counter(rule_of(one.name, int(one.matrix), optim) for one in trained)
    return [*problems, *_unused_rule_problems(optim, used, trained)]


def _per_matrix_group_problems(
    group: GroupConfig, optim: OptimConfig, trained: Sequence[HeldParameter]
) -> Iterator[str]:
    """Yield errors of groups that assign a per-matrix rule to a vector, table, head or adapter."""
    if group.kind not in PER_MATRIX_RULES:
        return
    for one in trained:
        text = describe_scalar_parameter(one.name, int(one.matrix))
        if text in ("", "a router") or not matches_any_pattern(one.name, group.match):
            continue
        scalar = optim.scalar_optimizer or "adamw"
        yield (
            f"optim.groups[{group.name}].kind={group.kind}: {one.name} is {text}, and "
            f"{group.kind} applies to hidden weight matrices only. Use patterns in "
            f"optim.groups[{group.name}].match that leave it out, so that optim.scalar_optimizer "
            f"({scalar}) updates it, or set optim.groups[{group.name}].kind to one of "
            f"{', '.join(ELEMENTWISE_RULES)}."
        )
        return


def _plugin_problems(optim: OptimConfig) -> Iterator[str]:
    if optim.plugin is not None and optim.kind != "adamw":
        yield (
            f"optim.plugin={optim.plugin} takes the place of optim.kind, but "
            f"optim.kind={optim.kind} is set as well. Remove one of them."
        )


def _muon_problems(optim: OptimConfig) -> Iterator[str]:
    muon = optim.muon
    if isinstance(muon.coefficients, tuple) and not muon.coefficients:
        yield (
            "optim.muon.coefficients=[] has no triple. Use one of quintic, simple, polar_express, "
            "cans, deepseek_v4, aol, or a list of triples such as [[3.4445, -4.775, 2.0315]]."
        )
    if muon.second_moment is not None:
        return
    default = type(muon)()
    for name in ("beta2", "eps"):
        value = getattr(muon, name)
        if value != getattr(default, name):
            yield (
                f"optim.muon.{name}={value} has no effect without optim.muon.second_moment. Set "
                f"optim.muon.second_moment to normuon or adamuon, or remove optim.muon.{name}."
            )


def _unused_rule_problems(
    optim: OptimConfig, used: Counter[str], trained: Sequence[HeldParameter]
) -> Iterator[str]:
    """Yield errors of rules and settings of rules that no trained parameter uses."""
    if optim.kind != "adamw" and optim.plugin is None and trained and not used[optim.kind]:
        yield (
            f"optim.kind={optim.kind} updates no parameter: {trained[0].name} and all other "
            "trained parameters are vectors, embedding tables, heads, routers or adapters, or "
            f"belong to groups with another kind. Set optim.kind=adamw, or train a matrix."
        )
    if optim.scalar_optimizer is not None and not any(
        not is_hidden_matrix(one.name, int(one.matrix)) for one in trained
    ):
        yield (
            f"optim.scalar_optimizer={optim.scalar_optimizer} updates no parameter: all trained "
            "parameters are hidden weight matrices. Remove optim.scalar_optimizer."
        )
    for rule in ("lion", *PER_MATRIX_RULES):
        settings = getattr(optim, rule)
        default = type(settings)()
        changed = [
            f"optim.{rule}.{field.name}={getattr(settings, field.name)}"
            for field in fields(settings)
            if getattr(settings, field.name) != getattr(default, field.name)
        ]
        if changed and not used[rule] and optim.kind != rule:
            target = "optim.kind" if rule != "lion" else "optim.kind or optim.scalar_optimizer"
            yield (
                f"{', '.join(changed)}: no trained parameter uses {rule}. Set {target} to {rule}, "
                f"or remove optim.{rule}."
            )


# --- resuming with another update rule

RULE_OF_ROLE = {
    "row_mean": "adafactor",
    "factor_left": "soap",
    "factor_right": "soap",
    "neuron_square": "muon",
    "momentum": "sgd or muon",
    "exp_avg_sq": "adamw",
    "exp_avg": "lion",
}
"""Update rule of a stored state; the first role that is stored decides."""


def describe_rule_change(
    name: str,
    inputs: int,
    needed: Sequence[str],
    stored: Sequence[str],
    optim: OptimConfig,
    saved_optim: OptimConfig | None = None,
) -> str:
    """Describe that the states of a parameter in a checkpoint are those of another update rule;
    empty if they are not.

    needed: roles of the run's states; stored: roles in the checkpoint; saved_optim: settings of
    the run that saved it. Unset: the rule is that of the stored roles.
    """
    rule = rule_of(name, inputs, optim)
    if saved_optim is None:
        previous = next((known for role, known in RULE_OF_ROLE.items() if role in stored), "")
        is_other = {*needed} != {*stored} and rule not in previous.split(" or ")
    else:  # equal roles may have another meaning: sgd's momentum is a sum, muon's an average
        previous = rule_of(name, inputs, saved_optim)
        is_other = previous != rule
    if not stored or not is_other:
        return ""
    setting = find_rule_setting(name, inputs, optim)
    needs = f"needs {', '.join(needed)}" if needed else "has no states"
    value = optim.plugin if rule == PLUGIN_RULE else rule
    names = [] if PLUGIN_RULE in (rule, previous) else previous.split(" or ")
    same = "".join(f", or {setting}={known}" for known in names if known)
    has_equal_roles = {*needed} == {*stored}
    of_rule = f", of the rule {previous}," if has_equal_roles else ""
    in_own_folder = (
        ""
        if has_equal_roles
        else " (in the run's own folder checkpoint.missing_keys=warn and "
        "checkpoint.unexpected_keys=warn)"
    )
    return (
        f"the checkpoint holds {', '.join(stored)}{of_rule} of '{name}'; "
        f"{setting}={value} {needs}. Set checkpoint.load_mode=progress, with "
        "checkpoint.load in another folder, for a new "
        f"optimizer at the same step{in_own_folder}{same}."
    )
