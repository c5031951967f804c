"""Fixtures that build layers with weights, full or sharded over simulated ranks."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megalith.config.model import ModelConfig
from megalith.config.parallel import ParallelConfig
from megalith.kernels.layer_inputs import LayerInputs
from megalith.kernels.packed import seq_params_from_lengths
from megalith.models.decoder import iter_parameter_specs
from megalith.nn.build import build_context, init_param_
from megalith.nn.rope import RotaryEmbedding
from megalith.parallel.mesh import Mesh, build_mesh, build_meta_mesh, build_single_rank_mesh
from megalith.parallel.tensor import Init
from megalith.plan.grid import model_grid

SIZES: dict[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 18,
    "num_layers": 1,
    "num_heads": 6,
    "num_kv_heads": 3,
    "ffn_hidden_size": 11,
    "max_seq_len": 32,
    "qkv_bias": True,
    "output_bias": True,
    "mlp_bias": True,
    "head_dim": 4,
}


def config(**changes: Any) -> ModelConfig:
    """A model of one layer, with biases."""
    return ModelConfig(**SIZES | changes)


def build(kind: type[nn.Module], model: ModelConfig, mesh: Mesh | None = None) -> nn.Module:
    """A layer in float64 with random weights and biases, the same under every layout."""
    context = build_context(model, mesh or build_single_rank_mesh(), dtype=torch.float64)
    layer = kind("layers.0.x", model, context)
    layer.to_empty(device="cpu")
    for declared, module, name in iter_parameter_specs(layer):
        init_param_(getattr(module, name), declared.shard, Init(0.3, offset=0.1), seed=2)
    return layer


def paper(model: ModelConfig, tp: int, rank: int) -> Mesh:
    """A place among tp ranks that do not exist."""
    return build_meta_mesh(model_grid(ParallelConfig(tp=tp), model, tp), rank=rank)


def real(model: ModelConfig, tp: int, rank: int) -> Mesh:
    """A place among tp processes."""
    return build_mesh(model_grid(ParallelConfig(tp=tp), model, tp), rank=rank)


def layer_inputs(model: ModelConfig, lengths: list[int]) -> LayerInputs:
    """Documents, with their rotations."""
    return RotaryEmbedding(model, torch.float64).add_to(
        LayerInputs(seq_params_from_lengths(lengths))
    )


def inputs(count: int, features: int = 18) -> Tensor:
    """x [count, features] in float64."""
    return torch.randn(
        count, features, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )


def weights(layer: nn.Module) -> dict[str, Tensor]:
    """Weights by the last part of their names, in the shapes of their boxes."""
    return {
        declared.shard.name.rpartition(".x.")[2]: getattr(module, name)
        .detach()
        .view(declared.shard.box_shape)
        for declared, module, name in iter_parameter_specs(layer)
    }


@pytest.fixture
def layers() -> SimpleNamespace:
    """Functions that make layers and what they read."""
    return SimpleNamespace(
        config=config,
        build=build,
        paper=paper,
        real=real,
        layer_inputs=layer_inputs,
        inputs=inputs,
        weights=weights,
    )
