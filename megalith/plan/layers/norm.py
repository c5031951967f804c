"""Norms: RMSNorm and LayerNorm, of the residual stream or inside a residual branch."""

from collections.abc import Iterator

from megalith.config.model import ModelConfig
from megalith.plan.layers.base import HeldParameter, LayerSetting, SavedActivation, Summed


def norm_parameters(
    name: str, model: ModelConfig, *, size: int | None = None, summed: Summed = "sp"
) -> Iterator[HeldParameter]:
    """Yield a weight and, for LayerNorm, a bias, of `size` features; unset: h."""
    yield HeldParameter(f"{name}.weight", size or model.hidden_size, summed=summed)
    if model.norm == "layer":
        yield HeldParameter(f"{name}.bias", size or model.hidden_size, summed=summed)


def norm_tensors(
    setting: LayerSetting, region: str, *, tokens: int | None = None, features: int | None = None
) -> list[SavedActivation]:
    """Return the saved tensors of a norm inside a residual branch: its input first, then one or two
    statistics."""
    own = setting.own_tokens if tokens is None else tokens
    width = own * (setting.model.hidden_size if features is None else features)
    rows = [
        SavedActivation(region, "input", width, width * setting.element),
        SavedActivation(region, "scale", own, own * setting.wide),
    ]
    if setting.model.norm == "layer":
        rows.append(SavedActivation(region, "mean", own, own * setting.wide))
    return rows


def stream_norm_tensors(setting: LayerSetting, region: str) -> list[SavedActivation]:
    """Return the saved tensors of a norm of the residual stream."""
    read, *statistics = norm_tensors(setting, region)
    return [read._replace(nbytes=read.numel * setting.stream), *statistics]


def residual_norm_tensors(setting: LayerSetting, norm: str) -> list[SavedActivation]:
    """Return the saved tensors of a norm that also adds its input to the residual stream."""
    return [row._replace(what=f"{row.what} of {norm}") for row in stream_norm_tensors(setting, "")]
