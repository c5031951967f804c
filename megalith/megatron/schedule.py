"""Megatron's learning rate and weight decay as our `schedule` settings."""

from megalith.megatron.draft import Draft
from megalith.megatron.steps import global_batch, total_steps

_STYLES = {"inverse-square-root": "inverse_square_root", "WSD": "wsd"}


def translate_schedule(draft: Draft) -> None:
    """Learning rate and weight decay over the run. What the style ignores is left out
    and reported."""
    draft.need("--lr", "the highest learning rate")
    draft.copy("--lr")
    style = str(draft.arguments.value("--lr-decay-style"))
    draft.put("--lr-decay-style", "schedule.style", _STYLES.get(style, style))
    _refuse_mixed_units(draft)
    _warmup(draft)
    _decay(draft, style)
    _wsd(draft, style)
    _weight_decay(draft)


def _refuse_mixed_units(draft: Draft) -> None:
    """A run counts in steps or in samples, as in Megatron."""
    counted = "iters" if draft.arguments.given("--train-iters") else "samples"
    other = "samples" if counted == "iters" else "iters"
    for name in ("--lr-decay", "--lr-warmup", "--lr-wsd-decay"):
        flag = f"{name}-{other}"
        if draft.arguments.given(flag) and draft.arguments.value(flag):
            typed = draft.arguments.typed(flag)
            draft.problems.append(
                f"{typed}: this run counts in --train-{counted}. Use {name}-{counted}."
            )


def _steps(draft: Draft, name: str) -> tuple[str, float] | None:
    """The flag and the length in steps of `--lr-decay` and its like; None when neither spelling was
    given."""
    for unit in ("iters", "samples"):
        flag = f"{name}-{unit}"
        if draft.arguments.given(flag) and draft.arguments.value(flag) is not None:
            value = draft.arguments.value(flag)
            return flag, value if unit == "iters" else value / global_batch(draft)
    return None


def _put_steps(
    draft: Draft, flag: str, setting: str, steps: float, *, of: tuple[str, ...] = ()
) -> None:
    """A length in whole steps; a fraction of one is rounded, and reported."""
    whole, of = round(steps), (*of, "train.global_batch_size") if flag.endswith("-samples") else of
    draft.put(flag, setting, whole, of=of)
    if setting not in draft.unsure and abs(whole - steps) > 1e-6 * max(steps, 1.0):
        text = f"{steps:.6g} steps are rounded to {whole}: lengths are whole steps here"
        draft.say("explained", flag, text, "numbers")


def _warmup(draft: Draft) -> None:
    flag = "--lr-warmup-fraction"
    fraction, given = draft.arguments.value(flag), _steps(draft, "--lr-warmup")
    if fraction is not None and given is not None and given[1] > 0:
        draft.problems.append(
            f"{draft.arguments.typed(flag)} and {given[0]}: expected one of them. Remove one."
        )
    elif fraction is not None:
        decay = _steps(draft, "--lr-decay")
        steps = fraction * (decay[1] if decay else total_steps(draft))
        _put_steps(
            draft, flag, "schedule.warmup_steps", steps, of=() if decay else ("train.steps",)
        )
    elif given is not None:
        _put_steps(draft, given[0], "schedule.warmup_steps", given[1])
    if draft.settings.get("schedule.warmup_steps"):
        draft.copy("--lr-warmup-init")
    elif draft.arguments.value("--lr-warmup-init"):
        draft.say("already", "--lr-warmup-init", "has no effect without a warm-up")


def _decay(draft: Draft, style: str) -> None:
    given = _steps(draft, "--lr-decay")
    if style == "constant":
        for flag in (given[0] if given else None, "--min-lr"):
            if flag is not None and draft.arguments.given(flag) and draft.arguments.value(flag):
                draft.say(
                    "already", flag, "has no effect with --lr-decay-style constant, in Megatron too"
                )
        return
    draft.copy("--min-lr")
    if given is not None and given[1] == total_steps(draft):
        draft.say("already", given[0], "the whole run, which is the default")
    elif given is not None:
        _put_steps(draft, given[0], "schedule.decay_steps", given[1])


def _wsd(draft: Draft, style: str) -> None:
    given = _steps(draft, "--lr-wsd-decay")
    if style == "WSD":
        draft.copy("--lr-wsd-decay-style")
        if given is not None:
            _put_steps(draft, given[0], "schedule.wsd_decay_steps", given[1])
        return
    for flag in (given[0] if given else None, "--lr-wsd-decay-style"):
        if flag is not None and draft.arguments.given(flag):
            draft.say("already", flag, "is read with --lr-decay-style WSD only")


def _weight_decay(draft: Draft) -> None:
    style = draft.arguments.value("--weight-decay-incr-style")
    draft.copy("--weight-decay-incr-style")
    start, end = (
        draft.arguments.value("--start-weight-decay"),
        draft.arguments.value("--end-weight-decay"),
    )
    if style != "constant":
        draft.need("--start-weight-decay", "the first weight decay")
        draft.need("--end-weight-decay", "the last weight decay")
        draft.copy("--start-weight-decay")
        draft.copy("--end-weight-decay")
        return
    draft.copy("--weight-decay")
    for flag, value in (("--start-weight-decay", start), ("--end-weight-decay", end)):
        if value is not None:
            draft.problems.append(
                f"{flag} {value}: the weight decay is constant. Remove it, or use "
                "--weight-decay-incr-style linear."
            )
