"""Weights that are not trained: which they are, and where backward ends above them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megalith.config.model import ModelConfig
from megalith.config.optim import OptimConfig
from megalith.kernels.tokens import PackedSeqParams
from megalith.parallel.recompute import LayerRunner, SpanHook
from megalith.plan.frozen import first_trained_layer, tables_trained


@dataclass(frozen=True, slots=True)
class BelowTrained:
    """Runs the layers of a chunk: those below everything that is trained without backward, for
    which nothing of them is kept."""

    run: LayerRunner
    count: int
    """Of those layers: the chunk's first ones, or all it has. Then its result wants no gradient
    either."""

    def __call__(
        self,
        layers: Sequence[nn.Module],
        x: Tensor,
        tokens: PackedSeqParams,
        remember: SpanHook | None = None,
    ) -> tuple[Tensor, PackedSeqParams]:
        """x [t, h], as the layers have tokens -> [t, h], and the tokens with what was remembered on
        the way."""
        training = torch.is_grad_enabled()
        below = remember is not None and remember.before < self.count
        with torch.no_grad():
            x, tokens = self.run(layers[: self.count], x, tokens, remember if below else None)
        rest, later = (
            layers[self.count :],
            None if remember is None or below else remember.after(self.count),
        )
        return (
            self.run(rest, x.requires_grad_() if training else x, tokens, later)
            if rest
            else (x, tokens)
        )


class BackwardEnd(nn.Module):
    """What enters the layers, as the place where backward ends: frozen embeddings give nothing
    that wants a gradient, and regions that are computed again would have no backward."""

    def __init__(self, input_embedding: nn.Module) -> None:
        super().__init__()
        self.input_embedding = input_embedding

    def forward(self, x: Tensor, tokens: PackedSeqParams) -> Tensor:
        """x [t, h] -> [t, h]."""
        x = self.input_embedding(x, tokens)
        return x.requires_grad_() if torch.is_grad_enabled() else x


def end_backward_at(chunk: Any, layer: int) -> None:  # a `Decoder`, which is built of what is here
    """Let backward reach no layer of a chunk below this one, and not the embedding."""
    below = sum(number < layer for number in chunk.stage.layers)
    if below:
        chunk.run_layers = BelowTrained(chunk.run_layers, below)
    elif chunk.stage.embedding:
        chunk.input_embedding = BackwardEnd(chunk.input_embedding)


def freeze(chunks: Sequence[Any], model: ModelConfig, optim: OptimConfig) -> None:
    """Let nothing be trained that `optim` does not name, in the chunks of a model on the meta
    device; a parameter that two chunks share is one parameter.

    Chunks: `Decoder`s, which are built of what is here, so that this file cannot name them.
    """
    if optim.trains_all():
        return
    for chunk in chunks:
        for module in chunk.modules():
            for name, declared in module.__dict__.get("declared", {}).items():
                if not optim.trains(declared.shard.name):
                    getattr(module, name).requires_grad_(False)
        if not tables_trained(model, optim):
            end_backward_at(chunk, first_trained_layer(model, optim))
