"""Self-attention, cross-layer attention, and the core attention that they and MLA share:
parameters, FLOPs, saved activations and messages."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import lcm
from typing import Literal

from megalith.config.model import AttentionConfig, ModelConfig, RopeConfig
from megalith.config.parallel import ContextKind
from megalith.plan.layers.base import (
    DocumentCounts,
    HeldParameter,
    LayerBranch,
    LayerKind,
    LayerRank,
    LayerRecompute,
    LayerSetting,
    Message,
    Passes,
    SavedActivation,
    TPMessages,
    hidden_gradient_numel,
    norm_parameters,
    norm_tensors,
    stream_norm_tensors,
)
from megalith.plan.recompute import Span

# --- core attention, which attention, latent attention and cross-layer attention share: FLOPs,
# saved activations of each backend, and the exchange of keys and values over context-parallel ranks
#
# The saved tensors follow what the kernels save for backward. Only estimates are: attention on
# accelerators; and, on CPUs, latent attention of documents too short for tiles, whose values have
# another width than keys, and relative position biases together with softcap, sinks or attention
# dropout.

TILED_LENGTHS, SHORTEST_TILED = range(64, 2049), 16
"""Document lengths for which CPU attention is tiled; packed documents or bf16 may be shorter."""

KEPT_LENGTH, TILE_ROWS, TILE_SCORES = 512, 64, 1 << 22
"""Constants of kernels/attention/cpu_tiled.py; a test checks that they are equal."""


def core_attention_flops(model: ModelConfig, doubled_pairs: int) -> int:
    """Return the model FLOPs of core attention: 6 · pairs · n · (d + d_v)."""
    pairs = doubled_pairs if model.attention.causal else 2 * doubled_pairs
    return 3 * pairs * model.num_heads * (model.key_size() + model.value_size())


def head_gradient_numel(branch: LayerBranch, setting: LayerSetting) -> int:
    """Return the elements of the heads' queries, keys, values and outputs on this rank."""
    model, part = branch.model, branch.tensor_part(setting.rank)
    return (part.heads + part.kv_heads) * (model.key_size() + model.value_size()) * setting.tokens


def received_numel(branch: LayerBranch, setting: LayerSetting) -> int:
    """Return the elements of keys and values of other context-parallel ranks: two chunks on a ring,
    all if they are gathered."""
    if setting.cp == 1:
        return 0
    chunks: dict[ContextKind, int] = {"ring": 2, "gather": setting.cp, "a2a": 0, "a2a+ring": 2}
    keys = setting.part.kv_heads * (setting.model.key_size() + setting.model.value_size())
    return chunks[setting.context] * keys * setting.tokens


# --- saved activations


def core_tensors(setting: LayerSetting, layer: int, recomputed: bool) -> list[SavedActivation]:
    """Return the saved tensors of core attention, recomputed if `recomputed`; its output only if it
    saves a copy of its own."""
    if recomputed:
        rows = _qkv_tensors(setting, setting.part.heads, setting.part.kv_heads)
        if _reads_projection(setting, layer) and not setting.model.has_attention_temperature(layer):
            rows[0] = rows[0]._replace(nbytes=projection_numel(setting) * setting.element)
        return rows
    if setting.cp > 1:
        return _context_tensors(setting, layer)
    return _local_tensors(setting, layer, setting.part.heads, setting.part.kv_heads, separate=False)


def projection_numel(setting: LayerSetting) -> int:
    """Return the number of elements of the QKV and gate projection's output."""
    part, gates = setting.part, setting.part.heads if setting.model.attention.gated else 0
    return (part.heads + 2 * part.kv_heads + gates) * setting.model.head_size() * setting.tokens


def _reads_projection(setting: LayerSetting, layer: int) -> bool:
    """Return whether keys (and queries without attention temperature) are views of the projection:
    neither normalized nor rotated."""
    model = setting.model
    return model.mla is None and model.attention.qk_norm == "none" and not model.uses_rope(layer)


