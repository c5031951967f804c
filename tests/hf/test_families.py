"""Rows of the table of families: published models, tensors, and fields of single families."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from megalith.config.model import AttentionConfig, ModelConfig
from megalith.config.moe import RouterConfig
from megalith.errors import ConfigError
from megalith.hf.config_fields import ConfigField, Fields, llama_fields
from megalith.hf.families import (
    GEMMA,
    GEMMA2,
    GEMMA3,
    GPT2,
    GPT_OSS,
    GRANITE,
    MISTRAL,
    MIXTRAL,
    NEOX,
    OLMO2,
    OLMOE,
    PHI3,
    QWEN2,
    QWEN2_MOE,
    QWEN3,
    QWEN3_MOE,
    SMOLLM3,
    STARCODER2,
)
from megalith.hf.family import Family
from megalith.hf.tensor_rules import (
    ATTENTION,
    GATED_MLP,
    INPUT_NORM,
    group_by_parameter,
    llama_tensors,
    rms_norm,
)
from megalith.kernels.rope import attention_factor
from tests.cases import loop_over
from tests.hf import published
from tests.hf.published import PUBLISHED, check_published, check_rules

RawConfig = dict[str, Any]  # config.json


def without(raw: RawConfig, *names: str) -> RawConfig:
    """Return a config.json without some fields."""
    return {name: value for name, value in raw.items() if name not in names}


# --- all families


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_model_has_its_number_of_parameters_and_survives_a_round_trip(name: str) -> None:
    model = PUBLISHED[name]
    check_published(model.family, model.raw, model.num_parameters, reworded=model.reworded)


TWO_LAYERS: RawConfig = {"num_hidden_layers": 2}
FEW_EXPERTS: RawConfig = {"num_hidden_layers": 1, "num_experts": 4, "num_experts_per_tok": 2}
TINY_GPT2: RawConfig = {
    "vocab_size": 37,
    "n_embd": 12,
    "n_layer": 2,
    "n_head": 3,
    "n_positions": 16,
    "n_inner": 10,
}
SMALL: dict[str, tuple[Family, RawConfig]] = {
    "mistral": (MISTRAL, published.MISTRAL_7B | TWO_LAYERS),
    "qwen2": (QWEN2, published.QWEN2_0_5B | TWO_LAYERS),
    "qwen3": (QWEN3, published.QWEN3_0_6B | TWO_LAYERS),
    "gemma": (GEMMA, published.GEMMA_2B | TWO_LAYERS),
    "gemma2": (GEMMA2, published.GEMMA2_2B | TWO_LAYERS),
    "gemma3": (GEMMA3, published.GEMMA3_1B | TWO_LAYERS),
    "olmo2": (OLMO2, published.OLMO2_1B | TWO_LAYERS | {"num_key_value_heads": 4}),
    "smollm3": (SMOLLM3, published.SMOLLM3_3B | TWO_LAYERS),
    "granite": (GRANITE, published.GRANITE_2B | TWO_LAYERS),
    "phi3": (PHI3, published.PHI3_MINI_4K | TWO_LAYERS | {"num_key_value_heads": 8}),
    "starcoder2 with biases": (
        STARCODER2,
        published.STARCODER2_3B | TWO_LAYERS | {"use_bias": True, "tie_word_embeddings": True},
    ),
    "starcoder2 without biases": (
        STARCODER2,
        published.STARCODER2_3B | TWO_LAYERS | {"use_bias": False, "tie_word_embeddings": False},
    ),
    "gpt2, untied": (GPT2, TINY_GPT2 | {"tie_word_embeddings": False}),
    "gpt_neox": (NEOX, published.PYTHIA_160M | TWO_LAYERS),
    "gpt_neox without biases": (
        NEOX,
        published.PYTHIA_160M | TWO_LAYERS | {"attention_bias": False, "tie_word_embeddings": True},
    ),
    "mixtral": (
        MIXTRAL,
        published.MIXTRAL_8X7B | {"num_hidden_layers": 1, "num_local_experts": 3},
    ),
    "olmoe": (OLMOE, published.OLMOE_7B | FEW_EXPERTS),
    "qwen2_moe": (QWEN2_MOE, published.QWEN1_5_MOE | FEW_EXPERTS),
    "qwen3_moe with dense layers": (
        QWEN3_MOE,
        published.QWEN3_30B_A3B | FEW_EXPERTS | {"num_hidden_layers": 2, "mlp_only_layers": [0]},
    ),
    "gpt_oss": (
        GPT_OSS,
        published.GPT_OSS_20B
        | {"num_hidden_layers": 2, "num_local_experts": 4, "layer_types": None},
    ),
}


@pytest.mark.parametrize("name", SMALL)
def test_tensor_rules_cover_every_element_of_every_parameter_once(name: str) -> None:
    family, raw = SMALL[name]
    check_rules(family, family.read_config(raw))


def shapes(family: Family, raw: RawConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors by name, without the prefix of the first layer."""
    rules = family.rules(family.read_config(raw))
    return {rule.name.removeprefix("model.layers.0."): rule.shape for rule in rules}


