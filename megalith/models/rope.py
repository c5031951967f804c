"""Rotary positions in config.json: as transformers 4 spells them, and as 5 does; read either, write
both."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from megalith.config.rope import RopeConfig
from megalith.models.fields import Fields

LLAMA3_KEYS = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_max_position",
}
"""llama3 scaling: theirs -> ours; all of them are needed."""

YARN_KEYS = {
    "factor": "factor",
    "original_max_position_embeddings": "original_max_position",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "truncate": "whole_pairs",
    "attention_factor": "attention_factor",
}
"""yarn: theirs -> ours; mscale and mscale_all_dim are another way to say attention_factor."""

LONGROPE_KEYS = {
    "short_factor": "short_factors",
    "long_factor": "long_factors",
    "original_max_position_embeddings": "original_max_position",
    "factor": "factor",
    "attention_factor": "attention_factor",
}
"""longrope: theirs -> ours; without a factor it is the whole context over the original one."""

WANTED = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": tuple(LLAMA3_KEYS),
    "yarn": ("factor",),
    "longrope": tuple(LONGROPE_KEYS)[:3],
}
"""What a kind of scaling must say."""

ALLOWED = {kind: frozenset(wanted) for kind, wanted in WANTED.items()} | {
    "yarn": frozenset((*YARN_KEYS, "mscale", "mscale_all_dim")),
    "longrope": frozenset(LONGROPE_KEYS),
    # Models that were stretched by another rule before keep saying how long their first rows were.
    "dynamic": frozenset(("factor", "original_max_position_embeddings")),
}
"""And what it may say."""


def read_rope(
    fields: Fields,
    *,
    max_position: int,
    theta: float = 10_000.0,
    theta_name: str = "rope_theta",
    fraction: float | None = None,
    fraction_name: str = "partial_rotary_factor",
    layer: str | None = None,
    scaled: bool = True,
) -> RopeConfig:
    """Rotary positions, from `rope_theta` and `rope_scaling` (transformers 4) or `rope_parameters`
    (5).

    `theta` and `fraction` are those of a config without them; with no `fraction` the family turns
    all features or none. `layer`: which of several kinds of layers, where rope_parameters has a
    mapping for each; `scaled`: whether `rope_scaling`, which does not know kinds of layers, is
    meant for it.
    """
    old, new = _mappings(fields, layer, scaled)
    outer = {
        "rope_theta": fields.value(theta_name),
        "partial_rotary_factor": fields.value(fraction_name),
    }
    parts = [
        {key: value for key, value in part.items() if value is not None}
        for part in (outer, old, new)
    ]
    kinds = {str(part.get("rope_type", part.get("type", "default"))) for part in (old, new) if part}
    values: dict[str, Any] = {}
    clash = len(kinds) > 1
    for part in parts:
        clash |= any(
            key in values and values[key] != value for key, value in part.items() if key not in KIND
        )
        values |= {key: value for key, value in part.items() if key not in KIND}
    if clash:
        fields.problems.append(
            f"{theta_name}={outer['rope_theta']}, rope_scaling={dict(old)} and "
            f"rope_parameters={dict(new)} disagree. "
            f"Remove those that are wrong."
        )
        return RopeConfig()
    if fraction is None and values.get("partial_rotary_factor") == 1:
        del values["partial_rotary_factor"]
    kind = kinds.pop() if kinds else "default"
    base: dict[str, Any] = {"theta": values.pop("rope_theta", theta)}
    if fraction is not None:
        base["fraction"] = values.pop("partial_rotary_factor", fraction)
    if not _fits(kind, values) or not _above_zero(base) or base.get("fraction", 1) > 1:
        fields.problems.append(_refusal(kind, values, base))
        return RopeConfig()
    numbers: dict[str, Any] = {name: float(value) for name, value in base.items()}
    return RopeConfig(**numbers, **_scaling(kind, values, max_position))


KIND = ("rope_type", "type")


def _mappings(
    fields: Fields, layer: str | None, scaled: bool
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """rope_scaling and rope_parameters, the latter of one kind of layers."""
    found: list[Mapping[str, Any]] = []
    for name in ("rope_scaling", "rope_parameters"):
        value = fields.value(name)
        value = {} if value is None else value
        if not isinstance(value, Mapping):
            fields.problems.append(f"{name}={value!r}: expected a mapping, or null.")
            value = {}
        if layer is not None and layer in value:
            value = value[layer] if isinstance(value[layer], Mapping) else {}
        elif name == "rope_scaling" and not scaled:
            value = {}
        found.append(value)
    return found[0], found[1]


PER_PAIR = ("short_factor", "long_factor")


def _fits(kind: str, values: Mapping[str, Any]) -> bool:
    """Whether the values are those of the kind, each of its own kind."""
    if (
        kind not in WANTED
        or not set(WANTED[kind]) <= values.keys()
        or not values.keys() <= ALLOWED[kind]
    ):
        return False
    whole = type(values.get("original_max_position_embeddings", 1)) is int
    other = ("truncate", "mscale", "mscale_all_dim", *PER_PAIR)
    numbers = {name: value for name, value in values.items() if name not in other}
    pairs = [values[name] for name in PER_PAIR if name in values]
    if not all(
        isinstance(each, Sequence) and _above_zero({str(i): one for i, one in enumerate(each)})
        for each in pairs
    ):
        return False
    scales = all(type(values.get(name, 0)) in (int, float) for name in ("mscale", "mscale_all_dim"))
    return whole and scales and type(values.get("truncate", True)) is bool and _above_zero(numbers)


def _above_zero(values: Mapping[str, Any]) -> bool:
    return all(type(value) in (int, float) and value > 0 for value in values.values())


def _refusal(kind: str, values: Mapping[str, Any], base: Mapping[str, Any]) -> str:
    told = {"theta": "rope_theta", "fraction": "partial_rotary_factor"}
    wrong = dict(values) | {told[name]: value for name, value in base.items()}
    return (
        f"rotary positions of rope_type={kind!r} with {wrong!s:.200} are not supported: rope_type "
        "must be 'default' "
        "with nothing beside rope_theta, 'linear' or 'dynamic' with factor, 'yarn' with factor "
        "and what it may have, "
        f"'llama3' with {', '.join(LLAMA3_KEYS)}, or 'longrope' with "
        f"{', '.join(WANTED['longrope'])}."
    )


def _scaling(kind: str, values: Mapping[str, Any], max_position: int) -> dict[str, Any]:
    """Our fields of a kind of scaling."""
    match kind:
        case "linear":
            return {"scaling": kind, "factor": float(values["factor"])}
        # whatever it says about its first training, transformers begins at max_position_embeddings
        case "dynamic":
            return {
                "scaling": kind,
                "factor": float(values["factor"]),
                "original_max_position": max_position,
            }
        case "llama3":
            numbers = {ours: float(values[theirs]) for theirs, ours in LLAMA3_KEYS.items()}
            return {
                "scaling": kind,
                **numbers,
                "original_max_position": values["original_max_position_embeddings"],
            }
        case "yarn":
            ours = {ours: values[theirs] for theirs, ours in YARN_KEYS.items() if theirs in values}
            return {
                "scaling": kind,
                "original_max_position": max_position,
                **ours,
                **_sharpness(values),
            }
        case "longrope":
            ours = {
                ours: values[theirs] for theirs, ours in LONGROPE_KEYS.items() if theirs in values
            }
            ours |= {
                name: tuple(map(float, ours[name])) for name in ("short_factors", "long_factors")
            }
            return {"scaling": kind, "factor": max_position / ours["original_max_position"], **ours}
        case _:
            return {}


def _sharpness(values: Mapping[str, Any]) -> dict[str, float]:
    """yarn's attention_factor, where it is not the usual one.

    mscale and mscale_all_dim count only together, as in transformers; the authors' own code lets
    either count alone.
    """
    if "attention_factor" in values or not (values.get("mscale") and values.get("mscale_all_dim")):
        return {}
    stretch = math.log(max(float(values["factor"]), 1.0))
    return {
        "attention_factor": (0.1 * values["mscale"] * stretch + 1)
        / (0.1 * values["mscale_all_dim"] * stretch + 1)
    }


def write_rope(rope: RopeConfig, *, fraction: bool = False) -> dict[str, Any]:
    """Both spellings: transformers 5 reads the last, everything older the others. `fraction`:
    for families that turn a part of the features."""
    kind, values = rope_values(rope)
    part = {"partial_rotary_factor": rope.fraction} if fraction else {}
    return {
        "rope_theta": rope.theta,
        **part,
        "rope_scaling": {"rope_type": kind, **values} if values else None,
        "rope_parameters": {"rope_type": kind, "rope_theta": rope.theta, **part, **values},
    }


def rope_values(rope: RopeConfig) -> tuple[str, dict[str, Any]]:
    """rope_type, and what goes with it."""
    match rope.scaling:
        case "none":
            return "default", {}
        case "linear" | "dynamic":
            return rope.scaling, {"factor": rope.factor}
        case "llama3":
            return rope.scaling, {
                theirs: getattr(rope, ours) for theirs, ours in LLAMA3_KEYS.items()
            }
        case "yarn":
            values = {theirs: getattr(rope, ours) for theirs, ours in YARN_KEYS.items()}
            return rope.scaling, {
                name: value for name, value in values.items() if value is not None
            }
        case "longrope":
            values = {theirs: getattr(rope, ours) for theirs, ours in LONGROPE_KEYS.items()}
            values |= {name: list(values[name]) for name in PER_PAIR}
            return rope.scaling, {
                name: value for name, value in values.items() if value is not None
            }
