import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from megalith.checkpoint.format import describe_tiling_problem
from megalith.config.model import ModelConfig, RopeConfig
from megalith.errors import ConfigError
from megalith.hf.families import LLAMA
from megalith.hf.release import parameters
from megalith.hf.tensor_rules import group_by_parameter, unpadded_shape
from tests.hf.published import LLAMA3

RAW: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 37,
    "hidden_size": 12,
    "intermediate_size": 10,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
}
SCALED = RopeConfig(theta=500_000.0, scaling="llama3", factor=8.0, original_max_position=8192)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tied_embeddings": True},
        {"qkv_bias": True, "output_bias": True, "mlp_bias": True},
        {"head_dim": 4, "num_kv_heads": 6, "norm_eps": 3e-6, "max_seq_len": 999, "init_std": 0.01},
        {"rope": RopeConfig(theta=123.0)},
        {"rope": SCALED},
    ],
)
def test_a_config_survives_a_round_trip(changes: dict[str, Any], tiny: SimpleNamespace) -> None:
    config = replace(tiny.config(pad_vocab_to_multiple_of=64), **changes)
    assert LLAMA.read_config(json.loads(json.dumps(LLAMA.write_config(config)))) == config


def test_defaults_of_missing_fields_match_transformers() -> None:
    config = LLAMA.read_config(RAW)
    expected = ModelConfig(
        vocab_size=37,
        hidden_size=12,
        num_layers=2,
        num_heads=6,
        num_kv_heads=6,
        ffn_hidden_size=10,
        max_seq_len=2048,
        norm_eps=1e-6,
        rope=RopeConfig(theta=10_000.0),
    )
    assert config == expected


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 500_000.0, "rope_scaling": LLAMA3},
        {
            "rope_theta": 500_000,
            "rope_scaling": {key.removeprefix("rope_"): value for key, value in LLAMA3.items()},
        },
        {"rope_parameters": {"rope_theta": 500_000.0, **LLAMA3}},
        {
            "rope_theta": 500_000.0,
            "rope_scaling": LLAMA3,
            "rope_parameters": {"rope_theta": 500_000.0, **LLAMA3},
        },
        {
            "rope_parameters": {"rope_theta": 500_000.0, "partial_rotary_factor": 1.0, **LLAMA3},
            "rope_scaling": None,
        },
    ],
)
def test_rotary_positions_are_read_in_the_spelling_of_transformers_4_and_5(
    fields: dict[str, Any],
) -> None:
    assert LLAMA.read_config(RAW | fields).rope == SCALED


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_a_theta_inside_either_mapping_counts(key: str) -> None:
    assert LLAMA.read_config(
        RAW | {key: {"rope_type": "default", "rope_theta": 77.0}}
    ).rope == RopeConfig(theta=77.0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"hidden_act": "mish"},
            "hidden_act='mish' is not supported: it must be one of 'silu', 'swish'",
        ),
        ({"attention_dropout": -0.1}, "attention_dropout=-0.1: expected a number of at least 0"),
        (
            {"quantization_config": {"bits": 4}},
            "quantization_config={'bits': 4}: quantized weights are not supported",
        ),
        (
            {"sliding_window": 128},
            "sliding_window=128: unknown field, which may change what the model computes. Remove",
        ),
        ({"rope_interleaved": True}, "rope_interleaved=True: unknown field"),
        (
            {"partial_rotary_factor": 0.5},
            "with {'partial_rotary_factor': 0.5, 'rope_theta': 10000.0} are not",
        ),
        (
            {"rope_scaling": {"type": "longrope", "factor": 2.0}},
            "rope_type='longrope' with {'factor': 2.0, ",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": "2"}}, "rope_type must be 'default'"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}},
            "'llama3' with factor, low_freq_factor",
        ),
        ({"rope_scaling": LLAMA3 | {"factor": "8"}}, "'factor': '8'"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "full_attention"),
        ({"rope_parameters": {"rope_theta": "big"}}, "'rope_theta': 'big'"),
        (
            {"rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 1e4}},
            "partial_rotary_factor",
        ),
        (
            {"rope_theta": 5.0, "rope_parameters": {"rope_theta": 6.0}},
            "disagree. Remove the wrong ones",
        ),
        ({"rope_scaling": LLAMA3, "rope_parameters": {"rope_type": "default"}}, "disagree"),
        ({"rope_scaling": "none"}, "rope_scaling='none': expected a mapping"),
        ({"hidden_size": "12"}, "hidden_size='12': expected a whole number above 0"),
        ({"num_key_value_heads": 0}, "num_key_value_heads=0: expected a whole number above 0"),
        ({"rms_norm_eps": None}, "rms_norm_eps=None: expected a number above 0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes': expected true or false"),
    ],
)
def test_a_field_that_changes_the_computation_is_rejected_by_name(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=r"(?s).*") as excinfo:
        LLAMA.read_config(RAW | fields)
    assert message in str(excinfo.value)


