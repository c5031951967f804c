"""Nemotron-NAS's config.json and tensors. transformers has no class for it; equal blocks are a
Llama of ours."""

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.cli.main import main
from megalith.config.model import EQUAL_LAYERS, LayerPart, LayersConfig
from megalith.errors import ConfigError
from megalith.hf.families import DECILM, LLAMA
from megalith.hf.folder import HuggingFaceFolder, find_family
from megalith.kernels.layer_inputs import LayerInputs
from megalith.kernels.packed import seq_params_from_lengths
from megalith.models.decoder import Decoder
from megalith.plan.costs import num_parameters
from tests.hf.published import check_rules, num_declared

WHOLE: dict[str, Any] = {
    "attention": {
        "n_heads_in_group": 4,
        "no_op": False,
        "num_sink_tokens": None,
        "replace_with_linear": False,
        "sparsify": None,
        "unshifted_sink": False,
        "use_prefill_window_in_sink_attention": False,
        "window_length": None,
    },
    "ffn": {"ffn_mult": 5.25, "no_op": False, "replace_with_linear": False, "sparsify": None},
}
RAW: dict[str, Any] = {
    "architectures": ["DeciLMForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_decilm.DeciLMConfig",
        "AutoModelForCausalLM": "modeling_decilm.DeciLMForCausalLM",
    },
    "block_configs": [WHOLE, WHOLE],
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": None,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "nemotron-nas",
    "num_attention_heads": 32,
    "num_hidden_layers": 2,
    "num_key_value_heads": None,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 128256,
}


def second(**halves: dict[str, Any]) -> dict[str, Any]:
    """The config whose second block is changed."""
    block = deepcopy(WHOLE)
    for name, values in halves.items():
        block[name].update(values)
    return {**RAW, "block_configs": [WHOLE, block]}


@pytest.mark.parametrize(
    ("raw", "count"),
    [
        (RAW, 1_486_901_248),
        (second(attention={"no_op": True, "n_heads_in_group": None}), 1_444_954_112),
        (second(ffn={"no_op": True, "ffn_mult": None}), 1_310_736_384),
        (second(attention={"replace_with_linear": True, "n_heads_in_group": None}), 1_461_735_424),
        (second(ffn={"replace_with_linear": True, "ffn_mult": None}), 1_327_517_696),
    ],
    ids=["the same", "no attention", "no MLP", "a matrix for attention", "a matrix for the MLP"],
)
def test_blocks_have_the_published_number_of_parameters(raw: dict[str, Any], count: int) -> None:
    before = deepcopy(raw)
    config = DECILM.read_config(raw)
    assert raw == before
    assert (
        num_declared(config) == num_parameters(replace(config, pad_vocab_to_multiple_of=1)) == count
    )
    again = DECILM.write_config(config)
    kept, given = (
        {"n_heads_in_group", "no_op", "replace_with_linear", "ffn_mult"},
        raw["block_configs"],
    )
    plain = [
        {half: {n: v for n, v in one[half].items() if n in kept} for half in one} for one in given
    ]
    assert again["block_configs"] == plain and DECILM.read_config(again) == config
    assert (again["num_key_value_heads"], again["intermediate_size"]) == (None, None)
    assert find_family(raw, Path("x"))[0] is DECILM, (
        "its own code has the model's name, and is not run"
    )


def test_model_with_equal_blocks_is_a_llama() -> None:
    fields = {"architectures", "model_type", "block_configs", "auto_map"}
    plain = {name: value for name, value in RAW.items() if name not in fields}
    as_llama = LLAMA.read_config({**plain, "num_key_value_heads": 8, "intermediate_size": 14336})
    assert DECILM.read_config(RAW) == as_llama and as_llama.layers == EQUAL_LAYERS
    assert DECILM.rules(as_llama) == LLAMA.rules(as_llama)


def filled(path: Path, tiny: SimpleNamespace) -> Decoder:
    """The model of a folder."""
    folder = HuggingFaceFolder(path)
    model: Decoder = tiny.blank(replace(folder.model_config, pad_vocab_to_multiple_of=8))
    folder.fill(tiny.entries(model))
    return model


def logits(model: Decoder) -> Tensor:
    """Scores of two documents."""
    with torch.no_grad():
        return model.head.logits(
            model.hidden_states(
                torch.arange(11) * 7 % 37, LayerInputs(seq_params_from_lengths([4, 7]))
            )
        )


def test_llama_with_equal_blocks_has_the_same_logits(tmp_path: Path, tiny: SimpleNamespace) -> None:
    config = tiny.config(ffn_hidden_size=256)
    tiny.folder(tmp_path / "x", config)
    expected = logits(filled(tmp_path / "x", tiny))
    raw = json.loads((tmp_path / "x" / "config.json").read_text())
    block = {"attention": {"n_heads_in_group": 3}, "ffn": {"ffn_mult": 3 * 256 / (2 * 12)}}
    raw |= {
        "architectures": ["DeciLMForCausalLM"],
        "model_type": "nemotron-nas",
        "block_configs": [block] * 2,
    }
    raw |= {"num_key_value_heads": None, "intermediate_size": None}
    (tmp_path / "x" / "config.json").write_text(json.dumps(raw))
    assert HuggingFaceFolder(tmp_path / "x").family is DECILM
    back = filled(tmp_path / "x", tiny)
    assert back.config == config and torch.equal(logits(back), expected)
    with torch.no_grad():
        back.norm.weight.mul_(2)
    assert not torch.equal(logits(back), expected)


