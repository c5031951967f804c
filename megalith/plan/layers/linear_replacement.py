"""Linear replacement of attention or of an MLP: one h·h matrix, which every tensor-parallel rank
computes for its own tokens."""

from collections.abc import Iterator, Sequence

from megalith.plan.layers.base import (
    HeldParameter,
    LayerBranch,
    LayerKind,
    LayerRank,
    LayerSetting,
    SavedActivation,
)


def _parameters(branch: LayerBranch, rank: LayerRank) -> Iterator[HeldParameter]:
    """Yield an h·h matrix and its bias."""
    model = branch.model
    yield HeldParameter(f"{branch.name}.linear", model.hidden_size, model.hidden_size)
    if model.output_bias if branch.name == "attention" else model.mlp_bias:
        yield HeldParameter(f"{branch.name}.linear_bias", model.hidden_size)


def _saved_tensors(
    branch: LayerBranch, setting: LayerSetting, again: Sequence[str], saves_input: bool
) -> list[SavedActivation]:
    """Return its input."""
    region = branch.name if branch.name in again else f"{branch.name}.linear"
    return [setting.hidden(region)] if saves_input else []


LINEAR_REPLACEMENT = LayerKind(parameters=_parameters, saved_tensors=_saved_tensors)