def _qkv_tensors(
    setting: LayerSetting, heads: int, kv_heads: int, *, tokens: int | None = None
) -> list[SavedActivation]:
    """Return queries, keys and values of `tokens` tokens; unset: of this rank's."""
    t, e = setting.tokens if tokens is None else tokens, setting.element
    keys, values = setting.model.key_size(), setting.model.value_size()
    sizes = {"q": heads * keys * t, "k": kv_heads * keys * t, "v": kv_heads * values * t}
    return [SavedActivation("attention", what, numel, numel * e) for what, numel in sizes.items()]


def _local_tensors(
    setting: LayerSetting, layer: int, heads: int, kv_heads: int, *, separate: bool
) -> list[SavedActivation]:
    """Return the saved tensors of attention over whole documents; `separate`: the next projection
    does not read its output."""
    setting = in_chunks(setting, layer)
    model, e, t = setting.model, setting.element, sum(setting.lengths)
    rows, d, backend = (
        _qkv_tensors(setting, heads, kv_heads, tokens=t),
        model.value_size(),
        attention_backend(setting, layer),
    )
    output_name = "output of some heads" if separate else "output"
    if backend == "biased":
        return _biased_tensors(setting, layer, heads)
    if backend == "cpu_tiled":
        saves_probabilities = max(setting.lengths) <= KEPT_LENGTH
        numels = (
            _tile_numels(setting.lengths, heads, kv_heads, model.attention.causal)
            if saves_probabilities
            else ()
        )
        return rows + [
            SavedActivation("attention", "probabilities", numel, numel * e) for numel in numels
        ]
    if backend == "split_kv":
        rows.append(SavedActivation("attention", "log-sum", heads * t, heads * t * setting.wide))
        output_name = (
            output_name if separate or _reads_saved_output(setting, heads) else "output by head"
        )
        return [*rows, SavedActivation("attention", output_name, heads * d * t, heads * d * t * e)]
    if _reads_projection(setting, layer) and not separate:
        whole = SavedActivation(
            "attention",
            "queries, keys, values",
            projection_numel(setting),
            projection_numel(setting) * e,
        )
        rows = [rows[0], whole] if model.has_attention_temperature(layer) else [whole]
    calls = kernel_lengths(setting.lengths)
    if backend == "plain":
        pairs = heads * sum(length**2 for length in setting.lengths)
        return [*rows, SavedActivation("attention", "probabilities", pairs, pairs * e)]
    for length in calls if len(calls) > 1 else (t,):
        tokens = heads * length
        rows.append(SavedActivation("attention", "log-sum", tokens, tokens * setting.wide))
        rows.append(SavedActivation("attention", output_name, tokens * d, tokens * d * e))
    return rows


def _biased_tensors(setting: LayerSetting, layer: int, heads: int) -> list[SavedActivation]:
    """Return the saved tensors of attention with relative position biases: torch's unfused kernel,
    which copies its inputs for every query head."""
    model, w, t = setting.model, setting.wide, sum(setting.lengths)
    runs, pairs = (
        kernel_lengths(setting.lengths),
        heads * sum(length**2 for length in setting.lengths),
    )
    copies, distances = (
        heads * (2 * model.key_size() + model.value_size()) * t,
        sum(2 * n - 1 for n in runs),
    )
    rows = [
        SavedActivation("attention", "queries, keys, values by head", copies, copies * w),
        SavedActivation("attention", "weights", pairs, pairs * w),
        SavedActivation("attention", "buckets of distances", distances, 8 * distances),
    ]
    hidden = model.attention.causal or _window_hides(model, layer, max(runs))
    num_pairs = sum(n**2 for n in runs)
    masks = [
        SavedActivation("attention", "mask", num_pairs, num_pairs),
        SavedActivation("attention", "queries that see nothing", t, t),
    ]
    return rows + masks if hidden else rows


def _reads_saved_output(setting: LayerSetting, heads: int) -> bool:
    """Return whether the projection reads the saved output itself and not a copy ordered by
    token."""
    return len(setting.lengths) > len(kernel_lengths(setting.lengths)) or heads == 1