@pytest.mark.parametrize("biases", [False, True])
def test_layers_of_every_kind_are_written_and_read_bit_for_bit(
    biases: bool, tmp_path: Path, tiny: SimpleNamespace
) -> None:
    layers = LayersConfig(
        attention=("full", "none", "linear"),
        mlp=("full", "full", "none", "linear"),
        num_kv_heads=(3, 3, 3, 1),
        ffn_hidden_size=(512, 256, 512),
    )
    config = tiny.config(
        num_layers=4,
        num_kv_heads=3,
        ffn_hidden_size=512,
        layers=layers,
        qkv_bias=biases,
        output_bias=biases,
    )
    check_rules(DECILM, config)
    model = tiny.folder(tmp_path / "x", config)
    folder = HuggingFaceFolder(tmp_path / "x")
    assert (
        folder.family is DECILM
        and replace(folder.model_config, pad_vocab_to_multiple_of=8) == config
    )
    back = tiny.blank(config)
    folder.fill(tiny.entries(back))
    for name, tensor in tiny.tensors(model).items():
        assert torch.equal(tiny.tensors(back)[name], tensor), name


def test_linear_replacement_of_an_mlp_has_no_bias(tiny: SimpleNamespace) -> None:
    raw = second(ffn={"replace_with_linear": True, "ffn_mult": None})
    with pytest.raises(
        ConfigError, match="mlp_bias=True with .* in block_configs .* Set mlp_bias to false"
    ):
        DECILM.read_config(raw | {"mlp_bias": True})
    parts: tuple[LayerPart, ...] = ("full", "linear")
    config = tiny.config(
        mlp_bias=True,
        qkv_bias=True,
        output_bias=True,
        layers=LayersConfig(mlp=parts, attention=parts),
    )
    with pytest.raises(
        ConfigError,
        match="mlp_bias=true with model.layers.mlp=.*Keep the model as a Megalith checkpoint",
    ):
        DECILM.write_config(config)
    names = [
        one.name
        for one in DECILM.rules(replace(config, mlp_bias=False))
        if one.name.endswith(".bias")
    ]
    assert "model.layers.1.self_attn.linear_attn.bias" in names and not any(
        "mlp" in name for name in names
    )


def test_tensor_names_are_those_of_published_files(tiny: SimpleNamespace) -> None:
    parts: tuple[LayerPart, ...] = ("linear", "none")
    names = [
        one.name
        for one in DECILM.rules(
            tiny.config(layers=LayersConfig(attention=parts, mlp=("full", "linear")))
        )
    ]
    assert names == [
        "model.embed_tokens.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.self_attn.linear_attn.weight",
        "model.layers.0.post_attention_layernorm.weight",
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.1.post_attention_layernorm.weight",
        "model.layers.1.mlp.linear_mlp.weight",
        "model.norm.weight",
        "lm_head.weight",
    ]


def test_all_problems_of_a_config_are_reported_together() -> None:
    raw = {
        **second(attention={"n_heads_in_group": 5, "window_length": 9}),
        "hidden_act": "tanh",
        "vocab_size": None,
    }
    with pytest.raises(ConfigError) as excinfo:
        DECILM.read_config(raw)
    for text in (
        "block_configs[1].attention.n_heads_in_group=5",
        "window_length=9",
        "hidden_act='tanh'",
        "vocab_size",
    ):
        assert text in str(excinfo.value)
    older = {name: value for name, value in RAW.items() if name != "block_configs"}
    with pytest.raises(
        ConfigError, match="block_configs has None, expected a list with one for each of 2 layers"
    ):
        DECILM.read_config({**older, "num_key_value_heads_per_layer": [4, 4]})


def test_width_without_a_multiplier_is_rejected(tiny: SimpleNamespace) -> None:
    config = tiny.config(layers=LayersConfig(ffn_hidden_size=(10, 256)), ffn_hidden_size=256)
    with pytest.raises(
        ConfigError,
        match="ffn_hidden_size=10 in layer 0: DeciLMForCausalLM supports only multiples of 256",
    ):
        DECILM.write_config(config)


def test_export_warns_that_transformers_cannot_load_the_folder(
    tmp_path: Path, tiny: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    layers = LayersConfig(mlp=("full", "none"))
    tiny.folder(tmp_path / "x", tiny.config(vocab_size=300, ffn_hidden_size=256, layers=layers))
    assert main(["convert", str(tmp_path / "x"), str(tmp_path / "y"), "--to", "huggingface"]) == 0
    stdout = capsys.readouterr().out
    assert (
        "transformers has no class for DeciLMForCausalLM: from_pretrained reads the folder only "
        "with auto_map" in stdout
    )
    assert main(["convert", str(tmp_path / "x"), str(tmp_path / "z")]) == 0
    assert (
        main(["convert", str(tmp_path / "x"), str(tmp_path / "w"), "--to", "huggingface", "--json"])
        == 0
    )
    assert "from_pretrained" not in capsys.readouterr().out
