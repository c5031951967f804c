"""A linear layer in place of attention or an MLP."""

from functools import partial
from types import SimpleNamespace

from torch import nn

from megalith.config.parallel import ParallelConfig
from megalith.models.decoder import iter_parameter_specs
from megalith.nn.build import build_context
from megalith.nn.layer import LinearReplacement
from megalith.plan.shards import gradient_sum_axes
from megalith.testing.tolerance import FP64, assert_equals


def built(layers: SimpleNamespace, *, bias: bool) -> nn.Module:
    layer: nn.Module = layers.build(partial(LinearReplacement, bias=bias), layers.config())
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
    config = layers.config()
    mesh = layers.paper(config, 2, 1)
    for sp in (True, False):
        context = build_context(config, mesh, ParallelConfig(sp=sp))
        square = LinearReplacement("layers.0.mlp", config, context, bias=True)
        shards = [declared.shard for declared, _, _ in iter_parameter_specs(square)]
        assert len(shards) == 2
        assert all(({*mesh.tp.axes} <= {*gradient_sum_axes(shard)}) == sp for shard in shards)
