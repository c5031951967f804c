"""Trained parameters and their learning rates, by patterns of their names; no torch."""

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations

from megalith.config.fields import Plain
from megalith.config.lora import LoraConfig
from megalith.config.model import ModelConfig
from megalith.config.optim import GroupConfig, OptimConfig, ScheduleConfig, matches_any_pattern
from megalith.config.train import TrainRun
from megalith.errors import did_you_mean
from megalith.plan.frozen import first_trained_layer, trained_names, with_adapters
from megalith.plan.layers.base import HeldParameter
from megalith.plan.parameters import (
    TABLES,
    ParameterRates,
    held_parameters,
    mup_factors,
)
from megalith.plan.update_rules import rule_of

NAME = re.compile(r"[a-z][a-z0-9_]*")


def named_parameters(model: ModelConfig, lora: LoraConfig | None) -> list[HeldParameter]:
    """Return every parameter of a model, unsharded, and of its adapters, without expert biases."""
    held = held_parameters(model)
    return [one for one in with_adapters(held, model, lora) if one.counts]


def is_trained(one: HeldParameter, optim: OptimConfig, lora: LoraConfig | None) -> bool:
    """Return whether a parameter has gradients; with LoRA, only adapters have."""
    return optim.trains(one.name) if lora is None else not one.frozen


def parameter_rates(
    model: ModelConfig, optim: OptimConfig, name: str, inputs: int
) -> ParameterRates:
    """Return the update rule and the rates of a parameter with `inputs` input dims: of its groups,
    times muP's factors."""
    rate, decay = _find_groups(optim.groups, name, _rate), _find_groups(optim.groups, name, _decay)
    rule = rule_of(name, inputs, optim)
    return mup_factors(model, rule, name, inputs)._replace(
        lr_of=rate[0].name if rate else "",
        decay_of=decay[0].name if decay else "",
        vector_decays=inputs == 0 and matches_any_pattern(name, optim.decayed_vectors),
        rule=rule,
    )


def parameter_rows(run: TrainRun) -> Iterator[dict[str, Plain]]:
    """Yield for every parameter the settings and factors of its learning rate and weight decay."""
    for one in named_parameters(run.model, run.lora):
        rates = parameter_rates(run.model, run.optim, one.name, int(one.matrix))
        row: dict[str, Plain] = {"name": one.name, "numel": one.numel}
        if not is_trained(one, run.optim, run.lora):
            yield row | {"trained": False}
            continue
        decay = rates.decay if one.matrix or rates.vector_decays else 0.0
        yield row | {
            "trained": True,
            "rule": rates.rule,
            "lr": rates.lr_of or "schedule",
            "lr_factor": rates.lr,
            "eps_factor": rates.eps,
            "weight_decay": rates.decay_of or "schedule",
            "weight_decay_factor": decay,
        }


GRAD_NORM_GROUPS = ("embedding", "attention", "mlp", "experts", "norms")
"""Groups of parameters whose gradient norms are logged (observe.grad_norm_by_group)."""


def find_grad_norm_group(name: str) -> int:
    """Return the number of the group in `GRAD_NORM_GROUPS` that a parameter belongs to.

    MoE layers, with their routers, are experts; the output head is part of embedding.

    >>> names = "head.weight", "layers.0.attention.q_norm.weight", "layers.0.moe.router"
    >>> [GRAD_NORM_GROUPS[find_grad_norm_group(name)] for name in names]
    ['embedding', 'norms', 'experts']
    """
    parts = name.split(".")
    if name in (*TABLES, "head.weight"):
        return 0
    if len(parts) > 1 and parts[-2].endswith("norm"):
        return 4
    if "moe" in parts:
        return 3
    return 1 if "attention" in parts or "cross" in parts else 2


# --- rules


