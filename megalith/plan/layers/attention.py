"""Attention with separate query heads and shared KV heads (GQA), and the parts that other kinds of
attention share.

One layer saves for t tokens, n query heads, g KV heads, d features per head, e bytes per value and
w per statistic:

    attention.qkv    input                               h·e·t        not with `norm`
    attention        queries, keys, values               (n + 2 g)·d·e·t
                     probabilities of short documents    n·(query-key pairs of a tile)·e
                     or log-sum-exp of torch's kernel    n·w·t
    attention.out    input                               n·d·e·t      saved by torch's kernel
"""

from collections.abc import Iterator, Sequence

from megalith.config.model import ModelConfig
from megalith.plan.layers.base import (
    DocumentCounts,
    HeldParameter,
    LayerBranch,
    LayerKind,
    LayerRank,
    LayerSetting,
    SavedActivation,
    TPMessages,
    hidden_gradient_numel,
)
from megalith.plan.layers.core_attention import (
    core_attention_flops,
    core_tensors,
    head_gradient_numel,
    key_value_exchange,
    projection_numel,
    received_numel,
)
from megalith.plan.layers.norm import norm_parameters, norm_tensors


def _parameters(branch: LayerBranch, rank: LayerRank) -> Iterator[HeldParameter]:
    """Yield h·(n + 2 g)·d + n·d·h elements, and n·d·h more with a gate."""
    model, part = branch.model, branch.tensor_part(rank)
    h, d, kv_cut, kind = model.hidden_size, model.head_size(), part.kv_copies == 1, model.attention
    query, keys = part.heads * d, 2 * part.kv_heads * d
    yield HeldParameter("attention.q", query, h, cut=True)
    yield HeldParameter("attention.kv", keys, h, cut=kv_cut, stacked=True, summed="heads")
    if kind.gated:
        yield HeldParameter("attention.gate", query, h, cut=True, stacked=True)
    if model.qkv_bias:
        yield HeldParameter("attention.q_bias", query, cut=True)
        yield HeldParameter("attention.kv_bias", keys, cut=kv_cut, summed="heads")
        if kind.gated:
            yield HeldParameter("attention.gate_bias", query, cut=True)
    if kind.qk_norm == "head":
        yield from norm_parameters("attention.q_norm", model, size=d, summed="always")
        yield from norm_parameters("attention.k_norm", model, size=d, summed="always")
    elif kind.qk_norm == "whole":
        yield HeldParameter("attention.q_norm.weight", query, cut=True)
        yield HeldParameter(
            "attention.k_norm.weight", part.kv_heads * d, cut=kv_cut, summed="heads"
        )
    if kind.sinks:
        yield HeldParameter("attention.sinks", part.heads, cut=True)
    yield from output_parameters(model, query)


def output_parameters(
    model: ModelConfig, features: int, *, where: str = "attention"
) -> Iterator[HeldParameter]:
    """Yield the output projection of attention."""
    yield HeldParameter(f"{where}.o", model.hidden_size, features, cut=True)
    if model.output_bias:
        yield HeldParameter(f"{where}.o_bias", model.hidden_size)


def attention_position(name: str) -> int:
    """Return the position of a parameter of attention: 1 projections of the layer's input, 2 their
    norms and the up-projections of latent vectors, 4 the output projection."""
    if name.startswith("o"):
        return 4
    later = ("q_down_norm", "kv_down_norm", "q_up", "kv_up", "q_norm", "k_norm")
    return 2 if name.startswith(later) else 1


def self_attention_flops(branch: LayerBranch, counts: DocumentCounts) -> int:
    """Return the model FLOPs of core attention, in a window if the layer has one."""
    model = branch.model
    kind = model.attention if model.has_window(branch.layer) else None
    return core_attention_flops(model, counts.doubled_pairs(kind))


def attention_weight_numel(branch: LayerBranch, setting: LayerSetting) -> int:
    """Return t · (2 h + (2 n + 2 g) d) elements."""
    return head_gradient_numel(branch, setting) + hidden_gradient_numel(branch, setting)


def rope_tables(setting: LayerSetting, local: bool) -> list[SavedActivation]:
    """Return the cosines and sines of the tokens' positions; `local`: those of windowed layers."""
    numel, suffix = setting.model.rotary_size() // 2 * setting.tokens, " of windows" * local
    nbytes = numel * setting.element
    return [
        SavedActivation("shared", f"{what}{suffix}", numel, nbytes) for what in ("cosines", "sines")
    ]


