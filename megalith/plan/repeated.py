"""Compute the cost of activation recomputation: FLOPs that backward repeats, layer by layer; no
torch."""

from collections.abc import Sequence
from typing import NamedTuple

from megalith.config.lora import lora_layers
from megalith.config.model import ModelConfig
from megalith.config.recompute import OffloadConfig, RecomputeConfig
from megalith.config.train import TrainRun
from megalith.plan.costs import attention_flops, latent_flops, layer_flops, mlp_flops, shared_flops
from megalith.plan.frozen import first_trained_layer, tables_trained
from megalith.plan.recompute import layer_spans, recomputed_modules
from megalith.plan.stages import Stage


def repeated_flops(
    run: TrainRun,
    stages: Sequence[Stage],
    *,
    tokens: int,
    squared_lengths: int,
    windowed: int | None = None,
) -> int:
    """Return the FLOPs of a step spent on recomputation: the forward of whole layers or of the
    selected modules, MTP layers included; a third of what `step_flops` counts for them.

    stages: of the whole pipeline; the other arguments are those of `step_flops`. Layers below every
    trained parameter have no backward, so they are not recomputed; the matmuls of adapters are not
    counted. Source: Korthikanti et al. 2022, arXiv:2205.05198, appendix A.
    """
    if run.recompute.granularity == "none":
        return 0
    token_counts = _RepeatedTokens(run.model, tokens, squared_lengths, windowed)
    if run.recompute.granularity == "full":
        return sum(token_counts.layer(layer) for layer in _list_recomputed_layers(run, stages)) // 3
    modules = recomputed_modules(run.recompute)
    modules = tuple(
        one for one in modules if one != "core_attention" or "mla_up_proj" not in modules
    )  # it is inside
    layers = (layer for stage in stages for layer in _layers_with_backward(stage.layers, run))
    mtp_layers = [run.model.num_layers - 1] * run.model.mtp.num_layers
    return (
        sum(
            token_counts.part(module, layer)
            for layer in (*layers, *mtp_layers)
            for module in modules
        )
        // 3
    )


def _list_recomputed_layers(run: TrainRun, stages: Sequence[Stage]) -> list[int]:
    """Return the numbers of the recomputed layers over all stages; the last layer's once more per
    MTP layer."""
    recomputed_layers = []
    for stage in stages:
        layers = _layers_with_backward(stage.layers, run)
        recomputed_layers += _select_recomputed(run.recompute, layers)
    return (
        recomputed_layers
        + _select_recomputed(run.recompute, [run.model.num_layers - 1]) * run.model.mtp.num_layers
    )


def _select_recomputed(recompute: RecomputeConfig, layers: Sequence[int]) -> list[int]:
    spans = layer_spans(recompute, OffloadConfig(), len(layers))
    return [layer for span in spans if span.recomputed for layer in layers[span.start : span.stop]]


def _layers_with_backward(layers: range, run: TrainRun) -> list[int]:
    """Return the layers from the first adapter, or the first trained parameter, on."""
    if run.lora is not None:
        first = lora_layers(run.lora, run.model)[0]
    else:
        below = not run.optim.trains_all() and not tables_trained(run.model, run.optim)
        first = first_trained_layer(run.model, run.optim) if below else 0
    return [layer for layer in layers if layer >= first]


class _RepeatedTokens(NamedTuple):
    """Token counts of the documents of a step."""

    model: ModelConfig
    tokens: int
    squared_lengths: int
    windowed: int | None

    def layer(self, layer: int) -> int:
        """Return the model FLOPs of one layer."""
        return layer_flops(
            self.model,
            layer,
            tokens=self.tokens,
            squared_lengths=self.squared_lengths,
            windowed=self.windowed,
        )

    def part(self, module: str, layer: int) -> int:
        """Return the model FLOPs of a recomputed module of a layer; 0 for norms and activations."""
        if module in ("mlp", "shared_experts"):
            return (mlp_flops if module == "mlp" else shared_flops)(self.model, layer, self.tokens)
        if module not in ("core_attention", "mla_up_proj"):
            return 0
        count = latent_flops if module == "mla_up_proj" else attention_flops
        return count(
            self.model,
            layer,
            tokens=self.tokens,
            squared_lengths=self.squared_lengths,
            windowed=self.windowed,
        )
