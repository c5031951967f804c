"""What recomputation costs: operations that backward does a second time, layer by layer; no
torch."""

from collections.abc import Sequence
from typing import NamedTuple

from megalith.config.lora import lora_layers
from megalith.config.model import ModelConfig
from megalith.config.recompute import OffloadConfig, RecomputeConfig
from megalith.config.train import TrainRun
from megalith.plan.costs import attention_flops, latent_flops, layer_flops, mlp_flops, shared_flops
from megalith.plan.frozen import first_trained_layer, tables_trained
from megalith.plan.recompute import layer_spans, modules_again
from megalith.plan.stages import Stage


def repeated_flops(
    run: TrainRun,
    stages: Sequence[Stage],
    *,
    tokens: int,
    squared_lengths: int,
    windowed: int | None = None,
) -> int:
    """Operations of a step that are no new work: a second forward of whole layers or of the parts
    that are named, those of multi-token predictions among them; a third of what `step_flops` counts
    for them, whose arguments these are.

    stages: of the whole pipeline. What lies below everything that is trained has no backward, so
    nothing of it runs again; adapters' own products, few beside a layer's, are not counted. Source:
    Korthikanti et al. 2022, arXiv:2205.05198, appendix A.
    """
    if run.recompute.granularity == "none":
        return 0
    seen = _RepeatedTokens(run.model, tokens, squared_lengths, windowed)
    if run.recompute.granularity == "full":
        return sum(seen.layer(layer) for layer in _layers_again(run, stages)) // 3
    modules = modules_again(run.recompute)
    modules = tuple(
        one for one in modules if one != "core_attention" or "mla_up_proj" not in modules
    )  # it is inside
    layers = (layer for stage in stages for layer in _with_backward(stage.layers, run))
    num_mtp_layers = [run.model.num_layers - 1] * run.model.mtp.num_layers
    return (
        sum(seen.part(module, layer) for layer in (*layers, *num_mtp_layers) for module in modules)
        // 3
    )


def _layers_again(run: TrainRun, stages: Sequence[Stage]) -> list[int]:
    """Numbers of the layers that run again, over all stages; the last layer's once more for each
    multi-token prediction."""
    found = []
    for stage in stages:
        layers = _with_backward(stage.layers, run)
        found += _chosen(run.recompute, layers)
    return found + _chosen(run.recompute, [run.model.num_layers - 1]) * run.model.mtp.num_layers


def _chosen(recompute: RecomputeConfig, layers: Sequence[int]) -> list[int]:
    spans = layer_spans(recompute, OffloadConfig(), len(layers))
    return [layer for span in spans if span.recomputed for layer in layers[span.start : span.stop]]


def _with_backward(layers: range, run: TrainRun) -> list[int]:
    """Those from the first adapter on, or from the first that is trained."""
    if run.lora is not None:
        first = lora_layers(run.lora, run.model)[0]
    else:
        below = not run.optim.trains_all() and not tables_trained(run.model, run.optim)
        first = first_trained_layer(run.model, run.optim) if below else 0
    return [layer for layer in layers if layer >= first]


class _RepeatedTokens(NamedTuple):
    """Some documents that a model reads."""

    model: ModelConfig
    tokens: int
    squared_lengths: int
    windowed: int | None

    def layer(self, layer: int) -> int:
        """Useful operations of one layer."""
        return layer_flops(
            self.model,
            layer,
            tokens=self.tokens,
            squared_lengths=self.squared_lengths,
            windowed=self.windowed,
        )

    def part(self, module: str, layer: int) -> int:
        """The same of a part that backward computes again; norms and activations have none."""
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