def all_rope_tables(setting: LayerSetting) -> list[SavedActivation]:
    """Return every RoPE table of the model; recomputed attention and recomputed layers save all."""
    if setting.model.positions != "rope":
        return []
    has_local = setting.model.rope.local_theta is not None
    return rope_tables(setting, False) + (rope_tables(setting, True) if has_local else [])


def layer_rope_tables(
    branch: LayerBranch, setting: LayerSetting, again: Sequence[str]
) -> list[SavedActivation]:
    """Return the RoPE table of a layer."""
    model = branch.model
    if not model.uses_rope(branch.layer):
        return []
    return rope_tables(
        setting, model.rope.local_theta is not None and model.has_window(branch.layer)
    )


def attention_tensors(
    branch: LayerBranch, setting: LayerSetting, again: Sequence[str]
) -> list[SavedActivation]:
    """Return the saved tensors from queries, keys and values to the output projection, with
    core_attention recomputed if in `again`."""
    model, e, w = setting.model, setting.element, setting.wide
    inner = setting.part.heads * model.value_size() * setting.tokens
    output = SavedActivation("attention.out", "input", inner, inner * e)
    rows = core_tensors(setting, branch.layer, "core_attention" in again)
    saves_output = any(row.what == "output" and row.numel == inner for row in rows)
    if model.has_attention_temperature(branch.layer):
        t = setting.tokens
        rows.append(SavedActivation("attention", "growth of queries", t, t * w))
    if not model.attention.gated:
        return rows if saves_output else [*rows, output]
    # The gate saves the output of attention, the projection its own input.
    if not saves_output:
        rows.append(SavedActivation("attention", "output before the gate", inner, inner * e))
    rows.append(SavedActivation("attention", "gate", inner, inner * w))
    if e != w:
        rows.append(SavedActivation("attention", "gate, rounded", inner, inner * e))
    return [*rows, output]


def _saved_tensors(
    branch: LayerBranch, setting: LayerSetting, again: Sequence[str], saves_input: bool
) -> list[SavedActivation]:
    rows = [setting.hidden("attention.qkv")] if saves_input else []
    return rows + _qk_norm_tensors(setting) + attention_tensors(branch, setting, again)


def _qk_norm_tensors(setting: LayerSetting) -> list[SavedActivation]:
    """Return the saved tensors of the QK norms; unfused norms save their input in fp32, or the
    whole projection."""
    model, t, d, w = setting.model, setting.tokens, setting.model.head_size(), setting.wide
    kind, heads = model.attention.qk_norm, {"q": setting.part.heads, "k": setting.part.kv_heads}
    if kind == "none":
        return []
    rows: list[SavedActivation] = []
    if kind == "head":
        for name, count in heads.items():
            rows += norm_tensors(
                setting, f"attention.norms.{name}_norm", tokens=count * t, features=d
            )
        return rows
    regions = {
        name: f"attention.norms.{name}_norm" if kind == "whole" else "attention" for name in heads
    }
    if setting.element == w:
        rows.append(
            SavedActivation(
                regions["q"],
                "projection",
                projection_numel(setting),
                projection_numel(setting) * w,
            )
        )
    for name, count in heads.items():
        width, statistics = count * d * t, t if kind == "whole" else count * t
        if setting.element != w:
            rows.append(SavedActivation(regions[name], "input", width, width * w))
        rows.append(SavedActivation(regions[name], "scale", statistics, statistics * w))
        if kind == "whole":
            element = w if model.zero_centered_gamma else setting.element
            rows.append(SavedActivation(regions[name], "normed", width, width * element))
            if model.zero_centered_gamma:
                rows.append(SavedActivation(regions[name], "1 + weight", count * d, count * d * w))
    return rows


def _tp_messages(branch: LayerBranch, again: Sequence[str]) -> TPMessages:
    x = (branch.model.hidden_size,)
    return TPMessages(inputs=x, weight_inputs=x, sums=1)


ATTENTION = LayerKind(
    parameters=_parameters,
    saved_tensors=_saved_tensors,
    core_flops=self_attention_flops,
    shared_tensors=layer_rope_tables,
    weight_gradient_numel=attention_weight_numel,
    received_numel=received_numel,
    tp_messages=_tp_messages,
    exchange=key_value_exchange,
    position=attention_position,
    type_rules=("ContextRule",),
)