def pattern_problems(
    optim: OptimConfig, schedule: ScheduleConfig, model: ModelConfig, lora: LoraConfig | None
) -> list[str]:
    """Return an error text for each broken rule of trained parameters and parameter groups."""
    if optim.trains_all() and not optim.groups and not optim.decayed_vectors:
        return []
    held = named_parameters(model, lora)
    problems = [*_frozen_problems(optim, held, model, lora), *_vector_problems(optim, held)]
    problems += [text for group in optim.groups for text in _group_problems(group, schedule)]
    names = [group.name for group in optim.groups]
    problems += [
        f"optim.groups: two groups are called {name}. Use a name of its own for each."
        for name in dict.fromkeys(name for name in names if names.count(name) > 1)
    ]
    for group in optim.groups:
        problems += _unknown(f"optim.groups[{group.name}].match", group.match, held, model)
    if problems:
        return problems
    moving = [one for one in held if is_trained(one, optim, lora)]
    idle = [text for group in optim.groups for text in _without_effect(group, optim, model, moving)]
    return [*idle, *_conflicts(optim.groups, moving)]


def _frozen_problems(
    optim: OptimConfig, held: Sequence[HeldParameter], model: ModelConfig, lora: LoraConfig | None
) -> Iterator[str]:
    if optim.trains_all():
        return
    chosen = f"optim.trained={list(optim.trained)} and optim.frozen={list(optim.frozen)}"
    if lora is not None:
        yield (
            f"{chosen} with lora.rank={lora.rank}, which trains adapters and nothing else. Choose "
            "with lora.targets "
            f"and lora.layers, and remove optim.trained and optim.frozen."
        )
        return
    problems = [
        *_unknown("optim.trained", optim.trained, held, model),
        *_unknown("optim.frozen", optim.frozen, held, model),
    ]
    yield from problems
    if not problems and not any(optim.trains(one.name) for one in held):
        yield (
            f"{chosen} leave no trained parameter. Remove one of the patterns, or use a "
            "narrower one."
        )
    elif not problems:
        yield from _find_frozen_routers_with_aux_loss(optim, model)


def _find_frozen_routers_with_aux_loss(optim: OptimConfig, model: ModelConfig) -> Iterator[str]:
    """Check that aux losses train their router: of frozen routers they would train the layers below
    instead."""
    if model.moe is None:
        return
    first = first_trained_layer(model, optim)
    routers = [
        f"layers.{layer}.moe.router"
        for layer in range(first, model.num_layers)
        if model.has_experts(layer)
    ]
    if model.has_experts(model.num_layers - 1):
        trained = trained_names(model, optim)
        routers += [
            f"mtp.{depth}.layer.moe.router"
            for depth in range(model.mtp.num_layers)
            if any(_before_router(name, depth) for name in trained)
        ]
    frozen_router = next((name for name in routers if not optim.trains(name)), None)
    for name in ("sequence_coeff", "batch_coeff", "global_batch_coeff", "z_loss_coeff"):
        weight = getattr(model.moe.aux_loss, name)
        if weight > 0 and frozen_router is not None:
            yield (
                f"model.moe.aux_loss.{name}={weight} where {frozen_router} is not trained: the "
                "loss would "
                "move what comes "
                f"before it instead. Set model.moe.aux_loss.{name}=0, or train the router."
            )


def _before_router(name: str, depth: int) -> bool:
    """Return whether the router of MTP layer `depth` depends on a parameter: of earlier MTP layers,
    of the model up to its last norm, or of its own layer up to attention."""
    if not name.startswith("mtp."):
        return name != "head.weight"
    _, number, rest = name.split(".", 2)
    is_after_router = rest.startswith(("layer.moe.", "layer.mlp_post_norm.", "norm."))
    return int(number) < depth or (int(number) == depth and not is_after_router)


def _vector_problems(optim: OptimConfig, held: Sequence[HeldParameter]) -> Iterator[str]:
    vectors = [one.name for one in held if not one.matrix]
    for pattern in optim.decayed_vectors:
        if not any(matches_any_pattern(name, [pattern]) for name in vectors):
            yield (
                f"optim.decayed_vectors={pattern}: no vector has such a name."
                f"{did_you_mean(pattern, _candidates(vectors))} Use names or patterns such as "
                f"{vectors[0]}; matrices "
                f"decay anyway."
            )


