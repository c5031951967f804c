"""Frozen weights: layers without backward."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megalith.kernels.layer_inputs import LayerInputs
from megalith.parallel.recompute import LayerRunner, SpanHook


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
