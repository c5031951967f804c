"""Cross-layer attention: a second attention of later layers, to the hidden states of an earlier
layer (the source), with separate projections of queries and of keys and values."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from megalith.config.model import AttentionConfig, ModelConfig, RopeConfig
from megalith.plan.layers.attention import attention_tensors, output_parameters
from megalith.plan.layers.base import (
    DocumentCounts,
    HeldParameter,
    LayerBranch,
    LayerKind,
    LayerRank,
    LayerSetting,
    SavedActivation,
    TPMessages,
)
from megalith.plan.layers.core_attention import (
    core_attention_flops,
    head_gradient_numel,
    key_value_exchange,
    received_numel,
)
from megalith.plan.layers.norm import norm_parameters, stream_norm_tensors
from megalith.plan.recompute import Span


def source_norm_parameters(model: ModelConfig) -> list[HeldParameter]:
    """Return the norm of the source hidden states, on their stage."""
    normed = model.cross is not None and model.norm_placement != "after"
    return list(norm_parameters("memory_norm", model)) if normed else []


def _parameters(branch: LayerBranch, rank: LayerRank) -> Iterator[HeldParameter]:
    """Yield h·(n + 2 g)·d + n·d·h elements."""
    model, part = branch.model, branch.tensor_part(rank)
    h, d, kv_cut = model.hidden_size, model.head_size(), part.kv_copies == 1
    query, keys = part.heads * d, 2 * part.kv_heads * d
    yield HeldParameter("cross.q", query, h, cut=True)
    if model.qkv_bias:
        yield HeldParameter("cross.q_bias", query, cut=True)
    yield HeldParameter("cross.kv", keys, h, cut=kv_cut, summed="heads")
    if model.qkv_bias:
        yield HeldParameter("cross.kv_bias", keys, cut=kv_cut, summed="heads")
    yield from output_parameters(model, query, where="cross")


def _core_flops(branch: LayerBranch, counts: DocumentCounts) -> int:
    """Return the model FLOPs of core attention without a window."""
    return core_attention_flops(branch.model, counts.doubled_pairs(None))


def _saved_tensors(
    branch: LayerBranch, setting: LayerSetting, again: Sequence[str], saves_input: bool
) -> list[SavedActivation]:
    """Return the saved tensors without the shared source hidden states: as of attention without a
    window, without RoPE and without norms of queries and keys."""
    kind, rows = branch.model.attention, [setting.hidden("cross.queries")] if saves_input else []
    plain = AttentionConfig(scale=kind.scale, softcap=kind.softcap, causal=kind.causal)
    model = replace(setting.model, attention=plain, positions="rope", rope=RopeConfig())
    tensors = attention_tensors(branch, replace(setting, model=model), again)
    return rows + [row._replace(region=row.region.replace("attention", "cross")) for row in tensors]


def source_tensors(
    setting: LayerSetting, layers: range, spans: Sequence[Span]
) -> Iterator[SavedActivation]:
    """Yield the source hidden states, shared by all layers of a stage, and their norm.

    The norm reads the same input as the first norm of the next layer; it saves the input only if
    that layer does not. spans: recomputed and offloaded layers of the stage.
    """
    model, first = setting.model, layers.start
    if model.cross is None:
        return
    source_layer = model.find_cross_layer_source(layers)
    later = [span for span in spans if first + span.start >= model.cross.memory]
    attending = any(
        model.uses_cross_layer_source(layer)
        for span in later
        for layer in range(first + span.start, first + span.stop)
    )
    normed = model.norm_placement != "after"
    is_layer_input = not normed and source_layer is not None and setting.stream == setting.element
    if not is_layer_input and (attending or any(span.recomputed for span in later)):
        yield setting.hidden("memory", "what layers look at")
    if source_layer is None or not normed:
        return
    read, *statistics = stream_norm_tensors(setting, "memory_norm")
    next_span = later[0]
    yield from statistics
    if next_span.offloaded or (next_span.recomputed and setting.recompute.shard_inputs):
        yield read


def _weight_gradient_numel(branch: LayerBranch, setting: LayerSetting) -> int:
    """Return t · (3 h + (2 n + 2 g) d) elements."""
    return head_gradient_numel(branch, setting) + 3 * branch.model.hidden_size * setting.tokens


def _tp_messages(branch: LayerBranch, again: Sequence[str]) -> TPMessages:
    """Return the input of the queries, and the source."""
    inputs = (branch.model.hidden_size,) * 2
    return TPMessages(inputs=inputs, weight_inputs=inputs, sums=1)


CROSS_LAYER_ATTENTION = LayerKind(
    parameters=_parameters,
    saved_tensors=_saved_tensors,
    core_flops=_core_flops,
    weight_gradient_numel=_weight_gradient_numel,
    received_numel=received_numel,
    num_input_gradients=3,
    tp_messages=_tp_messages,
    exchange=key_value_exchange,
    type_rules=("ContextRule",),
)
