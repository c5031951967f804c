"""What planning knows about the attention of this package: the parameters differ from the built-in
attention's, everything else is the same."""

from collections.abc import Iterator
from dataclasses import replace

from megalith.plan.layers.attention import ATTENTION, output_parameters
from megalith.plan.layers.base import HeldParameter, LayerBranch, LayerRank


def parameters(branch: LayerBranch, rank: LayerRank) -> Iterator[HeldParameter]:
    """Yield Q, K and V of all heads, the output projection and one weight per head."""
    model, heads = branch.model, branch.tensor_part(rank).heads
    features = heads * model.head_size()
    yield HeldParameter("attention.value_residual", heads, cut=True)
    for part in ("q", "k", "v"):
        name, stacked = f"attention.{part}", part != "q"
        yield HeldParameter(name, features, model.hidden_size, cut=True, stacked=stacked)
    yield from output_parameters(model, features)


VALUE_RESIDUAL = replace(ATTENTION, parameters=parameters)
