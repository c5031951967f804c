"""Tiny models with odd sizes, and Hugging Face folders made from them without transformers."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.checkpoint.format import CheckpointEntry
from megalith.config.model import ModelConfig
from megalith.hf.family import Family
from megalith.hf.folder import HFSource, find_exporting_family, write_folder
from megalith.hf.staging import ConversionOptions
from megalith.kernels.backend import AUTO, Backends
from megalith.models.decoder import Decoder, allocate, initialize, iter_parameter_specs
from megalith.nn.build import build_context
from megalith.parallel.mesh import Mesh, build_single_rank_mesh
from megalith.plan.shards import Box

SIZES: dict[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 12,
    "num_layers": 2,
    "num_heads": 6,
    "num_kv_heads": 2,
    "ffn_hidden_size": 10,
    "max_seq_len": 32,
    "pad_vocab_to_multiple_of": 8,
    "init_std": 0.3,
}


def config(**changes: Any) -> ModelConfig:
    """A model of a few thousand weights."""
    return ModelConfig(**SIZES | changes)


def blank(
    model_config: ModelConfig,
    mesh: Mesh | None = None,
    dtype: torch.dtype = torch.float32,
    backends: Backends = AUTO,
) -> Decoder:
    """A model whose weights are all -7."""
    mesh = mesh or build_single_rank_mesh()
    model = Decoder(build_context(model_config, mesh, dtype=dtype, backends=backends))
    allocate(model, torch.device("cpu"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(-7.0)
    return model


def model(
    model_config: ModelConfig,
    *,
    seed: int = 0,
    mesh: Mesh | None = None,
    backends: Backends = AUTO,
) -> Decoder:
    """A model with first weights, and biases that are not zero."""
    built = blank(model_config, mesh, backends=backends)
    initialize(built, seed=seed)
    with torch.no_grad():
        for declared, module, name in iter_parameter_specs(built):
            if name.endswith("bias"):
                whole = torch.arange(1.0, 1.0 + torch.Size(declared.shard.shape).numel()).view(
                    declared.shard.shape
                )
                box = tuple(slice(a, b) for a, b in declared.shard.box)
                getattr(module, name).copy_(whole[box].flatten())
    return built


def entries(made: Decoder) -> list[CheckpointEntry]:
    """Its weights as a checkpoint sees them."""
    return [
        CheckpointEntry(d.shard, "param", getattr(module, name))
        for d, module, name in iter_parameter_specs(made)
    ]


def tensors(made: Decoder) -> dict[str, Tensor]:
    """Its weights by name, in the shapes of their boxes."""
    return {
        entry.shard.name: entry.tensor.detach().view(entry.shard.box_shape)
        for entry in entries(made)
    }


@dataclass(frozen=True)
class InMemory:
    """Weights of a whole model, as something that can be converted."""

    whole: dict[str, Tensor]

    def dtype(self, parameter: str) -> torch.dtype:
        return self.whole[parameter].dtype

    def read(self, parameter: str, box: Box, dtype: torch.dtype) -> Tensor:
        return self.whole[parameter][tuple(slice(a, b) for a, b in box)].to(dtype)


def folder(
    path: Path,
    model_config: ModelConfig,
    *,
    seed: int = 0,
    dtype: torch.dtype | None = None,
    family: Family | None = None,
    activation_names: Mapping[str, str] | None = None,
    **options: Any,
) -> Decoder:
    """Write a Hugging Face folder of a new model, and return the model."""
    outputs = model(model_config, seed=seed)
    family = family or find_exporting_family(model_config)
    source = HFSource(family, activation_names or {})
    weights = InMemory(tensors(outputs))
    write_folder(path, model_config, weights, ConversionOptions(dtype), hf_source=source, **options)
    return outputs


@pytest.fixture
def tiny() -> SimpleNamespace:
    """Functions that make tiny models."""
    return SimpleNamespace(
        config=config,
        model=model,
        blank=blank,
        entries=entries,
        tensors=tensors,
        folder=folder,
        InMemory=InMemory,
    )