REJECTED_FIELDS: tuple[tuple[str, RawConfig, str], ...] = (
    ("mistral_7b", {"attention_bias": True}, "attention_bias=True: unknown field, which may chan"),
    (
        "qwen2_0_5b",
        {"layer_types": ["chunked"]},
        "layer_types=['chunked']: expected 'sliding_attention' or 'full_attention'",
    ),
    (
        "gemma2_2b",
        {"sliding_window_size": 2048},
        "sliding_window_size=2048 is not supported: it must be 4096",
    ),
    (
        "gemma3_1b",
        {"attn_logit_softcapping": 50.0},
        "attn_logit_softcapping=50.0: transformers ignores it",
    ),
    (
        "phi3_mini",
        {"rope_scaling": {"type": "yarn", "factor": 4.0}},
        "rope_type='yarn' are not supported in Phi-3: rope_type must be 'default' or 'longrope'",
    ),
    (
        "phi3_mini",
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
        "rope_type='linear' are not supported in Phi-3: rope_type must be 'default' or 'longrope'",
    ),
    (
        "starcoder2_3b",
        {"norm_type": "rms_norm"},
        "norm_type='rms_norm' is not supported: it must be 'layer_norm'",
    ),
    (
        "gpt2_124m",
        {"scale_attn_by_inverse_layer_idx": True},
        "scale_attn_by_inverse_layer_idx=True is not supported: it must be False",
    ),
    (
        "gpt2_124m",
        {"scale_attn_weights": False},
        "scale_attn_weights=False is not supported: it must be True",
    ),
    (
        "gpt2_124m",
        {"add_cross_attention": True},
        "add_cross_attention=True is not supported: it must be False",
    ),
    ("olmoe_7b", {"clip_qkv": 8.0}, "clip_qkv=8.0 is not supported: it must be None"),
    (
        "qwen3_30b_a3b",
        {"mlp_only_layers": [48]},
        "mlp_only_layers=[48]: expected numbers of layers, from 0 to 47",
    ),
    ("qwen3_30b_a3b", {"num_local_experts": 64}, "these numbers of experts differ"),
    (
        "gpt_oss_20b",
        {"swiglu_alpha": 1.5},
        "swiglu_alpha=1.5 is not supported: it must be 1.702",
    ),
    (
        "gpt_oss_20b",
        {"experts_per_token": 2},
        "num_experts_per_tok=4, experts_per_token=2: they differ",
    ),
)