def attention_backend(
    setting: LayerSetting, layer: int
) -> Literal["biased", "split_kv", "cpu_tiled", "torch", "plain"]:
    """Return the attention backend of a layer, as kernels/attention/dispatch.py selects it; plain:
    torch has
    no fused kernel and saves all scores."""
    setting = in_chunks(setting, layer)
    model, longest = setting.model, max(setting.lengths)
    kind = model.attention
    if model.positions == "relative":
        return "biased"
    if (
        _window_hides(model, layer, longest)
        or kind.softcap is not None
        or kind.sinks
        or kind.off_by_one
        or model.dropout.attention > 0
    ):
        return "split_kv"
    if setting.accelerator:
        return "torch"
    if tiled(setting):
        return "cpu_tiled"
    if model.key_size() == model.value_size():
        return "torch"
    return "split_kv" if longest >= TILED_LENGTHS.stop else "plain"


def _window_hides(model: ModelConfig, layer: int, longest: int) -> bool:
    """Return whether a layer's window masks any token of documents of length `longest` at most."""
    kind = model.attention
    if kind.window is None or not model.has_window(layer):
        return False
    after = kind.window - 1 if kind.window_right is None else kind.window_right
    return kind.window < longest or (not kind.causal and after < longest - 1)


def in_chunks(setting: LayerSetting, layer: int) -> LayerSetting:
    """Return the setting with each attention chunk as a document, for layers with chunked
    attention."""
    kind = setting.model.attention
    if not kind.chunked or kind.window is None or not setting.model.has_window(layer):
        return setting
    size, plain = kind.window, replace(kind, window=None, window_layers=(), chunked=False)
    lengths = [
        min(size, length - start) for length in setting.lengths for start in range(0, length, size)
    ]
    return replace(setting, lengths=tuple(lengths), model=replace(setting.model, attention=plain))


def kv_heads_exchanged(kv_heads: int, ranks: int) -> int:
    """Return the KV heads of each of `ranks` ranks after an all-to-all of heads, copies included.

    >>> [kv_heads_exchanged(kv_heads, 4) for kv_heads in (8, 4, 2, 6)]
    [2, 1, 1, 3]
    """
    return lcm(kv_heads, ranks) // ranks


def _context_tensors(setting: LayerSetting, layer: int) -> list[SavedActivation]:
    """Return the saved tensors of context-parallel attention, see parallel/context.py."""
    part, e, w, cp, ranks = setting.part, setting.element, setting.wide, setting.cp, setting.cp
    if setting.context == "a2a+ring":
        ranks = setting.a2a
    elif setting.context != "a2a":
        ranks = 1
    heads, kv_heads = part.heads // ranks, kv_heads_exchanged(part.kv_heads, ranks)
    if setting.context == "a2a":
        return _local_tensors(setting, layer, heads, kv_heads, separate=True)
    k, v, t = setting.model.key_size(), setting.model.value_size(), setting.tokens * ranks
    if setting.context == "gather":
        keys = [("keys", kv_heads * k * t * cp), ("values", kv_heads * v * t * cp)]
    else:
        keys = [("keys and values", kv_heads * (k + v) * t)]
    output_name = (
        "output of some heads"
        if ranks > 1
        else "output"
        if _reads_saved_output(setting, heads)
        else "output by head"
    )
    rows = [("q", heads * k * t), *keys, (output_name, heads * v * t)]
    return [
        *(SavedActivation("attention", what, numel, numel * e) for what, numel in rows),
        SavedActivation("attention", "log-sum", heads * t, heads * t * w),
        *_distance_tensors(setting, heads),
    ]


def _distance_tensors(setting: LayerSetting, heads: int) -> list[SavedActivation]:
    """Return the relative position biases of all distances, and the bucket of each distance."""
    if setting.model.positions != "relative":
        return []
    distances = 2 * min(setting.model.relative.max_distance, max(setting.lengths) - 1) + 1
    values = heads * distances
    return [
        SavedActivation("attention", "biases of distances", values, values * setting.element),
        SavedActivation("attention", "buckets of distances", distances, 8 * distances),
    ]


