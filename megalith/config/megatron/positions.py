"""Megatron's description of positions as our `model.positions` and `model.rope`."""

import math

from megalith.config.megatron.draft import Draft
from megalith.config.megatron.patterns import pattern_of

KNOWN = ("rope", "learned_absolute", "relative", "none")


def translate_positions(draft: Draft) -> None:
    """Which kind, and how rotary ones turn."""
    flag, old = "--position-embedding-type", "--use-rotary-position-embeddings"
    kind = "rope" if draft.arguments.value(old) else draft.arguments.value(flag)
    shown = old if draft.arguments.given(old) else flag
    latent = draft.arguments.value("--multi-latent-attention")
    if kind not in KNOWN or (latent and kind != "rope"):
        fits = "rope" if latent else "rope, learned_absolute, relative or none"
        text = f"positions like these are not known {'in latent attention' if latent else 'here'}. Use {flag} {fits}"
        draft.say("not mapped", shown, text, "model")
        return
    draft.put(shown, "model.positions", {"learned_absolute": "learned"}.get(str(kind), kind))
    if kind == "rope":
        _rotary(draft)
    if kind == "relative":
        draft.copy("--relative-attention-num-buckets")
        draft.copy("--relative-attention-max-distance")


def _rotary(draft: Draft) -> None:
    draft.copy("--rotary-base")
    if not draft.arguments.value("--multi-latent-attention"):
        draft.copy("--rotary-percent")
        if draft.arguments.value("--rotary-interleaved"):
            draft.put("--rotary-interleaved", "model.rope.interleaved", True)
        _scaling(draft)
    skipped = pattern_of(draft, "--no-rope-freq")
    if skipped is not None:
        draft.put("--no-rope-freq", "model.rope.skip", skipped)


def _scaling(draft: Draft) -> None:
    linear = draft.arguments.value("--rotary-seq-len-interpolation-factor")
    if draft.arguments.value("--use-rope-scaling"):
        factor = draft.arguments.value("--rope-scaling-factor")
        draft.put("--use-rope-scaling", "model.rope.scaling", "llama3")
        draft.put("--rope-scaling-factor", "model.rope.factor", factor)
        if factor != 8.0:
            text = "some releases of Megatron do not pass it on and scale by 8: compare with what your release does"
            draft.say("explained", "--rope-scaling-factor", text)
        if linear not in (None, 1):
            text = "positions are scaled in two ways. Remove one of it and --use-rope-scaling"
            draft.say("not mapped", "--rotary-seq-len-interpolation-factor", text, "model")
        return
    if draft.arguments.given("--rope-scaling-factor"):
        draft.say("already", "--rope-scaling-factor", "is read with --use-rope-scaling only")
    if linear not in (None, 1):
        draft.put("--rotary-seq-len-interpolation-factor", "model.rope.scaling", "linear")
        draft.put("--rotary-seq-len-interpolation-factor", "model.rope.factor", linear)


def translate_yarn_of_latents(draft: Draft, *, original: int) -> None:
    """The yarn of latent attention, which Megatron has unless --rope-type says rope; by a factor of 1 it does nothing.

    Turned features are multiplied by g(mscale) / g(mscale_all_dim), scores by g(mscale_all_dim) squared, where g(m) is
    0.1 m ln(factor) + 1.
    """
    arguments = draft.arguments
    factor, kind = _number(draft, "--rotary-scaling-factor"), arguments.value("--rope-type")
    if kind == "rope" or factor <= 1:
        if arguments.given("--rotary-scaling-factor"):
            draft.say("already", "--rotary-scaling-factor", "is read by yarn above 1 only")
        return
    part, whole = _number(draft, "--mscale"), _number(draft, "--mscale-all-dim")
    draft.put("--rope-type", "model.rope.scaling", "yarn")
    draft.put("--rotary-scaling-factor", "model.rope.factor", factor)
    draft.put("--rope-type", "model.rope.original_max_position", original)
    draft.put("--mscale", "model.rope.attention_factor", _sharper(part, factor) / _sharper(whole, factor))
    if whole:
        draft.put("--mscale-all-dim", "model.mla.yarn_mscale", whole)


def _sharper(mscale: float, factor: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0


def _number(draft: Draft, flag: str) -> float:
    value = draft.arguments.value(flag)
    return float(value) if isinstance(value, int | float) else 0.0
