from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from megalith.config.model import Activation, ModelConfig
from megalith.config.parallel import ParallelConfig, RecomputeConfig
from megalith.kernels.activation import (
    GatedActivation,
    activate,
    gated,
    reference_activate,
    reference_gated,
    swiglu,
)
from megalith.kernels.layer_inputs import LayerInputs
from megalith.kernels.linear import recompute_recipe, register_recompute
from megalith.kernels.packed import seq_params_from_queries
from megalith.models.decoder import iter_parameter_specs
from megalith.nn.build import build_context, init_param_
from megalith.nn.mlp import (
    MLP,
    ChunkedPrefillMLP,
    GatedMLP,
    build_mlp,
    choose_activation,
    recompute_activation,
)
from megalith.parallel.collectives import all_gather
from megalith.parallel.mesh import Mesh, build_mesh, build_single_rank_mesh
from megalith.parallel.tensor import Init
from megalith.plan.grid import model_grid
from megalith.testing.ranks import run_ranks
from megalith.testing.tolerance import FP64, assert_equals

GPT_OSS = {"activation": "quick_gelu", "activation_clamp": 0.9, "up_offset": 1.0}
KINDS: list[dict[str, Any]] = [{}, GPT_OSS, {"gated": False, "activation": "gelu"}]


@pytest.mark.parametrize("bias", [False, True])
def test_gated_mlp_matches_the_formula_of_the_paper(bias: bool, layers: SimpleNamespace) -> None:
    layer = layers.build(build_mlp, layers.config(mlp_bias=bias))
    assert isinstance(layer, GatedMLP)
    w, x = layers.weights(layer), layers.inputs(5)
    biases = (
        (w["gate_up_bias"], w["down_bias"])
        if bias
        else (torch.zeros(2, 1).double(), torch.zeros(1).double())
    )
    gate, up = (x @ w["gate_up"][i].T + biases[0][i] for i in range(2))
    assert_equals("mlp", layer(x), (silu(gate) * up) @ w["down"].T + biases[1], FP64)


@pytest.mark.parametrize("activation", get_args(Activation))
def test_mlp_matches_its_formula(activation: Activation, layers: SimpleNamespace) -> None:
    layer = layers.build(build_mlp, layers.config(gated=False, activation=activation))
    assert isinstance(layer, MLP)
    w, x = layers.weights(layer), layers.inputs(5)
    inner = reference_activate(x @ w["up"].T + w["up_bias"], activation)
    assert_equals("mlp", layer(x), inner @ w["down"].T + w["down_bias"], FP64)


def test_gate_clamp_and_up_offset(layers: SimpleNamespace) -> None:
    layer = layers.build(build_mlp, layers.config(**GPT_OSS))
    w, x = layers.weights(layer), layers.inputs(5)
    gate_up = torch.cat([x @ w["gate_up"][i].T + w["gate_up_bias"][i] for i in range(2)], -1)
    inner = reference_gated(gate_up, GatedActivation("quick_gelu", 0.9, 1.0))
    assert not torch.equal(
        inner, reference_gated(gate_up, GatedActivation("quick_gelu", None, 1.0))
    ), "limits are reached"
    assert_equals("mlp", layer(x), inner @ w["down"].T + w["down_bias"], FP64)


def test_prompt_in_chunks_matches_the_full_prompt(layers: SimpleNamespace) -> None:
    config, x = layers.config(mlp_bias=True), layers.inputs(7)
    layer = layers.build(build_mlp, config)
    context = build_context(config, build_single_rank_mesh(), prefill_mlp_chunks=3)
    divided = build_mlp("layers.0.x", config, context)
    assert isinstance(divided, ChunkedPrefillMLP)
    divided.mlp = layer
    widest: list[int] = []
    layer.down.register_forward_pre_hook(lambda module, given: widest.append(len(given[0])))
    assert_equals(
        "whole", divided(x, LayerInputs(seq_params_from_queries([(7, 9)]))), layer(x), FP64
    )
    assert widest == [3, 2, 2, 7]
    divided(x[:2], LayerInputs(seq_params_from_queries([(2, 2)])))
    divided(x[:3], LayerInputs(seq_params_from_queries([(1, 4), (1, 8), (1, 2)])))
    assert widest[4:] == [1, 1, 3], (
        "no chunk is empty, and texts that grow by a token are read at once"
    )


