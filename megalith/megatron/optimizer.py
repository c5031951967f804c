"""Megatron's optimizer, number formats and loss scale as our `optim` and `precision` settings."""

from megalith.config.fields import Plain
from megalith.megatron.draft import Draft

_ADAM = ("--adam-beta1", "--adam-beta2", "--adam-eps")
_SCALE = (
    "--initial-loss-scale",
    "--min-loss-scale",
    "--loss-scale-window",
    "--hysteresis",
    "--loss-scale",
)
_MAP = "--dump-param-to-param-group-map"
_CHECK = "--no-check-for-nan-in-loss-and-grad"


def translate_optimizer(draft: Draft) -> None:
    """The update, clipping, number formats, and what happens to gradients that are not finite."""
    _update(draft)
    draft.copy("--clip-grad")
    if draft.arguments.value("--log-num-zeros-in-grad"):
        draft.put("--log-num-zeros-in-grad", "optim.count_zeros", True)
    _groups(draft)
    _decayed(draft)
    if draft.arguments.given(_MAP):
        draft.put(_MAP, "observe.parameters", True, "in parameters.jsonl of the folder of the run")
    _precision(draft)
    _not_finite(draft)


def _groups(draft: Draft) -> None:
    """A rate of their own for the two tables of the vocabulary, or the one that they share."""
    arguments, flag, low = draft.arguments, "--decoupled-lr", "--decoupled-min-lr"
    if arguments.value(flag) is None:
        if arguments.given(low):
            draft.say("already", low, f"is read with {flag} only")
        return
    tables: list[Plain] = ["embed.weight"] + (
        [] if draft.settings.get("model.tied_embeddings") else ["head.weight"]
    )
    group: dict[str, Plain] = {
        "name": "embedding_and_output",
        "match": tables,
        "lr": arguments.value(flag),
    }
    lowest = arguments.value(low)
    if lowest is not None and draft.settings.get("schedule.style") == "constant":
        draft.say("already", low, "a constant rate never falls to it")
    elif lowest is not None:
        group["min_lr"] = lowest
        draft.say("already", low, f"is part of what {flag} became")
    draft.put(flag, "optim.groups", [group])


def _decayed(draft: Draft) -> None:
    """Norms of queries and keys that decay; in latent attention Megatron has one of these names for
    queries alone."""
    flag, kind = "--apply-wd-to-qk-layernorm", "--no-weight-decay-cond-type"
    given = [one for one in (flag, kind) if draft.arguments.value(one)]
    if not given:
        return
    settings = draft.settings
    if settings.get("model.attention.qk_norm") == "head":
        names: list[Plain] = ["*.q_norm.*", "*.k_norm.*"]
    else:
        normed = settings.get("model.mla.q_rank") is not None and settings.get(
            "model.mla.norms", True
        )
        names = ["*.q_down_norm.*"] if normed else []
    for one in given[:1] if names else []:
        draft.put(one, "optim.decayed_vectors", names)
    for one in given[1:] if names else given:
        draft.say(
            "already",
            one,
            "says the same again" if names else "the model has no norms of queries and keys",
        )


def _update(draft: Draft) -> None:
    """AdamW or SGD, and which arguments only the other reads."""
    arguments, kind = draft.arguments, str(draft.arguments.value("--optimizer"))
    coupled = "--no-decoupled-weight-decay"
    unread: tuple[str, ...] = ()
    if kind == "sgd":
        draft.put("--optimizer", "optim.kind", "sgd")
        draft.copy("--sgd-momentum")
        unread = (*_ADAM, coupled)
    elif kind == "adam":
        for flag in _ADAM:
            draft.copy(flag)
        if arguments.value(coupled):
            draft.put(coupled, "optim.decoupled_weight_decay", False)
        unread = ("--sgd-momentum",)
    else:
        draft.say(
            "not mapped",
            "--optimizer",
            "not yet: optimizers beside AdamW and SGD. Use adam or sgd",
            "model",
        )
    for flag in unread:
        if arguments.given(flag):
            draft.say(
                "already",
                flag,
                f"is read with --optimizer {'adam' if kind == 'sgd' else 'sgd'} only",
            )


def _precision(draft: Draft) -> None:
    """The format of weights and activations; fp16 has a loss scale."""
    fp16, bf16 = (bool(draft.arguments.value(flag)) for flag in ("--fp16", "--bf16"))
    if fp16 and bf16:
        draft.problems.append("--fp16 and --bf16: weights have one format. Use one of them.")
    draft.put(
        "--fp16" if fp16 else "--bf16",
        "precision.params",
        "fp16" if fp16 else "bf16" if bf16 else "fp32",
    )
    for flag in _SCALE:
        if fp16:
            draft.copy(flag)
        elif draft.arguments.given(flag):
            draft.say("already", flag, "is read with --fp16 only")


def _not_finite(draft: Draft) -> None:
    """Megatron ends the run at the first gradient that is not finite; under fp16 such steps are
    part of a good run."""
    skip = bool(draft.arguments.value(_CHECK))
    if draft.arguments.value("--fp16"):
        draft.put(
            _CHECK if skip else "--fp16", "optim.nonfinite_grad", "skip", "it lowers the loss scale"
        )
        if draft.arguments.value("--loss-scale") is not None and not skip:
            text = (
                "a step whose gradients overflow is left out and counted; Megatron ends the "
                "run there"
            )
            draft.say("explained", "--loss-scale", text)
    else:
        draft.put(_CHECK, "optim.nonfinite_grad", "skip" if skip else "raise")
