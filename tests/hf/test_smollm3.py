"""SmolLM3's config.json and tensors."""

from typing import Any

import pytest

from megalith.errors import ConfigError
from megalith.hf.smollm3 import SMOLLM3, read_config, write_config
from tests.hf.published import check_published, check_rules

RAW: dict[str, Any] = {
    "architectures": ["SmolLM3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "eos_token_id": 128012,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "layer_types": ["full_attention"] * 36,
    "max_position_embeddings": 65536,
    "max_window_layers": 28,
    "mlp_bias": False,
    "model_type": "smollm3",
    "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0] * 9,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 4,
    "pad_token_id": 128004,
    "pretraining_tp": 2,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 5000000.0,
    "sliding_window": None,
    "transformers_version": "4.54.0.dev0",
    "use_cache": False,
    "use_sliding_window": False,
    "vocab_size": 128256,
}


def test_the_published_model_is_read_and_has_as_many_parameters_as_stated() -> None:
    check_published(SMOLLM3, RAW, 3_075_098_624)


def test_one_in_no_rope_layers_means_rotary_embeddings() -> None:
    config = read_config(RAW)
    assert [config.uses_rope(layer) for layer in range(5)] == [True, True, True, False, True]
    assert config.rope.skip == (False, False, False, True)
    without = {name: value for name, value in RAW.items() if name != "no_rope_layers"}
    assert read_config(without) == config, "every fourth by default"
    assert read_config(RAW | {"no_rope_layers": [1] * 36}).rope.skip == ()


def test_windows_are_for_layers_without_positions() -> None:
    raw = {name: value for name, value in RAW.items() if name != "layer_types"}
    config = read_config(raw | {"use_sliding_window": True, "sliding_window": 128})
    assert [config.has_window(layer) for layer in range(4)] == [False, False, False, True]
    assert read_config(write_config(config)) == config


@pytest.mark.parametrize("layers", [[1, 0], [2] * 36, "all"])
def test_a_list_that_does_not_cover_all_layers_is_rejected(layers: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"no_rope_layers=.*: expected 1 or 0 for each of 36 layers"
    ):
        read_config(RAW | {"no_rope_layers": layers})


def test_the_rules_cover_every_parameter() -> None:
    check_rules(SMOLLM3, read_config(RAW | {"num_hidden_layers": 2}))


@pytest.mark.parametrize(
    "switch", [{"use_sliding_window": False}, {"use_sliding_window": None}, {}]
)
def test_sliding_layer_types_without_a_window_are_rejected_by_name(switch: dict[str, Any]) -> None:
    raw = {name: value for name, value in RAW.items() if name != "use_sliding_window"} | switch
    layer_types = ["full_attention", "sliding_attention"] * 18
    with pytest.raises(
        ConfigError, match="layer_types has 'sliding_attention' for 18 of 36 layers"
    ) as error:
        read_config(raw | {"sliding_window": 128, "layer_types": layer_types})
    assert "sliding_window=128" in str(error.value) and "use_sliding_window to true" in str(
        error.value
    )
    config = read_config(
        raw | {"sliding_window": 128, "use_sliding_window": True, "layer_types": layer_types}
    )
    assert [config.has_window(layer) for layer in range(4)] == [False, True, False, True]
