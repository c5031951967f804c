"""Translate Megatron's description of a GPT to our `model` settings."""

import math
import re

from megalith.config.fields import Plain
from megalith.megatron.layers import read_layer_pattern, translate_block_configs, translate_moe
from megalith.megatron.parse import Draft

MLA_ORIGINAL_CONTEXT = 4096
"""Context before YaRN that Megatron assumes for MLA; no argument changes it."""

_TYPE = "--position-embedding-type"

_POSITIONS = {
    "rope": "rope",
    "yarn": "rope",
    "mrope": "rope",
    "learned_absolute": "learned",
    "none": "none",
}
"""Positions of Megatron's GPT, and ours. `relative` exists only in its T5; its GPT then has no
positions."""


def translate_model(draft: Draft) -> None:
    """Translate sizes and choices of the model; the vocabulary belongs to the tokenizer."""
    draft.need("--num-layers", "the number of layers")
    draft.need("--hidden-size", "the hidden size")
    draft.need("--num-attention-heads", "the number of query heads")
    draft.need("--max-position-embeddings", "the maximum context")
    flags = ("--num-layers", "--hidden-size", "--num-attention-heads", "--max-position-embeddings")
    for flag in (*flags, "--norm-epsilon"):
        draft.copy(flag)
    _translate_heads(draft)
    _translate_norms(draft)
    _translate_mlp(draft)
    _translate_attention(draft)
    _translate_positions(draft)
    _translate_biases(draft)
    _translate_dropout(draft)
    _translate_mtp(draft)
    _translate_init(draft)
    translate_moe(draft)
    _translate_kernels(draft)
    tied = not draft.arguments.value("--untie-embeddings-and-output-weights")
    draft.put("--untie-embeddings-and-output-weights", "model.tied_embeddings", tied)
    translate_block_configs(draft)


def _translate_heads(draft: Draft) -> None:
    arguments, setting, heads = draft.arguments, "model.num_kv_heads", "--num-attention-heads"
    mla = arguments.value("--multi-latent-attention")
    if arguments.value("--group-query-attention") and not mla:
        draft.report("already", "--group-query-attention", "query heads share KV heads")
        draft.put("--num-query-groups", setting, arguments.value("--num-query-groups"))
        return
    draft.put(heads, setting, draft.number(heads), of=(heads,))
    if arguments.given("--num-query-groups"):
        text = "takes effect only with --group-query-attention"
        draft.report("already", "--num-query-groups", text)


def _translate_kernels(draft: Draft) -> None:
    """Translate disabled fused kernels; results are the same."""
    arguments = draft.arguments
    if arguments.value("--no-rope-fusion"):
        draft.put("--no-rope-fusion", "kernels.rope", "torch")
    swiglu = "--no-bias-swiglu-fusion"
    if arguments.value(swiglu) and arguments.value("--swiglu"):
        draft.put(swiglu, "kernels.activation", "torch")
    elif arguments.value(swiglu):
        draft.report("already", swiglu, "takes effect only with --swiglu")
    attention = "--attention-backend"
    if arguments.value(attention) in ("unfused", "local"):
        text = "the whole score matrix is in memory"
        draft.put(attention, "kernels.attention", "reference", text)
    elif arguments.given(attention):
        text = "the fastest backend that supports the attention is selected"
        draft.report("already", attention, text)


def _translate_norms(draft: Draft) -> None:
    kind = str(draft.arguments.value("--normalization"))
    norm = {"RMSNorm": "rms", "LayerNorm": "layer"}.get(kind)
    draft.put("--normalization", "model.norm", norm)
    if draft.arguments.value("--apply-layernorm-1p"):
        draft.put("--apply-layernorm-1p", "model.zero_centered_gamma", True)
    if draft.arguments.value("--fp32-residual-connection"):
        draft.put("--fp32-residual-connection", "model.fp32_residual", True)


