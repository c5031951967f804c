"""One matrix in place of attention or an MLP."""

from types import SimpleNamespace

import torch
from torch import nn

from megalith.nn.square import Square
from megalith.parallel.mesh import Mesh
from megalith.parallel.tensor import Region
from megalith.testing.tolerance import FP64, assert_equals


def built(layers: SimpleNamespace, *, bias: bool) -> nn.Module:
    def kind(name: str, config: object, mesh: Mesh, region: Region, *, dtype: torch.dtype) -> nn.Module:
        return Square(name, layers.config(), region, bias=bias, dtype=dtype)

    layer: nn.Module = layers.build(kind, layers.config())
    return layer


def test_it_is_a_product_and_a_bias_where_there_is_one(layers: SimpleNamespace) -> None:
    for bias in (False, True):
        layer, x = built(layers, bias=bias), layers.inputs(5)
        w = layers.weights(layer)
        assert list(w) == ["linear", "linear_bias"][: 1 + bias]
        assert_equals("y", layer(x), x @ w["linear"].T + (w["linear_bias"] if bias else 0), FP64)
