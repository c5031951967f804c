"""Multi-token prediction (MTP): a decoder layer like the last one, a projection of 2·h·h, and three
norms; it shares the embedding and the head of the model."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from megalith.config.model import ModelConfig
from megalith.plan.layers.base import HeldParameter, LayerSetting, SavedActivation
from megalith.plan.layers.embedding import embedding_tensors
from megalith.plan.layers.norm import norm_parameters, norm_tensors, stream_norm_tensors


def mtp_parameters(model: ModelConfig, layer: Iterable[HeldParameter]) -> Iterator[HeldParameter]:
    """Yield the parameters of one MTP layer; `layer`: those of its decoder layer."""
    for word in ("embed_norm", "hidden_norm", "norm"):
        yield from norm_parameters(word, model)
    yield HeldParameter("project", model.hidden_size, 2 * model.hidden_size)
    for one in layer:
        yield replace(one, name=f"layer.{one.name}")


def mtp_projection_flops(model: ModelConfig, tokens: int) -> int:
    """Return the model FLOPs of the projection."""
    return 6 * tokens * 2 * model.hidden_size**2


def mtp_tensors(
    setting: LayerSetting, region: str, layer: Iterable[SavedActivation]
) -> Iterator[SavedActivation]:
    """Yield the saved tensors of one MTP layer; `layer`: those of its decoder layer."""
    width = 2 * setting.own_tokens * setting.model.hidden_size
    yield from embedding_tensors(setting, f"{region}.")
    yield from stream_norm_tensors(setting, f"{region}.embed_norm")
    yield from norm_tensors(setting, f"{region}.hidden_norm")
    yield SavedActivation(f"{region}.project", "input", width, width * setting.element)
    yield from layer
    yield from stream_norm_tensors(setting, f"{region}.norm")
