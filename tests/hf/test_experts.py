"""What families with experts share: both ways of storing them, and settings that change nothing
outside training."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy

from megalith.config.model import ModelConfig
from megalith.config.moe import AuxLossConfig, CapacityConfig, MoEConfig, RouterConfig
from megalith.errors import CheckpointError, ConfigError
from megalith.hf.families import QWEN3_MOE
from megalith.hf.family import canonical_experts
from megalith.hf.folder import HuggingFaceFolder
from megalith.kernels.layer_inputs import AuxLossScale, LayerInputs, RouterInputs
from megalith.kernels.packed import seq_params_from_rows
from megalith.testing.tolerance import relative_error
from tests.hf.families import CASES, batch, our_gradients, our_model, saved
from tests.hf.published import QWEN3_30B_A3B

MODEL = ModelConfig(
    vocab_size=8,
    hidden_size=24,
    num_layers=4,
    num_heads=2,
    num_kv_heads=1,
    ffn_hidden_size=8,
    moe=MoEConfig(num_experts=4, ffn_hidden_size=6),
)


def test_training_settings_are_not_part_of_a_model() -> None:
    assert MODEL.moe is not None
    trained = replace(
        MODEL.moe,
        aux_loss=AuxLossConfig(batch_coeff=0.1),
        capacity=CapacityConfig(factor=1.0),
        router=RouterConfig(jitter=0.1, dtype="model"),
        layers=(True, True),
    )
    assert canonical_experts(replace(MODEL, moe=trained)) == canonical_experts(MODEL)
    other = replace(MODEL, moe=replace(MODEL.moe, router=RouterConfig(routed_scaling_factor=2.0)))
    assert canonical_experts(other) != canonical_experts(MODEL)
    assert canonical_experts(replace(MODEL, moe=replace(MODEL.moe, layers=(False,)))).moe is None


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "deepseek_v3, experts"])
def test_a_folder_with_all_experts_in_two_tensors_is_the_same_model(
    name: str, tmp_path: Path
) -> None:
    reference, folder = saved(CASES[name], tmp_path / "each")
    expected = our_model(folder).state_dict()
    together = {key: value.contiguous() for key, value in reference.state_dict().items()}
    assert any(key.endswith("experts.gate_up_proj") for key in together)
    (tmp_path / "joined").mkdir()
    (tmp_path / "joined" / "config.json").write_text(
        (tmp_path / "each" / "config.json").read_text()
    )
    save_file(together, tmp_path / "joined" / "model.safetensors", metadata={"format": "pt"})
    result = our_model(HuggingFaceFolder(tmp_path / "joined")).state_dict()
    assert result.keys() == expected.keys()
    assert all(torch.equal(result[key], expected[key]) for key in expected)


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss"])
def test_aux_loss_matches_transformers(name: str, tmp_path: Path) -> None:
    """In one layer; of several, transformers pools the tokens."""
    requested = {"output_router_logits": True, "router_aux_loss_coef": 0.37, "num_hidden_layers": 1}
    own = {
        field: value for field, value in CASES[name].fields.items() if field != "mlp_only_layers"
    }
    reference, folder = saved(replace(CASES[name], fields=own | requested), tmp_path)
    moe = folder.model_config.moe
    assert moe is not None and moe.aux_loss == AuxLossConfig(
        batch_coeff=pytest.approx(0.37 * moe.top_k)
    )
    written = folder.family.write_config(folder.model_config)
    assert (written["output_router_logits"], written["router_aux_loss_coef"]) == (True, 0.37)

    ids, labels = batch(reference.config.vocab_size)
    result = reference(ids, output_router_logits=True)
    loss = cross_entropy(result.logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    (loss + reference.config.router_aux_loss_coef * result.aux_loss).backward()
    ours = our_model(folder)
    tokens = LayerInputs(
        seq_params_from_rows(*ids.shape), router_inputs=RouterInputs(AuxLossScale(0, 1, 1.0))
    )
    (ours.loss(ids.flatten(), labels.flatten(), tokens) / (labels >= 0).sum()).backward()
    router = next(
        key
        for key in dict(reference.named_parameters())
        if key.endswith(("gate.weight", "router.weight"))
    )
    expected = dict(reference.named_parameters())[router].grad
    assert relative_error(our_gradients(ours, folder)[router], expected) < 1e-4
    plain = our_model(folder, moe=replace(moe, aux_loss=AuxLossConfig()))
    (plain.loss(ids.flatten(), labels.flatten(), tokens) / (labels >= 0).sum()).backward()
    assert relative_error(our_gradients(plain, folder)[router], expected) > 1e-2, "the loss is seen"


def test_a_disabled_aux_loss_stays_disabled() -> None:
    raw = QWEN3_MOE.write_config(QWEN3_MOE.read_config(QWEN3_30B_A3B))
    assert raw["output_router_logits"] is False and "router_aux_loss_coef" not in raw
    every_other = QWEN3_MOE.read_config(
        {**QWEN3_30B_A3B, "output_router_logits": True, "decoder_sparse_step": 2}
    )
    assert every_other.moe is not None and every_other.moe.aux_loss.batch_coeff == 0.000333333333333
    again = QWEN3_MOE.write_config(every_other)
    assert (again["router_aux_loss_coef"], again["output_router_logits"]) == (0.001, True)
    for nothing in (None, 0, 0.0):
        none = {**QWEN3_30B_A3B, "output_router_logits": True, "router_aux_loss_coef": nothing}
        assert QWEN3_MOE.read_config(none) == QWEN3_MOE.read_config(QWEN3_30B_A3B)
    with pytest.raises(
        ConfigError, match="router_aux_loss_coef='x': expected a number of at least 0"
    ):
        QWEN3_MOE.read_config({**QWEN3_30B_A3B, "router_aux_loss_coef": "x"})


def test_missing_experts_are_reported_by_index(tmp_path: Path) -> None:
    """The original converter silently kept their initial values."""
    saved(CASES["mixtral"], tmp_path / "whole")
    tensors = load_file(tmp_path / "whole" / "model.safetensors")
    (tmp_path / "missing").mkdir()
    (tmp_path / "missing" / "config.json").write_text(
        (tmp_path / "whole" / "config.json").read_text()
    )
    lost = [
        f"layers.0.block_sparse_moe.experts.{number}.w{word}."
        for number in (0, 1)
        for word in (1, 2, 3)
    ]
    lost.append("layers.0.block_sparse_moe.experts.2.w2.")
    kept = {key: value for key, value in tensors.items() if not any(name in key for name in lost)}
    assert len(kept) == len(tensors) - 7
    save_file(kept, tmp_path / "missing" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError) as raised:
        our_model(HuggingFaceFolder(tmp_path / "missing"))
    block = "model.layers.0.block_sparse_moe"
    text = (
        f"missing: experts 0, 1 of {block} (w1.weight, w3.weight), experts 0 to 2 of {block} "
        "(w2.weight). Copy the"
    )
    assert text in str(raised.value)
