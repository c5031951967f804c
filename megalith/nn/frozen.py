"""Frozen weights: which parameters are not trained, and where backward ends."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megalith.config.model import ModelConfig
from megalith.config.optim import OptimConfig
from megalith.kernels.layer_inputs import LayerInputs
from megalith.parallel.recompute import LayerRunner, SpanHook
from megalith.plan.frozen import first_trained_layer, tables_trained


@dataclass(frozen=True, slots=True)
class FrozenLayerRunner:
    """Runs the layers of a chunk; layers below all trained ones run without autograd and save
    nothing."""

    run: LayerRunner
    count: int
    """Number of leading frozen layers; if it is all of the chunk's, the result requires no
    gradient."""

    def __call__(
        self,
        layers: Sequence[nn.Module],
        x: Tensor,
        inputs: LayerInputs,
        span_hook: SpanHook | None = None,
    ) -> tuple[Tensor, LayerInputs]:
        """x [t, h], in the layout of the layers -> [t, h], and the inputs with the cross-layer
        source."""
        training = torch.is_grad_enabled()
        below = span_hook is not None and span_hook.before < self.count
        with torch.no_grad():
            x, inputs = self.run(layers[: self.count], x, inputs, span_hook if below else None)
        rest, later = (
            layers[self.count :],
            None if span_hook is None or below else span_hook.after(self.count),
        )
        return (
            self.run(rest, x.requires_grad_() if training else x, inputs, later)
            if rest
            else (x, inputs)
        )


class BackwardBoundary(nn.Module):
    """Input embedding with frozen weights whose output requires a gradient, because activation
    checkpointing has no backward otherwise."""

    def __init__(self, input_embedding: nn.Module) -> None:
        super().__init__()
        self.input_embedding = input_embedding

    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """x [t, h] -> [t, h]."""
        x = self.input_embedding(x, inputs)
        return x.requires_grad_() if torch.is_grad_enabled() else x


def end_backward_at(chunk: Any, layer: int) -> None:  # a `Decoder`, whose module imports this one
    """Stop backward above the frozen layers of a chunk: no layer below `layer` and no embedding
    gets a gradient."""
    below = sum(number < layer for number in chunk.stage.layers)
    if below:
        chunk.run_layers = FrozenLayerRunner(chunk.run_layers, below)
    elif chunk.stage.embedding:
        chunk.input_embedding = BackwardBoundary(chunk.input_embedding)


def freeze(chunks: Sequence[Any], model: ModelConfig, optim: OptimConfig) -> None:
    """Freeze all parameters that `optim` does not train, in the chunks of a model on the meta
    device; a parameter that two chunks share is one parameter.

    `chunks` are `Decoder`s, which this module cannot import without a cycle.
    """
    if optim.trains_all():
        return
    for chunk in chunks:
        for module in chunk.modules():
            for name, spec in module.__dict__.get("param_specs", {}).items():
                if not optim.trains(spec.shard.name):
                    getattr(module, name).requires_grad_(False)
        if not tables_trained(model, optim):
            end_backward_at(chunk, first_trained_layer(model, optim))
