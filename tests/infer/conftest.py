"""A tiny model whose scores differ enough for its texts to be interesting."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megalith.config.model import ModelConfig
from megalith.models.decoder import Decoder, allocate, build_chunks, initialize
from megalith.nn.build import build_context
from megalith.parallel.mesh import Mesh, build_single_rank_mesh

SIZES: dict[str, Any] = {
    "vocab_size": 37,
    "hidden_size": 12,
    "num_layers": 2,
    "num_heads": 6,
    "num_kv_heads": 2,
    "ffn_hidden_size": 10,
    "max_seq_len": 96,
    "pad_vocab_to_multiple_of": 8,
    "init_std": 0.7,
}


def config(**changes: Any) -> ModelConfig:
    """A model of a few thousand weights."""
    return ModelConfig(**SIZES | changes)


def model(model_config: ModelConfig, mesh: Mesh | None = None, **fields: Any) -> Decoder:
    """A model, or a pipeline stage of it, with initial weights, the same under every layout;
    `fields`: see `BuildContext`."""
    (decoder,) = build_chunks(
        build_context(model_config, mesh or build_single_rank_mesh(), **fields)
    )
    allocate(decoder, torch.device("cpu"))
    initialize(decoder, seed=11)
    return decoder


@pytest.fixture
def tiny() -> SimpleNamespace:
    """Functions that make tiny models."""
    return SimpleNamespace(config=config, model=model)
