"""Megatron's description of a GPT as our `model` settings: the sizes that follow from others, and
what must be so."""

import re

from megalith.config.fields import Plain
from megalith.megatron.attention import heads_of_keys, translate_attention
from megalith.megatron.blocks import translate_blocks
from megalith.megatron.draft import Draft
from megalith.megatron.experts import translate_experts
from megalith.megatron.initial import translate_initial
from megalith.megatron.positions import translate_positions


def translate_model(draft: Draft) -> None:
    """The sizes and choices of the network; the vocabulary belongs to the tokenizer."""
    draft.need("--num-layers", "the number of layers")
    draft.need("--hidden-size", "the features per token")
    draft.need("--num-attention-heads", "the number of query heads")
    draft.need("--max-position-embeddings", "the longest context")
    flags = ("--num-layers", "--hidden-size", "--num-attention-heads", "--max-position-embeddings")
    for flag in (*flags, "--norm-epsilon"):
        draft.copy(flag)
    _heads(draft)
    _norms(draft)
    _mlp(draft)
    translate_attention(draft)
    translate_positions(draft)
    _biases(draft)
    _dropout(draft)
    _mtp(draft)
    translate_initial(draft)
    translate_experts(draft)
    _kernels(draft)
    tied = not draft.arguments.value("--untie-embeddings-and-output-weights")
    draft.put("--untie-embeddings-and-output-weights", "model.tied_embeddings", tied)
    translate_blocks(draft)


def _heads(draft: Draft) -> None:
    latent = draft.arguments.value("--multi-latent-attention")
    if draft.arguments.value("--group-query-attention") and not latent:
        draft.say("already", "--group-query-attention", "query heads share key/value heads")
        draft.put("--num-query-groups", "model.num_kv_heads", heads_of_keys(draft))
    else:
        heads = "--num-attention-heads"
        draft.put(heads, "model.num_kv_heads", heads_of_keys(draft), of=(heads,))
        if draft.arguments.given("--num-query-groups"):
            draft.say("already", "--num-query-groups", "is read with --group-query-attention only")


def _kernels(draft: Draft) -> None:
    """Fused ways that were turned off; results are the same."""
    arguments = draft.arguments
    if arguments.value("--no-rope-fusion"):
        draft.put("--no-rope-fusion", "kernels.rope", "torch")
    if arguments.value("--no-bias-swiglu-fusion"):
        if arguments.value("--swiglu"):
            draft.put("--no-bias-swiglu-fusion", "kernels.activation", "torch")
        else:
            draft.say("already", "--no-bias-swiglu-fusion", "is read with --swiglu only")
    if arguments.value("--attention-backend") in ("unfused", "local"):
        draft.put(
            "--attention-backend", "kernels.attention", "reference", "every score is in memory"
        )
    elif arguments.given("--attention-backend"):
        draft.say(
            "already", "--attention-backend", "the fastest way that knows the scores is taken"
        )


def _norms(draft: Draft) -> None:
    kind = draft.arguments.value("--normalization")
    draft.put(
        "--normalization", "model.norm", {"RMSNorm": "rms", "LayerNorm": "layer"}.get(str(kind))
    )
    if draft.arguments.value("--apply-layernorm-1p"):
        draft.put("--apply-layernorm-1p", "model.zero_centered_gamma", True)
    if draft.arguments.value("--fp32-residual-connection"):
        draft.put("--fp32-residual-connection", "model.fp32_residual", True)


def _mlp(draft: Draft) -> None:
    """The activation, with a gate or without, and the width."""
    arguments, flag, activation, gated = draft.arguments, "--swiglu", "silu", True
    if arguments.value("--quick-geglu"):
        flag, activation = "--quick-geglu", "quick_gelu"
    elif arguments.value("--squared-relu"):
        flag, activation, gated = "--squared-relu", "squared_relu", False
    elif not arguments.value("--swiglu"):
        gated, plain = (
            False,
            arguments.value("--disable-bias-linear") or arguments.value("--no-bias-gelu-fusion"),
        )
        activation, flag = "gelu" if plain else "gelu_tanh", "--no-bias-gelu-fusion"
    why = (
        ""
        if activation != "gelu_tanh"
        else "Megatron's GELU that is fused with its bias is the approximate one"
    )
    draft.put(flag, "model.activation", activation, why)
    draft.put(flag, "model.gated", gated)
    if gated:
        draft.copy("--activation-func-clamp-value")
        draft.copy("--glu-linear-offset")
    if arguments.value("--ffn-hidden-size") is not None:
        draft.copy("--ffn-hidden-size")
        return
    hidden, wide = draft.number("--hidden-size"), ("--hidden-size",)
    if arguments.value("--swiglu"):
        width = hidden * 8 // 3 // 64 * 64  # for two matrices up, as wide as 4 h for one
        draft.put(
            "--swiglu",
            "model.ffn_hidden_size",
            width,
            "8/3 of the hidden size, down to a multiple of 64",
            of=wide,
        )
    else:
        draft.put(
            "--ffn-hidden-size",
            "model.ffn_hidden_size",
            4 * hidden,
            "4 times the hidden size",
            of=wide,
        )


def _biases(draft: Draft) -> None:
    linear = not draft.arguments.value("--disable-bias-linear")
    latent = draft.arguments.value("--multi-latent-attention")
    for setting in ("model.qkv_bias", "model.output_bias", "model.mlp_bias"):
        if setting == "model.qkv_bias" and latent:
            continue  # its projections have none
        if setting == "model.qkv_bias" and draft.arguments.value("--add-qkv-bias") and not linear:
            draft.put("--add-qkv-bias", setting, True)
        else:
            draft.put("--disable-bias-linear", setting, linear)


def _dropout(draft: Draft) -> None:
    draft.put(
        "--attention-dropout",
        "model.dropout.attention",
        draft.arguments.value("--attention-dropout"),
    )
    for place in ("embedding", "residual"):
        draft.put(
            "--hidden-dropout", f"model.dropout.{place}", draft.arguments.value("--hidden-dropout")
        )


def _mtp(draft: Draft) -> None:
    """Multi-token prediction."""
    if draft.arguments.value("--mtp-num-layers"):
        draft.copy("--mtp-num-layers")
        draft.copy("--mtp-loss-scaling-factor")
    if draft.arguments.given("--mtp-standalone"):
        alone = _stage_of_its_own(draft.arguments.value("--pipeline-model-parallel-layout"))
        decides = "--pipeline-model-parallel-layout decides, as in Megatron"
        reason = (
            "with m on a stage of its own"
            if alone
            else "which has no stage with m and nothing else"
        )
        draft.say("already", "--mtp-standalone", f"{decides}, {reason}")


def _stage_of_its_own(layout: Plain) -> bool:
    """Whether a layout string has a bar, also one that a group repeats, at least one m, and the
    next bar."""
    times = r"(\*\d+)?"
    return (
        layout is not None
        and re.search(rf"\|{times}(m{times})+\|", re.sub(r"[, ()]", "", str(layout))) is not None
    )
