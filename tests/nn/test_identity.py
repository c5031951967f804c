"""A linear layer in place of attention or an MLP."""

from types import SimpleNamespace

import torch
from torch import nn

from megalith.models.decoder import iter_parameter_specs
from megalith.nn.layer import LinearReplacement
from megalith.parallel.mesh import Mesh
from megalith.parallel.tensor import SequenceParallelComm, TensorParallelComm, TPComm
from megalith.plan.shards import gradient_sum_axes
from megalith.testing.tolerance import FP64, assert_equals


def built(layers: SimpleNamespace, *, bias: bool) -> nn.Module:
    def kind(
        name: str, config: object, mesh: Mesh, tp_comm: TPComm, *, dtype: torch.dtype
    ) -> nn.Module:
        return LinearReplacement(name, layers.config(), tp_comm, bias=bias, dtype=dtype)

    layer: nn.Module = layers.build(kind, layers.config())
    return layer


def test_linear_replacement_with_and_without_bias(layers: SimpleNamespace) -> None:
    for bias in (False, True):
        layer, x = built(layers, bias=bias), layers.inputs(5)
        w = layers.weights(layer)
        assert list(w) == ["linear", "linear_bias"][: 1 + bias]
        assert_equals("y", layer(x), x @ w["linear"].T + (w["linear_bias"] if bias else 0), FP64)


def test_sequence_parallel_gradients_are_summed_over_ranks(
    layers: SimpleNamespace,
) -> None:
    mesh = layers.paper(layers.config(), 2, 1)
    for tp_comm, summed in (
        (SequenceParallelComm(mesh.tp), True),
        (TensorParallelComm(mesh.tp), False),
    ):
        square = LinearReplacement(
            "layers.0.mlp", layers.config(), tp_comm, bias=True, dtype=torch.float32
        )
        shards = [declared.shard for declared, _, _ in iter_parameter_specs(square)]
        assert len(shards) == 2
        assert all(({*mesh.tp.axes} <= {*gradient_sum_axes(shard)}) == summed for shard in shards)
