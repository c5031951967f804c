"""Phi-3's config.json and tensors."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from megalith.errors import ConfigError
from megalith.hf.phi3 import PHI3, read_config, write_config
from megalith.kernels.rope import attention_factor
from tests.hf.published import check_published, check_rules

RAW: dict[str, Any] = {
    "architectures": ["Phi3ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "embd_pdrop": 0.0,
    "eos_token_id": 32000,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "model_type": "phi3",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096,
    "pad_token_id": 32000,
    "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": 2047,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.2",
    "use_cache": True,
    "attention_bias": False,
    "vocab_size": 32064,
}


def test_the_published_model_is_read_and_has_as_many_parameters_as_stated() -> None:
    check_published(PHI3, RAW, 3_821_079_552)  # Phi-3-mini-4k


def test_its_rules_cover_everything_once() -> None:
    check_rules(PHI3, read_config(RAW | {"num_hidden_layers": 2, "num_key_value_heads": 8}))


@pytest.mark.parametrize(
    "scaling", [{"type": "yarn", "factor": 4.0}, {"type": "linear", "factor": 4.0}]
)
def test_other_rotary_positions_are_refused_by_name(scaling: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match=f"rope_type='{scaling['type']}' are not .* 'default' or 'longrope'"
    ):
        read_config(RAW | {"rope_scaling": scaling})


LONG: dict[str, Any] = RAW | {
    "max_position_embeddings": 131072,
    "sliding_window": 262144,
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.05] * 48,
        "long_factor": [1.0, *range(2, 49)],
    },
}


@pytest.mark.parametrize("kind", ["longrope", "su", "yarn"])
def test_the_long_context_variant_is_read_under_each_of_its_names(kind: str) -> None:
    config = read_config(LONG | {"rope_scaling": LONG["rope_scaling"] | {"type": kind}})
    rope = config.rope
    assert (rope.scaling, rope.factor, rope.original_max_position) == ("longrope", 32.0, 4096)
    assert rope.short_factors == (1.05,) * 48 and rope.long_factors == tuple(
        map(float, range(1, 49))
    )
    assert attention_factor(rope) == pytest.approx(math.sqrt(1 + math.log(32) / math.log(4096)))
    assert read_config(write_config(config)) == config


def test_the_long_context_variant_is_written_as_published() -> None:
    check_published(PHI3, LONG, 3_821_079_552)  # Phi-3-mini-128k
    written = write_config(read_config(LONG))
    assert (
        written["rope_scaling"] == LONG["rope_scaling"]
    )  # transformers 4 allows nothing beside it
    assert written["original_max_position_embeddings"] == 4096
    assert written["rope_parameters"]["original_max_position_embeddings"] == 4096


@pytest.mark.parametrize(
    "wrong",
    [
        {"short_factor": 1.0},
        {"long_factor": [0.0] * 48},
        {"long_factor": ["a"] * 48},
        {"short_mscale": 1.1},
    ],
)
def test_invalid_longrope_factors_are_rejected(wrong: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError,
        match="or 'longrope' with short_factor, long_factor, original_max_position_embedd",
    ):
        read_config(LONG | {"rope_scaling": LONG["rope_scaling"] | wrong})


def test_longrope_attention_factor_that_differs_from_the_default_is_rejected() -> None:
    config = read_config(LONG)
    with pytest.raises(
        ConfigError,
        match=r"model.rope.attention_factor=1.5: Phi3ForCausalLM cannot express this setting",
    ):
        write_config(replace(config, rope=replace(config.rope, attention_factor=1.5)))


def test_a_part_of_the_features_may_turn() -> None:
    config = read_config(RAW | {"partial_rotary_factor": 0.75})
    assert config.rope.fraction == 0.75 and read_config(write_config(config)) == config


def test_a_model_that_is_no_phi_is_not_written_as_one(tiny: SimpleNamespace) -> None:
    with pytest.raises(
        ConfigError, match=r"model.mlp_bias=True: Phi3ForCausalLM cannot express this setting"
    ):
        write_config(tiny.config(mlp_bias=True))