@pytest.mark.parametrize("tp", [2, 3, 4])
@pytest.mark.parametrize("changes", KINDS)
def test_uneven_shards_cover_the_full_matrices(
    tp: int, changes: dict[str, Any], layers: SimpleNamespace
) -> None:
    config = layers.config(mlp_bias=True, num_kv_heads=6, **changes)
    whole = layers.weights(layers.build(build_mlp, config))
    parts = [
        layers.weights(layers.build(build_mlp, config, layers.paper(config, tp, rank)))
        for rank in range(tp)
    ]
    cut = {"gate_up": 1, "gate_up_bias": 1, "up": 0, "up_bias": 0, "down": 1}
    for name, tensor in whole.items():
        if name == "down_bias":
            assert all(torch.equal(part[name], tensor) for part in parts)
        else:
            assert torch.equal(torch.cat([part[name] for part in parts], cut[name]), tensor)


def _filled(config: ModelConfig, mesh: Mesh, sp: bool) -> nn.Module:
    recompute = RecomputeConfig(granularity="selective", modules=("mlp_act",))
    context = build_context(
        config, mesh, ParallelConfig(sp=sp), dtype=torch.float64, recompute=recompute
    )
    layer = build_mlp("layers.0.x", config, context)
    layer.to_empty(device="cpu")
    for declared, module, name in iter_parameter_specs(layer):
        init_param_(getattr(module, name), declared.shard, Init(0.3, offset=0.1), seed=2)
    return layer


def _results(layer: nn.Module, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(dy)
    assert x.grad is not None
    gradients = {
        declared.shard.name: getattr(m, name).grad
        for declared, m, name in iter_parameter_specs(layer)
    }
    return y.detach(), x.grad, gradients


def _equals_one_rank(rank: int, world: int, config: ModelConfig, x: Tensor, sp: bool) -> None:
    mesh, dy = build_mesh(model_grid(ParallelConfig(tp=world), config, world), rank=rank), x.flip(0)
    alone = _filled(config, build_single_rank_mesh(), False)
    layer = _filled(config, mesh, sp)
    actual = slice(rank * 6 // world, (rank + 1) * 6 // world) if sp else slice(None)
    y, dx, gradients = _results(layer, x[actual], dy[actual])
    expected_y, expected_dx, expected = _results(alone, x, dy)
    assert_equals("y", y, expected_y[actual], FP64)
    assert_equals("dx", dx, expected_dx[actual], FP64)
    for declared, _, _ in iter_parameter_specs(layer):
        shard = declared.shard
        gradient = gradients[shard.name]
        if sp and not shard.cut:  # ranks have seen other tokens
            gradient = all_gather(gradient.unsqueeze(0), mesh.tp).sum(0)
        box = tuple(slice(start, stop) for start, stop in shard.box)
        assert_equals(
            shard.name,
            gradient.view(shard.box_shape),
            expected[shard.name].view(shard.shape)[box],
            FP64,
        )


@pytest.mark.parametrize(("tp", "sp"), [(2, False), (3, False), (2, True), (3, True)])
@pytest.mark.parametrize("changes", KINDS[1:])
def test_tensor_parallel_results_and_gradients_match_one_rank(
    tp: int, sp: bool, changes: dict[str, Any], layers: SimpleNamespace
) -> None:
    run_ranks(_equals_one_rank, tp, layers.config(num_kv_heads=6, **changes), layers.inputs(6), sp)


def test_without_biases_there_are_none(layers: SimpleNamespace) -> None:
    assert layers.weights(layers.build(build_mlp, layers.config(mlp_bias=False))).keys() == {
        "gate_up",
        "down",
    }
    plain = layers.config(mlp_bias=False, gated=False)
    assert layers.weights(layers.build(build_mlp, plain)).keys() == {"up", "down"}


def test_the_kernel_for_a_plain_silu_gate_is_swiglu(layers: SimpleNamespace) -> None:
    assert choose_activation(layers.config()) is swiglu
    for changes in ({"activation": "gelu"}, {"activation_clamp": 7.0}, {"up_offset": 1.0}):
        assert choose_activation(layers.config(**changes)).func is gated  # type: ignore[attr-defined]  # a partial
    assert choose_activation(layers.config(gated=False)).func is activate  # type: ignore[attr-defined]


@pytest.mark.parametrize("changes", KINDS)
def test_activation_is_recomputed_from_the_up_projection(
    changes: dict[str, Any], layers: SimpleNamespace
) -> None:
    x, activation = layers.inputs(5), choose_activation(layers.config(**changes))
    y = recompute_activation(register_recompute, activation, x)
    recipe = recompute_recipe(y)
    assert recipe is not None and recipe.inputs[0] is x
    assert torch.equal(y, activation(x)) and torch.equal(recipe.function(*recipe.inputs), y)
