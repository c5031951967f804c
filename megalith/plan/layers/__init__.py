"""Layer kinds: what planning knows about each kind of layer, one module per kind.

A decoder layer is a list of residual branches (`branches`), and each branch has a layer of some
kind: a key of `LAYER_KINDS`. Parameters, memory, FLOPs and communication of a run are sums over the
branches of its layers. A new kind is one module and one row of the table; a layer gets it if
`model.layers.attention` or `model.layers.mlp` has its name.
"""

from collections.abc import Iterator

from megalith.config.model import ModelConfig
from megalith.plan.layers.attention import ATTENTION
from megalith.plan.layers.base import HeldParameter, LayerBranch, LayerKind, LayerRank
from megalith.plan.layers.cross_attention import CROSS_LAYER_ATTENTION
from megalith.plan.layers.linear_replacement import LINEAR_REPLACEMENT
from megalith.plan.layers.mla import MLA
from megalith.plan.layers.mlp import DENSE_MLP
from megalith.plan.layers.moe import MOE
from megalith.plan.layers.norm import norm_parameters

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
    kinds: list[LayerBranch] = []
    attention, mlp = model.attention_part(layer), model.mlp_part(layer)
    if attention != "none":
        full = "attention" if model.mla is None else "mla"
        kinds.append(
            LayerBranch("attention", full if attention == "full" else attention, layer, own)
        )
    if model.uses_cross_layer_source(layer):
        kinds.append(LayerBranch("cross", "cross_layer_attention", layer, own))
    if mlp != "none":
        full = "moe" if model.has_experts(layer) else "mlp"
        kinds.append(LayerBranch("mlp", full if mlp == "full" else mlp, layer, own))
    return kinds


def branch_parameters(branch: LayerBranch, rank: LayerRank) -> Iterator[HeldParameter]:
    """Yield the parameters of a branch and of the norms around its layer."""
    model = branch.model
    shares_norm = branch.name == "mlp" and model.block == "parallel_one_norm"
    if model.norm_placement != "after" and not shares_norm:
        yield from norm_parameters(f"{branch.name}_norm", model)
    yield from LAYER_KINDS[branch.kind].parameters(branch, rank)
    if model.norm_placement != "before":
        yield from norm_parameters(f"{branch.name}_post_norm", model)
