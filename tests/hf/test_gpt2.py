"""Folders of GPT-2 with the tensor names of its first release and with current ones."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megalith.errors import CheckpointError
from megalith.hf.families import GPT2
from megalith.hf.folder import HFSource, HuggingFaceFolder, write_folder

SMALL: dict[str, Any] = {
    "vocab_size": 37,
    "n_embd": 12,
    "n_layer": 2,
    "n_head": 3,
    "n_positions": 16,
    "n_inner": 10,
    "architectures": ["GPT2LMHeadModel"],
}


def folder(path: Path, tiny: SimpleNamespace) -> dict[str, torch.Tensor]:
    """A small model in a folder; its tensors."""
    config = GPT2.read_config(SMALL)
    write_folder(
        path, config, tiny.InMemory(tiny.tensors(tiny.model(config))), hf_source=HFSource(GPT2)
    )
    return load_file(path / "model.safetensors")


def test_files_of_the_first_release_have_no_prefix_and_have_masks(
    tmp_path: Path, tiny: SimpleNamespace
) -> None:
    tensors = folder(tmp_path / "x", tiny)
    old = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    old |= {f"h.{layer}.attn.bias": torch.ones(1, 1, 16, 16) for layer in range(2)}
    new = HuggingFaceFolder(tmp_path / "x")
    save_file(old, tmp_path / "x" / "model.safetensors", metadata={"format": "pt"})
    hugging_face_folder = HuggingFaceFolder(tmp_path / "x")
    box = ((0, 2), (1, 3), (0, 4), (0, 12))
    read = hugging_face_folder.read("layers.1.attention.kv", box, torch.float32)
    fused = tensors["transformer.h.1.attn.c_attn.weight"].T.view(3, 3, 4, 12)
    assert torch.equal(read, fused[1:, 1:])
    assert hugging_face_folder.dtype("embed.weight") == torch.float32
    assert hugging_face_folder.model_config == new.model_config


def test_missing_tensors_are_reported_with_hugging_face_names(
    tmp_path: Path, tiny: SimpleNamespace
) -> None:
    tensors = folder(tmp_path / "x", tiny)
    del tensors["transformer.h.1.ln_1.bias"]
    old = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    save_file(old, tmp_path / "x" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"missing: h\.1\.ln_1\.bias"):
        HuggingFaceFolder(tmp_path / "x")
