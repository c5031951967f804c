"""Layer kinds: what planning knows about each kind of layer, one module per kind.

A decoder layer is a list of residual branches (`branches`), and each branch has a layer of some
kind (`LayerKind`). Parameters, memory, FLOPs and communication of a run are sums over the branches
of its layers. A new kind is one module and one row of `LAYER_KINDS`, or the attribute `layer_kind`
of the class that `model.plugins.attention` or `model.plugins.mlp` names.
"""

from collections.abc import Iterator
from typing import Literal

from megalith.config.model import ModelConfig
from megalith.config.plugins import load_plugin
from megalith.plan.layers.attention import ATTENTION, CROSS_LAYER_ATTENTION
from megalith.plan.layers.base import (
    HeldParameter,
    LayerBranch,
    LayerKind,
    LayerRank,
    norm_parameters,
)
from megalith.plan.layers.mla import MLA
from megalith.plan.layers.mlp import DENSE_MLP, LINEAR_REPLACEMENT
from megalith.plan.layers.moe import MOE

LAYER_KINDS: dict[str, LayerKind] = {
    "attention": ATTENTION,
    "mla": MLA,
    "cross_layer_attention": CROSS_LAYER_ATTENTION,
    "linear": LINEAR_REPLACEMENT,
    "mlp": DENSE_MLP,
    "moe": MOE,
}
"""Planning functions of each kind of layer."""


def branches(model: ModelConfig, layer: int) -> list[LayerBranch]:
    """Return the residual branches of a decoder layer by its global number, in order of
    computation."""
    own = model.at(layer)
    layer_branches: list[LayerBranch] = []
    attention, mlp = model.attention_part(layer), model.mlp_part(layer)
    if attention != "none":
        kind = _attention_kind(model) if attention == "full" else LAYER_KINDS[attention]
        layer_branches.append(LayerBranch("attention", kind, layer, own))
    if model.uses_cross_layer_source(layer):
        kind = LAYER_KINDS["cross_layer_attention"]
        layer_branches.append(LayerBranch("cross", kind, layer, own))
    if mlp != "none":
        kind = _mlp_kind(model, layer) if mlp == "full" else LAYER_KINDS[mlp]
        layer_branches.append(LayerBranch("mlp", kind, layer, own))
    return layer_branches


def _attention_kind(model: ModelConfig) -> LayerKind:
    """Return the kind of full attention."""
    built_in = LAYER_KINDS["attention" if model.mla is None else "mla"]
    return _plugin_kind("attention", model.plugins.attention, built_in)


def _mlp_kind(model: ModelConfig, layer: int) -> LayerKind:
    """Return the kind of a full MLP or of the experts; plug-ins replace only MLPs."""
    if model.has_experts(layer):
        return LAYER_KINDS["moe"]
    return _plugin_kind("mlp", model.plugins.mlp, LAYER_KINDS["mlp"])


def _plugin_kind(
    plugin: Literal["attention", "mlp"], name: str | None, built_in: LayerKind
) -> LayerKind:
    """Return the `layer_kind` of a plug-in; without a plug-in, or without this attribute, the kind
    of the built-in layer that it replaces."""
    if name is None:
        return built_in
    kind: LayerKind = getattr(load_plugin(plugin, name), "layer_kind", built_in)
    return kind


def plugins_without_layer_kind(model: ModelConfig) -> list[str]:
    """Return the settings of the model's plug-ins that planning counts as built-in layers."""
    plugins = model.plugins
    named = {"attention": plugins.attention, "mlp": plugins.mlp, "block": plugins.block}
    return [
        f"model.plugins.{kind}={name}"
        for kind, name in named.items()
        if name is not None and not hasattr(load_plugin(kind, name), "layer_kind")
    ]


def branch_parameters(branch: LayerBranch, rank: LayerRank) -> Iterator[HeldParameter]:
    """Yield the parameters of a branch and of the norms around its layer."""
    model = branch.model
    shares_norm = branch.name == "mlp" and model.block == "parallel_one_norm"
    if model.norm_placement != "after" and not shares_norm:
        yield from norm_parameters(f"{branch.name}_norm", model)
    yield from branch.kind.parameters(branch, rank)
    if model.norm_placement != "before":
        yield from norm_parameters(f"{branch.name}_post_norm", model)
