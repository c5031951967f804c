"""Fields of rotary embeddings in config.json, in the formats of transformers 4 and 5: either is
read, both are written."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from megalith.config.model import RopeConfig
from megalith.hf.fields import Fields

LLAMA3_KEYS = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_max_position",
}
"""llama3 scaling: Hugging Face field -> RopeConfig field; all are required."""

YARN_KEYS = {
    "factor": "factor",
    "original_max_position_embeddings": "original_max_position",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "truncate": "whole_pairs",
    "attention_factor": "attention_factor",
}
"""yarn: Hugging Face field -> RopeConfig field; mscale and mscale_all_dim also determine
attention_factor."""

LONGROPE_KEYS = {
    "short_factor": "short_factors",
    "long_factor": "long_factors",
    "original_max_position_embeddings": "original_max_position",
    "factor": "factor",
    "attention_factor": "attention_factor",
}
"""longrope: Hugging Face field -> RopeConfig field; factor defaults to the context length over the
original one."""

WANTED = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": tuple(LLAMA3_KEYS),
    "yarn": ("factor",),
    "longrope": tuple(LONGROPE_KEYS)[:3],
}
"""Kind of scaling -> required fields."""

ALLOWED = {kind: frozenset(wanted) for kind, wanted in WANTED.items()} | {
    "yarn": frozenset((*YARN_KEYS, "mscale", "mscale_all_dim")),
    "longrope": frozenset(LONGROPE_KEYS),
    # Models that had another scaling before keep their original context length.
    "dynamic": frozenset(("factor", "original_max_position_embeddings")),
}
"""Kind of scaling -> allowed fields."""


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
    """Return the RopeConfig from `rope_theta` and `rope_scaling` (transformers 4) or
    `rope_parameters` (5).

    `theta` and `fraction` are defaults; without `fraction` the family rotates all features.
    `layer`: the kind of layer, if rope_parameters has a mapping for each; `scaled`: whether
    `rope_scaling` applies to that kind.
    """
    old, new = _mappings(fields, layer, scaled)
    outer = {
        "rope_theta": fields.read_value(theta_name),
        "partial_rotary_factor": fields.read_value(fraction_name),
    }
    mappings = [
        {key: value for key, value in mapping.items() if value is not None}
        for mapping in (outer, old, new)
    ]
    kinds = {
        str(mapping.get("rope_type", mapping.get("type", "default")))
        for mapping in (old, new)
        if mapping
    }
    values: dict[str, Any] = {}
    has_conflict = len(kinds) > 1
    for mapping in mappings:
        has_conflict |= any(
            key in values and values[key] != value
            for key, value in mapping.items()
            if key not in KIND
        )
        values |= {key: value for key, value in mapping.items() if key not in KIND}
    if has_conflict:
        fields.problems.append(
            f"{theta_name}={outer['rope_theta']}, rope_scaling={dict(old)} and "
            f"rope_parameters={dict(new)} disagree. "
            f"Remove the wrong ones."
        )
        return RopeConfig()
    if fraction is None and values.get("partial_rotary_factor") == 1:
        del values["partial_rotary_factor"]
    kind = kinds.pop() if kinds else "default"
    base: dict[str, Any] = {"theta": values.pop("rope_theta", theta)}
    if fraction is not None:
        base["fraction"] = values.pop("partial_rotary_factor", fraction)
    if not _is_valid(kind, values) or not _above_zero(base) or base.get("fraction", 1) > 1:
        fields.problems.append(_describe_problem(kind, values, base))
        return RopeConfig()
    numbers: dict[str, Any] = {name: float(value) for name, value in base.items()}
    return RopeConfig(**numbers, **_scaling(kind, values, max_position))


KIND = ("rope_type", "type")


def _mappings(
    fields: Fields, layer: str | None, scaled: bool
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return rope_scaling and rope_parameters, the latter for one kind of layer."""
    mappings: list[Mapping[str, Any]] = []
    for name in ("rope_scaling", "rope_parameters"):
        value = fields.read_value(name)
        value = {} if value is None else value
        if not isinstance(value, Mapping):
            fields.problems.append(f"{name}={value!r}: expected a mapping, or null.")
            value = {}
        if layer is not None and layer in value:
            value = value[layer] if isinstance(value[layer], Mapping) else {}
        elif name == "rope_scaling" and not scaled:
            value = {}
        mappings.append(value)
    return mappings[0], mappings[1]


PER_PAIR = ("short_factor", "long_factor")


