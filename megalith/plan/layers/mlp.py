"""MLP of a layer, and the linear layer that may replace attention or the MLP: parameters, saved
activations and messages."""

from collections.abc import Iterator, Sequence

from megalith.config.model import ModelConfig
from megalith.plan.layers.base import (
    HeldParameter,
    LayerBranch,
    LayerKind,
    LayerRank,
    LayerSetting,
    SavedActivation,
    TPMessages,
    hidden_gradient_numel,
)


def num_inner_copies(model: ModelConfig) -> int:
    """Return the number of tensors of f features inside an MLP: gate, up and the activation."""
    return 3 if model.gated else 2


def mlp_parameters(prefix: str, model: ModelConfig, ffn: int) -> Iterator[HeldParameter]:
    """Yield 3·h·f elements with a gate, else 2·h·f."""
    up = "gate_up" if model.gated else "up"
    inner = 2 * ffn if model.gated else ffn
    yield HeldParameter(f"{prefix}.{up}", inner, model.hidden_size, cut=True)
    if model.mlp_bias:
        yield HeldParameter(f"{prefix}.{up}_bias", inner, cut=True)
    yield HeldParameter(f"{prefix}.down", model.hidden_size, ffn, cut=True)
    if model.mlp_bias:
        yield HeldParameter(f"{prefix}.down_bias", model.hidden_size)


def mlp_tensors(
    setting: LayerSetting, ffn: int, recomputed: Sequence[str]
) -> list[SavedActivation]:
    """Return the saved tensors between the two matmuls."""
    inner, e, gated = ffn * setting.tokens, setting.element, setting.model.gated
    before = 2 * inner if gated else inner
    rows = [SavedActivation("mlp", "gate and up" if gated else "up", before, before * e)]
    return (
        rows
        if "mlp_act" in recomputed
        else [*rows, SavedActivation("mlp.down", "input", inner, inner * e)]
    )


def mlp_position(name: str) -> int:
    """Return 2 for the matrices that read the activation, else 1."""
    return 2 if name.rsplit(".", 1)[-1].startswith("down") else 1


def _parameters(branch: LayerBranch, rank: LayerRank) -> Iterator[HeldParameter]:
    yield from mlp_parameters("mlp", branch.model, branch.tensor_part(rank).ffn)


def _saved_tensors(
    branch: LayerBranch, setting: LayerSetting, recomputed: Sequence[str], saves_input: bool
) -> list[SavedActivation]:
    up = "mlp.gate_up" if branch.model.gated else "mlp.up"
    rows = [setting.hidden("mlp" if "mlp" in recomputed else up)] if saves_input else []
    return (
        rows if "mlp" in recomputed else rows + mlp_tensors(setting, setting.part.ffn, recomputed)
    )


def _weight_gradient_numel(branch: LayerBranch, setting: LayerSetting) -> int:
    """Return t · (2 h + 3 f) elements, or 2 f without a gate."""
    inner = num_inner_copies(branch.model) * branch.tensor_part(setting.rank).ffn
    return inner * setting.tokens + hidden_gradient_numel(branch, setting)


def _backward_numel(branch: LayerBranch, setting: LayerSetting) -> int:
    """Return t · 3 f elements, or 2 f without a gate, of the largest MLP of the model."""
    return num_inner_copies(branch.model) * setting.part.ffn * setting.tokens


def _tp_messages(branch: LayerBranch, recomputed: Sequence[str]) -> TPMessages:
    x = (branch.model.hidden_size,)
    return TPMessages(
        inputs=x, weight_inputs=x, recomputed_inputs=x if "mlp" in recomputed else (), sums=1
    )


DENSE_MLP = LayerKind(
    parameters=_parameters,
    saved_tensors=_saved_tensors,
    weight_gradient_numel=_weight_gradient_numel,
    backward_numel=_backward_numel,
    tp_messages=_tp_messages,
    position=mlp_position,
)


# --- linear replacement of attention or of an MLP: one h·h matrix, which every tensor-parallel rank
# computes for its own tokens


def _replacement_parameters(branch: LayerBranch, rank: LayerRank) -> Iterator[HeldParameter]:
    """Yield an h·h matrix and its bias."""
    model = branch.model
    yield HeldParameter(f"{branch.name}.linear", model.hidden_size, model.hidden_size)
    if model.output_bias if branch.name == "attention" else model.mlp_bias:
        yield HeldParameter(f"{branch.name}.linear_bias", model.hidden_size)


def _replacement_tensors(
    branch: LayerBranch, setting: LayerSetting, recomputed: Sequence[str], saves_input: bool
) -> list[SavedActivation]:
    """Return its input."""
    region = branch.name if branch.name in recomputed else f"{branch.name}.linear"
    return [setting.hidden(region)] if saves_input else []


LINEAR_REPLACEMENT = LayerKind(
    parameters=_replacement_parameters, saved_tensors=_replacement_tensors
)