def tiled(setting: LayerSetting) -> bool:
    """Return whether attention over these documents is computed in tiles; else by torch's
    kernel."""
    lengths = kernel_lengths(setting.lengths)
    typical = sum(lengths) // max(1, sum(length > 0 for length in lengths))
    shortest = (
        SHORTEST_TILED if setting.dtype == "bf16" or len(lengths) > 1 else TILED_LENGTHS.start
    )
    return not setting.accelerator and shortest <= typical and max(lengths) < TILED_LENGTHS.stop


def kernel_lengths(lengths: Sequence[int]) -> tuple[int, ...]:
    """Return one length if all documents have the same length and one kernel call computes them,
    else all."""
    return tuple(lengths[:1]) if len(set(lengths)) == 1 else tuple(lengths)


def _tile_numels(lengths: Sequence[int], heads: int, kv_heads: int, causal: bool) -> Iterator[int]:
    """Yield the elements of every tile of probabilities: all query heads of some KV heads, for some
    queries and their keys."""
    call_lengths, shared = kernel_lengths(lengths), heads // kv_heads
    rows = sum(lengths) // sum(call_lengths) * kv_heads
    heads_per_tile = max(1, TILE_SCORES // (shared * TILE_ROWS * max(call_lengths)))
    starts = [0, *accumulate(call_lengths)]
    for head in range(0, rows, heads_per_tile):
        for start in range(0, sum(call_lengths), TILE_ROWS):
            stop = min(start + TILE_ROWS, sum(call_lengths))
            first = starts[bisect_right(starts, start) - 1]
            last = stop if causal else starts[bisect_left(starts, stop)]
            yield min(heads_per_tile, rows - head) * shared * (stop - start) * (last - first)


# --- communication


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyValueExchange:
    """Exchange of keys and values over context-parallel ranks."""

    context: ContextKind
    heads: int
    kv_heads: int
    key_size: int
    value_size: int
    tokens: int
    element: int
    wide: int
    cp: int
    a2a: int
    """Size of the all-to-all group of heads, with a2a+ring."""

    overlap: bool

    def repeats(self, recompute: LayerRecompute) -> tuple[bool, bool]:
        """Return whether it is repeated; recomputing core attention alone does not repeat the
        all-to-all of its output."""
        selected = not {"core_attention", "mla_up_proj"}.isdisjoint(recompute.modules)
        return recompute.whole or selected, recompute.whole

    def messages(self, passes: Passes) -> Iterator[Message]:
        """Yield the keys and values to the other ranks, and their gradients."""
        keys = self.kv_heads * (self.key_size + self.value_size) * self.tokens
        if self.context == "gather":
            gathered, forwards = self.cp * keys * self.element, passes.forwards
            what = "keys and values"
            yield Message("cp", what, "all_gather", self.cp, forwards, forwards * gathered)
            calls = passes.forward
            what = "their gradients"
            yield Message("cp", what, "reduce_scatter", self.cp, calls, calls * gathered)
            return
        if self.context in ("a2a", "a2a+ring"):
            ranks = self.a2a if self.context == "a2a+ring" else self.cp
            kv_heads = kv_heads_exchanged(self.kv_heads, ranks)
            keys = kv_heads * (self.key_size + self.value_size) * self.tokens * ranks
            yield self._heads_for_tokens(passes, ranks, keys)
        if self.context in ("ring", "a2a+ring"):
            ring = self.cp // self.a2a
            steps, forwards, backwards = ring - 1, passes.forwards, passes.forward
            nbytes = (forwards + backwards) * self.element + backwards * self.wide
            yield Message(
                "cp",
                "keys, values, their gradients",
                "message",
                ring,
                steps * (forwards + 2 * backwards),
                steps * keys * nbytes,
                "attention" if self.overlap else "",
            )

    def _heads_for_tokens(self, passes: Passes, ranks: int, keys: int) -> Message:
        """Return the all-to-all of queries, of `keys` elements of keys and values, and of
        outputs."""
        projected = self.heads * self.key_size * self.tokens + keys
        output = self.heads * self.value_size * self.tokens
        outputs = 2 * passes.forward + passes.outputs_recomputed
        inputs = passes.forwards + passes.forward
        return Message(
            "cp",
            "heads for tokens",
            "all_to_all",
            ranks,
            inputs + outputs,
            (inputs * projected + outputs * output) * self.element,
        )


def key_value_exchange(branch: LayerBranch, setting: LayerSetting) -> KeyValueExchange:
    """Return the exchange of one layer."""
    part = branch.tensor_part(setting.rank)
    return KeyValueExchange(
        context=setting.context,
        heads=part.heads,
        kv_heads=part.kv_heads,
        key_size=branch.model.key_size(),
        value_size=branch.model.value_size(),
        tokens=setting.tokens,
        element=setting.element,
        wide=setting.wide,
        cp=setting.cp,
        a2a=setting.a2a,
        overlap=setting.overlap,
    )


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
    branch: LayerBranch, setting: LayerSetting, recomputed: Sequence[str]
) -> list[SavedActivation]:
    """Return the RoPE table of a layer."""
    model = branch.model
    if not model.uses_rope(branch.layer):
        return []
    return rope_tables(
        setting, model.rope.local_theta is not None and model.has_window(branch.layer)
    )


