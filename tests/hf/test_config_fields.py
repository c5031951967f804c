"""What most families share."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from megalith.config.model import (
    AttentionConfig,
    DropoutConfig,
    MLAConfig,
    ModelConfig,
    MTPConfig,
    RopeConfig,
)
from megalith.errors import ConfigError
from megalith.hf.config_fields import FULL, SLIDING, shortest_pattern, window_arguments
from megalith.hf.families import GEMMA2, GEMMA3, GPT_OSS, LLAMA, QWEN2, QWEN2_MOE, QWEN3, SMOLLM3
from megalith.hf.family import Family, UnexportedFieldsError, canonical, check_all_fields_exported

SAME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "head size": ({"head_dim": 2}, {"head_dim": None}),
    "padding": ({"pad_vocab_to_multiple_of": 8}, {"pad_vocab_to_multiple_of": 64}),
    "dropout": ({"dropout": DropoutConfig(residual=0.1)}, {}),
    "weights of losses": ({"mtp": MTPConfig(loss_weight=0.3)}, {}),
    "a factor that nothing asks for": ({"rope": RopeConfig(factor=3.0)}, {}),
    "default attention factor": (
        {"rope": RopeConfig(scaling="yarn", factor=4.0, attention_factor=0.1 * math.log(4) + 1)},
        {"rope": RopeConfig(scaling="yarn", factor=4.0)},
    ),
    "layers that all turn": ({"rope": RopeConfig(skip=(False, False))}, {}),
    "a theta of no layer": ({"rope": RopeConfig(local_theta=9.0)}, {}),
    "a window of no layer": ({"attention": AttentionConfig(window=3, window_layers=(False,))}, {}),
    "windows everywhere": (
        {"attention": AttentionConfig(window=3)},
        {"attention": AttentionConfig(window=3, window_layers=(True, True))},
    ),
    "default scale": ({"attention": AttentionConfig(scale=2**-0.5)}, {}),
}
OTHER: dict[str, dict[str, Any]] = {
    "scale": {"attention": AttentionConfig(scale=0.5)},
    "window": {"attention": AttentionConfig(window=3)},
    "sinks": {"attention": AttentionConfig(sinks=True)},
    "skip": {"rope": RopeConfig(skip=(False, True))},
    "theta": {"rope": RopeConfig(theta=3.0)},
    "interleaved": {"rope": RopeConfig(interleaved=True)},
    "norm": {"norm": "layer"},
    "logits": {"logit_scale": 0.5},
    "latent": {"mla": MLAConfig(kv_rank=3)},
    "MTP layers": {"mtp": MTPConfig(num_layers=1)},
}


@pytest.mark.parametrize("case", SAME)
def test_equivalent_configs_have_one_canonical_form(case: str, tiny: SimpleNamespace) -> None:
    first, second = (tiny.config(**changes) for changes in SAME[case])
    assert first != second and canonical(first) == canonical(second)


@pytest.mark.parametrize("case", OTHER)
def test_settings_that_change_the_computation_are_not_exported(
    case: str, tiny: SimpleNamespace
) -> None:
    assert canonical(tiny.config(**OTHER[case])) != canonical(tiny.config())
    if case != "theta":
        with pytest.raises(
            ConfigError,
            match=r"LlamaForCausalLM cannot express .* exported as .* Keep the model",
        ):
            LLAMA.write_config(tiny.config(**OTHER[case]))


def test_all_unsupported_settings_are_reported_together(tiny: SimpleNamespace) -> None:
    config = tiny.config(gated=False, logit_softcap=3.0, positions="none")
    with pytest.raises(ConfigError, match="3 settings") as excinfo:
        LLAMA.write_config(config)
    for text in ("model.gated=False", "model.logit_softcap=3.0", "model.positions='none'"):
        assert text in str(excinfo.value)
    assert isinstance(excinfo.value, UnexportedFieldsError) and {*excinfo.value.settings} == {
        "gated",
        "logit_softcap",
        "positions",
    }


def test_biases_of_attention_bias_may_be_exported_as_zeros(tiny: SimpleNamespace) -> None:
    raw = LLAMA.write_config(tiny.config(qkv_bias=True))
    assert raw["attention_bias"] is True
    check_all_fields_exported(raw, tiny.config(output_bias=True), LLAMA)


@pytest.mark.parametrize(
    ("flags", "pattern"),
    [
        ((True, False, True, False, True), (True, False)),
        ((True, True, True), (True,)),
        ((False, True, True), (False, True, True)),
        ((True,), (True,)),
    ],
)
def test_patterns_are_as_short_as_they_can_be(
    flags: tuple[bool, ...], pattern: tuple[bool, ...]
) -> None:
    assert shortest_pattern(flags) == pattern


def test_a_window_that_no_layer_has_is_none() -> None:
    none = {"window": None, "window_layers": ()}
    assert window_arguments(3, (False,)) == window_arguments(None, (True,)) == none
    assert window_arguments(3, (True, True)) == {"window": 3, "window_layers": ()}


def test_null_num_key_value_heads_means_num_heads_and_missing_the_family_default() -> None:
    sizes = {
        "vocab_size": 9,
        "hidden_size": 8,
        "intermediate_size": 5,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }
    family = replace(LLAMA, defaults={"num_key_value_heads": 2})
    assert family.read_config(sizes).num_kv_heads == 2
    assert family.read_config(sizes | {"num_key_value_heads": None}).num_kv_heads == 4
    assert LLAMA.read_config(sizes).num_kv_heads == 4


def test_tied_embeddings_have_no_head_tensor(tiny: SimpleNamespace) -> None:
    assert LLAMA.rules(tiny.config())[-1].name == "lm_head.weight"
    assert LLAMA.rules(tiny.config(tied_embeddings=True))[-1].name == "model.norm.weight"


def test_initialization_and_training_dtypes_are_not_part_of_the_canonical_form() -> None:
    plain = ModelConfig(
        vocab_size=8, hidden_size=8, num_layers=2, num_heads=2, num_kv_heads=1, ffn_hidden_size=8
    )
    changed = replace(
        plain,
        init="xavier_uniform",
        embedding_init_std=0.5,
        init_overrides=(("*.o", 0.1),),
        fp32_residual=True,
    )
    assert canonical(changed) == canonical(plain)
    same, other = (
        replace(plain, attention=AttentionConfig(qk_norm="head", qk_norm_eps=eps))
        for eps in (1e-5, 1e-6)
    )
    assert (
        canonical(same)
        == canonical(replace(plain, attention=AttentionConfig(qk_norm="head")))
        != canonical(other)
    )


WINDOWS: dict[str, Any] = {
    "vocab_size": 32,
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize(
    "family", [QWEN2, QWEN3, QWEN2_MOE, SMOLLM3], ids=lambda family: family.model_type
)
@pytest.mark.parametrize("size", [128, None])
def test_layer_types_that_contradict_the_sliding_window_are_rejected(
    family: Family, size: int | None
) -> None:
    raw = WINDOWS | {
        "use_sliding_window": size is None and family is not QWEN2_MOE,
        "sliding_window": size,
    }
    with pytest.raises(
        ConfigError,
        match="layer_types has 'sliding_attention' for 1 of 2 layers, and use_sliding_win",
    ):
        family.read_config(raw | {"layer_types": [SLIDING, FULL]})
    assert family.read_config(raw | {"layer_types": [FULL, FULL]}).attention.window is None


@pytest.mark.parametrize("family", [GEMMA2, GEMMA3, GPT_OSS], ids=lambda family: family.model_type)
@pytest.mark.parametrize(
    "fields", [{}, {"layer_types": [SLIDING, FULL]}], ids=["default", "layer_types"]
)
def test_sliding_layers_without_a_window_are_rejected(
    family: Family, fields: dict[str, Any]
) -> None:
    raw = WINDOWS | {"sliding_window": None} | fields
    with pytest.raises(
        ConfigError,
        match=r"sliding_window=None, so no window size is set.*or sliding_window to a",
    ):
        family.read_config(raw)
    assert family.read_config(raw | {"layer_types": [FULL, FULL]}).attention.window is None