def _translate_mlp(draft: Draft) -> None:
    arguments = draft.arguments
    flag, activation, gated = "--no-bias-gelu-fusion", "gelu_tanh", False
    if arguments.value("--quick-geglu"):
        flag, activation, gated = "--quick-geglu", "quick_gelu", True
    elif arguments.value("--squared-relu"):
        flag, activation = "--squared-relu", "squared_relu"
    elif arguments.value("--swiglu"):
        flag, activation, gated = "--swiglu", "silu", True
    elif arguments.value("--disable-bias-linear") or arguments.value(flag):
        activation = "gelu"
    is_approximate = activation == "gelu_tanh"
    text = "Megatron's GELU with a fused bias is the tanh approximation" if is_approximate else ""
    draft.put(flag, "model.activation", activation, text)
    draft.put(flag, "model.gated", gated)
    if gated:
        draft.copy("--activation-func-clamp-value")
        draft.copy("--glu-linear-offset")
    _translate_ffn_hidden_size(draft)


def _translate_ffn_hidden_size(draft: Draft) -> None:
    flag, setting, hidden = "--ffn-hidden-size", "model.ffn_hidden_size", "--hidden-size"
    size = draft.number(hidden)
    if draft.arguments.value(flag) is not None:
        draft.copy(flag)
    elif draft.arguments.value("--swiglu"):
        # two up-projections of this size have as many parameters as one of size 4 h
        text = "8/3 of the hidden size, rounded down to a multiple of 64"
        draft.put("--swiglu", setting, size * 8 // 3 // 64 * 64, text, of=(hidden,))
    else:
        draft.put(flag, setting, 4 * size, "4 times the hidden size", of=(hidden,))


def _translate_biases(draft: Draft) -> None:
    arguments = draft.arguments
    all_biases = not arguments.value("--disable-bias-linear")
    if not arguments.value("--multi-latent-attention"):  # its projections have no biases
        if arguments.value("--add-qkv-bias") and not all_biases:
            draft.put("--add-qkv-bias", "model.qkv_bias", True)
        else:
            draft.put("--disable-bias-linear", "model.qkv_bias", all_biases)
    for setting in ("model.output_bias", "model.mlp_bias"):
        draft.put("--disable-bias-linear", setting, all_biases)


def _translate_dropout(draft: Draft) -> None:
    for flag, site in (
        ("--attention-dropout", "attention"),
        ("--hidden-dropout", "embedding"),
        ("--hidden-dropout", "residual"),
    ):
        draft.put(flag, f"model.dropout.{site}", draft.arguments.value(flag))


def _translate_mtp(draft: Draft) -> None:
    """Translate multi-token prediction."""
    if draft.arguments.value("--mtp-num-layers"):
        draft.copy("--mtp-num-layers")
        draft.copy("--mtp-loss-scaling-factor")
    if draft.arguments.given("--mtp-standalone"):
        layout = "--pipeline-model-parallel-layout"
        has_stage = "has a" if _has_mtp_stage(draft.arguments.value(layout)) else "has no"
        text = f"{layout} decides, as in Megatron; it {has_stage} stage that contains only m"
        draft.report("already", "--mtp-standalone", text)


def _has_mtp_stage(layout: Plain) -> bool:
    """Return whether a stage of a pipeline layout, also of a repeated group, contains only m."""
    if layout is None:
        return False
    times = r"(\*\d+)?"
    stages = re.sub(r"[, ()]", "", str(layout))
    return re.search(rf"\|{times}(m{times})+\|", stages) is not None


def _translate_init(draft: Draft) -> None:
    """Translate the standard deviations of initial weights, and muP."""
    arguments, xavier = draft.arguments, "--init-method-xavier-uniform"
    draft.copy("--init-method-std")
    draft.copy("--embedding-init-method-std")
    if arguments.value(xavier):
        text = "embeddings keep their own standard deviation"
        draft.put(xavier, "model.init", "xavier_uniform", text)
    if arguments.value("--use-mup"):
        _translate_mup(draft)


def _translate_mup(draft: Draft) -> None:
    """Translate muP; without a base size Megatron divides the hidden size by --mup-width-mult."""
    arguments, base, multiplier = draft.arguments, "--mup-base-hidden-size", "--mup-width-mult"
    hidden, factor = draft.number("--hidden-size"), float(str(arguments.value(multiplier)))
    width = arguments.value(base)
    flag = multiplier if width is None else base
    if not isinstance(width, int):
        width = round(hidden / factor) if factor > 0 else 0
    draft.put(flag, "model.mup.base_hidden_size", width, of=("--hidden-size",))
    if not arguments.value("--multi-latent-attention"):  # Megatron scales its scores without muP
        draft.copy("--mup-base-head-dim")
        draft.copy("--mup-attn-scale-power")
    draft.copy("--mup-embedding-mult")
    output = arguments.value("--mup-output-mult")
    if output != 1.0:
        scale = float(str(output)) * hidden / max(width, 1)
        text = "multiplied by the width factor, by which muP divides"
        draft.put("--mup-output-mult", "model.logit_scale", scale, text)


# --- attention


def _translate_attention(draft: Draft) -> None:
    arguments, kind = draft.arguments, draft.arguments.value("--softmax-type")
    if arguments.value("--multi-latent-attention"):
        _translate_mla(draft)
    else:
        draft.copy("--kv-channels")
        if arguments.value("--qk-l2-norm"):  # takes precedence if both are given
            draft.put("--qk-l2-norm", "model.attention.qk_norm", "l2")
        elif arguments.value("--qk-layernorm"):
            draft.put("--qk-layernorm", "model.attention.qk_norm", "head")
        if arguments.value("--attention-output-gate"):
            draft.put("--attention-output-gate", "model.attention.gated", True)
    draft.put("--softmax-type", "model.attention.sinks", kind == "learnable")
    if kind == "off-by-one":
        draft.put("--softmax-type", "model.attention.off_by_one", True)
    _translate_window(draft)


def _translate_window(draft: Draft) -> None:
    """Translate (left, right), the numbers of tokens beside the query; our window includes it."""
    flag, value = "--window-size", draft.arguments.value("--window-size")
    if value is None:
        return
    sides = re.fullmatch(r"\(?\s*(-?\d+)\s*,\s*(-?\d+)\s*\)?", str(value))
    if sides is None or min(int(sides[1]), int(sides[2])) < -1:
        draft.problems.append(
            f"{flag} {value} must be two counts of at least -1. Use {flag} 127,0 for 128 tokens."
        )
        return
    left = int(sides[1])
    if int(sides[2]) > 0:
        text = "the second number has no effect on causal attention"
        draft.report("already", flag, text)
    if left == -1:
        draft.report("already", flag, "attention to all earlier tokens is the default")
        return
    draft.put(flag, "model.attention.window", left + 1, "our window includes the query token")
    _translate_window_layers(draft)


def _translate_window_layers(draft: Draft) -> None:
    """Translate the layers with a window: N marks every Nth layer as one without, but in a list 1
    marks a layer with a window."""
    flag = "--window-attn-skip-freq"
    pattern, value = read_layer_pattern(draft, flag), draft.arguments.value(flag)
    if pattern is not None:
        is_number = str(value).isdecimal()
        layers: list[Plain] = [marked != is_number for marked in pattern]
        draft.put(flag, "model.attention.window_layers", layers)


def _translate_mla(draft: Draft) -> None:
    """Translate MLA: its compressed vectors are normalized only with --qk-layernorm, and its rotary
    positions are interleaved."""
    flag, arguments = "--multi-latent-attention", draft.arguments
    draft.report(
        "already", flag, "keys and values of all heads are expanded from one vector per token"
    )
    for name in (
        "--kv-lora-rank",
        "--q-lora-rank",
        "--qk-head-dim",
        "--qk-pos-emb-head-dim",
        "--v-head-dim",
    ):
        draft.copy(name)
    draft.put(flag, "model.rope.interleaved", True, "rotary positions of MLA are interleaved")
    if arguments.value("--qk-layernorm"):
        draft.put("--norm-epsilon", "model.mla.norm_eps", arguments.value("--norm-epsilon"))
        text = "the compressed vectors are normalized, with the norm of --normalization"
        draft.report("already", "--qk-layernorm", text)
    else:
        text = "compressed vectors are normalized only with --qk-layernorm"
        draft.put(flag, "model.mla.norms", False, text)
    for name in ("--group-query-attention", "--qk-l2-norm", "--attention-output-gate"):
        if arguments.value(name):
            draft.report("not mapped", name, "MLA does not support it. Remove it", "model")
    if arguments.given("--kv-channels"):
        draft.report("already", "--kv-channels", "MLA has head sizes of its own")
    _translate_mla_yarn(draft)


# --- positions


def _translate_positions(draft: Draft) -> None:
    arguments, old_flag = draft.arguments, "--use-rotary-position-embeddings"
    kind = "rope" if arguments.value(old_flag) else str(arguments.value(_TYPE))
    flag = old_flag if arguments.given(old_flag) else _TYPE
    if arguments.value("--multi-latent-attention") and kind != "rope":
        text = f"MLA supports only rotary positions. Use {_TYPE} rope"
        draft.report("not mapped", flag, text, "model")
        return
    if kind == "relative":
        text = (
            "belongs to BERT or T5; pretrain_gpt.py does not read it and trains without positions. "
            f"Use {_TYPE} none"
        )
        draft.report("not mapped", flag, text, "model")
        return
    draft.put(flag, "model.positions", _POSITIONS[kind])
    if _POSITIONS[kind] == "rope":
        _translate_rope(draft, kind)


def _translate_rope(draft: Draft, kind: str) -> None:
    draft.copy("--rotary-base")
    skip = "--no-rope-freq"
    if draft.arguments.value("--multi-latent-attention"):
        if draft.arguments.given(skip):
            text = "Megatron's MLA applies rotary positions in every layer and ignores it"
            draft.report("already", skip, text)
        return
    _translate_rope_features(draft, kind)
    {"rope": _translate_rope_scaling, "yarn": _translate_yarn, "mrope": _translate_mrope}[kind](
        draft
    )
    skipped = read_layer_pattern(draft, skip)
    if skipped is not None:
        draft.put(skip, "model.rope.skip", skipped)


def _translate_rope_features(draft: Draft, kind: str) -> None:
    """Translate which features are rotated: Megatron's YaRN rotates all of them, and only its plain
    rope supports interleaving."""
    percent, interleaved = "--rotary-percent", "--rotary-interleaved"
    if kind == "yarn" and draft.arguments.value(percent) != 1:
        text = "Megatron's YaRN rotates all features and ignores it. Remove it"
        draft.report("not mapped", percent, text, "model")
    else:
        draft.copy(percent)
    if draft.arguments.value(interleaved) and kind != "rope":
        text = f"Megatron fails with it and {_TYPE} {kind}. Remove it"
        draft.report("not mapped", interleaved, text, "model")
    elif draft.arguments.value(interleaved):
        draft.put(interleaved, "model.rope.interleaved", True)


def _translate_rope_scaling(draft: Draft) -> None:
    arguments, scaling = draft.arguments, "--rope-scaling-factor"
    if not arguments.value("--use-rope-scaling"):
        if arguments.given(scaling):
            draft.report("already", scaling, "takes effect only with --use-rope-scaling")
        _translate_linear_scaling(draft)
        return
    factor, linear = arguments.value(scaling), "--rotary-seq-len-interpolation-factor"
    draft.put("--use-rope-scaling", "model.rope.scaling", "llama3")
    draft.put(scaling, "model.rope.factor", factor)
    if factor != 8.0:
        text = "some releases of Megatron ignore it and scale by 8: check what your release does"
        draft.report("explained", scaling, text)
    if arguments.value(linear) not in (None, 1):
        text = "only one kind of scaling is supported. Remove it, or --use-rope-scaling"
        draft.report("not mapped", linear, text, "model")


def _translate_linear_scaling(draft: Draft) -> None:
    flag = "--rotary-seq-len-interpolation-factor"
    factor = draft.arguments.value(flag)
    if factor not in (None, 1):
        draft.put(flag, "model.rope.scaling", "linear")
        draft.put(flag, "model.rope.factor", factor)


def _translate_yarn(draft: Draft) -> None:
    """Translate YaRN without MLA; with a factor of 1 it does nothing."""
    factor = _read_number(draft, "--rotary-scaling-factor")
    if factor == 1:
        draft.report("already", _TYPE, "YaRN with --rotary-scaling-factor 1 is plain rope")
        return
    draft.put(_TYPE, "model.rope.scaling", "yarn")
    draft.put("--rotary-scaling-factor", "model.rope.factor", factor)
    for flag in ("--yarn-original-max-position-embeddings", "--yarn-beta-fast", "--yarn-beta-slow"):
        draft.copy(flag)
    if draft.arguments.value("--no-yarn-correction-range-round-to-int"):
        draft.put("--no-yarn-correction-range-round-to-int", "model.rope.whole_pairs", False)
    _translate_attention_factor(draft, factor)


def _translate_mrope(draft: Draft) -> None:
    """Translate multimodal positions (time, height, width); Megatron scales them linearly only."""
    flag = "--mrope-section"
    _translate_linear_scaling(draft)
    if not draft.need(flag, "three numbers of feature pairs, for time, height and width"):
        return
    words = [str(word) for word in draft.arguments.value(flag)]
    if not all(word.isdecimal() for word in words):
        typed = " ".join(words)
        draft.problems.append(
            f"{flag} {typed} must be numbers of feature pairs. Use {flag} 16 24 24."
        )
        return
    sections: list[Plain] = [int(word) for word in words]
    draft.put(flag, "model.rope.sections", sections, "text has the same positions as with rope")


def _translate_mla_yarn(draft: Draft) -> None:
    """Translate YaRN of MLA, which is used unless --rope-type is rope; with a factor of 1 it does
    nothing.

    Rotary features are multiplied by g(mscale) / g(mscale_all_dim), and attention scores by
    g(mscale_all_dim) squared, where g(m) is 0.1 m ln(factor) + 1; the latter also with
    --rope-type rope.
    """
    arguments, scaling = draft.arguments, "--rotary-scaling-factor"
    factor, kind = _read_number(draft, scaling), arguments.value("--rope-type")
    mscale_all_dim = _read_number(draft, "--mscale-all-dim")
    if arguments.value("--use-mup"):
        text = "muP does not change the score scale of Megatron's MLA"
        _translate_mla_scale(draft, "--use-mup", factor, text)
    elif kind == "rope" and factor > 1 and mscale_all_dim:
        text = "takes effect with --rope-type rope, too"
        _translate_mla_scale(draft, "--mscale-all-dim", factor, text)
    if kind == "rope" and arguments.value("--rotary-percent") != 1:
        text = "MLA rotates all of its rotary features. Remove it"
        draft.report("not mapped", "--rotary-percent", text, "model")
    if kind == "rope" or factor <= 1:
        if arguments.given(scaling):
            text = "takes effect only with YaRN if above 1, and with --mscale-all-dim"
            draft.report("already", scaling, text)
        return
    draft.put("--rope-type", "model.rope.scaling", "yarn")
    draft.put(scaling, "model.rope.factor", factor)
    draft.put("--rope-type", "model.rope.original_max_position", MLA_ORIGINAL_CONTEXT)
    _translate_attention_factor(draft, factor)
    if mscale_all_dim and not arguments.value("--use-mup"):
        draft.put("--mscale-all-dim", "model.mla.yarn_mscale", mscale_all_dim)


def _translate_mla_scale(draft: Draft, flag: str, factor: float, text: str) -> None:
    """Set the score scale of MLA where no other setting expresses Megatron's."""
    head_dim = draft.number("--qk-head-dim") + draft.number("--qk-pos-emb-head-dim")
    temperature = _yarn_temperature(_read_number(draft, "--mscale-all-dim"), factor)
    draft.put(flag, "model.attention.scale", temperature**2 / math.sqrt(head_dim), text)


def _translate_attention_factor(draft: Draft, factor: float) -> None:
    """Set the factor of rotated queries and keys."""
    all_dim = "--mscale-all-dim"
    part, whole = (
        _yarn_temperature(_read_number(draft, flag), factor) for flag in ("--mscale", all_dim)
    )
    draft.put("--mscale", "model.rope.attention_factor", part / whole)
    if draft.arguments.given(all_dim):
        draft.put(all_dim, "model.rope.attention_factor", part / whole)


def _yarn_temperature(mscale: float, factor: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _read_number(draft: Draft, flag: str) -> float:
    value = draft.arguments.value(flag)
    return float(value) if isinstance(value, int | float) else 0.0