@pytest.mark.parametrize(("name", "fields", "message"), REJECTED_FIELDS)
def test_field_that_changes_the_computation_is_rejected(
    name: str, fields: RawConfig, message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        PUBLISHED[name].family.read_config(PUBLISHED[name].raw | fields)
    assert message in str(error.value)


REJECTED_MODELS: tuple[tuple[Family, dict[str, Any], str], ...] = (
    (PHI3, {"mlp_bias": True}, "model.mlp_bias=True: Phi3ForCausalLM cannot express this setting"),
    (STARCODER2, {}, "model.norm='rms': Starcoder2ForCausalLM cannot express this setting"),
    (GPT2, {}, "model.positions='rope': GPT2LMHeadModel cannot express this setting"),
    (NEOX, {}, "model.gated=True: GPTNeoXForCausalLM cannot express this setting"),
    (MIXTRAL, {}, "model.moe=null: MixtralForCausalLM needs a mixture of experts"),
    (GPT_OSS, {}, "model.moe=null: GptOssForCausalLM needs a mixture of experts"),
)


@pytest.mark.parametrize(("family", "changes", "message"), REJECTED_MODELS)
def test_model_of_another_family_is_not_exported(
    family: Family, changes: dict[str, Any], message: str, tiny: SimpleNamespace
) -> None:
    with pytest.raises(ConfigError) as error:
        family.write_config(tiny.config(**changes))
    assert message in str(error.value)


# --- a new family


NOVEL = Family(
    architecture="NovelForCausalLM",
    model_type="novel",
    fields=llama_fields(
        ConfigField("logit_multiplier", "logit_scale", Fields.read_number, 1.0),
        without=("attention_bias",),
    ),
    defaults={"max_position_embeddings": 4096, "num_key_value_heads": 2},
    settings={"attention.qk_norm": "head", "norm_placement": "around"},
    tensors=llama_tensors(
        INPUT_NORM,
        ATTENTION,
        rms_norm("attention_out_norm", "attention_post_norm"),
        rms_norm("mlp_in_norm", "mlp_norm"),
        GATED_MLP,
        rms_norm("mlp_out_norm", "mlp_post_norm"),
    ),
)
"""A family of known parts: one row."""


def test_new_family_of_known_parts_is_one_row() -> None:
    sizes = {
        "vocab_size": 37,
        "hidden_size": 12,
        "intermediate_size": 10,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
    }
    config = NOVEL.read_config(sizes | {"logit_multiplier": 0.25})
    assert config == ModelConfig(
        vocab_size=37,
        hidden_size=12,
        num_layers=2,
        num_heads=6,
        num_kv_heads=2,
        ffn_hidden_size=10,
        max_seq_len=4096,
        norm_eps=1e-6,
        logit_scale=0.25,
        norm_placement="around",
        attention=AttentionConfig(qk_norm="head"),
    )
    raw = NOVEL.write_config(config)
    assert raw["model_type"] == "novel" and raw["logit_multiplier"] == 0.25
    assert NOVEL.read_config(json.loads(json.dumps(raw))) == config
    check_rules(NOVEL, config)
    names = [rule.name for rule in NOVEL.rules(config)]
    assert "model.layers.1.mlp_in_norm.weight" in names
    assert "model.layers.1.self_attn.q_norm.weight" in names
    with pytest.raises(ConfigError, match="attention_bias=True: unknown field"):
        NOVEL.read_config(sizes | {"attention_bias": True})
    with pytest.raises(ConfigError, match=r"model.norm='layer': NovelForCausalLM cannot express"):
        NOVEL.write_config(replace(config, norm="layer"))


# --- Mistral, Qwen2, Qwen3


def test_mistral_has_the_window_in_every_layer_and_null_means_none() -> None:
    config = MISTRAL.read_config(published.MISTRAL_7B)
    assert [config.has_window(layer) for layer in (0, 31)] == [True, True]
    assert config.attention.window == 4096
    assert MISTRAL.read_config(published.MISTRAL_7B_V3).attention.window is None
    by_default = MISTRAL.read_config(without(published.MISTRAL_7B_V3, "sliding_window"))
    assert by_default == MISTRAL.read_config(published.MISTRAL_7B_V3 | {"sliding_window": 4096})


def test_qwen2_has_biases_of_queries_keys_and_values_only() -> None:
    config = QWEN2.read_config(published.QWEN2_0_5B | {"num_hidden_layers": 1})
    biases = [
        rule.name.split(".")[-2] for rule in QWEN2.rules(config) if rule.name.endswith("bias")
    ]
    assert biases == ["q_proj", "k_proj", "v_proj"]
    with pytest.raises(
        ConfigError,
        match="model.qkv_bias=False: Qwen2ForCausalLM cannot express .* exported as True",
    ):
        QWEN2.write_config(replace(config, qkv_bias=False))


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({}, ()),
        ({"use_sliding_window": True, "max_window_layers": 22}, (22, 23)),
        ({"use_sliding_window": True, "max_window_layers": 0}, tuple(range(24))),
        (
            {
                "use_sliding_window": True,
                "layer_types": ["full_attention"] * 23 + ["sliding_attention"],
            },
            (23,),
        ),
        ({"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, ()),
    ],
)
def test_qwen2_windows_follow_from_switch_size_and_layers(
    fields: RawConfig, windows: tuple[int, ...]
) -> None:
    config = QWEN2.read_config(published.QWEN2_0_5B | fields)
    assert tuple(layer for layer in range(24) if config.has_window(layer)) == windows
    assert QWEN2.read_config(QWEN2.write_config(config)) == config


def test_qwen3_qk_norm_has_one_weight_for_all_heads() -> None:
    names = shapes(QWEN3, published.QWEN3_0_6B | {"num_hidden_layers": 1})
    norms = {name: shape for name, shape in names.items() if "q_norm" in name or "k_norm" in name}
    assert norms == {f"self_attn.{word}_norm.weight": (128,) for word in "qk"}


def test_qwen3_default_head_dim_is_128() -> None:
    raw = without(published.QWEN3_0_6B, "head_dim")
    assert QWEN3.read_config(raw).head_size() == 128 != 1024 // 16


def test_qwen3_context_extension_is_read_as_yarn() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    rope = QWEN3.read_config(published.QWEN3_0_6B | {"rope_scaling": yarn}).rope
    assert (rope.scaling, rope.factor, rope.original_max_position) == ("yarn", 4.0, 32768)
    assert rope.theta == 1e6


# --- Gemma


@pytest.mark.parametrize(
    ("fields", "activation"),
    [
        ({"hidden_act": "gelu"}, "gelu_tanh"),
        ({"hidden_act": "gelu", "hidden_activation": None}, "gelu_tanh"),
        ({"hidden_act": "silu", "hidden_activation": "gelu_pytorch_tanh"}, "gelu_tanh"),
        ({"hidden_act": "relu"}, "relu"),
    ],
)
def test_gemma_gelu_means_the_tanh_approximation(fields: RawConfig, activation: str) -> None:
    assert GEMMA.read_config(published.GEMMA_2B | fields).activation == activation


def test_gemma_defaults_are_tied_scaled_embeddings_and_zero_centered_norms() -> None:
    config = GEMMA.read_config(published.GEMMA_2B)
    assert config.tied_embeddings and config.zero_centered_gamma
    assert config.embedding_scale == 2048**0.5
    assert GEMMA.write_config(config)["hidden_activation"] == "gelu_pytorch_tanh"


def test_gemma2_has_a_window_in_every_other_layer_from_the_first() -> None:
    config = GEMMA2.read_config(published.GEMMA2_2B)
    assert [config.has_window(layer) for layer in range(4)] == [True, False, True, False]
    assert (config.attention.softcap, config.logit_softcap) == (50.0, 30.0)


def test_gemma2_attention_scale_comes_from_query_pre_attn_scalar() -> None:
    config = GEMMA2.read_config(published.GEMMA2_27B)
    assert config.attention.scale == 1 / 12 != 128**-0.5
    assert GEMMA2.write_config(config)["query_pre_attn_scalar"] == 144


def test_gemma2_post_norm_has_the_name_of_the_second_pre_norm_of_llama() -> None:
    rules = GEMMA2.rules(GEMMA2.read_config(published.GEMMA2_2B | {"num_hidden_layers": 1}))
    names = {rule.parameter: rule.name.removeprefix("model.layers.0.") for rule in rules}
    assert names["layers.0.attention_post_norm.weight"] == "post_attention_layernorm.weight"
    assert names["layers.0.mlp_norm.weight"] == "pre_feedforward_layernorm.weight"


def test_gemma3_has_a_window_and_a_theta_of_its_own_in_five_of_six_layers() -> None:
    for raw in (published.GEMMA3_1B, published.GEMMA3_270M):
        config = GEMMA3.read_config(raw)
        assert [config.has_window(layer) for layer in range(7)] == [True] * 5 + [False, True]
        assert (config.rope.theta, config.rope.local_theta) == (1e6, 1e4)


@loop_over(
    "fields",
    [
        {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {
            "rope_theta": None,
            "rope_local_base_freq": None,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ],
)
def test_gemma3_rope_scaling_applies_only_to_full_attention(fields: RawConfig) -> None:
    config = GEMMA3.read_config(published.GEMMA3_1B | fields)
    rope = config.rope
    assert (rope.scaling, rope.factor, rope.local_theta) == ("linear", 8.0, 1e4)
    assert GEMMA3.read_config(GEMMA3.write_config(config)) == config


def test_gemma3_rope_scaling_of_sliding_layers_is_rejected() -> None:
    kinds = {
        "full_attention": {"rope_theta": 1e6},
        "sliding_attention": {"rope_type": "linear", "factor": 2.0},
    }
    raw = {name: value for name, value in published.GEMMA3_1B.items() if name[:4] != "rope"}
    with pytest.raises(
        ConfigError, match="rope_type='linear' for sliding_attention is not supported"
    ):
        GEMMA3.read_config(raw | {"rope_parameters": kinds})


# --- OLMo 2, SmolLM3, Granite


def test_olmo2_has_post_norms_and_qk_norm_over_all_heads() -> None:
    changes = {"num_hidden_layers": 1, "num_key_value_heads": 4}
    sizes = shapes(OLMO2, published.OLMO2_1B | changes)
    assert sizes["self_attn.q_norm.weight"] == (2048,)
    assert sizes["self_attn.k_norm.weight"] == (512,)
    assert "input_layernorm.weight" not in sizes
    assert sizes["post_feedforward_layernorm.weight"] == (2048,)


def test_smollm3_one_in_no_rope_layers_means_rope() -> None:
    config = SMOLLM3.read_config(published.SMOLLM3_3B)
    assert [config.uses_rope(layer) for layer in range(5)] == [True, True, True, False, True]
    assert config.rope.skip == (False, False, False, True)
    by_default = SMOLLM3.read_config(without(published.SMOLLM3_3B, "no_rope_layers"))
    assert by_default == config
    all_rope = SMOLLM3.read_config(published.SMOLLM3_3B | {"no_rope_layers": [1] * 36})
    assert all_rope.rope.skip == ()


def test_smollm3_default_windows_are_in_layers_without_rope() -> None:
    raw = without(published.SMOLLM3_3B, "layer_types")
    config = SMOLLM3.read_config(raw | {"use_sliding_window": True, "sliding_window": 128})
    assert [config.has_window(layer) for layer in range(4)] == [False, False, False, True]
    assert SMOLLM3.read_config(SMOLLM3.write_config(config)) == config


@loop_over("layers", [[1, 0], [2] * 36, "all"])
def test_smollm3_list_that_does_not_cover_all_layers_is_rejected(layers: object) -> None:
    with pytest.raises(
        ConfigError, match=r"no_rope_layers=.*: expected 1 or 0 for each of 36 layers"
    ):
        SMOLLM3.read_config(published.SMOLLM3_3B | {"no_rope_layers": layers})


@loop_over("switch", [{"use_sliding_window": False}, {"use_sliding_window": None}, {}])
def test_smollm3_sliding_layer_types_without_a_window_are_rejected(switch: RawConfig) -> None:
    layer_types = ["full_attention", "sliding_attention"] * 18
    raw = without(published.SMOLLM3_3B, "use_sliding_window") | switch
    raw |= {"sliding_window": 128, "layer_types": layer_types}
    with pytest.raises(
        ConfigError, match="layer_types has 'sliding_attention' for 18 of 36 layers"
    ) as error:
        SMOLLM3.read_config(raw)
    assert "sliding_window=128" in str(error.value)
    assert "use_sliding_window to true" in str(error.value)
    config = SMOLLM3.read_config(raw | {"use_sliding_window": True})
    assert [config.has_window(layer) for layer in range(4)] == [False, True, False, True]


def test_granite_multipliers_and_dropout_are_read() -> None:
    config = GRANITE.read_config(published.GRANITE_2B)
    assert (config.embedding_scale, config.residual_scale) == (12.0, 0.22)
    assert (config.logit_scale, config.attention.scale) == (1 / 8, 1 / 64)
    assert config.dropout.attention == 0.1


def test_granite_default_attention_multiplier_is_one() -> None:
    raw = without(published.GRANITE_2B, "attention_multiplier")
    assert GRANITE.read_config(raw).attention.scale == 1.0


@loop_over("divisor", [3.0, 7.0, 49.0])
def test_granite_logits_scaling_without_exact_inverse_survives_a_round_trip(
    divisor: float,
) -> None:
    config = GRANITE.read_config(published.GRANITE_2B | {"logits_scaling": divisor})
    written = GRANITE.write_config(config)
    assert written["logits_scaling"] == pytest.approx(divisor, rel=1e-15)


def test_granite_default_attention_scale_is_exported_explicitly() -> None:
    config = replace(GRANITE.read_config(published.GRANITE_2B), attention=AttentionConfig())
    assert GRANITE.write_config(config)["attention_multiplier"] == 0.125


# --- Phi-3


@loop_over("kind", ["longrope", "su", "yarn"])
def test_phi3_longrope_is_read_under_each_of_its_names(kind: str) -> None:
    raw = published.PHI3_MINI_128K
    config = PHI3.read_config(raw | {"rope_scaling": raw["rope_scaling"] | {"type": kind}})
    rope = config.rope
    assert (rope.scaling, rope.factor, rope.original_max_position) == ("longrope", 32.0, 4096)
    assert rope.short_factors == (1.05,) * 48
    assert rope.long_factors == tuple(map(float, range(1, 49)))
    assert attention_factor(rope) == pytest.approx(math.sqrt(1 + math.log(32) / math.log(4096)))
    assert PHI3.read_config(PHI3.write_config(config)) == config


def test_phi3_longrope_is_written_as_published() -> None:
    written = PHI3.write_config(PHI3.read_config(published.PHI3_MINI_128K))
    # transformers 4 allows no other fields in it
    assert written["rope_scaling"] == published.PHI3_MINI_128K["rope_scaling"]
    assert written["original_max_position_embeddings"] == 4096
    assert written["rope_parameters"]["original_max_position_embeddings"] == 4096


@loop_over(
    "wrong",
    [
        {"short_factor": 1.0},
        {"long_factor": [0.0] * 48},
        {"long_factor": ["a"] * 48},
        {"short_mscale": 1.1},
    ],
)
def test_phi3_invalid_longrope_factors_are_rejected(wrong: RawConfig) -> None:
    raw = published.PHI3_MINI_128K
    with pytest.raises(
        ConfigError,
        match="or 'longrope' with short_factor, long_factor, original_max_position_embedd",
    ):
        PHI3.read_config(raw | {"rope_scaling": raw["rope_scaling"] | wrong})


def test_phi3_attention_factor_that_differs_from_the_default_is_rejected() -> None:
    config = PHI3.read_config(published.PHI3_MINI_128K)
    with pytest.raises(
        ConfigError,
        match=r"model.rope.attention_factor=1.5: Phi3ForCausalLM cannot express this setting",
    ):
        PHI3.write_config(replace(config, rope=replace(config.rope, attention_factor=1.5)))


def test_phi3_partial_rotary_factor_survives_a_round_trip() -> None:
    config = PHI3.read_config(published.PHI3_MINI_4K | {"partial_rotary_factor": 0.75})
    assert config.rope.fraction == 0.75
    assert PHI3.read_config(PHI3.write_config(config)) == config


# --- GPT-2, GPT-NeoX


def test_gpt2_default_dropout_is_that_of_the_release() -> None:
    dropout = GPT2.read_config(published.GPT2_124M | {"attn_pdrop": 0.2, "embd_pdrop": 0.3}).dropout
    assert (dropout.attention, dropout.embedding, dropout.residual) == (0.2, 0.3, 0.1)


def test_neox_rotary_fields_are_read_under_both_names() -> None:
    raw = published.PYTHIA_160M
    config = NEOX.read_config(raw | {"rotary_pct": 0.5, "rotary_emb_base": 1000})
    assert (config.rope.fraction, config.rope.theta, config.rotary_size()) == (0.5, 1000.0, 32)
    new = {name: value for name, value in raw.items() if not name.startswith("rotary")}
    assert NEOX.read_config(new).rope.fraction == 0.25
    parameters = {"partial_rotary_factor": 0.5, "rope_theta": 1000.0, "rope_type": "default"}
    assert NEOX.read_config(new | {"rope_parameters": parameters}) == config


def test_neox_sequential_block_survives_a_round_trip() -> None:
    config = NEOX.read_config(published.PYTHIA_160M | {"use_parallel_residual": False})
    assert config.block == "sequential"
    assert NEOX.write_config(config)["use_parallel_residual"] is False


# --- mixture of experts


def test_mixtral_experts_have_three_tensors_each_or_two_fused_ones() -> None:
    config = MIXTRAL.read_config(SMALL["mixtral"][1])
    names = [rule.name for rule in MIXTRAL.rules(config) if "experts" in rule.name]
    block = "model.layers.0.block_sparse_moe.experts"
    assert names == [f"{block}.{e}.{word}.weight" for e in range(3) for word in ("w1", "w3", "w2")]
    fused = MIXTRAL.rules(config, fused=True)
    assert [rule.name for rule in fused if "experts" in rule.name] == [
        f"model.layers.0.mlp.experts.{word}" for word in ("gate_up_proj", "down_proj")
    ]
    assert group_by_parameter(fused).keys() == group_by_parameter(MIXTRAL.rules(config)).keys()


def test_mixtral_rejects_a_routed_scaling_factor() -> None:
    config = MIXTRAL.read_config(published.MIXTRAL_8X7B)
    assert config.moe is not None
    router = RouterConfig(routed_scaling_factor=2.0)
    with pytest.raises(
        ConfigError,
        match=r"model.moe.router.routed_scaling_factor=2.0: MixtralForCausalLM cannot express",
    ):
        MIXTRAL.write_config(replace(config, moe=replace(config.moe, router=router)))


def test_olmoe_has_qk_norm_over_all_heads() -> None:
    assert OLMOE.read_config(published.OLMOE_7B).attention.qk_norm == "whole"


def test_qwen2_moe_shared_experts_are_one_mlp_with_a_gate() -> None:
    raw = SMALL["qwen2_moe"][1]
    moe = QWEN2_MOE.read_config(raw).moe
    assert moe is not None and moe.shared_gate and not moe.router.norm_topk_prob
    sizes = shapes(QWEN2_MOE, raw)
    assert sizes["mlp.shared_expert_gate.weight"] == (1, 2048)
    assert sizes["mlp.shared_expert.down_proj.weight"] == (2048, 5632)


def test_qwen3_moe_dense_layers_survive_a_round_trip() -> None:
    changes = {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    config = QWEN3_MOE.read_config(published.QWEN3_30B_A3B | changes)
    assert [config.has_experts(layer) for layer in range(4)] == [False, True, False, False]
    written = QWEN3_MOE.write_config(config)
    assert (written["decoder_sparse_step"], written["mlp_only_layers"]) == (1, [0, 2, 3])
    assert QWEN3_MOE.read_config(written) == config


def test_gpt_oss_defaults_are_those_of_the_release() -> None:
    raw = published.GPT_OSS_20B
    config = GPT_OSS.read_config(raw)
    assert [config.has_window(layer) for layer in range(4)] == [True, False, True, False]
    assert (config.rope.theta, config.rope.whole_pairs) == (150_000.0, False)
    assert config.attention.window == 128
    names = [name for name in raw if name.startswith(("rope", "layer_types"))]
    assert GPT_OSS.read_config(without(raw, *names)) == config


def test_gpt_oss_expert_tensors_have_inputs_before_outputs() -> None:
    sizes = shapes(GPT_OSS, SMALL["gpt_oss"][1])
    assert sizes["mlp.experts.gate_up_proj"] == (4, 2880, 5760)
    assert sizes["mlp.experts.down_proj"] == (4, 2880, 2880)
    assert sizes["mlp.router.bias"] == (4,)
