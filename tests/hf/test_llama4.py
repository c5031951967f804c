from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megalith.cli.main import main
from megalith.errors import CheckpointError, ConfigError
from megalith.hf.convert import convert, plan_moves
from megalith.hf.families import LLAMA4
from megalith.hf.folder import HuggingFaceFolder
from megalith.hf.pretrained import open_pretrained
from megalith.kernels.layer_inputs import LayerInputs
from megalith.kernels.packed import seq_params_from_rows
from megalith.plan.costs import active_parameters
from megalith.testing.tolerance import relative_error
from tests.hf.families import CASES, SIZES, batch, our_model
from tests.hf.published import check_published, check_rules

PUBLISHED: dict[str, Any] = {  # the text_config of Llama 4 Scout
    "architectures": ["Llama4ForCausalLM"],
    "attention_bias": False,
    "attention_chunk_size": 8192,
    "attention_dropout": 0.0,
    "attn_scale": 0.1,
    "attn_temperature_tuning": True,
    "bos_token_id": 200000,
    "cache_implementation": "hybrid",
    "eos_token_id": [200001, 200007, 200008],
    "floor_scale": 8192,
    "for_llm_compressor": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "initializer_range": 0.02,
    "interleave_moe_layer_step": 1,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "max_position_embeddings": 10485760,
    "model_type": "llama4_text",
    "moe_layers": list(range(48)),
    "no_rope_layers": [1, 1, 1, 0] * 12,
    "num_attention_heads": 40,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 48,
    "num_key_value_heads": 8,
    "num_local_experts": 16,
    "output_router_logits": False,
    "pad_token_id": 200018,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 16.0,
        "high_freq_factor": 1.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "router_aux_loss_coef": 0.001,
    "router_jitter_noise": 0.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_qk_norm": True,
    "vocab_size": 202048,
}

AN_MLP = 3 * 5120 * 8192
A_LAYER = 5120 * (5120 + 2 * 1024) + 5120 * 5120 + 2 * 5120 + 17 * AN_MLP + 16 * 5120
OUTSIDE = 2 * 202_048 * 5120 + 5120


def test_the_published_model_is_read_and_has_as_many_parameters_as_its_layers() -> None:
    check_published(LLAMA4, PUBLISHED, 48 * A_LAYER + OUTSIDE)
    assert 48 * A_LAYER + OUTSIDE == 107_769_861_120  # 109 billion with the tower for pictures
    config = LLAMA4.read_config(PUBLISHED)
    # "17B"
    assert active_parameters(config) == 48 * (A_LAYER - 15 * AN_MLP) + OUTSIDE == 17_172_894_720
    assert [config.uses_rope(layer) for layer in range(5)] == [True, True, True, False, True]
    assert [config.has_window(layer) for layer in range(5)] == [True, True, True, False, True]
    assert [config.at(layer).attention.qk_norm for layer in range(5)] == [
        "l2",
        "l2",
        "l2",
        "none",
        "l2",
    ]
    assert [config.has_attention_temperature(layer) for layer in range(5)] == [
        False,
        False,
        False,
        True,
        False,
    ]
    ruled = {
        "attention_chunk_size",
        "attn_scale",
        "attn_temperature_tuning",
        "floor_scale",
        "moe_layers",
        "no_rope_layers",
        "use_qk_norm",
        "num_local_experts",
    }
    bare = {name: value for name, value in PUBLISHED.items() if name not in ruled}
    assert LLAMA4.read_config(bare) == config, "as the defaults of transformers"
    assert LLAMA4.read_config(PUBLISHED | {"attn_temperature_tuning": 4}) == config, (
        "as in the release"
    )
    plain = [
        LLAMA4.read_config(PUBLISHED | {"attn_temperature_tuning": off}) for off in (None, False)
    ]
    assert plain[0] == plain[1] != config, "a null that is written is false there"


def test_maverick_has_experts_in_every_other_layer_and_no_norms() -> None:
    maverick = {
        name: value
        for name, value in PUBLISHED.items()
        if name not in ("moe_layers", "rope_scaling")
    } | {
        "num_local_experts": 128,
        "interleave_moe_layer_step": 2,
        "use_qk_norm": False,
        "attn_temperature_tuning": 4,
        "max_position_embeddings": 1048576,
    }
    config = LLAMA4.read_config(maverick)
    assert [config.has_experts(layer) for layer in range(4)] == [False, True, False, True]
    assert config.attention.qk_norm == "none" and config.ffn_hidden_size == 16_384
    dense, mixed = A_LAYER - 17 * AN_MLP - 16 * 5120 + 2 * AN_MLP, A_LAYER + 112 * (AN_MLP + 5120)
    check_published(
        LLAMA4, maverick, 24 * (dense + mixed) + OUTSIDE, reworded=("attn_temperature_tuning",)
    )
    assert 24 * (dense + mixed) + OUTSIDE == 400_711_848_960


