"""Rotary positions in config.json."""

import math
import re
from typing import Any

import pytest

from megalith.config.model import RopeConfig
from megalith.errors import ConfigError
from megalith.hf.config_fields import Fields, read_rope, write_rope
from megalith.kernels.rope import attention_factor


def read(raw: dict[str, Any], **options: Any) -> RopeConfig:
    """The positions of a config that has nothing else."""
    fields = Fields(raw)
    rope = read_rope(fields, **{"max_position": 4096, **options})
    fields.raise_problems()
    return rope


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
ROPES = [
    RopeConfig(theta=123.0),
    RopeConfig(scaling="linear", factor=2.0),
    RopeConfig(scaling="dynamic", factor=2.0, original_max_position=4096),
    RopeConfig(
        scaling="llama3",
        factor=4.0,
        low_freq_factor=1.5,
        high_freq_factor=5.0,
        original_max_position=99,
    ),
    RopeConfig(
        scaling="yarn",
        factor=4.0,
        beta_fast=30.0,
        beta_slow=2.0,
        whole_pairs=False,
        attention_factor=1.5,
    ),
    RopeConfig(scaling="yarn", factor=40.0, original_max_position=4096),
    RopeConfig(scaling="longrope", factor=4.0, short_factors=(1.0, 1.5), long_factors=(2.0, 8.0)),
    RopeConfig(
        scaling="longrope",
        short_factors=(1.0,),
        long_factors=(2.0,),
        original_max_position=32,
        attention_factor=1.5,
    ),
]


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("spelling", [("rope_theta", "rope_scaling"), ("rope_parameters",), None])
def test_written_rope_is_read_back_from_either_spelling(
    rope: RopeConfig, spelling: tuple[str, ...] | None
) -> None:
    raw = write_rope(rope)
    assert read({name: raw[name] for name in spelling or raw}) == rope


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
def test_partial_rotary_factor_is_read_only_by_families_that_support_it(spelling: str) -> None:
    raw = write_rope(RopeConfig(fraction=0.25), fraction=True)
    assert read(raw, fraction=1.0).fraction == 0.25
    assert read({"partial_rotary_factor": 0.25}, fraction=1.0) == read(
        {spelling: {"partial_rotary_factor": 0.25}}, fraction=1.0
    )
    assert read({"rotary_pct": 0.5}, fraction=0.25, fraction_name="rotary_pct").fraction == 0.5
    assert read({}, fraction=0.25).fraction == 0.25
    with pytest.raises(ConfigError, match="'partial_rotary_factor': 0.25"):
        read(raw)
    with pytest.raises(ConfigError, match="'partial_rotary_factor': 1.5"):
        read({"partial_rotary_factor": 1.5}, fraction=1.0)


def test_a_mapping_for_each_kind_of_layers_is_read_for_one_of_them() -> None:
    raw = {"rope_parameters": {"full": YARN | {"rope_theta": 5.0}, "near": {"rope_theta": 7.0}}}
    assert read(raw, layer="near") == RopeConfig(theta=7.0)
    assert read(raw, layer="full").scaling == "yarn"
    with pytest.raises(ConfigError, match="'full': {'rope_type': 'yarn'"):
        read(raw)


def test_rope_scaling_applies_only_to_the_scaled_kind_of_layer() -> None:
    raw = {"rope_theta": 5.0, "near_theta": 7.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert read(raw | {"near_theta": None}).scaling == "linear"
    fields = Fields(raw)
    near = read_rope(fields, max_position=1, theta_name="near_theta", layer="near", scaled=False)
    assert near == RopeConfig(theta=7.0)


@pytest.mark.parametrize(
    ("yarn_fields", "factor"),
    [
        ({}, 0.1 * math.log(4) + 1),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        (
            {"mscale": 0.7, "mscale_all_dim": 0.4},
            (0.07 * math.log(4) + 1) / (0.04 * math.log(4) + 1),
        ),
        ({"mscale": 0.7}, 0.1 * math.log(4) + 1),
        ({"mscale": 0.7, "mscale_all_dim": 0}, 0.1 * math.log(4) + 1),
        ({"attention_factor": 1.2, "mscale": 0.7, "mscale_all_dim": 0.4}, 1.2),
    ],
)
def test_yarn_attention_factor_matches_transformers(
    yarn_fields: dict[str, float], factor: float
) -> None:
    assert attention_factor(read({"rope_scaling": YARN | yarn_fields})) == pytest.approx(
        factor, rel=1e-12
    )


def test_yarn_original_length_defaults_to_max_position() -> None:
    assert read({"rope_scaling": {"type": "yarn", "factor": 2.0}}).original_max_position == 4096


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}},
            "'longrope' with {'short_factor': [1.0]",
        ),
        (
            {"rope_scaling": {"type": "linear"}},
            "rope_type='linear' with {'rope_theta': 10000.0} are not supported",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "'factor': 0"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 3}}, "'beta_fast': 3"),
        ({"rope_scaling": YARN | {"truncate": 1}}, "'truncate': 1"),
        ({"rope_scaling": YARN | {"mscale": "1"}}, "'mscale': '1'"),
        ({"rope_theta": -5.0}, "'rope_theta': -5.0"),
        (
            {"rope_theta": 5.0, "rope_parameters": {"rope_theta": 6.0}},
            "disagree. Remove the wrong ones",
        ),
        ({"rope_scaling": YARN, "rope_parameters": YARN | {"factor": 5.0}}, "disagree"),
    ],
)
def test_unsupported_rope_fields_are_rejected_by_name(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as excinfo:
        read(raw)
    assert message in str(excinfo.value)


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("value", [0, False, "", []])
def test_an_empty_value_that_is_no_mapping_is_rejected(name: str, value: Any) -> None:
    with pytest.raises(
        ConfigError, match=f"{name}={re.escape(repr(value))}: expected a mapping, or null"
    ):
        read({name: value})
