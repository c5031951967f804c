"""Frozen weights get no gradient, backward stops above them, and results match full training."""

import pytest
import torch
from torch import Tensor

from megalith.config.model import ModelConfig, MTPConfig
from megalith.config.optim import TRAIN_ALL, OptimConfig
from megalith.kernels.layer_inputs import LayerInputs
from megalith.kernels.packed import seq_params_from_lengths
from megalith.models.decoder import Decoder, allocate, initialize, iter_parameter_specs
from megalith.nn.build import build_context
from megalith.parallel.mesh import build_single_rank_mesh
from megalith.parallel.recompute import FrozenLayerRunner
from megalith.train.objective import sum_lm_losses

MODEL = ModelConfig(
    vocab_size=61,
    hidden_size=12,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    ffn_hidden_size=7,
    max_seq_len=16,
    mtp=MTPConfig(num_layers=1),
)


def built(optim: OptimConfig) -> Decoder:
    context = build_context(MODEL, build_single_rank_mesh(), dtype=torch.float64, optim=optim)
    model = Decoder(context)
    allocate(model, torch.device("cpu"))
    initialize(model, seed=1)
    return model


def gradients(optim: OptimConfig) -> dict[str, Tensor]:
    model, tokens = built(optim), LayerInputs(seq_params_from_lengths([5, 4], device="cpu"))
    ids, labels = torch.arange(9) * 5 % 61, torch.arange(9) * 7 % 61
    torch.stack(
        sum_lm_losses(
            model.outputs(ids, tokens, mtp_inputs=((labels, ids),)), labels, ((labels, ids),)
        )
    ).sum().backward()
    pairs = [(d.shard.name, getattr(m, name)) for d, m, name in iter_parameter_specs(model)]
    assert all(one.requires_grad == optim.trains(name) for name, one in pairs)
    return {name: one.grad for name, one in pairs if one.grad is not None}


@pytest.mark.parametrize(
    "optim",
    [
        OptimConfig(frozen=("embed.weight", "layers.[01].*")),
        OptimConfig(trained=("head.weight",)),
        OptimConfig(trained=("mtp.*",)),
        OptimConfig(frozen=("*.attention.q",)),
        OptimConfig(frozen=("embed.weight",)),
        OptimConfig(trained=("embed.weight",)),
    ],
)
def test_gradients_of_trained_weights_match_full_training(
    optim: OptimConfig,
) -> None:
    whole, some = gradients(TRAIN_ALL), gradients(optim)
    assert some.keys() == {name for name in whole if optim.trains(name)}
    for name, gradient in some.items():
        torch.testing.assert_close(gradient, whole[name], rtol=1e-12, atol=1e-14)


def test_backward_stops_above_frozen_layers() -> None:
    upper = built(OptimConfig(trained=("layers.2.*",)))
    run: object = upper.run_layers
    assert isinstance(run, FrozenLayerRunner) and run.count == 2
    first = built(OptimConfig(frozen=("embed.weight",)))
    assert first.input_embedding.requires_grad
    assert not isinstance(first.run_layers, FrozenLayerRunner)
    whole = built(OptimConfig(frozen=("layers.*",)))
    assert not whole.input_embedding.requires_grad
    assert not isinstance(whole.run_layers, FrozenLayerRunner)


def test_model_is_unchanged_without_frozen_weights() -> None:
    model = built(TRAIN_ALL)
    assert not isinstance(model.run_layers, FrozenLayerRunner)
    assert not model.input_embedding.requires_grad
    assert all(one.requires_grad for one in model.parameters())
