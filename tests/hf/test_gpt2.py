"""GPT-2's config.json and tensors, with the names of its first release and those of today."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megalith.errors import CheckpointError, ConfigError
from megalith.hf.folder import HuggingFaceFolder, write_folder
from megalith.hf.gpt2 import GPT2, read_config, write_config
from tests.hf.published import check_published, check_rules

RAW: dict[str, Any] = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50256,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 50257,
}
SMALL: dict[str, Any] = {
    "vocab_size": 37,
    "n_embd": 12,
    "n_layer": 2,
    "n_head": 3,
    "n_positions": 16,
    "n_inner": 10,
    "architectures": ["GPT2LMHeadModel"],
}


def test_the_published_model_is_read_and_has_as_many_parameters_as_stated() -> None:
    check_published(GPT2, RAW, 124_439_808)


def test_its_rules_cover_everything_once() -> None:
    check_rules(GPT2, read_config(SMALL | {"tie_word_embeddings": False}))


def test_dropout_defaults_are_those_of_the_release() -> None:
    dropout = read_config(RAW | {"attn_pdrop": 0.2, "embd_pdrop": 0.3}).dropout
    assert (dropout.attention, dropout.embedding, dropout.residual) == (0.2, 0.3, 0.1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("scale_attn_by_inverse_layer_idx", True),
        ("scale_attn_weights", False),
        ("add_cross_attention", True),
    ],
)
def test_what_changes_its_attention_is_refused_by_name(field: str, value: bool) -> None:
    with pytest.raises(
        ConfigError, match=f"{field}={value} is not supported: it must be {not value}"
    ):
        read_config(RAW | {field: value})


def test_a_model_that_is_no_gpt2_is_not_written_as_one(tiny: SimpleNamespace) -> None:
    with pytest.raises(
        ConfigError, match=r"model.positions='rope': GPT2LMHeadModel cannot express this setting"
    ):
        write_config(tiny.config())


def folder(path: Path, tiny: SimpleNamespace) -> dict[str, torch.Tensor]:
    """A small model in a folder; its tensors."""
    config = read_config(SMALL)
    write_folder(path, config, tiny.InMemory(tiny.tensors(tiny.model(config))), family=GPT2)
    return load_file(path / "model.safetensors")


def test_files_of_the_first_release_lack_a_prefix_and_have_masks(
    tmp_path: Path, tiny: SimpleNamespace
) -> None:
    tensors = folder(tmp_path / "x", tiny)
    old = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    old |= {f"h.{layer}.attn.bias": torch.ones(1, 1, 16, 16) for layer in range(2)}
    new = HuggingFaceFolder(tmp_path / "x")
    save_file(old, tmp_path / "x" / "model.safetensors", metadata={"format": "pt"})
    found = HuggingFaceFolder(tmp_path / "x")
    box = ((0, 2), (1, 3), (0, 4), (0, 12))
    read = found.read("layers.1.attention.kv", box, torch.float32)
    fused = tensors["transformer.h.1.attn.c_attn.weight"].T.view(3, 3, 4, 12)
    assert torch.equal(read, fused[1:, 1:])
    assert (
        found.tensor_dtype("transformer.wte.weight") == torch.float32
        and found.model_config == new.model_config
    )


def test_missing_tensors_are_reported_with_hugging_face_names(
    tmp_path: Path, tiny: SimpleNamespace
) -> None:
    tensors = folder(tmp_path / "x", tiny)
    del tensors["transformer.h.1.ln_1.bias"]
    old = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    save_file(old, tmp_path / "x" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"missing: h\.1\.ln_1\.bias"):
        HuggingFaceFolder(tmp_path / "x")