def attention_tensors(
    branch: LayerBranch, setting: LayerSetting, recomputed: Sequence[str]
) -> list[SavedActivation]:
    """Return the saved tensors from queries, keys and values to the output projection, with
    core_attention recomputed if in `recomputed`."""
    model, e, w = setting.model, setting.element, setting.wide
    inner = setting.part.heads * model.value_size() * setting.tokens
    output = SavedActivation("attention.out", "input", inner, inner * e)
    rows = core_tensors(setting, branch.layer, "core_attention" in recomputed)
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
    branch: LayerBranch, setting: LayerSetting, recomputed: Sequence[str], saves_input: bool
) -> list[SavedActivation]:
    rows = [setting.hidden("attention.qkv")] if saves_input else []
    return rows + _qk_norm_tensors(setting) + attention_tensors(branch, setting, recomputed)


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


def _tp_messages(branch: LayerBranch, recomputed: Sequence[str]) -> TPMessages:
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


# --- cross-layer attention: a second attention of later layers, to the hidden states of an earlier
# layer (the source), with separate projections of queries and of keys and values


def source_norm_parameters(model: ModelConfig) -> list[HeldParameter]:
    """Return the norm of the source hidden states, on their stage."""
    normed = model.cross is not None and model.norm_placement != "after"
    return list(norm_parameters("memory_norm", model)) if normed else []


def _cross_parameters(branch: LayerBranch, rank: LayerRank) -> Iterator[HeldParameter]:
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


def _cross_tensors(
    branch: LayerBranch, setting: LayerSetting, recomputed: Sequence[str], saves_input: bool
) -> list[SavedActivation]:
    """Return the saved tensors without the shared source hidden states: as of attention without a
    window, without RoPE and without norms of queries and keys."""
    kind, rows = branch.model.attention, [setting.hidden("cross.queries")] if saves_input else []
    plain = AttentionConfig(scale=kind.scale, softcap=kind.softcap, causal=kind.causal)
    model = replace(setting.model, attention=plain, positions="rope", rope=RopeConfig())
    tensors = attention_tensors(branch, replace(setting, model=model), recomputed)
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


def _cross_tp_messages(branch: LayerBranch, recomputed: Sequence[str]) -> TPMessages:
    """Return the input of the queries, and the source."""
    inputs = (branch.model.hidden_size,) * 2
    return TPMessages(inputs=inputs, weight_inputs=inputs, sums=1)


CROSS_LAYER_ATTENTION = LayerKind(
    parameters=_cross_parameters,
    saved_tensors=_cross_tensors,
    core_flops=_core_flops,
    weight_gradient_numel=_weight_gradient_numel,
    received_numel=received_numel,
    num_input_gradients=3,
    tp_messages=_cross_tp_messages,
    exchange=key_value_exchange,
    type_rules=("ContextRule",),
)
