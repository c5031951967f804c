"""DeepSeek's config.json and tensors: dense ones, and MTP layers."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megalith.config.model import MLAConfig, MTPConfig
from megalith.errors import CheckpointError, ConfigError
from megalith.hf.convert import plan_moves
from megalith.hf.families import DEEPSEEK_V2, DEEPSEEK_V3
from megalith.hf.folder import HFSource, HuggingFaceFolder, write_folder
from megalith.hf.pretrained import open_pretrained
from megalith.rules.model import network_problems
from megalith.testing.tolerance import EXACT, assert_close
from tests.hf.published import check_published, check_rules

RAW: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "aux_loss_alpha": 0.001,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "pretraining_tp": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
DENSE = RAW | {"num_hidden_layers": 3, "num_nextn_predict_layers": 0}
# latent attention as in section 4.2 of the report; MLP; norms
A_LAYER = 187_107_328 + 396_361_728 + 2 * 7168
SMALL: dict[str, Any] = DENSE | {
    "vocab_size": 37,
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "intermediate_size": 10,
    "q_lora_rank": 5,
    "kv_lora_rank": 7,
    "qk_nope_head_dim": 3,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
}


def test_published_model_has_its_dense_layers_and_stated_number_of_parameters() -> None:
    check_published(
        DEEPSEEK_V3, DENSE, 2 * 129_280 * 7168 + 7168 + 3 * A_LAYER, reworded=("rope_scaling",)
    )


def test_the_published_model_is_read_whole() -> None:
    check_published(
        DEEPSEEK_V3,
        RAW | {"num_nextn_predict_layers": 0},
        671_026_404_352,
        reworded=("rope_scaling",),
    )
    config = DEEPSEEK_V3.read_config(RAW)
    assert config.moe is not None and config.mtp.num_layers == 1
    assert [config.has_experts(layer) for layer in (0, 2, 3, 60)] == [False, False, True, True]
    router = config.moe.router
    assert (
        router.score,
        router.expert_bias,
        router.routed_scaling_factor,
        router.norm_topk_prob,
    ) == (
        "sigmoid",
        True,
        2.5,
        True,
    )
    assert (router.num_groups, router.topk_groups, router.group_score) == (8, 4, "top")


SPARSE: dict[str, Any] = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 6,
}


def test_rules_contain_every_expert_tensor() -> None:
    config = DEEPSEEK_V3.read_config(SMALL | SPARSE | {"num_nextn_predict_layers": 1})
    check_rules(DEEPSEEK_V3, config)
    names = {rule.name for rule in DEEPSEEK_V3.rules(config)}
    assert "model.layers.1.mlp.gate.e_score_correction_bias" in names
    assert "model.layers.2.mlp.experts.3.down_proj.weight" in names, (
        "MTP layers have experts like the last layer"
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_shared_experts": 0}, "n_shared_experts=0: transformers needs at least one"),
        ({"topk_method": "greedy"}, "topk_method='greedy' is not supported: it must be 'noaux_tc'"),
        (
            {"num_experts_per_tok": 3},
            "num_experts_per_tok=3, topk_group=1: transformers scores a group by",
        ),
        (
            {"scoring_func": "softmax"},
            "scoring_func='softmax' is not supported: it must be 'sigmoid'",
        ),
        (
            {"first_k_dense_replace": -1},
            "first_k_dense_replace=-1: expected a whole number of at least 0",
        ),
        ({"moe_layer_freq": 2}, "moe_layer_freq=2 is not supported: it must be 1"),
        ({"num_local_experts": 3}, "these numbers of experts differ"),
    ],
)
def test_unsupported_expert_fields_are_rejected_by_name(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        DEEPSEEK_V3.read_config(SMALL | SPARSE | fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention_bias": True}, "attention_bias=True is not supported: it must be False"),
        ({"num_key_value_heads": 1}, "num_key_value_heads=1 is not supported: it must be 3"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_type='linear' are not supported in DeepSeek",
        ),
        (
            {"num_mtp_layers": 2},
            "num_nextn_predict_layers=0, num_mtp_layers=2: expected one whole number",
        ),
        ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers=-1"),
        (
            {"quantization_config": {"fmt": "e4m3"}},
            "quantization_config=.* quantized weights are not supported",
        ),
    ],
)
def test_unsupported_fields_are_rejected_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DEEPSEEK_V3.read_config(SMALL | fields)


@pytest.mark.parametrize(
    ("scales", "factor", "mscale"),
    [
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0, 1.0),
        ({"mscale": 0.707, "mscale_all_dim": 0}, None, None),
        ({"mscale": 0.707}, None, None),
        ({"mscale_all_dim": 0.707}, None, 0.707),
        ({}, None, None),
    ],
)
def test_mscales_affect_rope_only_together_and_attention_scale_alone(
    scales: dict[str, float], factor: float | None, mscale: float | None
) -> None:
    plain = {
        name: value for name, value in RAW["rope_scaling"].items() if not name.startswith("mscale")
    }
    config = DEEPSEEK_V3.read_config(SMALL | {"rope_scaling": plain | scales})
    assert config.mla is not None
    assert (config.rope.attention_factor, config.mla.yarn_mscale) == (factor, mscale)
    assert DEEPSEEK_V3.read_config(DEEPSEEK_V3.write_config(config)) == config


def test_mscale_ratio_of_one_is_written_as_in_the_release() -> None:
    written = DEEPSEEK_V3.write_config(DEEPSEEK_V3.read_config(DENSE))["rope_scaling"]
    assert (written["mscale"], written["mscale_all_dim"]) == (
        1.0,
        1.0,
    ) and "attention_factor" not in written


@pytest.mark.parametrize("changes", [{}, {"q_lora_rank": None, "tie_word_embeddings": True}])
def test_rules_cover_every_element_once(changes: dict[str, Any]) -> None:
    check_rules(
        DEEPSEEK_V3, DEEPSEEK_V3.read_config(SMALL | changes | {"num_nextn_predict_layers": 2})
    )


def test_only_latent_attention_and_only_v3_with_mtp_are_exported(
    tiny: SimpleNamespace,
) -> None:
    config = DEEPSEEK_V3.read_config(DENSE)
    assert config.mla is not None
    with pytest.raises(
        ConfigError,
        match="model.mla.norms=false: DeepseekV3ForCausalLM always normalizes .* Use a",
    ):
        DEEPSEEK_V3.write_config(replace(config, mla=replace(config.mla, norms=False)))
    with pytest.raises(
        ConfigError, match="model.mla=None: DeepseekV3ForCausalLM needs latent attention"
    ):
        DEEPSEEK_V3.write_config(tiny.config())
    config = replace(DEEPSEEK_V3.read_config(SMALL), mtp=MTPConfig(num_layers=1))
    with pytest.raises(
        ConfigError,
        match="model.mtp.num_layers=1: DeepseekV2ForCausalLM cannot express this setting",
    ):
        DEEPSEEK_V2.write_config(config)
    assert config.mla is not None
    odd = replace(config, mla=MLAConfig(kv_rank=7, norm_eps=0.1))
    with pytest.raises(
        ConfigError,
        match="model.mla.norm_eps=0.1: DeepseekV3ForCausalLM cannot express this setting",
    ):
        DEEPSEEK_V3.write_config(odd)


def test_mtp_layers_survive_a_round_trip_with_release_names(
    tmp_path: Path, tiny: SimpleNamespace
) -> None:
    config = DEEPSEEK_V3.read_config(SMALL | {"num_nextn_predict_layers": 2})
    weights = tiny.tensors(tiny.model(config))
    write_folder(tmp_path / "x", config, tiny.InMemory(weights), hf_source=HFSource(DEEPSEEK_V3))
    file = tmp_path / "x" / "model.safetensors"
    tensors = load_file(file)
    assert torch.equal(tensors["model.layers.3.eh_proj.weight"], weights["mtp.1.project"])
    assert torch.equal(
        tensors["model.layers.2.shared_head.norm.weight"], weights["mtp.0.norm.weight"]
    )
    folder = HuggingFaceFolder(tmp_path / "x")
    assert folder.model_config == config
    back = tiny.blank(config)
    folder.fill(tiny.entries(back))
    assert_close(tiny.tensors(back), weights, EXACT)


COPIES = {"embed_tokens": "model.embed_tokens.weight", "shared_head.head": "lm_head.weight"}


@pytest.mark.parametrize("tied", [False, True])
def test_mtp_layers_repeat_embedding_and_head(
    tied: bool, tmp_path: Path, tiny: SimpleNamespace
) -> None:
    config = DEEPSEEK_V3.read_config(
        SMALL | {"num_nextn_predict_layers": 2, "tie_word_embeddings": tied}
    )
    weights = tiny.tensors(tiny.model(config))
    write_folder(tmp_path / "x", config, tiny.InMemory(weights), hf_source=HFSource(DEEPSEEK_V3))
    tensors = load_file(tmp_path / "x" / "model.safetensors")
    for layer in (2, 3):
        for copy, first in COPIES.items():
            result = tensors[f"model.layers.{layer}.{copy}.weight"]
            assert torch.equal(result, tensors["model.embed_tokens.weight" if tied else first])
    lines = plan_moves(open_pretrained(tmp_path / "x"), "megalith", None)
    assert [line.target for line in lines[-2:]] == [
        "nothing: it repeats embed.weight",
        f"nothing: it repeats {'embed' if tied else 'head'}.weight",
    ]
    assert all(line.nbytes for line in lines[:-4]) and not any(line.nbytes for line in lines[-4:])


@pytest.mark.parametrize("name", COPIES)
def test_copy_may_be_missing_but_must_not_differ(
    name: str, tmp_path: Path, tiny: SimpleNamespace
) -> None:
    config = DEEPSEEK_V3.read_config(SMALL | {"num_nextn_predict_layers": 1})
    write_folder(
        tmp_path / "x",
        config,
        tiny.InMemory(tiny.tensors(tiny.model(config))),
        hf_source=HFSource(DEEPSEEK_V3),
    )
    file = tmp_path / "x" / "model.safetensors"
    tensors, copy = load_file(file), f"model.layers.2.{name}.weight"
    without = {key: tensor for key, tensor in tensors.items() if key != copy}
    save_file(without, file, metadata={"format": "pt"})
    assert HuggingFaceFolder(tmp_path / "x").model_config == config
    for other in (tensors[copy] + 1, tensors[copy][:-1]):
        save_file(without | {copy: other.contiguous()}, file, metadata={"format": "pt"})
        with pytest.raises(
            CheckpointError,
            match=rf"{copy} differs from {COPIES[name]}.*Remove {copy} from the fold",
        ):
            HuggingFaceFolder(tmp_path / "x")


def test_mtp_tensors_may_be_missing(tmp_path: Path, tiny: SimpleNamespace) -> None:
    config = DEEPSEEK_V3.read_config(SMALL | {"num_nextn_predict_layers": 1})
    write_folder(
        tmp_path / "x",
        config,
        tiny.InMemory(tiny.tensors(tiny.model(config))),
        hf_source=HFSource(DEEPSEEK_V3),
    )
    file = tmp_path / "x" / "model.safetensors"
    kept = {
        name: tensor
        for name, tensor in load_file(file).items()
        if not name.startswith("model.layers.2.")
    }
    save_file(kept, file, metadata={"format": "pt"})
    assert HuggingFaceFolder(tmp_path / "x").model_config == replace(config, mtp=MTPConfig())


def test_expert_biases_keep_fp32_in_a_bf16_model(tmp_path: Path, tiny: SimpleNamespace) -> None:
    config = DEEPSEEK_V3.read_config(SMALL | SPARSE)
    tiny.folder(tmp_path / "theirs", config, dtype=torch.bfloat16)
    raw = json.loads((tmp_path / "theirs" / "config.json").read_text())
    (file,) = (tmp_path / "theirs").glob("*.safetensors")
    stored = {name: tensor.dtype for name, tensor in load_file(file).items()}
    wide = {name for name, dtype in stored.items() if dtype == torch.float32}
    assert raw["dtype"] == raw["torch_dtype"] == "bfloat16", "what transformers builds the rest in"
    assert wide == {"model.layers.1.mlp.gate.e_score_correction_bias"} and set(stored.values()) > {
        torch.float32
    }


def test_yarn_without_interpolated_pairs_is_exported() -> None:
    kimi = RAW | {"rope_scaling": RAW["rope_scaling"] | {"beta_fast": 1.0, "beta_slow": 1.0}}
    assert network_problems(DEEPSEEK_V3.read_config(kimi)) == []
