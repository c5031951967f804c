"""GPT-NeoX's config.json and tensors."""

from types import SimpleNamespace
from typing import Any

import pytest

from megalith.errors import ConfigError
from megalith.hf.neox import NEOX, read_config, write_config
from tests.hf.published import check_published, check_rules

RAW: dict[str, Any] = {
    "architectures": ["GPTNeoXForCausalLM"],
    "bos_token_id": 0,
    "eos_token_id": 0,
    "hidden_act": "gelu",
    "hidden_size": 768,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048,
    "model_type": "gpt_neox",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "rotary_emb_base": 10000,
    "rotary_pct": 0.25,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.24.0",
    "use_cache": True,
    "use_parallel_residual": True,
    "vocab_size": 50304,
}


def test_the_published_model_is_read_and_has_as_many_parameters_as_stated() -> None:
    check_published(NEOX, RAW, 162_322_944)  # pythia-160m


@pytest.mark.parametrize("changes", [{}, {"attention_bias": False, "tie_word_embeddings": True}])
def test_its_rules_cover_everything_once(changes: dict[str, Any]) -> None:
    check_rules(NEOX, read_config(RAW | {"num_hidden_layers": 2} | changes))


def test_neox_names_of_rotary_fields_are_read() -> None:
    config = read_config(RAW | {"rotary_pct": 0.5, "rotary_emb_base": 1000})
    assert (config.rope.fraction, config.rope.theta, config.rotary_size()) == (0.5, 1000.0, 32)
    new = {name: value for name, value in RAW.items() if not name.startswith("rotary")}
    assert read_config(new).rope.fraction == 0.25
    given = {"partial_rotary_factor": 0.5, "rope_theta": 1000.0, "rope_type": "default"}
    assert read_config(new | {"rope_parameters": given}) == config


def test_a_model_that_is_no_neox_is_not_written_as_one(tiny: SimpleNamespace) -> None:
    with pytest.raises(
        ConfigError, match=r"model.gated=True: GPTNeoXForCausalLM cannot express this setting"
    ):
        write_config(tiny.config())


def test_layers_one_after_the_other_are_kept() -> None:
    config = read_config(RAW | {"use_parallel_residual": False})
    assert config.block == "sequential" and write_config(config)["use_parallel_residual"] is False
