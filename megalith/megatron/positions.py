"""Megatron's description of positions as our `model.positions` and `model.rope`."""

import math

from megalith.megatron.draft import Draft
from megalith.megatron.patterns import pattern_of

KINDS = {
    "rope": "rope",
    "yarn": "rope",
    "mrope": "rope",
    "learned_absolute": "learned",
    "none": "none",
}
"""The kinds of positions that Megatron's GPT builds, and ours; under `relative`, which its T5
builds, it has none."""

_TYPE = "--position-embedding-type"


def translate_positions(draft: Draft) -> None:
    """Which kind, and how rotary ones turn."""
    old = "--use-rotary-position-embeddings"
    kind = "rope" if draft.arguments.value(old) else str(draft.arguments.value(_TYPE))
    shown = old if draft.arguments.given(old) else _TYPE
    if draft.arguments.value("--multi-latent-attention") and kind != "rope":
        text = f"positions like these are not known in latent attention. Use {_TYPE} rope"
        draft.say("not mapped", shown, text, "model")
        return
    if kind == "relative":
        text = (
            "belongs to BERT or T5; pretrain_gpt.py does not read it and trains without "
            f"positions. Use {_TYPE} none"
        )
        draft.say("not mapped", shown, text, "model")
        return
    draft.put(shown, "model.positions", KINDS[kind])
    if KINDS[kind] == "rope":
        _rotary(draft, kind)


def _rotary(draft: Draft, kind: str) -> None:
    draft.copy("--rotary-base")
    skip = "--no-rope-freq"
    if draft.arguments.value("--multi-latent-attention"):
        if draft.arguments.given(skip):
            draft.say(
                "already",
                skip,
                "Megatron's latent attention turns in every layer, whatever this says",
            )
        return
    _pairs(draft, kind)
    {"rope": _scaling, "yarn": _yarn, "mrope": _sections}[kind](draft)
    skipped = pattern_of(draft, skip)
    if skipped is not None:
        draft.put(skip, "model.rope.skip", skipped)


def _pairs(draft: Draft, kind: str) -> None:
    """Which features turn. Megatron's yarn turns all of them, and only its rope turns
    neighbors."""
    percent, neighbors = "--rotary-percent", "--rotary-interleaved"
    if kind == "yarn" and draft.arguments.value(percent) != 1:
        draft.say(
            "not mapped",
            percent,
            "Megatron's yarn turns all features, whatever this says. Remove it",
            "model",
        )
    else:
        draft.copy(percent)
    if draft.arguments.value(neighbors) and kind != "rope":
        draft.say(
            "not mapped",
            neighbors,
            f"Megatron fails over it with {_TYPE} {kind}. Remove it",
            "model",
        )
    elif draft.arguments.value(neighbors):
        draft.put(neighbors, "model.rope.interleaved", True)


def _scaling(draft: Draft) -> None:
    linear = draft.arguments.value("--rotary-seq-len-interpolation-factor")
    if draft.arguments.value("--use-rope-scaling"):
        factor = draft.arguments.value("--rope-scaling-factor")
        draft.put("--use-rope-scaling", "model.rope.scaling", "llama3")
        draft.put("--rope-scaling-factor", "model.rope.factor", factor)
        if factor != 8.0:
            text = (
                "some releases of Megatron do not pass it on and scale by 8: compare with what "
                "your release does"
            )
            draft.say("explained", "--rope-scaling-factor", text)
        if linear not in (None, 1):
            text = "positions are scaled in two ways. Remove one of it and --use-rope-scaling"
            draft.say("not mapped", "--rotary-seq-len-interpolation-factor", text, "model")
        return
    if draft.arguments.given("--rope-scaling-factor"):
        draft.say("already", "--rope-scaling-factor", "is read with --use-rope-scaling only")
    _linear(draft)


def _linear(draft: Draft) -> None:
    flag = "--rotary-seq-len-interpolation-factor"
    factor = draft.arguments.value(flag)
    if factor not in (None, 1):
        draft.put(flag, "model.rope.scaling", "linear")
        draft.put(flag, "model.rope.factor", factor)