def test_all_problems_are_reported_together() -> None:
    raw = {name: value for name, value in RAW.items() if name != "vocab_size"} | {
        "hidden_act": "mish",
        "odd": 1,
    }
    with pytest.raises(ConfigError, match="3 settings") as excinfo:
        LLAMA.read_config(raw)
    for name in ("vocab_size is missing", "hidden_act='mish'", "odd=1"):
        assert name in str(excinfo.value)


def test_fields_without_effect_are_accepted() -> None:
    harmless = {
        "use_cache": True,
        "bos_token_id": 1,
        "eos_token_id": [2, 3],
        "pretraining_tp": 2,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.31.0",
        "_name_or_path": "x",
        "sliding_window": None,
        "is_decoder": False,
        "rope_interleaved": False,
        "max_length": 20,
        "pruned_heads": {},
    }
    assert LLAMA.read_config(RAW | harmless) == LLAMA.read_config(RAW)


def test_a_model_that_transformers_rejects_is_not_exported(tiny: SimpleNamespace) -> None:
    with pytest.raises(
        ConfigError,
        match="hidden_size=10 is not a multiple of model.num_heads=6.*Keep the model as a Megalith",
    ):
        LLAMA.write_config(tiny.config(hidden_size=10, head_dim=4))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("multiple", [1, 64])
def test_the_rules_cover_every_element_of_every_parameter_once(
    tied: bool, bias: bool, multiple: int, tiny: SimpleNamespace
) -> None:
    config = tiny.config(
        tied_embeddings=tied,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        pad_vocab_to_multiple_of=multiple,
        head_dim=4,
    )
    result = group_by_parameter(LLAMA.rules(config))
    declared = {shard.name: shard.shape for shard in parameters(config)}
    assert result.keys() == declared.keys()
    for name, shape in declared.items():
        assert (
            describe_tiling_problem(
                unpadded_shape(result[name]), [rule.box for rule in result[name]]
            )
            is None
        )
        rows = config.vocab_size if name in ("embed.weight", "head.weight") else shape[0]
        assert unpadded_shape(result[name]) == (rows, *shape[1:])


def test_tensor_names_are_those_of_published_files(tiny: SimpleNamespace) -> None:
    """As in the index of meta-llama/Llama-3.1-8B, with the biases of LlamaForCausalLM added."""
    names = [
        rule.name
        for rule in LLAMA.rules(
            tiny.config(num_layers=1, qkv_bias=True, output_bias=True, mlp_bias=True)
        )
    ]
    attention = [f"self_attn.{p}_proj.{kind}" for kind in ("weight", "bias") for p in "qkvo"]
    mlp = [f"mlp.{p}_proj.{kind}" for kind in ("weight", "bias") for p in ("gate", "up", "down")]
    layer = ["input_layernorm.weight", *attention, "post_attention_layernorm.weight", *mlp]
    assert sorted(names) == sorted(
        [
            "model.embed_tokens.weight",
            "model.norm.weight",
            "lm_head.weight",
            *(f"model.layers.0.{n}" for n in layer),
        ]
    )
    assert not LLAMA.ignored_tensors.fullmatch("model.layers.0.self_attn.q_proj.weight")


@pytest.mark.parametrize(("qkv", "output"), [(True, False), (False, True)])
def test_missing_biases_are_exported_as_zeros(
    qkv: bool, output: bool, tiny: SimpleNamespace
) -> None:
    config = tiny.config(num_layers=1, qkv_bias=qkv, output_bias=output)
    zeros = {rule.name.split(".")[-2] for rule in LLAMA.rules(config) if rule.parameter is None}
    assert zeros == ({"o_proj"} if qkv else {"q_proj", "k_proj", "v_proj"})
    assert LLAMA.write_config(config)["attention_bias"] is True
