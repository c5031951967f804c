from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import silu

from megalith.kernels.rebuilt import Rebuilt
from megalith.kernels.swiglu import swiglu
from megalith.nn.mlp import SwiGLU, swiglu_again
from megalith.testing.tolerance import FP64, assert_equals


@pytest.mark.parametrize("bias", [False, True])
def test_it_is_the_formula_of_the_paper(bias: bool, layers: SimpleNamespace) -> None:
    layer = layers.build(SwiGLU, layers.config(mlp_bias=bias))
    w, x = layers.weights(layer), layers.inputs(5)
    biases = (w["gate_up_bias"], w["down_bias"]) if bias else (torch.zeros(2, 1).double(), torch.zeros(1).double())
    gate, up = (x @ w["gate_up"][i].T + biases[0][i] for i in range(2))
    assert_equals("mlp", layer(x), (silu(gate) * up) @ w["down"].T + biases[1], FP64)


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_ranks_hold_uneven_slices_whose_parts_add_up(tp: int, layers: SimpleNamespace) -> None:
    config = layers.config(mlp_bias=True, num_kv_heads=6)
    whole = layers.weights(layers.build(SwiGLU, config))
    parts = [layers.weights(layers.build(SwiGLU, config, layers.paper(config, tp, rank))) for rank in range(tp)]
    for name, dim in (("gate_up", 1), ("gate_up_bias", 1), ("down", 1)):
        assert torch.equal(torch.cat([part[name] for part in parts], dim), whole[name])
    assert all(torch.equal(part["down_bias"], whole["down_bias"]) for part in parts)
    x = layers.inputs(5)
    found = whole["down_bias"].expand(5, -1)
    for part in parts:
        gate, up = (x @ part["gate_up"][i].T + part["gate_up_bias"][i] for i in range(2))
        found = found + (silu(gate) * up) @ part["down"].T
    assert_equals("sum of the parts", found, layers.build(SwiGLU, config)(x), FP64)


def test_without_biases_there_are_none(layers: SimpleNamespace) -> None:
    assert layers.weights(layers.build(SwiGLU, layers.config(mlp_bias=False))).keys() == {"gate_up", "down"}


def test_gated_features_are_rebuilt_from_gate_and_up(layers: SimpleNamespace) -> None:
    gate_up = layers.inputs(5)
    found = swiglu_again(Rebuilt, gate_up)
    assert torch.equal(found.value, swiglu(gate_up)) and torch.equal(found.again(*found.inputs), found.value)
    assert found.inputs[0] is gate_up
