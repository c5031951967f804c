"""Megatron's description of attention as our settings: norms of queries and keys, windows, sinks,
gates, and MLA."""

import re

from megalith.config.fields import Plain
from megalith.megatron.draft import Draft
from megalith.megatron.patterns import pattern_of
from megalith.megatron.positions import translate_yarn_of_latents

ORIGINAL_CONTEXT = 4096
"""Tokens that Megatron's latent attention assumes of the training before yarn; no argument says
otherwise."""


def translate_attention(draft: Draft) -> None:
    """Everything between the projections, and latent attention in their place."""
    if draft.arguments.value("--multi-latent-attention"):
        _latent(draft)
    else:
        draft.copy("--kv-channels")
        _norms(draft)
        if draft.arguments.value("--attention-output-gate"):
            draft.put("--attention-output-gate", "model.attention.gated", True)
    _softmax(draft)
    _windows(draft)


def _norms(draft: Draft) -> None:
    """L2 comes first where both are asked for."""
    if draft.arguments.value("--qk-l2-norm"):
        draft.put("--qk-l2-norm", "model.attention.qk_norm", "l2")
    elif draft.arguments.value("--qk-layernorm"):
        draft.put("--qk-layernorm", "model.attention.qk_norm", "head")


def _softmax(draft: Draft) -> None:
    kind = draft.arguments.value("--softmax-type")
    draft.put("--softmax-type", "model.attention.sinks", kind == "learnable")
    if kind == "off-by-one":
        draft.put("--softmax-type", "model.attention.off_by_one", True)


def _windows(draft: Draft) -> None:
    """(left, right) counts the tokens beside a query; here the query itself counts, too."""
    flag, layers = "--window-size", "--window-attn-skip-freq"
    typed = draft.arguments.value(flag)
    if typed is None:
        return
    sides = re.fullmatch(r"\(?\s*(-?\d+)\s*,\s*(-?\d+)\s*\)?", str(typed))
    if sides is None or min(int(sides[1]), int(sides[2])) < -1:
        draft.problems.append(
            f"{flag} {typed} must be two counts of at least -1. Use {flag} 127,0 for 128 tokens."
        )
        return
    left = int(sides[1])
    if int(sides[2]) > 0:
        draft.say("already", flag, "the second number: causal attention sees nothing to the right")
    if left == -1:
        draft.say("already", flag, "tokens see all before them")
        return
    draft.put(flag, "model.attention.window", left + 1, "the token itself counts")
    skipped = pattern_of(draft, layers)
    if (
        skipped is not None
    ):  # Megatron's number counts to a layer without the window; in its list 1 is a window
        every = (
            isinstance(draft.arguments.value(layers), int)
            or str(draft.arguments.value(layers)).isdecimal()
        )
        draft.put(layers, "model.attention.window_layers", [one != every for one in skipped])


def _latent(draft: Draft) -> None:
    """Sizes; the short vectors are normed only where --qk-layernorm asks for it, and its rope turns
    neighbors."""
    flag, arguments = "--multi-latent-attention", draft.arguments
    draft.say("already", flag, "keys and values of all heads come from one short vector")
    sizes = (
        "--kv-lora-rank",
        "--q-lora-rank",
        "--qk-head-dim",
        "--qk-pos-emb-head-dim",
        "--v-head-dim",
    )
    for name in sizes:
        draft.copy(name)
    draft.put(flag, "model.rope.interleaved", True, "its positions turn pairs of neighbors")
    if arguments.value("--qk-layernorm"):
        draft.put("--norm-epsilon", "model.mla.norm_eps", arguments.value("--norm-epsilon"))
        draft.say(
            "already",
            "--qk-layernorm",
            "the two short vectors are normed, in the way of --normalization",
        )
    else:
        draft.put(
            flag, "model.mla.norms", False, "its short vectors are normed with --qk-layernorm only"
        )
    for name in ("--group-query-attention", "--qk-l2-norm", "--attention-output-gate"):
        if arguments.value(name):
            draft.say("not mapped", name, "latent attention has no such thing. Remove it", "model")
    if arguments.given("--kv-channels"):
        draft.say("already", "--kv-channels", "latent attention has sizes of its own")
    translate_yarn_of_latents(draft, original=ORIGINAL_CONTEXT)


def heads_of_keys(draft: Draft) -> Plain:
    """Key/value heads: those of the groups, or as many as query heads."""
    grouped = draft.arguments.value("--group-query-attention")
    if grouped and not draft.arguments.value("--multi-latent-attention"):
        return draft.arguments.value("--num-query-groups")
    return draft.number("--num-attention-heads")