def _group_problems(group: GroupConfig, schedule: ScheduleConfig) -> Iterator[str]:
    """Yield errors of one group that hold for every model."""
    where = f"optim.groups[{group.name}]"
    if not NAME.fullmatch(group.name):
        yield (
            f"optim.groups: name={group.name!r} must be small letters, digits and underscores, "
            "such as embedding."
        )
    if not group.match:
        yield (
            f"{where}.match={list(group.match)} fits no parameter. Use one or more names, such "
            "as embed.weight."
        )
    if not any(_rate(group)) and not any(_decay(group)) and group.kind is None:
        yield (
            f"{where} with match={list(group.match)} has no effect. Set {where}.lr, "
            f"{where}.weight_decay or {where}.kind."
        )
    for value, scale, rest in (
        ("lr", "lr_scale", "min_lr"),
        ("weight_decay", "weight_decay_scale", "end_weight_decay"),
    ):
        given, by, end = (getattr(group, field) for field in (value, scale, rest))
        if given is not None and by is not None:
            yield (
                f"{where}.{value}={given} and {where}.{scale}={by} are both set. Remove one of "
                "them."
            )
        if end is not None and given is None:
            yield (
                f"{where}.{rest}={end} has an effect only with {where}.{value}. Set "
                f"{where}.{value} "
                "as well."
            )
    yield from _span_problems(where, group, schedule)


def _span_problems(where: str, group: GroupConfig, schedule: ScheduleConfig) -> Iterator[str]:
    """Yield errors of the start and end values of learning rate and weight decay."""
    if group.lr is not None and group.lr >= 0:
        lowest = schedule.min_lr if group.min_lr is None else group.min_lr
        if lowest > group.lr:
            text = "schedule.min_lr" if group.min_lr is None else f"{where}.min_lr"
            yield (
                f"{where}.lr={group.lr} is below {text}={lowest}. Set {where}.min_lr to "
                f"{group.lr} or less."
            )
        if schedule.warmup_init > group.lr:
            yield (
                f"{where}.lr={group.lr} is below schedule.warmup_init={schedule.warmup_init}, "
                "where all rates start. "
                f"Set schedule.warmup_init to {group.lr} or less."
            )
    if group.min_lr and schedule.style == "constant":
        yield (
            f"{where}.min_lr={group.min_lr} is never reached with schedule.style={schedule.style}. "
            f"Remove it, or choose another style."
        )
    if group.end_weight_decay is not None and schedule.weight_decay_style == "constant":
        yield (
            f"{where}.end_weight_decay={group.end_weight_decay} has no effect with "
            "schedule.weight_decay_style="
            f"{schedule.weight_decay_style}. Remove it, or set schedule.weight_decay_style to "
            "linear or cosine."
        )


def _without_effect(
    group: GroupConfig, optim: OptimConfig, model: ModelConfig, moving: Sequence[HeldParameter]
) -> Iterator[str]:
    """Yield errors of groups that match only frozen parameters, or only parameters without weight
    decay."""
    where, reached = (
        f"optim.groups[{group.name}]",
        [one for one in moving if matches_any_pattern(one.name, group.match)],
    )
    if not reached:
        yield (
            f"{where}.match={list(group.match)} fits only parameters that are not trained. Use the "
            "name of one that "
            f"is, such as {moving[0].name}."
        )
    elif any(_decay(group)) and not any(
        one.matrix or matches_any_pattern(one.name, optim.decayed_vectors) for one in reached
    ):
        yield (
            f"{where} sets the weight decay of {reached[0].name} and other vectors, which do "
            f"not decay. Set optim.decayed_vectors to {list(group.match)}, or remove it."
        )
    elif any(_decay(group)) and not any(_decays(one, optim, model) for one in reached):
        table = next(one.name for one in reached if one.matrix)
        yield (
            f"{where} sets the weight decay of {table}, which does not decay with "
            "model.embedding_init_std="
            f"{model.embedding_init_std}. Remove it, or leave model.embedding_init_std unset."
        )