def _is_valid(kind: str, values: Mapping[str, Any]) -> bool:
    """Return whether the values are valid for the kind of scaling."""
    if (
        kind not in WANTED
        or not set(WANTED[kind]) <= values.keys()
        or not values.keys() <= ALLOWED[kind]
    ):
        return False
    is_length_int = type(values.get("original_max_position_embeddings", 1)) is int
    not_scalars = ("truncate", "mscale", "mscale_all_dim", *PER_PAIR)
    numbers = {name: value for name, value in values.items() if name not in not_scalars}
    pairs = [values[name] for name in PER_PAIR if name in values]
    if not all(
        isinstance(factors, Sequence)
        and _above_zero({str(i): factor for i, factor in enumerate(factors)})
        for factors in pairs
    ):
        return False
    are_mscales_numbers = all(
        type(values.get(name, 0)) in (int, float) for name in ("mscale", "mscale_all_dim")
    )
    return (
        is_length_int
        and are_mscales_numbers
        and type(values.get("truncate", True)) is bool
        and _above_zero(numbers)
    )


def _above_zero(values: Mapping[str, Any]) -> bool:
    return all(type(value) in (int, float) and value > 0 for value in values.values())


def _describe_problem(kind: str, values: Mapping[str, Any], base: Mapping[str, Any]) -> str:
    hf_names = {"theta": "rope_theta", "fraction": "partial_rotary_factor"}
    shown = dict(values) | {hf_names[name]: value for name, value in base.items()}
    return (
        f"rotary positions of rope_type={kind!r} with {shown!s:.200} are not supported: rope_type "
        "must be 'default' with only rope_theta, 'linear' or 'dynamic' with factor, "
        "'yarn' with factor and its optional fields, "
        f"'llama3' with {', '.join(LLAMA3_KEYS)}, or 'longrope' with "
        f"{', '.join(WANTED['longrope'])}."
    )


def _scaling(kind: str, values: Mapping[str, Any], max_position: int) -> dict[str, Any]:
    """Return the fields of RopeConfig for a kind of scaling."""
    match kind:
        case "linear":
            return {"scaling": kind, "factor": float(values["factor"])}
        # transformers scales beyond max_position_embeddings, whatever the original length is
        case "dynamic":
            return {
                "scaling": kind,
                "factor": float(values["factor"]),
                "original_max_position": max_position,
            }
        case "llama3":
            numbers = {ours: float(values[hf_name]) for hf_name, ours in LLAMA3_KEYS.items()}
            return {
                "scaling": kind,
                **numbers,
                "original_max_position": values["original_max_position_embeddings"],
            }
        case "yarn":
            ours = {
                ours: values[hf_name] for hf_name, ours in YARN_KEYS.items() if hf_name in values
            }
            return {
                "scaling": kind,
                "original_max_position": max_position,
                **ours,
                **_attention_factor(values),
            }
        case "longrope":
            ours = {
                ours: values[hf_name]
                for hf_name, ours in LONGROPE_KEYS.items()
                if hf_name in values
            }
            ours |= {
                name: tuple(map(float, ours[name])) for name in ("short_factors", "long_factors")
            }
            return {"scaling": kind, "factor": max_position / ours["original_max_position"], **ours}
        case _:
            return {}


def _attention_factor(values: Mapping[str, Any]) -> dict[str, float]:
    """Return attention_factor of yarn from mscale and mscale_all_dim, if both are given.

    transformers ignores one without the other, unlike the original code.
    """
    if "attention_factor" in values or not (values.get("mscale") and values.get("mscale_all_dim")):
        return {}
    log_factor = math.log(max(float(values["factor"]), 1.0))
    return {
        "attention_factor": (0.1 * values["mscale"] * log_factor + 1)
        / (0.1 * values["mscale_all_dim"] * log_factor + 1)
    }


def write_rope(rope: RopeConfig, *, fraction: bool = False) -> dict[str, Any]:
    """Return the fields for transformers 4 and 5. `fraction`: for families that rotate a part of
    the features."""
    kind, values = rope_values(rope)
    part = {"partial_rotary_factor": rope.fraction} if fraction else {}
    return {
        "rope_theta": rope.theta,
        **part,
        "rope_scaling": {"rope_type": kind, **values} if values else None,
        "rope_parameters": {"rope_type": kind, "rope_theta": rope.theta, **part, **values},
    }


def rope_values(rope: RopeConfig) -> tuple[str, dict[str, Any]]:
    """Return rope_type and its other fields."""
    match rope.scaling:
        case "none":
            return "default", {}
        case "linear" | "dynamic":
            return rope.scaling, {"factor": rope.factor}
        case "llama3":
            return rope.scaling, {
                hf_name: getattr(rope, name) for hf_name, name in LLAMA3_KEYS.items()
            }
        case "yarn":
            values = {hf_name: getattr(rope, name) for hf_name, name in YARN_KEYS.items()}
            return rope.scaling, {
                name: value for name, value in values.items() if value is not None
            }
        case "longrope":
            values = {hf_name: getattr(rope, name) for hf_name, name in LONGROPE_KEYS.items()}
            values |= {name: list(values[name]) for name in PER_PAIR}
            return rope.scaling, {
                name: value for name, value in values.items() if value is not None
            }
