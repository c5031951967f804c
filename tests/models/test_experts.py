"""What families with experts share: both ways of storing them, and settings that change nothing outside training."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megalith.config.model import ModelConfig
from megalith.config.moe import BalanceConfig, CapacityConfig, MoEConfig, RouterConfig
from megalith.errors import CheckpointError
from megalith.models.experts import canonical_experts
from megalith.models.hf import HuggingFaceFolder
from tests.models.families import CASES, our_model, saved

MODEL = ModelConfig(
    vocab_size=8, hidden_size=24, num_layers=4, num_heads=2, num_kv_heads=1, ffn_hidden_size=8,
    moe=MoEConfig(experts=4, ffn_hidden_size=6),
)  # fmt: skip


def test_settings_of_training_are_no_part_of_a_model() -> None:
    assert MODEL.moe is not None
    trained = replace(
        MODEL.moe, balance=BalanceConfig(batch=0.1), capacity=CapacityConfig(factor=1.0),
        router=RouterConfig(jitter=0.1, dtype="model"), layers=(True, True),
    )  # fmt: skip
    assert canonical_experts(replace(MODEL, moe=trained)) == canonical_experts(MODEL)
    other = replace(MODEL, moe=replace(MODEL.moe, router=RouterConfig(scale=2.0)))
    assert canonical_experts(other) != canonical_experts(MODEL)
    assert canonical_experts(replace(MODEL, moe=replace(MODEL.moe, layers=(False,)))).moe is None


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "deepseek_v3, experts"])
def test_a_folder_with_all_experts_in_two_tensors_is_the_same_model(name: str, tmp_path: Path) -> None:
    theirs, folder = saved(CASES[name], tmp_path / "each")
    expected = our_model(folder).state_dict()
    together = {key: value.contiguous() for key, value in theirs.state_dict().items()}
    assert any(key.endswith("experts.gate_up_proj") for key in together)
    (tmp_path / "joined").mkdir()
    (tmp_path / "joined" / "config.json").write_text((tmp_path / "each" / "config.json").read_text())
    save_file(together, tmp_path / "joined" / "model.safetensors", metadata={"format": "pt"})
    found = our_model(HuggingFaceFolder(tmp_path / "joined")).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_experts_that_a_folder_lacks_are_named_by_their_numbers(tmp_path: Path) -> None:
    """The original's converter left them as they were first drawn, and said nothing."""
    saved(CASES["mixtral"], tmp_path / "whole")
    tensors = load_file(tmp_path / "whole" / "model.safetensors")
    (tmp_path / "lacking").mkdir()
    (tmp_path / "lacking" / "config.json").write_text((tmp_path / "whole" / "config.json").read_text())
    kept = {key: value for key, value in tensors.items() if "layers.0." not in key or ".experts.1." not in key}
    assert len(kept) == len(tensors) - 3
    save_file(kept, tmp_path / "lacking" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.0\.block_sparse_moe\.experts\.1\.w1"):
        our_model(HuggingFaceFolder(tmp_path / "lacking"))