def test_expert_tensors_have_inputs_first_and_gate_before_up() -> None:
    config = LLAMA4.read_config(
        PUBLISHED | {"num_hidden_layers": 4, "num_local_experts": 4, "moe_layers": [1, 3]}
    )
    check_rules(LLAMA4, config)
    shapes = {
        rule.name.removeprefix("model.layers.1.feed_forward."): rule.shape
        for rule in LLAMA4.rules(config)
    }
    assert shapes["experts.gate_up_proj"] == (4, 5120, 16384) and shapes["experts.down_proj"] == (
        4,
        8192,
        5120,
    )
    assert shapes["router.weight"] == (4, 5120) and shapes["shared_expert.down_proj.weight"] == (
        5120,
        8192,
    )
    assert shapes["model.layers.0.feed_forward.gate_proj.weight"] == (16384, 5120)
    dense = LLAMA4.read_config(PUBLISHED | {"moe_layers": []})
    assert dense.moe is None and LLAMA4.read_config(LLAMA4.write_config(dense)) == dense


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_experts_per_tok": 2}, "num_experts_per_tok=2 is not supported: it must be 1"),
        (
            {"moe_layers": [1, "x"]},
            r"moe_layers=\[1, 'x'\]: expected numbers of layers, from 0 on, or null",
        ),
        (
            {"attention_chunk_size": None},
            "attention_chunk_size=None, but some layers have chunked attention",
        ),
        ({"attn_temperature_tuning": "x"}, "attn_temperature_tuning='x': expected true or false"),
        (
            {"layer_types": ["sliding_attention"] * 48},
            "expected .chunked_attention. or .full_attention. for each of",
        ),
    ],
)
def test_unsupported_fields_are_rejected_by_name(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        LLAMA4.read_config(PUBLISHED | change)


def test_a_sliding_window_cannot_be_expressed() -> None:
    config = LLAMA4.read_config(PUBLISHED)
    with pytest.raises(
        ConfigError,
        match="model.attention.chunked=False: Llama4ForCausalLM cannot express this setting",
    ):
        LLAMA4.write_config(replace(config, attention=replace(config.attention, chunked=False)))


def with_pictures(path: Path) -> Any:
    """A tiny model of theirs that reads pictures, too; random weights, saved."""
    transformers = pytest.importorskip("transformers")
    known = transformers.Llama4TextConfig()
    sizes = {name: value for name, value in SIZES.items() if hasattr(known, name)}
    vision = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
        "image_size": 4,
        "patch_size": 2,
        "vision_output_dim": 8,
        "projector_input_dim": 8,
        "projector_output_dim": 8,
        "pixel_shuffle_ratio": 0.5,
    }
    config = transformers.Llama4Config(
        text_config=sizes | dict(CASES["llama4"].fields), vision_config=vision
    )
    model = transformers.Llama4ForConditionalGeneration._from_config(
        config, attn_implementation="eager"
    ).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(float(parameter.ndim == 1), 0.2, generator=generator)
    model.save_pretrained(path)
    return model


def test_text_model_of_a_multimodal_folder_is_read_and_the_rest_named(
    tmp_path: Path,
) -> None:
    reference = with_pictures(tmp_path / "theirs")
    folder = HuggingFaceFolder(tmp_path / "theirs")
    assert folder.family is LLAMA4 and folder.others
    ids, _ = batch(97)
    ours = our_model(folder)
    scores = ours.head.logits(
        ours.hidden_states(ids.flatten(), LayerInputs(seq_params_from_rows(*ids.shape)))
    )
    assert relative_error(scores, reference(ids).logits.flatten(0, 1)) < 2e-5

    source = open_pretrained(tmp_path / "theirs")
    left = [move.source for move in plan_moves(source, "megalith", None) if not move.nbytes]
    assert left == list(folder.others) and all(
        name.startswith(("vision_model.", "multi_modal")) for name in left
    )
    convert(source, tmp_path / "text", "huggingface")
    again = HuggingFaceFolder(tmp_path / "text")
    assert again.raw["architectures"] == ["Llama4ForCausalLM"] and not again.others
    assert again.model_config == folder.model_config


def test_config_without_a_text_config_is_rejected(tmp_path: Path) -> None:
    with_pictures(tmp_path)
    (tmp_path / "config.json").write_text(
        '{"architectures": ["Llama4ForConditionalGeneration"], "text_config": 3}'
    )
    with pytest.raises(
        CheckpointError,
        match="text_config=3: expected the config of a text model. Use the conf",
    ):
        HuggingFaceFolder(tmp_path)


def test_ignored_tensors_may_have_any_dtype_and_are_not_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with_pictures(tmp_path / "theirs")
    file = tmp_path / "theirs" / "model.safetensors"
    ids = {
        "vision_model.ids": torch.arange(3),
        "vision_model.some": torch.zeros(2, dtype=torch.float8_e4m3fn),
    }
    save_file(load_file(file) | ids, file, metadata={"format": "pt"})
    words = ["convert", str(tmp_path / "theirs"), str(tmp_path / "out"), "--to", "huggingface"]
    assert main([*words, "--dry-run"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    left = [line for line in lines if " -> nothing: not part of the text model" in line]
    assert "vision_model.ids -> nothing: not part of the text model  (3,) I64" in left
    assert "vision_model.some -> nothing: not part of the text model  (2,) float8_e4m3fn" in left
    assert main(words) == 0
    count = len(load_file(tmp_path / "out" / "model.safetensors"))
    assert capsys.readouterr().out.startswith(
        f"wrote {tmp_path / 'out'}: {count} tensors, {len(left)} skipped, "
    )
    assert last.startswith(f"{count} tensors, {len(left)} skipped, ")
    assert len(lines) == count + len(left)
