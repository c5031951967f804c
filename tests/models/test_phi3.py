"""Phi-3's config.json and tensors."""

from types import SimpleNamespace
from typing import Any

import pytest

from megalith.errors import ConfigError
from megalith.models.phi3 import PHI3, read_config, write_config
from tests.models.published import check_published, check_rules

RAW: dict[str, Any] = {
    "architectures": ["Phi3ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "embd_pdrop": 0.0,
    "eos_token_id": 32000, "hidden_act": "silu", "hidden_size": 3072, "initializer_range": 0.02,
    "intermediate_size": 8192, "max_position_embeddings": 4096, "model_type": "phi3", "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 32, "original_max_position_embeddings": 4096, "pad_token_id": 32000,
    "resid_pdrop": 0.0, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0, "sliding_window": 2047,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.40.2", "use_cache": True,
    "attention_bias": False, "vocab_size": 32064,
}  # fmt: skip


def test_the_published_model_is_read_and_has_as_many_parameters_as_stated() -> None:
    check_published(PHI3, RAW, 3_821_079_552)  # Phi-3-mini-4k


def test_its_rules_cover_everything_once() -> None:
    check_rules(PHI3, read_config(RAW | {"num_hidden_layers": 2, "num_key_value_heads": 8}))


@pytest.mark.parametrize("kind", ["longrope", "su", "yarn", "linear"])
def test_other_rotary_positions_are_refused_by_name(kind: str) -> None:
    scaling = {"type": kind, "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    if kind in ("yarn", "linear"):
        scaling = {"type": kind, "factor": 4.0}
    with pytest.raises(ConfigError, match=f"rope_type='{kind}'"):
        read_config(RAW | {"rope_scaling": scaling})


def test_a_part_of_the_features_may_turn() -> None:
    config = read_config(RAW | {"partial_rotary_factor": 0.75})
    assert config.rope.fraction == 0.75 and read_config(write_config(config)) == config


def test_a_model_that_is_no_phi_is_not_written_as_one(tiny: SimpleNamespace) -> None:
    with pytest.raises(ConfigError, match=r"model.mlp_bias=True: Phi3ForCausalLM has no word for it"):
        write_config(tiny.config(mlp_bias=True))