def _yarn(draft: Draft) -> None:
    """The yarn of attention with keys of its own; by a factor of 1 it does nothing."""
    factor = _number(draft, "--rotary-scaling-factor")
    if factor == 1:
        draft.say("already", _TYPE, "is rope where --rotary-scaling-factor is 1")
        return
    draft.put(_TYPE, "model.rope.scaling", "yarn")
    draft.put("--rotary-scaling-factor", "model.rope.factor", factor)
    for flag in ("--yarn-original-max-position-embeddings", "--yarn-beta-fast", "--yarn-beta-slow"):
        draft.copy(flag)
    if draft.arguments.value("--no-yarn-correction-range-round-to-int"):
        draft.put("--no-yarn-correction-range-round-to-int", "model.rope.whole_pairs", False)
    _set_attention_temperature(draft, factor)


def _sections(draft: Draft) -> None:
    """Positions in time, height and width; Megatron reads one scaling of them, the linear one."""
    flag = "--mrope-section"
    _linear(draft)
    if not draft.need(flag, "three counts of pairs, which turn by time, by height and by width"):
        return
    typed = draft.arguments.value(flag)
    words = [str(word) for word in typed] if isinstance(typed, list) else []
    if not all(word.isdecimal() for word in words):
        draft.problems.append(
            f"{flag} {' '.join(words)} must be counts of pairs. Use {flag} 16 24 24."
        )
        return
    draft.put(flag, "model.rope.sections", [int(word) for word in words], "text turns as with rope")


def translate_yarn_of_latents(draft: Draft, *, original: int) -> None:
    """The yarn of latent attention, which Megatron has unless --rope-type says rope; by a factor of
    1 it does nothing.

    LayerRope features are multiplied by g(mscale) / g(mscale_all_dim), scores by g(mscale_all_dim)
    squared, where g(m) is 0.1 m ln(factor) + 1; the latter also where --rope-type says rope.
    """
    arguments = draft.arguments
    factor, kind = _number(draft, "--rotary-scaling-factor"), arguments.value("--rope-type")
    whole = _number(draft, "--mscale-all-dim")
    if arguments.value("--use-mup"):
        _scores_of_latents(
            draft,
            "--use-mup",
            factor,
            "Megatron's latent attention leaves scores as they are without it",
        )
    elif kind == "rope" and factor > 1 and whole:
        _scores_of_latents(draft, "--mscale-all-dim", factor, "with --rope-type rope, too")
    if kind == "rope" and arguments.value("--rotary-percent") != 1:
        text = "latent attention here turns all features that it keeps for positions. Remove it"
        draft.say("not mapped", "--rotary-percent", text, "model")
    if kind == "rope" or factor <= 1:
        if arguments.given("--rotary-scaling-factor"):
            draft.say(
                "already",
                "--rotary-scaling-factor",
                "is read by yarn above 1 only, and by --mscale-all-dim",
            )
        return
    draft.put("--rope-type", "model.rope.scaling", "yarn")
    draft.put("--rotary-scaling-factor", "model.rope.factor", factor)
    draft.put("--rope-type", "model.rope.original_max_position", original)
    _set_attention_temperature(draft, factor)
    if whole and not arguments.value("--use-mup"):
        draft.put("--mscale-all-dim", "model.mla.yarn_mscale", whole)


def _scores_of_latents(draft: Draft, flag: str, factor: float, text: str) -> None:
    """What scores are multiplied by, where no setting of ours follows Megatron's."""
    features = draft.number("--qk-head-dim") + draft.number("--qk-pos-emb-head-dim")
    scale = _sharper(_number(draft, "--mscale-all-dim"), factor) ** 2 / math.sqrt(features)
    draft.put(flag, "model.attention.scale", scale, text)


def _set_attention_temperature(draft: Draft, factor: float) -> None:
    """What turned queries and keys are multiplied by."""
    part, whole = (
        _sharper(_number(draft, flag), factor) for flag in ("--mscale", "--mscale-all-dim")
    )
    draft.put("--mscale", "model.rope.attention_factor", part / whole)
    if draft.arguments.given("--mscale-all-dim"):
        draft.put("--mscale-all-dim", "model.rope.attention_factor", part / whole)


def _sharper(mscale: float, factor: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _number(draft: Draft, flag: str) -> float:
    value = draft.arguments.value(flag)
    return float(value) if isinstance(value, int | float) else 0.0