def _decays(one: HeldParameter, optim: OptimConfig, model: ModelConfig) -> bool:
    """Return whether weight decay applies to a parameter."""
    vector = not one.matrix and not matches_any_pattern(one.name, optim.decayed_vectors)
    return not vector and mup_factors(model, "", one.name, int(one.matrix)).decay > 0


def _conflicts(groups: Sequence[GroupConfig], moving: Sequence[HeldParameter]) -> Iterator[str]:
    """Yield pairs of groups that set different values for the same parameter."""
    quantities = ("learning rate", _rate), ("weight decay", _decay), ("update rule", _kind)
    for what, decides in quantities:
        for one, other in combinations([group for group in groups if any(decides(group))], 2):
            both = next(
                (
                    p.name
                    for p in moving
                    if matches_any_pattern(p.name, one.match)
                    and matches_any_pattern(p.name, other.match)
                ),
                None,
            )
            if both is not None and decides(one) != decides(other):
                yield (
                    f"optim.groups: {one.name} ({_format_values(decides(one))}) and {other.name} "
                    f"({_format_values(decides(other))}) "
                    f"disagree on the {what} of {both}. Use patterns that share no parameter, or "
                    "equal values."
                )


Decided = tuple[str, ...]
"""Settings of a group about one quantity as text, such as `lr=0.001`; empty: unset."""


def _rate(group: GroupConfig) -> Decided:
    return (
        _typed("lr", group.lr),
        _typed("min_lr", group.min_lr),
        _typed("lr_scale", group.lr_scale),
    )


def _decay(group: GroupConfig) -> Decided:
    return (
        _typed("weight_decay", group.weight_decay),
        _typed("end_weight_decay", group.end_weight_decay),
        _typed("weight_decay_scale", group.weight_decay_scale),
    )


def _kind(group: GroupConfig) -> Decided:
    return (_typed("kind", group.kind),)


def _typed(field: str, value: float | str | None) -> str:
    return "" if value is None else f"{field}={value}"


def _format_values(decided: Decided) -> str:
    return ", ".join(text for text in decided if text)


def _find_groups(
    groups: Sequence[GroupConfig], name: str, decides: Callable[[GroupConfig], Decided]
) -> list[GroupConfig]:
    """Return the groups that set a quantity of a parameter."""
    return [
        group for group in groups if any(decides(group)) and matches_any_pattern(name, group.match)
    ]


def _unknown(
    where: str, patterns: Sequence[str], held: Sequence[HeldParameter], model: ModelConfig
) -> Iterator[str]:
    """Yield errors of patterns that match no parameter."""
    names = [one.name for one in held]
    for pattern in patterns:
        if any(matches_any_pattern(name, [pattern]) for name in names):
            continue
        near = did_you_mean(pattern, _candidates(names))
        if pattern == "head.weight" and model.tied_embeddings:
            near = " With model.tied_embeddings=true the head is embed.weight."
        elif ".balancing_" in pattern:
            near = " An expert bias is updated as long as its router is trained."
        yield (
            f"{where}={pattern}: no parameter has such a name.{near} Use names or patterns such "
            f"as {names[0]}."
        )


def _candidates(names: Sequence[str]) -> list[str]:
    """Return names and patterns for suggestions: of the first and last layer, and of parameters
    outside of layers."""
    parts = [name.split(".", 2) for name in names]
    layers = [int(part[1]) for part in parts if part[0] == "layers"]
    ends = {str(layer) for layer in (layers[:1] + layers[-1:])}
    candidates = [
        name
        for name, part in zip(names, parts, strict=True)
        if part[0] != "layers" or part[1] in ends
    ]
    candidates += [f"layers.{layer}.*" for layer in sorted(set(layers))]
    return list(
        dict.fromkeys([*candidates, *(f"*.{part[2]}" for part in parts if part[0] == "layers")])
    )
